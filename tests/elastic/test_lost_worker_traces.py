"""What is left of a worker that is lost while the run goes on, or that leaves with an exit code of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import paceline, train_basics

import paceline as package
from paceline.base.journal import read_journal

SHARES = (4, 4)  # micro-batches of three rows, of a global batch of 24
TWO = ("--shares", ",".join(map(str, SHARES)), "--plan", "exact micro=3")
ONCE = """
import os, sys
rank = int(os.environ["PACELINE_RANK"])
def once(step, worker):
    if t.steps_done < step or rank != worker or os.path.exists(f"lost-{worker}"):
        return False
    open(f"lost-{worker}", "w").close()
    return True
"""


def line_of(folder: Path, text: str) -> int:
    lines = (folder / "train.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


def with_row(row: int, epoch: int) -> tuple[int, int, list[int]]:
    """The worker that has a row of the dataset in an epoch, its micro-batch, and the rows of that."""
    order = [package.sample_index(position, 96, 0, epoch) for position in range(96)]
    position = order.index(row)
    micro_batch = position % 24 // 3
    worker = [number for number, share in enumerate(SHARES) for _ in range(share)][micro_batch]
    return worker, micro_batch, order[position - position % 3 :][:3]


RAISES = {
    "loss": """
def loss(o, b):
    if t.steps_done >= 4 and (b[0] == x[13]).all(1).any() and not os.path.exists("lost"):
        bad()
    return F.cross_entropy(o, b[1])
rows, loaders = data, 0
""",
    "rows": """
class Rows:
    def __len__(self):
        return len(data)
    def __getitem__(self, row):
        if row == 13 and os.path.exists("later") and not os.path.exists("lost"):
            bad()
        return data[row]
loss, rows, loaders = cross_entropy, Rows(), 0
""",
}
RAISES["loader"] = RAISES["rows"].replace("loaders = cross_entropy, Rows(), 0", "loaders = cross_entropy, Rows(), 1")


@pytest.mark.parametrize("where", ["loss", "loader", pytest.param("rows", marks=pytest.mark.slow)])
def test_exception_of_a_lost_worker_names_line_and_rows(where: str, tmp_path: Path) -> None:
    """Of the forward, of a dataset, and of a dataset in a loader's process."""
    body = (
        "import os\n"
        "def bad():\n"
        "    open('lost', 'w').close()\n"
        "    raise ValueError('row 13 is bad')\n"
        f"{RAISES[where]}"
        "print('so far, so good', flush=True)\n"
        "t = make(loss)\n"
        "options = {'num_workers': loaders, 'prefetch_factor': 1} if loaders else {}\n"
        "for report in t.steps(rows, count=9, loader=options):\n"
        "    if report.step == 2:\n"
        "        open('later', 'w').close()\n"
    )
    done = train_basics(tmp_path, body, 2, *TWO)
    worker, micro_batch, rows = with_row(13, 1)
    raises = "raise ValueError('row 13 is bad')"
    cause = [
        "ValueError: row 13 is bad",
        f"at train.py:{line_of(tmp_path, raises)} in bad: {raises}",
        f"in micro-batch {micro_batch}: rows {', '.join(map(str, rows))} of the dataset",
    ]
    lines = [*cause, f"the end of out/logs/worker-{worker}.log:", "| so far, so good"]
    text = "".join(f"  {line}\n" for line in lines)
    assert f"\nworker {worker} raised ValueError: 1 worker goes on\n{text}" in done.stderr
    (lost,) = [event for event in read_journal(tmp_path / "out") if event["event"] == "lost"]
    assert lost["causes"] == {str(worker): cause}
    told = f"worker {worker} raised ValueError, after step {lost['step']}; {', '.join(cause)}"
    assert f"  lost         {told}\n" in paceline("explain", "out", cwd=tmp_path).stdout
    assert told in re.sub(r"\s+", " ", done.stderr[done.stderr.index("\nlost ") :])


