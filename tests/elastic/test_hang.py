"""Code of the user's that never returns: its line is named, its worker ended, and others go on."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from agents import journal, until
from launching import paceline, stderr_of
from warm import Process, environment

TELLS, ENDS = 2, 3  # seconds after which a worker is told of, and ended; more where steps are slow
ONCE = """
import glob, os, threading, time
rank = int(os.environ["PACELINE_RANK"])
lock = threading.Lock()
def hangs(worker, step):
    if "HANG" not in os.environ or rank != worker or t.steps_done < step or os.path.exists(f"hung-{worker}"):
        return False
    open(f"hung-{worker}", "w").close()
    return True
"""
PLACES = f"""{ONCE}
class Net(nn.Sequential):
    def forward(self, rows):
        if hangs(1, 3):
            lock.acquire()
            lock.acquire()  # twice
        return super().forward(rows)
class Rows:
    def __len__(self):
        return len(data)
    def __getitem__(self, row):
        if hangs(2, 9):
            time.sleep(603)
        return data[row]
def loss(o, b):
    if hangs(0, 3):
        time.sleep(600)
    return F.cross_entropy(o, b[1])
t = make(loss, lambda: Net(*net()))
for report in t.steps(Rows(), count=14, loader={{"num_workers": 0}}):
    if hangs(3, 9):
        time.sleep(604)
t.export("out.safetensors")
"""
STANDS = {  # by worker: its line, and the function
    0: ("time.sleep(600)", "loss"),
    1: ("lock.acquire()  # twice", "forward"),
    2: ("time.sleep(603)", "__getitem__"),
    3: ("time.sleep(604)", "<module>"),
}
PATIENCE = {"HANG": "1", "PACELINE_STANDSTILL": str(TELLS)}


def trained(folder: Path, body: str, workers: int, *options: str, code: int = 0, **env: str) -> str:
    """What is said on the console."""
    (folder / "train.py").write_text("from basics import *\n" + body)
    command = ("run", "--workers", str(workers), "--run-dir", "out", *options, "train.py")
    return paceline(*command, cwd=folder, code=code, **env).stderr


def place(folder: Path, source: str, function: str) -> str:
    lines = (folder / "train.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.strip() == source)
    return f"train.py:{number} in {function}"


def waited(folder: Path, ended: bool) -> dict[object, list[str]]:
    """By worker, after how many seconds it was told of, or ended: at least as many as were asked for."""
    found: dict[object, list[str]] = {}
    for event in (event for event in journal(folder / "out", "hang") if event["ended"] is ended):
        seconds = event["seconds"]
        assert isinstance(seconds, float)
        assert seconds >= (ENDS if ended else TELLS)
        found.setdefault(event["worker"], []).append(f"{seconds:.0f} s")
    return found


def block_of(stderr: str) -> list[str]:
    """The failure block but for what the worker wrote."""
    (block,) = re.findall(r"^worker \d+ failed \(host.*\Z", stderr, re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\(host \S+, pid \d+", "(host H, pid P", block).strip().splitlines()
    return [line for line in lines if not line.startswith(("  |", "the end of "))]


def test_hang_is_reported_with_its_line_and_the_worker_is_replaced(tmp_path: Path) -> None:
    """In the loss by a sleep and in the model by a lock in one step; in a dataset and in the loop's body in another."""
    plan = ("--plan", "exact micro=3")
    one = tmp_path / "one"
    one.mkdir()
    trained(one, PLACES, 1, *plan)
    said = trained(tmp_path, PLACES, 4, *plan, "--hang-timeout", str(ENDS), **PATIENCE)
    assert (tmp_path / "out.safetensors").read_bytes() == (one / "out.safetensors").read_bytes()
    told, ended = waited(tmp_path, ended=False), waited(tmp_path, ended=True)
    assert {*ended} == {*STANDS} >= {*told} > set()  # where steps are as slow as that, it is ended at once
    begun = [event for event in journal(tmp_path / "out", "worker") if event["what"] == "started"]
    again = {event["worker"] for event in begun if event["life"]}  # the last steps may end before a worker is back
    assert again
    for worker, (source, function) in STANDS.items():
        line, log = place(tmp_path, source, function), f"out/logs/worker-{worker}.log"
        at = f"waiting at {line}: {source}\n  all its stacks: {log}\n"
        for seconds in told.get(worker, []):
            assert f"\nworker {worker} has made no progress for {seconds}: {at}" in said
        lost = f"\nworker {worker} hung at {line} for {ended[worker][0]}: "
        goes = ["3 workers go on", "2 workers go on", "1 worker goes on"]  # fewer: others hang as long, or are not back
        assert any(f"{lost}{left}\n  waiting: {source}\n" in said for left in goes), said
        assert f", line {line.partition(' ')[0].partition(':')[2]} in {function}\n" in (tmp_path / log).read_text()
        files = [path.name for path in (tmp_path / "out" / "stacks").glob(f"worker-{worker}.*")]
        lives = ["", ".1"] if worker in again else [""]
        assert {f"worker-{worker}.txt", *(f"worker-{worker}{life}.jsonl" for life in lives)} <= {*files}
    lines = {(event["worker"], event["line"], event["busy"]) for event in journal(tmp_path / "out", "hang")}
    assert lines == {(w, f"{place(tmp_path, s, f)}: {s}", False) for w, (s, f) in STANDS.items()}


