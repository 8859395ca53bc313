"""Days with failures: against the closed form, against one clock for each worker, and what must never get worse."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.time_accounting import COSTS, USEFUL
from paceline.errors import UsageError
from paceline.planner.days import (
    DAY,
    HOUR,
    REACTIONS,
    GivenLoss,
    Scenario,
    best_interval,
    restart_progress,
    simulate,
)

CHECKPOINTS = [(0.02, 0.001), (0.05, 0.01), (0.2, 0.0), (0.5, 0.03), (1.5, 0.1)]  # in mean times between losses
STOPS = [0.01, 0.05, 0.2, 0.6]
MEAN = 3600.0


def deviation(values: list[float], expected: float) -> float:
    """How many standard errors the mean of the values is away."""
    return (fmean(values) - expected) / (stdev(values) / math.sqrt(len(values)))


def test_restarts_agree_with_the_closed_form_on_twenty_settings():
    apart = []
    for every, save in CHECKPOINTS:
        for stop in STOPS:
            scenario = Scenario(
                1000, reaction="restart", worker_hours=1000 * MEAN / HOUR, every=every * MEAN, save=save * MEAN
            )
            scenario = replace(scenario, detect=0.2 * stop * MEAN, restart=0.8 * stop * MEAN)
            days = [simulate(scenario, 20 * DAY, seed).progress for seed in range(10)]
            apart.append(abs(deviation(days, restart_progress(scenario))))
    assert sum(errors <= 2 for errors in apart) >= 18, apart  # one of twenty is further away by chance
    assert max(apart) < 4


@pytest.mark.parametrize("save", [0.0005, 0.01, 0.1, 0.5])
def test_no_other_interval_of_checkpoints_is_better_in_the_closed_form(save):
    scenario = Scenario(100, step=1e-3, worker_hours=100.0, save=save * HOUR, restart=60.0, reaction="restart")
    best = best_interval(scenario)
    progress = restart_progress(replace(scenario, every=best))
    others = [restart_progress(replace(scenario, every=best * 2 ** (power / 4))) for power in range(-8, 9)]
    assert max(others) <= progress * 1.002
    young = math.sqrt(2 * save) * HOUR
    assert best < young
    assert save > 0.01 or best == pytest.approx(young, rel=0.1)


def second_by_second(scenario: Scenario, seconds: int, seed: int) -> float:
    """The progress of a team whose workers each have a clock, in steps of one second, without any arithmetic."""
    chance = random.Random(seed)
    lifetime = scenario.worker_hours * HOUR
    dies = [chance.expovariate(1 / lifetime) for _ in range(scenario.workers)]
    next_death = min(dies)
    back: dict[int, float] = {}  # time at which a lost worker is replaced
    spares, repaired, unreplaced = scenario.spares, list[float](), list[int]()
    stop = trained = saving = work = work_since = work_step = 0.0
    complete = scenario.replicas
    restarts = scenario.reaction == "restart"
    for now in range(seconds):
        arrived = [worker for worker, at in back.items() if at <= now]
        for worker in arrived:
            del back[worker]
            dies[worker] = now + chance.expovariate(1 / lifetime)
        while repaired and repaired[0] <= now:
            repaired.pop(0)
            if unreplaced:
                back[unreplaced.pop(0)] = now + scenario.restart
            else:
                spares += 1
        dead = [worker for worker, at in enumerate(dies) if at <= now] if next_death <= now else []
        hit = False
        for worker in dead:
            mates = range(worker - worker % scenario.replica, worker - worker % scenario.replica + scenario.replica)
            hit |= all(dies[mate] < math.inf for mate in mates)
            dies[worker] = math.inf
            repaired.append(now + scenario.repair_hours * HOUR)
            if spares:
                spares -= 1
                if restarts:
                    dies[worker] = now + chance.expovariate(1 / lifetime)
                else:
                    back[worker] = now + scenario.restart
            else:
                unreplaced.append(worker)
        if arrived or dead:
            next_death, before = min(dies), complete
            lost = {worker // scenario.replica for worker, at in enumerate(dies) if at == math.inf}
            complete = scenario.replicas - len(lost)
            if hit and restarts:
                stop, work = scenario.detect + scenario.restart, work - work_since
                work_since = trained = saving = 0.0
            elif hit:
                stop, work, work_step = scenario.detect + scenario.form, work - work_step, 0.0
            elif complete > before and stop <= 0:
                stop = scenario.form + scenario.hand_over
        if stop > 0:
            stop -= 1
        elif saving > 0:
            saving -= 1
            if saving <= 0:
                work_since = 0.0
        else:
            speed = complete / scenario.replicas
            work, work_since, work_step = work + speed, work_since + speed, work_step + speed
            trained += 1
            if work_step >= scenario.step:
                work_step -= scenario.step
            if trained >= scenario.every:
                trained, saving = 0.0, scenario.save
    return work / seconds


@pytest.mark.parametrize("reaction", ["restart", "leave-out"])
def test_one_clock_for_all_agrees_with_a_clock_for_each_of_512_workers(reaction):
    many = Scenario(512, 8, reaction=reaction, step=20.0, every=600.0, save=10.0, worker_hours=250.0)
    many = replace(many, detect=10.0, form=20.0, hand_over=5.0, restart=120.0, repair_hours=0.4)
    many = replace(many, spares=2 if reaction == "leave-out" else 1000)
    seconds, count = 5 * 3600, 60
    one = [simulate(many, seconds, seed).progress for seed in range(10 * count)]
    each = [second_by_second(many, seconds, seed) for seed in range(count)]
    spreads = stdev(one), stdev(each)
    assert abs(fmean(one) - fmean(each)) < 2.5 * spreads[1] / math.sqrt(count)
    assert abs(spreads[0] - spreads[1]) < 2.5 * spreads[1] / math.sqrt(2 * count)


SCENARIOS = st.builds(
    lambda replicas, replica, host, reaction, step, every, save, hours, host_hours, stops, repair, spares, least: (
        Scenario(
            replicas * replica,
            replica,
            host,
            reaction,
            step,
            every=every,
            save=save,
            write=every / 3,
            worker_hours=hours * replicas * replica,
            host_hours=host_hours * replicas * replica,
            detect=stops[0],
            form=stops[1],
            hand_over=stops[2],
            transfer=stops[2] * 2,
            restart=stops[3],
            repair_hours=repair,
            spares=spares,
            least=min(least, replicas),
        )
    ),
    replicas=st.integers(1, 40),
    replica=st.sampled_from([1, 2, 8]),
    host=st.sampled_from([1, 4, 8]),
    reaction=st.sampled_from([*REACTIONS]),
    step=st.floats(0.1, 100.0),
    every=st.floats(10.0, 7200.0),
    save=st.floats(0.0, 60.0),
    hours=st.floats(0.3, 30.0),
    host_hours=st.sampled_from([0.0, 1.0, 20.0]),
    stops=st.tuples(*[st.floats(0.0, 300.0)] * 4),
    repair=st.floats(0.0, 20.0),
    spares=st.integers(0, 10),
    least=st.integers(1, 40),
)


@given(SCENARIOS, st.integers(0, 1000))
@settings(max_examples=30)
def test_the_account_adds_up_and_has_a_runs_words(scenario, seed):
    day = simulate(scenario, DAY, seed)
    assert math.fsum(day.account.values()) == pytest.approx(DAY, rel=1e-9)
    assert day.account.keys() <= {*USEFUL, *COSTS}
    assert min(day.account.values()) >= 0
    assert 0 <= day.progress <= day.goodput + 1e-9
    assert day == simulate(scenario, DAY, seed)


@given(SCENARIOS)
@settings(max_examples=30)
def test_without_failures_only_checkpoints_cost_time(scenario):
    calm = replace(scenario, worker_hours=0.0, host_hours=0.0)
    days = 1000
    cycle = calm.every + calm.save
    assert simulate(calm, days * cycle).progress == pytest.approx(calm.every / cycle, rel=1e-9)
    assert simulate(calm, 0.5 * calm.every).progress == pytest.approx(1)


BETTER = {
    "fewer failures": lambda s: replace(s, worker_hours=3 * s.worker_hours, host_hours=3 * s.host_hours),
    "more spares": lambda s: replace(s, spares=s.spares + 5),
    "faster checkpoints": lambda s: replace(s, save=s.save / 2, write=s.write / 2),
    "faster links": lambda s: replace(s, hand_over=s.hand_over / 2, transfer=s.transfer / 2),
}


@pytest.mark.parametrize("what", BETTER)
@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_what_is_better_never_costs_progress(what, count):
    def check(scenario):
        variants = scenario, BETTER[what](scenario)
        usual, better = ([simulate(variant, DAY, seed).progress for seed in range(24)] for variant in variants)
        error = math.hypot(stdev(usual), stdev(better)) / math.sqrt(len(usual))
        assert fmean(better) >= fmean(usual) - 3 * error - 1e-3

    settings(max_examples=count, derandomize=True, database=None)(given(SCENARIOS)(check))()


def test_hosts_fail_with_all_their_workers_and_come_back_after_the_repair():
    """A host is there for mean / (mean + repair) of the time, and so are its workers, which are a replica."""
    scenario = Scenario(320, 8, 8, "leave-out", host_hours=30.0, repair_hours=6.0)
    days = [simulate(scenario, 30 * DAY, seed).progress for seed in range(10)]
    assert abs(deviation(days, 30 / 36)) < 3
    two = [simulate(replace(scenario, replica=16), 30 * DAY, seed).progress for seed in range(10)]
    assert abs(deviation(two, (30 / 36) ** 2)) < 3, "a replica of two hosts needs both"


def test_given_losses_happen_at_their_steps():
    scenario = Scenario(4, step=2.0, detect=1.0, form=0.5, restart=10.0, hand_over=0.25)
    day = simulate(scenario, math.inf, losses=[GivenLoss(10, 0), GivenLoss(20.5, 3)], steps=40)
    assert day.losses == 2
    assert day.work == pytest.approx(80.0)
    assert day.account["redone"] == pytest.approx(1.0)
    assert day.account["detection"] == pytest.approx(2.0)
    assert day.account["forming"] == pytest.approx(4 * 0.5)
    assert day.account["hand-over"] == pytest.approx(2 * 0.25)


def test_a_worker_that_is_not_back_yet_is_lost_when_it_is():
    scenario = Scenario(4, step=1.0, detect=1.0, form=0.5, restart=30.0)
    day = simulate(scenario, math.inf, losses=[GivenLoss(10, 0), GivenLoss(12, 0)], steps=100)
    lost = [span.begin for span in day.spans if span.account == "detection"]
    # Ten steps, then thirty seconds until the worker has started, and the joining.
    assert lost == pytest.approx([10.0, 40.5])


def test_a_restart_loses_what_was_not_written_yet():
    scenario = Scenario(2, reaction="restart", every=100.0, save=10.0, write=50.0, detect=1.0, restart=4.0, spares=9)
    late, early = (simulate(scenario, math.inf, losses=[GivenLoss(steps, 0)], steps=300) for steps in (180, 120))
    assert late.account["redone"] == pytest.approx(80.0)
    assert early.account["redone"] == pytest.approx(120.0), "the first checkpoint is not written after 20 seconds"
    assert late.account["starting"] == pytest.approx(4.0)


def test_with_too_few_replicas_the_run_is_paused():
    scenario = Scenario(2, reaction="leave-out", worker_hours=1e9, least=2, repair_hours=1.0, detect=1.0, form=1.0)
    day = simulate(scenario, DAY, losses=[GivenLoss(3600, 1)])
    assert day.account["paused"] == pytest.approx(HOUR - 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reaction": "pray"}, "unknown reaction 'pray'; use one of restart, leave-out, spare, redo"),
        (
            {"workers": 9, "replica": 2},
            "9 workers cannot be divided into replicas of 2; use a multiple of 2 workers",
        ),
        ({"every": 0.0}, "a step and the interval of checkpoints must take more than 0 seconds; give longer ones"),
    ],
)
def test_contradicting_values_are_refused(change, message):
    with pytest.raises(UsageError) as error:
        Scenario(**{"workers": 4, **change})
    assert str(error.value) == message
