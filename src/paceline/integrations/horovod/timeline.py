"""Writes a Chrome trace of the named collectives: when each was negotiated, and when it was carried out."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any


class CollectiveTimeline:
    """Collects the events of this process and writes them to a file that chrome://tracing and Perfetto read.

    Each name has a row. The file is complete once `close` has been called.
    """

    def __init__(self, path: str | Path, mark_cycles: bool = False) -> None:
        self.path, self.mark_cycles = Path(path), mark_cycles
        self._events: list[dict[str, Any]] = []
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        self.path.write_text("[]\n")  # so that a path that cannot be written is reported at once

    def _row(self, name: str) -> int:
        if name not in self._rows:
            number = self._rows[name] = len(self._rows) + 1
            self._events.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}})
        return self._rows[name]

    def begin(self, name: str, activity: str, **args: Any) -> None:
        """Begins an activity of a named collective."""
        self._add(name, "B", activity, args)

    def end(self, name: str) -> None:
        """Ends the last activity of a named collective."""
        self._add(name, "E", "", {})

    def mark_cycle(self) -> None:
        """Marks the start of a negotiation cycle."""
        if self.mark_cycles:
            self._add("cycles", "i", "CYCLE_START", {})

    def _add(self, name: str, phase: str, activity: str, args: dict[str, Any]) -> None:
        with self._lock:
            event = {"ph": phase, "pid": self._row(name), "tid": 0, "ts": time.perf_counter() * 1e6}
            self._events.append(
                {**event, **({"name": activity} if activity else {}), **({"args": args} if args else {})}
            )

    def close(self) -> None:
        """Writes the file."""
        with self._lock:
            lines = ",\n".join(json.dumps(event) for event in self._events)
            self.path.write_text(f"[\n{lines}\n]\n")
