"""`paceline run` on this machine: checks, run folder, agent."""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from paceline.base.console import in_one_line, say
from paceline.base.environment import (
    parse_save_every,
    parse_shares,
    read_nodes,
    standstill,
    starts_cold,
    take_token,
    trainjob_server,
    variable,
)
from paceline.base.journal import Journal
from paceline.base.terminal import Terminal
from paceline.checkpoint.lock import hold_lock
from paceline.checkpoint.storage import is_url, storage_at
from paceline.errors import LaunchError, UsageError
from paceline.launch.agent import Agent
from paceline.launch.fork_server import Kept
from paceline.launch.joining import address_of, find, introduction, join, likeness, listen, stand_by
from paceline.launch.mirror import mirror
from paceline.launch.notify import Notifier
from paceline.launch.options import GIVEN, LaunchOptions
from paceline.launch.serving import Serving, check_serving
from paceline.observe.loggers import TensorBoard
from paceline.observe.progress import Progress
from paceline.observe.summary import Summary
from paceline.plan import Plan
from paceline.team.auth import keep_token, make_token, read_token
from paceline.team.coordinator_client import CoordinatorClient
from paceline.team.etcd_lease import parse_store

PORT, PATIENCE = 29400, 300.0  # of the first of several nodes; seconds in which it is to begin
FULL = errno.ENOSPC, errno.EDQUOT
FILES = 8  # that are open for a worker: three pipes, two sockets, its log, its pidfd, its pulse


def launch(options: LaunchOptions) -> int:
    """Runs the script with its workers on this machine until all have ended; returns the exit code.

    0 finished, 2 usage or plan, 75 stopped politely, 130 Ctrl-C, 128 + signal where a worker was killed by
    one, else the failing worker's own. To be called from the main thread. UsageError: the options cannot
    work. LaunchError: the run folder is in use, or the workers cannot be started.
    """
    if options.nodes is not None:
        options = _as_node(options)
    _check(options)
    compared = Summary(Path(options.against)) if options.against else None
    try:
        with Notifier(options.notify, options.script, partial(_say, options)) as notifier:
            return _join(options, notifier) if options.join else _launch(options, compared, notifier)
    except OSError as error:
        if error.errno == errno.EMFILE:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            what = f"this process may have {most:,} open files, and the run needs more"
            raise LaunchError(what, "raise the limit before, as by `ulimit -n 1024`") from error
        if error.errno not in FULL:
            raise
        what = f"the run folder {options.run_dir or 'below runs/'} could not be written to: {error.strerror}"
        raise LaunchError(what, "free some space or choose another --run-dir") from error


def _launch(options: LaunchOptions, compared: Summary | None, notifier: Notifier) -> int:
    """A run of our own, begun again where it is to be."""
    with mirror(options.mirror) as variables, Kept() as kept:
        environment = {**options.environment, **variables}
        kept = options.kept or kept
        options = replace(options, run_dir=str(_folder(options)), environment=environment, kept=kept)
        source = "what is in memory" if variables else "the last checkpoint"
        restarts = 0
        with Serving(options.metrics, options.page, trainjob_server(), partial(_say, options)) as serving:
            while True:
                code, in_pieces = _begin(options, compared, serving, notifier)
                restarts += 1
                # Of several replicas one goes on; the last one, if of several workers, cannot without one of them.
                again = in_pieces or bool(variables)
                killed = 128 < code != 130
                if not again or not killed or restarts > options.max_restarts:  # too often
                    notifier.end(_folder(options), code)
                    return code
                notifier.failed, options = False, replace(options, begin=1)
                say(f"starting again with {source} ({restarts} of {options.max_restarts})")


def _say(options: LaunchOptions, text: str) -> None:
    if not options.quiet:
        say(text)


