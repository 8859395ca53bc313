"""Operations of models: as closed formulas give them, the same under every plan, and shown with the speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agents import journal
from launching import paceline
from torch import nn

from paceline.base.device_peaks import peak_of
from paceline.compute.model_flops import ModelSkeleton
from paceline.observe.summary import Summary
from paceline.train.step_observers import FlopsObserver

ROWS, TOKENS, WIDTH, WORDS = 2, 32, 64, 500
IDS = torch.randint(0, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
COMMON = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}


def language_model(layers: int, weights: float, extra: float = 0.0) -> float:
    """Each of the `weights` in the matrices of a layer takes six operations per token. Attention multiplies queries by
    keys and weights by values, which are twelve per pair of tokens and dimension.
    """
    return 6 * TOKENS * (layers * weights + WIDTH * WORDS + extra) + 12 * layers * TOKENS**2 * WIDTH


def gpt2() -> tuple[nn.Module, float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=WIDTH, n_layer=4, n_head=4, **COMMON)
    return GPT2LMHeadModel(config), language_model(4, 12 * WIDTH**2)


def llama() -> tuple[nn.Module, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(intermediate_size=96, **HEADS, **COMMON)
    return LlamaForCausalLM(config), language_model(3, 3 * WIDTH**2 + 3 * WIDTH * 96)


def mixtral() -> tuple[nn.Module, float]:
    """Two of eight experts compute each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(intermediate_size=96, num_local_experts=8, num_experts_per_tok=2, **HEADS, **COMMON)
    return MixtralForCausalLM(config), language_model(3, 3 * WIDTH**2 + 2 * 3 * WIDTH * 96 + 8 * WIDTH)


def gpt_oss() -> tuple[nn.Module, float]:
    """Its weights of experts are transposed, and have biases."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        intermediate_size=96, num_local_experts=8, num_experts_per_tok=2, head_dim=16, **HEADS, **COMMON
    )
    return GptOssForCausalLM(config), language_model(3, 3 * WIDTH**2 + 2 * 3 * WIDTH * 96 + 8 * WIDTH)


@pytest.mark.parametrize("make", [gpt2, llama, mixtral, gpt_oss])
@pytest.mark.parametrize("given", ["ids", "mask", "labels"])
def test_flops_of_language_models_are_those_of_the_formula(make: Callable[[], Any], given: str) -> None:
    """Also if the forward looks at a mask, or computes the loss itself."""
    model, expected = make()
    words: dict[str, Any] = {"ids": {}, "mask": {"attention_mask": torch.ones_like(IDS)}, "labels": {"labels": IDS}}
    batch = {"input_ids": IDS, **words[given]}
    found = ModelSkeleton(model).count(lambda model, batch: model(**batch), batch, ROWS)
    assert not found.is_estimated
    assert not found.uncounted
    assert found.per_row == pytest.approx(expected, rel=0.02 if "num_local_experts" in vars(model.config) else 1e-3)


def test_flops_of_a_vision_transformer_and_of_a_residual_network() -> None:
    from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

    images = torch.randn(ROWS, 3, 32, 32)
    config = ViTConfig(intermediate_size=96, image_size=32, patch_size=8, **{k: HEADS[k] for k in [*HEADS][:2]})
    config.num_hidden_layers = 3
    vit, patches = ViTForImageClassification(config), 16
    expected = 6 * (patches + 1) * 3 * (4 * WIDTH**2 + 2 * WIDTH * 96) + 12 * 3 * (patches + 1) ** 2 * WIDTH
    expected += 4 * patches * 3 * 64 * WIDTH + 6 * WIDTH * 2  # images have no gradient; the head takes one token
    found = ModelSkeleton(vit).count(lambda model, batch: model(batch).logits, images, ROWS)
    assert (found.per_row, found.is_estimated) == (pytest.approx(expected, rel=1e-3), False)

    resnet = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    )
    sizes: list[float] = []

    def add(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        weight = module.weight
        places = output.numel() / output.shape[1] / ROWS if weight.dim() == 4 else 1
        sizes.append((4 if not sizes else 6) * places * weight.numel())

    for module in resnet.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(add)  # type: ignore[arg-type]
    resnet(images)
    forward_hooks_stay = len(sizes)
    found = ModelSkeleton(resnet).count(lambda model, batch: model(batch).logits, images, ROWS)
    assert found.per_row == pytest.approx(sum(sizes[:forward_hooks_stay]), rel=1e-3)


def test_flops_of_a_model_that_looks_at_values_are_estimated() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer = nn.Embedding(50, 8), nn.Linear(8, 8, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.words(ids)
            out: torch.Tensor = self.layer(x[x.sum(-1).abs() > float(x.mean())])
            return out

    model = Looks()
    ids = torch.randint(0, 50, (4, 10))
    found = ModelSkeleton(model).count(lambda model, batch: model(batch), ids, 4)
    assert (found.per_row, found.is_estimated) == (6 * 64 * 10, True)
    assert all(param.device.type == "cpu" and param.grad is None for param in model.parameters())


def test_count_leaves_the_model_as_it_is() -> None:
    """Lists, counters and methods that the model refers to are copied, objects of other kinds are shared."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(4, 4)]  # no list of modules
            self.head, self.seen = nn.Linear(4, 4), [0]
            self.method = self.head.forward
            self.shared = object()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen[0] += 1
            out: torch.Tensor = self.method(F.relu(self.layers[0](x)))
            return out

    model = Counts()
    found = ModelSkeleton(model).count(lambda model, batch: model(batch), torch.randn(3, 4), 3)
    assert (found.per_row, found.is_estimated) == ((4 + 6) * 16, False)
    assert model.seen == [0]
    assert model(torch.randn(1, 4)).device.type == "cpu"


