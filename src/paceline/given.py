"""What a script gives a Trainer: checked before anything is trained, and made ready."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.errors import PlanError, UsageError, WorkersDifferError, a
from paceline.strategies.pieces import tensors_of

Schedule = Callable[..., Any]


def choose_plan(outside: str | None, origin: str, script: str | None) -> tuple[str, str]:
    """The plan's text and where it came from; what was said outside of the script wins."""
    if outside is not None:
        return outside, origin + (f" (over the script's {script!r})" if script and script != outside else "")
    return (script, "script") if script else ("", "default")


def device_of(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise PlanError(
            f"this host has {count} CUDA devices and more than {local_rank} workers",
            f"start {count} workers per host, or hide the devices with CUDA_VISIBLE_DEVICES= to train on CPU",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has had: on the device, or with a CPU in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (10 if sys.platform.startswith("linux") else 0)


def private_memory() -> int:
    """Bytes that belong to this process alone, on CPU."""
    if not sys.platform.startswith("linux"):
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def settle_arithmetic(capabilities: Sequence[str], device: torch.device) -> None:
    """For `exact`: the same instructions and one thread on every worker, or the same sums come out differently."""
    if device.type != "cpu":
        raise PlanError(
            f"exact is not built for {device.type.upper()} yet",
            "hide the devices with CUDA_VISIBLE_DEVICES= or leave exact out",
        )
    torch.set_num_threads(1)
    for rank, capability in enumerate(capabilities):
        if capability != capabilities[0]:
            raise WorkersDifferError(
                f"worker {rank} computes with {capability} and worker 0 with {capabilities[0]}: their bits differ",
                "take equal machines, or set ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA alike on all of them",
            )


def checked(model: Any) -> nn.Module:
    """The model, if it can be trained here."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is {a(type(model).__name__)}", "give an nn.Module or a function that returns one")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UsageError(f"{name} of the model has no size yet", "give the sizes, or run one forward first")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(f"{name or 'the model'} gives sparse gradients", "make it with sparse=False")
    return model


def optimizers_of(made: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    optimizers = [made] if isinstance(made, Optimizer) else list(made)
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        raise UsageError(
            f"optimizer(params) returned {made!r:.60}", "return a torch optimizer, or a list of them, made from params"
        )
    for one in optimizers:
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UsageError(
                f"{type(one).__name__} computes the loss several times a step, by a closure",
                "take an optimizer whose step() needs none, such as AdamW",
            )
    return optimizers


def refuse_fused(optimizers: Sequence[Optimizer], exact_shards: bool) -> None:
    """Refuses a user's own `fused` where it would go wrong: with `exact` in shards (why, see `fused`), and anywhere
    with parameters that are not contiguous.
    """
    for one in optimizers:
        groups = [group for group in one.param_groups if group.get("fused")]
        if exact_shards and groups:
            what = f"{type(one).__name__} runs fused and would round the rows of a shard other than in the whole"
            raise UsageError(what, "leave fused out, or exact")
        if not all(param.is_contiguous() for group in groups for param in group["params"]):
            what = f"{type(one).__name__} runs fused, and would take parameters for contiguous that are not"
            raise UsageError(what, "leave fused out, or give the model contiguous parameters")


def fused(optimizers: list[Optimizer], device: torch.device, exact: bool) -> list[str]:
    """Lets optimizers whose user left `fused` open run fused, where torch can; the names of those that do now.

    None with `exact`: torch's fused kernels for CPUs round an element by where it lies, in the last few of a tensor
    or before, and a shard's rows would come out other than the same rows in the whole.
    """
    if exact and device.type == "cpu":
        return []
    known = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    changed = []
    for one in optimizers:
        groups = one.param_groups
        if type(one) not in known or device.type not in ("cpu", "cuda"):
            continue
        params = [param for group in groups for param in group["params"]]
        even = all(param.is_contiguous() for param in params)
        # A fused SGD fails where some parameters have momentum already and others get their first gradient.
        against = ("foreach", "differentiable", "momentum")
        open_ = all(group["fused"] is None and not any(map(group.get, against)) for group in groups)
        if open_ and even and all(map(torch.is_floating_point, params)):
            for group in groups:
                group["fused"] = True
            changed.append(type(one).__name__)
    return changed


def scheduler_of(schedule: Schedule, optimizer: Optimizer) -> LRScheduler:
    """One of torch's schedulers, from its class or partial, or from a factor as a function of the step."""
    made = schedule.func if isinstance(schedule, partial) else schedule
    if inspect.isclass(made) and issubclass(made, (LRScheduler, ReduceLROnPlateau)):
        scheduler: LRScheduler = schedule(optimizer)
        return scheduler
    return LambdaLR(optimizer, schedule)


def digest_of(batch: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors_of(batch):
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def refuse_twins(digests: list[str], when: str) -> None:
    """Refuses workers that bring the same rows: they would count twice."""
    seen: dict[str, int] = {}
    for rank, digest in enumerate(digests):
        if digest and digest in seen:
            raise UsageError(
                f"workers {seen[digest]} and {rank} brought the same rows to {when}",
                "seed each worker's own data apart, e.g. with paceline.stream_seed(seed, 0, paceline.join().rank)",
            )
        seen[digest] = rank
