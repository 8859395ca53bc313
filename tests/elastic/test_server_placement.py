"""The coordinator's decisions about parameter servers: on which host each is, and what becomes of one that is lost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from paceline.team.coordinator import ALIKE, AWAITED, RETURN, Coordinator
from paceline.team.membership import Announcement, Membership
from paceline.team.server_placement import ServerPlacement
from paceline.team.worker_slots import WorkerReport, WorkerSlot

STORE, TAKES = ("127.0.0.1", 1), ("127.0.0.1", 2, "secret")
SERVER = 1_000_000


class Served:
    """A host with two workers and three parameter servers that hold the state, each also what another keeps."""

    def __init__(self) -> None:
        self.journal: list[dict[str, Any]] = []
        self.now = 0.0
        worker = WorkerReport(store=STORE, ready=True, servers=3, copies=1)
        self.said = {0: worker, 1: worker}
        self.other: dict[int, WorkerReport] = {}  # of another host
        self.coordinator = self.start(Membership((0, 1)))
        self.report()
        for number in range(3):
            self.said[SERVER + number] = WorkerReport(store=STORE, newcomer=True, at=TAKES, holds=True)
        self.report()

    def start(self, membership: Membership) -> Coordinator:
        record = lambda event, **fields: self.journal.append({"event": event, **fields})
        made = Coordinator(3, 1, record, membership)
        made.join("a", "logs", STORE, [0, 1], 2)
        return made

    def report(self) -> None:
        self.now += 0.05
        self.coordinator.report("a", self.said, 7, self.now)

    def ends(self, *servers: int, **more: Any) -> None:
        how = {"status": -9, "why": "was killed by SIGKILL"} | more
        for server in servers:
            self.said[SERVER + server] = replace(self.said[SERVER + server], **how)
        self.report()

    def serves(self, server: int, **more: Any) -> None:
        life = self.coordinator.slots[SERVER + server].life
        self.said[SERVER + server] = WorkerReport(life=life, store=STORE, newcomer=True, at=TAKES, **more)
        self.report()

    @property
    def lives(self) -> list[int]:
        return [seat.life for _, seat in sorted(self.coordinator.slots.items())]


def test_killed_parameter_server_with_a_copy_joins_between_two_steps() -> None:
    play = Served()
    assert play.journal == []
    play.ends(1)
    assert play.lives == [0, 0, 0, 1, 0]
    assert play.coordinator.lines[-1][1].startswith(
        "server 1 was killed by SIGKILL: server 2 has a copy of its state\n"
    )
    assert sorted(play.coordinator.orders("a")["servers"]) == [0, 2]
    assert [entry["event"] for entry in play.journal] == ["lost"]
    play.serves(1)
    assert play.journal[-1] == {"event": "generation", "number": 1, "workers": [0, 1], "planned": True, "at_once": 0}
    play.said |= {number: replace(play.said[number], formed=1) for number in (0, 1)}
    play.serves(1, holds=True)
    play.ends(2)
    assert play.lives == [0, 0, 0, 1, 1]
    assert len(play.journal) == 3


def test_loss_of_a_parameter_server_and_then_its_copy_resumes_from_the_checkpoint() -> None:
    for servers in ((1, 2), (0, 2)):
        play = Served()
        play.ends(servers[0])
        play.serves(servers[0])  # it has not got the state back
        play.ends(servers[1])
        assert "all workers and servers return to the last checkpoint" in play.coordinator.lines[-1][1]
        assert play.lives == [1, 1, *(2 if server == servers[0] else 1 for server in range(3))]


@pytest.mark.parametrize("raised", [False, True])
def test_loss_of_a_parameter_server_with_its_copy_resumes_from_the_checkpoint_once(raised: bool) -> None:
    """Both are in one report, or within the time in which exceptions are judged together."""
    play = Served()
    more = {"failed": ("OSError", 0, "OSError: disk"), "status": 1} if raised else {}
    play.ends(1, 2, **more)
    play.now += ALIKE
    play.coordinator.tick(play.now)
    assert play.coordinator.failing == {}
    assert play.lives == [1, 1, 1, 1, 1]
    [entry, restarted] = play.journal
    assert (restarted["event"], restarted["lives"]) == ("restarted", {"0": 1, "1": 1})
    assert (entry["event"], entry["workers"]) == ("lost", [SERVER + 1, SERVER + 2])
    how = "raised OSError" if raised else "was killed by SIGKILL"
    assert play.coordinator.lines[-1][1].splitlines() == [
        f"server 1 {how}, server 2 {how}: all workers and servers return to the last checkpoint",
        "  log: logs/server-1.log",
        "  log: logs/server-2.log",
    ]


def test_restarted_coordinator_knows_which_parameter_server_joins_again() -> None:
    play = Served()
    play.ends(1)
    play.serves(1)
    play.coordinator = play.start(Membership((0, 1)))
    play.coordinator.recovering = play.now + RETURN
    play.report()
    assert play.coordinator.recovering == math.inf
    assert play.coordinator.announcement == Announcement(1, (0, 1), planned=True)


# ---- agents that are silent


def on_two_hosts(copies: int) -> Served:
    """Another host has another worker and the second server."""
    play = Served()
    play.said = {0: play.said[0], SERVER: play.said[SERVER]}
    worker = WorkerReport(store=STORE, ready=True, servers=2, copies=copies)
    play.said[0], other = worker, {1: worker, SERVER + 1: play.said[SERVER]}
    play.journal.clear()
    record = lambda event, **fields: play.journal.append({"event": event, **fields})
    play.coordinator = Coordinator(3, 1, record, Membership((0, 1)))
    play.coordinator.join("a", "logs", STORE, [0], 1)
    play.coordinator.join("b", "logs", STORE, [1], 1)
    for _ in range(2):
        play.report()
        play.coordinator.report("b", other, 7, play.now)
    assert play.coordinator.orders("a")["servers"] == {0: TAKES, 1: TAKES}
    play.other = other
    return play


def test_silent_only_host_with_parameter_servers_is_waited_for() -> None:
    play = Served()
    lines = [*play.coordinator.lines]
    play.coordinator.lost_agent("a", "it is silent")
    play.coordinator.tick(play.now + 1000.0)
    play.report()
    assert (play.lives, play.journal, play.coordinator.failing) == ([0] * 5, [], {})
    assert play.coordinator.lines == lines


@pytest.mark.parametrize("comes", [True, False])
def test_silent_host_with_the_only_copy_of_parameters_is_waited_for(comes: bool) -> None:
    play = on_two_hosts(copies=0)
    play.coordinator.lost_agent("b", "the agent on b is silent")
    assert (play.lives, play.journal, play.coordinator.failing) == ([0] * 4, [], {})
    waits = "no other server has a copy of its state: the run waits for 60 s"
    said = f"server 1 may be lost (the agent on b is silent), and {waits}"
    assert play.coordinator.lines[-1][1] == said
    assert play.coordinator.due == play.now + AWAITED
    if comes:
        play.coordinator.report("b", play.other, 9, play.now + 50.0)
        assert play.coordinator.lines[-1][1] == "the host of server 1 responds again"
    play.coordinator.tick(play.now + AWAITED)
    assert play.coordinator.due == math.inf
    assert play.coordinator.failing == ({} if comes else {SERVER + 1: "is lost (the agent on b is silent)"})


@pytest.mark.parametrize("how", ["ended", "copied"])
def test_ended_host_or_host_with_copied_parameters_is_not_waited_for(how: str) -> None:
    play = on_two_hosts(copies=int(how == "copied"))
    play.coordinator.lost_agent("b", "the agent on b disconnected", ended=how == "ended")
    assert play.coordinator.awaited == {}
    if how == "ended":
        assert play.coordinator.failing == {SERVER + 1: "is lost (the agent on b disconnected)"}
    else:
        assert [entry["workers"] for entry in play.journal if entry["event"] == "lost"] == [[SERVER + 1], [1]]


def spread(hosts: str, servers: int, least: int = 1) -> ServerPlacement:
    """Workers on these hosts, one after another, want so many servers."""
    lives = ServerPlacement({number: WorkerSlot(host) for number, host in enumerate(hosts)}, set(), set())
    lives.place_servers("a", {0: WorkerReport(servers=servers)}, False, least)
    return lives


def where(lives: ServerPlacement) -> str:
    return "".join(seat.agent for number, seat in sorted(lives.slots.items()) if number >= SERVER)


def test_parameter_servers_are_spread_evenly_with_copies_on_other_hosts() -> None:
    assert where(spread("aab", 3, least=4)) == ""
    assert where(spread("aaa", 3)) == "aaa"
    assert where(spread("abc", 1)) == "a"
    for hosts in ("aab", "aabbc", "abcd", "abcdefg"):
        for servers in range(1, 20):
            found = where(spread(hosts, servers))
            counts = [found.count(host) for host in dict.fromkeys(hosts)]
            assert max(counts) - min(counts) <= 1
            assert sum(counts) == servers
            pairs = zip(found, found[1:] + found[:1], strict=True)
            same = sum(one == other for one, other in pairs)
            assert same == (servers % 2 if len(counts) == 2 else 0) or servers == 1


def test_parameter_server_of_a_lost_host_starts_on_another_host() -> None:
    lives = spread("aabbc", 3)
    lives.gone.add("b")
    lives.restart(SERVER + 1, 1)
    assert where(lives) == "aac"
    assert lives.wanted("b")[SERVER + 1] == {"life": 0, "out": True, "newcomer": True}
    lives.gone.add("c")
    lives.restart(SERVER + 2, 1)
    assert where(lives) == "aaa"
    lives.gone.clear()
    assert lives.wanted("a")[SERVER + 1] == {"life": 1, "out": False, "newcomer": True}
