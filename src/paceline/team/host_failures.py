"""Failures of hosts, and the decision which hosts are left out of a run. No torch, no sockets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.base.console import in_one_line
from paceline.base.text import plural
from paceline.team.worker_slots import WorkerReport

FORBIDDEN = 403  # HTTP status of the answer to an agent whose host is left out
SHOWN = 4  # newest reasons that are shown
LONGEST = 300  # characters of a reason
ACCELERATOR = "AcceleratorError"  # the exception of torch for errors of a GPU
WRONG_VALUES = "computed wrong values"  # ends the reason of such a failure
TWICE = 2  # failures of this kind in a run, after which a host is left out also without a limit
Failure = tuple[float, str]  # Unix seconds, and what happened


def blames_host(report: WorkerReport) -> bool:
    """Whether the host may be the cause of a worker's end: a signal, a hang, or an error of a GPU. Other exceptions and
    exit codes are the script's. Wrong values of `--verify-steps` are counted when they are found.
    """
    if report.failed is not None:
        return report.failed[0] == ACCELERATOR
    return bool(report.hung) or (report.status is not None and report.status < 0)


def describe(failures: Iterable[Failure]) -> str:
    """Counts failures and names the newest of them, each reason once."""
    known = sorted(failures)
    reasons = dict.fromkeys(text for _, text in reversed(known))
    text = "; ".join([*reasons][:SHOWN]) + "; ..." * (len(reasons) > SHOWN)
    return f"{plural(len(known), 'failure')} ({text})"


@dataclass
class HostFailures:
    """The failures of hosts, by host. After `limit` failures a host must be left out (None: never). It must also be
    left out if its workers computed `wrong` values twice in this run, and the run has other hosts.

    `agents` are the hosts of agents. `excluded` has the reasons for each host that is left out, and `spared` the hosts
    that the run needs although they failed that often.
    """

    limit: int | None = None
    failures: dict[str, list[Failure]] = field(default_factory=dict)
    agents: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    spared: set[str] = field(default_factory=set)
    wrong: Counter[str] = field(default_factory=Counter)
    clock: Callable[[], float] = time.time

    def join(self, agent: str, host: str, earlier: Iterable[Failure]) -> str:
        """Registers the host of an agent with the failures that it remembers of earlier runs. Returns why the host is
        left out, or an empty text.
        """
        self.agents[agent] = host
        known = self.failures.setdefault(host, [])
        known += sorted({(at, text) for at, text in earlier} - {*known})
        return self.excluded.get(host, "")

    def agents_of(self, host: str) -> set[str]:
        """The agents of a host."""
        return {agent for agent, other in self.agents.items() if other == host}

    def add(self, agent: str, why: str) -> Failure:
        """Counts a failure of an agent's host, and returns it with its time."""
        failure = round(self.clock(), 3), in_one_line(why)[:LONGEST]  # as the host remembers it
        self._count(self.agents.get(agent, ""), failure)
        return failure

    def _count(self, host: str, failure: Failure) -> None:
        self.failures.setdefault(host, []).append(failure)
        self.wrong[host] += failure[1].endswith(WRONG_VALUES)

    def is_due(self, host: str) -> bool:
        """Whether a host has failed so often that it is to be left out, and is not yet."""
        often = self.limit is not None and len(self.failures.get(host, ())) >= self.limit
        often |= self.wrong[host] >= TWICE and any(other != host for other in self.agents.values())
        return bool(host) and often and host not in self.excluded

    def about(self, agent: str) -> dict[str, Any]:
        """What an agent is to know of its host: its failures, and why it is left out, if it is."""
        host = self.agents.get(agent, "")
        return {"failures": self.failures.get(host, []), "excluded": self.excluded.get(host, "")}

    def recall(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Takes over what an earlier coordinator of this run has written into the journal."""
        for event in events:
            host = str(event.get("host"))
            if event.get("event") == "excluded":
                self.excluded[host] = str(event.get("text"))
            elif event.get("event") == "host" and event.get("kind") == "failure":
                self._count(host, (float(event.get("since") or 0.0), str(event.get("text"))))
