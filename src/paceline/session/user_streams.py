"""The states of the random generators that belong to the script, for checkpoints and newcomers."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from paceline.checkpoint.tree import reading


def user_streams() -> dict[str, Any]:
    """Returns the state of the random generators that belong to the script."""
    streams: dict[str, Any] = {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "random": json.loads(json.dumps(random.getstate())),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        streams["numpy"] = [name, keys.tolist(), *rest]
    if torch.cuda.is_available():
        streams["cuda"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return streams


def load_user_streams(saved: dict[str, Any]) -> None:
    """Restores what `user_streams` returned."""
    with reading():
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(saved["torch"]), dtype=torch.uint8))
        if "cuda" in saved and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(saved["cuda"]), dtype=torch.uint8))
        form, keys, gauss = saved["random"]
        random.setstate((form, tuple(keys), gauss))
        if "numpy" in saved and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(tuple(saved["numpy"]))
