"""`DistributedOptimizer`: an optimizer whose gradients are reduced over the workers while backward runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch

from paceline.integrations.horovod.compression import Compression, Compressor
from paceline.integrations.horovod.context import CONTEXT, ProcessSet, global_process_set
from paceline.integrations.horovod.exceptions import HorovodArgumentError
from paceline.integrations.horovod.operations import (
    Adasum,
    Average,
    ReduceOp,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)

Group = tuple[torch.Tensor, ...]


def name_parameters(optimizer: torch.optim.Optimizer, named: Any) -> dict[torch.Tensor, str]:
    """The name of each of the optimizer's parameters. HorovodArgumentError: names are missing or not unique."""
    groups = optimizer.param_groups
    if named is None:
        return {
            one: f"parameter.{row}.{column}"
            for row, group in enumerate(groups)
            for column, one in enumerate(group["params"])
        }
    pairs = [*named]
    if not all(isinstance(one, tuple) and len(one) == 2 for one in pairs):
        raise HorovodArgumentError(
            "named_parameters= is not a sequence of (name, parameter)", "pass model.named_parameters()"
        )
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise HorovodArgumentError(
            f"named_parameters= has several parameters of the name {twice[0]!r}", "give each parameter its own name"
        )
    known = {one: name for name, one in pairs}
    missing = sum(one not in known for group in groups for one in group["params"])
    if missing:
        raise HorovodArgumentError(
            f"named_parameters= lacks {missing} of the optimizer's parameters", "pass all of model.named_parameters()"
        )
    return known


def group_parameters(parameters: Sequence[torch.Tensor], groups: Any) -> list[Group]:
    """Divides parameters into groups that are reduced at once. HorovodArgumentError: `groups` is malformed."""
    if isinstance(groups, int):
        if groups < 1:
            raise HorovodArgumentError(f"groups={groups} is not positive", "pass a number from 1 on, or None")
        size, more = divmod(len(parameters), groups)
        ends = [0]
        for number in range(groups):
            ends.append(ends[-1] + size + (number < more))
        return [tuple(parameters[first:last]) for first, last in pairwise(ends) if last > first]
    lists = [tuple(group) for group in groups]
    listed = [one for group in lists for one in group]
    if not all(isinstance(one, torch.Tensor) for one in listed):
        raise HorovodArgumentError("groups= has a value that is not a parameter", "pass a list of lists of parameters")
    if len({*map(id, listed)}) < len(listed):
        raise HorovodArgumentError("a parameter is in two of the groups=", "list each parameter once")
    used = {id(one) for one in parameters}
    made = [tuple(one for one in group if id(one) in used) for group in lists]
    alone = {*map(id, listed)}
    return [group for group in made if group] + [(one,) for one in parameters if id(one) not in alone]


class GradientReducer:
    """Reduces the gradients of an optimizer's parameters, each as soon as backward has accumulated it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], options: dict[str, Any]
    ) -> None:
        self.names, self.options = names, options
        self.passes: int = options["backward_passes_per_step"]
        self.parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        groups = options["groups"]
        made = [(one,) for one in self.parameters] if groups is None else group_parameters(self.parameters, groups)
        self.group_of: dict[torch.Tensor, Group] = {one: group for group in made for one in group}
        self.delays = dict.fromkeys(self.parameters, self.passes)
        self.started: dict[Group, tuple[Any, Any]] = {}  # by group: handle, and how to decompress each tensor
        self._hooks = [one.register_post_accumulate_grad_hook(self._accumulated) for one in self.parameters]

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to reduce."""
        included = self.options["process_set"].included()
        return bool(included) and len(CONTEXT.current.negotiation.sets[self.options["process_set"].process_set_id]) > 1

    def reset(self) -> None:
        """Forgets gradients that were accumulated."""
        self.started.clear()
        self.delays = dict.fromkeys(self.parameters, self.passes)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Starts the reduction of a group once all of its gradients are accumulated."""
        if not self.is_needed:
            return
        if self.delays[parameter] <= 0:
            raise AssertionError(
                f"the gradient of {self.names[parameter]} was computed more than backward_passes_per_step="
                f"{self.passes} times before step(); increase backward_passes_per_step"
            )
        self.delays[parameter] -= 1
        group = self.group_of[parameter]
        if not any(self.delays[one] for one in group):
            self.start(group)

    def start(self, group: Group) -> None:
        """Starts the reduction of a group's gradients. A missing gradient counts as zero."""
        for one in group:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        grads = [cast(torch.Tensor, one.grad) for one in group]
        op, options = self.options["op"], self.options
        factor = options["gradient_predivide_factor"]
        how = {"op": op, "process_set": options["process_set"]}
        if factor != 1.0:
            how |= {"prescale_factor": 1.0 / factor, "postscale_factor": factor}
        if any(grad.is_sparse for grad in grads) and not options["sparse_as_dense"]:
            if len(group) > 1:
                raise HorovodArgumentError(
                    f"the gradient of {self.names[group[0]]} or another one of its group is sparse",
                    "use sparse_as_dense=True, or no groups=",
                )
            name = f"sparse.{self.names[group[0]]}"
            self.started[group] = sparse_allreduce_async(grads[0], name, op, options["process_set"]), None
            return
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        packed = [options["compression"].compress(grad) for grad in dense]
        tensors, contexts = [one for one, _ in packed], [ctx for _, ctx in packed]
        name = self.names[group[0]]
        if len(group) > 1:
            handle = grouped_allreduce_async_(tensors, name=f"group.{name}", **how)
        else:
            handle = allreduce_async_(tensors[0], name=name, **how)
        self.started[group] = handle, contexts

    def finish(self) -> None:
        """Waits for all reductions, and writes the results into the gradients. Starts those that are missing."""
        if not self.is_needed:
            return
        for group in dict.fromkeys(self.group_of.values()):
            if group not in self.started:
                self.start(group)
        for group, (handle, contexts) in self.started.items():
            if callable(handle):
                cast(torch.Tensor, group[0].grad).zero_().add_(handle())
                continue
            result = synchronize(handle)
            outputs = result if len(group) > 1 else (result,)
            for one, output, ctx in zip(group, outputs, contexts, strict=True):
                reduced, grad = self.options["compression"].decompress(output, ctx), cast(torch.Tensor, one.grad)
                if grad.is_sparse:
                    grad.zero_().add_(reduced.to_sparse(grad.sparse_dim()))
                elif reduced is not grad:
                    grad.copy_(reduced)
        self.reset()


