"""Whoever is killed, stopped, or both, and wherever the training is: it goes on with the bytes of the undisturbed run,
or ends with a block and an exit code that is not 0, and the same command goes on.

A test is a row: one team, one victim, one fault, at all moments one after another, in one run folder. Every two of a
team, a victim and a fault meet in a row.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import pytest
from agents import alive
from clusters import Agent, Cluster, processes, worker_of
from clusters import cluster as cluster
from covering import each_value, pairwise
from launching import paceline
from networks import hosts as hosts

from paceline.base.journal import effective_steps, read_journal

pytestmark = pytest.mark.root

STEPS = 120
# Whom the file "want" names waits, at the moment that it names, once, until there is a file that lets it go.
SCRIPT = """
from basics import *
import os, sys, time
number = os.environ.get("PACELINE_RANK", "0")
def at(moment):
    if os.path.exists("want") and open("want").read() == f"{moment} {number}" and not os.path.exists(f"at-{moment}"):
        open(f"at-{moment}", "w").close()
        while not os.path.exists(f"go-{moment}"):
            time.sleep(0.01)
def model():
    at("before")
    return net()
def loss(output, batch):
    at("step")
    return cross_entropy(output, batch)
def metric(output, batch):
    at("evaluate")
    return {"right": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}
class Probe:
    def state_dict(self):
        at("save")
        return {"nothing": 0}
    def load_state_dict(self, state):
        pass
t = make(loss, model)
t.state["probe"] = Probe()
steps = int(sys.argv[2])
for report in t.steps(data, count=steps):
    if report.step % 3 == 0:
        t.evaluate(data, metric)
    if report.step % 3 == 1:
        t.save()
    time.sleep(0 if os.path.exists("gate") else 0.05 if report.step < 90 else 1.0)
