"""Where workers stand: the flight recorder, `paceline stacks` on a run that goes on, what a dead worker leaves."""

from __future__ import annotations

import gzip
import json
import mmap
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from agents import journal, until
from clusters import worker_of
from launching import paceline
from warm import Process, environment

from paceline.base.flight_recorder import KEPT, SIZE, FlightRecorder, flight_lines, read_flight
from paceline.base.heartbeat import BEHIND, PAGE, HeartbeatView
from paceline.base.stacks import read_within
from paceline.errors import FormatError
from paceline.team.stack_requests import MOST, PACKED, StackRequests, packed, table, unpacked


def flight_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Whose it is, and its collectives."""
    return [json.loads(line) for line in (folder / "stacks" / f"{name}.jsonl").read_text().splitlines()]


# ---- the recorder


def test_the_last_collectives_are_kept_and_read_from_the_memory_of_both() -> None:
    view = HeartbeatView()
    flight = FlightRecorder()
    flight.take(memoryview(mmap.mmap(view.fd, BEHIND))[PAGE : PAGE + SIZE])
    assert view.flight == []
    turns = [flight.begin("team", n, f"step {n} ä" + "x" * 100, "train.py:3", 8 * n) for n in range(1, 2501)]
    for turn in turns[::-1]:  # those of the first 1,500, too, whose places others have
        if turn % 3:
            flight.end(turn, well=turn % 3 == 1)
    kept = view.flight
    assert [record["number"] for record in kept] == [*range(2501 - KEPT, 2501)]
    for record in kept:
        turn = record["turn"]
        assert (record["name"][:12], record["bytes"]) == (f"step {turn} äxxxxx"[:12], 8 * turn)
        assert (record["ended"] is None, record.get("failed", False)) == (turn % 3 == 0, turn % 3 == 2)
        assert record["ended"] is None or record["begun"] <= record["ended"] <= record["begun"] + 60
    assert len(flight_lines({}, kept).splitlines()) == KEPT + 1
    flight.take(memoryview(mmap.mmap(view.fd, BEHIND))[PAGE : PAGE + SIZE])  # another program of the same worker
    assert view.flight == []
    view.close()
    assert read_flight(bytes(SIZE)) == []


def test_a_request_for_stacks_does_not_end_a_process_whose_interpreter_has_forgotten_the_handler() -> None:
    """As it does when it ends, while the agent still looks for a worker that does nothing."""
    view = HeartbeatView()
    code = (
        "import faulthandler, os\n"
        "from paceline.base.heartbeat import HEARTBEAT, SIGNAL\n"
        "HEARTBEAT.take()\n"
        "assert faulthandler.unregister(SIGNAL)\n"
        "os.kill(os.getpid(), SIGNAL)\n"
        "print('still here')"
    )
    env = {**os.environ, "PACELINE_PULSE_FD": str(view.fd)}
    done = subprocess.run([sys.executable, "-c", code], env=env, pass_fds=[view.fd], capture_output=True, text=True)
    view.close()
    assert (done.returncode, done.stdout) == (0, "still here\n")


def test_in_whose_code_a_stack_stands() -> None:
    ours, theirs = '  File "{}/run.py", line 3 in made\n', '  File "/home/me/train.py", line 4 in loss\n'
    ours = ours.format(Path(sys.modules["paceline"].__file__ or "").parent)
    torchs = '  File "/usr/lib/python3/site-packages/torch/x.py", line 5 in relu\n'
    head = "Thread 0x1 (most recent call first):\n" + torchs + "\nCurrent thread 0x2 (most recent call first):\n"
    assert read_within(head + theirs + ours) == ""
    assert read_within(head + torchs + theirs + ours) == ""  # the user's own call
    assert read_within(head + torchs + ours + torchs + ours + theirs) == "made (run.py)"
    assert read_within(head + torchs + ours) == "made (run.py)"
    assert read_within("no stack") == ""


# ---- what agents answer


def test_the_coordinator_takes_answers_of_workers_alone(tmp_path: Path) -> None:
    stands = StackRequests(tmp_path)
    stands.ask(["a", "b"])
    worker = {"asked": stands.asked, "worker": 3, "name": "worker-3", "files": packed("stack", "{}\n"), "newest": {}}
    for name in ("../../etc/passwd", "worker-3/../x", "worker-", "worker-3\n"):
        with pytest.raises(FormatError, match="not the name of a worker"):
            stands.take("a", {**worker, "name": name})
    with pytest.raises(FormatError, match="while decompressing data"):
        stands.take("a", {**worker, "files": ["AAAA", "AAAA"]})
    stands.take("a", {**worker, "asked": stands.asked - 1, "name": "worker-4"})  # an answer to another question
    stands.take("a", {"asked": stands.asked, "last": True})
    assert not (tmp_path / "stacks").exists()
    stands.take("b", worker)
    assert (stands.answer()["waits"], [*stands.answer()["workers"]]) == (["b"], [3])
    assert (tmp_path / "stacks" / "worker-3.txt").read_text() == "stack"
    before = stands.asked
    stands.ask([])
    assert stands.asked > before
    assert stands.answer()["workers"] == {}


def test_what_is_too_large_to_be_told_has_its_beginning_and_end() -> None:
    noise = "".join(f"{n * 2654435761 % 2**32:08x}" for n in range(60_000))
    texts = "first " + noise + " last", "a" * 3 * MOST
    ways = packed(*texts)
    assert max(map(len, ways)) <= PACKED * 4 / 3 + 4
    cut, limited = unpacked(ways)
    assert (cut[:6], cut[-5:], "\n...\n" in cut) == ("first ", " last", True)
    assert limited == "a" * MOST


def test_workers_at_the_same_place_share_a_line() -> None:
    waits = {"state": "waiting in step 3", "place": "x.py:1", "at": 10.0, "group": "team", "number": 7}
    told = {str(n): {**waits, "since": 9.0 - n, "newest": {"team": 7}} for n in (0, 1, 3)}
    told["2"] = {"state": "in user code", "place": "x.py:9", "at": 10.0, "since": None, "group": None, "number": None}
    told["2"]["newest"] = {"team": 6}
    assert table(told) == [
        "worker 2        in user code at x.py:9",
        "workers 0-1, 3  waiting in step 3 for 4.0 s at x.py:1; worker 2 has not reached it",
    ]


# ---- runs

STANDS = """
from basics import *
import os, time
rank = int(os.environ["PACELINE_RANK"])
def loss(o, b):
    if rank == 4 and os.path.exists("stand"):
        open("stands", "w").close()
        while not os.path.exists("go"): pass
    return F.cross_entropy(o, b[1])
