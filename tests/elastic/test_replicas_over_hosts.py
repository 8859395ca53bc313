"""Replicas that span hosts: `paceline launch` starts them over several hosts together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from agents import until
from host_teams import SCRIPT, STEPS, HostTeam, coordinators_in, undisturbed
from host_teams import host_team as host_team
from host_teams import hosts as hosts
from launching import piped
from networks import Network
from oracle import apart
from safetensors.torch import load_file
from warm import environment

from paceline.base.handshake import make_key
from paceline.base.journal import effective_steps, read_journal
from paceline.base.mesh import Mesh, pick_ranks
from paceline.checkpoint.files import find_checkpoint, write_checkpoint
from paceline.checkpoint.host_memory import HostMemory, MemoryServer
from paceline.checkpoint.storage import Folder
from paceline.errors import CheckpointError
from paceline.team.coordinator import AWAITED, RETURN, Coordinator
from paceline.team.membership import Membership
from paceline.team.worker_slots import WorkerReport

PLANS = ["shard=8 zero=3", "pipeline=4 data=2 micro=2", "tensor=2 pipeline=2 data=2 micro=2"]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_launch_starts_a_plan_over_four_hosts(
    plan: str, host_team: Callable[..., HostTeam], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No host has enough workers for it; the weights are one worker's."""
    team = host_team(2, 2, 2, 2)
    team.start(plan)
    team.end()
    whole = undisturbed(tmp_path_factory, "micro=2")
    assert apart(load_file(team.folder / "out.safetensors"), load_file(whole / "out.safetensors")) <= 1e-12
    (start,) = team.events("start")
    assert start["workers"] == 8, json.dumps(start)
    assert " needs 8 workers: the run begins on several hosts together\n" in team.text


