"""Seconds that the loss of a worker costs: from the fault to the next step that the team does, less that step.

Usage: losses.py [--losses N] [--sides NAME ...] [--record FILE]. Six workers with a loader process each train a small
model; one of them is lost every few seconds, killed or stopped, and comes back. As root also two hosts (network
namespaces) with three workers each, of which one is cut off and comes back. Of a parameter server with a copy, of three
beside three workers, likewise. Beside it torchrun restarts the same loop,
without loader processes, after one kill in each of as many runs: as its documentation has it, and with a part of the
store for each attempt. What has not gone on after half a minute counts as hung. The work since torchrun's checkpoint,
which it does again, comes on top.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import small
from turns import record

from paceline.base.environment import SERVERS
from paceline.base.journal import read_journal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from networks import network

WORKERS, APART = 6, 150  # steps between two losses: the one before has come back by then
HUNG = 30.0


def gaps(done: dict[int, float], faults: list[float]) -> list[float]:
    """For each fault, the seconds to the first step that anybody had done after it, less a usual step. Infinite where
    nobody went on.
    """
    ends = sorted(done.values())
    usual = statistics.median(after - before for before, after in pairwise(ends))
    return [min((end for end in ends if end > fault), default=math.inf) - fault - usual for fault in faults]


def lose(kind: str, losses: int, servers: int = 0) -> list[float]:
    whom, when = [(5 * number) % WORKERS for number in range(losses)], "backward"
    plan, workers = list[str](), WORKERS
    if servers:
        whom, when = [SERVERS + number % servers for number in range(losses)], "reduced"
        plan, workers = ["--plan", f"server={servers} copies=1"], WORKERS - servers
    text = ",".join(f"{kind}:{who}@{APART * (number + 1)}.{when}" for number, who in enumerate(whom))
    with tempfile.TemporaryDirectory() as folder:
        out, run = Path(folder), Path(folder, "run")
        options = ["--workers", str(workers), "--run-dir", str(run), "--max-restarts", str(losses), "--quiet", *plan]
        os.environ["PACELINE_CHAOS"] = text
        process = small.start("paceline", out, APART * (losses + 1), options, loaders=1)
        del os.environ["PACELINE_CHAOS"]
        if process.wait(600) != 0:
            raise SystemExit(f"the run with {text} failed")
        fired = [json.loads(line)["at"] for line in (run / "chaos.jsonl").read_text().splitlines()]
        return gaps(small.times(out), fired)


def cut(losses: int) -> list[float]:
    """The second host's cable is pulled, in the midst of a step or between two."""
    faults = []
    with tempfile.TemporaryDirectory() as folder, network(2, Path(folder)) as net:
        out, run = Path(folder), Path(folder, "run")
        options = [["--listen", "10.77.0.1:29400", "--run-dir", str(run)]]
        options.append(["--join", "10.77.0.1:29400", "--token-file", str(run / "token")])
        steps, processes = 100_000, []

        def members() -> int:
            formed = [event for event in read_journal(run) if event["event"] == "formed"] if run.exists() else []
            return len(formed[-1]["workers"]) if formed else 0

        for host, more in zip(net.hosts, options, strict=True):
            command = small.command("paceline", out, steps, ["--workers", "3", "--quiet", *more], loaders=1)
            processes.append(
                subprocess.Popen(host.command(*command), cwd=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
            )
            while len(small.times(out)) < 20:
                time.sleep(0.1)
        for _ in range(losses):
            while members() < WORKERS:
                time.sleep(0.1)
            time.sleep(2.0)
            net.hosts[1].cut()
            faults.append(time.time())
            while members() == WORKERS:
                time.sleep(0.1)
            time.sleep(1.0)
            net.hosts[1].mend()
        for process in reversed(processes):
            process.terminate()
            process.wait()
        return gaps(small.times(out), faults)


def torchrun(role: str, losses: int) -> list[float]:
    found = []
    for _ in range(losses):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            options = ["--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "3"]
            process = small.start(role, out, 1_000_000, options)
            while len(small.times(out)) < 50:
                time.sleep(0.05)
            before = {path.name for path in out.glob("*.times")}
            fault = time.time()
            os.kill(int((out / "3.pid").read_text()), signal.SIGKILL)
            while time.time() - fault < HUNG and not (after := again(out, before)):
                time.sleep(0.1)
            found.append(min(after, default=math.inf) - fault - small.PAUSE)
            small.end(process)
    return found


def again(out: Path, before: set[str]) -> list[float]:
    """When workers that were started since had done their first step."""
    said = [path.read_text().split() for path in out.glob("*.times") if path.name not in before]
    return [float(words[1]) for words in said if len(words) > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=11)
    parser.add_argument("--sides", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    options = parser.parse_args()
    sides = {"killed": partial(lose, "kill"), "stopped": partial(lose, "stop")}
    sides |= {
        f"server {how}": partial(lose, kind, servers=3) for kind, how in (("kill", "killed"), ("stop", "stopped"))
    }
    sides |= {"host cut off": cut} if os.geteuid() == 0 else {}
    peers = {"torchrun": partial(torchrun, "ddp"), "torchrun, own store": partial(torchrun, "ddp-prefix")}
    results = {}
    for name, side in (sides | peers).items():
        if options.sides and name not in options.sides:
            continue
        found = side(options.losses)
        went_on = [seconds for seconds in found if seconds < math.inf]
        hung = f", {len(found) - len(went_on)} hung" if len(went_on) < len(found) else ""
        much = f": median {statistics.median(went_on):.3f} s, most {max(went_on):.3f} s" if went_on else ""
        print(f"{name:20} {len(found)} losses{much}{hung}", flush=True)
        results[name] = {"went on": went_on, "hung": len(found) - len(went_on)}
    if options.record:
        record(options.record, workers=WORKERS, threads=1, pause=small.PAUSE, results=results)


if __name__ == "__main__":
    main()
