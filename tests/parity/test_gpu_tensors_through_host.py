"""The way of tensors on a GPU that several workers share, tried with those of the CPU: plans give the same weights.

On a GPU itself tests/parity/test_cuda_plans.py tries it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from launching import train_basics
from once import once
from safetensors.numpy import load_file

SCRIPT = """
from through_host import *
trainer = make()
for report in trainer.steps(data, epochs=5):
    pass
trainer.export("out.safetensors")
print(len(carried), "carried")
"""
ISLANDS = "local=2 every=4", "local=2 every=4 fragments=2 delay=1"
SEVERAL = [
    (3, "", ""),
    *((2, word, "") for word in ("shard=2 zero=1", "shard=2 zero=2", "tensor=2", "pipeline=2")),
    (4, "shard=2 zero=3", ""),
    *((2, words, words) for words in ISLANDS),
]
QUICK = "", "shard=2 zero=3", "pipeline=2"


@pytest.mark.parametrize(
    ("workers", "plan", "alone"),
    [pytest.param(*case, marks=[] if case[1] in QUICK else pytest.mark.slow) for case in SEVERAL],
)
def test_weights_are_those_of_one_worker(
    workers: int, plan: str, alone: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def train(folder: Path, count: int, words: str) -> None:
        said = train_basics(folder, SCRIPT, count, "--plan", f"micro=4 {words}").stdout
        assert ("\n0 carried" in f"\n{said}") == (count == 1), said

    one = once(tmp_path_factory, f"one worker {alone}", lambda folder: train(folder, 1, alone))
    train(tmp_path, workers, plan)
    expected = load_file(one / "out.safetensors")
    for key, value in load_file(tmp_path / "out.safetensors").items():
        np.testing.assert_allclose(value, expected[key], rtol=0, atol=1e-12, err_msg=key)
