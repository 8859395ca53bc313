"""What agents and their coordinators import, before torch is: `NAMES` tells it from what comes after.

In a warm process, too, which is forked several times for each run: its memory becomes huge pages before the first time.
A process then costs 8 ms instead of 22. That takes a second, which is much for one run and little for all tests.
"""

import ctypes
import os
import re
import sys
from pathlib import Path

import paceline.cli.main
import paceline.launch.chaos
import paceline.launch.check
import paceline.team.coordinator_server  # noqa: F401

HUGE, COLLAPSE = 1 << 21, 25  # MADV_COLLAPSE of linux/mman.h, from 6.1 on; before it, nothing happens
ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 ", re.MULTILINE)
_collapsed: list[bool] = []


def collapse() -> None:
    """Once in a process and all that are forked from it."""
    if _collapsed:
        return
    _collapsed.append(True)
    libc = ctypes.CDLL(None)
    for begin, end in ANONYMOUS.findall(Path("/proc/self/maps").read_text()):
        for place in range(-(-int(begin, 16) // HUGE) * HUGE, int(end, 16) // HUGE * HUGE, HUGE):
            libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(HUGE), COLLAPSE)


assert "torch" not in sys.modules
NAMES = {*sys.modules}
os.register_at_fork(before=collapse)
