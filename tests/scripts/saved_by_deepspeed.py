"""Writes tests/checkpoint/deepspeed.tar.xz, the checkpoints that the tests of imports read, by DeepSpeed itself:

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 DS_ACCELERATOR=cpu python tests/scripts/saved_by_deepspeed.py

For each kind it trains on two processes over gloo, saves, makes one more step, and stores the weights after that step.
The tests take the model and its rows from this file, and need no DeepSpeed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

ARCHIVE = Path(__file__).resolve().parents[1] / "checkpoint" / "deepspeed.tar.xz"
KINDS = ("zero0", "zero1", "zero2", "zero3", "zero1-bf16", "zero2-universal", "zero3-universal")
STEPS = 3


class Tiny(nn.Module):
    """A model with tied weights, a buffer, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.second.weight = self.first.weight
        self.head = nn.Linear(10, 2, bias=False)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 10), requires_grad=False)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: torch.Tensor = self.head((hidden * self.frozen * self.scale).to(x.dtype))
        return out


def groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Weights decay and biases do not, as is usual; what is not trained is left out."""
    trained = [(name, param) for name, param in named if param.requires_grad]
    decayed = [param for name, param in trained if name.endswith("weight")]
    return [{"params": decayed}, {"params": [p for n, p in trained if n.endswith("bias")], "weight_decay": 0.0}]


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The 24 rows of a step."""
    x = torch.randn(24, 10, generator=torch.Generator().manual_seed(step))
    return x, (x.sum(1) > 0).long()


def write(folder: Path, kind: str) -> None:
    """One of the two processes."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(7)
    model = Tiny()
    optimizer = torch.optim.AdamW(groups(model.named_parameters()), lr=0.02, weight_decay=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 12,
        "zero_optimization": {"stage": int(kind[4])},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": kind.endswith("bf16")},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32

    def step(number: int) -> None:
        x, y = (part[12 * rank :][:12] for part in rows(number))
        engine.backward(cross_entropy(engine(x.to(dtype)), y))
        engine.step()

    for number in range(STEPS):
        step(number)
    engine.save_checkpoint(str(folder))
    step(STEPS)
    if kind.startswith("zero3"):
        with deepspeed.zero.GatheredParameters([*engine.module.parameters()]):
            state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    else:
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    if rank == 0:
        state = {name: value.detach().float() for name, value in state.items()}
        versions = {"deepspeed": deepspeed.__version__, "torch": str(torch.__version__)}
        torch.save({"weights": state, "float32": own_conversion(folder, kind), **versions}, folder / "next.pt")


def own_conversion(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The float32 weights that DeepSpeed's own conversion finds in the checkpoint."""
    if kind == "zero0":
        return {}
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return {name: value.detach().clone() for name, value in found.items()}


def make(folder: Path, kind: str, port: int) -> None:
    where = [f"--master-port={port}", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "torch.distributed.run", *where, __file__, str(folder), kind]
    subprocess.run(command, check=True)
    for script in folder.glob("*.py"):
        script.unlink()
    if kind.endswith("universal"):
        source = folder / f"global_step{STEPS}"
        words = ["--input_folder", str(source), "--output_folder", str(folder / "universal"), "--inject_missing_state"]
        subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words], check=True)
        shutil.rmtree(source)
        (folder / "latest").unlink()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, tarfile.open(ARCHIVE, "w:xz") as archive:
        for number, kind in enumerate(KINDS):
            make(Path(folder, kind), kind, 29700 + number)
            archive.add(Path(folder, kind), kind)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main()
