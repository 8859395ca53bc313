"""How an agent joins a run: address, token, and reasons for refusal."""

from __future__ import annotations

import difflib
import hashlib
import re
import secrets
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.base.console import in_one_line, say
from paceline.base.environment import address_towards
from paceline.base.schema import read_file
from paceline.base.tracebacks import short
from paceline.errors import FormatError, LaunchError, UsageError
from paceline.launch.coordinator_process import listening_at
from paceline.launch.options import GIVEN, LaunchOptions
from paceline.team.auth import NAME, read_token
from paceline.team.coordinator_client import CoordinatorClient, RefusedError, UnsignedError
from paceline.team.join_options import TermsError

LONGEST = 30  # lines of a difference that are shown
# What to do where something answers that has not the run's token.
NO_TOKEN = f"see whether the run still goes on there, or copy the file {NAME} of its folder here again"
NAMELESS = 0.5  # seconds between two questions for a name


def likeness(options: LaunchOptions, text: bytes | None = None) -> dict[str, Any]:
    """The facts that all agents of a run must have in common. `text`: the content of the script, if it is not to be
    read.
    """
    return {
        "script": hashlib.sha256(read_file(options.script) if text is None else text).hexdigest(),
        "module": options.module,
        "arguments": list(options.arguments),
        "plan": options.plan,
        "torch": _version_of_torch(),
        "paceline": sys.modules["paceline"].__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def _version_of_torch() -> str:
    """The version of the torch that workers will import. It is read from a file: the import takes seconds, and even its
    package's metadata takes a tenth of the time in which an agent starts.
    """
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        with suppress(OSError):
            text = Path(spec.origin).with_name("version.py").read_text(errors="replace")
            if version_match := re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE):
                return version_match[1]
    from importlib.metadata import version

    return version("torch")


def introduction(options: LaunchOptions, folder: Path, numbers: list[int], standby: socket.socket) -> dict[str, Any]:
    """The first message of an agent. `standby`: the socket on which its own coordinator listens, or may one day."""
    host = socket.gethostname()
    return {
        "agent": f"{host} ({secrets.token_hex(4)})",
        "host": host,
        "logs": str(short(folder / "logs")),
        "standby": standby.getsockname()[:2],
        "numbers": numbers,
        "count": options.workers,
        "same": likeness(options),
    }


def address_of(text: str) -> tuple[str, int]:
    """`HOST:PORT`, or `HOST` with a port that is free."""
    host, _, port = text.rpartition(":") if ":" in text else (text, "", "0")
    if not re.fullmatch("[!-~]+", host) or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UsageError(f"{text!r} is no address", "give HOST:PORT, as 10.0.0.7:29400")
    return host, int(port)


def listen(options: LaunchOptions) -> socket.socket:
    """The coordinator's socket: on the loopback unless others are to come."""
    host, port = address_of(options.listen) if options.listen else ("127.0.0.1", 0)
    if host in ("0.0.0.0", "::", "*"):
        raise UsageError(f"--listen {host} is every address", "give the one at which the other hosts reach this one")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        cure = "give an address of this host, and a port that is free"
        raise UsageError(f"--listen {options.listen}: {error.strerror}", cure) from error
    listener.listen(256)
    return listener


def stand_by(towards: tuple[str, int], patience: float = 0.0) -> socket.socket:
    """A socket at the address from which the coordinator is reached, for one that takes over. Nobody answers yet. The
    coordinator's name may be known to nobody for so many seconds.
    """
    standby, end = socket.socket(), time.monotonic() + patience
    try:
        while True:
            try:
                standby.bind((address_towards(*towards), 0))
                break
            except socket.gaierror:
                if time.monotonic() > end:
                    raise
                time.sleep(NAMELESS)
    except OSError as error:
        standby.close()
        host, port = towards
        raise LaunchError(f"there is no way to {host}:{port} ({error.strerror})", "see `ip route`") from error
    return standby


