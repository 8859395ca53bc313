"""The plans that may be used for a model on so many workers: those that `Plan.validate` and the model's shape allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

from paceline.base.batching import Grid
from paceline.base.mesh import AXES
from paceline.errors import PlanError
from paceline.plan import Plan
from paceline.planner.descriptions import ModelDescription

_PLACES = {*AXES, "local", "server"}
# Words that say where parts of a model and its updates are, with those that refine them.
LAYOUT = _PLACES | {row.name for row in fields(Plan) if row.metadata["of"] in {*_PLACES, "fragments"}}
PROBED = "micro", "precision", "optimizer_states", "tiles"
VIRTUAL = 1, 2
LOSSY = "codec=bf16", "codec=int8"
EVERY = 20  # steps between two merges of local SGD
STALENESS = 4  # steps that a worker may run ahead of others
NO_LAYOUT = "tensor=1"  # words that leave a plan as it is by default


def candidates(
    workers: int,
    model: ModelDescription,
    script: Plan,
    fixed_words: Plan,
    allowed: frozenset[str],
    free_micro: bool,
    hosts: Sequence[int] = (),
) -> tuple[list[Plan], dict[str, str]]:
    """Returns the plans to choose from, and the refused ones with the reason. `hosts` are the workers of each host, if
    there are several and no replica may span them.

    All give the same result as one worker with the `script`'s plan, but for what is `allowed`: "lossy" codecs, "local"
    SGD and stale updates, another "precision". The `fixed_words` stay as they are. With `free_micro` the size of
    micro-batches does not change the result, so it may be chosen.
    """
    base = _with(without_layout(script), {row.name: value for row, value, _ in fixed_words.stated_words()})
    stated = {row.name for row, _, _ in fixed_words.stated_words()}
    plans: dict[str, Plan] = {}
    refused: dict[str, str] = {}
    for layout in _layouts(workers, model, stated, allowed):
        for words in _variants(base, model, workers, allowed, free_micro, stated):
            changes = {name: value for name, value in {**layout, **words}.items() if name not in stated}
            plan = _with(base, changes)
            if "codec" in changes and not _sums_gradients(plan, workers):
                continue  # the same as without the codec
            try:
                plan = plan.validate(workers)
            except PlanError as error:
                refused.setdefault(str(plan), error.what)
                continue
            if reason := _misfit(plan, model, workers, hosts):
                refused.setdefault(str(plan), reason)
            else:
                plans.setdefault(str(plan), plan)
    return [*plans.values()], {text: reason for text, reason in refused.items() if text not in plans}


def _with(plan: Plan, words: Mapping[str, Any]) -> Plan:
    return replace(plan, **words)


def _layouts(
    workers: int, model: ModelDescription, stated: set[str], allowed: frozenset[str]
) -> Iterator[dict[str, int | None]]:
    """Yields the values of the axes whose product divides the workers, and the words that refine them; and those of
    parameter servers.
    """
    has_experts = any(block.expert_parameters for block in model.blocks)
    axes = [axis for axis in AXES if axis != "data" and axis not in stated and (axis != "expert" or has_experts)]
    divisors = [number for number in range(1, workers + 1) if workers % number == 0]
    for sizes in product(divisors, repeat=len(axes)):
        if workers % math.prod(sizes):
            continue
        layout: dict[str, int | None] = {
            axis: size if size > 1 else None for axis, size in zip(axes, sizes, strict=True)
        }
        zeros = (1, 2, 3) if layout.get("shard") and "zero" not in stated else (None,)
        virtual = [v for v in VIRTUAL if layout.get("pipeline") and v * (layout["pipeline"] or 1) <= model.block_count]
        for zero, stages in product(zeros, virtual or (None,)):
            yield {**layout, "zero": zero, "virtual": stages if stages and stages > 1 else None}
    if workers > 1 and not stated & LAYOUT:
        yield {"server": 1}
        if "local" in allowed:
            yield {"server": 1, "staleness": STALENESS}


def _variants(
    base: Plan, model: ModelDescription, workers: int, allowed: frozenset[str], free_micro: bool, stated: set[str]
) -> Iterator[dict[str, object]]:
    """Yields changes to the words that do not say where parts of the model are."""
    micros: list[int | None] = [base.micro]
    if free_micro and "micro" not in stated:
        rows, usual = model.global_batch, Grid.of(model.global_batch, base.micro).micro
        micros += sorted({size for size in (usual * 2, usual * 4, usual // 2) if 0 < size <= rows // workers})
    recomputes = [base.recompute] if "recompute" in stated else [base.recompute, "blocks"]
    precisions = [base.precision] if "precision" not in allowed else [base.precision, "bf16"]
    for micro, recompute, precision in product(micros, dict.fromkeys(recomputes), dict.fromkeys(precisions)):
        words: dict[str, object] = {"micro": micro, "recompute": recompute, "precision": precision}
        yield words
        if "lossy" in allowed:
            yield from ({**words, "codec": word.partition("=")[2]} for word in LOSSY)
        if "local" in allowed and workers > 1:
            yield {**words, "local": workers, "every": EVERY}


def _misfit(plan: Plan, model: ModelDescription, workers: int, hosts: Sequence[int]) -> str:
    """Returns why a plan does not fit the shape of a model or the hosts, or an empty text."""
    mesh = plan.mesh(workers)
    if spans_hosts(plan, hosts):
        return f"a replica of {mesh.replica} workers would span hosts, and its checkpoints would need --checkpoints"
    stages = mesh.pipeline * (plan.virtual or 1)
    if stages > model.block_count:
        return f"{stages} stages of {model.block_count} blocks"
    if mesh.tensor > 1 and model.heads and model.heads % mesh.tensor:
        return f"tensor={mesh.tensor} does not divide {model.heads} heads"
    if mesh.context > 1 and model.tokens < 2:
        return "rows have no sequence that context= could split"
    micro = Grid.of(model.global_batch, plan.micro).micro
    if -(-model.global_batch // micro) < mesh.units:
        return f"{-(-model.global_batch // micro)} micro-batches for {mesh.units} replicas"
    return ""


def _sums_gradients(plan: Plan, workers: int) -> bool:
    """Whether gradients are summed over replicas or by servers, which is what codecs compress."""
    return bool(plan.server) or plan.mesh(workers).data > 1


def layout_of(plan: Plan) -> set[str]:
    """Returns the names of the plan's words that say where parts of a model are."""
    return LAYOUT & {row.name for row, _, _ in plan.stated_words()}


