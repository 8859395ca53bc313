"""Parameter servers on several hosts: what one process gives, each row once, and whole hosts that are lost."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import until
from clusters import Cluster
from clusters import cluster as cluster
from launching import SCRIPTS
from networks import hosts as hosts
from served import MICRO
from test_async_windows import each_row_once
from test_parameter_servers import STEPS, by_hand, right

from paceline.base.journal import effective_steps

pytestmark = pytest.mark.root
Clusters = Callable[[int], Cluster]


def begun(here: Cluster, plan: str, *options: str, counts: tuple[int, ...] = (1, 1)) -> None:
    """So many workers on each host, which all are there before the first Trainer is made."""
    here.variables = {**here.variables, "START": "start"}
    here.start(0, counts[0], "--plan", plan, *options)
    for host, count in enumerate(counts[1:], 1):
        here.until(here.status)
        here.start(host, count)
    here.until(lambda: len(here.status()["workers"]) == sum(counts))
    (here.folder / "start").touch()


def served_by(here: Cluster) -> dict[int, str]:
    """The host of each server, as at last."""
    workers = here.status()["workers"]
    return {int(n) - 1_000_000: one["agent"].partition(" ")[0] for n, one in workers.items() if one["role"] == "server"}


def of_served(here: Cluster, **variables: str) -> None:
    here.job, here.variables = (SCRIPTS / "served.py", ".", str(STEPS)), variables


def of_counted(here: Cluster, steps: int, **variables: str) -> None:
    here.job, here.variables = (SCRIPTS / "counted.py", ".", str(steps)), {"PACE": "0.03", **variables}


@pytest.mark.parametrize(
    ("count", "plan"),
    [(2, "server=2"), pytest.param(3, "server=4 copies=1", marks=pytest.mark.slow)],
)
def test_servers_are_spread_over_the_hosts(cluster: Clusters, tmp_path: Path, count: int, plan: str) -> None:
    here = cluster(count)
    of_served(here, SLOW="3")
    begun(here, f"micro={MICRO} {plan}", counts=(1,) * count)
    until((tmp_path / "reached").exists)
    hosts = [f"nowhere-{n}" for n in (1, 2, 3)]
    assert served_by(here) == {n: hosts[place] for n, place in enumerate((0, 1, 2, 1)[: int(plan[7])])}
    here.end(*(0,) * count)
    right(tmp_path)


def test_a_host_with_a_server_is_lost(cluster: Clusters, tmp_path: Path) -> None:
    """In step: another has what it kept, and it is started again where there is a host."""
    here = cluster(2)
    of_served(here, SLOW="8")
    begun(here, f"micro={MICRO} server=2 copies=1")
    until((tmp_path / "reached").exists)
    here.agents[1].kill()
    here.end(0, -9)
    said = here.agents[0].text
    assert "server 1 is lost (the agent on nowhere-2 has gone): server 0 has a copy of what it kept" in said
    assert "worker 1 is lost (the agent on nowhere-2 has gone): 1 worker goes on" in said
    right(tmp_path)
    assert sum(event["steps"] for event in effective_steps(here.agents[0].events("step"))) == STEPS


@pytest.mark.slow
def test_without_a_copy_all_go_back_to_the_checkpoint(cluster: Clusters, tmp_path: Path) -> None:
    """And its server is started again where there is a host."""
    here = cluster(2)
    of_served(here, SLOW="14")
    begun(here, f"micro={MICRO} server=2", "--save-every", "1")
    until((tmp_path / "reached").exists)
    here.agents[1].kill()
    here.end(0, -9)
    said = here.agents[0].text
    assert "server 1 is lost (the agent on nowhere-2 has gone): all go back to the last checkpoint" in said
    right(tmp_path, first=len(by_hand()[1]) + 1 - len(json.loads((tmp_path / "told.json").read_text())["figures"]))


@pytest.mark.slow
def test_each_row_counts_once_whatever_host_is_lost(cluster: Clusters, tmp_path: Path) -> None:
    """Out of step: a host with a server and a worker is lost, and comes back."""
    here = cluster(2)
    of_counted(here, 200, REACHED="0:20")
    begun(here, "micro=3 server=2 copies=1 staleness=2 window=20")
    until((tmp_path / "reached").exists)
    here.agents[1].kill()
    here.until(lambda: "server 0 has a copy of what it kept" in here.agents[0].text)
    here.until(lambda: served_by(here) == {0: "nowhere-1", 1: "nowhere-1"})
    here.start(1, 1)
    here.until(lambda: here.agents[0].text.count("has joined") == 2)
    here.end(0, -9, 0)
    each_row_once(tmp_path, 200)


@pytest.mark.slow
def test_a_host_with_a_server_leaves(cluster: Clusters, tmp_path: Path) -> None:
    """As it was told: its worker ends its step."""
    here = cluster(2)
    of_served(here, SLOW="8")
    begun(here, f"micro={MICRO} server=2 copies=1")
    until((tmp_path / "reached").exists)
    here.stop(1)
    here.end(0, 75)
    right(tmp_path)


@pytest.mark.parametrize("copies", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stall_of_the_agent_of_a_host_with_a_server(cluster: Clusters, tmp_path: Path, copies: int) -> None:
    """Without a copy the run waits for it; with one the others go on, and the host is taken in again."""
    here = cluster(2)
    of_served(here, SLOW="8")
    begun(here, f"micro={MICRO} server=2 copies={copies}")
    until((tmp_path / "reached").exists)
    agent = here.agents[1].process
    agent.send_signal(signal.SIGSTOP)
    waits = "and nobody else has what it keeps: the run waits for 60 s"
    here.until(lambda: ("server 0 has a copy of what it kept" if copies else waits) in here.agents[0].text)
    time.sleep(3.0)
    agent.send_signal(signal.SIGCONT)
    here.end(0, 0)
    said = here.agents[0].text
    assert ("the host of server 1 answers again" in said) == (not copies)
    assert len(here.agents[0].events("lost")) == 2 * copies
    right(tmp_path)