@pytest.mark.root
@pytest.mark.slow
def test_launch_chooses_a_plan_for_all_hosts(
    host_team: Callable[..., HostTeam], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two hosts take part in a trial, and then in the run, whose weights are one worker's."""
    team = host_team(2, 1)
    team.start("auto")
    team.end()
    whole = undisturbed(tmp_path_factory, "micro=2")
    assert apart(load_file(team.folder / "out.safetensors"), load_file(whole / "out.safetensors")) <= 1e-12
    (chosen,) = (event for event in team.events("decision") if "plan" in event)
    assert chosen["workers"] == 3
    assert "waiting for 1 worker of other hosts ...\n" in team.text


MIRRORED = ["shard=8 zero=3 micro=2 exact", "pipeline=4 micro=2 exact", "tensor=2 pipeline=2 data=2 micro=2 exact"]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("plan", MIRRORED)
def test_loss_of_a_host_loses_nothing(
    plan: str, host_team: Callable[..., HostTeam], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All of its processes are killed. Another agent takes its place, and training goes on from memory: there is no
    checkpoint that all workers can read.
    """
    workers = (1, 1, 1, 1) if plan.startswith("pipeline") else (2, 2, 2, 2)
    calm = undisturbed(tmp_path_factory, plan, sum(workers))
    team = host_team(*workers)
    team.start(plan, "--mirror", "1")
    team.until_step(6)
    team.lose(3 if "data=2" in plan else 1)  # the first replica goes on, or none is left
    team.end()
    assert (team.folder / "out.safetensors").read_bytes() == (calm / "out.safetensors").read_bytes()
    lost = team.events("lost")[0]
    if "data=2" in plan:  # the other replica has gone on
        assert len(team.events("start")) == 1
        return
    _, start = team.events("start")
    assert 0 < start["resumed_from"] <= lost["step"]
    assert start["resumed_in"] == "the copies in the memory of 4 hosts"
    (recovered,) = team.events("recovered")
    assert recovered["workers"] == [*range(sum(workers))]
    assert f"resuming from step {start['resumed_from']} of the copies in the memory of 4 hosts\n" in team.text
    assert f" workers train again {recovered['seconds']:.1f} s after the loss\n" in team.text


@pytest.mark.root
@pytest.mark.slow
def test_loss_of_the_coordinator_while_the_team_waits_for_a_host(
    host_team: Callable[..., HostTeam], tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm = undisturbed(tmp_path_factory, "shard=2 zero=3 micro=2 exact", 2)
    team = host_team(1, 1)
    team.start("shard=2 zero=3 micro=2 exact", "--mirror", "1")
    team.until_step(6)
    team.lose(1)
    until(lambda: team.events("restarted"))  # the launcher starts the host again five seconds after its loss
    (coordinator,) = coordinators_in(team.folder)
    os.kill(coordinator, signal.SIGKILL)
    until(lambda: coordinators_in(team.folder) not in ([], [coordinator]))
    assert not team.events("recovered"), "the team was still waiting"
    team.end()
    assert "the coordinator ended (SIGKILL) and is restarted" in team.text
    assert (team.folder / "out.safetensors").read_bytes() == (calm / "out.safetensors").read_bytes()
    assert [event["workers"] for event in team.events("recovered")] == [[0, 1]]


@pytest.mark.slow
def test_kill_of_the_coordinator_before_all_hosts_have_come(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "gate").touch()
    run, plan = tmp_path / "run", ["--plan", "shard=2 zero=3", "--workers", "1"]

    def coordinators() -> list[int]:
        """Those that answer, and to which the first agent has come."""
        if not (run / "coordinator.json").exists():
            return []
        port = json.loads((run / "coordinator.json").read_text())["port"]
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/status", timeout=2) as answer:
            return coordinators_in(tmp_path) if json.loads(answer.read())["agents"] else []
        return []

    first = ["run", "--listen", "127.0.0.1", "--min-workers", "2", "--run-dir", "run", *plan, "train.py"]
    agents = [piped([sys.executable, "-m", "paceline", *first], tmp_path)]
    try:
        (before,) = until(coordinators)
        os.kill(before, signal.SIGKILL)
        until(lambda: coordinators() not in ([], [before]))
        agents.append(
            piped([sys.executable, "-m", "paceline", "run", "--join", "run", *plan[2:], "train.py"], tmp_path)
        )
        _, error = agents[0].communicate(timeout=100)
        assert agents[0].returncode == 0, error
        assert agents[1].wait(20) == 0
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    assert "the coordinator ended (SIGKILL) and is restarted" in error
    assert sum(event["steps"] for event in effective_steps(read_journal(run))) == STEPS
    assert (tmp_path / "seen").read_text() == str(16 * STEPS)


COSTS = """
import json
from paceline.parallel.plan_cost import cost, facts_of
from paceline.parallel.tensor_parallel.script_view import call_without_script_view
from paceline.session.run import Run
checkpoints = Run.current().checkpoints
local = checkpoints._mirror[1]._local
sizes = [item for folder in local.folders() for item in local.sizes(folder).items()]
held = sum(size for name, size in sizes if name.endswith(".safetensors"))
facts = call_without_script_view(lambda: facts_of(trainer._job))
team = paceline.join()
predicted = cost(trainer.plan, facts, team.size, mirror=checkpoints.copies_every)
told = [predicted.copies, predicted.sent.get("copies", 0), held, team.group.ledger.get("copies", [0, 0, 0])]
open(f"costs-{team.rank}.json", "w").write(json.dumps(told))
"""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "workers"),
    [
        ("shard=2 zero=3", (1, 1)),
        ("shard=4 zero=3", (1, 1, 1, 1)),
        ("pipeline=4", (1, 1, 1, 1)),
        ("shard=2 zero=1 data=2", (3, 1)),
        ("tensor=2 pipeline=2 data=2", (2, 2, 2, 2)),
    ],
)
def test_cost_predicts_memory_and_traffic_of_copies(
    plan: str, workers: tuple[int, ...], host_team: Callable[..., HostTeam]
) -> None:
    """Also of two replicas that share a host. Where they do not, each is the copy of the other one."""
    team = host_team(*workers)
    team.more = COSTS
    team.start(plan, "--mirror", "2", WIDE="8192")
    team.end()
    predicted, held_by_host = 0.0, dict[int, float]()
    for rank, host in enumerate(host for host, count in enumerate(workers) for _ in range(count)):
        copies, sent, held, (count, total, _) = json.loads((team.folder / f"costs-{rank}.json").read_text())
        assert (count > 0) == ("tensor" not in plan)
        assert sent == pytest.approx(total / max(1, count) / 2, rel=0.05)
        predicted += copies
        held_by_host[host] = held
    # While a copy is written, the last one is still there.
    assert predicted == pytest.approx(2 * sum(held_by_host.values()), rel=0.05)


@dataclass
class Team:
    """A coordinator whose plan needs four workers, of which the first host has two, and its agents' workers."""

    journal: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        record = lambda event, **fields: self.journal.append((event, fields))
        self.coordinator = Coordinator(10, 1, record, Membership((0, 1, 2, 3)))
        self.coordinator.group_sizes, self.coordinator.reserved = Mesh(shard=4).group_sizes, {0, 1}

    def report(self, agent: str, life: int, **more: Any) -> None:
        """What an agent says of its workers, which are those that the coordinator has given it."""
        self.now += 0.1
        numbers = [number for number, slot in self.coordinator.slots.items() if slot.agent == agent]
        reports = {n: WorkerReport(life, store=("host", 7 + n), replica=4, **more) for n in numbers}
        self.coordinator.report(agent, reports, 5, self.now)

    def wanted(self, agent: str) -> dict[int, tuple[int, Any]]:
        """By worker: the life that it is to have, and the address of the store at which it starts."""
        orders = self.coordinator.orders(agent)
        assert not any(each["newcomer"] or each["out"] for each in orders["workers"].values())
        return {number: (each["life"], orders["store"]) for number, each in orders["workers"].items()}


def begun_team() -> Team:
    team = Team()
    assert team.coordinator.join("b", "logs", ("b", 1), [], 2) == [2, 3], "the first host has reserved its workers"
    assert team.wanted("b") == {2: (0, None), 3: (0, None)}
    assert team.coordinator.join("a", "logs", ("a", 1), [0, 1], 2) == [0, 1]
    assert team.wanted("a") == {0: (0, ("", 0)), 1: (0, ("", 0))}
    assert team.wanted("b") == {2: (0, None), 3: (0, None)}, "worker 0 does not serve its store yet"
    team.report("a", 0)
    assert team.wanted("b") == {2: (0, ("host", 7)), 3: (0, ("host", 7))}
    team.report("a", 0, ready=True)
    team.report("b", 0, ready=True)
    return team


def test_coordinator_waits_for_a_host_in_the_place_of_a_lost_one() -> None:
    team = begun_team()
    team.coordinator.lost_agent("b", "the agent on b disconnected", ended=True)
    assert team.wanted("a") == {0: (1, None), 1: (1, None)}
    assert all(each["out"] for each in team.coordinator.orders("b")["workers"].values()), "what is left of it ends"
    (line,) = [text for _, text, _ in team.coordinator.lines if "no replica is left" in text]
    assert line.splitlines()[0] == (
        "workers 2-3 are lost (the agent on b disconnected), and no replica is left: all workers go back to the last "
        "checkpoint once a host takes the place of workers 2-3"
    )
    assert team.coordinator.join("c", "logs", ("c", 1), [], 2) == [2, 3]
    assert team.wanted("a") == {0: (1, ("", 0)), 1: (1, ("", 0))}
    team.report("a", 1)
    assert team.wanted("c") == {2: (1, ("host", 7)), 3: (1, ("host", 7))}
    team.report("a", 1, ready=True)
    team.report("c", 1, ready=True)
    assert [event for event, _ in team.journal] == ["lost", "restarted", "recovered", "decision"]
    assert team.journal[-1][1]["why"] == "workers 2-3 are lost (the agent on b disconnected), and no replica was left"


def test_silent_host_of_the_last_replica_takes_its_workers_again() -> None:
    """With copies in memory, nobody waits for it; it may still be back before another host comes."""
    team = begun_team()
    team.coordinator.lost_agent("b", "the agent on b has been silent for 1.6 s")
    assert team.wanted("a") == {0: (0, ("", 0)), 1: (0, ("", 0))}, "without copies, going back would cost steps"
    team.coordinator.mirrors = True
    team.coordinator.lost_agent("b", "the agent on b has been silent for 1.6 s")
    assert team.wanted("a") == {0: (1, None), 1: (1, None)}
    team.coordinator.report("b", {n: WorkerReport(0, replica=4, ready=True) for n in (2, 3)}, 5, 1.0)
    assert team.wanted("a") == {0: (1, ("", 0)), 1: (1, ("", 0))}
    assert team.wanted("b") == {2: (1, None), 3: (1, None)}


def test_kill_of_a_worker_of_the_last_replica_starts_all_again() -> None:
    team = begun_team()
    team.report("b", 0, ready=True, status=-9, why="was killed by SIGKILL")
    assert team.wanted("a") == {0: (1, ("", 0)), 1: (1, ("", 0))}
    assert team.wanted("b") == {2: (1, None), 3: (1, None)}


def test_host_that_joins_ends_the_wait_for_a_silent_one() -> None:
    """If it can replace all of its workers; otherwise it gets further ones, since the silent host has the state."""
    team = begun_team()
    team.coordinator.lost_agent("b", "the agent on b has been silent for 1.6 s")
    assert team.coordinator.join("d", "logs", ("d", 1), [], 1) == [4]
    assert team.wanted("a") == {0: (0, ("", 0)), 1: (0, ("", 0))}
    assert team.coordinator.join("c", "logs", ("c", 1), [], 2) == [2, 3]
    assert team.wanted("a") == {0: (1, ("", 0)), 1: (1, ("", 0))}
    assert team.wanted("c") == {2: (1, None), 3: (1, None)}


def restarted(team: Team, **lives: int) -> Team:
    """The coordinator is started again. It knows what the journal has; then these agents, whose workers are in these
    lives, report to it.
    """
    after = Team(team.journal, team.now)
    after.coordinator.recovering = after.now + RETURN
    last = [{"event": event} | fields for event, fields in team.journal if event in ("generation", "restarted")][-1:]
    if last and last[0]["event"] == "restarted":
        after.coordinator.recall_restart(last[0], after.now, 0.5)
    for agent, life in lives.items():
        numbers = {"a": [0, 1], "b": [2, 3]}[agent]
        assert after.coordinator.join(agent, "logs", (agent, 1), numbers, 2) == numbers
        if life >= 0:
            after.report(agent, life, ready=True)
        else:
            after.coordinator.report(agent, {}, 0, after.now)
    return after


def console(team: Team) -> list[str]:
    return [text.partition("\n")[0] for _, text, _ in team.coordinator.lines]


def join_as_c(team: Team) -> None:
    """A host without numbers joins. It has to ask again while the coordinator cannot know those that it gets."""
    while team.coordinator.defers([], 2):
        assert team.coordinator.recovering < team.now + AWAITED, "it may ask only until the others' time is over"
        team.now += 0.1
        team.coordinator.tick(team.now)
    assert team.coordinator.join("c", "logs", ("c", 1), [], 2) == [2, 3]


def test_coordinator_that_restarts_while_the_team_waits_for_a_host_waits_on() -> None:
    """It was killed before the agent that is left knew that all workers go back, or after it had ended them."""
    for dead in (False, True):
        team = begun_team()
        team.coordinator.lost_agent("b", "the agent on b disconnected", ended=True)
        team = restarted(team, a=0)
        if dead:
            killed = WorkerReport(0, replica=4, ready=True, status=-9, why="was killed by SIGKILL")
            team.coordinator.report("a", dict.fromkeys((0, 1), killed), 5, team.now)
        assert not team.coordinator.over
        team = restarted(team, a=0)  # once more
        join_as_c(team)
        (life,) = {life for life, store in team.wanted("a").values() if store == ("", 0)}
        assert life >= 1, "a process of before must not be taken for one of the new team"
        team.report("a", life)
        assert {store for _, store in team.wanted("c").values()} == {("host", 7)}
        team.report("a", life, ready=True)
        team.report("c", team.wanted("c")[2][0], ready=True)
        assert team.coordinator.membership.established == {0, 1, 2, 3}
        events = [event for event, _ in team.journal]
        assert events[:2] == ["lost", "restarted"]
        assert events[-2:] == ["recovered", "decision"]
        assert team.journal[-1][1]["why"].startswith("workers 2-3 are lost (the agent on b disconnected)")


def test_coordinator_that_restarts_before_all_hosts_have_come_waits_for_them() -> None:
    """The first host has started no process yet."""
    team = restarted(Team(), a=-1)
    assert team.wanted("a") == {0: (0, None), 1: (0, None)}
    join_as_c(team)
    assert {store for _, store in team.wanted("a").values()} == {("", 0)}
    assert console(team) == [
        "workers 2-3 have not reported to the restarted coordinator: all workers start once their hosts or others have "
        "joined"
    ]
    assert [event for event, _ in team.journal] == ["restarted"], "nobody is lost"


def test_host_of_a_first_team_that_returns_late_has_its_workers_again() -> None:
    """Those that it started before are ended, since the others have begun again."""
    team = begun_team()
    team.coordinator.lost_agent("b", "the agent on b disconnected", ended=True)
    team = restarted(team, a=0)
    team.now += RETURN + 1
    team.coordinator.tick(team.now)
    assert not team.coordinator.undecided
    assert team.coordinator.join("b", "logs", ("b", 1), [2, 3], 2) == [2, 3]
    team.report("b", 0, ready=True)
    assert {store for _, store in team.wanted("a").values()} == {("", 0)}
    assert all(life >= 1 for life, _ in team.wanted("b").values())


@pytest.mark.parametrize("mirrors", [False, True])
def test_restarted_coordinator_waits_for_the_last_replica_as_before(mirrors: bool) -> None:
    """A host with a part of it does not come back: with copies in memory nobody waits for it longer than for others."""
    team = restarted(begun_team(), a=0)
    team.coordinator.mirrors = mirrors
    team.now += RETURN + 1
    team.coordinator.tick(team.now)
    assert team.coordinator.undecided is not mirrors
    team.now += AWAITED
    team.coordinator.tick(team.now)
    assert [event for event, _ in team.journal] == ["lost", "restarted"]
    assert team.wanted("a") == {0: (1, None), 1: (1, None)}
    assert console(team)[-1].startswith(
        "workers 2-3 did not report to the restarted coordinator, and no replica is left"
    )
    assert team.coordinator.join("b", "logs", ("b", 1), [2, 3], 2) == [2, 3]
    team.report("b", 4, ready=True)
    assert team.wanted("b") == {2: (5, None), 3: (5, None)}, "worker 0 does not serve its store yet"


def test_host_that_joins_ends_the_wait_of_a_restarted_coordinator() -> None:
    """The host that is late finds other workers in the place of its own ones, and ends these."""
    team = restarted(begun_team(), a=0)
    join_as_c(team)
    assert team.wanted("a") == {0: (1, ("", 0)), 1: (1, ("", 0))}
    assert team.coordinator.join("b", "logs", ("b", 1), [2, 3], 2) == []
    assert all(each["out"] and each["life"] > 9 for each in team.coordinator.orders("b")["workers"].values())


def test_host_in_the_place_of_one_that_has_left_starts_its_workers() -> None:
    coordinator = Team().coordinator
    for agent, numbers in (("a", [0, 1]), ("b", [2, 3])):
        coordinator.join(agent, "logs", (agent, 1), numbers, 2)
        coordinator.report(agent, {n: WorkerReport(replica=2, ready=True) for n in numbers}, 5, 0.1)
    leaves = WorkerReport(replica=2, ready=True, leaves=True)
    coordinator.report("b", dict.fromkeys((2, 3), leaves), 5, 0.2)
    coordinator.tick(1.0)
    assert coordinator.membership.members == (0, 1)
    coordinator.report("b", dict.fromkeys((2, 3), replace(leaves, status=75)), 5, 1.1)
    coordinator.bye("b")
    assert coordinator.join("c", "logs", ("c", 1), [], 2) == [2, 3]
    anew = {"life": 1, "out": False, "newcomer": True}
    assert coordinator.orders("c")["workers"] == {2: anew, 3: anew}


def test_kill_of_a_spare_before_the_first_step_restarts_no_other_worker() -> None:
    team = Team()
    assert team.coordinator.join("b", "logs", ("b", 1), [], 2) == [2, 3]
    assert team.coordinator.join("a", "logs", ("a", 1), [0, 1], 2) == [0, 1]
    assert team.coordinator.join("c", "logs", ("c", 1), [], 1, 1) == [4]
    killed = WorkerReport(newcomer=True, status=-9, why="was killed by SIGKILL")
    team.coordinator.report("c", {4: killed}, 0, 0.1)
    assert team.wanted("a") == {0: (0, ("", 0)), 1: (0, ("", 0))}


def test_first_host_reserves_its_spares() -> None:
    team = Team()
    team.coordinator.reserved = {0, 1, 4}
    assert team.coordinator.join("b", "logs", ("b", 1), [], 3) == [2, 3, 5]
    assert team.coordinator.join("a", "logs", ("a", 1), [0, 1, 4], 3, 1) == [0, 1, 4]


def test_failures_of_hosts_of_the_last_replica_count() -> None:
    team = begun_team()
    for agent in "ab":
        assert team.coordinator.refuses(agent, f"host-{agent}", ()) == ""
    team.report("b", 0, ready=True, status=-9, why="was killed by SIGKILL")
    team.coordinator.lost_agent("b", "the agent on b disconnected", ended=True)
    failures = [(fields["host"], fields["text"]) for event, fields in team.journal if event == "host"]
    assert failures == [("host-b", "worker 2 was killed by SIGKILL"), ("host-b", "the agent on b disconnected")]


def test_copies_in_the_memory_of_two_hosts(tmp_path: Path) -> None:
    """A file is on its host and the next one; the loss of a host loses none, and a host without the key gets none."""

    def key(salt: str) -> bytes:
        return make_key(b"token", salt)

    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    servers = [MemoryServer(folder, "127.0.0.1", key) for folder in folders]
    memories = [HostMemory(Folder(folder), server.at, key) for folder, server in zip(folders, servers, strict=True)]
    for memory in memories:
        memory.meet([server.at for server in servers])
    generator = torch.Generator().manual_seed(0)
    tensors = {"wide": torch.randn(100, 3, generator=generator), "scalar": torch.tensor(2.0, dtype=torch.float64)}
    write_checkpoint(memories[0], 1, tensors, {}, keep=1)
    write_checkpoint(memories[0], 2, tensors, {}, keep=1)
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [["step-000000000002"]] * 2 + [[]]
    for request in ({"do": "remove"}, {"do": "remove", "folder": ".."}, {"do": "read", "folder": "a", "file": "../b"}):
        with pytest.raises(OSError, match="a name is not allowed"):
            memories[2]._others[0].ask(**request)
    shutil.rmtree(folders[0])
    servers[0].close()
    found = find_checkpoint(memories[2], print)
    assert found is not None
    assert found.step == 2
    rows = found.tensors(mapped=True)
    assert torch.equal(rows["wide"][7:9], tensors["wide"][7:9])
    assert torch.equal(rows["scalar"].clone(), tensors["scalar"])
    (folders[1] / "step-000000000002" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="no checkpoint in the memory of 3 hosts is intact"):
        find_checkpoint(memories[2], print)
    stranger = HostMemory(Folder(folders[2]), servers[2].at, lambda salt: make_key(b"another", salt))
    stranger.meet([server.at for server in servers[1:]])
    assert stranger.folders() == []
    with pytest.raises(ConnectionError, match=r"the memory of host 127\.0\.0\.1 does not answer"):
        stranger.write("step-000000000003", "file", [b"data"])
    for server in servers[1:]:
        server.close()


SERVES = """
import sys, threading
from pathlib import Path
from paceline.base import handshake
from paceline.checkpoint.host_memory import MemoryServer

handshake.VANISHED, handshake.PROBE = 2, 1
server = MemoryServer(Path(sys.argv[1]), sys.argv[2], lambda salt: b"key")
print(*server.at, flush=True)
before = threading.active_count()
for line in sys.stdin:
    print(threading.active_count() - before, flush=True)
"""
ASKS = """
import sys
from paceline.checkpoint.host_memory import _OtherHost

host, port, salt = sys.argv[1:]
assert (other := _OtherHost((host, int(port), salt), lambda salt: b"key")).ask("folders") == []
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.mark.root
@pytest.mark.slow
def test_memory_of_a_host_forgets_a_host_that_vanished(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    network = hosts(2)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment()}
    serves, asks = (host.command(sys.executable, "-c") for host in network.hosts)
    with subprocess.Popen([*serves, SERVES, str(tmp_path), network.hosts[0].address], **pipes) as server:
        at = server.stdout.readline().split()
        with subprocess.Popen([*asks, ASKS, *at], **pipes) as other:
            assert other.stdout.readline() == "asked\n"

            def threads() -> str:
                print("count", file=server.stdin, flush=True)
                return str(server.stdout.readline()).strip()

            assert threads() == "1"
            network.hosts[1].cut()
            until(lambda: threads() == "0", 30)
            other.kill()
        server.kill()


def hosts_of(counts: list[int], mesh: Mesh) -> list[list[int]]:
    """The ranks of each host, in the order in which hosts come."""
    free, picked = set(range(mesh.size)), list[list[int]]()
    for count in counts:
        picked.append(pick_ranks(free, count, mesh.group_sizes))
        free -= {*picked[-1]}
    return picked


def test_ranks_that_exchange_most_are_on_one_host() -> None:
    assert hosts_of([2, 2, 2, 2], Mesh(2, pipeline=2, tensor=2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert hosts_of([3, 3, 2], Mesh(2, pipeline=2, tensor=2)) == [[0, 1, 7], [2, 3, 6], [4, 5]]
    assert hosts_of([6, 2], Mesh(2, pipeline=2, tensor=2)) == [[0, 1, 2, 3, 6, 7], [4, 5]]
    assert hosts_of([1, 1, 1, 1], Mesh(pipeline=4)) == [[0], [1], [2], [3]]
    assert hosts_of([3, 9], Mesh(shard=8)) == [[0, 1, 2], [3, 4, 5, 6, 7]]
