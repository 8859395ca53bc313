"""`paceline doctor` before a run: checks what this host has."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from paceline.base.environment import (
    address_towards,
    gloo_interface,
    gpus,
    host_name,
    memory_free,
    nodes_by_launcher,
    reached_at,
    read_nodes,
    read_world,
    slurm_job,
)
from paceline.base.network_interfaces import interface_addresses
from paceline.base.text import plural, size_of
from paceline.errors import PacelineError, UsageError
from paceline.launch.host_health import Gpus, counters
from paceline.launch.host_history import HostHistory

SHM = Path("/dev/shm")
LEAST_SHM = 1 << 30  # bytes below which a note is given
COPIED = 32 << 20  # bytes of the test copy
FILES = 1024  # open files below which a note is given: hundreds of workers and loaders need more
SIDE, PRODUCTS = 1024, 0.25  # rows of the matrices that are multiplied, and seconds of that
SLOW = 0.5  # seconds of a flush above which a note is given
TORCH = (2, 13)


@dataclass(frozen=True)
class Finding:
    """The result of one check. With a `cure` a run may fail, with a `note` it may be slow; otherwise all is well."""

    what: str
    cure: str = ""
    note: str = ""

    def __str__(self) -> str:
        mark = "BAD " if self.cure else "note" if self.note else "ok  "
        return f"{mark}  {self.what}" + (f": {self.cure or self.note}" if self.cure or self.note else "")


def checkup(folder: Path) -> Iterator[Finding]:
    """Checks this host for a run in this folder, in about a tenth of a second."""
    for look in (_versions, _cores, _memory, _room, _copy, _graphics, _address, _files):
        yield from look()
    yield from _disk(folder)
    yield from _errors()
    yield from _start()


def at_launch() -> Iterator[str]:
    """The warnings that are printed when a run begins, from the checks that take no time."""
    for finding in (*_room(), *_graphics()):
        if finding.cure or finding.note:
            yield f"{finding.what}: {finding.cure or finding.note}"


def refuse_fp8() -> None:
    """Raises UsageError if workers on this host cannot compute with `precision=fp8`, as far as is known without torch.

    GPUs of other makers than NVIDIA, and those of a Linux inside of Windows, are not counted.
    """
    if not gpus() and not any(Path("/dev", name).exists() for name in ("kfd", "dxg")):
        what = "precision=fp8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell)"
        raise UsageError(f"{what}, and this host has no GPU", "use precision=bf16")
    if find_spec("torchao") is None:
        raise UsageError("precision=fp8 needs torchao", "pip install 'paceline[fp8]'")


def versions() -> dict[str, str]:
    """The versions of Python, torch and Paceline, which must be the same on all hosts."""
    version_of = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "paceline"):
        try:
            version_of[name] = version(name)
        except PackageNotFoundError:
            version_of[name] = "missing"
    return version_of


def _versions() -> Iterator[Finding]:
    version_of = versions()
    text = ", ".join(f"{name} {number}" for name, number in version_of.items())
    torch_match = re.match(r"(\d+)\.(\d+)", version_of["torch"])
    fits = torch_match is not None and (int(torch_match[1]), int(torch_match[2])) >= TORCH
    yield Finding(text, "" if fits else "pip install 'torch>=2.13'")


def _cores() -> Iterator[Finding]:
    count, flags = len(os.sched_getaffinity(0)), ""
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
    kind = next((name for name, flag in (("AVX-512", "avx512f"), ("AVX2", "avx2")) if f" {flag}" in flags), "")
    with suppress(OSError, ValueError):  # the quota of a container
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max" and int(quota) < count * int(period):
            what = f"{plural(count, 'core')}, limited to {int(quota) / int(period):g} by a quota"
            yield Finding(what, note="start at most one worker per available core")
            return
    yield Finding(plural(count, "core") + (f" with {kind}" if kind else ""))


def _memory() -> Iterator[Finding]:
    yield Finding(f"{size_of(memory_free())} of free memory")


def _room() -> Iterator[Finding]:
    """Checks the space in shared memory, through which loader processes pass rows."""
    if not SHM.is_dir():
        yield Finding(f"{SHM} does not exist", "mount a tmpfs there: loader processes pass rows through it")
        return
    free = shutil.disk_usage(SHM).free
    what, cure = f"{size_of(free)} free in {SHM}", "use docker run --shm-size=8g, or a memory emptyDir in Kubernetes"
    if free < 2 * COPIED:
        yield Finding(what, cure)
    else:
        yield Finding(what, note="" if free >= LEAST_SHM else f"loader processes pass rows through it; {cure}")


def measure_copy() -> tuple[float, bool] | None:
    """Copies data through shared memory. Returns the bytes per second and whether the copy is correct; None without
    space for it.
    """
    if not SHM.is_dir() or shutil.disk_usage(SHM).free < 2 * COPIED:
        return None
    pattern = os.urandom(1 << 20) * (COPIED >> 20)
    with tempfile.TemporaryFile(dir=SHM) as file:
        file.truncate(COPIED)
        with mmap.mmap(file.fileno(), COPIED) as memory:
            memory[:] = pattern  # allocates the pages
            began = time.perf_counter()
            memory[:] = pattern
            took = time.perf_counter() - began
            same = hashlib.blake2b(memory).digest() == hashlib.blake2b(pattern).digest()
    return COPIED / took, same


def measure_products() -> float | None:
    """Multiplies matrices with numpy, which is imported sooner than torch. Returns the floating-point operations per
    second, of the best of several products; None without numpy.
    """
    try:
        import numpy as np
    except ImportError:
        return None
    matrix, best = np.ones((SIDE, SIDE), np.float32), math.inf
    end = time.perf_counter() + PRODUCTS
    while time.perf_counter() < end or best == math.inf:
        began = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - began)
    return 2 * SIDE**3 / best


def measure_flush(folder: Path) -> tuple[Path, float]:
    """Writes to the nearest folder that exists. Returns it, and the seconds of a flush. OSError: it cannot be
    written.
    """
    existing_folder = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=existing_folder) as file:
            file.write(b"\0" * (1 << 20))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            return existing_folder, time.perf_counter() - began
    except OSError as error:
        error.filename = str(existing_folder)
        raise


def figures(folder: Path) -> dict[str, float]:
    """Measures this host in less than a second: memory bandwidth (GB/s), matrix products (GFLOP/s), a flush in `folder`
    (ms) and the free space there (GB). What cannot be measured is left out.
    """
    measured: dict[str, float] = {}
    with suppress(OSError):
        if (copied := measure_copy()) is not None:
            measured["memory"] = copied[0] / 1e9
    if (rate := measure_products()) is not None:
        measured["products"] = rate / 1e9
    with suppress(OSError):
        existing_folder, seconds = measure_flush(folder)
        measured |= {"flush": 1000 * seconds, "free": shutil.disk_usage(existing_folder).free / 1e9}
    return measured


def _copy() -> Iterator[Finding]:
    copied = measure_copy()
    if copied is None:
        return
    rate, same = copied
    speed = f"{rate / 1e9:.1f} GB/s"
    yield Finding(
        f"a copy through shared memory is correct, {speed}" if same else "a copy through shared memory is corrupted",
        "" if same else "test the memory of this machine: no result computed on it can be trusted",
    )


def _graphics() -> Iterator[Finding]:
    count = gpus()
    if count and (torch := versions()["torch"]).endswith("+cpu"):
        yield Finding(f"{plural(count, 'GPU')}, but torch {torch} does not support CUDA", "install torch with CUDA")
    elif count:
        yield Finding(plural(count, "GPU"))


def own_address() -> str:
    """The address at which other hosts reach this one: the address of its default route, otherwise that of its first
    network interface, otherwise an empty text.
    """
    interfaces = (address for _, address in interface_addresses() if not address.startswith("127."))
    return _default_route_address() or next(interfaces, "")


def _default_route_address() -> str:
    """The address of this host's default route; an empty text without such a route."""
    with suppress(OSError):
        return address_towards("192.0.2.1")  # an address reserved for documentation
    return ""


