"""Answers what `paceline check`, `paceline explain` and `paceline plan` ask of a run that they start."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.communicator import Group
from paceline.compute.model_size import count_elements
from paceline.errors import UsageError
from paceline.plan import Plan
from paceline.planner.candidates import candidates, without_layout
from paceline.planner.descriptions import ProbeRequest, ProbeResult, WorkerBytes, as_json, converted
from paceline.planner.division import Division
from paceline.planner.probe import ModelProbe, describe_machine
from paceline.planner.trial import Trial
from paceline.train.step import Step
from paceline.train.step_context import Batches, StepContext
from paceline.train.step_verbs import load_batch


class RequestedAnswer:
    """Answers the request of a run for one of its trainers, and ends the script then."""

    def __init__(self, context: StepContext) -> None:
        self._context, self._asked = context, context.run.check
        self._trial: Trial | None = None
        if self._asked.trial is not None and context.trainer == 0:
            self._trial = Trial(context, *self._asked.trial)

    def before_step(self, batches: Batches) -> None:
        """Answers a request for a probe, from the first rows."""
        if self._asked.probe is None:
            return
        context = self._context
        batch = batches.load(0, context.current_assignment())
        assert batch is not None
        load_batch(context, step := Step(context.done, 0.0), batch)
        result = _probe(context, step, converted(ProbeRequest, self._asked.probe))
        self._asked.answer(as_json(result))

    def after_step(self, step: Step) -> None:
        """Measures a step of a trial, or writes the weights after the last step of a check."""
        context = self._context
        if self._trial is not None:
            self._trial.observe(step)
        if self._asked.steps is not None and context.run.team.step >= self._asked.steps:
            context.run.trainers.flush()
            self._asked.write_weights(context.job, context.run.team.group, context.merging.mixes, context.run.team.step)

    def after_loop(self) -> None:
        """Ends a trial with the loop that it measures, if that has fewer steps."""
        if self._trial is not None:
            self._trial.end()


def _probe(context: StepContext, step: Step, request: ProbeRequest) -> ProbeResult:
    """Measures the model and the machines, and computes the bytes of plans. Collective."""
    job, run, workers = context.job, context.run, request.workers
    group = run.team.group
    group.declare("a probe of the machines", kind="figures")
    probe = ModelProbe(context, step, group)
    model = probe.describe()
    machine = describe_machine(job.device, group, request.memory) if request.measures_machine else None
    script, division = Plan.parse(run.check.script_plan), probe.division()
    plans = [(Plan.parse(text).validate(workers), workers) for text in request.plans]
    if not plans:
        fixed_words, allowed = Plan.parse(request.fixed_words), frozenset(request.allowed)
        made, _ = candidates(workers, model, script, fixed_words, allowed, True, request.hosts)
        plans = [(plan, workers) for plan in made] + [(without_layout(script).validate(1), 1)]
    sizes, refused = _bytes_of(plans, division, group)
    usable = {(plan.tensor or 1, plan.context or 1) for plan, _ in plans if str(plan) in sizes}
    model = probe.with_divided(model, division, sorted(usable - {(1, 1)}), request.memory, group)
    asked = [plan for plan, _ in plans if str(plan) in sizes] if request.plans else []
    return ProbeResult(
        str(script),
        probe.sample.rows,
        step.batch.count,
        model,
        machine,
        run.memory.process_bytes if job.device.type == "cpu" else 0,
        sizes,
        {str(plan): division.stage_blocks(plan, workers) for plan in asked},
        refused,
        count_elements(job.model),
    )


def _bytes_of(
    plans: Sequence[tuple[Plan, int]], division: Division, group: Group
) -> tuple[dict[str, tuple[WorkerBytes, ...]], dict[str, tuple[str, str]]]:
    """Returns the bytes of each plan for so many workers, and why others cannot be used for the model. Collective."""
    # Plans that divide layers alike are computed by the same worker, which divides them once.
    kinds = [(plan.tensor, plan.context, plan.expert, plan.recompute, plan.precision) for plan, _ in plans]
    owners = {kind: number % group.size for number, kind in enumerate(dict.fromkeys(kinds))}
    by_plan: dict[str, list[dict[str, object]]] = {}
    refused: dict[str, tuple[str, str]] = {}
    for (plan, workers), kind in zip(plans, kinds, strict=True):
        if owners[kind] == group.rank:
            try:
                by_plan[str(plan)] = [as_json(one) for one in division.bytes_of(plan, workers)]
            except UsageError as error:
                refused[str(plan)] = error.what, error.cure
    parts = group.gather_json([by_plan, refused])
    sizes = {text: tuple(converted(WorkerBytes, one) for one in of) for part, _ in parts for text, of in part.items()}
    return sizes, {text: (why[0], why[1]) for _, part in parts for text, why in part.items()}
