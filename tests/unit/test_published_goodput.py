"""Goodput that others have published, and that of Paceline's soaks, beside the simulated one with the same inputs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from paceline.base.time_accounting import USEFUL
from paceline.planner.days import DAY, HOUR, GivenLoss, Scenario, restart_progress, simulate

TABLE = Path(__file__).parents[1] / "published" / "goodput.csv"
RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
LINES = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
PUBLISHED: dict[str, dict[str, Any]] = {row["name"]: row for row in csv.DictReader(LINES)}
BOUND = 16.7  # minutes of restart and lost work that Llama 3's interruptions leave at 90 %


def progress(scenario: Scenario, days: float, seeds: int = 8) -> float:
    return fmean(simulate(scenario, days * DAY, seed).progress for seed in range(seeds))


@pytest.mark.parametrize("restart", [2.0, 5.0, 10.0, 14.0])
@pytest.mark.parametrize("every", [2.0, 5.0, 10.0, 20.0, 30.0])
def test_llama_3_reaches_its_goodput_where_restart_and_lost_work_take_less_than_the_bound(restart, every):
    row = PUBLISHED["Llama 3 405B"]
    workers, minutes = int(row["workers"]), float(row["minutes_between_losses"])
    assert minutes == pytest.approx(54 * 24 * 60 / 466, abs=0.01)
    scenario = Scenario(workers, reaction="restart", worker_hours=workers * minutes / 60, every=60 * every)
    scenario = replace(scenario, restart=60 * restart)
    cost = restart + every / 2  # on average half of an interval is lost
    if abs(cost - BOUND) > 1.5:  # losses while restarting shift the bound a little
        assert (restart_progress(scenario) >= float(row["goodput"])) == (cost < BOUND), cost
    assert progress(scenario, 54) == pytest.approx(restart_progress(scenario), abs=0.012)


def test_one_set_of_inputs_gives_both_goodputs_of_ft_hsdp():
    """Assumed: 18.5 minutes between losses, checkpoints every 10 minutes, replicas of 4,096, out for 25 minutes.
    Half of the stall is when a replica is lost, half when it is back.
    """
    out, back = PUBLISHED["FT-HSDP all restart"], PUBLISHED["FT-HSDP replica out"]
    workers, stop = int(out["workers"]), 60 * float(out["minutes_of_a_stop"])
    team = Scenario(workers, 4096, worker_hours=workers * 18.5 / 60, every=600.0, step=10.0)
    restarting = replace(team, reaction="restart", restart=stop)
    continuing = replace(team, reaction="leave-out", restart=25 * 60.0, form=30 * float(back["minutes_of_a_stop"]))
    assert progress(restarting, 30) == pytest.approx(float(out["goodput"]), abs=0.03)
    assert progress(continuing, 30) == pytest.approx(float(back["goodput"]), abs=0.03)


def test_byterobust_with_an_incident_in_three_hours_that_costs_five_minutes():
    """Assumed: both figures, and a copy of the state in each step."""
    row = PUBLISHED["ByteRobust"]
    workers = int(row["workers"])
    scenario = Scenario(workers, reaction="restart", worker_hours=3.0 * workers, every=30.0, step=30.0, restart=300.0)
    assert progress(scenario, 90) == pytest.approx(float(row["goodput"]), abs=0.01)


@pytest.mark.parametrize(("name", "hours"), [("RSC-1 at 16384 GPUs", 1.8), ("RSC-1 at 131072 GPUs", 0.23)])
def test_the_time_to_a_failure_of_kokolis_and_others(name, hours):
    scenario = Scenario(int(PUBLISHED[name]["workers"]), host=8, host_hours=1000 * 24 / 6.5)
    assert scenario.seconds_between_losses / HOUR == pytest.approx(hours, rel=0.03)
    day = simulate(scenario, 30 * DAY)
    assert 30 * 24 / day.losses == pytest.approx(hours, rel=0.1)


def test_a_chip_that_fails_once_a_year_and_a_million_and_a_half_of_them():
    """An article on Decoupled DiLoCo has one in five minutes; it is 21 seconds."""
    assert Scenario(1_500_000, worker_hours=365 * 24).seconds_between_losses == pytest.approx(21.0, abs=0.1)


def soak(date: str) -> dict[str, Any]:
    record = json.loads((RECORDS / f"soak-{date}.json").read_text())
    return {**record["results"], "workers": record["workers"]}


@pytest.mark.parametrize(("predicted", "measured"), [("2026-11-26", "2026-11-21"), ("2026-11-21", "2026-11-26")])
def test_a_soak_has_the_goodput_that_the_figures_of_another_one_give(predicted, measured):
    """Seconds of a detection, of forming and of a hand-over are those of the other soak; steps those of the run without
    faults. A kill is known at once, so all seconds of detection are those of stops. The faults are spread evenly.
    """
    one, other = soak(predicted), soak(measured)
    did, account = other["soak"]["did"], other["soak"]["account"]
    losses, guests, faults = did["kill"] + did["stop"], did["join"], one["soak"]["did"]
    count = faults["kill"] + faults["stop"]
    alone, steps = one["alone"]["account"], one["steps"]
    trained = sum(alone.get(name, 0.0) for name in (*USEFUL, "waiting"))
    scenario = Scenario(
        one["workers"],
        step=trained / steps,
        waiting=alone["waiting"] / trained,
        detect=account["detection"] / did["stop"] * faults["stop"] / count,
        form=account["forming"] / (2 * (losses + guests)),
        hand_over=account["hand-over"] / (losses + guests),
        restart=1.0,
    )
    due = [GivenLoss((number + 0.5) * steps / count, number % one["workers"]) for number in range(count)]
    day = simulate(scenario, losses=due, steps=steps, seconds=DAY)
    starting = one["soak"]["account"]["starting"]
    goodput = day.goodput * day.seconds / (day.seconds + starting)
    assert day.losses == count
    assert goodput == pytest.approx(one["soak"]["goodput"], abs=0.02)
    for name in ("detection", "hand-over"):
        assert day.account[name] == pytest.approx(one["soak"]["account"][name], rel=0.2, abs=1.0), name
