"""Trains models, each by a Trainer of its own, and writes what came out. Usage: contract.py OUT MODEL... [WORD...]

The words are those of every model's plan; with `short` each has few rows and steps. With `aot_eager`, code beside
tensor= or context= is traced for torch.compile, and run without a compiler of kernels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cases import right
from expert_models import EXPERT_MODELS
from mixture_models import MIXTURE_MODELS
from parity_models import MODELS, shortened
from reported_bugs import REPORTED_MODELS
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import paceline
from paceline.parallel.tensor_parallel import compiled_units

MODELS = MODELS | MIXTURE_MODELS | EXPERT_MODELS | REPORTED_MODELS
out = Path(sys.argv[1])
tensors, figures = {}, {}
words = [word for word in sys.argv[2:] if word not in MODELS and word not in ("short", "aot_eager")]
if "aot_eager" in sys.argv:
    compiled_units.COMPILER = "aot_eager"
micro = next((word for word in words if word.startswith("micro=")), "")  # instead of the cases' own
for name in (name for name in sys.argv[2:] if name in MODELS):
    case = shortened(MODELS[name]) if "short" in sys.argv else MODELS[name]
    over_batch = lambda output, batch, case=case: case.loss(trainer.model, output)  # noqa: B023
    trainer = paceline.Trainer(
        model=case.model,
        loss=over_batch if case.loss_over else case.loss,
        optimizer=case.optimizer,
        global_batch=case.global_batch,
        schedule=case.schedule,
        clip_norm=case.clip_norm,
        forward=case.forward,
        seed=7,
        plan=" ".join([*words, *([f"micro={case.micro}"] if case.micro and not micro else [])]),
        loss_over=case.loss_over,
    )
    before = {} if case.loss_over or words else trainer.evaluate(case.data(), right)
    reports = list(trainer.steps(case.data(), count=case.steps))
    evaluation = {} if case.loss_over else trainer.evaluate(case.data(), right)
    if trainer.plan.tensor or trainer.plan.pipeline or trainer.plan.expert:  # here is but a part of it
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
        "before": before,
        "evaluation": evaluation,
    }
if paceline.join().rank == 0:
    save_file(tensors, out.with_suffix(".safetensors"))
    out.with_suffix(".json").write_text(json.dumps(figures))
