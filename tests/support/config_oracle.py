"""What configurations of DeepSpeed and Accelerate describe, in plain PyTorch: small ones, trained in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import paceline
from paceline.integrations.configs.conversion import Conversion
from paceline.integrations.configs.report import script_of

ROWS, BATCH = 48, 16
HEADER = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy as loss_function

torch.set_default_dtype(torch.float64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 4)
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 2

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


generator = torch.Generator().manual_seed(3)
inputs = torch.randn(48, 6, generator=generator)
labels = torch.randint(0, 4, (48,), generator=generator)
dataset = [(x, y) for x, y in zip(inputs, labels)]
make_optimizer = lambda params: torch.optim.AdamW(params, lr=0.01)
"""


class Warmup:
    """DeepSpeed's warmup schedulers, stepped after the optimizer: the rate is that of the last call, from -1 on."""

    def __init__(
        self,
        kind: str,
        lr: float,
        warmup_num_steps: int,
        warmup_type: str = "log",
        total_num_steps: int = 0,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float | None = None,
        warmup_min_ratio: float = 0.0,
        cos_min_ratio: float = 0.0001,
    ) -> None:
        self.kind, self.lr, self.count, self.ramp = kind, lr, max(2, warmup_num_steps), warmup_type
        self.total, self.low = total_num_steps, warmup_min_lr
        self.high = warmup_max_lr if warmup_max_lr is not None else lr
        self.ratio, self.floor = warmup_min_ratio, cos_min_ratio
        self.last = -1

    def rate(self) -> float:
        """The learning rate of the next step."""
        is_cosine = self.kind == "WarmupCosineLR"
        if self.last < 0:
            return 0.0 if is_cosine else self.low
        if self.last < self.count:
            part = math.log(self.last + 1) / math.log(self.count) if self.ramp == "log" else self.last / self.count
            if is_cosine:
                return self.lr * (self.ratio + part * (1 - self.ratio))
        elif is_cosine:
            part = min(1.0, (self.last - self.count + 1) / max(1, self.total - self.count))
            return self.lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * part)) / 2)
        elif self.kind == "WarmupDecayLR":
            part = max(0.0, (self.total - self.last) / max(1.0, self.total - self.count))
        else:
            part = 1.0
        return self.low + (self.high - self.low) * part


class OneCycle:
    """DeepSpeed's 1-cycle policy, stepped after the optimizer."""

    def __init__(self, **words: float) -> None:
        self.words = words
        self.last = -1

    def rate(self) -> float:
        """The learning rate of the next step."""
        words = self.words
        low, high, first = words["cycle_min_lr"], words["cycle_max_lr"], words["cycle_first_step_size"]
        total = first + words["cycle_second_step_size"]
        if self.last < 0:
            return low
        if self.last >= total:
            return low / (1 + words["decay_lr_rate"] * (self.last - total + 1) / words["decay_step_size"])
        x = (self.last + 1) / total
        x -= math.floor(x)
        turn = first / total
        return low + (high - low) * (x / turn if x <= turn else (x - 1) / (turn - 1))


def reference_rates(scheduler: Any, count: int) -> list[float]:
    """The rates of so many steps."""
    rates = []
    for _ in range(count):
        rates.append(scheduler.rate())
        scheduler.last += 1
    return rates


@dataclass(frozen=True)
class Case:
    """A configuration, and what it describes."""

    config: dict[str, Any]
    plan: str
    # Makes the optimizer of plain PyTorch.
    optimizer: Callable[[Any], Any] = lambda params: torch.optim.AdamW(params, lr=0.01)
    rate: Callable[[], Any] | None = None
    clip: float | None = None
    steps: int = 6
    accelerate: bool = field(default=False)


def script_for(conversion: Conversion, case: Case) -> str:
    """The converted script with the model, the loss and the dataset that are the user's."""
    text = script_of(conversion)
    if "global_batch=" not in text:
        text = text.replace(
            "    optimizer=make_optimizer,", f"    optimizer=make_optimizer,\n    global_batch={BATCH},"
        )
    loop = text.rindex("for report in")
    body = f"for report in trainer.steps(dataset, count={case.steps}):\n    pass\ntrainer.export('out.safetensors')\n"
    return f"{HEADER}\n{text[:loop]}{body}"


