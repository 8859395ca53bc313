"""Linear layers in 8 bits (`precision=fp8`) beside torchao's float8 training by hand. Without a GPU, torchao emulates
the products of 8-bit matrices.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import journal
from launching import paceline as command
from launching import train_basics
from oracle import apart, built, grid
from safetensors.torch import load_file
from torch import nn

from paceline.compute import float8_linear
from paceline.compute.float8_linear import use_float8
from paceline.errors import UsageError

# transformers imports torchao wherever it is installed, which takes seconds and prints warnings on a CPU.
LACKING = "no torchao here: pip install --no-deps torchao"
NEEDS_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason=LACKING)
STEPS, BATCH, MICRO = 6, 24, 4
WARM = {"WARM_WITH": "torchao.float8"}
EMULATED = """
from functools import partial
import torchao.float8
from paceline.compute import float8_linear
float8_linear.refuse_device = lambda device: None
torchao.float8.Float8LinearConfig = partial(torchao.float8.Float8LinearConfig, emulate=True)
"""
BODY = """
from expert_models import Mixture
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)
        self.mixture = Mixture(4, width=16)
    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.mixture(x)[0]
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(10, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
model = lambda: Model().double()
def summed(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
def optimizer(params):
    return torch.optim.AdamW(params, lr=0.01)
"""
TRAIN = """
import os
options = {"global_batch": 24, "plan": os.environ["WORDS"], "clip_norm": 1.0}
t = paceline.Trainer(model, summed, optimizer, **options)
for report in t.steps(data, count=6): pass
t.export("out.safetensors")
"""
MADE: dict[str, Any] = {}
exec("import torch, torch.nn.functional as F\nfrom torch import nn\n" + BODY, MADE)


def data() -> Any:
    x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def converted(model: nn.Module, **options: Any) -> nn.Module:
    """What torchao itself makes of a model."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(pad_inner_dim=True, **options)
    within = lambda module, name: name.endswith(("up", "down"))
    return convert_to_float8_training(model, config=config, module_filter_fn=within)


def by_hand(
    in_8_bits: range = range(STEPS), device: str = "cpu", dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """Trains in one process; these steps with torchao's layers."""
    plain = built(MADE["model"]).to(device, dtype)
    model = converted(copy.deepcopy(plain), emulate=device == "cpu")
    for name, param in plain.named_parameters():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, param)
    update = MADE["optimizer"](plain.parameters())
    for step, batch in enumerate(grid(data(), BATCH, MICRO, count=STEPS)):
        update.zero_grad()
        for rows, labels in batch:
            micro_batch = rows.to(device, dtype), labels.to(device)
            with torch.autocast(device, torch.bfloat16):
                output = (model if step in in_8_bits else plain)(micro_batch[0])
                total, _ = MADE["summed"](output, micro_batch)
            total.mul(1 / BATCH).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        update.step()
    return dict(plain.state_dict())


def run(folder: Path, workers: int, words: str, *options: str) -> None:
    env = {"WORDS": f"micro={MICRO} {words}", **WARM}
    train_basics(folder, EMULATED + BODY + TRAIN, workers, *options, **env)


def trained(folder: Path, workers: int, words: str) -> dict[str, torch.Tensor]:
    run(folder, workers, words)
    return load_file(folder / "out.safetensors")


PLANS = [
    (1, ""),
    (3, ""),
    (2, "exact"),
    (2, "server=1"),
    (2, "shard=2 zero=1"),
    (2, "shard=2 zero=2"),
    (4, "shard=2 zero=3"),
    (2, "pipeline=2"),
    (2, "pipeline=2 schedule=zb"),
    (2, "recompute=blocks"),
    (2, "tiles=2"),
    (2, "expert=2"),
    (2, "shard=2 recompute=blocks"),
]


@NEEDS_TORCHAO
@pytest.mark.parametrize(
    ("workers", "words"),
    [(2, "data=2"), *(pytest.param(*plan, marks=pytest.mark.slow) for plan in PLANS)],
)
def test_emulated_layers_train_as_torchao_by_hand(workers: int, words: str, tmp_path: Path) -> None:
    weights = by_hand()
    assert apart(weights, by_hand(range(0))) > 1e-3, "8 bits would make no difference"
    found = trained(tmp_path, workers, f"precision=fp8 {words}")
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in weights.items()}
    assert apart(found, weights) <= 1e-12
    decisions = [str(event["what"]) for event in journal(tmp_path / "out", "decision")]
    stays = "first (outside of blocks), head (outside of blocks), blocks.0.mixture.router (16 x 4), "
    stays += "blocks.1.mixture.router (16 x 4) and 1 more"
    assert f"6 linear layers compute in 8 bits; in bfloat16: {stays}" in decisions


@NEEDS_TORCHAO
@pytest.mark.slow
def test_exact_sums_give_the_bytes_of_one_worker(tmp_path: Path) -> None:
    weights = []
    for workers in (1, 3):
        folder = tmp_path / f"workers-{workers}"
        folder.mkdir()
        weights.append(trained(folder, workers, "precision=fp8 exact"))
    one, three = weights
    assert all(torch.equal(one[name], three[name]) for name in one)


@NEEDS_TORCHAO
@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("precision=fp8", "precision=bf16 shard=2"), ("", "precision=fp8")])
def test_resume_with_and_without_8_bits(before: str, after: str, tmp_path: Path) -> None:
    """A checkpoint holds the weights as a plan without the word does."""
    run(tmp_path, 1, before, "--steps", "3")
    found = trained(tmp_path, 2, after)
    steps = range(3) if before else range(3, STEPS)
    assert apart(found, by_hand(steps)) <= 1e-12


