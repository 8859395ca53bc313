"""Summarises a journal for report, explanation and comparison."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

from paceline.base.console import command_line, in_one_line, quoted, separated
from paceline.base.device_peaks import peak_of
from paceline.base.environment import FUNCTION
from paceline.base.journal import NAME, Event, Reader, effective_steps
from paceline.base.text import (
    duration,
    links_of,
    number,
    plural,
    ranks,
    rate_of,
    shares_of,
    size_of,
    total,
    totals,
    trainer_names,
)
from paceline.base.time_accounting import COSTS, USEFUL
from paceline.errors import UsageError
from paceline.observe.drawing import save
from paceline.observe.key_figures import (
    SHORT,
    WHOLE_RUN,
    best_values,
    flops,
    recent_speed,
    speed,
    started_at,
    step_count,
)
from paceline.observe.model_text import block_rows, model_line
from paceline.observe.plan_explanation import PlanExplanation, took

Rows = list[tuple[str, str]]
Made = TypeVar("Made")
LINKS = 12  # links that are listed, those with the most bytes first


class Summary:
    """A run, summed up over its attempts from its journal up to the event `number`.

    Steps that a later attempt repeated count once, except in `wall_seconds`, `made` and `made_by`. Raises UsageError if
    there is no journal, or if a later version wrote it.

    - `start` is the first event of the last attempt, `outcome` its end (None: killed, or still running), `live` whether
      the run is known to be running, `compare` the run to compare with.
    - `steps` are the step records by trainer ("" if there is one), `series` the evaluated and logged numbers as
      (step, value) by name, `texts` the last logged text of each name, with its step.
    - `samples_per_second` is the speed of the last attempt without the first tenth of its steps, `time` the seconds of
      worker 0 by part, `bytes_moved` the bytes it sent, `waited_for` the seconds others waited for each worker.
    - `chosen` is what `auto` decided and predicted last, `step_seconds` the usual step of the last attempt.
    - `made` and `made_by` are counts of all trainers, with repeated steps; `each` is the last record of what each of
      very many workers computed.
    - `up` says which workers belong to the team now, `hosts` where they were, `loaded` how long they waited for rows,
      `sent` the bytes between hosts by link (``a to b``), `hang` which worker has made no progress since the last step.
    - `collectives` are calls, bytes and seconds waited by kind.

    If there are several trainers, `steps_done`, `samples`, speed and times are those of the first one.
    """

    live = False

    def __init__(self, folder: Path, reader: Reader | None = None) -> None:
        if not (folder / NAME).exists():
            raise UsageError(
                f"{in_one_line(folder)} is not a run folder: it does not contain {NAME}",
                "pass a folder made by --run-dir",
            )
        self.folder = folder
        reader = reader or Reader(folder)
        events, self.number = reader.read(), reader.number
        self.last_event_at = float(events[-1].get("at") or 0.0) if events else 0.0
        starts = [index for index, event in enumerate(events) if event["event"] == "start"] or [0]
        while len(starts) > 1 and any(event.get("already") for event in events[starts[-1] :]):
            events = events[: starts.pop()]  # this attempt had nothing left to do
        attempts = [events[first:after] for first, after in zip(starts, [*starts[1:], len(events)], strict=True)]
        self.attempts = [span for attempt in attempts for span in _span(attempt)]
        last = attempts[-1]
        self.start: Event = last[0] if last and last[0]["event"] == "start" else {}
        self.workers = int(self.start.get("workers") or 1)
        self.script = str(self.start.get("script") or "")
        endings = [event for event in last if event["event"] in ("finished", "stopped", "failed")]
        endings.sort(
            key=lambda event: event["event"] == "failed"
        )  # a failure comes last: when one trainer fails, the others are stopped
        self.outcome = endings[-1] if endings else None
        self.finished = self.outcome is not None and self.outcome["event"] == "finished"
        self.failures = [event for event in events if event["event"] == "failed"]
        self.lost = [event for event in events if event["event"] == "lost"]
        self.host_events = [event for event in events if event["event"] in ("host", "excluded")]
        self.recovered = [pair for attempt in attempts for pair in _pair_recoveries(attempt)]
        self.healed, self.verified = (effective_steps(events, kind) for kind in ("healed", "verified"))
        self.corrupted = effective_steps(events, "corrupted")
        self.formed = [event for event in events if event["event"] == "formed"]
        late = effective_steps(events, "late") + effective_steps(events, "uncounted")  # each may be there twice
        self.late = list({(e.get("trainer"), e.get("step"), e.get("island")): e for e in late}.values())
        self.windows = effective_steps(events, "window")
        self.compare: Event = next((event for event in reversed(events) if event["event"] == "compare"), {})
        self.collectives: Event = next((e["kinds"] for e in reversed(last) if e["event"] == "collectives"), {})
        self.checkpoints = effective_steps(events, "checkpoint")
        self.checked = [event for event in events if event["event"] == "checked"]
        self.evaluations = effective_steps(events, "evaluate")
        self.grids = _once(events, "grid", "phase")
        self.shares, self.memory = ([e for e in last if e["event"] == kind] for kind in ("shares", "memory"))
        self.models = list({event.get("trainer"): event for event in last if event["event"] == "model"}.values())
        known = {e.get("trainer"): e for e in last if e["event"] == "figures"} or {0: {}}  # the last of each
        grids = {grid.get("trainer"): grid for grid in self.grids}
        plans = [{**grids.get(trainer, {}), **self.start, **event} for trainer, event in known.items()]
        shown = (event for event in plans if (event.get("workers") or 1) > 1 or event.get("measured"))
        self.explained = {event.get("trainer", 0): PlanExplanation.of(event) for event in shown if event.get("plan")}
        self.drawn = [explanation for explanation in self.explained.values() if explanation.workers > 1]
        self.codecs = list({event.get("trainer"): event for event in last if event["event"] == "codec"}.values())
        self.noise = list({event.get("trainer"): event for event in last if event["event"] == "noise"}.values())
        self.links = {key: value for e in last if e["event"] == "links" for key, value in e.items()}
        self.notes = _once(events, "note", "text")
        self._add_decisions(events)
        up = _up(last)
        self.up = {} if self.outcome else up
        self.spares = [event for event in last if event["event"] == "spares"]
        self.ready_spares = [str(worker) for event in self.spares[-1:] for worker in event["workers"]]
        processes = [
            event for event in events if event["event"] == "worker"
        ]  # their events may precede the start of the attempt
        current_workers = {*up, *(str(event["worker"]) for event in last if event["event"] == "worker")}
        self.hosts = {
            str(e["worker"]): str(e.get("host") or "") for e in processes if str(e["worker"]) in current_workers
        }
        self.loaded = [event for event in last if event["event"] == "loaded"]
        self.sent = _sent(self.loaded)
        self.each: Event = next((e for e in reversed(last) if e["event"] == "each"), {})
        moved = ("step", "evaluate", "formed", "lost")
        self.config = config_of(events)
        self.environment: Event = next((e for e in reversed(last) if e["event"] == "environment"), {})
        self.hang = next(
            (e if e["event"] == "hang" else None for e in reversed(last) if e["event"] in ("hang", *moved)), None
        )
        self._add_steps(events, last)
        self._add_account(events)
        self._add_values(events)
        media = {(event.get("trainer"), event.get("name")): event for event in effective_steps(events, "media")}
        self.media = [*media.values()]  # the last picture or histogram of each name

    def _add_decisions(self, events: list[Event]) -> None:
        self.decisions = _once(events, "decision", "what")
        self.chosen: Event = next((e for e in reversed(events) if e["event"] == "decision" and "predicted" in e), {})
        if len({event["trainer"] for event in events if "trainer" in event}) > 1:
            self.decisions = [
                {**event, "what": f"trainer {event['trainer']}: {event.get('what')}"} if "trainer" in event else event
                for event in self.decisions
            ]

    def _add_steps(self, events: list[Event], last: list[Event]) -> None:
        records = effective_steps(events)
        models = {record.get("trainer"): "" for record in records}
        models |= {grid["trainer"]: grid.get("model") or "" for grid in self.grids if grid.get("trainer") in models}
        names = trainer_names(models) if len(models) > 1 else {}
        self.steps: dict[str, list[Event]] = {}
        for record in records:
            self.steps.setdefault(names.get(record.get("trainer"), ""), []).append(record)
        main_records = next(iter(self.steps.values()), [])
        main = main_records[0].get("trainer") if main_records else None
        current = [event for event in last if event["event"] == "step" and event.get("trainer") == main] or main_records
        self.samples_per_second = _steady_speed(current) if main_records else None
        steady = [r for r in current[len(current) // 10 :] if r.get("steps") and r.get("seconds")]
        self.step_seconds = median(r["seconds"] / r["steps"] for r in steady) if steady else None
        compared_speed = self.compare.get("samples_per_second")
        self.speedup = self.samples_per_second / compared_speed if compared_speed and self.samples_per_second else None
        of_model = [event for event in last if event["event"] == "flops" and event.get("trainer") == main]
        self.flops: Event = of_model[-1] if of_model else {}
        self.flops_per_second = (self.flops.get("per_row") or 0.0) * (self.samples_per_second or 0.0) or None
        peak = peak_of(str(self.flops.get("device")), str(self.start.get("plan")))
        workers = self.start.get("workers") or 1
        self.utilisation = self.flops_per_second / workers / peak if peak and self.flops_per_second else None
        self.steps_done = int(main_records[-1].get("step") or 0) if main_records else 0
        self.samples = int(total(main_records, "samples"))
        self.bytes_moved = int(total(records, "bytes"))
        counted, steps = any(record.get("bytes") is not None for record in records), total(main_records, "steps")
        self.bytes_per_step = self.bytes_moved / steps if counted and steps > 0 else None
        self.time, self.waited_for = totals(main_records, "time"), totals(main_records, "waited_for")
        every = [event for event in events if event["event"] == "step"]
        self.made = {field: total(every, field) for field in ("steps", "samples", "bytes")}
        self.made_by = {field: totals(every, field) for field in ("computed", "waited_for")}

    def _add_account(self, events: list[Event]) -> None:
        """Adds up where the wall clock went; steps that a later attempt repeated count as redone."""
        kept = {id(record) for record in effective_steps(events)}
        spent = dict.fromkeys((*USEFUL, *COSTS), 0.0)
        for event in events:
            superseded = event["event"] == "step" and id(event) not in kept
            seconds = event.get("account" if event["event"] == "step" else "seconds") or {}
            for name, value in seconds.items() if event["event"] in ("step", "account") else ():
                name = "redone" if superseded else name
                spent[name] = spent.get(name, 0.0) + value
        waited = min(spent["steps"], sum(self.waited_for.values()))
        spent["steps"] -= waited
        spent["waiting"] += waited
        self.account = {name: seconds for name, seconds in spent.items() if seconds > 0}

    def host_of(self, worker: int) -> str:
        """The host of a worker; empty if the journal does not have it."""
        reported_hosts = [e["host"] for e in self.loaded if str(worker) in e["workers"]]
        return reported_hosts[-1] if reported_hosts else self.hosts.get(str(worker), "")

    @property
    def goodput(self) -> float | None:
        """The fraction of the wall-clock time that advanced training."""
        total_seconds = sum(self.account.values())
        return sum(self.account.get(name, 0.0) for name in USEFUL) / total_seconds if total_seconds else None

    def _add_values(self, events: list[Event]) -> None:
        """Collects curves and texts; values evaluated and logged under the same name form one curve."""
        self.texts: dict[str, tuple[int | None, str]] = {}
        curves: dict[str, dict[float, float]] = {}
        several = len({str(event.get("trainer")) for event in self.evaluations}) > 1
        for event in self.evaluations + effective_steps(events, "log"):
            prefix = f"trainer {event.get('trainer')}: " if several and "results" in event else ""
            for name, value in (event.get("results") or event.get("values") or {}).items():
                if isinstance(value, str):
                    self.texts[name] = (event.get("step"), value)
                elif isinstance(value, (int, float)) and name != "n":
                    curves.setdefault(prefix + name, {})[float(event.get("step") or 0)] = float(value)
        self.series = {name: sorted(curve.items()) for name, curve in curves.items()}

    @property
    def wall_seconds(self) -> float:
        """From an attempt's first event to its last, over all attempts."""
        return sum(last - first for first, last in self.attempts)

    @property
    def losses(self) -> dict[str, tuple[float | None, float | None]]:
        """First and last loss by trainer; None stands for a loss that was not finite."""
        return {name: (kept[0].get("loss"), kept[-1].get("loss")) for name, kept in self.steps.items()}

    @property
    def waits(self) -> list[tuple[float, str]]:
        """(seconds that others waited for a worker, its name), the slowest worker first."""
        return sorted(((wait, name) for name, wait in self.waited_for.items() if wait > 0), reverse=True)

    @property
    def raw(self) -> bool:
        """Whether it was started with --raw: its script trained by itself, and its steps are not known."""
        return bool(self.start.get("raw"))

    @property
    def running(self) -> bool:
        """Whether the run is known to be running, not only without an end in the journal."""
        return self.live and self.outcome is None

    @property
    def ending(self) -> str:
        """How the run ended, in a few words."""
        event, at = self.outcome, "" if self.raw else f" at step {self.steps_done}"
        if self.running:
            return f"running,{at}" if at else "running"
        if event is None:
            return f"last seen{at}: killed, or still running"
        if event["event"] == "failed":
            return f"failed{at}: {_cause(event, ', ')}"
        at = "" if self.raw else f" at step {event.get('step')}"
        return f"{event['event']}{at}" + (f": {event['why']}" if event.get("why") else "")

    @property
    def command(self) -> str:
        """The command to run next: export the weights of a finished run, or resume another."""
        if self.finished and not self.raw:
            return command_line(["paceline", "export", str(self.folder), "model.safetensors"])
        if self.start.get("module") == FUNCTION:
            return f"call paceline.launch(...) again with run_dir={str(self.folder)!r}"
        if not self.script:
            return f"run the same command again with --run-dir {quoted(str(self.folder))}"
        plan = ["--plan", str(self.start["plan"])] if self.start.get("plan_origin") == "--plan" else []
        words = [
            "paceline",
            "run",
            *(["--raw"] if self.raw else []),
            "--workers",
            str(self.workers),
            *plan,
            "--run-dir",
            str(self.folder),
        ]
        script, args = self._script_and_arguments
        return command_line([*words, *script, *separated(args)])

    @property
    def name(self) -> str:
        """The name of the script, module or function that the workers ran; empty if the journal has none."""
        if self.start.get("module") == FUNCTION:
            return "the function"
        return in_one_line(Path(self.script).name)

    @property
    def script_line(self) -> list[str]:
        """The script and its arguments."""
        script, args = self._script_and_arguments
        return [*script, *args]

    @property
    def _script_and_arguments(self) -> tuple[list[str], list[str]]:
        args = [str(arg) for arg in self.start.get("argv") or []]
        module = self.start.get("module")  # older versions did not record it
        script = ["-m", str(module)] if module else [self.script] if self.script else []
        return script, args[1:] if args and self.script.endswith(args[0]) else args


