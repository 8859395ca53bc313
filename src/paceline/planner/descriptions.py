"""Descriptions of a model and of the machines it is trained on: plain data, from which the planner predicts.

`paceline plan --describe` prints both as JSON, and ``--on FILE`` reads a description of machines, of which some are
shipped (`machines/`). Every prediction depends on nothing but these two and a plan. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any, TypeVar, cast

import msgspec

from paceline.base.schema import check, parse, read_file
from paceline.errors import FormatError, UsageError

VERSION = 1  # of the format
CURE = "correct the description, or write one with paceline plan --describe"
PER_TOKEN = (
    "saved",
    "undivided",
    "passes",
    "exchanged",
    "routed",
)  # fields of a block that grow with the tokens of a row
SHIPPED = Path(__file__).with_name("machines")
BETWEEN = "between hosts"  # the name of the links that are measured
ALIKE = 0.15  # workers whose loads differ by less than this part are taken to be equally fast

Amount = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the descriptions, whose fields are JSON's."""


Kind = TypeVar("Kind", bound=Description)


class BlockDescription(Description, frozen=True):
    """A block of a model, or its first or last part. Figures are of one such block; of a row, in the forward alone."""

    name: str
    parameters: Count  # elements
    count: Count = 1  # how many alike follow one another
    saved: Amount = 0.0  # bytes of activations that a row keeps for the backward
    undivided: Amount = 0.0  # those of them that tensor= does not divide
    passes: Amount = 0.0  # bytes that a row passes on to the next block
    matmul: Amount = 0.0  # FLOPs of matrix products
    attention: Amount = 0.0  # FLOPs of attention, which has a rate of its own
    precision: str = ""  # of its matrix products, where they are not computed in that of the model
    operations: Count = 0  # operations that are launched
    tensor_sums: Amount = 0.0  # sums over what the block passes on, under tensor=
    exchanged: Amount = 0.0  # bytes that a row exchanges along context=: queries, keys, values and results
    expert_parameters: Count = 0  # those of the parameters that expert= divides
    routed: Amount = 0.0  # bytes that a row sends to experts and gets back
    # Measured seconds of a forward and backward, by the number of rows of the micro-batch. All workers computed at
    # once: alone on its host, a worker would be faster.
    seconds: dict[str, Amount] = {}


class ModelDescription(Description, frozen=True):
    """A model and how it is trained."""

    name: str
    blocks: tuple[BlockDescription, ...]
    global_batch: Count  # rows of a step
    tokens: Count = 1  # of a row
    width: Count = 0  # of the hidden states; 0 if unknown
    heads: Count = 0  # of attention; 0 if it has none
    key_value_heads: Count = 0
    element_size: Amount = 4.0  # bytes of a parameter
    gradient_size: Amount = 0.0  # bytes of a gradient's element; 0: as many as a parameter has
    state: Amount = 2.0  # bytes of optimizer state for each byte of parameters
    # Measured seconds of a forward and backward relative to an even division among workers: how many divide layers
    # (tensor=), and sequences (context=), as "2 1".
    divided: dict[str, Amount] = {}
    update: Amount = 0.0  # measured seconds in which the optimizer updates an element; 0: those of its memory traffic
    precision: str = ""  # of matrix products: fp32, bf16 or fp8; "": what the plan says, or the size of an element
    merges: bool = False  # whether micro-batches may be computed together: no random numbers, a loss that is a sum
    sequence_parallel: bool = False  # tensor= divides all activations (Korthikanti et al., 2022)

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(block.parameters * block.count for block in self.blocks)

    def without_seconds(self) -> ModelDescription:
        """Returns this description without what was measured on one kind of machine."""
        blocks = tuple(msgspec.structs.replace(block, seconds={}) for block in self.blocks)
        return msgspec.structs.replace(self, blocks=blocks, divided={}, update=0.0)

    def with_load(self, times: float, longer: float) -> ModelDescription:
        """Returns this description if blocks take so many times as long, and rows are `longer` by this factor."""
        blocks = tuple(
            msgspec.structs.replace(
                block,
                seconds={rows: times * seconds for rows, seconds in block.seconds.items()},
                **{name: longer * getattr(block, name) for name in PER_TOKEN},
            )
            for block in self.blocks
        )
        return msgspec.structs.replace(self, blocks=blocks, update=times * self.update)

    @property
    def block_count(self) -> int:
        """The number of blocks."""
        return sum(block.count for block in self.blocks)


class LinkDescription(Description, frozen=True):
    """A level of links: workers inside a host, hosts of a rack, racks."""

    name: str
    workers: Count  # how many workers such a link connects; 0: all of them
    bandwidth: Amount  # bytes in a second in one direction; a worker gets all of it while the others are silent
    latency: Amount = 0.0  # seconds of a message
    shared_by: Count = 1  # workers that share the bandwidth
    receive: Amount = 0.0  # further seconds for which a message of a pipeline keeps its receiver busy
    meet: Amount = 0.0  # further seconds of each sum, gather or exchange: workers wait until all have computed


