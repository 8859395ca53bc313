"""Plans that cut a model take those of transformers as they are: many kinds, none of which any code here names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kinds import KINDS
from launching import SCRIPTS, paceline
from once import once


def losses(folder: Path, workers: int, plan: str) -> dict[str, list[float]]:
    """The models compute their losses in float32, whatever they are of."""
    options = ("--max-restarts", "0", "--plan", f"micro=3 {plan}", "--run-dir", "out")
    paceline("run", "--workers", str(workers), *options, SCRIPTS / "kinds.py", *KINDS, cwd=folder, timeout=900)
    found: dict[str, list[float]] = json.loads((folder / "losses-0.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["pipeline=2", "context=2", "tensor=2"])
def test_transformers_kinds_have_the_losses_of_one_worker(
    plan: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    one = once(tmp_path_factory, "kinds of transformers on one worker", lambda folder: losses(folder, 1, "data=1"))
    wanted, found = json.loads((one / "losses-0.json").read_text()), losses(tmp_path, 2, plan)
    assert {name: pytest.approx(some, abs=2e-6) for name, some in wanted.items()} == found
