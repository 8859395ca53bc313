"""The way of tensors on a GPU that several workers share, tried with those of the CPU: plans give the same weights.

On a GPU itself tests/parity/test_cuda_plans.py tries it.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from launching import train_basics
from once import once
from safetensors.numpy import load_file

SCRIPT = """
from through_host import *
for number, plan in enumerate({plans!r}):
    carried.clear()
    trainer = make(plan=f"micro=4 {{plan}}".strip())
    for report in trainer.steps(data, epochs=3):
        pass
    trainer.export(f"{{number}}.safetensors")
    print(f"plan {{number}}: {{len(carried)}} carried")
"""
ISLANDS = "local=2 every=4", "local=2 every=4 fragments=2 delay=1"
SEVERAL = [
    (3, "", ""),
    *((2, word, "") for word in ("shard=2 zero=1", "shard=2 zero=2", "tensor=2", "pipeline=2")),
    (4, "shard=2 zero=3", ""),
    *((2, words, words) for words in ISLANDS),
]
Weights = list[dict[str, np.ndarray]]


def weights(folder: Path, workers: int, plans: list[str]) -> Weights:
    """What each plan exports; only several workers carry tensors through the host."""
    text = train_basics(folder, SCRIPT.format(plans=plans), workers, "--max-restarts", "0").stdout
    counts = re.findall(r"^plan \d: (\d+) carried$", text, re.M)
    assert [count != "0" for count in counts[: len(plans)]] == [workers > 1] * len(plans), text
    return [load_file(folder / f"{number}.safetensors") for number in range(len(plans))]


def check_equal(found: Weights, expected: Weights) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for key, value in mine.items():
            np.testing.assert_allclose(value, theirs[key], rtol=0, atol=1e-12, err_msg=key)


def of_one_worker(plans: list[str], factory: pytest.TempPathFactory) -> Weights:
    def make(folder: Path) -> None:
        weights(folder, 1, plans)

    folder = once(factory, f"one worker {plans}", make)
    return [load_file(folder / f"{number}.safetensors") for number in range(len(plans))]


@pytest.mark.slow
def test_gpu_tensors_through_the_host_give_the_weights_of_one_worker(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plans = ["", "shard=2 zero=3", "pipeline=2"]
    check_equal(weights(tmp_path, 4, plans), of_one_worker([""], tmp_path_factory) * len(plans))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "plan", "alone"), SEVERAL)
def test_gpu_tensors_through_the_host_under_other_plans(
    workers: int, plan: str, alone: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_equal(weights(tmp_path, workers, [plan]), of_one_worker([alone], tmp_path_factory))
