"""Types of the journal's events.

Imported with the first event that is read: it needs msgspec. No torch.

A field that is not required may be missing, as in journals of earlier versions, or null. Fields and kinds that are not
named here are those of later versions, and pass.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from paceline.base.schema import find_wrong

# Limits are far beyond what any run writes, and keep sums of many of them finite.
Real = Annotated[float, Meta(ge=-1.7e308, le=1.7e308)]  # a user's own number; NaN and infinity are written as null
Time = Annotated[float, Meta(ge=0, le=1e11)]  # Unix seconds
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]  # clocks are set back now and then
Amount = Annotated[float, Meta(ge=0, le=1e30)]  # bytes, or what a second brings
Count = Annotated[int, Meta(ge=0, le=2**53)]
Worker = Annotated[int, Meta(ge=0, le=2**40)]  # its number; servers have numbers beyond those of workers
Few = Annotated[int, Meta(ge=0, le=1 << 16)]  # of what a list is made
Number = Annotated[str, Meta(pattern="^[0-9]{1,12}$")]  # a worker's, as a name
RingSlot = Annotated[str, Meta(pattern="^[0-9]{1,12} [a-z]+$")]
Value = Real | bool | str | list[Any] | dict[str, Any] | None
By = dict[str, Seconds]  # seconds by name
ByWorker = dict[Number, Seconds]


class Journaled(TypedDict):
    """The fields that all events have."""

    at: NotRequired[Time]
    event: str
    trainer: NotRequired[Count | None]


class VersionEvent(Journaled):
    """The first line of a journal: its version."""

    version: NotRequired[Count]


class TrainerEvent(Journaled):
    """The fields that the events of one trainer have."""

    step: NotRequired[Count | None]


class StepEvent(TrainerEvent):
    """A record of one or several steps."""

    epoch: NotRequired[int | None]
    loss: NotRequired[Real | None]
    lr: NotRequired[Real | None]
    grad_norm: NotRequired[Real | None]
    metrics: NotRequired[dict[str, Real | None] | None]
    samples: NotRequired[Count | None]
    tokens: NotRequired[Count | None]
    steps: NotRequired[Count | None]
    bytes: NotRequired[Count | None]
    seconds: NotRequired[Seconds | None]
    time: NotRequired[By | None]
    waited_for: NotRequired[By | None]
    computed: NotRequired[ByWorker | None]
    lanes: NotRequired[dict[RingSlot, Seconds] | None]
    account: NotRequired[By | None]
    gpu: NotRequired[Real | None]


class StartEvent(Journaled):
    """The start of an attempt: workers, plan, script and versions."""

    workers: NotRequired[Few | None]
    hosts: NotRequired[int | list[str] | None]
    plan: NotRequired[str | None]
    plan_origin: NotRequired[str | None]
    raw: NotRequired[bool | None]
    script: NotRequired[str | None]
    module: NotRequired[str | None]
    argv: NotRequired[list[str] | None]
    script_sha256: NotRequired[str | None]
    versions: NotRequired[dict[str, str | None] | None]
    seed: NotRequired[int | None]
    threads: NotRequired[int | None]
    device: NotRequired[str | None]
    resumed_from: NotRequired[Count | None]
    resumed_in: NotRequired[str]  # where that state was: a folder, a URL, or the memory of hosts
    began: NotRequired[Time | None]


class GenerationEvent(Journaled):
    """A new generation that the coordinator has planned."""

    number: Count
    workers: list[Worker]
    at_once: NotRequired[Count]


class RestartedEvent(Journaled):
    """All workers are to start again as the first team: the number of processes started for each before, by worker."""

    number: Count
    workers: list[Worker]
    lives: dict[Number, int]
    why: NotRequired[str]


class SparesEvent(Journaled):
    """The spare workers that are ready, and those that enter the team."""

    workers: list[Worker]
    enter: NotRequired[list[Worker]]
    step: NotRequired[Count | None]


class CheckedEvent(Journaled):
    """A checkpoint that a spare worker has read again, and what is damaged in it; empty if nothing is."""

    step: Count
    worker: Worker
    damage: str
    seconds: NotRequired[float]


class MembersEvent(Journaled):
    """The members of a new generation, or the workers that a team lost."""

    workers: NotRequired[list[Worker] | None]
    step: NotRequired[Count | None]
    seconds: NotRequired[Seconds | None]
    mates: NotRequired[list[Worker] | None]
    why: NotRequired[str | None]
    causes: NotRequired[dict[str, list[str]] | None]


class EndedEvent(Journaled):
    """The end of an attempt, and why it ended."""

    step: NotRequired[Count | None]
    worker: NotRequired[Worker | None]
    host: NotRequired[str | None]
    cause: NotRequired[str | None]
    why: NotRequired[str | None]
    code: NotRequired[int | None]
    text: NotRequired[str | None]
    already: NotRequired[bool | None]


class ProcessEvent(Journaled):
    """A worker's process was started, stopped, continued or ended, or is lost."""

    worker: Worker
    host: NotRequired[str | None]
    what: NotRequired[str | None]
    cause: NotRequired[str | None]