def find(options: LaunchOptions) -> tuple[tuple[str, int], bytes, Path | None]:
    """The address of the coordinator of the run to join, its token, and the run folder if it is on this host.
    UsageError: there is no such run, or the token is missing.
    """
    assert options.join is not None
    folder = Path(options.join)
    if folder.is_dir():
        try:
            address = listening_at(folder)
        except OSError:
            raise UsageError(
                f"no run to join was started in {in_one_line(folder)}", "start it first, without --join"
            ) from None
        token = Path(options.token_file) if options.token_file else folder / NAME
        return (address["host"], address["port"]), read_token(token), folder
    if ":" not in options.join:
        cure = "give the run's folder, or HOST:PORT of its coordinator and --token-file"
        raise UsageError(f"there is no folder {options.join}", cure)
    if options.token is not None:
        return address_of(options.join), options.token, None
    if options.token_file is None:
        raise UsageError("a run at HOST:PORT needs its token", f"copy the file {NAME} of its folder: --token-file FILE")
    return address_of(options.join), read_token(Path(options.token_file)), None


def join(options: LaunchOptions, link: CoordinatorClient) -> tuple[LaunchOptions, list[int]]:
    """Joins a run. Returns the options, completed by those of the run, and the numbers of our workers. UsageError: this
    host differs from the run, or has the wrong token. LaunchError: the run cannot be reached, or refuses.
    """
    host, port = link.address
    try:
        numbers = _introduced(link, options.patience)
    except UnsignedError as error:
        if error.code == 401:
            cure = f"copy the file {NAME} of its folder here again"
            raise UsageError(f"the run at {host}:{port} refuses this token", cure) from None
        raise LaunchError(str(error), NO_TOKEN) from None
    except (TermsError, FormatError) as error:
        why = error.what if isinstance(error, FormatError) else error
        cure = "see that the run and this command use the same Paceline"
        raise LaunchError(f"the run at {host}:{port} cannot be joined: {why}", cure) from None
    except RefusedError as refused:
        differs = refused.reply.get("differs")
        if not differs:
            raise LaunchError(f"the run at {host}:{port} refuses to be joined: {refused}", "see its console") from None
        script = refused.reply.get("script", "")
        what = [_difference(options, name, run_value, local_value, script) for name, run_value, local_value in differs]
        raise UsageError("; ".join(what), "bring the same here, and join again") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "no answer"
        cure = "see whether it still runs"
        if options.on_listening is not None:  # it does
            cure = "let the hosts reach each other on all ports, or launch with --tunnel where only ssh is open"
        raise LaunchError(f"there is no run to join at {host}:{port} ({why})", cure) from error
    run = link.run
    given = {name: run["given"][name] for name in GIVEN if getattr(options, name) is None}
    rules = {name: run[name] for name in ("max_restarts", "min_workers")}
    return replace(options, **given, **rules, size=run["workers"]), numbers


def _introduced(link: CoordinatorClient, patience: float) -> list[int]:
    """Asks the coordinator for the numbers of our workers, and waits up to `patience` seconds for it to begin."""
    end, has_warned = time.monotonic() + patience, False
    while True:
        try:
            return link.introduce()
        except UnsignedError as error:  # another program may have the port until then
            if time.monotonic() > end or error.code == 401:
                raise
            if not has_warned:
                say(f"{in_one_line(error)}: waiting for the run to begin there")
            has_warned = True
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def _difference(options: LaunchOptions, name: str, run_value: Any, local_value: Any, script: str) -> str:
    if name != "script":
        return f"{name}: {run_value} in the run, {local_value} here"
    run_lines, local_lines = script.splitlines(), read_file(options.script).decode(errors="replace").splitlines()
    lines = list(difflib.unified_diff(run_lines, local_lines, "script of the run", "script here", lineterm="", n=1))
    if len(lines) > LONGEST:
        lines[LONGEST:] = [f"... and {len(lines) - LONGEST} lines more"]
    return "\n".join(["the script differs from the run's:", *lines])
