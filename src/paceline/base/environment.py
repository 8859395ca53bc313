"""Reads environment variables: ranks, addresses, settings, as Paceline, torchrun, mpirun or Slurm's srun set them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline.base.console import shown
from paceline.errors import UsageError

PROGRESS = ("plain", "rich", "none")  # kinds of progress that a console can show
MOST = 999_999_999_999  # more of anything than anybody has
FUNCTION = "paceline.launch.function"  # the module that calls the function of `paceline.launch`
SERVERS = 1_000_000  # parameter servers are numbered from here on, beside the workers
# Of copies in memory: steps and folder; where they are served to other hosts.
MIRROR, MIRROR_AT = "PACELINE_MIRROR", "PACELINE_MIRROR_AT"
WAY, REFUSED = b"+", b"-"  # what a tunnel says of a way that was asked for
ASKING = 20.0  # seconds that it may take


@dataclass(frozen=True)
class World:
    """One worker's place, and what its launcher told it.

    `rank` counts workers from 0, `local_rank` those of this host. `launcher` is who started us: ``paceline``,
    ``torchrun``, ``mpirun``, ``srun`` or ``none``. `store` is the address of the rendezvous store (none in a
    world of one); where `store_fd` is set, this worker serves the store on that inherited listening socket. `job` tells
    this start of workers from others that may come to the same store. `join_timeout` is in seconds.
    `events_fd` is a pipe to the agent, one JSON object a line. `shares` are the workers' weights in dealing
    micro-batches. `commands_fd` is a socket on which the agent tells of new generations of the team; a `newcomer` waits
    for one that it belongs to; workers that are too few `hold` after their first step. `members` are the workers of its
    generation by rank, where one has formed. `chaos` are faults on purpose. `save_every` is seconds (``60s``), steps
    (``100``) or ``auto``; of the `checkpoints`, at a place other than the run folder if one is given, the newest `keep`
    stay; a `mirror` is a folder in memory for a copy of a lone replica's state, every so many steps, which is served to
    other hosts at `mirror_at` (host, port, and the salt of its key); `max_steps` ends the run early; `tensorboard`: its
    figures go to TensorBoard's files, too; `log_to`: loggers for them; `progress`: how it is shown; `heal`: workers
    whose weights differ take those of a majority; `verify_steps`: one step of so many is computed twice and compared
    (0: none); `spares`: how many workers wait to take the place of a lost one, in a run on one host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    store: tuple[str, int] | None = None
    store_fd: int | None = None
    store_is_ours: bool = True
    job: str = ""
    join_timeout: int = 300
    run_dir: str | None = None
    plan: str | None = None
    events_fd: int | None = None
    shares: tuple[float, ...] | None = None
    save_every: str = "60s"
    keep: int = 2
    checkpoints: str | None = None
    mirror: tuple[int, str] | None = None
    mirror_at: tuple[str, int, str] | None = None
    max_steps: int | None = None
    check: str | None = None
    commands_fd: int | None = None
    newcomer: bool = False
    hold: bool = False
    chaos: str = ""
    tensorboard: bool = False
    log_to: str | None = None
    progress: str | None = None
    heal: bool = False
    verify_steps: int = 0
    spares: int = 0
    members: tuple[int, ...] = ()

    @property
    def serves(self) -> bool:
        """Whether this process is a parameter server, and no worker."""
        return self.rank >= SERVERS

    @property
    def plan_origin(self) -> str:
        """Where the text of the plan was given: an option, or a variable of the environment."""
        return "--plan" if self.launcher == "paceline" else "PACELINE_PLAN"

    @property
    def host(self) -> str:
        """The name of this machine."""
        return socket.gethostname()

    def tell(self, event: str, **fields: Any) -> None:
        """Tells the agent, if there is one: one JSON line on its pipe. Silent when the agent is gone."""
        if self.events_fd is None:
            return
        with contextlib.suppress(OSError):  # the agent is gone: so are we, in a moment
            os.write(self.events_fd, json.dumps({"event": event, **fields}).encode() + b"\n")


