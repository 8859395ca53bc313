"""Losses of logits that are computed in tiles (`tiles=`): as of one process in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_vocabulary_loss as losses
from launching import SCRIPTS, paceline
from vocabulary import LOSSES

VERIFIED = "verified on one micro-batch against full logits"
# Losses that need no full logits, and the functions for which the others get them.
TILED = ["plain", "transposed", "ignoring", "mean", "with_z_loss", "in_logarithms"]
FULL = {
    "distilled": "kl_div",
    "of_probabilities": "cross_entropy",
    "masked": "masked_fill",
    "entropy": "log, mul",
    "of_other_functions": "cummax, special_entr",
    "written": "cross_entropy, setitem",
}
PLANS = {
    "data=2 tiles=4": 2,
    "shard=2 zero=2 tiles=4": 2,
    "shard=2 zero=3 tiles=4": 2,
    "context=2 tiles=3": 2,
    "pipeline=2 tiles=4": 2,
    "pipeline=2 context=2 tiles=4": 4,
    "shard=2 zero=3 context=2 tiles=2": 4,
    "shard=2 zero=3 recompute=blocks tiles=2": 2,
    "exact data=2 tiles=4": 2,
}


def check(folder: Path, workers: int, plan: str, *names: str, tied: bool = False) -> dict[str, str]:
    """Trains with each loss and compares. Returns the functions that got full logits, by loss."""
    told = losses.check(folder, workers, plan, 23, *names, tied=tied, note="tiles=: ")
    assert all(VERIFIED in text for text in told)
    before = [text.partition(VERIFIED)[0].removeprefix("tiles=: ") for text in told]
    texts = [text.removeprefix("the loss gets full logits for ").removesuffix("; ") for text in before]
    return dict(zip(names, texts, strict=True))


def test_losses_of_tiled_logits_are_those_of_one_process(tmp_path: Path) -> None:
    assert check(tmp_path, 1, "tiles=4", *TILED, tied=True) == dict.fromkeys(TILED, "")


@pytest.mark.slow
def test_losses_that_need_full_logits_get_them(tmp_path: Path) -> None:
    assert check(tmp_path, 1, "tiles=4", *LOSSES) == {name: FULL.get(name, "") for name in LOSSES}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_tiled_logits_under_mixtures(plan: str, tmp_path: Path) -> None:
    check(tmp_path, PLANS[plan], plan, *TILED, "written")


def test_logits_take_the_memory_of_a_tile(tmp_path: Path) -> None:
    peaks = {}
    for plan in ("micro=1", "tiles=4"):
        done = paceline("run", "--plan", plan, SCRIPTS / "logits_memory.py", cwd=tmp_path)
        peaks[plan] = float(done.stdout.split("peak ")[1].split()[0])
    assert peaks["tiles=4"] <= 1.05 * peaks["micro=1"] / 4
