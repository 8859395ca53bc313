"""The coordinator's decisions, through any order of losses, arrivals, silent hosts and restarts of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from replay import Replay

from paceline.team.coordinator import ALONE, RETURN, Coordinator
from paceline.team.host_failures import HostFailures
from paceline.team.membership import Announcement, Membership
from paceline.team.worker_slots import LONGEST, WorkerReport

HOSTS = {  # by the workers of a replica; those of "a" begin the run
    1: {"a": [0, 1], "b": [2, 3], "c": [4]},
    2: {"a": [0, 1, 2, 3], "b": [4, 5, 6], "c": [7]},
}
STORE = ("127.0.0.1", 1)
TAKES = ("127.0.0.1", 2, "secret")


@dataclass
class Play:
    """Agents with their workers, which do at once what they are told, though one after another where they leave, and a
    coordinator that may be started again.

    `journal` is what the coordinator wrote: its generations are all that a new one knows.
    """

    places: int = 1
    spares: dict[str, int] = field(default_factory=dict)  # by host
    now: float = 0.0
    workers: dict[str, dict[int, WorkerReport]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    journal: list[dict[str, Any]] = field(default_factory=list)
    heard: dict[int, int] = field(default_factory=dict)  # by worker: the last generation that it was told
    raised: int = 0
    replicas: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by worker and life

    def __post_init__(self) -> None:
        self.coordinator = self.start()
        for agent, numbers in self.hosts.items():
            self.workers[agent] = {n: WorkerReport(store=STORE, newcomer=agent != "a") for n in numbers}
            self.join(agent)
        self.settle()
        for number in self.hosts["a"]:
            self.change(number, ready=True, replica=self.places)
        self.settle()

    @property
    def hosts(self) -> dict[str, list[int]]:
        return HOSTS[self.places]

    def start(self) -> Coordinator:
        generations = [entry for entry in self.journal if entry["event"] == "generation"]
        *before, known = [{"workers": self.hosts["a"], "number": 0, "at_once": 0}, *generations]
        past = tuple(before[-1]["workers"]) if before else ()
        membership = Membership(tuple(known["workers"]), known["number"], known["at_once"], before=past)
        made = Coordinator(100, 1, self.record, membership)
        made.version = 1_000_000 * (1 + len(self.journal))
        return made

    def record(self, event: str, /, **fields: Any) -> None:
        self.journal.append({"event": event, **fields})

    def join(self, agent: str) -> None:
        numbers = list(self.workers[agent])
        spares = self.spares.get(agent, 0)
        assert self.coordinator.join(agent, "logs", STORE, numbers, len(numbers), spares) == numbers

    def change(self, number: int, **fields: Any) -> None:
        for workers in self.workers.values():
            if number in workers and workers[number].status is None:
                workers[number] = replace(workers[number], **fields)

    def again(self) -> None:
        """The coordinator dies and is started again."""
        self.coordinator = self.start()
        self.coordinator.recovering = self.now + RETURN
        for agent in self.workers:
            if agent not in self.silent:
                self.join(agent)

    def settle(self, seconds: float = 1.0) -> None:
        """Time goes on: agents report, and do what they are told. Once nothing changes any more, nothing will before
        the coordinator's next moment, which comes at once.
        """
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            before = self.coordinator.version, {agent: {**workers} for agent, workers in self.workers.items()}
            for agent in self.workers:
                if agent not in self.silent:
                    self.coordinator.report(agent, self.workers[agent], 1, self.now)
            self.coordinator.tick(self.now)
            for agent in self.workers:
                if agent not in self.silent:
                    self.obey(agent)
            if (self.coordinator.version, self.workers) == before and self.coordinator.recovering == math.inf:
                self.now = max(self.now, min(end, self.coordinator.due) - 0.05)

    def obey(self, agent: str) -> None:
        orders = self.coordinator.orders(agent)
        for number, wanted in orders["workers"].items():
            said = self.workers[agent][number]
            if wanted["life"] > said.life:
                self.workers[agent][number] = WorkerReport(life=wanted["life"], store=STORE, newcomer=True)
            elif wanted["out"] and said.life == wanted["life"] and said.status is None:
                self.workers[agent][number] = replace(said, status=-9, why="was ended")
        for number in orders["coming"]:
            self.change(number, current=True)
        generation = orders["generation"]
        left = False
        for number, said in self.workers[agent].items():
            if generation is None or said.status is not None or said.stopped or said.failed is not None:
                continue
            state = said.formed >= 0 or said.ready
            waiting = said.waiting and said.formed < 0
            if generation["number"] <= said.formed or (waiting and number not in generation["members"]):
                continue
            if number in generation["members"] and (state or waiting):
                assert said.life == wanted_life(orders, number), "a process of before is told of a team it is not of"
                self.workers[agent][number] = replace(said, formed=generation["number"])
                first = generation["members"].index(number) // self.places * self.places
                replica = generation["members"][first : first + self.places]
                assert self.replicas.setdefault((number, said.life), replica) == replica, "its mates are others"
            elif state and not left:
                self.workers[agent][number] = replace(
                    said, status=76 if generation["at_once"] > max(said.formed, 0) else 75
                )
                left = True

    @property
    def members(self) -> set[int]:
        return set(self.coordinator.membership.members)


def wanted_life(orders: dict[str, Any], number: int) -> int:
    return int(orders["workers"][number]["life"])


def events(places: int) -> st.SearchStrategy[list[tuple[str, Any]]]:
    numbers = st.sampled_from([number for numbers in HOSTS[places].values() for number in numbers])
    return st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["kill", "stop", "raise", "arrive", "leave"]), numbers),
            st.tuples(st.sampled_from(["silent", "back"]), st.sampled_from(["b", "c"])),
            st.tuples(st.sampled_from(["again", "wait", "moment"]), st.none()),
        ),
        max_size=25,
    )


def happen(play: Play, what: str, who: Any) -> None:
    if what == "kill":
        play.change(who, status=-9, why="was killed")
    elif what == "stop":
        play.change(who, stopped=True)
    elif what == "raise":
        play.raised += 1
        play.change(who, failed=("ValueError", play.raised, "no"))
    elif what == "arrive":
        for workers in play.workers.values():
            if who in workers and workers[who].newcomer and workers[who].formed < 0:
                play.change(who, waiting=True, at=TAKES if play.places == 1 else None, replica=play.places)
    elif what == "leave":
        for workers in play.workers.values():
            if who in workers and (workers[who].ready or workers[who].formed >= 0):
                play.change(who, leaves=True)
    elif what == "silent" and who not in play.silent:
        play.silent.add(who)
        play.coordinator.lost_agent(who, "it is silent")
    elif what == "back" and who in play.silent:
        play.silent.discard(who)
        play.join(who)
    elif what == "again":
        play.again()
    elif what == "wait":
        play.settle()
    else:
        play.settle(0.05)


SILENT_WHILE_RECOVERING: list[tuple[str, Any]] = [
    *[("kill", 0), ("kill", 1), ("arrive", 2), ("moment", None), ("again", None), ("wait", None)],
    *[("silent", "b"), ("again", None), ("back", "b"), ("silent", "b")],
]

BACK_AFTER_THE_COORDINATOR: list[tuple[str, Any]] = [
    *[("arrive", 2), ("wait", None), ("arrive", 4)],
    *[("silent", "b"), ("wait", None), ("again", None)],
]
ALL_TOLD_ONE_AFTER_ANOTHER: list[tuple[str, Any]] = [("leave", 0), ("moment", None), ("moment", None), ("leave", 3)]
TOLD_BEFORE_THE_COORDINATOR: list[tuple[str, Any]] = [("leave", 0), ("moment", None), ("moment", None), ("again", None)]
SILENT_OFTEN: list[tuple[str, Any]] = [
    *[("silent", "b"), ("back", "b"), ("silent", "b"), ("back", "b"), ("wait", None), ("kill", 2), ("wait", None)],
]


ADMITTED: list[tuple[str, Any]] = [("arrive", 2), ("arrive", 3), ("arrive", 4), ("wait", None)]


@settings(max_examples=150, deadline=None)
@example((1, {}, SILENT_WHILE_RECOVERING))
@example((1, {}, SILENT_OFTEN))
@example((1, {}, BACK_AFTER_THE_COORDINATOR))
@example(
    (1, {"b": 1, "c": 1}, [*ADMITTED, ("kill", 1), ("moment", None), ("kill", 3), ("moment", None), ("again", None)])
)
@example((1, {"b": 1, "c": 1}, [*ADMITTED, ("kill", 1), ("kill", 2), ("kill", 3), ("kill", 4), ("wait", None)]))
@example((2, {}, ALL_TOLD_ONE_AFTER_ANOTHER))
@example((2, {}, TOLD_BEFORE_THE_COORDINATOR))
@example((2, {}, [("leave", 1), ("silent", "b"), ("silent", "b"), ("again", None)]))
@given(
    st.sampled_from([1, 2]).flatmap(
        lambda places: st.tuples(st.just(places), st.sampled_from([{}, {"c": 1}, {"b": 1, "c": 1}]), events(places))
    )
)
def test_any_order_of_faults_and_joins_leaves_one_team_of_all_living_workers(
    case: tuple[int, dict[str, int], list[tuple[str, Any]]],
) -> None:
    play = Play(case[0], case[1])
    for what, who in case[2]:
        happen(play, what, who)
        generations = [entry for entry in play.journal if entry["event"] == "generation"]
        numbers = [entry["number"] for entry in generations]
        assert numbers == sorted(set(numbers)), "a generation was announced twice"
        assert all(len(entry["workers"]) % play.places == 0 for entry in generations), "a replica is not whole"
        assert all(len(entry["workers"]) <= full_size(play) for entry in generations), "a spare is not needed"
    for agent in sorted(play.silent):
        happen(play, "back", agent)
    for _ in range(4):
        play.settle(max(5.0, min(play.coordinator.due, play.now + LONGEST) - play.now))  # pauses are long
        for workers in play.workers.values():
            for number in workers:
                happen(play, "arrive", number)
                play.change(number, stopped=False)  # where nobody could go on without it
    if play.coordinator.failing or play.coordinator.over or play.coordinator.stop:
        return  # all that had the state were lost at once, or told to leave
    everybody = {n: said for workers in play.workers.values() for n, said in workers.items()}
    living = {n for n, said in everybody.items() if said.status is None}
    assert everybody.keys() - living == {n for n, said in everybody.items() if said.leaves and said.status == 75}
    assert play.members <= living
    assert min(len(living), full_size(play)) - len(play.members) < play.places, "a replica is not let in"
    assert play.coordinator.membership.entered == play.members
    for number in play.members:
        assert everybody[number].formed == play.coordinator.membership.number or play.coordinator.membership.number == 0


def full_size(play: Play) -> int:
    """The workers of all hosts without the spares."""
    return sum(len(numbers) for numbers in play.hosts.values()) - sum(play.spares.values())


def with_spares(**spares: int) -> Play:
    """A team of the workers of all hosts, with so many spares on these."""
    play = Play(1, spares)
    for number in (2, 4, 3) if "b" in spares else (2, 3, 4):
        happen(play, "arrive", number)
        play.settle()
    return play


def test_spare_of_another_host_takes_the_place_of_a_lost_worker() -> None:
    play = with_spares(c=1)
    assert play.members == {0, 1, 2, 3}
    assert play.coordinator.status()["spares"] == [4]
    assert play.coordinator.status()["workers"][4]["state"] == "spare"
    assert play.coordinator.orders("a")["coming"] == {4: TAKES}, "no worker of its host has the state"
    happen(play, "kill", 1)
    play.settle(0.5)
    assert play.members == {0, 2, 3, 4}
    happen(play, "arrive", 1)
    play.settle(2.0)
    happen(play, "arrive", 1)
    play.settle()
    assert play.members == {0, 2, 3, 4}
    assert play.coordinator.status()["spares"] == [1]
    assert play.coordinator.orders("a")["coming"] == {1: TAKES}, "one worker of its host has the state"
    assert play.coordinator.lines[-1][1] == "worker 1 is ready as a spare: 4 workers, 1 spare"


def test_host_that_replaces_one_that_is_left_out_makes_the_team_full() -> None:
    """Until it has come, spares take the place of the lost workers; later ones wait again."""
    play = with_spares(c=1)
    play.coordinator.hosts = HostFailures(1)
    assert play.coordinator.refuses("b", "host-b", ()) == ""
    happen(play, "kill", 2)
    play.settle(2.0)
    assert [event["workers"] for event in play.journal if event["event"] == "excluded"] == [[2, 3]]
    assert play.members == {0, 1, 4}
    assert play.coordinator.spares.full_size == 4, "one more worker is to come"
    numbers = play.coordinator.join("d", "logs", STORE, [], 2)
    play.workers["d"] = {n: WorkerReport(store=STORE, newcomer=True) for n in numbers}
    assert play.coordinator.spares.full_size == 4
    for number in numbers:
        happen(play, "arrive", number)
        play.settle()
    assert len(play.members) == 4
    assert len(play.coordinator.status()["spares"]) == 1
    play.join("d")
    assert play.coordinator.spares.full_size == 4, "it has come once"


def test_spares_of_a_host_with_two_workers_get_no_copy() -> None:
    play = with_spares(b=1)
    assert play.members == {0, 1, 2, 4}
    assert play.coordinator.status()["spares"] == [3]
    assert play.coordinator.orders("a")["coming"] == {3: TAKES}
    happen(play, "kill", 2)
    play.settle(0.5)
    assert play.members == {0, 1, 3, 4}, "a worker of the same host comes first"


def test_kill_of_a_spare_leaves_the_team_alone() -> None:
    play = with_spares(c=1)
    number, life = play.coordinator.membership.number, play.workers["c"][4].life
    happen(play, "kill", 4)
    play.settle(0.5)
    assert (play.coordinator.membership.number, play.members) == (number, {0, 1, 2, 3})
    assert play.workers["c"][4].life == life + 1, "it is started again at once"
    said = [text.partition("\n")[0] for _, text, _ in play.coordinator.lines]
    assert said[-1] == "worker 4 was killed while it was a spare"


def test_kill_of_a_spare_before_the_first_step_does_not_end_the_run() -> None:
    play = Play(1, {"a": 0, "c": 1})
    play.coordinator.membership.established.clear()
    assert not play.coordinator.membership.begun
    happen(play, "kill", 4)
    play.settle(0.5)
    assert not play.coordinator.failing


def test_spare_takes_the_place_of_a_worker_that_leaves() -> None:
    play = with_spares(c=1)
    happen(play, "leave", 1)
    play.settle()
    assert play.members == {0, 2, 3, 4}


def test_team_that_waits_for_a_spare_goes_on_without_it() -> None:
    """The spare is lost in the moment in which the members of the new generation begin to wait for it."""
    play = with_spares(c=1)
    happen(play, "kill", 1)
    play.settle(0.05)
    assert play.coordinator.orders("a")["generation"]["admits"]
    assert play.coordinator.orders("a")["generation"]["members"] == [0, 2, 3]
    happen(play, "kill", 4)
    play.settle(1.0)
    announcement = play.coordinator.announcement
    assert announcement is not None
    assert announcement.members == (0, 2, 3)
    assert not play.coordinator.orders("a")["generation"]["admits"]


def admitted() -> Play:
    play = Play()
    for number in (2, 3, 4):
        happen(play, "arrive", number)
    play.settle()
    assert play.members == {0, 1, 2, 3, 4}
    return play


def test_restart_of_the_coordinator_changes_nothing() -> None:
    play = admitted()
    before = play.coordinator.membership
    play.again()
    play.settle()
    after = play.coordinator.membership
    assert (after.members, after.number, after.established) == (before.members, before.number, before.established)
    assert not play.coordinator.failing


def test_restart_of_the_coordinator_does_not_restart_a_worker_that_left() -> None:
    play = admitted()
    happen(play, "leave", 1)
    play.settle()
    happen(play, "kill", 4)
    play.settle()
    play.again()
    play.settle()
    assert play.members == {0, 2, 3}
    assert (play.workers["a"][1].life, play.workers["a"][1].status) == (0, 75)


def test_kill_without_a_coordinator_is_noticed_after_its_restart() -> None:
    play = admitted()
    happen(play, "kill", 0)
    play.again()
    play.settle()
    assert play.members == {1, 2, 3, 4}
    play.silent.add("b")
    play.again()
    play.settle(RETURN + 1)
    assert play.members == {1, 4}
    assert [entry for entry in play.journal if entry["event"] == "lost"][-1][
        "why"
    ] == "did not report to the restarted coordinator"


def test_agent_waits_for_the_restart_of_its_last_worker() -> None:
    """A newcomer that is killed early is restarted after a pause, and its host may have no other worker."""
    play = Play()
    last = play.hosts["b"][-1]
    life = play.workers["b"][last].life
    happen(play, "kill", last)
    play.settle(0.5)
    assert (play.workers["b"][last].life, play.coordinator.undecided) == (life, True), "it may not end now"
    play.settle(3.0)
    assert (play.workers["b"][last].life, play.coordinator.undecided) == (life + 1, False)
    happen(play, "kill", last)
    play.settle(0.5)
    play.coordinator.stop_all()
    assert not play.coordinator.undecided


def test_worker_whose_host_computes_wrong_values_is_not_started_again() -> None:
    play = admitted()
    play.change(1, failed=("HardwareError", 7, "worker 1 computed a wrong value"))
    play.settle(0.5)
    play.change(1, status=1, why="ended with exit code 1")
    play.settle(5.0)
    assert play.members == {0, 2, 3, 4}
    assert (play.workers["a"][1].life, play.coordinator.failing) == (0, {})
    assert "worker 1 raised HardwareError: 4 workers go on; it is not restarted" in play.coordinator.lines[-1][1]
    play.again()
    play.settle(RETURN + 1)
    assert play.members == {0, 2, 3, 4}
    assert play.workers["a"][1].life == 0


def late(play: Play, *agents: str) -> None:
    """The coordinator is started again, and these do not come back in time."""
    play.silent |= {*agents}
    play.again()
    play.settle(RETURN + 2)


def back(play: Play, *agents: str) -> None:
    for agent in agents:
        play.silent.discard(agent)
        play.join(agent)


def waits_for_the_first_host(play: Play) -> None:
    """The restarted coordinator waits for it, says so, and goes on with its workers."""
    late(play, "a")
    said = "workers 0-1 have not reported to the restarted coordinator yet, and no other worker has the training state"
    assert [text for _, text, _ in play.coordinator.lines] == [f"{said}: waiting"]
    back(play, "a")
    play.settle()
    assert play.members == {0, 1}


def test_late_agents_have_not_failed() -> None:
    """All of them: nobody else could go on. One is back first, and the others have their time from then on."""
    play = admitted()
    before = play.coordinator.membership
    lives = {n: said.life for workers in play.workers.values() for n, said in workers.items()}
    late(play, "a", "b", "c")
    assert play.coordinator.undecided
    back(play, "c")
    play.settle(RETURN - 1)
    back(play, "a", "b")
    play.settle()
    after = play.coordinator.membership
    assert (after.members, after.number, after.established) == (before.members, before.number, before.established)
    assert not play.coordinator.failing
    assert {n: said.life for workers in play.workers.values() for n, said in workers.items()} == lives


def test_late_agents_are_lost_once_others_are_back() -> None:
    play = admitted()
    late(play, "a", "b", "c")
    back(play, "b")
    play.settle(RETURN + 1)
    assert play.members == {2, 3}
    (lost,) = [entry for entry in play.journal if entry["event"] == "lost"]
    assert (lost["workers"], lost["why"]) == ([0, 1, 4], "did not report to the restarted coordinator")
    back(play, "a", "c")
    play.settle()
    for number in (0, 1, 4):
        happen(play, "arrive", number)
    play.settle()
    assert play.members == {0, 1, 2, 3, 4}
    assert not play.coordinator.failing


def test_agents_without_the_state_wait_for_the_late_agent() -> None:
    play = admitted()
    for number in (2, 3, 4):
        happen(play, "kill", number)
    waits_for_the_first_host(play)
    assert not play.coordinator.failing


def test_newcomers_wait_for_the_late_agent_of_the_first_team() -> None:
    """It may have trained already."""
    play = Play()
    waits_for_the_first_host(play)
    assert [said.life for said in play.workers["a"].values()] == [0, 0]


def test_late_agent_at_the_end_is_not_lost() -> None:
    """Nobody comes to the end without the others."""
    play = admitted()
    for number in (0, 1, 2, 3):
        play.change(number, ended=True)
        play.change(number, status=0)
    late(play, "c")
    assert [entry for entry in play.journal if entry["event"] == "lost"] == []
    assert not play.coordinator.failing
    assert not play.coordinator.undecided
    assert play.coordinator.finished


def test_silent_last_host_is_waited_for() -> None:
    """As after Ctrl-Z: nobody else could go on."""
    play = Play()
    play.coordinator.lost_agent("a", "it is silent")
    play.settle()
    assert play.members == {0, 1}
    assert not play.coordinator.failing


def test_joining_host_gets_the_state_ahead_through_one_worker() -> None:
    play = Play()
    for number in (2, 3):
        play.change(number, waiting=True, at=TAKES)
    for agent in ("a", "b"):
        play.coordinator.report(agent, play.workers[agent], 1, play.now)
    assert play.coordinator.orders("a")["coming"] == {2: TAKES}
    assert play.coordinator.announcement is None
    play.settle()
    assert play.members == {0, 1, 2, 3}
    assert play.coordinator.orders("a")["coming"] == {}


def test_lost_connections_form_the_same_team_again() -> None:
    play = admitted()
    number = play.coordinator.membership.number
    play.change(3, alone=number)
    play.settle(2.0)
    assert play.coordinator.membership.number == number
    play.settle(2.0)
    assert play.coordinator.membership.number == number + 1
    assert play.members == {0, 1, 2, 3, 4}


def test_lost_connections_end_the_run_after_max_restarts() -> None:
    play = Play()
    play.coordinator.max_restarts = 1
    for _ in range(2):
        play.change(0, alone=play.coordinator.membership.number)
        play.settle(ALONE + 1)
    assert play.coordinator.orders("a")["failing"] == [[0, "a", "lost its connections to the other workers"]]


def test_lost_connections_do_not_wait_for_the_end_of_a_step() -> None:
    """After which the generation that admits somebody would be entered."""
    play = Play()
    play.change(2, waiting=True, current=True)
    play.change(0, alone=0)
    for agent in play.workers:
        play.coordinator.report(agent, play.workers[agent], 1, play.now)
    assert play.coordinator.announcement == Announcement(1, (0, 1, 2), planned=True)
    play.coordinator.tick(play.now + ALONE)
    assert play.coordinator.announcement == Announcement(2, (0, 1), planned=False)


def test_replica_leaves_one_worker_after_another_and_no_other_replica() -> None:
    play = Play(places=2)
    happen(play, "leave", 1)
    play.settle(5.0)
    assert [entry["workers"] for entry in play.journal if entry["event"] == "generation"] == [[2, 3]]
    assert [n for n, said in play.workers["a"].items() if said.status is not None] == [1], "its mate is back"


# ---- many workers


class Number(int):
    """A worker's number that knows how often one was compared with another or looked up."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Number.looks += 1
        return int(self) == other

    def __hash__(self) -> int:
        Number.looks += 1
        return hash(int(self))


