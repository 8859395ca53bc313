"""Reads how busy this worker's GPU is, through NVML."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def _has_nvml(device: torch.device) -> bool:
    if device.type != "cuda" or find_spec("pynvml") is None:
        return False
    try:
        torch.cuda.utilization(device)
    except RuntimeError:  # of the driver, or of a device that NVML does not show
        return False
    return True


def gpu_utilisation(device: torch.device) -> float | None:
    """Returns the fraction of the last sample period of NVML, up to a second, in which the GPU computed; None if that
    cannot be read.
    """
    return torch.cuda.utilization(device) / 100 if _has_nvml(device) else None
