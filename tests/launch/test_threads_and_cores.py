"""Threads, cores and the allocator around the workers, and what `paceline explain` says of them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from launching import paceline
from warm import environment

from paceline.base.console import shown
from paceline.base.environment import THREADS, doubt_threads
from paceline.launch.tuning import thread_warnings, worker_settings


def test_workers_are_pinned_to_their_share_of_cores():
    variables, pins, done = worker_settings(2, {}, [0, 1, 4, 5, 7])
    assert variables["OMP_NUM_THREADS"] == "2"
    assert pins == [[0, 1], [4, 5]]
    assert [text for text, _ in done][:2] == ["2 threads each", "pinned to 2 cores each"]


def test_one_worker_and_more_workers_than_cores_are_not_pinned():
    assert worker_settings(1, {}, [0, 1])[1] == [[]]
    variables, pins, _ = worker_settings(5, {}, [0, 1])
    assert variables["OMP_NUM_THREADS"] == "1"
    assert pins == [[]] * 5


def test_thread_and_allocator_variables_of_the_user_stay():
    given = {"OMP_NUM_THREADS": "3", "MALLOC_TRIM_THRESHOLD_": "1", "THP_MEM_ALLOC_ENABLE": "0", "PYTHONHASHSEED": "7"}
    variables, _, done = worker_settings(3, given, [0, 1])
    assert (variables, done) == ({}, [])
    assert "MALLOC_MMAP_THRESHOLD_" not in worker_settings(1, {"GLIBC_TUNABLES": ""}, [0])[0]


NO_NUMBERS = ["banana", "-1", "0", "1e3", "1.5", "", "2 3", "\u0663"]


@pytest.mark.parametrize("name", THREADS)
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_invalid_thread_variable_is_replaced_and_noted(name: str, value: str) -> None:
    assert worker_settings(2, {name: value}, [0, 1, 4, 5])[0][name] == "2"
    given = f"{name}={shown(value)}"
    said = f"{given} is not a number of threads; each worker uses 2 instead"
    assert thread_warnings(2, {name: value}, [0, 1, 4, 5]) == [said]
    said = f"{given} is not a number of threads"
    assert doubt_threads(7, {name: value}) == [f"{said}, so torch uses 7; write it in digits, or unset it"]


def test_more_threads_than_cores_are_noted() -> None:
    for given in ({}, {"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": " 2,1"}, {"MKL_NUM_THREADS": "1"}):
        assert thread_warnings(2, given, [0, 1, 4, 5]) == []
        assert doubt_threads(1, given) == []
    assert "OMP_NUM_THREADS" not in worker_settings(2, {"OMP_NUM_THREADS": "3"}, [0, 1, 4, 5])[0]
    said = "is more threads than cores, for 2 workers on 4 cores; unset it to use 2, which is faster"
    assert thread_warnings(2, {"OMP_NUM_THREADS": "3"}, [0, 1, 4, 5]) == [f"OMP_NUM_THREADS=3 {said}"]
    cores = len(os.sched_getaffinity(0))
    said = f"OMP_NUM_THREADS=999 is more threads than the {cores} cores of this process; unset it"
    assert doubt_threads(999, {"OMP_NUM_THREADS": "999"}) == [said]


SAYS = "from basics import *\nt = make()\nlist(t.steps(data, count=1))\nif t.main: print(torch.get_num_threads())\n"


def test_run_notes_an_invalid_thread_variable(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAYS)
    done = paceline("run", "--workers", "2", "train.py", cwd=tmp_path, OMP_NUM_THREADS="banana")
    each = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (
        done.stderr.splitlines()[1]
        == f"OMP_NUM_THREADS=banana is not a number of threads; each worker uses {each} instead"
    )
    assert done.stdout == f"{each}\n"


@pytest.mark.slow
def test_script_without_run_notes_an_invalid_thread_variable(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAYS)
    env = environment(OMP_NUM_THREADS="-1", PACELINE_COLD_START="1")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    said = f"OMP_NUM_THREADS=-1 is not a number of threads, so torch uses {done.stdout.strip()}"
    assert f"\n{said}; write it in digits, or unset it\n" in done.stderr


def test_workers_have_threads_and_cores_and_explain_shows_them(tmp_path):
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
    assert "AdamW runs fused\n    because fused= was not set, and torch supports it on this device\n" in said
    if len(cores) > 1:
        assert "workers: pinned to" in said
    assert "collectives," in said


MEMORY = """
import copy, resource, sys
width, limit = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit << 20, limit << 20))
import paceline, torch
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
    ("width", "limit", "what"),
    [
        (1 << 11, 24, "32 MB of memory (File too large): gradients are copied before they are summed"),
        pytest.param(
            1 << 6, 4, "4 MB of memory (File too large): messages between them go over gloo", marks=pytest.mark.slow
        ),
    ],
    ids=["arena", "all"],
)
def test_shared_memory_that_is_refused_is_one_warning_and_the_same_weights(
    tmp_path: Path, width: int, limit: int, what: str
) -> None:
    """The largest file that a process may make, in MB, bounds the memory that it can share with others."""
    (tmp_path / "train.py").write_text(MEMORY)
    done = paceline("run", "--workers", "2", "train.py", str(width), str(limit), cwd=tmp_path)
    warnings = [line.partition(" (/")[0] for line in done.stderr.splitlines() if "cannot share" in line]
    assert warnings == [f"[worker 0] UserWarning: workers 0, 1 cannot share {what}"]
