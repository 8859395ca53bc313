"""Dynamic loss scaling for fp16.

It moves as that of torch.amp.GradScaler, with one difference: a step whose gradients overflow is computed again with
half the scale instead of being left out, so no row is lost. All workers see the same overflow, in the squares of the
summed gradients, and so take the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST, GROWTH = 65536.0, 2000


@dataclass
class LossScale:
    """`scale` is tried in the next step; `good` steps in a row did not need a smaller one."""

    scale: float = FIRST
    good: int = 0

    def took(self, scale: float) -> str:
        """A step was made with this scale; says so if another one is tried from now on."""
        before, self.scale = self.scale, scale
        if scale < before:
            self.good = 0
            return "the gradients overflowed with a larger one"
        self.good += 1
        if self.good < GROWTH:
            return ""
        self.scale, self.good = 2 * scale, 0
        return f"{GROWTH} steps in a row did not overflow"
