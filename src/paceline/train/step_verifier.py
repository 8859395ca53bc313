"""Verifies chosen steps: each share is computed a second time by another worker, and compared before the update."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from paceline.base.batching import parted, stream_seed
from paceline.base.environment import processor
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.mesh import Mesh
from paceline.base.text import ranks
from paceline.comm.checked_collectives import ATTEMPTS, WEIGHTS, TransferChecks
from paceline.comm.checked_reducer import CheckedReducer
from paceline.comm.digests import checksum, combined
from paceline.comm.gradient_buckets import Bucket, Buckets
from paceline.compute.batchnorm import without_a_trace
from paceline.compute.microbatches import name_of
from paceline.errors import HardwareError, WorkersDifferError
from paceline.train.replica import compute
from paceline.train.share_record import ROWS, ShareRecord, first_difference, tolerance_of
from paceline.train.step import Step
from paceline.train.step_context import Batches, StepContext
from paceline.train.step_verbs import heals, must_repeat, take_batch, take_parts
from paceline.train.votes import Vote, attempts_by_worker, deviating, majority, partners

TWICE = 2  # attempts with wrong values after which a worker leaves the run
_DRAW = -3  # keeps the draw of steps apart from other streams of the seed
_TEST = "test the memory and the processor of that host before you use it again"
_UNSTEADY = (
    "if the model computes other bits each time, as some GPU kernels do, call "
    "torch.use_deterministic_algorithms(True); otherwise test the memory and the processors of these hosts"
)


FAULTS = {
    "contribution": "what {} sent for the sums of {} changed on its way",
    "sum": "the sums of {1} that {0} had added up changed on their way",
    "code": "what {} sent of the encoded sums of {} changed on its way",
    "weights": "what {} sent of the weights of {} changed on its way",
    "addition": "{} added up the gradients of {} wrongly",
    "memory": "the sums of {1} changed in the memory of {0}",
    "gradients": "the sums of {1} on {0} differ from those on another worker",
}
GRADIENTS = "all gradients"


class Wrong(NamedTuple):
    """A vote that differs from the `right` one; `name` is the first tensor in which it does."""

    vote: Vote
    right: Vote
    name: str

    def describe(self, who: str) -> str:
        """Returns a text about the workers `who`."""
        others = f"worker {self.right.worker}" if self.right.worker != self.vote.worker else "its next attempt"
        if self.name == ROWS:
            return f"{who} loaded other rows than {others} for the same micro-batches"
        return f"{who} computed a wrong value: {self.name} differs from that of {others} for the same rows"


def drawn(seed: int, every: int, done: int) -> bool:
    """Whether the step after `done` steps is verified: one step of each window of `every` steps, drawn by the seed."""
    window = done // every
    return done % every == stream_seed(seed, window, _DRAW) % every


class StepVerifier:
    """Verifies one step of each `every` steps of a trainer. `counts` has the attempts in which each worker was wrong,
    by its number.
    """

    def __init__(self, context: StepContext, every: int) -> None:
        self.context, self.every = context, every
        self.counts = defaultdict[int, float](float)  # parts of an attempt where several workers compute together
        replica, job = context.replica, context.job
        self.period = replica.mesh.replica if context.plan.together > 1 else replica.mesh.unit
        self.kind = f"{context.weights.kind}, {processor()}, {torch.get_num_threads()} threads"
        self.tolerance = tolerance_of(job)
        buckets = replica.grad_buffers
        self.buckets = buckets if isinstance(buckets, Buckets) else None
        self.names = list(job.named)
        self.rows_differ = False
        self._announce()

    def _announce(self) -> None:
        """Tells the user what is verified."""
        context, every = self.context, self.every
        what = "every step is verified" if every == 1 else f"one of {every} steps is verified"
        what += ": its micro-batches are computed twice and compared before the update"
        context.reporter.decide(context.trainer, what, "--verify-steps")
        context.reporter.say(what, once=True)

    def is_due(self, done: int) -> bool:
        """Whether the step after `done` steps is verified; the same on all workers."""
        return drawn(self.context.job.seed, self.every, done)

    def difference(self, one: Vote, other: Vote) -> str:
        """Returns the name of the first tensor that two workers computed differently; empty if there is none."""
        return first_difference(one.value, other.value, self.tolerance)

    def same(self, one: Vote, other: Vote) -> bool:
        """Whether two workers computed the same."""
        return not self.difference(one, other)

    def note_rows(self, step: int, worker: int, other: int) -> None:
        """Notes once that a dataset gives two workers different rows, so that their values cannot be compared."""
        if self.rows_differ:
            return
        self.rows_differ = True
        self.context.notes.note(
            f"step {step} was not verified completely: the dataset gives worker {worker} other rows than worker {other}"
            "; draw random numbers from the generators of torch, numpy or random, which are seeded for each row",
            step,
        )

    def report(
        self, step: int, workers: Sequence[int], hosts: Sequence[str], tensor: str, text: str, leaves: bool, then: str
    ) -> None:
        """Tells the user and the journal that workers were wrong, and what was done `then` unless one leaves."""
        then = "that was not the first time: it leaves the run" if leaves else then
        self.context.reporter.say(f"{text} in step {step}; {then}")
        fields = {"step": step, "workers": workers, "hosts": hosts, "tensor": tensor, "text": text, "leaves": leaves}
        self.context.reporter.journal.write("corrupted", trainer=self.context.trainer, **fields)


class StepCheck:
    """The check of one step in one generation, over all attempts at it."""

    def __init__(self, verifier: StepVerifier, step: Step, batches: Batches) -> None:
        self.verifier, self.context, self.step, self.batches = verifier, verifier.context, step, batches
        self.attempt = 0
        self.began = time.perf_counter()
        self._votes: dict[int, list[Vote]] = {}  # by the rank of the worker whose share it is
        self._faults: list[tuple[int, str, int, str]] = []  # attempt, and kind, worker and tensors of a fault
        self._hosts: dict[int, str] = {}  # by worker: host and device
        self._checks = TransferChecks(verifier.names)
        self._reducer: CheckedReducer | None = None
        self._shares = list(range(self.context.group.size))  # by rank: whose share the worker computes in addition
        self._mixed = False  # whether several workers are alone in their kind of processor, and check each other
        self._kinds: list[str] = []  # by rank: what the worker's unit computes with
        self._grids: list[float] = []  # of exact sums, when the attempt began
        self._records: list[ShareRecord] = []  # of this worker's own share, and of the other one

    # -- an attempt -------------------------------------------------------------------------------------------------

    @contextmanager
    def protected(self) -> Iterator[None]:
        """Gives each complete bucket to the record before it is sent, and checks the sums."""
        replica = self.context.replica
        usual = replica.reducer, replica.send_bucket
        if replica.reducer is not None:
            among, layout = (replica.team, replica.reducer.route), replica.layout
            self._reducer = CheckedReducer(*among, self._look, self._checks, replica.codec, layout.groups)
            replica.reducer, replica.send_bucket = self._reducer, self._reducer.send
        replica.layout.check(self._checks)
        try:
            yield
        finally:
            replica.reducer, replica.send_bucket = usual
            replica.runner.on_loss = None
            replica.layout.check(None)

    def _look(self, bucket: Bucket) -> None:
        self._records[0].take(bucket)

    def compute_other(self) -> None:
        """Computes another worker's micro-batches, without sending anything, and restores everything. Collective."""
        context, step, verifier = self.context, self.step, self.verifier
        began, group, replica = time.perf_counter(), context.group, context.replica
        if step.digest is None and group.size > 1:
            step.digest = context.weights.digest_state()
        self._checks.begin()
        merges = self._choose_partners()
        partner = self._shares[group.rank]
        assignment = replace(context.shares.assignment, rank=partner // replica.mesh.unit)
        micro_batches = self.batches.load_other(assignment, self._shares)
        take_parts(micro_batches, context.job.device)
        quiet: dict[str, Any] = {"test_merging": False, "check_loss": False, "noise_sample": "", "fault_point": None}
        options = replace(step.options, merge=merges[partner], **quiet)
        guard = replica.runner.guard
        guard.wake()
        self._records = [ShareRecord(context.job, verifier.buckets, self._mixed) for _ in range(2)]
        local, other = self._records
        replica.runner.on_loss = other.outputs.watch if self._mixed else None
        with without_a_trace(context.job.model, guard.streams), guard.unlearning():
            other.close(micro_batches, compute(replica, micro_batches, options, other.take))
            context.restore_state()
            replica.abort(again=True)
        replica.runner.on_loss = local.outputs.watch if self._mixed else None
        exact = replica.grad_buffers.exact
        self._grids = [] if exact is None else [*exact.largest]
        step.began += time.perf_counter() - began
        HEARTBEAT.beat()

    def _choose_partners(self) -> list[int]:
        """Chooses whose share each worker computes in addition. Returns how many micro-batches each worker merges."""
        context, group, period = self.context, self.context.group, self.verifier.period
        group.declare(f"{self.step.name}, verified", check=False, kind="verification")
        reports = group.gather_json([self.step.options.merge, self.verifier.kind])
        hosts = group.hosts if period > 1 else [0] * group.size
        kinds = []
        for first in range(0, group.size, period):
            of_unit = hosts[first : first + period]
            kinds.append((*(kind for _, kind in reports[first : first + period]), *map(of_unit.index, of_unit)))
        units = partners(kinds, context.done // self.verifier.every + self.attempt)
        self._shares = [units[rank // period] * period + rank % period for rank in range(group.size)]
        self._mixed = sum(kinds.count(kind) == 1 for kind in kinds) > 1
        self._kinds = [" ".join(map(str, kinds[rank // period])) for rank in range(group.size)]
        return [int(merge) for merge, _ in reports]

    @property
    def _mesh(self) -> Mesh:
        """The mesh of the present team."""
        return self.context.replica.mesh.over(self.context.group.size)

    def close(self) -> None:
        """Takes the rest of what this worker computed of its own share, before it is summed."""
        assert self.step.sums is not None
        self._records[0].close(self.step.batch.micro_batches, self.step.sums)

    # -- the comparison ---------------------------------------------------------------------------------------------

    def must_repeat(self) -> bool:
        """Returns whether all workers compute the step again: because values differ, or for another reason. Raises
        HardwareError on a worker that was wrong too often. Collective.
        """
        context, step = self.context, self.step
        reports = self._compare_digests()
        faults = self._all_faults(reports)
        if any(failed for *_, failed in reports) or (step.agreed.failed and not faults):
            self._votes.clear()
            step.options.merge = 1  # memory was too small for more, or more together failed
            return must_repeat(context, step) or self._again()
        if step.digest is not None and heals(context, step):
            self._votes.clear()
            return self._again()
        differs = any(report[1] != reports[share][0] for report, share in zip(reports, self._shares, strict=True))
        unequal: dict[int, str] = {}
        if differs or faults or self._mixed or self._votes:
            self._vote()
            unequal = self._withdraw() if faults and context.replica.layout.gathers else self._unequal()
        self._faults += [(self.attempt, *fault) for fault in faults]
        if unequal or faults:
            return self._differs(unequal)
        wrong = [
            Wrong(vote, votes[-1], self.verifier.difference(vote, votes[-1]))
            for votes in self._votes.values()
            for vote in deviating(votes, votes[-1], self.verifier.same)
        ]
        if wrong or self._faults:
            self._name(wrong, must_leave=False)
        if must_repeat(context, step):
            self._votes.clear()
            return True
        seconds = time.perf_counter() - self.began
        fields = {"step": step.number + 1, "attempts": self.attempt + 1, "seconds": seconds}
        context.reporter.journal.write("verified", trainer=context.trainer, **fields)
        self._checks.begin()
        return False

    def finish(self) -> None:
        """Names workers whose updated weights changed on their way to others, who have taken them again. Collective."""
        if not self.context.replica.layout.overwrites_gradients:  # nothing was gathered
            return
        self.context.group.declare(f"{self.step.name}, gathered", check=False, kind="verification")
        reports = self.context.group.gather_json([self._device, [[*fault] for fault in self._checks.faults]])
        faults = dict.fromkeys(tuple(fault) for _, seen in reports for fault in seen)
        if faults:
            self._hosts = {name: host for name, (host, _) in zip(self.context.group.names, reports, strict=True)}
            self._faults = [(self.attempt, *fault) for fault in faults]
            self._name([], must_leave=False, then="they were sent again")

    def _compare_digests(self) -> list[Any]:
        """Returns, by rank: digests of the worker's own share and of the other one, and of the gradients of the update
        where the sums are not these; the faults of sums; and whether a share was not computed completely.
        """
        replica, faults, gradients = self.context.replica, list[list[Any]](), 0
        if self._reducer is not None:
            self._reducer.confirm()
            faults = [[*fault] for fault in self._checks.faults]
        if self._mesh.data > 1 and (replica.codec is not None or replica.grad_buffers.exact is not None):
            gradients = combined(map(checksum, replica.grad_buffers.sums))
        local, other = self._records
        self.context.group.declare(f"{self.step.name}, compared", check=False, kind="verification")
        return self.context.group.gather_json(
            [local.digest, other.digest, gradients, faults, local.failed or other.failed]
        )

    def _all_faults(self, reports: Sequence[Any]) -> list[tuple[str, int, str]]:
        """Returns the faults of sums that any worker has seen, each once."""
        names, mesh = self.context.group.names, self._mesh
        faults = dict.fromkeys(tuple(fault) for report in reports for fault in report[3])
        for rank in range(0 if faults else mesh.replica):
            apart = parted(mesh.twins(rank), [report[2] for report in reports])
            if apart is not None:
                usual, others = apart
                kind = "memory" if len(usual) > len(others) else "gradients"
                known = others if kind == "memory" else [*usual, *others]
                faults |= {(kind, names[other], GRADIENTS): None for other in known}
        return [*faults]

    @property
    def _device(self) -> str:
        """This worker's host and device."""
        return f"{self.context.run.team.world.host}, {name_of(self.context.job.device)}"

    def _vote(self) -> None:
        """Gathers what all workers computed in this attempt. Each share gets the votes of two workers."""
        group = self.context.group
        local, other = (record.content(self._kinds[group.rank]) for record in self._records)
        group.declare(f"{self.step.name}, in detail", check=False, kind="verification")
        reports = group.gather_json([local, other, self._device])
        self._hosts = {name: host for name, (*_, host) in zip(group.names, reports, strict=True)}
        for first in range(0, group.size, self.verifier.period):  # of a unit, one worker may have the outputs
            for contents in list(zip(*reports[first : first + self.verifier.period], strict=True))[:2]:
                rounding = [max(values) for values in zip(*(one["rounding"] for one in contents), strict=True)]
                for one in contents:
                    one["rounding"] = rounding
        for name, (content, *_), rank in zip(group.names, reports, range(group.size), strict=True):
            self._votes.setdefault(rank, []).append(Vote(name, self.attempt, content))
        for name, (_, content, _), share in zip(group.names, reports, self._shares, strict=True):
            self._votes[share].append(Vote(name, self.attempt, content))

    def _unequal(self) -> dict[int, str]:
        """Returns, by share, the first tensor in which this attempt's two votes differ. Shares whose rows differ again
        and again are left out: their values cannot be compared.
        """
        unequal = {}
        for share, votes in [*self._votes.items()]:
            name = self.verifier.difference(votes[-2], votes[-1])
            if name == ROWS and (self.attempt or self.verifier.rows_differ):
                self.verifier.note_rows(self.step.number + 1, votes[-2].worker, votes[-1].worker)
                del self._votes[share]
            elif name:
                unequal[share] = name
        return unequal

    def _withdraw(self) -> dict[int, str]:
        """Withdraws the votes of this attempt: what has changed within a replica changed all that it computed."""
        for share, votes in [*self._votes.items()]:
            del votes[-2:]
            if not votes:
                del self._votes[share]
        return {}

    def _differs(self, unequal: Mapping[int, str]) -> bool:
        """Prepares the next attempt. Ends the run, or a worker, if no attempt can agree."""
        wrong, same = list[Wrong](), self.verifier.same
        for votes in self._votes.values():
            right = majority(votes, same)
            if right is not None:
                wrong += [Wrong(v, right, self.verifier.difference(v, right)) for v in deviating(votes, right, same)]
        if any(len(attempts) >= TWICE for attempts in self._attempts_of(wrong).values()):
            self._name(wrong, must_leave=True)  # the others go on without the workers that leave
        elif self.attempt + 1 >= ATTEMPTS:
            self._give_up(unequal)
        return self._again()

    def _attempts_of(self, wrong: Sequence[Wrong]) -> dict[int, list[int]]:
        """Returns the attempts in which each worker was wrong. Other rows are the dataset's fault."""
        votes = [one.vote for one in wrong if one.name != ROWS]
        known = (fault for fault in self._faults if fault[1] != "gradients")
        return attempts_by_worker([*votes, *(Vote(worker, attempt, None) for attempt, _, worker, _ in known)])

    def _again(self) -> bool:
        """Prepares everything for another attempt, also the rows. Returns True."""
        context = self.context
        context.restore_state()
        context.replica.abort(again=True)
        exact = context.replica.grad_buffers.exact
        if exact is not None:
            exact.largest = [*self._grids]
        self.attempt += 1
        take_batch(context, self.step, self.batches.load(0, context.shares.assignment))
        return True

    # -- what people learn ------------------------------------------------------------------------------------------

    def _name(self, wrong: Sequence[Wrong], must_leave: bool, then: str = "the step was computed again") -> None:
        """Names the workers that were wrong. Raises HardwareError on each that was wrong too often in the run, if
        others can go on. `must_leave`: they can only go on without those that were wrong in several attempts. `then`
        says what was done.
        """
        verifier, group = self.verifier, self.context.group
        attempts = self._attempts_of(wrong)
        units: dict[int, list[int]] = {}  # those that were wrong, by unit: one of them may have made all wrong
        for worker in attempts:
            units.setdefault(group.names.index(worker) // verifier.period, []).append(worker)
        for workers in units.values():
            for worker in workers:
                verifier.counts[worker] += len(attempts[worker]) / len(workers)
        if must_leave:
            leaving = [worker for worker, tries in attempts.items() if len(tries) >= TWICE]
        else:
            can_leave = group.size > self._mesh.replica and self.context.transactions.elastic
            leaving = [worker for worker in attempts if can_leave and verifier.counts[worker] >= TWICE]
        texts: dict[str, tuple[list[int], str]] = {}
        for workers in units.values():
            first = next((one for worker in workers for one in wrong if one.vote.worker == worker), None)
            if first is not None:
                texts[first.describe(self._who(workers))] = workers, first.name
        for one in wrong:
            if one.vote.worker not in attempts:  # other rows
                texts[one.describe(self._who([one.vote.worker]))] = [one.vote.worker], one.name
        for _, kind, worker, name in self._faults:
            texts[FAULTS[kind].format(self._who([worker]), name)] = [worker], name
        for text, (workers, name) in texts.items():
            hosts = [self._hosts[worker] for worker in workers]
            leaves = not {*leaving}.isdisjoint(workers)
            verifier.report(self.step.number + 1, workers, hosts, name, text, leaves, then)
        self._faults.clear()
        self._votes.clear()
        worker = group.names[group.rank]
        if worker in attempts:  # its host is to be known for it
            self.context.run.team.world.tell("corrupted", attempts=verifier.counts[worker])
        if worker in leaving:
            text = next(text for text, (workers, _) in texts.items() if worker in workers)
            what = f"{text} in step {self.step.number + 1}, and that was not the first time"
            raise HardwareError(what, _TEST)

    def _who(self, workers: Sequence[int]) -> str:
        """Names workers with their hosts and devices."""
        hosts = "; ".join(dict.fromkeys(self._hosts[worker] for worker in workers))
        return f"{ranks(workers)} ({hosts}{'; they compute together' if len(workers) > 1 else ''})"

    def _give_up(self, unequal: Mapping[int, str]) -> None:
        """Raises WorkersDifferError: no two computations agree."""
        step = f"in step {self.step.number + 1}, {ATTEMPTS} times in a row"
        if not unequal:
            _, kind, _, tensors = self._faults[-1]
            what = "weights" if kind == WEIGHTS else "sums"
            raise WorkersDifferError(f"the {what} of {tensors} changed on their way {step}", _TEST)
        share, name = next(iter(unequal.items()))
        workers = sorted({vote.worker for vote in self._votes[share]})
        hosts = [self._hosts[worker] for worker in workers]
        who = f"{ranks(workers)} ({'; '.join(dict.fromkeys(hosts))})"
        how = f"{who} compute different values" if len(workers) > 1 else f"{who} computes other values each time"
        what = f"{how} from the same rows {step}; {name} is the first that differs"
        fields = {"step": self.step.number + 1, "workers": workers, "hosts": hosts, "tensor": name, "text": what}
        self.context.reporter.journal.write("corrupted", trainer=self.context.trainer, **fields, leaves=False)
        raise WorkersDifferError(what, _UNSTEADY)
