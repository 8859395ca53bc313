"""`paceline trace`: exports all workers' timelines for Perfetto.

The format is the JSON of Chrome's Trace Event Format: complete events ("X") with microseconds, instants ("i"), names
of processes and threads ("M"), flows ("s", "t", "f"), which tie the same collective on several workers. The clock is
that of the coordinator's host: the times of other hosts are corrected by the offsets in the journal.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.base.console import in_one_line, shown
from paceline.base.journal import NAME, Event, read_journal, thinned
from paceline.base.schema import read_file, read_json
from paceline.base.stacks import FOLDER
from paceline.base.text import plural, ranks
from paceline.errors import UsageError
from paceline.observe.team_table import lanes_of

RUN, STEPS, COLLECTIVES = 0, 1, 10  # the process of the run's events; the first thread numbers of a worker
INSTANTS = (
    "generation",
    "spares",
    "formed",
    "lost",
    "recovered",
    "hang",
    "failed",
    "stopped",
    "finished",
    "shares",
    "worker",
    "links",
)
GONE = "delete that file to make the trace without it"
MOST = 200_000  # step records times workers, beyond which neighbouring records are added up
Span = dict[str, Any]


def trace(folder: Path, out: Path | None, steps: str | None) -> str:
    """Writes the trace of a run to `out`, gzipped if its name ends in .gz; returns the text to print.

    `steps` is "A:B" or None for all. Raises UsageError if `folder` is not a run folder, or if `steps` is malformed or
    matches no step of the journal.
    """
    if not (folder / NAME).exists():
        raise UsageError(
            f"{in_one_line(folder)} is not a run folder: it does not contain {NAME}",
            "pass a folder made by --run-dir",
        )
    out = out or folder / "trace.json.gz"
    made = Timeline(read_journal(folder), flights(folder))
    while steps is None and len(made.records) * len(made.workers) > MOST:
        fewer = Timeline(thinned(made.journal_events), made.flights)
        if len(fewer.records) == len(made.records):
            break
        made = fewer
    events = made.events(*_window(made, steps))
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    with gzip.open(out, "wt") if out.name.endswith(".gz") else out.open("w") as file:
        file.write(text)
    what = plural(sum(event["ph"] == "X" for event in events), "span")
    return f"{in_one_line(out)}: {what} of {plural(len(made.workers), 'worker')}; open it at https://ui.perfetto.dev"


def flights(folder: Path) -> list[tuple[Event, list[Event]]]:
    """Reads the flight recorder's files of a run, of all hosts, as (head with worker and host, collectives)."""
    from paceline.base.file_types import FlightHead, FlightRecord  # needs msgspec

    recordings: list[tuple[Event, list[Event]]] = []
    for path in sorted([*folder.glob(f"{FOLDER}/*.jsonl"), *folder.glob(f"hosts/*/{FOLDER}/*.jsonl")]):
        first, *rest = [line for line in read_file(path).splitlines() if line.endswith(b"}")] or [b""]
        if first:
            head = dict(read_json(first, FlightHead, str(path), GONE))
            recordings.append((head, [dict(read_json(line, FlightRecord, str(path), GONE)) for line in rest]))
    return recordings


