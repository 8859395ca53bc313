"""The weights alone, as safetensors: from a checkpoint or from a model."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import equal, flip, sample
from test_checkpoint_tree import refusal, same

from paceline.checkpoint.export import export_model, write_model
from paceline.checkpoint.files import write_checkpoint
from paceline.checkpoint.tensorfile import size_text
from paceline.checkpoint.tree import flatten
from paceline.errors import CheckpointError, UsageError


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.phase = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.register_buffer("flipped", torch.randn(3, 2).t())
        self.register_buffer("mirrored", torch.randn(2, dtype=torch.complex64).conj())


def save_net(folder: Path, step: int, *nets: torch.nn.Module) -> None:
    trainers = [{"model": net.state_dict(keep_vars=True), "step": step} for net in nets]
    flat, skeleton = flatten({"trainers": trainers}, "")
    write_checkpoint(folder, step, flat, {"tree": skeleton}, keep=9)


def test_export_holds_what_a_strict_load_needs(tmp_path: Path) -> None:
    torch.manual_seed(1)
    run, out = tmp_path / "run", tmp_path / "model.safetensors"
    nets = [Net(), Net(), Net()]
    save_net(run, 100, nets[0], nets[1])
    save_net(run, 120, nets[2], nets[1])
    for options, step, wanted in [
        ({}, 120, nets[2]),
        ({"trainer": 1}, 120, nets[1]),
        ({"step": 100}, 100, nets[0]),
    ]:
        line = export_model(run, out, **options)
        size = out.stat().st_size
        assert line == f"wrote {out}: 10 tensors, {size_text(size)}, from step {step} of {run}"
        fresh = Net()
        fresh.load_state_dict(load_file(out), strict=True)
        assert same(dict(fresh.state_dict()), dict(wanted.state_dict()))
        assert list(load_file(out).keys() ^ wanted.state_dict().keys()) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.safetensors", "run"]
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~current_umask()


def test_an_export_replaces_the_file_and_not_its_bytes(tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    write_model(sample(1), out)
    before = load_file(out)  # mapped, as a server would hold it
    write_model(sample(2), out)
    assert equal(before, sample(1))
    assert equal(load_file(out), sample(2))


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_export_says_what_it_passed_over(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "m.safetensors"
    save_net(run, 100, torch.nn.Linear(2, 2))
    save_net(run, 120, torch.nn.Linear(2, 2))
    flip(run / "checkpoints/step-000000000120/model.safetensors", -1)
    first, second = export_model(run, out).splitlines()
    assert first == "checkpoint of step 120 is damaged (model.safetensors: SHA-256 differs); taking step 100"
    assert second == f"wrote {out}: 2 tensors, {out.stat().st_size} bytes, from step 100 of {run}"


def test_export_errors(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "m.safetensors"
    wanted = f"there is no checkpoint in {run}; give the --run-dir of a run that saved one"
    assert refusal(CheckpointError, export_model, run, out) == wanted
    save_net(run, 100, torch.nn.Linear(2, 2))
    save_net(run, 120, torch.nn.Linear(2, 2))
    wanted = f"there is no checkpoint of step 70 in {run}; choose one of the steps 100, 120"
    assert refusal(CheckpointError, export_model, run, out, step=70) == wanted
    assert refusal(UsageError, export_model, run, out, trainer=1) == (
        f"there is no trainer 1 in step 120 of {run}, which has 1; "
        "count trainers from 0, in the order in which the script makes them"
    )
    assert refusal(UsageError, export_model, run, tmp_path / "m.pt") == (
        f"the model cannot be exported to {tmp_path}/m.pt: only .safetensors files, which run no code, "
        f"are written; name it {tmp_path}/m.safetensors"
    )
    assert refusal(CheckpointError, export_model, run, tmp_path / "no/m.safetensors") == (
        f"the model could not be written to {tmp_path}/no/m.safetensors: No such file or directory; "
        "see that the folder exists and can be written to, or choose another file"
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"a": 1}, "dict"),
        (torch.ones(2, dtype=torch.complex128), "torch.complex128 tensor on cpu"),
        (torch.ones(2, device="meta"), "torch.float32 tensor on meta"),
    ],
)
def test_a_state_that_safetensors_cannot_hold(tmp_path: Path, value: Any, kind: str) -> None:
    assert refusal(UsageError, write_model, {"x._extra_state": value}, tmp_path / "m.safetensors") == (
        f"'x._extra_state' of the model's state is of a kind that safetensors files do not hold ({kind}); "
        "keep it out of state_dict(), as register_buffer(..., persistent=False) does, or convert it"
    )
    assert list(tmp_path.iterdir()) == []
