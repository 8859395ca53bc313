"""Sets threads, cores and memory allocator of the workers."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.base.console import shown
from paceline.base.environment import threads_asked
from paceline.base.text import plural

KEEP = str(1 << 36)  # bytes: more than any tensor, so that freed memory is used again instead of being given back
_GLIBC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
HUGE = "THP_MEM_ALLOC_ENABLE"  # torch's own: tensors of 2 MB and more lie in huge pages
# From where on a copy writes past the cache. glibc takes it from a cache that a virtual machine shares with others.
PAST = "glibc.cpu.x86_non_temporal_threshold=0x400000"
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def surround(
    workers: int, given: Mapping[str, str], cores: Sequence[int]
) -> tuple[dict[str, str], list[list[int]], list[tuple[str, str]]]:
    """Variables for every worker, each one's cores (none: it may use all), and what was done, with the reason.

    What is set in `given` already, which is the user's environment, stays.
    """
    variables: dict[str, str] = {}
    done: list[tuple[str, str]] = []
    memory: list[str] = []
    each = max(1, len(cores) // workers)
    asked = threads_asked(given)
    variables |= {name: str(each) for name, number in asked.items() if number is None}
    if "OMP_NUM_THREADS" not in given:
        variables["OMP_NUM_THREADS"] = str(each)
        done.append((f"{each} thread{'s' * (each > 1)} each", f"{len(cores)} cores shared by {workers}"))
    pins: list[list[int]] = [[] for _ in range(workers)]
    if 1 < workers <= len(cores):
        pins = [list(cores[rank * each : (rank + 1) * each]) for rank in range(workers)]
        done.append((f"pinned to {each} core{'s' * (each > 1)} each", "a worker that moves leaves its cache behind"))
    if platform.libc_ver()[0] == "glibc" and not any(name in given for name in (*_GLIBC, "GLIBC_TUNABLES")):
        variables |= dict.fromkeys(_GLIBC, KEEP)
        variables["GLIBC_TUNABLES"] = PAST
        memory.append("freed memory is kept for reuse, or each step would fault the same pages in again")
        memory.append("large copies write past the cache, or they would first read what they overwrite")
    if HUGE not in given and _PAGES.exists() and "[never]" not in _PAGES.read_text():
        variables[HUGE] = "1"
        memory.append("large tensors lie in huge pages, or each 4 kB of them would be a page fault")
    if "PYTHONHASHSEED" not in given:  # sets of text come in one order on all workers, as a model may register them
        variables["PYTHONHASHSEED"] = "0"
    if memory:
        done.append(("memory tuned", "; ".join(memory)))
    return variables, pins, done


def doubts(workers: int, given: Mapping[str, str], cores: Sequence[int]) -> list[str]:
    """Warnings about numbers of threads in the user's environment that are probably a mistake."""
    each, texts = max(1, len(cores) // workers), list[str]()
    for name, number in threads_asked(given).items():
        what = f"{name}={shown(given[name])}"
        if number is None:
            texts.append(f"{what} is no number of threads: each worker has {each} instead")
        elif number > each:
            whose = f"{plural(workers, 'worker')} on {plural(len(cores), 'core')}"
            texts.append(f"{what} is more threads than cores, for {whose}: {each} would be faster; unset it for that")
    return texts


def pin(pid: int, cores: Sequence[int]) -> None:
    """Binds a process that has just started, and all that it starts, to cores."""
    if cores:
        os.sched_setaffinity(pid, cores)
