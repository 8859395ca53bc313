"""Error-feedback residuals: per-worker state in checkpoints and when the team changes.

In a checkpoint such tensors lie one upon another, as rows of one with a dimension more; each is written by the worker
that has it. Beside them is the rule for another team or plan, which is `add`: their sum goes into the next gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from paceline.base.mesh import Mesh
from paceline.base.sharding import ShardedTensor, ShardingSpec, stacked
from paceline.comm import codec_tuning as choice
from paceline.comm.communicator import Group
from paceline.comm.compression import Codec, Feedback
from paceline.comm.gradient_buckets import GradSink


class Transactions(Protocol):
    """What the team does together; `done` is the number of transactions that count."""

    @property
    def done(self) -> int: ...
    def run(self, make: Callable[[], Generator[Any, Any, None]], spends: str) -> Any: ...


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class ErrorFeedback:
    """What the `codec` of a worker, if there is one, has left out of the gradients at `home`, which are summed over
    `outer`. They are of parameters by name, of which a worker has rows as `cuts` say.

    `owed` is the state of all alike: what goes into the next gradient, by name and unscaled. So is, with `auto`, the
    `chosen` codec (`words`) of each bucket, with the `rate` of the link and the number of `hosts` that it is for.
    """

    def __init__(
        self,
        codec: Codec | None,
        group: Group,
        outer: Group,
        mesh: Mesh,
        home: GradSink,
        cuts: Mapping[str, ShardingSpec],
    ) -> None:
        self.codec: Codec | None = codec
        self.trainer = 0  # whose it is
        self.coded = codec  # whose bytes are told; where it sums nothing, they go `to` somebody else
        self.to = "other hosts"
        self.group, self.outer, self.mesh = group, outer, mesh
        self.home, self.cuts = home, cuts
        self.owed: dict[str, torch.Tensor] = {}
        self.chosen: dict[str, Any] = {}
        self._tried: tuple[int, choice.Trials] = 0, {}  # among so many hosts
        self._runoff: choice.LiveComparison | None = None  # under way
        self._usual = 0.0  # seconds of encoding and decoding in a step, as they were when the choice was made
        self._astray, self._patience = 0, 3  # steps in a row in which costs were others; when to say so
        if codec is not None:
            codec.names = list(cuts)
        self._saved: Mapping[str, torch.Tensor] = {}  # from a checkpoint, and not taken yet
        self._rows: list[int | None] = []

    @property
    def differs(self) -> bool:
        """Whether workers may have, or bring back, what others have not."""
        return bool(self._saved) or (self.codec is not None and self.codec.lossy)

    def _left(self, done: int) -> dict[str, torch.Tensor]:
        """What this worker has, by name, after so many transactions."""
        left, names = {} if self.codec is None else self.codec.kept.at(done).left, list(self.cuts)
        return {
            names[number]: part
            for bucket in self.home.buckets
            if bucket.index in left
            for number, part in bucket.split(left[bucket.index])
        }

    def _rows_of(self, holds: Sequence[bool]) -> list[int | None]:
        """The row of each rank, if those who hold something have the first ones. Whoever is summed with others has as
        many rows with them as any; the rest are zeros.
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
        """For everybody: does this worker hold something, and lead; what leaders hold, if it knows that. Collective."""
        if self.codec is None:
            return [False, False, []]
        self.outer.enter("how codecs stand", check=False)
        kept = self.codec.kept.at(done)
        return [bool(kept.left), self.outer.leads, [*kept.squares.items()]]

    def formed(self, said: Sequence[Sequence[Any]], resumed: bool) -> Iterator[str]:
        """All have said what they know: what was lost, for people. In the first generation of a run that is `resumed`
        as many leaders as there were take a row each, in order; else the rule holds.
        """
        holding = {name for name, (holds, *_) in zip(self.group.names, said, strict=True) if holds}
        squares = {name: value for *_, known in said for name, value in known if value > 0}
        for name in sorted(squares.keys() - holding):
            norm = math.sqrt(squares[name])
            yield f"worker {name} was lost with what its codec had not sent yet: sums of gradients of norm {norm:.6g}"
        if self._saved:
            leads = [leads for _, leads, _ in said]
            saved, rows, count = self._saved, self._rows_of(leads), len(next(iter(self._saved.values())))
            alike = self.codec is not None and self.codec.lossy and sum(leads) == count * self.mesh.replica
            if not (resumed and alike and max(row or 0 for row in rows) == count - 1):
                yield from self.add_saved()
            self._saved, row = {}, rows[self.group.rank] if self._saved else None
            if row is not None:
                self._restore({name: self._mine(name, tensor[row : row + 1][0]) for name, tensor in saved.items()})

    def _mine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return self.cuts[name].at(self.group.rank).of(whole)

    def _restore(self, named: Mapping[str, torch.Tensor]) -> None:
        assert self.codec is not None
        names, left = list(self.cuts), self.codec.kept.value.left
        for bucket in self.home.buckets:
            flat = left[bucket.index] = torch.zeros(len(bucket.mine), dtype=wide(bucket.mine.dtype))
            for number, part in bucket.split(flat):
                part.copy_(named[names[number]].view(part.shape))

    def add_saved(self) -> Iterator[str]:
        """The rule `add`, and what is said of it."""
        if not self._saved:
            return
        hosts, self.owed = len(next(iter(self._saved.values()))), self.shared()
        self._saved = {}
        yield (
            f"what codecs of {hosts} hosts had not sent when the checkpoint was taken goes into the next gradient: "
            "mathematics that the undisturbed run does not have"
        )

    def told(self, share: Callable[[], float]) -> tuple[str, str] | None:
        """What the codec does among the present hosts, and why. `share` is which part of all bytes these sums are."""
        if self.codec is None:
            return None
        what, hosts, kind = f"codec={self.codec.word}", len(self.outer.leaders), self.codec.kind
        if hosts == 1:
            return f"{what} has nothing to do", "the workers whose gradients are summed are on one host"
        why = "inside of a host sums are whole, and its first worker sends codes of them"
        if len({*self.group.hosts[: self.mesh.replica]}) > 1:
            why += f"; replicas span hosts, and of what a worker sends these sums are at most {share():.0%}"
        if self.codec.auto:
            kind = ", ".join(self._may)
        return f"{what} ({kind}) between {hosts} hosts", why

    # -- before a change --------------------------------------------------------------------------------------------

    def pool(self, team: Transactions) -> Generator[Any, Any, None]:
        """An attempt of the team's: what all have left out is summed and owed by all, before some of them leave."""
        pooled, names = self.shared(), list(self.cuts)
        if self.codec is not None:
            was = self.codec.kept.at(team.done)
            self.outer.enter("what codecs have left out", kind="gradients")
            for bucket in (one for one in self.home.buckets if one.mine.is_floating_point()):
                flat = torch.zeros(len(bucket.mine), dtype=wide(bucket.mine.dtype))
                self.outer.sum(flat.add_(was.left.get(bucket.index, 0.0)))
                for number, part in bucket.split(flat):
                    pooled[names[number]] = part.add_(pooled.get(names[number], 0.0))
            self.codec.kept.pend(team.done, Feedback(basis=was.basis))
        yield lambda: None
        self.owed, self._saved = pooled, {}
        yield None

    # -- a step -----------------------------------------------------------------------------------------------------

    # -- the choice -------------------------------------------------------------------------------------------------

    @property
    def link(self) -> tuple[float, float]:
        """Bytes a second to other hosts, by this leader's last sums or as measured, and seconds; zeros: unknown."""
        if not self.group.links:
            return 0.0, 0.0
        flow, latency = self.outer.flow, max(link.latency for link in self.group.links)
        return (flow.rate if flow else 0.0) or min(link.rate for link in self.group.links), latency

    @property
    def _may(self) -> tuple[str, ...]:
        return choice.ROUNDING + (choice.LOSSY if self.codec is not None and self.codec.lossy else ())

    def go_on(self, chosen: Mapping[str, Any], measured: bool) -> bool:
        """A generation begins in which this was chosen; whether it has to be chosen again. `measured`: links were."""
        if self.codec is None:
            return False
        links = self.group.links
        rate = min((link.rate for link in links), default=0.0)
        self.outer.pace(rate, max((link.latency for link in links), default=0.0))
        if not self.codec.auto:
            return False
        self.chosen, self.codec.words = dict(chosen), dict(chosen.get("words") or {})
        self._runoff = None
        hosts = len(self.outer.leaders)
        if rate == 0.0 or hosts == 1:
            return False
        open_ = chosen.get("open") or chosen.get("hosts") != hosts
        return bool(open_) or (measured and choice.differs(rate, chosen["rate"]))

    def step(self, seconds: float) -> None:
        """One has been made, in so many seconds."""
        if self.outer.flow is not None:
            self.outer.flow.step()
        if self.codec is None or not self.codec.words:
            return
        if self._runoff is not None:
            self._runoff.note(seconds, self.codec.spent)
        elif self.outer.leads:
            far = choice.differs(self.link[0], self.chosen["rate"]) or self.codec.spent > 2 * self._usual + 0.1
            self._astray = self._astray + 1 if far else 0

    @property
    def wishes(self) -> bool:
        """Whether there is something to choose: costs have been clearly others for some steps than those that were
        chosen by, or another candidate is to be tried.
        """
        return self._astray >= self._patience or (self._runoff is not None and self._runoff.ready)

    def choose(self, anew: bool) -> Iterator[tuple[str, str]]:
        """Chooses for each bucket, and says what and why. Collective. All leaders try, those that know only `anew`."""
        assert self.codec is not None
        if self._runoff is not None:
            yield from self._run_on(self._runoff)
            return
        hosts, buckets, tried = len(self.outer.leaders), self.home.buckets, choice.Trials()
        if self.outer.leads:
            if anew or self._tried[0] != hosts:
                shown = choice.ROUNDING + (choice.LOSSY if self.codec.lossy else choice.LOSSY[:1])
                self._tried = hosts, choice.trials(buckets, self.codec.names, shown, hosts)
            tried = self._tried[1]
        said = self.group.gather_json([tried, *self.link])
        found = choice.slowest([trials for trials, *_ in said])
        rate = min(rate for trials, rate, _ in said if trials)
        latency = max(latency for _, _, latency in said)
        before = self.chosen.get("words") or {}
        words = choice.decide(found, self._may, rate, latency, before)
        self._usual = sum(tried[name][word].seconds for name, word in words.items() if name in tried)
        candidates = choice.close(found, self._may, rate, latency, words)
        self._runoff = choice.LiveComparison(candidates) if len(candidates) > 1 else None
        self._take(words, rate, hosts)
        self._astray, self._patience = 0, 2 * self._patience if before else self._patience
        named = {self.codec.names[bucket.members[0]]: bucket for bucket in buckets}
        for word in dict.fromkeys(words.values()):
            some = [(len(named[name].mine), name) for name in words if words[name] == word and name in named]
            if some and any(before.get(name) != word for _, name in some):
                name = max(some)[1]
                size, link = f"{named[name].mine.nbytes / 1e6:.3g} MB", f"link {8e-6 * rate:.3g} Mbit/s"
                costs = choice.told(found[name], word, rate, latency)
                more = f"; so do {len(some) - 1} smaller ones" if len(some) > 1 else ""
                why = f"that costs least of {', '.join(self._may)}{more}"
                yield f"bucket {named[name].index}, {size}, {link}: {costs}", why

    def _take(self, words: dict[str, str], rate: float, hosts: int) -> None:
        assert self.codec is not None
        self.chosen = {"words": words, "rate": rate, "hosts": hosts} | ({"open": True} if self._runoff else {})
        self.codec.words = words
        if self.outer.flow is not None:
            self.outer.flow.forget()

    def _run_on(self, runoff: choice.LiveComparison) -> Iterator[tuple[str, str]]:
        """The next of those that are tried in the run or, when all were, the best. Collective."""
        said = self.group.gather_json([runoff.seconds, *self.link])
        seconds, rate = max(took for took, *_ in said), min(rate for _, rate, _ in said)
        hosts = self.chosen["hosts"]
        if runoff.turn(seconds, rate):
            self._take(runoff.present, rate, hosts)
            return
        best, self._runoff = runoff.best(), None
        self._usual = runoff.spent[best] if best < len(runoff.spent) else self._usual
        self._take(runoff.candidates[best], runoff.took[best][1], hosts)
        yield f"codecs tried in the run: {runoff.told()}", "that took the least time in the steps of training"

    def advice(self, computing: float, codecs: bool) -> str:
        """If sums over hosts take longer than `computing`, which takes so many seconds: how long, and what helps, may
        there be `codecs`. For a leader.
        """
        hosts, (rate, latency) = len(self.outer.leaders), self.link
        buckets = [bucket for bucket in self.home.buckets if bucket.mine.is_floating_point() and len(bucket.mine)]
        whole = sum(bucket.mine.nbytes for bucket in buckets)
        sent = 2 * whole * (hosts - 1) / hosts
        if self.codec is not None or not rate or sent <= computing * rate:
            return ""
        said = f"sums of gradients send {sent / 1e6:.3g} MB a step to other hosts, which takes {sent / rate:.2g} s at "
        said += f"{8e-6 * rate:.3g} Mbit/s, while computing takes {computing:.2g} s: a step takes {sent / rate:.2g} s "
        said += "or more; twice the global_batch= would halve that for a row"
        if codecs:
            most = max(buckets, key=lambda bucket: len(bucket.mine))
            times = whole / most.mine.nbytes
            costs = [choice.trial(word, most, hosts).cost(rate, latency) * times for word in ("int8", "powersgd:4")]
            said += f", codec=int8 would make it {costs[0]:.2g} s and codec=powersgd:4 {costs[1]:.2g} s"
        return f"{said}; local={hosts} every=16 would send them once in 16 steps; all of these are other mathematics"

    # -- a step, again ----------------------------------------------------------------------------------------------

    def add(self, expected: float) -> None:
        """Adds what is owed to sums of gradients over `expected`, which are the same on all."""
        for name, param in zip(self.cuts, self.home.own, strict=True):
            if name in self.owed:
                more = (self.owed[name].view(param.shape) / expected).to(param)
                param.grad = more if param.grad is None else param.grad.add_(more)

    def blame(self) -> str:
        """Where gradients were not finite, if anybody has looked. Collective."""
        if self.codec is None:
            return ""
        names = list(self.cuts)
        said = self.group.gather_json([names[number] for number in sorted(self.codec.bad)])
        found = [
            f"worker {name}: {', '.join(bad[:3])}" for name, bad in zip(self.group.names, said, strict=True) if bad
        ]
        return f", on {'; '.join(found[:3])}"

    def unused(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Those of the parameters without a gradient to which nothing comes from earlier steps either."""
        grads = [(number, self.home.own[number].grad) for number in numbers]
        return tuple(number for number, grad in grads if grad is None or not bool(grad.any()))

    # -- state ------------------------------------------------------------------------------------------------------

    def shared(self) -> dict[str, torch.Tensor]:
        """What is owed once everything has been taken that was saved."""
        found = dict(self.owed)
        for name, rows in self._saved.items():
            for row in range(len(rows)):
                found[name] = self._mine(name, rows[row : row + 1][0]) + found.get(name, 0.0)
        return found

    def meet(self, done: int) -> Iterator[str]:
        """All are about to write a checkpoint. Collective."""
        yield from self.add_saved()
        self._rows = self._rows_of(self.group.gather_json(bool(self._left(done))))

    def state(self, done: int) -> dict[str, Any]:
        """For a checkpoint."""
        rows, left, made = self._rows, self._left(done) if self._rows else {}, {}
        if max((-1 if row is None else row for row in rows), default=-1) < 0:
            return {}
        for param, (name, cut) in zip(self.home.own, self.cuts.items(), strict=True):
            stack = stacked(cut, rows)
            shape, rank = stack.at(self.group.rank).shape, self.group.rank
            mine = left[name].view(shape) if name in left else torch.zeros(shape, dtype=wide(param.dtype))
            made[name] = ShardedTensor(mine, stack, rank)
        return {"rule": "add", "left": made}

    def take(self, saved: Mapping[str, Any]) -> None:
        """What `state` was, of whole tensors."""
        if saved:
            self._saved = saved["left"]

    def load(self, owed: Mapping[str, torch.Tensor]) -> None:
        """What `shared` was, of whole tensors or of the own pieces."""
        whole = {name: tuple(tensor.shape) == self.cuts[name].shape for name, tensor in owed.items()}
        self.owed = {name: (self._mine(name, t) if whole[name] else t).clone() for name, t in owed.items()}


class Differing(Protocol):
    """What workers may have that others have not."""

    trainer: int  # whose it is

    @property
    def codec(self) -> Codec | None: ...
    @property
    def differs(self) -> bool: ...
    def pool(self, team: Transactions) -> Generator[Any, Any, None]: ...
    def meet(self, done: int) -> Iterator[str]: ...


class AllErrorFeedback(list[Differing]):
    """Those of all trainers of a script."""

    @property
    def differ(self) -> bool:
        return any(own.differs for own in self)

    def release(self, trainer: int) -> list[dict[str, Any]]:
        """Forgets those of a trainer that has ended; what codecs have saved it."""
        figures = [told for told in self.figures() if told["trainer"] == trainer]
        self[:] = [own for own in self if own.trainer != trainer]
        return figures

    def pool(self, team: Transactions) -> None:
        """What each has of its own is everybody's then. Collective."""
        for own in (one for one in self if one.differs):
            team.run(partial(own.pool, team), "forming")

    @property
    def _trainers(self) -> list[ErrorFeedback]:
        return [own for own in self if isinstance(own, ErrorFeedback)]

    @property
    def rate(self) -> float:
        """How fast the links between hosts were at last, in bytes a second; 0 if there are none."""
        return next((own.link[0] for own in self._trainers if own.group.links), 0.0)

    def figures(self) -> Iterator[dict[str, Any]]:
        """For the report: what codecs have saved this worker, by trainer."""
        for own in self._trainers:
            if (codec := own.coded) is not None and codec.full:
                about = {"trainer": own.trainer, "codec": codec.word, "kind": codec.kind, "to": own.to}
                yield {**about, "sent": int(codec.sent), "full": int(codec.full)}

    def meet(self, done: int) -> Iterator[str]:
        """What is to be said before a checkpoint. Collective."""
        return (text for own in self if own.differs for text in own.meet(done))
