"""Trainers that have ended: what they leave in memory and in checkpoints, and what a resumed run makes of them."""

from __future__ import annotations

import gc
import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import happened, trainer
from cases import rows
from closed_in_turns import EPOCHS, FOLDS, distance, fold, loss, net, optimizer
from closed_in_turns import rows as all_rows
from launching import SCRIPTS, paceline
from oracle import apart
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LinearLR

from paceline.checkpoint.files import find_checkpoint
from paceline.checkpoint.storage import storage_at
from paceline.errors import UsageError


def data() -> list[Any]:
    return rows(3, 48, 10)


def expected() -> tuple[list[float], list[float], list[dict[str, torch.Tensor]]]:
    """The figures of scripts/closed_in_turns.py and the weights, in plain PyTorch."""
    distances, errors, weights = [], [], []
    for number in range(FOLDS):
        model = net()
        adam = optimizer(model.parameters())
        for _ in range(EPOCHS):
            for batch in torch.utils.data.DataLoader(fold(number), 4):
                adam.zero_grad()
                loss(model(batch[0]), batch).backward()
                adam.step()
        with torch.no_grad():
            x, y = (torch.stack(column) for column in zip(*all_rows, strict=True))
            errors += [float(loss(model(x), (x, y))), 10.0 * number + 4]
        distances.append(distance(model))
        weights.append(model.state_dict())
    return distances, errors, weights


def run_script(folder: Path, how: str, workers: int, *options: str, code: int = 0, **env: str) -> None:
    command = (
        "run",
        "--workers",
        str(workers),
        "--run-dir",
        "run",
        *options,
        SCRIPTS / "closed_in_turns.py",
        how,
        "out.json",
    )
    paceline(*command, cwd=folder, code=code, **env)


def check(folder: Path, plain: bool = True) -> None:
    """`plain`: without a plan, for which the script writes no distances, and then nothing is exported either."""
    distances, errors, weights = expected()
    found = json.loads((folder / "out.json").read_text())
    assert found["errors"] == pytest.approx(errors, rel=1e-12)
    assert not plain or found["distances"] == pytest.approx(distances, rel=1e-12)
    newest = find_checkpoint(storage_at(folder / "run" / "checkpoints"), print)
    assert newest is not None
    in_checkpoint = {int(name.split(".")[1]) for name in newest.manifest["tensors"]}
    assert in_checkpoint == {FOLDS - 1}, "only the last trainer's tensors"
    if not plain:
        return
    paceline("export", "run", "first.safetensors", "--trainer", "0", cwd=folder)
    assert apart(load_file(folder / "first.safetensors"), weights[0]) <= 1e-12
    assert "12 parameters" not in paceline("inspect", "run", cwd=folder).stdout


@pytest.mark.parametrize("how", ["close", pytest.param("drop", marks=pytest.mark.slow)])
def test_resumed_script_finds_the_last_weights_of_trainers_that_have_ended(how, tmp_path):
    """Stopped in each trainer's loop, and continued by another number of workers."""
    for workers, steps in ((1, 3), (2, 6), (1, 10)):
        run_script(tmp_path, how, workers, "--steps", str(steps))
    run_script(tmp_path, how, 2)
    check(tmp_path)


def test_resumed_run_cannot_train_a_trainer_that_has_ended(golden, tmp_path):
    run_script(tmp_path, "close", 1, "--steps", "6")
    last = tmp_path / "run" / "checkpoints" / "trainer-0"
    command = ("run", "--workers", "1", "--run-dir", "run", SCRIPTS / "closed_in_turns.py", "close", "out.json")
    (line,) = re.findall(r"^ *(UsageError: .*)$", paceline(*command, cwd=tmp_path, code=2, MORE="1").stderr, re.M)
    golden("more steps of a trainer that has ended", line)
    shutil.rmtree(last)
    missing = "the final weights of trainer 0 are missing: "
    cure = "/run/checkpoints/trainer-0/step-000000000004; restore them from a copy, or choose another --run-dir\n"
    said = paceline(*command, cwd=tmp_path, code=None)
    assert (missing in said.stderr, cure in said.stderr, said.returncode != 0) == (True, True, True), said.stderr


@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        (2, "data=2"),
        *(
            pytest.param(workers, plan, marks=pytest.mark.slow)
            for workers, plan in (
                (1, "data=1"),
                (3, "data=3"),
                (2, "shard=2 zero=1"),
                (2, "shard=2 zero=3"),
                (2, "tensor=2"),
                (2, "data=2 exact"),
            )
        ),
    ],
)
def test_killed_worker_that_joins_again_passes_over_trainers_that_have_ended(workers, plan, tmp_path):
    """It is lost in the second trainer's loop and in the third's."""
    chaos = f"kill:{workers - 1}@6.backward,kill:{workers - 1}@10.backward" if workers > 1 else ""
    run_script(tmp_path, "close", workers, PLAN=plan, PACELINE_CHAOS=chaos)
    check(tmp_path, plain=False)


