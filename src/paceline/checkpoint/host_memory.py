"""Checkpoints in the memory of two hosts: a storage whose files are on the writer's host and on another; its server.

A file that a worker writes goes into the folder of its host in /dev/shm and, while it is written, over a connection
into that of the next host. So each file is on two hosts, and the loss of one host loses none. Reading finds files on
any host, and takes from other hosts only those bytes that are used. No torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.base.environment import way_to
from paceline.base.handshake import (
    NONCE,
    MessageSeals,
    introduce,
    make_nonce,
    receive_exactly,
    serve_callers,
)
from paceline.base.memory import machine_memory
from paceline.base.schema import read_message
from paceline.checkpoint.storage import Chunks, Folder, blocks, file_digest
from paceline.errors import FormatError

At = tuple[str, int, str]  # where a host's folder is served: address, port, and the salt of the key
PATIENCE = 20.0  # seconds for another host to answer, or to take a block
HASHING = 600.0  # seconds for another host to compute the hash of a file
_BLOCK = 16 << 20  # bytes that are sent at once, at most
_AHEAD, _KEPT = 4 << 20, 16  # bytes of a block that is read ahead, and how many are kept
_LENGTH = struct.Struct("<Q")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_OF_FILES = "write", "put", "digest", "read"  # requests that name a file
_NO_ANSWER = "the memory of host {} does not answer"


class _Wire:
    """One end of a connection between hosts: messages, each with its length and a seal."""

    def __init__(self, link: socket.socket, seals: tuple[MessageSeals, MessageSeals]) -> None:
        self.link, (self._sent_seals, self._received_seals) = link, seals

    def send(self, part: bytes | memoryview) -> None:
        """Sends a message. OSError: the connection is broken."""
        self.link.sendall(_LENGTH.pack(len(part)))
        self.link.sendall(part)
        self.link.sendall(self._sent_seals.next(part))

    def receive(self) -> bytearray:
        """Receives a message. OSError: the connection is broken, or the seal is wrong."""
        (length,) = _LENGTH.unpack(receive_exactly(self.link, _LENGTH.size))
        if length > machine_memory():
            raise ConnectionError(errno.EPROTO, "a message is too long")
        part = receive_exactly(self.link, length)
        expected = self._received_seals.next(part)
        if not secrets.compare_digest(receive_exactly(self.link, len(expected)), expected):
            raise ConnectionError(errno.EPROTO, "the seal of a message is wrong")
        return part


class MemoryServer:
    """Serves the folder of this host's copies to the workers of the run on all hosts, in threads.

    `at` is where; `key` makes the key of a connection from the salt.
    """

    def __init__(self, path: Path, host: str, key: Callable[[str], bytes]) -> None:
        self._folder, self._key = Folder(path), key
        self._listener = socket.create_server((host, 0))
        self.at: At = (host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._lock = threading.Lock()
        self._digests: dict[Path, tuple[tuple[int, int], str]] = {}  # of files, with their times and sizes
        self._hashing: dict[Path, threading.Lock] = {}  # held while a file's digest is computed
        serve_callers(self._listener, lambda: key(self.at[2]), self._serve, "paceline-memory")

    def close(self) -> None:
        """Ends the serving; connections end with the process."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, link: socket.socket, nonce: bytes, caller_nonce: bytes) -> None:
        wire = _Wire(link, _seals(self._key(self.at[2]), nonce, caller_nonce, calls=False))
        with suppress(FormatError):
            while True:
                self._answer(wire, read_message(bytes(wire.receive()), dict[str, Any], "a request for memory"))

    def _answer(self, wire: _Wire, request: dict[str, Any]) -> None:
        data: bytes | None = None
        try:
            value, data = self._do(wire, **request)
            answer: dict[str, Any] = {"value": value}
        except OSError as error:
            answer = {"error": [error.errno or errno.EIO, error.strerror or "unknown error"]}
        except TypeError:  # a request of another version
            answer = {"error": [errno.EPROTO, "the request is not known to this host"]}
        wire.send(json.dumps(answer).encode())
        if data is not None:
            wire.send(data)

    def _do(
        self, wire: _Wire, do: str, folder: str = "", file: str = "", first: int = 0, end: int = 0, files: Any = None
    ) -> tuple[Any, bytes | None]:
        """Carries out a request; returns its value and the bytes that follow."""
        names = [folder] * (do != "folders") + [file] * (do in _OF_FILES) + [*(files or ())]
        if not all(_NAME.fullmatch(name) for name in names):
            raise OSError(errno.EINVAL, "a name is not allowed")
        if do == "write":
            received = _received(wire)
            try:
                return self._folder.write(folder, file, received), None
            finally:
                for _ in received:  # what is still to come after an error
                    pass
        if do == "put":
            self._folder.put(folder, file, bytes(wire.receive()))
            return None, None
        if do == "remove":
            self._folder.remove(folder, files)
            return None, None
        if do == "tidy":
            self._folder.tidy(folder)
            return None, None
        if do == "folders":
            return self._folder.folders(), None
        if do == "sizes":
            return self._folder.sizes(folder), None
        if do == "digest":
            return self._digest(self._folder.local(folder, file)), None
        with open(self._folder.local(folder, file), "rb") as data:
            return None, os.pread(data.fileno(), min(max(end - first, 0), _BLOCK), first)

    def _digest(self, path: Path) -> str:
        """The SHA-256 of a file, which several workers ask for at once; it is computed for the first of them."""
        with self._lock:
            hashing = self._hashing.setdefault(path, threading.Lock())
        with hashing:
            status = path.stat()
            stamp = status.st_mtime_ns, status.st_size
            known = self._digests.get(path)
            if known is None or known[0] != stamp:
                known = stamp, file_digest(path)
                with self._lock:
                    self._digests = {at: each for at, each in self._digests.items() if at.exists()} | {path: known}
                    self._hashing = {at: each for at, each in self._hashing.items() if at.exists()}
        return known[1]


