"""Feeds loggers from the journal: TensorBoard, trackers of experiments, and loggers that the script makes.

The process that writes the journal also reads it and passes its events to the loggers, and it saves the position of
each in the journal. So a process that takes over, or a resumed run, continues there and passes on all later events.
A logger that fails stops and delays nothing: what it missed is read from the journal again.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from paceline.base.device_peaks import peak_of
from paceline.base.journal import Event, Reader, replace_file
from paceline.base.logger_names import LoggerName, check_installed, parse_loggers
from paceline.base.schema import read_json
from paceline.errors import FormatError, PacelineError, UsageError, first_line
from paceline.observe.metrics import flops_of, values_of
from paceline.observe.trackers.tracker import LoggedRun

EVERY = 0.25  # seconds between two reads of the journal
LINGER = 20.0  # seconds that loggers may take at the end of a run
LONGEST_PAUSE = 60.0  # seconds until a logger that failed is fed again
NAME = "loggers.json"  # in the run folder: the position of each logger
CLASSES = {
    "wandb": "weights_and_biases.WandB",
    "mlflow": "mlflow_runs.MLflow",
    "trackio": "trackio_runs.Trackio",
    "comet": "comet_experiments.Comet",
    "csv": "csv_tables.CSVTables",
    "tensorboard": "tensorboard_files.TensorBoard",
    "otlp": "otlp.OTLP",
}
_FACTS = ("plan", "workers", "seed", "device", "script")  # fields of the journal's `start` that loggers get
_NO_VALUES = ("at", "event", "trainer", "step", "name")  # fields of the journal's `media`


class LoggerPosition(TypedDict):
    """How far a logger is, in loggers.json.

    - `at`: a byte of the journal at or before the first event of the last step; `step`: that step.
    - `id`: the identifier of the logger's run.
    - `last`: the last step of each value.
    - `known`: of this attempt the `plan`, the `workers`, the `config` that was handed over, and the `flops` by trainer:
      the operations of the model per row, and the peak of all devices per second, or 0.
    """

    at: int
    step: int
    id: NotRequired[str | None]
    last: NotRequired[dict[str, int]]
    known: NotRequired[dict[str, Any]]


class Loggers:
    """The loggers of a run. Only those of the process that writes the journal are fed; the others do nothing.

    `names` are loggers that come with Paceline; `say` prints a line.
    """

    def __init__(
        self, folder: Path | None, names: Sequence[LoggerName] = (), say: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        self._folder, self._say = folder, say
        self._all, self._looked = list[LoggerFeed](), 0.0
        self._positions: dict[str, Any] | None = None
        for name in names if folder is not None else ():
            self._add(_made(name), name)

    def add(self, logger: Any, upload: bool = False) -> None:
        """Adds a logger, or those with these names, as ``"wandb:digits,csv"``. With `upload`, the best checkpoint is
        copied to them. Raises UsageError if there is none of the name, its package is not installed, or an object has
        no `write` method.
        """
        made, name = [logger], type(logger).__name__
        if isinstance(logger, str):
            names, name = parse_loggers(logger, "log_to()"), logger
            for one in names:
                check_installed(one.kind)
            made = [_made(one) for one in names]
            for one, parsed in zip(made, names, strict=True):
                self._add(one, parsed, upload)
        elif callable(getattr(logger, "write", None)):
            self._add(logger, LoggerName(name), upload)
        else:
            what = f"log_to() needs an object with a method write(step, values), got {logger!r:.60}"
            raise UsageError(what, 'pass the name of a logger, as "wandb" or "csv", or add this method')
        if upload and not any(getattr(one, "uploads", hasattr(one, "upload")) for one in made):
            self._say(f"upload=True has no effect on {name}: only wandb, mlflow, trackio and comet store checkpoints")

    def _add(self, logger: Any, name: LoggerName, upload: bool = False) -> None:
        is_tensorboard = type(logger).__name__ == "TensorBoard"
        kind = "TensorBoard" if is_tensorboard else name.kind
        if self._folder is None:
            self._say(f"nothing is logged to {kind}, because this run has no run folder", once=True)
            return
        same = [feed for feed in self._all if feed.name.partition(" ")[0] == kind]
        for feed in same if kind in CLASSES or is_tensorboard else ():  # --log-to may have added it
            if is_tensorboard or not name.target or feed.target in ("", name.target):
                feed.logger.upload = upload or feed.logger.upload
                return
        if hasattr(logger, "upload"):
            logger.upload = upload
        number = f" {len(same) + 1}" if same else ""
        self._all.append(LoggerFeed(logger, kind + number, name.target, self._folder))

    def hear(self) -> None:
        """Feeds the loggers, at most every `EVERY` seconds. Called after each event of the journal."""
        if self._all and time.monotonic() - self._looked >= EVERY:
            self._feed()

    def close(self) -> None:
        """Feeds the loggers for the last time and closes them. Called when the journal has ended."""
        if not self._all:
            return
        self._feed()
        for feed in self._all:
            feed.end()
        until = time.monotonic() + LINGER
        for feed in self._all:
            if not feed.has_ended(until):
                text = f"the logger {feed.name} has not taken everything within {LINGER:.0f} s"
                self._say(f"{text}; it gets the rest when the run is resumed")
        self._note()
        self._all.clear()

    def _feed(self) -> None:
        self._looked = time.monotonic()
        if self._positions is None:
            self._positions = self._saved()
        for feed in self._all:
            feed.begin(self._positions.get(feed.name))
        self._note()

    def _note(self) -> None:
        """Prints what went wrong, and saves the positions if they have changed."""
        assert self._folder is not None
        for feed in self._all:
            while feed.messages:
                self._say(feed.messages.popleft())
        positions = {**(self._positions or {}), **{feed.name: feed.position for feed in self._all}}
        if positions != self._positions:
            self._positions = positions
            with suppress(OSError):  # the journal has warned of a full disk
                replace_file(self._folder / NAME, json.dumps(positions))

    def _saved(self) -> dict[str, Any]:
        assert self._folder is not None
        path = self._folder / NAME
        if path.exists():
            with suppress(FormatError, OSError):  # without their positions, the loggers are fed from the start again
                positions = read_json(path, dict[str, tuple[int, int] | LoggerPosition], NAME)
                return {
                    name: one if isinstance(one, dict) else LoggerPosition(at=one[0], step=one[1])
                    for name, one in positions.items()
                }
        return {}


def _made(name: LoggerName) -> Any:
    module, _, kind = CLASSES[name.kind].partition(".")
    return getattr(import_module(f"paceline.observe.trackers.{module}"), kind)(name.target or None)


class _Caught:
    """Keeps an exception that leaves the context, so that it has no other effect."""

    error: Exception | None = None

    def __enter__(self) -> _Caught:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


@dataclass
class LoggerFeed:
    """Feeds one logger, in the training loop, or in a thread of its own if the logger has a true `background`.

    `position` is how far it is; `messages` are lines for the user.
    """

    logger: Any
    name: str
    target: str
    folder: Path
    position: LoggerPosition = field(default_factory=lambda: LoggerPosition(at=0, step=0))
    messages: deque[str] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._reader: Reader | None = None
        self._at, self._step = 0, 0
        self._last: dict[str, int] = {}  # the last step of each value
        self._repeated: dict[str, int] = {}  # the same when the run was resumed: what was logged before
        self._config: dict[str, Any] = {}  # values that the logger has not received yet
        self._known: dict[str, Any] = {}  # see LoggerPosition
        self._thread: threading.Thread | None = None
        self._wake, self._ends = threading.Event(), threading.Event()
        self._reported: set[str] = set()
        self._due = self._pause = 0.0  # when a logger that failed is fed again
        self._has_begun = self._is_off = self._is_over = False

    @property
    def _background(self) -> bool:
        return bool(getattr(self.logger, "background", False))

    def begin(self, saved: LoggerPosition | None) -> None:
        """Feeds the logger what is new, or has its thread do so. `saved` is the position of the process before."""
        if not self._has_begun:
            self._has_begun, self.position = True, saved or self.position
            if self._background:
                self._thread = threading.Thread(target=self._run, name=f"paceline-{self.name}", daemon=True)
                self._thread.start()
        if self._thread is None:
            self._feed()
        self._wake.set()

    def end(self) -> None:
        """Feeds the logger for the last time and closes it; its thread goes on until this is done."""
        self._due = 0.0
        self._ends.set()
        self._wake.set()
        if self._thread is None:
            self._close()

    def has_ended(self, until: float) -> bool:
        """Waits until the monotonic time `until` for the end. Returns whether the logger has received everything."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
            return not self._thread.is_alive() and self._is_over
        return self._is_over

    def _run(self) -> None:
        has_ended = False
        while not has_ended:
            if not self._pause:
                self._wake.wait()
            self._wake.clear()
            has_ended = self._ends.is_set()
            self._feed()
            if not has_ended:
                self._ends.wait(max(EVERY, self._due - time.monotonic()))
        self._close()

    def _close(self) -> None:
        self._due = 0.0
        self._feed()
        with _Caught() as caught:
            if self._reader is not None:
                self._send_config()
                self._send()
            self._call("close")
        if caught.error is not None:
            self._failed(caught.error)
        self._is_over = not self._pause

    def _feed(self) -> None:
        """Hands on what is new. After an exception the next record follows, or, if a service does not answer, all of it
        later.
        """
        while time.monotonic() >= self._due and not self._is_off:
            with _Caught() as caught:
                self._hand_on()
            if caught.error is None:
                self._due = self._pause = 0.0
                return
            self._failed(caught.error)

    def _failed(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, PacelineError):
            message = f"nothing is logged to {self.name}: {error}"
            self._is_off = True
        elif self._reader is None or any(isinstance(cause, OSError) for cause in _causes(error)):
            message = f"the logger {self.name} failed ({text}); training goes on, and it gets the missing values later"
            self._pause = min(2 * self._pause or 1.0, LONGEST_PAUSE)
            self._due = time.monotonic() + self._pause
            self._reader = None  # what it may not have taken is read again
        else:
            what = f"the logger {self.name} failed at step {self._step}"
            message = f"{what} ({text}); training goes on without this record"
        self._tell(message, message.partition("(")[0].rstrip("0123456789 "))

    def _tell(self, message: str, kind: str) -> None:
        """Tells the user the first message of this kind."""
        if message and kind not in self._reported:
            self._reported.add(kind)
            self.messages.append(message)

    def _hand_on(self) -> None:
        if self._reader is None:
            self._at, self._step = self.position["at"], self.position["step"]
            self._last, self._repeated = dict(self.position.get("last") or {}), {}
            self._known = self.position.get("known") or {}
            self._config = dict(self._known.get("config") or {}) if getattr(self.logger, "takes_facts", False) else {}
            if hasattr(self.logger, "begin"):
                script = next((event for event in _events(self.folder) if event["event"] == "start"), {})
                stem = Path(str(script.get("module") or script.get("script") or "paceline")).stem
                about = LoggedRun(self.folder, self.folder.absolute().name, stem, self.position.get("id"))
                self.position = {**self.position, "id": self.logger.begin(about)}
                self._tell(getattr(self.logger, "notice", ""), "notice")
            self._reader = Reader(self.folder, self._at, damaged=False)
            self._call("rewind", self._step)
        for start, event in self._reader.news():
            self._event(start, event)
        self._send()

    def _send(self) -> None:
        self._call("flush")
        at = self._at
        if getattr(self.logger, "appends", False):  # nothing is handed over twice but what arrives before a crash
            at = self._at if self._config or self._reader is None else self._reader.at
            self.position = {**self.position, "last": dict(self._last)}
        self.position = {**self.position, "at": at, "step": self._step, "known": self._known}

    def _event(self, start: int, event: Event) -> None:
        kind, logger = event["event"], self.logger
        if kind == "start":
            resumed = event.get("resumed_from") or 0
            self._at, self._step = start, resumed + (resumed > 0)
            self._repeated = dict(self._last) if getattr(logger, "appends", False) else {}
            self._known = {name: event.get(name) for name in ("plan", "workers")}
            if getattr(logger, "takes_facts", False):
                self._config = dict(_facts(event))
            self._call("rewind", self._step)
        if hasattr(logger, "at"):
            logger.at = event["at"]
        self._call("event", event)
        prefix = f"trainer {event['trainer']}/" if event.get("trainer") else ""
        if kind == "config":
            values = event.get("values") or {}
            self._config |= {prefix + name: value for name, value in values.items() if value is not None}
        for mark in (event.get("best") or ()) if kind == "checkpoint" and hasattr(logger, "artifact") else ():
            trainer = f"trainer {mark['trainer']}/" if mark["trainer"] else ""
            self._send_config()
            logger.artifact(event.get("step") or 0, trainer + mark["name"], self._checkpoint(event), mark["value"])
        is_media = kind == "media" and callable(getattr(logger, "media", None))
        values, step = self._values(event), event.get("step", self._step)
        if not (values or is_media) or step is None:
            return
        if step > self._step:
            self._at, self._step = start, step
        self._send_config()
        tags = [prefix + str(event.get("name"))] if is_media else [prefix + tag for tag in values]
        new = [tag for tag in tags if step > self._repeated.get(tag, -1)]
        self._last |= dict.fromkeys(new, int(step))
        if is_media and new:
            fields = {key: value for key, value in event.items() if key not in _NO_VALUES}
            if "file" in fields:
                fields["file"] = str(self.folder / fields["file"])
            logger.media(step, tags[0], fields)
        elif new:
            logger.write(step, {tag: values[tag.removeprefix(prefix)] for tag in new})

    def _values(self, event: Event) -> dict[str, float | str]:
        """The values of an event, with the speed of the model once its operations per row are known."""
        kind, trainer, known = event["event"], str(event.get("trainer") or 0), self._known.get("flops") or {}
        if kind == "flops":
            peak = peak_of(str(event.get("device")), str(self._known.get("plan"))) or 0.0
            flops = [event.get("per_row") or 0.0, peak * (self._known.get("workers") or 1)]
            self._known = {**self._known, "flops": {**known, trainer: flops}}
        speed = flops_of(event, *known[trainer]) if kind == "step" and trainer in known else {}
        return {**values_of(event), **speed}

    def _checkpoint(self, event: Event) -> str:
        """The folder or the address of a checkpoint."""
        path = str(event.get("path") or "")
        return path if "://" in path else str((self.folder / path).absolute())

    def _send_config(self) -> None:
        """Hands over the config once, before the first values, because TensorBoard takes only one."""
        config, self._config = self._config, {}
        if config:
            self._known = {**self._known, "config": {**self._known.get("config", {}), **config}}
            self._call("config", config)

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls a method that a logger may have."""
        getattr(self.logger, name, lambda *_: None)(*arguments)


def _events(folder: Path) -> Iterator[Event]:
    for _, event in Reader(folder, damaged=False).news():
        yield event


def _facts(start: Event) -> Mapping[str, Any]:
    """What a run is made of, for the loggers that come with Paceline, from its journal's `start`."""
    facts = {f"paceline.{name}": start[name] for name in _FACTS if start.get(name) is not None}
    if len(start.get("argv") or ()) > 1:
        facts["paceline.arguments"] = " ".join(start["argv"][1:])
    return facts


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
