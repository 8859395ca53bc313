"""Strategies with which Lightning's own loop and Fabric communicate by Paceline's transport.

They are Lightning's DDP strategies with Paceline's torch.distributed backend, in processes that `paceline run --raw`,
torchrun or Lightning itself starts.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch

from paceline.base.environment import variable
from paceline.comm.autoload import register
from paceline.errors import UsageError

# Scripts that import pytorch_lightning need classes of that package.
_OLD = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_pytorch = import_module("pytorch_lightning.strategies" if _OLD else "lightning.pytorch.strategies")
_fabric_name = "lightning_fabric" if _OLD else "lightning.fabric"
_fabric = import_module(f"{_fabric_name}.strategies")


def _options(options: dict[str, Any], name: str) -> dict[str, Any]:
    """The options of Lightning's class: with the backend, and the environment where the processes are started."""
    if options.get("process_group_backend") not in (None, "paceline"):
        what = f"{name}(process_group_backend={options['process_group_backend']!r})"
        raise UsageError(what, "leave it out; to use another backend, pass Lightning's DDPStrategy")
    register()
    options = {**options, "process_group_backend": "paceline"}
    if variable("RANK") and variable("WORLD_SIZE") and options.get("cluster_environment") is None:
        environments = import_module(f"{_fabric_name}.plugins.environments")
        options["cluster_environment"] = environments.TorchElasticEnvironment()  # which reads these variables
    return options


def _takes_sum(tensor: Any, reduce_op: Any) -> bool:
    """Whether a mean of integers is asked for, which Paceline's backend refuses: Lightning divides the sum by itself
    under gloo.
    """
    is_mean = reduce_op is None or (isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"))
    return isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and is_mean


class PacelineStrategy(_pytorch.DDPStrategy):  # type: ignore[misc, name-defined]
    """The strategy of `lightning.Trainer` that communicates by Paceline's transport; otherwise it is DDPStrategy.

    Args:
        options: The arguments of Lightning's DDPStrategy, except `process_group_backend`.

    Example:
        >>> trainer = lightning.Trainer(strategy=paceline.lightning.PacelineStrategy(), devices=2)
    """

    strategy_name = "paceline"

    def __init__(self, **options: Any) -> None:
        super().__init__(**_options(options, "PacelineStrategy"))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all workers, as in DDPStrategy."""
        if not _takes_sum(tensor, reduce_op):
            return super().reduce(tensor, group, reduce_op)
        return super().reduce(tensor, group, "sum") // torch.distributed.get_world_size(group)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes ``strategy="paceline"`` known to `lightning.Trainer`."""
        strategy_registry.register("paceline", cls, description="DDP over Paceline's transport")


class PacelineFabricStrategy(_fabric.DDPStrategy):  # type: ignore[misc, name-defined]
    """The strategy of `lightning.Fabric` that communicates by Paceline's transport; otherwise it is DDPStrategy.

    Args:
        options: The arguments of Fabric's DDPStrategy, except `process_group_backend`.

    Example:
        >>> fabric = lightning.Fabric(strategy=paceline.lightning.PacelineFabricStrategy(), devices=2)
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**_options(options, "PacelineFabricStrategy"))

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all workers, as in DDPStrategy."""
        if not _takes_sum(tensor, reduce_op):
            return super().all_reduce(tensor, group, reduce_op)
        return super().all_reduce(tensor, group, "sum") // torch.distributed.get_world_size(group)


PacelineStrategy.register_strategies(_pytorch.StrategyRegistry)