t = make(loss)
for report in t.steps(data, count=10**6 if not os.path.exists("go") else 1):
    time.sleep(0.01)
    if os.path.exists("go"):
        t.stop()
"""


def test_stacks_and_profiles_of_a_run_that_goes_on_from_all_its_agents(tmp_path: Path) -> None:
    """Five workers of two agents; the one in the user's code computes without ever letting the interpreter go."""
    (tmp_path / "train.py").write_text(STANDS)
    run = [sys.executable, "-m", "paceline", "run", "--quiet", "--hang-timeout", "0"]
    begun = [*run, "--workers", "3", "--shares", "1,1,1", "--run-dir", "out", "train.py"]  # all have rows
    first = Process(begun, environment(), cwd=tmp_path, stderr=PIPE)
    until(lambda: (tmp_path / "out" / "coordinator.json").exists())
    joined = Process([*run, "--workers", "2", "--join", "out", "train.py"], environment(), cwd=tmp_path, stderr=PIPE)
    until(lambda: any(len(event["workers"]) == 5 for event in journal(tmp_path / "out", "formed")))  # type: ignore[arg-type]
    said = paceline("stacks", "out", cwd=tmp_path).stdout.splitlines()  # whatever they do just now
    assert (said[0], said[-1]) == ("5 workers:", "all stacks and last collectives: out/stacks")
    done = paceline("profile", "out", "--steps", "2", "--workers", "0,4", cwd=tmp_path)  # of both agents
    assert done.stderr == "profiling 2 steps of workers 0, 4\n"
    for number, path in zip((0, 4), done.stdout.splitlines(), strict=True):
        assert re.fullmatch(rf"out/profiles/\d+/worker-{number}\.json\.gz", path)
        names = [
            event.get("name") for event in json.loads(gzip.decompress((tmp_path / path).read_bytes()))["traceEvents"]
        ]
        steps = [int(name[5:]) for name in names if re.fullmatch(r"step \d+", str(name))]
        assert steps == [steps[0], steps[0] + 1]
        assert names.count("aten::linear") >= 4
    said = paceline("profile", "out", "--workers", "1,9", cwd=tmp_path, code=2).stderr
    what = r"the run has workers 0-4, but not worker 9; see the console of the run"
    assert re.fullmatch(rf"paceline: the run at \S+ cannot be profiled: {what}\n", said)
    (tmp_path / "stand").touch()
    until((tmp_path / "stands").exists)

    def stand() -> list[str]:
        where = json.loads((tmp_path / "out" / "coordinator.json").read_text())
        address = f"{where['host']}:{where['port']}"
        said = paceline("stacks", address, "--token-file", "out/token", cwd=tmp_path).stdout.splitlines()
        assert said[-1] == f"all stacks and last collectives: {tmp_path / 'out' / 'stacks'} on {where['host']}"
        return said[1:-1]

    one = re.escape('worker 4     in user code at train.py:8 in loss: while not os.path.exists("go"): pass')
    others = r"workers 0-3  waiting in step (\d+) for [\d.]+ s at .*; worker 4 has not reached it"
    found = until(lambda: re.fullmatch(rf"{one}\n{others}", "\n".join(stand())))  # the others have come there
    left = {worker: flight_of(tmp_path / "out", f"worker-{worker}") for worker in range(5)}
    last = left[0][-1]["number"]
    for worker, (about, *flight) in left.items():
        assert (about["worker"], about["life"]) == (worker, 0)
        assert about["pid"] == worker_of(tmp_path / "out", worker) or worker > 2
        own = [(record["number"], record["name"], record["bytes"]) for record in flight if record["group"] == "team"]
        assert own[-30:-3] != []
        open_ = [record["name"] for record in flight if record["ended"] is None]
        assert {*open_} == ({f"step {found[1]}"} if worker < 4 else set())
        stacks = (tmp_path / "out" / "stacks" / f"worker-{worker}.txt").read_text()
        assert ("line 8 in loss" in stacks) is (worker == 4)
        assert len(flight) <= KEPT
    names = [{record["number"]: record["name"] for record in flight} for _, *flight in left.values()]
    alike = [name[number] for number in [*names[4]][-10:] if number for name in names]
    assert alike == [name for name in alike[::5] for _ in names], "the same number, another name"
    (tmp_path / "go").touch()
    for process in (first, joined):
        _, text = process.communicate(timeout=120)
        assert process.returncode == 0, text
    (_, *after) = flight_of(tmp_path / "out", "worker-0")  # written again at the end
    assert after[-1]["number"] > last
    assert [record for record in after if record["ended"] is None] == []
    said = paceline("stacks", "out", cwd=tmp_path, code=2).stderr
    assert re.search(
        r"^paceline: no run answers at \S+ \(Connection refused\); if the run has ended, `paceline report RUN` shows",
        said,
    )


def test_a_dead_worker_leaves_its_last_collectives(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STANDS.replace("rank == 4", "rank == 1").replace("while not", "while 1 or not"))
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--run-dir", "out", "--max-restarts", "0"]
    run = Process([*command, "--shares", "1,1", "train.py"], environment(), cwd=tmp_path, stderr=PIPE)
    until(lambda: (tmp_path / "out" / "journal.jsonl").exists() and bool(journal(tmp_path / "out", "step")))
    (tmp_path / "stand").touch()
    until((tmp_path / "stands").exists)
    os.kill(worker_of(tmp_path / "out", 1), signal.SIGKILL)
    _, said = run.communicate(timeout=120)
    assert (run.returncode, "worker 1 failed (host " in said) == (137, True), said
    (about, *flight), (_, *other) = (flight_of(tmp_path / "out", f"worker-{worker}") for worker in (1, 0))
    assert about["worker"] == 1
    assert all(record["ended"] for record in flight), "it was in the user's code"
    assert other[-1]["number"] > flight[-1]["number"]
    assert other[-1]["ended"] is None or other[-1]["failed"] is True, "it waited when it was ended, or had heard why"
