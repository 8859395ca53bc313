"""paceline.lightning against Lightning's own Trainer, and its tables against Lightning's own signatures."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import blocks_of
from launching import SCRIPTS, free_port, paceline
from lazily import Lazily
from once import once
from paths import DOCS
from plain_python import python_train
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset
from warm import environment

from paceline.errors import UsageError
from paceline.integrations.lightning import arguments
from paceline.integrations.lightning.optimizers import read_configuration

lightning = Lazily("lightning")
SCRIPT = SCRIPTS / "lightning_cases.py"
KINDS = ["plain", "cosine", "epochs", "plateau", "groups"]


def run_alone(folder: Path, kind: str, how: str, **words: Any) -> None:
    """Runs the script with `python`: by Lightning, or by Paceline on one worker."""
    body = (
        f"import runpy, sys; sys.argv[1:] = {[kind, how, 'out', json.dumps(words)]!r}; runpy.run_path({str(SCRIPT)!r})"
    )
    (folder / "train.py").write_text(body)
    python_train(folder)


def oracle(factory: pytest.TempPathFactory, kind: str, **words: Any) -> Path:
    """The folder with what Lightning's own Trainer computes on one process."""
    name = f"lightning {kind} {json.dumps(words)}".replace("/", " ")
    return once(factory, name, lambda folder: run_alone(folder, kind, "plain", **words))


def assert_equal(folder: Path, wanted: Path) -> dict[str, Any]:
    """Compares weights, metrics, rates and hooks. Returns the values of the run in `folder`."""
    values, reference = (json.loads((one / "out.json").read_text()) for one in (folder, wanted))
    weights, others = load_file(folder / "out.safetensors"), load_file(wanted / "out.safetensors")
    assert weights.keys() == others.keys()
    for name, value in others.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)
    assert values["metrics"] == pytest.approx(reference["metrics"], abs=1e-6)
    assert values["rates"] == pytest.approx(reference["rates"], rel=1e-6)
    assert values["test_loss"] == pytest.approx(reference["test_loss"], abs=1e-6)
    assert values["steps"] == reference["steps"]
    assert values["events"] == reference["events"][: len(values["events"])]  # test() prepares data again in Lightning
    return dict(values)