class Newest(Generic[Made]):
    """Caches the result of `make` for the newest summary of a running run.

    The result is updated at most every `every` seconds, and less often if updates of a long journal would take more
    than a twentieth of the time. Raises UsageError as `Summary` does.
    """

    def __init__(self, folder: Path, every: float, make: Callable[[Summary], Made]) -> None:
        self._folder, self._every, self._make, self._reader = folder, every, make, Reader(folder)
        self._due = 0.0
        self._made: tuple[int, Made] | None = None

    def get(self, anew: bool = False) -> tuple[int, Made]:
        """Returns (number of the last event, result of `make`); `anew` reads the journal now in any case."""
        began = time.monotonic()
        if self._made is None or anew or began >= self._due:
            summary = Summary(self._folder, self._reader)
            summary.live = True
            if self._made is None or summary.number > self._made[0]:
                self._made = summary.number, self._make(summary)
            self._due = began + max(self._every, 20 * (time.monotonic() - began))
        return self._made


def config_of(events: list[Event]) -> dict[str, Any]:
    """The values that a script gave to `trainer.config()`, by name; later attempts replace earlier ones."""
    config_events = (e for e in events if e["event"] == "config")
    return {
        (f"trainer {e['trainer']}/" if e.get("trainer") else "") + name: value
        for e in config_events
        for name, value in (e.get("values") or {}).items()
    }