def _as_node(options: LaunchOptions) -> LaunchOptions:
    """The first node listens, the others join it, at a port that all know, with folders of their own in its run folder.

    Where their number may change (Kubernetes) they wait as long as whoever started them lets them; and where the first
    one is replaced, the others come to the next one of its name.
    """
    rank, count, first, gpus = read_nodes()
    token = take_token()
    if options.token_file is not None:
        token = read_token(Path(options.token_file))
    if token is None or len(token) < 32:
        cure = "give all nodes the same --token-file or PACELINE_TOKEN, of 32 characters or more"
        raise UsageError("--nodes auto needs a secret that the nodes share", cure)
    if not first and count != 1:
        raise UsageError("the variables of this node do not say where the first one is", "say --listen and --join")
    where: dict[str, Any] = {"join" if rank else "listen": f"{first}:{PORT}"} if count != 1 else {}
    where |= {"metrics": None, "page": None} if rank else {}
    if rank and options.run_dir is not None:
        where["run_dir"] = str(Path(options.run_dir, "hosts", f"node-{rank}"))
    workers = gpus if options.workers == 1 and gpus else options.workers
    where |= {"patience": PATIENCE if count else math.inf, "epoch": 1 if count else int(time.time())}
    again = variable("PACELINE_AGAIN")
    return replace(options, workers=workers, token=token, token_file=None, again=again, **where)


def _begin(options: LaunchOptions, compared: Summary | None, serving: Serving, notifier: Notifier) -> tuple[int, bool]:
    """Begins or resumes a run. Returns its exit code and whether a model was split over workers of this host alone."""
    listener = listen(options)
    options = replace(options, address=listener.getsockname()[0])
    folder = _folder(options)
    with _held(folder, options.patience, notifier) as journal:
        if compared:
            journal.write("compare", workers=compared.workers, samples_per_second=compared.samples_per_second)
        numbers = list(range(options.workers))
        if options.token is not None:
            keep_token(folder, options.token)
        if options.on_listening is not None:
            options.on_listening(listener.getsockname())
        link = CoordinatorClient(
            listener.getsockname(), make_token(folder), introduction(options, folder, numbers, listener)
        )
        given = {name: getattr(options, name) for name in GIVEN}
        link.run = {
            name: getattr(options, name)
            for name in ("script", "workers", "max_restarts", "min_workers", "begin", "store")
        }
        link.run |= {"same": likeness(options), "given": given}
        link.run["served"] = [options.metrics, options.page, str(folder.absolute())]
        with Progress(Terminal(stderr=True), live=None if options.debug is None else False) as progress:
            agent = Agent(options, folder, journal, progress, link, numbers, listener, serving)
            agent.serve()
            with signals() as wakeup:
                return agent.run(wakeup), agent.in_pieces


def _join(options: LaunchOptions, notifier: Notifier) -> int:
    """Starts workers for a run that was begun elsewhere. Returns the exit code."""
    address, token, folder = find(options)
    has_own_folder = folder is None
    if folder is None:
        folder = _folder(options)
    standby = stand_by(address, options.patience)
    link = CoordinatorClient(address, token, introduction(options, folder, [], standby))
    options, numbers = join(replace(options, address=standby.getsockname()[0]), link)
    metrics, page, begun = link.run["served"]
    with (
        Serving(metrics, page, trainjob_server(), partial(_say, options), Path(begun)) as serving,
        _held(folder, options.patience, notifier) if has_own_folder else _open(folder, notifier) as journal,
        Progress(Terminal(stderr=True)) as progress,
    ):
        if has_own_folder:
            keep_token(folder, token)  # it may be this host that is joined one day
        agent = Agent(options, folder, journal, progress, link, numbers, standby, serving)
        if options.on_listening is not None:
            options.on_listening(link.address)
        with signals() as wakeup:
            return agent.run(wakeup)


def _folder(options: LaunchOptions) -> Path:
    with _made():
        return Path(options.run_dir) if options.run_dir else _new_folder(options.module or Path(options.script).stem)


