"""The agent's program on another host, controlled through standard input.

It prints four kinds of messages on standard output, each a line that begins with `MARK`: ``ready``, ``like`` (the facts
that must be equal on all hosts), ``listens``, and the ``value`` of a function, in pieces. It reads a job, then an order
(which host is the first), each a line of JSON, and then bytes: zeros, which distinguish an idle launcher from a broken
connection; signal numbers; and `GO_ON`: the launcher leaves, and the run continues without it.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.base.console import shown
from paceline.base.environment import FUNCTION, address_towards, gpus, reached_at
from paceline.base.exit_codes import STOPPED
from paceline.base.polling import can_read, wait_for
from paceline.base.schema import SAME_VERSION, read_json
from paceline.errors import FormatError, UsageError
from paceline.launch.engines.links import measure_link, offer_links
from paceline.launch.host_history import HostEntry, HostHistory
from paceline.launch.joining import likeness
from paceline.launch.local import launch
from paceline.launch.modules import find_module
from paceline.launch.options import LaunchOptions
from paceline.launch.preflight import figures

MARK = b"\x1epaceline "
SILENCE = 15.0  # seconds without a byte, after which the connection counts as broken
PATIENCE = 20.0  # seconds in which the running coordinator of the first host must be reached
VALUE = 1 << 19  # bytes of a value in one line
PIECE = 4096  # bytes that a pipe accepts at once if it accepts any
GO_ON = 255
HOSTS = "hosts"  # the folder in a run folder with those of joined hosts
CONSOLE = "console.log"  # a file in the run folder: the output after the launcher has left


def run_job() -> int:
    """Runs the launcher's job on this host and returns the exit code. UsageError, LaunchError: the job cannot run."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a broken connection is noticed by its silence
    with open(0, "rb", buffering=0, closefd=False) as launcher_input:
        _say("ready")
        job = read_job(launcher_input.readline() or b"null")
        if job is None:
            return STOPPED
        if job["tunnel"] is None:
            return _run(launcher_input, job)
        from paceline.launch.engines.tunnel import inside  # imported here, because it needs asyncio

        with inside(*(job["tunnel"][key] for key in ("own", "goes", "comes"))):
            return _run(launcher_input, job)


