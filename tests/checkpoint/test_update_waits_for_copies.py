"""A step's update waits until the checkpoint before it has copied the weights."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from alone import happened, trainer
from cases import rows
from safetensors.torch import load_file

from paceline.checkpoint import writer


def test_checkpoint_has_the_weights_of_its_step_although_the_next_update_follows_at_once(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's thread copies slowly: it gives the next update half a second to come, which it must not do."""
    is_updated, updates_while_copying, copied = threading.Event(), list[bool](), list[torch.Tensor]()
    copy = writer._copy

    def copy_slowly(tensor: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == "paceline-save":
            if not copied:
                updates_while_copying.append(is_updated.wait(0.5))
            copied.append(copy(tensor))
            return copied[-1]
        return copy(tensor)

    monkeypatch.setattr(writer, "_copy", copy_slowly)
    own = trainer()
    weights: dict[str, torch.Tensor] = {}
    for report in own.steps(rows(1, 45, 10), count=3):
        if report.step == 1:
            weights = {name: param.detach().clone() for name, param in own.model.named_parameters()}
            own._context.job.optimizers[0].register_step_post_hook(lambda *_: is_updated.set())
            own.save()
    assert is_updated.is_set()
    assert updates_while_copying[0] is False
    assert copied
    assert all(any(torch.equal(one, weight) for one in copied) for weight in weights.values())
    assert happened(run, "checkpoint")[0]["step"] == 1
    (file,) = run.folder.path.glob("checkpoints/*1/*.safetensors")
    saved = [*load_file(file).values()]
    assert all(
        any(torch.equal(one, weight) for one in saved if one.shape == weight.shape) for weight in weights.values()
    )
