"""Workers of a team meet at a store that worker 0 serves.

A worker that cannot connect gets an error with the reason.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.base.console import say
from paceline.base.environment import World, way_to
from paceline.comm.peer_status import LATE, MANY, PAUSE, find_set_keys, run_in_thread, workers
from paceline.errors import LaunchError, PeerLostError, first_line

OPEN_FILES = 1 << 16  # the most that a worker may have open, where its hard limit allows as many


def never() -> bool:
    """Returns False: the rendezvous is never given up."""
    return False


def allow_open_files() -> None:
    """Raises this process's soft limit of open files towards its hard limit.

    The listening sockets of torch's store and of gloo accept every connection and close none that stays silent. Each
    costs a file descriptor, and the usual soft limit of 1024 would end the run after as many.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Rendezvous:
    """Opens the stores of the teams that this worker belongs to, one after another.

    It serves those of teams whose first worker it is, all at one address, on the socket that its launcher bound.
    """

    def __init__(self) -> None:
        self._served: dist.Store | None = None

    def open(self, world: World, given_up: Callable[[], bool] = never) -> dist.Store:
        """The store of the team of `world`, once every worker has joined it. Raises LaunchError or PeerLostError."""
        assert world.store is not None
        host, port = world.store
        allow_open_files()
        serves = world.rank == 0 and world.store_is_ours

        def make(served: bool, **options: Any) -> dist.Store:
            options |= {"timeout": timedelta(seconds=world.join_timeout), "wait_for_workers": False}
            # Torch waits for ever if what accepts its connection is no store.
            return run_in_thread(lambda: dist.TCPStore(host, port, None, served, **options)).result(world.join_timeout)

        try:
            if serves and self._served is None:
                self._served = make(True, **({} if world.store_fd is None else {"master_listen_fd": world.store_fd}))
            elif not serves:
                _reach(world, given_up)
            # Each team has its own client: a request that was given up may still hold the one before.
            store = make(False)
        except (RuntimeError, TimeoutError) as error:
            what = "open" if serves else "use"
            why = (
                "the program at this address does not answer as a store"
                if isinstance(error, TimeoutError)
                else first_line(error)
            )
            raise LaunchError(
                f"worker {world.rank} could not {what} the store at {host}:{port} ({why})",
                "if another program uses this port, set MASTER_PORT to a free port for all workers",
            ) from error
        team_store = dist.PrefixStore(f"paceline/{world.job}" if world.job else "paceline", store)
        _wait_for_all(team_store, world, given_up)
        return team_store


def _reach(world: World, given_up: Callable[[], bool]) -> None:
    """Waits until worker 0's port answers. Torch would report the same at length, and without a remedy."""
    assert world.store is not None
    host, port = world.store
    deadline = time.monotonic() + world.join_timeout
    while True:
        try:
            left = deadline - time.monotonic()
            socket.create_connection(way_to(host, port), timeout=max(left, PAUSE)).close()
            return
        except OSError as error:
            if time.monotonic() > deadline or given_up():
                raise PeerLostError(
                    f"worker {world.rank} could not reach worker 0 at {host}:{port} within {world.join_timeout} s "
                    f"({error.strerror or error})",
                    "see the log of worker 0; "
                    "if it is running, set MASTER_ADDR to its host's address, and open this port",
                ) from None
        time.sleep(PAUSE)


def _take_rank(store: dist.Store, rank: int) -> None:
    """Claims this worker's rank. Raises LaunchError if another process has claimed it before."""
    identity = f"process {os.getpid()} on {socket.gethostname()}"
    nonce = secrets.token_hex(8)  # two containers may have equal names and numbers
    first = store.compare_set(f"joined/{rank}", "", f"{identity} {nonce}").decode()
    if first != f"{identity} {nonce}":
        what = f"two processes have joined as worker {rank}: {first.rpartition(' ')[0]}, and {identity}"
        raise LaunchError(what, "start each worker only once, and use a different MASTER_PORT for each run")


def _wait_for_all(store: dist.Store, world: World, given_up: Callable[[], bool]) -> None:
    _take_rank(store, world.rank)
    names = [f"joined/{rank}" for rank in range(world.size)]
    awaited = ["joined/all"] if world.rank else names  # a thousand workers do not each ask for a thousand keys
    began, pause, has_warned = time.monotonic(), 0.001, False
    try:
        while not store.check(awaited):
            time.sleep(pause)
            pause = min(2 * pause, PAUSE * max(1.0, world.size / MANY))
            waited = time.monotonic() - began
            is_over = waited > world.join_timeout or given_up()
            if is_over or (waited > LATE and not has_warned):
                has_warned = True
                arrived = {*find_set_keys(store, names)}
                missing = workers([rank for rank, name in enumerate(names) if name not in arrived])
                if len(arrived) == world.size:
                    break
                if is_over:
                    raise PeerLostError(
                        f"worker {world.rank} waited {waited:.0f} s for {missing}, which did not join",
                        "see their logs; start every worker, all with the same number of workers",
                    )
                say(f"paceline: worker {world.rank} has waited {waited:.0f} s for {missing}")
        if world.rank == 0:
            store.set("joined/all", "1")
    except RuntimeError as error:  # the store went
        raise PeerLostError(
            f"worker {world.rank} lost worker 0 before all workers had joined", "see the log of worker 0"
        ) from error
