"""fp16 with a loss scale that all agree on, recomputed blocks, compiled ones: beside plain PyTorch in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agents import journal
from alone import trainer
from cases import rows as case_rows
from launching import equal_bytes, exported, train_basics
from oracle import apart
from safetensors.torch import load_file
from torch import nn

from paceline import sample_index, stream_seed
from paceline.compute.blocks import compiled, recompute
from paceline.compute.loss_scale import FIRST, GROWTH, LossScale

LOUD = 500.0  # what the loss is multiplied by: its gradients overflow fp16 at the first scale
BODY = (
    "def model(): return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))\n"
    "def loud(output, batch): return LOUD * F.cross_entropy(output, batch[1])\n"
    "t = paceline.Trainer(model, loud, lambda params: torch.optim.AdamW(params, lr=0.01), global_batch=24,\n"
    "    clip_norm=1.0, forward=lambda model, batch: model(batch[0].float()))\n"
    "for r in t.steps(data, count=12): pass\n"
    "t.export('out.safetensors')\n"
).replace("LOUD", str(LOUD))


def rows() -> torch.utils.data.TensorDataset:
    x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def by_hand(fp16: bool = True) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights, and the loss scales that were tried and left; without `fp16` all is computed in float32."""
    torch.manual_seed(stream_seed(0, 0, -1))
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=0.01), rows()
    scale, said = FIRST, []
    for step in range(12):
        epoch, first = divmod(24 * step, 96)
        found = [sample_index(place, 96, 0, epoch) for place in range(first, first + 24)]
        tried = scale
        while True:
            model.zero_grad()
            for some in (found[start : start + 3] for start in range(0, 24, 3)):
                x, y = (torch.stack(column) for column in zip(*(data[i] for i in some), strict=True))
                with torch.autocast("cpu", torch.float16, enabled=fp16):
                    loss = LOUD * F.cross_entropy(model(x.float()), y, reduction="sum")
                (loss * (tried / 24)).backward()
            if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
                break
            tried /= 2
        if tried < scale:
            said.append(f"loss scale {tried:g} from step {step + 2}")
        scale = tried
        for param in model.parameters():
            param.grad /= scale
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return dict(model.state_dict()), said


def scales(folder: Path) -> list[str]:
    told = (str(entry["what"]) for entry in journal(folder / "out", "decision"))
    return [what for what in told if what.startswith("loss scale")]


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (1, ""),
        pytest.param(2, "", marks=pytest.mark.slow),
        (2, "shard=2 zero=1"),
        pytest.param(3, "shard=3", marks=pytest.mark.slow),
        (2, "pipeline=2 schedule=zb"),
        pytest.param(2, "pipeline=2", marks=pytest.mark.slow),
        pytest.param(4, "data=2 pipeline=2 schedule=gpipe", marks=pytest.mark.slow),
        pytest.param(4, "shard=2 pipeline=2 zero=2", marks=pytest.mark.slow),
    ],
)
def test_fp16_takes_the_decisions_of_one_process(workers: int, words: str, tmp_path: Path) -> None:
    weights, said = by_hand()
    assert said, "the gradients were to overflow"
    found = exported(tmp_path / "team", BODY, workers, f"precision=fp16 {words}")
    assert scales(found.parent) == said
    assert apart(load_file(found), weights) <= 1e-3


@pytest.mark.parametrize(
    ("workers", "words"), [(2, "tensor=2"), pytest.param(4, "shard=2 tensor=2 zero=3", marks=pytest.mark.slow)]
)
def test_fp16_with_layers_in_parts_is_as_near_to_float32_as_one_process(
    workers: int, words: str, tmp_path: Path
) -> None:
    """Each worker rounds its part of a layer's sums to fp16, where one process rounds the sum."""
    weights, said = by_hand()
    plain, _ = by_hand(fp16=False)
    found = exported(tmp_path / "team", BODY, workers, f"precision=fp16 {words}")
    assert scales(found.parent) == said
    assert apart(load_file(found), plain) <= 1.5 * apart(weights, plain)


@pytest.mark.slow
def test_fp16_with_exact_has_the_bytes_of_one_worker(tmp_path: Path) -> None:
    found = []
    for workers, words in ((1, ""), (2, ""), (2, "shard=2 zero=1"), (3, "shard=3")):
        weights = exported(tmp_path / f"{workers} {words}", BODY, workers, f"precision=fp16 exact {words}")
        found.append((weights.read_bytes(), scales(weights.parent)))
    assert found[0][1]
    assert all(one == found[0] for one in found)


@pytest.mark.slow
def test_fp16_loss_scale_survives_a_resume(tmp_path: Path) -> None:
    train_basics(tmp_path, BODY, 1, "--plan", "precision=fp16 exact", "--steps", "5")
    told = scales(tmp_path)
    train_basics(tmp_path, BODY, 2, "--max-restarts", "0", "--plan", "precision=fp16 exact shard=2")
    assert scales(tmp_path) == told  # it overflowed in the first step, and never again
    resumed = (tmp_path / "out.safetensors").read_bytes()
    assert exported(tmp_path / "alone", BODY, 1, "precision=fp16 exact").read_bytes() == resumed


def test_fp16_loss_scale_grows_after_many_good_steps() -> None:
    scale = LossScale()
    assert scale.took(FIRST / 4) == "the gradients overflowed with a larger scale"
    assert [bool(scale.took(scale.scale)) for _ in range(GROWTH)] == [False] * (GROWTH - 1) + [True]
    assert (scale.scale, scale.good) == (FIRST / 2, 0)


