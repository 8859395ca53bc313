"""The team that a worker joins, and collectives for the user's own loops."""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.backends.cpu import get_cpu_capability

import paceline.base.environment as worlds
from paceline.base.environment import World
from paceline.base.exit_codes import INTERRUPTED, STOPPED
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.mesh import Mesh
from paceline.comm.communicator import Group
from paceline.comm.peer_status import call_site
from paceline.data.loader import Assignment
from paceline.errors import PacelineError, PeerLostError, UsageError, WorkersDifferError, add_hint
from paceline.team.exit_reports import ExitReports, describe_exception
from paceline.team.transactions import LeftError, Transactions

T = TypeVar("T")
_NO_GROUP = "Default process group has not been initialized"  # torch's error in a collective
_SUMS = (
    "Paceline's workers have no torch.distributed process group: remove collectives, ranks and sizes from "
    "losses, forwards and datasets; return (sum, count) from a loss or metric, and Paceline adds it over all workers; "
    "elsewhere call paceline.join().all_reduce(tensor)"
)
_TWINS = (
    "create and use Trainers only in the process that `paceline run` starts (in scripts that spawn processes, under "
    "`if __name__ == '__main__':`); to train in a separate process, remove the PACELINE_ variables from its environment"
)
_NOT_RAW = "leave out --raw: it is for scripts that create no paceline.Trainer and do not call paceline.join()"
# What gloo and NCCL both can add.
SUMS = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "complex128", "complex64"]


@lru_cache(maxsize=8)  # asked for in every step, and the same in all of a generation
def _weights(members: tuple[int, ...], shares: tuple[float, ...] | None, unit: int) -> tuple[float, ...]:
    """The weights of units of `unit` members each: the sums of their members' shares."""
    each = tuple(shares[m] if shares is not None and m < len(shares) else 1.0 for m in members)
    each = each if sum(each) else (1.0,) * len(members)
    return tuple(sum(each[first : first + unit]) for first in range(0, len(each), unit))


