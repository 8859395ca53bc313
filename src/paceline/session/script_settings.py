"""The settings that a resumed run keeps, whatever the script says now: the seed and the optimizers' options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

_OPTIONS = (int, float, tuple, str, type(None))  # of an optimizer's group: what a script says in a line of text
_TORCHS = ("params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable")


@dataclass
class ScriptSettings:
    """The settings of a script that its checkpoints keep: the seed, and the options of the optimizers' groups.
    `version` counts how often the weights had been written to when the trainer was made.
    """

    seed: int
    options: list[list[dict[str, Any]]]
    version: int

    @staticmethod
    def of(seed: int, optimizers: Sequence[Optimizer], model: nn.Module) -> ScriptSettings:
        """Returns the settings of a new trainer."""
        options = [
            [{k: v for k, v in g.items() if k not in _TORCHS and isinstance(v, _OPTIONS)} for g in one.param_groups]
            for one in optimizers
        ]
        return ScriptSettings(seed, options, _version(model))

    def saved(self) -> dict[str, Any]:
        """Returns the settings for a checkpoint."""
        return {"seed": self.seed, "options": self.options}

    def is_untrained(self, model: nn.Module) -> bool:
        """Returns whether nothing has written to the weights: no step, and no load."""
        return self.version == _version(model)

    def go_on(self, saved: Mapping[str, Any] | None, say: Callable[..., None]) -> int:
        """Takes the settings of a checkpoint, whatever the script says now, and tells the user of differences. Returns
        the seed.
        """
        saved = saved or self.saved()  # an older version's
        for old, new in zip(saved["options"], self.options, strict=False):
            for group, now in zip(old, new, strict=False):
                for name in (name for name in now if name in group and _plain(group[name]) != _plain(now[name])):
                    what = (
                        f"the script now has {name}={now[name]}, but the run continues with {name}={group[name]} from"
                        " the checkpoint"
                    )
                    cure = "to change it, set it in the optimizer's param_groups after creating the Trainer"
                    say(f"{what}; {cure}", once=True)
        if saved["seed"] != self.seed:
            what = (
                f"the script now has seed={self.seed}, but the run continues with seed={saved['seed']} from the"
                " checkpoint"
            )
            say(f"{what}; to change it, start a new run in another --run-dir", once=True)
        self.seed, self.options = saved["seed"], saved["options"]
        return self.seed


def _plain(option: Any) -> Any:
    return list(option) if isinstance(option, tuple) else option


def _version(model: nn.Module) -> int:
    return sum(param._version for param in model.parameters())
