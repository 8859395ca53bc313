"""ZeRO 2 and 3 over torch's fully_shard."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from paceline.comm.communicator import Group
from paceline.comm.fsdp_reduce_scatter import FsdpReduceScatter
from paceline.comm.gradient_buckets import Buckets
from paceline.comm.torch_private import pytree
from paceline.compute.blocks import blocks_of, by_block, explain_gathering
from paceline.compute.state_dict import cut_in_rows, held, local, marked, marks_of
from paceline.errors import CollectiveMismatchError, UsageError
from paceline.parallel.deferred_init import DeferredInit, Slot, assign, strip
from paceline.parallel.layout import Layout
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.tensor_parallel.script_view import refuse_in_metric

Share = Callable[[list[torch.Tensor]], None]  # broadcasts the first worker's tensors, in place
_Param = tuple[int, nn.Module, str]  # a parameter's number, the module that has it, and its name there
_OUTSIDE = "the forward or the loss uses parameters of the model that are in pieces"
_SAY_2 = "say zero=2, which gathers all before a forward, if not every micro-batch runs every layer"
_WITHIN = "use them within model(...), where they are gathered, or say zero=2"
_TORCH_ERRORS = {  # by pattern of torch's message: what the error means, and what to do
    "mixed torch.Tensor and DTensor": (_OUTSIDE, _WITHIN),
    "setStorage.*storage of size 0": (
        "a backward needs parameters that were freed: a loss uses what is inside of a layer besides its output, or a "
        "gradient of a gradient (create_graph)",
        "say zero=2",
    ),
    "RegisterPostBackwardFunction.* modified inplace": (
        "a layer changes its input in place, which is not possible where its parameters are gathered",
        "let it make a new tensor (inplace=False), or say zero=1",
    ),
}


_UNIT = "_paceline_unit"  # attribute of a DeviceMesh: the group of the workers on it


def read_full_numbers(mesh: DeviceMesh, unit: Group) -> None:
    """Makes numbers that a script reads of DTensors on this mesh (`float(p.norm())`) those of the full tensors.

    Torch's own `item()` silently returns this worker's part of a sum. Reading a number becomes collective.
    """
    vars(mesh)[_UNIT] = unit
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _read_number


def _read_number(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    tensor = args[0]
    assert isinstance(tensor, DTensor)
    unit = vars(tensor.device_mesh).get(_UNIT)
    if unit is None or all(placement.is_replicate() for placement in tensor.placements):
        return local(tensor).item()
    refuse_in_metric("each worker has a part under zero=2 and zero=3")
    with unit.declared_torch_group(
        "a number that the script reads of weights, of which each worker has a part", "shard"
    ):
        return tensor.full_tensor().item()


class FullyShard(Layout):
    """ZeRO levels 2 and 3: between steps a worker of the replica holds only its rows of parameters and gradients.

    Torch's fully_shard gathers the parameters of a block before it is used and frees them after the backward, with
    `reshard` also after the forward. Its own reduction averages gradients and has no exact sums; hence gradients are
    taken by hooks on the full parameters and reduced by `FsdpReduceScatter`, which holds a few blocks' at a time.

    Fully_shard does not take parameters without dimensions. All workers hold these in full, and the first one updates
    them.
    """

    gathers = True

    def __init__(self, job: ParallelJob, replica: Group, reshard: bool, share: Share | None = None) -> None:
        super().__init__(job, replica.allocate)
        self.replica = replica
        self.shards = RowShards(replica.size, replica.rank)
        self.blocks = blocks_of(job.model)
        self._shapes = [param.shape for param in job.named.values()]
        groups = by_block(list(job.named), list(self.blocks))
        job.decisions.append(explain_gathering(job.model, self.blocks, rest=bool(groups[-1])))
        refuse_ungatherable(job.model, groups)
        marks = {name: marks_of(param) for name, param in job.model.named_parameters()}
        cuts = cut_in_rows(dict(job.model.named_parameters(remove_duplicate=False)), job.cuts, self.shards.count)
        job.cuts = {name: cut for name, cut in cuts.items() if cut.shape}
        job.local_cuts = {name: cuts[name] for name in job.named}
        self.replica.expose_to_torch()
        with self.replica.exposed():
            self.mesh = self._shard(reshard, share)
        self._gather_alike(reshard)
        job.keeping = self._keeping
        self._forward = job.forward
        job.forward = _with_explained_errors(self._run_forward, reshard)
        job.loss = _with_explained_errors(job.loss, reshard)
        job.named = {name: param for name, param in job.model.named_parameters() if param.requires_grad}
        job.local_params = {name: marked(self._rows(param), marks[name]) for name, param in job.named.items()}
        for name, param in job.model.named_parameters():
            vars(param).update(marks[name])
        self._scalars = [param for param in job.named.values() if param.dim() == 0]
        numbers = {name: number for number, name in enumerate(job.named)}
        self._leaving_order = [
            [numbers[param_name] for param_name in reversed(names)] for names in [*groups[-2::-1], groups[-1]] if names
        ]
        self._hooked: dict[int, nn.Parameter] = {}
        self._owners = [_owner(job.model, name) for name, _ in job.model.named_parameters()]
        self._peak_gathered_bytes = self._measurements = 0
        self._params_of_modules = [
            [(numbers[param_name], *_owner(job.model, param_name)) for param_name in names] for names in groups
        ]
        for module, params in zip([*self.blocks.values(), job.model], self._params_of_modules, strict=True):
            module.register_forward_pre_hook(partial(self._before_call, params), with_kwargs=True)
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
        for block in self.blocks.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, ignored_params=scalars)
        fully_shard(job.model, mesh=mesh, reshard_after_forward=None if reshard else False, ignored_params=scalars)
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

        Without `reshard` all blocks are gathered before a forward. With it each block is gathered as it is run; workers
        compare the block's name, and at the end of a forward and of a backward whether all have come as far, so that a
        difference raises an error.
        """
        model = self.job.model
        for name, module in [*self.blocks.items(), ("the rest of the model", model)]:
            assert isinstance(module, FSDPModule)
            module.set_custom_all_gather(_Gather(self.replica, f"the gathering of {name}"))
            type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
        self._reshard, self._compares_order = reshard, reshard and bool(self.blocks)
        self._keeps = False
        if self._compares_order:
            model.register_forward_hook(lambda *_: self.replica.finish(self._start_barrier("the end of a forward")))
        if not reshard:
            model.register_forward_pre_hook(lambda *_: self._gather_all())

    def _run_forward(self, model: nn.Module, batch: Any) -> Any:
        if not self._reshard:  # also if the forward calls only submodules
            self._gather_all()
        return self._forward(model, batch)

    def _gather_all(self) -> None:
        for module in [*self.blocks.values(), self.job.model]:
            assert isinstance(module, FSDPModule)
            module.unshard()
        for params in self._params_of_modules:
            self._hook_gradients(params)

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
        buckets = Buckets([*self.job.local_params.values()], exact=self.job.exact, hooks=False)
        self.staging = FsdpReduceScatter(
            buckets, self._shapes, self._leaving_order, self.replica, self._finish_backward, not self._compares_order
        )
        return self.staging

    def _before_call(self, params: Sequence[_Param], module: nn.Module, given: Any, named: Mapping[str, Any]) -> None:
        """Runs before a module's forward, when its parameters are gathered: hooks their gradients."""
        self._measure_gathered()
        self._hook_gradients(params)
        if self._compares_order and params and torch.is_grad_enabled():
            number = params[0][0]
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
        """Puts hooks on gathered parameters that take their gradients, once on each."""
        for number, owner, name in params:
            param = owner._parameters[name]
            if param is not None and param.requires_grad and self._hooked.get(number) is not param:
                if param.is_inference():
                    raise UsageError("the model is first called under inference_mode()", "begin with torch.no_grad()")
                self._hooked[number] = param
                param.register_post_accumulate_grad_hook(partial(self._take_gradient, number))

    def _take_gradient(self, number: int, param: torch.Tensor) -> None:
        self._measure_gathered()
        self.staging.land(number, param)

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
            self.replica.declare("the weights after an update", check=False, kind="weights")
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
        if not compares or error.cure == _SAY_2:
            raise
        raise CollectiveMismatchError(error.what, _SAY_2) from error
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
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            what = "has a hook, which would not be called"
        elif not param.is_contiguous():
            what = f"is not contiguous (strides {param.stride()}), which its rows would be"
        if what is not None:
            raise UsageError(f"{name} of the model {what}", "say zero=1")
    for group in groups:
        kinds = {str(named[name].dtype).removeprefix("torch."): name for name in group if named[name].dim()}
        if len(kinds) > 1:
            (one, first), (other, second) = list(kinds.items())[:2]
            what = f"{first} is of {one} and {second}, which is gathered with it, of {other}"
            raise UsageError(what, "say zero=1, or give them one dtype")
    identities = {id(param) for param in named.values()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and any(id(leaf) in identities for leaf in pytree.tree_iter(value)):
                what = f"{name} of {path or 'the model'} holds parameters besides, which would stay as they are now"
                raise UsageError(what, "say zero=1, or hold them in an nn.ParameterList")


class _Gather(AllGather):
    """Torch's own all-gather, declared to the replica under a name that workers compare."""

    def __init__(self, replica: Group, name: str) -> None:
        self.replica, self.name = replica, name

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates the output of an all-gather."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        with self.replica.declared_torch_group(self.name, "all_gather"):
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group, async_op)
            return work


def _refuse_copy(module: nn.Module, memo: Any) -> Any:
    raise UsageError(f"{type(module).__name__.removeprefix('FSDP')} is in pieces, which cannot be copied", "say zero=1")


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