class HangEvent(Journaled):
    """A worker made no progress for so many seconds."""

    worker: Worker
    seconds: Seconds
    line: NotRequired[str | None]
    busy: NotRequired[bool | None]


class HealedEvent(TrainerEvent):
    """Workers whose weights differed took those of a majority."""

    workers: list[Worker]
    tensors: list[str]


class VerifiedEvent(TrainerEvent):
    """A step was computed a second time on other workers, in so many attempts until all agreed."""

    attempts: Few
    seconds: NotRequired[Seconds]


class CorruptedEvent(TrainerEvent):
    """Workers had wrong values in a step: the first tensor that differed, and a text."""

    workers: list[Worker]
    hosts: NotRequired[list[str]]
    tensor: NotRequired[str]
    text: str
    leaves: NotRequired[bool]


class LateEvent(TrainerEvent):
    """A merge of a round without an island, or with one that missed a part of the round."""

    late: NotRequired[list[Worker] | None]
    missed: NotRequired[dict[Number, tuple[Count, Count, Count]] | None]
    merged: NotRequired[list[Worker] | None]


class UncountedEvent(TrainerEvent):
    """Rows of a late island that no merge will count."""

    island: Worker
    rows: Count


class WindowEvent(TrainerEvent):
    """The end of a window of asynchronous updates."""

    workers: list[tuple[Worker, Count]]
    missed: list[tuple[Count, Count]]
    dropped: Count
    late: NotRequired[list[list[int]]]


class CompareEvent(Journaled):
    """The workers and the speed of the run that this one is compared with."""

    workers: NotRequired[Few | None]
    samples_per_second: NotRequired[Amount | None]


class CollectivesEvent(Journaled):
    """How many collectives of each kind the run had, with their bytes and seconds."""

    kinds: dict[str, tuple[Count, Amount, Seconds]]


class BestMark(TypedDict):
    """The value of `Trainer.keep_best` that made a checkpoint the best one so far of a trainer."""

    trainer: Count
    name: str
    mode: Annotated[str, Meta(pattern="^(max|min)$")]
    value: Real


class SavedEvent(Journaled):
    """A checkpoint was written."""

    step: NotRequired[Count | None]
    path: NotRequired[str | None]
    seconds: NotRequired[Seconds | None]
    took: NotRequired[Seconds | None]
    bytes: NotRequired[Count | None]
    best: NotRequired[list[BestMark] | None]


class EvaluatedEvent(TrainerEvent):
    """Results of an evaluation, or values that the script logs."""

    results: NotRequired[dict[str, Value] | None]
    values: NotRequired[dict[str, Value] | None]


class GridEvent(TrainerEvent):
    """The beginning of a loop: how its global batches are divided."""

    phase: NotRequired[int | None]
    model: NotRequired[str | None]
    rows: NotRequired[Count | None]
    steps: NotRequired[Count | None]
    epochs: NotRequired[int | None]
    shares: NotRequired[list[Few] | None]
    unit: NotRequired[Annotated[int, Meta(ge=1, le=1 << 16)] | None]
    text: NotRequired[str | None]
    micro: NotRequired[Count | None]
    micro_batches: NotRequired[Few | None]
    global_batch: NotRequired[Count | None]