t.export("out.safetensors")
at("end")
"""
MOMENTS = ("before", "step", "save", "evaluate", "end")
FAULTS = {"kill": [signal.SIGKILL], "stop": [signal.SIGSTOP], "both": [signal.SIGSTOP, signal.SIGKILL]}
TEAMS = {"one host": (3,), "two hosts": (2, 2), "16 workers": (16,)}  # workers of each host
PLANS = {"one host": "exact micro=3", "two hosts": "exact micro=3", "16 workers": "exact micro=12"}  # that: two shares
VICTIMS = ("worker 0", "another", "agent", "coordinator")
STANDS_STILL = 5.0  # seconds that an agent is stopped, until somebody outside lets it go on


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """By plan: what one worker gives."""

    @cache
    def of(plan: str) -> bytes:
        folder = tmp_path_factory.mktemp("undisturbed")
        for name, text in (("other.py", SCRIPT), ("gate", "")):
            (folder / name).write_text(text)
        command = ("run", "--plan", plan, "--run-dir", "run", "other.py", "out", str(STEPS))
        paceline(*command, cwd=folder)
        return (folder / "out.safetensors").read_bytes()

    return of


@dataclass
class Row:
    """A run that is struck again and again."""

    here: Cluster
    team: str
    victim: str
    fault: str

    @property
    def counts(self) -> tuple[int, ...]:
        return TEAMS[self.team]

    @property
    def dies(self) -> bool:
        return signal.SIGKILL in FAULTS[self.fault]

    def start(self, host: int) -> None:
        self.here.start(host, self.counts[host], *(() if host else ("--plan", PLANS[self.team])), code=SCRIPT)

    def members(self, host: int) -> list[int]:
        """The workers of the team that are of a host."""
        *_, name = self.here.network.hosts[host].inside
        workers = self.here.status().get("workers", {}).items()
        return [int(n) for n, w in workers if w["state"] == "member" and w["agent"].startswith(f"{name} ")]

    def holder(self, moment: str) -> int:
        """Who waits at the moment: the victim, where it comes there."""
        if self.team == "16 workers" and moment in ("step", "evaluate"):  # only the first two have rows
            return int(self.here.status()["members"][0])
        if self.team == "two hosts" and self.victim in ("another", "agent"):
            if moment == "save":  # which is done on the first worker's host
                return 0
            return self.counts[0] if moment == "before" else self.members(1)[0]
        return self.number

    @property
    def number(self) -> int:
        """Of the victim, or of whoever waits in its place."""
        return 0 if self.victim != "another" else 9 if self.team == "16 workers" else 2

    def reach(self, moment: str) -> None:
        """Until the training is there, and its workers are all of the team."""
        here = self.here
        elsewhere = self.team == "two hosts" and self.victim in ("another", "agent")
        if moment == "before":
            if elsewhere:
                self.start(0)
                here.members(self.counts[0])
            self.want(moment)
            self.start(int(elsewhere))
        else:
            here.members(sum(self.counts))
            self.want(moment)
        if moment == "end":
            here.go()
        here.until((here.folder / f"at-{moment}").exists)

    def want(self, moment: str) -> None:
        said = self.here.folder / "said"
        said.write_text(f"{moment} {self.holder(moment)}")
        said.replace(self.here.folder / "want")

    def strike(self, moment: str) -> None:
        """The fault, and what is to come of it."""
        here, agent = self.here, self.here.agents[-1 if self.team == "two hosts" and self.victim != "worker 0" else 0]
        first = here.agents[0]
        said = len(first.text)
        if self.victim == "coordinator":
            (pid,) = here.coordinators()
        elif self.victim == "agent":
            pid = agent.process.pid
        else:
            pid = worker_of(agent.folder, self.number)
        for number in FAULTS[self.fault]:
            with suppress(ProcessLookupError):  # its agent was faster
                os.kill(pid, number)
            time.sleep(0.1)
        if self.victim == "agent":
            self.agent_is_gone(agent, moment, said)
        elif self.victim == "coordinator":
            here.until(lambda: "and is restarted; training continues" in first.text[said:])
        else:
            self.worker_is_lost(moment, pid, said)
        (here.folder / f"go-{moment}").touch()

    def agent_is_gone(self, agent: Agent, moment: str, said: int) -> None:
        """One that is killed takes its workers with it, and the same command goes on. One that is stopped hinders
        nobody: workers of another host go on without its own, those of its own wait until it goes on.
        """
        if self.dies:
            assert agent.process.wait(20) == -signal.SIGKILL
            alone = len(self.counts) == 1
            left = lambda: [one for one in processes() if one.info["cwd"] == str(self.here.folder)]
            self.here.until(lambda: not (left() if alone else any(map(alive, pids_of(agent)))))
            if not alone:
                self.here.until(lambda: "(the agent on nowhere-2 disconnected)" in self.here.agents[0].text[said:])
            if moment != "end" or alone:  # else there may be nothing left to join
                agent.process = agent.again()
        else:
            time.sleep(STANDS_STILL)
            agent.process.send_signal(signal.SIGCONT)

    def worker_is_lost(self, moment: str, pid: int, said: int) -> None:
        """Before the first step of the team one that dies ends the run, and the same command starts it anew."""
        first = self.here.agents[0]
        if moment == "before" and self.dies and len(self.here.agents) == 1:
            assert first.process.wait(20) == 128 + signal.SIGKILL, first.text
            assert f"\nworker {self.number} failed (host " in first.text[said:]
            first.process = first.again()
        self.here.until(lambda: not alive(pid))

    def end(self, undisturbed: Callable[[str], bytes]) -> None:
        here = self.here
        gone = self.team == "two hosts" and self.victim == "agent" and self.dies
        here.end(0, *([-signal.SIGKILL if gone else 0] * (len(here.agents) - 1)))
        assert (here.folder / "out.safetensors").read_bytes() == undisturbed(PLANS[self.team])
        assert sum(event["steps"] for event in effective_steps(read_journal(here.agents[0].folder))) == STEPS
        assert [one.info for one in processes() if one.info["cwd"] == str(here.folder)] == []


def pids_of(agent: Agent) -> list[int]:
    return [int(event["pid"]) for event in agent.events("worker") if event["what"] == "started"]


ROWS = [pytest.param(*row, id="-".join(row).replace(" ", "_")) for row in pairwise([*TEAMS], VICTIMS, [*FAULTS])]


@pytest.mark.slow
@pytest.mark.parametrize(("team", "victim", "fault"), ROWS)
def test_kill_or_stop_of_worker_agent_or_coordinator_goes_on_or_ends_with_an_exit_code(
    cluster: Callable[[int], Cluster], undisturbed: Callable[[str], bytes], team: str, victim: str, fault: str
) -> None:
    row = Row(cluster(len(TEAMS[team])), team, victim, fault)
    row.here.steps = STEPS
    for moment in MOMENTS:
        row.reach(moment)
        row.strike(moment)
        if moment == "before" and len(row.here.agents) < len(row.counts):
            row.here.members(row.counts[0])
            row.start(1)
    row.end(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "fault"), [*each_value(MOMENTS, [*FAULTS]), ("step", "kill"), ("before", "stop")])
def test_kill_or_stop_of_the_agent_of_the_coordinators_host(
    cluster: Callable[[int], Cluster], undisturbed: Callable[[str], bytes], moment: str, fault: str
) -> None:
    """Where it is killed, the coordinator and the workers of its host go with it: somebody says `--take-over`, or,
    before the first step, starts the same command again, to which the other host comes. Where it is stopped, the other
    host goes on.
    """
    row = Row(cluster(2), "two hosts", "first agent", fault)
    here, before = row.here, moment == "before"
    here.steps = STEPS
    (here.folder / "want").write_text("before 0" if before else "")
    row.start(0)
    if before:
        here.until((here.folder / "at-before").exists)
    else:
        here.members(2)
    row.start(1)
    if before:
        here.until(lambda: len(here.status().get("workers", ())) == 4)
    else:
        here.members(4)
        (here.folder / "want").write_text(f"{moment} {0 if moment == 'save' else 2}")
        if moment == "end":
            here.go()
        here.until((here.folder / f"at-{moment}").exists)
    first, second = here.agents
    for number in FAULTS[fault]:
        first.process.send_signal(number)
        time.sleep(0.1)
    if not row.dies:
        time.sleep(STANDS_STILL)
        first.process.send_signal(signal.SIGCONT)
    elif before:
        assert first.process.wait(20) == -signal.SIGKILL
        first.process = first.again()
    else:
        here.until(lambda: "the coordinator at 10.77.0.1:29400 does not answer" in second.text)
        paceline("run", "--take-over", second.folder, cwd=here.folder)
    (here.folder / f"go-{moment}").touch()
    if not row.dies and moment not in ("before", "end"):  # its workers come back as new ones
        here.until(lambda: re.search(r"^workers? 0.* (is|are) lost \(the agent.*$", first.text, re.M))
        here.members(4)
    here.end(-signal.SIGKILL if row.dies and not before else 0, 0)
    assert (here.folder / "out.safetensors").read_bytes() == undisturbed(PLANS["two hosts"])
    assert [one.info for one in processes() if one.info["cwd"] == str(here.folder)] == []
