"""Writes TensorBoard's event files."""

from __future__ import annotations

import os
import re
import socket
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from paceline.base.logger_names import check_installed
from paceline.base.schema import read_file
from paceline.observe.trackers.tracker import LoggedRun

FOLDER = "tensorboard"  # in the run folder


class TensorBoard:
    """A logger that writes TensorBoard's event files to `folder` (default: ``tensorboard`` in the run folder).

    Each process that writes adds a file, which begins with the step from which on it replaces the earlier files:
    TensorBoard's readers drop their later steps. Raises UsageError if the package tensorboard is not installed.
    """

    upload = uploads = False  # no checkpoint is copied

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        check_installed("tensorboard")
        self.folder = None if folder is None else Path(folder)
        self.at = 0.0  # the Unix time of the next record
        self._file: BinaryIO | None = None
        self._warned = False

    def begin(self, run: LoggedRun) -> None:
        """Chooses the folder if none was given."""
        self.folder = self.folder or run.folder / FOLDER

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Adds values of a step: numbers as scalars, texts as texts."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        summary = Summary()
        for tag, value in values.items():
            if isinstance(value, str):
                summary.value.extend(text_pb(tag, value).value)
            else:
                summary.value.add(tag=tag, simple_value=value)
        self._put(step=step, summary=summary)

    def media(self, step: int, name: str, event: Mapping[str, Any]) -> None:
        """Adds a histogram, or the picture in the PNG ``file``; `event` has the fields of its journal event."""
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        summary = Summary()
        if event["kind"] == "histogram":
            counts, mean = event["counts"], event["mean"]
            count = sum(counts)
            squares = count * (event["deviation"] ** 2 + mean**2)
            about = {"min": event["edges"][0], "max": event["edges"][-1], "num": count, "sum": count * mean}
            limits = {"bucket_limit": event["edges"][1:], "bucket": counts}
            summary.value.add(tag=name, histo=HistogramProto(**about, sum_squares=squares, **limits))
        elif (file := Path(event["file"])).exists():
            size = {"height": event["height"], "width": event["width"], "colorspace": 4}
            summary.value.add(tag=name, image=Summary.Image(**size, encoded_image_string=read_file(file)))
        self._put(step=step, summary=summary)

    def config(self, values: Mapping[str, Any]) -> None:
        """Adds the config of the run, for TensorBoard's HParams tab."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        self._put(step=0, summary=hparams_pb(dict(values), trial_id=str(self.folder)))

    def rewind(self, step: int) -> None:
        """Makes readers drop this step and later ones, which will be written again."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._put(step=step, session_log=SessionLog(status=SessionLog.START))

    def close(self) -> None:
        """Closes the file; the next record opens a new one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put(self, **fields: Any) -> None:
        """Appends a record with one system call, so that what was written survives the death of this process."""
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.summary.writer.record_writer import RecordWriter

        try:
            if self._file is None:
                self._file = self._open()
                first = Record(wall_time=time.time(), file_version="brain.Event:2")
                RecordWriter(self._file).write(first.SerializeToString())
            record = Record(wall_time=self.at or time.time(), **fields)
            RecordWriter(self._file).write(record.SerializeToString())
        except OSError as error:
            if not self._warned:
                self._warned = True
                what = f"the TensorBoard file in {self.folder} cannot be written ({error.strerror})"
                warnings.warn(f"{what}; training continues. Free some space on that disk.", stacklevel=2)

    def _open(self) -> BinaryIO:
        """Creates a file whose name sorts after those of the existing files, the order in which they are read."""
        assert self.folder is not None
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        matches = (re.match(r"events\.out\.tfevents\.(\d+)", name) for name in os.listdir(self.folder))
        number = max([int(time.time()), *(1 + int(earlier[1]) for earlier in matches if earlier)])
        path = self.folder / f"events.out.tfevents.{number:010}.{socket.gethostname()}.{os.getpid()}"
        return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb", buffering=0)
