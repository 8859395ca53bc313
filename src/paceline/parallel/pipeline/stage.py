"""A pipeline stage: its blocks, and what it sends and receives.

Each stage runs the user's own forward, under `stage_forward.StageForwardMode`. A stage sends the values that later
stages need, after a header: the shapes of the values, the structure of the blocks' results, and the positions of the
random generators. The next stage sends the gradients of the values back. `schedule` decides the order of forwards and
backwards, `partition` which stage has which blocks. Several stages may hold the same weight (tied weights); its
gradients are summed over them at the end of a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from paceline.base.sharding import LocalShard, ShardingSpec
from paceline.comm.communicator import Group
from paceline.comm.message_reader import damaged, decode_message
from paceline.compute.batchnorm import without_a_trace
from paceline.compute.job import ELSEWHERE, Judge
from paceline.compute.microbatches import refuse_other_input, tensors_of
from paceline.compute.rng import RngState
from paceline.compute.state_dict import refuse_state
from paceline.errors import UsageError
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.pipeline.block_hooks import BlockHooks
from paceline.parallel.pipeline.partition import StagePartition
from paceline.parallel.pipeline.schedule import FORWARD, Action, messages, stages_of, table
from paceline.parallel.pipeline.stage_forward import (
    ANOTHER_WAY,
    PARAM,
    Key,
    StageBoundaryError,
    StageForwardMode,
    StageInputs,
    form_of,
    made_like,
    placed,
    placeholder,
)
from paceline.parallel.pipeline.stage_messages import Read, StageMessages
from paceline.parallel.tensor_parallel.redistribute import ShardPlacement
from paceline.parallel.tensor_parallel.script_view import ABSENT, call_without_script_view
from paceline.parallel.tensor_parallel.sharded_mode import placement_of, set_placement, tensors_in

_under_way: list[str] = []  # the models whose forward or loss this worker is computing
HEAD = 1024  # bytes of the first message; the rest of a longer header follows in a second one


def refuse_under_way(model: str) -> None:
    """Raises UsageError if this worker computes the forward or loss of a model in stages: others of its replica do not.

    `model` is the name of a model whose parameters all workers of a replica gather.
    """
    if _under_way:
        what = f"the forward or loss of {_under_way[-1]}, which pipeline= splits into stages, calls {model}"
        what += ", whose parameters zero=2 or zero=3 gathers from workers that do not make this call"
        raise UsageError(what, "use zero=1")


# What is called, whether in training mode, and the shape of each input tensor with sizes above 1 written as 2.
_Kind = tuple[str, bool, tuple[tuple[int, ...], ...]]


def _kind(what: str, model: nn.Module, given: Any) -> _Kind:
    """Returns the kind of a forward. Code may take another branch where a size is 0 or 1 (a single row or token);
    torch.compile distinguishes the same sizes.
    """
    shapes = tuple(tuple(min(size, 2) for size in tensor.shape) for tensor in tensors_of(given))
    return what, model.training, shapes


@dataclass
class _AbsentParameter:
    """A parameter whose values are on other workers: `param` is empty on this worker, and has this `shape` on the
    others. With tensor= it may be the shard `part` of a larger parameter.
    """

    param: nn.Parameter
    shape: torch.Size
    part: ShardPlacement | None


class Pipeline:
    """The stages of a job's model that one worker of the `line` runs, the group of workers that form one pipeline.

    `kind` names the schedule, which says which worker has which stages. Construction has two steps: the constructor,
    and `drop_absent_parameters`. Tensor parallelism may shard the parameters between them. `inner` workers have the
    same rank in their lines.
    """

    def __init__(self, job: ParallelJob, line: Group, stages: StagePartition, kind: str, inner: int) -> None:
        self.job, self.line, self.stages, self.kind, self._inner = job, line, stages, kind, inner
        self.local_stages = stages_of(kind, line.size, stages.count // line.size, line.rank)
        self.messages = StageMessages(line, kind, self._read, ahead=job.device.type == "cpu")
        self.last = stages.count - 1
        self._streams, self.model_name = RngState(job.device), type(job.model).__name__
        homes, keys = stages.homes(job.model), dict[int, Key]()
        named = list(job.model.named_parameters(remove_duplicate=False))
        self._homes = {name: homes[id(param)] for name, param in named}
        self._keys = {name: keys.setdefault(id(param), (PARAM, len(keys), 0)) for name, param in named}
        self.absent = {name for name, stages in self._homes.items() if not {*stages} & {*self.local_stages}}
        # Where this worker's parameters are, by key: a module and an attribute. Another layout may replace them.
        self._local_slots: dict[Key, tuple[nn.Module, str]] = {}
        self._absent: dict[Key, _AbsentParameter] = {}  # parameters of other workers' stages
        # Stand-ins of parameters outside of blocks: the first stage that has one, the module, attribute, stand-in.
        self._slots: list[tuple[int, nn.Module, str, nn.Parameter]] = []
        self._stand_ins: dict[int, Key] = {}
        # Parameters outside of blocks that this worker lacks: the first stage that has it, its identity, its name.
        self._outside: list[tuple[int, int, str]] = []
        self._sends_by_kind: dict[
            _Kind, list[list[Key]]
        ] = {}  # by kind of forward: the values that each stage sends on
        self._forward_mode: StageForwardMode | None = None
        self._stage: int | None = None  # the stage that a runner has set
        self._inputs, self._wanted, self._surveys = StageInputs(), frozenset[Key](), False
        # Values that the last micro-batch of each stage received, and whose gradients the stage before needs.
        self._received: dict[int, list[torch.Tensor]] = {}
        self._number = 0  # of the micro-batch that the stage computes
        self._awaiting: dict[tuple[int, int], list[torch.Tensor]] = {}  # tensors whose gradients are still to come
        self.assembles = False  # whether this worker has the full model for now
        self._is_script_call = False  # whether the script called the model
        self._by_block = False  # whether the full model's blocks get their weights only while they are called
        self._plain_forward, job.forward = job.forward, self._run_user_forward
        job.loss = Judge(job.loss, self._computing)

    def __deepcopy__(self, memo: Any) -> Pipeline:
        what = f"{self.model_name} cannot be copied, because pipeline= leaves each worker only its own stages"
        raise UsageError(what, "write the full model with export(), or leave pipeline= out to keep copies (averages)")

    @property
    def decision(self) -> tuple[str, str]:
        """The stages and the reason for them, as text for people."""
        stages, names = self.stages, self.stages.blocks
        numbers = [name.rpartition(".")[2] for name in names]
        by_stage = [[numbers[number] for number in stages.blocks_of(stage)] for stage in range(stages.count)]
        parts = ", ".join(blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}" for blocks in by_stage)
        what = f"{names[0].rpartition('.')[0] or self.model_name} is split into {stages.count} stages: blocks {parts}"
        shared_names = {self._keys[name]: name for name in reversed(self._homes) if len(self._homes[name]) > 1}
        held_text = (
            f"; the first and the last stage both hold {', '.join(shared_names.values())}" if shared_names else ""
        )
        return what + held_text, "each stage has about the same amount of arithmetic"

    # -- which parameters ---------------------------------------------------------------------------------------------

    def drop_absent_parameters(self) -> None:
        """Frees the parameters of other workers' stages and puts stand-ins in their places."""
        job, model = self.job, self.job.model
        block_prefixes = tuple(f"{block}." for block in self.stages.blocks)
        absent_params: dict[int, tuple[nn.Parameter, ShardingSpec]] = {}
        for prefix, module in list(model.named_modules(remove_duplicate=False)):
            for attribute, param in list(module._parameters.items()):
                name = f"{prefix}.{attribute}".lstrip(".")
                if param is None:
                    continue
                key, homes = self._keys[name], self._homes[name]
                spec = job.cuts.get(name) or ShardingSpec.unsharded(param.shape)
                job.cuts[name] = spec = self._restrict_to_stages(spec, homes)
                if name not in self.absent:
                    self._local_slots[key] = module, attribute
                    continue
                if not name.startswith(block_prefixes):
                    stand_in = nn.Parameter(placeholder(param.shape, param.dtype, param.device), requires_grad=False)
                    vars(stand_in).update(vars(param))
                    self._slots.append((homes[0], module, attribute, stand_in))
                    self._stand_ins[id(stand_in)] = key
                    self._outside.append((homes[0], id(param), name))
                if key not in self._absent:
                    self._absent[key] = _AbsentParameter(param, param.shape, placement_of(param))
                absent_params[id(param)] = param, spec
        for param, spec in absent_params.values():  # in place: other references to it see it empty as well
            param.data = torch.empty((0, *spec.shape[1:]), dtype=param.dtype, device=param.device)
            set_placement(param, None)  # it has no shard to gather
        names = {id(param): name for name, param in reversed([*model.named_parameters(remove_duplicate=False)])}
        for param, spec in absent_params.values():
            vars(param)[ABSENT] = names[id(param)], spec.shape
        job.redistributors.append(None)
        job.named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        modules = dict(model.named_modules())
        self._hooks = BlockHooks(model, [modules[name] for name in self.stages.blocks])
        for number, name in enumerate(self.stages.blocks):
            forward = partial(self._call_block, number, name, modules[name].forward)
            modules[name].forward = partial(call_without_script_view, forward)
        model.forward = partial(call_without_script_view, partial(self._call_model, model.forward))
        refuse_state(model, f"{self.model_name}, which pipeline= splits into stages")
        self._cut_forward, job.forward, job.skips_block = job.forward, self.forward, self._skips_block
        self._block_numbers = {id(modules[name]): number for number, name in enumerate(self.stages.blocks)}
        self.shared = self._find_shared()

    def _restrict_to_stages(self, spec: ShardingSpec, homes: Sequence[int]) -> ShardingSpec:
        """Returns the sharding spec of a parameter that exists only on the given stages."""
        nothing = LocalShard((0, *spec.shape[1:]), ())
        workers = set(map(self.messages.worker, homes))
        shards = [spec.pieces[index % len(spec.pieces)] for index in range(self._inner)]
        pieces = [shard if worker in workers else nothing for worker in range(self.line.size) for shard in shards]
        return ShardingSpec(spec.shape, tuple(pieces))

    def _find_shared(self) -> dict[int, list[int]]:
        """Returns the trainable parameters that several workers of the line have: {its number: the workers}."""
        shared, ends, me = {}, self.job.ends, self.line.rank
        for number, (name, param) in enumerate(self.job.named.items()):
            workers = sorted(set(map(self.messages.worker, self._homes[name])))
            if len(workers) > 1:
                shared[number] = workers
                ends["pipeline"] = ends.get("pipeline", 0) + shared_bytes(param, workers, me)
        return shared

    def _local_param(self, key: Key) -> nn.Parameter | None:
        """Returns this worker's parameter with a key, gathered if a forward has just used it."""
        module, attribute = self._local_slots.get(key, (None, ""))
        return None if module is None else module._parameters[attribute]

    # -- forwards -----------------------------------------------------------------------------------------------------

    def _call_block(self, number: int, name: str, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self.assembles:
            with self._borrowed_block(number) if self._by_block else nullcontext():
                return forward(*given, **named)
        if self._forward_mode is None:
            what = f"the script calls {name} directly, but pipeline= splits {self.model_name} into stages"
            raise UsageError(what, "call the full model instead, on all workers")
        return self._forward_mode.block(number, name, forward, given, named)

    def _skips_block(self, block: nn.Module) -> bool:
        """Whether the stage that runs now leaves out a block that this worker has for another stage."""
        number = self._block_numbers.get(id(block))
        return number is not None and self._forward_mode is not None and number not in self._forward_mode.local_blocks

    def _run_user_forward(self, model: nn.Module, batch: Any) -> Any:
        """Runs the user's own forward on the current stage. Returns the output, or the values for later stages."""
        if model is not self.job.model or self.assembles:
            return self._plain_forward(model, batch)
        return self._run_in_stage(partial(self._plain_forward, model, batch))

    def _run_in_stage(self, call: Callable[[], Any]) -> Any:
        stage = cast(int, self._stage)
        local_blocks, on_first_block = (
            self.stages.blocks_of(stage),
            partial(self._streams.apply_changes, self._inputs.drawn),
        )
        options = self._inputs, self._stand_ins, self._wanted, on_first_block, self.job.device, self._hooks
        self._forward_mode = mode = StageForwardMode(local_blocks, *options, self._surveys)
        mode.redistributors = [one for one in self.job.redistributors if one is not None]
        mode.later = {identity: name for home, identity, name in self._outside if home > stage and self._surveys}
        slots = [(module, key, stand_in) for home, module, key, stand_in in self._slots if home < stage]
        removed = nullcontext() if self._surveys else self._hooks.removed_if_cut_off(StageBoundaryError)
        self.job.passing = True
        try:
            with placed(slots), removed, mode:
                output = call()
                if stage == self.last:
                    return mode.real(output)
        except StageBoundaryError:
            values = tuple(mode.kept_outputs.values())
            return values if self._is_script_call else self.job.end_forward(values)
        finally:
            self._forward_mode, self._last_mode, self.job.passing = None, mode, False
        what = f"the forward of {self.model_name} ended without calling {self.stages.blocks[local_blocks.stop]}"
        raise UsageError(what, "call all blocks in order in the forward, or leave pipeline= out")

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Runs a micro-batch through the stage that a runner has set, or else through all stages of this worker."""
        if model is not self.job.model:
            return self._plain_forward(model, batch)
        if self.assembles:
            return self._cut_forward(model, batch)
        call, kind = partial(self._cut_forward, model, batch), _kind("forward", model, batch)
        if self._stage is None and self._is_new_to_some(kind, "a forward"):
            self._survey(kind, partial(self._run_user_forward, model, batch))
        return self._run_local_stages(kind, call)

    def _is_new_to_some(self, kind: _Kind, what: str) -> bool:
        """Whether this kind of forward was not surveyed here, or on a worker in lockstep with this one: these
        survey equally often. Collective among them.
        """
        is_new = kind not in self._sends_by_kind
        if self.job.lockstep is None:
            return is_new
        self.job.lockstep.declare(f"{what} of {self.model_name}", check=False, kind="pipeline")
        return any(self.job.lockstep.gather_json(is_new))

    def new_kind(self, batch: Any) -> _Kind | None:
        """Returns the kind of a forward if it has not been surveyed."""
        kind = _kind("forward", self.job.model, batch)
        return None if kind in self._sends_by_kind else kind

    def survey(self, model: nn.Module, batch: Any, again: bool = False) -> None:
        """Finds out which values stages need from earlier stages, if this is the first forward of its kind, or `again`.

        It runs the forward on stand-ins, so the forward must not read values. A survey is collective in the line, so
        it is not allowed while a schedule runs.
        """
        kind = _kind("forward", model, batch)
        if again or kind not in self._sends_by_kind:
            self._survey(kind, partial(self._run_user_forward, model, batch))

    def _run_local_stages(self, kind: _Kind, call: Callable[[], Any]) -> Any:
        self.line.declare("the stages of a pipeline", check=False, kind="pipeline")
        output = ELSEWHERE
        for stage in [self._stage] if self._stage is not None else self.local_stages:
            output = self._run_stage(stage, self._sends_by_kind[kind], call)
        return output

    @contextmanager
    def _computing(self) -> Iterator[None]:
        _under_way.append(self.model_name)
        try:
            yield
        finally:
            _under_way.pop()

    def _run_stage(self, stage: int, sends: list[list[Key]], call: Callable[[], Any]) -> Any:
        before, self._stage = self._stage, stage
        snapshot = self._streams.snapshot() if stage < self.last else ()  # no later stage needs the last stage's draws
        incoming, outgoing = sends[stage - 1] if stage else [], sends[stage]
        try:
            self._inputs = inputs = self._receive(stage, incoming) if stage else StageInputs()
            self._wanted = frozenset(outgoing)
            with self._computing():
                output = call()
        finally:
            self._stage, self._wanted = before, frozenset()
        received = (inputs.values[key] for key in incoming)
        self._received[stage] = [value for value in received if value.requires_grad]
        if stage == self.last:
            return output
        outputs = list[torch.Tensor]()
        made = dict(zip(self._last_mode.kept_outputs, self.job.gather_output(output), strict=True))
        for key in outgoing:
            value = made.get(key, inputs.values.get(key))
            value = self._local_param(key) if value is None else value
            if value is None:
                raise UsageError(*ANOTHER_WAY)
            outputs.append(self.job.once(value) if isinstance(value, nn.Parameter) else value)
        self._awaiting[stage, self._number] = [value for value in outputs if value.requires_grad]
        self._send(stage, self._last_mode.forms, self._streams.changes_since(snapshot), outputs)
        return ELSEWHERE

    # -- messages between stages --------------------------------------------------------------------------------------

    def _send(self, stage: int, forms: list[Any], drawn: list[Any], values: Sequence[torch.Tensor]) -> None:
        kinds = [[str(v.dtype).removeprefix("torch."), list(v.shape), v.requires_grad] for v in values]
        head = json.dumps([forms, drawn, kinds]).encode()
        data = len(head).to_bytes(8, "little") + head
        first = torch.frombuffer(bytearray(data[:HEAD].ljust(HEAD)), dtype=torch.uint8)
        rest = [torch.frombuffer(bytearray(data[HEAD:]), dtype=torch.uint8)] if len(data) > HEAD else []
        action = Action(FORWARD, stage + 1, self._number)
        self.messages.send(action, [first, *rest, *(value.detach() for value in values)])

    def _receive(self, stage: int, keys: list[Key]) -> StageInputs:
        action = Action(FORWARD, stage, self._number)
        forms, drawn, tensors = self.messages.receive(action, stage - 1)
        if len(tensors) != len(keys):
            raise damaged("values", f"stage {stage - 1}", f"expected {len(keys)} values, got {len(tensors)}")
        return StageInputs(forms, drawn, dict(zip(keys, tensors, strict=True)))

    def _read(self, action: Action) -> Read | None:
        """Reads the message for an action. None: it brings gradients of values that this worker has yet to send."""
        if action.kind == FORWARD:
            return self._read_values(action.stage - 1)
        outputs = self._awaiting.get((action.stage, action.micro_batch))
        return None if outputs is None else self._read_gradients(outputs)

    def _read_values(self, stage: int) -> Read:
        """Reads the structure of the blocks' results, the changes of generators, and the values that a stage sent."""
        yield (first := torch.empty(HEAD, dtype=torch.uint8))
        data = bytes(first.numpy())
        length = int.from_bytes(data[:8], "little")
        head = data[8 : 8 + length]
        if length > HEAD - 8:
            yield (rest := torch.empty(length - HEAD + 8, dtype=torch.uint8))
            head += bytes(rest.numpy())
        forms, drawn, kinds = decode_message(head, "values", f"stage {stage}")
        tensors = list[torch.Tensor]()
        for dtype, shape, grad in kinds:
            yield (value := torch.empty(shape, dtype=getattr(torch, dtype), device=self.job.device))
            tensors.append(value.requires_grad_(grad))
        return forms, drawn, tensors

    def _read_gradients(self, outputs: Sequence[torch.Tensor]) -> Read:
        gradients = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in outputs]
        yield from gradients
        return gradients

    def _survey(self, kind: _Kind, call: Callable[[], Any]) -> None:
        """Runs one forward on stand-ins, stage by stage, to find out which values stages need from earlier stages."""
        self.line.declare("the stages of a pipeline", check=False, kind="pipeline")
        needs_by_stage: dict[int, list[Key]] = {}
        before, self._surveys, self._wanted = self._stage, True, frozenset()
        try:
            for stage in self.local_stages:
                self._stage = stage
                self._inputs = self._receive(stage, []) if stage else StageInputs()
                with without_a_trace(self.job.model, self._streams), torch.no_grad(), self._computing():
                    call()
                needs_by_stage[stage] = sorted(self._last_mode.needs)
                if stage < self.last:
                    self._send(stage, self._last_mode.forms, [], [])
        finally:
            self._surveys, self._stage = False, before
        self.messages.finish()
        by_worker = self.line.gather_json(needs_by_stage)
        gathered = {int(stage): keys for of_worker in by_worker for stage, keys in of_worker.items()}
        needs: list[set[Key]] = [{(a, b, c) for a, b, c in gathered[stage]} for stage in range(self.stages.count)]
        self._sends_by_kind[kind] = [self._sends(stage, needs) for stage in range(self.stages.count)]

    def _sends(self, stage: int, needs: list[set[Key]]) -> list[Key]:
        """Returns the values that later stages need from this stage or from those before it."""
        wanted = set[Key]().union(*needs[stage + 1 :])
        return sorted(key for key in wanted if self._source_stage(key) <= stage)

    def _source_stage(self, key: Key) -> int:
        blocks, which, _ = key
        if blocks == PARAM:
            return self._homes[next(name for name, known in self._keys.items() if known[1] == which)][0]
        return self.stages.stage_of_block(blocks - 1) if blocks else 0

    # -- for the runner -----------------------------------------------------------------------------------------------

    def actions(self, micro_batches: int, forward_only: bool = False) -> Sequence[Action]:
        """Begins a schedule. Returns this worker's part of it, in order."""
        workers, me = self.line.size, self.line.rank
        schedule = self.kind, workers, self.stages.count // workers, micro_batches
        self.messages.expect(messages(*schedule, me, forward_only))
        return table(*schedule, forward_only)[me]

    def set_stage(self, stage: int | None, number: int = 0) -> None:
        """Sets the stage that the next forward runs, and the number of its micro-batch; None: all stages of this
        worker, one after another.
        """
        self._stage, self._number = stage, number

    def take_received(self, stage: int) -> list[torch.Tensor]:
        """Returns the values that the last micro-batch of a stage received and whose gradients the stage before needs.
        The pipeline then forgets them.
        """
        return self._received.pop(stage)

    def receive_gradients(self, action: Action) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the values that a stage sent, each with its gradient; without those that no later stage used."""
        grads = self.messages.receive(action, action.stage + 1)
        outputs = self._awaiting.pop((action.stage, action.micro_batch))
        return [(value, grad) for value, grad in zip(outputs, grads, strict=True) if not _is_none(grad)]

    def send_gradients(self, action: Action, received: Sequence[torch.Tensor]) -> None:
        """Sends the gradients of the values that a stage received to the stage before."""
        if received:
            grads = [_none_like(v) if v.grad is None else v.grad for v in received]
            self.messages.send(action._replace(stage=action.stage - 1), grads)

    def suggest_partition(self, seconds: Mapping[int, float]) -> str:
        """Returns advice for the user: a partition that would balance the measured seconds of the stages better.

        The text is empty if no partition gains enough. `seconds` are those of this worker's stages. Collective in the
        line.
        """
        line, names = self.line, self.line.names
        line.declare("the seconds of the stages", check=False, kind="pipeline")
        durations = [(int(at), value) for of_worker in line.gather_json(seconds) for at, value in of_worker.items()]
        by_stage = dict(sorted(durations))
        if len(by_stage) != self.stages.count:
            return ""
        suggestion = self.stages.suggest([*by_stage.values()], [self.messages.worker(stage) for stage in by_stage])
        if suggestion is None:
            return ""
        pipeline_blocks, now, then = suggestion
        each = ", ".join(
            f"{value:.2g} s on worker {names[self.messages.worker(stage)]}" for stage, value in by_stage.items()
        )
        gain = f"with the suggestion, the slowest worker would compute for {then:.2g} s instead of {now:.2g} s"
        what = f'other stages would balance these workers better: Trainer(..., pipeline_blocks="{pipeline_blocks}")'
        return f"{what}. In a step, the stages take {each}; {gain}"

    def add_up(self, number: int, parts: Sequence[torch.Tensor]) -> None:
        """Sums the gradient of a parameter that several workers have, in place. `parts` are tensors of the gradient."""
        workers, me = self.shared[number], self.line.rank
        if me not in workers:
            return
        for part in parts:
            if me != workers[0]:
                self.messages.send_to(workers[0], [part.clone()])
                self.messages.fetch_from(workers[0], part)
                continue
            for other in workers[1:]:
                part.add_(self.messages.fetch_from(other, torch.empty_like(part)))
            for other in workers[1:]:
                self.messages.send_to(other, [part.clone()])

    # -- the full model -----------------------------------------------------------------------------------------------

    @property
    def last_worker(self) -> int:
        """The worker of the line that has the last stage."""
        return self.messages.worker(self.last)

    def missing_bytes(self, by_block: bool) -> int:
        """Returns the bytes of the parameters that only other workers have; or those that the worker of the last stage
        needs at a time if blocks get their weights one block at a time.
        """
        if not by_block:
            return sum(absent.shape.numel() * absent.param.element_size() for absent in self._absent.values())
        of_blocks = [sum(map(self._bytes, self._missing_of_block(number))) for number in range(len(self.stages.blocks))]
        return sum(map(self._bytes, self._missing)) - sum(of_blocks) + max(of_blocks)

    def _bytes(self, name: str) -> int:
        absent = self._absent.get(self._keys[name])
        return 0 if absent is None else absent.shape.numel() * absent.param.element_size()

    def source_worker(self, name: str) -> int:
        """Returns the first worker of the line that has a parameter."""
        return self.messages.worker(self._homes[name][0])

    @contextmanager
    def assembled(self, by_block: bool) -> Iterator[None]:
        """Assembles the full model on the worker of the last stage while the context is active.

        The other workers send it their parameters. The parameters stay the same objects, so that lists of them in
        modules or closures hold the values as well. If `by_block`, each block has its weights only while it is called.
        Collective in the line.
        """
        self.line.declare("the full model, on one worker of the pipeline", check=False, kind="comparison")
        if by_block:
            with self._assembled_by_block():
                yield
        else:
            with self._borrowed(self._missing), self._assembling():
                yield

    @contextmanager
    def _assembled_by_block(self) -> Iterator[None]:
        """Assembles the full model where it does not fit: each block has its weights only while it is called.

        The weights are NaN otherwise, so that code which uses them elsewhere is noticed. The worker of the last stage
        computes one forward; the other workers send it each block in turn.
        """
        in_blocks = {name for number in range(len(self.stages.blocks)) for name in self._missing_of_block(number)}
        with self._borrowed([name for name in self._missing if name not in in_blocks]), self._assembling():
            if not self.assembles:
                for number in range(len(self.stages.blocks)):
                    with self._borrowed_block(number):
                        pass
                yield
                return
            absent = [self._absent[self._keys[name]] for name in in_blocks]
            before = [(one.param, one.param.data) for one in absent]
            try:
                for one in absent:
                    one.param.data = placeholder(one.shape, one.param.dtype, one.param.device)
                self._by_block = True
                yield
            finally:
                self._by_block = False
                for param, empty in before:
                    param.data = empty

    @contextmanager
    def _assembling(self) -> Iterator[None]:
        self.assembles = self.job.assembled = self.line.rank == self.last_worker
        try:
            yield
        finally:
            self.assembles = self.job.assembled = False

    @property
    def _missing(self) -> list[str]:
        """The parameters that the worker of the last stage lacks, each by the first of its names."""
        first_names = {key: name for name, key in reversed(self._keys.items())}
        workers = {name: set(map(self.messages.worker, homes)) for name, homes in self._homes.items()}
        return [name for _, name in sorted(first_names.items()) if self.last_worker not in workers[name]]

    def _missing_of_block(self, number: int) -> list[str]:
        """Returns the missing parameters that are in one block and in no module outside of blocks."""
        inside = tuple(f"{block}." for block in self.stages.blocks)
        outside = {key for name, key in self._keys.items() if not name.startswith(inside)}
        prefix = f"{self.stages.blocks[number]}."
        block_keys = {self._keys[name] for name in self._keys if name.startswith(prefix)} - outside
        return [name for name in self._missing if self._keys[name] in block_keys]

    def _borrowed_block(self, number: int) -> AbstractContextManager[None]:
        return self._borrowed(self._missing_of_block(number))

    @contextmanager
    def _borrowed(self, names: Sequence[str]) -> Iterator[None]:
        """Fills the named parameters on the worker of the last stage while the context is active. Owners send them."""
        filled = list[tuple[_AbsentParameter, torch.Tensor]]()
        try:
            for name in names:
                key, home = self._keys[name], self.source_worker(name)
                if self.line.rank == home:
                    param = self._local_param(key)
                    assert param is not None
                    self.line.send(self.job.gather_param(param).detach().contiguous(), self.last_worker)
                elif self.line.rank == self.last_worker:
                    absent = self._absent[key]
                    value = torch.empty(absent.shape, dtype=absent.param.dtype, device=absent.param.device)
                    self.line.receive(value, home)
                    filled.append((absent, absent.param.data))
                    absent.param.data = value
                    set_placement(absent.param, absent.part)
            yield
        finally:
            for absent, empty in filled:
                absent.param.data = empty
                set_placement(absent.param, None)

    def abandon(self) -> None:
        """Forgets all micro-batches and messages in flight, after a step was cut off."""
        self.messages.abandon()
        self._received.clear()
        self._awaiting.clear()
        self.set_stage(None)

    # -- calls by the user's script -----------------------------------------------------------------------------------

    def _call_model(self, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Calls the model: for the user's forward, or for the script, where all workers of the line compute it."""
        if self._forward_mode is not None or self.assembles:
            return forward(*given, **named)
        if _under_way:  # not all workers of the line come to this
            what = f"the forward or loss of {_under_way[-1]} calls {self.model_name}, which is also split by pipeline="
            raise UsageError(what, f'do not split {self.model_name}: give its Trainer plan="pipeline=1"')
        if torch.is_grad_enabled():
            what = (
                f"{self.model_name}, which pipeline= splits into stages, is called outside of its own trainer's forward"
            )
            cure = 'call it under torch.no_grad(), or do not split it: give its Trainer plan="pipeline=1"'
            raise UsageError(what, cure)
        self.line.declare(f"a call of {self.model_name}, which pipeline= splits into stages", kind="pipeline")
        refuse_other_input(self.line, (given, named), self.model_name, "pipeline= splits it")
        call, snapshot = partial(self._run_in_stage, partial(forward, *given, **named)), self._streams.snapshot()
        kind = _kind("call", self.job.model, (given, named))
        self._is_script_call = True
        try:
            if self._is_new_to_some(kind, "a call"):
                self._survey(kind, call)
            output = self._run_local_stages(kind, call)
        finally:
            self._is_script_call = False
        self.messages.finish()
        return self._broadcast_output(output, self._streams.changes_since(snapshot))

    def _broadcast_output(self, output: Any, drawn: list[Any]) -> Any:
        """Broadcasts the last stage's output and the changes of its random generators to the line."""
        source, is_source = self.last_worker, output is not ELSEWHERE
        plain_output = dict(output) if isinstance(output, Mapping) else output
        message = [form_of(plain_output, f"a call of {self.model_name}"), drawn] if is_source else None
        form, drawn = self.line.gather_json(message)[source]
        self._streams.apply_changes(drawn)
        made = plain_output if is_source else made_like(form, self.job.device)
        for tensor in tensors_in([made]):
            self.line.broadcast(tensor, source)
        return Attributes(made) if isinstance(made, dict) else made


def shared_bytes(param: torch.Tensor, workers: Collection[int], me: int) -> int:
    """Returns the bytes of a gradient that a worker sends, if these workers of a line have the same parameter: the
    first one sends the sum to the others.
    """
    return (len(workers) - 1 if me == min(workers) else int(me in workers)) * param.nbytes


def _none_like(value: torch.Tensor) -> torch.Tensor:
    """Returns the message for "autograd made no gradient": the first element has all bits set, a NaN that no arithmetic
    yields. The stage before then makes no gradient either: an optimizer updates a parameter whose gradient is zero, and
    skips one that has none.
    """
    made = torch.empty_like(value, memory_format=torch.contiguous_format)
    made.view(-1)[:1].view(torch.uint8).fill_(0xFF)
    return made


def _is_none(grad: torch.Tensor) -> bool:
    if not grad.numel():
        return False
    first = grad.view(-1)[0].item()
    return first != first and bool((grad.view(-1)[:1].view(torch.uint8) == 0xFF).all())


class Attributes(dict[str, Any]):
    """A dict whose values can also be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
