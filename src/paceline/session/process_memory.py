"""Measures the memory of this process: at present, at its peak, and what it may still take."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch

from paceline.base.environment import memory_free
from paceline.base.memory import machine_memory


def peak_memory(device: torch.device) -> int:
    """Returns the largest number of bytes that this process has used: on the device, or on a CPU in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (10 if sys.platform.startswith("linux") else 0)


def memory_now(device: torch.device) -> int:
    """Returns the bytes that this process uses at present: on the device, or on a CPU in all."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if not sys.platform.startswith("linux"):
        return peak_memory(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def room_of_worker(device: torch.device, peers: int) -> float:
    """Returns the bytes that this process may take, if its host's `peers` workers share what is free."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return memory_now(device) + min(memory_free(), machine_memory()) / peers


def private_memory() -> int:
    """Returns the bytes of main memory that belong to this process alone."""
    if not sys.platform.startswith("linux"):
        return 0
    match = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0
