"""Sets threads, cores and memory allocator of the workers."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.base.console import shown
from paceline.base.environment import threads_asked
from paceline.base.text import plural

KEEP = str(1 << 36)  # bytes: more than any tensor, so that freed memory is reused instead of returned to the kernel
_GLIBC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
HUGE = "THP_MEM_ALLOC_ENABLE"  # torch's own: tensors of 2 MB and more lie in huge pages
# The size from which a copy bypasses the cache. The default of glibc depends on a cache that virtual machines share.
PAST = "glibc.cpu.x86_non_temporal_threshold=0x400000"
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def worker_settings(
    workers: int, given: Mapping[str, str], cores: Sequence[int]
) -> tuple[dict[str, str], list[list[int]], list[tuple[str, str]]]:
    """Returns the variables for all workers, the cores of each (empty: all), and (choice, reason) pairs for the log.

    Variables that the user's environment `given` already sets are kept.
    """
    variables: dict[str, str] = {}
    done: list[tuple[str, str]] = []
    memory: list[str] = []
    each = max(1, len(cores) // workers)
    asked = threads_asked(given)
    variables |= {name: str(each) for name, number in asked.items() if number is None}
    if "OMP_NUM_THREADS" not in given:
        variables["OMP_NUM_THREADS"] = str(each)
        reason = f"{plural(len(cores), 'core')} shared by {plural(workers, 'worker')}"
        done.append((f"{each} thread{'s' * (each > 1)} each", reason))
    pins: list[list[int]] = [[] for _ in range(workers)]
    if 1 < workers <= len(cores):
        pins = [list(cores[rank * each : (rank + 1) * each]) for rank in range(workers)]
        done.append((f"pinned to {each} core{'s' * (each > 1)} each", "a worker that changes cores loses its cache"))
    if platform.libc_ver()[0] == "glibc" and not any(name in given for name in (*_GLIBC, "GLIBC_TUNABLES")):
        variables |= dict.fromkeys(_GLIBC, KEEP)
        variables["GLIBC_TUNABLES"] = PAST
        memory.append("freed memory is kept for reuse, because each step would otherwise fault the same pages in again")
        memory.append("large copies bypass the cache, because they would otherwise read the memory that they overwrite")
    if HUGE not in given and _PAGES.exists() and "[never]" not in _PAGES.read_text():
        variables[HUGE] = "1"
        memory.append("large tensors use huge pages, because each 4 kB of them would otherwise be a page fault")
    if "PYTHONHASHSEED" not in given:  # sets of strings get the same order on all workers, for models that use them
        variables["PYTHONHASHSEED"] = "0"
    if memory:
        done.append(("memory tuned", "; ".join(memory)))
    return variables, pins, done


def thread_warnings(workers: int, given: Mapping[str, str], cores: Sequence[int]) -> list[str]:
    """Warnings about numbers of threads in the user's environment that are probably a mistake."""
    each, texts = max(1, len(cores) // workers), list[str]()
    for name, number in threads_asked(given).items():
        what = f"{name}={shown(given[name])}"
        if number is None:
            texts.append(f"{what} is not a number of threads; each worker uses {each} instead")
        elif number > each:
            whose = f"{plural(workers, 'worker')} on {plural(len(cores), 'core')}"
            texts.append(f"{what} is more threads than cores, for {whose}; unset it to use {each}, which is faster")
    return texts


def pin(pid: int, cores: Sequence[int]) -> None:
    """Binds a process that has just started, and its future children, to cores."""
    if cores:
        os.sched_setaffinity(pid, cores)


def pin_threads(pid: int, cores: Sequence[int]) -> None:
    """Binds all threads of a running process to cores."""
    if cores:
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):
                    os.sched_setaffinity(int(thread), cores)