def parse_whole(name: str, text: str, least: int = 0) -> int:
    """The whole number that an option or variable was given, `name` with what stands behind it: ``--steps `` or
    ``PACELINE_KEEP=``. UsageError: it is not from `least` to `MOST`, or not in plain digits (int() takes all scripts').
    """
    if not re.fullmatch("[0-9]{1,12}", text) or int(text) < least:
        raise UsageError(f"{name}{shown(text)} is not a whole number from {least} to {MOST:,}", "write it in digits")
    return int(text)


def _number(env: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    text = env.get(name, "")
    return parse_whole(f"{name}=", text, least) if text else default


def _flag(env: Mapping[str, str], name: str) -> bool:
    """Whether a variable that is 0 or 1 is 1. UsageError: it is neither."""
    text = env.get(name, "")
    if text not in ("", "0", "1"):
        raise UsageError(f"{name}={shown(text)} must be 0 or 1", "set it to 0 or 1, or unset it")
    return text == "1"


# Variables by which OpenMP and MKL are told how many threads to make: a list has one number a nested level.
_ONE = r"\s*\+?0*([1-9][0-9]*)\s*"
THREADS = {"OMP_NUM_THREADS": rf"{_ONE}(?:,\s*[0-9]+\s*)*", "MKL_NUM_THREADS": _ONE}


def threads_asked(env: Mapping[str, str] = os.environ) -> dict[str, int | None]:
    """Returns the number of threads that each variable of `THREADS` asks for, if it is set.

    None stands for a value that is not a number, which OpenMP and MKL ignore.
    """
    matches = {name: re.fullmatch(form, env[name], re.ASCII) for name, form in THREADS.items() if name in env}
    return {name: int(match[1]) if match else None for name, match in matches.items()}


def doubt_threads(used: int, env: Mapping[str, str] = os.environ) -> list[str]:
    """Returns warnings about the numbers of threads that the environment asks for; torch uses `used` threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    warnings = []
    for name, number in threads_asked(env).items():
        what = f"{name}={shown(env[name])}"
        if number is None:
            warnings.append(f"{what} is not a number of threads, so torch uses {used}; write it in digits, or unset it")
        elif number > cores and used > cores:
            warnings.append(f"{what} is more threads than the {cores} cores of this process; unset it")
    return warnings


def _first(env: Mapping[str, str], *names: str, default: int) -> int:
    for name in names:
        if env.get(name):
            return _number(env, name, default)
    return default


def _derived(env: Mapping[str, str], launcher: str) -> tuple[str, str]:
    """Returns worker 0's host and a number of this start, or "" for what the launcher's own variables do not have."""
    if launcher == "mpirun":
        is_one_host = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == env.get("OMPI_COMM_WORLD_SIZE")
        return "127.0.0.1" if is_one_host else "", env.get("PMIX_NAMESPACE", "")
    if launcher == "srun":
        is_one_host = env.get("SLURM_STEP_NUM_NODES") == "1"
        host = "127.0.0.1" if is_one_host else _first_host(env.get("SLURM_STEP_NODELIST", ""))
        return host, ".".join(filter(None, (env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID"))))
    return "", ""


def _first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: ``gpu07`` of ``gpu[07-09,12],login1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _address(env: Mapping[str, str], launcher: str, rank: int) -> tuple[tuple[str, int], str]:
    """Where the store is, and what tells our keys in it from others'.

    A port that follows from the number of the start lies below those that systems hand out by themselves. Two starts
    may still get the same one, on the same host at the same time once in 20,000 pairs: the second one's worker 0 then
    says so, and its others, which came to the store of the first, disturb nobody there and give up waiting.
    """
    if env.get("PACELINE_STORE"):
        host, _, port = env["PACELINE_STORE"].rpartition(":")
        return (host, parse_whole(f"PACELINE_STORE={shown(host)}:", port)), ""
    host, number = _derived(env, launcher)
    host = env.get("MASTER_ADDR") or host
    if host and env.get("MASTER_PORT"):
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "") if launcher == "torchrun" else ""
        return (host, _number(env, "MASTER_PORT", 0)), attempt
    if host and number:
        return (host, 10_000 + zlib.crc32(number.encode()) % 20_000), number
    raise UsageError(
        f"worker {rank} was started by {launcher} without MASTER_ADDR and MASTER_PORT",
        "export both on every worker: the address of worker 0's host and a free port there",
    )


def _tasks_here(env: Mapping[str, str]) -> int:
    """How many tasks Slurm's step has on this node: one of ``2(x3),1``, in the order of its nodes. 0 if unknown."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(tasks)] * int(times or 1)
    node = _number(env, "SLURM_NODEID", 0)
    return counts[node] if 0 <= node < len(counts) else 0


def read_world(env: Mapping[str, str] = os.environ) -> World:
    """The world as the environment tells it: ours first, then torchrun's, Open MPI's and Slurm's; else alone."""
    if env.get("PACELINE_WORLD_SIZE"):
        launcher, names = (
            "paceline",
            ("PACELINE_RANK", "PACELINE_WORLD_SIZE", "PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE"),
        )
    elif env.get("RANK") and env.get("WORLD_SIZE"):
        launcher, names = "torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif env.get("OMPI_COMM_WORLD_SIZE"):
        launcher = "mpirun"
        names = tuple(f"OMPI_COMM_WORLD_{end}" for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))  # type: ignore[assignment]
    elif env.get("SLURM_PROCID") and env.get("SLURM_STEP_NUM_TASKS"):  # a batch script's own process is no task
        launcher, names = "srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
    else:
        launcher, names = "none", ("", "", "", "")
    rank = _first(env, names[0], default=0)
    size = _first(env, names[1], default=1)
    newcomer = bool(env.get("PACELINE_NEWCOMER"))
    if rank >= size and not newcomer:
        raise UsageError(f"{names[0]}={rank} must be less than {names[1]}={size}", "number the workers from 0")
    local_rank = _first(env, names[2], default=rank)
    local_size = _tasks_here(env) if launcher == "srun" else 0
    store, job = _address(env, launcher, rank) if size > 1 or newcomer else (None, "")
    fds = {name: _number(env, f"PACELINE_{name}_FD", -1) for name in ("STORE", "EVENTS", "COMMANDS")}
    store_fd, events, commands = (fd if fd >= 0 else None for fd in fds.values())
    shares = env.get("PACELINE_SHARES")
    every, _, mirror = env.get(MIRROR, "").partition(":")
    mirror_host, mirror_port, salt = (*env.get(MIRROR_AT, "").rsplit(":", 2), "", "")[:3]
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size or _first(env, names[3], default=size),
        launcher=launcher,
        store=store,
        store_fd=store_fd,
        store_is_ours=env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true",
        job=job,
        join_timeout=_number(env, "PACELINE_JOIN_TIMEOUT", 300, least=1),
        run_dir=env.get("PACELINE_RUN_DIR") or None,
        plan=env.get("PACELINE_PLAN") or None,
        events_fd=events,
        shares=parse_shares(shares, size) if shares else None,
        save_every=env.get("PACELINE_SAVE_EVERY") or "60s",
        keep=_number(env, "PACELINE_KEEP", 2, least=1),
        checkpoints=env.get("PACELINE_CHECKPOINTS") or None,
        mirror=(parse_whole(f"{MIRROR}=", every, 1), mirror) if mirror else None,
        mirror_at=(mirror_host, parse_whole(f"{MIRROR_AT}=", mirror_port), salt) if salt else None,
        max_steps=_number(env, "PACELINE_MAX_STEPS", 0, least=1) or None,
        check=env.get("PACELINE_CHECK") or None,
        commands_fd=commands,
        newcomer=newcomer,
        hold=bool(env.get("PACELINE_HOLD")),
        chaos=env.get("PACELINE_CHAOS", ""),
        tensorboard=_flag(env, "PACELINE_TENSORBOARD"),
        log_to=env.get("PACELINE_LOG_TO") or None,
        progress=_progress(env),
        heal=_flag(env, "PACELINE_HEAL"),
        spares=_first(env, "PACELINE_SPARES", default=0),
        verify_steps=parse_verify_steps(env["PACELINE_VERIFY_STEPS"]) if env.get("PACELINE_VERIFY_STEPS") else 0,
    )


