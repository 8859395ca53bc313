"""Models of very many small tensors: what is done for each of them is done once, and by no tensors of their own."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import trainer
from cases import mlp, rows
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.checkpoint import files
from paceline.checkpoint import writer as saver
from paceline.checkpoint.storage import blocks, write_file
from paceline.parallel.data_parallel import kinds
from paceline.session.checkpoint_manager import CheckpointManager

MANY = 2000


class Sized(torch.Tensor):
    """Knows how often it was asked for its size."""

    asked = 0

    @property
    def nbytes(self) -> int:
        Sized.asked += 1
        return super().nbytes


class Operations(TorchDispatchMode):
    """Counts what torch is told to do."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_weights_of_many_small_tensors_are_grouped_in_one_pass() -> None:
    Sized.asked = 0
    some = [torch.zeros(4, dtype=(torch.float32, torch.float64)[number % 2]) for number in range(MANY)]
    found = list(kinds((tensor.as_subclass(Sized) for tensor in some), 1600))
    assert Sized.asked == MANY
    assert all(len({tensor.dtype for tensor in alike}) == 1 for alike in found)
    sizes = {
        dtype: [len(alike) for alike in found if alike[0].dtype == dtype] for dtype in (torch.float32, torch.float64)
    }
    assert sizes == {torch.float32: [100] * 10, torch.float64: [50] * 20}


def test_checkpoint_layout_makes_no_tensors() -> None:
    tensors = {str(number): torch.zeros(4) for number in range(MANY)}
    with Operations() as operations:
        shapes = files.tensor_infos(tensors)
        plan = files.layout({}, tensors, {}, [0, 1], "aaaaaaaa")
    assert operations.count == 0
    assert shapes["0"] == (torch.float32, (4,))
    assert [len(slices) for part in plan for slices in part.values()] == [MANY // 2] * 2


def test_checkpoint_copies_a_small_tensor_with_one_operation() -> None:
    small = torch.arange(4.0)
    with Operations() as operations:
        copy = saver._copy(small)
    assert operations.count <= 2  # it is detached
    assert torch.equal(copy, small)
    assert copy.data_ptr() != small.data_ptr()


def test_checkpoint_writes_small_tensors_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    write = os.write

    def counted(fd: int, data: Any) -> int:
        writes.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", counted)
    small, large = [bytes([number % 251]) * 1000 for number in range(MANY)], bytes(100_000)
    size, _ = write_file(tmp_path / "file", [*small, large, b"", *small])
    assert (tmp_path / "file").read_bytes() == b"".join([*small, large, *small])
    assert size == sum(writes)
    assert len(writes) <= 7
    assert [bytes(block) for block in blocks([b"", b""])] == []


def test_garbage_collector_is_off_while_a_checkpoint_starts(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    looks: list[str] = []
    begin = CheckpointManager._start
    code, thresholds = inspect.unwrap(begin).__code__, gc.get_threshold()

    def note(phase: str, _: object) -> None:
        frame = sys._getframe()
        while phase == "start" and frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code is code:
                looks.append(frame.f_code.co_filename)

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.many = mlp(), nn.ParameterList(torch.zeros(1) for _ in range(MANY // 2))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.net(rows) + torch.stack([*self.many]).sum()

    def counted(*arguments: Any) -> Any:
        started.append(True)
        return begin(*arguments)

    monkeypatch.setattr(CheckpointManager, "_start", counted)
    mine = trainer(Many, plan="micro=16")
    gc.callbacks.append(note)
    gc.set_threshold(50)
    try:
        for report in mine.steps(rows(1, 45, 10), count=2):
            if report.step == 1:
                mine.save()
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    assert started
    assert looks == []
