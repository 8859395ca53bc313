"""Prediction: model outputs in dataset order, returned or written to a file.

It goes in windows of a few micro-batches for each worker. One window is one operation of the team: the main worker says
which, everybody computes its part and sends it there. So a window that a loss interrupts is done again, a worker that
becomes the main one begins with the first window, as it has none, and memory holds one window.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy
import torch

from paceline.checkpoint.files import TensorInfo, write_cure
from paceline.checkpoint.safetensors_file import DTYPES, head, ordered
from paceline.checkpoint.storage import write_file
from paceline.checkpoint.tree import raw
from paceline.data.fingerprint import compare_read, compare_rows, first_rows
from paceline.data.loader import Feed
from paceline.errors import CheckpointError, UsageError, a
from paceline.evaluate.evaluate import EvalPass
from paceline.evaluate.metric_objects import to_main
from paceline.session.run import Run

_WINDOW = 4  # micro-batches of a worker
_BLOCK = 1 << 24


def predicted(run: Run, sweep: EvalPass, path: Path | None = None) -> Iterator[tuple[range, Any]]:
    """Yields rows and output of each micro-batch on the main worker. Other workers do their part and yield nothing.
    With a `path` the outputs go to that file, and nobody yields. Raises CheckpointError on all workers if the file
    cannot be written.
    """
    run.need_team()
    for step in run.results.take():
        if step != run.trainers.step or run.team.world.newcomer:
            run.reporter.say(
                f"predict() of step {step} is not repeated: the weights are those of step {run.trainers.step}",
                once=True,
            )
            return
    try:
        yield from _Outputs(sweep, path).windows()
    except GeneratorExit:  # the loop over them was left
        run.results.record(run.trainers.step)
        raise
    run.results.record(run.trainers.step)


class _Outputs:
    """One pass of predict(), on one worker."""

    def __init__(self, sweep: EvalPass, path: Path | None) -> None:
        self._sweep, self._path, self._file = sweep, path, _File(path) if path is not None else None
        self._word: list[int] | None = [_WINDOW * sweep.team.size, 0]  # micro-batches of a window, and which is next
        self._trouble: list[str] | None = None
        self._got: list[Any] | None = None
        self._feed: Feed | None = None
        self._fed = [0, 0]  # the window that it gave last, as in a word

    def windows(self) -> Iterator[tuple[range, Any]]:
        """Computes one window after another, and yields rows and output of each micro-batch on the main worker."""
        run = partial(self._sweep.team.transactions.run, self._window, spends="evaluating")
        try:
            while run() is not None:
                got, self._got = self._got, None
                if got is not None and self._word is not None:
                    self._word[1] += 1
                while got:
                    number, rows, output = got.pop(0)
                    row_range = range(number * self._sweep.micro, number * self._sweep.micro + rows)
                    if self._file is None:
                        yield row_range, output
                    else:
                        self._tries(partial(self._file.add, row_range, output))
        except GeneratorExit:  # the others wait for the next window
            self._word = None
            run()
            raise
        finally:
            if self._feed is not None:
                self._feed.close()

    def _tries(self, work: Callable[[], None]) -> None:
        """Does something on the main worker only. Its error is raised on all workers in the next window."""
        try:
            if self._trouble is None:
                work()
        except UsageError as error:
            self._trouble = [error.what, error.cure]
        except OSError as error:
            what = f"the outputs could not be written to {self._path}: {error.strerror}"
            self._trouble = [what, write_cure(error, None, "another file")]

    def _window(self) -> int | None:
        """Computes the next window. The main worker then has its outputs in `_got`. Returns the window's number, or
        None if there is none.
        """
        group, self._got = self._sweep.team.group, None
        group.declare(f"predict(){self._sweep.of}", kind="predict()")
        word = self._agreed()
        if word is None:
            return None
        size, at = word
        if self._feed is None or self._fed[0] != size or self._fed[1] > at:
            if self._feed is not None:
                self._feed.close()
            self._feed = self._sweep.feed(size)
        self._fed = word
        if at == 0:
            compare_rows(group, self._sweep.source, self._sweep.team.world.tell, "the dataset of predict()")
        more = self._feed.has(at)
        feed = self._feed
        compare_read(
            group, len(feed.read) * more, feed, first_rows(feed) if at == 0 else [], "the dataset of predict()"
        )
        if not more:
            if self._file is not None and group.rank == 0:
                self._tries(self._file.close)
            self._agreed()
            return None
        outputs: list[Any] = []
        with self._sweep.resting():
            micro_batches = self._feed.at(at, self._sweep.get_assignment())[2]
            self._sweep.over(at * size, micro_batches, lambda n, rows, out, _: outputs.append([n, rows, _plain(out)]))
        if gathered := to_main(group, outputs):
            self._got = sorted((part for parts in gathered for part in parts), key=lambda part: part[0])
        return int(at)

    def _agreed(self) -> Any:
        """Returns the main worker's next window. Raises its error on all workers. Part of the entered collective."""
        word, trouble = self._sweep.team.group.gather_json([self._word, self._trouble])[0]
        if trouble is not None:
            raise CheckpointError(*trouble)
        return word


