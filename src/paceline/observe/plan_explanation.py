"""Explains a plan in words, as predicted and as measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.base.journal import Event
from paceline.base.mesh import AXES
from paceline.base.text import duration, plural, ranks, size_of
from paceline.parallel.pipeline.schedule import KINDS, Simulated, drawn, kept, simulate, table
from paceline.plan import Plan

DRAWN = 12  # micro-batches in a drawn schedule, at most
HELD = ("parameters", "gradients", "optimizer", "activations")
_PLACES = dict(zip(AXES, ("replica", "shard", "stage", "stretch", "part"), strict=True))
_EACH = "gradients, once a step"
# For each word of a plan: what each of its N workers holds, what it sends, and when it waits.
_WORDS = {
    "data": (
        "a copy of its part of the model, for 1/{n} of the micro-batches",
        _EACH,
        "at the end of a step, for the gradients of other replicas",
    ),
    "local": (
        "what the optimizer of each of its islands keeps, and the weights of the round's start",
        "how far its islands have come, once in {every} steps",
        "at the end of a round, for {last}",
    ),
    "fragments": (
        "also what each of its islands has come to in parts that are not merged yet",
        "how far its islands have come in one of {n} parts at a time",
        "after each part, where its sum takes longer than the {delay} steps that are made meanwhile",
    ),
    "zero=1": (
        "all parameters and gradients, and 1/{n} of the optimizer's state",
        f"{_EACH}, and then the weights that it has updated",
        "at the end of a step, for gradients, and then for weights",
    ),
    "zero=2": (
        "all parameters during a step, and 1/{n} of gradients and optimizer's state",
        "its parameters, once a step, and gradients, in each micro-batch",
        "at the beginning of a step, for parameters, and in each backward, for gradients",
    ),
    "zero=3": (
        "1/{n} of parameters, gradients and optimizer's state, and one block whole at a time",
        "its part of each block, twice in a micro-batch, and gradients, once",
        "before each block, for the parts of the others",
    ),
    "pipeline": (
        "the blocks of {v} of {stages} stages, and activations of {kept} micro-batches at most",
        "what its blocks give, to the next stage, and the gradients of what came, to the one before",
        "in a forward for the stage before, in a backward for the one after: {bubble:.1%} of a step",
    ),
    "context": (
        "the activations of 1/{n} of each sequence",
        f"its stretch, for heads of the whole, in each attention; {_EACH}",
        "in each attention, for the stretches of the others",
    ),
    "tensor": (
        "1/{n} of each large layer, and the rest whole",
        "its part of what layers give, in each of these",
        "in each of these layers, for the parts of the others",
    ),
}


class PlanExplanation:
    """Explains a plan for `workers` workers, with the figures of an `event`.

    The event has the `model`, the number of `micro_batches` of a global batch, the `micro` rows of one, the `stages`
    (`blocks`, bytes that a stage `passes` on, seconds of `forward` and `backward` of a micro-batch), and, for each
    worker of the first replica, `predicted` and `measured` amounts: bytes of each kind in `HELD` and of the `process`,
    bytes `sent` in a step by kind, `seconds` of forward and backward in a step, and seconds `waited` for other stages.
    """

    def __init__(self, plan: Plan, workers: int, event: Mapping[str, Any]) -> None:
        self.plan, self.workers, self.mesh = plan, workers, plan.mesh(workers)
        self.model, self.micro = event.get("model") or "", event.get("micro")
        self.micro_batches = int(event.get("micro_batches") or 8)
        islands = plan.local or 1  # each island has a run of micro-batches and at least one replica
        self.islands = -(-islands // self.mesh.data)  # islands of a replica, at most
        units = max(1, self.mesh.data // islands) * self.mesh.shard
        self.each = self.islands * -(
            -self.micro_batches // islands // units
        )  # micro-batches of a unit in a step, at most
        self.stages, self.predicted, self.measured = (
            list[Event](event.get(name) or ()) for name in ("stages", "predicted", "measured")
        )
        if min(len(self.predicted or self.measured), len(self.measured or self.predicted)) < self.mesh.replica:
            self.predicted = self.measured = []  # the figures are of another team
        waited = sum(amounts.get("waited") or 0.0 for amounts in self.measured)
        busy = sum(amounts.get("seconds") or 0.0 for amounts in self.measured)
        self.waited = waited / (waited + busy) if busy else None  # the part of a step, measured
        self.kind = plan.schedule or KINDS[0], self.mesh.pipeline, plan.virtual or 1
        count = self.kind[1] * self.kind[2]
        self.bubble = simulate(table(*self.kind, self.each), [1.0] * count, [2.0] * count).bubble
        self.lines = [
            [rank for rank in range(self.mesh.replica) if self.mesh.coordinate(rank, "pipeline") == stage]
            for stage in range(self.mesh.pipeline)
        ]  # the workers that have the same stages

    @classmethod
    def of(cls, event: Event) -> PlanExplanation:
        """The explanation of a journal event, whose team may have changed since its plan was chosen."""
        plan, workers = replace(Plan.parse(event["plan"]), data=None), int(event["workers"])
        return cls(plan.validate(workers), workers, event)

    def schedule(self, most: int) -> Simulated:
        """Simulates a step of a unit with at most `most` micro-batches.

        Uses the seconds of its stages if they are known, otherwise equal ones.
        """
        taken = [
            (stage["forward"], stage["backward"]) for stage in self.stages if {"forward", "backward"} <= stage.keys()
        ]
        taken = taken if len(taken) == self.kind[1] * self.kind[2] and sum(map(sum, taken)) > 0 else []
        if self.waited is not None:  # a backward takes about twice as long as a forward
            taken = [
                (s, 2 * s) for s in (self.measured[stage_ranks[0]].get("seconds") or 0.0 for stage_ranks in self.lines)
            ] * self.kind[2]
        forward, backward = zip(*(taken or [(1.0, 2.0)] * self.kind[1] * self.kind[2]), strict=True)
        return simulate(table(*self.kind, min(self.each, most)), forward, backward)

    @property
    def waiting(self) -> str:
        """How long stages wait for each other, in words."""
        (kind, p, v), m = self.kind, self.each
        text = f"{kind}: {self.bubble:.1%} of a step if all stages take equally long"
        if math.isclose(self.bubble, (p - 1) / (v * m + p - 1)):  # as where rounds are full
            text += f", (p-1)/({'V' * (v > 1)}m+p-1) with p={p}, m={m}" + f", V={v}" * (v > 1)
        text += f"; {self.schedule(m).bubble:.1%} with what these take" * bool(self.predicted or self.measured)
        text += f"; {self.waited:.1%} measured" if self.waited is not None else ""
        return text + f"; drawn with {DRAWN} of {m} micro-batches" * (m > DRAWN)

    def position_text(self, rank: int, *axes: str) -> str:
        """A worker's position along these axes, as ``stage 0, part 1``; with virtual stages as ``stages 0, 2``."""
        at = {axis: str(self.mesh.coordinate(rank, axis)) for axis in axes if getattr(self.mesh, axis) > 1}
        _, p, v = self.kind
        if "pipeline" in at and v > 1:
            at["pipeline"] = "s " + ", ".join(str(int(at["pipeline"]) + p * number) for number in range(v))
        return ", ".join(f"{_PLACES[axis]} {number}".replace(" s ", "s ") for axis, number in at.items())

    def stages_of(self, rank: int) -> list[Event]:
        """The events of a worker's stages."""
        return self.stages[self.mesh.coordinate(rank, "pipeline") :: self.mesh.pipeline]

    def blocks(self, rank: int) -> str:
        """The blocks of a worker's stages, as text."""
        return ", ".join(str(stage["blocks"]) for stage in self.stages_of(rank) if stage.get("blocks"))

    def _map(self) -> Iterator[tuple[str, str]]:
        """The workers of the first units by stage, sequence shard and part, as (name, text) rows."""
        for first in range(0, self.workers, self.mesh.unit)[:4]:
            stages = [
                [self.mesh.peers(rank, "tensor") for rank in self.mesh.peers(stage, "context")]
                for stage in self.mesh.peers(first, "pipeline")
            ]
            texts = [" | ".join(" ".join(map(str, part)) for part in stage) for stage in stages]
            layout = " > ".join(f"[{text}]" if self.mesh.context * self.mesh.tensor > 1 else text for text in texts)
            yield self.position_text(first, *AXES[:2]) or "workers", layout
        if self.mesh.units > 4:
            yield "", f"and {self.mesh.units - 4} more like these"

    def _words(self) -> Iterator[tuple[str, str]]:
        """Explains what each word of the plan means for a worker, as (word, text) rows."""
        _, p, v = self.kind
        values: dict[str, Any] = {"v": v, "stages": v * p, "bubble": self.bubble, "every": self.plan.every}
        values["last"] = f"{plural(q, 'island')} and a grace window" if (q := self.plan.quorum) else "the last island"
        values["delay"] = self.plan.delay or 0
        values["kept"] = max(map(kept, table(*self.kind, self.each)))
        for row, value, word in self.plan.stated_words():
            meanings = _WORDS.get(f"zero={self.plan.zero}" if row.name == "shard" else row.name)
            if row.name == "data" and self.plan.local:
                per_worker = f"each computes at most {plural(self.islands, 'island')}"
                shared = "those of one island sum their gradients in each step"
                yield (
                    word,
                    f"replicas, to which the islands are dealt: {shared if value > self.plan.local else per_worker}",
                )
            elif meanings is None and row.name not in ("zero", "every", "outer", "delay", "quorum"):  # told with others
                yield word, row.metadata["caption"]
            elif meanings is not None and (value > 1 or row.name == "local"):
                verbs = zip((word, "", ""), ("holds", "sends", "waits"), meanings, strict=True)
                yield from ((name, f"{verb} {text.format(n=value, **values)}") for name, verb, text in verbs)

    def figures(self) -> Iterator[tuple[str, str]]:
        """What the workers of each stage hold, send and compute, at most, as (name, text) rows."""
        for stage_ranks in self.lines:
            passes = sum(stage.get("passes") or 0 for stage in self.stages_of(stage_ranks[0]))
            description = ": ".join(
                filter(None, (self.position_text(stage_ranks[0], "pipeline"), self.blocks(stage_ranks[0])))
            )
            description += f"; passes {size_of(passes)} on in each micro-batch" * bool(passes)
            if description or self.predicted or self.measured:
                yield ranks(stage_ranks) if len(self.lines) > 1 else "each worker", description or "the whole model"
            for title, amounts in (("predicted", self.predicted), ("measured", self.measured)):
                if amounts:
                    yield title, _describe_amounts([amounts[rank] for rank in stage_ranks])
        if self.mesh.pipeline > 1:
            yield "waiting", self.waiting

    def text(self) -> str:
        """The whole explanation, as text for a terminal."""
        line = f"{self.plan}: {plural(self.workers, 'worker')}" + f", {self.model}" * bool(self.model)
        line += f"; a step of {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        line += f" of {plural(self.micro or 0, 'row')}" * bool(self.micro)
        if self.mesh.units > 1:
            line += f", at most {self.each} for each of {self.mesh.units} units of {plural(self.mesh.unit, 'worker')}"
        tables = [[*self._map()], [*self._words()], [*self.figures()]]
        notes = []
        if self.mesh.pipeline > 1:
            places = [self.position_text(stage_ranks[0], "pipeline") for stage_ranks in self.lines]
            width = 66 if self.each * self.kind[2] <= 8 else 110
            tables.append([*zip(places, drawn(self.schedule(DRAWN), width), strict=True)])
            notes.append("a number is the forward of a micro-batch, in brackets its backward; the rest is waiting")
        if self.predicted:
            parts = self.mesh.context * self.mesh.tensor
            equal = f", in {parts} equal parts" * (parts > 1)
            notes.append(f"seconds and activations are those of a micro-batch on one worker here{equal}")
        wide = max(len(name) for rows in tables for name, _ in rows)
        sections = ["\n".join(f"{name:{wide}}  {text}".rstrip() for name, text in rows) for rows in tables if rows]
        return "\n\n".join(filter(None, [line, *sections, "\n".join(notes)]))


def took(seconds: float) -> str:
    """A duration; below a second with three digits, so that stages can be compared."""
    return duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _describe_amounts(amounts: Sequence[Event]) -> str:
    largest = {
        name: max(worker_amounts.get(name) or 0 for worker_amounts in amounts)
        for name in (*HELD, "process", "seconds", "waited")
    }
    sent = {kind: size for worker_amounts in amounts for kind, size in (worker_amounts.get("sent") or {}).items()}
    held = [f"{name} {size_of(largest[name])}" for name in HELD if largest[name]]
    held += [f"{size_of(largest['process'])} in all"] * bool(largest["process"])
    sends = [f"{kind} {size_of(size)}" for kind, size in sent.items() if size > sum(sent.values()) / 100]
    takes = [
        f"{verb} {took(largest[key])}" for key, verb in (("seconds", "computes"), ("waited", "waits")) if largest[key]
    ]
    parts = {"holds ": held, "sends ": sends, "": takes}
    return "; ".join(verb + ", ".join(figures) for verb, figures in parts.items() if figures)
