"""What a script keeps in `trainer.state`, through losses, arrivals and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import train_basics
from safetensors.torch import load_file

from paceline.base.journal import read_journal

# Means of the weights, one put there before the team is asked for anything, one after its evaluation was.
MEAN = """
import os, time
from pathlib import Path
from safetensors.torch import save_file
class Mean:
    def __init__(self, model):
        self.values = {name: value.clone() for name, value in model.state_dict().items()}
    def update(self, model):
        for name, value in model.state_dict().items():
            self.values[name].mul_(0.9).add_(value, alpha=0.1)
    def state_dict(self):
        return self.values
    def load_state_dict(self, saved):
        for name, value in saved.items():
            self.values[name].copy_(value)
t = make(plan="exact micro=3")
before = t.state["before"] = Mean(t.model)
t.evaluate(data, lambda o, b: {"n": (len(o), 1)})
after = t.state["after"] = Mean(t.model)
journal = Path("out/journal.jsonl")
def complete():
    return not os.environ["PACELINE_CHAOS"] or journal.read_text().count('"formed"') >= 2
for report in t.steps(data, count=60):
    for mean in (before, after):
        mean.update(t.model)
    if not complete():
        time.sleep(0.05 if report.step < 40 else 1.0)
values = {f"{name} {key}": value for name in ("before", "after") for key, value in t.state[name].values.items()}
save_file(values, f"mean-{os.environ.get('PACELINE_RANK', 0)}.safetensors")
"""


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_state_of_a_worker_that_joins_again_is_filled_once(lost: int, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    train_basics(tmp_path / "one", MEAN, 1)
    train_basics(tmp_path, MEAN, 2, chaos=f"kill:{lost}@5.backward")
    events = read_journal(tmp_path / "out")
    assert [event["workers"] for event in events if event["event"] == "lost"] == [[lost]]
    undisturbed = load_file(tmp_path / "one" / "mean-0.safetensors")
    for worker in range(2):
        means = load_file(tmp_path / f"mean-{worker}.safetensors")
        assert all(value.equal(means[name]) for name, value in undisturbed.items()), f"worker {worker} has another mean"


# What a script does before its loop depends on what the team has reached, as callbacks at the start of training do.
READS = """
import json, os, time
from pathlib import Path
t = make()
reached, seen = t.steps_done, t.state.get("seen", 0)
journal = Path("out/journal.jsonl")
for report in t.steps(data, count=60):
    t.state["seen"] = report.step
    if journal.read_text().count('"formed"') < 2:
        time.sleep(0.05 if report.step < 40 else 1.0)
Path(f"reached-{os.environ['PACELINE_RANK']}.json").write_text(json.dumps([reached, seen]))
"""


def test_worker_that_joins_reads_the_steps_and_the_state_of_the_team_before_its_loop(tmp_path: Path) -> None:
    train_basics(tmp_path, READS, 2, chaos="kill:1@5.backward")
    of_first, of_newcomer = (json.loads((tmp_path / f"reached-{worker}.json").read_text()) for worker in range(2))
    assert of_first == [0, 0]
    assert of_newcomer[0] == of_newcomer[1] >= 5


COUNTS = """
import json, os
class Rows:
    def __init__(self):
        self.seen = torch.zeros(96)
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, saved):
        self.seen.copy_(saved["seen"])
def loss(o, b):
    for row in b[0]:
        number = int((x == row).all(1).nonzero())
        rows.seen[number] += 1
        calls.append([t.steps_done, number])
        t.state["last"] = number
    return F.cross_entropy(o, b[1])
t = make(loss, plan="exact micro=3")
rows = t.state["rows"] = Rows()
calls = t.state["calls"] = []
for report in t.steps(data, count=12):
    t.state["bodies"] = t.state.get("bodies", 0) + 1
print(json.dumps([calls, rows.seen.tolist(), t.state["bodies"], t.state["last"] == calls[-1][1]]))
"""


def test_state_that_a_loss_changes_counts_once_in_a_step_that_is_repeated_after_a_kill(tmp_path: Path) -> None:
    done = train_basics(tmp_path, COUNTS, 2, "--max-restarts", "1", chaos="kill:1@5.backward")
    assert "worker 1" in done.stderr
    calls, seen, bodies, last = json.loads(done.stdout.splitlines()[0])
    assert (bodies, last) == (12, True)
    for step in range(3, 12):  # what merging tries before that calls the loss again
        rows = [row for number, row in calls if number == step]
        assert len(rows) == len(set(rows)), step
    assert [float(sum(row == number for _, row in calls)) for number in range(96)] == seen
