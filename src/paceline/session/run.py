"""The run of this process: opens its folder, journal and checkpoints, resumes, handles signals, ends."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Never, Protocol

import torch
from torch.backends.cpu import get_cpu_capability

from paceline.base.batching import Agreed
from paceline.base.console import say
from paceline.base.environment import World, doubt_threads
from paceline.base.journal import Journal, plain
from paceline.base.memory import advice, machine_memory
from paceline.base.terminal import Terminal
from paceline.base.text import duration, plural, ranks, size_of
from paceline.base.time_accounting import process_began
from paceline.checkpoint.export import write_together
from paceline.checkpoint.files import FOLDER, folder_of
from paceline.checkpoint.lock import hold_lock
from paceline.checkpoint.storage import CHECKPOINTS, NO_MIRROR, RUN_DIR, storage_at
from paceline.checkpoint.tree import unflatten
from paceline.comm.error_feedback import AllErrorFeedback
from paceline.comm.torch_private import pytree, untested
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import held, in_pieces
from paceline.errors import CheckpointError, OutOfMemoryError, UsageError, WorkersDifferError, first_line
from paceline.observe.loggers import Loggers
from paceline.observe.profiling import Profiles
from paceline.observe.progress import Progress
from paceline.observe.report import write_report
from paceline.observe.step_totals import BytesSent
from paceline.parallel.tensor_parallel.script_view import without_script_view
from paceline.session.best_checkpoint import best_now, keep_best
from paceline.session.checkpoint_manager import CheckpointManager, StateSnapshot, load_user_streams, user_streams
from paceline.session.closed_trainers import Ended, release
from paceline.session.consistency import ConsistencyChecker
from paceline.session.script_info import (
    VERSIONS,
    changed_since,
    code,
    module_name,
    packages,
    refuse_other_script,
    script_name,
    script_text,
)
from paceline.session.trainer_consistency import OF_MODEL, refuse_difference
from paceline.session.training_loop import LoopState, RegisteredTrainer
from paceline.session.validation import private_memory, refused_exports
from paceline.team.agent_commands import Generation
from paceline.team.coordinator import STOPPED
from paceline.team.team import Team, join
from paceline.team.transactions import LeftError


class ServerProcess(Protocol):
    """The interface of the parameter server that the run uses if its process is one. `contexts` are of its trainers."""

    contexts: list[Any]

    def take(self) -> dict[str, Any]:
        """Waits for a worker's state and returns it."""
        ...

    def serve(self, reached: Callable[[str], None]) -> None:
        """Serves until training ends; `reached` is called at moments at which faults may be injected."""


