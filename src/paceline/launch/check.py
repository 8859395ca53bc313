"""`paceline check`: compares training on N workers with training on one."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.console import in_one_line, say
from paceline.base.exit_codes import INTERRUPTED, STOPPED
from paceline.base.text import plural
from paceline.errors import LaunchError, UsageError
from paceline.launch.fork_server import WarmProcessHolder
from paceline.launch.local import launch
from paceline.launch.options import LaunchOptions
from paceline.plan import Plan

FLOOR = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}
LIMIT = {"float64": 1e-9, "float32": 1e-3}  # beyond this it is not rounding
MARGIN = 10.0  # N workers may differ this many times more than another order of summation


def check(options: LaunchOptions, steps: int) -> int:
    """Prints three differences and a verdict; returns 0 if the training is the same, 1 if not.

    A difference is defined by `apart`. UsageError: the plan itself changes the result.
    """
    results, workers = [], options.workers
    if (plan := Plan.parse(options.plan or "")).in_windows:
        what = f"with {plan.several} the result depends on the speed of the workers, unlike with one worker"
        raise UsageError(what, f"check the script without {plan.several.partition('=')[0]}")
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder, WarmProcessHolder() as warm_holder:
        # In so few steps a lost worker must be visible; but servers need workers that may be started again.
        several = replace(options, max_restarts=int("server=" in (options.plan or "")), warm_holder=warm_holder)
        alone = replace(several, workers=1, plan=None)
        cases = (
            ("one worker", alone, False),
            ("one worker summing in another order", alone, True),
            (f"{workers} workers", several, False),
        )
        for number, (name, options, reverse) in enumerate(cases):
            say(f"{plural(steps, 'step')} with {name} ...")
            results.append(Case.run(Path(folder) / str(number), options, steps, reverse))
        return _verdict(results, workers, steps)


def rehearse(folder: Path, options: LaunchOptions, request: dict[str, Any], **environment: str) -> tuple[int, Any]:
    """Runs the script in a fresh folder. Returns its exit code and its answer to the request; None without an answer.
    SystemExit: the run was asked to stop.
    """
    folder.mkdir()
    environment["PACELINE_CHECK"] = json.dumps(request | {"out": str(folder / "out")})
    run_dir = str(folder / "run")
    environment = {**options.environment, **environment}
    code = launch(replace(options, run_dir=run_dir, temporary=True, quiet=True, environment=environment))
    if code in (INTERRUPTED, STOPPED):
        raise SystemExit(code)
    answer_file = folder / "out.json"
    return code, json.loads(answer_file.read_text()) if answer_file.exists() else None


@dataclass(frozen=True)
class Case:
    """A run of a few steps and the folder of its weights. `mixes`: a remark if the loss is not a sum over rows;
    `steps`: the number of steps that the team had made at the end.
    """

    folder: Path
    dtype: str
    mixes: str
    steps: int

    @staticmethod
    def run(folder: Path, options: LaunchOptions, steps: int, reverse: bool = False, **environment: str) -> Case:
        """Runs the script in a fresh folder. LaunchError: it fails, or ends before it has made its steps. SystemExit:
        it was asked to stop.
        """
        code, answer = rehearse(folder, options, {"steps": steps, "reverse": reverse}, **environment)
        if code or not answer:
            why = f"exit code {code}" if code else f"it ended before step {steps}"
            what = f"{in_one_line(options.script)} could not be checked with {plural(options.workers, 'worker')}: {why}"
            raise LaunchError(what, "see the output above, or use fewer --steps")
        return Case(folder / "run", **answer)

    def weights(self) -> dict[str, Any]:
        """The weights at the end of the run, by parameter name."""
        from safetensors.torch import load_file  # imports torch, which is slow

        return dict(load_file(self.folder.parent / "out.safetensors"))


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The norm of the difference over all weights together, relative to the norm of the weights."""
    difference = sum(float((a[name] - b[name]).square().sum()) for name in a)
    size = sum(float(a[name].square().sum()) for name in a)
    return float((difference / size) ** 0.5)


def _verdict(results: list[Case], workers: int, steps: int) -> int:
    tell = partial(say, out=sys.stdout)
    one, other, many = (result.weights() for result in results)
    rounding, difference, cross = apart(one, other), apart(one, many), apart(other, many)
    dtype = results[0].dtype
    limit = max(MARGIN * rounding, FLOOR.get(dtype, 1e-6))
    steady = rounding <= LIMIT.get(dtype, 1e-2)
    same = steady and difference <= limit
    tell(f"after {plural(steps, 'step')}, norm of the difference of all weights, relative to their norm:")
    tell(f"  {'one worker, and one worker summing in another order':52} {rounding:.1e}   (rounding error)")
    tell(f"  {f'one worker, and {workers} workers':52} {difference:.1e}")
    tell(f"  {f'one worker in another order, and {workers} workers':52} {cross:.1e}")
    mixes = results[0].mixes
    if same:
        tell(f"verdict: the same training on {workers} workers as on one" + (f", but {mixes}" if mixes else ""))
    elif not steady:
        tell("verdict: two runs with one worker already differ by more than rounding")
        tell(
            "  Look for values that do not depend on the seeds: random data made by the script, the time, a process id."
        )
    else:
        worst = sorted(one, key=lambda name: -float((one[name] - many[name]).norm()))[:3]
        tell(f"verdict: NOT the same training; largest differences: {', '.join(worst)}")
        tell("  Look for code that depends on the worker: rows from outside of the dataset, state in the forward.")
    if mixes and not same:
        tell(f"  Also, {mixes}")
    return 0 if same and not mixes else 1
