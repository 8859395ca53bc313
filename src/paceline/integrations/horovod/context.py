"""What `hvd.init()` makes of this process: its team, its runtime, and its place among the workers."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import torch

from paceline.base.environment import variable
from paceline.base.heartbeat import HEARTBEAT
from paceline.comm.peer_status import call_site
from paceline.errors import PeerLostError
from paceline.integrations.horovod.exceptions import HorovodArgumentError, HorovodInternalError, not_initialized
from paceline.integrations.horovod.negotiation import ADD, GLOBAL, REMOVE, Request
from paceline.integrations.horovod.runtime import Entry, Runtime
from paceline.integrations.horovod.timeline import CollectiveTimeline
from paceline.team.team import Team, join


class ProcessSet:
    """A set of workers that run collectives together, given by their ranks.

    It can be used once `hvd.init(process_sets=[...])` or `hvd.add_process_set` has given it a `process_set_id`.

    Args:
        ranks_or_comm: The ranks. MPI communicators are not supported.
    """

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        ranks = [*ranks_or_comm] if isinstance(ranks_or_comm, Sequence | range | set | frozenset) else None
        if ranks is None or not all(type(rank) is int for rank in ranks):
            raise HorovodArgumentError(
                f"ProcessSet needs a list of ranks, got {type(ranks_or_comm).__name__}",
                "pass ranks, for example ProcessSet([0, 1]); MPI communicators are not supported",
            )
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = sorted(ranks)
        self.mpi_comm = None

    def size(self) -> int | None:
        """The number of workers in the set; None before it is initialized."""
        if self.process_set_id is None:
            return None
        return len(CONTEXT.current.negotiation.sets[self.process_set_id])

    def rank(self) -> int | None:
        """The position of this worker in the set; None before the set is initialized. Root ranks are not counted so."""
        if self.process_set_id is None:
            return None
        if not self.included():
            raise HorovodArgumentError(f"worker {CONTEXT.current.rank} is not in {self}", "ask for its rank on members")
        return CONTEXT.current.negotiation.sets[self.process_set_id].index(CONTEXT.current.rank)

    def included(self) -> bool | None:
        """Whether this worker is in the set."""
        return None if self.ranks is None else CONTEXT.current.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = GLOBAL


class Context:
    """The state of this process between `init` and `shutdown`."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.team: Team | None = None
        self.handles: dict[int, tuple[Entry, Any]] = {}  # by handle: the collective, and what it returns
        self._next_handle = 0
        self._epoch = (-1, 0)  # generation of the team, and how often it was initialized in it
        self._registered = False
        self._is_elastic = False

    @property
    def current(self) -> Runtime:
        """The runtime. HorovodArgumentError: there is none."""
        if self.runtime is None:
            raise not_initialized()
        return self.runtime

    def begin(self) -> None:
        """Joins the team, and starts the runtime if it does not run."""
        if self.runtime is not None and not self.runtime.ended:
            return
        self.team = team = join()
        if team.transactions.waiting:
            self._is_elastic = True
            team.form()
        generation, count = self._epoch
        self._epoch = team.transactions.number, count + 1 if generation == team.transactions.number else 0
        self.handles.clear()
        self.runtime = Runtime(team, self._epoch[1])
        global_process_set.ranks = [*range(team.size)]
        path = variable("HOROVOD_TIMELINE")
        if path and path.upper() != "DYNAMIC":
            start_timeline(path, variable("HOROVOD_TIMELINE_MARK_CYCLES") == "1")
        if not self._registered:
            self._registered = True
            atexit.register(self._end)

    def begin_elastic(self) -> None:
        """Declares that the script survives lost workers."""
        self.begin()
        assert self.team is not None
        if not self._is_elastic:
            self._is_elastic = True
            number = self.team.transactions.number
            if self.team.form() != number:
                self.stop()
                self.begin()

    def reset(self, lost: PeerLostError | None) -> None:
        """Goes on with the next generation of the team. Workers that fail meanwhile lead to yet another one."""
        assert self.team is not None
        while True:
            if lost is None:
                self.stop()
            elif self.runtime is not None:
                self.runtime.abandon()
                self.runtime = None
            try:
                self.team.form(lost)
                self.begin()
                return
            except PeerLostError as error:
                if lost is error or self.team.world.commands_fd is None:
                    raise
                lost = error

    def stop(self) -> None:
        """Shuts down; does nothing without a runtime."""
        if self.runtime is not None:
            self.runtime.stop()
            self.runtime = None
            self.handles.clear()

    def _end(self) -> None:
        """Shuts down at the end of the script: without the other workers if it has failed."""
        runtime, self.runtime = self.runtime, None
        if runtime is not None and self.team is not None:
            (runtime.stop if self.team.code is None else runtime.abandon)()

    def start(self, request: Request, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> Entry:
        """Submits a collective."""
        runtime = self.current
        members = runtime.negotiation.sets.get(request.process_set)
        if members is None or runtime.rank not in members:
            raise HorovodArgumentError(
                f"worker {runtime.rank} called {request.kind} for process set {request.process_set}, "
                + ("which does not exist" if members is None else f"whose ranks are {list(members)}"),
                "call it on members of an initialized process set only",
            )
        entry = Entry(request, inputs, outputs, call_site())
        if inputs and inputs[0].is_cuda:
            entry.ready = torch.cuda.Event()
            entry.ready.record()
        return runtime.submit(entry)

    def handle(self, entry: Entry, result: Any) -> int:
        """A handle of a submitted collective; `result` is computed from the entry when it is synchronized."""
        self._next_handle += 1
        self.handles[self._next_handle] = (entry, result)
        return self._next_handle


CONTEXT = Context()


def wait(entry: Entry) -> Entry:
    """Waits for a collective. HorovodInternalError: it failed."""
    if not entry.done.is_set():
        with HEARTBEAT.waiting():
            entry.done.wait()
    if entry.error is not None:
        raise entry.error
    return entry


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Joins the workers of the run; call it before anything else of this module.

    Args:
        comm: None or the ranks of all workers.
        process_sets: Process sets to initialize, or "dynamic"; process sets can be added later in any case.
    """
    CONTEXT.begin()
    if comm is not None and [*comm] not in ([], [*range(CONTEXT.current.size)]):
        raise HorovodArgumentError(
            "hvd.init(comm=...) got other ranks than those of all workers",
            "use process_sets=[hvd.ProcessSet(ranks)] and pass process_set= to the collectives",
        )
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise HorovodArgumentError(f"process_sets={process_sets!r} is unknown", 'pass a list, or "dynamic"')
    for process_set in process_sets if process_sets and not isinstance(process_sets, str) else ():
        add_process_set(process_set)


def shutdown() -> None:
    """Ends Horovod's part on all workers; collectives that are not complete fail. `init()` may follow."""
    CONTEXT.stop()


def is_initialized() -> bool:
    """Whether `init()` was called, and `shutdown()` not since then on any worker."""
    return CONTEXT.runtime is not None and not CONTEXT.runtime.ended


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Initializes a process set. All workers call it, also those that are not in the set.

    Args:
        process_set: The set, or its ranks.

    Returns:
        The set, with its `process_set_id`.

    Raises:
        HorovodArgumentError: A rank does not exist, or a set of the same ranks exists.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks, size = tuple(made.ranks or ()), CONTEXT.current.size
    if not ranks or len({*ranks}) < len(ranks) or ranks[-1] >= size or ranks[0] < 0:
        raise HorovodArgumentError(
            f"a process set has the ranks {list(ranks)}", f"pass each rank once, from 0 to {size - 1}"
        )
    name = CONTEXT.current.name(GLOBAL, ADD, None)
    entry = CONTEXT.start(Request(GLOBAL, name, ADD, splits=ranks), (), [])
    try:
        made.process_set_id = wait(entry).number
    except HorovodInternalError as error:
        if "exists already" not in error.what:
            raise
        raise HorovodArgumentError(error.what, error.cure) from None
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set. All workers call it.

    Returns:
        Whether it was removed: False for the global set and for one that is not initialized.
    """
    number = process_set.process_set_id
    if not number:
        return False
    request = Request(GLOBAL, CONTEXT.current.name(GLOBAL, REMOVE, None), REMOVE, root=number)
    process_set.process_set_id = None
    wait(CONTEXT.start(request, (), []))
    return True


def rank() -> int:
    """The number of this worker, from 0."""
    return CONTEXT.current.rank


def size() -> int:
    """The number of workers."""
    return CONTEXT.current.size


def local_rank() -> int:
    """The number of this worker among those of its host."""
    return CONTEXT.current.local_rank


def local_size() -> int:
    """The number of workers on this host."""
    return CONTEXT.current.local_size


def cross_rank() -> int:
    """The number of this worker's host among the hosts that have a worker with this local rank."""
    return CONTEXT.current.cross_rank


def cross_size() -> int:
    """The number of hosts that have a worker with this local rank."""
    return CONTEXT.current.cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have equally many workers."""
    return CONTEXT.current.homogeneous


def mpi_threads_supported() -> bool:
    """False: no MPI is used."""
    CONTEXT.current  # noqa: B018 (raises before init)
    return False


def mpi_enabled() -> bool:
    """False: no MPI is used."""
    return False


def mpi_built() -> bool:
    """False: no MPI is used."""
    return False


def gloo_enabled() -> bool:
    """True: hosts exchange data over gloo."""
    return True


def gloo_built() -> bool:
    """True: hosts exchange data over gloo."""
    return True


def nccl_built() -> int:
    """The version of NCCL, as one number; 0 without GPUs."""
    if not torch.cuda.is_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts a Chrome trace of the collectives, which rank 0 writes.

    Args:
        file_path: The file.
        mark_cycles: Whether the trace shows each negotiation cycle.
    """
    runtime = CONTEXT.current
    if runtime.timeline is not None:
        raise HorovodArgumentError("a timeline is being recorded", "call hvd.stop_timeline() first")
    if runtime.rank == 0:
        runtime.timeline = CollectiveTimeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the trace and writes its file."""
    runtime = CONTEXT.current
    timeline, runtime.timeline = runtime.timeline, None
    if timeline is not None:
        timeline.close()