def _progress(env: Mapping[str, str]) -> str | None:
    kind = env.get("PACELINE_PROGRESS") or None
    if kind not in (None, *PROGRESS):
        raise UsageError(f"PACELINE_PROGRESS={shown(kind)} is not a kind of progress", "use plain, rich or none")
    return kind


def parse_shares(text: str, size: int) -> tuple[float, ...]:
    """``3,1`` for two workers: the first computes three micro-batches for each one of the second."""
    try:
        shares = tuple(float(part) for part in text.encode("ascii").split(b","))  # no digits of other scripts
    except ValueError:
        raise UsageError(f"shares {text!r} are not numbers", "give one number per worker, for example 3,1") from None
    if len(shares) != size or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise UsageError(
            f"shares {text!r} do not fit {size} workers",
            "give one number per worker; none may be negative, and not all may be zero",
        )
    return shares


def parse_save_every(text: str) -> tuple[float | None, int | None]:
    """``60s`` is (60.0, None), ``100`` is (None, 100): seconds or steps between checkpoints; ``auto`` is neither."""
    if text == "auto":
        return None, None
    try:
        digits = text.encode("ascii")
        seconds, steps = (float(digits[:-1]), None) if text.endswith("s") else (None, int(digits))
    except ValueError:
        seconds, steps = None, 0
    if (steps is None and not 0 <= (seconds or 0) < float("inf")) or (steps is not None and steps < 1):
        match = re.fullmatch("([0-9]{1,6}) ?(m|min|h)", text)
        cure = (
            f"use {int(match[1]) * (3600 if match[2] == 'h' else 60)}s"
            if match
            else "give seconds as 60s, steps as 100, or auto"
        )
        raise UsageError(f"--save-every {text!r} is not an interval", cure)
    return seconds, steps