def _received(wire: _Wire) -> Iterator[memoryview]:
    """The blocks of a file, up to the empty one."""
    while block := wire.receive():
        yield memoryview(block)


def _seals(key: bytes, nonce: bytes, caller_nonce: bytes, calls: bool) -> tuple[MessageSeals, MessageSeals]:
    """The seals of what this end sends and of what the other end sends."""
    return (MessageSeals(key, nonce, caller_nonce, calls), MessageSeals(key, nonce, caller_nonce, not calls))


class _OtherHost:
    """The folder of another host, over one connection, which is made when it is first used."""

    def __init__(self, at: At, key: Callable[[str], bytes]) -> None:
        self.at, self._key = at, key
        self._wire: _Wire | None = None
        self._using = threading.RLock()

    @contextmanager
    def asking(self, do: str, **request: Any) -> Iterator[tuple[_Wire, dict[str, Any]]]:
        """Sends a request, and yields the connection, for what is to follow it, and the answer, which is empty until
        the context ends. OSError: the host refuses, or does not answer.
        """
        answer, is_complete = dict[str, Any](), False
        with self._using:
            try:
                wire = self._wire = self._wire or self._connect()
                wire.link.settimeout(HASHING if do == "digest" else PATIENCE)
                wire.send(json.dumps({"do": do, **request}).encode())
                yield wire, answer
                answer |= read_message(bytes(wire.receive()), dict[str, Any], "an answer from memory")
                if do == "read" and "error" not in answer:
                    answer["value"] = wire.receive()
                is_complete = True
            except (OSError, FormatError) as error:
                raise ConnectionError(errno.EHOSTUNREACH, _NO_ANSWER.format(self.at[0])) from error
            finally:
                if not is_complete and self._wire is not None:  # also after an error of the caller
                    self._wire.link.close()
                    self._wire = None
        if "error" in answer:
            raise OSError(*answer["error"])

    def ask(self, do: str, send: Iterable[bytes] = (), **request: Any) -> Any:
        """Sends a request and the messages that follow it; returns its value. OSError: as for `asking`."""
        with self.asking(do, **request) as (wire, answer):
            for part in send:
                wire.send(part)
        return answer["value"]

    def _connect(self) -> _Wire:
        with ExitStack() as stack:
            link = stack.enter_context(socket.create_connection(way_to(*self.at[:2]), PATIENCE))
            key, nonce, caller_nonce = self._key(self.at[2]), bytes(receive_exactly(link, NONCE)), make_nonce()
            if not introduce(link, key, nonce, caller_nonce=caller_nonce):
                raise ConnectionError(errno.EACCES, "the other host does not know the token")
            stack.pop_all()
        return _Wire(link, _seals(key, nonce, caller_nonce, calls=True))


