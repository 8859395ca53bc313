"""How far one has to read to follow a step: the calls of the package's functions that one micro-batch takes.

    python benchmarks/trace.py                        one worker
    python benchmarks/trace.py --workers 4            one, and the main thread of worker 0 of four
    python benchmarks/trace.py --workers 4 --calls    also every call, in order, indented by depth

What is counted: one turn of the loop over trainer.steps(), from its end to the end of the next one, of an MLP without
hooks, BatchNorm or draws. The global batch has one micro-batch for each worker (the plan says micro=), so a whole step
is one micro-batch on each, and nothing is merged, divided or left out. Rows are loaded in the worker, and shares stay
equal. The first 32 steps, in which much is observed, do not count. Of the next seven, in which nothing is compared, the
middle one by calls does: some write a record into the journal.

calls      a function of src/paceline is entered, or a generator of it goes on; not torch's, nor the standard library's.
           Comprehensions are a part of the function that they stand in
functions  different ones among them, nested ones and lambdas too
files      that they are in
switches   calls whose caller, the nearest one in the package, is in another file; the first is the loop's own
depth      the most functions of the package under way at once

Of several workers calls and switches also grow with each look at what others are waited for: compare the least of some.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

PACKAGE = f"{Path(paceline.__file__).parent}{os.sep}"
ROWS, WARM_UP, STEPS = 32, 32, 7  # rows of a micro-batch; steps
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # the first three are no frames since 3.12
Call = tuple[int, str, str]  # depth, file, function with its line


class Trace:
    """The calls of one turn, by the thread that enters it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._depth = 0

    def __enter__(self) -> Trace:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        inside = code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS
        if event not in ("call", "return") or not inside:
            return
        if event == "return":
            self._depth -= 1
            return
        self._depth += 1
        name = f"{code.co_qualname}:{code.co_firstlineno}"
        self.calls.append((self._depth, code.co_filename.removeprefix(PACKAGE), name))


def figures(calls: list[Call]) -> dict[str, int]:
    """What the head of this file says of them."""
    under_way: list[str] = []  # files
    switches = 0
    for depth, file, _ in calls:
        del under_way[depth - 1 :]
        switches += under_way[-1:] != [file]
        under_way.append(file)
    functions, files = {call[1:] for call in calls}, {file for _, file, _ in calls}
    found = {"calls": len(calls), "functions": len(functions), "files": len(files), "switches": switches}
    return {**found, "depth": max(depth for depth, _, _ in calls)}


def train(workers: int) -> list[Call]:
    """The calls of the step that counts."""
    rows = ROWS * workers
    chance = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(8 * rows, 64, generator=chance), torch.arange(8 * rows) % 8)
    trainer = paceline.Trainer(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        global_batch=rows,
        plan=f"micro={ROWS}",
    )
    stepping = trainer.steps(data, count=WARM_UP + STEPS, loader={"num_workers": 0})
    for _ in range(WARM_UP):
        next(stepping)
    found: list[list[Call]] = []
    for _ in range(STEPS):
        with Trace() as trace:
            next(stepping)
        found.append(trace.calls)
    for _ in stepping:
        pass
    return sorted(found, key=len)[STEPS // 2]


def launched(workers: int) -> list[Call]:
    """The same of worker 0 of several."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "calls.json"
        team = ["--workers", str(workers), "--shares", ",".join(["1"] * workers)]
        run = ["run", "--quiet", *team, "--run-dir", str(Path(folder) / "run"), "--save-every", "3600"]
        script = [__file__, "--worker", str(workers), str(out)]
        subprocess.run([sys.executable, "-m", "paceline", *run, *script], check=True)
        return [(depth, file, name) for depth, file, name in json.loads(out.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="how many, beside one")
    parser.add_argument("--calls", action="store_true", help="list them, too")
    options = parser.parse_args()
    for workers in sorted({1, options.workers}):
        calls = train(1) if workers == 1 else launched(workers)
        if options.calls:
            print("\n".join(f"{'  ' * (depth - 1)}{file} {name}" for depth, file, name in calls))
        told = ", ".join(f"{count} {what}" for what, count in figures(calls).items())
        print(f"{workers} worker{'s' if workers > 1 else ''}: {told}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        found = train(int(sys.argv[2]))
        if os.environ["PACELINE_RANK"] == "0":
            Path(sys.argv[3]).write_text(json.dumps(found))
    else:
        main()
