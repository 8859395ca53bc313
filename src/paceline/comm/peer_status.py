"""Side channel over the store that finds mismatched, finished or failed workers while collectives wait.

A worker that waits long says what for, and looks what the others wait for; so a mismatch, an end or a failure becomes
an error with call sites and not a hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.base.console import say
from paceline.comm.message_reader import read_told
from paceline.errors import CollectiveMismatchError, PacelineError, PeerLostError, first_line

T = TypeVar("T")
Ask = Callable[..., list[str]]  # of any number of keys
PATIENCE = 1.0  # seconds of waiting before a worker tells the others where it is, and looks where they are
PAUSE = 0.05  # seconds between two looks
RARER, RAREST = 0.1, 2.0  # part of its wait, and seconds at most, that a worker lets pass before it asks again
MANY = 64  # with more workers than these the pauses grow, so that all together ask no more often
LATE = 30.0  # seconds of waiting before it says once on the console who has not arrived
EXPLAIN = 5.0  # seconds to find the reason after a collective failed
_PACKAGE = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_OURS = (_PACKAGE, _TORCH, "<frozen")


def call_site() -> str:
    """``file:line`` of the nearest frame that is the user's: neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if _is_users(frame):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def raise_site(error: BaseException) -> str:
    """``file:line`` of the innermost line of the user's that an exception came through; of any, where none is."""
    passed = [*walk_tb(error.__traceback__)]
    frame, line = next((one for one in reversed(passed) if _is_users(one[0])), passed[-1])
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"


def _is_users(frame: FrameType) -> bool:
    """Whether the code is neither ours nor torch's."""
    name = frame.f_code.co_filename
    return not name.startswith(_OURS) and "contextlib" not in name


class PeerStatus:
    """Where worker `rank` of `size` is, and where the others said they are."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self.names: Sequence[int] = range(size)  # what the workers are called, by rank
        self.here: dict[str, Any] = {"sequence": 0, "name": "the start", "site": "", "state": "in"}
        self._said_late = False
        self._there: dict[str, int] = {}  # who has a place in the store, by its key
        self._next = 0.0  # when to ask again
        self._survey: Future[list[dict[str, Any] | None]] | None = None
        store.set(f"at/{rank}", "null")

    @property
    def name(self) -> int:
        return self.names[self.rank]

    def say(self, state: str, where: tuple[str, str]) -> None:
        """Changes this worker's state; `where` (name, site) it was last."""
        self.here = {**self.here, "state": state, "name": where[0], "site": where[1]}

    def publish(self) -> None:
        self._store.set(f"at/{self.rank}", json.dumps(self.here))

    def others(self) -> list[dict[str, Any] | None]:
        """Where each worker said it is; None for those that have not said anything.

        One request for all: one for each would be a thousand from each of a thousand that wait for one.
        """
        keys = {f"at/{rank}": rank for rank in range(self.size) if f"at/{rank}" not in self._there}
        self._there.update((key, keys[key]) for key in there(self._store, [*keys]))
        places: list[dict[str, Any] | None] = [None] * self.size
        for rank, said in zip(self._there.values(), self._store.multi_get([*self._there]), strict=True):
            places[rank] = read_told(said, "place", f"worker {self.names[rank]}")
        return places

    def _meet(self) -> list[dict[str, Any] | None]:
        self.publish()
        return self.others()

    def _ask(self) -> list[dict[str, Any] | None]:
        places, pause, end = self._meet(), PAUSE, time.monotonic() + 1.5 * PATIENCE
        # Everybody who waits says where before long; it is asked less and less often, or many would ask too much.
        while self._trouble(places) is not None and not self._all_said(places) and time.monotonic() < end:
            time.sleep(pause)
            places, pause = self.others(), 2 * pause
        return places

    def _all_said(self, places: Sequence[dict[str, Any] | None]) -> bool:
        """Whether each has come as far as this worker, or comes no further, and has said so."""
        here = self.here["sequence"]
        return all(place and (place["sequence"] >= here or place["state"] in ("ended", "failed")) for place in places)

    def look(self, waited: float, missing: Sequence[int], wait: float = 0.0) -> None:
        """After a long wait: raises the reason if the others' places show one. `missing` are known not to be here.

        The store is asked beside; if it does not answer within `wait` seconds, a later look has the answer.
        """
        if self._survey is None and not wait and time.monotonic() < self._next:
            return
        self._survey = self._survey or beside(self._ask)
        try:
            places = self._survey.result(wait)
            self._survey, self._next = None, time.monotonic() + min(RARER * waited, RAREST) * max(1.0, self.size / MANY)
        except TimeoutError:
            return
        except RuntimeError:  # the store went with worker 0
            raise PeerLostError(
                f"worker {self.name} lost worker 0 while waiting in {self.here['name']}", "see the log of worker 0"
            ) from None
        error = self._trouble(places)
        if error is not None:
            raise error
        if waited > LATE and not self._said_late:
            self._said_late = True
            sequence = self.here["sequence"]
            late = missing or [r for r, place in enumerate(places) if place is None or place["sequence"] < sequence]
            say(
                f"paceline: worker {self.name} has waited {waited:.0f} s in {self.here['name']} "
                f"({self.here['site']}) for {workers([self.names[rank] for rank in late])}",
            )

    def _trouble(self, places: Sequence[dict[str, Any] | None]) -> PacelineError | None:
        """The error if somebody is in another collective of the same number, or ended, or failed."""
        for place in places:
            if place is None:
                continue
            elsewhere = place["sequence"] == self.here["sequence"] and place["name"] != self.here["name"]
            if elsewhere or place["state"] == "ended":
                return self._mismatch(places)
        for rank, place in enumerate(places):
            if place is not None and place["state"] == "failed":
                return PeerLostError(
                    f"worker {self.name} waited in {self.here['name']} for worker {self.names[rank]}, which failed",
                    f"see the log of worker {self.names[rank]}",
                )
        return None

    def _mismatch(self, places: Sequence[dict[str, Any] | None]) -> CollectiveMismatchError:
        parts: dict[tuple[str, str], list[int]] = {}
        sequence = self.here["sequence"]
        for rank, place in enumerate(places):
            if place is None or (place["state"] != "ended" and place["sequence"] != sequence):
                continue
            what = "ended after " if place["state"] == "ended" else ""
            where = f"{place['name']} at {place['site']}" if place["site"] else place["name"]
            parts.setdefault((what, where), []).append(self.names[rank])
        said = ", ".join(
            f"{workers(ranks)} {what or ('are in ' if len(ranks) > 1 else 'is in ')}{where}"
            for (what, where), ranks in parts.items()
        )
        return CollectiveMismatchError(
            f"workers do not meet: {said}",
            "every worker must call the same ones in the same order: remove the condition around the call "
            "(files are written once anyway)",
        )

    def reason(self, error: Exception, everybody: bool, known: Callable[[], bool]) -> PacelineError:
        """Why a collective failed: a mismatch if the places show one, else a lost peer.

        With `everybody` all workers have noticed and will say where they are: waits for them, to name them all. Gives
        up when the reason is `known` otherwise.
        """
        search = beside(lambda: self._search(everybody, known))
        deadline, found = time.monotonic() + EXPLAIN, None
        while not known() and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                found = search.result(0.01)
                break
        return found or PeerLostError(
            f"worker {self.name} lost a peer in {self.here['name']} ({first_line(error)})",
            "the reason stands in the log of the worker that ended first",
        )

    def _search(self, everybody: bool, known: Callable[[], bool]) -> PacelineError | None:
        """Asks until there is a reason that will not grow. Blocks as long as the store does."""
        deadline, found = time.monotonic() + EXPLAIN, None
        with contextlib.suppress(RuntimeError):  # the store went with worker 0
            while time.monotonic() < deadline and not known():
                places = self._meet()
                said = sum(p is not None and p["sequence"] >= self.here["sequence"] for p in places)
                found = self._trouble(places)
                if found is not None and (not everybody or said == self.size):
                    break
                time.sleep(0.05)
        return found