LOADERS = f"""{ONCE}
import subprocess
class Rows:
    def __len__(self):
        return len(data)
    def __getitem__(self, row):
        if rank == 1 and "HANG" in os.environ and os.path.exists("later") and not os.path.exists("hung"):
            open("hung", "w").close()
            time.sleep(599)
        return data[row]
other = subprocess.Popen(["sleep", "600"])
t = make()
for report in t.steps(Rows(), count=20, loader={{"num_workers": 2, "prefetch_factor": 1}}):
    if report.step == 3:
        open("later", "w").close()
if rank == 0:
    print(f"the other process {{other.poll()}}")
other.kill()
"""


@pytest.mark.slow
def test_hang_of_a_loader_process_is_reported_with_its_own_line(tmp_path: Path) -> None:
    """And no process gets the signal that has not said so: the sleep in the same session would end by it."""
    said = trained(tmp_path, LOADERS, 2, "--hang-timeout", str(ENDS), **PATIENCE)
    line = place(tmp_path, "time.sleep(599)", "__getitem__")
    (told, *_), (ended,) = waited(tmp_path, ended=False)[1], waited(tmp_path, ended=True)[1]
    stands = (
        rf"waiting in its loader process (\d+) at {line}: time\.sleep\(599\)\n  all its stacks: out/logs/worker-1\.log"
    )
    loader = re.findall(rf"^worker 1 has made no progress for {told}: {stands}$", said, re.M)[0]
    log = (tmp_path / "out" / "logs" / "worker-1.log").read_text()
    own = log.partition(f"process {loader}:\n")[2].partition("\n\nprocess ")[0]
    assert f", line {line.partition(' ')[0].partition(':')[2]} in __getitem__\n" in own
    assert re.search(r"^process \d+:\nno stack$", log, re.M), "the sleep was looked at"
    doing = f"waiting in its loader process {loader}: time.sleep(599)"
    assert f"\nworker 1 hung at {line} for {ended}: 1 worker goes on\n  {doing}\n" in said


TWICE = """
import glob, os, time
def loss(o, b):
    if "HANG" in os.environ and t.steps_done >= 4 and (b[0] == x[13]).all(1).any():
        time.sleep(600)
    return F.cross_entropy(o, b[1])
t = make(loss)
list(t.steps(data, count=12))
"""


@pytest.mark.slow
def test_hang_at_the_same_line_twice_ends_the_run(tmp_path: Path) -> None:
    """The rows that led there lead there again."""
    options = ("--plan", "exact micro=3", "--hang-timeout", str(ENDS), "--save-every", "2")
    body = TWICE.replace("t.steps_done >= 4", "glob.glob('out/checkpoints/*/manifest.json')").replace("=12", "=10**6")
    said = trained(tmp_path, body, 3, *options, code=1, **PATIENCE)
    line = place(tmp_path, "time.sleep(600)", "loss")
    first, second = (event["worker"] for event in journal(tmp_path / "out", "hang") if event["ended"])
    low, high = sorted((first, second))
    after = waited(tmp_path, ended=True)
    (other,) = {0, 1, 2} - {first, second}
    lost = f"\nworker {first} hung at {line} for {after[first][0]}: 2 workers go on\n"
    assert f"{lost}  waiting: time.sleep(600)\n" in said
    then = "paceline run --workers 3 --run-dir out --plan 'exact micro=3' --save-every 2 train.py"
    block = block_of(said)
    assert re.fullmatch(rf"worker {low} failed \(host H, pid P, after step \d+\)", block[0])
    assert block[1] == f"  hung at {line} for {after[low][0]}, waiting: time.sleep(600)"
    assert block[2].startswith(f"worker {high} failed ")  # in the same way, unless it took some seconds more
    assert re.search(rf"\b{other}\b", block[3].removeprefix("Paceline stopped the others: "))
    assert block[4] == "logs: out/logs/"
    next_of = f"next: find out why it waits; all its stacks are in its log; then run `{then}`: it continues from step "
    assert re.fullmatch(re.escape(next_of) + r"\d+", block[5])


