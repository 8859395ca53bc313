"""Explains a plan in words, as predicted and as measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.base.journal import Event
from paceline.base.mesh import AXES
from paceline.base.text import duration, plural, ranks, size_of
from paceline.observe.model_text import model_line
from paceline.parallel.pipeline.schedule import (
    SPLIT,
    Simulated,
    drawn,
    most_in_flight,
    simulate,
    stages_of,
    table,
    worker_of,
)
from paceline.plan import Plan

DRAWN = 12  # micro-batches in a drawn schedule, at most
HELD = ("parameters", "gradients", "optimizer", "activations")
_PLACES = dict(zip(AXES, ("replica", "shard", "expert shard", "stage", "sequence shard", "part"), strict=True))
_EACH = "its gradients once per step"
# For each word of a plan: what each of its N workers holds, what it sends, and when it waits for others.
_WORDS = {
    "data": (
        "a copy of its part of the model, for 1/{n} of the micro-batches",
        _EACH,
        "at the end of a step, for the gradients of other replicas",
    ),
    "local": (
        "the inner optimizer state of each of its islands, and the weights from the start of the round",
        "the weight changes of its islands every {every} steps",
        "at the end of a round, for {last}",
    ),
    "fragments": (
        "also the weights of each of its islands in fragments that are not merged yet",
        "the weight changes of its islands in one of {n} fragments at a time",
        "after each fragment, if its reduction takes longer than {delay} of training",
    ),
    "zero=1": (
        "all parameters and gradients, and 1/{n} of the optimizer state",
        f"{_EACH}, then the weights that it has updated",
        "at the end of a step, first for gradients, then for weights",
    ),
    "zero=2": (
        "all parameters during a step, and 1/{n} of the gradients and of the optimizer state",
        "its parameters once per step, and gradients in each micro-batch",
        "at the start of a step for parameters, and in each backward pass for gradients",
    ),
    "zero=3": (
        "1/{n} of the parameters, gradients and optimizer state, and one full block at a time",
        "its shard of each block twice per micro-batch, and gradients once",
        "before each block, for the shards of the other workers",
    ),
    "pipeline": (
        "the blocks of {v} of {stages} stages, and the activations of at most {kept}",
        "its outputs to the next stage, and the gradients of its inputs to the previous stage",
        "in a forward pass for the previous stage, in a backward pass for the next one: {bubble:.1%} of a step",
    ),
    "context": (
        "the activations of 1/{n} of each sequence",
        f"its sequence shard in each attention, in exchange for heads of the full sequence; {_EACH}",
        "in each attention, for the sequence shards of the other workers",
    ),
    "expert": (
        "1/{n} of the experts of each layer, and all of the rest, for its own micro-batches",
        "tokens to their experts and the results back, in each layer of experts; gradients of the rest once per step",
        "in each layer of experts, for the tokens and results of the other workers",
    ),
    "tensor": (
        "1/{n} of each large layer, and all of the other layers",
        "its part of the outputs of each large layer",
        "in each large layer, for the parts of the other workers",
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
        self.size = model_line(event.get("size") or {})
        self.micro_batches = int(event.get("micro_batches") or 8)
        islands = plan.local or 1  # each island has a run of micro-batches and at least one replica
        self.islands = -(-islands // self.mesh.data)  # islands of a replica, at most
        units = max(1, self.mesh.data // islands) * self.mesh.shard * self.mesh.expert
        self.each = self.islands * -(
            -self.micro_batches // islands // units
        )  # micro-batches of a unit in a step, at most
        self.stages, self.predicted, self.measured = (
            list[Event](event.get(name) or ()) for name in ("stages", "predicted", "measured")
        )
        if min(len(self.predicted or self.measured), len(self.measured or self.predicted)) < self.mesh.replica:
            self.predicted = self.measured = []  # the figures belong to another team
        waited = sum(amounts.get("waited") or 0.0 for amounts in self.measured)
        busy = sum(amounts.get("seconds") or 0.0 for amounts in self.measured)
        self.waited = waited / (waited + busy) if busy else None  # the part of a step, measured
        self.kind = plan.stage_order, self.mesh.pipeline, plan.virtual or 1
        count = self.kind[1] * self.kind[2]
        self.bubble = simulate(table(*self.kind, self.each), [1.0] * count, [2.0] * count).bubble
        self.lines = [
            [rank for rank in range(self.mesh.replica) if self.mesh.coordinate(rank, "pipeline") == stage]
            for stage in range(self.mesh.pipeline)
        ]  # the workers that have the same stages

    @classmethod
    def of(cls, event: Event) -> PlanExplanation:
        """The explanation of a journal event, whose team may have changed since its plan was chosen."""
        plan, workers = Plan.parse(event["plan"]), int(event["workers"])
        enough = max(workers, (plan.backup or 0) + 1)  # fewer may be left than are needed to spare `backup` of them
        return cls(replace(plan, data=None).validate(enough), workers, event)

    def schedule(self, most: int) -> Simulated:
        """Simulates a step of a unit with at most `most` micro-batches.

        Uses the seconds of its stages if they are known, otherwise equal ones.
        """
        taken = [
            (stage["forward"], stage["backward"]) for stage in self.stages if {"forward", "backward"} <= stage.keys()
        ]
        taken = taken if len(taken) == self.kind[1] * self.kind[2] and sum(map(sum, taken)) > 0 else []
        if self.waited is not None:  # a backward takes about twice as long as a forward
            by_worker = [self.measured[stage_ranks[0]].get("seconds") or 0.0 for stage_ranks in self.lines]
            kind, p, v = self.kind
            taken = [(s, 2 * s) for s in (by_worker[worker_of(kind, p, stage)] for stage in range(p * v))]
        forward, backward = zip(*(taken or [(1.0, 2.0)] * self.kind[1] * self.kind[2]), strict=True)
        return simulate(table(*self.kind, min(self.each, most)), forward, backward)

    @property
    def waiting(self) -> str:
        """How long stages wait for each other, in words."""
        (kind, p, v), m = self.kind, self.each
        text = f"{kind}: {self.bubble:.1%} of a step if all stages take equally long"
        if math.isclose(self.bubble, (p - 1) / (v * m + p - 1)):  # holds if every round of micro-batches is full
            text += f", (p-1)/({'V' * (v > 1)}m+p-1) with p={p}, m={m}" + f", V={v}" * (v > 1)
        text += f"; {self.schedule(m).bubble:.1%} with the times of these stages" * bool(
            self.predicted or self.measured
        )
        text += f"; {self.waited:.1%} measured" if self.waited is not None else ""
        return text + f"; drawn with {DRAWN} of {m} micro-batches" * (m > DRAWN)

    def position_text(self, rank: int, *axes: str) -> str:
        """A worker's position along these axes, as ``stage 0, part 1``; with virtual stages as ``stages 0, 2``."""
        at = {axis: str(self.mesh.coordinate(rank, axis)) for axis in axes if getattr(self.mesh, axis) > 1}
        if "pipeline" in at and self.kind[2] > 1:
            at["pipeline"] = "s " + ", ".join(map(str, self._stage_numbers(rank)))
        return ", ".join(f"{_PLACES[axis]} {number}".replace(" s ", "s ") for axis, number in at.items())

    def stages_of(self, rank: int) -> list[Event]:
        """The events of a worker's stages."""
        return [self.stages[number] for number in self._stage_numbers(rank) if number < len(self.stages)]

    def _stage_numbers(self, rank: int) -> list[int]:
        return stages_of(*self.kind, self.mesh.coordinate(rank, "pipeline"))

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
            yield self.position_text(first, *AXES[:3]) or "workers", layout
        if self.mesh.units > 4:
            yield "", f"and {plural(self.mesh.units - 4, 'more unit')}"

    def _words(self) -> Iterator[tuple[str, str]]:
        """Explains the effect of each word of the plan on a worker, as (word, text) rows."""
        _, p, v = self.kind
        values: dict[str, Any] = {"v": v, "stages": v * p, "bubble": self.bubble, "every": self.plan.every}
        values["last"] = (
            f"{plural(q, 'island')} and a grace window" if (q := self.plan.quorum) else "the slowest island"
        )
        values["delay"] = plural(self.plan.delay or 0, "step")
        values["kept"] = _micro_batches(max(map(most_in_flight, table(*self.kind, self.each))))
        for row, value, word in self.plan.stated_words():
            meanings = _WORDS.get(f"zero={self.plan.zero}" if row.name == "shard" else row.name)
            if row.name == "data" and self.plan.local:
                per_worker = f"each computes at most {plural(self.islands, 'island')}"
                shared = "the replicas of an island sum their gradients in each step"
                yield (
                    word,
                    f"replicas that compute the islands: {shared if value > self.plan.local else per_worker}",
                )
            elif meanings is None and row.name not in (
                "zero",
                "every",
                "outer",
                "delay",
                "quorum",
            ):  # explained with other words
                yield word, row.metadata["caption"]
            elif meanings is not None and (value > 1 or row.name == "local"):
                verbs = zip((word, "", ""), ("holds", "sends", "waits"), meanings, strict=True)
                yield from ((name, f"{verb} {text.format(n=value, **values)}") for name, verb, text in verbs)

    def figures(self) -> Iterator[tuple[str, str]]:
        """The most that a worker of each stage holds, sends and computes, as (name, text) rows."""
        for stage_ranks in self.lines:
            passes = sum(stage.get("passes") or 0 for stage in self.stages_of(stage_ranks[0]))
            description = ": ".join(
                filter(None, (self.position_text(stage_ranks[0], "pipeline"), self.blocks(stage_ranks[0])))
            )
            description += f"; sends {size_of(passes)} to the next stage in each micro-batch" * bool(passes)
            if description or self.predicted or self.measured:
                yield ranks(stage_ranks) if len(self.lines) > 1 else "each worker", description or "the full model"
            for title, amounts in (("predicted", self.predicted), ("measured", self.measured)):
                if amounts:
                    yield title, _describe_amounts([amounts[rank] for rank in stage_ranks])
        if self.mesh.pipeline > 1:
            yield "waiting", self.waiting

    def text(self) -> str:
        """The complete explanation, as text for a terminal."""
        line = f"{self.plan}: {plural(self.workers, 'worker')}" + f", {self.model}" * bool(self.model)
        line += f"; a step of {_micro_batches(self.micro_batches)}"
        line += f" of {plural(self.micro or 0, 'row')}" * bool(self.micro)
        if self.mesh.units > 1:
            line += f", at most {self.each} for each of {self.mesh.units} units of {plural(self.mesh.unit, 'worker')}"
        tables = [[*self._map()], [*self._words()], [*self.figures()]]
        notes = []
        if self.mesh.pipeline > 1:
            places = [self.position_text(stage_ranks[0], "pipeline") for stage_ranks in self.lines]
            width = 66 if self.each * self.kind[2] <= 8 else 110
            tables.append([*zip(places, drawn(self.schedule(DRAWN), width), strict=True)])
            note = "a number is the forward pass of a micro-batch, in brackets its backward pass; gaps are waiting time"
            if self.kind[0] in SPLIT:
                note = note.replace("its backward pass", "the gradients of inputs, in parentheses those of weights")
            notes.append(note)
        if self.size:
            notes.append(f"the model is a {self.size}")
        if self.predicted:
            parts = self.mesh.context * self.mesh.tensor
            equal = f" and divided by {parts}" * (parts > 1)
            notes.append(f"seconds and activations were measured on this machine with one micro-batch{equal}")
        wide = max(len(name) for rows in tables for name, _ in rows)
        sections = ["\n".join(f"{name:{wide}}  {text}".rstrip() for name, text in rows) for rows in tables if rows]
        return "\n\n".join(filter(None, [line, *sections, "\n".join(notes)]))


def _micro_batches(count: int) -> str:
    return f"{count} micro-batch{'es' * (count != 1)}"


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
    held += [f"{size_of(largest['process'])} in total"] * bool(largest["process"])
    sends = [f"{kind} {size_of(size)}" for kind, size in sent.items() if size > sum(sent.values()) / 100]
    takes = [
        f"{verb} {took(largest[key])}" for key, verb in (("seconds", "computes"), ("waited", "waits")) if largest[key]
    ]
    parts = {"holds ": held, "sends ": sends, "": takes}
    return "; ".join(verb + ", ".join(figures) for verb, figures in parts.items() if figures)
