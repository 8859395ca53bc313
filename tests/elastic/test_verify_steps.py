"""--verify-steps: flipped bits and workers that compute wrongly are found before the update, and named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import SCRIPTS, paceline, train_basics
from once import once

from paceline.base.journal import read_journal
from paceline.observe.summary import Summary, facts
from paceline.team.fault_injection import read_log

STEPS = 12
EXACT = f"""
trainer = make(plan="exact micro=3")
for report in trainer.steps(data, count={STEPS}):
    pass
trainer.export("out.safetensors")
"""
# The last layer of worker 2 computes wrongly from some step on.
FAULTY = f"""
import os

class Faulty(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.001 if os.environ["PACELINE_RANK"] == "FAULTY" and trainer.done >= 3 else 1.0)

trainer = make(
    model=lambda: nn.Sequential(nn.Linear(10, 16), nn.ReLU(), Faulty(16, 2)).double(), plan="exact micro=3"
)
for report in trainer.steps(data, count={STEPS}):
    pass
trainer.export("out.safetensors")
"""


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of one worker, without the option: under `exact`, those of any number of workers."""
    folder = once(tmp_path_factory, "undisturbed by wrong values", lambda folder: train_basics(folder, EXACT, 1))
    return (folder / "out.safetensors").read_bytes()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(folder / "out") if event["event"] == kind]


def flips(folder: Path) -> Iterator[tuple[str, int, int]]:
    """What was flipped in which step on which worker."""
    return ((entry["kind"], entry["step"] + 1, entry["worker"]) for entry in read_log(folder / "out"))


def test_flipped_bits_are_found_before_the_update_and_named(undisturbed: bytes, tmp_path: Path) -> None:
    """One bit of each kind, each on another worker, as a second one would make a worker leave."""
    faults = "flip-gradient:1@2.forward,flip-activation:2@3.loading,flip-bucket:0@4.loading,flip-transit:3@6.loading"
    done = train_basics(tmp_path, EXACT, 4, "--verify-steps", "100%", chaos=f"{faults},flip-weight:3@8.loading").stderr
    assert "every step is verified: its micro-batches are computed twice and compared before the update" in done
    assert len([*flips(tmp_path)]) == 5
    healed = [("flip-weight", event["step"] + 1, *event["workers"]) for event in events(tmp_path, "healed")]
    wrong = [(event["step"], *event["workers"]) for event in events(tmp_path, "corrupted")]
    assert healed + wrong == [
        ("flip-weight", 9, 3),
        *((step, worker) for kind, step, worker in flips(tmp_path) if kind != "flip-weight"),
    ]
    attempts = {event["step"]: event["attempts"] for event in events(tmp_path, "verified")}
    assert attempts == {step: 2 if step in (3, 4, 5, 7, 9) else 1 for step in range(1, STEPS + 1)}
    assert (tmp_path / "out.safetensors").read_bytes() == undisturbed
    shown = facts(Summary(tmp_path / "out"))["What happened"]
    assert ("verified", "12 steps, 5 of them computed again") in shown
    assert len([text for name, text in shown if name == "wrong values"]) == 4


# Gradients within a replica, weights before a forward, and between replicas; a bit of what is sent each time.
WAYS = {
    "shard=2 zero=3": "flip-transit:1@2.loading,flip-gather:2@4.loading",
    "shard=2 zero=2": "flip-transit:3@2.loading,flip-gather:0@4.loading",
    "shard=2 zero=1": "flip-transit:1@2.loading,flip-gather:2@4.loading",
}


@pytest.mark.parametrize(
    "plan", [*(plan if plan.endswith("3") else pytest.param(plan, marks=pytest.mark.slow) for plan in WAYS)]
)
def test_only_the_worker_that_sent_a_flipped_bit_is_named(plan: str, undisturbed: bytes, tmp_path: Path) -> None:
    """Within a replica, too, where all workers compute with what it sent."""
    script = EXACT.replace("exact micro=3", f"exact {plan} micro=3")
    train_basics(tmp_path, script, 4, "--verify-steps", "1", chaos=WAYS[plan])
    fired = {step: worker for _, step, worker in flips(tmp_path)}
    assert len(fired) == 2
    named = {event["step"]: (event["workers"], event["text"]) for event in events(tmp_path, "corrupted")}
    assert {step: workers for step, (workers, _) in named.items()} == {step: [w] for step, w in fired.items()}
    for step, kind in (
        (3, "what worker {} .* sent for the sums of .*"),
        (5, "what worker {} .* sent of the weights of .*"),
    ):
        assert re.fullmatch(kind.format(fired[step]) + " changed on its way", named[step][1])
    again = (3,) if "zero=1" in plan else (3, 5)  # updated weights are only sent again
    attempts = {event["step"]: event["attempts"] for event in events(tmp_path, "verified")}
    assert attempts == {step: 2 if step in again else 1 for step in range(1, STEPS + 1)}
    assert (tmp_path / "out.safetensors").read_bytes() == undisturbed