class DistributedMixin:
    """What `DistributedOptimizer` adds to an optimizer's class: `step` waits for the reduced gradients."""

    _reducer: GradientReducer
    _is_synchronized = False
    _synchronizes = True

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:  # scripts and tests written for Horovod read it
        return self._reducer.names

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes whose gradients are accumulated before they are reduced."""
        return self._reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes before each reduction."""
        self._reducer.passes = passes
        self._reducer.reset()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads a state, and forgets gradients that were not applied."""
        self._reducer.reset()
        self._is_synchronized, self._synchronizes = False, True
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def synchronize(self) -> None:
        """Waits for the reduced gradients, for example to clip them before `step`; see `skip_synchronize`."""
        self._reducer.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step` uses the gradients as they are, after `synchronize`."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the reduced gradients, and updates the parameters."""
        if self._synchronizes:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                    "gradients are reduced twice; use `with optimizer.skip_synchronize(): optimizer.step()`",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients. AssertionError: their reduction is under way."""
        if self._reducer.started:
            raise AssertionError(
                "optimizer.zero_grad() was called between loss.backward() and optimizer.step(), while the gradients "
                "are being reduced; call it after step()"
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]


class AdasumMixin:
    """What `DistributedOptimizer` with `op=Adasum` adds: the workers' updates, not their gradients, are combined."""

    _names: dict[torch.Tensor, str]
    _options: dict[str, Any]
    param_groups: list[dict[str, Any]]

    def synchronize(self) -> None:
        """Does nothing: the updates are combined in `step`."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refuses. AssertionError: always."""
        raise AssertionError("optimizer.skip_synchronize() is not possible with op=Adasum; call step() alone")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Computes this worker's update, and applies the Adasum of all updates."""
        parameters = [one for group in self.param_groups for one in group["params"] if one.requires_grad]
        before = [one.detach().clone() for one in parameters]
        for one in parameters:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        loss = super().step(closure)  # type: ignore[misc]
        compression, started = self._options["compression"], []
        with torch.no_grad():
            for one, start in zip(parameters, before, strict=True):
                packed, ctx = compression.compress(one - start)
                started.append((allreduce_async_(packed, name=f"adasum.{self._names[one]}", op=Adasum), ctx))
            for one, start, (handle, ctx) in zip(parameters, before, started, strict=True):
                one.copy_(start + compression.decompress(synchronize(handle), ctx))
        return loss


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes an optimizer that reduces gradients over the workers before each step, beginning during backward.

    Args:
        optimizer: The optimizer; the result has its class as a base, and shares its parameter groups and state.
        named_parameters: `model.named_parameters()`: the names under which gradients are reduced.
        compression: `Compression.none` or `Compression.fp16`.
        backward_passes_per_step: How many backward passes are accumulated before gradients are reduced.
        op: `Average`, `Sum`, `Min`, `Max`, `Product`, or `Adasum`, which combines the updates of the workers.
        gradient_predivide_factor: Splits the division of an average: gradients are divided by this factor before the
            sum, and multiplied by it over the number of workers afterwards.
        num_groups: Deprecated: an integer for `groups`.
        groups: A number of groups, or lists of parameters: the gradients of a group are reduced at once.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones.
        process_set: The workers whose gradients are reduced.

    Raises:
        HorovodArgumentError: Names are missing or not unique, or options do not fit together.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise HorovodArgumentError("gradient_predivide_factor= needs op=hvd.Average", "remove one of them")
    if backward_passes_per_step <= 0:
        raise HorovodArgumentError(
            f"backward_passes_per_step={backward_passes_per_step} is not positive", "pass a number from 1 on"
        )
    if num_groups:
        warnings.warn("num_groups= has been replaced by groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    options: dict[str, Any] = {
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": ReduceOp(op),
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    names = name_parameters(optimizer, named_parameters)
    is_adasum = op == Adasum and CONTEXT.current.size > 1
    if is_adasum and process_set is not global_process_set:
        raise HorovodArgumentError("op=Adasum needs the global process set", "remove process_set=")
    kind = type(optimizer)
    mixin = AdasumMixin if is_adasum else DistributedMixin
    made: Any = object.__new__(type(kind.__name__, (mixin, kind), {"__module__": kind.__module__}))
    # A scheduler that was made before has replaced `step` of the old object by a bound method.
    made.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    if is_adasum:
        made._names, made._options = names, options
    else:
        made._reducer = GradientReducer(optimizer, names, options)
    return made
