"""Training goes on from checkpoints of other programs: the next optimizer step is that program's own next step."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from basics import data, net
from conftest import running
from launching import train_basics, without_an_agent
from oracle import apart
from paths import SCRIPTS
from safetensors.torch import load_file, save_file
from saved_by_deepspeed import KINDS, Tiny, groups, rows
from saved_by_deepspeed import STEPS as DEEPSPEED_STEPS
from test_import_weights import imported
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.functional import cross_entropy

from paceline import Trainer, sample_index
from paceline.checkpoint.import_weights import import_model
from paceline.checkpoint.sources.deepspeed_folder import _groups

STEPS = 3  # that the other program makes before it saves
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "groups": lambda params: torch.optim.AdamW([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}], lr=0.05),
}
SCRIPT = """
t = paceline.Trainer(
    net, cross_entropy, lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1), global_batch=24
)
list(t.steps(data, count=1))
t.export("out.safetensors")
"""


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a step; those after the last step before the checkpoint are those of Paceline's first step."""
    places = [sample_index(place, len(data), 0, 0) for place in range(24)] if step == STEPS else range(step, 96, 4)
    return data.tensors[0][places], data.tensors[1][places]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


class Trained:
    """A model after STEPS steps of plain PyTorch, the state of its optimizer, and the weights one step later."""

    def __init__(self, kind: str, wrapped: Callable[[nn.Module], nn.Module] = lambda model: model, named: bool = False):
        torch.manual_seed(5)
        self.model = wrapped(net())
        params = [*(self.model.named_parameters() if named else self.model.parameters())]
        self.optimizer = OPTIMIZERS[kind](params)
        train(self.model, self.optimizer, 0, STEPS)

    def save(self, path: Path, **names: Any) -> dict[str, torch.Tensor]:
        """Saves both under these names, with what else is given; returns the weights after the next step."""
        made = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({name: made.get(str(value), value) for name, value in names.items()}, path)
        return self.next_weights()

    def next_weights(self) -> dict[str, torch.Tensor]:
        train(self.model, self.optimizer, STEPS, STEPS + 1)
        state = self.model.state_dict()
        return {name.replace("module.", "").replace("_orig_mod.", ""): value for name, value in state.items()}


@pytest.fixture
def step_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, torch.Tensor]]:
    return partial(next_weights, run=tmp_path / "run", patch=monkeypatch)


