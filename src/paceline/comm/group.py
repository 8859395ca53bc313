"""The workers of a team and the collectives among them: named, counted, and able to say who is missing.

Data travels over torch's process group. What a worker is waiting for travels over the store, which still works when
the data channel is stuck: that is how a mismatch becomes an error with call sites and not a hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import CollectiveMismatchError, PacelineError, PeerLostError
from paceline.world import World

PATIENCE = 1.0  # seconds of waiting before a worker tells the others where it is, and looks where they are
LATE = 30.0  # seconds of waiting before it says once on the console who has not arrived
NAME = 80  # characters of a collective's name and of its call site that travel
HEADER = 1024  # bytes: both as JSON, where a character takes up to six
KEPT_BYTES = 64 << 20  # of collectives that are done
EXPLAIN = 5.0  # seconds to find the reason after a collective failed
_PACKAGE = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)


def call_site() -> str:
    """``file:line`` of the nearest frame that is the user's: neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_PACKAGE, _TORCH, "<frozen")) and "contextlib" not in name:
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class Group:
    """The collectives of a team of `size` workers. In a world of one every operation is the identity.

    `sent` counts bytes that this worker handed to collectives, as payload (not as the algorithm's traffic).
    """

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        self.sent = 0
        self._sequence = 0
        self._here: dict[str, Any] = {"sequence": 0, "name": "the start", "site": "", "state": "in"}
        self._said_late = False
        # gloo's threads let go of a collective a moment after it is done. If theirs were the last reference, they would
        # need the interpreter to release its tensors: at a fork (a loader's child then hangs, with CPython 3.11) or at
        # the interpreter's end (which aborts). So the last reference is here.
        self._recent: deque[tuple[dist.Work, int]] = deque()
        self._kept = 0  # bytes
        self._store: dist.Store | None = None
        if self.size == 1:
            return
        assert world.store is not None
        host, port = world.store
        serves = world.rank == 0 and world.store_is_ours
        fd: dict[str, Any] = {} if world.store_fd is None else {"master_listen_fd": world.store_fd}
        store = dist.TCPStore(host, port, None, serves, timeout=timedelta(minutes=5), wait_for_workers=False, **fd)
        self._store = dist.PrefixStore("paceline", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        # Its functions take the group of the moment of its import for a default, and would keep ours alive beyond
        # destroy_process_group: gloo's threads then meet a dying interpreter, which aborts one exit in some.
        importlib.import_module("torch.distributed.nn.functional")
        # Waiting is our own (see wait): torch's deadline only has to be longer than any honest pause.
        dist.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.size, timeout=timedelta(days=7)
        )

    # -- entering -----------------------------------------------------------------------------------------------

    def enter(self, name: str, check: bool = True) -> None:
        """Declares the next collective. With `check`, returns only when all workers declared the same one.

        Raises CollectiveMismatchError on every worker, naming each call site, if they did not.
        """
        self._sequence += 1
        if len(name) > NAME:  # told apart by all of it, shown by its beginning
            name = f"{name[: NAME - 13]}~{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        self._here = {"sequence": self._sequence, "name": name, "site": call_site(), "state": "in"}
        if self.size == 1 or not check:
            return
        header = json.dumps([name, self._here["site"][-NAME:]]).encode().ljust(HEADER)
        mine = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        rows = [json.loads(bytes(row.tolist()).decode()) for row in self._gather_equal(mine)]
        if any(row[0] != name for row in rows):
            raise self._mismatch([{"name": row[0], "site": row[1], "state": "in"} for row in rows])

    def wait(self, work: dist.Work) -> None:
        """Waits for a collective, a little at a time, and finds the reason when it does not come.

        Not by a callback, which would run Python in a thread of gloo's: see `_recent`.
        """
        began = time.monotonic()
        while True:
            try:
                work.wait(timedelta(seconds=PATIENCE))
                return
            except RuntimeError:  # it failed, or the time is over
                if work.is_completed():
                    break
            try:
                self._look_around(time.monotonic() - began)
            except PacelineError:
                self.abandon([work])
                raise
        try:
            work.wait()
        except RuntimeError as error:
            raise self._reason(error) from None

    # -- collectives --------------------------------------------------------------------------------------------

    def start_sum(self, tensor: torch.Tensor) -> dist.Work | None:
        """Starts summing `tensor` in place over all workers; `finish` must follow. Part of the entered collective."""
        if self.size == 1:
            return None
        self.sent += tensor.nbytes
        try:
            return self._keep(dist.all_reduce(tensor, async_op=True), tensor.nbytes)
        except RuntimeError as error:
            raise self._reason(error) from None

    def finish(self, work: dist.Work | None) -> None:
        if work is not None:
            self.wait(work)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` in place over all workers and returns it. Part of the entered collective."""
        self.finish(self.start_sum(tensor))
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrites `tensor` on all workers with that of `source`. Part of the entered collective."""
        if self.size > 1:
            self.sent += tensor.nbytes if self.rank == source else 0
            self.wait(self._keep(dist.broadcast(_bytes(tensor), source, async_op=True), tensor.nbytes))
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every worker's flat tensor of one dtype, lengths may differ. Part of the entered collective."""
        if self.size == 1:
            return [tensor]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = tensor.numel()
        self.sum(lengths)
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=tensor.dtype, device=tensor.device)
        padded[: tensor.numel()] = tensor
        everyone = self._gather_equal(padded)
        return [row[: int(length)] for row, length in zip(everyone, lengths, strict=True)]

    def _gather_equal(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every worker's flat tensor of one length, shape (workers, length)."""
        everyone = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        self.sent += tensor.nbytes
        work = dist.all_gather_single(_bytes(everyone), _bytes(tensor), async_op=True)
        self.wait(self._keep(work, everyone.nbytes))
        return everyone.view(self.size, -1)

    def gather_json(self, value: Any) -> list[Any]:
        """Every worker's JSON value. Part of the entered collective."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(row.tolist()).decode()) for row in self.gather(data)]

    def _keep(self, work: dist.Work | None, size: int) -> dist.Work:
        """Holds a collective for a while after it is done; the larger they are, the fewer, and the longer they take."""
        assert work is not None
        self._recent.append((work, size))
        self._kept += size
        while len(self._recent) > 8 and (len(self._recent) > 512 or self._kept > KEPT_BYTES):
            self._kept -= self._recent.popleft()[1]
        return work

    # -- the side channel ---------------------------------------------------------------------------------------

    def flag(self, name: str) -> None:
        """Raises a flag that the others can see without a collective."""
        if self._store is not None:
            self._store.set(f"flag/{name}", "1")

    def wait_for_flag(self, name: str) -> None:
        """Waits for a flag as long as it takes: the launcher ends us if its owner dies."""
        while self._store is not None and not self._store.check([f"flag/{name}"]):
            time.sleep(0.05)

    def _publish(self) -> None:
        assert self._store is not None
        self._store.set(f"at/{self.rank}", json.dumps(self._here))

    def _others(self) -> list[dict[str, Any] | None]:
        """Where each worker said it is; None for those that have not said anything."""
        assert self._store is not None
        return [
            json.loads(self._store.get(f"at/{rank}")) if self._store.check([f"at/{rank}"]) else None
            for rank in range(self.size)
        ]

    def _look_around(self, waited: float) -> None:
        try:
            self._publish()
            places = self._others()
            if self._trouble(places) is not None:
                time.sleep(1.5 * PATIENCE)  # until everybody who waits has said where
                places = self._others()
        except RuntimeError:  # the store went with worker 0
            raise PeerLostError(
                f"worker {self.rank} lost worker 0 while waiting in {self._here['name']}", "see the log of worker 0"
            ) from None
        error = self._trouble(places)
        if error is not None:
            raise error
        if waited > LATE and not self._said_late:
            self._said_late = True
            missing = [r for r, place in enumerate(places) if place is None or place["sequence"] < self._sequence]
            print(
                f"paceline: worker {self.rank} has waited {waited:.0f} s in {self._here['name']} "
                f"({self._here['site']}) for {_workers(missing)}",
                file=sys.stderr,
            )

    def _trouble(self, places: Sequence[dict[str, Any] | None]) -> PacelineError | None:
        """The error if somebody is in another collective of the same number, or ended, or failed."""
        for place in places:
            if place is None:
                continue
            elsewhere = place["sequence"] == self._sequence and place["name"] != self._here["name"]
            if elsewhere or place["state"] == "ended":
                return self._mismatch(places)
        for rank, place in enumerate(places):
            if place is not None and place["state"] == "failed":
                return PeerLostError(
                    f"worker {self.rank} waited in {self._here['name']} for worker {rank}, which failed",
                    f"see the log of worker {rank}",
                )
        return None

    def _mismatch(self, places: Sequence[dict[str, Any] | None]) -> CollectiveMismatchError:
        parts: dict[tuple[str, str], list[int]] = {}
        for rank, place in enumerate(places):
            if place is None or (place["state"] != "ended" and place.get("sequence", self._sequence) != self._sequence):
                continue
            what = "ended after " if place["state"] == "ended" else ""
            where = f"{place['name']} at {place['site']}" if place["site"] else place["name"]
            parts.setdefault((what, where), []).append(rank)
        said = ", ".join(
            f"{_workers(ranks)} {what or ('are in ' if len(ranks) > 1 else 'is in ')}{where}"
            for (what, where), ranks in parts.items()
        )
        return CollectiveMismatchError(
            f"workers do not meet: {said}",
            "every worker must call the same ones in the same order: remove the condition around the call "
            "(files are written once anyway)",
        )

    def _reason(self, error: RuntimeError) -> PacelineError:
        """Why a collective failed: a mismatch if the side channel shows one, else a lost peer."""
        deadline = time.monotonic() + EXPLAIN
        while time.monotonic() < deadline:
            try:
                self._publish()
                places = self._others()
            except RuntimeError:  # the store went with worker 0
                break
            found = self._trouble(places)
            if found is not None:
                return found
            time.sleep(0.1)
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return PeerLostError(
            f"worker {self.rank} lost a peer in {self._here['name']} ({first_line})",
            "the reason stands in the log of the worker that ended first",
        )

    # -- the end ------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """At the good end of the script: says so, and waits until all have come as far, so that none is left waiting.

        A worker that still waits for us in a collective sees that we ended, and fails with the reason; then we, too,
        raise PeerLostError.
        """
        if self._store is None:
            return
        self._here = {**self._here, "state": "ended"}
        places: list[dict[str, Any] | None] = [None]
        with contextlib.suppress(RuntimeError):  # the store went with worker 0: nobody is left to wait for
            self._publish()
            while not all(place is not None and place["state"] == "ended" for place in places):
                time.sleep(0.02)
                places = self._others()
                for rank, place in enumerate(places):
                    if place is not None and place["state"] == "failed":
                        raise PeerLostError(
                            f"worker {self.rank} had ended, but worker {rank} failed", f"see the log of worker {rank}"
                        )

    def abandon(self, works: Sequence[dist.Work | None]) -> None:
        """Leaves unfinished collectives behind for good: gloo ends the process when one is destroyed."""
        for work in works:
            if work is not None and not work.is_completed():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))

    def close(self, failed: bool) -> None:
        """Releases the group. In a good end the store, which lives in worker 0, goes last."""
        if self._store is None:
            return
        store, self._store = self._store, None
        with contextlib.suppress(RuntimeError):  # the store went with worker 0
            self._here = {**self._here, "state": "failed" if failed else "ended"}
            store.set(f"at/{self.rank}", json.dumps(self._here))
            store.set(f"closed/{self.rank}", "1")
            while self.rank == 0 and not failed and not store.check([f"closed/{r}" for r in range(self.size)]):
                time.sleep(0.02)
        if not failed:
            dist.destroy_process_group()  # ends gloo's threads
            self._recent.clear()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory: what is only moved may be of a dtype that the backend has no name for."""
    return tensor.view(-1).view(torch.uint8)


def _workers(ranks: Sequence[int]) -> str:
    """``worker 3``, ``workers 0, 2``; an empty list is ``nobody``."""
    if not ranks:
        return "nobody"
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
