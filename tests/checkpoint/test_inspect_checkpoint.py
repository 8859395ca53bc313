"""What a checkpoint holds, told without the model's code: compared with what was put in."""

from __future__ import annotations

import hashlib
import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import weights_of, write_checkpoint
from launching import paceline, train_basics
from test_checkpoint_tree import refusal
from test_checkpoint_write import flip
from torch import nn

from paceline.checkpoint.export import write_model
from paceline.checkpoint.import_weights import import_model
from paceline.checkpoint.inspect import inspect_run
from paceline.checkpoint.safetensors_file import size_text
from paceline.checkpoint.tree import flatten
from paceline.errors import CheckpointError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.half = nn.Linear(8, 8).bfloat16()
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


def save(run: Path, step: int) -> None:
    """A checkpoint in the form in which a run writes one."""
    net = Net()
    embed = {"embed.weight": {"step": torch.tensor(3.0), "exp_avg": torch.zeros(50, 8)}}
    group = {"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": float("inf"), "maximize": False, "foreach": None}
    phase = {"number": 0, "rows": 96, "epochs": 3, "total": 12, "done": 7, "complete": False, "stopped": False}
    trainer = {
        "model": net.state_dict(keep_vars=True),
        "optimizers": [{"groups": [{**group, "params": ["embed.weight", "norm.weight"]}], "state": embed}],
        "schedulers": [{"last_epoch": 7, "_last_lr": [0.25]}],
        "steps": 7,
        "grid": [24, 3],
        "phases": [{**phase, "first_epoch": 2, "begun": 2, "inside": {}}],
        "stopped": False,
        "state": {
            "best": ("plain", 1.5),
            "nan": ("plain", float("nan")),
            "none": ("plain", None),
            "seen": ("plain", [1, 2]),
            "pair": ("plain", (1, 2)),
            "table": ("plain", torch.zeros(3, 2)),
            "counts": ("plain", np.zeros(3)),
            "mean": ("object", {"w": torch.zeros(4)}),
        },
    }
    second = {"model": nn.Linear(2, 1).state_dict(), "optimizers": [], "schedulers": [], "steps": 0, "phases": []}
    flat, skeleton = flatten({"trainers": [trainer, second], "results": []}, "")
    versions = {"python": "3.11.7", "torch": "2.13.0", "paceline": "0.1.0"}
    manifest = {"tree": skeleton, "plan": "data=3", "workers": 3, "versions": versions, "script": "", "streams": []}
    write_checkpoint(run, step, flat, manifest, keep=9)


