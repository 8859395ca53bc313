"""Measures links between hosts: the bytes that one receives from another in a fifth of a second, and the round trip."""

from __future__ import annotations

import json
import secrets
import socket
import time
from typing import Any

from paceline.base.environment import reached_at
from paceline.base.handshake import NONCE, introduce, serve_callers
from paceline.base.schema import read_message
from paceline.errors import FormatError
from paceline.launch.preflight import own_address

SENT, PATIENCE = 0.2, 2.0  # seconds to measure a link, and to connect
ANSWER = 20.0  # seconds for a host to connect, or to answer
BEGINNING = 0.25  # share of a measurement that is ignored, because a link buffers the first bytes
BUFFER = 1 << 18


def offer_links() -> tuple[list[Any], socket.socket]:
    """Lets other hosts measure their links to this one. Returns the address, the port and the secret for that, and the
    socket, which ends it when it is shut down.
    """
    address, secret = reached_at() or own_address(), secrets.token_hex(16)
    listener = socket.create_server((address, 0))
    serve_callers(listener, secret.encode, _measure_arrivals, "paceline-links")
    return [address, listener.getsockname()[1], secret], listener


def _measure_arrivals(connection: socket.socket, *_: bytes) -> None:
    """Receives bytes of another host and answers with their rate, in bytes a second."""
    came: list[tuple[float, int]] = []
    connection.settimeout(ANSWER)
    while data := connection.recv(BUFFER):
        came.append((time.monotonic(), len(data)))
    later = came[int(BEGINNING * len(came)) :]
    seconds = later[-1][0] - later[0][0] if later else 0.0
    rate = sum(size for _, size in later[1:]) / seconds if seconds > 0 else 0.0
    connection.sendall(json.dumps(rate).encode())


def measure_link(address: str, port: int, secret: str) -> dict[str, Any]:
    """Measures the link to another host: bytes a second and the round trip in seconds, or why it cannot be reached."""
    if not address:
        return {"refused": "it has no network address"}
    from paceline.launch.engines.message_types import RATE  # needs msgspec

    try:
        with socket.create_connection((address, port), PATIENCE) as link:
            link.settimeout(ANSWER)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            nonce = link.recv(NONCE, socket.MSG_WAITALL)
            began = time.monotonic()
            if not introduce(link, secret.encode(), nonce):
                return {"refused": "another program listens at its port"}
            latency, end = time.monotonic() - began, time.monotonic() + SENT
            while time.monotonic() < end:
                link.sendall(bytes(BUFFER >> 2))
            link.shutdown(socket.SHUT_WR)
            return {"rate": read_message(link.makefile("rb").read(), RATE, "its answer"), "latency": latency}
    except FormatError as error:
        return {"refused": error.what}
    except (OSError, ValueError) as error:
        return {"refused": getattr(error, "strerror", None) or str(error) or "no answer"}