def there(store: dist.Store, keys: Sequence[str]) -> Sequence[str]:
    """Those of the keys that are set, in few requests if nearly all are or nearly none."""
    if not keys or store.check([*keys]):
        return keys
    half = len(keys) // 2
    return [] if len(keys) == 1 else [*there(store, keys[:half]), *there(store, keys[half:])]


def asker(store: dist.Store, given_up: Callable[[], bool], size: int = 1, for_ever: bool = False) -> Ask:
    """Waits for what others set in `store`, without blocking in compiled code, which could not be `given_up`, for as
    long as the store does or `for_ever`. `size` may ask at a time.
    """

    def ask(*keys: str) -> list[str]:
        pause, longest = 5e-5, 0.005 * max(1.0, size / MANY)
        patience = math.inf if for_ever else store.timeout.total_seconds()  # type: ignore[attr-defined]
        deadline = time.monotonic() + patience
        while not store.check([*keys]):
            if given_up() or time.monotonic() > deadline:
                missing = {*keys} - {*there(store, keys)}
                raise PeerLostError(
                    f"a worker did not come ({', '.join(sorted(missing))})", "see the logs of the others"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return [said.decode() for said in store.multi_get([*keys])]

    return ask


def agree(
    ask: Ask, store: dist.Store, name: str, rank: int, who: Sequence[int], mine: str, join: Callable[[list[str]], str]
) -> str:
    """What `join` makes of what each of `who` says, also for others. The first of them reads what all say, everybody
    else what it made of that: a thousand who read a thousand answers would be a million. `name` is fresh in `store`.
    """
    if rank in who:
        store.set(f"{name}/{rank}", mine)
    if rank != who[0]:
        return ask(f"{name}/all")[0]
    made = join(ask(*(f"{name}/{other}" for other in who)))
    store.set(f"{name}/all", made)
    return made


def beside(call: Callable[[], T]) -> Future[T]:
    """What asks the store may block as long as the network does: a thread that may be left behind does it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except (RuntimeError, PacelineError) as error:
            future.set_exception(error)

    threading.Thread(target=run, name="paceline-side", daemon=True).start()
    return future


def unless(given_up: Callable[[], Exception | None], call: Callable[[], T]) -> T:
    """What `call` gives, which runs beside; it is left behind as soon as it is `given_up`, with the error why.

    A store whose host is cut off answers nothing while TCP goes on trying, and holds who asks in compiled code.
    """
    future = beside(call)
    while True:
        try:
            return future.result(PAUSE)
        except TimeoutError:
            if (error := given_up()) is not None:
                raise error from None


def spare_late_threads() -> None:
    """At the interpreter's very end: a thread that was left behind in compiled code stops for good when it comes back.

    The interpreter unwinds such a thread through frames of C++ that take that for an error, and end the process
    (pthread_exit in a noexcept function); so what they do then is made to wait for ever.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C++ library: then it ends as before
        forever = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(forever)


def workers(ranks: Sequence[int]) -> str:
    """``worker 3``, ``workers 0, 2``; an empty list is ``nobody``."""
    if not ranks:
        return "nobody"
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
