"""Predicts the seconds of a step from a plan and descriptions of the model and the machine, part by part. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from paceline.base.mesh import AXES
from paceline.parallel.pipeline.schedule import simulate, table
from paceline.plan import CODED_BYTES, Plan
from paceline.planner.compute_time import BACKWARDS, ComputeTime
from paceline.planner.descriptions import BlockDescription, MachineDescription, ModelDescription
from paceline.planner.links import Links, Peers
from paceline.planner.workload import Stage, Workload

COMPUTED = "computing", "recomputing", "bubble"  # parts that a slow worker makes longer
ROUNDS = 3  # of micro-batches through a pipeline that are simulated; further ones repeat the last round


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step on the worker that has most to do. The parts add up to `total`."""

    computing: float  # forwards and backwards
    recomputing: float  # forwards that are repeated for the backward
    bubble: float  # waiting for other stages of the pipeline
    sums: float  # of gradients, as far as computing does not hide them
    gathers: float  # of sharded parameters, likewise
    messages: float  # inside layers: tensor=, context=, expert=
    hops: float  # messages between stages
    update: float  # the optimizer
    fixed: float  # what belongs to nothing else

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Returns the seconds of each part by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def step_time(
    plan: Plan,
    model: ModelDescription,
    machine: MachineDescription,
    workers: int,
    axes: Sequence[str] = AXES,
    slow: Sequence[float] = (),
) -> StepTime:
    """Returns the predicted seconds of a step of `plan` over `workers`.

    `axes` is the order of the mesh, outer to inner; Paceline's own by default. `slow` has for each worker how many
    times as long as the fastest one it computes; if it is empty, all are alike. Raises PlanError if the plan does not
    fit the workers.
    """
    taken = _Prediction(Workload(plan.validate(workers), model, workers, axes), machine).time()
    if not slow:
        return taken
    longer = _slowdown(plan, slow)
    return replace(taken, **{name: longer * getattr(taken, name) for name in COMPUTED})


def _slowdown(plan: Plan, slow: Sequence[float]) -> float:
    """Returns how many times as long computing takes as if all workers were as fast as the fastest one. The workers
    that compute a micro-batch together wait for each other; shares of the others follow their speed.
    """
    size = plan.mesh(len(slow)).unit
    units = [max(slow[first : first + size]) for first in range(0, len(slow), size)]
    return max(units) if plan.together > 1 else len(units) / sum(1 / one for one in units)


@dataclass(frozen=True)
class _Chunk:
    """The seconds of one stage for the micro-batches that are computed together."""

    forward: float
    recompute: float
    messages: float  # inside layers, of forward, recomputation and backward

    @property
    def forwards(self) -> float:
        """The seconds of the forward, in which a share of the messages is sent."""
        return self.forward + self.messages / (3 if self.recompute else 2)

    @property
    def total(self) -> float:
        """The seconds of forward and backward."""
        return (1 + BACKWARDS) * self.forward + self.recompute + self.messages

    @property
    def backwards(self) -> float:
        """The seconds of the backward, with the recomputation before it."""
        return self.total - self.forwards


