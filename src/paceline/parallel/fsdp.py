"""ZeRO 2 and 3 over torch's fully_shard."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor

from paceline.base.sharding import RowShards
from paceline.comm.checked_collectives import WEIGHTS, TransferChecks
from paceline.comm.communicator import Group
from paceline.comm.fsdp_reduce_scatter import FsdpReduceScatter
from paceline.comm.gradient_buckets import Buckets
from paceline.comm.torch_private import pytree
from paceline.compute.blocks import blocks_of, by_block, explain_gathering
from paceline.compute.state_dict import cut_in_rows, held, local, marked, marks_of
from paceline.errors import CollectiveMismatchError, UsageError
from paceline.parallel.deferred_init import DeferredInit, Slot, assign, strip
from paceline.parallel.layout import Layout
from paceline.parallel.parallel_job import GRADIENT_HOOK, ParallelJob
from paceline.parallel.pipeline.stage import refuse_under_way
from paceline.parallel.tensor_parallel.script_view import ABSENT, ROWS_GROUP, gather_rows, refuse_in_metric

Share = Callable[[list[torch.Tensor]], None]  # broadcasts the first worker's tensors, in place
# A parameter's number (None: it is frozen), the module that has it, its name there, and the attributes set on it.
_Param = tuple[int | None, nn.Module, str, Mapping[str, Any]]
_OUTSIDE = "the forward or the loss uses a sharded parameter outside of model(...)"
_USE_ZERO_2 = "if some micro-batches skip a layer, use zero=2, which gathers all parameters before each forward"
_WITHIN = "use the parameter inside model(...), where it is gathered, or use zero=2"
_TORCH_ERRORS = {  # by pattern of torch's message: what the error means, and what to do
    "mixed torch.Tensor and DTensor": (_OUTSIDE, _WITHIN),
    "setStorage.*storage of size 0": (
        "a backward needs parameters that were freed: the loss uses an intermediate value of a layer other than its "
        "output, or a second-order gradient (create_graph)",
        "use zero=2",
    ),
    "RegisterPostBackwardFunction.* modified inplace": (
        "a layer changes its input in place, which zero=2 and zero=3 do not allow",
        "let the layer return a new tensor (inplace=False), or use zero=1",
    ),
}


def read_full_numbers(mesh: DeviceMesh, unit: Group) -> None:
    """Makes numbers that a script reads of DTensors on this mesh (`float(p.norm())`) those of the full tensors.

    Torch's own `item()` silently returns this worker's part of a sum. Reading a number becomes collective.
    """
    vars(mesh)[ROWS_GROUP] = unit
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _read_number


def _read_number(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    tensor = args[0]
    assert isinstance(tensor, DTensor)
    unit = vars(tensor.device_mesh).get(ROWS_GROUP)
    if unit is None or all(placement.is_replicate() for placement in tensor.placements):
        return local(tensor).item()
    refuse_in_metric("zero=2 or zero=3")
    with unit.declared_torch_group("a number that the script reads from sharded weights", "shard"):
        return tensor.full_tensor().item()


class FullyShard(Layout):
    """ZeRO levels 2 and 3: between steps a worker of the replica holds only its rows of parameters and gradients.

    Torch's fully_shard gathers the parameters of a block before it is used and frees them after the backward, with
    `reshard` also after the forward. Its own reduction averages gradients and has no exact sums; hence gradients are
    taken by hooks on the full parameters and reduced by `FsdpReduceScatter`, which holds a few blocks' at a time.

    Fully_shard does not take parameters without dimensions. All workers hold these in full, and the first one updates
    them. It does not take parameters of other pipeline stages either.

    Where `tensor`, `pipeline` or `context` divide the model, this layout shards the part that a worker of a unit has,
    and `replica` are the workers with the same part. Modes that follow the forward of such a model do not see the
    gathering.
    """

    gathers = True

    def __init__(self, job: ParallelJob, replica: Group, reshard: bool, share: Share | None = None) -> None:
        super().__init__(job, replica.allocate)
        self.replica, self.groups = replica, (replica,)
        self.shards = RowShards(replica.size, replica.rank)
        absent = {name for name, param in job.model.named_parameters() if ABSENT in vars(param)}
        self._model_name = type(job.model).__name__
        self.blocks = {
            name: block
            for name, block in blocks_of(job.model).items()
            if any(f"{name}.{inner}" not in absent for inner, _ in block.named_parameters())
        }
        self._shapes = [param.shape for param in job.named.values()]
        groups = by_block((name for name in job.named if name not in absent), list(self.blocks))
        job.decisions.append(explain_gathering(job.model, self.blocks, rest=bool(groups[-1])))
        refuse_ungatherable(job.model, groups)
        marks = {name: marks_of(param) for name, param in job.model.named_parameters()}
        params, count = dict(job.model.named_parameters(remove_duplicate=False)), self.shards.count
        cuts = cut_in_rows(params, job.cuts, count, job.each_shard)
        scalars = {name: replace(cut, pieces=cut.pieces * count) for name, cut in job.cuts.items() if not cut.shape}
        job.cuts = {name: cut for name, cut in cuts.items() if cut.shape} | scalars
        job.local_cuts = {name: cuts[name] for name in job.named}
        self.replica.expose_to_torch()
        with self.replica.exposed():
            self.mesh = self._shard(reshard, share)
        self._gather_alike(reshard)
        job.keeping, job.end_forward = self._keeping, self._end_forward
        job.leaves, job.gather_param, job.capture = self._leaves, self._gather_param, self._capture
        self._forward = job.forward
        job.forward = _with_explained_errors(self._run_forward, reshard)
        job.loss = _with_explained_errors(job.loss, reshard)
        job.named = {name: param for name, param in job.model.named_parameters() if param.requires_grad}
        job.local_params = {name: marked(self._rows(param), marks[name]) for name, param in job.named.items()}
        for name, param in job.model.named_parameters():
            vars(param).update(marks[name])
        self._scalars = [param for param in job.named.values() if param.dim() == 0]
        self._numbers = numbers = {name: number for number, name in enumerate(job.named)}
        self._leaving_order = [
            [numbers[param_name] for param_name in reversed(names)] for names in [*groups[-2::-1], groups[-1]] if names
        ]
        self._hooked: dict[int, nn.Parameter] = {}
        self._owners = [_owner(job.model, name) for name, _ in job.model.named_parameters()]
        self._peak_gathered_bytes = self._measurements = 0
        self._params_of_modules: list[list[_Param]] = [
            [(numbers.get(name), *_owner(job.model, name), marks[name]) for name in names]
            for names in by_block((name for name in marks if name not in absent), list(self.blocks))
        ]
        for module, gathered in zip([*self.blocks.values(), job.model], self._params_of_modules, strict=True):
            module.register_forward_pre_hook(partial(self._before_call, gathered), with_kwargs=True)
            module.register_forward_hook(self._after_call)
        assert isinstance(job.model, FSDPModule)
        self._fsdp_state = job.model._get_fsdp_state()
        with self.replica.exposed():
            self._fsdp_state._lazy_init()  # else the first module that is called would become the root

    def _shard(self, reshard: bool, share: Share | None) -> DeviceMesh:
        """Replaces every parameter by this worker's rows. Returns the mesh."""
        job = self.job
        mesh = init_device_mesh(job.device.type, (self.replica.size,))
        read_full_numbers(mesh, self.replica)
        named = dict(job.model.named_parameters())
        other_tensors: list[Slot] = []
        if job.blueprint is not None:
            other_tensors = job.blueprint.other_tensors(job.model)
            assign(other_tensors, job.device)
            strip(job.model)
        # Torch warns of views changed in place. That matters only where parameters are freed after the forward.
        view_warning = f"{type(job.model).__name__}) returned a view" if reshard else ""
        warnings.filterwarnings("ignore", re.escape(f"FSDP2-wrapped module (FSDP{view_warning}"))
        ties: dict[nn.Parameter, nn.Parameter | None] = {}
        scalars = {param for param in job.model.parameters() if param.dim() == 0}
        ignored = scalars | {param for param in job.model.parameters() if ABSENT in vars(param)}
        for block in self.blocks.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, ignored_params=ignored)
        fully_shard(job.model, mesh=mesh, reshard_after_forward=None if reshard else False, ignored_params=ignored)
        if job.blueprint is not None:
            parameters = [(m, name, param) for m in job.model.modules() for name, param in m._parameters.items()]
            job.model.to_empty(device=job.device)
            for module, name, param in parameters:
                if param in scalars:  # to_empty() has untied it
                    module._parameters[name] = ties.setdefault(param, module._parameters[name])
            assign(other_tensors, job.device)
            self._fill(job.blueprint, named, share)
        return mesh

    def _gather_alike(self, reshard: bool) -> None:
        """Keeps workers whose micro-batches run different blocks from gathering different parameters.

        Without `reshard`, all blocks are gathered before a forward. With `reshard`, each block is gathered when it
        runs; workers compare the block's name, and meet at the end of each forward and backward, so a difference raises
        an error.
        """
        model = self.job.model
        for name, module in [*self.blocks.items(), ("the rest of the model", model)]:
            assert isinstance(module, FSDPModule)
            module.set_custom_all_gather(_Gather(self, name))
            type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
            self._end_hook = self._hide_gathering(module)
        self._reshard, self._compares_order = reshard, reshard and bool(self.blocks)
        self._keeps = False
        if self._compares_order:
            model.register_forward_hook(lambda *_: self._meet("the end of a forward"))
        if not reshard:
            model.register_forward_pre_hook(lambda *_: self._gather_all())

    def _hide_gathering(self, module: nn.Module) -> Callable[..., Any]:
        """Lets fully_shard's hooks of a module run unseen by modes, and not at all where a stage skips the module.

        Returns the hook that runs after the forward.
        """
        assert isinstance(module, FSDPModule)
        state, last = module._get_fsdp_state(), self._run_hook
        for hooks, first in ((module._forward_pre_hooks, 0), (module._forward_hooks, 1)):
            for number, hook in hooks.items():
                if getattr(hook, "__self__", None) is state:
                    hooks[number] = last = partial(self._run_hook, hook, first)
        return last

    def _run_hook(self, hook: Callable[..., Any], first: int, module: nn.Module, *given: Any) -> Any:
        """Runs a hook of fully_shard, and copies the attributes of the tensors that it takes to those it returns.

        It returns what it takes from the argument `first` on: before a forward, arguments and keywords; after it, the
        second of arguments and output.
        """
        if self.job.skips_block(module):
            return None
        if self.job.stages is None:
            refuse_under_way(self._model_name)
        with torch._C.DisableTorchFunction():
            made = hook(module, *given)
            before = pytree.tree_leaves(given[first:])
            for tensor, source in zip(pytree.tree_leaves(made), before, strict=False):
                if isinstance(tensor, torch.Tensor) and tensor is not source and isinstance(source, torch.Tensor):
                    vars(tensor).update(vars(source))
        return made

    def _end_forward(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Ends a forward that left the model by an exception after a pipeline stage's last block."""
        state = self._fsdp_state
        if state._state_ctx.iter_forward_root is not state:
            return values
        values = self._end_hook(self.job.model, (), values)
        if self._compares_order:
            self._meet("the end of a forward")
        return values

    def _run_forward(self, model: nn.Module, batch: Any) -> Any:
        if not self._reshard:  # also if the forward calls only submodules
            self._gather_all()
        return self._forward(model, batch)

    def _gather_all(self) -> None:
        with torch._C.DisableTorchFunction():
            for module in [*self.blocks.values(), self.job.model]:
                assert isinstance(module, FSDPModule)
                module.unshard()
            for params in self._params_of_modules:
                self._hook_gradients(params)

    def _meet(self, where: str) -> None:
        with torch._C.DisableTorchFunction():
            self.replica.finish(self._start_barrier(where))

    def _start_barrier(self, where: str) -> dist.Work:
        options = dist.BarrierOptions()
        options.asyncOp = True
        with self.replica.declared_torch_group(where, "all_gather") as group:
            return group.barrier(options)

    def _finish_backward(self) -> dist.Work | None:
        return self._start_barrier("the end of a backward") if self._compares_order else None

    def _fill(self, blueprint: DeferredInit, named: Mapping[str, nn.Parameter], share: Share | None) -> None:
        """Materialises one parameter after another and keeps this worker's rows."""
        for name, param in self.job.model.named_parameters():
            full = blueprint.value(named[name])
            if share is not None:
                share([full])
            local(param).copy_(self.shards.of(full, self.shards.me) if param.dim() else full)
        if share is not None:
            share(list(self.job.model.buffers()))

    def _rows(self, param: torch.Tensor) -> torch.Tensor:
        return local(param) if isinstance(param, DTensor) else self.shards.of(param.detach(), self.shards.me)

    def select_local_params(self) -> None:
        """Does nothing: the local parameters are known since the model was sharded."""

    def make_grad_sink(self) -> FsdpReduceScatter:
        """Returns the reduce-scatter that collects the gradients of the full parameters."""
        job = self.job
        local_params = [*job.local_params.values()]
        buckets = Buckets(local_params, exact=job.exact, hooks=False, divided=job.divided_numbers)
        self.staging = FsdpReduceScatter(
            buckets, self._shapes, self._leaving_order, self.replica, self._finish_backward, not self._compares_order
        )
        return self.staging

    def check(self, checks: TransferChecks | None) -> None:
        """Begins to record the digests of gathered parameters and of gradients, or with None ends it."""
        self.checks = self.staging.checks = checks

    def _before_call(self, params: Sequence[_Param], module: nn.Module, given: Any, named: Mapping[str, Any]) -> None:
        """Runs before a module's forward, when its parameters are gathered: hooks their gradients."""
        if self.job.skips_block(module):
            return
        with torch._C.DisableTorchFunction():
            self._measure_gathered()
            self._hook_gradients(params)
            number = next((number for number, *_ in params if number is not None), None)
            if number is None or not (self._compares_order and torch.is_grad_enabled()):
                return
            self.staging.call(number)
            inputs = [
                t for t in pytree.tree_iter((given, named)) if isinstance(t, torch.Tensor) and t.grad_fn is not None
            ]
            if inputs:  # else no hook can tell when the backward leaves the module
                register_multi_grad_hook(inputs, lambda _: self.staging.leave(number), mode="any")

    def _after_call(self, *_: Any) -> None:
        """Frees gathered parameters after a call by the script, without a backward: their values may change later."""
        inside = self._keeps or self._fsdp_state._state_ctx.iter_forward_root is not None
        if not inside and not torch.is_grad_enabled():
            self.rest()

    def _hook_gradients(self, params: Sequence[_Param]) -> None:
        """Puts hooks that take gradients on gathered parameters, once on each, and the parameters' attributes."""
        for number, owner, name, marks in params:
            param = owner._parameters[name]
            if param is None or isinstance(param, DTensor):
                continue
            vars(param).update(marks)
            if number is not None and param.requires_grad and self._hooked.get(number) is not param:
                if param.is_inference():
                    raise UsageError("the first call of the model is under inference_mode()", "use torch.no_grad()")
                self._hooked[number] = param
                if GRADIENT_HOOK in marks:
                    param.register_hook(marks[GRADIENT_HOOK])
                param.register_post_accumulate_grad_hook(partial(self._take_gradient, number))

    def _take_gradient(self, number: int, param: torch.Tensor) -> None:
        self._measure_gathered()
        self.staging.land(number, param)

    def _leaves(self) -> Mapping[str, nn.Parameter]:
        """Returns the gathered parameters by name. One that no forward has used is an empty stand-in."""
        unused = nn.Parameter(torch.empty(0, dtype=torch.float32))
        return {name: self._hooked.get(number, unused) for name, number in self._numbers.items()}

    def _gather_param(self, param: torch.Tensor) -> torch.Tensor:
        """Returns all rows of a parameter. Collective."""
        if not isinstance(param, DTensor):
            return param.detach()
        return gather_rows(param, "the full model, on one worker of the pipeline")

    @contextmanager
    def _capture(self, gradients: dict[str, torch.Tensor]) -> Iterator[None]:
        """Puts the gradients of full parameters into a dictionary by name; nothing is summed over the workers."""
        names = list(self._numbers)
        self.staging.captured = captured = dict[int, torch.Tensor]()
        try:
            yield
        finally:
            self.staging.captured = None
            gradients.update({names[number]: grad for number, grad in captured.items()})

    def _measure_gathered(self) -> None:
        """Measures the bytes of gathered parameters in the first step; later ones gather the same."""
        if self._measurements < 2 * len(self._owners):
            self._measurements += 1
            params = (owner._parameters[name] for owner, name in self._owners)
            gathered_bytes = held(param for param in params if not isinstance(param, DTensor))
            self._peak_gathered_bytes = max(self._peak_gathered_bytes, gathered_bytes)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Keeps parameters gathered as the plan says during a step, and explains torch's errors."""
        model = self.job.model
        self.replica.declare(name, check=False, kind="gradients")
        assert isinstance(model, FSDPModule)
        model.set_reshard_after_backward(self._reshard)  # else a second backward would gather again on some workers
        try:
            with self._keeping(), _explained_errors(self._compares_order):
                yield
        finally:
            model.set_reshard_after_backward(True)

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        self.rest()
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False
            self.rest()

    def rest(self) -> None:
        """Frees all gathered parameters."""
        assert isinstance(self.job.model, FSDPModule)
        self.job.model.reset_iter_state()

    def complete(self) -> None:
        """Broadcasts the parameters without dimensions, which the first worker updates. Collective."""
        if self._scalars:
            self.replica.declare("the updated weights", check=False, kind="weights")
        for scalar in self._scalars:
            self.replica.broadcast(scalar.detach().view(1))

    def gathered(self) -> int:
        """Returns the most bytes of gathered parameters held at a time."""
        return self._peak_gathered_bytes


@contextmanager
def _explained_errors(compares: bool) -> Iterator[None]:
    """Replaces torch's errors about sharded parameters by errors that say what to do."""
    try:
        yield
    except CollectiveMismatchError as error:
        if not compares or error.cure == _USE_ZERO_2:
            raise
        raise CollectiveMismatchError(error.what, _USE_ZERO_2) from error
    except RuntimeError as error:
        for pattern, (what, cure) in _TORCH_ERRORS.items():
            if re.search(pattern, str(error)):
                raise UsageError(what, cure) from error
        raise


def _with_explained_errors(call: Callable[[Any, Any], Any], compares: bool) -> Callable[[Any, Any], Any]:
    def explaining(first: Any, second: Any) -> Any:
        with _explained_errors(compares):
            result = call(first, second)
        head = result[0] if isinstance(result, tuple) and result else result
        if isinstance(head, DTensor):
            raise UsageError(_OUTSIDE, _WITHIN)
        return result

    return explaining


def refuse_ungatherable(model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Raises UsageError where gathering a block would lose hooks, strides, dtypes or references of a parameter."""
    named = dict(model.named_parameters())
    for name, param in named.items():
        what = None
        hooks = [hook for hook in (param._backward_hooks or {}).values() if hook is not vars(param).get(GRADIENT_HOOK)]
        if hooks or param._post_accumulate_grad_hooks:
            what = "has a hook, which would not be called on a shard"
        elif not param.is_contiguous():
            what = f"is not contiguous (strides {param.stride()}), but its shards would be"
        if what is not None:
            raise UsageError(f"the parameter {name} {what}", "use zero=1")
    for group in groups:
        kinds = {str(named[name].dtype).removeprefix("torch."): name for name in group if named[name].dim()}
        if len(kinds) > 1:
            (one, first), (other, second) = list(kinds.items())[:2]
            what = f"{first} has dtype {one}, but {second}, which is gathered together with it, has {other}"
            raise UsageError(what, "give them the same dtype, or use zero=1")
    identities = {id(param) for param in named.values()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and any(id(leaf) in identities for leaf in pytree.tree_iter(value)):
                what = f"the attribute {name} of {path or 'the model'} refers to parameters that sharding replaces"
                raise UsageError(what, "keep the parameters in an nn.ParameterList, or use zero=1")


class _Gather(AllGather):
    """Torch's own all-gather of a module's parameters, declared to the replica under a name that workers compare."""

    def __init__(self, layout: FullyShard, module: str) -> None:
        self.layout, self.module = layout, module

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates the output of an all-gather."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        layout, replica = self.layout, self.layout.replica
        with replica.declared_torch_group(f"the all-gather of {self.module}", "all_gather"):
            if layout.checks is None:
                work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group, async_op)
                return work
            sent = [input_tensor.view(-1)] * replica.size
            transfer = layout.checks.sends(replica, WEIGHTS, self.module, sent)
            dist.all_gather_single(output_tensor, input_tensor, group)
            layout.checks.receives(transfer, output_tensor.view(replica.size, -1))
            return None


def _refuse_copy(module: nn.Module, memo: Any) -> Any:
    what = f"{type(module).__name__.removeprefix('FSDP')} is sharded and cannot be copied"
    raise UsageError(what, "use zero=1")


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