SCRIPT = """
import torch, torch.nn as nn, torch.nn.functional as F, paceline
from paceline.train.step_observers import FlopsObserver
FlopsObserver.AFTER = 0.0
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
data = torch.utils.data.TensorDataset(torch.randint(0, 40, (64, 6), generator=torch.Generator().manual_seed(0)))
trainer = paceline.Trainer(
    Model,
    loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[0].flatten()),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch=8,
)
for _ in trainer.steps(data, count=16): pass
"""


def test_collective_in_a_forward_is_not_called_by_one_worker_alone(tmp_path: Path) -> None:
    """Then the operations are estimated."""
    call = 'paceline.join().all_reduce(x.detach().sum(), "of the forward")'
    called = SCRIPT.replace("        return self.head(x)\n", f"        {call}\n        return self.head(x)\n")
    (tmp_path / "train.py").write_text(called.replace("global_batch=8", 'global_batch=8, plan="micro=4"'))
    paceline("run", "--workers", "2", "--run-dir", "run", "train.py", cwd=tmp_path)
    (event,) = journal(tmp_path / "run", "flops")
    assert event["estimated"]


@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        "tensor=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (
                "shard=2 zero=3",
                "pipeline=2",
                "context=2",
                "local=2 every=2",
                "server=1",
                "data=2 recompute=blocks",
                "micro=4",
            )
        ),
    ],
)
def test_flops_are_the_same_under_every_plan_and_in_the_report(plan: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    workers = "1" if "micro" in plan else "2"
    paceline("run", "--workers", workers, "--run-dir", "run", "--plan", plan, "train.py", cwd=tmp_path)
    (event,) = journal(tmp_path / "run", "flops")
    assert event["per_row"] == 6 * 6 * (2 * 2 * 8 * 32 + 8 * 40)
    assert (event["estimated"], event["uncounted"], event["device"]) == (False, [], "cpu")
    summary = Summary(tmp_path / "run")
    assert summary.flops_per_second == event["per_row"] * summary.samples_per_second  # type: ignore[operator]
    assert summary.utilisation is None
    report = " ".join(paceline("report", "run", cwd=tmp_path).stdout.split())
    assert "FLOP/s, of the model, without recomputation" in report


def test_state_that_a_forward_changes_is_as_without_the_count(tmp_path: Path) -> None:
    counts = SCRIPT.replace(
        "        return self.head(x)\n", "        trainer.state['forwards'] += 1\n        return self.head(x)\n"
    )
    counts = counts.replace("for _ in trainer", "trainer.state['forwards'] = 0\nfor _ in trainer")
    found = []
    for after in ("0.0", "1e9"):
        ends = f"from pathlib import Path\nPath('forwards{after}').write_text(str(trainer.state['forwards']))\n"
        (tmp_path / "train.py").write_text(counts.replace("AFTER = 0.0", f"AFTER = {after}") + ends)
        paceline("run", "--run-dir", f"run{after}", "--plan", "micro=8", "train.py", cwd=tmp_path)
        found.append(int((tmp_path / f"forwards{after}").read_text()))
    assert len(journal(tmp_path / "run0.0", "flops")) == 1
    assert found[0] == found[1]


def test_all_observers_see_the_step_in_which_flops_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlopsObserver, "AFTER", 0.0)
    seen: list[object] = []
    context: Any = SimpleNamespace(job=SimpleNamespace(skeleton=None), observers=[])
    context.run = SimpleNamespace(team=SimpleNamespace(group=SimpleNamespace(rank=1)))
    context.observers += [FlopsObserver(context), seen.append]
    for step in ("first", "second"):
        for observe in context.observers:
            observe(step)
    assert seen == ["first", "second"]
    assert context.observers == [seen.append]


@pytest.mark.parametrize(
    ("device", "plan", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "precision=bf16", 989e12),
        ("NVIDIA H100 PCIe", "data=2 precision=fp16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "precision=bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "data=2", None),
        ("NVIDIA H200", "data=2 precision=fp8", 2 * 989e12),
        ("cpu", "precision=bf16", None),
    ],
)
def test_peak_of_a_device_is_that_of_its_data_sheet(device: str, plan: str, peak: float | None) -> None:
    assert peak_of(device, plan) == peak


def test_operations_are_known_by_module() -> None:
    """Products and attention of each block of a GPT are those of the formula, and the rest is the head's."""
    model, _ = gpt2()
    found = ModelSkeleton(model).count(lambda model, batch: model(batch), IDS, ROWS)
    block = found.modules["transformer.h.3"]
    assert block.products == 2 * ROWS * TOKENS * 12 * WIDTH**2
    assert block.attention == 2 * 2 * ROWS * TOKENS**2 * WIDTH
    assert 20 < block.calls < 200
    assert [found.modules[f"transformer.h.{number}"] for number in range(3)] == [block] * 3
    whole = found.modules[""]
    assert whole.products == 4 * block.products + 2 * ROWS * TOKENS * WIDTH * WORDS
    assert whole.attention == 4 * block.attention
    assert found.per_row * ROWS == pytest.approx(3 * (whole.products + whole.attention))
