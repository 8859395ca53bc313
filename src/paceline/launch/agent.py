"""The agent of a host: obeys the coordinator, and decides which of its workers start, start again and end."""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.console import in_one_line, quoted
from paceline.base.environment import host_name, variable
from paceline.base.exit_codes import STOPPED
from paceline.base.heartbeat import BUSY, DONE, LOADED, USUAL
from paceline.base.journal import Journal
from paceline.base.schema import read_file
from paceline.base.text import ranks
from paceline.base.tracebacks import named, short
from paceline.errors import LaunchError, UsageError
from paceline.launch.coordinator_process import TAKE_OVER, CoordinatorProcess
from paceline.launch.diagnostics import Recorder
from paceline.launch.hangs import Hangs
from paceline.launch.host_health import HostHealth, HostWatch
from paceline.launch.host_history import FAILURE, HostEntry, HostHistory
from paceline.launch.joining import explain_refusal
from paceline.launch.options import LaunchOptions
from paceline.launch.outcome import RunOutcome
from paceline.launch.output import Output
from paceline.launch.preflight import at_launch
from paceline.launch.processes import Child, end_sessions
from paceline.launch.raw import GRACE
from paceline.launch.run_folder import RunFolder
from paceline.launch.serving import Serving
from paceline.launch.spares import team_text
from paceline.launch.traffic import Traffic
from paceline.launch.workers import CHUNK, STILL, Worker, Workers
from paceline.observe.progress import Progress
from paceline.team.coordinator_client import AWAY, CoordinatorClient
from paceline.team.etcd_lease import Lease

if TYPE_CHECKING:
    from paceline.launch.plan_watch import PlanWatch
    from paceline.planner.outlook import PlanChange

# Seconds to wait after a failure: for other failures, for the cause of a lost peer, for a failing process to end.
OTHERS, CAUSE, EXIT = 1.0, 3.0, 10.0
FAREWELL, PATIENCE = 5.0, 60.0  # seconds for the other hosts to end: when the run is cut short, otherwise
TWICE = 3.0  # seconds after which a second SIGTERM counts: job managers may signal a group and its members
UNUSED = 60.0  # seconds after which workers that have not joined a team are reported
LOOK = 0.5  # seconds between two checks of the coordinator
GIVEN_UP = 6.0  # seconds without a coordinator after which an agent whose workers have all ended stops waiting


