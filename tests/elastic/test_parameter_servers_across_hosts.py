"""Parameter servers on several hosts: what one process gives, each row once, and whole hosts that are lost."""

from __future__ import annotations

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
from server_runs import STEPS, check_each_row_counted_once, check_served, check_served_from_checkpoint

from paceline.base.journal import effective_steps

pytestmark = pytest.mark.root
Clusters = Callable[[int], Cluster]


def start_run(here: Cluster, plan: str, *options: str, counts: tuple[int, ...] = (1, 1)) -> None:
    """So many workers on each host, which all are there before the first Trainer is made."""
    here.variables = {**here.variables, "START": "start"}
    here.start(0, counts[0], "--plan", plan, *options)
    for host, count in enumerate(counts[1:], 1):
        here.until(here.status)
        here.start(host, count)
    here.until(lambda: len(here.status()["workers"]) == sum(counts))
    (here.folder / "start").touch()


def hosts_of_servers(here: Cluster) -> dict[int, str]:
    """The host of each server, as at last."""
    workers = here.status()["workers"]
    return {int(n) - 1_000_000: one["agent"].partition(" ")[0] for n, one in workers.items() if one["role"] == "server"}


def use_served(here: Cluster, **variables: str) -> None:
    here.job, here.variables = (SCRIPTS / "served.py", ".", str(STEPS)), variables


def use_counted(here: Cluster, steps: int, **variables: str) -> None:
    here.job, here.variables = (SCRIPTS / "counted.py", ".", str(steps)), {"PACE": "0.03", **variables}


@pytest.mark.slow
@pytest.mark.parametrize(("count", "plan"), [(2, "server=2"), (3, "server=4 copies=1")])
def test_parameter_servers_are_spread_over_the_hosts(cluster: Clusters, tmp_path: Path, count: int, plan: str) -> None:
    here = cluster(count)
    use_served(here, SLOW="3")
    start_run(here, f"micro={MICRO} {plan}", counts=(1,) * count)
    until((tmp_path / "reached").exists)
    hosts = [f"nowhere-{n}" for n in (1, 2, 3)]
    assert hosts_of_servers(here) == {n: hosts[place] for n, place in enumerate((0, 1, 2, 1)[: int(plan[7])])}
    here.end(*(0,) * count)
    check_served(tmp_path)


def test_kill_of_a_host_with_a_parameter_server(cluster: Clusters, tmp_path: Path) -> None:
    """In step: another has what it kept, and it is started again where there is a host."""
    here = cluster(2)
    use_served(here, SLOW="8")
    start_run(here, f"micro={MICRO} server=2 copies=1")
    until((tmp_path / "reached").exists)
    assert hosts_of_servers(here) == {0: "nowhere-1", 1: "nowhere-2"}
    here.agents[1].kill()
    here.end(0, -9)
    text = here.agents[0].text
    assert "server 1 is lost (the agent on nowhere-2 disconnected): server 0 has a copy of its state" in text
    assert "worker 1 is lost (the agent on nowhere-2 disconnected): 1 worker goes on" in text
    check_served(tmp_path)
    assert sum(event["steps"] for event in effective_steps(here.agents[0].events("step"))) == STEPS


@pytest.mark.slow
def test_kill_of_a_host_without_a_copy_returns_to_the_checkpoint(cluster: Clusters, tmp_path: Path) -> None:
    """And its server is started again where there is a host."""
    here = cluster(2)
    use_served(here, SLOW="14")
    start_run(here, f"micro={MICRO} server=2", "--save-every", "1")
    until((tmp_path / "reached").exists)
    here.agents[1].kill()
    here.end(0, -9)
    text = here.agents[0].text
    assert (
        "server 1 is lost (the agent on nowhere-2 disconnected): all workers and servers return to the last checkpoint"
        in text
    )
    check_served_from_checkpoint(tmp_path)


@pytest.mark.slow
def test_kill_of_a_host_in_async_training_counts_each_row_once(cluster: Clusters, tmp_path: Path) -> None:
    """Out of step: a host with a server and a worker is lost, and comes back."""
    here = cluster(2)
    use_counted(here, 200, REACHED="0:20")
    start_run(here, "micro=3 server=2 copies=1 staleness=2 window=20")
    until((tmp_path / "reached").exists)
    here.agents[1].kill()
    here.until(lambda: "server 0 has a copy of its state" in here.agents[0].text)
    here.until(lambda: hosts_of_servers(here) == {0: "nowhere-1", 1: "nowhere-1"})
    here.start(1, 1)
    here.until(lambda: here.agents[0].text.count("has joined") == 2)
    here.end(0, -9, 0)
    check_each_row_counted_once(tmp_path, 200)


@pytest.mark.slow
def test_stop_of_a_host_with_a_parameter_server(cluster: Clusters, tmp_path: Path) -> None:
    """As it was told: its worker ends its step."""
    here = cluster(2)
    use_served(here, SLOW="8")
    start_run(here, f"micro={MICRO} server=2 copies=1")
    until((tmp_path / "reached").exists)
    here.stop(1)
    here.end(0, 75)
    check_served(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_sigstop_of_the_agent_of_a_host_with_a_parameter_server(cluster: Clusters, tmp_path: Path, copies: int) -> None:
    """Without a copy the run waits for it; with one the others go on, and the host is taken in again."""
    here = cluster(2)
    use_served(here, SLOW="8")
    start_run(here, f"micro={MICRO} server=2 copies={copies}")
    until((tmp_path / "reached").exists)
    agent = here.agents[1].process
    agent.send_signal(signal.SIGSTOP)
    waits = "and no other server has a copy of its state: the run waits for 60 s"
    here.until(lambda: ("server 0 has a copy of its state" if copies else waits) in here.agents[0].text)
    time.sleep(3.0)
    agent.send_signal(signal.SIGCONT)
    here.end(0, 0)
    text = here.agents[0].text
    assert ("the host of server 1 responds again" in text) == (not copies)
    assert len(here.agents[0].events("lost")) == 2 * copies
    check_served(tmp_path)
