"""Models that are built without memory for large tensors: values, draws and ties are those of the plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from agents import journal
from launching import equal_bytes, exported, train_basics
from torch import nn

from paceline.compute.rng import RngState
from paceline.parallel.deferred_init import SMALL, build, strip
from paceline.plan import Plan
from paceline.session.validation import build_model


class Everything(nn.Module):
    """What models do while they are built."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(300, 300) for _ in range(3)])
        self.tokens = nn.Embedding(1000, 64, padding_idx=3)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.tokens.weight
        self.image = nn.Conv2d(64, 64, 3)
        self.orthogonal = nn.Parameter(torch.empty(200, 150))
        nn.init.orthogonal_(self.orthogonal)
        self.bounded = nn.Parameter(torch.empty(200, 150))
        nn.init.trunc_normal_(self.bounded, std=0.02, a=-0.02, b=0.02)  # draws until all are within
        self.register_buffer("frequencies", 1.0 / (10000 ** (torch.arange(0, 64, 2).float() / 64)))
        self.register_buffer("mask", torch.tril(torch.ones(200, 200)))
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 5)]
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2)
        self.plain = torch.eye(200)
        self.kept = {"pair": (torch.eye(300), 7), "small": [torch.ones(2)]}
        self.apply(self.begin)

    @staticmethod
    def begin(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.in_features == 300:
            module.weight.data.normal_(0, 0.02)
            module.weight.data[:10].zero_()
            if module.weight.std() > 1e9:  # a look into what has no values yet
                raise AssertionError


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make()


def test_deferred_init_has_the_values_and_draws_of_plain_construction() -> None:
    plain = seeded(Everything)
    drawn = torch.get_rng_state()
    torch.manual_seed(5)
    model, blueprint = build(Everything)
    assert torch.equal(torch.get_rng_state(), drawn)
    large = [name for name, param in model.named_parameters() if param.numel() > SMALL]
    assert len(large) > 10
    for name, param in model.named_parameters():
        assert torch.equal(blueprint.value(param), plain.get_parameter(name)), name
        assert torch.equal(torch.get_rng_state(), drawn), "asking for a value draws nothing"
    rest = {name: value for _, name, value in blueprint.other_tensors(model)}
    kept = rest.pop("kept")
    assert torch.equal(kept["pair"][0], torch.eye(300))
    assert (kept["pair"][1], kept["small"][0].tolist()) == (7, [1.0, 1.0])
    assert rest.keys() == {"frequencies", "mask", "plain"}
    assert all(torch.equal(value, getattr(plain, name)) for name, value in rest.items())
    assert model.rates == plain.rates
    strip(model)
    assert model.head.weight is model.tokens.weight
    assert all(param.is_meta for param in model.parameters())


def test_deferred_init_keeps_generators_and_default_dtype() -> None:
    """Both are something else by the time that a value is asked for."""

    def make() -> nn.Module:
        outside = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        generator = torch.Generator().manual_seed(3)
        made = nn.ParameterList([torch.rand(200, 200, generator=generator) for _ in range(3)])
        nn.init.normal_(made[1], generator=generator)
        torch.set_default_dtype(outside)
        return made

    plain = make()
    before = torch.get_default_dtype(), torch.get_rng_state()
    model, blueprint = build(make)
    for param, wanted in reversed(list(zip(model, plain, strict=True))):
        assert torch.equal(blueprint.value(param), wanted)
        assert wanted.dtype == torch.float64
    assert torch.get_default_dtype() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


class Table:
    def __init__(self) -> None:
        self.values = torch.randn(300, 300)
        self.me = self  # in a circle


@pytest.mark.parametrize("kept", [True, False])
def test_deferred_init_refuses_large_tensors_outside_of_modules(kept: bool) -> None:
    def make() -> nn.Module:
        model, table = nn.Linear(300, 300), Table()
        model.lists = [[torch.randn(300, 300)]]
        if kept:
            model.table = table
        return model

    if kept:
        with pytest.raises(
            NotImplementedError, match=r"^the model keeps large tensors outside of its modules \(in an object, "
        ):
            build(make)
    else:
        model, blueprint = build(make)
        assert [name for _, name, _ in blueprint.other_tensors(model)] == ["lists"]


def test_deferred_init_refuses_shapes_that_depend_on_values() -> None:
    with pytest.raises(RuntimeError):
        build(lambda: nn.Linear(300, 300).weight.nonzero())


def test_model_with_gradient_hooks_is_built_in_full() -> None:
    """Its parameters would be replaced by others without the hooks."""

    def hooked() -> nn.Module:
        layer = nn.Linear(300, 300)
        layer.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return layer

    device = torch.device("cpu")
    model, fields = build_model(hooked, device, RngState(device), 0, Plan.parse("pipeline=2"))
    assert fields.keys() == {"decisions", "skeleton", "trains"}
    assert fields["decisions"] == [("the complete model is built on each worker", "weight has a gradient hook")]
    assert model.weight._backward_hooks


BODY = (
    "def model():\n"
    "    net = nn.Sequential(nn.Linear(10, 200), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 200))\n"
    "    {look}\n"
    "    return net\n"
    "t = paceline.Trainer(model, cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1), global_batch=24,\n"
    "    forward=lambda model, batch: model(batch[0].float()))\n"
    "for r in t.steps(data, count=2): pass\n"
    "t.export('out.safetensors')\n"
)


@pytest.mark.parametrize(
    "look", [pytest.param("", marks=pytest.mark.slow), "net[1].weight.data[net[1].weight.data.nonzero()[0]] = 3.0"]
)
def test_deferred_init_under_shards_has_the_bits_of_one_worker(look: str, tmp_path: Path) -> None:
    body = BODY.format(look=look or "pass")
    equal_bytes(tmp_path, body, 2, "shard=2")
    whole = "the complete model is built on each worker"
    assert (whole in [entry["what"] for entry in journal(tmp_path / "several" / "out", "decision")]) == bool(look)


OF_ITS_OWN = """
from pathlib import Path
import paceline.parallel.deferred_init as blueprint
from paceline.parallel.tensor_parallel.script_view import script_view_off
made, plain = [], blueprint.DeferredInit.value
def value(self, tensor):
    made.append(tensor.numel() if tensor.requires_grad else 0)
    return plain(self, tensor)
blueprint.DeferredInit.value = value
def model():
    blocks = [nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200)) for _ in range(4)]
    return nn.Sequential(nn.Linear(10, 200), *blocks, nn.Linear(200, 200), nn.Dropout(0.1)).double()
def cut(**words):
    return paceline.Trainer(model, cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), global_batch=24, **words)
t = cut()
team = paceline.join()
with script_view_off(): kept = sum(param.numel() for param in t.model.parameters())  # a script sees the whole model's
Path(f"made-{team.rank}").write_text(f"{sum(made)} {kept}")
t.export("out.safetensors")
"""


@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        (2, "pipeline=2"),
        *[
            pytest.param(workers, plan, marks=pytest.mark.slow)
            for workers, plan in ((2, "pipeline=2 virtual=2"), (4, "pipeline=2 tensor=2"), (4, "data=2 pipeline=2"))
        ],
        pytest.param(4, "shard=2 zero=1 pipeline=2", marks=pytest.mark.slow),
        pytest.param(2, "tensor=2", marks=pytest.mark.slow),
    ],
)
def test_worker_initializes_only_its_own_parameters(workers: int, plan: str, tmp_path: Path) -> None:
    """The parameters of its own stages, and no others; of its parts of layers, one whole layer after another."""
    one, several = exported(tmp_path / "one", OF_ITS_OWN, 1, ""), exported(tmp_path / "cut", OF_ITS_OWN, workers, plan)
    assert one.read_bytes() == several.read_bytes()
    every = [[int(n) for n in (several.parent / f"made-{rank}").read_text().split()] for rank in range(workers)]
    _, whole = map(int, (one.parent / "made-0").read_text().split())
    tensor = 2 if "tensor" in plan else 1
    stages = {rank // tensor % 2: made for rank, (made, _) in enumerate(every)} if "pipeline" in plan else {0: whole}
    assert sum(stages.values()) == whole
    assert all(kept == made or (tensor == 2 and kept < 0.6 * made) for made, kept in every)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["shard=4", "pipeline=4"])
