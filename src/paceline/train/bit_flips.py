"""Flips single bits on purpose: of a weight, an activation, a gradient, a bucket, or a sum on its way."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.comm.checked_collectives import CODE, CONTRIBUTION, FIGURES, SUM, WEIGHTS
from paceline.comm.checked_reducer import CheckedReducer
from paceline.comm.fsdp_reduce_scatter import FsdpReduceScatter
from paceline.comm.gradient_buckets import Bucket, Buckets
from paceline.compute.microbatches import tensors_of
from paceline.compute.state_dict import local
from paceline.train.replica import Replica

Log = Callable[..., None]  # gets what was flipped: tensor=, element= and bit=
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_bit(tensor: torch.Tensor, chance: random.Random) -> dict[str, int]:
    """Flips a drawn bit of a drawn element of a tensor, unseen by autograd and by modes. Returns element and bit."""
    with torch._C.DisableTorchFunction():
        return _flip(tensor, chance)


def _flip(tensor: torch.Tensor, chance: random.Random) -> dict[str, int]:
    real = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
    element, width = chance.randrange(real.numel()), 8 * real.element_size()
    bit, at, rest = chance.randrange(width), real.storage_offset(), element
    for size, stride in zip(reversed(real.shape), reversed(real.stride()), strict=True):
        rest, index = divmod(rest, size)
        at += index * stride
    mask = 1 << bit if bit < width - 1 else -(1 << bit)
    real.as_strided((1,), (1,), at).view(_INTEGERS[real.element_size()]).bitwise_xor_(mask)
    return {"element": element, "bit": bit}


class BitFlips:
    """Flips bits in the memory of one trainer on this worker. A flip is drawn from a `chance` of its own."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def arm(self, kind: str, chance: random.Random, log: Log) -> None:
        """Flips a bit: of a weight at once, of anything else when it is next computed or sent. Then calls `log`.
        Without anything of the kind, it never does.
        """
        match kind:
            case "flip-weight":
                name = chance.choice(list(self._replica.job.named))
                tensor = local(dict(self._replica.job.model.named_parameters())[name])
                if tensor.numel():
                    log(tensor=name, **flip_bit(tensor, chance))
            case "flip-activation" | "flip-gradient":
                self._arm_module(kind == "flip-gradient", chance, log)
            case "flip-bucket":
                self._arm_bucket(chance.random() < 0.5, chance, log)
            case "flip-gather":
                self._arm_transit((WEIGHTS,), chance, log)
            case _:
                self._arm_transit((CONTRIBUTION, SUM, CODE), chance, log)

    def _arm_module(self, backward: bool, chance: random.Random, log: Log) -> None:
        """Waits for a drawn one of the next outputs of modules with parameters, or for its gradient."""
        model = self._replica.job.model
        owners = [*dict.fromkeys(name.rpartition(".")[0] for name in self._replica.job.named)]
        flip, waits = _OneFlip("", chance, log), [chance.randrange(len(owners))]

        def hook_gradient(grad: torch.Tensor) -> torch.Tensor:
            changed = grad.clone()
            flip(changed)
            return changed

        def hook_output(name: str, module: nn.Module, given: Any, output: Any) -> None:
            tensor = next((one for one in tensors_of(output) if one.is_floating_point() and one.numel()), None)
            if tensor is None or flip.done or (backward and not tensor.requires_grad):
                return
            waits[0] -= 1
            if waits[0] >= 0:
                return
            flip.name = f"{'the gradient of ' if backward else ''}the output of {name or 'the model'}"
            if backward:
                tensor.register_hook(hook_gradient)
            else:
                flip(local(tensor))

        for owner in owners:
            model.get_submodule(owner).register_forward_hook(partial(hook_output, owner))

    def _draw_bucket(self, chance: random.Random) -> Bucket | None:
        buckets = self._replica.grad_buffers.buckets
        return chance.choice(buckets) if buckets else None

    def _arm_bucket(self, late: bool, chance: random.Random, log: Log) -> None:
        """Waits until a drawn bucket is complete. With `late`, flips after its digests were taken, if there are any."""
        drawn, replica = self._draw_bucket(chance), self._replica
        if drawn is None:
            return
        flip, usual = _OneFlip("", chance, log), replica.send_bucket

        def flip_in(bucket: Bucket) -> None:
            if bucket.index == drawn.index and not flip.done:
                flip.name, wire = self._draw_wire(bucket, chance)
                flip(wire)

        def send(bucket: Bucket) -> None:
            flip_in(bucket)
            usual(bucket)

        if late and isinstance(replica.reducer, CheckedReducer):
            replica.reducer.tamper = flip_in
        else:
            replica.send_bucket = send

    def _draw_wire(self, bucket: Bucket, chance: random.Random) -> tuple[str, torch.Tensor]:
        buckets, names = self._replica.grad_buffers, list(self._replica.job.named)
        assert isinstance(buckets, Buckets)
        wires = [(names[number], wire) for number, parts in buckets.wires(bucket) for wire in parts if wire.numel()]
        name, wire = chance.choice(wires)
        return f"the gradient of {name}", wire

    def _arm_transit(self, kinds: Collection[str], chance: random.Random, log: Log) -> None:
        """Waits for a drawn one of the next transfers of these kinds, and flips what goes to another worker. In a step
        that is not verified, it flips a bucket before.
        """
        replica, reducer = self._replica, self._replica.reducer
        if not isinstance(reducer, CheckedReducer):
            if WEIGHTS not in kinds:
                self._arm_bucket(late=False, chance=chance, log=log)
            return
        # So many there are at least: each bucket is sent, and blocks in both computations.
        sink = replica.grad_sink
        count = 2 * len(sink.blocks) if isinstance(sink, FsdpReduceScatter) else len(replica.grad_buffers.buckets)
        flip, waits = _OneFlip("", chance, log), [chance.randrange(max(1, count))]

        def tamper(kind: str, tensors: str, part: torch.Tensor) -> None:
            if kind not in kinds or tensors == FIGURES or flip.done:
                return
            waits[0] -= 1
            if waits[0] < 0:
                flip.name = f"a message with {tensors}"
                flip(part)

        reducer.checks.tamper = tamper


class _OneFlip:
    """Flips one bit, once, and logs it."""

    def __init__(self, name: str, chance: random.Random, log: Log) -> None:
        self.name, self._chance, self._log, self.done = name, chance, log, False

    def __call__(self, tensor: torch.Tensor) -> None:
        if not self.done:
            self.done = True
            self._log(tensor=self.name, **flip_bit(tensor, self._chance))
