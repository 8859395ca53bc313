"""What watching itself costs a worker: the CPU seconds in what observes, beside those of the steps.

    python benchmarks/observing.py [--workers 2] [--rounds 3] [--record FILE]

A run of an MLP whose step takes about 20 ms on a worker of one thread, with all that is on unless it is said
otherwise: records of the journal, the account of the wall clock, marks of what a worker does (for hangs and stacks),
the flight recorder, digests that are compared (their sums over the wire are a part of the step's vector). Each
function and method of the modules that do so is clocked where it is entered from elsewhere, in any thread, less what a
function that does nothing takes so; a generator while it goes on. The first steps, in which much is looked at once, do
not count. Worker 0, which writes the journal, and the others.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ClassVar

from turns import record

MODULES = (
    "paceline.observe.",
    "paceline.base.flight_recorder",
    "paceline.base.heartbeat",
    "paceline.session.consistency",
)
WIDTH, ROWS, WARM, STEPS = 512, 216, 50, 1500


class Clock(threading.local):
    """CPU seconds of the calls that are not made by one another."""

    spent: ClassVar[Counter[str]] = Counter()  # of all threads
    calls: ClassVar[Counter[str]] = Counter()
    inside = False

    def clocked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{function.__module__}.{function.__qualname__}"
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def going(*args: Any, **named: Any) -> Iterator[Any]:
                generator = function(*args, **named)
                while True:
                    try:
                        found = self._timed(name, next, generator)
                    except StopIteration as end:
                        return end.value
                    yield found

            return going

        @functools.wraps(function)
        def called(*args: Any, **named: Any) -> Any:
            return self._timed(name, function, *args, **named)

        return called

    def _timed(self, name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.inside:
            return function(*args, **named)
        began, self.inside = time.thread_time(), True
        try:
            return function(*args, **named)
        finally:
            self.inside = False
            self.calls[name] += 1
            self.spent[name] += time.thread_time() - began  # type: ignore[assignment]


def clock_all(clock: Clock) -> None:
    """In place of each function of the modules that observe, under whatever name others have it."""
    ours = [module for name, module in sys.modules.items() if name.startswith(MODULES)]
    instead: dict[int, Any] = {}
    for module in ours:
        for owner in [module, *(kind for kind in vars(module).values() if isinstance(kind, type))]:
            if isinstance(owner, type) and owner.__module__ != module.__name__:
                continue
            for name, value in [*vars(owner).items()]:
                inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if not isinstance(inner, FunctionType) or inner.__module__ != module.__name__:
                    continue
                clocked = instead.setdefault(id(inner), clock.clocked(inner))
                if isinstance(owner, type):
                    kind = type(value)
                    setattr(owner, name, clocked if kind is FunctionType else kind(clocked))
    for module in [module for name, module in sys.modules.items() if name.startswith("paceline")]:
        for name, value in [*vars(module).items()] if isinstance(module, ModuleType) else ():
            if isinstance(value, FunctionType) and id(value) in instead:
                setattr(module, name, instead[id(value)])


def train(out: str) -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import paceline.session.run
    import paceline.trainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = Clock()
    clock_all(clock)
    nothing = clock.clocked(lambda: None)  # as cold as what is clocked
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    trainer = paceline.Trainer(
        lambda: nn.Sequential(*layers, nn.Linear(WIDTH, 10)),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        global_batch=ROWS * int(os.environ["PACELINE_WORLD_SIZE"]),
    )
    data = TensorDataset(torch.randn(1 << 13, WIDTH), torch.randint(10, (1 << 13,)))
    for report in trainer.steps(data, count=WARM + STEPS):
        nothing()
        if report.step == WARM:
            clock.spent.clear()
            clock.calls.clear()
            began, cpu = time.perf_counter(), time.process_time()
    name = f"{nothing.__module__}.{nothing.__qualname__}"
    alone = clock.spent.pop(name) / clock.calls.pop(name)
    seconds, own = time.perf_counter() - began, time.process_time() - cpu
    spent = {name: max(0.0, found - clock.calls[name] * alone) for name, found in clock.spent.items()}
    found = {"step": seconds / STEPS, "cpu": own / STEPS, "observing": sum(spent.values()) / STEPS}
    most = sorted(spent, key=lambda name: -spent[name])[:12]
    text = json.dumps({**found, "most": {name: [spent[name] / STEPS, clock.calls[name] / STEPS] for name in most}})
    Path(out, f"{os.environ['PACELINE_RANK']}.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    parser.add_argument("--script", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.script:
        train(options.script)
        return
    results: list[list[dict[str, Any]]] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "paceline", "run", "--workers", str(options.workers), "--run-dir"]
            command += [f"{folder}/run", "--cold-start", __file__, "--script", folder]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
            found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.workers)]
        results.append(found)
    for rank in range(options.workers):
        step, cpu, own = (
            statistics.median(one[rank][name] for one in results) for name in ("step", "cpu", "observing")
        )
        share = statistics.median(one[rank]["observing"] / one[rank]["cpu"] for one in results)
        about = f"a step of {step * 1e3:.1f} ms, {cpu * 1e3:.1f} ms of CPU"
        print(f"worker {rank}: {about}; watching {own * 1e6:.0f} us of that, {share:.2%}")
        for name, (seconds, calls) in results[-1][rank]["most"].items():
            print(f"    {seconds * 1e6:6.1f} us in {calls:5.1f} calls  {name.removeprefix('paceline.')}")
    if options.record:
        record(options.record, workers=options.workers, steps=STEPS, results=results)


if __name__ == "__main__":
    main()