def test_full_model_is_never_in_memory(plan: str, tmp_path: Path) -> None:
    """640 MB of parameters over four workers: none of them ever needs memory for all, nor when the run is resumed."""
    body = (
        "import resource\n"
        "from pathlib import Path\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10\n"
        "def model(): return nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(40)])\n"
        "def make(function):\n"
        "    return paceline.Trainer(function, cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), global_batch=24)\n"
        "make(lambda: nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]))\n"  # what libraries take at the first use
        "before = peak()\n"
        "t = make(model)\n"
        "size = 40 * 2000 * 2001 * 4\n"
        "Path(f'peak-{paceline.join().rank}').write_text(str((peak() - before) / size))\n"
        "rows = torch.utils.data.TensorDataset(torch.arange(48000.0).sin().view(24, 2000), torch.zeros(24).long())\n"
        "for r in t.steps(rows, count=2): pass\n"
    )
    for options in (("--steps", "1"), ()):
        train_basics(tmp_path, body, 4, "--max-restarts", "0", "--plan", f"{plan} micro=6", *options)
        peaks = [float((tmp_path / f"peak-{rank}").read_text()) for rank in range(4)]
        assert all(0.25 < peak < 0.9 for peak in peaks), peaks
        (tmp_path / "peak-0").unlink()
