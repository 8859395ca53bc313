"""Prediction: what a model gives for every row of a dataset, in its order, on the main worker or in a file.

It goes in windows of a few micro-batches for each worker. One window is one operation of the team: the main worker says
which, everybody computes its part and sends it there. So a window that a loss interrupts is done again, a worker that
becomes the main one begins with the first window, as it has none, and memory holds one window.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy
import torch

from paceline.checkpoint.export import FILE_MODE, explained, whole_file
from paceline.checkpoint.files import Whole
from paceline.checkpoint.storage import Chunks, write_file
from paceline.checkpoint.tensorfile import DTYPES, head, ordered
from paceline.data.loader import Feed
from paceline.errors import CheckpointError, PacelineError, UsageError, a
from paceline.evaluate import Sweep
from paceline.metrics import to_main
from paceline.run import Run
from paceline.team.ahead import raw
from paceline.team.operations import Simple

_WINDOW = 4  # micro-batches of a worker
_BLOCK = 1 << 24
_SAME = "return tensors whose first dimension is the row, alike for all rows, or leave path= out"


def predicted(run: Run, sweep: Sweep) -> Iterator[tuple[range, Any]]:
    """The rows and output of each micro-batch on the main worker; nothing on the others, which do their part."""
    if _passed(run):
        return
    try:
        yield from _Outputs(sweep).windows()
    except GeneratorExit:
        run.record(run.step)
        raise
    run.record(run.step)


def write(run: Run, sweep: Sweep, path: Path) -> Path:
    """Writes the outputs to a file that the main worker makes. Raises CheckpointError on all where it cannot."""
    if path.suffix not in (".npy", ".safetensors"):
        raise UsageError(f"predict() cannot write {path}", "name a file that ends in .npy or .safetensors")
    if not _passed(run):
        file = _File(path)
        outputs = _Outputs(sweep, file.close)
        for rows, output in outputs.windows():
            outputs.tries(partial(file.add, rows, output))
        run.record(run.step)
    return path


def _passed(run: Run) -> bool:
    """Whether this was done before the checkpoint that the run resumes from, with weights that are gone."""
    for step in run.recorded():
        if step != run.step or run.team.world.newcomer:
            run.say(f"predict() of step {step} is not done again: the weights are of step {run.step}", once=True)
            return True
    return False


class _Outputs:
    """One going through; `finish` is called on the main worker when it has handed out all."""

    def __init__(self, sweep: Sweep, finish: Callable[[], None] = lambda: None) -> None:
        self._sweep, self._finish = sweep, finish
        self._word: list[int] | None = [_WINDOW * sweep.team.size, 0]  # micro-batches of a window, and which is next
        self._trouble: list[str] | None = None
        self._got: list[Any] | None = None
        self._feed: Feed | None = None
        self._fed = [0, 0]  # the window that it gave last, as in a word

    def windows(self) -> Iterator[tuple[range, Any]]:
        run = partial(self._sweep.team.operations.run, Simple(self._window, spends="evaluating"))
        try:
            while run() is not None:
                got, self._got = self._got, None
                if got is not None and self._word is not None:
                    self._word[1] += 1
                while got:
                    number, rows, output = got.pop(0)
                    start = number * self._sweep.micro
                    yield range(start, start + rows), output
        except GeneratorExit:  # the loop over them was left: the others wait for the next window
            self._word = None
            run()
            raise
        finally:
            if self._feed is not None:
                self._feed.close()

    def tries(self, work: Callable[[], None]) -> None:
        """Does what the main worker alone does; its failure will be everybody's."""
        try:
            work()
        except PacelineError as error:
            self._trouble = [error.what, error.cure]

    def _window(self) -> int | None:
        """The next window, whose outputs are then in `_got` of the main worker; None: there is none."""
        group, self._got = self._sweep.team.group, None
        group.enter("predict()")
        word = self._agreed()
        if word is None:
            return None
        size, at = word
        if self._feed is None or self._fed[0] != size or self._fed[1] > at:
            if self._feed is not None:
                self._feed.close()
            self._feed = self._sweep.feed(size)
        self._fed = word
        if not self._feed.has(at):
            if group.rank == 0:
                self.tries(self._finish)
            self._agreed()
            return None
        mine: list[Any] = []
        with self._sweep.resting():
            micro_batches = self._feed.at(at)[2]
            self._sweep.over(at * size, micro_batches, lambda n, rows, out, _: mine.append([n, rows, _plain(out)]))
        if found := to_main(group, mine):
            self._got = sorted((part for parts in found for part in parts), key=lambda part: part[0])
        return at

    def _agreed(self) -> Any:
        """What the main worker says; where it is in trouble all are. Part of the entered collective."""
        word, trouble = self._sweep.team.group.gather_json([self._word, self._trouble])[0]
        if trouble is not None:
            raise CheckpointError(*trouble)
        return word


