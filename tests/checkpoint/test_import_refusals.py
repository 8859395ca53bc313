"""Sources that are damaged, hostile, or do not fit are refused, and nothing in them is executed."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from basics import net
from checkpoints import list_checkpoints
from conftest import running
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint_tree import refusal, same
from test_import_sources import OPTIMIZERS, Trained
from test_import_weights import imported
from torch import nn
from torch._weights_only_unpickler import load as load_weights_only
from torch.distributed import checkpoint as dcp
from torch.nn.functional import cross_entropy

from paceline import Trainer, load
from paceline.checkpoint.import_weights import import_model
from paceline.checkpoint.sources.dcp_folder import to_protocol_2
from paceline.errors import CheckpointError, UsageError

RESAVE = "load it with the program that wrote it, and save model.state_dict() with torch.save or as safetensors"
AGAIN = "check that you can read it, or copy it again from its source"


class Runs:
    """Creates a file when it is unpickled by an ordinary unpickler."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(2, dtype=torch.float64)}


# -- nothing is executed ---------------------------------------------------------------------------------------------


def test_objects_of_other_classes_are_not_created(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    beside = {
        "args": argparse.Namespace(lr=0.1, folder=tmp_path),
        "trap": Runs(shutil.copyfile, __file__, mark),
        "shell": Runs(eval, f"open({str(mark)!r}, 'w')"),
        "epoch": 3,
    }
    torch.save({"model": {**weights(), "extra": Runs(shutil.copyfile, __file__, mark)}, **beside}, tmp_path / "a.pt")
    text = import_model(tmp_path / "a.pt", tmp_path / "run")
    assert text.splitlines()[1:] == [
        "not taken: extra (it is not a tensor (shutil.copyfile))",
        "not taken: args, trap, shell (only weights and optimizer states are taken)",
        "not taken: epoch (a run counts its own steps)",
    ]
    assert same(imported(tmp_path / "run"), weights())
    assert not mark.exists()
    with (tmp_path / "a.pt").open("rb") as file:  # the trap works
        torch.load(file, weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize("kind", ["now", "legacy", "metadata", "value"])
def test_calls_of_the_system_are_refused(kind: str, tmp_path: Path) -> None:
    mark, trap = tmp_path / "executed", tmp_path / "source"
    command = Runs(os.system, f"touch {mark}")
    if kind in ("metadata", "value"):
        dcp.save({**weights(), "trap": command if kind == "value" else 3}, checkpoint_id=trap, no_dist=True)
        if kind == "metadata":
            (trap / ".metadata").write_bytes(pickle.dumps(command))
    else:
        trap = tmp_path / "a.pth"
        torch.save({**weights(), "trap": command}, trap, _use_new_zipfile_serialization=kind == "now")
    said = refusal(CheckpointError, import_model, trap, tmp_path / "run")
    name = {"metadata": f"{trap}/.metadata", "value": "trap"}.get(kind, str(trap))
    assert said == f"{name} could not be read: it uses posix.system, which is never executed; {RESAVE}"
    assert not mark.exists()
    assert list_checkpoints(tmp_path / "run") == []


def test_metadata_cannot_name_other_classes_or_files(tmp_path: Path) -> None:
    dcp.save(weights(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    intact = path.read_bytes()
    path.write_bytes(pickle.dumps({"a": Runs(eval, "1")}))
    said = refusal(CheckpointError, import_model, tmp_path / "dcp", tmp_path / "run")
    assert said == f"{path} could not be read: it uses eval, which is never executed; {RESAVE}"
    path.write_bytes(pickle.dumps(3))
    said = refusal(CheckpointError, import_model, tmp_path / "dcp", tmp_path / "run")
    assert said == f"{path} could not be read: it is not the metadata of a checkpoint; {AGAIN}"
    known = pickle.loads(intact)
    for info in known.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    path.write_bytes(pickle.dumps(known))
    said = refusal(CheckpointError, import_model, tmp_path / "dcp", tmp_path / "run")
    assert said == f"{path} could not be read: it names files outside of its folder; {AGAIN}"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(0, 300), inner),
    max_leaves=20,
)


@given(PLAIN, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_any_protocol_becomes_protocol_2(value: Any, protocol: int) -> None:
    twice = [value, value, {"torch": value, "same": "torch"}]
    rewritten = to_protocol_2(pickle.dumps(twice, protocol))
    assert pickle.loads(rewritten) == twice
    assert load_weights_only(io.BytesIO(rewritten)) == twice


# -- damaged ---------------------------------------------------------------------------------------------------------


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "a.pt"
    torch.save({"model": weights()}, path)
    intact = path.read_bytes()
    for cut in range(0, len(intact), 97):
        path.write_bytes(intact[:cut])
        assert refusal(CheckpointError, import_model, path, run).startswith(f"{path} could not be read: ")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/readme", "no tensors")
    assert refusal(CheckpointError, import_model, path, run).startswith(f"{path} could not be read: ")
    path.write_bytes(b"")
    assert refusal(CheckpointError, import_model, path, run).startswith(f"{path} could not be read: ")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(path))
    said = refusal(CheckpointError, import_model, path, run)
    assert said == f"{path} could not be read: it is a TorchScript program, not weights; {RESAVE}"
    torch.save(weights(), path, pickle_protocol=4)
    said = refusal(CheckpointError, import_model, path, run)
    assert said == f"{path} could not be read: torch.save did not write it as it does by default; {RESAVE}"
    dcp.save(weights(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = (tmp_path / "dcp" / ".metadata").read_bytes()
    for cut in range(0, len(metadata), 37):
        (tmp_path / "dcp" / ".metadata").write_bytes(metadata[:cut])
        said = refusal(CheckpointError, import_model, tmp_path / "dcp", run)
        assert said.startswith(f"{tmp_path}/dcp/.metadata could not be read: ")
    (tmp_path / "dcp" / ".metadata").write_bytes(metadata)
    for file in (tmp_path / "dcp").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    assert " could not be read: " in refusal(CheckpointError, import_model, tmp_path / "dcp", run)
    assert list_checkpoints(run) == []


def test_sources_without_weights_are_refused(tmp_path: Path) -> None:
    cure = "pass a file that contains a model's state dict, or a dict with one under 'state_dict' or 'model'"
    for value, keys in ((3, "none"), ({"epoch": 3, "lr": 0.1}, "epoch, lr"), ([torch.ones(2)], "none")):
        torch.save(value, tmp_path / "a.pt")
        said = refusal(UsageError, import_model, tmp_path / "a.pt", tmp_path / "run")
        assert said == f"{tmp_path}/a.pt does not contain weights by name; its keys are: {keys}; {cure}"
    torch.save(
        {"w": torch.ones(2).to_sparse(), "c": torch.ones(2, dtype=torch.complex128), **weights()}, tmp_path / "a.pt"
    )
    assert import_model(tmp_path / "a.pt", tmp_path / "run").splitlines()[1:] == [
        "not taken: c (tensors of complex128 cannot be stored)",
    ]
    torch.save({"w": torch.ones(2).to_sparse(), "b": torch.ones(2)}, tmp_path / "a.pt")
    assert import_model(tmp_path / "a.pt", tmp_path / "sparse").splitlines()[1:] == [
        "not taken: w (it is a sparse, quantized or empty (meta) tensor)",
    ]


def test_files_of_torch_in_a_folder_of_hugging_face(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for number, (name, value) in enumerate(weights().items(), start=1):
        torch.save({name: value}, folder / f"pytorch_model-{number:05d}-of-00002.bin")
    places = {name: f"pytorch_model-{n:05d}-of-00002.bin" for n, name in enumerate(weights(), start=1)}
    (folder / "pytorch_model.bin.index.json").write_text(f'{{"weight_map": {places}}}'.replace("'", '"'))
    import_model(folder, tmp_path / "run")
    assert same(imported(tmp_path / "run"), weights())
    torch.save({"other": torch.ones(1)}, folder / "pytorch_model-00002-of-00002.bin")
    assert refusal(CheckpointError, import_model, folder, tmp_path / "second") == (
        f"{folder}/pytorch_model-00002-of-00002.bin could not be read: it does not contain tensor b; {AGAIN}"
    )


def test_deepspeed_folders_that_are_incomplete(tmp_path: Path) -> None:
    folder = tmp_path / "ds"
    (folder / "tag").mkdir(parents=True)
    (folder / "latest").write_text("../elsewhere")
    assert refusal(CheckpointError, import_model, folder, tmp_path / "run") == (
        f"{folder}/latest names the folder '../elsewhere', which does not exist; {AGAIN}"
    )
    (folder / "latest").write_text("tag\n")
    said = refusal(CheckpointError, import_model, folder, tmp_path / "run")
    assert said == f"{folder}/tag contains no *_model_states.pt; {AGAIN}"
    model = {"module": weights(), "ds_version": "0.19", "param_shapes": [{"w": torch.Size([2, 3])}]}
    torch.save(model, folder / "tag" / "mp_rank_00_model_states.pt")
    said = refusal(UsageError, import_model, folder / "tag" / "mp_rank_00_model_states.pt", tmp_path / "run")
    assert said == (
        f"{folder}/tag/mp_rank_00_model_states.pt is one of several files of a DeepSpeed checkpoint; "
        f"pass its folder, {folder}/tag"
    )
    base = {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}
    state = {"single_partition_of_fp32_groups": [torch.ones(3)], "base_optimizer_state": base, "partition_count": [2]}
    optimizer = folder / "tag" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": state}, optimizer)
    said = refusal(CheckpointError, import_model, folder, tmp_path / "run")
    assert said == (f"{folder}/tag has the optimizer states of 1 workers, but 2 workers have written it; {AGAIN}")
    torch.save({"optimizer_state_dict": {**state, "partition_count": [1]}}, optimizer)
    said = refusal(CheckpointError, import_model, folder, tmp_path / "run")
    assert "the vectors of the optimizer are too short for the parameters" in said
    convert = "convert it with `python -m deepspeed.checkpoint.ds_to_universal`, and import the folder that it writes"
    torch.save({"optimizer_state_dict": {}}, optimizer)
    said = refusal(UsageError, import_model, folder, tmp_path / "run")
    assert said == f"{folder}/tag has an optimizer state of an unknown layout; {convert}"
    torch.save(model, folder / "tag" / "mp_rank_01_model_states.pt")
    said = refusal(UsageError, import_model, folder, tmp_path / "run")
    assert said == f"{folder}/tag was written with the model itself in parts (mp_rank_01); {convert}"


# -- what does not fit -----------------------------------------------------------------------------------------------


def test_optimizer_states_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer refuses them by name; without the states training begins."""
    cure = "create the same optimizer as the program that saved it, or import again with --no-optimizer"
    trained = Trained("adamw")
    state = trained.optimizer.state_dict()
    named = Trained("adamw", named=True).optimizer.state_dict()
    momenta = {number: {"momentum_buffer": kept["exp_avg"]} for number, kept in state["state"].items()}
    turned = {**state["state"][0], "exp_avg": state["state"][0]["exp_avg"].T}
    group = state["param_groups"][0]
    names = named["param_groups"][0]["param_names"]
    cases: list[tuple[Any, str]] = [
        ([state, state], "it contains 2 optimizers, and the script creates 1"),
        (
            {**state, "param_groups": [{**group, "params": [0]}, {**group, "params": [1, 2, 3]}]},
            "its parameters have no names, and its groups have 1, 3 parameters, not 4",
        ),
        (
            {**state, "state": momenta},
            "AdamW keeps exp_avg, exp_avg_sq, step, but it has momentum_buffer of 0.weight",
        ),
        (
            {**state, "state": {**state["state"], 0: turned}},
            "exp_avg of 0.weight has the shape [10, 16] instead of [16, 10]",
        ),
        (
            {**named, "param_groups": [{**group, "param_names": [*names[:3], "other"]}]},
            "it has states of other, which the optimizer does not train",
        ),
        (
            {"state": {0: state["state"][0]}, "param_groups": [{"params": [0], "param_names": ["0.weight"]}]},
            "it has no state of 0.bias, 2.bias, 2.weight",
        ),
    ]
    for number, (saved, why) in enumerate(cases):
        torch.save({"model": trained.model.state_dict(), "optimizer": saved}, tmp_path / "a.pt")
        import_model(tmp_path / "a.pt", tmp_path / f"run{number}")
        with running(tmp_path / f"run{number}", monkeypatch):
            said = refusal(
                CheckpointError, Trainer, net, lambda out, rows: cross_entropy(out, rows[1]), OPTIMIZERS["adamw"], 24
            )
        assert said == f"the optimizer state imported from {tmp_path}/a.pt does not fit trainer 0: {why}; {cure}"
    import_model(tmp_path / "a.pt", tmp_path / "run", optimizer=False)
    with running(tmp_path / "run", monkeypatch):
        Trainer(net, lambda out, rows: cross_entropy(out, rows[1]), OPTIMIZERS["adamw"], global_batch=24)
    torch.save({"model": trained.model.state_dict(), "optimizer": {"step": 3}}, tmp_path / "a.pt")
    assert import_model(tmp_path / "a.pt", tmp_path / "none").splitlines()[1:] == [
        "not taken: optimizer (it does not have the layout of a torch optimizer's state_dict())"
    ]


def test_options_of_the_script_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Trained("adamw").save(tmp_path / "a.pt", model="model", optimizer="optimizer")
    import_model(tmp_path / "a.pt", tmp_path / "run")
    with running(tmp_path / "run", monkeypatch):
        made: list[torch.optim.Optimizer] = []

        def optimizer(params: Any) -> torch.optim.Optimizer:
            made.append(torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.999), weight_decay=0.1))
            return made[-1]

        Trainer(net, lambda out, rows: cross_entropy(out, rows[1]), optimizer, 24, schedule=lambda step: 0.5)
        assert made[-1].param_groups[0]["lr"] == 0.005
    wanted = "the optimizer's options are those of the script: lr 0.01 instead of 0.05, betas (0.8, 0.999) instead of "
    assert f"{wanted}(0.9, 0.999) in the import\n" in capsys.readouterr().err


# -- paceline.load ---------------------------------------------------------------------------------------------------


def test_load_reads_weights_of_other_programs(tmp_path: Path) -> None:
    trained = Trained("adamw")
    state = {name: value.clone() for name, value in trained.model.state_dict().items()}
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "a.ckpt")
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for source in (tmp_path / "a.ckpt", tmp_path / "dcp"):
        assert same(dict(sorted(load(source).items())), dict(sorted(state.items())))
        model = load(str(source), net())
        assert same(dict(model.state_dict()), state)
        assert not model.training
    said = refusal(CheckpointError, load, tmp_path / "a.ckpt", nn.Linear(2, 2))
    assert said == (
        f"the weights of {tmp_path}/a.ckpt do not fit Linear: missing: bias, weight; unexpected: 0.bias, 0.weight, "
        "2.bias, 2.weight; build the model as the script that trained it does"
    )
    assert refusal(UsageError, load, tmp_path / "a.ckpt", best=True) == (
        f"best=, step= and trainer= choose a checkpoint of a run, and {tmp_path}/a.ckpt comes from another program; "
        "leave them out"
    )