@pytest.mark.parametrize("how", ["close", pytest.param("drop", marks=pytest.mark.slow)])
def test_closed_trainer_gives_back_shared_memory(how, tmp_path):
    run_script(tmp_path, how, 2)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["mapped"][0] == found["mapped"][2] > 0
    assert found["held"] == ([0, 0, 0] if how == "close" else [1, 1, 1]), "at most one waits to be released"


def test_dropped_trainer_is_freed_without_garbage_collection(run):
    trainer()  # the first optimizer of a process imports modules of torch, which may keep frames of the import
    gc.collect()
    gc.disable()
    try:
        mine = trainer()
        for _ in mine.steps(data(), count=2):
            pass
        held = [
            weakref.ref(one)
            for one in (mine, mine.model, mine._job.optimizers[0], mine._strategy, mine._context, mine._replica)
        ]
        del mine
        assert held[0]() is None
        trainer()
        assert [one() for one in held] == [None] * len(held)
    finally:
        gc.enable()


def test_closed_trainer_is_freed_with_its_scheduler(run):
    mine = trainer(schedule=LinearLR)
    for _ in mine.steps(data(), count=1):
        pass
    held = [weakref.ref(one) for one in (mine.model, mine._job.optimizers[0])]
    mine.close()
    assert [one() for one in held] == [None, None]


USES = {
    "steps": lambda mine: mine.steps(data()),
    "step": lambda mine: mine.step(None),
    "evaluate": lambda mine: mine.evaluate(data(), lambda out, batch: {}),
    "predict": lambda mine: mine.predict(data()),
    "keep_best": lambda mine: mine.keep_best("loss"),
    "save": lambda mine: mine.save(),
    "export": lambda mine: mine.export("out.safetensors"),
    "stop": lambda mine: mine.stop(),
    "log": lambda mine: mine.log(loss=1.0),
    "model": lambda mine: mine.model,
    "state": lambda mine: mine.state,
    "device": lambda mine: mine.device,
}


def test_closed_trainer_refuses_all_uses(run, golden):
    mine = trainer()
    for _ in mine.steps(data(), count=2):
        pass
    mine.close()
    mine.close()
    for use in USES.values():
        with pytest.raises(UsageError) as caught:
            use(mine)
        golden("a closed trainer", str(caught.value))
    assert (mine.steps_done, mine.complete, mine.main, str(mine.plan)) == (2, True, True, "data=1")


def test_model_of_the_script_keeps_its_weights_after_close(run):
    model = net()
    mine = trainer(model, loss=loss, optimizer=optimizer)
    for _ in mine.steps(all_rows, count=2):
        pass
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mine.close()
    assert apart(model.state_dict(), before) == 0
    model(all_rows[0][0]).sum().backward()  # no hook of the trainer's is left
    assert all(param.grad is not None for param in model.parameters())
    again = trainer(model, loss=loss, optimizer=optimizer)
    for _ in again.steps(all_rows, count=1):
        pass
    assert run.trainers.step == 3


def test_close_inside_the_loop_needs_a_break(run, golden):
    mine = trainer()
    for report in mine.steps(data()):
        if report.step == 2:
            mine.close()
            break
    mine = trainer()
    with pytest.raises(UsageError) as caught:
        for _ in mine.steps(data()):
            mine.close()
    golden("close() in a loop that goes on", str(caught.value))


def test_trainer_that_ends_in_an_exception_is_released_with_the_next_one(run):
    mine = trainer()
    try:
        for _ in mine.steps(data()):
            raise ZeroDivisionError
    except ZeroDivisionError:
        mine.close()
    assert run.trainers.ended == {0}
    trainer()
    assert run.trainers.ended == {1}, "the second one was dropped at once"


def test_figures_are_measured_for_each_trainer(run):
    mine, other = (
        trainer(),
        trainer(lambda: torch.nn.Sequential(*(net() for _ in range(1))), loss=loss, optimizer=optimizer),
    )
    for _ in mine.steps(data(), count=3):
        for _ in other.steps(all_rows, count=1):
            pass
    found = {event["trainer"]: event["measured"][0] for event in happened(run, "figures")}
    sizes = [sum(p.nbytes for p in one.model.parameters()) for one in (mine, other)]
    assert [found[number]["gradients"] for number in (0, 1)] == sizes
    assert [found[number]["sent"] for number in (0, 1)] == [{}, {}]
