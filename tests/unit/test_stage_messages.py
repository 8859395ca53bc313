"""Messages between the stages of a pipeline: what a worker sends, awaits and reads, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.parallel.pipeline.schedule import BACKWARD, FORWARD, Action
from paceline.parallel.pipeline.stage_messages import Read, StageMessages

FIRST, SECOND = Action(FORWARD, 0, 0), Action(FORWARD, 0, 1)


class Line:
    """A line of two workers, seen by the first one. `mail` has the parts of messages that come from the other one."""

    rank, size = 0, 2

    def __init__(self, hosts: list[int], mail: list[float]) -> None:
        self.hosts, self.log = hosts, list[str]()
        self._mail = iter(mail)

    def start_send(self, tensor: torch.Tensor, worker: int) -> None:
        self.log.append(f"send {float(tensor):g}")

    def receive(self, tensor: torch.Tensor, worker: int) -> None:
        self.log.append("receive")
        tensor.fill_(next(self._mail))

    def start_receive(self, parts: Iterator[torch.Tensor], worker: int) -> None:
        self.log.append("await")
        for part in parts:
            part.fill_(next(self._mail))

    def finish(self, work: Any) -> None:
        self.log.append("finish")


def two_parts(action: Action) -> Read:
    """Reads two numbers; the second tensor is made once the first number is known."""
    yield (number := torch.empty(1, dtype=torch.float64))
    yield (other := torch.full_like(number, float("nan")))
    return action, float(number), float(other)


def started(line: Line, unreadable: set[Action], ahead: bool = True) -> StageMessages:
    read = lambda action: None if action in unreadable else two_parts(action)
    messages = StageMessages(line, "1f1b", read, ahead)  # type: ignore[arg-type]
    messages.expect([[], [FIRST, SECOND]])
    return messages


def test_the_next_message_of_another_host_is_awaited_before_one_is_sent() -> None:
    line = Line([0, 1], [1, 2, 3, 4])
    messages = started(line, set())
    messages.send(Action(FORWARD, 1, 0), [torch.ones(1)])
    assert messages.receive(FIRST, 1) == (FIRST, 1, 2)
    messages.send(Action(FORWARD, 1, 1), [torch.ones(1)])
    assert messages.receive(SECOND, 1) == (SECOND, 3, 4)
    assert line.log == ["await", "send 1", "finish", "await", "send 1", "finish"]


def test_a_message_that_cannot_be_read_yet_is_awaited_later() -> None:
    line, unreadable = Line([0, 1], [1, 2, 3, 4]), {FIRST}
    messages = started(line, unreadable)
    messages.send(Action(FORWARD, 1, 0), [torch.ones(1)])
    unreadable.clear()
    messages.send(Action(FORWARD, 1, 1), [torch.ones(1)])
    assert messages.receive(FIRST, 1) == (FIRST, 1, 2)
    assert line.log == ["send 1", "await", "send 1", "finish", "await"]


@pytest.mark.parametrize(("hosts", "ahead"), [([0, 0], True), ([0, 1], False)])
def test_messages_within_a_host_or_of_devices_are_not_awaited(hosts: list[int], ahead: bool) -> None:
    line = Line(hosts, [1, 2, 3, 4])
    messages = started(line, set(), ahead)
    messages.send(Action(FORWARD, 1, 0), [torch.ones(1)])
    assert messages.receive(FIRST, 1) == (FIRST, 1, 2)
    assert line.log == ["send 1", "receive", "receive"]


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_a_message_that_comes_early_is_put_aside(hosts: list[int]) -> None:
    messages = started(Line(hosts, [1, 2, 3, 4]), set())
    assert messages.receive(SECOND, 1) == (SECOND, 3, 4)
    assert messages.receive(FIRST, 1) == (FIRST, 1, 2)


def test_a_stage_hands_on_to_one_of_the_same_worker() -> None:
    line, mine = Line([0, 1], []), Action(BACKWARD, 0, 0)
    messages = started(line, set())
    messages.send(mine, [torch.tensor([number], dtype=torch.float64) for number in (5, 6)])
    assert messages.receive(mine, 0) == (mine, 5, 6)
    assert line.log == []