def reference_weights(case: Case) -> dict[str, torch.Tensor]:
    """The weights after the steps of a case, by plain PyTorch in one process."""
    before = torch.get_default_dtype()
    namespace: dict[str, Any] = {}
    try:
        exec(HEADER, namespace)
        model, dataset = namespace["Net"](), namespace["dataset"]
        optimizer = case.optimizer(model.parameters())
        scheduler = None if case.rate is None else case.rate()
        for step in range(case.steps):
            places = range(step * BATCH, (step + 1) * BATCH)
            rows = [dataset[paceline.sample_index(place % ROWS, ROWS, 0, place // ROWS)] for place in places]
            x, y = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            if scheduler is not None:
                for group in optimizer.param_groups:
                    group["lr"] = scheduler.rate()
                scheduler.last += 1
            optimizer.step()
        return {name: value.detach() for name, value in model.state_dict().items()}
    finally:
        torch.set_default_dtype(before)


def _deepspeed(**config: Any) -> dict[str, Any]:
    return {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1, **config}


def _optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


def _accelerate(kind: str, **config: Any) -> dict[str, Any]:
    return {"distributed_type": kind, "num_processes": 2, "mixed_precision": "no", **config}


CASES = {
    "replicas": Case(
        _deepspeed(
            optimizer=_optimizer("AdamW", lr=0.01, betas=[0.8, 0.99], weight_decay=0.1),
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
            gradient_clipping=0.1,
        ),
        "micro=4",
        lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
        lambda: Warmup("WarmupLR", 0.01, 4),
        clip=0.1,
    ),
    "zero1": Case(
        _deepspeed(
            zero_optimization={"stage": 1},
            optimizer=_optimizer("Adam", lr=0.01, weight_decay=0.1),
            scheduler={
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.02, "total_num_steps": 8, "warmup_type": "linear"},
            },
        ),
        "shard=2 zero=1 micro=4",
        lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
        lambda: Warmup("WarmupDecayLR", 0.01, 3, "linear", 8, warmup_max_lr=0.02),
    ),
    "zero2": Case(
        _deepspeed(
            gradient_accumulation_steps=2,
            zero_optimization={"stage": 2, "overlap_comm": True},
            optimizer=_optimizer("Adam", lr=0.01, weight_decay=0.1, adam_w_mode=False),
            gradient_clipping=0.2,
        ),
        "shard=2 zero=2 micro=4",
        lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1),
        clip=0.2,
    ),
    "zero3": Case(
        _deepspeed(
            zero_optimization={"stage": 3},
            optimizer=_optimizer("SGD", lr=0.1, momentum=0.9, nesterov=True),
            scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 7}},
        ),
        "shard=2 zero=3 micro=4",
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        lambda: Warmup("WarmupCosineLR", 0.1, 2, "log", 7),
    ),
    "offload": Case(
        _deepspeed(
            zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            optimizer=_optimizer("Adagrad", lr=0.05),
        ),
        "shard=2 zero=3 offload=cpu micro=4",
        lambda params: torch.optim.Adagrad(params, lr=0.05),
    ),
    "one-cycle": Case(
        _deepspeed(
            optimizer=_optimizer("SGD", lr=0.1),
            scheduler={
                "type": "OneCycle",
                "params": {
                    "cycle_min_lr": 0.01,
                    "cycle_max_lr": 0.2,
                    "cycle_first_step_size": 2,
                    "cycle_second_step_size": 2,
                    "cycle_momentum": False,
                    "decay_step_size": 1,
                    "decay_lr_rate": 0.5,
                },
            },
        ),
        "micro=4",
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda: OneCycle(
            cycle_min_lr=0.01,
            cycle_max_lr=0.2,
            cycle_first_step_size=2,
            cycle_second_step_size=2,
            decay_step_size=1,
            decay_lr_rate=0.5,
        ),
    ),
    "auto": Case(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "optimizer": _optimizer("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto"),
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": "auto",
                    "warmup_max_lr": "auto",
                    "warmup_num_steps": "auto",
                    "total_num_steps": "auto",
                },
            },
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        },
        "shard=2 zero=2 micro=8",
        lambda params: torch.optim.AdamW(params, lr=5e-5, weight_decay=0.0),
        lambda: Warmup("WarmupDecayLR", 5e-5, 1, "log", 9),
        clip=1.0,
    ),
    "torch-scheduler": Case(
        _deepspeed(
            optimizer=_optimizer("RMSprop", lr=0.01, momentum=0.5),
            scheduler={"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}},
            pipeline={"stages": 1},
            activation_checkpointing={"partition_activations": True},
        ),
        "micro=4 recompute=blocks",
        lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
        lambda: Halves(0.01, 2),
    ),
    "multi-cpu": Case(_accelerate("MULTI_CPU", use_cpu=True), "", accelerate=True),
    "fsdp1": Case(
        _accelerate(
            "FSDP", fsdp_config={"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_activation_checkpointing": True}
        ),
        "shard=2 zero=2 recompute=blocks",
        accelerate=True,
    ),
    "fsdp2": Case(
        _accelerate("FSDP", fsdp_config={"fsdp_version": 2, "fsdp_offload_params": True}),
        "shard=2 zero=3 offload=cpu",
        accelerate=True,
    ),
    "tensor": Case(
        _accelerate("FSDP", fsdp_config={"fsdp_version": 2}, parallelism_config={"parallelism_config_tp_size": 2}),
        "tensor=2",
        accelerate=True,
    ),
    "pipeline": Case(
        _accelerate(
            "MEGATRON_LM", megatron_lm_config={"megatron_lm_pp_degree": 2, "megatron_lm_gradient_clipping": 0.1}
        ),
        "pipeline=2",
        clip=0.1,
        accelerate=True,
    ),
    "accelerate-deepspeed": Case(
        _accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 1, "gradient_clipping": 0.1}),
        "shard=2 zero=1",
        clip=0.1,
        accelerate=True,
    ),
}


class Halves:
    """Half the rate every so many steps."""

    def __init__(self, lr: float, every: int) -> None:
        self.lr, self.every, self.last = lr, every, -1

    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.lr * 0.5 ** ((self.last + 1) // self.every)
