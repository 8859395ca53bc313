"""Gives an unchanged script of `paceline run --raw` groups of the `paceline` backend.

A group becomes one of this backend if the script names no backend, or gloo. All other backends stay what they are: a
script that asks for NCCL by name gets NCCL.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from paceline.base.environment import raw_worker
from paceline.base.heartbeat import HEARTBEAT

NAME = "paceline"
_DEVICES = ("cpu", "cuda")  # the devices whose tensors the backend sends
_replaced: list[Any] = []  # torch's own function, once it is replaced
_joined: list[int] = []  # the process that has told its agent about its first group


def take_over_groups() -> None:
    """Replaces the function with which torch makes every group, in this process. Calling it again is harmless.

    It is the one below `init_process_group`, `new_group` and DeviceMesh, so it does not matter which of them a library
    has imported before, or calls.
    """
    from torch.distributed import distributed_c10d as c10d

    if _replaced:
        return
    make = c10d._new_process_group_helper
    _replaced.append(make)

    @wraps(make)
    def make_group(size: int, rank: int, ranks: list[int], backend: Any, *more: Any, **named: Any) -> Any:
        _join()
        return make(size, rank, ranks, c10d.Backend(choose_backend(str(backend))), *more, **named)

    c10d._new_process_group_helper = make_group  # type: ignore[assignment]


def choose_backend(asked: str) -> str:
    """The backend of a group whose script `asked` for another, as torch writes it: ``undefined``, a name, or names by
    device like ``cpu:gloo,cuda:nccl``.
    """
    if asked == "undefined":
        return NAME if _accelerator() in _DEVICES else asked
    devices = dict(part.rpartition(":")[::2] for part in asked.split(","))
    named_gloo = "gloo" in devices.values() and devices.get("cpu", "gloo") == "gloo"
    return NAME if named_gloo and devices.keys() <= {"", *_DEVICES} else asked


def _accelerator() -> str:
    """The kind of device for which torch would make a group if nobody names a backend."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _join() -> None:
    """Tells the agent that this worker's script uses torch.distributed.

    A process that the script started tells nothing: it may have the variables of the worker, but not its pipe.
    """
    if os.getpid() not in _joined and HEARTBEAT.process() == os.getpid():
        _joined.append(os.getpid())
        raw_worker().tell("join")
