"""Seconds that a worker computes a block: measured ones, or the roofline of the machine.

The roofline (Williams, Waterman, Patterson, "Roofline", 2009) has the arithmetic of matrix products and attention, each
at its own rate, the memory traffic of all other operations, and what it costs to launch operations. Products of narrow
matrices are slower: their rate is halved at a width of `half_width`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import log2

from msgspec.structs import replace

from paceline.planner.descriptions import BlockDescription, MachineDescription, ModelDescription
from paceline.planner.workload import Stage, Workload

BACKWARDS = 2.0  # times of a forward that a backward takes


class ComputeTime:
    """The seconds that a worker of a workload computes on a machine."""

    def __init__(self, workload: Workload, machine: MachineDescription) -> None:
        self._model, self._machine, self._workload = workload.model, machine, workload
        self._tensor, self._context = workload.mesh.tensor, workload.mesh.context
        self._precision = workload.precision
        # Attention is not computed in less than two bytes.
        self._attention_peak = peak_at(machine, "bf16" if workload.precision == "fp8" else workload.precision)

    def forward(self, blocks: Stage, rows: int) -> float:
        """Returns the seconds of a forward through `blocks` for a micro-batch of `rows` rows."""
        return sum(count * self._block(block, rows) for block, count in blocks)

    def rows_together(self) -> tuple[int, float]:
        """Returns how many rows are computed together, and how often that happens in a step.

        Where micro-batches may be merged, a worker measures how many of them at a time are fastest.
        """
        workload = self._workload
        micro, forwards = workload.micro, workload.forwards
        if not self._merges:
            return micro, forwards
        sizes = [micro]
        while sizes[-1] < micro * forwards:
            sizes.append(min(2 * sizes[-1], micro * forwards))
        blocks = tuple(pair for stage in workload.stages for pair in stage)
        best = min(sizes, key=lambda rows: self.forward(blocks, rows) / rows)
        return best, micro * forwards / best

    def most_together(self) -> int:
        """Returns how many rows are computed together at most: a worker also tries more of them than are fastest."""
        rows, _ = self.rows_together()
        return min(2 * rows, self._workload.micro * self._workload.forwards) if self._merges else rows

    @property
    def _merges(self) -> bool:
        """Whether micro-batches may be computed together."""
        return self._model.merges and not self._workload.plan.one_by_one

    def _block(self, block: BlockDescription, rows: int) -> float:
        if block.seconds:
            uneven = self._model.divided.get(f"{self._tensor} {self._context}", 1.0)
            return uneven * interpolated(block.seconds, rows) / (1 + BACKWARDS) / (self._tensor * self._context)
        machine, share = self._machine, rows / self._context
        peak = peak_at(machine, block.precision or self._precision)
        matmul = block.matmul * share / self._tensor / (peak * machine.efficiency * self._narrowness(share))
        attention = block.attention * share / self._tensor
        attention /= self._attention_peak * machine.efficiency * machine.attention_rate
        traffic = machine.memory_passes * self.saved(block, rows) / machine.memory_bandwidth
        weights = self._workload.parameters_of(block) * self._model.element_size / machine.memory_bandwidth
        return max(max(matmul, weights) + attention + traffic, block.operations * machine.launch)

    def _narrowness(self, share: float) -> float:
        """Returns the part of the rate of wide matrices that products for `share` rows reach."""
        tokens, width = share * self._model.tokens, self._model.width
        if not (width and tokens):
            return 1.0
        half = self._machine.half_width
        return 1.0 / (1.0 + half * self._tensor / width) / (1.0 + half / tokens)

    def saved(self, block: BlockDescription, rows: float) -> float:
        """Returns the bytes of activations of a block that a worker keeps for the backward of so many rows."""
        divided = block.saved - block.undivided
        undivided = block.undivided / (self._tensor if self._model.sequence_parallel else 1)
        scale = self._workload.activation_scale * rows / self._context
        return scale * (divided / self._tensor + undivided)


def calibrated(model: ModelDescription, row_seconds: Mapping[str, float]) -> ModelDescription:
    """Returns a description whose blocks together take the measured seconds of a row, by the rows that are computed
    together. Other numbers of rows are corrected as the nearest one that was measured. A probe, which computes a block
    forward and at once backward, has the block's weights in the cache.
    """
    blocks, times = [(block, block.count) for block in model.blocks], dict[int, float]()
    if not all(block.seconds for block, _ in blocks):
        return model
    for rows, seconds in row_seconds.items():
        probed = sum(count * interpolated(block.seconds, int(rows)) for block, count in blocks)
        times[int(rows)] = seconds * int(rows) / probed
    if not times:
        return model

    def corrected(rows: str, seconds: float) -> float:
        return seconds * times[min(times, key=lambda measured: abs(log2(measured / int(rows))))]

    made = [
        replace(block, seconds={rows: corrected(rows, seconds) for rows, seconds in block.seconds.items()})
        for block in model.blocks
    ]
    return replace(model, blocks=tuple(made))


def peak_at(machine: MachineDescription, precision: str) -> float:
    """Returns the FLOP/s of a machine in a precision; if unknown, those of the next higher one that is known."""
    finer = {"fp8": "bf16", "fp16": "bf16", "bf16": "fp32"}
    known = precision
    while known not in machine.peak and known in finer:
        known = finer[known]
    return machine.peak.get(known) or max(machine.peak.values())


def interpolated(seconds: dict[str, float], rows: int) -> float:
    """Returns the seconds for `rows` rows, from measured ones by number of rows: on the lines between these, and in
    proportion to the rows outside of them.
    """
    points = sorted((int(number), taken) for number, taken in seconds.items())
    at = bisect_left([number for number, _ in points], rows)
    if at in (0, len(points)) or points[at][0] == rows:
        number, taken = points[min(at, len(points) - 1)]
        return taken * rows / number
    (low, before), (high, after) = points[at - 1], points[at]
    return before + (after - before) * (rows - low) / (high - low)
