"""Trains several cases under one plan, one after another in one run, and compares each with one process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import Case
from launching import SCRIPTS, paceline
from once import once
from oracle import Result, apart, train
from parity_models import shortened
from safetensors.torch import load_file

TOLERANCE = 1e-12


def result_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Result]) -> Result:
    """The result that `make` gives on one thread. It is made once for all tests that use the same `name`."""

    def save(folder: Path) -> None:
        torch.set_num_threads(1)
        torch.save(make(), folder / "result.pt")

    name += f", BLOCKS={os.environ['BLOCKS']}" if "BLOCKS" in os.environ else ""
    result = torch.load(once(factory, name, save) / "result.pt", weights_only=False)
    assert isinstance(result, Result)
    return result


def train_cases(
    folder: Path, plan: str, workers: int, names: Sequence[str], shares: str = "", short: bool = False
) -> None:
    """Trains cases that tests/scripts/contract.py knows by these names."""
    options = ["--workers", str(workers), "--run-dir", "run", "--max-restarts", "0"]
    options += ["--shares", shares] if shares else []
    words = [*(["short"] if short else []), *plan.split()]
    paceline("run", *options, SCRIPTS / "contract.py", "out", *names, *words, cwd=folder, timeout=800)


def check_cases(
    folder: Path, cases: Mapping[str, Case], names: Sequence[str], factory: pytest.TempPathFactory, short: bool = False
) -> None:
    """Asserts that the trained cases with these names are what plain PyTorch makes of them."""
    results = {}
    for name in names:
        case = shortened(cases[name]) if short else cases[name]
        results[name] = result_once(factory, f"oracle of {name} {short}", partial(train, case))
    check_figures(folder, results)


def check_figures(folder: Path, results: Mapping[str, Result]) -> None:
    """Asserts the weights, losses, norms and evaluations of one process, by the name of the case."""
    tensors, figures = load_file(folder / "out.safetensors"), json.loads((folder / "out.json").read_text())
    wrong = {}
    for model, result in results.items():
        names = [name for name in tensors if name.startswith(f"{model}/")]
        weights = {name.removeprefix(f"{model}/"): tensors[name] for name in names}
        distance = apart(weights, dict(result.weights))
        differing = [] if distance <= TOLERANCE else [f"weights are {distance} apart"]
        for kind in ("loss", "norm"):
            if figures[model][kind] != pytest.approx(result.figures[kind], rel=TOLERANCE):
                differing.append(f"{kind}: {figures[model][kind]} instead of {result.figures[kind]}")
        if figures[model]["evaluation"] != pytest.approx(result.evaluation, rel=TOLERANCE):
            differing.append("evaluation")
        wrong[model] = differing
        print(f"{folder.name}: {model}: weights are {distance:.2g} apart")
    assert {model: differing for model, differing in wrong.items() if differing} == {}
