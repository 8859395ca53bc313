"""Weights from elsewhere: a run that begins with them trains as plain PyTorch does from the same ones, or refuses."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from basics import data, net
from checkpoints import find_checkpoint, list_checkpoints
from launching import paceline, train_basics
from oracle import apart
from paths import SCRIPTS
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from test_checkpoint_tree import refusal, same
from test_checkpoint_write import equal
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import sample_index
from paceline.checkpoint.import_weights import adopted, import_model
from paceline.checkpoint.tree import unflatten
from paceline.errors import CheckpointError, LaunchError, UsageError

STEPS = 10  # two epochs and a half of four steps
BODY = f"""
t = paceline.Trainer(
    net, cross_entropy, lambda params: torch.optim.AdamW(params, lr=0.05), global_batch=24,
    schedule=lambda step: 1 / (1 + step),
)
before = t.evaluate(data, lambda out, batch: {{"loss": (F.cross_entropy(out, batch[1], reduction="sum"), len(out))}})
for report in t.steps(data, count={STEPS}):
    time.sleep(0.2 if "KILL_AT" in os.environ else 0)  # a checkpoint is written meanwhile
    if os.environ.get("KILL_AT") == str(report.step) and t.main:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
t.export("out.safetensors")
if t.main:
    print("before", before["loss"])
"""
SCRIPT = "import os, signal, time\n" + BODY


def weights(seed: int = 5) -> dict[str, torch.Tensor]:
    """Weights of the script's model that no seed of the script makes."""
    torch.manual_seed(seed)
    return {name: torch.randn_like(value) for name, value in net().state_dict().items()}


