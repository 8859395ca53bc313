"""What a worker hears of generations, of which it may miss some: agents tell of the newest one alone."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest
from launching import free_port
from replay import Replay

from paceline.base.environment import World
from paceline.comm.communicator import Group
from paceline.errors import PeerLostError
from paceline.team.agent_commands import AgentCommands, Generation


class Agent:
    """Tells a worker, whose `commands` hear it; `heard` are the generations that interrupt."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.heard: list[int] = []
        self.news = threading.Event()
        self.commands = AgentCommands(
            self._theirs.fileno(), lambda generation: self.heard.append(generation.number), lambda _: None
        )

    def tell(self, number: int, members: tuple[int, ...], at_once: int, port: int = 1) -> Generation:
        said = {"number": number, "members": members, "store": ("127.0.0.1", port), "at_once": at_once}
        self._ours.sendall(json.dumps(said).encode() + b"\n")
        return self.commands.wait(number - 1)

    def close(self) -> None:
        self._ours.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.close()


def test_newer_generation_ends_one_whose_end_was_missed(agent: Agent) -> None:
    """Number 6, without worker 2, came and went before it was heard of."""
    agent.tell(5, (0, 1, 2), at_once=3)
    assert agent.commands.has_newer(4)
    assert not agent.commands.has_newer(4, at_once=True)
    agent.tell(7, (0, 1, 2), at_once=6)
    assert agent.commands.has_newer(5, at_once=True)
    assert not agent.commands.has_newer(6, at_once=True)
    assert agent.commands.wait(5, at_once=True).number == 7
    assert agent.heard == [5, 7]  # 5 since nobody knew of 3
    agent.tell(8, (0, 1, 2, 3), at_once=6)
    assert agent.heard == [5, 7]


def test_forming_an_ended_generation_is_interrupted(agent: Agent) -> None:
    """A newcomer waits for worker 0, which is in another generation long since: it must not wait for ever."""
    port = free_port()
    generation = agent.tell(5, (0, 2), at_once=4, port=port)
    group, errors, done = Group(World(rank=2, newcomer=True)), [], threading.Event()

    def form() -> None:
        try:
            group.form(generation.world(World(rank=2), 2), lambda: agent.commands.has_newer(5, at_once=True))
        except PeerLostError as error:
            errors.append(error.what)
        done.set()

    threading.Thread(target=form, daemon=True).start()
    agent.tell(7, (0, 2), at_once=6, port=port)
    assert done.wait(60)
    assert len(errors) == 1  # by whichever of its two threads saw it first


def test_coordinator_sends_the_last_immediate_generation() -> None:
    play = Replay(1, 3)
    play.begin()
    play.lose_worker()
    play.enter()
    told = play.ask(0)["generation"]
    assert (told["number"], told["at_once"]) == (1, 1)
    play.come_back()
    told = play.ask(0)["generation"]
    assert (told["number"], told["at_once"]) == (2, 1)
