"""Words of the plan that one GPU can carry out, through the command: its weights are those of the CPU.

Several GPUs need NCCL between them, and a machine that has them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from launching import train_basics
from safetensors.numpy import load_file

pytestmark = pytest.mark.gpu

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


def weights(folder: Path, script: str, plan: str, **env: str) -> dict[str, np.ndarray]:
    folder.mkdir()
    said = train_basics(folder, script, 1, "--plan", plan, **env).stdout
    assert ("device cpu" if env else "device cuda") in said
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
def test_the_weights_of_the_cpu(plan, apart, tmp_path):
    on_gpu = weights(tmp_path / "gpu", SCRIPT, plan)
    on_cpu = weights(tmp_path / "cpu", SCRIPT, "micro=4", CUDA_VISIBLE_DEVICES="")
    assert on_gpu.keys() == on_cpu.keys()
    for name, value in on_gpu.items():
        np.testing.assert_allclose(value, on_cpu[name], rtol=0, atol=apart, err_msg=name)


def test_a_loss_over_the_whole_batch(tmp_path):
    on_gpu = weights(tmp_path / "gpu", WHOLE, "micro=4")
    on_cpu = weights(tmp_path / "cpu", WHOLE, "micro=4", CUDA_VISIBLE_DEVICES="")
    for name, value in on_gpu.items():
        np.testing.assert_allclose(value, on_cpu[name], rtol=0, atol=1e-9, err_msg=name)


def test_a_run_goes_on_from_its_checkpoint_after_a_kill(tmp_path):
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
