"""Torch's own parts over `paceline`: the same numbers as over gloo; and how the backend becomes known to torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from launching import SCRIPTS
from oracle import apart
from safetensors.torch import load_file
from warm import Process, environment

# Both add two numbers in the one way there is; of three, gloo adds in another order.
TOLERANCE = {2: 0.0, 3: 1e-12}
PARTS = {
    2: ["data_parallel", "fully_sharded", "tensor_parallel", "pipeline", "subgroups"],
    3: ["data_parallel", "fully_sharded", "subgroups"],
}
CASES = [(size, part, name) for size, parts in PARTS.items() for part in parts for name in ("first", "again")]
READY = "import sys, torch.distributed as dist; assert 'paceline.comm.c10d_backend' not in sys.modules; "
MAKE = "dist.init_process_group('paceline', store=dist.HashStore(), rank=0, world_size=1); "
USE = "import torch; x = torch.ones(2); dist.all_reduce(x); print(dist.get_backend(), x.tolist())"


def run_workers(size: int, folder: Path, seconds: float = 150) -> None:
    """One process per worker; all end if one fails."""
    logs = [folder / f"{rank}.log" for rank in range(size)]
    command = [sys.executable, str(SCRIPTS / "torch_parts.py")]
    workers = [
        Process(
            [*command, str(rank), str(size), folder],
            environment(CUDA_VISIBLE_DEVICES=""),
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + seconds
    while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    time.sleep(0 if all(worker.poll() == 0 for worker in workers) else 2)  # the others say why
    codes = [worker.poll() for worker in workers]
    for worker in workers:
        worker.kill()
        worker.wait()
    assert codes == [0] * size, "\n".join(log.read_text()[-3000:] for log in logs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    @cache
    def of(size: int) -> list[dict[str, torch.Tensor]]:
        folder = tmp_path_factory.mktemp(f"parts-{size}")
        run_workers(size, folder)
        return [load_file(folder / f"{rank}.safetensors") for rank in range(size)]

    return of


def picked(found: dict[str, torch.Tensor], name: str, part: str) -> dict[str, torch.Tensor]:
    head = f"{name}/{part}/"
    tensors = {key.removeprefix(head): value for key, value in found.items() if key.startswith(head)}
    assert tensors, head
    return tensors


@pytest.mark.parametrize(("size", "part", "name"), CASES)
def test_ddp_fsdp_tensor_parallel_and_pipeline_give_the_numbers_of_gloo(
    trained, size: int, part: str, name: str
) -> None:
    """`again`: in the same processes, after the groups were destroyed and made anew."""
    for found in trained(size):
        assert apart(picked(found, name, part), picked(found, "gloo", part)) <= TOLERANCE[size]


@pytest.mark.parametrize("size", PARTS)
def test_ddp_fsdp_tensor_parallel_and_pipeline_train_one_model(trained, size: int) -> None:
    """However it is cut, it is the same training: the comparison above is not of what nobody trained."""
    found = trained(size)
    whole = picked(found[0], "first", "data_parallel")
    assert apart(picked(found[-1], "first", "data_parallel"), whole) == 0
    assert apart(picked(found[0], "first", "fully_sharded"), whole) < 1e-12
    if size == 2:
        assert apart(picked(found[0], "first", "tensor_parallel"), whole) < 1e-12
        halves = picked(found[0], "first", "pipeline") | picked(found[1], "first", "pipeline")
        assert apart(halves, whole) < 1e-12


@pytest.mark.parametrize(
    ("autoload", "imports"),
    [
        ("1", "import torch"),
        pytest.param("1", "import paceline, torch", marks=pytest.mark.slow),  # the autoload does it, as above
        pytest.param("1", "import torch, paceline", marks=pytest.mark.slow),  # it is known before the second one
        ("0", "import torch, paceline"),
        pytest.param("0", "import paceline, torch", marks=pytest.mark.slow),  # what the one below says
        pytest.param("0", "import torch", marks=pytest.mark.slow),  # nothing of ours takes part
    ],
)
def test_backend_is_registered_after_import(autoload: str, imports: str) -> None:
    """With the autoload of torch's, in any order and even alone; without it, where `import paceline` comes last."""
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}; {READY}{MAKE}{USE}"],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if autoload == "1" or imports.endswith("paceline"):
        assert done.stdout == "paceline [1.0, 1.0]\n", done.stderr
    else:
        assert "Unknown backend type paceline" in done.stderr


def test_import_paceline_does_not_import_torch() -> None:
    code = "import sys, paceline; print([name for name in sys.modules if name.split('.')[0] == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
