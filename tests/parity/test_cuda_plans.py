"""Plans on one GPU, through the command, with one worker and with several that share it: weights are those of the CPU.

Several GPUs need NCCL between them, and a machine that has them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import pytest
import torch
from launching import free_port, stderr_of, train_basics
from safetensors.numpy import load_file
from test_gpu_tensors_through_host import SEVERAL
from torch.distributed.fsdp import FSDPModule
from warm import SCRIPTS, environment

pytestmark = pytest.mark.gpu
SERVED = [*SEVERAL, (2, "server=1", "")]
# The package needs 2.13, and machines with GPUs have what their makers built.
NEW = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason=f"torch {torch.__version__} is too old for it"
)
SHARED = "workers of this host share a GPU"
APART = "unshare", "--user", "--map-root-user", sys.executable

SCRIPT = """
trainer = make()
for report in trainer.steps(data, epochs=5):
    pass
trainer.export("out.safetensors")
print("device", trainer.device.type)
"""
WHOLE = f"""
def loss(outputs, batch):
    return (torch.logsumexp(outputs @ outputs.T, 1) - outputs.square().sum(1)).mean()

{SCRIPT.replace("make(", 'make(loss=loss, loss_over="batch"')}"""


def weights(
    folder: Path, script: str, plan: str, workers: int = 1, chaos: str = "", **env: str
) -> dict[str, np.ndarray]:
    folder.mkdir()
    ran = train_basics(folder, script, workers, "--plan", plan, chaos=chaos, **env)
    assert ("device cpu" if env else "device cuda") in ran.stdout
    assert (SHARED in ran.stderr) == (workers > 1 and not env), ran.stderr
    assert not chaos or "SIGKILL" in ran.stderr, ran.stderr
    return load_file(folder / "out.safetensors")


@pytest.mark.parametrize(
    ("plan", "apart"),
    [
        ("micro=4", 1e-9),
        ("micro=8 shard=1 zero=1", 1e-9),
        ("micro=8 shard=1 zero=3 offload=cpu", 1e-9),
        ("micro=8 recompute=blocks", 1e-9),
        ("micro=8 compile", 1e-9),
        ("micro=8 precision=bf16", 0.1),
        ("server=1", 1e-9),
        ("server=2 micro=4", 1e-9),
        ("server=2 micro=4 staleness=2 window=7", 1e-9),
    ],
)
def test_cuda_plan_gives_the_weights_of_the_cpu(plan, apart, tmp_path):
    on_gpu = weights(tmp_path / "gpu", SCRIPT, plan)
    on_cpu = weights(tmp_path / "cpu", SCRIPT, "micro=4", CUDA_VISIBLE_DEVICES="")
    assert on_gpu.keys() == on_cpu.keys()
    for name, value in on_gpu.items():
        np.testing.assert_allclose(value, on_cpu[name], rtol=0, atol=apart, err_msg=name)


def test_cuda_loss_over_the_whole_batch(tmp_path):
    on_gpu = weights(tmp_path / "gpu", WHOLE, "micro=4")
    on_cpu = weights(tmp_path / "cpu", WHOLE, "micro=4", CUDA_VISIBLE_DEVICES="")
    for name, value in on_gpu.items():
        np.testing.assert_allclose(value, on_cpu[name], rtol=0, atol=1e-9, err_msg=name)


def test_cuda_resume_after_a_kill_has_the_same_bits(tmp_path):
    """With the generators of the GPU: dropout is drawn there."""
    dropout = SCRIPT.replace("make(", "make(model=lambda: nn.Sequential(net(), nn.Dropout(0.2))")
    whole = weights(tmp_path / "whole", dropout, "micro=4")
    folder = tmp_path / "killed"
    folder.mkdir()
    for code, chaos in ((137, "kill:0@12.forward"), (0, "")):
        ended = train_basics(folder, dropout, 1, "--plan", "micro=4", "--save-every", "5", code=code, chaos=chaos)
    assert "resuming from step" in ended.stderr
    for name, value in load_file(folder / "out.safetensors").items():
        np.testing.assert_array_equal(value, whole[name])


@pytest.mark.parametrize(
    ("workers", "plan", "alone"),
    [pytest.param(*case, marks=[NEW] if "zero=2" in case[1] or "zero=3" in case[1] else []) for case in SERVED],
)
def test_cuda_workers_that_share_a_gpu(workers, plan, alone, tmp_path):
    shared = weights(tmp_path / "gpu", SCRIPT, f"micro=4 {plan}", workers)
    on_cpu = weights(tmp_path / "cpu", SCRIPT, f"micro=4 {alone}", CUDA_VISIBLE_DEVICES="")
    for name, value in shared.items():
        np.testing.assert_allclose(value, on_cpu[name], rtol=0, atol=1e-9, err_msg=name)


def test_cuda_codec_to_parameter_servers(tmp_path):
    shared = weights(tmp_path / "gpu", SCRIPT, "micro=4 server=2 codec=bf16", 2)
    on_cpu = weights(tmp_path / "cpu", SCRIPT, "micro=4", CUDA_VISIBLE_DEVICES="")
    for name, value in shared.items():
        np.testing.assert_allclose(value, on_cpu[name], rtol=0, atol=1e-2, err_msg=name)


@pytest.mark.parametrize("moment", ["backward", "reduced"])
def test_cuda_kill_of_one_of_the_workers_that_share_a_gpu(moment, tmp_path):
    shared = weights(tmp_path / "gpu", SCRIPT, "micro=4", 3, chaos=f"kill:1@7.{moment}")
    on_cpu = weights(tmp_path / "cpu", SCRIPT, "micro=4", CUDA_VISIBLE_DEVICES="")
    for name, value in shared.items():
        np.testing.assert_allclose(value, on_cpu[name], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("plan", ["codec=int8", "codec=powersgd:2", "codec=auto", "shard=2 zero=1 codec=bf16"])
def test_cuda_codec_of_gradients_between_hosts(plan, tmp_path):
    """Workers in user namespaces of their own are on hosts of their own."""
    ends = {}
    for device in ("0", ""):
        folder = tmp_path / f"device-{device}"
        folder.mkdir()
        shared = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PLAN": plan}
        shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": device}
        given = {"cwd": folder, "stderr": PIPE, "text": True}
        workers = [
            Popen([*APART, SCRIPTS / "linear.py", "out", "9"], env=environment(**shared, RANK=str(rank)), **given)
            for rank in range(4)
        ]
        said = stderr_of(workers)
        assert [worker.returncode for worker in workers] == [0] * 4, said
        assert re.search(r"^codec=.* between \d hosts", said[0], re.M), said[0]
        ends[device] = load_file(folder / "out.safetensors")
    for name, value in ends["0"].items():
        np.testing.assert_allclose(value, ends[""][name], rtol=0, atol=1e-2, err_msg=name)