class Timeline:
    """When everything in a run happened. `workers` maps the known workers to their hosts."""

    def __init__(self, events: Sequence[Event], flights: Sequence[tuple[Event, list[Event]]]) -> None:
        self.journal_events, self.flights = list(events), flights
        self.offsets: dict[str, float] = {}  # seconds to add to a host's clock
        self.workers: dict[int, str] = {}
        for event in events:
            if event["event"] == "clock":
                self.offsets[event["host"]] = event["offset"]
                self.workers |= dict.fromkeys(event["workers"], event["host"])
            elif event["event"] == "worker":
                self.workers[event["worker"]] = event.get("host") or ""
            elif event["event"] == "step":
                self.workers |= {int(w): "" for w in event.get("computed") or {} if int(w) not in self.workers}
        self.workers |= {about["worker"]: about["host"] for about, _ in flights}
        self.records: list[
            tuple[float, float, Event]
        ] = []  # begin, end and record of steps; those of a trainer do not overlap
        ends: dict[Any, float] = {}
        for event in events:
            if event["event"] == "step" and event.get("seconds"):
                begin = max(ends.get(event.get("trainer"), 0.0), event["at"] - event["seconds"])
                if begin < event["at"]:
                    self.records.append((begin, event["at"], event))
                ends[event.get("trainer")] = event["at"]

    def events(self, first: float, last: float) -> list[Span]:
        """All trace events between these Unix seconds, in the order of time, which begins at 0."""
        spans = [*self._steps(), *self._collectives(), *self._journal_spans()]
        spans = [span for span in spans if first <= span["ts"] and span.get("end", span["ts"]) <= last]
        spans += [*_ties([span for span in spans if span["cat"] == "collective"])]
        zero = min((span["ts"] for span in spans), default=0.0)
        for span in spans:
            begin = round(1e9 * (span["ts"] - zero))  # whole nanoseconds, so that nested spans stay nested
            span["ts"] = begin / 1000
            if "end" in span:
                span["dur"] = (round(1e9 * (span.pop("end") - zero)) - begin) / 1000
        spans.sort(key=lambda span: (span["ts"], -span.get("dur", 0.0)))
        return [*self._names(spans), *spans]

    def _names(self, spans: Sequence[Span]) -> Iterator[Span]:
        names = {RUN: "run"}
        for worker, host in sorted(self.workers.items()):
            names[worker + 1] = ranks([worker]) + (f" ({host})" if host else "")
        for pid, name in names.items():
            yield _about("process_name", pid, 0, name=name)
            yield _about("process_sort_index", pid, 0, sort_index=pid)
        for pid, tid in sorted({(span["pid"], span["tid"]) for span in spans}):
            lane = f"collectives {tid - COLLECTIVES + 1}" if tid >= COLLECTIVES else "steps"
            run_lane = "checkpoints" if tid else "events"
            yield _about("thread_name", pid, tid, name=run_lane if pid == RUN else lane)

    def _steps(self) -> Iterator[Span]:
        """The parts of steps on each worker that has lanes, else on worker 0; on the others computing and the rest.

        A record is of one step, or has the sums of several steps, which are drawn one after another. The seconds of
        reduce, update and other are, on workers other than 0, those of the step before.
        """
        for begin, end, record in self.records:
            steps, last = record.get("steps") or 1, int(record.get("step") or 0)
            name = f"step {last}" if steps == 1 else f"steps {last - steps + 1}-{last}"
            args = {key: record.get(key) for key in ("trainer", "loss", "samples", "bytes", "steps")}
            if steps > 1:
                args["parts"] = "sums over these steps, one after another"
            parts = lanes_of([record]) | {"0": record.get("time") or {}}
            for worker, computed in (record.get("computed") or {}).items():
                rest = max(0.0, record["seconds"] - computed)
                parts.setdefault(worker, {"load and compute": computed, "reduce, wait and others": rest})
            for worker, spent in parts.items():
                track = {"pid": int(worker) + 1, "tid": STEPS + (record.get("trainer") or 0) % (COLLECTIVES - STEPS)}
                yield _span(name, "step", begin, end, args, **track)
                scale, at = (end - begin) / max(sum(spent.values()), 1e-9), begin
                for part, seconds in spent.items():
                    if seconds > 0:
                        until = min(end, at + seconds * scale)
                        yield _span(part, "part", at, until, {"seconds": seconds}, **track)
                        at = until

    def _collectives(self) -> Iterator[Span]:
        for about, records in self.flights:
            offset, free = self.offsets.get(about["host"], 0.0), list[float]()  # when each lane is free
            for record in (record for record in records if "begun" in record):
                begin = record["begun"] + offset
                end = max(begin, (record.get("ended") or about.get("at") or record["begun"]) + offset)
                args = {key: record.get(key) for key in ("group", "number", "site", "bytes", "failed")}
                args |= {} if record.get("ended") else {"ended": "not yet"}
                track = {"pid": about["worker"] + 1, "tid": COLLECTIVES + _lane(free, begin, end)}
                yield _span(record["name"], "collective", begin, end, args, **track)

    def _journal_spans(self) -> Iterator[Span]:
        """The events of the journal that concern the whole run."""
        free: list[float] = []
        for event in self.journal_events:
            kind = event["event"]
            if kind == "checkpoint":
                took = event.get("took") or event.get("seconds") or 0.0
                name = f"checkpoint of step {event.get('step')}"
                lane = STEPS + _lane(free, event["at"] - took, event["at"])
                yield _span(name, kind, event["at"] - took, event["at"], {}, pid=RUN, tid=lane)
            elif kind in INSTANTS:
                what = {"worker": f"{ranks([event.get('worker') or 0])} {event.get('what')}", "hang": "hang"}.get(
                    kind, kind
                )
                args = {key: value for key, value in event.items() if key not in ("at", "event", "text")}
                yield {
                    "name": what,
                    "cat": kind,
                    "ph": "i",
                    "s": "g",
                    "ts": event["at"],
                    "pid": RUN,
                    "tid": 0,
                    "args": args,
                }