def parse_verify_steps(text: str) -> int:
    """``1%`` is 100 and ``100`` is 100: one step of so many is verified."""
    percent = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", text)
    share = float(percent[1]) if percent else 0.0
    if 0.0 < share <= 100.0:
        return max(1, round(100.0 / share))
    if not re.fullmatch("[0-9]{1,12}", text) or int(text) < 1:
        what = f"--verify-steps {shown(text)} is not a part of the steps"
        raise UsageError(what, "give a percentage as 1%, or N to verify one step of each N")
    return int(text)


def job_ends_at(env: Mapping[str, str] = os.environ) -> float | None:
    """Returns when the Slurm job of this process ends, in seconds since 1970; None if that is not known."""
    text = env.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdecimal() and int(text) > 0 else None


def worker_environment(base: Mapping[str, str] | None = None, **values: str | None) -> dict[str, str]:
    """An environment for a child: `base` (ours unless given) with `values` set, and those that are None unset."""
    env = dict(os.environ if base is None else base)
    for name, value in values.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def assume(environment: Mapping[str, str]) -> None:
    """Takes this environment as if it had been there from the beginning, also for compiled code."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def began(env: Mapping[str, str] = os.environ) -> float | None:
    """Unix seconds of when our agent began to start us."""
    text = env.get("PACELINE_BEGAN", "")
    return float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]*)?", text) else None


def pulse_descriptor(env: Mapping[str, str] = os.environ) -> int | None:
    """What we share with our agent, see `paceline.base.heartbeat`."""
    text = env.get("PACELINE_PULSE_FD", "")
    return int(text) if text.isdecimal() else None


def agent_pid(env: Mapping[str, str] = os.environ) -> int | None:
    """The process id of the agent that started a worker with this environment; None where no agent did."""
    text = env.get("PACELINE_AGENT", "")
    return int(text) if text.isdecimal() else None


def is_raw(env: Mapping[str, str] = os.environ) -> bool:
    """Whether `paceline run --raw` started this process: its script trains by itself, over torch.distributed."""
    return _flag(env, "PACELINE_RAW")


def raw_worker(env: Mapping[str, str] = os.environ) -> World:
    """The World of a worker of `paceline run --raw`, which has no team: its place, and the pipe to its agent."""
    return World(
        rank=_number(env, "RANK", 0),
        size=_number(env, "WORLD_SIZE", 1, least=1),
        launcher="paceline",
        events_fd=_number(env, "PACELINE_EVENTS_FD", -1),
    )


def standstill(env: Mapping[str, str] = os.environ) -> float:
    """Seconds that a worker may do nothing before its agent says so."""
    return float(_number(env, "PACELINE_STANDSTILL", 30, least=1))


def starts_cold(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the user wants every worker started from nothing."""
    return _flag(env, "PACELINE_COLD_START")


