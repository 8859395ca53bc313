"""A lease in etcd decides who runs the coordinator.

A key with the run's name exists as long as the lease that it was written with. A second key counts the epochs, and both
are written in one transaction. The holder treats its lease as expired before etcd does, so there are never two holders.
Uses etcd's JSON gateway (etcd.io/docs, "Why gRPC gateway"), which needs no client library. No torch.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.base.schema import read_message
from paceline.errors import FormatError, LaunchError, UsageError

SCHEME = "etcd://"
LASTS, MARGIN = 5, 1.0  # seconds that a lease lasts without renewal, and by which its holder gives it up sooner
RENEW, ANSWER = 1.0, 1.0  # seconds between two renewals; to wait for an answer


def parse_store(text: str) -> tuple[list[str], str]:
    """Reads the addresses and the run's name in ``etcd://HOST:PORT[,HOST:PORT...]/NAME``.

    UsageError: the text has another form.
    """
    where, _, name = text.removeprefix(SCHEME).partition("/")
    hosts = where.split(",")
    if not text.startswith(SCHEME) or not name or not all(re.fullmatch(r".+:[0-9]{1,5}", host) for host in hosts):
        raise UsageError(
            f"--store needs the form etcd://HOST:PORT/NAME, got {text!r}",
            "pass the address of etcd, and a name for this run",
        )
    return hosts, name


class Lease:
    """An agent's lease, which lets it run the coordinator, at `address`.

    `epoch` is the epoch of this agent's coordinator while it holds the lease; `holder` is the address of another
    agent's coordinator. After `start`, a thread renews the lease, or takes it when it is `wanted` and free.
    """

    def __init__(self, store: str, address: tuple[str, int]) -> None:
        self._hosts, self._name = parse_store(store)
        self._address = address
        self._id = ""
        self._until = 0.0
        self.epoch: int | None = None
        self.holder: tuple[str, int] | None = None
        self.wanted = False
        self._closed = threading.Event()

    @property
    def held(self) -> bool:
        """Whether this coordinator leads the run: it has the lease, and it has not run out."""
        return self.epoch is not None and time.monotonic() < self._until

    def begin(self) -> int:
        """Takes the lease; returns the first epoch of a run. LaunchError: no answer from etcd, or a name in use."""
        try:
            self._try_to_acquire()
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            cure = "check that etcd is running and that this host can reach it"
            raise LaunchError(f"etcd does not answer at {', '.join(self._hosts)} ({why})", cure) from error
        if self.epoch is None:
            assert self.holder is not None
            host, port = self.holder
            cure = f"join or stop that run, use another name, or wait {LASTS} s if its host is lost"
            raise LaunchError(f"a run named {self._name} already has its coordinator at {host}:{port}", cure)
        return self.epoch

    def start(self) -> None:
        """Starts the thread that renews or takes the lease."""
        threading.Thread(target=self._run, name="paceline-lease", daemon=True).start()

    def close(self) -> None:
        """Stops the thread, and gives the lease back."""
        self._closed.set()
        if self.epoch is not None:
            self.epoch = None
            with suppress(OSError, ValueError):
                self._ask("lease/revoke", {"ID": self._id})

    def _run(self) -> None:
        while not self._closed.wait(RENEW):
            with suppress(OSError, ValueError):
                if self.epoch is not None:
                    self._renew()
                elif self.wanted:
                    self._try_to_acquire()

    def _renew(self) -> None:
        asked = time.monotonic()
        answer = self._ask("lease/keepalive", {"ID": self._id})
        if int(answer.get("result", {}).get("TTL", 0)) > 0:
            self._until = asked + LASTS - MARGIN
        else:
            self.epoch = None

    def _try_to_acquire(self) -> None:
        """Takes the lease if it is free, else learns who holds it."""
        asked = time.monotonic()
        holder, (before, revision) = self._read("holder"), self._read("epoch") or ("0", "0")
        if holder is None:
            granted, epoch = str(self._ask("lease/grant", {"TTL": LASTS})["ID"]), int(before) + 1
            holds, counts = {"key": _text(f"{self._name}/holder")}, {"key": _text(f"{self._name}/epoch")}
            free = {**holds, "target": "CREATE", "createRevision": "0"}
            same = {**counts, "target": "MOD", "modRevision": revision}
            holder_entry = {**holds, "value": _text(json.dumps(self._address)), "lease": granted}
            puts = [{"requestPut": holder_entry}, {"requestPut": {**counts, "value": _text(str(epoch))}}]
            if self._ask("kv/txn", {"compare": [free, same], "success": puts}).get("succeeded"):
                self._id, self._until, self.epoch = granted, asked + LASTS - MARGIN, epoch
                return
            holder = self._read("holder")
        if holder is not None:
            from paceline.team.message_types import Address  # needs msgspec

            try:
                self.holder = read_message(holder[0].encode(), Address, f"etcd's entry for the name {self._name}")
            except FormatError as error:
                raise OSError(error.what) from error

    def _read(self, what: str) -> tuple[str, str] | None:
        """Reads a key's value, and the revision at which it was written; None if there is no such key."""
        entries = self._ask("kv/range", {"key": _text(f"{self._name}/{what}")}).get("kvs")
        if not entries:
            return None
        return base64.b64decode(entries[0]["value"]).decode(), entries[0]["mod_revision"]

    def _ask(self, what: str, request_body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer of the first host that gives one. OSError: no host answers as etcd does."""
        from urllib.request import Request, urlopen  # takes its time, and few runs have a store

        from paceline.team.message_types import ETCD  # needs msgspec

        failure = OSError("etcd has no address")
        for host in self._hosts:
            request = Request(f"http://{host}/v3/{what}", json.dumps(request_body).encode())
            try:
                with urlopen(request, timeout=ANSWER) as answer:
                    return dict(read_message(answer.read(), ETCD[what], "etcd's answer"))
            except OSError as error:
                failure = error
            except FormatError as error:
                failure = OSError(error.what)
        raise failure


def _text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()
