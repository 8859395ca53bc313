"""Collectives of one queue begin in order, and beside each other where that is safe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.progress_engine import ENGINE, Begun, Operation, Steps, last


class Nobody:
    """An owner that has nothing to say."""

    broken: Exception | None = None
    crowded = False

    def look(self, operation: Operation, waited: float) -> None:
        raise AssertionError

    def explain(self, operation: Operation, error: Exception) -> Exception:
        return error

    def account(self, operation: Operation, waited: float) -> None: ...


class Part:
    """What is sent: it begins, and ends when the link lets it."""

    def __init__(self, log: list[tuple[str, int]], number: int) -> None:
        self.log, self.number, self.over = log, number, False

    def steps(self) -> Steps:
        self.log.append(("begins", self.number))
        yield Begun(lambda: self.over)


parts = st.integers(0, 3)


@given(
    asked=st.lists(st.tuples(parts, st.booleans(), st.booleans()), min_size=1, max_size=6),
    draw=st.randoms(use_true_random=False),
)
def test_what_begins_when(asked: list[tuple[int, bool, bool]], draw: Any) -> None:
    """Each collective has some parts, of which the final one may be its last; and may overtake or not."""
    log, made = list[tuple[str, int]](), list[Operation]()
    under: list[list[Part]] = [
        [Part(log, number) for _ in range(1 + more)] for number, (more, _, _) in enumerate(asked)
    ]

    def steps(number: int, ends: bool) -> Iterator[Any]:
        *before, final = under[number]
        for part in before:
            yield from part.steps()
        yield from last(final.steps()) if ends else final.steps()
        log.append(("ends", number))

    owner, queue = Nobody(), object()
    for number, (_, ends, overtakes) in enumerate(asked):
        made.append(Operation(owner, steps(number, ends), "", str(number), "", 0))  # type: ignore[arg-type]
        made[-1].overtakes = overtakes
        ENGINE.enqueue(queue, made[-1])
    while not all(operation.done for operation in made):
        waiting = [part for some in under for part in some if not part.over]
        assert waiting, (asked, log, [o.done for o in made], [o.error for o in made])
        draw.choice(waiting).over = True
        ENGINE.progress()
        begun = [number for what, number in log if what == "begins"]
        assert begun == sorted(begun)
        for number, (_, _, overtakes) in enumerate(asked):
            at = [place for place, (what, which) in enumerate(log) if (what, which) == ("begins", number)]
            open_ = [b for b in range(number) if at and ("ends", b) not in log[: at[0]]]
            assert not open_ or overtakes
            assert all(asked[other][1] and len(under[other]) == begun.count(other) for other in open_)
            before = range(number)
            free = all(made[b].done or (asked[b][1] and begun.count(b) == len(under[b])) for b in before)
            turns = all(asked[b][2] for b in range(1, number) if not made[b].done)
            if overtakes and free and turns:
                assert at
    assert sorted(number for what, number in log if what == "ends") == [*range(len(asked))]
