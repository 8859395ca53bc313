"""Explains a long wait through the store: who is in another collective, has ended or has failed.

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
from paceline.comm.message_reader import decode_message
from paceline.errors import CollectiveMismatchError, PacelineError, PeerLostError, first_line

T = TypeVar("T")
Ask = Callable[..., list[str]]  # of any number of keys
PATIENCE = 1.0  # seconds of waiting before a worker publishes its status and reads those of its peers
PAUSE = 0.05  # seconds between two requests
RARER, RAREST = 0.1, 2.0  # a worker asks again after this fraction of its wait, and after this many seconds at most
MANY = 64  # with more workers than these the pauses grow, so that all together ask no more often
LATE = 30.0  # seconds of waiting before it prints once who has not arrived
EXPLAIN = 5.0  # seconds to find the reason after a collective failed
LINGER = 1.0  # seconds for which a worker that knows the reason waits until the others know it
_PACKAGE = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_LIBRARY_PATHS = (_PACKAGE, _TORCH, "<frozen")


def call_site() -> str:
    """``file:line`` of the nearest frame of the user's code, which is neither Paceline's nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if _is_users(frame):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def raise_site(error: BaseException) -> str:
    """``file:line`` of the innermost line of the user's code that an exception passed; of any code if there is none."""
    passed = [*walk_tb(error.__traceback__)]
    frame, line = next((one for one in reversed(passed) if _is_users(one[0])), passed[-1])
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"


def _is_users(frame: FrameType) -> bool:
    """Whether the code is neither Paceline's nor torch's."""
    name = frame.f_code.co_filename
    return not name.startswith(_LIBRARY_PATHS) and "contextlib" not in name


