"""A model that no worker may hold whole: each of them has a memory cgroup of its own, which it does not fit."""

from __future__ import annotations

import numpy
import pytest
import torch
from conftest import enter_group
from launching import SCRIPTS, paceline
from safetensors.torch import load_file

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]
ROOM = 1_500_000_000  # bytes of a worker; with Adam the model takes 3.1 GB


@pytest.mark.parametrize("plan", ["pipeline=2 tensor=2", "shard=4"])
def test_model_larger_than_the_memory_of_a_worker(
    plan: str, memory_group, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """What is exported gives in transformers what the model gave that was trained. In shards whole layers come and go:
    the C library is to give them back at once.
    """
    groups = [memory_group(ROOM) for _ in range(4)]
    command = ("run", "--workers", "4", "--run-dir", "out", "--max-restarts", "0", "--save-every", "1000000")
    command += ("--plan", f"{plan} micro=2")
    env = {"OMP_NUM_THREADS": "1", **({"MALLOC_MMAP_THRESHOLD_": str(1 << 20)} if plan == "shard=4" else {})}
    paceline(*command, SCRIPTS / "large.py", *groups, cwd=tmp_path, timeout=900, **env)
    monkeypatch.syspath_prepend(SCRIPTS)
    import large

    model = large.model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        alone = model(input_ids=large.rows.tensors[0]).logits.numpy()
    assert numpy.abs(numpy.load(tmp_path / "logits.npy") - alone).max() <= 1e-10 * numpy.abs(alone).max()


def test_one_worker_is_killed_by_the_out_of_memory_killer(memory_group, tmp_path) -> None:
    enter = enter_group(memory_group(ROOM))
    command = ("run", "--workers", "1", "--run-dir", "out", "--max-restarts", "0", SCRIPTS / "large.py")
    done = paceline(*command, cwd=tmp_path, code=137, timeout=900, preexec=enter, OMP_NUM_THREADS="1")
    assert (
        "killed by the kernel's out-of-memory killer (SIGKILL): the gradients did not fit into memory: " in done.stderr
    )
