"""Sparse gradients: what is trained is what one process trains, and only the rows travel that were touched."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
import rows
import torch
from launching import SCRIPTS, paceline
from oracle import Weights, apart, built
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR

from paceline import sample_index
from paceline.base.journal import read_journal
from paceline.team.fault_injection import read_log

TOLERANCE = 1e-12
DENSE = 8 * (rows.WIDTH * 6 + 6 + 6 * rows.WIDTH + rows.WIDTH)  # bytes of gradients that are whole


@cache
def sparse_by_hand(more: str = "") -> tuple[Weights, list[tuple[float, float]]]:
    """Weights; and of each step the loss, and the norm of the gradient. torch clips no sparse gradients, so it is done
    here, of whole global batches.
    """
    model, data, figures = built(lambda: rows.Towers(bool(more))), rows.drawn(), []
    optimizers = rows.optimizers(list(model.named_parameters()))
    schedules = [LambdaLR(one, lambda step: 0.9**step) for one in optimizers]
    for step in range(rows.STEPS):
        epoch, start = divmod(step * rows.BATCH, len(data))
        numbers = [sample_index(position, len(data), 0, epoch) for position in range(start, start + rows.BATCH)]
        batch = [tensor[numbers] for tensor in data.tensors]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = rows.loss(model(*batch[:2]), batch)
        loss.backward()
        params = [param for param in model.parameters() if param.grad is not None]
        grads = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in params if p.grad is not None]
        norm = float(torch.stack([grad.norm() for grad in grads]).norm())
        for param in params:
            param.grad = param.grad * min(1.0, rows.CLIP / (norm + 1e-6))  # type: ignore[operator]
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        figures.append((float(loss.detach()), norm))
    return dict(model.state_dict()), figures


def train_sparse(folder: Path, workers: int, *options: str, more: str = "", chaos: str = "") -> str:
    said = ("--workers", str(workers), "--run-dir", "run", *options)
    done = paceline(
        "run", *said, SCRIPTS / "rows.py", "out.safetensors", *more.split(), cwd=folder, PACELINE_CHAOS=chaos
    )
    return done.stdout + done.stderr


def check_sparse(folder: Path, more: str = "") -> None:
    weights, figures = sparse_by_hand(more)
    assert apart(load_file(folder / "out.safetensors"), weights) < TOLERANCE
    made = ast.literal_eval((folder / "figures").read_text())
    assert torch.allclose(torch.tensor(made), torch.tensor(figures)[-len(made) :], rtol=TOLERANCE, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_sparse_gradients_on_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    train_sparse(tmp_path, workers)
    check_sparse(tmp_path)


def test_only_touched_rows_of_sparse_gradients_travel(tmp_path: Path) -> None:
    train_sparse(tmp_path, 2)
    check_sparse(tmp_path)
    (figures,) = (event for event in read_journal(tmp_path / "run") if event["event"] == "figures")
    widest = 8 * (rows.WIDTH + 1)  # bytes of a row in float64, with its number
    for predicted, measured in zip(figures["predicted"], figures["measured"], strict=True):
        sent = measured["sent"]
        assert predicted["gradients"] == predicted["sent"]["gradients"] == DENSE
        assert sent["rows"] <= 4 * rows.BATCH * widest + 200 < 8 * rows.WIDTH * rows.ITEMS / 2


FAULTS = [("kill:2@3.forward", "kill:1@5.summed"), ("kill:0@3.reduced", "kill:4@5.applied"), ("stop:3@4.backward",)]


@pytest.mark.parametrize(
    ("workers", "faults", "more"),
    [(3, FAULTS[0], "whole"), *(pytest.param(5, faults, "", marks=pytest.mark.slow) for faults in FAULTS)],
)
def test_kill_of_a_worker_with_sparse_gradients(
    workers: int, faults: tuple[str, ...], more: str, tmp_path: Path
) -> None:
    """Its step is done again, or ended, and it comes back with the state of others. `whole`: a table is also used as a
    whole, by some of the rows; its gradient is a whole one on some workers, and none on others.
    """
    train_sparse(tmp_path, workers, more=more, chaos=",".join(faults))
    assert len(read_log(tmp_path / "run")) == len(faults)
    check_sparse(tmp_path, more)


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
def test_kill_with_sparse_gradients_on_parameter_servers(plan: str, more: str, tmp_path: Path) -> None:
    """Also where a worker is lost, or a server of which there is a copy."""
    fault = "kill:1000001@4.reduced" if "copies" in plan else "kill:1@4.summed"
    train_sparse(tmp_path, SERVED[plan], "--plan", f"micro=2 {plan}", more=more, chaos=fault)
    assert len(read_log(tmp_path / "run")) == 1
    check_sparse(tmp_path, more)


OUT_OF_STEP = "server=2 copies=1 staleness=4 window=3"


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("whole", ""),
        pytest.param("", "", marks=pytest.mark.slow),
        *(pytest.param("", f"kill:{server}@4.{moment}", marks=pytest.mark.slow) for server, moment in KILLS),
    ],
)
def test_async_sparse_gradients_of_one_worker_are_those_of_one_process(more: str, fault: str, tmp_path: Path) -> None:
    """Through a resume in the midst of an epoch, and where a server is lost of which there is a copy."""
    for options in (("--steps", "5"), ()):
        train_sparse(
            tmp_path, 1, "--plan", f"micro=2 {OUT_OF_STEP}", *options, more=more, chaos=fault if options else ""
        )
    assert len(read_log(tmp_path / "run") if fault else []) == bool(fault)
    weights, _ = sparse_by_hand(more)
    assert apart(load_file(tmp_path / "out.safetensors"), weights) < TOLERANCE


@pytest.mark.slow
def test_resume_of_sparse_gradients_on_other_workers(tmp_path: Path) -> None:
    train_sparse(tmp_path, 3, "--steps", "3")
    train_sparse(tmp_path, 2, "--steps", "6")
    train_sparse(tmp_path, 1)
    check_sparse(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 5])
def test_sparse_table_that_is_used_as_a_whole_too(workers: int, tmp_path: Path) -> None:
    """By some of the rows: its gradient is a whole one on some workers, and none on others."""
    train_sparse(tmp_path, workers, more="whole")
    check_sparse(tmp_path, "whole")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["codec=bf16", "precision=bf16", "recompute=blocks"])
def test_sparse_gradients_with_codec_precision_and_recompute(plan: str, tmp_path: Path) -> None:
    train_sparse(tmp_path, 2, "--plan", f"micro=2 {plan}")
    weights, _ = sparse_by_hand()
    assert apart(load_file(tmp_path / "out.safetensors"), weights) < (1e-2 if "bf16" in plan else TOLERANCE)
