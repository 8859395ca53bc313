"""What a worker computed of a share of a step, as digests that other workers compare with their own."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paceline.comm.digests import checksum, combined, sketch
from paceline.comm.gradient_buckets import Bucket, Buckets
from paceline.compute.job import StepSums, TrainingJob
from paceline.compute.microbatches import MicroBatch, tensors_of

Content = Mapping[str, Any]  # of a record, as workers send it to each other
# Of workers whose processors differ, the parts of a gradient's norm by which it may differ. Rounding is smaller, but it
# may decide whether a unit is active.
_OF_FLOAT64, _OTHER = 1e-6, 0.25
_LEAST = 0.1  # of the norm of all gradients: what a small gradient is compared with
ROWS, FIGURES = "the rows", "the loss, a metric or a buffer"


class ShareRecord:
    """Digests of a share: of its rows, of the gradients of each parameter, and of loss, metrics and buffer changes.

    `take` gets each complete bucket, before it is sent. With `sketched`, sketches of the gradients come in addition,
    for workers that round otherwise. `failed` says that the share was not computed completely.
    """

    def __init__(self, job: TrainingJob, buckets: Buckets | None, sketched: bool) -> None:
        self._job, self._buckets, self._sketched = job, buckets, sketched
        self._digests: dict[str, int] = {}
        self._sketches: dict[str, list[float]] = {}
        self._names = list(job.named)
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
        sketches = {name: self._sketches[name] for name in digests if name in self._sketches}
        return {"kind": kind, "digest": self.digest, "digests": digests, "sketches": sketches}


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
    sketches = one["sketches"]
    norm = math.hypot(*(numbers[0] for name, numbers in sketches.items() if name != FIGURES))
    for name in dict.fromkeys([*sketches, *other["sketches"]]):
        numbers, others = sketches.get(name), other["sketches"].get(name)
        if numbers is None or others is None:  # only one of them has a gradient
            return str(name)
        sizes = numbers[0], others[0], 0.0 if name == FIGURES else _LEAST * norm
        scale = max(size for size in (0.0, *sizes) if math.isfinite(size))
        if any(not _near(a, b, tolerance * scale) for a, b in zip(numbers, others, strict=True)):
            return str(name)
    return ""


def _near(one: float, other: float, limit: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= limit


def tolerance_of(job: TrainingJob) -> float:
    """Returns the tolerance for a job's gradients between different processors."""
    exact = job.precision is None and all(param.dtype == torch.float64 for param in job.named.values())
    return _OF_FLOAT64 if exact else _OTHER


@cache
def processor() -> str:
    """Names the processor of this machine."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
