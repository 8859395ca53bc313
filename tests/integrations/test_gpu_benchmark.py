"""`make gpu` where there is no GPU, and the script behind it on the CPU, at tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from paths import ROOT
from warm import Process, environment

TINY = ("--cpu", "--eager", "--layers=2", "--width=64", "--length=16", "--vocabulary=97", "--batch=2", "--rounds=2")


def gpu(*options: str, code: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *options]
    with Process(command, environment(CUDA_VISIBLE_DEVICES=""), stdout=PIPE, stderr=PIPE) as process:
        output, errors = process.communicate(timeout=500)
    assert process.returncode == code, output + errors
    return subprocess.CompletedProcess(command, code, output, errors)


def test_make_gpu_without_a_gpu_fails_with_one_sentence() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "gpu"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    command = done.stdout.splitlines()[-1]
    assert command.startswith(".venv/bin/python benchmarks/gpu.py --tests --record benchmarks/records/gpu-")
    done = gpu("--tests", code=1)
    sentence = f"make gpu needs a CUDA device, and torch {torch.__version__} finds none here\n"
    assert (done.stdout, done.stderr) == ("", sentence)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gpu_benchmark_measures_and_records_all_parts(tmp_path: Path) -> None:
    done = gpu(*TINY, "--record", str(tmp_path / "record.json"), code=0)
    assert "ddp starts" in done.stdout
    results = json.loads((tmp_path / "record.json").read_text())["results"]
    assert list(results) == ["one", "several"]
    for part, sides in (("one", ["plain", "ddp", "trainer"]), ("several", ["ddp", "trainer"])):
        assert results[part]["losses apart"] < 0.01
        for side in sides:
            assert len(results[part]["seconds"][side]) == 2
            assert results[part][side]["memory"] > 1e6
            assert results[part][side]["tokens a second"] > 0
        for other in sides[:-1]:
            assert results[part][f"{other}/trainer"]["ratio"] > 0


@pytest.mark.slow
def test_gpu_benchmark_out_of_time_is_recorded(tmp_path: Path) -> None:
    done = gpu(*TINY, "--minutes", "0.01", "--record", str(tmp_path / "record.json"), code=1)
    results = json.loads((tmp_path / "record.json").read_text())["results"]
    failed = {"failed": "OutOfTimeError: the minutes are spent"}
    assert results == {"one": failed, "several": failed}
    assert done.stderr.endswith(f"failed: {json.dumps(dict.fromkeys(results, failed['failed']))}\n")
