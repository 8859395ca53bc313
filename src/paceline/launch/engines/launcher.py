"""Starts one agent per host through an engine and follows them to the end.

Hosts are checked before any of them begins; the first one keeps the coordinator, and the others join it. One that does
not answer, or whose connection breaks, is started again until it comes.
"""

from __future__ import annotations

import base64
import json
import math
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.base.console import Coloured, Passing, coloured, in_one_line, last_painted, printable, say
from paceline.base.exit_codes import INTERRUPTED, LEFT_OUT, STOPPED
from paceline.base.schema import read_message
from paceline.errors import LaunchError
from paceline.launch.engines.engine import End, Engine, Host
from paceline.launch.engines.preflight_run import Preflight
from paceline.launch.engines.remote_agent import GO_ON, MARK
from paceline.launch.local import signals
from paceline.plan import Plan

BEAT = 1.0  # seconds between two bytes that show that the launcher is alive
ANSWER = 15.0  # seconds for hosts to answer; after that the run begins without the others
FIRST_RETRY, LONGEST_RETRY = 5.0, 60.0  # seconds before a host is tried again: at first, and at most
FAREWELL = 15.0  # seconds for the other hosts to end after the first one
CHUNK = 1 << 16  # bytes that are read or written at a time
COLUMNS = ("python", "torch", "paceline", "script")


@dataclass(frozen=True)
class HostJob:
    """The program that runs on each host: `python` in the folder `cwd`, after the shell lines of `setup`. `options` are
    those of `paceline run` (`LaunchOptions`); `files` is an archive that is unpacked on the host; `call` is a pickled
    function that is called instead of a script; `listen` is the address at which the first host listens. `detach`: the
    run goes on without the launcher once all hosts have joined. `wait`: if given, all hosts must answer within this
    many seconds, otherwise the run does not begin. `together`: it begins with the workers of all hosts. `preflight`:
    hosts are measured and compared before the run begins.
    """

    options: Mapping[str, Any]
    python: str
    cwd: str
    setup: str = ""
    workers: int | None = None
    listen: str | None = None
    files: bytes = b""
    detach: bool = False
    call: bytes = b""
    wait: float | None = None
    together: bool = False
    preflight: bool = False

    @property
    def script(self) -> str:
        """The first input of ``sh``. ``sh`` may read ahead, so nothing else is sent before Python has replaced it."""
        home = "~/" if self.cwd.startswith("~/") else ""
        cwd = self.cwd.removeprefix(home)
        folder = home + shlex.quote(f"./{cwd}" if cwd.startswith("-") else cwd)
        make = f"(umask 077; mkdir -p {folder}) && " if self.files else ""
        setup = f"{{ {self.setup}\n}} </dev/null && " if self.setup else ""
        return f"{make}cd {folder} && {setup}exec {shlex.quote(self.python)} -m paceline agent\n"


@dataclass
class _Host:
    """The state of one host: its local process, its pipes, and what is known about its agent."""

    spec: Host
    first: bool
    process: subprocess.Popen[bytes] | None = None
    unsent: bytearray = field(default_factory=bytearray)
    unread: dict[str, bytes] = field(default_factory=dict)
    last_line: str = ""  # its last line on standard error
    facts: dict[str, Any] | None = None  # what must be alike on all hosts, once its agent has answered
    ordered: bool = False  # its agent was ordered to begin
    begun: bool = False  # it has joined the run
    code: int | None = None
    end: End | None = None
    retry_at: float = math.inf  # when it is started again
    retry_pause: float = 0.0  # seconds before that
    losses: int = 0  # how often it was lost after it had joined the run
    replaces: str = ""  # the host that was left out, if it replaces one

    @property
    def is_over(self) -> bool:
        return self.process is None and self.retry_at == math.inf


