"""Threads, cores and the allocator around the workers, and what `paceline explain` says of them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest
from launching import paceline

from paceline.launch.tuning import surround


def test_cores_are_shared_out_and_each_worker_keeps_its_own():
    variables, pins, done = surround(2, {}, [0, 1, 4, 5, 7])
    assert variables["OMP_NUM_THREADS"] == "2"
    assert pins == [[0, 1], [4, 5]]
    assert [text for text, _ in done][:2] == ["2 threads each", "pinned to 2 cores each"]


def test_one_worker_may_use_all_cores_and_too_many_are_not_pinned():
    assert surround(1, {}, [0, 1])[1] == [[]]
    variables, pins, _ = surround(5, {}, [0, 1])
    assert variables["OMP_NUM_THREADS"] == "1"
    assert pins == [[]] * 5


def test_what_the_user_set_stays():
    given = {"OMP_NUM_THREADS": "3", "MALLOC_TRIM_THRESHOLD_": "1", "THP_MEM_ALLOC_ENABLE": "0", "PYTHONHASHSEED": "7"}
    variables, _, done = surround(3, given, [0, 1])
    assert (variables, done) == ({}, [])
    assert "MALLOC_MMAP_THRESHOLD_" not in surround(1, {"GLIBC_TUNABLES": ""}, [0])[0]


def test_workers_find_them_and_the_run_explains_them(tmp_path):
    (tmp_path / "train.py").write_text(
        "import json, os, paceline, torch\n"
        "t = paceline.Trainer(lambda: torch.nn.Linear(1, 1), lambda o, b: o.mean(),\n"
        "                     lambda p: torch.optim.AdamW(p), global_batch=2)\n"
        "for _ in t.steps(torch.ones(4, 1)): pass\n"
        "if t.main:\n"
        "    print(json.dumps([os.environ.get('MALLOC_TRIM_THRESHOLD_'), torch.get_num_threads(),\n"
        "                      sorted(os.sched_getaffinity(0))]))\n"
    )
    cores = sorted(os.sched_getaffinity(0))
    done = paceline("run", "--workers", "2", "--run-dir", "r", "train.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    trim, threads, mine = json.loads(done.stdout.splitlines()[-1])
    assert threads == 1
    assert mine == (cores[: len(cores) // 2] if len(cores) > 1 else cores)
    assert bool(trim) == (platform.libc_ver()[0] == "glibc")
    said = paceline("explain", "r", cwd=tmp_path).stdout
    assert "AdamW runs fused\n    because fused= was left open, and torch has it for this device\n" in said
    if len(cores) > 1:
        assert "workers: pinned to" in said
    assert "collectives," in said


MEMORY = """
import copy, sys, paceline, torch
width = int(sys.argv[1])
rows = torch.randn(2, width, generator=torch.Generator().manual_seed(1))
t = paceline.Trainer(lambda: torch.nn.Linear(width, width), lambda output, batch: output.square().mean(),
                     lambda params: torch.optim.SGD(params, lr=0.1), global_batch=2)
plain = copy.deepcopy(t.model)
plain(rows).square().mean().backward()
torch.optim.SGD(plain.parameters(), lr=0.1).step()
list(t.steps(rows))
for mine, expected in zip(t.model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(mine, expected)
"""


@pytest.mark.parametrize(
    ("width", "limit", "said"),
    [
        (1 << 11, 24, "32 MB of memory (File too large): gradients are copied to be summed"),
        pytest.param(
            1 << 6, 4, "4 MB of memory (File too large): what they exchange goes over gloo", marks=pytest.mark.slow
        ),
    ],
    ids=["arena", "all"],
)
def test_memory_that_cannot_be_shared_is_said_once_and_changes_nothing(tmp_path, width, limit, said):
    """The largest file that a process may make, in MB, bounds the memory that it can share with others."""
    (tmp_path / "train.py").write_text(MEMORY)
    command = ["sh", "-c", f'ulimit -f {limit * 2048}; exec "$@"', "sh", sys.executable, "-m", "paceline.cli", "run"]
    command += ["--workers", "2", "train.py", str(width)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    warned = [line.partition(" (/")[0] for line in done.stderr.splitlines() if "cannot share" in line]
    assert warned == [f"[worker 0] UserWarning: workers 0, 1 cannot share {said}"]
