"""How many micro-batches are computed together, where measurements are disturbed. Nothing is timed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from paceline.base.batching import NOTHING
from paceline.compute.job import StepSums
from paceline.compute.merge_policy import Decision, MergePolicy

Cost = Callable[[int], float]  # the true seconds of a row, by the number of micro-batches in a chunk
SHARES = 2, 4, 5, 8, 16  # micro-batches of a worker


def trained(cost: Cost, share: int, disturbed: Iterator[float], steps: int) -> tuple[MergePolicy, list[int]]:
    """Returns a policy after so many steps, each of which takes as long as it costs, times what disturbs it; and the
    sizes of the steps.
    """
    policy = MergePolicy(torch.device("cpu"), never=False)
    learn(policy, 1.0, share, tested=1)
    sizes = []
    for _ in range(steps):
        sizes.append(policy.size)
        learn(policy, cost(policy.size) * next(disturbed), share)
    return policy, sizes


def learn(policy: MergePolicy, seconds: float, share: int, tested: int = 0, **sums: bool) -> Decision | None:
    agreed = NOTHING if not tested else type(NOTHING)(**{**vars(NOTHING), "tested": tested})
    return policy.learn(StepSums(**sums), agreed, seconds, 1, share)


def drawn_cost(draw: random.Random) -> Cost:
    """Each chunk has a cost of its own; chunks that are larger than a cache may cost more for each row."""
    of_chunk, of_size = draw.uniform(0, 1), draw.choice([0, draw.uniform(0, 0.3)])
    return lambda size: 1 + of_chunk / size + of_size * (size - 1) / 2


def bursts(draw: random.Random, length: float, steady: bool) -> Iterator[float]:
    """Yields by which factor each step is longer. In 30 % of them the machine is disturbed and they take up to twice as
    long, for about `length` steps in a row: all alike if `steady`.
    """
    is_disturbed = draw.random() < 0.3
    while True:
        factor = 1 + draw.random()
        for _ in range(max(1, round(draw.expovariate(1 / (length if is_disturbed else length * 7 / 3))))):
            noise = 1 + abs(draw.gauss(0, 0.02))
            yield noise * (factor if steady else 1 + draw.random()) if is_disturbed else noise
        is_disturbed = not is_disturbed


@pytest.mark.parametrize(("length", "steady"), [(1, False), (6, False), (6, True), (40, True)])
def test_the_best_size_is_chosen_although_steps_are_disturbed(length, steady):
    """In at least 95 % of the draws the size costs at most 5 % more than the best one."""
    good, draws = 0, 100
    for number in range(draws):
        draw = random.Random(number)
        share, cost = draw.choice(SHARES), drawn_cost(draw)
        policy, sizes = trained(cost, share, bursts(draw, length, steady), 500)
        best = min(cost(size) for size in {1, 2, 4, 8, 16, share} if size <= share)
        good += cost(policy.best) <= 1.05 * best
        assert max(sizes) <= share
    assert good >= 0.95 * draws


def test_few_steps_try_other_sizes():
    """At most 2 % of the steps after the first search, and far fewer later."""
    flat = iter([1.0] * 20000)
    _, sizes = trained(lambda size: 1 + 0.5 / size, 8, flat, 20000)
    first = 60
    assert {*sizes[:first]} == {1, 2, 4, 8}
    assert sum(size != 8 for size in sizes[first:2000]) <= 0.02 * (2000 - first)
    assert sum(size != 8 for size in sizes[10000:]) <= 0.001 * 10000


def test_a_size_that_becomes_slow_is_left():
    """A step whose chunks do not fit a cache any more is soon computed in smaller ones."""
    policy, _ = trained(lambda size: 1 + 0.5 / size, 8, iter([1.0] * 500), 500)
    assert policy.best == 8
    decisions = [learn(policy, 1 + 0.5 / policy.size + 0.2 * policy.size, 8) for _ in range(420)]
    assert policy.best in (1, 2)
    (what, why) = next(filter(None, decisions))
    assert what == f"worker 0 computes {policy.best} micro-batch{'es' * (policy.best > 1)} at a time"
    assert "for 4" in why


def test_the_first_choice_names_all_sizes_it_has_measured():
    policy = MergePolicy(torch.device("cpu"), never=False)
    learn(policy, 1.0, 8, tested=1)
    seconds = {1: 4e-6, 2: 3e-6, 4: 2e-6, 8: 2e-6}
    decisions = [learn(policy, seconds[policy.size], 8) for _ in range(60)]
    (decision,) = filter(None, decisions)
    why = "a row took 4 µs for 1, 3 µs for 2, 2 µs for 4, 2 µs for 8 at a time"
    assert decision == ("worker 0 computes 4 micro-batches at a time", why)


def test_more_than_ran_out_of_memory_is_not_tried_again():
    policy, _ = trained(lambda size: 1 / size, 8, iter([1.0] * 100), 100)
    assert policy.size == 8
    learn(policy, 1.0, 8, out_of_memory=True)
    assert max(policy.size for _ in range(2000) if learn(policy, 1 / policy.size, 8) is None) == 4