class Launcher:
    """Starts an agent on each host of an engine and follows them to the end. `stop_signal`: the signal that asked for a
    stop, if any did. `value`: the pickled value that a function has returned on worker 0.
    """

    def __init__(self, engine: Engine, job: HostJob) -> None:
        self._engine, self._job = engine, job
        self._token = secrets.token_hex(32)
        self._hosts = [_Host(spec, first=not number) for number, spec in enumerate(engine.hosts)]
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()
        self._listens = ""  # the address of the coordinator
        self._checked = False  # the hosts were compared, and the first one was told to begin
        self._has_left = False  # the run goes on without this launcher
        self._size = 0  # workers with which the run begins, if the first host has too few for the plan
        self._counts: list[int] = []  # of workers on each host, if the plan is chosen for all of them
        self._farewell_end = math.inf  # when to stop waiting for the other hosts, after the end of the first one
        self._last_beat = 0.0  # when the hosts last received the sign that the launcher is alive
        self._preflight: Preflight | None = None
        if job.preflight and len(self._hosts) > 1:
            self._preflight = Preflight([host.spec.name for host in self._hosts], self._measure, self._say)
        self.stop_signal: int | None = None
        self.value = bytearray()

    def run(self) -> int:
        """Runs the job from the hosts' start to their end and returns its exit code. No process remains. LaunchError:
        the hosts cannot begin.
        """
        with signals() as wakeup:
            self._selector.register(wakeup, selectors.EVENT_READ, (None, ""))
            try:
                for host in self._hosts:
                    self._start(host)
                while not self._is_done():
                    for key, events in self._selector.select(BEAT / 4):
                        host, name = key.data
                        if host is None:
                            self._on_signal(wakeup)
                        elif host.process is None:
                            continue  # it has ended since
                        elif events & selectors.EVENT_WRITE:
                            self._write(host)
                        else:
                            self._read(host, name)
                    self._tick(time.monotonic())
            finally:
                for host in self._hosts:
                    self._close(host)
        return self._exit_code()

    def _say(self, text: str) -> None:
        say(text)

    # ---- hosts

    def _start(self, host: _Host) -> None:
        host.retry_at, host.facts, host.last_line = math.inf, None, ""
        host.ordered = host.begun = False
        command = self._engine.command(host.spec)
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            host.process = subprocess.Popen(command, **streams, start_new_session=True)  # type: ignore[call-overload]
        except OSError as error:
            what = f"{command[0]} cannot be started ({error.strerror})"
            raise LaunchError(what, f"install it, or see `paceline launch {self._engine.name} --help`") from error
        assert host.process is not None
        host.unread = {"stdout": b"", "stderr": b""}
        for name in host.unread:
            self._selector.register(getattr(host.process, name), selectors.EVENT_READ, (host, name))
        os.set_blocking(host.process.stdin.fileno(), False)  # type: ignore[union-attr]
        self._send(host, self._job.script.encode())

    def _send(self, host: _Host, data: bytes) -> None:
        if host.process is not None:
            if not host.unsent:
                self._selector.register(host.process.stdin, selectors.EVENT_WRITE, (host, ""))  # type: ignore[arg-type]
            host.unsent += data

    def _keys(self, host: _Host) -> list[selectors.SelectorKey]:
        return [key for key in self._selector.get_map().values() if key.data[0] is host]

    def _write(self, host: _Host) -> None:
        assert host.process is not None
        with suppress(BlockingIOError):
            try:
                del host.unsent[: os.write(host.process.stdin.fileno(), host.unsent[:CHUNK])]  # type: ignore[union-attr]
            except BrokenPipeError:
                host.unsent.clear()
        if not host.unsent:
            self._selector.unregister(host.process.stdin)  # type: ignore[arg-type]

    def _read(self, host: _Host, name: str) -> None:
        pipe = getattr(host.process, name)
        data = os.read(pipe.fileno(), CHUNK)
        *lines, host.unread[name] = (host.unread[name] + data).split(b"\n")
        if not data:
            lines, host.unread[name] = [host.unread[name]] if host.unread[name] else [], b""
            self._selector.unregister(pipe)
        for line in lines:
            if name == "stdout" and line.startswith(MARK):
                self._receive(host, line.removeprefix(MARK))
                continue
            if name == "stderr":
                host.last_line = in_one_line(line.decode(errors="replace").strip()) or host.last_line
            if host.ordered:
                if name == "stdout":
                    Passing(sys.stdout).write(line + b"\n")
                else:
                    before = "" if host.first else f"{host.spec.name} | "
                    say(Coloured(printable(before) + coloured(last_painted(line))))
        if not data and not any(key.events & selectors.EVENT_READ for key in self._keys(host)):
            self._on_end(host)

    def _receive(self, host: _Host, line: bytes) -> None:
        from paceline.launch.engines.message_types import AGENT_MESSAGES  # needs msgspec

        source = f"the message of {host.spec.name}"
        kind = read_message(line, dict[str, Any], source).get("says")
        message = read_message(line, AGENT_MESSAGES.get(str(kind), dict[str, Any]), source)
        if kind == "ready":
            workers = host.spec.workers or self._job.workers
            job = {"options": self._job.options, "workers": workers, "token": self._token, "spare": host.spec.spare}
            job |= {
                "preflight": self._preflight is not None and not self._checked,
                "files": len(self._job.files),
                "call": len(self._job.call),
                "tunnel": self._engine.tunnel_arguments(host.spec),
            }
            self._send(host, json.dumps(job).encode() + b"\n" + self._job.files + self._job.call)
        elif kind == "like":
            host.facts = message
        elif kind == "figures" and self._preflight is not None:
            self._preflight.take(host.spec.name, message)
        elif kind == "link" and self._preflight is not None:
            self._preflight.take_link(host.spec.name, message)
        elif kind == "listens":
            address, port = message["address"]
            self._listens, host.begun = f"{address}:{port}", True
        elif kind == "value":
            self.value += base64.b64decode(message["data"])

    def _measure(self, name: str, target: Any) -> None:
        """Asks a host to measure its link to another one."""
        host = next(host for host in self._hosts if host.spec.name == name)
        self._send(host, json.dumps({"measure": target}).encode() + b"\n")

    def _order(self, host: _Host) -> None:
        """Tells a host's agent to begin: the first one listens, the others join it."""
        towards = self._hosts[1].spec.name if len(self._hosts) > 1 else None
        join = None if host.first else self._listens
        order = {
            "name": host.spec.name,
            "listen": self._job.listen or self._engine.listen,
            "towards": towards,
            "join": join,
            "detach": self._job.detach,
            "slow": self._preflight.slow.pop(host.spec.name, []) if self._preflight is not None else [],
            "size": self._size if host.first else 0,
            "hosts": self._counts if host.first else [],
        }
        host.ordered, host.retry_pause = True, 0.0
        self._send(host, json.dumps(order).encode() + b"\n")

    def _on_end(self, host: _Host) -> None:
        """Notes why a host ended, and starts it again later, replaces it, or goes on without it."""
        process, host.process = host.process, None
        assert process is not None
        host.code = process.wait()
        self._forget(host, process)
        host.end = self._engine.why_ended(host.spec, host.code, host.last_line)
        self._engine.stop(host.spec)
        host.losses += host.begun and host.end is not None and host.end.passing
        if host.first or self.stop_signal is not None:
            return
        is_left_out = host.code == LEFT_OUT
        if is_left_out or host.losses >= (self._job.options.get("exclude_after") or math.inf):
            if self._replace(host):
                return
            if is_left_out:
                self._say(f"{host.spec.name} is left out, and {self._engine.name} has no other host for this run")
                return
        if not (host.end and host.end.passing):
            if host.replaces and not host.ordered:
                why = host.last_line or f"exit code {host.code}"
                self._say(f"{self._engine.name} has not provided a host instead of {host.replaces} ({why})")
            return
        if not host.retry_pause:
            when = "was lost" if host.ordered else "does not answer"
            self._say(f"{host.spec.name} {when} ({host.end.text}); Paceline retries until it answers")
        host.retry_pause = min(LONGEST_RETRY, 2 * host.retry_pause) or FIRST_RETRY
        host.retry_at = time.monotonic() + host.retry_pause

    def _replace(self, host: _Host) -> bool:
        """Asks the engine for another host instead of one that is left out. Returns whether the engine has others."""
        name = host.spec.name
        spec = None if self._hosts[0].is_over else self._engine.request_replacement(host.spec)
        if spec is None:
            return False
        self._say(f"{name} is left out; {self._engine.name} was asked for another host")
        self._hosts.append(_Host(spec, first=False, replaces=name))
        self._start(self._hosts[-1])
        return True

    def _close(self, host: _Host) -> None:
        """Kills the local process of a host. Its agent sees the end of its input, and ends too."""
        host.retry_at = math.inf
        if host.process is not None:
            host.process.kill()
            host.process.wait()
            self._forget(host, host.process)
            host.process = None
            self._engine.stop(host.spec)

    def _forget(self, host: _Host, process: subprocess.Popen[bytes]) -> None:
        for key in self._keys(host):
            self._selector.unregister(key.fileobj)
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()  # type: ignore[union-attr]
        host.unsent.clear()

    # ---- all of them

    def _tick(self, now: float) -> None:
        if now - self._last_beat >= BEAT:
            self._last_beat = now
            for host in self._hosts:
                if host.ordered and not host.unsent:
                    self._send(host, b"\0")
        if not self._checked:
            self._check(now)
        for host in self._hosts:
            if now >= host.retry_at and not self._hosts[0].is_over:
                self._start(host)
            elif self._listens and host.facts and not host.ordered and host.process is not None and self._is_next(host):
                self._admit(host)
        ordered = [host for host in self._hosts if host.ordered and host.process is not None]
        if self._job.detach and not self._has_left and self._listens and all(host.begun for host in ordered):
            self._leave(ordered)

    def _is_next(self, host: _Host) -> bool:
        """Whether a host may join: where the run begins on several hosts together, one after the other, so that
        neighbours in the list of hosts get neighbouring workers.
        """
        earlier = self._hosts[: self._hosts.index(host)] if self._size else []
        return not any(other.ordered and not other.begun and other.process is not None for other in earlier)

    def _leave(self, hosts: list[_Host]) -> None:
        """Leaves the run, which continues on these hosts without the launcher."""
        self._has_left = True
        for host in self._hosts:
            if host in hosts:
                self._send(host, bytes([GO_ON]))
                continue
            self._say(f"{host.spec.name} has not joined; the run continues without it")
            self._close(host)
        folder = Path(self._job.cwd, self._job.options["run_dir"])
        self._say(f"the run continues by itself, at {self._listens}, in the folder {self._hosts[0].spec.name}:{folder}")
        self._say("follow or stop it with `paceline watch`, `paceline logs -f` or `paceline stop`, and that folder")

    def _check(self, now: float) -> None:
        """Lets the first host begin once all hosts have answered, or time is up. LaunchError: the hosts differ, or a
        host that the run needs is silent.
        """
        first, silent = self._hosts[0], [host for host in self._hosts if host.facts is None]
        needs_all_hosts, seconds = self._job.wait is not None, self._job.wait or ANSWER
        waiting = [host for host in silent if host.process is not None or (needs_all_hosts and not host.is_over)]
        if (waiting and now - self._began < seconds) or self.stop_signal is not None:
            return
        failed = [host for host in silent if host.process is None and not (host.end and host.end.passing)]
        if failed or len({self._row(host)[1:] for host in self._hosts if host.facts}) > 1:
            raise LaunchError(f"the hosts differ:\n{self._table()}", self._cure())
        if first.facts is None:
            why = (first.end and first.end.text) or self._engine.why_silent(first.spec) or "no output"
            what = f"the first host {first.spec.name} does not answer ({why}), but it must run the coordinator"
            raise LaunchError(what, "put another host first, or repair this one")
        answering = [host.spec.name for host in self._hosts if host.facts is not None and host.process is not None]
        if self._preflight is not None and not self._preflight.is_over(answering, now):
            return
        for host in waiting:
            why = (host.end and host.end.text) or self._engine.why_silent(host.spec) or "no output"
            if needs_all_hosts:
                what = f"{host.spec.name} has not answered within {seconds:.0f} s ({why}), but the run needs all hosts"
                raise LaunchError(what, "fix the cause, or use fewer hosts")
            self._say(f"{host.spec.name} does not answer yet ({why}); the run begins without it")
        self._set_size(not waiting)
        self._checked = True
        self._order(first)

    def _set_size(self, is_complete: bool) -> None:
        """Sets the number of workers with which the run begins, if it begins on several hosts together. PlanError: its
        plan needs more workers, and all hosts have answered (`is_complete`). Workers of spare hosts do not count.
        """
        counts = [host.facts["workers"] for host in self._hosts if host.facts and not host.spec.spare]
        if len(self._hosts) == 1:
            return
        plan, total = Plan.parse(self._job.options.get("plan") or ""), sum(counts)
        if plan.auto:
            self._size, self._counts = total, counts
            return
        size = plan.first_team(counts[0])
        if is_complete and size > total:
            plan.validate(total)
        if self._job.together:
            self._size = total
        elif size > counts[0]:
            self._size = size
            self._say(f"the plan {plan} needs {size} workers: the run begins on several hosts together")

    def _admit(self, host: _Host) -> None:
        """Lets a host join, unless it differs from the first one."""
        if self._row(host)[1:] == self._row(self._hosts[0])[1:]:
            self._order(host)
        else:
            self._say(f"{host.spec.name} differs from the first host and is left out:\n{self._table()}")
            host.retry_pause = math.inf
            self._close(host)

    def _row(self, host: _Host) -> tuple[str, ...]:
        if host.facts is None:
            text = host.end.text if host.end else host.last_line or f"ended with exit code {host.code}"
            return (host.spec.name, text if host.process is None else "has not answered")
        return (host.spec.name, *(in_one_line(host.facts[name])[: 8 if name == "script" else 40] for name in COLUMNS))

    def _table(self) -> str:
        rows = [("host", *COLUMNS), *map(self._row, self._hosts)]
        full = [row for row in rows if len(row) > 2]
        widths = [max(len(row[column]) for row in (rows if not column else full)) for column in range(len(COLUMNS) + 1)]
        cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=False)] for row in rows]
        return "\n".join("  ".join(row).rstrip() for row in cells)

    def _cure(self) -> str:
        if cure := next((host.end.cure for host in self._hosts if host.end and host.end.cure), ""):
            return cure
        scripts = {host.facts["script"] for host in self._hosts if host.facts}
        if len(scripts) > 1:
            return "copy the same script to all hosts, or use --sync"
        return "install the same versions, or use --python PATH and --setup"

    def _on_signal(self, wakeup: socket.socket) -> None:
        for number in wakeup.recv(CHUNK):
            if number == signal.SIGCHLD:
                continue
            first = self._hosts[0]
            if self.stop_signal is None and not first.ordered:  # the run has not begun
                for host in self._hosts:
                    self._close(host)
            self.stop_signal = self.stop_signal or number
            self._send(first, bytes([number if number != signal.SIGUSR2 else signal.SIGTERM]))

    def _is_done(self) -> bool:
        first = self._hosts[0]
        if not self._checked and self.stop_signal is None:
            return False
        if not first.is_over:
            return False
        self._farewell_end = min(self._farewell_end, time.monotonic() + FAREWELL)
        ended = all(host.process is None or not host.ordered for host in self._hosts)  # the others have not begun
        return ended or time.monotonic() > self._farewell_end

    def _exit_code(self) -> int:
        """The exit code of the first host, or of another host on which a worker failed."""
        first = self._hosts[0]
        if first.end is not None:
            self._say(f"{first.spec.name}: {first.end.kind} ({first.end.text}); run the same command again to continue")
            return STOPPED
        if not first.ordered:
            return INTERRUPTED if self.stop_signal == signal.SIGINT else STOPPED
        no_failure = (None, 0, 2, STOPPED, LEFT_OUT, INTERRUPTED)
        others = [host.code for host in self._hosts[1:] if host.code not in no_failure]
        code = others[0] if first.code == 1 and others and others[0] else first.code
        return code if code is not None and code >= 0 else 1