def _run(launcher_input: io.RawIOBase, job: dict[str, Any]) -> int:
    if job["files"]:
        unpack(launcher_input, job["files"])
    call, value = _receive_function(launcher_input, job)
    count = job["workers"] or gpus() or 1
    workers, spares = (0, count) if job["spare"] else (count, 0)
    options = LaunchOptions(**job["options"], workers=workers, spares=spares, token=job["token"].encode())
    _say("like", **_like(options), workers=count)
    order = _measure(launcher_input, options) if job["preflight"] else read_order(launcher_input.readline() or b"null")
    if order is None:  # the launcher has ended, or the hosts differ
        return STOPPED
    apart = _fork_apart() if order["detach"] else None
    where: dict[str, Any] = {"listen": order["listen"] or _own_address(order["towards"])}
    if order["join"]:
        folder = Path(options.run_dir or ".", HOSTS, order["name"])
        where = {"join": order["join"], "run_dir": str(folder), "patience": PATIENCE, "metrics": None, "page": None}
    for text in order.get("slow", ()):
        HostHistory().add(HostEntry(time.time(), "slow", text, options.run_dir or ""))
    where |= {"size": order["size"], "hosts": tuple(order.get("hosts", ()))}
    options = replace(options, **where, on_listening=lambda address: _say("listens", address=address))
    broken = threading.Event()
    with _relayed(1, broken) as out, _relayed(2, broken) as error:

        def go_on() -> None:
            log = os.open(Path(options.run_dir or ".", CONSOLE), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for stream in (out, error):
                os.dup2(log, stream, inheritable=False)
            os.close(log)
            if apart is not None:
                os.write(apart, b"!")

        threading.Thread(target=_obey_launcher, args=(broken, go_on), name="paceline-heed", daemon=True).start()
        code = _launch(options)
        call.close()
        value.seek(0)
        while piece := value.read(VALUE):
            _say("value", data=base64.b64encode(piece).decode())
    if options.temporary:
        _remove_run_folder(Path(job["options"]["run_dir"]), Path(options.run_dir or "."))
    return code


def _remove_run_folder(run: Path, folder: Path) -> None:
    """Removes what this host has written in the `folder` that is its part of a run folder, and then the empty folders
    above it, up to the one that contains the `run` folder. Other hosts may have parts in the same file system.
    """
    with suppress(OSError):
        for entry in folder.iterdir():
            if entry.name == HOSTS:
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
        for path in (folder, *folder.parents):
            path.rmdir()
            if path == run.parent:
                break


def _launch(options: LaunchOptions) -> int:
    if not options.chooses_plan:
        return launch(options)
    from paceline.launch.auto import launch_with_chosen_plan  # not with every run

    return launch_with_chosen_plan(options)


def _measure(launcher_input: io.RawIOBase, options: LaunchOptions) -> Any:
    """Measures this host, and its links as the launcher asks for them. Returns the order to begin."""
    endpoint, listener = offer_links()
    with listener:
        _say("figures", at=endpoint, **figures(Path(options.run_dir or ".")), clock=time.time())
        while (order := read_order(launcher_input.readline() or b"null")) is not None and "measure" in order:
            _say("link", **measure_link(*order["measure"]))
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
    return order


def read_job(line: bytes) -> Any:
    """Reads the launcher's job for this host; None without a job. FormatError: it is damaged, or of another version."""
    from paceline.launch.engines.message_types import JOB, OPTIONS  # needs msgspec

    job = read_json(line, JOB, "the job of the launcher", SAME_VERSION)
    if unknown := sorted(job["options"].keys() - OPTIONS.keys() if job else ()):
        raise FormatError(f"the launcher sent an option unknown to this host, {shown(unknown[0])}", SAME_VERSION)
    return job


def read_order(line: bytes) -> Any:
    """Reads the launcher's order to begin, or to measure a link; None: the host does not begin. FormatError: it is
    damaged.
    """
    from paceline.launch.engines.message_types import ASKED, ORDER, SENT  # needs msgspec

    what = "the order of the launcher"
    kind = read_json(line, SENT, what, SAME_VERSION) or {}
    return read_json(line, ASKED if "measure" in kind else ORDER, what, SAME_VERSION)


def _receive_function(launcher_input: io.RawIOBase, job: dict[str, Any]) -> list[io.FileIO]:
    """Stores the function that follows in the input, if there is one. Returns two files in memory, for the function and
    for the value that worker 0 returns, or its answer to a request; only processes of the same user can open them.
    """
    memory_files = [io.FileIO(os.memfd_create("paceline"), "r+") for _ in range(2)]
    variables = job["options"].setdefault("environment", {})
    if asked := variables.get("PACELINE_CHECK"):
        path = f"/proc/{os.getpid()}/fd/{memory_files[1].fileno()}"
        variables["PACELINE_CHECK"] = json.dumps({**json.loads(asked), "answer": path})
    if job["call"]:
        for piece in _pieces(launcher_input, job["call"]):
            memory_files[0].write(piece)
        # Not as arguments, which must be the same on all hosts.
        paths = ":".join(f"/proc/{os.getpid()}/fd/{memory.fileno()}" for memory in memory_files)
        job["options"]["environment"] |= {"PACELINE_CALL": paths}
        job["options"] |= {"script": find_module(FUNCTION), "module": FUNCTION}
    return memory_files


def _pieces(source: io.RawIOBase | io.BytesIO, size: int) -> Iterator[bytes]:
    while size and (piece := source.read(min(1 << 20, size))):
        size -= len(piece)
        yield piece


def _fork_apart() -> int:
    """Continues in a forked process, unknown to the program that started us, because mpirun, for example, would end it.
    The first process stays until the forked one ends, or writes to the returned descriptor.
    """
    comes, tells = os.pipe()
    if child := os.fork():
        os.close(tells)
        if os.read(comes, 1):
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    os.close(comes)
    os.setsid()
    return tells


def _say(what: str, **fields: Any) -> None:
    sys.stdout.buffer.write(MARK + json.dumps({"says": what, **fields}).encode() + b"\n")
    sys.stdout.flush()


def _like(options: LaunchOptions) -> dict[str, Any]:
    if not Path(options.script).is_file():
        return {**likeness(options, b""), "script": "missing"}
    return likeness(options)


def unpack(source: io.RawIOBase | io.BytesIO, size: int) -> None:
    """Unpacks the launcher's files into the working directory; removes those that only an earlier launch brought."""
    data = b"".join(_pieces(source, size))
    kept = Path(".paceline-files")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = archive.getnames()
        for name in set(kept.read_text().splitlines() if kept.exists() else ()) - set(names):
            with suppress(OSError):
                os.unlink(name)
        archive.extractall(filter="data")
    kept.write_text("".join(f"{name}\n" for name in names))


def _own_address(towards: str | None) -> str:
    """The address at which other hosts reach this one: the one that ssh used, or else that of the route to `towards`.
    UsageError: there is no route.
    """
    if address := reached_at():
        return address
    if towards is None:
        return "127.0.0.1"
    try:
        return address_towards(towards)
    except OSError as error:
        what = f"{socket.gethostname()} cannot reach {towards} ({error.strerror})"
        raise UsageError(what, "pass --listen ADDR, at which the other hosts reach the first host") from error


def _obey_launcher(broken: threading.Event, go_on: Callable[[], None]) -> None:
    """Raises the signals that the launcher sends. After `SILENCE` without a byte, this host stops as on a SIGTERM."""
    while can_read(0, SILENCE) and (numbers := os.read(0, PIECE)):
        for number in filter(None, numbers):
            if number == GO_ON:
                go_on()
                return
            os.kill(os.getpid(), number)
    broken.set()
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _relayed(stream: int, broken: threading.Event) -> Iterator[int]:
    """Sends a standard stream through a pipe and a thread: a connection that breaks or stalls must not stop us. Yields
    the descriptor of the original stream, which may be replaced by another file.
    """
    original = os.dup(stream)
    read, write = os.pipe()
    os.dup2(write, stream)
    os.close(write)

    def relay() -> None:
        while data := os.read(read, PIECE):
            while not broken.is_set():
                if wait_for((), [original], 0.5)[1]:
                    with suppress(OSError):
                        os.write(original, data)
                    break

    thread = threading.Thread(target=relay, name="paceline-relay", daemon=True)
    thread.start()
    try:
        yield original
    finally:
        for text in (sys.stdout, sys.stderr):
            text.flush()
        os.dup2(original, stream)
        thread.join(SILENCE)
