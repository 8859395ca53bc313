"""--verify-steps: flipped bits and workers that compute wrongly are found before the update, and named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import train_basics
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


def test_worker_that_computes_wrongly_twice_leaves_and_is_not_restarted(undisturbed: bytes, tmp_path: Path) -> None:
    done = train_basics(tmp_path, FAULTY.replace("FAULTY", "2"), 3, "--verify-steps", "1").stderr
    (event,) = events(tmp_path, "corrupted")
    assert (event["workers"], event["step"], event["tensor"], event["leaves"]) == ([2], 4, "0.weight", True)
    assert f"{event['text']} in step 4; that was not the first time: it leaves the run" in done
    assert "worker 2 raised HardwareError: 2 workers go on; it is not restarted" in done
    assert (tmp_path / "out.safetensors").read_bytes() == undisturbed
