"""Paceline trains one PyTorch model on whatever machines there are.

The names below are the public ones. They are imported when first used, so that the launcher, which needs no
torch, starts at once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.base.heartbeat import HEARTBEAT

if TYPE_CHECKING:
    import paceline.data as data
    import paceline.hf as hf
    import paceline.keras as keras
    import paceline.lightning as lightning
    import paceline.optim as optim
    from paceline.base.batching import stream_seed as stream_seed
    from paceline.base.script_config import config as config
    from paceline.checkpoint.export import load as load
    from paceline.compute.buffers import buffer as buffer
    from paceline.compute.lr_schedules import cosine as cosine
    from paceline.compute.lr_schedules import linear as linear
    from paceline.compute.lr_schedules import plateau as plateau
    from paceline.compute.lr_schedules import wsd as wsd
    from paceline.data.order import sample_index as sample_index
    from paceline.errors import PacelineError as PacelineError
    from paceline.launch.function import launch as launch
    from paceline.observe.media import Histogram as Histogram
    from paceline.observe.media import Image as Image
    from paceline.observe.trackers.tensorboard_files import TensorBoard as TensorBoard
    from paceline.plan import Plan as Plan
    from paceline.team.team import Team as Team
    from paceline.team.team import join as join
    from paceline.train.step import StepReport as StepReport
    from paceline.trainer import Trainer as Trainer

__version__ = "0.2.0"

_HOMES = {
    "Trainer": "paceline.trainer",
    "StepReport": "paceline.train.step",
    "Team": "paceline.team.team",
    "buffer": "paceline.compute.buffers",
    "config": "paceline.base.script_config",
    "join": "paceline.team.team",
    "load": "paceline.checkpoint.export",
    "Plan": "paceline.plan",
    "TensorBoard": "paceline.observe.trackers.tensorboard_files",
    "Histogram": "paceline.observe.media",
    "Image": "paceline.observe.media",
    "PacelineError": "paceline.errors",
    "sample_index": "paceline.data.order",
    "stream_seed": "paceline.base.batching",
    "cosine": "paceline.compute.lr_schedules",
    "linear": "paceline.compute.lr_schedules",
    "plateau": "paceline.compute.lr_schedules",
    "wsd": "paceline.compute.lr_schedules",
}

__all__ = [  # noqa: PLE0604 (they are strings)
    *_HOMES,
    "data",
    "hf",
    "keras",
    "launch",
    "lightning",
    "optim",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in ("data", "hf", "keras", "launch", "lightning", "optim"):
        return import_module(f"paceline.{name}")
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _flush_files() -> None:
    """Writes what is in the buffers of open files, as the interpreter's clean-up would."""
    for file in [sys.stdout, sys.stderr, *gc.get_objects()]:
        if issubclass(type(file), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads
                file.flush()


def _last() -> None:
    """Runs after all exit handlers that were registered since this import. A worker that failed ends here: gloo's
    groups cannot be destroyed while a collective is unfinished, and left alone they abort the interpreter's exit.

    After a generation was left, the collector must not destroy what is unfinished there: that could end the process by
    a signal. Nothing that the collector alone would find is destroyed then.
    """
    team = sys.modules.get("paceline.team.team")
    if team is None:
        return
    if team.exit_code() is not None:
        _flush_files()
        os._exit(team.exit_code())
    if team.has_left_generation():
        _flush_files()
        gc.freeze()
    sys.modules["paceline.comm.peer_status"].spare_late_threads()


atexit.register(_last)
HEARTBEAT.take()  # a worker that was forked has done so already
if "torch.distributed.distributed_c10d" in sys.modules:
    import_module("paceline.comm.autoload").register()