def _plain(output: Any) -> Any:
    """A copy of an output on the CPU: tensors, numbers and text in tuples, lists and dicts."""
    if isinstance(output, torch.Tensor):
        return output.detach().to("cpu", copy=True)
    if isinstance(output, Mapping):
        return {str(name): _plain(value) for name, value in output.items()}
    if isinstance(output, (tuple, list)):
        return (tuple if isinstance(output, tuple) else list)(map(_plain, output))
    if output is None or isinstance(output, (bool, int, float, str)):
        return output
    cure = "give a forward= that returns tensors, or tuples, lists and mappings of them"
    raise UsageError(f"the output has {a(type(output).__name__)}, which predict() cannot hand on", cure)


class _File:
    """Outputs as they come, each name's in a file that has no name itself; then all of them in one."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, 0
        self._kinds: dict[str, Whole] = {}  # of a row
        self._parts: dict[str, IO[bytes]] = {}

    def add(self, rows: range, output: Any) -> None:
        named, where = output if isinstance(output, dict) else {"output": output}, f"rows {rows.start}-{rows.stop - 1}"
        for name, tensor in named.items():
            if not isinstance(tensor, torch.Tensor) or tensor.shape[:1] != (len(rows),):
                is_ = f"has the shape {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else "is no tensor"
                raise UsageError(f"{name!r} of {where} {is_}", _SAME)
        kinds = {name: Whole(tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in named.items()}
        self._kinds = self._kinds or self._held(kinds, isinstance(output, dict))
        if kinds != self._kinds:
            raise UsageError(f"{where} have {_told(kinds)}, and those before {_told(self._kinds)}", _SAME)
        self._rows += len(rows)
        with explained(self._path, "the outputs", None):
            for name, tensor in named.items():
                if name not in self._parts:
                    self._parts[name] = tempfile.TemporaryFile(dir=self._path.absolute().parent)  # noqa: SIM115
                self._parts[name].write(raw(tensor).numpy().data)

    def _held(self, kinds: dict[str, Whole], mapping: bool) -> dict[str, Whole]:
        """The kinds, if such a file holds them."""
        numpy_too = self._path.suffix == ".npy"
        odd = {n: k for n, k in kinds.items() if k.dtype not in DTYPES or (numpy_too and not _numpy(k.dtype))}
        if odd or (numpy_too and mapping):
            what = f"a {self._path.suffix} file does not hold {_told(odd or kinds)}"
            raise UsageError(what, "write a mapping to .safetensors, and convert other kinds, as with .float()")
        return kinds

    def close(self) -> None:
        whole = {name: Whole(kind.dtype, (self._rows, *kind.shape)) for name, kind in self._kinds.items()}
        with whole_file(self._path, "the outputs", None) as temporary:
            write_file(temporary, self._chunks(whole), FILE_MODE)

    def _chunks(self, whole: dict[str, Whole]) -> Chunks:
        if self._path.suffix == ".npy":
            text, one = io.BytesIO(), whole["output"]
            about = {"descr": _numpy(one.dtype), "fortran_order": False, "shape": one.shape}
            numpy.lib.format.write_array_header_1_0(text, about)
            yield text.getvalue()
        else:
            yield head(whole)[0]
        for name in ordered(whole):
            self._parts[name].seek(0)
            yield from iter(partial(self._parts[name].read, _BLOCK), b"")


def _numpy(dtype: torch.dtype) -> str:
    """numpy's word for a dtype; empty where it has none."""
    try:
        return numpy.dtype(str(dtype).removeprefix("torch.")).str
    except TypeError:
        return ""


def _told(kinds: Mapping[str, Whole]) -> str:
    return ", ".join(f"{name} {str(of.dtype).removeprefix('torch.')}{list(of.shape)}" for name, of in kinds.items())
