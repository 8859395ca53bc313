"""The public names of the optimizers for large batches, LARS and LAMB."""

from __future__ import annotations

from paceline.compute.optimizers import LAMB as LAMB
from paceline.compute.optimizers import LARS as LARS

__all__ = ["LAMB", "LARS"]