@contextmanager
def _made() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:  # which `launch` says
            raise
        raise LaunchError(f"the run folder cannot be made ({error})", "give another --run-dir") from error


@contextmanager
def _held(folder: Path, patience: float, notifier: Notifier) -> Iterator[Journal]:
    """The journal of a folder that nobody else uses meanwhile: who did before has so many seconds to end."""
    with _made():
        lock = hold_lock(folder, min(patience, PATIENCE))
    try:
        with _open(folder, notifier) as journal:
            yield journal
    finally:
        os.close(lock)


@contextmanager
def _open(folder: Path, notifier: Notifier) -> Iterator[Journal]:
    with _made():
        journal = notifier.journal(folder)
    try:
        yield journal
    finally:
        journal.close()


def _check(options: LaunchOptions) -> None:
    """Refuses what can be refused before any worker starts."""
    if not Path(options.script).is_file():
        how = "is not a file" if Path(options.script).exists() else "does not exist"
        raise UsageError(
            f"the script {in_one_line(options.script)} {how}", "give the path of the Python file that trains"
        )
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES
    if options.workers > most:
        what = f"{options.workers:,} workers need more open files than this process may have"
        raise UsageError(what, f"take at most {most:,} workers on this host, or see `ulimit -n`")
    if options.min_workers > options.workers and options.listen is None and options.join is None:
        what = f"--min-workers {options.min_workers} does not fit {options.workers} workers"
        raise UsageError(what, f"give 1 to {options.workers}")
    if options.debug is not None and not 0 <= options.debug < options.workers:
        raise UsageError(f"there is no worker {options.debug} to debug", f"give 0 to {options.workers - 1}")
    if options.plan is not None:
        Plan.parse(options.plan).validate(options.workers)
    if options.shares is not None:
        parse_shares(options.shares, options.workers)
    if options.listen is not None:
        address_of(options.listen)
    starts_cold(), standstill()  # UsageError: these variables cannot be read
    if options.tensorboard is not None:
        TensorBoard()
    check_serving(options.metrics, options.page)
    if options.join is not None and (options.metrics or options.page):
        what = "a run is served beside its coordinator, and --join comes to one"
        raise UsageError(what, "give --metrics and --page to the command that begins it")
    if options.store is not None:
        parse_store(options.store)
    if options.save_every is not None:
        parse_save_every(options.save_every)
    if Path(options.run_dir or ".").is_file():
        raise UsageError(f"--run-dir {in_one_line(options.run_dir)} is a file", "give a folder, or leave it out")
    if not _is_utf8(options.run_dir or ""):
        what = f"--run-dir {options.run_dir!a} is no UTF-8, and checkpoints cannot be read from such a path"
        raise UsageError(what, "give another name")
    if is_url(options.run_dir or ""):
        what = f"--run-dir {in_one_line(options.run_dir)} is no folder, and logs and the journal need one"
        raise UsageError(what, f"give --checkpoints {in_one_line(options.run_dir)} instead")
    if options.checkpoints is not None:
        storage_at(options.checkpoints)


def _is_utf8(path: str) -> bool:
    """Whether a path is one that programs which want UTF-8 can open."""
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        return False
    return True


def _new_folder(stem: str) -> Path:
    Path("runs").mkdir(exist_ok=True)
    stem = stem if _is_utf8(stem) else stem.encode("ascii", "replace").decode().replace("?", "_")
    first = Path("runs", f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            break
    return folder


@contextmanager
def signals() -> Iterator[socket.socket]:
    """SIGINT, SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP (unless ignored, as under nohup) and SIGCHLD, which tells of workers
    that are stopped, are only written, as numbers, to this socket. In another thread than the main one none comes.
    """
    wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD]
    wanted = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    read, write = socket.socketpair()
    with read, write:
        read.setblocking(False)
        write.setblocking(False)
        if threading.current_thread() is not threading.main_thread():
            yield read
            return
        former = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in wanted}
        try:
            yield read
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former)
