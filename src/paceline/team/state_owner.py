"""The interface of the object that holds the training state, which the team hands over and takes over."""

from __future__ import annotations

from typing import Any, Protocol

from paceline.team.agent_commands import Generation


class StateOwner(Protocol):
    """Holds the state of the training, and hands it over to other workers or takes it over from them."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    def hand_over(self) -> Any:
        """Returns the full state, as a tree of plain values and tensors."""

    def take_over(self, tree: Any, newcomer: bool) -> None:
        """Takes the state that another worker handed over; a worker that is not a newcomer keeps its position in its
        script.
        """

    def complete(self) -> None:
        """Does what a step that counts may have left to do. Collective among the workers of a replica."""

    def step_bytes(self) -> int:
        """The bytes of a step's sums."""

    def on_state_sent(self, worker: int, size: int, full_size: int, seconds: float | None) -> None:
        """Reports that this worker is about to send `size` of the state's `full_size` bytes to a worker, which takes
        `seconds`, if that is known.
        """

    def formed(self, generation: Generation, seconds: float) -> None:
        """Assigns memory and shares again after a generation has formed, which took `seconds`. Collective."""

    def load_base(self, tree: Any) -> None:
        """Takes, at a newcomer that is not admitted yet, a state that is some steps old, in the form of a hand-over."""

    def apply_step(self, message: list[Any]) -> None:
        """Takes, after `load_base`, a part of a later step of the team."""
