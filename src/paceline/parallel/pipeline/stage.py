"""A pipeline stage: its blocks, and what it sends and receives.

The user's own forward runs on each stage; how is in `passage`. Along with the values that later stages need goes a
head: their shapes, what blocks gave but for values, and how far the random generators have come. Gradients of these
values come back. In which order forwards and backwards are made is in `schedule`, who has what in `stages`. Weights
that several stages have, as tied ones, are held by all of them, and their gradients added up at the end of a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from paceline.parallel.pipeline.partition import StagePartition
from paceline.parallel.pipeline.schedule import Action, table
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
from paceline.parallel.tensor_parallel.redistribute import ShardPlacement
from paceline.parallel.tensor_parallel.script_view import ABSENT, call_by_pieces
from paceline.parallel.tensor_parallel.sharded_mode import mark, part_of, tensors_in

_under_way: list[str] = []  # the models whose forward or loss is computed by this worker just now
HEAD = 1024  # bytes of the first message; a longer head goes on in a second one
MOST = 64  # messages on their way, before a sender waits


# What is called, in training mode or not, and of each tensor that it takes, which sizes are 0, 1 or more.
_Kind = tuple[str, bool, tuple[tuple[int, ...], ...]]


def _kind(what: str, model: nn.Module, given: Any) -> _Kind:
    """The kind of a forward. Code may take another way where a size is 0 or 1 (a single row or token), as it does under
    torch.compile, which tells the same sizes apart.
    """
    shapes = tuple(tuple(min(size, 2) for size in tensor.shape) for tensor in tensors_of(given))
    return what, model.training, shapes


@dataclass
class _Absent:
    """A parameter whose values are on other workers: `param` is empty here, and has this `shape` there. With tensor=
    it may be this `part` of a larger one.
    """

    param: nn.Parameter
    shape: torch.Size
    part: ShardPlacement | None


@dataclass
class _Under:
    """A micro-batch that is under way in a stage: what came, and what went on."""

    came: list[torch.Tensor]
    went: list[torch.Tensor]


class Pipeline:
    """The part that a worker of the `line` has of a job's model: every so many `stages`. Schedules are of a `kind`.

    It is made in two steps, between which others may cut what is here; `leave` is the second one. `inner` workers have
    the same place in their lines.
    """

    def __init__(self, job: ParallelJob, line: Group, stages: StagePartition, kind: str, inner: int) -> None:
        self.job, self.line, self.stages, self.kind, self._inner = job, line, stages, kind, inner
        self.own = range(line.rank, stages.count, line.size)
        self.last = stages.count - 1
        self._streams, self._model = RngState(job.device), type(job.model).__name__
        homes, keys = stages.homes(job.model), dict[int, Key]()
        named = list(job.model.named_parameters(remove_duplicate=False))
        self._homes = {name: homes[id(param)] for name, param in named}
        self._keys = {name: keys.setdefault(id(param), (PARAM, len(keys), 0)) for name, param in named}
        self.absent = {name for name, stages in self._homes.items() if not {*stages} & {*self.own}}
        self._held: dict[Key, nn.Parameter] = {}  # by key, what is here
        self._absent: dict[Key, _Absent] = {}  # and what is not
        self._slots: list[tuple[int, nn.Module, str, nn.Parameter]] = []  # stand-ins, and whose the parameter is
        self._stand_ins: dict[int, Key] = {}
        # Parameters outside of blocks that this worker has nothing of: the first stage, the identity, the name.
        self._outside: list[tuple[int, int, str]] = []
        self._ways: dict[_Kind, list[list[Key]]] = {}  # by kind of forward: what each stage sends on
        self._passage: StageForwardMode | None = None
        self._stage: int | None = None  # that a runner has said
        self._heard, self._want, self._surveys = StageInputs(), frozenset[Key](), False
        self._under: dict[int, _Under] = {}  # of each stage, what has passed last
        self._sent: list[Any] = []
        self.waited = 0.0  # seconds, for other stages
        self.sent = 0  # bytes
        self.assembles = False  # the whole model is here
        self._by_block = False  # but for the weights of blocks, which come one block at a time
        self._plain, job.forward = job.forward, self._inside
        job.loss = Judge(job.loss, self._computing)

    def __deepcopy__(self, memo: Any) -> Pipeline:
        what = f"{self._model} is cut in stages, and a copy would be of this worker's"
        raise UsageError(what, "export() writes it whole; leave pipeline= out to keep a copy, as an average is")

    @property
    def told(self) -> tuple[str, str]:
        """For people."""
        stages, names = self.stages, self.stages.blocks
        numbers = [name.rpartition(".")[2] for name in names]
        own = [[numbers[number] for number in stages.own(stage)] for stage in range(stages.count)]
        parts = ", ".join(some[0] if len(some) == 1 else f"{some[0]} to {some[-1]}" for some in own)
        what = f"{stages.count} stages have the blocks {parts} of {names[0].rpartition('.')[0] or self._model}"
        once = {self._keys[name]: name for name in reversed(self._homes) if len(self._homes[name]) > 1}
        held = f"; the first and the last hold {', '.join(once.values())}" if once else ""
        return what + held, "each has about the same arithmetic"

    # -- which parameters ---------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leaves to others what is theirs."""
        job, model = self.job, self.job.model
        inside = tuple(f"{block}." for block in self.stages.blocks)
        theirs: dict[int, tuple[nn.Parameter, ShardingSpec]] = {}
        for prefix, module in list(model.named_modules(remove_duplicate=False)):
            for key, param in list(module._parameters.items()):
                name = f"{prefix}.{key}".lstrip(".")
                if param is None:
                    continue
                known, homes = self._keys[name], self._homes[name]
                job.cuts[name] = cut = self._cut(job.cuts.get(name) or ShardingSpec.unsharded(param.shape), homes)
                if name not in self.absent:
                    self._held[known] = param
                    continue
                if not name.startswith(inside):
                    other = nn.Parameter(placeholder(param.shape, param.dtype, param.device), requires_grad=False)
                    vars(other).update(vars(param))
                    self._slots.append((homes[0], module, key, other))
                    self._stand_ins[id(other)] = known
                    self._outside.append((homes[0], id(param), name))
                if known not in self._absent:
                    self._absent[known] = _Absent(param, param.shape, part_of(param))
                theirs[id(param)] = param, cut
        for param, cut in theirs.values():  # after all names of all are known; whoever else holds one has it empty, too
            param.data = torch.empty((0, *cut.shape[1:]), dtype=param.dtype, device=param.device)
            mark(param, None)  # nothing can be gathered of it
        names = {id(param): name for name, param in reversed([*model.named_parameters(remove_duplicate=False)])}
        for param, cut in theirs.values():
            vars(param)[ABSENT] = names[id(param)], cut.shape
        job.redistributors.append(None)
        job.named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        modules = dict(model.named_modules())
        for number, name in enumerate(self.stages.blocks):
            modules[name].forward = partial(call_by_pieces, partial(self._block, number, name, modules[name].forward))
        model.forward = partial(call_by_pieces, partial(self._called, model.forward))
        refuse_state(model, f"{self._model}, which is cut in stages")
        self._cut_forward, job.forward = job.forward, self.forward
        self.shared = self._several()

    def _cut(self, cut: ShardingSpec, homes: Sequence[int]) -> ShardingSpec:
        """That of what stages have, of which others have nothing."""
        none = LocalShard((0, *cut.shape[1:]), ())
        workers = {stage % self.line.size for stage in homes}
        inside = [cut.pieces[place % len(cut.pieces)] for place in range(self._inner)]
        return ShardingSpec(
            cut.shape, tuple(p if at in workers else none for at in range(self.line.size) for p in inside)
        )

    def _several(self) -> dict[int, list[int]]:
        """The numbers of trainable parameters that several workers of the line have, and which."""
        found, ends, me = {}, self.job.ends, self.line.rank
        for number, (name, param) in enumerate(self.job.named.items()):
            workers = sorted({stage % self.line.size for stage in self._homes[name]})
            if len(workers) > 1:
                found[number] = workers
                times = len(workers) - 1 if me == workers[0] else int(me in workers)
                ends["pipeline"] = ends.get("pipeline", 0) + times * param.nbytes
        return found

    # -- forwards -----------------------------------------------------------------------------------------------------

    def _block(self, number: int, name: str, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self.assembles:
            with self._lent_block(number) if self._by_block else nullcontext():
                return forward(*given, **named)
        if self._passage is None:
            what = f"{name} is called by itself, and {self._model} is cut in stages"
            raise UsageError(what, "call the whole model, on all workers")
        return self._passage.block(number, name, forward, given, named)

    def _inside(self, model: nn.Module, batch: Any) -> Any:
        """The user's own forward, on the stage under way: its output, or what it has for the next ones."""
        if model is not self.job.model or self.assembles:
            return self._plain(model, batch)
        return self._passing(partial(self._plain, model, batch))

    def _passing(self, call: Callable[[], Any]) -> Any:
        stage = cast(int, self._stage)
        own, arrived = self.stages.own(stage), partial(self._streams.follow, self._heard.drawn)
        about = self._heard, self._stand_ins, self._want, arrived, self.job.device, self._surveys
        self._passage = passage = StageForwardMode(own, *about)
        passage.later = {identity: name for home, identity, name in self._outside if home > stage and self._surveys}
        slots = [(module, key, other) for home, module, key, other in self._slots if home < stage]
        self.job.passing = True
        try:
            with placed(slots), passage:
                output = call()
                if stage == self.last:
                    return passage.real(output)
        except StageBoundaryError:
            return tuple(passage.kept.values())
        finally:
            self._passage, self._passed, self.job.passing = None, passage, False
        what = f"the forward of {self._model} ended without a call of {self.stages.blocks[own.stop]}"
        raise UsageError(what, "let it call all blocks, one after another, or leave pipeline= out")

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """One micro-batch through the stage that a runner has said, or else through all that are here."""
        if model is not self.job.model:
            return self._plain(model, batch)
        if self.assembles:
            return self._cut_forward(model, batch)
        return self._forwards(self.survey(model, batch), partial(self._cut_forward, model, batch))

    def knows(self, model: nn.Module, batch: Any) -> bool:
        """Whether a forward of this kind has been surveyed."""
        return _kind("forward", model, batch) in self._ways

    def survey(self, model: nn.Module, batch: Any) -> _Kind:
        """Sees which values stages need of earlier ones, if this is the first forward of its kind: without anything
        around it that looks at values. Collective in the line then, hence not while a schedule is under way.
        """
        if (kind := _kind("forward", model, batch)) not in self._ways:
            self._survey(kind, partial(self._inside, model, batch))
        return kind

    def _forwards(self, kind: _Kind, call: Callable[[], Any]) -> Any:
        self.line.enter("the stages of a pipeline", check=False, kind="pipeline")
        output = ELSEWHERE
        for stage in [self._stage] if self._stage is not None else self.own:
            output = self._ahead(stage, self._ways[kind], call)
        return output

    @contextmanager
    def _computing(self) -> Iterator[None]:
        _under_way.append(self._model)
        try:
            yield
        finally:
            _under_way.pop()

    def _ahead(self, stage: int, sends: list[list[Key]], call: Callable[[], Any]) -> Any:
        before, self._stage = self._stage, stage
        mark = self._streams.mark() if stage < self.last else ()  # the last one tells nobody what was drawn
        comes, goes = sends[stage - 1] if stage else [], sends[stage]
        try:
            self._heard = heard = self._receive(stage, comes) if stage else StageInputs()
            self._want = frozenset(goes)
            with self._computing():
                output = call()
        finally:
            self._stage, self._want = before, frozenset()
        self._under[stage] = under = _Under([heard.values[key] for key in comes], [])
        if stage == self.last:
            return output
        made = dict(zip(self._passed.kept, self.job.gather_output(output), strict=True))
        for key in goes:
            places: tuple[Mapping[Key, torch.Tensor], ...] = (made, heard.values, self._held)
            found = next((values[key] for values in places if key in values), None)
            if found is None:
                raise UsageError(*ANOTHER_WAY)
            under.went.append(self.job.once(found) if isinstance(found, nn.Parameter) else found)
        self._send(stage, self._passed.forms, self._streams.moves(mark), under.went)
        return ELSEWHERE

    # -- what stages tell each other ----------------------------------------------------------------------------------

    def _send(self, stage: int, forms: list[Any], drawn: list[Any], values: Sequence[torch.Tensor]) -> None:
        kinds = [[str(v.dtype).removeprefix("torch."), list(v.shape), v.requires_grad] for v in values]
        head = json.dumps([forms, drawn, kinds]).encode()
        data = len(head).to_bytes(8, "little") + head
        first = torch.frombuffer(bytearray(data[:HEAD].ljust(HEAD)), dtype=torch.uint8)
        rest = [torch.frombuffer(bytearray(data[HEAD:]), dtype=torch.uint8)] if len(data) > HEAD else []
        self._to(stage + 1, [first, *rest, *(value.detach() for value in values)])

    def _to(self, stage: int, tensors: Sequence[torch.Tensor]) -> None:
        self._sent = [work for work in self._sent if work is not None and not work.is_completed()]
        while len(self._sent) > MOST:
            self.line.finish(self._sent.pop(0))
        self.sent += sum(tensor.nbytes for tensor in tensors)
        self._sent += [self.line.start_send(tensor.contiguous(), stage % self.line.size) for tensor in tensors]

    def _from(self, stage: int, tensor: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        self.line.receive(tensor, stage % self.line.size)
        self.waited += time.perf_counter() - began
        return tensor

    def _receive(self, stage: int, keys: list[Key]) -> StageInputs:
        first = bytes(self._from(stage - 1, torch.empty(HEAD, dtype=torch.uint8)).numpy())
        length = int.from_bytes(first[:8], "little")
        head = first[8 : 8 + length]
        if length > HEAD - 8:
            head += bytes(self._from(stage - 1, torch.empty(length - HEAD + 8, dtype=torch.uint8)).numpy())
        who = f"stage {stage - 1}"
        forms, drawn, kinds = decode_message(head, "values", who)
        if len(kinds) != len(keys):
            raise damaged("values", who, f"there are {len(kinds)}, and not {len(keys)}")
        values = {}
        for key, (dtype, shape, grad) in zip(keys, kinds, strict=True):
            made = torch.empty(shape, dtype=getattr(torch, dtype), device=self.job.device)
            values[key] = self._from(stage - 1, made).requires_grad_(grad)
        return StageInputs(forms, drawn, values)

    def finish(self) -> None:
        """Waits until all that was sent has been taken."""
        began = time.perf_counter()
        for work in self._sent:
            self.line.finish(work)
        self._sent.clear()
        self.waited += time.perf_counter() - began

    def _survey(self, kind: _Kind, call: Callable[[], Any]) -> None:
        """One forward on stand-ins, stage by stage, to see which values stages need of earlier ones."""
        self.line.enter("the stages of a pipeline", check=False, kind="pipeline")
        found: dict[int, list[Key]] = {}
        before, self._surveys, self._want = self._stage, True, frozenset()
        try:
            for stage in self.own:
                self._stage = stage
                self._heard = self._receive(stage, []) if stage else StageInputs()
                with without_a_trace(self.job.model, self._streams), torch.no_grad(), self._computing():
                    call()
                found[stage] = sorted(self._passed.needs)
                if stage < self.last:
                    self._send(stage, self._passed.forms, [], [])
        finally:
            self._surveys, self._stage = False, before
        self.finish()
        said = {int(stage): keys for mine in self.line.gather_json(found) for stage, keys in mine.items()}
        needs: list[set[Key]] = [{(a, b, c) for a, b, c in said[stage]} for stage in range(self.stages.count)]
        self._ways[kind] = [self._sends(stage, needs) for stage in range(self.stages.count)]

    def _sends(self, stage: int, needs: list[set[Key]]) -> list[Key]:
        """What later stages need of this one and those before it."""
        wanted = set[Key]().union(*needs[stage + 1 :])
        return sorted(key for key in wanted if self._source(key) <= stage)

    def _source(self, key: Key) -> int:
        blocks, which, _ = key
        if blocks == PARAM:
            return self._homes[next(name for name, known in self._keys.items() if known[1] == which)][0]
        return self.stages.of_block(blocks - 1) if blocks else 0

    # -- what a runner does -------------------------------------------------------------------------------------------

    def actions(self, micro_batches: int) -> Sequence[Action]:
        """Of this worker, in order."""
        return table(self.kind, self.line.size, self.stages.count // self.line.size, micro_batches)[self.line.rank]

    def at(self, stage: int | None) -> None:
        self._stage = stage

    def under(self, stage: int) -> _Under:
        """What has passed last through a stage."""
        return self._under.pop(stage)

    def back(self, stage: int, under: _Under, begin: Callable[[], None] | None) -> None:
        """The backward of what has passed: `begin` begins it on the last stage."""
        if begin is not None:
            begin()
        else:
            went = [value for value in under.went if value.requires_grad]
            grads = [self._from(stage + 1, torch.empty_like(v, memory_format=torch.contiguous_format)) for v in went]
            used = [(value, grad) for value, grad in zip(went, grads, strict=True) if not _is_none(grad)]
            if used:
                torch.autograd.backward([value for value, _ in used], [grad for _, grad in used])
        came = [value for value in under.came if value.requires_grad]
        if came:
            self._to(stage - 1, [_none_like(v) if v.grad is None else v.grad for v in came])

    def better(self, seconds: Mapping[int, float]) -> str:
        """For people: another cut, where stages take their workers unequally long, and why. Collective in the line."""
        line, names = self.line, self.line.names
        took = dict(sorted((int(at), some) for mine in line.gather_json(seconds) for at, some in mine.items()))
        found = self.stages.better([*took.values()], line.size) if len(took) == self.stages.count else None
        if found is None:
            return ""
        said, now, then = found
        each = ", ".join(f"{some:.2g} s on worker {names[at % line.size]}" for at, some in took.items())
        gain = f"so cut, the slowest worker would compute {then:.2g} instead of {now:.2g}"
        what = f'other stages suit these workers better: Trainer(..., pipeline_blocks="{said}")'
        return f"{what}: in a step the stages take {each}; {gain}"

    def add_up(self, number: int, parts: Sequence[torch.Tensor]) -> None:
        """The gradients of a parameter that several workers have."""
        workers, me = self.shared[number], self.line.rank
        if me not in workers:
            return
        for part in parts:
            if me != workers[0]:
                self._to(workers[0], [part.clone()])
                self._from(workers[0], part)
                continue
            for other in workers[1:]:
                part.add_(self._from(other, torch.empty_like(part)))
            for other in workers[1:]:
                self._to(other, [part.clone()])

    # -- the whole model ----------------------------------------------------------------------------------------------

    @property
    def judge(self) -> int:
        """The worker of the line that has the last stage."""
        return self.last % self.line.size

    def lacking(self) -> int:
        """Bytes of what other workers have of the model."""
        return sum(one.shape.numel() * one.param.element_size() for one in self._absent.values())

    def lacking_by_block(self) -> int:
        """The same where weights of blocks come one block at a time."""
        found = [sum(map(self._bytes, self._lacked_by(number))) for number in range(len(self.stages.blocks))]
        return sum(map(self._bytes, self._lacked)) - sum(found) + max(found)

    def _bytes(self, name: str) -> int:
        one = self._absent.get(self._keys[name])
        return 0 if one is None else one.shape.numel() * one.param.element_size()

    def trained(self) -> dict[str, nn.Parameter]:
        """The trainable parameters as they are in the model now, with the first of their names."""
        params = self.job.model.named_parameters()
        return {name: param for name, param in params if param.requires_grad}

    def source(self, name: str) -> int:
        """The first worker of the line that has a parameter."""
        return self._homes[name][0] % self.line.size

    @contextmanager
    def assembled(self) -> Iterator[None]:
        """Puts the whole model on the worker of the last stage for a while: the other workers send it their parameters.
        The parameters stay the same objects, so that lists of them in modules or closures hold the values as well.
        Collective in the line.
        """
        self.line.enter("the whole model, on one worker of a pipeline", check=False, kind="comparison")
        with self._lent(self._lacked), self._assembling():
            yield

    @contextmanager
    def assembled_by_block(self) -> Iterator[None]:
        """The same where the whole model does not fit: the weights of a block are there while it is called, and NaN
        otherwise, so that code which uses them elsewhere is noticed. One forward is computed on the worker of the last
        stage; the other workers send it each block in turn.
        """
        self.line.enter("the whole model, on one worker of a pipeline", check=False, kind="comparison")
        inside = {name for number in range(len(self.stages.blocks)) for name in self._lacked_by(number)}
        with self._lent([name for name in self._lacked if name not in inside]), self._assembling():
            if not self.assembles:
                for number in range(len(self.stages.blocks)):
                    with self._lent_block(number):
                        pass
                yield
                return
            absent = [self._absent[self._keys[name]] for name in inside]
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
        self.assembles = self.job.assembled = self.line.rank == self.judge
        try:
            yield
        finally:
            self.assembles = self.job.assembled = False

    @property
    def _lacked(self) -> list[str]:
        """The parameters that the worker of the last stage has not, each by the first of its names."""
        first = {known: name for name, known in reversed(self._keys.items())}
        line = self.line.size
        return [n for _, n in sorted(first.items()) if self.judge not in {stage % line for stage in self._homes[n]}]

    def _lacked_by(self, number: int) -> list[str]:
        """Those that are in one block, and in no module outside of blocks."""
        inside = tuple(f"{block}." for block in self.stages.blocks)
        outside = {known for name, known in self._keys.items() if not name.startswith(inside)}
        prefix = f"{self.stages.blocks[number]}."
        own = {self._keys[name] for name in self._keys if name.startswith(prefix)} - outside
        return [name for name in self._lacked if self._keys[name] in own]

    def _lent_block(self, number: int) -> AbstractContextManager[None]:
        return self._lent(self._lacked_by(number))

    @contextmanager
    def _lent(self, names: Sequence[str]) -> Iterator[None]:
        """Some of the parameters on the worker of the last stage for a while, sent by those that have them."""
        filled = list[tuple[_Absent, torch.Tensor]]()
        try:
            for name in names:
                known, home = self._keys[name], self.source(name)
                if self.line.rank == home:
                    self.line.send(self._held[known].detach().contiguous(), self.judge)
                elif self.line.rank == self.judge:
                    absent = self._absent[known]
                    value = torch.empty(absent.shape, dtype=absent.param.dtype, device=absent.param.device)
                    self.line.receive(value, home)
                    filled.append((absent, absent.param.data))
                    absent.param.data = value
                    mark(absent.param, absent.part)
            yield
        finally:
            for absent, empty in filled:
                absent.param.data = empty
                mark(absent.param, None)

    def abandon(self) -> None:
        """Nothing is under way any more."""
        self._sent.clear()
        self._under.clear()
        self._stage = None

    # -- what a script may do -----------------------------------------------------------------------------------------

    def _called(self, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """The model itself: by the user's forward, or by the script, when all of the line compute it together."""
        if self._passage is not None or self.assembles:
            return forward(*given, **named)
        if _under_way:  # not all workers of the line come to this
            what = (
                f"the forward or loss of {_under_way[-1]} calls {self._model}, which pipeline= cuts in stages as well"
            )
            raise UsageError(what, 'let the trainer of the one that is called keep it whole: plan="pipeline=1"')
        if torch.is_grad_enabled():
            what = f"{self._model} is cut in stages by pipeline=, and called outside of its own trainer's forward"
            cure = 'call it under torch.no_grad(), or let that other trainer\'s model whole: plan="pipeline=1"'
            raise UsageError(what, cure)
        self.line.enter(f"a call of {self._model}, which is cut in stages", kind="pipeline")
        refuse_other_input(self.line, (given, named), self._model, "pipeline= cuts it")
        call, mark = partial(self._passing, partial(forward, *given, **named)), self._streams.mark()
        if (kind := _kind("call", self.job.model, (given, named))) not in self._ways:
            self._survey(kind, call)
        output = self._forwards(kind, call)
        self.finish()
        return self._to_all(output, self._streams.moves(mark))

    def _to_all(self, output: Any, drawn: list[Any]) -> Any:
        """The last stage's output, on all workers of the line; its generators are everybody's."""
        source, here = self.last % self.line.size, output is not ELSEWHERE
        mine = dict(output) if isinstance(output, Mapping) else output
        said = [form_of(mine, f"a call of {self._model}"), drawn] if here else None
        form, drawn = self.line.gather_json(said)[source]
        self._streams.follow(drawn)
        made = mine if here else made_like(form, self.job.device)
        for tensor in tensors_in([made]):
            self.line.broadcast(tensor, source)
        return Attributes(made) if isinstance(made, dict) else made


def _none_like(value: torch.Tensor) -> torch.Tensor:
    """What is sent where autograd made no gradient: its first element has all bits set, a NaN that no arithmetic
    gives. The stage before then makes none either: optimizers move what has zeros, and leave alone what has none.
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
    """A mapping whose values are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