def _address() -> Iterator[Finding]:
    name, address, chosen = socket.gethostname(), reached_at() or own_address(), gloo_interface()
    names = [interface for _, interface in socket.if_nameindex()]
    if chosen and not any(one.strip() in names for one in chosen.split(",")):
        yield Finding(f"GLOO_SOCKET_IFNAME={chosen} is not an interface", f"unset it, or use one of {', '.join(names)}")
    if not address:
        yield Finding(f"{name} has no network address", note="only workers on this host can connect to each other")
        return
    with socket.socket() as listener:
        listener.bind((address, 0))
    resolved = ""
    with suppress(OSError):
        resolved = socket.gethostbyname(name)
    loops = resolved.startswith("127.")
    more = f"{name} resolves to {resolved} here; Paceline uses the address, other tools may not" if loops else ""
    alone = "" if _default_route_address() else ", only in its own network: this host has no default route"
    yield Finding(f"other hosts reach {name} at {address}{alone}", note=more)


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        yield Finding(
            f"at most {soft} open files per process",
            note=f"run ulimit -n {min(hard, 65536)} for many workers and loaders",
        )


def _disk(folder: Path) -> Iterator[Finding]:
    """Whether a checkpoint can be written near `folder`, and how long a flush takes there."""
    try:
        existing_folder, took = measure_flush(folder)
    except OSError as error:
        what = f"{error.filename} cannot be written ({error.strerror})"
        yield Finding(what, "choose another --run-dir or --checkpoints")
        return
    free = size_of(shutil.disk_usage(existing_folder).free)
    what = f"{free} free in {existing_folder}, a flush takes {1000 * took:.0f} ms"
    yield Finding(what, note="writing checkpoints will be slow" if took > SLOW else "")