CODED = """
import os
from paceline.comm import hierarchical

hierarchical.host_key = lambda: f"host {int(os.environ['PACELINE_RANK']) // 2}"
trainer = make(plan="PLAN micro=3")
for report in trainer.steps(data, count=8):
    pass
trainer.export("out.safetensors")
"""


# With shard=2 the first thing that is sent are gradients within a host.
SENT = {
    **dict.fromkeys(("codec=int8", "codec=fp16", "codec=topk:0.2", "codec=powersgd:1"), "of the encoded sums"),
    "shard=2 codec=sign": "for the sums",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", SENT)
def test_flipped_bits_in_sums_between_hosts_are_found_with_every_codec(words: str, tmp_path: Path) -> None:
    """Two hosts with two workers each: what was not sent yet goes into the next step as without the fault."""
    done = []
    for chaos in ("", "flip-transit:2@2.loading,flip-transit:1@4.loading,flip-bucket:3@6.loading"):
        folder = tmp_path / ("wild" if chaos else "calm")
        folder.mkdir()
        options = ("--verify-steps", "1", "--shares", "1,1,1,1")
        train_basics(folder, CODED.replace("PLAN", words), 4, *options, chaos=chaos)
        named = [(event["step"], event["workers"]) for event in events(folder, "corrupted")]
        assert named == [(step, [worker]) for _, step, worker in flips(folder)]
        assert all(f" sent {SENT[words]} of " in event["text"] for event in events(folder, "corrupted")[:1])
        done.append((folder / "out.safetensors").read_bytes())
    assert len(named) == 3
    assert done[0] == done[1]


def test_worker_that_computes_wrongly_twice_leaves_and_is_not_restarted(undisturbed: bytes, tmp_path: Path) -> None:
    done = train_basics(tmp_path, FAULTY.replace("FAULTY", "2"), 3, "--verify-steps", "1").stderr
    (event,) = events(tmp_path, "corrupted")
    assert (event["workers"], event["step"], event["tensor"], event["leaves"]) == ([2], 4, "0.weight", True)
    assert f"{event['text']} in step 4; that was not the first time: it leaves the run" in done
    assert "worker 2 raised HardwareError: 2 workers go on; it is not restarted" in done
    assert (tmp_path / "out.safetensors").read_bytes() == undisturbed


# Three kinds of workers, which check each other in two of three attempts, and themselves in the other ones. One forward
# is wrong on each.
ONCE = """
import os

rank, faults = int(os.environ["PACELINE_RANK"]), {(1, 5), (0, 6), (2, 7)}
torch.set_num_threads(1 + rank)

class Faulty(nn.Linear):
    def forward(self, x):
        if (rank, trainer.done) in faults:
            faults.remove((rank, trainer.done))
            return super().forward(x) * 1.5
        return super().forward(x)

trainer = make(
    model=lambda: nn.Sequential(nn.Linear(10, 16), nn.ReLU(), Faulty(16, 2)).double(), plan="micro=3"
)
for report in trainer.steps(data, count=9):
    pass
"""


def test_only_the_wrong_worker_is_named_among_workers_of_other_kinds(tmp_path: Path) -> None:
    train_basics(tmp_path, ONCE, 3, "--verify-steps", "1")
    named = [(event["step"], event["workers"], event["tensor"]) for event in events(tmp_path, "corrupted")]
    assert named == [(6, [1], "0.weight"), (7, [0], "0.weight"), (8, [2], "0.weight")]
    assert [event["attempts"] for event in events(tmp_path, "verified")] == [1, 1, 1, 1, 1, 2, 2, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["loading", "forward", "backward", "summed", "reduced", "applied"])
def test_killed_worker_in_a_verified_step_costs_nothing(moment: str, undisturbed: bytes, tmp_path: Path) -> None:
    fault = f"kill:1@5.{moment}"
    train_basics(tmp_path, EXACT, 4, "--verify-steps", "2", chaos=fault)
    assert [entry["fault"] for entry in read_log(tmp_path / "out")] == [fault]
    assert not events(tmp_path, "corrupted")
    assert (tmp_path / "out.safetensors").read_bytes() == undisturbed


@pytest.mark.slow
def test_two_workers_that_disagree_are_both_named(tmp_path: Path) -> None:
    said = train_basics(tmp_path, FAULTY.replace("FAULTY", "1"), 2, "--verify-steps", "1", code=1).stderr
    (event,) = events(tmp_path, "corrupted")
    assert (event["workers"], event["step"], event["leaves"]) == ([0, 1], 4, False)
    assert f"WorkersDifferError: {event['text']}; if the model computes other bits each time" in said
    assert event["text"].endswith("from the same rows in step 4, 3 times in a row; 0.weight is the first that differs")


PLANS = {
    "micro=2": {},
    "exact micro=2": {},
    "micro=2 precision=fp16": {},
    "micro=6 precision=bf16": {},
    "micro=6 precision=bf16:pure": {},
    "shard=2 zero=1 micro=6": {},
    "shard=2 zero=2 micro=2": {},
    "shard=2 zero=3 micro=2": {},
    "exact shard=2 zero=3 micro=2": {},
    "shard=2 zero=3 micro=4": {"ATTENTION": "1"},  # with blocks
    "tensor=2 micro=2": {"ATTENTION": "1"},
    "context=2 micro=2": {"ATTENTION": "1"},
    "pipeline=2 micro=4": {"ATTENTION": "1"},
    "expert=2 micro=4": {"EXPERTS": "1"},
}
FLIPS = "flip-gradient:1@2.forward,flip-activation:2@3.loading,flip-bucket:0@4.loading,flip-transit:3@10.loading"


def survive(folder: Path, plan: str, chaos: str, shares: str, **env: str) -> bytes:
    """Trains scripts/survivor.py, of which every step is verified. Shares do not change with the workers' speed."""
    folder.mkdir()
    options = ("--workers", "4", "--run-dir", "out", "--plan", plan, "--verify-steps", "1", "--shares", shares)
    env = {"PACELINE_CHAOS": chaos, **PLANS[plan], **env}
    paceline("run", *options, SCRIPTS / "survivor.py", "end", "12", cwd=folder, **env)
    return (folder / "end.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_flipped_bits_are_found_under_every_plan(plan: str, tmp_path: Path) -> None:
    """Dropout, BatchNorm, clipping, a schedule, and with unequal shares. The tenth step measures the noise scale."""
    shares = "3,1,2,2" if plan in ("micro=2", "exact micro=2") else "1,1,1,1"
    calm = survive(tmp_path / "calm", plan, "", shares)
    assert not events(tmp_path / "calm", "corrupted")
    assert {event["attempts"] for event in events(tmp_path / "calm", "verified")} == {1}
    wild = survive(tmp_path / "wild", plan, FLIPS, shares)
    named = {event["step"]: event["workers"] for event in events(tmp_path / "wild", "corrupted")}
    flipped = {step: (kind, worker) for kind, step, worker in flips(tmp_path / "wild")}
    assert len(flipped) == 4
    assert named.keys() <= flipped.keys()
    for step, (kind, worker) in flipped.items():
        if kind != "flip-activation" or step in named:  # that of a unit which is off changes nothing
            assert worker in named[step], (kind, named)
    assert wild == calm


@pytest.mark.slow
@pytest.mark.parametrize("plan", [plan for plan in PLANS if "=2" in plan.partition("micro")[0]])
def test_replicas_of_other_kinds_agree_under_every_plan(plan: str, tmp_path: Path) -> None:
    """Each replica checks the other one, or itself."""
    survive(tmp_path / "kinds", plan, "", "1,1,1,1", KINDS="two")
    assert [event["attempts"] for event in events(tmp_path / "kinds", "verified")] == [1] * 12
    assert not events(tmp_path / "kinds", "corrupted")


KINDS = """import os
os.environ["ATEN_CPU_CAPABILITY"] = "KINDS".split()[int(os.environ["PACELINE_RANK"])]
from basics import *
data = TensorDataset(x.float(), data.tensors[1])
model = lambda: nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
torch.manual_seed(0)
trainer = make(model=model, plan="micro=3")
for report in trainer.steps(data, count=200):
    pass
"""
MADE = 'trainer = make(model=model, plan="micro=3")\n'
SURE = """
with torch.no_grad():
    made = model()
    data = TensorDataset(x.float(), made(x.float()).argmax(1))
    made[-1].weight *= 60
    made[-1].bias *= 60
trainer = make(model=made, plan="micro=3")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["default avx2 avx512", "default default avx2 avx512 avx512"])
@pytest.mark.parametrize("sure", [False, True])
def test_workers_with_other_instructions_raise_no_false_alarm(kinds: str, sure: bool, tmp_path: Path) -> None:
    """A model that is sure of all rows has gradients that consist of rounding."""
    script = KINDS.replace("KINDS", kinds)
    (tmp_path / "train.py").write_text(script.replace(MADE, SURE) if sure else script)
    train_basics(tmp_path, None, len(kinds.split()), "--verify-steps", "1", "--cold-start")
    assert [event["attempts"] for event in events(tmp_path, "verified")] == [1] * 200
    assert not events(tmp_path, "corrupted")
    (agreement,) = events(tmp_path, "agreement")
    assert agreement["distance"] > 0  # they did round otherwise
