"""A model in stages: every plan gives what one worker gives, with models as they are, through losses of workers; what
scripts do with models that are cut in stages, and what is refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SCRIPTS, paceline
from once import once
from oracle import apart
from safetensors.torch import load_file
from staging import MODELS
from test_team import STEPS, fired, train
from test_tensor import MOMENTS, Calm, calm

__all__ = ["calm"]

TEAMS = {
    "pipeline=2": 2,
    "pipeline=2 virtual=2": 2,
    "pipeline=2 schedule=gpipe": 2,
    "pipeline=3": 3,
    "pipeline=4": 4,
    "data=2 pipeline=2": 4,
    "shard=2 zero=1 pipeline=2": 4,
}
QUICK = ("pipeline=2 virtual=2", "data=2 pipeline=2")


def trained(folder: Path, workers: int, plan: str) -> None:
    options = ("--max-restarts", "0", *(("--plan", f"micro=3 {plan}") if plan else ()))
    script = SCRIPTS / "staging.py"
    paceline("run", "--workers", str(workers), "--run-dir", "out", *options, script, *MODELS, cwd=folder)


@pytest.mark.parametrize(
    "plan", [plan if plan in QUICK else pytest.param(plan, marks=pytest.mark.slow) for plan in TEAMS]
)
def test_models_as_they_are(plan: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    one = once(tmp_path_factory, "staged models of one worker", lambda folder: trained(folder, 1, ""))
    trained(tmp_path, TEAMS[plan], plan)
    found = {name: apart(*(load_file(at / f"{name}.safetensors") for at in (tmp_path, one))) for name in MODELS}
    assert {name: distance for name, distance in found.items() if distance > 1e-12} == {}


# ---- losses

LOST_QUICK = {("backward", 2)}


@pytest.mark.parametrize(
    ("moment", "worker"),
    [
        pytest.param(moment, worker, marks=[] if (moment, worker) in LOST_QUICK else pytest.mark.slow)
        for moment in MOMENTS
        for worker in range(4)
    ],
)
def test_a_lost_worker_takes_its_stages_mates_and_nothing_else(
    moment: str, worker: int, calm: Calm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATTENTION", "1")
    at, ballast = (9 if moment in ("saving", "writing") else 11), 0
    fault = f"kill:{worker}@{at}.{moment}"
    ended = train(tmp_path, 4, STEPS, fault, ballast=ballast, plan="micro=4 pipeline=2 recompute=blocks")
    assert fired(ended) == {fault}
    calm.meets(ended, STEPS)