def test_loss_among_many_workers_needs_few_comparisons() -> None:
    """A loss is decided with a few looks at each worker; a report, of which each may change the team, with fewer."""
    replay = Replay(40, 8, Number)
    looks: dict[str, int] = {}
    acts = ["begin", "lose_worker", "enter", "news", "come_back", "lose_host", "enter", "news", "leave", "end"]
    for act in acts:
        Number.looks = 0
        getattr(replay, act)()
        looks[act] = max(looks.get(act, 0), Number.looks // 320)
    assert max(looks["lose_worker"], looks["lose_host"]) < 50, looks
    assert max(looks.values()) < 10 * 40, looks


def test_silent_host_is_no_failure_of_its_workers() -> None:
    """Who fails once is started again after the first pause, however often its host was silent before."""
    play = Play()
    for what, who in SILENT_OFTEN:
        happen(play, what, who)
    assert [seat.failures for _, seat in sorted(play.coordinator.slots.items())] == [0] * 5
    happen(play, "wait", None)
    happen(play, "arrive", 2)
    play.settle()
    assert 2 in play.members


def test_run_below_min_workers_is_paused() -> None:
    play = Replay(1, 2)
    play.coordinator.min_workers = 2
    play.begin()
    assert not play.coordinator.status()["paused"]
    play.lose_worker()
    assert play.coordinator.status()["paused"]
    play.enter()
    assert play.coordinator.status()["paused"]
    play.come_back()
    assert not play.coordinator.status()["paused"]
