"""Types of the journal's events.

Imported with the first event that is read: it needs msgspec. No torch.

A field that is not required may be missing, as in journals of earlier versions, or null. Fields and kinds that are not
named here are those of later versions, and pass.
"""

from __future__ import annotations

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
    at: NotRequired[Time]
    event: str
    trainer: NotRequired[Count | None]


class VersionEvent(Journaled):
    version: NotRequired[Count]


class TrainerEvent(Journaled):
    step: NotRequired[Count | None]


class StepEvent(TrainerEvent):
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


class StartEvent(Journaled):
    workers: NotRequired[Few | None]
    hosts: NotRequired[int | list[str] | None]
    plan: NotRequired[str | None]
    plan_origin: NotRequired[str | None]
    script: NotRequired[str | None]
    module: NotRequired[str | None]
    argv: NotRequired[list[str] | None]
    script_sha256: NotRequired[str | None]
    versions: NotRequired[dict[str, str | None] | None]
    seed: NotRequired[int | None]
    threads: NotRequired[int | None]
    device: NotRequired[str | None]
    resumed_from: NotRequired[Count | None]
    began: NotRequired[Time | None]


class GenerationEvent(Journaled):
    number: Count
    workers: list[Worker]
    at_once: NotRequired[Count]


class MembersEvent(Journaled):
    """Of a team: those who are in it, or whom it lost."""

    workers: NotRequired[list[Worker] | None]
    step: NotRequired[Count | None]
    seconds: NotRequired[Seconds | None]
    mates: NotRequired[list[Worker] | None]
    why: NotRequired[str | None]
    causes: NotRequired[dict[str, list[str]] | None]


class EndedEvent(Journaled):
    step: NotRequired[Count | None]
    worker: NotRequired[Worker | None]
    host: NotRequired[str | None]
    cause: NotRequired[str | None]
    why: NotRequired[str | None]
    code: NotRequired[int | None]
    text: NotRequired[str | None]
    already: NotRequired[bool | None]


class ProcessEvent(Journaled):
    worker: Worker
    host: NotRequired[str | None]
    what: NotRequired[str | None]
    cause: NotRequired[str | None]


class HangEvent(Journaled):
    worker: Worker
    seconds: Seconds
    line: NotRequired[str | None]
    busy: NotRequired[bool | None]


class HealedEvent(TrainerEvent):
    workers: list[Worker]
    tensors: list[str]


class LateEvent(TrainerEvent):
    late: NotRequired[list[Worker] | None]
    missed: NotRequired[dict[Number, tuple[Count, Count, Count]] | None]
    merged: NotRequired[list[Worker] | None]


class UncountedEvent(TrainerEvent):
    island: Worker
    rows: Count


class WindowEvent(TrainerEvent):
    workers: list[tuple[Worker, Count]]
    missed: list[tuple[Count, Count]]
    dropped: Count
    late: NotRequired[list[list[int]]]


class CompareEvent(Journaled):
    workers: NotRequired[Few | None]
    samples_per_second: NotRequired[Amount | None]


class CollectivesEvent(Journaled):
    kinds: dict[str, tuple[Count, Amount, Seconds]]


class SavedEvent(Journaled):
    step: NotRequired[Count | None]
    path: NotRequired[str | None]
    seconds: NotRequired[Seconds | None]
    took: NotRequired[Seconds | None]
    bytes: NotRequired[Count | None]


class EvaluatedEvent(TrainerEvent):
    results: NotRequired[dict[str, Value] | None]
    values: NotRequired[dict[str, Value] | None]


class GridEvent(TrainerEvent):
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
    workers: list[Worker]
    parts: list[Seconds]


class MemoryEvent(TrainerEvent):
    parameters: NotRequired[Amount | None]
    gradients: NotRequired[Amount | None]
    optimizer: NotRequired[Amount | None]
    process: NotRequired[Amount | None]


class HeldFigures(TypedDict):
    parameters: NotRequired[Amount | None]
    gradients: NotRequired[Amount | None]
    optimizer: NotRequired[Amount | None]
    activations: NotRequired[Amount | None]
    process: NotRequired[Amount | None]
    seconds: NotRequired[Amount | None]
    waited: NotRequired[Amount | None]
    sent: NotRequired[dict[str, Amount] | None]


class StageFigures(TypedDict):
    blocks: NotRequired[str | int | None]
    passes: NotRequired[Amount | None]
    forward: NotRequired[Amount]
    backward: NotRequired[Amount]


class FiguredEvent(Journaled):
    plan: str
    workers: Annotated[int, Meta(ge=1, le=1 << 16)]
    model: NotRequired[str | None]
    micro: NotRequired[Count | None]
    micro_batches: NotRequired[Few | None]
    stages: NotRequired[list[StageFigures] | None]
    predicted: NotRequired[list[HeldFigures] | None]
    measured: NotRequired[list[HeldFigures] | None]


class CodecEvent(TrainerEvent):
    codec: NotRequired[str | None]
    kind: NotRequired[str | None]
    to: NotRequired[str | None]
    sent: NotRequired[Amount | None]
    full: NotRequired[Amount | None]


class NoiseEvent(TrainerEvent):
    scale: NotRequired[Seconds | None]
    looks: NotRequired[Count | None]


class LinksEvent(Journaled):
    pairs: NotRequired[list[tuple[list[Worker], list[Worker], Amount, Seconds]] | None]
    over: NotRequired[str | None]
    rate: NotRequired[Amount | None]


class TextEvent(TrainerEvent):
    text: NotRequired[str | None]
    what: NotRequired[str | None]
    why: NotRequired[str | None]


class LoadedEvent(Journaled):
    host: str
    workers: dict[Number, tuple[Seconds, Count]]
    sent: NotRequired[dict[str, Amount] | None]
    here: NotRequired[list[str]]
    agent: NotRequired[str]


class EachEvent(TrainerEvent):
    steps: NotRequired[Count | None]
    computed: NotRequired[ByWorker | None]


class ConfigEvent(TrainerEvent):
    values: NotRequired[dict[str, Value] | None]


class EnvironmentEvent(Journaled):
    packages: NotRequired[dict[str, str | None] | None]
    commit: NotRequired[str | None]
    remote: NotRequired[str | None]
    diff: NotRequired[str | None]


class AccountEvent(Journaled):
    seconds: NotRequired[By | None]


class MediumEvent(TrainerEvent):
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
    host: str
    offset: Seconds
    workers: list[Worker]


class MergeEvent(Journaled):
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
    **dict.fromkeys(("formed", "lost"), MembersEvent),
    **dict.fromkeys(("finished", "stopped", "failed"), EndedEvent),
    "worker": ProcessEvent,
    "hang": HangEvent,
    "healed": HealedEvent,
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
    "links": LinksEvent,
    **dict.fromkeys(("note", "decision"), TextEvent),
    "loaded": LoadedEvent,
    "each": EachEvent,
    "config": ConfigEvent,
    "environment": EnvironmentEvent,
    "account": AccountEvent,
    "media": MediumEvent,
    "clock": ClockEvent,
    "merge": MergeEvent,
}
_decode = msgspec.json.Decoder().decode
_checks: dict[str, Any] = {kind: msgspec.json.Decoder(of).decode for kind, of in KINDS.items()}
_check_other = msgspec.json.Decoder(Journaled).decode


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
    kind = event["event"] if type(event["event"]) is str else ""
    try:
        _checks.get(kind, _check_other)(line)
    except msgspec.ValidationError as error:
        raise ValueError(find_wrong(event, KINDS.get(kind, Journaled)) or str(error)) from None
    event.setdefault("at", 0.0)
    return event
