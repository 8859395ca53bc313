"""The agent's program on another host, controlled through standard input.

It says four things on standard output, each a line that begins with `MARK`: ``ready``, ``like`` (what all hosts must
have in common), ``listens`` and the ``value`` of a function, in pieces. It hears a job, then an order (which host is
the first), each a line of JSON; and then bytes: zeros, so that a cable that is cut can be told from a launcher that has
nothing to say, numbers of signals, and `GO_ON`: the launcher leaves, and the run goes on by itself.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.base.console import shown
from paceline.base.environment import address_towards, gpus, reached_at
from paceline.base.polling import can_read, wait_for
from paceline.base.schema import SAME_VERSION, read_json
from paceline.errors import FormatError, UsageError
from paceline.launch.joining import likeness
from paceline.launch.local import launch
from paceline.launch.modules import find_module
from paceline.launch.options import LaunchOptions
from paceline.launch.outcome import FUNCTION

MARK = b"\x1epaceline "
SILENCE = 15.0  # seconds without a byte, after which the connection counts as broken
PATIENCE = 20.0  # seconds in which the first host's coordinator, which has begun, is to be reached
VALUE = 1 << 19  # bytes of a value in one line
PIECE = 4096  # bytes that a pipe takes at once if it takes any
STOPPED = 75
GO_ON = 255
CONSOLE = "console.log"  # in the run folder: what is said after that


def hosted() -> int:
    """The exit code of `paceline run` here. What cannot work is a UsageError or LaunchError."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a connection that breaks is told of by its silence
    with open(0, "rb", buffering=0, closefd=False) as heard:
        _say("ready")
        job = read_job(heard.readline() or b"null")
        if job is None:
            return STOPPED
        if job["tunnel"] is None:
            return _run(heard, job)
        from paceline.launch.engines.tunnel import inside  # asyncio, not with every agent

        with inside(**job["tunnel"]):
            return _run(heard, job)


def _run(heard: io.RawIOBase, job: dict[str, Any]) -> int:
    if job["files"]:
        unpack(heard, job["files"])
    call, value = _called(heard, job)
    options = LaunchOptions(**job["options"], workers=job["workers"] or gpus() or 1, token=job["token"].encode())
    _say("like", **_like(options), workers=options.workers)
    order = read_order(heard.readline() or b"null")
    if order is None:  # the launcher is gone, or the hosts differ
        return STOPPED
    apart = _apart() if order["detach"] else None
    where: dict[str, Any] = {"listen": order["listen"] or _own_address(order["towards"])}
    if order["join"]:
        folder = Path(options.run_dir or ".", "hosts", order["name"])
        where = {"join": order["join"], "run_dir": str(folder), "patience": PATIENCE, "metrics": None, "page": None}
    options = replace(options, **where, heard=lambda address: _say("listens", address=address))
    broken = threading.Event()
    with _relayed(1, broken) as out, _relayed(2, broken) as error:

        def go_on() -> None:
            log = os.open(Path(options.run_dir or ".", CONSOLE), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for ours in (out, error):
                os.dup2(log, ours, inheritable=False)
            os.close(log)
            if apart is not None:
                os.write(apart, b"!")

        threading.Thread(target=_heed, args=(broken, go_on), name="paceline-heed", daemon=True).start()
        code = launch(options)
        call.close()
        value.seek(0)
        while piece := value.read(VALUE):
            _say("value", data=base64.b64encode(piece).decode())
        return code


def read_job(line: bytes) -> Any:
    """What a launcher wants of this host; None: nothing. FormatError: it is no job, or one of another version."""
    from paceline.launch.engines.message_types import JOB, OPTIONS  # needs msgspec

    job = read_json(line, JOB, "the launcher's job", SAME_VERSION)
    if unknown := sorted(job["options"].keys() - OPTIONS.keys() if job else ()):
        raise FormatError(f"the launcher gives the option {shown(unknown[0])}, which is not known here", SAME_VERSION)
    return job


def read_order(line: bytes) -> Any:
    """How this host is to begin; None: not at all. FormatError: it is no order."""
    from paceline.launch.engines.message_types import ORDER  # needs msgspec

    return read_json(line, ORDER, "the launcher's order", SAME_VERSION)


def _called(heard: io.RawIOBase, job: dict[str, Any]) -> list[io.FileIO]:
    """Where the function is that follows, if one does, and where worker 0 leaves its value: memory that only processes
    of the same user can open.
    """
    both = [io.FileIO(os.memfd_create("paceline"), "r+") for _ in range(2)]
    if job["call"]:
        for piece in _pieces(heard, job["call"]):
            both[0].write(piece)
        # Not as arguments: those are the same on all hosts.
        places = ":".join(f"/proc/{os.getpid()}/fd/{memory.fileno()}" for memory in both)
        job["options"]["environment"] |= {"PACELINE_CALL": places}
        job["options"] |= {"script": find_module(FUNCTION), "module": FUNCTION}
    return both


def _pieces(heard: io.RawIOBase | io.BytesIO, size: int) -> Iterator[bytes]:
    while size and (piece := heard.read(min(1 << 20, size))):
        size -= len(piece)
        yield piece


def _apart() -> int:
    """Goes on in a process that whoever started us does not know, as an mpirun that ends what it has started. The first
    one stays until that ends, or writes to what is returned.
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


def unpack(heard: io.RawIOBase | io.BytesIO, size: int) -> None:
    """Files of the launcher's, into the working directory; those that an earlier launch brought and this one does not
    are removed.
    """
    data = b"".join(_pieces(heard, size))
    kept = Path(".paceline-files")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = archive.getnames()
        for name in set(kept.read_text().splitlines() if kept.exists() else ()) - set(names):
            with suppress(OSError):
                os.unlink(name)
        archive.extractall(filter="data")
    kept.write_text("".join(f"{name}\n" for name in names))


def _own_address(towards: str | None) -> str:
    """Where other hosts reach this one: as ssh did, or else the address from which one of them is reached."""
    if address := reached_at():
        return address
    if towards is None:
        return "127.0.0.1"
    try:
        return address_towards(towards)
    except OSError as error:
        what = f"{socket.gethostname()} finds no way to {towards} ({error.strerror})"
        raise UsageError(what, "give --listen ADDR, at which the other hosts reach the first") from error


def _heed(broken: threading.Event, go_on: Callable[[], None]) -> None:
    """Signals that the launcher sends; and when nothing comes any more, this host stops as upon a SIGTERM."""
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
    """A standard stream through a pipe and a thread: a connection that breaks, or stands still, must not stop us. Where
    it goes may become another file's.
    """
    own = os.dup(stream)
    read, write = os.pipe()
    os.dup2(write, stream)
    os.close(write)

    def relay() -> None:
        while data := os.read(read, PIECE):
            while not broken.is_set():
                if wait_for((), [own], 0.5)[1]:
                    with suppress(OSError):
                        os.write(own, data)
                    break

    thread = threading.Thread(target=relay, name="paceline-relay", daemon=True)
    thread.start()
    try:
        yield own
    finally:
        for text in (sys.stdout, sys.stderr):
            text.flush()
        os.dup2(own, stream)
        thread.join(SILENCE)
