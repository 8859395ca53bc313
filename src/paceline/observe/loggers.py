"""Writes TensorBoard files and feeds the user's loggers from the journal.

The process that writes the journal also reads it and passes its events to the loggers, and it saves its position in the
journal. So a process that takes over, or a resumed run, continues at this position and passes on all later events.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from paceline.base.journal import Event, Reader, replace_file
from paceline.base.schema import read_file, read_json
from paceline.errors import FormatError, UsageError
from paceline.observe.metrics import values_of

EVERY = 0.25  # seconds between two reads of the journal
NAME = "loggers.json"  # in the run folder: the position of each logger
FOLDER = "tensorboard"  # in the run folder


class Loggers:
    """The loggers of a run. Only those of the process that writes the journal are fed; the others do nothing."""

    def __init__(self, folder: Path | None, tensorboard: bool = False) -> None:
        self._folder, self._all, self._looked = folder, list[_Fed](), 0.0
        if tensorboard and folder is not None:
            self.add(TensorBoard(), lambda text: None)

    def add(self, logger: Any, say: Callable[..., None]) -> None:
        """Adds a logger. Raises UsageError if it has no `write` method."""
        if not callable(getattr(logger, "write", None)):
            what = f"log_to() needs an object with a method write(step, values), got {logger!r:.60}"
            raise UsageError(what, "pass paceline.TensorBoard(), or add this method")
        kind = type(logger).__name__
        if self._folder is None:
            say(f"nothing is logged to {kind}, because this run has no run folder", once=True)
            return
        same = [fed for fed in self._all if type(fed.logger).__name__ == kind]
        if isinstance(logger, TensorBoard):
            if same:  # --tensorboard has added one already
                return
            logger.folder = logger.folder or self._folder / FOLDER
        name = kind + (f" {len(same) + 1}" if same else "")
        self._all.append(_Fed(logger, name, self._folder))

    def hear(self) -> None:
        """Feeds the loggers, at most every `EVERY` seconds. Called after each event of the journal."""
        if self._all and time.monotonic() - self._looked >= EVERY:
            self._hand_on()

    def close(self) -> None:
        """Feeds the loggers for the last time and closes them. Called when the journal has ended."""
        if self._all:
            self._hand_on()
        for fed in self._all:
            fed.tell_config()
            getattr(fed.logger, "close", lambda: None)()
        self._all.clear()

    def _hand_on(self) -> None:
        assert self._folder is not None
        path, known = self._folder / NAME, dict[str, Any]()
        if path.exists():
            with suppress(FormatError):  # if their positions are lost, the loggers are fed from the start again
                known = read_json(path, dict[str, tuple[int, int]], NAME)
        now = {**known, **{fed.name: fed.hand_on(known.get(fed.name)) for fed in self._all}}
        self._looked = time.monotonic()
        if now != known:
            replace_file(path, json.dumps(now))


class _Fed:
    """A logger and its position: a byte of the journal at or before the first event of the last step."""

    def __init__(self, logger: Any, name: str, folder: Path) -> None:
        self.logger, self.name, self._folder = logger, name, folder
        self._reader: Reader | None = None
        self._at, self._step = 0, 0
        self._config: dict[str, Any] = {}  # values that the logger has not received yet

    def hand_on(self, known: Any) -> list[int]:
        """Feeds the logger the new events of the journal; returns its position, (byte, step).

        `known` is the position of the process that fed this logger before.
        """
        if self._reader is None:
            self._at, self._step = known or (0, 0)
            self._reader = Reader(self._folder, self._at, damaged=False)
            self._rewind(self._step)
        for start, event in self._reader.news():
            self._event(start, event)
        return [self._at, self._step]

    def _event(self, start: int, event: Event) -> None:
        if event["event"] == "start":
            resumed = event.get("resumed_from") or 0
            self._at, self._step = start, resumed + (resumed > 0)
            self._rewind(self._step)
        prefix = f"trainer {event['trainer']}/" if event.get("trainer") else ""
        if event["event"] == "config":
            values = event.get("values") or {}
            self._config |= {prefix + name: value for name, value in values.items() if value is not None}
        media = event["event"] == "media" and callable(getattr(self.logger, "media", None))
        values, step = values_of(event), event.get("step", self._step)
        if not (values or media) or step is None:
            return
        if step > self._step:
            self._at, self._step = start, step
        if isinstance(self.logger, TensorBoard):
            self.logger.at = event["at"]
        self.tell_config()
        if media:
            fields = {
                key: value for key, value in event.items() if key not in ("at", "event", "trainer", "step", "name")
            }
            if "file" in fields:
                fields["file"] = str(self._folder / fields["file"])
            self.logger.media(step, prefix + str(event.get("name")), fields)
        else:
            self.logger.write(step, {prefix + tag: value for tag, value in values.items()})

    def tell_config(self) -> None:
        """Hands over the config once, before the first values, because TensorBoard takes only one."""
        config, self._config = self._config, {}
        if config and callable(getattr(self.logger, "config", None)):
            self.logger.config(config)

    def _rewind(self, step: int) -> None:
        getattr(self.logger, "rewind", lambda step: None)(step)


class TensorBoard:
    """A logger that writes TensorBoard's event files to `folder` (default: ``tensorboard`` in the run folder).

    Each process that writes adds a file, which begins with the step from which on it replaces the earlier files:
    TensorBoard's readers drop their later steps. Raises UsageError if the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        if find_spec("tensorboard") is None:
            what = "TensorBoard files cannot be written because the package tensorboard is not installed"
            raise UsageError(what, "run pip install 'paceline[tensorboard]'")
        self.folder = None if folder is None else Path(folder)
        self.at = 0.0  # the Unix time of the next record
        self._file: BinaryIO | None = None
        self._warned = False

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
