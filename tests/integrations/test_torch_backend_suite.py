"""Torch's own tests of a backend over `paceline`: what passes with gloo must pass with ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import STDOUT
from typing import Any

import pytest
import torch
from launching import SCRIPTS
from warm import Process, environment

WORKERS, CORE_WORKERS = 3, 2

# What passes with gloo and cannot with ours, and why.
REFUSED = "dist.monitored_barrier refuses every backend but the one named gloo"
EXCEPTIONS = {
    "test_monitored_barrier_gloo": REFUSED,
    "test_monitored_barrier_failure_order": REFUSED,
    "test_monitored_barrier_gloo_rank_0_timeout": "ours names the ranks that did not come even if it had no time",
    "test_ddp_profiling_torch_profiler": "only a Work written in C++ can give the profiler an event across threads",
}
if torch.__version__ < "2.14":  # from there on these two barriers of a few of the ranks go to the backend
    EXCEPTIONS |= {"test_monitored_barrier_gloo_subgroup": REFUSED, "test_monitored_barrier_wait_all_ranks": REFUSED}

# What the tables of test_backend_contract.py do not show: objects, messages, time that runs out, the profiler, and DDP
# with what hangs on its futures. Those named `cuda` are on the CPU too.
CORE = [
    "test_all_gather_object_default_pg",
    "test_all_gather_v_cuda",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_to_all_single_unequal_split",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo",
    "test_batch_isend_irecv_self_nccl",
    "test_ddp_comm_hook_logging",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_destroy_full_group",
    "test_isend_torch_profiler",
    "test_reduce_scatter_v_cuda",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_DistributedDataParallelCPU",
]


def outcomes(backend: str, folder: Path, workers: int, *names: str) -> dict[str, dict[str, Any]]:
    """What each test came to."""
    out, log = folder / f"{backend}.jsonl", folder / f"{backend}.log"
    with log.open("w") as file:
        command = [sys.executable, SCRIPTS / "torch_suite.py", backend, str(workers), out, *names]
        code = Process(command, environment(CUDA_VISIBLE_DEVICES=""), stdout=file, stderr=STDOUT).wait()
    assert code == 0, log.read_text()[-3000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return {row["test"]: row for row in rows}


def named(rows: dict[str, dict[str, Any]], outcome: str) -> set[str]:
    return {name for name, row in rows.items() if row["outcome"] == outcome}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_torch_distributed_core_tests_pass_over_paceline(tmp_path: Path) -> None:
    ours = outcomes("paceline", tmp_path, CORE_WORKERS, *CORE)
    assert {name: row["why"] for name, row in ours.items() if row["outcome"] != "passed"} == {}
    assert set(ours) == set(CORE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_torch_distributed_tests_that_pass_over_gloo_pass_over_paceline(tmp_path: Path) -> None:
    gloo, ours = outcomes("gloo", tmp_path, WORKERS), outcomes("paceline", tmp_path, WORKERS)
    counts = {outcome: [len(named(rows, outcome)) for rows in (gloo, ours)] for outcome in ("passed", "failed")}
    print(f"gloo, paceline: {counts}")
    demanded = named(gloo, "passed")
    assert len(demanded) > 200, "most of torch's tests do not run any more: see what keeps them"
    assert {name: ours[name]["why"] for name in demanded - named(ours, "passed") - set(EXCEPTIONS)} == {}
    assert set(EXCEPTIONS) <= demanded - named(ours, "passed"), "an exception that is none any more"
