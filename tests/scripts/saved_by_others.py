"""Trains the model of basics.py for some steps with another program, saves as that program does, and steps once more.

    saved_by_others.py fsdp|accelerate_fsdp|accelerate|lightning FOLDER

The first two need two processes. The weights after the next step are in FOLDER/next.safetensors. The rows of each step
are those of `test_import_sources.batch`, given in FOLDER/rows.safetensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

STEPS = 3
FOLDER = Path(sys.argv[2])
ROWS = load_file(FOLDER / "rows.safetensors")


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2)).double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def finish(state: dict[str, torch.Tensor]) -> None:
    save_file({name: value.detach().clone() for name, value in state.items()}, FOLDER / "next.safetensors")


def sharded(save: Callable[[Any, torch.optim.Optimizer, int], None]) -> None:
    """Trains with FSDP2 over two processes, and calls `save(model, optimizer, rank)`."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), net()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = adamw(model)

    def step(number: int) -> None:
        x, y = (ROWS[f"{kind}{number}"][12 * rank :][:12] for kind in "xy")
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    for number in range(STEPS):
        step(number)
    save(model, optimizer, rank)
    step(STEPS)
    after = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        finish(after)
    dist.destroy_process_group()


def fsdp(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Saves in the layouts of torch's tutorial, of torchtitan, and as one file."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optim": states}, "epoch": 3}, checkpoint_id=FOLDER / "tutorial")
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    titan: dict[str, Any] = {
        **weights,
        "optimizer": flat,
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": 3},
    }
    dcp.save(titan, checkpoint_id=FOLDER / "titan")
    complete = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = {
        "model": get_model_state_dict(model, options=complete),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=complete),
    }
    if rank == 0:
        torch.save(saved, FOLDER / "complete.pt")


def accelerate_fsdp(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Saves as `Accelerator.save_state` does for FSDP, which Accelerate itself uses on accelerators only."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        state = PartialState(cpu=True)
        save_fsdp_model(plugin, state, model, str(FOLDER / kind))
        save_fsdp_optimizer(plugin, state, optimizer, model, str(FOLDER / kind))


def accelerate() -> None:
    """`save_state` of one process, as safetensors and as files of torch."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(str(FOLDER)))
    model = net()
    optimizer = adamw(model)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    )

    def step(number: int) -> None:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(ROWS[f"x{number}"]), ROWS[f"y{number}"]))
        optimizer.step()
        scheduler.step()

    for number in range(STEPS):
        step(number)
    accelerator.save_state(str(FOLDER / "safetensors"))
    accelerator.save_state(str(FOLDER / "torch"), safe_serialization=False)
    step(STEPS)
    finish(accelerator.unwrap_model(model).state_dict())


def lightning() -> None:
    """A checkpoint of a Trainer with a callback and hyperparameters, whose objects are not created again."""
    from argparse import Namespace

    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self, options: Namespace) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = net()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.net)

    def fit(steps: int, **options: Any) -> Module:
        module = Module(Namespace(width=16, folder=FOLDER))
        batches = [(ROWS[f"x{number}"], ROWS[f"y{number}"]) for number in range(steps)]
        off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        trainer = pl.Trainer(
            max_steps=steps, accelerator="cpu", barebones=False, default_root_dir=FOLDER, **off, **options
        )
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        return module

    fit(STEPS, callbacks=[ModelCheckpoint(FOLDER, "last", save_weights_only=False)])
    finish(fit(STEPS + 1, enable_checkpointing=False).net.state_dict())


if __name__ == "__main__":
    kinds = {
        "fsdp": partial(sharded, fsdp),
        "accelerate_fsdp": partial(sharded, accelerate_fsdp),
        "accelerate": accelerate,
        "lightning": lightning,
    }
    kinds[sys.argv[1]]()
