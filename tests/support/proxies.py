"""A proxy between workers and parameter servers that loses what servers say and repeats what they are told."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

from paceline.base.handshake import SEAL
from paceline.param_server.protocol import LENT, Kind

HEAD = struct.Struct("<BHIqqqQ")
PUSHES = {Kind.PUSH, Kind.PUSHED, Kind.ROWS, Kind.SQUARES, Kind.COMMIT}  # what a worker says that changes something
ACKNOWLEDGEMENTS = {Kind.SQUARES, Kind.READ, Kind.DEAL, Kind.KEPT, Kind.BUFFERS}


class Proxy:
    """Listens at `port`. Instead of delivering each `lose`-th acknowledgement of a kind it cuts the connection; it
    delivers each `double`-th push of a kind twice: of all kinds together, those that come in turns would meet the same
    one again and again. `did` counts both, and what was lent instead of sent; `kinds` what was lost or came twice.
    Seals are those of `scripts/served.py`, which fit anywhere.
    """

    def __init__(self, lose: int, double: int) -> None:
        self._every = {"lost": lose, "doubled": double}
        self.did, self.kinds, self._seen = Counter[str](), Counter[str](), Counter[tuple[str, int]]()
        self._lock, self._open = threading.Lock(), list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        for one in [self._listener, *self._open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                worker, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(worker,), daemon=True).start()

    def _serve(self, worker: socket.socket) -> None:
        self._open.append(worker)
        with suppress(OSError, EOFError):
            line = b""
            while not line.endswith(b"\n"):
                line += _exactly(worker, 1)
            host, port = line.decode().split()
            server = socket.create_connection((host, int(port)))
            self._open.append(server)
            back = threading.Thread(target=self._pass_on, args=(server, worker, "lost", ACKNOWLEDGEMENTS), daemon=True)
            back.start()
            self._pass_on(worker, server, "doubled", PUSHES)
            back.join()
        worker.close()

    def _due(self, what: str, kind: int) -> bool:
        with self._lock:
            self._seen[what, kind] += 1
            if self._seen[what, kind] % self._every[what]:
                return False
            self.did[what] += 1
            self.kinds[f"{what} {Kind(kind).name}"] += 1
            return True

    def _pass_on(self, source: socket.socket, target: socket.socket, what: str, kinds: set[Kind]) -> None:
        """Frame by frame, to the end of one of the two."""
        with suppress(OSError, EOFError):
            while True:
                head = _exactly(source, HEAD.size)
                kind, trainer, count, *_, size = HEAD.unpack(head)
                with self._lock:
                    self.did["lent" if trainer & LENT else "sent"] += count > 0
                sealed = 0 if kind == Kind.HELLO else SEAL * (2 if trainer & LENT or not count else 1)
                frame = head + _exactly(source, 4 * count + size + sealed)
                due = kind in kinds and self._due(what, kind)
                if due and what == "lost":
                    break
                target.sendall(frame + frame if due else frame)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _exactly(link: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        more = link.recv(size - len(found))
        if not more:
            raise EOFError
        found += more
    return bytes(found)