def code_of(event: Event) -> str:
    """The commit that ran, and whether the working tree had changes, as text."""
    changed = f", with local changes ({event['diff']})" if event.get("diff") else ""
    remote = f" of {event['remote']}" if event.get("remote") else ""
    return f"{event['commit'][:12]}{remote}{changed}" if event.get("commit") else ""


def _span(attempt: list[Event]) -> list[tuple[float, float]]:
    """Unix seconds of the first and the last event, as the only entry; empty if no event has a time.

    Events that the agent writes before its workers start are ignored: they would count the pause between two attempts.
    """
    counted_events = (e for e in attempt if e["event"] != "compare" and (e["event"] != "decision" or "trainer" in e))
    stamps = [float(event.get("began") or event["at"]) for event in counted_events if event.get("at")]
    return [(stamps[0], stamps[-1])] if stamps else []


def _pair_recoveries(attempt: list[Event]) -> list[tuple[Event, Event]]:
    """Each event of a team that trains again after it went back, with the start of the attempt."""
    if not attempt or attempt[0]["event"] != "start":
        return []
    return [(event, attempt[0]) for event in attempt if event["event"] == "recovered"]


def _up(attempt: list[Event]) -> dict[str, bool]:
    """The workers that an attempt has had, and whether each is in the team now."""
    up: dict[str, bool] = {}
    for event in attempt:
        if event["event"] in ("start", "generation", "formed"):
            members: Any = event.get("workers") or []
            now = range(members or 0) if event["event"] == "start" else members
            up = {**dict.fromkeys(up, False), **dict.fromkeys(map(str, now), True)}
        elif event["event"] == "lost":
            up |= dict.fromkeys(map(str, [*(event.get("workers") or []), *(event.get("mates") or [])]), False)
    return up


