"""The optimizer and the schedulers that `configure_optimizers()` returns, for the parameters of a worker."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import UsageError, a

_FORMS = (
    "return an optimizer, [optimizer], ([optimizer], [schedulers]), or "
    '{"optimizer": optimizer, "lr_scheduler": scheduler or {"scheduler": ..., "interval": ..., "monitor": ...}}'
)
_KEYS = ("scheduler", "name", "interval", "frequency", "reduce_on_plateau", "monitor", "strict")


@dataclass
class SchedulerConfig:
    """A scheduler and when it moves, with the fields of Lightning's LRSchedulerConfig.

    Attributes:
        scheduler: One of torch's schedulers.
        name: Its name; not used.
        interval: ``"step"`` or ``"epoch"``.
        frequency: It moves after each so many intervals.
        reduce_on_plateau: Whether it follows a value.
        monitor: The name of that value.
        strict: Whether a missing value is an error.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def read_configuration(returned: Any) -> tuple[torch.optim.Optimizer, list[SchedulerConfig]]:
    """Reads what `configure_optimizers()` returned, in each of Lightning's forms for a single optimizer.

    Args:
        returned: An optimizer, a list, a pair of lists, a dict, or a list of one dict.

    Raises:
        UsageError: There are several optimizers, or none, or a scheduler cannot be used.
    """
    schedulers: Any = []
    monitor = None
    optimizers: Any = returned
    if isinstance(returned, list | tuple) and len(returned) == 2 and isinstance(returned[0], list):
        optimizers, schedulers = returned
    elif isinstance(returned, Mapping) or (
        isinstance(returned, list | tuple) and returned and all(isinstance(one, Mapping) for one in returned)
    ):
        dicts = [returned] if isinstance(returned, Mapping) else list(returned)
        optimizers = [one.get("optimizer") for one in dicts]
        schedulers = [one["lr_scheduler"] for one in dicts if one.get("lr_scheduler") is not None]
        monitor = dicts[0].get("monitor")
    optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    schedulers = list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
    if returned is None or not optimizers or not all(map(_is_optimizer, optimizers)):
        raise UsageError(f"configure_optimizers() returned {' '.join(repr(returned).split()):.60}", _FORMS)
    if len(optimizers) > 1:
        what = f"configure_optimizers() returned {len(optimizers)} optimizers"
        raise UsageError(what, "return one with several parameter groups, or use a paceline.Trainer for each model")
    return optimizers[0], [_read_scheduler(one, monitor, optimizers[0]) for one in schedulers]


