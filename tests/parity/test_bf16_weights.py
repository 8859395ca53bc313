"""Weights in bfloat16 (`precision=bf16:pure`) beside the same in plain PyTorch: a bfloat16 model, float32 copies of its
weights, AdamW on the copies, and the copies rounded into the weights after each update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import find_checkpoint
from launching import exported, exported_once, train_basics
from oracle import apart, built, grid
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.base.sharding import ShardingSpec
from paceline.checkpoint.tree import unflatten
from paceline.compute.master_weights import follow, round_stochastically
from paceline.team.fault_injection import read_log

STEPS, BATCH, CLIP = 8, 24, 1.0
BODY = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))
def model():
    return nn.Sequential(nn.Linear(10, 16), Block(), Block(), nn.Linear(16, 2))
def summed(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
def optimizer(params):
    return torch.optim.AdamW(params, lr=0.01, foreach=True)
def forward(model, batch):
    return model(batch[0].float())
"""
TRAIN = """
t = paceline.Trainer(model, summed, optimizer, global_batch=24, clip_norm=1.0, forward=forward)
for report in t.steps(data, count=8): pass
t.export("out.safetensors")
"""
MADE: dict[str, Any] = {}
exec("import torch, torch.nn.functional as F\nfrom torch import nn\n" + BODY, MADE)
PURE, STOCHASTIC = "precision=bf16:pure", "precision=bf16:pure,stochastic"


class ByHand:
    """A training in plain PyTorch. `masters` are the float32 weights by name."""

    def __init__(self, bf16: bool = True) -> None:
        self.bf16 = bf16
        self.model = built(MADE["model"]).to(torch.bfloat16 if bf16 else torch.float32)
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in self.model.named_parameters()}
        self.optimizer = MADE["optimizer"](list(self.masters.values()))

    def train(self, data: Any, first: int = 0, end: int = STEPS, stochastic: bool = False) -> dict[str, torch.Tensor]:
        for step, batches in list(enumerate(grid(data, BATCH, BATCH, count=end)))[first:]:
            (batch,) = batches
            self.model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                total, count = MADE["summed"](MADE["forward"](self.model, batch), batch)
            (total / count).backward()
            grads = [param.grad for param in self.model.parameters() if param.grad is not None]
            norm = math.sqrt(sum(float(grad.norm(dtype=torch.float32)) ** 2 for grad in grads))
            for (name, param), grad in zip(self.model.named_parameters(), grads, strict=True):
                if stochastic:
                    self.masters[name].detach().copy_(param)
                self.masters[name].grad = grad.float() * min(1.0, CLIP / (norm + 1e-6))
            self.optimizer.step()
            for name, param in self.model.named_parameters():
                master = self.masters[name].detach()
                if stochastic:
                    round_stochastically(
                        master, ShardingSpec.unsharded(master.shape).at(0), master.shape, f"0/{step}/{name}"
                    )
                param.detach().copy_(master)
        return dict(self.model.state_dict())


def data() -> Any:
    x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def masters_in(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = find_checkpoint(folder / "out", print)
    assert checkpoint is not None
    masters: dict[str, torch.Tensor] = unflatten(
        checkpoint.manifest["tree"]["trainers"][0]["masters"], checkpoint.tensors()
    )
    return masters


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """What one worker exports with `exact` and these words of a plan."""
    return partial(exported_once, tmp_path_factory, BODY + TRAIN)


@pytest.mark.parametrize("words", [PURE, STOCHASTIC])
def test_one_worker_has_the_bits_of_a_loop_by_hand(words: str, tmp_path: Path) -> None:
    hand = ByHand()
    weights = hand.train(data(), stochastic=words == STOCHASTIC)
    found = load_file(exported(tmp_path / "one", BODY + TRAIN, 1, f"micro=24 {words}"))
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(weights, torch.bfloat16)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    kept = masters_in(tmp_path / "one")
    expected = {} if words == STOCHASTIC else hand.masters
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (2, f"{PURE} shard=2 zero=1"),
        *[
            pytest.param(workers, f"{precision} {words}".strip(), marks=pytest.mark.slow)
            for precision in (PURE, STOCHASTIC)
            for workers, words in (
                (2, ""),
                (4, "data=2 shard=2 zero=1"),
                (2, "shard=2 zero=2"),
                (3, "shard=3"),
                (2, "shard=2 offload=cpu"),
                (2, "tensor=2"),
                (4, "shard=2 zero=3 tensor=2"),
                (2, "pipeline=2"),
                (2, "pipeline=2 schedule=zb"),
                (4, "shard=2 zero=1 pipeline=2"),
            )
        ],
    ],
)
def test_many_workers_are_as_near_to_float32_as_one_process(workers: int, words: str, tmp_path: Path) -> None:
    """Workers round the sums of their micro-batches to bfloat16, where one process rounds the sum of all."""
    plain = ByHand(bf16=False).train(data())
    weights = ByHand().train(data(), stochastic=STOCHASTIC in words)
    found = load_file(exported(tmp_path / "team", BODY + TRAIN, workers, f"micro=6 {words}"))
    assert apart(found, plain) <= 1.5 * apart(weights, plain)