def _ties(spans: Sequence[Span]) -> Iterator[Span]:
    """Yields flow events that connect the same collective on several workers."""
    alike: dict[tuple[Any, ...], list[Span]] = defaultdict(list)
    for span in spans:
        if number := span["args"].get("number"):
            alike[span["args"].get("group"), number, span["name"]].append(span)
    for number, together in enumerate(_meetings(alike)):
        for turn, span in enumerate(together):
            how = "s" if turn == 0 else "f" if turn == len(together) - 1 else "t"
            flow = {key: span[key] for key in ("name", "ts", "pid", "tid")}
            yield {**flow, "cat": "collective", "ph": how, "id": number, **({"bp": "e"} if how == "f" else {})}


def _meetings(alike: Mapping[Any, list[Span]]) -> Iterator[list[Span]]:
    """Groups the spans of one collective on several workers.

    Numbers repeat in another generation: a span that begins a second after all others of the group have ended, or a
    second span of the same worker, belongs to another collective.
    """
    for spans in alike.values():
        together: list[Span] = []
        for span in sorted(spans, key=lambda span: float(span["ts"])):
            over = together and span["ts"] > max(one["end"] for one in together) + 1.0
            if over or span["pid"] in {one["pid"] for one in together}:
                if len(together) > 1:
                    yield together
                together = []
            together.append(span)
        if len(together) > 1:
            yield together


def _lane(free: list[float], begin: float, end: float) -> int:
    """Takes the first lane that is free at `begin`, and occupies it until `end`."""
    lane = next((lane_index for lane_index, until in enumerate(free) if until <= begin), len(free))
    free[lane : lane + 1] = [end]
    return lane


def _span(name: str, kind: str, begin: float, end: float, args: Mapping[str, Any], **track: int) -> Span:
    known_args = {key: value for key, value in args.items() if value is not None}
    return {"name": name, "cat": kind, "ph": "X", "ts": begin, "end": end, "args": known_args, **track}


def _about(what: str, pid: int, tid: int, **args: Any) -> Span:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _window(made: Timeline, steps: str | None) -> tuple[float, float]:
    """The Unix seconds between which the steps A to B were made."""
    if steps is None:
        return 0.0, float("inf")
    first, _, last = steps.partition(":")
    if not (first or "0").isdecimal() or not (last or "0").isdecimal() or ":" not in steps:
        raise UsageError(
            f"--steps {shown(steps)} is not a range of steps", "use A:B, for example 100:120, 100: or :120"
        )
    low, high = int(first or 0), float(last) if last else float("inf")
    those = [
        (begin, end)
        for begin, end, record in made.records
        if low <= (step := record.get("step") or 0) and step - (record.get("steps") or 1) < high
    ]
    if not those:
        raise UsageError(
            f"the journal has no step in the range {shown(steps)}", "`paceline report` shows the number of steps"
        )
    return those[0][0], those[-1][1]
