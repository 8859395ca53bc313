"""The plans that `paceline plan` and `auto` choose from."""

from __future__ import annotations

from paceline.plan import Plan
from paceline.planner.candidates import candidates
from paceline.planner.descriptions import BlockDescription, ModelDescription

MODEL = ModelDescription("Net", tuple(BlockDescription(str(n), 10**4, passes=80.0) for n in range(8)), 64, merges=True)


def test_codecs_are_tried_only_where_gradients_are_summed() -> None:
    plans, _ = candidates(4, MODEL, Plan(), Plan(), frozenset({"lossy"}), free_micro=True)
    summed = [plan for plan in plans if plan.server or plan.mesh(4).data > 1]
    assert {plan.codec for plan in summed} == {None, "bf16", "int8"}
    divided = [plan for plan in plans if plan not in summed]
    assert {plan.mesh(4).replica for plan in divided} == {4}
    assert {plan.codec for plan in divided} == {None}


def test_a_codec_that_the_user_asks_for_stays() -> None:
    fixed = Plan.parse("codec=int8")
    plans, _ = candidates(2, MODEL, Plan(), fixed, frozenset({"lossy"}), free_micro=False)
    assert {plan.mesh(2).data for plan in plans} == {1, 2}
    assert {plan.codec for plan in plans} == {"int8"}
