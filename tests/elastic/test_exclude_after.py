"""Hosts that fail repeatedly are left out: what is counted, what is remembered, and what the run does without them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import Cluster, same, worker_of
from clusters import cluster as cluster
from clusters import undisturbed as undisturbed
from launching import paceline
from networks import hosts as hosts
from test_coordinator import Play, admitted

from paceline.base.exit_codes import LEFT_OUT
from paceline.launch.host_history import FAILURE, REMEMBERED, HostEntry, HostHistory
from paceline.observe.summary import Summary, facts
from paceline.team.coordinator import Coordinator
from paceline.team.host_failures import HostFailures
from paceline.team.membership import Membership

KILLED = "was killed (SIGKILL)"


def limited(limit: int | None) -> Play:
    """A team of all workers, whose agents are on hosts of the same names."""
    play = admitted()
    play.coordinator.hosts = HostFailures(limit)
    for agent in play.hosts:
        assert play.coordinator.refuses(agent, f"host-{agent}", ()) == ""
    return play


def kill(play: Play, number: int) -> None:
    """The process of a worker is killed, and started again where that is allowed."""
    play.change(number, status=-9, why=KILLED)
    play.settle(5.0)
    play.change(number, waiting=True, current=True)
    play.settle(1.0)


def lines(play: Play) -> list[str]:
    return [text.partition("\n")[0] for _, text, _ in play.coordinator.lines]


def events(play: Play, kind: str) -> list[dict[str, object]]:
    return [event for event in play.journal if event["event"] == kind]


def test_host_is_left_out_after_its_second_failure() -> None:
    play = limited(2)
    kill(play, 2)
    assert play.members == {0, 1, 2, 3, 4}
    kill(play, 3)
    assert play.members == {0, 1, 4}
    reasons = f"2 failures (worker 3 {KILLED}; worker 2 {KILLED})"
    assert f"host-b is left out of the run after {reasons}" in lines(play)
    assert "worker 2 leaves with its host: 3 workers go on" in lines(play)
    (event,) = events(play, "excluded")
    assert {name: event[name] for name in ("host", "text", "workers")} == {
        "host": "host-b", "text": reasons, "workers": [2, 3],
    }  # fmt: skip
    assert play.coordinator.orders("b")["excluded"] == reasons
    assert [text for _, text in play.coordinator.orders("b")["failures"]] == [
        f"worker 2 {KILLED}",
        f"worker 3 {KILLED}",
    ]
    assert play.coordinator.orders("a")["excluded"] == ""
    assert play.coordinator.refuses("b again", "host-b", ()) == reasons


def test_wrong_values_count_as_failures() -> None:
    """Both attempts of a worker that leaves because its values were wrong twice, and its exception not once more."""
    play = limited(2)
    play.change(2, wrong=1.0)
    play.settle(1.0)
    assert [event["text"] for event in events(play, "host")] == ["worker 2 computed wrong values"]
    play.change(2, wrong=2.0, failed=("HardwareError", 7, "worker 2 computed a wrong value"))
    play.settle(5.0)
    assert play.members == {0, 1, 4}
    assert len(events(play, "host")) == 2


def test_host_with_wrong_values_twice_is_left_out_without_the_option() -> None:
    """Other failures do not count then, and neither do wrong values of earlier runs. A restarted coordinator knows."""
    play = limited(None)
    play.coordinator.hosts.clock = itertools.count(10.0).__next__
    wrong = [(1.0, "worker 0 computed wrong values"), (2.0, "worker 0 computed wrong values")]
    assert play.coordinator.refuses("d", "host-d", wrong) == ""
    kill(play, 3)
    kill(play, 3)
    play.change(2, wrong=1.0)
    play.settle(1.0)
    assert play.members == {0, 1, 2, 3, 4}
    again = HostFailures()
    again.recall(play.journal)
    assert again.wrong == {"host-b": 1}
    play.change(3, wrong=1.0)
    play.settle(5.0)
    assert play.members == {0, 1, 4}
    (event,) = events(play, "excluded")
    assert (event["host"], event["workers"]) == ("host-b", [2, 3])
    values = "worker 3 computed wrong values; worker 2 computed wrong values"
    assert event["text"] == f"4 failures ({values}; worker 3 {KILLED})"
    assert play.coordinator.refuses("b again", "host-b", ()) == event["text"]


def test_only_host_stays_after_wrong_values() -> None:
    hosts = HostFailures(agents={"a": "host-a"})
    for _ in range(3):
        hosts.add("a", "worker 0 computed wrong values")
    assert not hosts.is_due("host-a")
    hosts.join("b", "host-b", ())
    assert hosts.is_due("host-a")


def test_exceptions_of_the_script_are_no_failures_of_the_host() -> None:
    play = limited(1)
    play.change(2, failed=("ValueError", 7, "this row is damaged"))
    play.settle(0.5)
    play.change(2, status=1, why="ended with exit code 1")
    play.settle(5.0)
    assert events(play, "lost")
    assert events(play, "host") == []


def test_host_that_the_run_needs_is_not_left_out() -> None:
    play = limited(1)
    play.coordinator.min_workers = 4
    kill(play, 3)
    kill(play, 3)
    assert play.members == {0, 1, 2, 3, 4}
    needs = f"host-b has had 1 failure (worker 3 {KILLED}), and is not left out: the run needs its workers"
    assert lines(play).count(needs) == 1


def test_host_with_a_history_is_refused() -> None:
    """Failures of earlier runs count, each once."""
    play = limited(2)
    past = [(1.0, "worker 0 was killed"), (1.0, "worker 0 was killed"), (2.0, "worker 1 made no progress")]
    assert play.coordinator.refuses("d", "host-d", past) == (
        "2 failures (worker 1 made no progress; worker 0 was killed)"
    )
    assert play.coordinator.refuses("e", "host-e", past[:2]) == ""


def test_first_team_needs_its_hosts() -> None:
    """Hosts with a history are refused only if they are not among those of the first team."""
    coordinator = Coordinator(10, 1, lambda *_, **__: None, Membership((0, 1, 2, 3)))
    coordinator.reserved, coordinator.hosts = {0, 1}, HostFailures(1)
    past = [(1.0, "worker 0 was killed")]
    for agent, numbers in (("a", [0, 1]), ("b", [])):
        assert coordinator.refuses(agent, f"host-{agent}", past, numbers) == ""
        coordinator.join(agent, "logs", (agent, 1), numbers, 2)
    assert coordinator.refuses("c", "host-c", past) == "1 failure (worker 0 was killed)"


def test_restarted_coordinator_remembers_failures() -> None:
    play = limited(2)
    kill(play, 3)
    again = HostFailures(2)
    again.recall(play.journal)
    assert [text for _, text in again.failures["host-b"]] == [f"worker 3 {KILLED}"]
    kill(play, 3)
    again = HostFailures(2)
    again.recall(play.journal)
    assert [*again.excluded] == ["host-b"]


def test_history_is_kept_for_seven_days(tmp_path: Path) -> None:
    path, now = tmp_path / "hosts" / "one.jsonl", time.time()
    history = HostHistory(path)
    assert [*history.lines()] == []
    old = HostEntry(now - REMEMBERED - 60, FAILURE, "worker 0 was killed")
    entries = [old, HostEntry(now - 60, FAILURE, "worker 1 was killed", "runs/a"), HostEntry(now - 30, "disk", "full")]
    for entry in (*entries, *entries):
        history.add(entry)
    with path.open("a") as file:
        file.write('{"at": "never"}\nnot JSON\n[1]\n')
    assert len(path.read_text().splitlines()) == 3 + 3
    known = HostHistory(path)
    assert known.failures == [(entries[1].at, entries[1].text)]
    assert [*known.lines()] == [
        "1 failure (worker 1 was killed) in the last seven days",
        "  30.0 s ago: disk: full",
        "  1 min ago: failure: worker 1 was killed (run runs/a)",
    ]


@pytest.mark.slow
@pytest.mark.root
def test_kill_of_two_workers_leaves_their_host_out(
    cluster: Callable[[int], Cluster], undisturbed: Path, tmp_path: Path
) -> None:
    """The others train what one worker trains. The host is named on both consoles, in the journal, the report and
    by `paceline doctor`, and is refused afterwards.
    """
    here = cluster(3)
    here.variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    here.spread(1, 2, 1, options=("--exclude-after", "2"))
    os.kill(worker_of(here.agents[1].folder, 1), signal.SIGKILL)
    here.until(lambda: "worker 1 was killed" in here.agents[0].text)
    here.members(4)
    os.kill(worker_of(here.agents[1].folder, 2), signal.SIGKILL)
    here.until(lambda: here.agents[1].process.poll() is not None)
    here.members(2)
    reasons = "2 failures (worker 2 was killed by SIGKILL; worker 1 was killed by SIGKILL)"
    assert f"\nnowhere-2 is left out of the run after {reasons}\n" in here.agents[0].text
    cure = "next: test this host; `paceline doctor` shows its history"
    assert f"\nnowhere-2 is left out of the run after {reasons}\n{cure}\n" in here.agents[1].text
    again = here.start(1, 2)
    here.until(lambda: again.process.poll() is not None)
    assert again.text.startswith(f"nowhere-2 is left out of the run at 10.77.0.1:29400 after {reasons}; test this host")
    here.end(0, LEFT_OUT, 0, LEFT_OUT)
    same(here, undisturbed)
    run = here.agents[0].folder
    summary = Summary(run)
    assert ("left out", f"nowhere-2, after {reasons}") in facts(summary)["What happened"]
    assert f"nowhere-2, after {reasons}" in (run / "report.html").read_text()
    kept = tmp_path / "cache" / "paceline" / "hosts" / "nowhere-2.jsonl"
    assert [json.loads(line)["kind"] for line in kept.read_text().splitlines()] == [FAILURE, FAILURE]
    said = paceline("doctor", cwd=tmp_path, **here.variables, PACELINE_HOST="nowhere-2").stdout
    assert (
        f"note  nowhere-2 remembers {reasons} in the last seven days: remove {kept} once the host is repaired" in said
    )


@pytest.mark.slow
@pytest.mark.root
def test_host_that_was_left_out_meanwhile_ends_with_the_reason(
    cluster: Callable[[int], Cluster], undisturbed: Path, tmp_path: Path
) -> None:
    """Its agent is suspended, and the coordinator that has left it out is started again before it is back."""
    here = cluster(2)
    here.variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    here.spread(1, 2, options=("--exclude-after", "1"))
    os.kill(here.agents[1].process.pid, signal.SIGSTOP)
    here.until(lambda: here.agents[0].events("excluded"))
    here.restart_coordinator()
    os.kill(here.agents[1].process.pid, signal.SIGCONT)
    here.until(lambda: here.agents[1].process.poll() is not None)
    reason = (
        "nowhere-2 is left out of the run at 10.77.0.1:29400 after 1 failure (the agent on nowhere-2 has been silent"
    )
    assert reason in here.agents[1].text
    here.end(0, LEFT_OUT)
    same(here, undisturbed)


@pytest.mark.slow
@pytest.mark.root
def test_failures_before_a_restart_of_the_coordinator_count(
    cluster: Callable[[int], Cluster], undisturbed: Path, tmp_path: Path
) -> None:
    here = cluster(2)
    here.variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    here.spread(1, 2, options=("--exclude-after", "2"))
    os.kill(worker_of(here.agents[1].folder, 1), signal.SIGKILL)
    here.until(lambda: here.agents[0].events("host"))
    here.members(3)
    here.restart_coordinator()
    here.members(3)
    os.kill(worker_of(here.agents[1].folder, 2), signal.SIGKILL)
    here.end(0, LEFT_OUT)
    same(here, undisturbed)
    assert len(here.agents[0].events("excluded")) == 1


@pytest.mark.slow
@pytest.mark.root
def test_host_whose_workers_compute_wrongly_is_left_out(
    cluster: Callable[[int], Cluster], undisturbed: Path, tmp_path: Path
) -> None:
    """One bit flips on each of its two workers. The others train what one worker trains."""
    here = cluster(3)
    here.variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    here.start(0, 1, "--verify-steps", "1")
    here.until(lambda: here.status().get("step", 0) > 2)
    here.start(1, 2, faults="flip-gradient:1@40.forward,flip-gradient:2@44.forward")
    here.start(2, 1)
    here.members(4)
    here.end(0, LEFT_OUT, 0)
    first = here.agents[0]
    wrong = [(event["step"], event["workers"]) for event in first.events("corrupted")]
    assert wrong == [(41, [1]), (45, [2])]
    reasons = "2 failures (worker 2 computed wrong values; worker 1 computed wrong values)"
    assert [(event["host"], event["text"]) for event in first.events("excluded")] == [("nowhere-2", reasons)]
    assert f"nowhere-2 is left out of the run after {reasons}\n" in first.text
    same(here, undisturbed)
