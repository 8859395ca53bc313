"""Published steps (tests/published/*.csv): as plans, models and machines, predicted, and used to fit constants.

A fit changes a description of a machine by a few constants, each with a meaning. It minimises the logarithms of
predicted over measured seconds, of which large ones count in proportion (Huber), and what the constants differ from
those that the description began with, each relative to its `spread`: so few rows change what they know about.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from paceline.base.mesh import AXES
from paceline.plan import Plan
from paceline.planner.decoders import DecoderShape, decoder
from paceline.planner.descriptions import MachineDescription, ModelDescription
from paceline.planner.memory import WorkerMemory, worker_memory
from paceline.planner.step_time import StepTime, step_time

FOLDER = Path(__file__).parents[1] / "published"
MEGATRON = ("pipeline", "data", "shard", "expert", "context", "tensor")  # its mesh, outer to inner
# Out of line with their neighbours (see the README of the tables): predicted, but not fitted to.
ODD = ("tensor=8 micro=64", "tensor=16")
NOISE = 0.05  # of a measured step, relative: residuals beyond it count in proportion


def read(name: str) -> list[dict[str, str]]:
    """The rows of a table; lines with # say where they are from."""
    lines = (FOLDER / f"{name}.csv").read_text().splitlines()
    return [*csv.DictReader(line for line in lines if not line.startswith("#"))]


@cache
def _shapes() -> dict[str, dict[str, str]]:
    return {row["model"]: row for row in read("models")}


@dataclass(frozen=True, eq=False)
class Published:
    """A measured step: its plan, model and number of GPUs, and the seconds that it took."""

    plan: str
    model: ModelDescription
    workers: int
    seconds: float
    axes: Sequence[str] = AXES

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.workers} GPUs, {self.model.tokens} tokens, {self.plan}"

    @property
    def flops(self) -> float:
        """Operations of each GPU, recomputed ones included."""
        forward = sum(block.count * (block.matmul + block.attention) for block in self.model.blocks)
        return forward * (4 if "recompute" in self.plan else 3) * self.model.global_batch / self.workers

    def predict(self, machine: MachineDescription) -> StepTime:
        return step_time(Plan.parse(self.plan), self.model, machine, self.workers, self.axes)

    def error(self, machine: MachineDescription) -> float:
        """Predicted seconds as a part of the measured ones, less one."""
        return self.predict(machine).total / self.seconds - 1

    def memory(self, machine: MachineDescription) -> WorkerMemory:
        return worker_memory(Plan.parse(self.plan), self.model, machine, self.workers, self.axes)


def model_of(row: Mapping[str, str], fused: bool = True, dropout: bool = False, **facts: object) -> ModelDescription:
    """The description of the model in a row of a table."""
    shape = {key: int(value) for key, value in _shapes()[row["model"]].items() if key != "model"}
    shape["gated"] = bool(shape["gated"])
    decoder_shape = DecoderShape(**shape, tokens=int(row["tokens"]), fused=fused, dropout=dropout)
    return decoder(decoder_shape, int(row["global_batch"]), name=row["model"], **facts)


def by_tokens(row: Mapping[str, str]) -> float:
    """The seconds of a step, from tokens in a second on each GPU."""
    return int(row["global_batch"]) * int(row["tokens"]) / float(row["value"]) / int(row["gpus"])


def vtrain(table: str) -> list[Published]:
    """Steps of Megatron-LM, whose attention was not fused then."""
    return [
        Published(
            row["plan"],
            model_of(row, fused=False, dropout=True),
            int(row["gpus"]),
            float(row["value"]) / 1000,
            MEGATRON,
        )
        for row in read(f"vtrain_{table}")
    ]


def korthikanti() -> list[Published]:
    """Steps of Megatron-LM with full recomputation, or of attention alone with sequence parallelism."""
    steps = []
    for row in read("korthikanti"):
        model = model_of(row, fused=False, dropout=True, sequence_parallel=row["recomputation"] == "selective")
        steps.append(Published(row["plan"], model, int(row["gpus"]), float(row["value"]), MEGATRON))
    return steps


def mpt(gpu: str) -> list[Published]:
    """Steps of MPT under FSDP."""
    rows = [row for row in read("mpt_fsdp") if (row["gpu"], row["precision"]) == (gpu, "bf16")]
    return [Published(row["plan"], model_of(row), int(row["gpus"]), by_tokens(row)) for row in rows]


def nemo(stack: str) -> list[Published]:
    """Steps of NeMo and of Megatron-Bridge in FP8."""
    rows = [row for row in read("nemo_h100") if row["stack"].startswith(stack)]
    return [
        Published(
            row["plan"],
            model_of(row, precision="fp8", sequence_parallel=True),
            int(row["gpus"]),
            by_tokens(row),
            MEGATRON,
        )
        for row in rows
    ]


