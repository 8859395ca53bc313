"""The state of workers: as agents report it, and as the coordinator keeps it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.base.environment import SERVERS
from paceline.base.text import called, plural
from paceline.team.agent_commands import At
from paceline.team.membership import Announcement, Membership
from paceline.team.merge_quorum import RoundReport

WIDEST = 300  # characters of each line about a loss
PAUSE, LONGEST = 1.0, 30.0  # seconds before a newcomer that failed is started again; twice as long each time
UNKNOWN = -1  # the life of a worker that was started before the coordinator was


@dataclass(frozen=True)
class WorkerReport:
    """What an agent reports of a worker.

    `life` counts the processes that were started for the worker; all other fields describe the present process.
    `replica` is the number of workers that hold the model together. A newcomer is `waiting` to be admitted; `at` is the
    address where it receives the state beforehand (host, port, salt), and `current` means that it has the state, or
    that no worker sends it. `formed` is the last generation that it entered, `alone` the one in which it misses others.
    `wrong` counts the attempts at verified steps in which it computed wrong values. `checked` is the last checkpoint
    that it has read again: its step, what is damaged, and the seconds that it took.
    `failed` describes its exception, which is `final` if another worker would raise it as well. The worker has been
    `stopped` (SIGSTOP) for `since` seconds. `hung` is the line at which it hung and was ended, `stands` a text for the
    console about a worker that makes no progress. `status` is its exit code, `why` says how it ended, `cause` what else
    is known of that, and `tail` has the last lines of its log. `declined`: it cannot be started again. `round` is its
    team's last report of a round of islands. Its plan needs `servers` parameter servers, with `copies` copies of what
    each keeps. A server that `holds` has its state.
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
    wrong: float = 0.0
    checked: tuple[int, str, float] | None = None
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
        """How the worker failed, in words."""
        if self.failed is None:
            return self.why
        kind, _, text = self.failed
        return f"ended with {text}" if kind == "SystemExit" else f"raised {kind}"

    def epitaph(self, log: str) -> list[str]:
        """The console's lines about a lost worker: causes and the end of its log, which is at `log`."""
        return [*self.cause, f"the end of {log}:" if self.tail else f"log: {log}", *(f"| {line}" for line in self.tail)]


FIELDS = {each.name for each in fields(WorkerReport)}


@dataclass
class WorkerSlot:
    """What the coordinator keeps of a worker.

    The worker is `out` when the team goes on without it. `life` is the one that its agent must run. `failures`
    processes in a row ended before they joined the team. A `spare` is ready, but the team is full.
    """

    agent: str
    life: int = 0
    newcomer: bool = False
    out: bool = False
    failures: int = 0
    spare: bool = False
    report: WorkerReport = field(default_factory=WorkerReport)

    @property
    def alive(self) -> bool:
        """Whether its process runs, as far as its agent has reported."""
        return self.report.status is None and not self.out

    @property
    def failed_early(self) -> bool:
        """Whether the process ended before it joined the team, or was ready as a spare."""
        return self.newcomer and self.report.status is not None and not self.report.holds and not self.spare

    @property
    def wanted(self) -> dict[str, Any]:
        """The state that the worker's agent must bring about."""
        return {"life": self.life, "out": self.out, "newcomer": self.newcomer}


def read_report(given: Mapping[str, Any]) -> WorkerReport:
    """A worker's report from JSON of the type message_types.STATE."""
    made = {name: given[name] for name in FIELDS & given.keys()}
    made |= {name: tuple(made[name]) for name in ("store", "at", "failed") if made.get(name) is not None}
    made |= {name: tuple(line[:WIDEST] for line in made[name]) for name in ("cause", "tail") if name in made}
    return WorkerReport(**made | {"round": RoundReport.read(given.get("round"))})


def left_of(lost: Iterable[int], slots: Mapping[int, WorkerSlot], logs: Mapping[str, str]) -> str:
    """The console's lines below the one that names lost workers: causes, and where their logs are."""
    lines: list[str] = []
    for number in lost:
        agent, report = slots[number].agent, slots[number].report
        if not agent:  # it has not reported to a restarted coordinator
            continue
        where = f" on {agent.partition(' ')[0]}" if len(logs) > 1 else ""
        lines += report.epitaph(f"{logs.get(agent, 'logs')}/{called(number)}.log{where}")
    return "".join(f"\n  {line}" for line in lines)


def generation_of(
    announcement: Announcement | None, slots: Mapping[int, WorkerSlot], more: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The message to agents about the newest generation, if there is one."""
    if announcement is None:
        return None
    first = slots.get(announcement.members[0])
    store = list(first.report.store) if first else ["", 0]
    return {"number": announcement.number, "members": list(announcement.members), "store": store, **more}


def pause_of(slot: WorkerSlot) -> float:
    """Seconds before another process is started for this worker."""
    return min(LONGEST, PAUSE * 2.0**slot.failures) if slot.failed_early else 0.0


def go_on(members: Collection[int]) -> str:
    """Says that the other workers go on."""
    return f"{plural(len(members), 'worker')} go{'es' if len(members) == 1 else ''} on"


def state_of(number: int, slot: WorkerSlot, membership: Membership) -> dict[str, Any]:
    """What /status shows of a worker."""
    report = slot.report
    if slot.out or report.declined:
        state = "out"
    elif report.status is not None:
        state = f"ended with {report.status}"
    elif number in membership.leaving:
        state = "leaving"
    elif number in membership.members:
        state = "member" if number in membership.entered else "forming"
    else:
        serves = number >= SERVERS and report.at is not None
        state = "serving" if serves else "spare" if slot.spare else "waiting" if report.waiting else "starting"
    return {"role": "server" if number >= SERVERS else "worker", "agent": slot.agent, "life": slot.life, "state": state}
