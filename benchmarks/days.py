"""Seconds that a simulated day takes, by the number of workers and the way of reacting.

Usage: days.py [--record FILE]. The median of five days; a table of 100 settings with 20 seeds each, once.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from turns import record

from paceline.planner.days import DAY, REACTIONS, Scenario, simulate

# Workers, and hours between failures of one.
SIZES = {"1,000": (1_000, 5_000), "100,000": (100_000, 50_000), "1,000,000": (1_000_000, 5_000)}
TEAM = Scenario(8, 8, 8, step=10.0, every=600.0, save=10.0, detect=5.0, form=5.0, restart=60.0, repair_hours=12.0)


def seconds_of(scenario: Scenario) -> tuple[float, int]:
    """Median seconds of five simulated days, and the losses of the last one."""
    taken, losses = [], 0
    for seed in range(5):
        began = time.perf_counter()
        losses = simulate(scenario, DAY, seed).losses
        taken.append(time.perf_counter() - began)
    return median(taken), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, (workers, hours) in SIZES.items():
        for reaction in REACTIONS:
            team = replace(TEAM, workers=workers, worker_hours=float(hours), reaction=reaction, spares=workers // 100)
            seconds, losses = seconds_of(team)
            results[f"{name} workers, {reaction}"] = {"seconds": seconds, "losses": losses}
            print(f"{name:>9} workers  {reaction:9}  {1000 * seconds:8.1f} ms  {losses:6,} losses", flush=True)
    began = time.perf_counter()
    for setting in range(100):
        team = replace(TEAM, workers=16_384, worker_hours=50_000.0, every=60.0 * (1 + setting), reaction="restart")
        for seed in range(20):
            simulate(team, DAY, seed)
    results["100 settings x 20 seeds, 16,384 workers"] = {"seconds": time.perf_counter() - began}
    print(f"100 settings x 20 seeds of 16,384 workers: {time.perf_counter() - began:.2f} s")
    if options.record:
        record(options.record, results=results)


if __name__ == "__main__":
    main()
