"""`paceline run` on this machine: checks, run folder, agent."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
import socket
import tempfile
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
    parse_verify_steps,
    read_nodes,
    standstill,
    starts_cold,
    take_token,
    trainjob_server,
    variable,
)
from paceline.base.exit_codes import INTERRUPTED, LEFT_OUT
from paceline.base.journal import Journal, replace_file
from paceline.base.logger_names import LoggerName, check_installed, parse_loggers
from paceline.base.mesh import pick_ranks
from paceline.base.text import plural
from paceline.base.tracebacks import short
from paceline.checkpoint.lock import hold_lock
from paceline.checkpoint.storage import is_url, storage_at
from paceline.errors import LaunchError, UsageError
from paceline.launch.agent import Agent
from paceline.launch.foreign_scripts import refuse_foreign
from paceline.launch.fork_server import WarmProcessHolder
from paceline.launch.joining import (
    HostExcludedError,
    address_of,
    find_run,
    introduction,
    join,
    likeness,
    listen,
    stand_by,
)
from paceline.launch.mirror import mirror, shared
from paceline.launch.notify import Notifier
from paceline.launch.options import CONFIG_FILE, GIVEN, LaunchOptions
from paceline.launch.preflight import refuse_fp8
from paceline.launch.raw import refuse_options
from paceline.launch.serving import Serving, check_serving
from paceline.launch.spares import check_spares
from paceline.launch.time_limit import limited, parse_time, with_deadline
from paceline.observe.progress import Progress
from paceline.observe.summary import Summary
from paceline.plan import Plan
from paceline.team.auth import keep_token, make_token, read_token
from paceline.team.coordinator_client import CoordinatorClient
from paceline.team.etcd_lease import parse_store

PORT, PATIENCE = 29400, 300.0  # the port of the first of several nodes; seconds for it to start
REJOIN = 60.0  # seconds in which a run goes on under another plan
FULL = errno.ENOSPC, errno.EDQUOT
FILES = 8  # open files per worker: three pipes, two sockets, its log, its pidfd, its pulse


def launch(options: LaunchOptions) -> int:
    """Runs the script with its workers on this machine until all have ended; returns the exit code.

    Exit codes: 0 finished, 2 usage or plan error, 75 stopped with a checkpoint, 130 Ctrl-C, 128 + N if signal N killed
    a worker, otherwise the exit code of the worker that failed. Call it from the main thread. UsageError: the options
    cannot work. LaunchError: the run folder is in use, or the workers cannot be started.
    """
    if options.raw:
        refuse_options(options)
    if options.nodes is not None:
        options = as_node(options)
    options = with_size(options)
    _check(options)
    compared = Summary(Path(options.against)) if options.against else None
    try:
        with Notifier(options.notify, options.script, partial(_say, options)) as notifier:
            return _join_until_end(options, notifier) if options.join else _launch(options, compared, notifier)
    except OSError as error:
        if error.errno == errno.EMFILE:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            what = f"the run needs more open files than the limit of this process, {most:,}"
            raise LaunchError(what, "raise the limit first, for example with `ulimit -n 1024`") from error
        if error.errno not in FULL:
            raise
        what = f"the run folder {options.run_dir or 'in runs/'} cannot be written: {error.strerror}"
        raise LaunchError(what, "free some space, or choose another --run-dir") from error


def _launch(options: LaunchOptions, compared: Summary | None, notifier: Notifier) -> int:
    """Runs a new or resumed run of this command, and restarts it after a loss that it cannot survive."""
    with mirror(options.mirror) as variables, WarmProcessHolder() as warm_holder:
        environment = {**options.environment, **variables}
        warm_holder = options.warm_holder or warm_holder
        options = replace(options, run_dir=str(run_folder(options)), environment=environment, warm_holder=warm_holder)
        options = with_deadline(options)
        source = "the state in memory" if variables else "the last checkpoint"
        source = "the script's own checkpoints, if it loads any" if options.raw else source
        restarts = 0
        with Serving(options.metrics, options.page, trainjob_server(), partial(_say, options)) as serving:
            while True:
                code, again, agent = _begin(options, compared, serving, notifier)
                if options.chosen is not None and (other := _other_plan(options, code, agent)) is not None:
                    # Other hosts join it again: at the same address, but not the coordinator that ends.
                    notifier.failed, options = False, replace(other, epoch=agent.epoch + 1, port=agent.port)
                    continue
                restarts += 1
                # With several replicas another one continues, but the last one cannot lose a worker if it has several.
                # Where the first team is on several hosts, the other hosts have ended with the run.
                killed = (options.raw or 128 < code != INTERRUPTED) and options.size <= options.workers
                if not (again or variables) or not killed or restarts > options.max_restarts:
                    notifier.end(run_folder(options), code)
                    return code
                notifier.failed, options = False, replace(options, begin=1, restarts=restarts)
                say(f"restarting from {source} ({restarts} of {options.max_restarts})")


def _other_plan(options: LaunchOptions, code: int, agent: Agent) -> LaunchOptions | None:
    """Returns the options with another plan, if the run goes on with one."""
    from paceline.launch.plan_watch import next_options  # not with every run

    other = next_options(options, code, agent.change, agent.has_trained)
    if other is None:
        return None
    assert other.chosen is not None
    return replace(other, size=size_over_hosts(other.plan, other.workers, other.chosen.workers))


def _say(options: LaunchOptions, text: str) -> None:
    if not options.quiet:
        say(text)


def as_node(options: LaunchOptions) -> LaunchOptions:
    """Options of a node of `--nodes auto`. The first node listens at a fixed port. The others join it, each with a
    folder of its own in the run folder. If the number of nodes may change (Kubernetes), they wait for the first one
    without a limit; if the first node is replaced, they join the new node of the same name.
    """
    rank, count, first, gpus = read_nodes()
    token = take_token()
    if options.token_file is not None:
        token = read_token(Path(options.token_file))
    if token is None or len(token) < 32:
        cure = "pass the same --token-file, or set the same PACELINE_TOKEN, of at least 32 characters on all nodes"
        raise UsageError("--nodes auto needs a secret that all nodes share", cure)
    if not first and count != 1:
        raise UsageError("the variables of this node do not name the first node", "use --listen and --join instead")
    where: dict[str, Any] = {"join" if rank else "listen": f"{first}:{PORT}"} if count != 1 else {}
    where |= {"metrics": None, "page": None} if rank else {}
    if rank and options.run_dir is not None:
        where["run_dir"] = str(Path(options.run_dir, "hosts", f"node-{rank}"))
    workers = gpus if options.workers == 1 and gpus else options.workers
    if not rank:
        where |= {"size": size_over_hosts(options.plan, workers, workers * count)}
        where |= {"epoch": 1 if count else int(time.time())}
    where |= {"patience": PATIENCE if count else math.inf}
    again = variable("PACELINE_AGAIN")
    return replace(options, nodes=None, workers=workers, token=token, token_file=None, again=again, **where)


def with_size(options: LaunchOptions) -> LaunchOptions:
    """Adds the number of workers with which the run begins, if the plan needs hosts that join: as many as --min-workers
    says will come.
    """
    if options.listen is None or options.size:
        return options
    return replace(options, size=size_over_hosts(options.plan, options.workers, options.min_workers))


def size_over_hosts(plan: str | None, workers: int, most: int) -> int:
    """Returns how many workers begin the run if the plan needs more than the `workers` of this host; 0 if it does not,
    or needs more than `most`. Where the plan is not chosen yet, all of them are needed.
    """
    if plan is None:
        return 0
    parsed = Plan.parse(plan)
    size = most if parsed.auto else parsed.first_team(workers)
    return size if workers < size <= most else 0


def _begin(
    options: LaunchOptions, compared: Summary | None, serving: Serving, notifier: Notifier
) -> tuple[int, bool, Agent]:
    """Starts or resumes a run. Returns its exit code, whether it may help to start all workers again (a model was split
    over workers of this host only, or workers of --raw failed), and its agent.
    """
    listener = listen(options)
    options = replace(options, address=listener.getsockname()[0])
    folder = run_folder(options)
    with _held(folder, options.patience, notifier) as journal:
        if compared:
            journal.write("compare", workers=compared.workers, samples_per_second=compared.samples_per_second)
        if options.chosen is not None:
            journal.write("decision", **options.chosen.decision)
            if options.chosen.outlook is not None:
                options.chosen.outlook.write(folder)
        if options.config is not None:
            from paceline.launch.run_config import effective_config  # not with every run

            replace_file(folder / CONFIG_FILE, effective_config(options, str(short(folder))))
        options = replace(options, size=options.size or options.workers)
        sizes = Plan.parse(options.plan or "").mesh(1).group_sizes
        numbers = pick_ranks(range(options.size), options.workers, sizes)
        numbers += range(options.size, options.size + options.spares)
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
            for name in ("script", "max_restarts", "min_workers", "begin", "store", "exclude_after")
        }
        link.run |= {"workers": options.size, "trial": options.trial}
        if options.raw:  # the loss of one worker ends all: `_launch` restarts them together
            link.run |= {"max_restarts": 0}
            argv = [options.script, *options.arguments]
            about = {"script": options.script, "module": options.module, "argv": argv, "began": time.time()}
            journal.write("start", workers=options.workers, hosts=1, raw=True, **about)
        link.run |= {"same": likeness(options), "given": given}
        link.run["served"] = [options.metrics, options.page, str(folder.absolute())]
        with (
            Progress(kind=options.progress if options.debug is None else "plain") as progress,
            shared(options, lambda: link.token) as options,
        ):
            progress.max_steps = options.max_steps
            agent = Agent(options, folder, journal, progress, link, numbers, listener, serving)
            agent.serve()
            with signals() as wakeup, limited(folder, options):
                code = agent.run(wakeup)
                again = (code != 0 and not agent.was_stopped) if options.raw else agent.in_pieces
                return code, again, agent


def _join_until_end(options: LaunchOptions, notifier: Notifier) -> int:
    """Joins a run that another command has started, and joins it again each time that its plan has changed. Returns the
    exit code.
    """
    with WarmProcessHolder() as warm_holder:
        options = replace(options, warm_holder=options.warm_holder or warm_holder)
        while True:
            try:
                code, again = _join(options, notifier)
            except HostExcludedError as error:  # when it joins, or when it joins again
                say(str(error))
                return LEFT_OUT
            if again is None:
                return code
            notifier.failed, options = False, again


def _join(options: LaunchOptions, notifier: Notifier) -> tuple[int, LaunchOptions | None]:
    """Starts workers for a run that another command has started. Returns the exit code, and the options with which to
    join the run again if it goes on under another plan. HostExcludedError: the run leaves this host out.
    """
    address, token, folder = find_run(options)
    has_own_folder = folder is None
    if folder is None:
        folder = run_folder(options)
        options = replace(options, run_dir=str(folder))
    given = options
    standby = stand_by(address, options.patience)
    link = CoordinatorClient(address, token, introduction(options, folder, [], standby))
    link.epoch = options.epoch  # coordinators of earlier ones are over
    options, numbers = join(replace(options, address=standby.getsockname()[0]), link)
    metrics, page, begun = link.run["served"]
    has_own_folder |= link.run["trial"] is not None
    with (
        measured(options, folder, link.run["trial"]) as (options, folder),
        mirror(options.mirror) as variables,
        shared(replace(options, environment={**options.environment, **variables}), lambda: token) as options,
        Serving(metrics, page, trainjob_server(), partial(_say, options), Path(begun)) as serving,
        _held(folder, options.patience, notifier) if has_own_folder else _open(folder, notifier) as journal,
        Progress(kind=options.progress) as progress,
    ):
        if has_own_folder:
            keep_token(folder, token)  # this host may take over the coordinator later
        agent = Agent(options, folder, journal, progress, link, numbers, standby, serving)
        if options.on_listening is not None:
            options.on_listening(link.address)
        with signals() as wakeup:
            code = agent.run(wakeup)
        if not agent.rejoins:
            return code, None
        patience = max(given.patience, REJOIN)
        return code, replace(given, plan=None, patience=patience, epoch=agent.epoch + 1)


@contextmanager
def measured(options: LaunchOptions, folder: Path, trial: Any) -> Iterator[tuple[LaunchOptions, Path]]:
    """Yields the options of a host that joins, and its run folder. In a `trial` of a plan, its workers measure some
    steps, and nothing of them is kept.
    """
    if trial is None:
        yield options, folder
        return
    with tempfile.TemporaryDirectory(prefix="paceline-auto-") as temporary:
        environment = {**options.environment, "PACELINE_CHECK": json.dumps({"trial": trial})}
        yield replace(options, temporary=True, quiet=True, environment=environment), Path(temporary)


def run_folder(options: LaunchOptions) -> Path:
    """Returns the folder of a run; one without a name is made. LaunchError: that is not possible."""
    with making_folder():
        return Path(options.run_dir) if options.run_dir else _new_folder(options.module or Path(options.script).stem)


@contextmanager
def making_folder() -> Iterator[None]:
    """Turns errors of the system into one that names the run folder. LaunchError: it cannot be made."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:  # `launch` reports it
            raise
        raise LaunchError(f"the run folder cannot be created ({error})", "choose another --run-dir") from error