def _sent(reports: list[Event]) -> dict[str, float]:
    """Bytes sent between hosts by link (``a to b``), largest first, from each agent's last report.

    A host without a report is named by its address.
    """
    newest = {event["agent"]: event for event in reports if event.get("sent") and event.get("agent")}
    names = {address: str(event["host"]) for event in newest.values() for address in event.get("here", ())}
    bytes_by_link = Counter[str]()
    for event in newest.values():
        for address, count in event["sent"].items():
            bytes_by_link[f"{event['host']} to {names.get(address, address)}"] += count
    return {link: float(count) for link, count in bytes_by_link.most_common() if count}


def _once(events: list[Event], kind: str, key: str) -> list[Event]:
    """The events of a kind, the last for each trainer and `key`, because resumed attempts repeat them."""
    return list({(str(e.get("trainer")), str(e.get(key))): e for e in events if e["event"] == kind}.values())


def _steady_speed(records: list[Event]) -> float | None:
    """Samples per second without the first tenth of the steps."""
    begins = [(record.get("step") or 0) - (record.get("steps") or 0) for record in records]
    warm = begins[0] + 0.1 * ((records[-1].get("step") or 0) - begins[0])
    steady = [record for record, begin in zip(records, begins, strict=True) if begin >= warm] or records
    seconds = total(steady, "seconds")
    return total(steady, "samples") / seconds if seconds > 0 else None