def has_same_layout(one: Plan, other: Plan) -> bool:
    """Whether two plans place the parts of a model alike."""
    return all(getattr(one, name) == getattr(other, name) for name in LAYOUT)


def without_layout(plan: Plan) -> Plan:
    """Returns the words of a plan that do not say where parts of a model are."""
    return _with(plan, {row.name: row.default for row in fields(Plan) if row.name in LAYOUT})


def probed_words(plan: Plan) -> Plan:
    """Returns the words of a plan under which a script is probed: each worker has the complete model."""
    return Plan(**{name: getattr(plan, name) for name in PROBED})


def words_of(plan: Plan) -> str:
    """Returns the words to give for a plan: without `data`, which follows from the number of workers."""
    return str(replace(plan, data=None)) or str(plan)


def words_to_join(plan: Plan) -> str:
    """Returns the words to give for a plan if some of its workers join those of a first host, to which `data` would not
    fit.
    """
    return str(replace(plan, data=None)) or NO_LAYOUT


def spans_hosts(plan: Plan, hosts: Sequence[int]) -> bool:
    """Whether a replica of a plan over hosts with so many workers would span them."""
    return len(hosts) > 1 and any(host % plan.mesh(sum(hosts)).replica for host in hosts)


def words_over(plan: Plan, hosts: Sequence[int]) -> str:
    """Returns the words to give for a plan over hosts with so many workers: with `data` where they begin together,
    because replicas span them.
    """
    return str(plan) if spans_hosts(plan, hosts) else words_to_join(plan)
