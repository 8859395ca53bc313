"""Optimizer states in 8 bits (`optimizer_states=int8`) beside the same in plain PyTorch: AdamW in float32, whose states
are rounded after each update to what 8 bits hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import journal
from checkpoints import find_checkpoint
from launching import exported, exported_once, train_basics
from oracle import apart, built, grid
from safetensors.torch import load_file
from torch import nn

from paceline.checkpoint.tree import unflatten
from paceline.compute.int8_states import BLOCK, Int8States, decode, encode, state_bytes
from paceline.team.fault_injection import read_log

STEPS, BATCH, CLIP = 8, 24, 1.0
BODY = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 300), nn.Linear(300, 16)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))
def model():
    return nn.Sequential(nn.Linear(10, 16), Block(), Block(), nn.Linear(16, 2))
def summed(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
def optimizer(params):
    params = [param for _, param in params] if isinstance(params[0], tuple) else list(params)
    flat, deep = [p for p in params if p.dim() < 2], [p for p in params if p.dim() > 1]
    groups = [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))
def forward(model, batch):
    return model(batch[0].float())
rate = lambda step: 1 / (1 + step)
"""
TRAIN = """
t = paceline.Trainer(model, summed, optimizer, global_batch=24, clip_norm=1.0, forward=forward, schedule=rate)
for report in t.steps(data, count=8): pass
t.export("out.safetensors")
"""
MADE: dict[str, Any] = {}
exec("import torch, torch.nn.functional as F\nfrom torch import nn\n" + BODY, MADE)
INT8 = "optimizer_states=int8"


