"""`expert=N`: the weights, norms and evaluations of one worker in float64, with an auxiliary loss."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from agents import journal, until
from covering import pairwise
from expert_models import EXPERT_MODELS
from fault_runs import LONG, Calm, fired, outcome, train
from fault_runs import calm as calm
from launching import SCRIPTS, stderr_of, train_basics
from mixtures import check_cases, train_cases
from warm import Process, environment

WORKERS = {
    "expert=2": 2,
    "expert=4": 4,
    "expert=2 data=2": 4,
    "expert=2 shard=2 zero=1": 4,
    "expert=2 shard=2 zero=2": 4,
    "expert=2 shard=2 zero=3": 4,
    "expert=2 pipeline=2": 4,
    "expert=2 pipeline=3": 6,
    "expert=2 pipeline=2 schedule=zb": 4,
    "expert=2 tensor=2": 4,
    "expert=2 recompute=blocks": 2,
    "expert=3": 3,
    "data=2 shard=2 zero=3 expert=2": 8,
    "shard=2 zero=3 expert=2 pipeline=2": 8,
    "shard=2 zero=3 expert=2 tensor=2": 8,
    "expert=2 pipeline=2 tensor=2": 8,
}
# Workers with more micro-batches than others, and such that run only dummies.
SHARES = {
    "equal": {},
    "unequal": {2: "2,1", 3: "2,1,1", 4: "3,1,2,1", 6: "2,2,2,1,1,1", 8: "2,2,1,1,1,1,1,1"},
    "empty": {2: "1,0", 3: "2,0,1", 4: "1,0,0,1", 6: "1,1,1,0,0,0", 8: "1,1,0,0,1,1,0,0"},
}


def mixtures() -> list[Any]:
    """Each two of a plan, shares and a model meet in one of these runs."""
    runs = defaultdict[tuple[str, str], list[str]](list)
    for plan, shares, model in pairwise([*WORKERS], [*SHARES], [*EXPERT_MODELS]):
        runs[plan, shares].append(model)
    return [pytest.param(*run, models, id=f"{run[0]}, {run[1]}") for run, models in runs.items()]


@pytest.mark.parametrize(
    ("plan", "shares"),
    [("expert=4", "empty"), pytest.param("shard=2 zero=3 expert=2 pipeline=2", "", marks=pytest.mark.slow)],
)
def test_divided_experts_train_as_one_worker(
    plan: str,
    shares: str,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With six experts for four workers the last one has none."""
    monkeypatch.setenv("BLOCKS", "2")
    models = ["six experts, two shunned", "frozen experts"]
    train_cases(tmp_path, plan, WORKERS[plan], models, SHARES[shares or "equal"].get(WORKERS[plan], ""), short=True)
    check_cases(tmp_path, EXPERT_MODELS, models, tmp_path_factory, short=True)
    notes = [str(event["text"]) for event in journal(tmp_path / "run", "note")]
    assert any(note.startswith("expert= was verified on one micro-batch against complete layers") for note in notes)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("plan", "shares", "models"), mixtures())
