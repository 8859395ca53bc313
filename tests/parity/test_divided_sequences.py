"""`tensor=` with activations that stay divided along the sequence between row and column layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_vocabulary_loss as losses
from launching import SCRIPTS, TRANSFORMERS, paceline
from oracle import apart
from safetensors.torch import load_file
from test_packed_documents import one_by_one

DIVIDED = "activations between layers are divided along the sequence"
PLANS = {"data=2 tensor=2": 4, "shard=2 zero=3 tensor=2": 4, "tensor=2 recompute=blocks": 2, "exact tensor=2": 2}
NOT_DIVIDED = {"tensor=2 context=2": 4, "pipeline=2 tensor=2": 4, "tensor=4": 4}  # four do not divide 14 tokens


def check(folder: Path, workers: int, plan: str, *names: str) -> list[str]:
    return losses.check(folder, workers, plan, 24, *names, script="divided_sequences.py", kind=["losses"])


def test_divided_sequences_train_as_one_process(tmp_path: Path) -> None:
    told = check(tmp_path, 2, "tensor=2", "entropy", "written")
    assert [DIVIDED in text for text in told] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*PLANS, *NOT_DIVIDED])
def test_divided_sequences_under_mixtures(plan: str, tmp_path: Path) -> None:
    told = check(tmp_path, (PLANS | NOT_DIVIDED)[plan], plan, "plain", "with_z_loss")
    assert [DIVIDED in text for text in told] == [plan in PLANS or plan == "tensor=4"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "llama"])
def test_divided_sequences_of_attention_train_as_one_process(name: str, tmp_path: Path) -> None:
    command = ("run", "--workers", "2", "--run-dir", "run", "--plan", "tensor=2", SCRIPTS / "divided_sequences.py")
    done = paceline(*command, "documents", "out", name, cwd=tmp_path, **TRANSFORMERS)
    assert DIVIDED in done.stderr
    weights, _ = one_by_one(name)
    assert apart(load_file(tmp_path / "out.safetensors"), weights) < (1e-12 if name == "own" else 1e-6)


@pytest.mark.slow
def test_activations_of_divided_sequences_take_a_quarter_on_four_workers(tmp_path: Path) -> None:
    found = {}
    for workers in (1, 4):
        plan = ("--plan", "tensor=4") if workers > 1 else ()
        options = ("--workers", str(workers), "--run-dir", f"run{workers}", *plan)
        done = paceline("run", *options, SCRIPTS / "divided_sequences.py", "memory", cwd=tmp_path)
        found[workers] = float(done.stdout.split("activations ")[1].split()[0])
    assert found[4] <= 1.05 * found[1] / 4