@pytest.mark.slow
def test_hang_ends_a_run_of_one_worker_or_one_that_survives_no_loss(tmp_path: Path) -> None:
    for workers, options, source, doing, why in (
        (1, (), "while True: pass", "busy", "find out why it does not finish"),
        (2, ("--max-restarts", "0"), "time.sleep(600)", "waiting", "find out why it waits"),
    ):
        folder = tmp_path / str(workers)
        folder.mkdir()
        early = "time.sleep(0.9)\n        " if doing == "busy" else ""  # what it does is measured over the second half
        body = TWICE.replace("time.sleep(600)", early + source)
        said = trained(folder, body, workers, "--hang-timeout", str(ENDS), *options, code=1, **PATIENCE)
        line = place(folder, source, "loss")
        block = block_of(said)
        (seconds,) = waited(folder, ended=True).popitem()[1]
        reported = waited(folder, ended=False)  # none where steps are as slow as that: it is ended at once
        for worker, times in reported.items():
            assert f"worker {worker} has made no progress for {times[0]}: {doing} at {line}: {source}\n" in said
        assert block[1] == f"  hung at {line} for {seconds}, {doing}: {source}"
        next_of = f"next: {why}; all its stacks are in its log; then run `paceline run --workers {workers} "
        assert block[-1].startswith(next_of)


@pytest.mark.slow
def test_hang_before_the_first_step_ends_the_run(tmp_path: Path) -> None:
    """It has twice the time; nobody can tell whether it ever works, and so it ends the run."""
    body = f"{ONCE}if rank == 1:\n    time.sleep(600)\nt = make()\nlist(t.steps(data, count=3))\n"
    said = trained(tmp_path, body, 2, "--hang-timeout", str(ENDS), code=1, **PATIENCE)
    line = place(tmp_path, "time.sleep(600)", "<module>")
    told = f"worker 1 has made no progress for {{}} s: waiting at {line}: time.sleep(600)\n"
    assert [said.count(told.format(seconds)) for seconds in (TELLS, 2 * TELLS)] == [0, 1]
    assert block_of(said)[:2] == [
        "worker 1 failed (host H, pid P)",
        f"  hung at {line} for {2 * ENDS} s, waiting: time.sleep(600)",
    ]


SLOW = f"""{ONCE}
with paceline.join().main_first():
    if rank == 0:
        time.sleep(5)
t = make()
def metric(o, b):
    time.sleep(0.5)
    return {{"right": ((o.argmax(1) == b[1]).sum(), len(b[1]))}}
for report in t.steps(data, count=1):
    print(report.step, t.evaluate(data, metric)["n"], flush=True)
"""


@pytest.mark.slow
def test_long_main_first_and_evaluate_are_no_hang(tmp_path: Path) -> None:
    """Worker 0 prepares data for all, and evaluations take longer than one may stand still."""
    said = trained(tmp_path, SLOW, 2, "--hang-timeout", "2", "--plan", "micro=6", PACELINE_STANDSTILL="2")
    assert "no progress" not in said
    assert journal(tmp_path / "out", "hang") == []


# ---- Ctrl-C


def interrupted(folder: Path, body: str, workers: int) -> str:
    """Ctrl-C once, after a worker has hung."""
    (folder / "train.py").write_text("from basics import *\n" + body)
    command = [sys.executable, "-m", "paceline", "run", "--workers", str(workers), "--run-dir", "out"]
    command += ["--plan", "exact micro=3", "--save-every", "2", "train.py"]
    with Process(command, environment(HANG="1", PACELINE_STANDSTILL="9"), cwd=folder, stderr=PIPE) as process:
        until(lambda: (folder / "hung-0").exists())
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=120)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 130, said
    return said


STUCK = f"""{ONCE}
def loss(o, b):
    if hangs(0, 5):
        time.sleep(600)
    return F.cross_entropy(o, b[1])
t = make(loss)
list(t.steps(data, count=12))
t.export("out.safetensors")
"""