def test_all_mixtures_with_experts_train_as_one_worker(
    plan: str, shares: str, models: list[str], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    train_cases(tmp_path, plan, WORKERS[plan], models, SHARES[shares].get(WORKERS[plan], ""))
    check_cases(tmp_path, EXPERT_MODELS, models, tmp_path_factory)


KILLED = [
    ("data=2 expert=2", "backward", 3),
    ("data=2 expert=2", "applied", 0),
    ("data=2 expert=2", "summed", 1),
    ("expert=4", "forward", 2),
    ("expert=4", "saving", 1),
    ("shard=2 zero=3 expert=2", "reduced", 3),
]


@pytest.mark.parametrize(
    ("plan", "moment", "worker"),
    [pytest.param(*row, marks=[] if row == KILLED[0] else pytest.mark.slow) for row in KILLED],
)
def test_kill_of_a_worker_with_experts(
    plan: str, moment: str, worker: int, calm: Calm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run goes on with the other replica, and the worker comes back; or all resume from a checkpoint."""
    monkeypatch.setenv("EXPERTS", "1")
    calm.meets_kill(tmp_path, plan, worker, moment)


JOINS = [  # faults of six workers, and how many teams form until all are there again
    ({"kill:0@5.forward", "kill:3@30.backward"}, 4),
    ({"kill:5@5.forward", "kill:0@6.hand-over"}, 3),
    ({"kill:5@5.forward", "kill:4@0.hand-over"}, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("faults", "teams"), JOINS)
def test_killed_workers_with_experts_join_again(
    faults: set[str], teams: int, calm: Calm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A replica comes back as two workers, and each receives its own experts; also if either end fails meanwhile."""
    monkeypatch.setenv("EXPERTS", "1")
    wait = f'journal.jsonl "formed" {teams}'
    ended = train(tmp_path, 6, LONG, ",".join(faults), wait, plan="micro=4 data=3 expert=2")
    assert fired(ended) == faults
    calm.meets(ended, LONG)
    sizes = [len(event["workers"]) for event in ended.events("formed")]  # type: ignore[arg-type]
    assert sizes[-1] > min(sizes), "no replica came back"


@pytest.mark.parametrize(
    ("plan", "workers", "joining"),
    [
        ("expert=2", 2, 2),
        pytest.param("expert=2", 2, 4, marks=pytest.mark.slow),
        pytest.param("shard=2 zero=3 expert=2", 4, 4, marks=pytest.mark.slow),
        pytest.param("shard=2 zero=1 expert=2", 4, 4, marks=pytest.mark.slow),
    ],
)
def test_replicas_with_experts_that_join_a_run(
    plan: str, workers: int, joining: int, calm: Calm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers of another agent are new replicas: `expert=2` of two workers becomes `data=2 expert=2` of four."""
    monkeypatch.setenv("EXPERTS", "1")
    gate, run, steps = tmp_path / "gate", tmp_path / "run", 36
    command = [sys.executable, "-m", "paceline", "run"]
    script, env = [SCRIPTS / "survivor.py", tmp_path / "out", str(steps)], environment(WAIT=f"{gate} go 1")
    options = ["--workers", str(workers), "--run-dir", run, "--plan", f"micro=4 {plan}"]
    first = Process([*command, *options, *script], env, cwd=tmp_path, stderr=PIPE)
    until(lambda: (run / "coordinator.json").exists() and journal(run, "step")[3:])
    joins = [*command, "--join", run, "--workers", str(joining), *script]
    second = Process(joins, env, cwd=tmp_path, stderr=PIPE)
    until(lambda: any(len(event["workers"]) == workers + joining for event in journal(run, "formed")))  # type: ignore[arg-type]
    gate.write_text("go\n")
    texts = stderr_of((first, second))
    assert (first.returncode, second.returncode) == (0, 0), "\n".join(texts)
    calm.meets(outcome(tmp_path, texts[0]), steps)


@pytest.mark.parametrize(
    "what",
    [
        "a penalty",
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("a gradient hook", "no experts", "mixes tokens")),
    ],
)
def test_models_that_expert_cannot_divide_are_refused(what: str, tmp_path: Path, golden: Any) -> None:
    body = f"""
import expert_models
what, loss = {what!r}, expert_models.loss
model = expert_models.Model(4)
if what == "a penalty":
    loss = lambda output, batch: (expert_models.loss(output, batch)[0] + sum(p.norm() for p in t.model.parameters()), 1)
if what == "a gradient hook":
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
if what == "no experts":
    model = nn.Sequential(nn.Embedding(23, 4), nn.Linear(4, 23))
if what == "mixes tokens":
    plain = expert_models.Experts.forward
    expert_models.Experts.forward = lambda self, x, i, w: plain(self, x - x.mean(0), i, w)
t = paceline.Trainer(lambda: model, loss, torch.optim.AdamW, global_batch=8, plan="expert=2 micro=2")
for _ in t.steps(expert_models.words(16), count=2):
    pass
"""
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", code=2)
    golden(what, next(line for line in done.stderr.splitlines() if "Error: " in line).strip())
