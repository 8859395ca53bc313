"""Registers the `paceline` backend with torch.distributed.

Torch calls `register` at the end of its own import, by the entry point in pyproject.toml; so this stays cheap, and the
backend is imported with the first group. `import paceline` calls it too if torch is there already: the package may lie
on the path without being installed, or TORCH_DEVICE_BACKEND_AUTOLOAD may be 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.base.environment import is_raw

if TYPE_CHECKING:
    from paceline.comm.c10d_backend import ProcessGroup

_ready: list[ProcessGroup] = []  # the object that torch gets as its next group


def register() -> None:
    """Registers the backend with torch; under `paceline run --raw` scripts get it without naming it. Calling it again
    is harmless.
    """
    import torch.distributed as dist

    if dist.is_available() and "paceline" not in dist.Backend.backend_list:
        dist.Backend.register_backend("paceline", _make, devices=["cpu", "cuda"])
        # Torch 2.15 attaches its flight recorder to the groups of every backend that does not record by itself, which
        # fails for groups of a class derived from its own. Paceline has a flight recorder (base/flight_recorder.py).
        recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add("paceline")
    if dist.is_available() and is_raw():
        from paceline.comm.raw_groups import take_over_groups

        take_over_groups()


def lend(group: ProcessGroup, store: Any) -> None:
    """Makes a group known to torch, so that torch's own parts can use it.

    It is torch's default group only while it is `exposed`: the user's code must find the same torch.distributed under
    every plan.
    """
    import torch.distributed as dist

    register()
    _ready.append(group)
    dist.init_process_group("paceline", store=store, world_size=group.size(), rank=group.rank())
    dist.GroupMember.WORLD = None


@contextmanager
def exposed(group: ProcessGroup) -> Iterator[None]:
    """A context in which a lent group is torch's default group."""
    import torch.distributed as dist

    before, dist.GroupMember.WORLD = dist.GroupMember.WORLD, group
    try:
        yield
    finally:
        dist.GroupMember.WORLD = before


def take_back(group: ProcessGroup) -> None:
    """Makes torch forget a lent group, and no other."""
    import torch.distributed as dist

    with exposed(group):
        dist.destroy_process_group()


def _make(*details: Any) -> ProcessGroup:
    from paceline.comm.c10d_backend import ProcessGroup

    return _ready.pop() if _ready else ProcessGroup(*details)
