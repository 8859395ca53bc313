"""Tracks which loops the script is inside at the moment, and whether it has trained yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.session.training_loop import LoopState


class ScriptPosition:
    """The position of this worker's script.

    A resumed script `replays` what was done before: until its first step, loop bodies are skipped and collectives
    return their recorded results.
    """

    def __init__(self) -> None:
        self.replays = False
        self.took_step = False
        self.uses_step = False  # the script calls trainer.step()
        self.loops: list[LoopState] = []  # that the script iterates now; the first to begin is the first
        self.calls: Counter[int] = Counter()  # of steps(), by trainer: the numbers of their loops
        self.round: set[int] = set()  # trainers that made a step() outside of loops since the last checkpoint was due
        self._left_loops: list[LoopState] = []  # by `break`, before their end

    @contextmanager
    def inside(self, loop: LoopState) -> Iterator[None]:
        """Tracks a loop while the script iterates it."""
        self.loops.append(loop)
        try:
            yield
        except (GeneratorExit, KeyboardInterrupt):
            self._left_loops.append(loop)
            raise
        finally:
            self.loops = [other for other in self.loops if other is not loop]

    @property
    def enclosing_loop(self) -> LoopState | None:
        """The loop in whose body the script is. Of several loops that are iterated together it is the first."""
        return next((loop for loop in self.loops if loop.outer is self.loops[-1].outer), None)

    def complete_left_loops(self) -> None:
        """Marks loops that were left by `break` as complete: a resumed run does not return to them, since more training
        follows.
        """
        while self._left_loops:
            self._left_loops.pop().complete = True

    def begins_round(self, trainer: int, loop: bool) -> bool:
        """Outside of loops: returns whether all trainers have taken equally many single steps before a `loop` or the
        next single step of a `trainer` begins. Of several trainers that take single steps in turn, a checkpoint must
        find all of them after the same turn.
        """
        begins = loop or not self.round or trainer in self.round
        if begins:
            self.round.clear()
        return begins