def _goodput(s: Summary) -> tuple[str, str]:
    """The fraction of the time that advanced training, and the cost of everything else, as a row.

    A short run mostly starts up, which is not representative of a longer run, so only its seconds are shown.
    """
    total_seconds = sum(s.account.values())
    costs = sorted(((s.account[name], name) for name in COSTS if name in s.account), reverse=True)
    if s.goodput is None or total_seconds < SHORT:
        spent = sorted(((seconds, name) for name, seconds in s.account.items()), reverse=True)
        return "wall clock", ", ".join(f"{name} {duration(seconds)}" for seconds, name in spent)
    useful = ", ".join(f"{name} {s.account[name] / total_seconds:.0%}" for name in USEFUL if name in s.account)
    rest = ", ".join(f"{name} {duration(seconds)}" for seconds, name in costs)
    return "goodput", f"{s.goodput:.0%} of {duration(total_seconds)} ({useful})" + (f"; {rest}" if rest else "")


def _by_kind(summary: Summary) -> Rows:
    """The cost of each kind of collective; kinds below 1% of the bytes and of the time are added up in one row."""
    kinds, rest = dict(summary.collectives), [0, 0, 0.0]
    total = sum(size for _, size, _ in kinds.values())
    for kind, costs in summary.collectives.items():
        if costs[1] < 0.01 * total and costs[2] < 0.01 * summary.wall_seconds:
            rest = [a + b for a, b in zip(rest, kinds.pop(kind), strict=True)]
    if rest[0]:
        kinds["other kinds"] = rest
    return [
        (f"  {kind}", f"{plural(int(calls), 'collective')}, {size_of(size)}, worker 0 waited {duration(waited)}")
        for kind, (calls, size, waited) in kinds.items()
    ]


def _predictions(s: Summary) -> str:
    """What `auto` predicted of its plan, beside what was measured."""
    chosen, process = s.chosen, s.memory[-1].get("process") if s.memory else None
    texts = list[str]()
    if chosen and s.step_seconds:
        tried = f" ({took(chosen['tried'])} in its trial)" if chosen.get("tried") else ""
        measured = f"{took(s.step_seconds)} measured{_error(chosen['predicted'], s.step_seconds)}"
        texts.append(f"a step of {took(chosen['predicted'])}{tried}, {measured}")
    if chosen.get("memory") and process:
        measured = f"{size_of(process)} measured{_error(chosen['memory'], process)}"
        texts.append(f"{size_of(chosen['memory'])} of memory, {measured}")
    explained = next(iter(s.explained.values()), None)
    if chosen and explained is not None and explained.predicted and explained.measured:
        sends, sent = (sum((side[0].get("sent") or {}).values()) for side in (explained.predicted, explained.measured))
        texts.append(f"{size_of(sends)} sent in a step, {size_of(sent)} measured{_error(sends, sent)}")
    return "; ".join(texts)


def _error(predicted: float, measured: float) -> str:
    """By how much a prediction was off, in brackets; nothing if nothing was measured."""
    return f" ({predicted / measured - 1:+.0%})" if measured else ""


def _codec(event: Event) -> str:
    sent, full = event.get("sent") or 0, event.get("full") or 0
    ratio = f" ({sent / full:.1%})" if full else ""
    amounts = f"worker 0 sent {size_of(sent)} to {event.get('to') or 'other hosts'} instead of {size_of(full)}{ratio}"
    return f"{event.get('codec')} ({event.get('kind')}): {amounts}"


def _links(event: Event) -> str:
    if not event.get("pairs"):
        return ""
    return links_of(event) + (f"; {rate_of(event['rate'])} in the last reductions" if event.get("rate") else "")


def _noise(event: Event) -> str:
    scale, looks = event.get("scale"), plural(event.get("looks") or 0, "measurement")
    if not scale:
        return f"too large for {looks}: the gradients of a step are mostly noise, so a larger global batch helps"
    rows = number(float(f"{scale:.2g}"))
    return f"about {rows} rows ({looks}): a global batch beyond this size, or workers added for it, helps little"


def _losses(s: Summary) -> Rows:
    """The losses of workers, and the recoveries of teams of which no replica was left."""
    recovered = [("recovered", _recovered(*pair)) for pair in s.recovered]
    return [*(("lost", _lost(event)) for event in s.lost), *recovered]


def _recovered(event: Event, start: Event) -> str:
    """How long it took until all workers trained again, and from which state."""
    source = f" from step {start['resumed_from']} of {start.get('resumed_in')}" if start.get("resumed_from") else ""
    seconds = duration(event.get("seconds") or 0.0)
    return f"{ranks(event.get('workers') or [])} train again{source}, {seconds} after the loss"


