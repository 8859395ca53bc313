"""`paceline.lightning`: trains a LightningModule on any number of workers, and strategies for Lightning's own loop."""

from typing import TYPE_CHECKING, Any

from paceline.integrations.lightning.training import trainer as trainer

if TYPE_CHECKING:
    from paceline.integrations.lightning.strategies import PacelineFabricStrategy as PacelineFabricStrategy
    from paceline.integrations.lightning.strategies import PacelineStrategy as PacelineStrategy

__all__ = ["trainer", "PacelineStrategy", "PacelineFabricStrategy"]


def __getattr__(name: str) -> Any:
    """Makes the strategies when they are used: their classes derive from Lightning's."""
    if name not in ("PacelineStrategy", "PacelineFabricStrategy"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paceline.integrations.lightning import strategies

    return getattr(strategies, name)