class PeerStatus:
    """The status of worker `rank` of `size`, as it publishes it in a store, and that of its peers."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self.names: Sequence[int] = range(size)  # what the workers are called, by rank
        self.local_status: dict[str, Any] = {"sequence": 0, "name": "the start", "site": "", "state": "in"}
        self._has_warned = False
        self._published: dict[str, int] = {}  # rank by key, of the workers that have published a status
        self._next = 0.0  # when to ask again
        self._survey: Future[list[dict[str, Any] | None]] | None = None
        store.set(f"at/{rank}", "null")

    @property
    def name(self) -> int:
        """This worker's number in the run."""
        return self.names[self.rank]

    def set_state(self, state: str, where: tuple[str, str]) -> None:
        """Changes this worker's state: its script has `ended`, it has `met` the others at their ends, it has `closed`
        its group, or it has `failed`. `where` (name, site) is its last collective.
        """
        self.local_status = {**self.local_status, "state": state, "name": where[0], "site": where[1]}

    def publish(self) -> None:
        """Writes this worker's status to the store."""
        self._store.set(f"at/{self.rank}", json.dumps(self.local_status))

    def others(self) -> list[dict[str, Any] | None]:
        """The last published status of each worker; None for those that have not published any.

        One request reads all: with a thousand waiting workers, one request for each would be a million.
        """
        keys = {f"at/{rank}": rank for rank in range(self.size) if f"at/{rank}" not in self._published}
        self._published.update((key, keys[key]) for key in find_set_keys(self._store, [*keys]))
        statuses: list[dict[str, Any] | None] = [None] * self.size
        for rank, message in zip(self._published.values(), self._store.multi_get([*self._published]), strict=True):
            statuses[rank] = decode_message(message, "place", f"worker {self.names[rank]}")
        return statuses

    def _exchange(self) -> list[dict[str, Any] | None]:
        self.publish()
        return self.others()

    def _ask(self) -> list[dict[str, Any] | None]:
        statuses, pause, end = self._exchange(), PAUSE, time.monotonic() + 1.5 * PATIENCE
        # Every waiting worker publishes its status before long. Requests become rarer: many workers make many.
        while self._trouble(statuses) is not None and not self._all_published(statuses) and time.monotonic() < end:
            time.sleep(pause)
            statuses, pause = self.others(), 2 * pause
        return statuses

    def _all_published(self, statuses: Sequence[dict[str, Any] | None]) -> bool:
        """Whether each worker has published that it has come as far as this one, or comes no further."""
        sequence = self.local_status["sequence"]
        return all(
            status and (status["sequence"] >= sequence or self._has_ended(status) or status["state"] == "failed")
            for status in statuses
        )

    def _has_ended(self, status: dict[str, Any]) -> bool:
        """Whether a worker takes part in no more collectives. After this worker has met all others, a peer that still
        publishes `ended` has only not noticed the meeting yet, and does take part.
        """
        state: str = status["state"]
        return state == "closed" or (state == "ended" and self.local_status["state"] != "met")

    def look(self, waited: float, missing: Sequence[int], wait: float = 0.0) -> None:
        """Looks for the reason of a long wait in the others' statuses, and raises it.

        `missing` are ranks known not to have arrived. A thread asks the store; if it has no answer within `wait`
        seconds, a later call gets it.
        """
        if self._survey is None and not wait and time.monotonic() < self._next:
            return
        self._survey = self._survey or run_in_thread(self._ask)
        try:
            statuses = self._survey.result(wait)
            self._survey, self._next = None, time.monotonic() + min(RARER * waited, RAREST) * max(1.0, self.size / MANY)
        except TimeoutError:
            return
        except RuntimeError:  # the store went with worker 0
            raise PeerLostError(
                f"worker {self.name} lost worker 0 while waiting in {self.local_status['name']}",
                "see the log of worker 0",
            ) from None
        error = self._trouble(statuses)
        if error is not None:
            raise error
        if waited > LATE and not self._has_warned:
            self._has_warned = True
            sequence, name, site = (self.local_status[key] for key in ("sequence", "name", "site"))
            late = missing or [r for r, one in enumerate(statuses) if one is None or one["sequence"] < sequence]
            whom = workers([self.names[rank] for rank in late])
            say(f"paceline: worker {self.name} has waited {waited:.0f} s in {name} ({site}) for {whom}")

    def _trouble(self, statuses: Sequence[dict[str, Any] | None]) -> PacelineError | None:
        """The error if a worker is in another collective of the same number, or has ended or failed."""
        sequence, name = self.local_status["sequence"], self.local_status["name"]
        published = [(self.names[rank], status) for rank, status in enumerate(statuses) if status is not None]
        elsewhere = (status["sequence"] == sequence and status["name"] != name for _, status in published)
        if any(elsewhere) or any(self._has_ended(status) for _, status in published):
            return self._mismatch(statuses)
        for worker, status in published:
            if status["state"] == "failed":
                what = f"worker {self.name} waited in {name} for worker {worker}, which failed"
                return PeerLostError(what, f"see the log of worker {worker}")
        return None

    def _mismatch(self, statuses: Sequence[dict[str, Any] | None]) -> CollectiveMismatchError:
        ranks_by_status: dict[tuple[str, str], list[int]] = {}
        sequence = self.local_status["sequence"]
        for rank, status in enumerate(statuses):
            if status is None or (not self._has_ended(status) and status["sequence"] != sequence):
                continue
            what = "ended after " if self._has_ended(status) else ""
            where = f"{status['name']} at {status['site']}" if status["site"] else status["name"]
            ranks_by_status.setdefault((what, where), []).append(self.names[rank])
        summary = ", ".join(
            f"{workers(ranks)} {what or ('are in ' if len(ranks) > 1 else 'is in ')}{where}"
            for (what, where), ranks in ranks_by_status.items()
        )
        return CollectiveMismatchError(
            f"workers called different collectives: {summary}",
            "all workers must call the same collectives in the same order: remove the condition around the call "
            "(files are written only once anyway)",
        )

    def reason(self, error: Exception, everybody: bool, is_known: Callable[[], bool]) -> PacelineError:
        """Why a collective failed: a mismatch if the statuses show one, else a lost peer.

        With `everybody` all workers have noticed and will publish their statuses: waits for them, to name them all.
        Gives up once the reason `is_known` otherwise.
        """
        search = run_in_thread(lambda: self._search(everybody, is_known))
        deadline, error_found = time.monotonic() + EXPLAIN, None
        while not is_known() and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                error_found = search.result(0.01)
                break
        return error_found or PeerLostError(
            f"worker {self.name} lost a peer in {self.local_status['name']} ({first_line(error)})",
            "see the log of the worker that ended first",
        )

    def _search(self, everybody: bool, is_known: Callable[[], bool]) -> PacelineError | None:
        """Asks until there is a reason that will not change. Blocks as long as the store does."""
        deadline, error = time.monotonic() + EXPLAIN, None
        with contextlib.suppress(RuntimeError):  # the store went with worker 0
            while time.monotonic() < deadline and not is_known():
                statuses = self._exchange()
                arrived = sum(p is not None and p["sequence"] >= self.local_status["sequence"] for p in statuses)
                error = self._trouble(statuses)
                if error is not None and (not everybody or arrived == self.size):
                    if everybody:
                        self._await_readers(min(deadline, time.monotonic() + LINGER), is_known)
                    break
                time.sleep(0.05)
        return error

    def _await_readers(self, deadline: float, is_known: Callable[[], bool]) -> None:
        """Waits until all workers have read the statuses: the store ends with the worker that serves it."""
        self._store.set(f"explained/{self.rank}", "1")
        keys = [f"explained/{rank}" for rank in range(self.size)]
        while len(find_set_keys(self._store, keys)) < self.size and time.monotonic() < deadline and not is_known():
            time.sleep(0.02)