@NEEDS_TORCHAO
@pytest.mark.slow
@pytest.mark.parametrize("words", ["compile", "compile shard=2 zero=3"])
def test_compiled_layers_train_as_uncompiled_ones(words: str, tmp_path: Path) -> None:
    """Other kernels round otherwise, and so do 8 bits then."""
    plain, found = by_hand(range(0)), trained(tmp_path, 2, f"precision=fp8 {words}")
    assert apart(found, by_hand()) <= apart(found, plain) / 4


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchao.float8

    monkeypatch.setattr(float8_linear, "refuse_device", lambda device: None)
    emulating = partial(torchao.float8.Float8LinearConfig, emulate=True)
    monkeypatch.setattr(torchao.float8, "Float8LinearConfig", emulating)


CPU = torch.device("cpu")


def block() -> nn.Module:
    return built(MADE["Block"])


@NEEDS_TORCHAO
@pytest.mark.usefixtures("emulated")
def test_a_layer_without_tokens_has_zero_gradients() -> None:
    model = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 2)])
    use_float8(model, CPU)
    output = model[0](torch.zeros(0, 16))
    assert output.shape == (0, 32)
    output.sum().backward()
    assert model[0].weight.grad is not None
    assert not model[0].weight.grad.any()


@NEEDS_TORCHAO
@pytest.mark.usefixtures("emulated")
def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2))
    use_float8(model, CPU)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    other, before = copy.deepcopy(model), model(x)
    for param in other.parameters():
        param.detach().zero_()
    assert not other(x).any()
    assert torch.equal(model(x), before)


@NEEDS_TORCHAO
@pytest.mark.usefixtures("emulated")
def test_models_without_layers_for_8_bits_are_refused() -> None:
    what = "ModuleList has no linear layer that precision=fp8 could compute in 8 bits: in repeated blocks, with sizes "
    what += "that are multiples of 16"
    with pytest.raises(UsageError) as caught:
        use_float8(nn.ModuleList([nn.Linear(16, 20), nn.Linear(20, 16)]), CPU)
    assert str(caught.value) == f"{what}; use precision=bf16"


NEEDS = "precision=fp8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell)"


def test_devices_without_8_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        use_float8(block(), CPU)
    assert str(caught.value) == f"{NEEDS}, and this worker computes on cpu; use precision=bf16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(UsageError) as caught:
        use_float8(block(), torch.device("cuda", 0))
    assert str(caught.value) == f"{NEEDS}, and NVIDIA A100-SXM4-80GB has 8.0; use precision=bf16"


def test_a_missing_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_linear, "refuse_device", lambda device: None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UsageError) as caught:
        use_float8(block(), CPU)
    assert str(caught.value) == "precision=fp8 needs torchao; pip install 'paceline[fp8]'"


def test_a_host_without_gpu_is_refused_before_workers_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    run = ("run", "--run-dir", "out", "--plan", "precision=fp8", "train.py")
    done = command(*run, cwd=tmp_path, code=2, CUDA_VISIBLE_DEVICES="")
    assert done.stderr == f"paceline: {NEEDS}, and this host has no GPU; use precision=bf16\n"
    assert not (tmp_path / "out").exists()


@NEEDS_TORCHAO
@pytest.mark.gpu
@pytest.mark.parametrize("words", ["", "compile"])
def test_cuda_layers_train_as_torchao_by_hand(words: str, tmp_path: Path) -> None:
    """`make gpu` compares the time of a larger model."""
    if torch.cuda.get_device_capability() < float8_linear.CAPABILITY:
        pytest.skip(f"{torch.cuda.get_device_name()} has no products of 8-bit matrices")
    body = BODY.replace(".double()", "") + "forward = lambda model, batch: model(batch[0].float())\n"
    env = {"WORDS": f"micro={MICRO} precision=fp8 {words}", **WARM}
    train_basics(tmp_path, body + TRAIN.replace('"clip_norm"', '"forward": forward, "clip_norm"'), 1, **env)
    losses = []
    for weights in (load_file(tmp_path / "out.safetensors"), by_hand(device="cuda", dtype=torch.float32)):
        model = MADE["Model"]()
        model.load_state_dict(weights)
        rows, labels = data()[:]
        losses.append(nn.functional.cross_entropy(model(rows.float()), labels).item())
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
