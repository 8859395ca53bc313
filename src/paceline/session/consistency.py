"""Checks that all workers have equal weights and optimizer states, and heals differences.

They differ after a script has changed them on one worker alone, or after a fault of its memory. With ``--heal``, those
that differ receive the tensors of a strict majority of three or more.

Workers of one kind must have the same bits. Different processors round differently: between these the distance is
measured, and at a checkpoint all get the first worker's state.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.backends.cpu import get_cpu_capability

from paceline.base.batching import Agreed, parted
from paceline.base.journal import Journal
from paceline.base.mesh import Mesh
from paceline.base.text import ranks
from paceline.comm.communicator import Group
from paceline.comm.digests import SMALL, checksum
from paceline.comm.gradient_buckets import BYTES
from paceline.comm.torch_private import BatchNormBase
from paceline.compute.job import TrainingJob
from paceline.compute.microbatches import name_of
from paceline.compute.state_dict import local
from paceline.errors import WorkersDifferError
from paceline.parallel.data_parallel import kinds, share
from paceline.team.team import Team

SPENT = 0.005  # of the time, at most, after the first steps
FAR = 1e-5  # of the weights' norm: more than rounding makes
_HALF = 26  # bits of a digest that is told: the upper ones are of the weights, the lower ones of the optimizers' state
Heals = Callable[[list[int], list[str], str], None]
_CURE = (
    "code that changes weights or buffers must run on every worker with the same numbers: "
    "without `if trainer.main:`, ranks or unseeded random numbers"
)


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Returns a digest of the tensors' bits and their positions: 52 bits, the same on every device."""
    total = 0
    for alike in kinds(tensors, BYTES):
        flats = [tensor.detach().reshape(-1) for tensor in alike]
        small = [flat for flat in flats if flat.numel() < SMALL]
        parts = [flat for flat in flats if flat.numel() >= SMALL] + ([torch.cat(small)] if small else [])
        for part in parts:
            total = (total * 1_000_003 + checksum(part)) % ((1 << 52) - 1)
    return total


class Observed(Protocol):
    """A step that counts, and what workers agreed on in it."""

    agreed: Agreed

    @property
    def done(self) -> int:
        """The trainer's steps, this one included."""