def find_set_keys(store: dist.Store, keys: Sequence[str]) -> Sequence[str]:
    """The keys that are set in the store, in few requests if nearly all are or nearly none."""
    if not keys or store.check([*keys]):
        return keys
    half = len(keys) // 2
    return [] if len(keys) == 1 else [*find_set_keys(store, keys[:half]), *find_set_keys(store, keys[half:])]


def asker(store: dist.Store, given_up: Callable[[], bool], size: int = 1, for_ever: bool = False) -> Ask:
    """A function that waits until keys are set in `store`, and returns their values.

    It never blocks in compiled code, and ends with PeerLostError when `given_up` says so. It waits as long as the
    store's timeout, or `for_ever`. `size` workers may ask at a time.
    """

    def ask(*keys: str) -> list[str]:
        pause, longest = 5e-5, 0.005 * max(1.0, size / MANY)
        patience = math.inf if for_ever else store.timeout.total_seconds()  # type: ignore[attr-defined]
        deadline = time.monotonic() + patience
        while not store.check([*keys]):
            if given_up() or time.monotonic() > deadline:
                missing = {*keys} - {*find_set_keys(store, keys)}
                raise PeerLostError(
                    f"a worker did not join ({', '.join(sorted(missing))})", "see the logs of the other workers"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return [value.decode() for value in store.multi_get([*keys])]

    return ask


def agree(
    ask: Ask,
    store: dist.Store,
    name: str,
    rank: int,
    ranks: Sequence[int],
    own_answer: str,
    join: Callable[[list[str]], str],
) -> str:
    """What `join` makes of the answers of all `ranks`; other workers may ask for it, too.

    The first of `ranks` reads all answers, the others only its result: a thousand workers that read a thousand
    answers would make a million requests. `name` is fresh in `store`.
    """
    if rank in ranks:
        store.set(f"{name}/{rank}", own_answer)
    if rank != ranks[0]:
        return ask(f"{name}/all")[0]
    joint_answer = join(ask(*(f"{name}/{other}" for other in ranks)))
    store.set(f"{name}/all", joint_answer)
    return joint_answer


def run_in_thread(call: Callable[[], T]) -> Future[T]:
    """Runs `call` in a thread of its own, which may be left behind.

    A request to the store may block as long as the network does.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except (RuntimeError, PacelineError) as error:
            future.set_exception(error)
        finally:
            if not future.done():  # after an error that nobody expects, which the thread prints
                future.cancel()

    threading.Thread(target=run, name="paceline-side", daemon=True).start()
    return future


def unless(given_up: Callable[[], Exception | None], call: Callable[[], T]) -> T:
    """The result of `call`, which runs in a thread; raises the error of `given_up` as soon as there is one.

    A store whose host is cut off does not answer while TCP keeps trying, and blocks the caller in compiled code.
    """
    future = run_in_thread(call)
    while True:
        try:
            return future.result(PAUSE)
        except TimeoutError:
            if (error := given_up()) is not None:
                raise error from None


def spare_late_threads() -> None:
    """Lets threads that were left behind in compiled code stop for good when they return, at the interpreter's end.

    The interpreter unwinds such a thread through frames of C++ that take that for an error, and end the process
    (pthread_exit in a noexcept function). So the C++ library is made to wait for ever instead.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C++ library: then it ends as before
        forever = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(forever)


def workers(ranks: Sequence[int]) -> str:
    """``worker 3``, ``workers 0, 2``; an empty list is ``no worker``."""
    if not ranks:
        return "no worker"
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
