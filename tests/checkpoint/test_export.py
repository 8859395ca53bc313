"""The weights alone, as safetensors: from a checkpoint or from a model."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import find_checkpoint, weights_of, write_checkpoint
from launching import train_basics
from safetensors.torch import load_file
from test_checkpoint_tree import refusal, same
from test_checkpoint_write import equal, flip, sample
from torch.distributed import checkpoint as dcp

from paceline.base.text import parse_size
from paceline.checkpoint.export import export_model, write_model
from paceline.checkpoint.import_weights import adopted, import_model
from paceline.checkpoint.safetensors_file import size_text
from paceline.checkpoint.tree import flatten, unflatten
from paceline.errors import CheckpointError, UsageError


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.phase = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.register_buffer("flipped", torch.randn(3, 2).t())
        self.register_buffer("mirrored", torch.randn(2, dtype=torch.complex64).conj())


def save_net(folder: Path, step: int, *nets: torch.nn.Module) -> None:
    trainers = [{"model": net.state_dict(keep_vars=True), "step": step} for net in nets]
    flat, skeleton = flatten({"trainers": trainers}, "")
    write_checkpoint(folder, step, flat, {"tree": skeleton}, keep=9)


def test_export_holds_what_a_strict_load_needs(tmp_path: Path) -> None:
    torch.manual_seed(1)
    run, out = tmp_path / "run", tmp_path / "model.safetensors"
    nets = [Net(), Net(), Net()]
    save_net(run, 100, nets[0], nets[1])
    save_net(run, 120, nets[2], nets[1])
    for options, step, wanted in [
        ({}, 120, nets[2]),
        ({"trainer": 1}, 120, nets[1]),
        ({"step": 100}, 100, nets[0]),
    ]:
        line = export_model(run, out, **options)
        size = out.stat().st_size
        assert line == f"wrote {out}: 10 tensors, {size_text(size)}, from step {step} of {run}"
        fresh = Net()
        fresh.load_state_dict(load_file(out), strict=True)
        assert same(dict(fresh.state_dict()), dict(wanted.state_dict()))
        assert list(load_file(out).keys() ^ wanted.state_dict().keys()) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.safetensors", "run"]
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~current_umask()


def test_export_replaces_the_file_and_does_not_overwrite_it(tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    write_model(sample(1), out)
    before = load_file(out)  # mapped, as a server would hold it
    write_model(sample(2), out)
    assert equal(before, sample(1))
    assert equal(load_file(out), sample(2))


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_export_says_what_it_passed_over(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "m.safetensors"
    save_net(run, 100, torch.nn.Linear(2, 2))
    save_net(run, 120, torch.nn.Linear(2, 2))
    damaged = weights_of(run / "checkpoints/step-000000000120")
    flip(damaged, -1)
    first, second = export_model(run, out).splitlines()
    assert first == f"checkpoint of step 120 is damaged ({damaged.name}: SHA-256 differs); using step 100"
    assert second == f"wrote {out}: 2 tensors, {out.stat().st_size} bytes, from step 100 of {run}"


def test_export_errors(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "m.safetensors"
    wanted = f"{run} does not contain a checkpoint; use the --run-dir of a run that has saved a checkpoint"
    assert refusal(CheckpointError, export_model, run, out) == wanted
    save_net(run, 100, torch.nn.Linear(2, 2))
    save_net(run, 120, torch.nn.Linear(2, 2))
    wanted = f"{run} does not contain a checkpoint of step 70; choose one of these steps: 100, 120"
    assert refusal(CheckpointError, export_model, run, out, step=70) == wanted
    assert refusal(UsageError, export_model, run, out, trainer=1) == (
        f"step 120 of {run} has no weights of trainer 1; it has 1 trainer; "
        "trainers are numbered from 0, in the order the script creates them"
    )
    assert refusal(UsageError, export_model, run, tmp_path / "m.pt") == (
        f"the model cannot be exported to {tmp_path}/m.pt: only .safetensors files are written, because "
        f"they run no code; use the name {tmp_path}/m.safetensors"
    )
    (tmp_path / "no").touch()
    assert refusal(CheckpointError, export_model, run, tmp_path / "no/m.safetensors") == (
        f"the model could not be written to {tmp_path}/no/m.safetensors: File exists; "
        "check that the folder exists and that you can write to it, or choose another file"
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"a": 1}, "dict"),
        (torch.ones(2, dtype=torch.complex128), "torch.complex128 tensor on cpu"),
        (torch.ones(2, device="meta"), "torch.float32 tensor on meta"),
    ],
)
def test_export_refuses_a_state_that_safetensors_cannot_hold(tmp_path: Path, value: Any, kind: str) -> None:
    assert refusal(UsageError, write_model, {"x._extra_state": value}, tmp_path / "m.safetensors") == (
        f"'x._extra_state' in the model's state_dict() cannot be stored in a safetensors file ({kind}); "
        "leave it out of state_dict(), for example with register_buffer(..., persistent=False), or convert it"
    )
    assert list(tmp_path.iterdir()) == []


# -- folders, and what streams through them ------------------------------------------------------------------


def saved_state(run: Path, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A run whose only checkpoint has tensors of these shapes, which are returned."""
    generator = torch.Generator().manual_seed(len(shapes))
    state = {f"w{n}": torch.randn(shape, generator=generator, dtype=dtype) for n, shape in enumerate(shapes)}
    flat, skeleton = flatten({"trainers": [{"model": state}]}, "")
    write_checkpoint(run, 7, flat, {"tree": skeleton})
    return state


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """As Hugging Face's libraries do: by the index, or the single file."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    told = json.loads(index.read_text())
    files = {file: load_file(folder / file) for file in set(told["weight_map"].values())}
    found = {name: files[file][name] for name, file in told["weight_map"].items()}
    assert sum(len(each) for each in files.values()) == len(found)
    assert told["metadata"] == {"total_size": sum(tensor.nbytes for tensor in found.values())}
    return found


def test_export_folder_is_split_by_file_size(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "hf"
    torch.manual_seed(1)
    net = Net()
    save_net(run, 100, net)
    for size, count in [("5GB", 1), ("150", 3), ("100", 4), ("1", 10), ("0.2kB", 2)]:
        line = export_model(run, out, max_file=size)
        files = sorted(out.glob("*.safetensors"))
        names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        assert [file.name for file in files] == (names if count > 1 else ["model.safetensors"])
        total = size_text(sum(file.stat().st_size for file in files))
        many = f"{count} file{'s' if count > 1 else ''}"
        assert line == f"wrote {out}: 10 tensors, {total} in {many}, from step 100 of {run}"
        for file in files:
            group = load_file(file)
            assert len(group) == 1 or sum(tensor.nbytes for tensor in group.values()) <= parse_size(size)
        fresh = Net()
        fresh.load_state_dict(read_folder(out), strict=True)
        assert same(dict(fresh.state_dict()), dict(net.state_dict()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
    assert stat.S_IMODE((out / "model.safetensors.index.json").stat().st_mode) == 0o666 & ~current_umask()


def loaded_by_torch(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp  # which takes a second

    state = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_export_in_dcp_format_is_read_by_torch(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "dcp"
    torch.manual_seed(1)
    net = Net()
    save_net(run, 100, torch.nn.Linear(2, 2), net)
    line = export_model(run, out, trainer=1, layout="dcp")
    size = size_text(sum(file.stat().st_size for file in out.glob("*.distcp")))
    assert line == f"wrote {out}: 10 tensors, {size} in 10 files, from step 100 of {run}"
    state = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    assert same(loaded_by_torch(out, state), {name: tensor.resolve_conj() for name, tensor in state.items()})
    line = export_model(run, out, trainer=1, layout="dcp", dtype="bf16")
    assert line.endswith(f" in 10 files, floating-point values as bf16, from step 100 of {run}")
    wanted = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    assert same(loaded_by_torch(out, wanted), {name: tensor.resolve_conj() for name, tensor in wanted.items()})


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_export_converts_floating_point_weights(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    run, out = tmp_path / "run", tmp_path / "m.safetensors"
    save_net(run, 100, net := Net())
    line = export_model(run, out, dtype=name)
    size = size_text(out.stat().st_size)
    assert line == f"wrote {out}: 10 tensors, {size}, floating-point values as {name}, from step 100 of {run}"
    state = net.state_dict()
    wanted = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
    assert same(dict(sorted(load_file(out).items())), {key: wanted[key].resolve_conj() for key in sorted(wanted)})


def test_export_refuses_values_that_do_not_fit_the_dtype(tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = {"small": torch.ones(2), "a.big": torch.tensor([1.0, -70000.0]), "inf": torch.tensor([float("inf")])}
    flat, skeleton = flatten({"trainers": [{"model": state}]}, "")
    write_checkpoint(run, 1, flat, {"tree": skeleton})
    wanted = "'a.big' contains values that are too large for fp16; use --dtype bf16 or fp32"
    for out, options in [("m.safetensors", {}), ("hf", {}), ("dcp", {"layout": "dcp"})]:
        assert refusal(CheckpointError, export_model, run, tmp_path / out, dtype="fp16", **options) == wanted
        export_model(run, tmp_path / out, dtype="bf16", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "hf", "m.safetensors", "run"]


def test_export_does_not_replace_files_of_others(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "hf"
    state = saved_state(run, (3, 4), (2,))
    out.mkdir()
    export_model(run, out)  # an empty folder is free
    export_model(run, out, layout="dcp")
    assert ".metadata" in os.listdir(out)
    assert "model.safetensors" not in os.listdir(out)
    before = sorted(os.listdir(out))
    (out / "config.json").write_text("{}")
    assert refusal(UsageError, export_model, run, out) == (
        f"{out} contains files that no export wrote: config.json; choose another folder, or move these files away first"
    )
    assert sorted(os.listdir(out)) == sorted([*before, "config.json"])
    (out / "config.json").unlink()
    (out / "paceline-export.json").write_text("no JSON")
    assert refusal(UsageError, export_model, run, out) == (
        f"{out} contains files that no export wrote: .metadata, __0_0.distcp, __0_1.distcp and 1 more; "
        "choose another folder, or move these files away first"
    )
    (tmp_path / "file").touch()
    wanted = f"{tmp_path}/file is a file, but the export needs a folder; choose another name"
    assert refusal(UsageError, export_model, run, tmp_path / "file") == wanted
    assert same(loaded_by_torch(out, state), state)


def test_export_removes_what_killed_exports_left(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "h[f]"
    state = saved_state(run, (3, 4))
    dead = subprocess.Popen(["true"])
    dead.wait()
    export_model(run, out)
    (tmp_path / f".h[f].tmp-{dead.pid}").mkdir()
    (tmp_path / f".h[f].tmp-{os.getppid()}").mkdir()  # alive: perhaps writing
    out.rename(tmp_path / f".h[f].old-{dead.pid}")  # killed between two names
    (run / "checkpoints/step-000000000007").rename(tmp_path / "away")
    assert refusal(CheckpointError, export_model, run, out).startswith(f"{run} does not contain a checkpoint")
    (tmp_path / "away").rename(run / "checkpoints/step-000000000007")
    export_model(run, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".h[f].tmp-{os.getppid()}", "h[f]", "run"]
    assert same(read_folder(out), state)


def test_export_errors_of_folders(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "hf"
    saved_state(run, (3, 4))
    assert refusal(UsageError, export_model, run, out, dtype="int8") == (
        "weights cannot be converted to the dtype 'int8'; use one of bf16, fp16, fp32"
    )
    for text in ("", "x", "0", "5XB", "-1GB", "GB"):
        wanted = f"{text!r} is not a size in bytes; write a number and a unit, for example 500MB or 5GB"
        assert refusal(UsageError, export_model, run, out, max_file=text) == wanted
    assert refusal(UsageError, export_model, run, tmp_path / "m.safetensors", layout="dcp") == (
        f"{tmp_path}/m.safetensors is the name of a file, but --format dcp writes a folder; "
        "omit the suffix .safetensors"
    )
    for options in ({}, {"layout": "dcp"}):
        assert refusal(CheckpointError, export_model, run, tmp_path / "no/hf", **options) == (
            f"the model could not be written to {tmp_path}/no/hf: No such file or directory; "
            "check that the folder exists and that you can write to it, or choose another folder"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert [parse_size(text) for text in ("7", "500MB", "2gb", "1.5 kB", "3T")] == [
        7,
        5 * 10**8,
        2 * 10**9,
        1500,
        3 * 10**12,
    ]


@pytest.mark.root
@pytest.mark.parametrize("options", [{}, {"max_file": "1MB"}, {"layout": "dcp"}])
def test_export_to_a_full_disk_leaves_the_former_export(
    full_disk: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    out = full_disk / "out"
    small = saved_state(tmp_path / "one", (1000,))
    export_model(tmp_path / "one", out, **options)
    saved_state(tmp_path / "large", (200_000,), (200_000,))
    assert refusal(CheckpointError, export_model, tmp_path / "large", out, **options) == (
        f"the model could not be written to {out}: No space left on device; "
        "free some space (1.6 MB needed) or choose another folder"
    )
    assert os.listdir(full_disk) == ["out"]
    assert same(loaded_by_torch(out, small) if "layout" in options else read_folder(out), small)


LARGE = """
model = lambda: nn.Sequential(nn.Linear(10, 300), nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 2)).double()
t = make(model=model)
for report in t.steps(data, count=1): pass
t.export("small/model.safetensors")
"""


@pytest.mark.root
@pytest.mark.parametrize("plan", ["data=2", pytest.param("shard=2", marks=pytest.mark.slow)])
def test_export_that_one_worker_cannot_write_fails_on_all(plan: str, full_disk: Path, tmp_path: Path) -> None:
    """Midway, when the disk is full: others do not end well, and none waits for the rest."""
    said = train_basics(tmp_path, LARGE, 2, "--plan", plan, code=1).stderr
    assert (
        "CheckpointError: the model could not be written to small/model.safetensors: No space left on device; "
        "free some space (1.5 MB needed) or choose another file\n" in said
    )
    assert "worker 1 failed in the same way\n" in said
    assert os.listdir(full_disk) == []


EXPORT_AND_MEASURE = """
import sys
from pathlib import Path
from paceline.checkpoint.export import export_model
from paceline.checkpoint.import_weights import import_model
import torch.distributed.checkpoint, torch.distributed.checkpoint.api