def by_hand(state: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss over the data before, and the weights after, the script's training: a plain loop from `state`."""
    model = net()
    model.load_state_dict(state)
    with torch.no_grad():
        before = float(cross_entropy(model(data.tensors[0]), data.tensors[1]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        epoch, first = step // 4, step % 4 * 24
        rows = [sample_index(place, len(data), 0, epoch) for place in range(first, first + 24)]
        optimizer.zero_grad()
        cross_entropy(model(data.tensors[0][rows]), data.tensors[1][rows]).backward()
        optimizer.step()
        schedule.step()
    return before, dict(model.state_dict())


def imported(run: Path, trainer: int = 0) -> dict[str, Any]:
    found = find_checkpoint(run, pytest.fail)
    assert found is not None
    assert found.step == 0
    state: dict[str, Any] = unflatten(found.manifest["tree"], found.tensors())["trainers"][trainer]["model"]
    return state


def bare(folder: Path, state: dict[str, torch.Tensor], name: str = "m.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(state, folder / name, metadata={"format": "pt"})
    return folder / name


def sharded(folder: Path, *groups: dict[str, torch.Tensor]) -> Path:
    places = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        bare(folder, group, file)
        places.update(dict.fromkeys(group, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_training_with_imported_weights_is_that_of_plain_pytorch(workers: int, tmp_path: Path) -> None:
    paceline("import", bare(tmp_path, weights()), "out", cwd=tmp_path)
    done = train_basics(tmp_path, SCRIPT, workers)
    before, wanted = by_hand(weights())
    assert f"starting from the weights imported from {tmp_path}/m.safetensors\n" in done.stderr
    assert "resuming" not in done.stderr
    assert "has changed" not in done.stderr
    assert float(done.stdout.removeprefix("before ")) == pytest.approx(before, rel=1e-12)
    assert apart(load_file(tmp_path / "out.safetensors"), wanted) <= 1e-12
    _, from_the_seed = by_hand(dict(net().state_dict()))
    assert apart(from_the_seed, wanted) > 0.1  # the comparison would show other weights


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["2", "7"])
def test_resume_of_a_run_that_began_with_an_import(kill: str, tmp_path: Path) -> None:
    """Killed before its first checkpoint, and after it; the evaluation before training is the first one's."""
    import_model(bare(tmp_path, weights()), tmp_path / "out")
    (tmp_path / "train.py").write_text("from basics import *\n" + SCRIPT)
    words = ("run", "--workers", "2", "--run-dir", "out", "--save-every", "4", "train.py")
    path = str(SCRIPTS)
    paceline(*words, cwd=tmp_path, code=-signal.SIGKILL, PYTHONPATH=path, KILL_AT=kill)
    assert [step for step, _ in list_checkpoints(tmp_path / "out")] == ([0] if kill == "2" else [4, 0])
    done = train_basics(tmp_path, None, 3)
    said = "starting from the weights imported from" if kill == "2" else f"resuming from step 4 of {tmp_path}/out"
    assert said in done.stderr
    before, wanted = by_hand(weights())
    assert float(done.stdout.removeprefix("before ")) == pytest.approx(before, rel=1e-12)
    assert apart(load_file(tmp_path / "out.safetensors"), wanted) <= 1e-12


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_imported_weights_that_do_not_fit_are_refused(workers: int, tmp_path: Path) -> None:
    state = weights()
    state["0.weight"] = torch.ones(16, 11, dtype=torch.float64)
    state["2.bias"] = state["2.bias"].float()
    state |= {f"x.{number}": torch.ones(1) for number in range(7)}
    del state["2.weight"]
    import_model(bare(tmp_path, state), tmp_path / "out")
    done = train_basics(tmp_path, SCRIPT, workers, code=1)
    assert (
        f"CheckpointError: the weights imported from {tmp_path}/m.safetensors do not fit the model of trainer 0: "
        "missing: 2.weight; unexpected: x.0, x.1, x.2, x.3, x.4 and 2 more; "
        "wrong shape: 0.weight ([16, 11] instead of [16, 10]); "
        "wrong dtype: 2.bias (float32 instead of float64); "
        "import them again into a new run folder: use --map where names differ, --dtype where dtypes differ\n"
    ) in done.stderr
    assert [step for step, _ in list_checkpoints(tmp_path / "out")] == [0]
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.slow
def test_import_for_one_of_several_trainers(tmp_path: Path) -> None:
    body = """
a, b = make(), make(seed=1)
was = [{k: v.clone() for k, v in t.model.state_dict().items()} for t in (a, b)]
list(a.steps(data, count=2))
list(b.steps(data, count=2))
if a.main:
    from safetensors.torch import save_file
    save_file(was[0], "a.safetensors")
    save_file(was[1], "b.safetensors")
"""
    source = bare(tmp_path, weights())
    import_model(source, tmp_path / "out", trainer=1)
    assert equal(imported(tmp_path / "out", 1), weights())
    train_basics(tmp_path, body)
    assert equal(load_file(tmp_path / "b.safetensors"), weights())
    assert not equal(load_file(tmp_path / "a.safetensors"), weights())
    import_model(source, tmp_path / "other", trainer=2)
    done = paceline("run", "--run-dir", "other", "train.py", cwd=tmp_path, code=1)
    assert (
        f"CheckpointError: the weights imported from {source} are for trainer 2, and the script has made 2 trainers; "
        "create all trainers before the first step, or import the weights again with another --trainer\n"
    ) in done.stderr


# -- what fits a model ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("left_out", [[], ["head.weight"], ["embed.weight"]])
def test_import_of_tied_weights_under_one_or_both_names(left_out: list[str], tmp_path: Path) -> None:
    torch.manual_seed(1)
    wanted, model = Tied().state_dict(), Tied()
    state = {name: value.clone() for name, value in wanted.items() if name not in left_out}
    import_model(bare(tmp_path, state), tmp_path / "run")
    model.load_state_dict(adopted(model, imported(tmp_path / "run"), 0, "x"), strict=True)
    assert same(dict(model.state_dict()), dict(wanted))
    assert model.head.weight is model.embed.weight


def test_import_refuses_tied_weights_that_differ() -> None:
    model = Tied()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = {name: value.clone() for name, value in state.items()}
    state["head.weight"] += 1
    said = "the weights imported from x do not fit the model of trainer 2: "
    cure = "; import them again into a new run folder: use --map where names differ, --dtype where dtypes differ"
    tied = f"{said}tied in the model but not equal: head.weight and embed.weight{cure}"
    assert refusal(CheckpointError, adopted, model, state, 2, "x") == tied
    state["head.weight"] = before["head.weight"].double()
    assert refusal(CheckpointError, adopted, model, state, 2, "x") == (
        f"{said}wrong dtype: head.weight (float64 instead of float32); "
        f"tied in the model but not equal: head.weight and embed.weight{cure}"
    )
    del state["head.weight"], state["embed.weight"]
    assert refusal(CheckpointError, adopted, model, state, 2, "x") == f"{said}missing: embed.weight, head.weight{cure}"
    assert same(dict(model.state_dict()), before)


# -- sources -------------------------------------------------------------------------------------------------


def test_import_from_every_kind_of_source(tmp_path: Path) -> None:
    state = {f"w{n}": torch.randn(n + 1, 3) for n in range(4)} | {"empty": torch.empty(0, 2)}
    first, second = dict(list(state.items())[:2]), dict(list(state.items())[2:])
    bare(tmp_path / "single", state, "model.safetensors")
    for number, source in enumerate(
        [bare(tmp_path, state), tmp_path / "single", sharded(tmp_path / "sharded", first, second)]
    ):
        run = tmp_path / str(number)
        size = sum(tensor.nbytes for tensor in state.values())
        assert import_model(source, run) == (
            f"imported {source} into {run}: 5 tensors, {size} bytes; "
            f"`paceline run --run-dir {run} SCRIPT` starts from these weights"
        )
        assert equal(imported(run), state)
    bare(tmp_path / "sharded", {**second, "stale": torch.ones(1)}, "model-00002-of-00002.safetensors")
    import_model(tmp_path / "sharded", tmp_path / "indexed")  # the index says what counts
    assert imported(tmp_path / "indexed").keys() == state.keys()


def test_import_renames_prefixes_and_converts_weights(tmp_path: Path) -> None:
    state = {
        "model.a.w": torch.randn(2),
        "model.b.w": torch.randn(2),
        "c": torch.tensor([3]),
        "h": torch.randn(2).double(),
    }
    source = bare(tmp_path, state)
    line = import_model(source, tmp_path / "1", ["model.a.=first.", "model.=", "c=d.c"], dtype="bf16")
    run = tmp_path / "1"
    assert line == (
        f"imported {source} into {run}: 4 tensors, 20 bytes, floating-point values as bf16; "
        f"`paceline run --run-dir {run} SCRIPT` starts from these weights"
    )
    wanted = {"first.w": "model.a.w", "b.w": "model.b.w", "h": "h"}
    found = imported(run)
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(wanted, torch.bfloat16) | {
        "d.c": torch.int64
    }
    for new, old in wanted.items():
        assert same(found[new], state[old].bfloat16())
    import_model(source, tmp_path / "2", ["=net."])
    assert imported(tmp_path / "2").keys() == {f"net.{name}" for name in state}


def test_import_errors_of_options(tmp_path: Path) -> None:
    run, source = (
        tmp_path / "run",
        bare(tmp_path, {"model.a": torch.ones(1), "b": torch.full((2,), 1e9), "a": torch.ones(1)}),
    )
    for options, text in [
        (
            {"renames": ["model."]},
            "--map model. does not contain '='; write --map OLD=NEW, or --map OLD= to remove a prefix",
        ),
        (
            {"renames": ["net.=x"]},
            f"--map net.=x matches no tensor: no name in {source} begins with net.; the names are a, b, model.a",
        ),
        ({"renames": ["b=a"]}, "--map gives {} and {} the same name a; choose other prefixes"),
        ({"renames": ["model.="]}, "--map gives {} and {} the same name a; choose other prefixes"),
        (
            {"trainer": -1},
            "--trainer must be at least 0, got -1; trainers are numbered from 0, in the order the script creates them",
        ),
        ({"dtype": "f4"}, "weights cannot be converted to the dtype 'f4'; use one of bf16, fp16, fp32"),
    ]:
        said = refusal(UsageError, import_model, source, run, **options)
        assert re.sub(r"gives \S+ and \S+ the", "gives {} and {} the", said) == text
        assert not run.exists()
    assert refusal(CheckpointError, import_model, source, run, dtype="fp16") == (
        "'trainers.0.model.b' contains values that are too large for fp16; use --dtype bf16 or fp32"
    )
    assert list_checkpoints(run) == []
    import_model(source, run)
    wanted = f"{run} already contains a checkpoint; import into a new run folder"
    assert refusal(CheckpointError, import_model, source, run) == wanted
    (tmp_path / "file").touch()
    assert refusal(CheckpointError, import_model, source, tmp_path / "file") == (
        f"{tmp_path}/file/checkpoints could not be read: Not a directory; "
        "check that it is a folder that you can read, or choose another --run-dir"
    )


def test_import_into_a_running_run_is_refused(tmp_path: Path) -> None:
    from paceline.checkpoint.lock import hold_lock

    lock = hold_lock(tmp_path / "run")
    try:
        assert refusal(LaunchError, import_model, bare(tmp_path, weights()), tmp_path / "run").startswith(
            f"the run folder {tmp_path}/run is in use by process {os.getpid()} on "
        )
    finally:
        os.close(lock)


def test_import_errors_of_sources(tmp_path: Path) -> None:
    run, again = tmp_path / "run", "check that you can read it, or copy it again from its source"
    give = "pass a .safetensors, .pt, .pth, .bin or .ckpt file, or a folder of Hugging Face, Accelerate, "
    give += "torch.distributed.checkpoint or DeepSpeed"
    assert refusal(UsageError, import_model, tmp_path / "no", run) == f"{tmp_path}/no does not exist; {give}"
    (tmp_path / "m.gguf").touch()
    said = refusal(UsageError, import_model, tmp_path / "m.gguf", run)
    assert said == f"{tmp_path}/m.gguf is a file of an unknown format; {give}"
    folder = tmp_path / "folder"
    folder.mkdir()
    said = refusal(UsageError, import_model, folder, run)
    assert said == f"{folder} contains no weights in a known format; {give}"
    index = folder / "model.safetensors.index.json"
    outside = "expected str of another form"
    for text, why in (
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("[]", "expected object, got array"),
        ('{"weight_map": {"a": "../m.safetensors"}}', f"weight_map.a: {outside}"),
        ('{"weight_map": {"a": "b.safetensors", "c d": 3}}', 'weight_map["c d"]: expected str, got int'),
        ('{"weight_map": 3}', "weight_map: expected object, got int"),
        ('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}', 'the name "a" occurs twice'),
        ("[" * 100_000 + "]" * 100_000, "it is nested too deeply"),
    ):
        index.write_text(text)
        assert refusal(CheckpointError, import_model, folder, run) == f"{index} is damaged: {why}; {again}"
    sharded(folder, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    second = folder / "model-00002-of-00002.safetensors"
    second.unlink()
    said = refusal(CheckpointError, import_model, folder, run)
    assert said.startswith(f"{second} could not be read: No such file or directory")
    bare(folder, {"c": torch.ones(2)}, second.name)
    assert refusal(CheckpointError, import_model, folder, run) == (
        f"{second} could not be read: File does not contain tensor b; {again}"
    )
    whole = bare(tmp_path, weights()).read_bytes()
    for cut in (0, 7, 20, len(whole) - 1):
        (tmp_path / "m.safetensors").write_bytes(whole[:cut])
        with pytest.raises(SafetensorError) as theirs, safe_open(tmp_path / "m.safetensors", framework="pt"):
            pass
        wanted = f"{tmp_path}/m.safetensors could not be read: {theirs.value}; {again}"
        assert refusal(CheckpointError, import_model, tmp_path / "m.safetensors", run) == wanted
    assert not run.exists()


@pytest.mark.root
def test_import_on_a_full_disk(full_disk: Path, tmp_path: Path) -> None:
    source, run = bare(tmp_path, {"w": torch.ones(500_000)}), full_disk / "run"
    assert refusal(CheckpointError, import_model, source, run) == (
        f"checkpoint of step 0 could not be written to {run}/checkpoints: No space left on device; "
        "free some space (2.0 MB needed) or choose another --run-dir"
    )
    assert list_checkpoints(run) == []
    import_model(bare(tmp_path, weights()), run)
    assert equal(imported(run), weights())