@pytest.mark.parametrize(
    ("precision", "plans"),
    [
        (STOCHASTIC, ((2, "shard=2"),)),
        *[
            pytest.param(
                precision,
                ((3, ""), (2, "shard=2 zero=1"), (2, "shard=2 zero=2"), (3, "shard=3")),
                marks=pytest.mark.slow,
            )
            for precision in (PURE, STOCHASTIC)
        ],
    ],
)
def test_exact_sums_give_the_bytes_of_one_worker(
    precision: str, plans: Any, alone: Callable[[str], bytes], tmp_path: Path
) -> None:
    """Also where weights are rounded stochastically: draws belong to the elements of the full parameters."""
    for workers, words in plans:
        found = exported(tmp_path / f"plan {words}", BODY + TRAIN, workers, f"{precision} exact {words}")
        assert found.read_bytes() == alone(precision)


CHAIN = ((1, ""), (2, "shard=2 zero=1"), (2, "shard=2"), (2, ""))


@pytest.mark.parametrize(
    ("precision", "chain"),
    [
        (PURE, CHAIN[1:3]),
        pytest.param(PURE, CHAIN, marks=pytest.mark.slow),
        pytest.param(STOCHASTIC, CHAIN, marks=pytest.mark.slow),
    ],
)
def test_resume_under_another_plan_continues_exactly(
    precision: str, chain: Any, alone: Callable[[str], bytes], tmp_path: Path
) -> None:
    for number, (workers, words) in enumerate(chain, 1):
        stop = ("--steps", str(2 * number)) if number < len(chain) else ()
        plan = ("--plan", f"{precision} exact {words}", "--max-restarts", "0")
        train_basics(tmp_path, BODY + TRAIN, workers, *plan, *stop)
    assert (tmp_path / "out.safetensors").read_bytes() == alone(precision)


@pytest.mark.parametrize(
    ("before", "after", "workers"), [(PURE, "shard=2", 2), pytest.param("", PURE, 1, marks=pytest.mark.slow)]
)
def test_resume_in_another_precision_continues_from_the_float32_weights(
    before: str, after: str, workers: int, tmp_path: Path
) -> None:
    """From master copies to a float32 model, and back: none is rounded on the way."""
    train_basics(tmp_path, BODY + TRAIN, 1, "--plan", f"micro=24 {before}", "--steps", "6")
    train_basics(tmp_path, BODY + TRAIN, workers, "--plan", f"micro=24 {after}", "--max-restarts", "0")
    first, second = ByHand(bf16=bool(before)), ByHand(bf16=after == PURE)
    first.train(data(), end=6)
    for name, param in second.model.named_parameters():
        second.masters[name].detach().copy_(first.masters[name])
        param.detach().copy_(first.masters[name])
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    expected = second.train(data(), first=6)
    assert apart(load_file(tmp_path / "out.safetensors"), expected) <= 1e-6


@pytest.mark.parametrize(
    ("words", "workers", "chaos"),
    [
        ("shard=2 zero=1", 4, "kill:3@3.summed"),
        pytest.param("", 3, "kill:0@3.reduced,kill:2@7.forward", marks=pytest.mark.slow),
        pytest.param("shard=2", 4, "kill:1@4.applied", marks=pytest.mark.slow),
    ],
)
def test_killed_workers_come_back_with_their_master_copies(
    words: str, workers: int, chaos: str, alone: Callable[[str], bytes], tmp_path: Path
) -> None:
    train_basics(tmp_path, BODY + TRAIN, workers, "--plan", f"{PURE} exact {words}", chaos=chaos)
    assert len(read_log(tmp_path / "out")) == len(chaos.split(","))
    assert (tmp_path / "out.safetensors").read_bytes() == alone(PURE)


@pytest.mark.slow
def test_an_optimizer_of_full_parameters_updates_the_master_copies(tmp_path: Path) -> None:
    body = BODY + "from optimizers import both\n" + TRAIN.replace("summed, optimizer", "summed, both")
    one, two = (
        load_file(exported(tmp_path / str(workers), body, workers, f"micro=24 {PURE} {words}"))
        for workers, words in ((1, ""), (2, "shard=2"))
    )
    assert apart(two, one) <= 1e-3