def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

run, out, layout, dtype, from_elsewhere = sys.argv[1:]
options = {"layout": layout or None, "dtype": dtype or None, "max_file": "150MB"}
before = peak()
if from_elsewhere:
    import_model(Path(run), Path(out), dtype=dtype or None)
else:
    export_model(Path(run), Path(out), **options)
print(peak() - before)
"""
LARGEST = 16_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 400 MB, none of whose tensors is larger than 16 MB."""
    run = tmp_path_factory.mktemp("large")
    one = torch.ones(LARGEST // 4)
    state = {f"w{number}": one.clone() for number in range(25)}
    flat, skeleton = flatten({"trainers": [{"model": state}]}, "")
    write_checkpoint(run, 1, flat, {"tree": skeleton})
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("out", "layout", "dtype"),
    [
        ("m.safetensors", "", ""),
        ("hf", "", ""),
        ("hf", "", "bf16"),
        ("dcp", "dcp", ""),
        ("dcp", "dcp", "fp16"),
        ("", "", ""),
        ("", "", "bf16"),
        ("", "torch", ""),
        ("", "dcp", ""),
    ],
)
def test_export_of_a_large_model_needs_little_memory(
    large: Path, tmp_path: Path, out: str, layout: str, dtype: str
) -> None:
    """The window of 64 MiB, three of the largest tensor, and what the interpreter takes meanwhile."""
    source = large if out else next(large.rglob("*.safetensors"))
    if not out and layout:  # an import from another format
        state, source = load_file(source), tmp_path / "source.pt"
        torch.save(state, source) if layout == "torch" else dcp.save(state, checkpoint_id=source, no_dist=True)
        layout = ""
    words = [str(source), str(tmp_path / (out or "run")), layout, dtype, "" if out else "import"]
    done = subprocess.run(
        [sys.executable, "-c", EXPORT_AND_MEASURE, *words], capture_output=True, text=True, timeout=200, check=True
    )
    assert int(done.stdout) <= (64 << 20) + 3 * LARGEST + (24 << 20) < 200_000_000


@pytest.mark.slow
def test_export_folder_is_loaded_by_transformers(tmp_path: Path) -> None:
    """Both ways, with a model whose weights are tied."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32)
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config)
    save_net(tmp_path / "run", 5, model)
    for size in ("5GB", "20kB"):
        out = tmp_path / f"hf-{size}"
        export_model(tmp_path / "run", out, max_file=size)
        config.save_pretrained(out)
        read, told = transformers.GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
        assert [list(names) for names in told.values()] == [[]] * len(told)
        assert same(dict(read.state_dict()), dict(model.state_dict()))
        assert read.lm_head.weight is read.transformer.wte.weight
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    import_model(tmp_path / "theirs", tmp_path / "back")
    found = find_checkpoint(tmp_path / "back", pytest.fail)
    assert found is not None
    weights = unflatten(found.manifest["tree"], found.tensors())["trainers"][0]["model"]
    assert "lm_head.weight" not in weights
    whole = adopted(model, weights, 0, "theirs")
    assert same({name: whole[name] for name in model.state_dict()}, dict(model.state_dict()))