class SharesEvent(TrainerEvent):
    """New shares of the global batch for the workers."""

    workers: list[Worker]
    parts: list[Seconds]


class MemoryEvent(TrainerEvent):
    """The most bytes that worker 0 held."""

    parameters: NotRequired[Amount | None]
    gradients: NotRequired[Amount | None]
    optimizer: NotRequired[Amount | None]
    process: NotRequired[Amount | None]


class HeldFigures(TypedDict):
    """What one worker holds and sends, predicted or measured."""

    parameters: NotRequired[Amount | None]
    gradients: NotRequired[Amount | None]
    optimizer: NotRequired[Amount | None]
    activations: NotRequired[Amount | None]
    process: NotRequired[Amount | None]
    seconds: NotRequired[Amount | None]
    waited: NotRequired[Amount | None]
    sent: NotRequired[dict[str, Amount] | None]


class StageFigures(TypedDict):
    """The blocks of one pipeline stage, and the seconds that they take."""

    blocks: NotRequired[str | int | None]
    passes: NotRequired[Amount | None]
    forward: NotRequired[Amount]
    backward: NotRequired[Amount]


class FiguredEvent(Journaled):
    """Predicted and measured memory, traffic and time of the workers of a replica."""

    plan: str
    workers: Annotated[int, Meta(ge=1, le=1 << 16)]
    model: NotRequired[str | None]
    micro: NotRequired[Count | None]
    micro_batches: NotRequired[Few | None]
    stages: NotRequired[list[StageFigures] | None]
    predicted: NotRequired[list[HeldFigures] | None]
    measured: NotRequired[list[HeldFigures] | None]


class CodecEvent(TrainerEvent):
    """How many bytes worker 0 sent with a codec."""

    codec: NotRequired[str | None]
    kind: NotRequired[str | None]
    to: NotRequired[str | None]
    sent: NotRequired[Amount | None]
    full: NotRequired[Amount | None]


class NoiseEvent(TrainerEvent):
    """The gradient noise scale, in rows."""

    scale: NotRequired[Seconds | None]
    looks: NotRequired[Count | None]


class FlopsEvent(TrainerEvent):
    """The floating-point operations of forward and backward for one row, and the device that computes them."""

    per_row: NotRequired[Amount]
    estimated: NotRequired[bool]
    uncounted: NotRequired[list[str]]
    device: NotRequired[str]


class LinksEvent(Journaled):
    """The measured speed of the links between hosts."""

    pairs: NotRequired[list[tuple[list[Worker], list[Worker], Amount, Seconds]] | None]
    over: NotRequired[str | None]
    rate: NotRequired[Amount | None]


class TextEvent(TrainerEvent):
    """A note for the user, or a decision and its reason."""

    text: NotRequired[str | None]
    what: NotRequired[str | None]
    why: NotRequired[str | None]
    plan: NotRequired[str]  # that auto has chosen, for so many workers and these words
    workers: NotRequired[Count]
    asked: NotRequired[str]
    predicted: NotRequired[Amount]  # seconds of a step under that plan
    tried: NotRequired[Amount]  # the same in its trial
    memory: NotRequired[Amount]  # bytes of a worker's process, as predicted


class LoadedEvent(Journaled):
    """How long the workers of a host waited for rows, in which part of a step they wait for no other worker, and what
    they sent to other hosts.
    """

    host: str
    workers: dict[Number, tuple[Seconds, Count]]
    busy: NotRequired[ByWorker]
    sent: NotRequired[dict[str, Amount] | None]
    here: NotRequired[list[str]]
    agent: NotRequired[str]


class EachEvent(TrainerEvent):
    """Each worker's seconds of forward and backward, in teams that are too large for step records to list them."""

    steps: NotRequired[Count | None]
    computed: NotRequired[ByWorker | None]


class ModelEvent(TrainerEvent):
    """The size of a model: elements of parameters and buffers, also by block, and bytes that a worker holds at most."""

    model: NotRequired[str | None]
    parameters: NotRequired[Count]
    trained: NotRequired[Count]
    buffers: NotRequired[Count]
    held: NotRequired[list[Count]]
    blocks: NotRequired[list[tuple[str, str, Count, Count, Count]]]