class Team:
    """The team of all workers: `rank` of `size`, and collectives that take a name for error messages.

    Every method but `main_first` is collective: all workers must call the same ones in the same order; otherwise
    CollectiveMismatchError is raised on every worker, with each call site.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.group = Group(world)
        self.transactions = Transactions(world, self.group)
        self.left = False
        self.code: int | None = None  # the exit code of this worker if it failed
        self.ends_late = False  # whether it failed after the script had ended
        self.step = 0  # optimizer steps done, for the failure block
        self.closing: list[Callable[[bool], None]] = []
        self._firsts = 0
        world.tell("join")
        self._greet()

    @property
    def rank(self) -> int:
        """The number of this worker, from 0; it may change from one generation to the next."""
        return self.group.rank

    @property
    def size(self) -> int:
        """The number of workers of the present generation."""
        return self.group.size

    def get_assignment(self, mesh: Mesh, together: int = 1) -> Assignment:
        """How the micro-batches of a trainer with this mesh are assigned to units at present, and to which of these
        units this worker belongs.
        """
        rank, units = self.rank, _weights(self.transactions.members, self.world.shares, mesh.unit)
        speaks = mesh.speaks(rank)
        return Assignment(mesh.unit_of(rank), units, self.transactions.number, together=together, speaks=speaks)

    def _run_collective(self, compute: Callable[[], T]) -> T:
        result: T = self.transactions.run(compute)
        return result

    def _greet(self) -> None:
        """Checks that all workers run the same script, plan and versions. WorkersDifferError: they do not."""
        script = Path(sys.argv[0])
        digest = hashlib.sha256(script.read_bytes()).hexdigest() if script.is_file() else ""
        versions = {
            "script": digest,
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:2])),
            "plan": self.world.plan,
        }
        self.group.declare("the start")
        replies = self.group.gather_json([versions, get_cpu_capability()])
        everyone = [greeting for greeting, _ in replies]
        self.capabilities = [capability for _, capability in replies]  # of the processors, by rank
        for what in versions:
            others = [rank for rank, greeting in enumerate(everyone) if greeting[what] != everyone[0][what]]
            if others:
                shown = "" if what == "script" else f" ({everyone[0][what]} and {everyone[others[0]][what]})"
                raise WorkersDifferError(
                    f"worker {others[0]} runs a different {what} than worker 0{shown}",
                    f"use the same {what} on every worker, and start again",
                )

    def all_reduce(self, tensor: torch.Tensor, name: str = "all_reduce") -> torch.Tensor:
        """Adds the tensors of all workers.

        Every worker calls it, in the same order as the other collectives.

        Args:
            tensor: A tensor with the same shape and dtype on every worker.
            name: What error messages, `paceline stacks` and the trace call this sum.

        Returns:
            The sum, in a new tensor, with equal bits on every worker.

        Raises:
            UsageError: The transport cannot add this dtype, or another worker calls another collective.
        """
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in SUMS:
            raise UsageError(
                f"all_reduce {name!r} cannot add {kind} tensors", f"convert the tensor to one of {', '.join(SUMS)}"
            )
        shape = "x".join(map(str, tensor.shape)) or "scalar"

        def compute() -> torch.Tensor:
            self.group.declare(f"all_reduce {name!r} of {shape} {kind}")
            return self.group.sum(tensor.detach().clone().contiguous())

        return self._run_collective(compute)

    def broadcast(self, tensor: torch.Tensor, name: str = "broadcast") -> torch.Tensor:
        """Sends worker 0's tensor to all.

        Args:
            tensor: A tensor with the same shape and dtype on every worker; the values of worker 0 count.
            name: What error messages, `paceline stacks` and the trace call this collective.

        Returns:
            Worker 0's values, in a new tensor.
        """
        shape = "x".join(map(str, tensor.shape)) or "scalar"

        def compute() -> torch.Tensor:
            self.group.declare(f"broadcast {name!r} of {shape} {str(tensor.dtype).removeprefix('torch.')}")
            return self.group.broadcast(tensor.detach().clone().contiguous())

        return self._run_collective(compute)

    def gather(self, tensor: torch.Tensor, name: str = "gather") -> list[torch.Tensor]:
        """Collects the tensors of all workers on every worker.

        Args:
            tensor: A tensor with the same dtype on every worker; the shapes may differ.
            name: What error messages, `paceline stacks` and the trace call this collective.

        Returns:
            The tensors in the order of the ranks.
        """

        def compute() -> list[torch.Tensor]:
            self.group.declare(f"gather {name!r} of {str(tensor.dtype).removeprefix('torch.')}")
            shapes = self.group.gather_json(list(tensor.shape))
            parts = self.group.gather(tensor.detach().reshape(-1))
            return [part.reshape(shape).clone() for part, shape in zip(parts, shapes, strict=True)]

        return self._run_collective(compute)

    def any(self, flag: bool, name: str = "any") -> bool:
        """Tells every worker whether `flag` is true on at least one of them; `name` is for error messages."""

        def compute() -> bool:
            self.group.declare(f"any {name!r}")
            return bool(self.group.sum(torch.tensor([int(bool(flag))], dtype=torch.int64)).item())

        return self._run_collective(compute)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Worker 0 runs the block first, the others after it: for tokenising or downloading once per team.

        The others wait as long as worker 0 lives, not until a deadline.
        """
        self._firsts += 1
        name = f"main_first/{self._firsts}"
        if self.rank != 0:
            try:
                self.group.wait_for_flag(name)
            except RuntimeError:  # the store went with worker 0
                raise PeerLostError(
                    f"worker 0 failed inside main_first at {call_site()}", "see the log of worker 0"
                ) from None
        with HEARTBEAT.free():
            yield
        if self.rank == 0:
            self.group.flag(name)

    @property
    def is_changing(self) -> bool:
        """Whether another generation waits for `form`: workers join, leave or were lost.

        Workers may see it at different times, so agree before you act on it.
        """
        return self.transactions.newcomers

    @property
    def only_leaves(self) -> bool:
        """Whether the generation that waits for `form` has present workers only."""
        generation = self.transactions.commands.newest
        return generation is not None and {*generation.members} <= {*self.group.names}

    def form(self, lost: PeerLostError | None = None) -> int:
        """Forms the team for a training loop of the script's own that goes on when workers come and go.

        The first call declares that the loop survives losses; a process that joins a running team waits in it until it
        is admitted. From then on, the launcher restarts lost workers. After a collective has raised PeerLostError, or
        when all workers have agreed on `is_changing`, all workers call it again: it enters the next generation, whose
        rank, size and connections are new. Nothing of the script's state is handed over: afterwards, broadcast it from
        rank 0, which is always a worker that was in the team before.

        Args:
            lost: The error of the collective, if a worker was lost.

        Returns:
            The number of the generation.

        Raises:
            PeerLostError: A worker was lost, and the launcher does not restart workers.
            SystemExit: This worker was asked to leave.
            UsageError: The script has a Trainer, which forms the team by itself.
        """
        if self.transactions.state_owner is not None:
            raise UsageError(
                "team.form() was called in a script that has a Trainer", "use a Trainer or a loop of your own, not both"
            )
        try:
            self.transactions.form(lost)
        except LeftError:
            self.left = True
            raise SystemExit(STOPPED) from None
        return self.transactions.number

    def fail(self, code: int, **fields: str) -> None:
        """Reports that the script has failed; this worker ends with the exit code `code`."""
        self.code = code
        self.world.tell("failed", step=self.step, **fields)

    def close(self) -> None:
        """Ends this worker's part in the team; called automatically when the script ends."""
        alone = self.code is not None or self.left or self.transactions.waiting
        if not alone:
            with HEARTBEAT.waiting():
                self._run_collective(self.group.meet)
        for close in reversed(self.closing):
            close(alone)
        self.closing.clear()
        if not alone:
            self.world.tell("ended")
        self.group.close(alone)


