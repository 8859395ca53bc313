"""`paceline trace`: read back, it is what Perfetto wants, and has all workers on one clock."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import journal
from clusters import Cluster
from clusters import cluster as cluster
from launching import paceline
from networks import hosts as hosts

from paceline.observe.timeline import Timeline
from paceline.team.coordinator_client import CoordinatorClient

SCRIPT = """
from basics import *
import time
t = make()
for report in t.steps(data, count=30):
    time.sleep(0.02)
"""


def nanoseconds(microseconds: float) -> int:
    return round(1000 * microseconds)


def checked(events: list[dict[str, Any]]) -> dict[int, str]:
    """What must be so of every trace; the names of its processes."""
    lanes, flows = defaultdict(list), defaultdict(list)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert times[0] == 0
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
            assert event["dur"] >= 0
        elif event["ph"] in "stf":
            flows[event["id"]].append(event)
        if event["ph"] != "M":
            assert event["pid"] in names
            assert (event["pid"], event["tid"]) in threads
    for spans in lanes.values():  # the outer ones first
        open_: list[int] = []
        for span in spans:
            begin, end = nanoseconds(span["ts"]), nanoseconds(span["ts"]) + nanoseconds(span["dur"])
            while open_ and open_[-1] <= begin:
                open_.pop()
            assert not open_ or end <= open_[-1], span
            open_.append(end)
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", *["t"] * (len(flow) - 2), "f"]
        assert flow[-1]["bp"] == "e"
        assert len({event["pid"] for event in flow}) == len(flow) > 1
        for event in flow:  # each is bound to a span that begins there
            ends = lanes[event["pid"], event["tid"]]
            assert any(span["ts"] == event["ts"] and span["name"] == event["name"] for span in ends)
    return names


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.name.endswith(".gz") else path.open() as file:
        return list(json.load(file)["traceEvents"])


def test_a_run_with_a_loss_on_one_clock(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    faults = {"PACELINE_CHAOS": "kill:1@12.backward"}
    paceline("run", "--workers", "3", "--run-dir", "out", "--save-every", "10", "train.py", cwd=tmp_path, **faults)
    (lost,) = journal(tmp_path / "out", "lost")
    said = paceline("trace", "out", cwd=tmp_path).stdout
    events = read(tmp_path / "out" / "trace.json.gz")
    spans = [event for event in events if event["ph"] == "X"]
    assert said == (f"out/trace.json.gz: {len(spans):,} spans of 3 workers; open it at https://ui.perfetto.dev\n")
    host = journal(tmp_path / "out", "worker")[0]["host"]
    assert checked(events) == {0: "run", **{worker + 1: f"worker {worker} ({host})" for worker in range(3)}}
    happened = {event["name"] for event in events if event["ph"] == "i"}
    assert {"lost", "formed", "finished", "worker 1 lost"} <= happened
    assert {f"checkpoint of step {step}" for step in (10, 20, 30)} <= {span["name"] for span in spans}
    zero = (
        min(e["at"] for e in journal(tmp_path / "out", "worker"))
        - min(event["ts"] for event in events if event["cat" if event["ph"] != "M" else "ph"] == "worker") / 1e6
    )
    (seen,) = (event["ts"] / 1e6 + zero for event in events if event["name"] == "lost")
    assert abs(seen - float(str(lost["at"]))) < 1e-3
    records = journal(tmp_path / "out", "step")
    whole = [span for span in spans if span["cat"] == "step" and span["pid"] == 1]
    assert sum(span["args"]["steps"] for span in whole) == sum(int(str(record["steps"])) for record in records) == 30
    parts = {span["name"] for span in spans if span["cat"] == "part" and span["pid"] == 1}
    assert {"data", "compute", "reduce", "update"} <= parts
    ties = [event for event in events if event["ph"] == "s"]
    named = {event["name"] for event in ties}
    assert {f"step {step}" for step in (2, 11, 13, 29)} <= named, "before the loss and after it"
    for before in (f"step {step}" for step in (2, 5, 9)):  # all three were there
        ids = {event["id"] for event in ties if event["name"] == before}
        assert {sum(event.get("id") == one for event in events) for one in ids} == {3}
    paceline("trace", "out", "-o", "some.json", "--steps", "20:25", cwd=tmp_path)
    some = read(tmp_path / "some.json")
    checked(some)
    kept = {int(e["args"]["steps"]) for e in some if e.get("cat") == "step"}
    assert kept
    assert 0 < len(some) < len(events)
    for words, why in {
        ("--steps", "x"): "--steps x is not a range of steps; use A:B, for example 100:120, 100: or :120",
        ("--steps", "90:"): "the journal has no step in the range 90:; `paceline report` shows the number of steps",
    }.items():
        assert paceline("trace", "out", *words, cwd=tmp_path, code=2).stderr == f"paceline: {why}\n"


def test_a_number_of_another_generation_ties_nothing() -> None:
    def of(worker: int, *begun: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        record = {"turn": 1, "group": "team", "number": 4, "name": "step 1", "site": "", "bytes": 8}
        return {"worker": worker, "host": f"h{worker}", "at": 50.0}, [
            {**record, "begun": at, "ended": None if at == 40.0 else at + 1} for at in begun
        ]

    clock = {"event": "clock", "at": 1.0, "host": "h1", "offset": -100.0, "error": 0.1, "workers": [1]}
    made = Timeline([clock], [of(0, 10.0, 20.0, 40.0), of(1, 110.5, 140.5), of(2, 20.25)])
    events = made.events(0.0, float("inf"))
    assert checked(events) == {0: "run", 1: "worker 0 (h0)", 2: "worker 1 (h1)", 3: "worker 2 (h2)"}
    tied = sorted((event["id"], event["pid"], event["ts"] / 1e6) for event in events if event["ph"] in "stf")
    assert tied == [(0, 1, 0.0), (0, 2, 0.5), (1, 1, 10.0), (1, 3, 10.25), (2, 1, 30.0), (2, 2, 30.5)]
    assert [event["args"]["ended"] for event in events if "ended" in event.get("args", {})] == ["not yet"]
    cut = made.events(0.0, 11.2)  # in the midst of one, which is left out with what ties it
    checked(cut)
    assert [(event["ph"], event["pid"]) for event in cut if event["ph"] != "M"] == [("X", 1)]


def test_what_another_hosts_clock_says_is_known_to_an_error() -> None:
    """For any delays on the way, also unequal ones, and clocks that are far apart."""
    draw = random.Random(5)
    for truth in (0.0, 3.7, -7200.0):
        link = CoordinatorClient(("127.0.0.1", 1), b"", {})
        assert link.clock is None
        link._set_clock(1.0, None, 2.0)  # a coordinator that does not say
        now = 1e9
        for _ in range(100):
            out, held, back = (draw.expovariate(1 / mean) for mean in (0.01, 0.002, 0.05))
            came, left = now + out + truth, now + out + held + truth
            link._set_clock(now, (came, left), now + out + held + back)
            assert link.clock is not None
            offset, error = link.clock
            assert abs(offset - truth) <= error + 1e-6
            now += 0.25
        assert error < 0.01


@pytest.mark.slow
@pytest.mark.root
def test_two_hosts(cluster: Callable[[int], Cluster]) -> None:
    """Both are on this machine's clock, so that the true offset is none."""
    made = cluster(2)
    made.spread(2, 1)
    made.until(lambda: made.agents[0].events("clock"))
    first, folder = made.network.hosts[0], made.agents[0].folder
    command = first.command(sys.executable, "-m", "paceline", "stacks", folder)
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert said[0] == "3 workers:"
    assert {path.name for path in (folder / "stacks").glob("*.txt")} == {f"worker-{n}.txt" for n in range(3)}
    for event in made.agents[0].events("clock"):
        assert (event["host"], event["workers"]) == (made.network.hosts[1].inside[2], [2])
        assert abs(event["offset"]) <= event["error"] < 1.0
    paceline("trace", folder, cwd=made.folder)
    events = read(folder / "trace.json.gz")
    here, there = (host.inside[2] for host in made.network.hosts)
    names = {1: f"worker 0 ({here})", 2: f"worker 1 ({here})", 3: f"worker 2 ({there})"}
    assert checked(events) == {0: "run", **names}
    tied = defaultdict(set)
    for event in events:
        if event["ph"] in "stf":
            tied[event["id"]].add(event["pid"])
    assert {1, 2, 3} in tied.values()
    made.end(0, 0)