class ConfigEvent(TrainerEvent):
    """The configuration that the script logs."""

    values: NotRequired[dict[str, Value] | None]


class EnvironmentEvent(Journaled):
    """Installed packages, and the commit that the script is of."""

    packages: NotRequired[dict[str, str | None] | None]
    commit: NotRequired[str | None]
    remote: NotRequired[str | None]
    diff: NotRequired[str | None]


class AccountEvent(Journaled):
    """Seconds of the run by account."""

    seconds: NotRequired[By | None]


class MediumEvent(TrainerEvent):
    """An image, a histogram or another medium that the script logs."""

    name: NotRequired[str | None]
    kind: NotRequired[str | None]
    file: NotRequired[str]
    width: NotRequired[Count]
    height: NotRequired[Count]
    others: NotRequired[Count | None]
    mean: NotRequired[Real | None]
    deviation: NotRequired[Real | None]
    edges: NotRequired[list[Annotated[float, Meta(ge=-1e300, le=1e300)]]]
    counts: NotRequired[list[Count]]


class ClockEvent(Journaled):
    """The offset of another host's clock."""

    host: str
    offset: Seconds
    workers: list[Worker]


class HostEvent(TrainerEvent):
    """A failure of a host, which counts for --exclude-after, or another trouble: memory, disk, clock, GPU and so on."""

    host: str
    kind: str
    text: str
    since: NotRequired[Time]
    workers: NotRequired[list[Worker]]


class ExcludedEvent(TrainerEvent):
    """A host is left out of the run, with the reasons."""

    host: str
    text: str
    workers: list[Worker]


class MergeEvent(Journaled):
    """The coordinator's decision about which islands a merge includes."""

    turn: Count
    number: Count
    step: Count
    islands: list[Worker]
    late: list[Worker]
    void: bool


KINDS: dict[str, type] = {
    "journal": VersionEvent,
    "step": StepEvent,
    "start": StartEvent,
    "generation": GenerationEvent,
    "restarted": RestartedEvent,
    "spares": SparesEvent,
    "checked": CheckedEvent,
    **dict.fromkeys(("formed", "lost", "recovered"), MembersEvent),
    **dict.fromkeys(("finished", "stopped", "failed"), EndedEvent),
    "worker": ProcessEvent,
    "hang": HangEvent,
    "healed": HealedEvent,
    "verified": VerifiedEvent,
    "corrupted": CorruptedEvent,
    "late": LateEvent,
    "uncounted": UncountedEvent,
    "window": WindowEvent,
    "compare": CompareEvent,
    "collectives": CollectivesEvent,
    "checkpoint": SavedEvent,
    **dict.fromkeys(("evaluate", "log"), EvaluatedEvent),
    "grid": GridEvent,
    "shares": SharesEvent,
    "memory": MemoryEvent,
    "figures": FiguredEvent,
    "codec": CodecEvent,
    "noise": NoiseEvent,
    "flops": FlopsEvent,
    "links": LinksEvent,
    **dict.fromkeys(("note", "decision"), TextEvent),
    "loaded": LoadedEvent,
    "each": EachEvent,
    "config": ConfigEvent,
    "model": ModelEvent,
    "environment": EnvironmentEvent,
    "account": AccountEvent,
    "media": MediumEvent,
    "clock": ClockEvent,
    "host": HostEvent,
    "excluded": ExcludedEvent,
    "merge": MergeEvent,
}
_decode = msgspec.json.Decoder().decode
# A decoder is made with the first event of its type: making all of them takes as long as reading a short journal.
_decoder = cache(msgspec.json.Decoder)


def read_event(line: bytes) -> dict[str, Any]:
    """The event of a line of the journal; an empty one where a crash tore the line. ValueError: a field is not what it
    must be, with its name.
    """
    try:
        event = _decode(line)
        if type(event) is not dict or "event" not in event:
            return {}
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except ValueError:  # no JSON, or not UTF-8
        return {}
    event_type = KINDS.get(event["event"], Journaled) if type(event["event"]) is str else Journaled
    try:
        _decoder(event_type).decode(line)
    except msgspec.ValidationError as error:
        raise ValueError(find_wrong(event, event_type) or str(error)) from None
    event.setdefault("at", 0.0)
    return event
