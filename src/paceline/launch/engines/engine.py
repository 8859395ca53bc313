"""The interface of all engines: how processes start on other hosts."""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.base.console import in_one_line, shown
from paceline.base.schema import read_file
from paceline.errors import UsageError


@dataclass(frozen=True)
class Host:
    """A host, by the engine's name for it, and its workers: as many as it has GPUs, else one, where that is None."""

    name: str
    workers: int | None = None


@dataclass(frozen=True)
class End:
    """What an engine says of an end that was not the agent's own: ``lost`` (the host, or the way to it), ``preempted``,
    ``timed out`` or ``failed``; the engine's words, and what to do, where it knows that.
    """

    kind: str
    text: str
    cure: str = ""

    @property
    def passing(self) -> bool:
        """Whether another attempt may go better."""
        return self.kind in ("lost", "preempted")


class Engine(ABC):
    """Hosts at `places`, the first of which keeps the coordinator. `given` are options for the engine's own command."""

    name: str
    listen: str | None = None  # where the others reach the first host, if that is known here

    def __init__(self, places: Sequence[Host], given: Sequence[str] = ()) -> None:
        self.places, self.given = list(places), list(given)

    @abstractmethod
    def command(self, place: Host) -> list[str]:
        """Starts an agent: the command here that becomes ``sh`` on the host, with our standard streams."""

    def way(self, place: Host) -> dict[str, str] | None:
        """What the agent there is to know of the way to the others, where these are not reached as they are."""
        return None

    def missing(self, place: Host) -> str:
        """Why a host has not answered yet, as the engine sees it; empty where it sees nothing."""
        return ""

    def end(self, place: Host, code: int, said: str) -> End | None:
        """What the engine says of the end of `command`, from its exit code and last line; None: it has no say."""
        return None

    def after(self, code: int, told: int | None) -> int:
        """What becomes of the run's exit code; `told`: the signal that asked us to stop, if any did."""
        return code

    def stop(self, place: Host) -> None:  # noqa: B027 (most have nothing to do)
        """Ends what may be left on a host after the end of `command`."""

    def close(self) -> None:  # noqa: B027
        """Ends what the engine itself has needed."""


def split_options(text: str | None) -> list[str]:
    """The words of ``--engine``, as a shell would split them. UsageError: its quotes have no end."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise UsageError(f"--engine cannot be read ({error})", "close its quotes") from error


def parse_hosts(text: str) -> list[Host]:
    """``a,b:2,user@c``: hosts, some with their number of workers."""
    places = []
    for word in text.split(","):
        name, _, count = word.rpartition(":") if re.fullmatch("[^:]+:[0-9]{1,6}", word) else (word, "", "")
        if not name or name.startswith("-") or re.search(r"\s", name) or in_one_line(name) != name or count == "0":
            raise UsageError(f"{shown(word)} is no host", "give names as ssh takes them, as --hosts a,b:2,user@c")
        places.append(Host(name, int(count) if count else None))
    names = [place.name for place in places]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"the host {shown(twice)} is given twice", f"write {twice}:2 for two workers on it")
    return places


def read_hosts(path: Path) -> list[Host]:
    """A file with a host on each line: ``b``, ``b:2`` or, as mpirun has it, ``b slots=2``; # begins a comment."""
    try:
        lines = [line.partition("#")[0].strip() for line in read_file(path).decode().splitlines()]
    except OSError as error:
        raise UsageError(
            f"--hostfile {in_one_line(path)} cannot be read ({error.strerror})", "give a file of hosts"
        ) from error
    return parse_hosts(",".join(re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line))