def test_an_optimizer_of_full_parameters_beside_offload_is_refused(tmp_path: Path) -> None:
    body = BODY + "from optimizers import both\n" + TRAIN.replace("summed, optimizer", "summed, both")
    done = train_basics(tmp_path, body, 2, "--plan", f"{PURE} shard=2 offload=cpu", code=2)
    what = "precision=bf16:pure with offload=cpu does not support optimizers that update full parameters yet"
    cure = "leave offload out, or use an optimizer that updates each element by itself (AdamW)"
    assert f"UsageError: {what}; {cure}" in " ".join(done.stderr.split())


def test_weights_that_the_script_changes_count(tmp_path: Path) -> None:
    """Their master copies take the new value, the others keep theirs."""
    body = BODY + TRAIN.replace(": pass", ":\n    with torch.no_grad():\n        t.model[0].weight.clamp_(-0.2, 0.2)")
    found = load_file(exported(tmp_path / "one", body, 1, f"micro=24 {PURE}"))
    hand = ByHand()
    for step in range(STEPS):
        hand.train(data(), first=step, end=step + 1)
        with torch.no_grad():
            clipped = hand.model[0].weight.abs() > 0.2
            hand.model[0].weight.clamp_(-0.2, 0.2)
            hand.masters["0.weight"][clipped] = hand.model[0].weight[clipped].float()
    assert all(torch.equal(found[name], tensor) for name, tensor in hand.model.state_dict().items())


def test_imported_float32_weights_become_the_master_copies(tmp_path: Path) -> None:
    from paceline.checkpoint.import_weights import import_model

    weights = built(MADE["model"], seed=5).state_dict()
    save_file(weights, tmp_path / "first.safetensors")
    import_model(tmp_path / "first.safetensors", tmp_path / "out")
    train_basics(tmp_path, BODY + TRAIN.replace("count=8", "count=0"), 1, "--plan", PURE)
    train_basics(tmp_path, BODY + TRAIN.replace("count=8", "count=1"), 1, "--plan", f"micro=24 {PURE}")
    hand = ByHand()
    for name, param in hand.model.named_parameters():
        hand.masters[name].detach().copy_(weights[name])
        param.detach().copy_(weights[name])
    expected = hand.train(data(), end=1)
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# -- stochastic rounding --------------------------------------------------------------------------------------------


def rounded(values: torch.Tensor, key: str = "key") -> torch.Tensor:
    made = values.clone()
    round_stochastically(made, ShardingSpec.unsharded(values.shape).at(0), tuple(values.shape), key)
    return made


def test_stochastic_rounding_keeps_the_expected_value() -> None:
    values = torch.randn(512, 1, generator=torch.Generator().manual_seed(0)).expand(512, 4096).contiguous()
    made = rounded(values)
    assert torch.equal(made.bfloat16().float(), made)
    spacing = torch.exp2(values.abs().log2().floor() - 7)  # between two values of bfloat16, which has 8 bits
    assert bool(((made - values).abs() < spacing).all())
    # Five standard deviations of a mean of 4096 draws, of which none deviates by more than half a spacing.
    off = ((made - values).mean(1) / spacing[:, 0]).abs()
    assert float(off.max()) < 5 * 0.5 / 4096**0.5
    # Draws of other keys, and those of neighbours, are independent.
    up = [(rounded(torch.full((1 << 18,), 1 + 2.0**-8), key) > 1).double() for key in ("one", "other")]
    for first, second in ((up[0], up[1]), (up[0][1:], up[0][:-1])):
        assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.01


def test_stochastic_rounding_keeps_values_of_bfloat16() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -3.0, math.inf, -math.inf, 2.0**-133], dtype=torch.float32)
    assert torch.equal(rounded(values), values)
    assert bool(rounded(torch.tensor([math.nan], dtype=torch.float32)).isnan().all())
    assert rounded(torch.tensor(2.5, dtype=torch.float32)) == 2.5


@pytest.mark.parametrize(
    "spec",
    [
        ShardingSpec.unsharded((37, 50)).in_rows(4),
        ShardingSpec.split((37, 50), 1, 3, sections=[20, 30]),
        ShardingSpec.split((37, 50), 0, 2).in_rows(3),
    ],
)
def test_a_shard_is_rounded_as_in_the_full_tensor(spec: ShardingSpec) -> None:
    values = torch.randn(37, 50, generator=torch.Generator().manual_seed(0))
    full = rounded(values)
    for piece in spec.pieces:
        local = piece.of(values).clone()
        round_stochastically(local, piece, (37, 50), "key")
        assert torch.equal(local, piece.of(full))


def test_a_master_copy_follows_only_weights_that_it_does_not_round_to() -> None:
    master = torch.tensor([1.001, 2.0, 3.003], dtype=torch.float32)
    weight = torch.tensor([1.0, 5.0, 3.0], dtype=torch.bfloat16)
    follow(master, weight)
    assert torch.equal(master, torch.tensor([1.001, 5.0, 3.003], dtype=torch.float32))
