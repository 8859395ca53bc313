"""A training job (model, loss, optimizers, autocast), the options of a step, and the sums that it produces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.base.batching import Part
from paceline.base.sharding import ShardingSpec

if TYPE_CHECKING:
    from paceline.comm.communicator import Group
    from paceline.compute.model_flops import ModelSkeleton


ELSEWHERE = object()  # the result of a forward whose output is on another worker
LOSS_FORMS = "return a scalar (the mean over the rows it was given), (sum, count) or (sum, count, {name: (sum, count)})"


def default_forward(model: nn.Module, batch: Any) -> Any:
    """``model(batch)`` for a tensor, ``model(batch[0])`` for a tuple or list, ``model(**batch)`` for a mapping."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


class Judge:
    """A loss with a context around each call; `call` is the user's function. `compute` may replace the loss."""

    def __init__(
        self,
        loss: Callable[[Any, Any], Any],
        context: Callable[[], AbstractContextManager[Any]],
        compute: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.call = getattr(loss, "call", loss)
        self._loss, self._context = compute or loss, context

    def __call__(self, output: Any, batch: Any) -> Any:
        """Returns the loss of a micro-batch, or what else the script's function returns."""
        with self._context():
            return self._loss(output, batch)


@dataclass
class TrainingJob:
    """The user's model, loss and optimizers, and the device that they are on.

    `named` are the trainable parameters, `local_params` the tensors that this worker's optimizers hold for them: the
    parameters themselves or some of their rows, with `offload` as copies in host memory. The last `sparse` of them have
    sparse gradients. `cuts` has the sharding of the model's tensors by name, `local_cuts` that of the optimizers'
    tensors; this worker holds the shard number `shard_index` of its `replica`.
    """

    model: nn.Module
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Any]
    device: torch.device
    seed: int
    clip_norm: float | None = None
    over: Callable[[Any, Any], Any] | None = (
        None  # the loss over a global batch; `loss` is then each micro-batch's share
    )
    precision: str | None = None
    exact: bool = False
    offload: bool = False
    optimizer_states: str | None = None  # "int8" where optimizers keep them in 8 bits
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    named: dict[str, nn.Parameter] = field(default_factory=dict)
    sparse: int = 0
    local_params: dict[str, nn.Parameter] = field(default_factory=dict)
    cuts: dict[str, ShardingSpec] = field(default_factory=dict)
    local_cuts: dict[str, ShardingSpec] = field(default_factory=dict)
    masters: Mapping[str, nn.Parameter] = field(default_factory=dict)  # float32 copies of this worker's bfloat16 rows
    whole_copies: bool = False  # whether `local_params` are full copies of sharded parameters
    owned_cuts: dict[str, ShardingSpec] = field(default_factory=dict)  # of parameters that one worker updates in full
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of full parameters, under all of their names
    # Whether it is trained. Otherwise it is probed: it takes no memory for gradients, and nothing is compared.
    trains: bool = True
    assembled: bool = False  # whether this worker has the full model now, for a comparison with the stages
    passing: bool = False  # whether a forward runs through a pipeline stage now
    shard_index: int = 0
    unit: int = 1  # the number of workers that compute a micro-batch together
    each_shard: int = 1  # the number of workers that together have one of the shards of `shard=`
    inside: dict[str, int] = field(default_factory=dict)  # bytes that they exchange per micro-batch, by axis
    ends: dict[str, int] = field(default_factory=dict)  # bytes that they exchange at the end of a step, by axis
    replica: Group | None = None
    units: Group | None = None  # the workers with the same rank in their units
    skeleton: ModelSkeleton | None = None  # of the full model, until its operations are counted
    beside: Sequence[nn.Module] = ()  # the models of all trainers of the script, more as they are made
    gather_output: Callable[[Any], Any] = lambda output: output  # gathers a sharded output
    # Marks a weight that all workers of a unit use identically.
    once: Callable[[nn.Parameter], torch.Tensor] = lambda weight: weight
    # Sums the partial gradients of a micro-batch, by name, over the workers of a unit. Collective.
    add_up: Callable[[dict[str, torch.Tensor], Mapping[str, nn.Parameter]], None] = lambda gradients, named: None
    # The parameters that a forward has computed with, by name: `named` unless they are gathered from other workers.
    leaves: Callable[[], Mapping[str, nn.Parameter]] | None = None
    # The workers that make the same forwards and backwards, as they gather parameters or exchange tokens.
    lockstep: Group | None = None
    divided: frozenset[str] = frozenset()  # the parameters of experts, which expert= divides
    # Gathers the rows of a parameter that other workers hold. Collective where they run the model in lockstep.
    gather_param: Callable[[torch.Tensor], torch.Tensor] = lambda param: param
    # A context in which gradients are put into a dictionary by parameter name instead of being summed; None where they
    # stay in the parameters.
    capture: Callable[[dict[str, torch.Tensor]], AbstractContextManager[None]] | None = None
    # A context in which weights do not change, so that gathered parameters may be kept until its end.
    keeping: Callable[[], AbstractContextManager[None]] = nullcontext
    decisions: list[tuple[str, str]] = field(default_factory=list)  # of layouts: the decision and its reason
    news: dict[str, tuple[str, str]] = field(default_factory=dict)  # of a forward, as in `StepSums`

    def __post_init__(self) -> None:
        self.script_forward = self.forward  # as the script gave it; `forward` may be wrapped

    @property
    def optimizer_cuts(self) -> Mapping[str, ShardingSpec]:
        """The sharding of the optimizers' state by parameter; empty if optimizers hold full copies."""
        return {} if self.whole_copies else {**self.local_cuts, **self.owned_cuts}

    @property
    def in_shards(self) -> set[str]:
        """The names of parameters that this worker holds only in part, because tensor= splits their layers."""
        held = {name: cut.at(self.shard_index).elements for name, cut in self.cuts.items() if name not in self.divided}
        return {name for name, elements in held.items() if 0 < elements < math.prod(self.cuts[name].shape)}

    @property
    def divided_numbers(self) -> list[int]:
        """The positions in `named` of the parameters that expert= divides."""
        return [number for number, name in enumerate(self.named) if name in self.divided]

    @property
    def used_params(self) -> Mapping[str, nn.Parameter]:
        """The trainable parameters as the last forward has used them, by name: autograd's leaves."""
        return self.named if self.leaves is None else self.leaves()

    @property
    def dense(self) -> list[nn.Parameter]:
        """The parameters with dense gradients."""
        return [*self.named.values()][: len(self.named) - self.sparse]

    @property
    def in_rows(self) -> list[nn.Parameter]:
        """The parameters with sparse gradients."""
        return [*self.named.values()][len(self.named) - self.sparse :]

    @property
    def bf16_weights(self) -> bool:
        """Whether weights and gradients are in bfloat16, and optimizers hold float32 tensors."""
        return (self.precision or "").startswith("bf16:pure")

    @property
    def keeps_masters(self) -> bool:
        """Whether float32 copies of bfloat16 weights are kept between updates."""
        return self.bf16_weights and not (self.precision or "").endswith("stochastic")

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward and loss: autocast where the plan says `precision`."""
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, torch.float16 if self.precision == "fp16" else torch.bfloat16)


@dataclass
class StepOptions:
    """The settings of one step: its number, the count that scales its gradients, its size, and how it may be executed.

    `merge` is how many micro-batches a chunk may hold. `test_merging` tests whether micro-batches
    may be merged, `check_loss` tests the loss once even if they may not, `record_buffers` records BatchNorm's
    statistics per micro-batch, `reverse` reverses the order of summation. `hooked`: some worker has gradient hooks.
    `advice` is the advice to the user for micro-batches of a single row. `fault_point` is called at the
    moments of a step at which faults may be injected, if there are any. `transaction` counts the team's transactions.
    `noise_sample`: measure the squared norm of this worker's gradients, of "all" or of the "first" of several chunks.
    """

    step: int
    expected: float
    micro_batches: int
    rows: int = 0
    merge: int = 1
    test_merging: bool = False
    check_loss: bool = False
    record_buffers: bool = False
    reverse: bool = False
    hooked: bool = False
    advice: str = ""
    fault_point: Callable[[str], None] | None = None
    transaction: int = 0
    noise_sample: str = ""


@dataclass
class StepSums:
    """Sums over one worker's share of a step. Gradients stay in their buffers, as sums divided by `expected`.

    `no_merge`: micro-batches must run one by one, and `why`. `no_split`: they must not be divided among workers.
    `failed`: a merged or divided chunk failed, and the step is repeated without merging or dividing. `news` are
    messages to the user by kind: what, and why if it is a decision.

    `records` are the buffer changes of forwards, zero for those of other workers; `out_of_memory` says that the memory
    was too small for merged chunks. With `exact`, `parts` has (number, loss, count, metrics) of each
    micro-batch, and `sums_overflowed` says that a gradient was too large for its sum. `bad_samples` names the samples
    whose loss is not finite. `waited` are the seconds in which this worker waited for other stages. `sq_norms` is the
    squared norm of the gradients of some rows, and their count in the loss.
    """

    loss: float = 0.0
    count: float = 0.0
    computed: bool = False  # whether this worker computed a micro-batch that is not a dummy
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    unused: set[int] = field(default_factory=set)
    tested: bool = False
    no_merge: bool = False
    why: str = ""
    no_split: bool = False
    failed: bool = False
    news: dict[str, tuple[str, str]] = field(default_factory=dict)
    records: torch.Tensor | None = None
    out_of_memory: bool = False
    parts: list[Part] = field(default_factory=list)
    sums_overflowed: bool = False
    bad_samples: list[str] = field(default_factory=list)
    waited: float = 0.0
    sq_norms: tuple[float, float] = (0.0, 0.0)