def next_weights(
    source: Path,
    run: Path,
    patch: pytest.MonkeyPatch,
    kind: str = "adamw",
    model: Callable[[], nn.Module] = net,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Imports a source, makes one step, and returns the weights."""
    text = import_model(source, run, **options)
    assert ", and the optimizer state (" in text
    with running(run, patch):
        trainer = Trainer(model, lambda out, rows: cross_entropy(out, rows[1]), OPTIMIZERS[kind], global_batch=24)
        list(trainer.steps(data, count=1, loader={"num_workers": 0}))
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}


# -- files of torch.save ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_torch_file(kind: str, step_from: Callable[..., Any], tmp_path: Path) -> None:
    trained = Trained(kind)
    wanted = trained.save(tmp_path / "a.pt", model="model", optimizer="optimizer", epoch=3)
    assert apart(step_from(tmp_path / "a.pt", kind=kind), wanted) <= 1e-12


class Wrapped(nn.Module):
    """Puts its name before those of the model, as DDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(x)
        return out


@pytest.mark.parametrize("named", [False, True])
def test_torch_file_of_a_wrapped_and_compiled_model(named: bool, step_from: Callable[..., Any], tmp_path: Path) -> None:
    trained = Trained("adamw", lambda model: Wrapped(torch.compile(model, backend="eager")), named)
    assert {*trained.model.state_dict()} >= {"module._orig_mod.0.weight"}
    wanted = trained.save(tmp_path / "a.bin", state_dict="model", optim="optimizer")
    assert apart(step_from(tmp_path / "a.bin"), wanted) <= 1e-12


def test_folder_of_the_trainer_of_transformers(step_from: Callable[..., Any], tmp_path: Path) -> None:
    trained, folder = Trained("adamw"), tmp_path / "checkpoint-3"
    folder.mkdir()
    save_file(dict(trained.model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(trained.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({}, folder / "scheduler.pt")
    assert apart(step_from(folder), trained.next_weights()) <= 1e-12


# -- other programs --------------------------------------------------------------------------------------------------


def saved_by(program: str, folder: Path, processes: int = 1) -> dict[str, torch.Tensor]:
    """Lets a program write its checkpoints into a folder; returns the weights after its next step."""
    folder.mkdir()
    rows = {f"{kind}{step}": part for step in range(STEPS + 1) for kind, part in zip("xy", batch(step), strict=True)}
    save_file({name: part.contiguous() for name, part in rows.items()}, folder / "rows.safetensors")
    ended = without_an_agent(*[[SCRIPTS / "saved_by_others.py", program, folder]] * processes)
    assert [code for code, _ in ended] == [0] * processes, ended
    return load_file(folder / "next.safetensors")


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("saved") / "fsdp"
    return folder, saved_by("fsdp", folder, 2)


@pytest.mark.parametrize("name", ["tutorial", "titan", "complete.pt"])
def test_fsdp(name: str, fsdp: tuple[Path, dict[str, torch.Tensor]], step_from: Callable[..., Any]) -> None:
    folder, wanted = fsdp
    assert apart(step_from(folder / name), wanted) <= 1e-12


def test_folder_of_torch_under_other_names(step_from: Callable[..., Any], tmp_path: Path) -> None:
    trained, folder = Trained("adamw"), tmp_path / "dcp"
    weights, optimizer = get_state_dict(trained.model, trained.optimizer)
    dcp.save({"model": weights, "optim": optimizer}, checkpoint_id=folder, no_dist=True)
    step = step_from(folder, model=lambda: Wrapped(net()), renames=["=module."])
    assert apart(step, {f"module.{name}": value for name, value in trained.next_weights().items()}) <= 1e-12


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("saved") / "accelerate"
    return folder, saved_by("accelerate", folder)


@pytest.mark.parametrize("name", ["safetensors", "torch"])
def test_accelerate(name: str, accelerate: tuple[Path, dict[str, torch.Tensor]], step_from: Callable[..., Any]) -> None:
    folder, wanted = accelerate
    assert apart(step_from(folder / name), wanted) <= 1e-12


@pytest.mark.slow
def test_accelerate_with_fsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    wanted = saved_by("accelerate_fsdp", tmp_path / "saved", 2)
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        assert apart(next_weights(tmp_path / "saved" / kind, tmp_path / kind, monkeypatch), wanted) <= 1e-12


def test_lightning(tmp_path: Path, step_from: Callable[..., Any]) -> None:
    pytest.importorskip("lightning")
    wanted = saved_by("lightning", tmp_path / "saved")
    assert apart(step_from(tmp_path / "saved" / "last.ckpt", renames=["net.="]), wanted) <= 1e-12


# -- DeepSpeed -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(Path(__file__).with_name("deepspeed.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("bf16")])
def test_deepspeed(
    kind: str, deepspeed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = torch.load(deepspeed / kind / "next.pt")
    import_model(deepspeed / kind, tmp_path / "run")
    before = imported(tmp_path / "run")
    own = saved["float32"]  # DeepSpeed's own conversion, which leaves frozen parameters out in stage 1
    assert {*before} - {*own} <= {"frozen"} if own else kind == "zero0"
    assert all(torch.equal(before[name], value) for name, value in own.items())

    def optimizer(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups(params), lr=0.02, weight_decay=0.1)

    with running(tmp_path / "run", monkeypatch):
        trainer = Trainer(Tiny, lambda out, batch: cross_entropy(out, batch[1]), optimizer, global_batch=24)
        steps = trainer.steps([*zip(*rows(DEEPSPEED_STEPS), strict=True)], count=1, loader={"num_workers": 0})
        list(steps)
        assert apart(dict(trainer.model.state_dict()), saved["weights"]) <= 1e-6
    assert apart(before, saved["weights"]) > 1e-3  # the step is not nothing
    assert "the optimizer's options" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("bf16")])
def test_options_of_deepspeed_are_compared_group_by_group(
    kind: str, deepspeed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_model(deepspeed / kind, tmp_path / "run")

    def optimizer(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        weights, biases = groups(params)
        return torch.optim.AdamW([weights, {**biases, "weight_decay": 0.05}], lr=0.02, weight_decay=0.1)

    with running(tmp_path / "run", monkeypatch):
        Trainer(Tiny, lambda out, batch: cross_entropy(out, batch[1]), optimizer, global_batch=24)
    line = "the optimizer's options are those of the script: weight_decay 0.05 instead of 0.0 in the import\n"
    assert line in capsys.readouterr().err


def test_a_group_of_deepspeed_may_have_several_vectors() -> None:
    """Stage 3 cuts a group of more than a billion elements."""
    saved = [{"lr": 1.0, "params": [0, 1]}, {"lr": 2.0, "params": [2]}]
    assert _groups(saved, [["a", "b"], ["c"], ["d"]]) == [
        {"lr": 1.0, "params": ["a", "b", "c"]},
        {"lr": 2.0, "params": ["d"]},
    ]


def test_deepspeed_in_bfloat16(deepspeed: Path, tmp_path: Path) -> None:
    """Its float32 weights are imported, and not those in bfloat16."""
    text = import_model(deepspeed / "zero1-bf16", tmp_path / "run")
    assert ", and the optimizer state (exp_avg, exp_avg_sq, step of 4 parameters); " in text
    before = imported(tmp_path / "run")
    assert {str(value.dtype) for value in before.values()} == {"torch.float32"}
    own = torch.load(deepspeed / "zero1-bf16" / "next.pt")["float32"]
    assert all(torch.equal(before[name], value) for name, value in own.items())
    rounded = torch.load(next((deepspeed / "zero1-bf16").glob("*/mp_rank_00_model_states.pt")))["module"]
    assert not torch.equal(rounded["head.weight"].float(), own["head.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "shard=2 zero=1",
        "shard=2 zero=2",
        "shard=2 zero=3",
        "tensor=2",
        "pipeline=2",
        "server=1",
        "local=1 every=1 outer=sgd:1",
        "data=2 exact",
    ],
)
def test_plans(plan: str, tmp_path: Path) -> None:
    wanted = Trained("adamw").save(tmp_path / "a.pt", model="model", optimizer="optimizer")
    import_model(tmp_path / "a.pt", tmp_path / "out")
    done = train_basics(tmp_path, SCRIPT, 2, "--plan", plan)
    assert "starting from the weights and the optimizer state imported from" in done.stderr
    assert apart(load_file(tmp_path / "out.safetensors"), wanted) <= 1e-12