@contextmanager
def _held(folder: Path, patience: float, notifier: Notifier) -> Iterator[Journal]:
    """Locks a run folder and yields its journal. An earlier user of the folder has `patience` seconds to end."""
    with making_folder():
        lock = hold_lock(folder, min(patience, PATIENCE))
    try:
        with _open(folder, notifier) as journal:
            yield journal
    finally:
        os.close(lock)


@contextmanager
def _open(folder: Path, notifier: Notifier) -> Iterator[Journal]:
    with making_folder():
        journal = notifier.journal(folder)
    try:
        yield journal
    finally:
        journal.close()


def _check(options: LaunchOptions) -> None:
    """Checks the options before any worker starts. UsageError: an option cannot work."""
    if not Path(options.script).is_file():
        how = "is not a file" if Path(options.script).exists() else "does not exist"
        raise UsageError(f"the script {in_one_line(options.script)} {how}", "pass the path of a Python training script")
    if not (options.raw or options.join or options.again or options.temporary):
        refuse_foreign(Path(options.script), options.workers)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES
    if options.workers + options.spares > most:
        what = f"{options.workers:,} workers need more open files than the limit of this process"
        raise UsageError(what, f"use at most {plural(most, 'worker')} on this host, or raise `ulimit -n`")
    if options.min_workers > options.workers and options.listen is None and options.join is None:
        what = f"--min-workers {options.min_workers} is more than --workers {options.workers}"
        raise UsageError(what, f"use at most --min-workers {options.workers}")
    if options.spares:
        check_spares(options)
    if options.debug is not None and not 0 <= options.debug < options.workers:
        raise UsageError(f"--debug {options.debug} does not name a worker", f"use 0 to {options.workers - 1}")
    size = options.size or options.workers or options.spares
    if options.plan is not None:  # a host that joins has workers for one of the run's replicas, or for a part of it
        plan = Plan.parse(options.plan)
        plan = plan if options.join is not None else plan.validate(size)
        if plan.precision == "fp8":
            refuse_fp8()
    if options.max_time is not None:
        parse_time(options.max_time)
    if options.shares is not None:
        parse_shares(options.shares, size)
    if options.listen is not None:
        address_of(options.listen)
    starts_cold(), standstill()  # UsageError: these variables cannot be read
    for kind in (["tensorboard"] if options.tensorboard else []) + [one.kind for one in _loggers(options)]:
        check_installed(kind)
    check_serving(options.metrics, options.page)
    if options.join is not None and (options.metrics or options.page):
        what = "--join cannot be combined with --metrics or --page, which belong to the command that starts the run"
        raise UsageError(what, "pass --metrics and --page to that command")
    if options.store is not None:
        parse_store(options.store)
    if options.save_every is not None:
        parse_save_every(options.save_every)
    if options.verify_steps is not None:
        parse_verify_steps(options.verify_steps)
    if Path(options.run_dir or ".").is_file():
        raise UsageError(f"--run-dir {in_one_line(options.run_dir)} is a file", "name a folder, or leave --run-dir out")
    if not _is_utf8(options.run_dir or ""):
        what = f"--run-dir {options.run_dir!a} is not valid UTF-8, and checkpoints cannot be read from a path like this"
        raise UsageError(what, "choose another name")
    if is_url(options.run_dir or ""):
        what = f"--run-dir {in_one_line(options.run_dir)} is not a local folder, which logs and the journal need"
        raise UsageError(what, f"use --checkpoints {in_one_line(options.run_dir)} instead")
    if options.checkpoints is not None:
        storage_at(options.checkpoints)


def _loggers(options: LaunchOptions) -> list[LoggerName]:
    return [] if options.log_to is None else parse_loggers(options.log_to)


def _is_utf8(path: str) -> bool:
    """Whether a path is valid UTF-8, which some libraries need to open it."""
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
    """Yields a socket that receives the numbers of signals, which have no other effect: SIGINT, SIGTERM, SIGUSR1,
    SIGUSR2, SIGCHLD, and SIGHUP unless it is ignored, as under nohup. Outside of the main thread it receives nothing.
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