def _errors() -> Iterator[Finding]:
    """What the kernel and the driver have counted, and what this host remembers of earlier runs."""
    counted = [counter for counter in (*counters(), *Gpus().counters()) if counter.errors]
    for counter in counted:
        cure = "test this host before you use it" if counter.fatal else ""
        yield Finding(f"{counter.what}: {counter.errors} since this host started", cure, "watch whether there are more")
    if not counted:
        yield Finding("no errors of memory, disks or GPUs were counted since this host started")
    history = HostHistory()
    failures, lines = history.failures, [*history.lines()]
    if lines:
        more = "".join(f"\n      {line.strip()}" for line in lines[1:])
        where = f"remove {history.path} once the host is repaired{more}"
        yield Finding(f"{host_name()} remembers {lines[0]}", note=where if failures else more.strip() or where)


def _start() -> Iterator[Finding]:
    """Reports which launcher started this process, as `python train.py` and `paceline run --nodes auto` see it."""
    try:
        world = read_world()
        if world.launcher != "none":
            yield Finding(f"started by {world.launcher}: `python train.py` is worker {world.rank} of {world.size}")
        elif (job := slurm_job()) is not None:
            yield Finding(f"in Slurm job {job.number} on {job.nodes}: `paceline launch slurm train.py` uses its nodes")
        else:
            yield Finding("no launcher found: `python train.py` trains with one worker")
    except PacelineError as error:
        yield Finding(error.what, error.cure)
    if not nodes_by_launcher():
        return
    try:
        number, count, first, _ = read_nodes()
        of = f" of {count}" if count else ""  # otherwise the number may change
        yield Finding(f"node {number}{of} at {first}: start `paceline run --nodes auto train.py` on each node")
    except PacelineError as error:
        yield Finding(error.what, error.cure)