def _read_scheduler(given: Any, monitor: str | None, optimizer: torch.optim.Optimizer) -> SchedulerConfig:
    fields = dict(given) if isinstance(given, Mapping) else {"scheduler": given, "monitor": monitor}
    if unknown := sorted(fields.keys() - set(_KEYS)):
        raise UsageError(f"the lr_scheduler dict has the key {unknown[0]!r}", f"use only the keys {', '.join(_KEYS)}")
    scheduler = fields.get("scheduler")
    if not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        what = f"configure_optimizers() returned {a(type(scheduler).__name__)} as a scheduler"
        raise UsageError(what, "return one of torch's schedulers, or a subclass of LRScheduler")
    if scheduler.optimizer is not optimizer:
        what = f"{type(scheduler).__name__} belongs to another optimizer"
        raise UsageError(what, "make it with the optimizer that configure_optimizers() returns")
    config = SchedulerConfig(**fields)
    config.reduce_on_plateau = fields.get("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    if config.interval not in ("step", "epoch"):
        what = f"the lr_scheduler dict has interval={config.interval!r}"
        raise UsageError(what, 'use "step" or "epoch"')
    if config.reduce_on_plateau and not config.monitor:
        what = f"{type(scheduler).__name__} has no value to follow"
        raise UsageError(what, 'add "monitor": the name of a logged value')
    return config


class ConfiguredOptimizers:
    """Makes the module's optimizer and schedulers for the parameters that a worker holds.

    Attributes:
        optimizer: The optimizer that trains, once the Trainer has made it.
        schedule: The schedulers of that optimizer.
        configs: How the schedulers move.
    """

    def __init__(self, module: nn.Module, returned: Any, steps_per_epoch: int) -> None:
        self._original, self.configs = read_configuration(returned)
        self._steps_per_epoch = steps_per_epoch
        self.optimizer = self._original
        self.schedule: Schedule | None = None
        if isinstance(self._original, torch.optim.LBFGS):
            what = "LBFGS computes the loss several times in a step"
            raise UsageError(what, "use another optimizer, or Lightning's Trainer on one process")
        names = {id(param): name for name, param in module.named_parameters()}
        for group in self._original.param_groups:
            if any(id(param) not in names for param in group["params"]):
                what = "configure_optimizers() returned an optimizer of parameters that the module does not have"
                raise UsageError(what, "assign the modules that it trains to attributes of the LightningModule")
        left_out = {"params", "param_names"}
        self._groups = [
            ({k: v for k, v in group.items() if k not in left_out}, [names[id(param)] for param in group["params"]])
            for group in self._original.param_groups
        ]

    def make(self, params: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Makes the optimizer for these parameters, in the groups of the full model, with their present settings."""
        by_name, original = dict(params), self._original
        groups = [
            {**options, "params": [(name, by_name[name]) for name in names if name in by_name]}
            for options, names in self._groups
        ]
        groups = [group for group in groups if group["params"]] or groups
        wants = [name for name in inspect.signature(type(original)).parameters if name != "params"]
        if all(name in original.defaults for name in wants):
            made: torch.optim.Optimizer = type(original)(groups, **{name: original.defaults[name] for name in wants})
        else:
            made = _with_groups(original, groups)
        self.optimizer = made
        return made

    @property
    def scheduler_factory(self) -> Callable[[torch.optim.Optimizer], Any] | None:
        """What the Trainer's `schedule` is: None if there is no scheduler."""
        return self._make_schedule if self.configs else None

    def _make_schedule(self, optimizer: torch.optim.Optimizer) -> Schedule:
        if not _is_optimizer(optimizer):  # the Trainer asks first whether this is a factor as a function of the step
            raise TypeError(f"{type(optimizer).__name__} is not an Optimizer")
        # The copies refer to the new optimizer, whose groups have the rates that the originals set.
        memo: dict[int, Any] = {id(self._original): optimizer}
        copies = [copy.deepcopy(config.scheduler, memo) for config in self.configs]
        for config, made in zip(self.configs, copies, strict=True):
            config.scheduler = made
        self._original = optimizer
        self.schedule = Schedule(optimizer, self.configs, self._steps_per_epoch)
        return self.schedule


def _with_groups(original: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The same optimizer with other parameters: for classes that take arguments which are not settings of a group."""
    made = object.__new__(type(original))
    vars(made).update({name: value for name, value in vars(original).items() if name != "step"})
    made.state = defaultdict(dict)
    made.param_groups = []
    for group in groups:
        made.add_param_group(group)
    return made


class Schedule(LRScheduler):
    """Moves the schedulers of `configure_optimizers()` after each step, or after each epoch of so many steps.

    Those that follow a value move by `follow`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, configs: list[SchedulerConfig], steps_per_epoch: int) -> None:
        self.optimizer, self._configs, self._steps_per_epoch = optimizer, configs, steps_per_epoch
        self._schedulers = [one.scheduler for one in configs if not one.reduce_on_plateau]
        self.steps = 0

    def step(self, epoch: Any = None) -> None:
        """Counts an optimizer step, and moves the schedulers that are due."""
        self.steps += 1
        each = self._steps_per_epoch
        for one in self._configs:
            if one.reduce_on_plateau:
                continue
            in_epoch = (self.steps - 1) % each + 1
            if one.interval == "step":
                due = in_epoch % one.frequency == 0
            else:
                due = in_epoch == each and self.steps // each % one.frequency == 0
            if due:
                with warnings.catch_warnings():  # the copy of a scheduler does not watch its optimizer's step()
                    warnings.filterwarnings("ignore", message=".*optimizer.step")
                    one.scheduler.step()

    def follow(self, interval: str, number: int, values: Mapping[str, Any]) -> None:
        """Moves the schedulers that follow a value, at the end of the step or epoch with this number, from 1.

        Raises:
            UsageError: The value was not logged.
        """
        for one in self._configs:
            if not one.reduce_on_plateau or one.interval != interval or number % one.frequency:
                continue
            value = values.get(str(one.monitor))
            if value is None and one.strict:
                what = f"ReduceLROnPlateau follows {one.monitor!r}, which was not logged; logged: {sorted(values)}"
                raise UsageError(what, f'log it, or set "monitor" to one of these: self.log({one.monitor!r}, ...)')
            if value is not None:
                one.scheduler.step(value)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The present learning rates of the parameter groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The steps counted, and the state of each scheduler."""
        return {"steps": self.steps, "schedulers": [one.scheduler.state_dict() for one in self._configs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        self.steps = state_dict["steps"]
        for one, state in zip(self._configs, state_dict["schedulers"], strict=True):
            one.scheduler.load_state_dict(state)
