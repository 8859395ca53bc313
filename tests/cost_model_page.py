"""Fits the constants of tests/published/fitted.json, and writes the tables of docs/cost-model.md.

python tests/cost_model_page.py        # write the tables, with the constants as they are
python tests/cost_model_page.py --fit  # fit the constants first; takes a minute
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent / "support"))

from published import (
    FOLDER,
    Accuracy,
    Published,
    accuracy,
    by_one_utilisation,
    fit,
    korthikanti,
    mpt,
    nemo,
    vtrain,
    with_constants,
)

from paceline.planner.descriptions import MachineDescription

PAGE = Path(__file__).parents[1] / "docs" / "cost-model.md"
FITTED = FOLDER / "fitted.json"
LARGE = 0.25  # misses from that on are listed by name


@dataclass(eq=False)
class Table:
    """Published steps of one software on one kind of machines, of which every tenth is fitted, or none."""

    name: str
    rows: Sequence[Published]
    machine: MachineDescription  # before constants are fitted
    constants: str = ""  # the table whose constants are used, "" for those of the machine's description

    @property
    def fitted(self) -> Sequence[Published]:
        return self.rows[::10] if self.constants == self.name else []

    @property
    def predicted(self) -> Sequence[Published]:
        return [row for row in self.rows if row not in self.fitted]

    @cached_property
    def all_errors(self) -> dict[Published, float]:
        """By how much each row is off, as a part of its seconds."""
        machine = with_constants(self.machine, json.loads(FITTED.read_text()).get(self.constants, {}))
        return {row: row.error(machine) for row in self.rows}

    @property
    def errors(self) -> dict[Published, float]:
        """The same of the rows that are not fitted."""
        return {row: self.all_errors[row] for row in self.predicted}

    def choices(self, tried: int) -> list[float]:
        """How much slower than the best plan the best of the `tried` plans is that are predicted to be fastest.

        There is a choice where at least four plans were measured for a model, a number of GPUs and a global batch.
        """
        situations: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
        for row, error in self.all_errors.items():
            situation = situations.setdefault((row.model.name, row.workers, row.model.global_batch), [])
            situation.append((row.seconds * (1 + error), row.seconds))
        chosen = ([taken for _, taken in sorted(plans)] for plans in situations.values() if len(plans) >= 4)
        return [min(taken[:tried]) / min(taken) - 1 for taken in chosen]

    @property
    def accuracy(self) -> Accuracy:
        return accuracy([*self.errors.values()])

    @property
    def utilisation(self) -> Accuracy:
        """The accuracy of one utilisation for all rows, instead."""
        return by_one_utilisation(self.fitted or self.rows, self.predicted)


@cache
def tables() -> dict[str, Table]:
    """All tables by name."""
    # Eager code, in which messages are not hidden; constants that are fitted cannot begin at 0.
    a100_40, a100_80, h100 = (
        replace(MachineDescription.read(name), fixed=0.005) for name in ("a100-40", "a100-80", "h100")
    )
    blocking = replace(a100_80, exposed=0.9, layer_exposed=0.9)
    # Its configurations say 800 Gbit/s for a host, which all eight GPUs share.
    cluster = replace(blocking, links=(a100_80.links[0], replace(a100_80.links[1], bandwidth=80e9, shared_by=8)))
    megatron, one_host = "vTrain, 64 to 512 A100", "vTrain, one host of A100"
    rows = [
        Table(one_host, vtrain("one_node"), blocking, one_host),
        Table(megatron, vtrain("multi"), cluster, megatron),
        Table("Korthikanti et al., A100", korthikanti(), cluster, megatron),
        *(
            Table(name, mpt(gpu), machine, name)
            for gpu, machine in (("a100-40", a100_40), ("a100-80", a100_80), ("h100-80", h100))
            for name in [f"MPT under FSDP, {gpu.upper()}"]
        ),
        Table("NeMo 24.12, H100, FP8", nemo("NeMo"), MachineDescription.read("h100")),
        Table("Megatron-Bridge, H100, FP8", nemo("Megatron-Bridge"), MachineDescription.read("h100")),
    ]
    return {table.name: table for table in rows}


def accuracy_lines() -> list[str]:
    """The table of accuracy."""
    lines = ["| steps | fitted on | predicted | median | p90 | worst | one utilisation for all |", "|" + " --- |" * 7]
    for table in tables().values():
        fitted = str(len(table.fitted)) if table.fitted else "the row above" if table.constants else "none"
        figures = " | ".join(f"{figure:.1f} %" for figure in (*table.accuracy, table.utilisation.median))
        lines.append(f"| {table.name} | {fitted} | {len(table.predicted)} | {figures} |")
    return lines


def miss_lines() -> list[str]:
    """The predictions that miss by more than a quarter, by name."""
    lines = ["| steps | model and plan | measured | predicted | off by |", "| --- | --- | --- | --- | --- |"]
    for table in tables().values():
        for row, error in sorted(table.errors.items(), key=lambda pair: (pair[0].name, pair[0].seconds)):
            if abs(error) > LARGE:
                figures = f"{row.seconds:.3g} s | {row.seconds * (1 + error):.3g} s | {100 * error:+.0f} %"
                lines.append(f"| {table.name} | {row.name} | {figures} |")
    return lines


def choice_lines() -> list[str]:
    """How good the plans are that the predictions choose."""
    lines = ["| steps | choices | first within 5 % of the best | best of three | best of five |", "|" + " --- |" * 5]
    for table in tables().values():
        chosen = [table.choices(tried) for tried in (1, 3, 5)]
        if table.name.startswith("vTrain"):
            within = " | ".join(str(sum(slower <= 0.05 for slower in one)) for one in chosen)
            lines.append(f"| {table.name} | {len(chosen[0])} | {within} |")
    return lines


def page(text: str) -> str:
    """The page with its tables as the model predicts them now."""
    for name, lines in (("accuracy", accuracy_lines()), ("choices", choice_lines()), ("misses", miss_lines())):
        pattern = re.compile(rf"(?<=<!-- {name} -->\n\n).*?(?=\n\n<!-- end of {name} -->)", re.DOTALL)
        table = "\n".join(lines)
        text = pattern.sub(lambda _, table=table: table, text)
    return text


def refit() -> dict[str, dict[str, float]]:
    """The constants of each table that has some, fitted to every tenth of its rows."""
    own = [table for table in tables().values() if table.constants == table.name]
    return {table.name: fit(table.fitted, table.machine) for table in own}


def main() -> None:
    if "--fit" in sys.argv[1:]:
        rounded = {name: {k: float(f"{v:.4g}") for k, v in values.items()} for name, values in refit().items()}
        FITTED.write_text(json.dumps(rounded, indent=2) + "\n")
    if PAGE.exists():
        PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
