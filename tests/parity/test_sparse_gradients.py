"""Gradients in rows: what is trained is what one process trains, and only the rows travel that were touched."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from launching import SCRIPTS, paceline
from oracle import apart
from safetensors.torch import load_file

from paceline.base.journal import read_journal
from paceline.team.fault_injection import read_log

sys.path.insert(0, str(SCRIPTS))
import rows

TOLERANCE = 1e-12
DENSE = 8 * (rows.WIDTH * 6 + 6 + 6 * rows.WIDTH + rows.WIDTH)  # bytes of gradients that are whole


def trained(folder: Path, workers: int, *options: str, more: str = "", chaos: str = "") -> str:
    said = ("--workers", str(workers), "--run-dir", "run", *options)
    done = paceline(
        "run", *said, SCRIPTS / "rows.py", "out.safetensors", *more.split(), cwd=folder, PACELINE_CHAOS=chaos
    )
    return done.stdout + done.stderr


def as_by_hand(folder: Path, more: str = "") -> None:
    weights, figures = rows.by_hand(more)
    assert apart(load_file(folder / "out.safetensors"), weights) < TOLERANCE
    found = ast.literal_eval((folder / "figures").read_text())
    assert torch.allclose(torch.tensor(found), torch.tensor(figures)[-len(found) :], rtol=TOLERANCE, atol=0.0)


@pytest.mark.parametrize(
    "workers", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_several_workers_give_what_one_process_gives(workers: int, tmp_path: Path) -> None:
    trained(tmp_path, workers)
    as_by_hand(tmp_path)


def test_only_rows_that_were_touched_travel(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    as_by_hand(tmp_path)
    (figures,) = (event for event in read_journal(tmp_path / "run") if event["event"] == "figures")
    widest = 8 * (rows.WIDTH + 1)  # bytes of a row in float64, with its number
    for predicted, measured in zip(figures["predicted"], figures["measured"], strict=True):
        sent = measured["sent"]
        assert predicted["gradients"] == predicted["sent"]["gradients"] == DENSE
        assert sent["rows"] <= 4 * rows.BATCH * widest + 200 < 8 * rows.WIDTH * rows.ITEMS / 2


FAULTS = [("kill:2@3.forward", "kill:1@5.summed"), ("kill:0@3.reduced", "kill:4@5.applied"), ("stop:3@4.backward",)]


@pytest.mark.parametrize("faults", FAULTS[:1] + [pytest.param(one, marks=pytest.mark.slow) for one in FAULTS[1:]])
def test_a_worker_is_lost(faults: tuple[str, ...], tmp_path: Path) -> None:
    """Its step is done again, or ended, and it comes back with the state of others."""
    trained(tmp_path, 5, chaos=",".join(faults))
    assert len(read_log(tmp_path / "run")) == len(faults)
    as_by_hand(tmp_path)


KILLS = [(1000000, "reduced"), (1000000, "applied"), (1000001, "reduced"), (1000001, "applied")]
SERVED = {
    "server=2": 2,
    "server=1": 3,
    "server=3 copies=1": 3,
}


@pytest.mark.parametrize(
    "plan", [one if one == "server=2" else pytest.param(one, marks=pytest.mark.slow) for one in SERVED]
)
@pytest.mark.parametrize("more", ["", pytest.param("whole", marks=pytest.mark.slow)])
def test_rows_go_to_servers_and_come_back(plan: str, more: str, tmp_path: Path) -> None:
    """Also where a worker is lost, or a server of which there is a copy."""
    fault = "kill:1000001@4.reduced" if "copies" in plan else "kill:1@4.summed"
    trained(tmp_path, SERVED[plan], "--plan", f"micro=2 {plan}", more=more, chaos=fault)
    assert len(read_log(tmp_path / "run")) == 1
    as_by_hand(tmp_path, more)


OUT_OF_STEP = "server=2 copies=1 staleness=4 window=3"


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("", ""),
        ("whole", ""),
        *(pytest.param("", f"kill:{server}@4.{moment}", marks=pytest.mark.slow) for server, moment in KILLS),
    ],
)
def test_out_of_step_one_worker_gives_what_one_process_gives(more: str, fault: str, tmp_path: Path) -> None:
    """Through a resume in the midst of an epoch, and where a server is lost of which there is a copy."""
    for options in (("--steps", "5"), ()):
        trained(tmp_path, 1, "--plan", f"micro=2 {OUT_OF_STEP}", *options, more=more, chaos=fault if options else "")
    assert len(read_log(tmp_path / "run") if fault else []) == bool(fault)
    weights, _ = rows.by_hand(more)
    assert apart(load_file(tmp_path / "out.safetensors"), weights) < TOLERANCE


@pytest.mark.slow
def test_a_run_goes_on_with_other_workers(tmp_path: Path) -> None:
    trained(tmp_path, 3, "--steps", "3")
    trained(tmp_path, 2, "--steps", "6")
    trained(tmp_path, 1)
    as_by_hand(tmp_path)


@pytest.mark.parametrize("workers", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_table_that_is_used_as_a_whole_too(workers: int, tmp_path: Path) -> None:
    """By some of the rows: its gradient is a whole one on some workers, and none on others."""
    trained(tmp_path, workers, more="whole")
    as_by_hand(tmp_path, "whole")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["codec=bf16", "precision=bf16", "recompute=blocks"])
def test_beside_other_words(plan: str, tmp_path: Path) -> None:
    trained(tmp_path, 2, "--plan", f"micro=2 {plan}")
    weights, _ = rows.by_hand()
    assert apart(load_file(tmp_path / "out.safetensors"), weights) < (1e-2 if "bf16" in plan else TOLERANCE)
