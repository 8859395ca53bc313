"""Torch's own tests of a backend, as they ship with it. Usage: torch_suite.py BACKEND WORKERS OUT [TEST...]

Runs the named tests, or all, and writes a line of JSON for each to OUT: its name, "passed", "failed" or "skipped", the
reason, and the seconds. What keeps a test from running is changed, for every backend the same:

- where gloo is asked for, ``paceline`` will do; and, as we have an all-to-all of CPU tensors, where MPI is asked for;
- tests of groups run with fewer than the eight workers that torch wants for them;
- tests that want NCCL or several GPUs, most of DDP's among them, run on the CPU: their source is rewritten. A test that
  this breaks fails with gloo too, and so demands nothing.

Each test has workers of its own, as with torch's runner; but they are forked from this process, which has imported
torch and the tests once, and not started afresh. TEST_SECONDS is what a test may take before its workers are killed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import unittest
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SOURCE = "torch.testing._internal.distributed.distributed_test"
NAME = "shipped_tests"  # they pickle classes of their module: it needs a name
PLACE = r"(self\.rank|my_rank|rank|device_id|\"cuda\"|torch\.device\(rank\)|torch\.cuda\.current_device\(\))"
LEFT_OUT = {"test_ddp_uneven_inputs"}  # made for GPUs: on the CPU it is not done within minutes, with gloo neither
REWRITTEN = [  # (pattern, what replaces it, how often it is there at least)
    (r'BACKEND == "gloo"', 'BACKEND in ("gloo", "paceline")', 1),
    (r'BACKEND != "(gloo|mpi)"', r'BACKEND not in ("\1", "paceline")', 20),
    (r"require_backend_is_available\(\{\"gloo\"\}\)", 'require_backend_is_available({"gloo", "paceline"})', 10),
    (r'BACKEND != "nccl"', "False", 30),
    (r"\.cuda\([^()]*(\(\))?\)", ".cpu()", 50),
    (r"torch\.cuda\.(set_device|manual_seed|synchronize)\(", "_nothing(", 50),
    (r"\b(device_ids|output_device)=(\[[^\]]*\]|torch\.device\([^)]*\)|[\w.]+)", r"\1=None", 50),
    (rf"\bdevice={PLACE}", 'device="cpu"', 50),
    (rf"\.to\({PLACE}\)", '.to("cpu")', 20),
    (r"init_device_mesh\(\"cuda\"", 'init_device_mesh("cpu"', 1),
]


def rewritten(source: str) -> str:
    for pattern, by, least in REWRITTEN:
        source, count = re.subn(pattern, by, source)
        assert count >= least, f"torch's tests look different: {pattern} is there only {count} times"
    return source


def shipped(backend: str, workers: str) -> type[unittest.TestCase]:
    """The class of torch's tests for `backend`."""
    seconds = os.environ.get("TEST_SECONDS", "60")
    os.environ.update(BACKEND=backend, WORLD_SIZE=workers, DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=seconds)
    os.environ["INIT_METHOD"] = "file://"  # as in its runner's children
    import torch
    from torch.testing._internal import common_distributed

    from paceline.comm.autoload import register

    torch.set_num_threads(1)
    register()
    for backends in common_distributed.DistTestCases.backend_feature.values():
        backends.add("paceline")
    common_distributed.TIMEOUT_OVERRIDE.clear()
    common_distributed.skip_if_small_worldsize = lambda test: test
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.skip_if_lt_x_gpu = lambda count: lambda test: test
    common_distributed.init_multigpu_helper = lambda size, backend: {rank: ["cpu"] for rank in range(size)}
    spec = find_spec(SOURCE)
    assert spec is not None
    assert spec.origin is not None
    module = ModuleType(NAME)
    module._nothing = lambda *_, **__: None  # type: ignore[attr-defined]
    sys.modules[NAME] = module
    with open(spec.origin) as file:
        exec(compile(rewritten(file.read()), spec.origin, "exec", dont_inherit=True), module.__dict__)
    return _with_workers(module)


def _with_workers(module: Any) -> type[unittest.TestCase]:
    import torch

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            for process in self.processes:
                process.kill()
                process.join()
            super().tearDown()

        def _check_return_codes(self, test: Any, seconds: float) -> None:
            super()._check_return_codes(test, seconds)  # looks at the first worker's alone
            if test not in self.skip_return_code_checks:
                codes = [process.exitcode for process in self.processes]
                assert codes == [codes[0]] * len(codes), codes

    Suite.__module__ = NAME
    return Suite


def run(suite: type[unittest.TestCase], name: str) -> dict[str, Any]:
    result = unittest.TestResult()
    began = time.monotonic()
    suite(name).run(result)
    outcome, why = "passed", ""
    if result.skipped:
        outcome, why = "skipped", result.skipped[0][1]
    if result.errors or result.failures:
        outcome, why = "failed", (result.errors + result.failures)[0][1]
    return {"test": name, "outcome": outcome, "why": why, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    backend, workers, out, *names = sys.argv[1:]
    suite = shipped(backend, workers)
    with open(out, "w") as file:
        for name in names or sorted(set(unittest.TestLoader().getTestCaseNames(suite)) - LEFT_OUT):
            print(json.dumps(run(suite, name)), file=file, flush=True)


if __name__ == "__main__":
    main()