_team: Team | None = None


def join() -> Team:
    """The team of this process; made on the first call. A world of one needs no launcher.

    Raises WorkersDifferError if workers run different scripts, plans or versions, and UsageError if there are several
    workers and the platform is not Linux.
    """
    global _team
    if _team is None:
        world = worlds.read_world()
        if world.size > 1 and not sys.platform.startswith("linux"):
            what = f"several workers need Linux, but this platform is {sys.platform}"
            raise UsageError(what, "train with one worker on this platform")
        if worlds.is_raw():
            raise UsageError("the run was started with --raw, but its script uses Paceline's own workers", _NOT_RAW)
        _check_identity(world)
        before = sys.excepthook  # torch puts its own in place, which prefixes every line
        _team = Team(world)
        _take_over_exit(_team, before)
    return _team


def _check_identity(world: World) -> None:
    """Refuses a process that has a worker's environment but is not the one that its agent started: two processes that
    send gradients as the same worker would silently change the training. UsageError: it is another process.
    """
    agent, pid = worlds.agent_pid(), os.getpid()
    if world.launcher != "paceline" or agent is None:
        return
    started = HEARTBEAT.process()
    if started is None:  # a worker that replaced itself with another program has closed it
        started = pid if (os.getppid(), os.getsid(0)) == (agent, pid) else 0
    if started != pid:
        which = f"process {started}" if started else "another process"
        what = f"process {pid} has the environment of worker {world.rank}, but worker {world.rank} is {which}"
        raise UsageError(what, _TWINS)


def _refuse_in_child(team: Team) -> None:
    """Keeps a process that the worker forked out of the training; it reports nothing to the agent when it ends."""
    atexit.unregister(_end)
    worker = team.transactions.worker
    team.transactions.refusal = UsageError(
        f"process {os.getpid()} was forked from worker {worker}, and cannot train in its place", _TWINS
    )


def _take_over_exit(team: Team, before: Callable[..., Any]) -> None:
    """Installs the handlers that notice how the script ends and release groups before torch shuts down."""

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if _NO_GROUP in str(error):
            add_hint(error, _SUMS)
        team.fail(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1, **describe_exception(error))
        before(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_end, team, ExitReports())
    if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
        os.register_at_fork(after_in_child=partial(_refuse_in_child, team))
    if team.world.launcher == "paceline":
        # The agent handles the terminal's Ctrl-C, and asks this worker to leave.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(team: Team, exits: ExitReports) -> None:
    """Ends the worker when the script ends. An error in this, such as in the last checkpoint, must fail the worker."""
    if team.code is None and exits.failed:
        team.fail(exits.code, kind="SystemExit", text=f"exit code {exits.code}", at=exits.at)
    try:
        team.close()
    except PacelineError as error:
        team.ends_late = True
        # The error is about the script and not about this file; but an agent needs the traceback.
        if isinstance(error, UsageError) and team.world.launcher != "paceline":
            error = error.with_traceback(None)
        sys.excepthook(type(error), error, error.__traceback__)
        team.group.close(failed=True)


def exit_code() -> int | None:
    """The exit code of a worker that failed in a team of several, or after its script had ended; None if Python decides
    on the exit code.
    """
    return None if _team is None or (_team.size == 1 and not _team.ends_late) else _team.code


def has_left_generation() -> bool:
    """Whether this worker has left a generation, whose connections may be unfinished."""
    return _team is not None and _team.group.has_left_generation
