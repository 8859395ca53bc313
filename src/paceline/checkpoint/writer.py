"""Copies and writes one worker's part of a checkpoint in a thread."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy
import torch

from paceline.base.sharding import ShardedTensor
from paceline.checkpoint.files import Files, Slice, take, write_files
from paceline.checkpoint.storage import Storage
from paceline.comm.shared_memory import raw_bytes
from paceline.errors import CheckpointError

_SMALL = 1 << 15  # bytes up to which torch copies with one thread and faster than numpy
_NICE = 10  # niceness of the thread while it hashes and writes, so that training has priority


class Background:
    """Runs a function in its own thread.

    When the thread is `over`, either `result` is set, or `trouble` has the error: what happened and what to do.
    `seconds` is the processor time of the thread.
    """

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        self.result: Any = None
        self.trouble: list[str] | None = None
        self.seconds = 0.0
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        self.trouble = ["the thread that wrote a checkpoint failed", "read the traceback that it printed above"]
        try:
            self.result, self.trouble = self._work(), None
        except CheckpointError as error:
            self.trouble = [error.what, error.cure]
        finally:
            self.seconds = time.thread_time()


class WriterJob(Background):
    """Writes one writer's files of the checkpoint of `step`, from slices of `tensors`, in a thread.

    The constructor copies the tensors, except those named in `calm`: only the optimizer update changes these, so the
    thread copies them, and `copied` waits for that. With `still` nothing is copied, because nothing changes until the
    thread ends. The result is the bytes and the SHA-256 of each file. `need` returns the bytes of the complete
    checkpoint.
    """

    def __init__(
        self,
        storage: Storage,
        step: int,
        files: Files,
        tensors: Mapping[str, torch.Tensor | ShardedTensor],
        calm: Collection[str],
        still: bool,
        reached: Callable[[str], None],
        need: Callable[[], int],
    ) -> None:
        self._to, self._files, self._reached, self._need = (storage, step), files, reached, need
        self._copies: dict[Slice, torch.Tensor] = {}
        self._later: list[tuple[Slice, int]] = []
        self._is_copied = threading.Event()
        for name, block in (held for slices in files.values() for held in slices):
            part = take(tensors[name], block)
            self._copies[name, block] = part if still or name in calm else _copy(part)
            if not still and name in calm:
                self._later.append(((name, block), part._version))
        super().__init__(self._write, "paceline-save")

    def copied(self) -> float:
        """Waits until the state may change; returns the seconds waited."""
        began = time.monotonic()
        self._is_copied.wait()
        return time.monotonic() - began

    def _write(self) -> Any:
        try:
            self._copy_later()
        finally:
            self._is_copied.set()
        if sys.platform.startswith("linux"):  # on other systems the niceness is that of the whole process
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._reached("writing")
        try:
            return write_files(*self._to, self._files, lambda name, block: self._copies[name, block], self._need)
        finally:
            self._copies.clear()

    def _copy_later(self) -> None:
        for key, version in self._later:
            live = self._copies[key]
            self._copies[key] = _copy(live)
            if live._version != version:
                what = f"checkpoint of step {self._to[1]} was discarded: {key[0]!r} changed before the optimizer update"
                raise CheckpointError(what, "change weights in the body of the training loop, not in the forward")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        return tensor.cpu()
    if tensor.nbytes <= _SMALL or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    made = torch.empty_like(tensor)
    numpy.copyto(
        raw_bytes(made).numpy(), raw_bytes(tensor).numpy()
    )  # with one thread, because torch's threads are busy training
    return made