class HostMemory:
    """A storage in the memory of the run's hosts. `at` is where the `folder` of this host is served, if it is.

    `meet` says where those of all hosts are: the next one in their order becomes the partner, which gets a second copy
    of each file that is written on this host. Without other hosts, files are on this one only.
    """

    shared = False

    def __init__(self, folder: Folder, at: At | None, key: Callable[[str], bytes]) -> None:
        self._local, self.at, self._key, self.another = folder, at, key, folder.another
        self._others: list[_OtherHost] = []  # the partner first
        self._ahead: dict[tuple[str, str, int], bytes] = {}  # the last blocks of files that were read

    def __str__(self) -> str:
        return f"the memory of {len(self._others) + 1} hosts" if self._others else str(self._local)

    def meet(self, hosts: Sequence[At | None]) -> None:
        """Takes where the workers' hosts serve their folders, by rank."""
        self._ahead.clear()
        known = {other.at: other for other in self._others}
        ring = [*dict.fromkeys(at for at in hosts if at is not None)]
        start = ring.index(self.at) if self.at in ring else len(ring)
        others = [*ring[start + 1 :], *ring[:start]]
        self._others = [known.get(at) or _OtherHost(at, self._key) for at in others]

    @property
    def partner(self) -> At | None:
        """The host that has the second copy of this host's files."""
        return self._others[0].at if self._others else None

    def inside(self, folder: str) -> Folder:
        """A folder of this host only."""
        return self._local.inside(folder)

    def folders(self) -> list[str]:
        """The names of the folders on any host that answers."""
        names = {*self._local.folders()}
        for other in self._others:
            with suppress(OSError):
                names |= {*other.ask("folders")}
        return sorted(names)

    def sizes(self, folder: str) -> dict[str, int]:
        """The bytes of each file of a folder on any host."""
        sizes: dict[str, int] = {}
        for other in reversed(self._others):
            with suppress(OSError):
                sizes |= other.ask("sizes", folder=folder)
        with suppress(FileNotFoundError):
            sizes |= self._local.sizes(folder)
        return sizes

    def _first(self, folder: str, file: str, ask: Callable[[_OtherHost], Any]) -> Any:
        """The answer of the first other host that has a file. OSError: none has it."""
        failure: OSError = FileNotFoundError(errno.ENOENT, f"no host has {folder}/{file}")
        for other in self._others:
            try:
                return ask(other)
            except OSError as error:
                failure = failure if error.errno == errno.ENOENT else error
        raise failure

    def read(self, folder: str, file: str) -> bytes:
        """The bytes of a file."""
        if not self.is_elsewhere(folder, file):
            return self._local.read(folder, file)
        return b"".join(self._pieces(folder, file))

    def local(self, folder: str, file: str) -> Path:
        """The path of a file on this host."""
        return self._local.local(folder, file)

    def is_elsewhere(self, folder: str, file: str) -> bool:
        """Whether only other hosts have a file."""
        return bool(self._others) and not self._local.local(folder, file).exists()

    def read_part(self, folder: str, file: str, first: int, end: int) -> bytes:
        """The bytes from `first` to `end` of a file that another host has. It is read in blocks, the last of which are
        kept: small tensors lie side by side.
        """
        pieces = list[bytes]()
        for number in range(first // _AHEAD, -(-end // _AHEAD)):
            start = number * _AHEAD
            key = folder, file, number
            if key not in self._ahead:
                if len(self._ahead) == _KEPT:
                    del self._ahead[next(iter(self._ahead))]
                self._ahead[key] = self._piece(folder, file, start, start + _AHEAD)
            pieces.append(self._ahead[key][max(first - start, 0) : end - start])
        if sum(map(len, pieces)) != end - first:
            raise OSError(errno.EIO, f"{file} is shorter than expected")
        return b"".join(pieces)

    def _piece(self, folder: str, file: str, first: int, end: int) -> bytes:
        return bytes(
            self._first(folder, file, lambda it: it.ask("read", folder=folder, file=file, first=first, end=end))
        )

    def _pieces(self, folder: str, file: str) -> Iterator[bytes]:
        first = 0
        while piece := self._piece(folder, file, first, first + _BLOCK):
            first += len(piece)
            yield piece

    def digest(self, folder: str, file: str) -> str:
        """The SHA-256 of a file, computed where it is."""
        if not self.is_elsewhere(folder, file):
            return self._local.digest(folder, file)
        return str(self._first(folder, file, lambda other: other.ask("digest", folder=folder, file=file)))

    def write(self, folder: str, file: str, chunks: Chunks) -> tuple[int, str]:
        """Writes a new file here and on the partner; returns its size in bytes and its SHA-256."""
        self._ahead.clear()
        if not self._others:
            return self._local.write(folder, file, chunks)
        partner = self._others[0]
        failure: OSError | None = None
        with partner.asking("write", folder=folder, file=file) as (wire, answer):

            def passed_on() -> Iterator[memoryview]:
                for block in blocks(chunks):
                    wire.send(block)
                    yield block

            try:
                written = self._local.write(folder, file, passed_on())
            except OSError as error:
                failure = error
            wire.send(b"")
        if failure is not None:
            raise failure
        if answer["value"] != [*written]:
            raise OSError(errno.EIO, f"the copy on host {partner.at[0]} differs")
        return written

    def put(self, folder: str, file: str, data: bytes) -> None:
        """Writes a small file here and on the partner."""
        if self._others:
            self._others[0].ask("put", send=[data], folder=folder, file=file)
        self._local.put(folder, file, data)

    def remove(self, folder: str, files: Iterable[str] | None = None) -> None:
        """Removes these files of a folder on all hosts, or with None the whole folder."""
        names = None if files is None else [*files]
        for other in self._others:
            with suppress(FileNotFoundError, ConnectionError):  # a host that is gone has taken its files with it
                other.ask("remove", folder=folder, files=names)
        with suppress(FileNotFoundError):
            self._local.remove(folder, names)

    def tidy(self, folder: str) -> None:
        """Removes a folder on all hosts where it has no files."""
        for other in self._others:
            with suppress(FileNotFoundError, ConnectionError):
                other.ask("tidy", folder=folder)
        with suppress(FileNotFoundError):
            self._local.tidy(folder)
