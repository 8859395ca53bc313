"""What a worker computed of a share of a step, as digests that other workers compare with their own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from paceline.comm.checked_collectives import FIGURES
from paceline.comm.digests import SIGNS, checksum, combined, sketch
from paceline.comm.gradient_buckets import Bucket, Buckets
from paceline.compute.forward_backward import Loss
from paceline.compute.job import StepSums, TrainingJob
from paceline.compute.microbatches import MicroBatch, tensors_of

Content = Mapping[str, Any]  # of a record, as workers send it to each other
# Of workers whose processors differ, the parts of a gradient's norm by which it may differ. Rounding is smaller, but it
# may decide whether a unit is active.
_OF_FLOAT64, _OTHER = 1e-6, 0.25
_LEAST = 0.1  # of the norm of all gradients: what a small gradient is compared with
# Units of rounding by which outputs, and so the gradients of a loss, may differ between workers. A sum of n products
# is off by about sqrt(n) units (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019), of
# float32 also with numbers of 16 bits. The results of exp, log, a difference and a product are rounded.
_SUMMED, _ROUNDED = math.sqrt(4096), 4.0
ROWS = "the rows"


class OutputGradients:
    """Measures the gradients of the forward's outputs: how much of the gradients of a share may be rounding.

    A loss computes the gradient of an output as a difference of numbers as large as the output or 1, times the weight
    of a row: y - target, or p - 1 in softmax with cross-entropy. Each rounding moves it by a unit in the last digit of
    these numbers, however small the difference is because the model is sure of the row (Higham, Accuracy and Stability
    of Numerical Algorithms, 2002, section 1.7). The gradients of the parameters follow linearly from it.
    """

    def __init__(self, precision: str | None) -> None:
        self._least = 0.0 if precision is None else _error(torch.float16 if precision == "fp16" else torch.bfloat16)
        self.error = 0.0  # by which rounding may change an output or its gradient, if they are about 1
        self._squares = self._numbers = 0.0  # sums of squares, in weights of a row

    def watch(self, output: Any, loss: Loss) -> None:
        """Watches the backward of an output with its loss."""
        root, rows = (loss.total, 1.0) if loss.mean is None else (loss.mean, float(loss.count))
        weight = [0.0]

        def hook_loss(grad: torch.Tensor) -> None:
            weight[0] = abs(float(grad)) / (rows or 1.0)

        def hook_output(numbers: float, error: float, grad: torch.Tensor) -> None:
            if weight[0]:  # else a dummy's
                self._squares += (_norm_of(grad) / weight[0]) ** 2
                self._numbers += numbers
                self.error = max(self.error, error, self._least)

        with torch._C.DisableTorchFunction():
            # Tiled logits are not a plain tensor: they have no gradient. A single number is a loss.
            plain = (one for one in tensors_of(output) if type(one) is torch.Tensor and one.dim())
            outputs = [one for one in plain if one.requires_grad]
            if root.requires_grad and outputs:
                root.register_hook(hook_loss)
                for one in outputs:
                    one.register_hook(partial(hook_output, one.numel() + _norm_of(one) ** 2, _error(one.dtype)))

    @property
    def part(self) -> float:
        """The part of the gradients that rounding may make up; 0 if it is not known."""
        known = self._squares > 0.0 and math.isfinite(self._squares)
        return self.error * math.sqrt(self._numbers / self._squares) if known else 0.0


def _error(dtype: torch.dtype) -> float:
    unit = torch.finfo(dtype).eps / 2
    return _SUMMED * min(unit, torch.finfo(torch.float32).eps / 2) + _ROUNDED * unit


def _norm_of(tensor: torch.Tensor) -> float:
    size = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    return float(torch.linalg.vector_norm(size, dtype=torch.promote_types(size.dtype, torch.float32)))


class ShareRecord:
    """Digests of a share: of its rows, of the gradients of each parameter, and of loss, metrics and buffer changes.

    `take` gets each complete bucket, before it is sent. With `sketched`, sketches of the gradients come in addition,
    for workers that round otherwise; then `outputs` is to watch the losses. `failed` says that the share was not
    computed completely.
    """

    def __init__(self, job: TrainingJob, buckets: Buckets | None, sketched: bool) -> None:
        self._job, self._buckets, self._sketched = job, buckets, sketched
        self._digests: dict[str, int] = {}
        self._sketches: dict[str, list[float]] = {}
        self._names = list(job.named)
        self.outputs = OutputGradients(job.precision)
        self.rows = self.figures = 0
        self.failed = False

    def take(self, bucket: Bucket) -> None:
        """Takes the gradients of a bucket."""
        assert self._buckets is not None
        for number, wires in self._buckets.wires(bucket):
            self._add(self._names[number], [wire for wire in wires if wire.numel()])

    def close(self, micro_batches: Sequence[MicroBatch], sums: StepSums) -> None:
        """Takes the rest: rows, sums, and gradients that are in no bucket. It comes before anything is summed."""
        job = self._job
        tensors = (tensor for one in micro_batches if not one.is_dummy for tensor in tensors_of(one.batch))
        self.rows = combined(checksum(tensor.detach().reshape(-1)) for tensor in tensors)
        if self._buckets is None:
            for name, param in zip(self._names, job.dense, strict=False):
                self._add(name, [] if param.grad is None else [param.grad.reshape(-1)])
        for name, param in zip(self._names[len(job.dense) :], job.in_rows, strict=True):
            self._add(name, [part.reshape(-1) for part in _parts(param)])
        text = json.dumps([sums.loss, sums.count, sorted(sums.metrics.items()), sorted(sums.unused)])
        figures = [checksum(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]
        figures += [] if sums.records is None else [checksum(sums.records)]
        exact = None if self._buckets is None else self._buckets.exact
        figures += [] if exact is None else [checksum(exact.maxima)]
        self.figures = combined(figures)
        if self._sketched:
            self._sketches[FIGURES] = [abs(sums.loss), sums.loss, sums.count]
        self.failed = sums.failed or sums.out_of_memory

    def _add(self, name: str, flats: Sequence[torch.Tensor]) -> None:
        self._digests[name] = combined(map(checksum, flats))
        if self._sketched:
            self._sketches[name] = sketch(flats)

    @property
    def digest(self) -> int:
        """One digest of everything."""
        return combined([self.rows, self.figures, *(self._digests.get(name, 0) for name in self._names)])

    def content(self, kind: str) -> Content:
        """Returns all digests by name, of parameters in their order; `kind` names what this worker computes with."""
        digests = {name: self._digests.get(name, 0) for name in self._names}
        digests = {ROWS: self.rows, **digests, FIGURES: self.figures}
        names = [*self._names, FIGURES] if self._sketched else []
        sketches = {name: self._sketches.get(name, [0.0] * (1 + SIGNS)) for name in names}
        rounding = [self.outputs.error, self.outputs.part]
        return {"kind": kind, "digest": self.digest, "digests": digests, "sketches": sketches, "rounding": rounding}


def _parts(param: torch.Tensor) -> list[torch.Tensor]:
    if param.grad is None:
        return []
    grad = param.grad.coalesce()
    return [grad.indices(), grad.values()]


def first_difference(one: Content, other: Content, tolerance: float) -> str:
    """Returns the name of the first tensor in which two records differ, in the order of the model; empty if none does.

    Bits are compared if both workers compute with the same kind of processor, and sketches otherwise.
    """
    if one["kind"] == other["kind"]:
        digests = other["digests"]
        return next((name for name, digest in one["digests"].items() if digest != digests.get(name)), "")
    norms = [norm for content in (one, other) if math.isfinite(norm := _norm(content))]
    least = _LEAST * min(norms, default=0.0)
    for name, numbers in one["sketches"].items():
        others = other["sketches"][name]
        scale = max(size for size in (0.0, numbers[0], others[0]) if math.isfinite(size))
        scale = scale if name == FIGURES else max(scale, least)
        # The smaller one of both: a wrong gradient may be large.
        roundings = [size for content in (one, other) if (size := _rounding(content, name, least)) > 0.0]
        limit = max(tolerance * scale, min(roundings, default=0.0))
        if any(not _near(a, b, limit) for a, b in zip(numbers, others, strict=True)):
            return str(name)
    return ""


def _norm(content: Content) -> float:
    """Returns the norm of all gradients of a record."""
    return math.hypot(*(numbers[0] for name, numbers in content["sketches"].items() if name != FIGURES))


def _rounding(content: Content, name: str, least: float) -> float:
    """Returns by how much rounding may change a gradient, at `least` of this norm, or the loss of a record; 0 if that
    is not known.
    """
    (error, part), numbers = content["rounding"], content["sketches"][name]
    rounding = error * abs(numbers[-1]) if name == FIGURES else part * max(numbers[0], least)
    return float(rounding) if math.isfinite(rounding) else 0.0


def _near(one: float, other: float, limit: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= limit


def tolerance_of(job: TrainingJob) -> float:
    """Returns the tolerance for a job's gradients between different processors."""
    exact = job.precision is None and all(param.dtype == torch.float64 for param in job.named.values())
    return _OF_FLOAT64 if exact else _OTHER