def data() -> Any:
    x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def rounded(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """Each value as the square or the fourth power of a multiple of 1/127 or 1/255 of its block's largest value."""
    power, codes = (2, 127) if signed else (4, 255)
    result = values.clone()
    for row in result.flatten(1):
        count = -(-len(row) // BLOCK)
        for block in row.split(-(-len(row) // count)):
            largest = block.abs().max()
            roots = (block.double().abs() / largest.double()) ** (1 / power)
            block.copy_((roots * codes).round().div(codes).pow(power) * largest * block.sign())
    return result


class ByHand:
    """A training in plain PyTorch, whose states are rounded where `int8`."""

    def __init__(self, int8: bool = True) -> None:
        self.int8, self.model = int8, built(MADE["model"])
        self.optimizer = MADE["optimizer"](list(self.model.parameters()))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, MADE["rate"])

    def train(self, first: int = 0, end: int = STEPS) -> dict[str, torch.Tensor]:
        for (batch,) in grid(data(), BATCH, BATCH, count=end)[first:]:
            self.model.zero_grad()
            total, count = MADE["summed"](MADE["forward"](self.model, batch), batch)
            (total / count).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.schedule.step()
            if self.int8:
                self.round_states()
        return dict(self.model.state_dict())

    def round_states(self) -> None:
        for param, state in self.optimizer.state.items():
            if param.dim() > 1 and param.numel() >= 4096:
                state["exp_avg"] = rounded(state["exp_avg"], signed=True)
                state["exp_avg_sq"] = rounded(state["exp_avg_sq"], signed=False)


def states_in(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    checkpoint = find_checkpoint(folder / "out", print)
    assert checkpoint is not None
    tree = unflatten(checkpoint.manifest["tree"]["trainers"][0]["optimizers"][0], checkpoint.tensors())
    states: dict[str, dict[str, torch.Tensor]] = tree["state"]
    return states


def test_one_worker_trains_as_a_loop_by_hand(tmp_path: Path) -> None:
    hand = ByHand()
    weights = hand.train()
    found = load_file(exported(tmp_path / "one", BODY + TRAIN, 1, f"micro=24 {INT8}"))
    near, far = apart(found, weights), apart(found, ByHand(int8=False).train())
    assert near < far / 50
    states, names = states_in(tmp_path / "one"), [name for name, _ in hand.model.named_parameters()]
    assert states.keys() == {*names}
    for name, param in hand.model.named_parameters():
        for key, state in hand.optimizer.state[param].items():
            # A value between two codes may be rounded to either.
            near_ones = torch.isclose(states[name][key], state, rtol=0.04, atol=1e-6)
            assert near_ones.double().mean() > 0.999
            torch.testing.assert_close(states[name][key], state, rtol=0.1, atol=1e-6)
            assert states[name][key].dtype == torch.float32


PLANS = (
    (2, ""),
    (2, "shard=2 zero=2"),
    (3, "shard=3"),
    (4, "data=2 shard=2 zero=1"),
    (2, "tensor=2"),
    (4, "shard=2 zero=3 tensor=2"),
    (2, "pipeline=2"),
    (4, "shard=2 zero=1 pipeline=2"),
)


@pytest.mark.parametrize(
    ("workers", "words"),
    [(2, "shard=2 zero=1"), *[pytest.param(*plan, marks=pytest.mark.slow) for plan in PLANS]],
)
def test_many_workers_are_as_near_to_float32_as_one_process(workers: int, words: str, tmp_path: Path) -> None:
    """They add gradients in another order, and some states are rounded to neighbouring codes."""
    plain = exported(tmp_path / "plain", BODY + TRAIN, 1, "micro=24")
    found = load_file(exported(tmp_path / "team", BODY + TRAIN, workers, f"micro=6 {INT8} {words}"))
    assert apart(found, load_file(plain)) <= 1.5 * apart(ByHand().train(), ByHand(int8=False).train())


PURE = "precision=bf16:pure"


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """What one worker exports with `exact` and these words of a plan."""
    return partial(exported_once, tmp_path_factory, BODY + TRAIN)


@pytest.mark.parametrize(
    ("precision", "plans"),
    [
        ("", ((2, "shard=2"),)),
        pytest.param("", ((3, ""), (2, "shard=2 zero=1"), (4, "data=2 shard=2 zero=2")), marks=pytest.mark.slow),
        *[pytest.param(words, ((2, "shard=2"),), marks=pytest.mark.slow) for words in (PURE, f"{PURE},stochastic")],
    ],
)
def test_exact_sums_give_the_bytes_of_one_worker(
    precision: str, plans: Any, alone: Callable[[str], bytes], tmp_path: Path
) -> None:
    """Blocks lie within rows, so that shards have the blocks of the full parameters."""
    words = f"{INT8} {precision}".strip()
    for workers, plan in plans:
        found = exported(tmp_path / f"plan {plan}", BODY + TRAIN, workers, f"{words} exact {plan}")
        assert found.read_bytes() == alone(words)


@pytest.mark.parametrize(
    "chain",
    [
        ((2, "shard=2 zero=1"), (3, "shard=3")),
        pytest.param(((1, ""), (2, "shard=2 zero=1"), (2, "shard=2"), (2, "")), marks=pytest.mark.slow),
    ],
)
def test_resume_under_another_plan_continues_exactly(chain: Any, alone: Callable[[str], bytes], tmp_path: Path) -> None:
    for number, (workers, words) in enumerate(chain, 1):
        stop = ("--steps", str(2 * number)) if number < len(chain) else ()
        train_basics(tmp_path, BODY + TRAIN, workers, "--plan", f"{INT8} exact {words}", "--max-restarts", "0", *stop)
    assert (tmp_path / "out.safetensors").read_bytes() == alone(INT8)


@pytest.mark.parametrize(
    ("before", "after", "workers"),
    [(INT8, "shard=2", 2), pytest.param("", f"{INT8} pipeline=2", 2, marks=pytest.mark.slow)],
)
def test_resume_with_and_without_the_word(before: str, after: str, workers: int, tmp_path: Path) -> None:
    train_basics(tmp_path, BODY + TRAIN, 1, "--plan", f"micro=24 {before}", "--steps", "6")
    train_basics(tmp_path, BODY + TRAIN, workers, "--plan", f"micro=24 {after}", "--max-restarts", "0")
    hand = ByHand(int8=INT8 in before)
    hand.train(end=6)
    hand.round_states()
    hand.int8 = INT8 in after
    assert apart(load_file(tmp_path / "out.safetensors"), hand.train(first=6)) <= 2e-5


@pytest.mark.parametrize(
    ("words", "workers", "chaos"),
    [
        ("shard=2 zero=1", 4, "kill:3@3.summed"),
        pytest.param("", 3, "kill:0@3.reduced,kill:2@7.forward", marks=pytest.mark.slow),
        pytest.param("shard=2", 4, "kill:1@4.applied", marks=pytest.mark.slow),
    ],
)
def test_killed_workers_come_back_with_their_states(
    words: str, workers: int, chaos: str, alone: Callable[[str], bytes], tmp_path: Path
) -> None:
    train_basics(tmp_path, BODY + TRAIN, workers, "--plan", f"{INT8} exact {words}", chaos=chaos)
    assert len(read_log(tmp_path / "out")) == len(chaos.split(","))
    assert (tmp_path / "out.safetensors").read_bytes() == alone(INT8)


def test_memory_is_two_bytes_for_each_element(tmp_path: Path) -> None:
    body = BODY.replace(
        "nn.Linear(10, 16), Block()", "nn.Linear(10, 16), nn.Linear(16, 2560), nn.Linear(2560, 16), Block()"
    )
    train_basics(tmp_path, body + TRAIN, 1, "--plan", f"micro=24 {INT8}")
    (memory,) = journal(tmp_path / "out", "memory")
    params = [param for block in (nn.Linear(16, 2560), nn.Linear(2560, 16)) for param in block.parameters()]
    more = 2 * (2560 * 16 + 2560 * 4) + 2 * (16 * 2560 + 16 * 10 * 4)  # codes, and a scale for a block
    assert more == sum(state_bytes(param.shape) for param in params if param.dim() == 2)
    hand = list(MADE["model"]().parameters())
    small = sum(8 * p.numel() for p in [*hand, *params] if p.dim() < 2 or p.numel() < 4096)
    blocks = 2 * (2 * (300 * 16 + 300 * 4) + 2 * (16 * 300 + 16 * 2 * 4))
    assert memory["optimizer"] == pytest.approx(more + blocks + small, abs=4 * (len(hand) + len(params)))


@pytest.mark.parametrize(
    ("made", "what", "cure"),
    [
        ("SGD(params, lr=0.1)", "SGD", "use AdamW"),
        ("AdamW(params, amsgrad=True)", "AdamW with amsgrad=True", "leave amsgrad out"),
    ],
)
def test_other_optimizers_are_refused(made: str, what: str, cure: str, tmp_path: Path) -> None:
    body = BODY + f"optimizer = lambda params: torch.optim.{made}\n" + TRAIN
    done = train_basics(tmp_path, body, 1, "--plan", INT8, code=2)
    error = f"optimizer_states=int8 needs torch.optim.AdamW or torch.optim.Adam, but the optimizer is {what}"
    assert f"UsageError: {error}; {cure}, or leave optimizer_states out of the plan" in " ".join(done.stderr.split())


def test_hooks_of_the_script_see_all_gradients_once_in_a_step() -> None:
    large, small = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.Adam([large, small], lr=0.1)
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(large.grad is not None and small.grad is not None))
    Int8States(optimizer, {param: param.shape for param in (large, small)})
    for param in (large, small):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert seen == [True]
    assert torch.equal(large.detach(), small.detach().expand(64, 64))
    assert large.grad is not None
    assert optimizer.state[large]["exp_avg codes"].dtype == torch.int8


# -- quantization ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(37, 300), (64, 64), (3, 4, 700), (50, 1), (0, 400)])
@pytest.mark.parametrize("signed", [True, False])
def test_values_are_rounded_in_blocks_of_rows(shape: tuple[int, ...], signed: bool) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-6, 3, shape[-1])
    values = values if signed else values.square()
    codes, scales = encode(values, signed)
    made = decode(codes, scales, signed)
    assert (codes.element_size(), codes.shape) == (1, values.shape)
    torch.testing.assert_close(made, rounded(values, signed))
    # Encoded again they stay as they are, and a shard of rows is a shard of the codes.
    assert all(map(torch.equal, encode(made, signed), (codes, scales)))
    assert all(map(torch.equal, encode(values[1:9], signed), (codes[1:9], scales[1:9])))


def test_zeros_stay_zeros() -> None:
    for signed in (True, False):
        assert not decode(*encode(torch.zeros(3, 300), signed), signed).any()
        assert math.isnan(decode(*encode(torch.full((1, 4), math.nan), signed), signed).sum())