def _lost(event: Event) -> str:
    workers = event.get("workers") or []
    causes = [", ".join(lines) for lines in (event.get("causes") or {}).values()]
    who = f"{ranks(workers)} {event.get('why')}, after step {event.get('step')}"
    return "; ".join([who, *causes])


def _out_of_step(windows: list[Event]) -> str:
    """The number of updates of each worker, and their staleness: the updates of others since it read the weights."""
    by, missed = Counter[int](), Counter[int]()
    for event in windows:
        by.update(dict(event["workers"]))
        missed.update(dict(event["missed"]))
    if not missed:
        return ""
    if "late" in windows[0]:
        late = Counter(worker for event in windows for _, worker, *_ in event["late"])
        late_texts = ", ".join(f"worker {worker} in {plural(count, 'step')}" for worker, count in sorted(late.items()))
        return f"late, so the rows were dropped: {late_texts}" if late_texts else "no worker was late"
    mean = sum(others * times for others, times in missed.items()) / missed.total()
    made = ", ".join(f"{count} by worker {worker}" for worker, count in sorted(by.items()))
    dropped = sum(event["dropped"] for event in windows)
    also = f"; {dropped} dropped" if dropped else ""
    return f"updates: {made}{also}; staleness {mean:.1f} updates on average, at most {max(missed)}"


def _verified(events: list[Event]) -> str:
    """The number of steps that were computed a second time and compared."""
    again = sum(1 for event in events if event["attempts"] > 1)
    return plural(len(events), "step") + (f", {again} of them computed again" if again else "") if events else ""


def _describe_hardware(s: Summary) -> Rows:
    """Verified steps, wrong values, and what happened to hosts."""
    wrong = [("wrong values", f"step {event.get('step')}: {event['text']}") for event in s.corrupted]
    return [("verified", _verified(s.verified)), *wrong, *describe_hosts(s)]


def describe_hosts(s: Summary) -> Rows:
    """The failures and troubles of each host, and why hosts were left out."""
    troubles: dict[str, Counter[str]] = {}
    for event in s.host_events:
        if event["event"] == "host":
            troubles.setdefault(event["host"], Counter())[f"{event['kind']}: {event['text']}"] += 1
    times = {1: "", 2: " (twice)"}
    rows = [
        (f"host {host}", "; ".join(text + times.get(count, f" ({count} times)") for text, count in known.items()))
        for host, known in troubles.items()
    ]
    excluded = [event for event in s.host_events if event["event"] == "excluded"]
    return [*rows, *(("left out", f"{event['host']}, after {event['text']}") for event in excluded)]


def _late(events: list[Event]) -> str:
    """The islands that were too late for merges, and the rows that were not trained on because of that."""
    island_texts = []
    for island in sorted({str(i) for e in events for i in (*(e.get("late") or ()), *(e.get("missed") or ()))}):
        times = sum(int(island) in (event.get("late") or ()) for event in events)
        rows = sum((event.get("missed") or {}).get(island, [0, 0, 0])[2] for event in events)
        rows += sum(event.get("rows") or 0 for event in events if str(event.get("island")) == island)
        island_texts.append(f"island {island}: {plural(times, 'merge')} missed, {plural(rows, 'row')} not trained on")
    return "; ".join(island_texts)


def _cause(event: Event, link: str) -> str:
    """The cause of a failure, with its worker if it belongs to one."""
    worker = f"worker {event['worker']}{link}" if event.get("worker") is not None else ""
    return f"{worker}{event.get('cause')}"


def _memory(event: Event) -> str:
    parts = ", ".join(f"{name} {size_of(event.get(name) or 0)}" for name in ("parameters", "gradients", "optimizer"))
    most = f"; process at most {size_of(event['process'])}" if event.get("process") else ""
    return f"worker 0: {parts}{most}"


def _teams(formed: list[Event]) -> str:
    """How often the team was formed again, and how long training was interrupted for that."""
    if not formed:
        return ""
    workers = plural(len(formed[-1].get("workers") or []), "worker")
    return f"re-formed {plural(len(formed), 'time')} in {duration(total(formed, 'seconds'))}; {workers} at the end"


def _saved(s: Summary) -> str:
    """How many checkpoints were written, and how many of them spares have read again."""
    texts = list[str]()
    if s.checkpoints:
        seconds = duration(total(s.checkpoints, "seconds"))
        texts.append(f"{len(s.checkpoints)} written in {seconds}, the last to {s.checkpoints[-1].get('path')}")
    if s.checked:
        damaged = [f"step {event['step']} ({event['damage']})" for event in s.checked if event["damage"]]
        state = f"damaged: {', '.join(damaged)}" if damaged else "none is damaged"
        texts.append(f"spares have read {len(s.checked)} again, {state}")
    return "; ".join(texts)


