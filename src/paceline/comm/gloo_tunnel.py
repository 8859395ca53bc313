"""Connects gloo through the tunnel of `launch ssh --tunnel`."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import torch.distributed as dist

from paceline.base.environment import tunnel, way_to


def with_ways(store: dist.Store) -> dist.Store:
    """The store that gloo's addresses travel by. Whoever makes a group with it keeps it as long as the group."""
    inside = tunnel()
    return store if inside is None else _WithWays(store, socket.inet_aton(inside[0])[:3])


class _WithWays(dist.Store):
    """A store that gloo reads its peers' addresses in: socket addresses of IPv4, somewhere among other bytes. Those of
    all hosts begin with `net`.
    """

    def __init__(self, store: dist.Store, net: bytes) -> None:
        super().__init__()
        self._store = store
        self._address = re.compile(rb"\x02\0(..)(" + re.escape(net) + b".)", re.DOTALL)

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        said = self._store.get(key)
        for port, host in self._address.findall(said):
            try:
                way_to(socket.inet_ntoa(host), int.from_bytes(port), later=True)
            except OSError as error:
                raise RuntimeError(str(error)) from error  # as gloo says that a peer is not reached
        return said

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
        self._store.wait(keys, timeout)