class FailureDescription(Description, frozen=True):
    """How often machines fail, and what happens then. Lifetimes are exponentially distributed."""

    worker_hours: Amount = 0.0  # mean time between failures of one worker; 0: it never fails
    host_hours: Amount = 0.0  # the same of a host, with which all of its workers are lost
    detect: Amount = 1.0  # seconds until the others know
    form: Amount = 1.0  # seconds until the others, who know, train again without what is lost
    restart: Amount = 60.0  # seconds until processes that are started train
    repair_hours: Amount = 24.0  # until a lost worker is back
    spares: Count = 0  # workers that wait to take the place of a lost one


class MachineDescription(Description, frozen=True):
    """Machines of one kind. Rates are of one worker."""

    name: str
    peak: dict[str, Amount]  # FLOP/s of dense matrix products, by precision: fp32, bf16, fp8
    memory: Amount  # bytes
    memory_bandwidth: Amount  # bytes in a second
    links: tuple[LinkDescription, ...] = ()  # from the innermost to the outermost
    efficiency: Amount = 1.0  # part of the peak that large products reach
    half_width: Amount = 0.0  # width of matrices at which half of that is reached
    attention_rate: Amount = 1.0  # speed of attention as a part of that of a product
    launch: Amount = 0.0  # seconds that each operation costs
    memory_passes: Amount = 0.0  # times that a forward reads or writes the activations that it saves
    copies: Amount = 0.0  # times that a copy for a gather or reduce-scatter (ZeRO) reads or writes all of its bytes
    # Parts of the time of messages that computing does not hide, even where it takes longer than they do: of sums and
    # gathers of parameters, and of messages inside layers (tensor=, context=, expert=).
    exposed: Amount = 0.2
    layer_exposed: Amount = 1.0
    coding: dict[str, Amount] = {}  # seconds in which a worker encodes and decodes an element of gradients, by codec
    fixed: Amount = 0.0  # seconds of a step that belong to nothing else
    workers_per_host: Count = 1
    is_cpu: bool = False  # models are in the memory of the process, which also holds what checkpoints are written from
    failures: FailureDescription = FailureDescription()
    checkpoint_bandwidth: Amount = 0.0  # bytes in a second to the storage, of all workers together; 0: unknown
    price: Amount = 0.0  # of a worker for an hour
    watts: Amount = 0.0  # of a worker
    measured: bool = False  # by a probe under Paceline; otherwise figures are from data sheets
    source: tuple[str, ...] = ()

    def between_hosts(self, bandwidth: float, latency: float, receive: float | None = None) -> MachineDescription:
        """Returns hosts like this one, which a probe has measured, with such links between them. By default `receive`
        stays as it is known.
        """
        if receive is None:
            receive = next((link.receive for link in self.links if link.name == BETWEEN), 0.0)
        workers = self.workers_per_host
        links = (link for link in self.links if link.name != BETWEEN)
        inside = tuple(msgspec.structs.replace(link, workers=workers) for link in links)
        between = LinkDescription(BETWEEN, 0, bandwidth, latency, shared_by=workers, receive=receive)
        # Workers wait for the network meanwhile, and compute.
        exposed = min(self.exposed, 0.5)
        return msgspec.structs.replace(self, links=(*inside, between), exposed=exposed)

    def with_links(self, times: float) -> MachineDescription:
        """Returns these machines with links of so many times the bandwidth."""
        links = tuple(msgspec.structs.replace(link, bandwidth=times * link.bandwidth) for link in self.links)
        return msgspec.structs.replace(self, links=links)

    @staticmethod
    def read(name: str) -> MachineDescription:
        """Reads a description of machines from a file, or a shipped one by its name.

        Raises UsageError if there is no such file, and FormatError if it is not a description.
        """
        shipped = sorted(path.stem for path in SHIPPED.glob("*.json"))
        path = SHIPPED / f"{name}.json" if name in shipped else Path(name)
        try:
            data = read_file(path)
        except OSError as error:
            problem = f"the description of machines {name} cannot be read: {error.strerror}"
            raise UsageError(problem, f"give a JSON file, or one of {', '.join(shipped)}") from error
        return described(MachineDescription, data, name)