def _plain(output: Any) -> Any:
    """Copies an output to the CPU: tensors, numbers and text in tuples, lists and dicts. Raises UsageError for other
    types.
    """
    if isinstance(output, torch.Tensor):
        return output.detach().to("cpu", copy=True)
    if isinstance(output, Mapping):
        return {str(name): _plain(value) for name, value in output.items()}
    if isinstance(output, (tuple, list)):
        return (tuple if isinstance(output, tuple) else list)(map(_plain, output))
    if output is None or isinstance(output, (bool, int, float, str)):
        return output
    cure = "use a forward= that returns tensors, or tuples, lists and mappings of tensors"
    raise UsageError(f"the output contains {a(type(output).__name__)}, which predict() cannot return", cure)


class _File:
    """The file of outputs: each name's rows are collected in a temporary file and put together at the end."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in (".npy", ".safetensors"):
            raise UsageError(f"predict() cannot write {path}", "use a file name that ends in .npy or .safetensors")
        self._path, self._array, self._rows = path, path.suffix == ".npy", 0
        self._kinds: dict[str, TensorInfo] = {}  # of a row
        self._parts: dict[str, IO[bytes]] = {}

    def add(self, rows: range, output: Any) -> None:
        """Appends the output of a micro-batch. Raises UsageError if its names, dtypes or shapes differ from the first
        ones.
        """
        named = output if isinstance(output, dict) and not self._array else {"output": output}
        kinds = {name: self._kind(tensor, len(rows)) for name, tensor in named.items()}
        self._kinds = self._kinds or {name: kind for name, kind in kinds.items() if kind is not None}
        if kinds != self._kinds:
            kinds_text = ", ".join(f"{name} {_describe_kind(tensor)}" for name, tensor in named.items())
            what = f"rows {rows.start}-{rows.stop - 1} cannot be written to {self._path}: {kinds_text}"
            cure = (
                "return a tensor (for .safetensors a mapping of tensors) with one entry per row and the same shape"
                " for all rows"
            )
            raise UsageError(what, cure)
        for name, tensor in named.items():
            if name not in self._parts:
                self._parts[name] = tempfile.TemporaryFile(dir=self._path.absolute().parent)  # noqa: SIM115
            self._parts[name].write(raw(tensor).numpy().data)
        self._rows += len(rows)

    def _kind(self, tensor: Any, rows: int) -> TensorInfo | None:
        """Returns dtype and shape of one row; None if the file cannot hold it."""
        if not isinstance(tensor, torch.Tensor) or tensor.shape[:1] != (rows,):
            return None
        held = _numpy(tensor.dtype) if self._array else tensor.dtype in DTYPES
        return TensorInfo(tensor.dtype, tuple(tensor.shape[1:])) if held else None

    def close(self) -> None:
        """Writes the file from the collected rows, and replaces a former one."""
        temporary = self._path.with_name(f".{self._path.name}.tmp-{os.getpid()}")
        try:
            write_file(temporary, self._chunks(), 0o666)
            os.replace(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def _chunks(self) -> Iterator[bytes]:
        infos = {name: TensorInfo(kind.dtype, (self._rows, *kind.shape)) for name, kind in self._kinds.items()}
        if self._array:
            text, one = io.BytesIO(), infos["output"]
            about = {"descr": _numpy(one.dtype), "fortran_order": False, "shape": one.shape}
            numpy.lib.format.write_array_header_1_0(text, about)
            yield text.getvalue()
        else:
            yield head(infos)[0]
        for name in ordered(infos):
            self._parts[name].seek(0)
            yield from iter(partial(self._parts[name].read, _BLOCK), b"")


def _numpy(dtype: torch.dtype) -> str:
    """Returns numpy's name of a dtype; empty if numpy has none. One that another library adds cannot be in a file."""
    try:
        known = numpy.dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        return ""
    return known.str if known.isbuiltin == 1 else ""


def _describe_kind(value: Any) -> str:
    tensor = isinstance(value, torch.Tensor)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if tensor else type(value).__name__
