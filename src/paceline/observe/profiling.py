"""`paceline profile`: runs torch's profiler over the next steps of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = "profiles"  # in the run folder


def profile_of(folder: Path, asked: int, worker: int) -> Path:
    """The file to which a worker writes the profile of request number `asked`."""
    return folder / FOLDER / str(asked) / f"worker-{worker}.json.gz"


class Profiles:
    """Profiles steps of this `worker` on request."""

    def __init__(self, folder: Path | None, worker: int) -> None:
        self._folder, self._worker = folder, worker
        self._asked = 0
        self._profile: Any = None
        self._span: Any = None  # the step under way
        self._left = 0

    def between_steps(self, step: int, asked: Mapping[str, Any]) -> None:
        """Called after each step, with the number of steps made; the profiled steps lie between two calls.

        `asked` is the latest request: its number, how many `steps` to profile, and on which `workers`.
        """
        if self._profile is not None:
            self._span.__exit__(None, None, None)
            self._left -= 1
            if not self._left:
                self._write()
        if self._profile is None and asked.get("asked", 0) > self._asked:
            self._asked = asked["asked"]
            if self._worker in asked["workers"] and self._folder is not None:
                from torch.profiler import profile, supported_activities

                self._left = asked["steps"]
                self._profile = profile(activities=supported_activities(), acc_events=True)
                self._profile.start()
        if self._profile is not None:
            from torch.profiler import record_function

            self._span = record_function(f"step {step + 1}")
            self._span.__enter__()

    def _write(self) -> None:
        assert self._folder is not None
        taken, self._profile = self._profile, None
        taken.stop()
        path = profile_of(self._folder, self._asked, self._worker)
        half = path.with_name(f".{os.getpid()}.json.gz")
        with suppress(OSError):  # on a full disk only the profile is lost
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            taken.export_chrome_trace(str(half))
            half.chmod(0o600)
            half.replace(path)
