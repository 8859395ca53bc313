"""`paceline check`: three differences, a verdict, and losses that are not sums over rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import paceline


def check(body: str, tmp_path: Path, *options: str, code: int = 0) -> str:
    (tmp_path / "train.py").write_text("import os, sys\nfrom basics import *\n" + body)
    args = ("check", "train.py", "--workers", "3", "--steps", "3", *options)
    return paceline(*args, cwd=tmp_path, code=code).stdout


def differences(said: str) -> list[float]:
    return [float(number) for number in re.findall(r" (\d\.\de[-+]\d+)", said)]


def test_a_good_script(tmp_path):
    said = check("list(make().steps(data, count=int(sys.argv[1])))", tmp_path, "--", "4")
    assert len(differences(said)) == 3
    assert max(differences(said)) < 1e-13
    assert said.endswith("verdict: the same training on 3 workers as on one\n")
    assert "is not a sum over rows" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_plan_with_shards(tmp_path):
    said = check("list(make().steps(data, count=4))", tmp_path, "--plan", "shard=3")
    assert max(differences(said)) < 1e-13
    assert said.endswith("verdict: the same training on 3 workers as on one\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        "F.cross_entropy(F.normalize(o, dim=1) @ F.normalize(o, dim=1).T, torch.arange(len(o)))",  # contrastive
        "(F.cross_entropy(o, b[1], reduction='none') * (b[0][:, 0] > 0)).sum() / (b[0][:, 0] > 0).sum().clamp(min=1)",
    ],
)
@pytest.mark.parametrize("layer", ["nn.Identity()", "nn.Dropout(0.2)"])
def test_a_loss_that_is_not_a_sum_over_rows(loss, layer, tmp_path):
    """A contrastive loss, and a mean over unequal counts; also behind dropout, where pieces are never merged."""
    model = f"lambda: nn.Sequential(nn.Linear(10, 16), {layer}, nn.Linear(16, 4)).double()"
    said = check(f"list(make(lambda o, b: {loss}, model={model}).steps(data))", tmp_path, code=1)
    assert re.search(
        r"^verdict: the same training on 3 workers as on one, but the loss is not a sum over rows \(two micro-batches "
        r"together give [\d.]+, one by one they give [\d.]+\)\. It is the same on any number of workers, but differs "
        r"from the loss that plain PyTorch computes over the full batch; return \(sum, count\), or pass "
        r"loss_over=\"batch\" to the Trainer for a loss over the full batch \(a contrastive loss\)\n\Z",
        said,
        re.M,
    )


def test_what_depends_on_the_worker_is_found(tmp_path):
    body = (
        "team = paceline.join()\n"
        "model = lambda: nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2)).double()\n"
        "loss = lambda o, b: F.cross_entropy(o * (1 + team.rank), b[1])\n"
        "list(make(loss, model=model).steps(data))\n"
    )
    said = check(body, tmp_path, code=1)
    assert "verdict: NOT the same training; largest differences: " in said
    first, second, third = differences(said)
    assert first < 1e-13 < 1e-3 < second
    assert third > 1e-3


@pytest.mark.slow
def test_what_differs_from_run_to_run_is_found(tmp_path):
    body = (
        "import zlib\n"
        "seed = zlib.crc32(os.environ['PACELINE_RUN_DIR'].encode())\n"  # one for all workers of a run
        "noise = torch.rand(96, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))\n"
        "list(make().steps(TensorDataset(x + noise, data.tensors[1])))\n"
    )
    said = check(body, tmp_path, code=1)
    assert "verdict: two runs with one worker already differ by more than rounding\n" in said


def test_a_script_that_ends_too_early(tmp_path):
    (tmp_path / "train.py").write_text("from basics import *\nlist(make().steps(data, count=2))\n")
    done = paceline("check", "train.py", cwd=tmp_path, code=2)
    assert done.stderr.endswith(
        "paceline: train.py could not be checked with 1 worker: it ended before step 5; "
        "see the output above, or use fewer --steps\n"
    )
