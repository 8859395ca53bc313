"""How long all workers need to train again after the loss of a host: from copies in memory, and from a disk.

Usage: mirrors.py [--plans PLAN ...] [--wide N] [--turns N] [--record FILE], as root. Four hosts, each a network
namespace, with two workers each, under a plan that needs all of them. In the midst of training all processes of a host
are killed; the launcher starts an agent there again. Both ways take turns: `--mirror 1`, and `--save-every 1` with a
folder that all hosts share. The seconds are those of the journal, from the loss to the first step that all workers
have come to; 5 of them pass before the launcher tries the host again. What was lost is the number of steps that were
computed again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from turns import record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from host_teams import HostTeam
from networks import network

WAYS = {"memory": ("--mirror", "1"), "disk": ("--save-every", "1")}


def lose(plan: str, way: str, wide: int, workers: int) -> dict[str, float]:
    """The seconds and the repeated steps of one loss, in a run of its own."""
    with tempfile.TemporaryDirectory() as folder, network(5, Path(folder)) as net:
        team = HostTeam(net, Path(folder), [workers] * 4)
        try:
            team.start(plan, *WAYS[way], WIDE=str(wide))
            team.until_step(6)
            team.lose(1)
            team.end()
        finally:
            team.close()
        (recovered,) = team.events("recovered")
        start = team.events("start")[-1]
        return {"seconds": recovered["seconds"], "again": team.events("lost")[0]["step"] - start["resumed_from"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=["shard=8 zero=3 micro=2 exact", "pipeline=4 micro=2 exact"])
    parser.add_argument(
        "--wide", type=int, default=8192, help="width of the model's blocks: 0.13 MB of state for each 256"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    options = parser.parse_args()
    results = []
    for plan in options.plans:
        workers = 1 if plan.startswith("pipeline=4") else 2
        losses: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(options.turns):
            for way in WAYS:
                losses[way].append(lose(plan, way, options.wide, workers))
        for way, each in losses.items():
            seconds, again = (statistics.median(loss[name] for loss in each) for name in ("seconds", "again"))
            results.append({"plan": plan, "way": way, "seconds": seconds, "steps again": again, "losses": each})
            print(f"{plan:32} {way:7} {seconds:6.1f} s, {again:.0f} steps computed again", flush=True)
    if options.record:
        record(options.record, wide=options.wide, threads=1, results=results)


if __name__ == "__main__":
    main()
