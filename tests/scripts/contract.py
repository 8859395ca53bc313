"""Trains cases, each by a Trainer of its own, and writes what came out. Usage: contract.py OUT CASE... [WORD...]

The words are those of every case's plan.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cases import CASES, CUT, right
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import paceline

out = Path(sys.argv[1])
tensors, figures = {}, {}
every = CASES | CUT
words = [word for word in sys.argv[2:] if word not in every]
micro = next((word for word in words if word.startswith("micro=")), "")  # instead of the cases' own
for name in (name for name in sys.argv[2:] if name in every):
    case = every[name]
    trainer = paceline.Trainer(
        model=case.model,
        loss=case.loss,
        optimizer=case.optimizer,
        global_batch=case.global_batch,
        schedule=case.schedule,
        clip_norm=case.clip_norm,
        forward=case.forward,
        seed=7,
        plan=" ".join([*words, *([f"micro={case.micro}"] if case.micro and not micro else [])]),
    )
    reports = list(trainer.steps(case.data(), count=case.steps))
    evaluation = trainer.evaluate(case.data(), right)
    if trainer.plan.tensor:  # here is but a part of it
        trainer.export(file := out.with_name(f"{name}.safetensors"))
        state = load_file(file) if paceline.join().rank == 0 else {}
    else:
        state = {
            key: value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for key, value in trainer.model.state_dict().items()
        }
    tensors |= {f"{name}/{key}": value for key, value in state.items()}
    figures[name] = {
        "loss": [report.loss for report in reports],
        "norm": [report.grad_norm for report in reports],
        "lr": [report.lr for report in reports],
        "samples": [report.samples for report in reports],
        "metrics": [report.metrics for report in reports],
        "evaluation": evaluation,
    }
if paceline.join().rank == 0:
    save_file(tensors, out.with_suffix(".safetensors"))
    out.with_suffix(".json").write_text(json.dumps(figures))