def test_exit_code_signal_and_end_of_log_of_each_lost_worker(tmp_path: Path) -> None:
    """By a signal, without a word, and by an exit code of its own."""
    body = (
        f"{ONCE}"
        "def loss(o, b):\n"
        "    if once(1, 1):\n"
        "        print('leaving', flush=True)\n"
        "        sys.exit(3)\n"
        "    if once(2, 2):\n"
        "        os.kill(os.getpid(), 11)\n"
        "    if once(3, 3):\n"
        "        os.kill(os.getpid(), 9)\n"
        "    if once(4, 4):\n"
        "        print('a\\nb\\nc\\nd\\ne\\nf', flush=True)\n"
        "        os._exit(0)\n"
        "    return F.cross_entropy(o, b[1])\n"
        "t = make(loss)\n"
        "list(t.steps(data, count=12))\n"
    )
    options = ("--shares", "2,2,2,1,1", "--plan", "exact micro=3")
    done = train_basics(tmp_path, body, 5, *options)
    leaves, crashes = line_of(tmp_path, "sys.exit(3)"), line_of(tmp_path, "os.kill(os.getpid(), 11)")
    for how, left in {
        "worker 1 ended with exit code 3": [
            f"at train.py:{leaves} in loss: sys.exit(3)",
            "the end of out/logs/worker-1.log:",
            "| leaving",
        ],
        "worker 2 crashed with SIGSEGV": [
            f"at train.py:{crashes} in loss: os.kill(os.getpid(), 11)",
            "log: out/logs/worker-2.log",
        ],
        "worker 3 was killed by SIGKILL": ["log: out/logs/worker-3.log"],
        "worker 4 ended with exit code 0": ["the end of out/logs/worker-4.log:", *(f"| {word}" for word in "bcdef")],
    }.items():
        below = "".join(f"  {re.escape(line)}\n" for line in left)
        assert re.search(rf"^{how}: \d workers? goe?s? on\n{below}(?!  )", done.stderr, re.M), done.stderr
    told = paceline("explain", "out", cwd=tmp_path).stdout
    assert re.search(rf"^  lost  .* worker 1 ended with exit code 3, .*; at train.py:{leaves} in loss: sys", told, re.M)


# ---- exit codes of a script's own


def block_of(stderr: str) -> str:
    block = stderr[stderr.index(" failed (host ") - len("worker 0") :]
    return re.sub(r"\(host \S+, pid \d+", "(host H, pid P", block)


@pytest.mark.parametrize("leave", ["sys.exit(3)", pytest.param("exit(3)", marks=pytest.mark.slow)])
def test_exit_code_of_one_worker_ends_a_run_that_survives_no_loss(leave: str, tmp_path: Path) -> None:
    """Where no loss is survived: at once, with that code, and its line."""
    body = f"{ONCE}t = make()\nfor report in t.steps(data, count=12):\n    if rank == 1:\n        {leave}\n"
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", code=3)
    block = block_of(done.stderr).splitlines()
    assert block[:3] == [
        "worker 1 failed (host H, pid P, after step 1)",
        "  ended with exit code 3",
        f"  at train.py:{line_of(tmp_path, leave)} in <module>: {leave}",
    ]
    assert block[-1].startswith(
        "next: see the log of the worker; then run `paceline run --workers 2 --run-dir out train.py`: "
    )


def test_exit_code_of_one_worker_is_retried_once_on_another(tmp_path: Path) -> None:
    """The rows that led to it lead to it on another worker as well."""
    body = (
        "import sys\n"
        "def loss(o, b):\n"
        "    if t.steps_done >= 4 and (b[0] == x[13]).all(1).any():\n"
        "        sys.exit('no label')\n"
        "    return F.cross_entropy(o, b[1])\n"
        "t = make(loss)\n"
        "list(t.steps(data))\n"
    ).replace("data))", "data, epochs=2))")
    done = train_basics(tmp_path, body, 2, *TWO, code=1)
    number = line_of(tmp_path, "sys.exit('no label')")
    worker, _, _ = with_row(13, 1)
    first = f"\nworker {worker} ended with exit code 1: 1 worker goes on\n  at train.py:{number} in loss: sys.exit("
    assert first in done.stderr
    block = block_of(done.stderr)
    assert f"  ended with exit code 1\n  at train.py:{number} in loss: sys.exit('no label')\n" in block
    assert "  | no label\n" in block
    assert re.search(r"^worker \d failed in the same way$", block, re.M)


def test_exit_code_of_all_workers_ends_the_run_with_it(tmp_path: Path) -> None:
    body = "import sys\nfor report in make().steps(data, count=12):\n    if report.step == 2:\n        sys.exit(7)\n"
    done = train_basics(tmp_path, body, 2, code=7)
    block = block_of(done.stderr)
    assert "  ended with exit code 7\n  at train.py:5 in <module>: sys.exit(7)\n" in block
    assert "failed in the same way\n" in block
    assert " go on" not in done.stderr


def test_exit_that_the_script_catches_is_no_failure(tmp_path: Path) -> None:
    body = (
        "import sys\n"
        "list(make().steps(data, count=2))\n"
        "try:\n"
        "    sys.exit(3)\n"
        "except SystemExit as caught:\n"
        "    print('caught', caught.code)\n"
    )
    done = train_basics(tmp_path, body, 1)
    assert done.stdout == "caught 3\n"
    assert [event["step"] for event in read_journal(tmp_path / "out") if event["event"] == "finished"] == [2]