def told(run: Path, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(inspect_run(run, as_json=True, **options))
    return found


def test_inspect_json(tmp_path: Path) -> None:
    save(tmp_path, 7)
    found = told(tmp_path)
    path = tmp_path / "checkpoints/step-000000000007"
    (listed,) = found.pop("checkpoints")
    assert abs(datetime.fromisoformat(listed.pop("written")).timestamp() - time.time()) < 100
    size = sum(file.stat().st_size for file in path.iterdir())
    assert listed == {"step": 7, "bytes": size, "whole": True, "damage": None, "path": str(path)}
    first, second = found.pop("trainers")
    data, file = weights_of(path).read_bytes(), weights_of(path).name
    assert found == {
        "run": str(tmp_path),
        "best": [],
        "step": 7,
        "format": 2,
        "plan": "data=3",
        "workers": 3,
        "versions": {"python": "3.11.7", "torch": "2.13.0", "paceline": "0.1.0"},
        "imported": None,
        "files": [{"name": file, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}],
    }
    parameters = list(Net().parameters())
    buffers = list(Net().buffers())
    assert first["weights"] == {
        "tensors": len(Net().state_dict()),
        "values": sum(tensor.numel() for tensor in parameters + buffers),  # tied ones once
        "trained": 50 * 8 + 8,
        "dtypes": ["bfloat16", "float32", "int64"],
        "bytes": sum(tensor.nbytes for tensor in parameters + buffers),
    }
    (optimizer,) = first["optimizers"]
    assert optimizer == {
        "bytes": 4 + 50 * 8 * 4,
        "groups": [
            {"lr": 0.5, "betas": [0.9, 0.99], "weight_decay": "inf", "maximize": False, "foreach": None, "params": 2}
        ],
    }
    assert first["schedulers"] == [{"last_epoch": 7, "_last_lr": [0.25]}]
    assert first["grid"] == {"global_batch": 24, "micro": 3}
    assert first["phases"] == [{"epoch": 3, "done": 7, "total": 12, "epochs": 3, "rows": 96, "complete": False}]
    assert first["state"] == {
        "best": "float",
        "nan": "float",
        "none": "None",
        "seen": "list",
        "pair": "tuple",
        "table": "tensor float32 [3, 2]",
        "counts": "array <f8 [3]",
        "mean": "object with state_dict(), 16 bytes of tensors",
    }
    assert second["weights"]["values"] == 3
    assert second["weights"]["trained"] is None
    assert second["grid"] is None


def test_inspect_tables(tmp_path: Path) -> None:
    save(tmp_path, 7)
    save(tmp_path, 9)
    damaged = weights_of(tmp_path / "checkpoints/step-000000000009")
    flip(damaged, -1)
    lines = inspect_run(tmp_path, tensors=True).splitlines()
    size, written = told(tmp_path)["files"][0], [row["written"] for row in told(tmp_path)["checkpoints"]]
    whole = [size_text(row["bytes"]) for row in told(tmp_path)["checkpoints"]]
    assert lines[0].split() == ["step", "written", "size", "state"]
    assert lines[2:4] == [
        f"   9   {written[0]}   {whole[0]}   damaged: {damaged.name}: SHA-256 differs",
        f"   7   {written[1]}   {whole[1]}   intact",
    ]
    said = "\n".join(lines[4:])
    seen = [line.split() for line in lines[4:]]
    for line in [
        f"step 7 of {tmp_path}",
        "format    2",
        "plan      data=3",
        "workers   3",
        "versions  python 3.11.7, torch 2.13.0, paceline 0.1.0",
        "grid          global batch 24 in micro-batches of 3 rows",
        "phase 0       epoch 3, 7 of 12 steps done",
        "weights       505 values in 9 tensors, 408 of them trained, bfloat16, float32, int64, 1.9 kB",
        "optimizer 0   1.6 kB of state",
        "  group 0     2 parameters, lr 0.5, betas [0.9, 0.99], weight_decay inf, maximize False",
        "scheduler 0   last_epoch 7, _last_lr [0.25]",
        "state 'best'  float",
        "weights  3 values in 2 tensors, float32, 12 bytes",
        f"{size['name']}   {size_text(size['bytes'])}   {size['sha256'][:12]}...",
    ]:
        assert line.split() in seen
    rows = [line.split() for line in said[said.index("tensor  ") :].splitlines()[2:]]
    assert ["trainers.0.model.embed.weight", "float32", "[50,", "8]", "1,600"] in rows
    assert ["trainers.0.model.norm.num_batches_tracked", "int64", "[]", "8"] in rows
    assert len(rows) == len(told(tmp_path, tensors=True)["tensors"]) == 8 + 2 + 1 + 1 + 1 + 2


def test_inspect_a_chosen_and_a_damaged_checkpoint(tmp_path: Path) -> None:
    wanted = f"{tmp_path} does not contain a checkpoint; use the --run-dir of a run that has saved a checkpoint"
    assert refusal(CheckpointError, inspect_run, tmp_path) == wanted
    for step in (3, 5, 7):
        save(tmp_path, step)
    assert told(tmp_path, step=3)["step"] == 3
    wanted = f"{tmp_path} does not contain a checkpoint of step 4; choose one of these steps: 3, 5, 7"
    assert refusal(CheckpointError, inspect_run, tmp_path, step=4) == wanted
    folder = tmp_path / "checkpoints"
    flipped, removed = (weights_of(folder / f"step-{step:012d}") for step in (7, 3))
    flip(flipped, -1)
    (folder / "step-000000000005/manifest.json").unlink()
    found = told(tmp_path)
    assert found["step"] == 3
    damage = [f"{flipped.name}: SHA-256 differs", "not finished", None]
    assert [row["damage"] for row in found["checkpoints"]] == damage
    assert [row["whole"] for row in found["checkpoints"]] == [False, False, True]
    reasons = [f"step 7 ({damage[0]})", f"step 5 ({damage[1]})", f"step 3 ({removed.name} is missing)"]
    assert refusal(CheckpointError, inspect_run, tmp_path, step=7) == (
        f"no checkpoint in {folder} is intact: {reasons[0]}; restore one from a copy"
    )
    removed.unlink()
    assert refusal(CheckpointError, inspect_run, tmp_path) == (
        f"no checkpoint in {folder} is intact: {', '.join(reasons)}; restore one from a copy"
    )


def test_inspect_lists_a_checkpoint_of_a_newer_format(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save(tmp_path, 7)
    manifest = tmp_path / "checkpoints/step-000000000007/manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 99'))
    newest, other = told(tmp_path)["checkpoints"]
    assert newest["damage"].endswith("has format version 99, but this version of Paceline reads only versions up to 2")
    assert other["whole"]


def test_inspect_of_large_checkpoints_says_that_it_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 7)
    told(tmp_path)
    assert capsys.readouterr().err == ""
    with open(tmp_path / "checkpoints/step-000000000007/beside", "wb") as file:
        os.truncate(file.fileno(), 3_000_000_000)  # takes no room
    told(tmp_path)
    assert capsys.readouterr().err == "verifying 3.0 GB\n"


def test_inspect_imported_weights(tmp_path: Path) -> None:
    write_model(nn.Linear(3, 2).state_dict(), tmp_path / "m.safetensors")
    import_model(tmp_path / "m.safetensors", tmp_path / "run", trainer=1)
    found = told(tmp_path / "run")
    assert found["imported"] == f"{tmp_path}/m.safetensors"
    assert [trainer["weights"]["values"] for trainer in found["trainers"]] == [0, 8]
    assert f"\nimported  {tmp_path}/m.safetensors\n" in inspect_run(tmp_path / "run")


def test_inspect_command_on_a_real_run(tmp_path: Path) -> None:
    """What a real run writes, through the command, with nothing but JSON on standard output."""
    body = """
t = paceline.Trainer(net, cross_entropy, lambda p: torch.optim.AdamW(p, lr=0.1), global_batch=24,
                     schedule=lambda step: 0.5 ** step)
t.state["best"] = 1.0
list(t.steps(data, epochs=2))
list(t.steps(data, count=5))
"""
    train_basics(tmp_path, body, 2, "--steps", "11")
    found = json.loads(paceline("inspect", "out", "--json", "--step", "11", cwd=tmp_path).stdout)
    assert found["step"] == found["trainers"][0]["steps"] == 11
    assert (found["workers"], found["plan"]) == (2, "data=2")
    assert found["versions"]["torch"] == torch.__version__
    (trainer,) = found["trainers"]
    done = [(phase["epoch"], phase["done"], phase["total"], phase["complete"]) for phase in trainer["phases"]]
    assert done == [(1, 8, 8, True), (2, 3, 5, False)]
    assert trainer["weights"]["values"] == trainer["weights"]["trained"] == 16 * 10 + 16 + 2 * 16 + 2
    group = trainer["optimizers"][0]["groups"][0]
    assert (group["lr"], group["initial_lr"], group["params"]) == (0.1 * 0.5**11, 0.1, 4)
    assert trainer["schedulers"][0]["last_epoch"] == 11
    assert trainer["state"] == {"best": "float"}