class Agent:
    """Handles all events of one host in one loop: events, output, ends and stops of workers, the coordinator's orders,
    and signals to this process.

    `numbers`: the numbers of its workers. `standby`: the socket of the coordinator that this agent runs, or may run
    later. `serving`: the process that serves metrics and the live page on the coordinator's host.
    """

    def __init__(
        self,
        options: LaunchOptions,
        folder: Path,
        journal: Journal,
        progress: Progress,
        link: CoordinatorClient,
        numbers: list[int],
        standby: socket.socket,
        serving: Serving,
    ) -> None:
        self._options, self._folder, self._journal, self._progress = options, folder, journal, progress
        self._link, self._standby, self._serving = link, standby, serving
        self._served: Child | None = None
        self._coordinator: CoordinatorProcess | None = None
        store, standby_address = link.run.get("store"), standby.getsockname()[:2]
        self._lease = Lease(store, standby_address) if store else None
        self._is_held_back = False  # this host has lost the lease, so its workers wait
        self._stop: int | None = None  # the signal that asked for a stop with a checkpoint
        self._stopping = math.inf  # monotonic seconds of that signal
        self._at_once = self._over = self._leaving = self._away = False
        self._lines = 0  # the version of the orders whose line was printed last
        self._coming: dict[str, Any] = {}  # who receives the state, as last sent to the workers
        self._profile: dict[str, Any] = {}  # the last profile request
        self._damaged = -1  # the step of the newest checkpoint that was found damaged
        self._merge: dict[str, Any] | None = None  # the merge of islands, as last sent to the workers
        self._servers: dict[str, Any] = {}  # the parameter servers, as last sent to the workers
        self._sent_generation = (0, 0)  # epoch and number of the generation last sent to the workers
        self._failing: dict[int, str] = {}  # workers whose failure ends the run, and how they failed
        self._failing_since: dict[int, float] = {}  # monotonic seconds at which that became known
        self._wanted_lives: dict[int, dict[str, Any]] = {}  # by worker: the life in which the coordinator wants it
        self._store: Any = None  # the address of the first team's store, once that team can start
        self._ending_first: list[Worker] = []  # processes that must end before their workers start again
        logs = folder / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        # If both streams are the terminal, output must not break the progress line; otherwise bytes pass unchanged.
        raw = None if options.quiet or (sys.stderr.isatty() and sys.stdout.isatty()) else 1
        self._output = Output(logs, numbers, self.say, raw)
        self._workers = Workers(options, folder, numbers, self._output, journal, self._on_event, self.say)
        self._hangs = Hangs(self._workers, options, folder, journal, self._output, self.say)
        self._recorder = Recorder(self._workers, folder, link)
        self._script = _Script(Path(options.script))
        self._declined: dict[int, dict[str, Any]] = {}  # the reports of workers that were not started again
        self._report: dict[str, Any] = {}
        self._epoch, self._traffic = link.epoch, Traffic()
        self._standby_address: tuple[str, int] = standby_address
        self._outcome = RunOutcome(options, folder, journal, self._output, self.say)
        self._run_folder = RunFolder(folder, link.token, journal, self._output, options.checkpoints, self.say)
        self._host_watch = HostWatch(partial(HostHealth, folder, lambda: link.clock))
        self._shown_troubles: set[str] = set()
        # What happens in a rehearsal, or because of injected faults, says nothing about the host.
        is_real = not (options.temporary or options.raw or variable("PACELINE_CHAOS"))
        self._history = HostHistory() if is_real else None
        self.change: PlanChange | None = None  # of the plan, for which the run stops
        self.rejoins = False  # whether the run goes on under another plan, on its first host
        self._watch: PlanWatch | None = None
        if options.chosen is not None and options.chosen.outlook is not None and not options.shares:
            from paceline.launch.plan_watch import PlanWatch  # not with every run

            self._watch = PlanWatch(options.chosen.outlook, folder, journal, options.max_steps, options.deadline)

    def run(self, wakeup: socket.socket) -> int:
        """Runs the workers to their end and returns the exit code. No process remains. `wakeup` delivers signal
        numbers.
        """
        self._unused = time.monotonic() + UNUSED
        self._workers.selector.register(wakeup, selectors.EVENT_READ, partial(self._on_signal, wakeup))
        self._workers.selector.register(self._link, selectors.EVENT_READ, self._take_orders)
        try:
            if self._outcome.first:
                self._run_coordinator(self._options.epoch if self._lease is None else self._lease.begin(), None)
            if self._lease is not None:
                self._lease.start()
            self._prepare()
            for text in at_launch():  # while torch is imported
                self.say(text, always=True)
            self._host_watch.start()
            self._send_report()
            self._link.start()
            while not self._is_done():
                now = time.monotonic()
                dues = (self._deadline, self._output.deadline(), self._next_stop_report(), self._hangs.due, now + LOOK)
                for key, _ in self._workers.selector.select(max(min(dues) - now, 0.0)):
                    key.data()
                self._output.tick(time.monotonic())
                self._hangs.look(time.monotonic(), self._stop is not None)
                if now >= self._unused and not self._options.raw:
                    self._outcome.warn_of_strangers(self._workers.all)
                    self._unused = math.inf
                self._look_at_the_link()
                self._look_at_ends(now)
                self._run_folder.look(now)
                self._look_at_the_plan(now)
                self._look_at_the_host()
                self._send_report()
                self._recorder.look()
        finally:
            self._end()
        self._progress.close()
        if self._watch is not None:
            self._watch.remember()
        members = [worker for worker in self._workers.all if worker.is_member]
        if self.change is not None and not self._at_once and {worker.status for worker in members} == {STOPPED}:
            return STOPPED
        self.change = None
        orders = self._link.newest
        goes_on = orders.get("changes") or self._link.run.get("trial")
        self.rejoins = bool(goes_on) and not self._leads and self._stop is None
        if self.rejoins and {worker.status for worker in members} <= {0, STOPPED}:
            self.say("the plan of the run changes; the workers of this host join it again")
            return STOPPED
        return self._outcome.verdict(self._workers.all, self._stop, self._at_once, self._leaving, orders)

    def serve(self) -> None:
        """Starts the process that serves metrics and the live page, if they are asked for. Its messages and its end are
        printed; they have no other effect. UsageError: an address cannot be served.
        """
        served, output_fd = self._serving.start(self._folder, self._standby_address[0]), self._serving.output_fd
        if served is None or served is self._served or served.status is not None:  # it ended during an earlier attempt
            return

        def ends() -> None:
            status = served.status or 0
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
            self._forget_served()
            self.say(f"the process for metrics and the live page {how}; the run continues without it", always=True)

        def says() -> None:
            if not (text := os.read(output_fd, 1 << 12)):
                self._workers.selector.unregister(output_fd)
            for line in text.decode().splitlines():
                self.say(f"{line}; the run continues without it", always=True)

        self._served = served
        self._workers.selector.register(served.pidfd, selectors.EVENT_READ, ends)
        self._workers.selector.register(output_fd, selectors.EVENT_READ, says)

    def _forget_served(self) -> None:
        """Stops watching the process that serves metrics."""
        for descriptor in () if self._served is None else (self._served.pidfd, self._serving.output_fd):
            with suppress(KeyError):  # its output has ended, and was unregistered
                self._workers.selector.unregister(descriptor)
        self._served = None

    @property
    def in_pieces(self) -> bool:
        """Whether a model was split over several workers, and all workers belong to this agent."""
        parted = any(worker.report()["replica"] > 1 for worker in self._workers.all)
        return parted and (self._link.newest or {}).get("agents", 1) <= 1

    def _prepare(self) -> None:
        done = self._workers.tuning
        what = f" ({', '.join(text for text, _ in done)})" if done else ""
        where = f", run folder {named(self._folder)}"
        if not self._outcome.first:
            host, port = self._link.address
            where = f" for the run at {host}:{port}, as {ranks(self._workers.numbers)}{where}"
        self.say(f"{team_text(self._options.workers, self._options.spares)}{what}{where}")
        for warning in self._workers.thread_warnings:
            self.say(warning)
        for text, why in done if self._outcome.first else ():
            self._journal.write("decision", what=f"workers: {text}", why=why)
        self._workers.prepare(self._start)

    def _start(self) -> None:
        """Starts the workers that need not wait for other hosts: the first team, if it is on this host alone, and
        workers that wait to be admitted.
        """
        size = self._link.run["workers"]  # of the first team, which starts once its hosts have joined
        first = [number for number in self._workers.numbers if number < size]
        if self._outcome.first and len(first) == size:
            self._workers.start_team(dict.fromkeys(first, 0))
        for number in self._workers.numbers:
            if number >= size:
                self._workers.start_newcomer(number, 0)
        self._reconcile(self._wanted_lives)  # only now, since it starts newcomers that have no process yet

    def say(self, text: str, always: bool = False) -> None:
        """Prints a line on the console, with --quiet only if `always`."""
        if always or not self._options.quiet:
            self._progress.line(text)

    @property
    def _leads(self) -> bool:
        """Whether a signal to this host stops the run: it is the first host, or has taken over from it."""
        return self._outcome.first or self._outcome.took_over

    @property
    def was_stopped(self) -> bool:
        """Whether the run was asked to stop."""
        return self._stop is not None

    @property
    def epoch(self) -> int:
        """The epoch of the newest coordinator that this agent knows."""
        return self._link.epoch

    @property
    def port(self) -> int:
        """The port of the coordinator that this agent runs, or may run later."""
        return self._standby_address[1]

    @property
    def _goes_on(self) -> bool:
        """Whether the run goes on under another plan when these workers end: they stop for that, or have been started
        under a plan under which none has trained yet.
        """
        chosen, begins = self._options.chosen, not self.has_trained and self._stop is None
        return self.change is not None or (chosen is not None and chosen.before is not None and begins)

    @property
    def has_trained(self) -> bool:
        """Whether a worker has made a step."""
        return any("step" in worker.events for worker in self._workers.all)

    def _is_done(self) -> bool:
        # A script that trains by itself gets as long to end after a signal as under torchrun.
        self._at_once |= self._options.raw and time.monotonic() > self._stopping + GRACE
        if self._at_once or self._over or time.monotonic() >= self._deadline:
            return True
        if self._workers.preparing or self._ending_first:
            return False
        if any(worker.alive and worker.is_member for worker in self._workers.all):
            return False
        if any(worker.alive and not worker.out and not worker.serves for worker in self._workers.all):
            return False  # they wait to be admitted
        if not self._leaving and any(self._is_due(number, wanted) for number, wanted in self._wanted_lives.items()):
            return False  # they wait for the hosts of the others
        if self._coordinator is not None and not self._failing and self._link.newest.get("agents", 1) > 1:
            return False  # other hosts continue to train, and need our coordinator
        return self._link.settled(self._report) or self._link.away > GIVEN_UP

    # ---- events and signals

    def _on_event(self, worker: Worker, event: dict[str, Any]) -> None:
        kind = event["event"]
        main = self._output.shown == worker.rank and not worker.out
        if kind == "failed":
            worker.ended = time.monotonic()
        elif kind == "formed":
            self._workers.pin(worker)
            generation = self._link.newest.get("generation")
            if generation and generation["number"] == event.get("number"):
                self._output.show_lines_of(generation["members"][0])
        elif (main and kind == "line") or (main and kind == "detail" and self._options.verbose):
            self.say(str(event.get("text", "")))
        elif main and kind in ("phase", "step", "evaluate") and not self._options.quiet:
            getattr(self._progress, kind)(event)

    def _on_signal(self, wakeup: socket.socket) -> None:
        for number in wakeup.recv(CHUNK):
            if number == signal.SIGCHLD:
                self._workers.look_for_stops()
            elif self.change is not None and self._stop is not None:
                self._keep_plan(number)
            elif self._stop is not None:
                meant = number == self._stop == signal.SIGTERM and time.monotonic() - self._stopping > TWICE
                if number == signal.SIGINT or meant:
                    self._at_once, self._stop = True, number
            elif self._leads:
                self._stop_all(number)
            else:
                self._leave(number)

    def _stop_all(self, number: int) -> None:
        """Asks all workers to stop the run with a checkpoint."""
        self._stop, self._stopping = number, time.monotonic()
        self._at_once = self._workers.preparing
        if not self._at_once and self.change is None:
            saves = any(worker.events.keys() & {"phase", "step"} for worker in self._workers.all)  # they train
            how = "stopping after this step and saving" if saves else "stopping"
            self.say(f"{how}; press Ctrl-C again to stop at once", always=True)
        # A script that trains by itself gets the signal that the user sent, as under torchrun.
        raw = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        sent = raw if self._options.raw else signal.SIGUSR2
        for worker in self._workers.all:
            if worker.alive and not worker.serves:  # a worker without a trainer yet just ends
                worker.process.signal(sent)
        self._reconcile(self._wanted_lives)  # a team that waits for hosts does not start any more

    def _look_at_the_plan(self, now: float) -> None:
        """Stops the run at the end of a step if it is to go on under another plan."""
        if self._watch is None or self._stop is not None or self._leaving or self._failing:
            return
        orders = self._link.newest
        generation = orders.get("generation") or {"members": range(self._link.run["workers"])}
        hosts = [count for _, count in orders.get("hosts", ())]
        self.change = self._watch.look(now, generation["members"], self._workers.newest, hosts)
        if self.change is not None:
            what, why = self._watch.texts(self.change)
            self.say(f"auto: {what}: {why}")
            self._stop_all(signal.SIGTERM)

    def _look_at_the_host(self) -> None:
        """Reports what was noticed of this host: each kind of trouble once on the console, and all in the history."""
        for trouble in self._host_watch.take():
            self._remember(trouble)
            if trouble.kind not in self._shown_troubles:
                self._shown_troubles.add(trouble.kind)
                self.say(f"{host_name()}: {trouble.text}")

    def _remember(self, entry: HostEntry) -> None:
        """Keeps what happened to this host for later runs."""
        if self._history is not None:
            self._history.add(entry._replace(run=str(short(self._folder))))

    def _keep_plan(self, number: int) -> None:
        """Stops the run for good, although it has begun to stop for another plan."""
        self.change, self._stop = None, number
        self.say("the plan is not changed: the run stops after this step and saves", always=True)

    def _leave(self, number: int) -> None:
        """Asks the workers of this host to leave the run."""
        self._stop, self._stopping, self._leaving = number, time.monotonic(), True
        self.say("leaving the run after this step; press Ctrl-C again to leave at once", always=True)
        for worker in self._workers.all:
            if worker.alive:
                worker.process.signal(signal.SIGTERM if worker.is_member else signal.SIGKILL)

    # ---- the coordinator

    def _send_report(self) -> None:
        """Sends the coordinator a report if anything has changed."""
        now = time.monotonic()
        for worker in self._workers.all:
            worker.is_suspended = worker.alive and worker.stopped + STILL <= now
        current = [worker for worker in self._workers.newest.values() if worker.pulse[DONE]]
        loaded = {w.rank: (round(w.pulse[LOADED], 6), w.pulse[DONE]) for w in current}
        busy = {w.rank: round(w.pulse[BUSY], 6) for w in current if w.pulse[USUAL]}
        sent, local_addresses = self._traffic.look((w.process.pid for w in self._workers.all if w.alive), now)
        self._link.figures = {"loaded": loaded, "busy": busy, "sent": sent, "here": local_addresses}
        self._link.figures["troubles"] = [trouble[:3] for trouble in [*self._host_watch.newest]]
        workers = {number: worker.report() for number, worker in self._workers.newest.items()}
        report = {
            "workers": {str(number): worker_report for number, worker_report in (workers | self._declined).items()},
            "step": max((w.events.get("step", {}).get("step") or 0 for w in self._workers.all), default=0),
            "stop": self._leads and self._stop is not None and not self._leaving and self.change is None,
            "leaving": self._leaving,
            **({} if self._watch is None else {"changes": self._goes_on}),
        }
        if report != self._report:
            self._report = report
            self._link.put(report)

    def _take_orders(self) -> None:
        orders = self._link.take()
        if not orders:
            return
        for version, line, always in orders["lines"]:
            if version > self._lines:
                self._lines = version
                self.say(line, always)
        self._store = orders["store"]
        self._wanted_lives = {int(number): wanted for number, wanted in orders["workers"].items()}
        self._reconcile(self._wanted_lives)
        generation, messages = orders["generation"], []
        if generation is not None and (orders["epoch"], generation["number"]) > self._sent_generation:
            self._sent_generation = orders["epoch"], generation["number"]
            messages.append(generation)
        if orders["coming"] != self._coming or (orders["coming"] and messages):
            self._coming = orders["coming"]
            messages.append({"coming": self._coming})
        if orders["merge"] != self._merge:
            self._merge = orders["merge"]
            messages.append({"merge": self._merge})
        # Empty: a restarted coordinator does not know the servers yet.
        if orders["servers"] and (orders["servers"] != self._servers or messages):
            self._servers = orders["servers"]
            messages.append({"servers": self._servers})
        if orders["profile"] != self._profile:
            self._profile = orders["profile"]
            messages.append({"profile": self._profile})
        if (damaged := orders.get("damaged", -1)) != self._damaged:
            self._damaged = damaged
            messages.append({"damaged": damaged})
        for worker in self._workers.all if messages else []:
            if worker.alive:
                for message in messages:
                    worker.tell(message)
        for number, _, why in orders["failing"]:
            if number not in self._failing:
                self._failing[number] = why
                self._fail(number)
        if orders["stop"] and self._stop is None:
            self._stop_all(signal.SIGTERM)
        elif orders["stop"] and self.change is not None:
            self._keep_plan(signal.SIGTERM)
        self._over |= orders["over"]
        for at, text in orders.get("failures", ()):
            self._remember(HostEntry(at, FAILURE, text))
        self._link.others = [(host, port) for host, port in orders["standbys"] if (host, port) != self._standby_address]
        if orders["moved"] is not None:
            self._move(tuple(orders["moved"]))

    def _is_due(self, number: int, wanted: Mapping[str, Any]) -> bool:
        """Whether a worker is to start with the first team, and has not started yet."""
        worker = self._workers.newest.get(number)
        is_first = not (wanted["newcomer"] or wanted["out"] or number in self._declined)
        return is_first and (worker is None or worker.life < wanted["life"])

    def _reconcile(self, workers: Mapping[int, Mapping[str, Any]]) -> None:
        """Starts and kills workers, so that each comes into the life that the coordinator wants, and none runs that is
        out. A worker is started again only after its previous process has ended, and the workers of the first team
        only once the hosts of all of them have joined. So this is called again until everything is as wanted.
        """
        together, self._ending_first = {}, []
        if self._workers.preparing:
            return
        for number, wanted in workers.items():
            worker, life = self._workers.newest.get(number), wanted["life"]
            if worker is None and wanted["newcomer"] and number not in self._declined and not wanted["out"]:
                self._try_start({number: life}, partial(self._workers.start_newcomer, number, life))
            elif worker is None and self._is_due(number, wanted):
                together[number] = max(life, 0)
            if worker is None or worker.life > life or (worker.life == life and not wanted["out"]):
                continue
            self._workers.lose(worker)
            if worker.alive and "failed" not in worker.events:
                worker.process.signal(signal.SIGKILL)  # otherwise it could wake up and end a step of its old team
            if worker.life == life or wanted["out"] or number in self._declined:
                continue
            if worker.alive:
                self._ending_first.append(worker)
            if not wanted["newcomer"]:
                together[number] = life
            elif not worker.alive:
                self._try_start({number: life}, partial(self._workers.start_newcomer, number, life))
        if any(worker.alive for worker in self._ending_first if worker.rank in together):
            return
        if together and self._stop is not None:  # no worker has anything to save
            self._at_once = True
        elif together and self._store is not None:
            host, port = self._store
            self._try_start(together, partial(self._workers.start_team, together, (host, port) if port else None))

    def _look_at_ends(self, now: float) -> None:
        """Continues starts that wait for the ends of processes; kills a failed process that does not end."""
        for worker in self._ending_first:
            if worker.alive and now > worker.ended + EXIT:
                worker.process.signal(signal.SIGKILL)
        if any(not worker.alive for worker in self._ending_first):
            self._reconcile(self._wanted_lives)

    def _try_start(self, lives: Mapping[int, int], start: Callable[[], None]) -> None:
        """Calls `start`, which starts workers in the given `lives`, or prints why that is not possible."""
        error = None
        if self._leaving or self._stop is not None:  # the coordinator did not know of it yet
            error = ""
        elif what := self._script.changed():
            cure = "to use the new script, start" if what.startswith("has changed") else "restore it, then start"
            how = f"{in_one_line(self._options.script)} {what}; {cure} the same command again"
            error = f"{ranks(sorted(lives))} {'is' if len(lives) == 1 else 'are'} not restarted: {how}"
        else:
            try:
                start()
            except LaunchError as failure:
                error = str(failure)
        if error is not None:
            if error:
                self.say(error, always=True)
            for number, life in lives.items():
                before = self._workers.newest[number].report() if number in self._workers.newest else {}
                self._declined[number] = {**before, "life": life, "declined": True}

    def _fail(self, number: int) -> None:
        """Notes that the failure of this worker ends the run."""
        self._failing_since[number] = time.monotonic()
        if number in self._workers.newest:
            self._output.failing(number)

    @property
    def _deadline(self) -> float:
        """Monotonic seconds until which the agent waits for further reports about failures."""
        return min((since + self._patience(number) for number, since in self._failing_since.items()), default=math.inf)

    def _patience(self, number: int) -> float:
        worker = self._workers.newest.get(number)
        if worker is None or worker.stopped < math.inf:  # it will report nothing more
            return OTHERS
        lost = worker.events.get("failed", {}).get("kind") == "PeerLostError"
        return EXIT if worker.alive else CAUSE if lost else OTHERS

    def _look_at_the_link(self) -> None:
        if self._link.refused is not None:
            raise explain_refusal(self._link.refused, self._options, self._link.address)
        if self._coordinator is not None:
            self._coordinator.tend(self._link.answered)
        away = self._link.away > AWAY and (self._coordinator is None or self._away)  # ours is restarted
        if away and not self._away:
            host, port = self._link.home
            then = f"if that host is lost, run `paceline run --take-over {quoted(short(self._folder))}` to continue"
            then = then if self._lease is None else "if that host is lost, etcd assigns the coordinator to another host"
            what = self._link.trouble or f"the coordinator at {host}:{port} does not answer"
            self.say(f"{what}; the workers of this host wait for it; {then}")
        elif self._away and not away:
            self.say(f"the coordinator {'answers again' if self._link.epoch == self._epoch else 'was replaced'}")
        self._away, self._epoch = away, self._link.epoch if not away else self._epoch
        self._at_once |= self._leaving and self._link.away > GIVEN_UP  # no coordinator to report to
        asked = self._folder / TAKE_OVER
        if asked.exists():
            try:
                if away and self._coordinator is None and self._lease is None:
                    self._run_coordinator(self._link.epoch + 1, self._link.home)
                    self.say("this host takes over the coordinator")
            finally:
                asked.unlink()  # only now, because `take_over` then looks for the new address
        if self._lease is not None:
            self._look_at_the_lease(self._lease, away)

    def _look_at_the_lease(self, lease: Lease, away: bool) -> None:
        """With etcd: runs the coordinator if, and only if, this host has the lease."""
        if self._coordinator is not None and not lease.held:
            self._hold_back(True)
            self.say("etcd does not answer, or assigned the run to another host; the workers of this host wait")
            self._coordinator.close()
            self._coordinator = None
        if self._is_held_back and self._link.home != self._standby_address:  # the link found the host with the lease
            self._on_take_over(self._link.home)
        lease.wanted = self._coordinator is None and (away or self._is_held_back)
        if self._coordinator is not None or not lease.wanted:
            return
        if lease.held and lease.epoch is not None:
            self._run_coordinator(lease.epoch, None if self._is_held_back else self._link.home, again=True)
            self.say(
                "etcd answers again" if self._is_held_back else "this host takes over the coordinator, as etcd decided"
            )
            self._hold_back(False)
        elif lease.holder is not None and lease.holder not in (self._link.address, self._standby_address):
            self._move(lease.holder)

    def _hold_back(self, on: bool) -> None:
        """Makes the workers wait between two steps (`on`), or continue."""
        self._is_held_back = on
        for worker in self._workers.all:
            if worker.alive:
                worker.tell({"wait": on})

    def _run_coordinator(self, epoch: int, before: tuple[str, int] | None, again: bool = False) -> None:
        """Starts a coordinator on this host: as the successor of the one at `before`, or, with `again`, in place of
        one of this host that was closed.
        """
        run = {**self._link.run, "script": self._options.script}
        newest = self._link.newest.get("generation") or {"number": 0, "members": list(range(run["workers"]))}
        generation = [newest["number"], newest["members"]]
        again |= before is not None
        self._outcome.took_over = not self._outcome.first
        given = {"run": run, "generation": generation, "epoch": epoch, "before": before, "again": again}
        given["numbers"] = [] if again else self._workers.numbers
        self._standby.listen(256)
        token, selector = self._link.token, self._workers.selector
        restore = self._run_folder.restore
        self._coordinator = CoordinatorProcess(self._standby, self._folder, token, given, selector, self.say, restore)
        if again:
            self._link.move(self._standby_address)
            try:
                self.serve()
            except (UsageError, OSError) as error:
                self.say(f"metrics and the live page cannot be served any more: {error}", always=True)

    def _move(self, address: tuple[str, int]) -> None:
        """Connects to another host that has taken over the coordinator; our workers join it as new workers."""
        if address == self._standby_address:
            return
        if self._coordinator is not None or self._is_held_back:
            self._on_take_over(address)
        self._link.move(address)
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    def _on_take_over(self, address: tuple[str, int]) -> None:
        host, port = address
        self.say(f"the host at {host}:{port} has taken over; the workers of this host join it as new workers")
        self._outcome.first = self._outcome.took_over = self._is_held_back = False
        self._forget_served()
        self._serving.stop()

    def _next_stop_report(self) -> float:
        """Monotonic seconds at which the next stopped worker is to be reported."""
        stopped = [w.stopped + STILL for w in self._workers.all if w.alive and not w.is_suspended and not w.out]
        return min(stopped, default=math.inf)

    # ---- ending

    def _end(self) -> None:
        """Ends all processes and reads their last output."""
        self._host_watch.close()
        self._workers.kill()
        left = end_sessions({worker.process.pid for worker in self._workers.all})
        self._recorder.look(end=True)
        if self._coordinator is not None:
            self._wait_for_other_hosts()
        self._link.close({**self._report, "bye": True})
        if self._coordinator is not None:
            self._coordinator.close()
        if self._lease is not None:
            self._lease.close()
        self._standby.close()
        self._workers.close()
        if self._outcome.failures(self._workers.all, self._stop, self._failing):
            self._output.failing(self._output.shown)  # the output that is still held back belongs to the failure
        self._run_folder.restore()  # because the report is written there
        self._run_folder.close()
        self._output.close()
        if left and not any(worker.killed for worker in self._workers.all):
            names = ", ".join(f"{name} ({pid})" for pid, name in left.items())
            self.say(f"ended processes that the workers left running: {names}")

    def _wait_for_other_hosts(self) -> None:
        """Waits until the other hosts have the last orders of our coordinator and end by themselves."""
        cut_short = self._at_once or self._failing
        if cut_short:
            self._report = {**self._report, "over": True}
            self._link.put(self._report)
        end = time.monotonic() + (FAREWELL if cut_short else PATIENCE)
        with suppress(LaunchError):
            while self._coordinator is not None and self._link.take().get("agents", 1) > 1 and time.monotonic() < end:
                time.sleep(0.02)
                self._coordinator.tend(self._link.answered)


class _Script:
    """The script, which must stay the same for all workers of a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = read_file(path)

    def changed(self) -> str:
        """Describes how the file has changed since the start; empty if it has not changed."""
        try:
            return "has changed since the run began" if read_file(self._path) != self._text else ""
        except FileNotFoundError:
            return "was deleted"
        except OSError as error:
            return f"cannot be read ({error.strerror})"
