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
from paceline.base.environment import address_towards, host_name
from paceline.base.schema import read_file
from paceline.base.text import plural
from paceline.base.tracebacks import short
from paceline.errors import FormatError, LaunchError, PacelineError, UsageError
from paceline.launch.coordinator_process import listening_at
from paceline.launch.host_history import SENT, HostHistory
from paceline.launch.options import GIVEN, LaunchOptions
from paceline.team.auth import NAME, read_token
from paceline.team.coordinator import AWAITED, LATER
from paceline.team.coordinator_client import CoordinatorClient, RefusedError, UnsignedError
from paceline.team.host_failures import FORBIDDEN
from paceline.team.join_options import TermsError

LONGEST = 30  # lines of a script difference that are shown
# What to do if a program answers that does not know the token of the run.
NO_TOKEN = f"check whether the run is still running there, or copy the file {NAME} of its run folder here again"
NAMELESS = 0.5  # seconds between two attempts to resolve a name


class HostExcludedError(LaunchError):
    """The run goes on without this host, which has failed too often."""


def likeness(options: LaunchOptions, text: bytes | None = None) -> dict[str, Any]:
    """The facts that all agents of a run must have in common. `text`: the content of the script, if it should
    not be read.
    """
    return {
        "script": hashlib.sha256(read_file(options.script) if text is None else text).hexdigest(),
        "module": options.module,
        "arguments": list(options.arguments),
        "plan": options.plan,
        "config": options.config,
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
    """The first message of an agent. `standby`: the socket of the coordinator that this host runs, or may run later."""
    host = socket.gethostname()
    return {
        "agent": f"{host} ({secrets.token_hex(4)})",
        "host": host,
        "logs": str(short(folder / "logs")),
        "standby": standby.getsockname()[:2],
        "numbers": numbers,
        "count": options.workers + options.spares,
        "spares": options.spares,
        "same": likeness(options),
        "machine": host_name(),
        "failures": [] if options.temporary or options.raw else HostHistory().failures[-SENT:],
    }


def address_of(text: str) -> tuple[str, int]:
    """Parses `HOST:PORT`; `HOST` without a port means any free port. UsageError: the text is not an address."""
    host, _, port = text.rpartition(":") if ":" in text else (text, "", "0")
    if not re.fullmatch("[!-~]+", host) or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UsageError(f"{text!r} is not an address", "use HOST:PORT, for example 10.0.0.7:29400")
    return host, int(port)


def listen(options: LaunchOptions) -> socket.socket:
    """Opens the socket of the coordinator: on the loopback, unless --listen names an address for other hosts."""
    host, port = address_of(options.listen) if options.listen else ("127.0.0.1", 0)
    if host in ("0.0.0.0", "::", "*"):
        raise UsageError(f"--listen {host} means all addresses", "use the one at which the other hosts reach this host")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port or options.port))
    except OSError as error:
        cure = "use an address of this host and a free port"
        raise UsageError(f"--listen {options.listen}: {error.strerror}", cure) from error
    listener.listen(256)
    return listener


def stand_by(towards: tuple[str, int], patience: float = 0.0) -> socket.socket:
    """Binds a socket at the address from which the coordinator is reached, in case this host takes it over. It does
    not listen yet. For `patience` seconds, the name of the coordinator may be unknown. LaunchError: no route.
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
        raise LaunchError(f"{host}:{port} cannot be reached ({error.strerror})", "check `ip route`") from error
    return standby


def find_run(options: LaunchOptions) -> tuple[tuple[str, int], bytes, Path | None]:
    """The address of the coordinator of the run to join, its token, and the run folder if it is on this host.
    UsageError: there is no such run, or the token is missing.
    """
    assert options.join is not None
    folder = Path(options.join)
    if folder.is_dir():
        try:
            address = listening_at(folder)
        except OSError:
            what = f"no run was started in {in_one_line(folder)}"
            raise UsageError(what, "start the run first, without --join") from None
        token = Path(options.token_file) if options.token_file else folder / NAME
        return (address["host"], address["port"]), read_token(token), folder
    if ":" not in options.join:
        cure = "pass the run folder, or HOST:PORT of its coordinator with --token-file"
        raise UsageError(f"the folder {options.join} does not exist", cure)
    if options.token is not None:
        return address_of(options.join), options.token, None
    if options.token_file is None:
        cure = f"copy the file {NAME} of its run folder here, and pass --token-file FILE"
        raise UsageError("a run at HOST:PORT needs its token", cure)
    return address_of(options.join), read_token(Path(options.token_file)), None


def join(options: LaunchOptions, link: CoordinatorClient) -> tuple[LaunchOptions, list[int]]:
    """Joins a run. Returns the options, completed by those of the run, and the numbers of our workers. UsageError: this
    host differs from the run, or has the wrong token. LaunchError: the run cannot be reached, or refuses.
    """
    host, port = link.address
    try:
        numbers = _introduce(link, options.patience)
    except UnsignedError as error:
        if error.code == 401:
            cure = f"copy the file {NAME} of its run folder here again"
            raise UsageError(f"the run at {host}:{port} rejects this token", cure) from None
        raise LaunchError(str(error), NO_TOKEN) from None
    except (TermsError, FormatError) as error:
        why = error.what if isinstance(error, FormatError) else error
        cure = "use the same version of Paceline as the run"
        raise LaunchError(f"the run at {host}:{port} cannot be joined: {why}", cure) from None
    except RefusedError as refused:
        raise explain_refusal(refused, options, link.address) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "no answer"
        cure = "check whether the run is still running"
        if options.on_listening is not None:  # the launcher knows that it runs
            cure = "open all ports between the hosts, or use --tunnel if only ssh is open"
        raise LaunchError(f"no run answers at {host}:{port} ({why})", cure) from error
    run = link.run
    given = {name: run["given"][name] for name in GIVEN if getattr(options, name) is None}
    rules = {name: run[name] for name in ("max_restarts", "min_workers")}
    return replace(options, **given, **rules, size=run["workers"]), numbers


def explain_refusal(refused: RefusedError, options: LaunchOptions, address: tuple[str, int]) -> PacelineError:
    """The error that says why the run at `address` refuses that this host joins it."""
    host, port = address
    if refused.code == FORBIDDEN:
        left_out = f"{host_name()} is left out of the run at {host}:{port} after {refused}"
        return HostExcludedError(left_out, "test this host; `paceline doctor` shows its history")
    if not (differs := refused.reply.get("differs")):
        return LaunchError(f"the run at {host}:{port} cannot be joined: {refused}", "see its console")
    script = refused.reply.get("script", "")
    what = [_difference(options, name, run_value, local_value, script) for name, run_value, local_value in differs]
    return UsageError("; ".join(what), "make this host equal to the run, and join again")


def _introduce(link: CoordinatorClient, patience: float) -> list[int]:
    """Asks the coordinator for the numbers of our workers. Waits up to `patience` seconds for it to begin, and longer
    if it was restarted and does not know yet which workers it lacks.
    """
    began, has_warned = time.monotonic(), False
    end = began + patience
    while True:
        try:
            return link.introduce()
        except UnsignedError as error:  # until the run begins, another program may use the port
            if time.monotonic() > end or error.code == 401:
                raise
            if not has_warned:
                say(f"{in_one_line(error)}; waiting for the run to begin there")
            has_warned = True
        except RefusedError as refused:
            if refused.code != LATER or time.monotonic() > max(end, began + 2 * AWAITED):
                raise
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
        lines[LONGEST:] = [f"... and {plural(len(lines) - LONGEST, 'more line')}"]
    return "\n".join(["the script differs from the script of the run:", *lines])
