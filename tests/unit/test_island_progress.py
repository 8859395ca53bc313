"""The progress of an island in a round of local SGD, as it goes to another worker and into a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.base.batching import Agreed
from paceline.local_sgd.island_state import InnerOptimizerState, IslandProgress

AGREED = Agreed(1.0, 0.5, 0, 0, 0, 0, 0, 0, 0, {}, (0.1,), ())


def copied(progress: IslandProgress) -> IslandProgress:
    """The progress that another worker reads, or a resumed run."""
    replica: Any = None  # a state that came as a tree goes on as that tree
    return IslandProgress.from_tree(progress.to_tree(replica), 0)


@pytest.mark.parametrize("copy_after", [0, 1, 2])
def test_local_sgd_parameters_without_gradients_are_the_same_after_a_join_or_resume(copy_after: int) -> None:
    """A parameter is unused if no step since the round's begin used it, wherever the island's state was copied."""
    progress = IslandProgress(InnerOptimizerState.from_tree({"expected": 0.0, "at": 0}, 0))
    for step, unused in enumerate([(1, 2), (2, 3)]):
        if step == copy_after:
            progress = copied(progress)
        progress.add_step(replace(AGREED, unused=unused), norm=1.0, lr=0.1)
    if copy_after == 2:
        progress = copied(progress)
    assert progress.unused == {2}
    assert progress.steps == 2