def test_one_worker_trains_as_lightning(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    run_alone(tmp_path, "cosine", "paceline")
    assert assert_equal(tmp_path, oracle(tmp_path_factory, "cosine"))["steps"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_form_of_optimizer_and_scheduler(
    kind: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    run_alone(tmp_path, kind, "paceline")
    assert_equal(tmp_path, oracle(tmp_path_factory, kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"),
    [("plateau", "data=2"), ("cosine", "shard=2"), ("epochs", "tensor=2"), ("cosine", "pipeline=2")],
)
def test_two_workers_train_as_lightning(
    kind: str, plan: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    options = ("--workers", "2", "--max-restarts", "0", "--plan", plan, "--run-dir", "run")
    paceline("run", *options, SCRIPT, kind, "paceline", "out", cwd=tmp_path)
    assert_equal(tmp_path, oracle(tmp_path_factory, kind))


SMALL = """
import paceline, torch
from lightning.pytorch.demos.boring_classes import BoringModel
torch.manual_seed(0)
paceline.lightning.trainer(BoringModel(), global_batch=4, steps=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "code"), [("data=2", 0), ("pipeline=2", 2)])
def test_model_of_one_layer_trains_and_has_no_stages(plan: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    done = paceline("run", "--workers", "2", "--plan", plan, "small.py", cwd=tmp_path, code=code)
    text = "finished at step 2" if code == 0 else "BoringModel has no list of repeated blocks; pipeline= splits exactly"
    assert text in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        {"val_check_interval": 2, "limit_val_batches": 1},
        {"check_val_every_n_epoch": 2, "max_epochs": 3},
        {"stop": True, "max_epochs": 5},
    ],
)
def test_validation_and_stopping_as_lightning(
    words: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    run_alone(tmp_path, "plain", "paceline", **words)
    values = assert_equal(tmp_path, oracle(tmp_path_factory, "plain", **words))
    assert values["steps"] == {"val_check_interval": 8, "check_val_every_n_epoch": 12, "stop": 8}[next(iter(words))]


@pytest.mark.slow
def test_killed_worker_and_resumed_run(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    command = ("run", "--workers", "2", "--run-dir", "run", "--save-every", "2")
    script = (SCRIPT, "plateau", "paceline", "out")
    paceline(*command, "--steps", "5", *script, cwd=tmp_path)
    assert not (tmp_path / "out.json").exists()
    done = paceline(*command, *script, cwd=tmp_path, PACELINE_CHAOS="kill:1@7.forward")
    assert "step 5" in done.stderr  # of the checkpoint
    assert "SIGKILL" in done.stderr
    values, wanted = (
        json.loads((one / "out.json").read_text()) for one in (tmp_path, oracle(tmp_path_factory, "plateau"))
    )
    assert values["metrics"] == pytest.approx(wanted["metrics"], abs=1e-6)
    assert values["steps"] == wanted["steps"]


@pytest.mark.slow
def test_strategy_equals_ddp_over_gloo(tmp_path: Path) -> None:
    """Two processes, as torchrun starts them: the same bits as Lightning's strategy over gloo."""
    results = []
    for how in ("strategy", "ddp"):
        folder = tmp_path / how
        folder.mkdir()
        port = str(free_port())
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
        subprocess.run([*command, str(SCRIPT), "cosine", how, "out"], cwd=folder, env=environment(), check=True)
        results.append((json.loads((folder / "out.json").read_text()), load_file(folder / "out.safetensors")))
    (values, weights), (others, other_weights) = results
    assert values == others
    assert all(torch.equal(weights[name], value) for name, value in other_weights.items())


@pytest.mark.slow
def test_fabric_strategy_reduces_over_two_processes(tmp_path: Path) -> None:
    body = """
import json, torch, lightning
from paceline.lightning import PacelineFabricStrategy
fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=PacelineFabricStrategy())
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
rows = torch.arange(12.0).reshape(4, 3)[fabric.global_rank * 2 :][:2]
fabric.backward(model(rows).square().mean())
optimizer.step()
total = fabric.all_reduce(torch.tensor(fabric.global_rank * 3 + 1), reduce_op="mean")
if fabric.is_global_zero:
    values = {"total": int(total), "weight": model.weight.tolist(), "backend": torch.distributed.get_backend()}
    json.dump(values, open("out.json", "w"))
"""
    (tmp_path / "train.py").write_text(body)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    subprocess.run([*command, "train.py"], cwd=tmp_path, env=environment(), check=True)
    values = json.loads((tmp_path / "out.json").read_text())
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()
    wanted = model.weight - 0.1 * model.weight.grad
    assert values["backend"] == "paceline"
    assert values["total"] == 2
    assert values["weight"] == [pytest.approx(wanted[0].tolist(), rel=1e-5)]


# -- tables ----------------------------------------------------------------------------------------------------------


def names_of(function: Any) -> set[str]:
    return {name for name in inspect.signature(function).parameters if name != "self"}


def each_once(names: set[str], *tables: Any) -> None:
    listed = [name for table in tables for name in table]
    assert len(listed) == len(set(listed))
    assert set(listed) >= names, sorted(names - set(listed))


def test_every_argument_of_the_trainer_is_in_one_table() -> None:
    tables = (arguments.USED, arguments.NO_EFFECT, arguments.REFUSED)
    each_once(names_of(lightning.Trainer.__init__), *tables)
    assert {name for table in tables for name in table} <= names_of(lightning.Trainer.__init__)


def test_every_argument_of_log_is_in_one_table() -> None:
    names = names_of(lightning.LightningModule.log) | names_of(lightning.LightningModule.log_dict)
    each_once(names, arguments.LOG_USED, arguments.LOG_NO_EFFECT, arguments.LOG_REFUSED)


def test_every_hook_is_in_one_table() -> None:
    hooks = lightning.pytorch.core.hooks
    homes = (hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks)
    names = {name for home in homes for name in vars(home) if not name.startswith("_")}
    module = vars(lightning.LightningModule)
    prefixes = ("on_", "configure_", "optimizer_", "lr_scheduler_")
    methods = [name for name, value in module.items() if inspect.isfunction(value)]
    names |= {name for name in methods if name.startswith(prefixes) or name.endswith("_step") or "backward" in name}
    each_once(names, arguments.HOOKS, arguments.HOOKS_REFUSED, arguments.HOOKS_NO_EFFECT)


def test_every_page_row_names_its_argument() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from" / "lightning.md").read_text()
    tables = (arguments.USED, arguments.NO_EFFECT, arguments.REFUSED, arguments.HOOKS_REFUSED)
    assert [name for table in tables for name in table if f"`{name}`" not in page] == []


# -- refusals --------------------------------------------------------------------------------------------------------


@cache
def net_class() -> Any:
    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net


@pytest.mark.parametrize("name", sorted(arguments.HOOKS_REFUSED.keys() - {"state_dict", "load_state_dict"}))
def test_overridden_hook_is_refused_by_name(name: str) -> None:
    kind = type("Overrides", (net_class(),), {name: lambda self, *_: None})
    with pytest.raises(UsageError, match=rf"Overrides\.{name}\(\) cannot be used"):
        arguments.check_hooks(kind(), None)


def test_manual_optimization_is_refused() -> None:
    module = net_class()()
    module.automatic_optimization = False
    with pytest.raises(UsageError, match="automatic_optimization = False"):
        arguments.check_hooks(module, None)


@pytest.mark.parametrize("name", sorted(arguments.REFUSED))
def test_argument_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}='other' cannot be used"):
        arguments.check_words({name: "other"}, lightning.pytorch)


def test_arguments_with_their_defaults_are_accepted() -> None:
    parameters = inspect.signature(lightning.Trainer.__init__).parameters
    arguments.check_words({name: p.default for name, p in parameters.items() if name != "self"}, lightning.pytorch)


@pytest.mark.parametrize(
    ("callback", "named"),
    [
        (lambda: lightning.pytorch.callbacks.ModelCheckpoint(), "ModelCheckpoint"),
        (
            lambda: type("Own", (lightning.Callback,), {"on_train_batch_end": lambda *_: None})(),
            "Own has on_train_batch_end",
        ),
    ],
    ids=["ModelCheckpoint", "on_train_batch_end"],
)
def test_callback_within_a_step_is_refused(callback: Callable[[], Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        arguments.check_callbacks([callback()])


def test_several_optimizers_are_refused() -> None:
    one, other = (torch.optim.SGD(net_class()().parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(UsageError, match="returned 2 optimizers"):
        read_configuration([one, other])


def test_scheduler_of_another_optimizer_is_refused() -> None:
    one, other = (torch.optim.SGD(net_class()().parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(UsageError, match="StepLR belongs to another optimizer"):
        read_configuration(([one], [torch.optim.lr_scheduler.StepLR(other, 1)]))


# -- in the step -----------------------------------------------------------------------------------------------------

STEPS = {
    "world_size": ("self.trainer.world_size", "the module asks for trainer.world_size"),
    "unknown": ("self.trainer.predict_loop", "the module asks for trainer.predict_loop"),
    "list": ("self.losses.append(1)", "training_step() changes self.losses"),
    "stop": ("setattr(self.trainer, 'should_stop', True)", "sets trainer.should_stop within a step"),
}


@pytest.mark.slow
def test_what_a_step_cannot_do_is_refused(tmp_path: Path) -> None:
    body = f"""
import json, lightning, paceline, torch
from torch.utils.data import DataLoader, TensorDataset
class Net(lightning.LightningModule):
    def __init__(self, code):
        super().__init__()
        self.layer, self.losses, self.code = torch.nn.Linear(2, 1), [], code
    def training_step(self, batch, batch_idx):
        eval(self.code)
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
rows = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
messages = []
for code in {[code for code, _ in STEPS.values()]}:
    try:
        paceline.lightning.trainer(Net(code), rows, steps=1)
    except paceline.PacelineError as error:
        messages.append(str(error))
json.dump(messages, open("messages.json", "w"))
"""
    (tmp_path / "train.py").write_text(body)
    python_train(tmp_path)
    messages = json.loads((tmp_path / "messages.json").read_text())
    assert len(messages) == len(STEPS)
    for message, (_, wanted) in zip(messages, STEPS.values(), strict=True):
        assert wanted in message


# -- rows ------------------------------------------------------------------------------------------------------------


def loader(**words: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10)), **{"batch_size": 2, **words})


@pytest.mark.slow
def test_the_script_of_the_page_trains_on_two_workers(tmp_path: Path) -> None:
    script = next(block for block in blocks_of((DOCS / "coming-from/lightning.md").read_text()) if block.file)
    (tmp_path / "train.py").write_text(script.text)
    done = paceline("run", "--workers", "2", "--run-dir", "run", "train.py", cwd=tmp_path)
    assert re.search(r"^right: 9\d%$", done.stdout, re.MULTILINE), done.stdout
    assert len(load_file(tmp_path / "model.safetensors")) == 6