class WeightsComparison:
    """Compares the weights and the optimizer states of one trainer between workers. `kinds` names each worker's
    processor, by rank. `due` asks for a comparison in the next step, as in the first step of a generation. `distance`
    is the largest distance measured between workers with different processors. `alike_optimizers`: whether all workers
    have the same optimizer states. `heals` is called after tensors were healed: with the workers, the names of the
    tensors, and when. None: differences are errors.
    """

    def __init__(self, job: TrainingJob, mesh: Mesh, alike_optimizers: bool, heals: Heals | None) -> None:
        self.job, self.mesh, self._alike_optimizers, self._heals = job, mesh, alike_optimizers, heals
        self.kind, self.kinds = f"{name_of(job.device)} {get_cpu_capability()}", list[str]()
        self.due, self.checks, self.seconds = True, 0, 0.0
        self.trainer = 0  # its number
        self.distance: float | None = None
        self.refused = False  # the last step was
        self.done, self._last_equal = 0, -1  # steps; after how many of them all workers were last found equal
        self._next_at = 0.0  # before this time, a comparison would exceed the time budget

    def observe(self, step: Observed) -> None:
        """Notes whether all workers wish a comparison in the next step."""
        self.done, self.due = step.done, step.agreed.look > 0

    def compares_before(self, done: int) -> bool:
        """Returns whether the weights are compared before the step after `done` steps; the same on all workers."""
        self.done = done
        return self.due or done & (done + 1) == 0

    @property
    def has_time(self) -> bool:
        """Whether the first worker wants a comparison in the next step: when the time budget allows one."""
        return time.monotonic() >= self._next_at

    def _charge(self, began: float) -> None:
        now = time.monotonic()
        self.seconds += now - began
        self._next_at = max(self._next_at, now) + (now - began) / SPENT

    def _weights(self) -> dict[str, torch.Tensor]:
        """Returns the parameters (of sharded ones the local shard) and the statistics of BatchNorm."""
        tensors: dict[str, torch.Tensor] = dict(self.job.model.named_parameters())
        for path, module in self.job.model.named_modules():
            if isinstance(module, BatchNormBase):
                tensors |= {f"{path}.{name}".lstrip("."): buffer for name, buffer in module.named_buffers()}
        return {name: local(tensor) for name, tensor in tensors.items()}

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        """Returns the optimizer state by name, where it is the same on all workers: not with islands, and not with
        parameter servers.
        """
        states = dict[str, torch.Tensor]()
        for name, param in self.job.local_params.items() if self._alike_optimizers else ():
            for optimizer in self.job.optimizers:
                state = optimizer.state.get(param, {})
                tensors = ((key, state[key]) for key in sorted(state) if isinstance(state[key], torch.Tensor))
                states |= {f"{key} of {name}": local(tensor) for key, tensor in tensors}
        return states | {f"master copy of {name}": copy.detach() for name, copy in self.job.masters.items()}

    def digest_state(self) -> float:
        """Returns one number with the digests of the weights (upper bits) and of the optimizer state (lower bits)."""
        began, most = time.monotonic(), 1 << _HALF
        combined = digest(self._weights().values()) % most * most + digest(self._optimizer_state().values()) % most
        self._charge(began)
        return float(combined)

    def judge(
        self,
        group: Group,
        digests: Sequence[float],
        give: bool = False,
        present: bool = True,
        undo: Callable[[], None] = lambda: None,
        heal: bool = True,
    ) -> bool:
        """Compares the workers' `digests`. Returns whether differing workers were healed. Collective.

        If a worker differs, `undo` first restores statistics that a forward may have changed. Then the workers are
        healed, or all raise WorkersDifferError. Workers with different processors may round differently: their distance
        is measured. With `give` all of them then get the first worker's state. If the digests are not of the `present`
        state, but of an earlier one, nothing is measured or healed.
        """
        self.checks += 1
        healed, combined = False, [int(number) for number in digests]
        weights, states = [number >> _HALF for number in combined], [number % (1 << _HALF) for number in combined]
        if self._find_deviating(weights) or self._find_deviating(states, of_optimizer=True):
            undo()
            self._heal_or_raise(group, heal and present)
            healed = True
        if len(set(self.kinds)) > 1 and present:
            began = time.monotonic()
            self._measure(group, give)
            self._charge(began)
        self._last_equal = self.done
        return healed

    def _sets(self, of_optimizer: bool) -> list[list[int]]:
        """Returns the ranks that must have equal weights, or with `of_optimizer` equal optimizer states, set by set."""
        pieces = self.job.optimizer_cuts if of_optimizer else self.job.cuts
        keys = [(kind, self.mesh.shard_index_of(rank) if pieces else 0) for rank, kind in enumerate(self.kinds)]
        return [[rank for rank, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]

    def _find_deviating(self, values: Sequence[Any], of_optimizer: bool = False) -> tuple[list[int], list[int]] | None:
        """Returns the usual and the deviating ranks of the first set of workers that differ; None if all agree."""
        return next(filter(None, (parted(alike_ranks, values) for alike_ranks in self._sets(of_optimizer))), None)

    def _heal_or_raise(self, group: Group, heal: bool) -> None:
        """Finds the tensors that differ, and on which workers. Heals them, or raises WorkersDifferError."""
        both = [self._weights(), self._optimizer_state()]
        each = group.gather_json([[[name, digest([t])] for name, t in named.items()] for named in both])
        takes, why, first = list[tuple[int, int, list[str]]](), "", ""
        for of_optimizer, named in enumerate(both):
            digests = [dict(one[of_optimizer]) for one in each]
            for alike_ranks in self._sets(bool(of_optimizer)):
                apart = parted(alike_ranks, [tuple(one.items()) for one in digests])
                if apart is None:
                    continue
                usual, deviating = apart
                names = [name for name in named if len({digests[rank].get(name) for rank in alike_ranks}) > 1]
                both_groups = ranks(group.names[rank] for rank in deviating), ranks(group.names[rank] for rank in usual)
                first = first or "{} on {} differs from that on {}".format(*(names[:1] or ["a weight"]), *both_groups)
                if len(alike_ranks) < 3:
                    why = why or f"; --heal needs at least three replicas, got {len(alike_ranks)}"
                elif 2 * len(usual) <= len(alike_ranks):
                    why = why or f"; --heal needs a strict majority, which {len(usual)} of {len(alike_ranks)} are not"
                elif any(digests[rank].keys() != digests[usual[0]].keys() for rank in deviating):
                    why = why or "; --heal cannot repair a missing tensor"
                takes += [(usual[0], rank, names) for rank in deviating]
        if self._heals is None or not heal or why or not takes:
            first = first or "a weight differs between workers"
            raise WorkersDifferError(f"{first}, {self._when}{why if self._heals and heal else ''}", _CURE)
        self._send_tensors(group, takes, both[0] | both[1])
        changed = dict.fromkeys(name for *_, names in takes for name in names)
        self._heals(sorted({group.names[rank] for _, rank, _ in takes}), list(changed), self._when)

    def _send_tensors(
        self, group: Group, takes: Sequence[tuple[int, int, list[str]]], named: dict[str, torch.Tensor]
    ) -> None:
        """Sends each tensor from the source worker to the worker that takes it."""
        group.declare("the tensors to repair", check=False, kind="weights healed")
        for source, taker, names in takes:
            for name in names if group.rank in (source, taker) else ():
                value = named[name].detach().cpu().contiguous().clone()
                if group.rank == source:
                    group.send(value.reshape(-1), taker)
                else:
                    group.receive(flat := value.reshape(-1), source)
                    named[name].copy_(flat.view(value.shape))

    @property
    def _when(self) -> str:
        steps = self.done, self._last_equal
        seen, before = (f"after step {step}" if step else "before the first step" for step in steps)
        return f"seen {seen}" + (f", but not {before}" if 0 <= self._last_equal < self.done else "")

    def _measure(self, group: Group, give: bool) -> None:
        """Measures the distance from the first worker's weights, or from those of the first worker with an
        equal shard.
        """
        apart, size, across = 0.0, 0.0, group.subgroup("data", mesh=self.mesh)
        peers, named = across if self.job.cuts else group, self._weights()
        peers.declare("the weights of several kinds of workers", check=False, kind="weights compared")
        floats = (p for p in self.job.model.parameters() if p.is_floating_point())
        for alike in kinds(map(local, floats), BYTES):
            own_values = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
            first = peers.broadcast(own_values.clone()).double()
            apart += float((own_values.double() - first).square().sum())
            size += float(first.square().sum())
        distances = group.gather_json(math.sqrt(apart / size) if size else 0.0)
        far = max(distances, key=lambda distance: (math.isnan(distance), distance))
        if not far <= FAR:
            one, other = (f"worker {group.names[of]} ({self.kinds[of]})" for of in (distances.index(far), 0))
            what = f"the weights of {one} differ by {far:.1e} of their norm from those of {other}"
            raise WorkersDifferError(f"{what}, {self._when}", _CURE)
        self.distance = max(self.distance or 0.0, far)
        if give:
            share(named.values(), peers)
            states = [value for one in self.job.optimizers for state in one.state.values() for value in state.values()]
            share((t for t in (*self.job.local_params.values(), *states) if isinstance(t, torch.Tensor)), across)


class ConsistencyChecker:
    """Compares the weights of all trainers between two steps. `copied` waits for a checkpoint that is being written."""

    def __init__(self, team: Team, copied: Callable[[], None]) -> None:
        self.team, self._copied = team, copied
        self.comparisons: list[WeightsComparison] = []
        self._noted: tuple[int, list[float | None] | None] = (-1, None)
        self._ended = 0

    def note(self, step: int) -> None:
        """Records the digests when a loop is left: what the script does to the weights afterwards is not training."""
        if self.team.size > 1 and not sys.is_finalizing():
            self._noted = step, self._digest_all()

    def end(self, step: int) -> None:
        """Compares all weights at the end of training, if no checkpoint is written there. Collective."""
        if step != self._ended:
            noted = self._noted[1] if self._noted[0] == step else None
            self.team.transactions.run(partial(self.meet, noted, "the end of the training"))
        self._ended = step

    def meet(self, noted: list[float | None] | None = None, name: str = "") -> None:
        """Compares all weights. Collective; without a `name` it is part of a collective that all workers have entered.
        Raises WorkersDifferError.
        """
        group = self.team.group
        if group.size == 1:
            return
        if name:
            group.declare(name)
        self._copied()
        digests = noted or self._digest_all()
        everyone = group.gather_json(
            [[one.kind, reported] for one, reported in zip(self.comparisons, digests, strict=False)]
        )
        for one, *entries in zip(self.comparisons, *everyone, strict=False):  # a newcomer may make some later
            one.kinds = [kind for kind, _ in entries]
            if None not in (values := [value for _, value in entries]):
                one.judge(group, values, give=noted is None, present=noted is None)

    def _digest_all(self) -> list[float | None]:
        """Returns the digest of each trainer; None after a refused step, whose forwards may have changed weights."""
        return [None if one.refused else one.digest_state() for one in self.comparisons]

    def release(self, comparison: WeightsComparison, journal: Journal) -> None:
        """Stops comparing the weights of a trainer that has ended."""
        if comparison in self.comparisons:
            self.write(journal, [comparison])
            self.comparisons.remove(comparison)
            self._noted = (-1, None)  # what was noted is in the order of the comparisons

    def write(self, journal: Journal, only: Sequence[WeightsComparison] | None = None) -> None:
        """Writes the `agreement` event of each trainer, or `only` of some."""
        for one in self.comparisons if only is None else only:
            if one.checks:
                figures = {"checks": one.checks, "seconds": one.seconds, "distance": one.distance}
                journal.write("agreement", trainer=one.trainer, **figures)