class Run:
    """The run of this process; there is one per process. Without a run folder, `folder` is None, nothing is written and
    nothing can be resumed.
    """

    _current: Run | None = None

    @classmethod
    def current(cls, make_server: Callable[[World], ServerProcess] | None = None) -> Run:
        """Returns the run of this process and creates it at the first call. `make_server` is called if the process is a
        parameter server.
        """
        if cls._current is None:
            cls._current = Run(join(), make_server)
        return cls._current

    def __init__(self, team: Team, make_server: Callable[[World], ServerProcess] | None = None) -> None:
        self.team = team
        world = team.world
        world.tell("join", trainer=True)
        self.folder = Path(world.run_dir) if world.run_dir else None
        self._members: list[
            RegisteredTrainer | weakref.ref[RegisteredTrainer]
        ] = []  # of trainers in use the script alone holds them
        self.classes: list[str] = []  # of their models
        self.ended: set[int] = set()  # trainers that wait to be released
        self.error_feedback = AllErrorFeedback()
        self.models: list[torch.nn.Module] = []  # the members', for whoever must know what a loss may run
        self.notice: int | None = None
        self.loops: list[LoopState] = []  # those being gone through, the first to begin first
        self.calls: Counter[int] = Counter()  # of steps(), by trainer: the numbers of their phases
        self._left_loops: list[LoopState] = []  # by `break`, before their end
        self._round: set[int] = set()  # trainers that made a step() outside of loops, each once
        self._save_due = 0
        self._stop_due = self._enter_due = False
        self.stepping = False  # trainer.step() is being used
        self.took_step = False
        self.results: list[Any] = []
        self._replayed = 0
        self._lines_said: set[str] = set()
        location = world.checkpoints or (self.folder / FOLDER if self.folder is not None else None)
        mirror = (world.mirror[0], storage_at(Path(world.mirror[1]), NO_MIRROR)) if world.mirror else None
        another = CHECKPOINTS if world.checkpoints else RUN_DIR
        storage = storage_at(location, another) if location is not None and not world.serves else None
        # Set where this process is a parameter server.
        self.serving = make_server(world) if world.serves and make_server else None
        self.servers: Any = None  # the `param_server.client.ServerClient` to which this worker pushes gradients
        self.saving = CheckpointManager(team, storage, world.save_every, world.keep, mirror)
        self.agreement = ConsistencyChecker(team, self.saving.copied)
        self._check: dict[str, Any] = json.loads(world.check) if world.check else {}
        self.explain_request = self._check.get("explain")  # the plan, and for how many workers
        self.traffic = BytesSent(team.group.ledger)
        self.reverse = bool(self._check.get("reverse"))  # micro-batches are summed in the opposite order
        self._left = self._closing = False
        self._plan = ""
        self.baseline_bytes = 0
        self._opened = self.main
        team.transactions.state_owner = self
        alone = self.main and world.launcher != "paceline"  # without an agent, which holds the lock for its workers
        self._lock = hold_lock(self.folder) if self.folder is not None and alone else None
        self.profiles = Profiles(self.folder, world.rank)
        self.loggers = Loggers(self.folder, world.tensorboard)
        self.journal = Journal(self.folder if self.main else None, self.loggers)
        self.progress = Progress() if self.main and world.events_fd is None else None
        self.tree: dict[str, Any] = {}
        self._streams: list[Any] = []  # the user's own, by rank, as they were saved; one where all had the same
        resume_point = None if world.newcomer else self.saving.find(self.say)
        self._from: dict[str, Any] | None = None  # what the checkpoint that the run resumes from tells of itself
        world.tell("found", step=resume_point[0] if resume_point is not None else None)
        if resume_point is not None:
            step, self._from, tensors = resume_point
            self.resumed: int | None = step
            self.tree = unflatten(self._from["tree"], tensors)
            self.results = pytree.tree_map_only(torch.Tensor, torch.clone, list(self.tree.get("results", ())))
            self._streams = self._from.get("streams", [])
        else:
            self.resumed = None
        self.imported: str = self._from.get("imported", "") if self._from is not None else ""
        self.passing = self._from is not None and not self.imported  # what was done before is not done again
        if self._from is not None and self.passing:
            name, text = self._from.get("script_name", ""), self._from.get("script", "")
            refuse_other_script(name, text, self.folder or location)
            if self.main and (change := changed_since(text)):
                self.say(change)  # the run continues with the new script
        self._may_handle = threading.current_thread() is threading.main_thread()
        # With an agent, SIGUSR2 is its word that the whole run is to stop; the others tell this worker alone to leave.
        alone_too = self._leave_alone if team.transactions.elastic else self._notice
        handlers = {"SIGUSR1": alone_too, "SIGTERM": alone_too, "SIGUSR2": self._notice}
        for name, handler in handlers.items() if self._may_handle else ():
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), handler)
        team.closing.append(self.close)

    @property
    def main(self) -> bool:
        """Whether this worker prints and writes for the team."""
        return self.team.rank == 0 and not self.team.transactions.waiting and self.serving is None

    # -- trainers -------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[RegisteredTrainer]:
        """All trainers that the script has made; an ended trainer is represented by its `Ended` record."""
        trainers = (one() if isinstance(one, weakref.ref) else one for one in self._members)
        return [one for one in trainers if one is not None]

    @property
    def several(self) -> bool:
        """Whether the script has made more than one trainer."""
        return len(self._members) > 1

    def enlist(self, member: RegisteredTrainer, model: torch.nn.Module) -> None:
        """Registers a new trainer and its model."""
        self._members.append(weakref.ref(member))
        self.classes.append(type(model).__name__)
        self.models.append(model)

    def placeholder(self, number: int, member: RegisteredTrainer) -> None:
        """Replaces a trainer that has ended on this worker by `member`, to which it gave its parts."""
        self._members[number] = member
        self.ended.add(number)

    def forget(self, number: int, ended: Ended | None = None) -> None:
        """Stops comparing and summing a trainer that has ended on all workers, or in the checkpoint. `ended` takes its
        place.
        """
        for one in [one for one in self.agreement.weights if one.trainer == number]:
            self.agreement.release(one, self.journal)
        for figures in self.error_feedback.release(number):
            self.journal.write("codec", **figures)
        if ended is not None:
            self._members[number] = ended
            self.ended.discard(number)

    def view_models(self) -> None:
        """Updates the list of models that a loss may call to those of the present trainers."""
        members = self.members
        self.models[:] = [model for member in members if (model := member.viewed) is not None]
        for member in members:
            member.look_around()

    def measure(self) -> None:
        """Records the predicted and the measured memory and traffic of all trainers for the report. Collective."""
        group, members = self.team.group, self.members
        held = [member.held() for member in members]
        measurements = {
            str(n): measurement for n, one in enumerate(members) if (measurement := one.measure(sum(held) - held[n]))
        }

        def gather() -> Any:
            group.declare("what workers held and sent", kind="figures")
            return group.gather_json(measurements)

        reports = [measurements] if group.size == 1 else self.team.transactions.run(gather)
        for number in measurements:
            if all(number in one for one in reports):
                members[int(number)].measured([one[number] for one in reports])

    # -- a team that changes ------------------------------------------------------------------------------------

    def hand_over(self, done: int | None = None) -> Any:
        """Returns the whole state of the run as a tree, for a worker that joins."""
        trainers = [member.snapshot(done) for member in self.members]
        if len({*self.team.group.hosts}) > 1 and self.saving.storage is not None and not self.saving.storage.shared:
            # Whoever takes it may not see the folder.
            trainers = [self.saving.last_of(number, saved, self.say) for number, saved in enumerate(trainers)]
        described = [member.described for member in self.members]
        if self.team.world.newcomer:  # those that it was given, and has not made yet
            trainers += self.tree.get("trainers", ())[len(trainers) :]
            described += self.tree.get("described", ())[len(described) :]
        own_state = {
            "described": described,
            "streams": user_streams(),
            "saved": [self.saving.begun, self.saving.open],
            "capability": get_cpu_capability(),
        }
        return {"trainers": trainers, "results": self.results, **own_state}

    def take_over(self, tree: Any, newcomer: bool) -> None:
        """Takes the state that another worker handed over. A worker that is no newcomer keeps its position in the
        script. Raises WorkersDifferError.
        """
        self.saving.copied()
        self.refuse_differences(tree)
        self.tree, (self.saving.begun, self.saving.open) = tree, tree["saved"]
        if newcomer and "exact" in self._plan.split() and tree["capability"] != get_cpu_capability():
            worker, usual = self.team.transactions.worker, tree["capability"]
            raise WorkersDifferError(
                f"worker {worker} computes with {get_cpu_capability()} and the others with {usual}: their bits differ",
                "take equal machines, or set ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA alike on all of them",
            )
        if newcomer:
            trainers = [self.saving.last_of(number, saved, self.say) for number, saved in enumerate(tree["trainers"])]
            self.tree = {**tree, "trainers": trainers}
            self.passing, self.results, self._streams = True, list(tree["results"]), [tree["streams"]]
        for member in self.members:
            member.restore(newcomer)

    def complete(self) -> None:
        """Finishes a step after its update, for all trainers. Collective in a replica."""
        for member in self.members:
            member.complete_step()

    def step_bytes(self) -> int:
        """Returns the bytes of the gradient sums of a step."""
        return sum(p.nbytes for model in self.models for p in model.parameters() if p.requires_grad)

    def refuse_differences(self, tree: Any) -> None:
        """Raises WorkersDifferError if a model of this worker differs from the team's. Other settings of the script are
        not compared: a newcomer continues with the team's.
        """
        whose = "the other workers", ranks([self.team.transactions.worker])
        for member, described in zip(self.members, tree.get("described", ()), strict=False):
            refuse_difference(described, member.described, whose, OF_MODEL)

    def load_base(self, tree: Any) -> None:
        """Loads a state that is some steps old, ahead of the steps that follow it."""
        self.refuse_differences(tree)
        for member, saved in zip(self.members, tree["trainers"], strict=False):
            member.load_base(saved)

    def apply_step(self, message: list[Any]) -> None:
        """Passes a part of a step to the trainer that it belongs to."""
        trainer, *what = message
        if trainer < len(self.members):
            self.members[trainer].apply_step(what)

    def on_state_sent(self, worker: int, size: int, full_size: int, seconds: float | None) -> None:
        """Journals that a worker is about to receive `size` bytes of state, of `full_size` in all, and tells the user
        if that takes more than a second.
        """
        self.journal.write("gives", worker=worker, bytes=size, whole=full_size)
        if seconds is not None and seconds > 1.0:
            what = f"while worker {worker} takes {size_of(size)} of state over"
            self.say(f"everybody waits for about {duration(seconds)}, {what}")

    def formed(self, generation: Generation, seconds: float) -> None:
        """Journals a new generation. The worker that becomes the main one continues the journal."""
        if self.main and not self._opened:  # those before it are gone
            self._opened, self.journal = True, Journal(self.folder, self.loggers)
            for member in self.members:
                member.continue_journal()
        self.saving.losses += not generation.planned
        self.journal.write(
            "formed", number=generation.number, workers=list(generation.members), step=self.step, seconds=seconds
        )

    def knows(self, trainer: int) -> bool:
        """Whether the team made this trainer before this newcomer joined, which then makes it without the others."""
        return self.team.world.newcomer and trainer < len(self.tree.get("trainers", ()))

    def need_team(self) -> None:
        """Makes a newcomer wait until it is admitted: where its script first needs something of the team."""
        if self.team.transactions.waiting and self.serving is not None:
            tree, self.team.transactions.waiting = self.serving.take(), False
            self.take_over(tree, newcomer=True)
        elif self.team.transactions.waiting:
            self.team.transactions.admit()

    # -- beginning ----------------------------------------------------------------------------------------------

    def begin(self, plan: str, origin: str, seed: int, device: torch.device) -> None:
        """Writes the journal's `start` event, once."""
        if self._plan:
            return
        self._plan = plan
        world = self.team.world
        if self.imported:
            self.say(f"beginning with the weights imported from {self.imported}")
        elif self._from is not None:
            before, workers = self._from["plan"], self._from["workers"]
            change = f": written by {plural(workers, 'worker')} ({before}), now {plural(world.size, 'worker')} ({plan})"
            where = "its copy in memory" if self.saving.from_mirror else world.checkpoints or self.folder
            self.say(f"resuming from step {self.resumed} of {where}{change if before != plan else ''}")
        if origin != "default":
            self.say(f"plan: {plan} (from {origin})")
        for doubt in doubt_threads(torch.get_num_threads()) if world.launcher != "paceline" else ():
            self.say(doubt)
        for text in refused_exports(script_text()) if self.main else ():
            self.say(text)
        if newer := untested(torch.__version__):
            self.say(newer)
        self.journal.write(
            "start",
            workers=world.size,
            hosts=1 + (world.size - 1) // max(1, world.local_size),
            plan=plan,
            plan_origin=origin,
            script=sys.argv[0],
            module=module_name(),
            argv=sys.argv,
            script_sha256=hashlib.sha256(script_text().encode()).hexdigest(),
            versions=VERSIONS,
            seed=seed,
            threads=torch.get_num_threads(),
            device=str(device),
            resumed_from=self.resumed,
            began=process_began(),
        )
        if self.main and self.folder is not None:
            self.journal.write("environment", packages=packages(), **code(self.folder))

    # -- saying -------------------------------------------------------------------------------------------------

    def say(self, text: str, once: bool = False) -> None:
        """Prints a line for the user, on the main worker; with `once` not a second time."""
        if not self.main or (once and text in self._lines_said):
            return
        self._lines_said.add(text)
        if self.progress is not None:
            self.progress.line(text)
        self.team.world.tell("line", text=text)

    def decide(self, trainer: int, what: str, why: str) -> None:
        """Journals a trainer's decision and its reason, for `paceline explain`."""
        self.journal.write("decision", trainer=trainer, what=what, why=why)

    def show(self, event: str, **fields: Any) -> None:
        """Writes an event to the journal and shows it in the progress line."""
        if not self.main:
            return
        if event == "step":
            self.journal.steps(**fields)
        else:
            self.journal.write(event, **fields)
        if self.progress is not None:
            getattr(self.progress, "phase" if event == "grid" else event)(fields)
        event_fields = plain(fields) if event == "evaluate" else fields  # what of its results is no number, too
        self.team.world.tell("phase" if event == "grid" else event, **event_fields)

    # -- memory -------------------------------------------------------------------------------------------------

    def measure_baseline(self, given: Any) -> None:
        """Measures the memory of the process before the first model exists; `given` is a model that the script has made
        already.
        """
        if not self.members:
            self.baseline_bytes = private_memory() - (
                held(given.parameters()) if isinstance(given, torch.nn.Module) else 0
            )

    def report_memory_needs(self) -> None:
        """Before the first step: tells the agent what each plan needs, so that it can explain a kill for lack of
        memory.
        """
        if self.team.world.events_fd is not None and not self.took_step:
            self.team.world.tell("needs", plans=self._needs(), besides=self.baseline_bytes)

    def _needs(self) -> list[tuple[str, list[int]]]:
        """Returns the needs of all trainers together, if their plans are the same."""
        first, *others = [needs for member in self.members if (needs := member.needs())]
        totals = [(text, list(sizes)) for text, sizes in first]
        for needs in others:
            if [text for text, _ in needs] == [text for text, _ in totals]:
                totals = [
                    (text, [a + b for a, b in zip(sizes, more, strict=True)])
                    for (text, sizes), (_, more) in zip(totals, needs, strict=True)
                ]
        return totals

    @contextmanager
    def explains_memory(self, device: torch.device) -> Iterator[None]:
        """Raises OutOfMemoryError, with advice, if torch runs out of memory in the context."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            cuda = device.type == "cuda"
            room = torch.cuda.mem_get_info(device)[1] if cuda else machine_memory()
            what, cure = advice(self._needs(), 0 if cuda else self.baseline_bytes, room)
            raise OutOfMemoryError(f"{what} ({first_line(error)})", cure) from error

    # -- paceline check, and explain ------------------------------------------------------------------------------

    def checking(self, job: TrainingJob, mixes: str) -> None:
        """In a run of `paceline check`: writes the weights after the last step and ends the script."""
        if not self._check or self.step < self._check["steps"]:
            return
        for member in self.members:
            member.flush()
        out, params = self._check["out"], dict(job.model.named_parameters())
        with torch.no_grad():
            double = in_pieces({name: p.double() for name, p in params.items()}, job.cuts, job.shard_index)
        write_together(double, Path(f"{out}.safetensors"), self.main, job.replica, self.team.group)
        dtype = str(next(iter(params.values())).dtype).removeprefix("torch.")
        self.answer({"dtype": dtype, "mixes": mixes, "steps": self.step})

    def answer(self, result: Any) -> Never:
        """Writes the `result` of a run of `paceline check` or `explain`, and ends the script."""
        if self.main:
            Path(f"{self._check['out']}.json").write_text(json.dumps(result))
        self._left = True
        raise SystemExit(0)

    # -- notices ------------------------------------------------------------------------------------------------

    def _notice(self, number: int, _: object) -> None:
        self.notice = number

    def _leave_alone(self, number: int, _: object) -> None:
        self.team.world.tell("leaves")

    @contextmanager
    def loop(self, phase: LoopState) -> Iterator[None]:
        """Tracks a loop while the script iterates it. Without an agent, Ctrl-C stops it cleanly. A loop that is left by
        `break` and followed by more training is over: a resumed run does not return to it.
        """
        handles = self._may_handle and self.team.world.launcher != "paceline" and not self.loops
        self.loops.append(phase)
        before = signal.signal(signal.SIGINT, self._interrupted) if handles else None
        try:
            yield
        except (GeneratorExit, KeyboardInterrupt):
            self.agreement.note(self.step)
            self._left_loops.append(phase)
            raise
        finally:
            self.loops = [other for other in self.loops if other is not phase]
            if handles:
                signal.signal(signal.SIGINT, before)

    @property
    def enclosing_loop(self) -> LoopState | None:
        """The loop in whose body the script is. Of several loops that are iterated together it is the first."""
        return next((loop for loop in self.loops if loop.outer is self.loops[-1].outer), None)

    def is_outermost(self, phase: LoopState) -> bool:
        """Whether `phase` is in the body of no other loop: where it asks for a step, the whole script is between two
        steps.
        """
        return self.loops[0] is phase

    def _interrupted(self, number: int, _: object) -> None:
        """Ctrl-C without an agent: once stops cleanly, twice at once."""
        if self.notice is not None:
            raise KeyboardInterrupt
        self.notice = number
        saves = " and saving" if self.saving.storage is not None else ""
        self.say(f"stopping after this step{saves}; press Ctrl-C again to stop at once")

    # -- between two steps --------------------------------------------------------------------------------------

    def begin_training(self, trainer: int, loop: bool) -> None:
        """Before a loop or a single step: what a resumed run brings back, and what was due since the last one.

        Of several trainers that take single steps in turn, a checkpoint must find all of them after the same turn.
        """
        self.need_team()
        if self.serving is not None:
            self.serving.serve(self.team.transactions.reach)
        saved = self._streams
        if self.imported and not self.took_step and len(self.members) < len(self.tree["trainers"]):
            what = f"the weights imported from {self.imported} are for trainer {len(self.tree['trainers']) - 1}"
            cure = "make all trainers before the first step, or import them again with another --trainer"
            raise CheckpointError(f"{what}, and the script has made {plural(len(self.members), 'trainer')}", cure)
        if self.passing and not self.took_step and (len(saved) == 1 or self.team.rank < len(saved)):
            load_user_streams(saved[min(self.team.rank, len(saved) - 1)])
        for member in self.members:
            member.state.begin()
        while self._left_loops:
            self._left_loops.pop().complete = True
        if not self.loops:
            if loop or not self._round or trainer in self._round:
                self._round.clear()
                self.between()
            if not loop:
                self._round.add(trainer)

    def agreed(self, agreed: Agreed) -> None:
        """Records the wishes that workers agreed on in a step. They wait until the outermost loop asks for its next
        step.
        """
        self._save_due = agreed.save or self._save_due
        self._stop_due |= agreed.stop > 0
        self._enter_due |= agreed.enter > 0
        self.saving.agreed(agreed)
        self.profiles.between_steps(self.step, self.team.transactions.orders.profile)

    def between(self, ends: bool = False) -> None:
        """Does what was agreed on, when the outermost loop asks for the next step. If the loop `ends`, newcomers wait
        for the next loop: they would skip the collectives at the end of this one.
        """
        save, self._save_due = self._save_due, 0
        self.saving.poll()
        self.tell_saved()
        keep_best(self)
        if self._stop_due:
            self.leave(130 if self.notice == 2 else STOPPED, "asked to stop")
        if self.team.world.max_steps is not None and self.step >= self.team.world.max_steps:
            self.leave(0, f"--steps {self.team.world.max_steps}")
        if self.saving.asked or save == 1:
            self.save()
        elif save:
            release(self)
            self.saving.begin(self._subject(), mirror=True)
        while not ends and (self._enter_due or self.team.transactions.hold):
            self._enter_due = False
            self.error_feedback.consolidate(self.team.transactions)
            try:
                self.team.transactions.enter_next()
            except LeftError:
                self._left = self.team.left = True
                raise SystemExit(STOPPED) from None
        self.team.transactions.between_steps()

    # -- results of collectives outside of the loops ------------------------------------------------------------

    def outside(
        self,
        settle: Callable[[], Any],
        apply: Callable[[Any], Any] | None = None,
        spends: str = "script",
        take: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Returns the result of a collective outside of loops; in a resumed run before its first step, the recorded
        result. The arguments are those of `Transactions.run`.
        """
        results = self.recorded() or [self.team.transactions.run(settle, apply, spends, take)]
        self.record(results[0])
        return results[0]

    @property
    def replays(self) -> bool:
        """Whether the next collective has a recorded result: in a resumed run before its first step."""
        self.need_team()
        now = not self.passing or self.took_step or self.loops or self.stepping
        return not now and self._replayed < len(self.results)

    def recorded(self) -> list[Any]:
        """Returns a list with the recorded result of the next collective, or an empty list."""
        results = [self.results[self._replayed]] if self.replays else []
        self._replayed += len(results)
        return results

    def record(self, result: Any) -> None:
        """Records a result for runs that resume. A finished run that runs through the end of its script records
        nothing.
        """
        if (not self.passing or self.took_step) and not self.loops and not self.stepping:
            self.results.append(result)

    # -- checkpoints --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps of all trainers."""
        return sum(member.steps_done for member in self.members)

    def wants_save(self, steps: int = 1) -> int:
        """Returns the main worker's wish after so many further steps, by the intervals of `--save-every` and
        `--mirror`.
        """
        return self.saving.wants(self.step + steps) if self.main and self.saving.storage is not None else 0

    def ask_save(self) -> None:
        """Requests a checkpoint at the next step. Raises UsageError without a run folder."""
        if self.saving.storage is None and self.serving is None:
            cure = "start with `paceline run --run-dir FOLDER train.py`, or set PACELINE_RUN_DIR"
            raise UsageError("there is no run folder to save to", cure)
        self.saving.asked = True

    def save(self, wait: bool = False, must: bool = False) -> bool:
        """Begins a checkpoint of all trainers, which is written while training continues. Collective.

        With `wait` it returns when the checkpoint is written or has failed; with `must` a failure raises
        CheckpointError. Returns whether the checkpoint is known to exist.
        """
        saving = self.saving
        for member in self.members:
            member.flush()
        if saving.storage is None:
            if wait:
                self.agreement.end(self.step)
            return False
        self.journal.flush()
        asked = saving.asked
        if saving.open and (wait or asked):
            saving.finish()
            self.tell_saved()
        if asked or self.step != (saving.committed if wait else saving.begun):
            if not self._closing:  # else a script that has left main() could not be continued
                release(self)
            saving.begin(self._subject(), still=wait)
        trouble = saving.finish() if wait and saving.open else None
        if must and trouble is not None:
            raise CheckpointError(*trouble)
        self.tell_saved()
        return trouble is None and saving.committed == self.step

    def _subject(self) -> StateSnapshot:
        pool = partial(self.error_feedback.consolidate, self.team.transactions) if self.error_feedback.differ else None
        return StateSnapshot(self.step, self._tree, self._params, self.about, self._meet, pool)

    def _meet(self) -> None:
        self.agreement.meet()
        for text in self.error_feedback.meet(self.team.transactions.done):
            self.say(text)

    def tell_saved(self) -> None:
        """Journals and prints the outcomes of checkpoints."""
        for outcome in self.saving.news:
            if isinstance(outcome, dict):
                self.journal.write("checkpoint", **outcome)
                self.team.world.tell("saved", step=outcome["step"])
            elif isinstance(outcome, str):
                self.say(outcome)
            else:
                self.say(f"training goes on without it: {'; '.join(outcome)}")
        self.saving.news.clear()

    def _tree(self) -> Any:
        return {"trainers": [m.snapshot(self.team.transactions.done) for m in self.members], "results": self.results}

    def _params(self) -> Iterator[torch.Tensor]:
        return (param for model in self.models for param in model.parameters())

    def about(self) -> dict[str, Any]:
        """Returns what the manifest of a checkpoint tells of the run."""
        return {
            "plan": self._plan,
            "script": script_text(),
            "script_name": script_name(),
            "workers": self.team.size,
            "generation": self.team.transactions.number,
            "best": best_now(self),
            "versions": VERSIONS,
        }

    # -- the end ------------------------------------------------------------------------------------------------

    def leave(self, code: int, why: str) -> None:
        """Ends the script after a checkpoint. In a notebook or at a prompt only the cell ends."""
        if not code:
            self.measure()
        self.save(wait=True)
        saved = self.saving.committed
        path = f"checkpoints/{folder_of(saved)}" if self.folder and saved else None
        self._close_account()
        self.journal.write("stopped", step=self.step, why=why)
        self.team.world.tell("stopped", step=self.step, checkpoint=path)
        if self.progress is not None:
            then = f"; the same command continues from {self.folder}"
            self.say(f"stopped at step {self.step}{then if path else ': there is no run folder, nothing was saved'}")
        if hasattr(sys, "ps1"):  # more is to come from whoever sits there
            self.notice, self._stop_due = None, False
            raise KeyboardInterrupt
        self._left = True
        raise SystemExit(code)

    def end_here(self) -> Never:
        """Ends the script before any training."""
        self._left = True
        raise SystemExit(STOPPED)

    def _close_account(self) -> None:
        if self.took_step:
            self.journal.write("account", seconds=self.team.transactions.account.take())

    def say_finished(self) -> None:
        """Tells the user that a resumed run is finished, before code after its loops misses their reports."""
        if not self.took_step and self.step and all(member.complete for member in self.members):
            cure = "give a larger count= or epochs= to continue it, or another --run-dir"
            self.say(f"this run was finished at step {self.step}: nothing was left to do; {cure}", once=True)

    def _refuse_untouched(self) -> None:
        """Raises UsageError at the end of a script that called steps() and trained nothing."""
        left = [phase.site for one in self.members for phase in one.untouched if not phase.complete]
        if left and not self.took_step and self.serving is None:
            what = f"steps() at {left[0]} returned a loop that the script never went through, so nothing was trained"
            raise UsageError(what, "write `for report in trainer.steps(...):`")

    @without_script_view
    def close(self, failed: bool) -> None:
        """Ends the run at the end of the script: writes the last checkpoint, the journal and the report. Raises
        UsageError if nothing was trained.
        """
        if self.members and self.team.group.ledger:
            by_bytes = sorted(self.team.group.ledger.items(), key=lambda item: -item[1][1])
            self.journal.write("collectives", kinds=dict(by_bytes))
        self.agreement.write(self.journal)
        if rate := self.error_feedback.rate:
            self.journal.write("links", rate=rate)
        for figures in self.error_feedback.figures():
            self.journal.write("codec", **figures)
        done = bool(self.members) and all(member.complete for member in self.members)
        self._closing = True
        if not failed and not self._left and self.members:
            keep_best(self)
            if self.saving.asked or self.saving.open or self.step > self.saving.begun:
                self.save(wait=True, must=True)
            self._close_account()
            for text in [one.unmoved for one in self.members] if self.took_step else ():
                if text:
                    self.say(text)
            if not done and self.took_step:
                self.journal.write("stopped", step=self.step, why="the script ended before its loops did")
            if done and self.step:
                already = not self.took_step
                self.journal.write("finished", step=self.step, already=already)
                if self.main:
                    self.team.world.tell("finished", step=self.step, already=already)
                self.say_finished()
        if self.progress is not None:
            self.progress.close()
            if done and self.folder is not None and self.took_step and not failed:
                self.journal.close()
                console = Terminal(stderr=True)
                say(write_report(self.folder, console.width, console.is_terminal, short=True))
        self.journal.close()
        if not failed and not self._left:
            self._refuse_untouched()
