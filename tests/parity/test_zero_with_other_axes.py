"""`shard=N zero=2|3` beside `tensor`, `pipeline` and `context`: the weights and norms of one worker in float64."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from agents import journal
from covering import pairwise
from expert_models import EXPERT_MODELS
from fault_runs import Calm
from fault_runs import calm as calm
from mixture_models import MIXTURE_MODELS
from mixtures import TOLERANCE, check_cases, train_cases

# Unequal shares, and shares of units that compute nothing but dummy micro-batches, by the number of workers.
UNEQUAL = {4: "3,3,1,1", 8: "3,3,3,3,1,1,1,1"}
EMPTY = {4: "0,0,1,1", 8: "0,0,0,0,1,1,1,1"}
ON_4 = [
    "shard=2 tensor=2",
    "shard=2 pipeline=2",
    "shard=2 pipeline=2 schedule=gpipe",
    "shard=2 pipeline=2 virtual=2",
    "shard=2 context=2",
]
ON_8 = [
    "shard=2 pipeline=2 tensor=2",
    "shard=2 pipeline=2 context=2",
    "shard=2 context=2 tensor=2",
    "data=2 shard=2 tensor=2",
    "data=2 shard=2 pipeline=2 virtual=2",
    "data=2 shard=2 context=2",
    "shard=4 pipeline=2",
]
WORKERS = {plan: workers for workers, plans in ((4, ON_4), (8, ON_8)) for plan in plans}
SHARES = {"equal": {}, "unequal": UNEQUAL, "empty": EMPTY}


def mixtures() -> list[Any]:
    """Each two of a plan, a kind of sharding, shares and a model meet in one of these runs."""
    runs = defaultdict[tuple[str, int, str], list[str]](list)
    exists = lambda plan, zero, shares, model: model != "residual mlp" or "context" not in plan
    for *run, model in pairwise([*WORKERS], [2, 3], [*SHARES], [*MIXTURE_MODELS], valid=exists):
        runs[tuple(run)].append(model)  # type: ignore[index]
    return [pytest.param(*run, models, id=f"{run[0]} zero={run[1]}, {run[2]}") for run, models in runs.items()]


MIXTURES = mixtures()


# ---- errors that no message shows


@pytest.mark.parametrize(
    ("plan", "models", "shares"),
    [
        pytest.param("shard=2 pipeline=2 zero=3", ["gpt"], EMPTY[4], id="unequal micro-batches in stages"),
        pytest.param(
            "shard=2 pipeline=2 zero=3",
            ["tied gpt", "early norm"],
            "",
            id="tied head in stages; weight before blocks, used after them",
        ),
        pytest.param("pipeline=2", ["tied gpt"], "1,1,0,0", id="tied head in stages of an idle replica"),
    ],
)
def test_mixture_is_not_silently_wrong(
    plan: str,
    models: list[str],
    shares: str,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLOCKS", "2")
    train_cases(tmp_path, plan, 4, models, shares, short=True)
    check_cases(tmp_path, MIXTURE_MODELS, models, tmp_path_factory, short=True)


@pytest.mark.parametrize("axis", ["tensor", pytest.param("context", marks=pytest.mark.slow)])
def test_comparison_with_the_full_model_compares_gradients(
    axis: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are computed in another order are never all equal: exactly 0 means that none were compared. One
    model has divided logits in a pair with a full output.
    """
    monkeypatch.setenv("BLOCKS", "2")
    models = ["gpt", "experts"] if axis == "tensor" else ["gpt"]
    train_cases(tmp_path, f"shard=2 {axis}=2 zero=3", 4, models, short=True)
    check_cases(tmp_path, MIXTURE_MODELS | EXPERT_MODELS, models, tmp_path_factory, short=True)
    notes = " ".join(str(event["text"]) for event in journal(tmp_path / "run", "note"))
    distances = re.findall(r"verified on one micro-batch .*? and (\S+) of the gradients", notes)
    assert len(distances) == len(models)
    assert all(0 < float(distance) < TOLERANCE for distance in distances), distances


# ---- all mixtures


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("plan", "zero", "shares", "models"), MIXTURES)
def test_mixture_trains_as_one_worker(
    plan: str, zero: int, shares: str, models: list[str], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    train_cases(tmp_path, f"{plan} zero={zero}", WORKERS[plan], models, SHARES[shares].get(WORKERS[plan], ""))
    check_cases(tmp_path, MIXTURE_MODELS, models, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["recompute=blocks", "offload=cpu"])
@pytest.mark.parametrize("plan", ON_4)
def test_mixture_that_saves_more_memory(
    plan: str, words: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    train_cases(tmp_path, f"{plan} zero=3 {words}", 4, ["tied gpt", "one key head"], short=True)
    check_cases(tmp_path, MIXTURE_MODELS, ["tied gpt", "one key head"], tmp_path_factory, short=True)


# ---- losses

KILLED = [
    ("shard=2 pipeline=2", "backward", 3),
    ("shard=2 tensor=2", "backward", 2),
    ("shard=2 tensor=2", "applied", 1),
]


@pytest.mark.parametrize(
    ("plan", "moment", "worker"),
    [pytest.param(*row, marks=[] if row == KILLED[0] else pytest.mark.slow) for row in KILLED],
)
def test_kill_of_a_worker_of_a_mixture(
    plan: str, moment: str, worker: int, calm: Calm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The replica resumes from its checkpoint with all workers."""
    monkeypatch.setenv("ATTENTION", "1")
    calm.meets_kill(tmp_path, f"{plan} zero=3", worker, moment)