class Constant(NamedTuple):
    """A number in the description of a machine that is fitted."""

    name: str  # a field, or that of a link, with the level: "bandwidth 0"
    spread: float  # by which its logarithm may differ from the value that a fit begins with
    most: float = math.inf

    def of(self, machine: MachineDescription) -> float:
        name, _, level = self.name.partition(" ")
        return float(getattr(machine.links[int(level)] if level else machine, name))

    def change(self, machine: MachineDescription, value: float) -> MachineDescription:
        name, _, level = self.name.partition(" ")
        if not level:
            return replace(machine, **{name: value})
        links = [replace(link, **{name: value}) if str(n) == level else link for n, link in enumerate(machine.links)]
        return replace(machine, links=tuple(links))


CONSTANTS = (
    Constant("efficiency", 0.15, 1.0),
    Constant("half_width", 0.5),
    Constant("attention_rate", 1.0),
    Constant("launch", 0.5),
    Constant("memory_passes", 0.3),
    Constant("exposed", 1.0, 1.0),
    Constant("layer_exposed", 0.7, 1.0),
    Constant("fixed", 1.0),
    Constant("bandwidth 0", 0.3),
    Constant("bandwidth 1", 0.3),
    Constant("latency 0", 0.5),
)
LAUNCHES = (1.0, 5.0)  # times of the first value that fits begin with: below the floor that it makes, it has no slope


def with_constants(machine: MachineDescription, values: Mapping[str, float]) -> MachineDescription:
    """The machine with these values of its constants."""
    for constant in CONSTANTS:
        if constant.name in values:
            machine = constant.change(machine, values[constant.name])
    return machine


def fit(rows: Sequence[Published], machine: MachineDescription) -> dict[str, float]:
    """The constants with which the machine predicts these rows best."""
    rows = [row for row in rows if not any(odd in row.plan for odd in ODD)]
    start = np.log([constant.of(machine) for constant in CONSTANTS])
    at = [constant.name for constant in CONSTANTS].index("launch")
    fits = []
    for times in LAUNCHES:
        begin = start.copy()
        begin[at] += math.log(times)
        fits.append(_Fit(rows, machine, start).descend(begin))
    values = min(fits, key=lambda one: one[0])[1]
    return {constant.name: float(math.exp(value)) for constant, value in zip(CONSTANTS, values, strict=True)}


class _Fit:
    """Levenberg and Marquardt's method on the logarithms of constants."""

    def __init__(self, rows: Sequence[Published], machine: MachineDescription, start: np.ndarray) -> None:
        self._rows, self._machine, self._start = rows, machine, start
        self._weights = (NOISE / np.array([constant.spread for constant in CONSTANTS])) ** 2
        self._most = np.log([constant.most for constant in CONSTANTS])

    def descend(self, values: np.ndarray, steps: int = 15) -> tuple[float, np.ndarray]:
        """The loss and the logarithms of the constants where it is least, from these `values` on."""
        damping, residuals = 1e-2, self._residuals(values)
        loss = self._loss(residuals, values)
        for _ in range(steps):
            slopes = self._slopes(values, residuals)
            weighted = np.minimum(1.0, NOISE / np.maximum(np.abs(residuals), 1e-9))[:, None] * slopes
            normal = weighted.T @ slopes + np.diag(self._weights)
            downhill = weighted.T @ residuals + self._weights * (values - self._start)
            before = loss
            while damping < 1e3:
                move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
                then = np.minimum(values + np.clip(move, -0.7, 0.7), self._most)
                after = self._residuals(then)
                if self._loss(after, then) < loss:
                    values, residuals, loss = then, after, self._loss(after, then)
                    damping /= 4
                    break
                damping *= 4
            if before - loss < 1e-4 * before:
                break
        return loss, values

    def _residuals(self, values: np.ndarray) -> np.ndarray:
        names = (constant.name for constant in CONSTANTS)
        machine = with_constants(self._machine, dict(zip(names, np.exp(values).tolist(), strict=True)))
        return np.log([row.predict(machine).total / row.seconds for row in self._rows])

    def _slopes(self, values: np.ndarray, residuals: np.ndarray) -> np.ndarray:
        step = 0.03
        moved = [self._residuals(values + step * unit) for unit in np.eye(len(values))]
        return np.stack([(after - residuals) / step for after in moved], axis=1)

    def _loss(self, residuals: np.ndarray, values: np.ndarray) -> float:
        size = np.abs(residuals)
        huber = np.where(size < NOISE, size**2 / 2, NOISE * (size - NOISE / 2))
        return float(huber.sum() + (self._weights * (values - self._start) ** 2).sum() / 2)


class Accuracy(NamedTuple):
    """How far predictions are off, in percent of the measured seconds."""

    median: float
    p90: float
    worst: float


def accuracy(errors: Sequence[float]) -> Accuracy:
    sizes = sorted(100 * abs(error) for error in errors)
    return Accuracy(median(sizes), quantiles(sizes, n=10, method="inclusive")[-1], sizes[-1])


def by_one_utilisation(fitted: Sequence[Published], others: Sequence[Published]) -> Accuracy:
    """The accuracy of a part of the peak that is the same for all rows: the best one for the rows that are fitted."""
    rate = median(row.flops / row.seconds for row in fitted)
    return accuracy([row.flops / rate / row.seconds - 1 for row in others])