class WorkerBytes(Description, frozen=True):
    """What a plan makes a worker of one replica hold at most, and send in a step, in bytes."""

    parameters: Count
    gradients: Count
    optimizer: Count
    sent: dict[str, Count] = {}  # by kind
    in_flight: Count = 1  # micro-batches whose activations it keeps at most, counted once for each of its stages

    @property
    def held(self) -> int:
        """The bytes of parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


class ProbeRequest(Description, frozen=True):
    """What a probe is asked: a description of the model, and the bytes of plans."""

    workers: Count  # of the plans
    plans: tuple[str, ...] = ()  # if none is given: all candidates
    fixed_words: str = ""  # words that all candidates have
    allowed: tuple[str, ...] = ()  # changes of the result
    memory: Amount = 0.0  # bytes that a worker may take; 0: what is free
    hosts: tuple[Count, ...] = ()  # the workers of each host, if no replica may span them
    measures_machine: bool = True


class ProbeResult(Description, frozen=True):
    """What a probe has found. Plans that cannot be used for the model have a reason and what to do instead."""

    script: str = ""  # the script's own plan
    micro: Count = 0  # rows of the micro-batch that was measured
    micro_batches: Count = 0  # of a step
    model: ModelDescription | None = None
    machine: MachineDescription | None = None
    process: Count = 0  # bytes of a process before it has a model
    plans: dict[str, tuple[WorkerBytes, ...]] = {}  # by position along the pipeline
    stages: dict[str, tuple[tuple[str, int], ...]] = {}  # of asked plans: the blocks of each stage, and how many
    refused: dict[str, tuple[str, str]] = {}
    size: dict[str, Any] = {}  # of the model, in the fields of the journal's `model`


class TrialResult(Description, frozen=True):
    """What some steps of a script under one plan have measured. Bytes and seconds of a step are those of worker 0."""

    plan: str
    workers: Count
    rows: Count = 0  # of a step
    seconds: tuple[Amount, ...] = ()  # of each step, from the end of the one before it
    parts: dict[str, Amount] = {}  # mean seconds of a step by part, as in the journal
    sent: dict[str, Amount] = {}  # mean bytes of a step, by kind
    peaks: tuple[Count, ...] = ()  # bytes that each worker's process used at most
    busy: tuple[Amount, ...] = ()  # seconds of a step in which each worker did not wait for other workers
    total: Count = 0  # steps of the script's first loop, if they are known
    merges: bool = False  # whether micro-batches may be merged, so that their size does not change the result
    row_seconds: dict[str, Amount] = {}  # of a row's forward and backward on worker 0, by the rows computed together
    each_row: tuple[Amount, ...] = ()  # seconds in which each worker computed a row, without waiting for others
    together: Count = 0  # rows that a worker computed together at most
    # Of the slowest link between hosts: bytes a second, seconds one way, and seconds in which a stage is busy with a
    # message.
    link: tuple[Amount, Amount, Amount] | None = None
    refused: str = ""  # why the plan cannot be used

    @property
    def step_seconds(self) -> float:
        """The usual seconds of a step."""
        return usual(self.seconds)

    def beside(self, again: TrialResult) -> TrialResult:
        """Returns this trial with the steps of another one under the same plan."""
        return msgspec.structs.replace(self, seconds=(*self.seconds, *again.seconds))


def relative_loads(seconds: Sequence[float]) -> tuple[float, ...]:
    """Returns the seconds of workers for the same work relative to those of the fastest one. Workers that differ little
    are taken to be equally fast.
    """
    least = min(seconds, default=0.0)
    return tuple(one / least if one > (1 + ALIKE) * least else 1.0 for one in seconds) if least > 0 else ()


def usual(seconds: Sequence[float]) -> float:
    """Returns the lower quartile: others disturb a machine, and nobody speeds it up."""
    return quantiles(seconds, n=4)[0] if len(seconds) > 1 else sum(seconds)


def as_json(description: Description) -> dict[str, Any]:
    """Returns a description as JSON data, with the version of the format."""
    return {"version": VERSION, **cast(dict[str, Any], msgspec.to_builtins(description))}


def described(kind: type[Kind], data: bytes, origin: str) -> Kind:
    """Returns the description of this `kind` in a JSON text that comes from `origin`: the text of one, or of both as
    ``paceline plan --describe`` prints them.

    Raises FormatError, which names the field that is wrong.
    """
    value = parse(data, origin, CURE)
    if isinstance(value, dict):
        value = value.get("model" if kind is ModelDescription else "machine", value)
    version = value.pop("version", None) if isinstance(value, dict) else VERSION
    if version != VERSION:
        problem = f"{origin} has version {version} of descriptions, but this Paceline reads version {VERSION}"
        raise FormatError(problem, "write it again with paceline plan --describe")
    return converted(kind, check(value, kind, origin, CURE))


def converted(kind: type[Kind], value: Any) -> Kind:
    """Returns the description of this `kind` in JSON data that Paceline has written."""
    if isinstance(value, dict):
        value = {name: field for name, field in value.items() if name != "version"}
    return msgspec.convert(value, kind)