class _Prediction:
    """The parts of a step of one workload on one kind of machine."""

    def __init__(self, workload: Workload, machine: MachineDescription) -> None:
        self._workload, self._machine, self._mesh = workload, machine, workload.mesh
        self._plan, self._model = workload.plan, workload.model
        self._compute, self._links = ComputeTime(workload, machine), Links(machine.links)
        self._rows, self._count = self._compute.rows_together()
        self._stages = [self._chunk(stage) for stage in workload.stages]
        of_worker = [workload.stages_of(worker) for worker in range(self._mesh.pipeline)]
        totals = [sum(self._stages[stage].total for stage in stages) for stages in of_worker]
        slowest = totals.index(max(totals))
        self._blocks = workload.blocks_of(slowest)  # of the worker that computes most
        self._chunks = [self._stages[stage] for stage in of_worker[slowest]]

    def time(self) -> StepTime:
        """Returns the seconds of all parts."""
        count, chunks = self._count, self._chunks
        busy = count * sum(chunk.total for chunk in chunks)
        without_hops, end = (busy, busy) if len(self._stages) == 1 else self._pipeline()
        sums, gathers = self._parameter_messages()
        return StepTime(
            computing=count * (1 + BACKWARDS) * sum(chunk.forward for chunk in chunks),
            recomputing=count * sum(chunk.recompute for chunk in chunks),
            bubble=without_hops - busy,
            sums=sums,
            gathers=gathers,
            messages=count * sum(chunk.messages for chunk in chunks),
            hops=end - without_hops,
            update=self._update(),
            fixed=self._machine.fixed,
        )

    def _chunk(self, stage: Stage) -> _Chunk:
        forward = self._compute.forward(stage, self._rows)
        recompute = forward if self._plan.recompute else 0.0
        messages = sum(count * self._layer_messages(block) for block, count in stage)
        return _Chunk(forward, recompute, messages * (3 if recompute else 2))

    def _layer_messages(self, block: BlockDescription) -> float:
        """Returns the seconds of messages inside a block in a forward that computing does not hide."""
        mesh, peers = self._mesh, self._workload.peers
        rows = self._rows * self._workload.activation_scale / mesh.context
        seconds = 0.0
        if mesh.tensor > 1:
            seconds += block.tensor_sums * self._links.sum(block.passes * rows, peers("tensor"))
        if mesh.context > 1:
            seconds += self._links.exchange(block.exchanged * rows / mesh.tensor, peers("context"))
        if mesh.expert > 1:
            seconds += self._links.exchange(block.routed * rows, peers("expert"))
        return self._machine.layer_exposed * seconds

    def _pipeline(self) -> tuple[float, float]:
        """Returns the seconds of all forwards and backwards through the pipeline, without hops and with them."""
        hops = [self._hop(stage) for stage in range(len(self._stages) - 1)]
        travels, receives = zip(*hops, strict=True)
        return self._simulated((), ()), self._simulated(travels, receives)

    def _simulated(self, travels: Sequence[float], receives: Sequence[float]) -> float:
        """Returns the seconds of all micro-batches. A round takes as long as the last ones that are simulated."""
        count, size = int(self._count), self._mesh.pipeline
        shorter = ROUNDS * size + count % size
        if count <= shorter + size:
            return self._simulated_few(count, travels, receives)
        ends = [self._simulated_few(number, travels, receives) for number in (shorter, shorter + size)]
        return ends[1] + (ends[1] - ends[0]) * (count - shorter - size) / size

    def _simulated_few(self, count: int, travels: Sequence[float], receives: Sequence[float]) -> float:
        rows = table(self._plan.stage_order, self._mesh.pipeline, self._workload.virtual, count)
        forward, backward = ([getattr(c, name) for c in self._stages] for name in ("forwards", "backwards"))
        return simulate(rows, forward, backward, travels, receives).end

    def _hop(self, stage: int) -> tuple[float, float]:
        """Returns the seconds in which a message travels from a stage to the next one, and is received."""
        workload, mesh = self._workload, self._mesh
        distance = workload.distance("pipeline")
        sender, receiver = (workload.worker_of(number) * distance for number in (stage, stage + 1))
        if sender == receiver:
            return 0.0, 0.0
        passes = workload.stages[stage][-1][0].passes * workload.activation_scale * self._rows / mesh.context
        size = passes / (mesh.tensor if self._model.sequence_parallel else 1)
        return self._links.hop(size, sender, receiver, distance)

    def _parameter_messages(self) -> tuple[float, float]:
        """Returns the exposed seconds of sums of gradients, and of gathers of parameters."""
        plan, element_size = self._plan, self._model.element_size
        parameters = self._workload.parameters(self._blocks)
        size = parameters * element_size
        if plan.server:
            return self._servers(parameters), 0.0
        backward = sum(chunk.backwards for chunk in self._chunks)
        if plan.zero not in (2, 3):
            scatter, gather = 0.0, 0.0
            if plan.zero:
                scatter = self._by_shard(parameters * self._workload.gradient_size, copies=1)
                gather = self._by_shard(size, copies=1)
            sums = self._hidden(scatter + self._outer_sum(), backward) + self._encoding(parameters)
            return sums + self._merges(size), gather
        forward = sum(chunk.forwards for chunk in self._chunks)
        gather, scatter = (self._by_block(element) for element in (element_size, self._workload.gradient_size))
        # Zero 2 gathers once a step, zero 3 for each forward and backward; gradients are scattered in each backward.
        before = self._hidden(gather, forward) * (self._count if plan.zero == 3 else 1)
        again = gather if plan.zero == 3 else 0.0
        exposed = self._count * self._hidden(again + scatter, backward)
        share = again / (again + scatter) if scatter else 0.0
        outer = self._hidden(self._outer_sum(), backward) + self._encoding(parameters)
        return exposed * (1 - share) + outer + self._merges(size), before + exposed * share

    def _by_block(self, element_size: float) -> float:
        """Returns the seconds in which shards of the parameters, or of gradients, travel block by block."""
        workload = self._workload
        seconds = (
            count * self._by_shard(workload.parameters_of(block) * element_size, copies=2)
            for block, count in self._blocks
        )
        return sum(seconds)

    def _by_shard(self, size: float, copies: int) -> float:
        """Returns the seconds of a gather or a reduce-scatter among shards, for which `size` bytes are copied so many
        times.
        """
        copying = copies * self._machine.copies * size / self._machine.memory_bandwidth
        return self._links.gather(size, self._workload.peers("shard")) + copying

    def _hidden(self, messages: float, window: float) -> float:
        """Returns the seconds of messages that show, if the worker computes for `window` seconds meanwhile."""
        return max(0.0, messages - window) + self._machine.exposed * min(messages, window)

    def _outer_sum(self) -> float:
        """Returns the seconds of the sum of gradients over workers that hold the same parameters."""
        mesh, plan, peers = self._mesh, self._plan, self._workload.peers
        shards = mesh.shard if plan.zero else 1
        replicas = self._replicas_of_island()
        # Codecs compress what travels between hosts.
        scale = self._workload.gradient_size / shards * (self._coded(plan.codec) if self._sums_between_hosts else 1.0)
        experts = sum(count * block.expert_parameters for block, count in self._blocks) / mesh.expert / mesh.tensor
        shared = self._workload.parameters(self._blocks) - experts
        seconds = self._links.sum(scale * shared, Peers((*replicas.axes, *peers("expert", "context").axes)))
        return seconds + self._links.sum(scale * experts, Peers((*replicas.axes, *peers("context").axes)))

    @property
    def _sums_between_hosts(self) -> bool:
        """Whether gradients are summed between hosts."""
        replicas = self._replicas_of_island()
        return replicas.count > replicas.within(self._machine.workers_per_host)

    def _encoding(self, parameters: float) -> float:
        """Returns the seconds in which a worker encodes and decodes the gradients of `parameters` elements. Only on a
        CPU, where that takes time from cores that compute.
        """
        if not self._machine.is_cpu or not self._sums_between_hosts:
            return 0.0
        shards = self._mesh.shard if self._plan.zero else 1
        return self._machine.coding.get(self._plan.codec or "", 0.0) * parameters / shards

    def _coded(self, codec: str | None) -> float:
        """Returns the part of the bytes that a codec leaves to be sent. What others than rounding save is not known."""
        coded = CODED_BYTES.get(codec or "")
        return 1.0 if coded is None else min(1.0, coded / 256 / self._workload.gradient_size)

    def _replicas_of_island(self) -> Peers:
        """Returns the replicas that are summed in each step: all of them, or those of an island."""
        teams = min(self._plan.local or 1, self._mesh.data)
        size = -(-self._mesh.data // teams)
        return Peers(((size, self._workload.distance("data")),) if size > 1 else ())

    def _merges(self, size: float) -> float:
        """Returns the seconds of a step that merges of islands take, of which there is one in `every` steps."""
        plan, distance = self._plan, self._workload.distance("data")
        teams = min(plan.local or 1, self._mesh.data)
        if teams == 1:
            return 0.0
        islands = Peers(((teams, distance * -(-self._mesh.data // teams)),))
        size *= self._coded(plan.outer_codec)
        # A delayed merge travels while the islands go on.
        return self._links.sum(size, islands) / (plan.every or 1) * (self._machine.exposed if plan.delay else 1.0)

    def _servers(self, parameters: float) -> float:
        """Returns about how long a worker pushes its gradients and pulls parameters; servers may be the bottleneck."""
        outermost = self._machine.links[-1:]
        if not outermost:
            return 0.0
        pushed = parameters * self._workload.gradient_size * self._coded(self._plan.codec)
        pulled = parameters * self._model.element_size
        crowd = max(1.0, self._workload.workers / (self._plan.server or 1), outermost[0].shared_by)
        seconds = crowd * pushed * (1 + (self._plan.copies or 0)) / outermost[0].bandwidth
        seconds += crowd * pulled / outermost[0].bandwidth + 2 * outermost[0].latency
        seconds += self._updated(parameters / (self._plan.server or 1))
        # With `staleness` a worker computes while others push.
        return seconds * (self._machine.exposed if self._plan.staleness else 1.0)

    def _update(self) -> float:
        """Returns the seconds in which the optimizer of a worker updates its parameters."""
        shards = self._mesh.shard if self._plan.zero else 1
        parameters = self._workload.parameters(self._blocks) / shards
        return 0.0 if self._plan.server else self._updated(parameters)

    def _updated(self, parameters: float) -> float:
        """Returns the seconds in which an optimizer reads gradients, and reads and writes parameters and its state."""
        moved = 2 * (1 + self._model.state) * self._model.element_size + self._workload.gradient_size
        return parameters * (self._model.update or moved / self._machine.memory_bandwidth)