def test_fp16_overflow_starts_the_count_of_good_steps_again() -> None:
    scale = LossScale()
    assert [scale.took(FIRST) for _ in range(GROWTH - 1)] == [""] * (GROWTH - 1)
    assert scale.took(FIRST / 2) == "the gradients overflowed with a larger scale"
    assert [bool(scale.took(FIRST / 2)) for _ in range(GROWTH)] == [False] * (GROWTH - 1) + [True]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["recompute=blocks", "recompute=blocks shard=2 zero=1", "recompute=blocks shard=2"])
def test_recompute_gives_the_same_bytes(words: str, tmp_path: Path) -> None:
    body = BODY.replace("nn.ReLU(), nn.Linear(24, 2)", "nn.Dropout(0.3), nn.Linear(24, 2)")
    kept, again = (exported(tmp_path / plan, body, 2, plan) for plan in ("exact", f"exact {words}"))
    assert kept.read_bytes() == again.read_bytes()


class Remembering(nn.Module):
    """A block whose output depends on a buffer that each forward changes, and with statistics of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.norms = nn.ModuleList([nn.BatchNorm1d(10), nn.BatchNorm1d(10, momentum=None)])
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen *= 0.9
        return self.norms[1](torch.tanh(self.norms[0](self.linear(x)) * self.seen)) * self.seen


def test_recompute_restores_buffers_and_updates_them_once() -> None:
    def make() -> nn.Module:
        return nn.Sequential(Remembering(), Remembering(), nn.Linear(10, 4)).double()

    found = []
    for plan in ("", "recompute=blocks"):
        mine = trainer(make, plan=plan)
        for _ in mine.steps(case_rows(1, 64, 10), epochs=3):
            pass
        found.append(mine.model.state_dict())
    assert {name for name in found[0] if not torch.equal(found[0][name], found[1][name])} == set()
    assert found[0]["0.norms.0.num_batches_tracked"] == 3 * 4 * 8  # of three epochs, their steps and micro-batches


def penalised(model: nn.Module, batch: Any) -> torch.Tensor:
    """As the critic of a WGAN-GP: the slope of the output is a part of what is trained."""
    points = batch[0].clone().requires_grad_()
    output = model(points)
    (slope,) = torch.autograd.grad(output.sum(), points, create_graph=True)
    return output * (1 + (slope.norm(dim=1, keepdim=True) - 1).square())


def test_recompute_with_a_gradient_penalty() -> None:
    def make() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.2), nn.BatchNorm1d(10), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*layers, nn.Linear(10, 4)).double()

    found = []
    for plan in ("", "recompute=blocks"):
        mine = trainer(make, forward=penalised, plan=plan)
        for _ in mine.steps(case_rows(1, 64, 10)):
            pass
        found.append(mine.model.state_dict())
    assert apart(found[1], found[0]) <= 1e-12


def test_recompute_refuses_a_model_without_blocks(tmp_path: Path) -> None:
    body = "t = make(model=lambda: nn.Linear(10, 2).double())\n"
    done = train_basics(tmp_path, body, 1, "--plan", "recompute=blocks", code=2)
    what = "recompute=blocks needs a list of repeated blocks, which the model does not have"
    said = f"UsageError: {what}; leave recompute= out"
    assert said in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "shard=2 zero=1", "shard=2 zero=2", "shard=2", "shard=2 recompute=blocks"])
def test_compile_gives_the_same_weights_and_names(words: str, tmp_path: Path) -> None:
    found = []
    for plan in (words, f"compile {words}"):
        weights = exported(tmp_path / f"plan {plan}", BODY, 2, plan)
        found.append(load_file(weights))
        assert ("compiled" in (weights.parent / "out" / "journal.jsonl").read_text()) == ("compile" in plan)
    assert apart(found[1], found[0]) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "words"),
    [(2, "pipeline=2"), (2, "pipeline=2 virtual=2 schedule=zb"), (4, "shard=2 pipeline=2 zero=3")],
)
def test_compiled_stages_give_the_same_weights(workers: int, words: str, tmp_path: Path) -> None:
    body = BODY.replace("nn.ReLU(), nn.Linear(24, 2)", "nn.ReLU(), nn.Linear(24, 24), nn.Linear(24, 2)")
    plain = load_file(exported(tmp_path / "plain", body, 1, ""))
    found = exported(tmp_path / "team", body, workers, f"compile {words}")
    assert "blocks are compiled separately" in (found.parent / "out" / "journal.jsonl").read_text()
    assert apart(load_file(found), plain) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_copy_of_a_compiled_model_computes_with_its_own_weights(recomputed: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if recomputed:
        recompute(model)
    compiled(model, by_block=recomputed, exact=True)
    x = torch.randn(3, 4)
    before, other = model(x), copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
        other[0].bias.fill_(1.0)
    assert torch.allclose(other(x), F.linear(torch.ones(3, 4), model[1].weight, model[1].bias))
    assert torch.equal(model(x), before)


@pytest.mark.slow
def test_a_compiled_model_with_exact_has_the_bytes_of_one_worker(tmp_path: Path) -> None:
    equal_bytes(tmp_path, BODY, 3, "compile", alone="compile exact")
