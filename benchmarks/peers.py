"""Data-parallel training as users of other libraries write it, for step_time.py; each yields the loss of every step.

All get one process per worker, the same data and the same micro-batches. What they leave to torch (AdamW, gloo) is
torch's.

deepspeed   ZeRO stage 0. On a CPU its gradients go over torch's gloo: its own all-reduce in shared memory serves
            tensor parallel inference alone, and the oneCCL that it would prefer needs Intel's binding for torch
ray         starts its workers itself, and daemons that go on while others step: 14 processes, together some 9 % of one
            core. That slows all sides of the round, so compare with ray in a run of its own
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from models import JOBS, Job
from torch.utils.data import DataLoader, DistributedSampler
from turns import WORKERS, take

PACKAGES = {"accelerate": "accelerate", "fabric": "lightning", "deepspeed": "deepspeed", "ray": "ray[train]"}


def missing(side: str) -> str | None:
    """What pip would have to install."""
    return None if find_spec(PACKAGES[side].partition("[")[0]) else PACKAGES[side]


def given(job: Job, steps: int) -> tuple[Any, torch.optim.Optimizer, Any, int]:
    """Model, optimizer and loader of a script for one process, and how many micro-batches make a worker's step."""
    torch.manual_seed(0)
    model, share = job.model(), job.global_batch // WORKERS
    size = job.micro or share
    loader: DataLoader[Any] = DataLoader(job.data(steps * job.global_batch), batch_size=size, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader, share // size


def accelerate(job: Job, steps: int) -> Iterator[float]:
    from accelerate import Accelerator

    model, update, loader, accumulate = given(job, steps)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, update, loader = accelerator.prepare(model, update, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = job.loss(model(batch[0]), batch)
            accelerator.backward(loss)
            update.step()
            update.zero_grad()
        if accelerator.sync_gradients:
            yield loss.item()


def fabric(job: Job, steps: int) -> Iterator[float]:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=WORKERS, strategy="ddp")
    runner.launch()
    model, update, loader, accumulate = given(job, steps)
    model, update = runner.setup(model, update)
    loader = runner.setup_dataloaders(loader)
    for number, batch in enumerate(loader, 1):
        last = number % accumulate == 0
        with runner.no_backward_sync(model, enabled=not last):
            loss = job.loss(model(batch[0]), batch)
            runner.backward(loss / accumulate)
        if last:
            update.step()
            update.zero_grad()
            yield loss.item()


def deepspeed(job: Job, steps: int) -> Iterator[float]:
    import deepspeed

    model, update, loader, accumulate = given(job, steps)
    config = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": loader.batch_size,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,  # it would clip to a norm of 1, and the others do not
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=update, config=config)
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset)
    for batch in DataLoader(loader.dataset, loader.batch_size, sampler=sampler):
        loss = job.loss(engine(batch[0]), batch)
        engine.backward(loss)
        last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if last:
            yield loss.item()


def ray(job: Job, steps: int) -> Iterator[float]:
    from ray.train.torch import prepare_data_loader, prepare_model

    model, update, loader, accumulate = given(job, steps)
    wrapped: Any = prepare_model(model)  # in DistributedDataParallel
    loader = prepare_data_loader(loader)
    for number, batch in enumerate(loader, 1):
        last = number % accumulate == 0
        with nullcontext() if last else wrapped.no_sync():
            loss = job.loss(wrapped(batch[0]), batch)
            (loss / accumulate).backward()
        if last:
            update.step()
            update.zero_grad()
            yield loss.item()


def _ray_worker(config: dict[str, Any]) -> None:
    from ray import train

    stepping = ray(JOBS[config["model"]], config["steps"])
    take(config["address"], "ray", train.get_context().get_world_rank(), stepping)


def drive_ray(address: str, model: str, steps: int, folder: str) -> None:
    """Ray Train starts the workers itself; they take their turns like all others."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        _ray_worker,
        train_loop_config={"address": address, "model": model, "steps": steps},
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=False),
        run_config=RunConfig(name="ray", storage_path=folder),
    )
    trainer.fit()
    ray.shutdown()


PEERS: dict[str, Callable[[Job, int], Iterator[float]]] = {
    "accelerate": accelerate,
    "fabric": fabric,
    "deepspeed": deepspeed,
    "ray": ray,
}