def inherited_warm(env: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The number and the socket of a child process that was forked from a warm one before we began, if there is one.
    It is told once.
    """
    pid, _, descriptor = env.get("PACELINE_WARM", "").partition(":")
    os.environ.pop("PACELINE_WARM", None)
    return (int(pid), int(descriptor)) if pid.isdecimal() and descriptor.isdecimal() else None


def gpus(env: Mapping[str, str] = os.environ) -> int:
    """NVIDIA's GPUs here that workers may use, counted without torch."""
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([number for number in chosen.split(",") if number.strip() not in ("", "-1", "NoDevFiles")])
    return sum(1 for name in os.listdir("/dev") if re.fullmatch("nvidia[0-9]+", name))


def address_towards(host: str, port: int = 9, family: int = socket.AF_INET) -> str:
    """Of ours, from which another host is reached; nothing is sent. OSError: there is no way to it."""
    if inside := tunnel():
        return inside[0]
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def tunnel(env: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Returns (this host's address, path of the agent's socket that `way_to` asks) where hosts are connected by ssh
    only; else None.
    """
    local_address, _, agent_socket = env.get("PACELINE_TUNNEL", "").partition("=")
    return (local_address, agent_socket) if local_address else None


def enter_tunnel(local_address: str, agent_socket: str) -> None:
    """Makes this process, and all that it starts from now on, reach other hosts through the tunnel."""
    os.environ["PACELINE_TUNNEL"] = f"{local_address}={agent_socket}"


def way_to(host: str, port: int, later: bool = False) -> tuple[str, int]:
    """The address itself, once one may connect to it, which takes nothing but in a tunnel: its agent is asked for a way
    to what listens there, or will do so `later`. OSError: nothing does.
    """
    inside = tunnel()
    if inside is None or host == inside[0] or host.rpartition(".")[0] != inside[0].rpartition(".")[0]:
        return host, port
    with socket.socket(socket.AF_UNIX) as asks:
        asks.settimeout(ASKING)
        asks.connect(inside[1])
        asks.sendall(f"{host} {port}{' later' * later}\n".encode())
        if asks.recv(1) != WAY:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return host, port


def reached_at(env: Mapping[str, str] = os.environ) -> str:
    """The address of ours at which ssh reached us, if it did."""
    words = env.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 and ":" not in words[2] else ""


@dataclass(frozen=True)
class SlurmJob:
    """An allocation: its number and nodes, how often it was requeued, and whether a batch script runs in it."""

    number: str
    nodes: str
    restarts: int
    batch: bool


def slurm_job(env: Mapping[str, str] = os.environ) -> SlurmJob | None:
    """The allocation of Slurm's in which we are, if any."""
    number, nodes = env.get("SLURM_JOB_ID"), env.get("SLURM_JOB_NODELIST")
    if not number or not nodes:
        return None
    batch = env.get("ENVIRONMENT") == "BATCH"
    return SlurmJob(number, nodes, _number(env, "SLURM_RESTART_COUNT", 0), batch)


# What tells a node that starts by itself its number, how many there are (nothing: that may change), the first one's
# address (of several: the first), its GPUs, and where it is the first one the address that is its own.
NODES = {
    "SkyPilot": ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE", ""),
    "dstack": ("DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP", "DSTACK_GPUS_PER_NODE", ""),
    "Kubeflow": ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_NPROC_PER_NODE", ""),
    "Kubernetes": ("JOB_COMPLETION_INDEX", "", "PACELINE_FIRST", "", "PACELINE_ADDRESS"),
}


def nodes_by_launcher(env: Mapping[str, str] = os.environ) -> dict[str, tuple[int, int, str, int]]:
    """What the variables of each launcher say that are set: this node's number, the number of nodes (0: it may change),
    the first node's address, and this node's number of GPUs (0: unknown).
    """
    nodes = {}
    for name, (rank, count, first, gpu_count, own_address) in NODES.items():
        # Kubernetes numbers pods for everybody's purposes: it counts where our manifest, or one like it, says more.
        if env.get(rank) and (count or env.get(first)):
            number, gpus = _number(env, rank, 0), env.get(gpu_count, "")
            is_own = own_address and not number
            address = env.get(own_address, "") if is_own else [*env.get(first, "").split(), ""][0]
            many = _number(env, count, 1, 1) if count else 0
            nodes[name] = (number, many, address, int(gpus) if gpus.isdecimal() else 0)
    return nodes


def read_nodes(env: Mapping[str, str] = os.environ) -> tuple[int, int, str, int]:
    """This node's entry of `nodes_by_launcher`.

    Raises UsageError if no variables of a known launcher are set, or those of two disagree.
    """
    nodes = nodes_by_launcher(env)
    if not nodes:
        what = f"--nodes auto finds no variables of {', '.join(NODES)}"
        raise UsageError(what, "say --listen on the first node and --join on the others")
    if len(set(nodes.values())) > 1:
        raise UsageError(
            f"the variables of {' and '.join(nodes)} contradict each other",
            "unset the variables that another launcher left",
        )
    return next(iter(nodes.values()))


def read_call(env: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Where the function is that a worker is to call, and where its value goes."""
    function, _, value = env["PACELINE_CALL"].partition(":")
    return function, value


def trainjob_server(env: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Where Kubeflow Trainer wants to know how far we are, if it does: a URL, and files of its CA and our token."""
    name = "KUBEFLOW_TRAINER_SERVER_"
    if not env.get(f"{name}URL"):
        return None
    return {
        "url": env[f"{name}URL"],
        "certificate": env.get(f"{name}CA_CERT", ""),
        "token": env.get(f"{name}TOKEN", ""),
    }


def take_token(env: Mapping[str, str] = os.environ) -> bytes | None:
    """The run's token, where the environment has it: nobody after us finds it there."""
    token = env.get("PACELINE_TOKEN")
    os.environ.pop("PACELINE_TOKEN", None)
    return token.encode() if token else None


def variable(name: str) -> str | None:
    """What a user wants to be handed on."""
    return os.environ.get(name)


def gloo_interface() -> str:
    """The interface that the user chose for gloo, if any."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def offer_nccl_interface(name: str) -> None:
    """Tells NCCL the interface that routes to the peers, unless the user did."""
    if name and not os.environ.get("NCCL_SOCKET_IFNAME"):
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"


def host_name(env: Mapping[str, str] = os.environ) -> str:
    """Returns the name under which the failures of this host are counted. Pods are named after other things than their
    host, so launchers set a variable.
    """
    return env.get("PACELINE_HOST") or socket.gethostname()


def outside_of_slurm() -> list[str]:
    """Returns the variables that Slurm's commands must not see to ask for another job, and not for a step of ours."""
    return [name for name in os.environ if name.startswith("SLURM_") and name not in ("SLURM_CONF", "SLURM_JWT")]


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder for files of this user that may be removed at any time."""
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


@cache
def processor() -> str:
    """Names the processor of this machine."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_groups(process: int | str = "self") -> list[Path]:
    """Returns the folders that may describe the memory cgroup (version 1 or 2) of a process.

    These are its own folder and the mount itself, since a container sees only its own part of the hierarchy.
    """
    folders = []
    for line in Path(f"/proc/{process}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            mount = Path("/sys/fs/cgroup", "memory" if controllers else "")
            folders += [mount / path.lstrip("/"), mount]
    return folders


def memory_free() -> float:
    """Returns the bytes that are free in this host and in this process's memory cgroups; infinite if unknown."""
    free = [math.inf]
    with contextlib.suppress(OSError):
        free += [1024.0 * int(n) for n in re.findall(r"^MemAvailable: +(\d+)", Path("/proc/meminfo").read_text(), re.M)]
        for folder in {above for group in memory_groups() for above in (group, *group.parents)}:
            for limit, usage in (("limit_in_bytes", "usage_in_bytes"), ("max", "current")):
                with contextlib.suppress(OSError, ValueError):  # "max"
                    room, used = (int((folder / f"memory.{name}").read_text()) for name in (limit, usage))
                    cached = re.findall(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.M)
                    free.append(room - used + int(cached[-1]))
    return min(free)
