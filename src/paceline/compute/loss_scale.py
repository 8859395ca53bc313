"""The scale of fp16 losses: halved while gradients overflow, doubled after many steps that did not.

It moves as that of torch.amp.GradScaler, with one difference: a step whose gradients overflow is computed again with
half the scale instead of being left out, so no row is lost. All workers see the same overflow, in the squares of the
summed gradients, and so take the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST, GROWTH = 65536.0, 2000


@dataclass
class LossScale:
    """`scale` is tried in the next step; `good` is the number of consecutive steps without an overflow."""

    scale: float = FIRST
    good: int = 0

    def halved(self, scale: float) -> float | None:
        """Returns the scale to try after gradients overflowed with this one; None if the loss is not scaled."""
        return scale / 2 if scale > 1 else None

    def took(self, scale: float) -> str:
        """Records that a step was made with this scale. Returns the reason if the scale changes, else an empty text."""
        before, self.scale = self.scale, scale
        if scale < before:
            self.good = 0
            return "the gradients overflowed with a larger scale"
        self.good += 1
        if self.good < GROWTH:
            return ""
        self.scale, self.good = 2 * scale, 0
        return f"the gradients did not overflow in {GROWTH} consecutive steps"