def test_ctrl_c_with_a_hung_worker_saves_without_it(tmp_path: Path) -> None:
    """And the same command goes on to the undisturbed run's weights."""
    one = tmp_path / "one"
    one.mkdir()
    trained(one, STUCK, 1, "--plan", "exact micro=3")
    said = interrupted(tmp_path, STUCK, 2)
    line = place(tmp_path, "time.sleep(600)", "loss")
    assert re.search(
        rf"^worker 0 hung at {line} for \d s: 1 worker goes on\n  waiting: time\.sleep\(600\)$", said, re.M
    )
    end = said[said.index("\nstopped after step ") + 1 :].splitlines()
    (stopped,) = journal(tmp_path / "out", "stopped")
    assert stopped["step"] in (6, 7)
    assert [event["life"] for event in journal(tmp_path / "out", "worker") if event["what"] == "started"] == [0, 0]
    assert end == [
        f"stopped after step {stopped['step']}; saved out/checkpoints/step-{stopped['step']:012d}",
        "continue with: paceline run --workers 2 --run-dir out --plan 'exact micro=3' --save-every 2 train.py",
    ]
    trained(tmp_path, STUCK, 1, "--plan", "exact micro=3")
    assert (tmp_path / "out.safetensors").read_bytes() == (one / "out.safetensors").read_bytes()


@pytest.mark.slow
def test_ctrl_c_ends_a_hung_worker_that_is_the_only_one(tmp_path: Path) -> None:
    saved = "glob.glob('out/checkpoints/*/manifest.json') and hangs(0, 5)"
    said = interrupted(tmp_path, STUCK.replace("hangs(0, 5)", saved).replace("count=12", "count=10**6"), 1)
    line = re.escape(place(tmp_path, "time.sleep(600)", "loss"))
    again = re.escape(
        "continue with: paceline run --workers 1 --run-dir out --plan 'exact micro=3' --save-every 2 train.py"
    )
    told = (
        rf"^stopped; worker 0 hung at {line} for \d s, and was killed; the last checkpoint is from step \d+\n{again}$"
    )
    assert re.search(told, said, re.M), said


# ---- several hosts, and other starts


ELSEWHERE = """
import os, time
calls = []
def loss(o, b):
    calls.append(b)
    if os.environ["PACELINE_RANK"] == "1" and len(calls) > 15 and not os.path.exists("hung"):
        open("hung", "w").close()
        time.sleep(600)
    return F.cross_entropy(o, b[1])
t = make(loss, plan="micro=3")
for report in t.steps(data, count=200):
    time.sleep(0 if os.path.exists("hung") else 0.1)  # until the other one has come
"""


@pytest.mark.slow
def test_hang_on_another_host_is_reported_on_every_console(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from basics import *\n" + ELSEWHERE)
    paced = environment(**PATIENCE)
    run = [sys.executable, "-m", "paceline", "run"]
    first = Process([*run, "--run-dir", "out", "--hang-timeout", "0", "train.py"], paced, cwd=tmp_path, stderr=PIPE)
    until(lambda: (tmp_path / "out" / "coordinator.json").exists())
    joined = Process([*run, "--join", "out", "--hang-timeout", str(ENDS), "train.py"], paced, cwd=tmp_path, stderr=PIPE)
    said = stderr_of((first, joined))
    assert (first.returncode, joined.returncode) == (0, 0), "\n".join(said)
    line = place(tmp_path, "time.sleep(600)", "loss")
    (told, *_), (ended,) = waited(tmp_path, ended=False)[1], waited(tmp_path, ended=True)[1]
    told = f"worker 1 has made no progress for {told}: waiting at {line}: time.sleep(600)\n"
    where = f"  all its stacks: out/logs/worker-1.log on {os.uname().nodename}\n"
    for console in said:
        assert f"\n{told}{where}" in console
        assert f"\nworker 1 hung at {line} for {ended}: 1 worker goes on\n" in console


@pytest.mark.slow
def test_hang_with_cold_start_is_reported_and_with_debug_is_not(tmp_path: Path) -> None:
    """A worker of its own interpreter is seen from its import of Paceline on; with --debug nobody is hurried."""
    body = STUCK.replace("time.sleep(600)", "time.sleep(7)")
    said = trained(tmp_path, body, 2, "--cold-start", "--hang-timeout", "0", **PATIENCE)
    line = place(tmp_path, "time.sleep(7)", "loss")
    seconds = waited(tmp_path, ended=False)[0][0]
    assert f"\nworker 0 has made no progress for {seconds}: waiting at {line}: time.sleep(7)\n" in said
    (tmp_path / "hung-0").unlink()
    debugged = tmp_path / "debugged"
    debugged.mkdir()
    said = trained(debugged, body, 2, "--debug", "1", "--hang-timeout", str(ENDS), **PATIENCE)
    assert (debugged / "hung-0").exists()
    assert "no progress" not in said
