"""The residuals of gradient compression in checkpoints and when the team changes; when codecs are chosen again.

In a checkpoint such tensors lie one upon another, as rows of one with a dimension more; each is written by the worker
that has it. Beside them is the rule for another team or plan, which is `add`: their sum goes into the next gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from paceline.base.mesh import Mesh
from paceline.base.sharding import ShardedTensor, ShardingSpec, stacked
from paceline.base.text import plural
from paceline.comm import codec_tuning
from paceline.comm.communicator import Group
from paceline.comm.compression import Codec, Feedback
from paceline.comm.gradient_sinks import GradBuffers

ADVISED = 1 << 19  # elements with which codecs are tried to advise one of them


class TransactionRunner(Protocol):
    """The transactions that a team of workers makes together; `done` counts those that took effect."""

    @property
    def done(self) -> int:
        """The number of transactions that took effect."""

    def attempts(self, spends: str) -> Any:
        """Begins a transaction whose time is booked under `spends`; see `team.transactions.Attempt`."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that residuals of gradients of this dtype are kept in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class ErrorFeedback:
    """The error-feedback residual of one worker: what its `codec`, if it has one, left out of `grad_buffers`.

    The gradients are summed over the group `outer`. Parameters go by name; `cuts` gives the rows of each that this
    worker holds. `pending_residual` is the part of the residual that is equal on all workers: unscaled, by parameter
    name, it goes into the next gradient. `chosen` is equal on all workers, too: with `auto`, the codec of each bucket
    (`words`), the `rate` of the link and the number of `hosts` for which it was chosen.
    """

    def __init__(
        self,
        codec: Codec | None,
        group: Group,
        outer: Group,
        mesh: Mesh,
        grad_buffers: GradBuffers,
        cuts: Mapping[str, ShardingSpec],
    ) -> None:
        self.codec: Codec | None = codec
        self.trainer = 0  # the number of the trainer that it belongs to
        # The codec whose bytes are reported. A parameter server's codec sums nothing; its bytes go `to` the servers.
        self.coded = codec
        self.to = "other hosts"
        self.group, self.outer, self.mesh = group, outer, mesh
        self.grad_buffers, self.cuts = grad_buffers, cuts
        self.pending_residual: dict[str, torch.Tensor] = {}
        self.chosen: dict[str, Any] = {}
        self._tried: tuple[int, codec_tuning.Trials] = 0, {}  # (number of hosts, what was measured for it)
        self._comparison: codec_tuning.LiveComparison | None = None  # of candidates in the run, while it goes on
        self._usual_codec_seconds = 0.0  # in a step, when codecs were chosen
        self._deviating_steps, self._patience = 0, 3  # deviating steps in a row; how many lead to a new choice
        if codec is not None:
            codec.names = list(cuts)
        self._saved_residuals: Mapping[str, torch.Tensor] = {}  # from a checkpoint, not applied yet
        self._row_of_rank: list[int | None] = []

    @property
    def differs(self) -> bool:
        """Whether workers may hold, or restore from a checkpoint, residuals that differ."""
        return bool(self._saved_residuals) or (self.codec is not None and self.codec.lossy)

    def _left(self, done: int) -> dict[str, torch.Tensor]:
        """This worker's residual after `done` transactions, by parameter name."""
        left, names = {} if self.codec is None else self.codec.feedback.at(done).residual, list(self.cuts)
        buckets = [bucket for bucket in self.grad_buffers.buckets if bucket.index in left]
        return {names[number]: part for one in buckets for number, part in one.split(left[one.index])}

    def _rows_of(self, holds: Sequence[bool]) -> list[int | None]:
        """The row of each rank in a checkpoint's stacked residuals; None for a rank without one.

        Within workers whose gradients are summed together, those that hold a residual get the first rows. All such
        teams have equally many rows; a row without a residual is zeros.
        """
        mesh = self.mesh.over(self.group.size)
        teams = {mesh.peers(rank, "data", "context") for rank in range(self.group.size)}
        count = max(sum(holds[rank] for rank in team) for team in teams)
        rows: list[int | None] = [None] * self.group.size
        for team in teams:
            for row, rank in enumerate(sorted(team, key=lambda rank: not holds[rank])[:count]):
                rows[rank] = row
        return rows

    # -- when a generation begins -----------------------------------------------------------------------------------

    def known(self, done: int) -> list[Any]:
        """What this worker reports when a generation begins. Collective.

        The report is: whether it holds a residual, whether it leads its host, and the squared norms of the leaders'
        residuals that it knows.
        """
        if self.codec is None:
            return [False, False, []]
        self.outer.declare("the state of codecs", check=False)
        kept = self.codec.feedback.at(done)
        return [bool(kept.residual), self.outer.is_host_leader, [*kept.squares.items()]]

    def formed(self, reports: Sequence[Sequence[Any]], resumed: bool) -> Iterator[str]:
        """Takes the `reports` of all workers when a generation has formed; yields messages about lost residuals.

        In the first generation of a `resumed` run with as many leaders as before, each leader takes one saved row, in
        order. Otherwise the rule `add` holds.
        """
        holding = {name for name, (has_residual, *_) in zip(self.group.names, reports, strict=True) if has_residual}
        squares = {name: value for *_, known in reports for name, value in known if value > 0}
        for name in sorted(squares.keys() - holding):
            norm = math.sqrt(squares[name])
            yield f"worker {name} was lost with unsent gradient sums of its codec, of norm {norm:.6g}"
        if self._saved_residuals:
            leads = [leads for _, leads, _ in reports]
            saved, rows = self._saved_residuals, self._rows_of(leads)
            count = len(next(iter(saved.values())))
            has_same_leaders = self.codec is not None and self.codec.lossy and sum(leads) == count * self.mesh.replica
            if not (resumed and has_same_leaders and max(row or 0 for row in rows) == count - 1):
                yield from self._add_saved()
            self._saved_residuals, row = {}, rows[self.group.rank] if self._saved_residuals else None
            if row is not None:
                self._restore({name: self._local_block(name, full[row : row + 1][0]) for name, full in saved.items()})

    def _local_block(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """The block of a full tensor that this worker holds."""
        return self.cuts[name].at(self.group.rank).of(full)

    def _restore(self, named: Mapping[str, torch.Tensor]) -> None:
        """Writes residuals, by parameter name, into the codec's buckets."""
        assert self.codec is not None
        names, left = list(self.cuts), self.codec.feedback.value.residual
        for bucket in self.grad_buffers.buckets:
            flat = left[bucket.index] = torch.zeros(len(bucket.local_shard), dtype=wide(bucket.local_shard.dtype))
            for number, part in bucket.split(flat):
                part.copy_(named[names[number]].view(part.shape))

    def _add_saved(self) -> Iterator[str]:
        """Applies the rule `add` to saved residuals and yields the message about it."""
        if not self._saved_residuals:
            return
        hosts, self.pending_residual = len(next(iter(self._saved_residuals.values()))), self.shared()
        self._saved_residuals = {}
        yield (
            "changed mathematics: gradient sums that codecs had not sent when the checkpoint was taken, on "
            f"{plural(hosts, 'host')}, are added to the next gradient"
        )

    def describe(self, share: Callable[[], float]) -> tuple[str, str] | None:
        """What the codec does among the present hosts, and why; None without a codec.

        `share` gives the fraction of all bytes sent that these sums are.
        """
        if self.codec is None:
            return None
        what, hosts, kind = f"codec={self.codec.word}", len(self.outer.leaders), self.codec.kind
        if hosts == 1:
            return f"{what} is not used", "all workers whose gradients are summed are on one host"
        why = "sums within a host are exact, and its first worker sends them encoded"
        if len({*self.group.hosts[: self.mesh.replica]}) > 1:
            why += f"; replicas span hosts, and these sums are at most {share():.0%} of the bytes that a worker sends"
        if self.codec.auto:
            kind = ", ".join(self._allowed_words)
        return f"{what} ({kind}) between {hosts} hosts", why

    # -- before a change --------------------------------------------------------------------------------------------

    def consolidate(self, team: TransactionRunner) -> None:
        """Sums all residuals before workers leave, as a transaction; each worker then owes the total. Collective."""
        for attempt in team.attempts("forming"):
            with attempt:
                pooled, names = self.shared(), list(self.cuts)
                if self.codec is not None:
                    was = self.codec.feedback.at(team.done)
                    self.outer.declare("the residuals of codecs", kind="gradients")
                    for bucket in (one for one in self.grad_buffers.buckets if one.local_shard.is_floating_point()):
                        flat = torch.zeros(len(bucket.local_shard), dtype=wide(bucket.local_shard.dtype))
                        self.outer.sum(flat.add_(was.residual.get(bucket.index, 0.0)))
                        for number, part in bucket.split(flat):
                            pooled[names[number]] = part.add_(pooled.get(names[number], 0.0))
                    self.codec.feedback.pend(team.done, Feedback(basis=was.basis))
                attempt.commit(None, partial(self._owe, pooled))

    def _owe(self, pooled: dict[str, torch.Tensor], _: None) -> None:
        self.pending_residual, self._saved_residuals = pooled, {}

    # -- the choice -------------------------------------------------------------------------------------------------

    @property
    def link(self) -> tuple[float, float]:
        """Bandwidth to other hosts in bytes a second, and latency in seconds; zeros if unknown.

        The bandwidth is that of this leader's last sums or, before any, as measured.
        """
        if not self.group.links:
            return 0.0, 0.0
        flow, latency = self.outer.flow, max(link.latency for link in self.group.links)
        return (flow.rate if flow else 0.0) or min(link.rate for link in self.group.links), latency

    @property
    def _allowed_words(self) -> tuple[str, ...]:
        return codec_tuning.ROUNDING + (codec_tuning.LOSSY if self.codec is not None and self.codec.lossy else ())

    def go_on(self, chosen: Mapping[str, Any], measured: bool) -> bool:
        """Begins a generation with the codecs that were chosen before; returns whether to choose again.

        `measured` says whether the links were measured again.
        """
        if self.codec is None:
            return False
        links = self.group.links
        rate = min((link.rate for link in links), default=0.0)
        self.outer.pace(rate, max((link.latency for link in links), default=0.0))
        if not self.codec.auto:
            return False
        self.chosen, self.codec.words = dict(chosen), dict(chosen.get("words") or {})
        self._comparison = None
        hosts = len(self.outer.leaders)
        if rate == 0.0 or hosts == 1:
            return False
        open_ = chosen.get("open") or chosen.get("hosts") != hosts
        return bool(open_) or (measured and codec_tuning.differs(rate, chosen["rate"]))

    def step(self, seconds: float) -> None:
        """Records the seconds that a step took."""
        if self.outer.flow is not None:
            self.outer.flow.step()
        if self.codec is None or not self.codec.words:
            return
        if self._comparison is not None:
            self._comparison.note(seconds, self.codec.spent)
        elif self.outer.is_host_leader:
            is_slow = self.codec.spent > 2 * self._usual_codec_seconds + 0.1
            deviates = is_slow or codec_tuning.differs(self.link[0], self.chosen["rate"])
            self._deviating_steps = self._deviating_steps + 1 if deviates else 0

    @property
    def wishes(self) -> bool:
        """Whether codecs should be chosen now: for some steps costs have clearly differed from those that the choice
        was based on, or the next candidate of a live comparison is due.
        """
        return self._deviating_steps >= self._patience or (self._comparison is not None and self._comparison.ready)

    def choose(self, anew: bool) -> Iterator[tuple[str, str]]:
        """Chooses a codec for each bucket; yields pairs of a description and a reason. Collective.

        With `anew` all leaders measure the codecs; otherwise only those that have not measured them for this number of
        hosts.
        """
        assert self.codec is not None
        if self._comparison is not None:
            yield from self._run_on(self._comparison)
            return
        hosts, buckets, tried = len(self.outer.leaders), self.grad_buffers.buckets, codec_tuning.Trials()
        if self.outer.is_host_leader:
            if anew or self._tried[0] != hosts:
                lossy = codec_tuning.LOSSY if self.codec.lossy else codec_tuning.LOSSY[:1]
                trials = codec_tuning.trials(buckets, self.codec.names, codec_tuning.ROUNDING + lossy, hosts)
                self._tried = hosts, trials
            tried = self._tried[1]
        reports = self.group.gather_json([tried, *self.link])
        measured = codec_tuning.slowest([trials for trials, *_ in reports])
        rate = min(rate for trials, rate, _ in reports if trials)
        latency = max(latency for _, _, latency in reports)
        before = self.chosen.get("words") or {}
        words = codec_tuning.decide(measured, self._allowed_words, rate, latency, before)
        self._usual_codec_seconds = sum(tried[name][word].seconds for name, word in words.items() if name in tried)
        candidates = codec_tuning.close(measured, self._allowed_words, rate, latency, words)
        self._comparison = codec_tuning.LiveComparison(candidates) if len(candidates) > 1 else None
        self._choose_codec(words, rate, hosts)
        self._deviating_steps, self._patience = 0, 2 * self._patience if before else self._patience
        bucket_of = {self.codec.names[bucket.members[0]]: bucket for bucket in buckets}
        for word in dict.fromkeys(words.values()):
            names = (name for name in words if words[name] == word and name in bucket_of)
            bucket_sizes = [(len(bucket_of[name].local_shard), name) for name in names]
            if bucket_sizes and any(before.get(name) != word for _, name in bucket_sizes):
                name = max(bucket_sizes)[1]
                size, link = f"{bucket_of[name].local_shard.nbytes / 1e6:.3g} MB", f"link {8e-6 * rate:.3g} Mbit/s"
                costs = codec_tuning.format_costs(measured[name], word, rate, latency)
                more = f"; also for {plural(len(bucket_sizes) - 1, 'smaller bucket')}" if len(bucket_sizes) > 1 else ""
                why = f"it takes the least time of {', '.join(self._allowed_words)}{more}"
                yield f"bucket {bucket_of[name].index}, {size}, {link}: {costs}", why

    def _choose_codec(self, words: dict[str, str], rate: float, hosts: int) -> None:
        assert self.codec is not None
        self.chosen = {"words": words, "rate": rate, "hosts": hosts} | ({"open": True} if self._comparison else {})
        self.codec.words = words
        if self.outer.flow is not None:
            self.outer.flow.forget()

    def _run_on(self, comparison: codec_tuning.LiveComparison) -> Iterator[tuple[str, str]]:
        """Moves a live comparison to its next candidate or, after the last one, takes the best. Collective."""
        reports = self.group.gather_json([comparison.seconds, *self.link])
        seconds, rate = max(took for took, *_ in reports), min(rate for _, rate, _ in reports)
        hosts = self.chosen["hosts"]
        if comparison.next_candidate(seconds, rate):
            self._choose_codec(comparison.present, rate, hosts)
            return
        best, self._comparison = comparison.best(), None
        if best < len(comparison.spent):
            self._usual_codec_seconds = comparison.spent[best]
        self._choose_codec(comparison.candidates[best], comparison.took[best][1], hosts)
        yield f"codecs compared in the run: {comparison.describe()}", "this codec took the least time in training steps"

    def advice(self, computing: float, codecs: bool) -> str:
        """How long sums between hosts take and what would shorten them, if they take longer than `computing` seconds.

        Empty otherwise. Only a leader calls it. `codecs` says whether the plan allows codecs.
        """
        hosts, (rate, latency) = len(self.outer.leaders), self.link
        floating = (bucket for bucket in self.grad_buffers.buckets if bucket.local_shard.is_floating_point())
        buckets = [bucket for bucket in floating if len(bucket.local_shard)]
        gradient_bytes = sum(bucket.local_shard.nbytes for bucket in buckets)
        sent = 2 * gradient_bytes * (hosts - 1) / hosts
        if self.codec is not None or not rate or sent <= computing * rate:
            return ""
        text = (
            f"gradient sums send {sent / 1e6:.3g} MB to other hosts in each step, which takes {sent / rate:.2g} s at "
            f"{8e-6 * rate:.3g} Mbit/s, while computing takes {computing:.2g} s; so a step takes {sent / rate:.2g} s "
            "or more; doubling global_batch= would halve this time per row"
        )
        if codecs:
            largest = max(buckets, key=lambda bucket: len(bucket.local_shard))
            times = gradient_bytes / largest.local_shard.nbytes
            part = codec_tuning.sample(largest, ADVISED)
            tried = (codec_tuning.trial(word, largest, hosts, part) for word in ("int8", "powersgd:4"))
            int8, powersgd = (trial.cost(rate, latency) * times for trial in tried)
            text += f", codec=int8 would take {int8:.2g} s and codec=powersgd:4 {powersgd:.2g} s"
        return f"{text}; local={hosts} every=16 would send once in 16 steps; each of these changes the mathematics"

    # -- a step, again ----------------------------------------------------------------------------------------------

    def add(self, expected: float) -> None:
        """Adds the owed gradients, divided by `expected`, to gradients that are equal on all workers."""
        for name, param in zip(self.cuts, self.grad_buffers.local_params, strict=True):
            if name in self.pending_residual:
                more = (self.pending_residual[name].view(param.shape) / expected).to(param)
                param.grad = more if param.grad is None else param.grad.add_(more)

    def blame(self) -> str:
        """Names the workers and parameters whose gradients were not finite; empty without a codec. Collective."""
        if self.codec is None:
            return ""
        names = list(self.cuts)
        bad_names = self.group.gather_json([names[number] for number in sorted(self.codec.bad)])
        reports = zip(self.group.names, bad_names, strict=True)
        culprits = [f"worker {name}: {', '.join(bad[:3])}" for name, bad in reports if bad]
        return f", on {'; '.join(culprits[:3])}"

    # -- state ------------------------------------------------------------------------------------------------------

    def shared(self) -> dict[str, torch.Tensor]:
        """The residual that all workers owe, saved rows included, by parameter name."""
        total = dict(self.pending_residual)
        for name, rows in self._saved_residuals.items():
            for row in range(len(rows)):
                total[name] = self._local_block(name, rows[row : row + 1][0]) + total.get(name, 0.0)
        return total

    def meet(self, done: int) -> Iterator[str]:
        """Prepares for a checkpoint; yields messages for the user. Collective."""
        yield from self._add_saved()
        self._row_of_rank = self._rows_of(self.group.gather_json(bool(self._left(done))))

    def state(self, done: int) -> dict[str, Any]:
        """The residuals for a checkpoint, stacked by rank, after `done` transactions."""
        rows, left, tensors = self._row_of_rank, self._left(done) if self._row_of_rank else {}, {}
        if max((-1 if row is None else row for row in rows), default=-1) < 0:
            return {}
        for param, (name, cut) in zip(self.grad_buffers.local_params, self.cuts.items(), strict=True):
            stack = stacked(cut, rows)
            shape, rank = stack.at(self.group.rank).shape, self.group.rank
            residual = left[name].view(shape) if name in left else torch.zeros(shape, dtype=wide(param.dtype))
            tensors[name] = ShardedTensor(residual, stack, rank)
        return {"rule": "add", "left": tensors}

    def take(self, saved: Mapping[str, Any]) -> None:
        """Takes the full tensors of a `state` from a checkpoint."""
        if saved:
            self._saved_residuals = saved["left"]

    def load(self, owed: Mapping[str, torch.Tensor]) -> None:
        """Loads what `shared` returned, as full tensors or as this worker's blocks."""
        is_full = {name: tuple(tensor.shape) == self.cuts[name].shape for name, tensor in owed.items()}
        self.pending_residual = {n: (self._local_block(n, t) if is_full[n] else t).clone() for n, t in owed.items()}


class Differing(Protocol):
    """State that may differ from worker to worker."""

    trainer: int  # the number of the trainer that it belongs to

    @property
    def codec(self) -> Codec | None:
        """The codec that leaves residuals, if there is one."""

    @property
    def differs(self) -> bool:
        """Whether workers may hold different state now."""

    def consolidate(self, team: TransactionRunner) -> None:
        """Brings the same state to all workers, as a transaction. Collective."""

    def meet(self, done: int) -> Iterator[str]:
        """Prepares for a checkpoint; yields messages for the user. Collective."""


class AllErrorFeedback(list[Differing]):
    """The state that differs between workers, of all trainers of a script."""

    @property
    def differ(self) -> bool:
        """Whether the state of any trainer may differ between workers."""
        return any(feedback.differs for feedback in self)

    def release(self, trainer: int) -> list[dict[str, Any]]:
        """Forgets a trainer that has ended; returns its report of what codecs saved."""
        figures = [entry for entry in self.figures() if entry["trainer"] == trainer]
        self[:] = [feedback for feedback in self if feedback.trainer != trainer]
        return figures

    def consolidate(self, team: TransactionRunner) -> None:
        """Sums the state that differs, trainer by trainer, so that all workers hold the total. Collective."""
        for feedback in (each for each in self if each.differs):
            feedback.consolidate(team)

    @property
    def _trainers(self) -> list[ErrorFeedback]:
        return [feedback for feedback in self if isinstance(feedback, ErrorFeedback)]

    @property
    def rate(self) -> float:
        """The last known bandwidth between hosts in bytes a second; 0 if there are no links."""
        return next((feedback.link[0] for feedback in self._trainers if feedback.group.links), 0.0)

    def figures(self) -> Iterator[dict[str, Any]]:
        """Yields for each trainer how many bytes its codec sent, and how many it would have sent without."""
        for feedback in self._trainers:
            if (codec := feedback.coded) is not None and codec.full:
                about = {"trainer": feedback.trainer, "codec": codec.word, "kind": codec.kind, "to": feedback.to}
                yield {**about, "sent": int(codec.sent), "full": int(codec.full)}

    def meet(self, done: int) -> Iterator[str]:
        """Prepares all trainers for a checkpoint; yields messages for the user. Collective."""
        return (text for feedback in self if feedback.differs for text in feedback.meet(done))