def _spares(changes: list[Event]) -> str:
    """How often a spare worker has entered the team, and how many are ready."""
    if not changes:
        return ""
    entered = total([{"count": len(event.get("enter") or [])} for event in changes], "count")
    ready = plural(len(changes[-1]["workers"]), "spare worker")
    return f"{ready} ready at the end; {plural(int(entered), 'spare worker')} entered the team"


def _shares(s: Summary) -> str:
    """The workers' last parts of the global batch, or their micro-batches if nothing was measured."""
    if not s.shares:
        grid = s.grids[-1] if s.grids else {}
        unit = int(grid.get("unit") or 1)
        whose = (
            ranks([*range(unit_index * unit, (unit_index + 1) * unit)])
            for unit_index in range(len(grid.get("shares") or []))
        )
        return ", ".join(f"{who}: {share}" for who, share in zip(whose, grid.get("shares") or [], strict=True))
    workers, dealt = s.shares[-1].get("workers") or [], s.shares[-1].get("parts") or []
    unit = max(1, len(workers) // max(1, len(dealt)))
    units = (ranks(workers[at : at + unit]) for at in range(0, len(workers), unit))
    parts = ", ".join(f"{who}: {part:.0%}" for who, part in zip(units, dealt, strict=False))
    return f"{parts}; by measured speed, changed {plural(len(s.shares), 'time')}"


def _done(s: Summary) -> str:
    """Steps and samples, and the time that they took, as a text."""
    count = step_count(s)
    steps = f"{count.done:,} of {plural(count.total, 'step')}" if count.total else plural(count.done, "step")
    return f"{steps}, {plural(s.samples, 'sample')} in {duration(s.wall_seconds)}" if s.steps_done else ""


def _speed(s: Summary) -> str:
    """The speed of the run and that of its last seconds, as a text."""
    if not s.samples_per_second:
        return ""
    rate = f"{speed(s.samples_per_second)} samples/s"
    if s.speedup:
        rate += f", {s.speedup:.2f} times as fast as {plural(s.compare.get('workers') or 1, 'worker')}"
    newest = recent_speed(s)
    return f"{rate} ({WHOLE_RUN})" + (f"; {newest.value} samples/s ({newest.span})" if newest else "")


def _computing(s: Summary) -> str:
    """The operations of the model per second, and their part of what the devices can do, as a text."""
    rate = s.flops_per_second
    if not rate:
        return ""
    how = "of the model, without recomputation"
    how = "estimated as six per parameter and token" if s.flops.get("estimated") else how
    missing = ", ".join(s.flops.get("uncounted") or ())
    texts = [f"{flops(rate)}, {how}", f"without {missing}" if missing else ""]
    if s.utilisation is not None:
        texts.append(f"{s.utilisation:.0%} of the peak of {s.flops.get('device')}")
    return "; ".join(filter(None, texts))


def _gpu(s: Summary) -> str:
    """How much of the time worker 0's GPU was busy, as a text."""
    records = [event for of_trainer in s.steps.values() for event in of_trainer if event.get("gpu") is not None]
    seconds = total(records, "seconds")
    busy = sum(event["gpu"] * (event.get("seconds") or 0.0) for event in records)
    return f"worker 0's GPU was busy {busy / seconds:.0%} of the time" if seconds else ""


def facts(summary: Summary) -> dict[str, Rows]:
    """Describes the run as (name, text) rows by title; omits rows that the journal has no data for."""
    s, start = summary, summary.start
    losses = [(f"loss {name}".strip(), f"from {number(a)} to {number(b)}") for name, (a, b) in s.losses.items()]
    evaluation = s.evaluations[-1] if s.evaluations else {}
    results = (evaluation.get("results") or {}).items()
    values = ", ".join(
        f"{name} {v if isinstance(v, str) else number(v)}" for name, v in results if not isinstance(v, (list, dict))
    )
    moved = ""
    if s.bytes_per_step is not None:
        moved = f"{size_of(s.bytes_per_step)} per step, {size_of(s.bytes_moved)} in total, sent by worker 0"
    resumed = start.get("resumed_from")
    since = f"the last resumed from step {resumed}" if resumed else "the last started from the beginning"
    hosts = start.get("hosts") if start.get("hosts") != 1 else None
    tables: dict[str, Rows] = {
        "Results": [
            *losses,
            *((figure.name, figure.text) for figure in best_values(s)),
            *(("note", str(event.get("text"))) for event in s.notes),
            ("evaluation", f"{values} (step {evaluation.get('step')})" if values else ""),
            _goodput(s),
            *(("noise scale", _noise(event)) for event in s.noise),
            ("done", _done(s)),
            ("speed", _speed(s)),
            ("computing", "; ".join(filter(None, [_computing(s), _gpu(s)]))),
        ],
        "Costs": [
            ("time", ", ".join(f"{name} {part:.0%} ({duration(s.time[name])})" for name, part in shares_of(s.time))),
            ("waited for", ", ".join(f"worker {name} {duration(wait)}" for wait, name in s.waits)),
            ("bytes", moved),
            *_by_kind(s),
            ("links", _links(s.links)),
            ("sent", ", ".join(f"{link} {size_of(count)}" for link, count in [*s.sent.items()][:LINKS])),
            *(("codec", _codec(event)) for event in s.codecs),
            *(("memory", _memory(event)) for event in s.memory[-1:]),
        ],
        "Plan": [
            ("plan", f"{start['plan']} (from {start.get('plan_origin')})" if start.get("plan") else ""),
            *(("model", model_line(event)) for event in s.models),
            ("predictions", _predictions(s)),
            *(("grid", str(grid.get("text") or "")) for grid in s.grids),
            ("shares", _shares(s)),
        ],
        "Model": [row for event in s.models for row in block_rows(event)],
        "Workers": _workers(s),
        "What happened": [
            ("started", started_at(s)),
            ("attempts", f"{len(s.attempts)}, {since}" if len(s.attempts) > 1 else ""),
            ("checkpoints", _saved(s)),
            *_losses(s),
            *(
                ("healed", f"{ranks(e['workers'])}, after step {e.get('step')}: {', '.join(e['tensors'])}")
                for e in s.healed
            ),
            *_describe_hardware(s),
            ("too late", _late(s.late)),
            ("out of step", _out_of_step(s.windows)),
            *(("teams", _teams(s.formed)), ("spares", _spares(s.spares))),
            *(("failure", _cause(event, f" on {event.get('host')}: ")) for event in s.failures),
            ("ended", s.ending),
        ],
        "Environment": [
            ("script", command_line(s.script_line)),
            ("config", ", ".join(f"{name} {value}" for name, value in s.config.items())),
            ("commit", code_of(s.environment)),
            ("workers", str(start.get("workers") or "")),
            ("device", str(start.get("device") or "")),
            ("threads per worker", str(start.get("threads") or "")),
            ("hosts", ", ".join(map(str, hosts)) if isinstance(hosts, list) else str(hosts or "")),
            ("seed", str(start.get("seed", ""))),
            ("versions", ", ".join(f"{name} {version}" for name, version in (start.get("versions") or {}).items())),
        ],
    }
    return {title: [row for row in rows if row[1]] for title, rows in tables.items()}


def brief(summary: Summary) -> Rows:
    """The few rows of `facts` that show how a good run went."""
    tables = {title: dict(rows) for title, rows in facts(summary).items()}
    results, losses = tables["Results"], summary.losses.items()
    loss = ", ".join(f"{name} {number(a)} to {number(b)}" for name, (a, b) in losses) if len(losses) > 1 else ""
    rows = {"loss": loss, **results, "goodput": results.get("goodput", "").partition("; ")[0]}
    if summary.samples_per_second:
        mean = f"mean {speed(summary.samples_per_second)} samples/s"
        if summary.speedup:
            mean += f", {summary.speedup:.2f}x the speed of {plural(summary.compare.get('workers') or 1, 'worker')}"
        rows["speed"] = f"{mean}; {duration(summary.wall_seconds)} in all"
    shown = [name for name in rows if name in ("loss", "evaluation", "goodput", "speed") or name.startswith("best ")]
    return [(name, rows[name]) for name in shown if rows[name]]


def _workers(s: Summary) -> list[tuple[str, str]]:
    """What the workers of each trainer's plan hold and send."""
    several = len(s.explained) > 1
    return [
        (f"trainer {trainer}: {name}" if several else name, text)
        for trainer, explanation in s.explained.items()
        for name, text in explanation.figures()
    ]


def explain(folder: Path, svg: Path | None = None) -> str:
    """The text of ``paceline explain RUN``: a run's choices and their reasons.

    With `svg`, also draws its plan to that file. Raises UsageError if `folder` is not a run folder.
    """
    summary = Summary(folder)
    if svg is not None:
        if not summary.drawn:
            raise UsageError(f"{in_one_line(folder)} has no plan for several workers to draw", "omit --svg")
        save(summary.drawn[0], svg)
    tables = facts(summary)
    lines: list[str] = []
    for title in ("Environment", "Plan", "Model", "Workers", "Decisions", "Results", "Costs", "What happened"):
        if title == "Decisions":
            decisions = [[in_one_line(str(event.get(key))) for key in ("what", "why")] for event in summary.decisions]
            rows = [f"  {what}\n    because {why}" for what, why in decisions]
        else:
            width = max((len(name) for name, _ in tables[title]), default=0)
            rows = [f"  {in_one_line(f'{name:{width}}  {text}')}" for name, text in tables[title]]
        if rows:
            lines += [title, *rows, ""]
    if summary.outcome and summary.outcome.get("text"):
        lines += [str(summary.outcome["text"]).strip(), ""]
    return "\n".join([*lines, f"Next: {summary.command}"])
