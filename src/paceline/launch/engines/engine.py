"""The interface of all engines: how processes start on other hosts."""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.base.console import in_one_line, shown
from paceline.base.environment import variable
from paceline.base.schema import read_file
from paceline.errors import UsageError


@dataclass(frozen=True)
class Host:
    """A host: its name in the engine, and its number of workers (None: one worker per GPU, or one without GPUs), which
    are all spares on a `spare` host.
    """

    name: str
    workers: int | None = None
    spare: bool = False


@dataclass(frozen=True)
class End:
    """Why a host ended, if its agent did not end by itself. `kind` is ``lost`` (the host or the connection to it),
    ``preempted``, ``timed out`` or ``failed``; `text` is the engine's message; `cure` is what to do, if that is known.
    """

    kind: str
    text: str
    cure: str = ""

    @property
    def passing(self) -> bool:
        """Whether another attempt may succeed."""
        return self.kind in ("lost", "preempted")


class Engine(ABC):
    """Starts agents on `hosts`, the first of which runs the coordinator. `given`: options for the engine's command."""

    name: str
    listen: str | None = None  # the address at which the other hosts reach the first one, if the engine knows it

    def __init__(self, hosts: Sequence[Host], given: Sequence[str] = ()) -> None:
        self.hosts, self.given = list(hosts), list(given)

    @abstractmethod
    def command(self, host: Host) -> list[str]:
        """The local command that runs ``sh`` on the host with our standard streams; the agent is started in it."""

    def tunnel_arguments(self, host: Host) -> dict[str, str] | None:
        """The agent's arguments for `tunnel.inside`, if hosts reach each other through a tunnel only."""
        return None

    def why_silent(self, host: Host) -> str:
        """Why a host has not answered yet, if the engine knows; otherwise an empty text."""
        return ""

    def why_ended(self, host: Host, code: int, last_line: str) -> End | None:
        """Why `command` ended, from its exit code and last line; None if the agent ended by itself."""
        return None

    def exit_code(self, code: int, stop_signal: int | None) -> int:
        """Acts on the end of a run and returns the launcher's exit code. `stop_signal`: the signal that asked us to
        stop, if any did.
        """
        return code

    def request_replacement(self, host: Host) -> Host | None:
        """Asks for a host to replace one that is left out of the run; None if the engine has no others. The command of
        the new host may wait until the engine provides it.
        """
        return None

    def stop(self, host: Host) -> None:  # noqa: B027 (most have nothing to do)
        """Ends processes that may be left on a host after the end of `command`."""

    def close(self) -> None:  # noqa: B027
        """Releases the engine's own processes and files."""


def split_options(text: str | None) -> list[str]:
    """Splits the text of ``--engine`` into words, as a shell would. UsageError: a quote is not closed."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise UsageError(f"--engine cannot be parsed ({error})", "close the quotes") from error


def parse_hosts(text: str) -> list[Host]:
    """Parses ``a,b:2,user@c,d:spare``: hosts, optionally with their number of workers, and spare hosts. UsageError: a
    word is not a host.
    """
    hosts = []
    for word in text.split(","):
        host = word.removesuffix(":spare")
        name, _, count = host.rpartition(":") if re.fullmatch("[^:]+:[0-9]{1,6}", host) else (host, "", "")
        if not name or name.startswith("-") or re.search(r"\s", name) or in_one_line(name) != name or count == "0":
            raise UsageError(f"{shown(word)} is not a host", "use names that ssh accepts, like --hosts a,b:2,user@c")
        hosts.append(Host(name, int(count) if count else None, word.endswith(":spare")))
    names = [host.name for host in hosts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"the host {shown(twice)} is given twice", f"use {twice}:2 for two workers on it")
    if hosts[0].spare:
        what = f"the first host, {shown(names[0])}, cannot be a spare: it starts the run"
        raise UsageError(what, "list another host first")
    return hosts


def read_hosts(path: Path) -> list[Host]:
    """Reads a file with one host per line: ``b``, ``b:2`` or, as for mpirun, ``b slots=2``; # begins a comment."""
    try:
        lines = [line.partition("#")[0].strip() for line in read_file(path).decode().splitlines()]
    except OSError as error:
        what = f"--hostfile {in_one_line(path)} cannot be read ({error.strerror})"
        raise UsageError(what, "pass a file with one host per line") from error
    return parse_hosts(",".join(re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line))


def read_variables(words: Sequence[str]) -> dict[str, str]:
    """Reads the words of ``--env``: ``NAME=VALUE``, or ``NAME`` for a variable of this process. UsageError: a word is
    not one of these, or the variable is not set.
    """
    variables = {}
    for name, _, value in (word.partition("=") for word in words):
        if not name.isidentifier():
            raise UsageError(f"--env {shown(name)} is not a variable name", "use NAME or NAME=VALUE")
        variables[name] = value or variable(name) or ""
        if not variables[name]:
            raise UsageError(f"--env {name}: this variable is not set here", f"export it, or use --env {name}=VALUE")
    return variables
