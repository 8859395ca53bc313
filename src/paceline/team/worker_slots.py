"""What agents report of their workers and what the coordinator keeps of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.base.environment import SERVERS
from paceline.base.text import called, plural
from paceline.team.agent_commands import At
from paceline.team.membership import Announcement, Membership
from paceline.team.merge_quorum import RoundReport

WIDEST = 300  # characters of a line that is told of a loss
PAUSE, LONGEST = 1.0, 30.0  # seconds before one that failed as a newcomer is started again; twice as long each time
UNKNOWN = -1  # the life of a worker that was started before the coordinator was


@dataclass(frozen=True)
class WorkerReport:
    """What an agent says of a worker. `life` counts the processes that were started for it; all else is of the present
    one. A model lives on a `replica` of so many workers. It is `waiting` to be admitted; `at` is where it takes the
    state beforehand (host, port, secret), `current` says that it has, or that nobody sends it. `formed` is the last
    generation that it entered, `alone` the one in which it misses others; `failed` what it said of its exception,
    `final` one that another worker would raise as well; it has been `stopped` for `since` seconds; it was
    ended because it `hung` at that line, or what people are to know of how it `stands` still; `status` is its exit
    code and `why` how it ended, in words, `cause` what else is known of that, and `tail` the last lines of its log;
    `declined`: it cannot be started again; `round` is what its team last said of a round of islands; its
    plan wants so many parameter `servers`, and `copies` of what each keeps. One of those `holds` the state.
    """

    life: int = 0
    store: tuple[str, int] = ("", 0)
    newcomer: bool = False
    replica: int = 1
    ready: bool = False
    waiting: bool = False
    at: At | None = None
    current: bool = False
    formed: int = -1
    alone: int = -1
    leaves: bool = False
    ended: bool = False
    failed: tuple[str, int, str] | None = None
    final: bool = False
    stopped: bool = False
    since: float = 0.0
    hung: str = ""
    stands: str = ""
    status: int | None = None
    why: str = ""
    cause: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    declined: bool = False
    round: RoundReport | None = None
    servers: int = 0
    copies: int = 0
    holds: bool = False

    @property
    def loss(self) -> str:
        """How it failed, in words."""
        if self.failed is None:
            return self.why
        kind, _, text = self.failed
        return f"ended with {text}" if kind == "SystemExit" else f"raised {kind}"

    def epitaph(self, log: str) -> list[str]:
        """What is left of it when it is lost: lines for the console. `log` is where its log is."""
        return [*self.cause, f"the end of {log}:" if self.tail else f"log: {log}", *(f"| {line}" for line in self.tail)]


FIELDS = {each.name for each in fields(WorkerReport)}


@dataclass
class WorkerSlot:
    """A worker of an agent. Its process is `out` when the team goes on without it; `life` is the one that is wanted.
    `failures` of those before it ended, one after another, before they were of the team.
    """

    agent: str
    life: int = 0
    newcomer: bool = False
    out: bool = False
    failures: int = 0
    said: WorkerReport = field(default_factory=WorkerReport)

    @property
    def alive(self) -> bool:
        return self.said.status is None and not self.out

    @property
    def failed_early(self) -> bool:
        """Whether it ended before it was of the team."""
        return self.newcomer and self.said.status is not None and not self.said.holds

    @property
    def wanted(self) -> dict[str, Any]:
        """What its agent is to bring about."""
        return {"life": self.life, "out": self.out, "newcomer": self.newcomer}


def read_said(given: Mapping[str, Any]) -> WorkerReport:
    """What JSON of the type forms.STATE holds of a worker."""
    made = {name: given[name] for name in FIELDS & given.keys()}
    made |= {name: tuple(made[name]) for name in ("store", "at", "failed") if made.get(name) is not None}
    made |= {name: tuple(line[:WIDEST] for line in made[name]) for name in ("cause", "tail") if name in made}
    return WorkerReport(**made | {"round": RoundReport.read(given.get("round"))})


def left_of(lost: Iterable[int], seats: Mapping[int, WorkerSlot], logs: Mapping[str, str]) -> str:
    """Lines below the one that says who is lost: why, and where to read on."""
    lines: list[str] = []
    for number in lost:
        agent, said = seats[number].agent, seats[number].said
        where = f" on {agent.partition(' ')[0]}" if len(logs) > 1 else ""
        lines += said.epitaph(f"{logs.get(agent, 'logs')}/{called(number)}.log{where}")
    return "".join(f"\n  {line}" for line in lines)


def generation_of(
    order: Announcement | None, seats: Mapping[int, WorkerSlot], more: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What agents are told of it, if there is one."""
    if order is None:
        return None
    first = seats.get(order.members[0])
    store = list(first.said.store) if first else ["", 0]
    return {"number": order.number, "members": list(order.members), "store": store, **more}


def pause_of(seat: WorkerSlot) -> float:
    """Seconds before another process is started in its place."""
    return min(LONGEST, PAUSE * 2.0**seat.failures) if seat.failed_early else 0.0


def go_on(members: Collection[int]) -> str:
    """What the others do."""
    return f"{plural(len(members), 'worker')} go{'es' if len(members) == 1 else ''} on"


def state_of(number: int, seat: WorkerSlot, roster: Membership) -> dict[str, Any]:
    """What anybody may know of a worker."""
    said = seat.said
    if seat.out or said.declined:
        state = "out"
    elif said.status is not None:
        state = f"ended with {said.status}"
    elif number in roster.leaving:
        state = "leaving"
    elif number in roster.members:
        state = "member" if number in roster.entered else "forming"
    else:
        serves = number >= SERVERS and said.at is not None
        state = "serving" if serves else "waiting" if said.waiting else "starting"
    return {"role": "server" if number >= SERVERS else "worker", "agent": seat.agent, "life": seat.life, "state": state}
