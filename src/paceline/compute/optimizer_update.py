"""The optimizer update: corrects gradients to the global count, clips, runs `optimizer.step()` and schedules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.base.batching import Agreed
from paceline.base.sharding import ShardingSpec
from paceline.comm.communicator import Group
from paceline.comm.gradient_sinks import GradBuffers
from paceline.compute.cpu_offload import CpuOffloadedParams
from paceline.compute.full_parameters import FullParameterCopies
from paceline.compute.int8_states import Int8States, states_of
from paceline.compute.job import StepOptions, TrainingJob
from paceline.compute.master_weights import MasterWeights
from paceline.compute.parameter_owners import OwnedParameters
from paceline.compute.sparse_grads import rows_of
from paceline.compute.state_dict import (
    held,
    in_pieces,
    load_optimizer,
    optimizer_state,
    refuse_odd_state,
    same_number,
)
from paceline.errors import UsageError


class OptimizerUpdate:
    """Applies the optimizers of a job to its summed gradients, which are in `grad_buffers`.

    `rows` are this worker's rows of the parameters, `params` the tensors that the optimizers hold: the rows, copies of
    the rows in host memory or in float32, full copies of all parameters, or full copies of the parameters that this
    worker owns.
    """

    def __init__(self, job: TrainingJob, grad_buffers: GradBuffers) -> None:
        self.job, self.grad_buffers = job, grad_buffers
        self.rows = list(job.local_params.values())
        self._copies: list[CpuOffloadedParams | FullParameterCopies | OwnedParameters] = []
        self._widened: MasterWeights | None = None
        self._int8_states: list[Int8States] = []
        if job.bf16_weights and job.trains:
            self._widened = self._widen()
        elif job.offload:
            self._offload(dict(zip(job.local_params, self.rows, strict=True)))
        self.params = list(job.local_params.values())
        # Whether the gradients are those of the last step; times `to_mean` they are its mean before clipping.
        self.has_gradients, self.to_mean = False, 1.0
        self._looks = True  # whether to check the optimizers' state after the next update
        frozen = [(name, param) for name, param in job.model.named_parameters() if not param.requires_grad]
        self.names = {id(param): name for name, param in [*frozen, *job.local_params.items()]}

    def use_full_parameters(self, replica: Group) -> None:
        """Gives optimizers full copies of the sharded parameters, for updates that depend on the norm of a
        parameter.
        """
        job, rows = self.job, self._gathered_rows()
        made = FullParameterCopies(rows, job.local_cuts, job.shard_index, replica, job.offload)
        self._copies, job.whole_copies = [made], True
        self._let_hold(made.copies)

    def assign_owners(self, names: Collection[str], replica: Group) -> None:
        """Gives each of these parameters an owner, which updates the full parameter; the others stay in shards."""
        job, rows = self.job, self._gathered_rows()
        shared = {name: rows[name] for name in rows if name in names}
        owned = OwnedParameters(shared, job.local_cuts, job.shard_index, replica, job.offload)
        self._copies, job.owned_cuts = [owned], owned.owned_cuts
        if job.offload and self._widened is None:
            self._offload({name: row for name, row in rows.items() if name not in names})
        self._let_hold(owned.held)

    def _offload(self, rows: Mapping[str, Parameter]) -> None:
        """Lets the optimizers hold copies of these rows in host memory."""
        offloaded = CpuOffloadedParams([*rows.values()])
        self._copies.append(offloaded)
        self.job.local_params = {**self.job.local_params, **dict(zip(rows, offloaded.copies, strict=True))}

    def _widen(self) -> MasterWeights:
        """Lets the optimizers hold float32 tensors for this worker's bfloat16 rows."""
        job, shards = self.job, None
        if (job.precision or "").endswith("stochastic"):
            unsharded = {name: ShardingSpec.unsharded(row.shape) for name, row in job.local_params.items()}
            cuts = {**unsharded, **job.local_cuts}
            shards = {name: (cuts[name].at(job.shard_index), cuts[name].shape) for name in job.local_params}
        widened = MasterWeights(dict(job.local_params), job.offload, shards, lambda: job.seed)
        job.local_params, job.masters = dict(widened.held), widened.masters
        return widened

    def _gathered_rows(self) -> dict[str, Parameter]:
        """Returns the tensors that full copies are gathered from, by parameter."""
        if self._widened is None:
            return dict(zip(self.job.local_params, self.rows, strict=True))
        if self.job.offload:
            what = "precision=bf16:pure with offload=cpu does not support optimizers that update full parameters yet"
            raise UsageError(what, "leave offload out, or use an optimizer that updates each element by itself (AdamW)")
        return dict(self._widened.held)

    def _let_hold(self, tensors: Mapping[str, Parameter]) -> None:
        self.job.local_params = {**self.job.local_params, **tensors}
        self.params = list(self.job.local_params.values())
        self.names |= {id(tensor): name for name, tensor in self.job.local_params.items()}

    def build(self, optimizers: list[Optimizer], schedulers: list[LRScheduler]) -> None:
        """Takes over the optimizers, which were made for this worker's `local_params`. Raises UsageError for other
        tensors.
        """
        held = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
        if foreign := sum(id(param) not in self.names for param in held):
            which = "is not a parameter" if foreign == 1 else "are not parameters"
            raise UsageError(
                f"{foreign} of the optimizer's {len(held)} tensors {which} of the model",
                "build it from the params passed to your function, and register a loss with parameters as a submodule",
            )
        self.job.optimizers, self.job.schedulers = optimizers, schedulers
        self._int8_states = states_of(self.job)

    def apply(self, agreed: Agreed, options: StepOptions, norm: float) -> None:
        """Updates the weights. `norm` is the norm of the mean gradient, for clipping. If the loss counted nothing in
        the global batch, the optimizers do nothing, but the schedule advances.
        """
        self.has_gradients = agreed.count > 0
        if agreed.count > 0:
            # The one division: gradients are sums/expected, and expected is right whenever the count did not change.
            mean = factor = options.expected / agreed.count
            if self.job.clip_norm is not None:
                factor *= min(1.0, self.job.clip_norm / (norm + 1e-6))
            if factor != 1.0 and self._widened is None:
                grads = [*self.grad_buffers.sums, *(rows_of(self.job.in_rows) if self.job.sparse else ())]
                if grads:
                    torch._foreach_mul_(grads, factor)
            self.to_mean = mean / factor if self._widened is None else mean
            for number in agreed.unused:
                self.rows[number].grad = None
            with ExitStack() as stack:
                if self._widened is not None:
                    stack.enter_context(self._widened.update(options.step, factor))
                for copies in self._copies:
                    stack.enter_context(copies.update())
                for optimizer in self.job.optimizers:
                    optimizer.step()
            if self._looks and not self._int8_states:  # which have scales beside codes
                self._looks = False
                for optimizer in self.job.optimizers:
                    refuse_odd_state(optimizer, self.names, self.job.optimizer_cuts)
        if self.grad_buffers.exact is not None:
            self.grad_buffers.exact.keep()
        self.follow_schedule(agreed)

    def follow_schedule(self, agreed: Agreed) -> None:
        """Advances the schedulers, except those that follow a reported value (see session/reported_values.py)."""
        for scheduler in self.job.schedulers:
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()

    # -- state --------------------------------------------------------------------------------------------------

    def memory(self) -> int:
        """Bytes of the optimizers' state on this worker."""
        return held(
            [tensor for one in self.job.optimizers for state in one.state.values() for tensor in state.values()]
        )

    def state(self) -> dict[str, Any]:
        """State of optimizers and schedulers for a checkpoint, by parameter name; shards are marked as such."""
        cuts, shard_index, exact = self.job.optimizer_cuts, self.job.shard_index, self.grad_buffers.exact
        with ExitStack() as stack:
            for states, one in zip(self._int8_states, self.job.optimizers, strict=False):
                stack.enter_context(states.in_float32(one))
            optimizers = [optimizer_state(one, self.names, cuts, shard_index) for one in self.job.optimizers]
        return {
            "optimizers": optimizers,
            "schedulers": [scheduler.state_dict() for scheduler in self.job.schedulers],
            "exact": {} if exact is None else dict(zip(self.job.named, exact.largest, strict=False)),
            "masters": in_pieces(self.job.masters, self.job.local_cuts, shard_index),
        }

    def load_masters(self, values: Mapping[str, Any]) -> None:
        """Sets the master copies of the weights to these values, full ones or this worker's shards of them; to the
        weights where there are none.
        """
        if self._widened is None:
            return
        cuts, shards = self.job.local_cuts, dict[str, torch.Tensor]()
        for name in self.job.masters:
            value, cut = values.get(name), cuts.get(name)
            if value is not None and value.dtype == torch.float32:
                is_full = cut is not None and tuple(value.shape) == cut.shape
                shards[name] = cut.at(self.job.shard_index).of(value) if cut is not None and is_full else value
        self._widened.load(shards)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned, from shards or full tensors. Raises UsageError if the optimizers differ."""
        self.has_gradients = False
        same_number("optimizers", len(state["optimizers"]), len(self.job.optimizers))
        same_number("schedulers", len(state["schedulers"]), len(self.job.schedulers))
        for optimizer, saved in zip(self.job.optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved, self.names, self.job.optimizer_cuts, self.job.shard_index)
        for states, one in zip(self._int8_states, self.job.optimizers, strict=False):
            states.quantize(one)
        for scheduler, saved in zip(self.job.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(dict(saved))
        if (exact := self.grad_buffers.exact) is not None:
            largest = state.get("exact") or {}
            exact.largest = [float(largest.get(name, 0.0)) for name in self.job.named]
