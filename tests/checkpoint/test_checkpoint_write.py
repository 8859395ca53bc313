"""Checkpoints on disk: whatever interrupts a write or damages a file, a whole checkpoint is found."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import find_checkpoint, list_checkpoints, weights_of, write_checkpoint
from paths import SUPPORT
from safetensors.torch import load_file
from test_checkpoint_tree import refusal, same
from warm import Process

from paceline.checkpoint.export import write_model
from paceline.checkpoint.safetensors_file import size_text, write_tensors
from paceline.errors import CheckpointError


def sample(step: int, size: int = 5000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.weight": torch.randn(size, generator=generator),
        "model.steps": torch.tensor(step),
        "optimizer.mean": torch.randn(7, 3, generator=generator, dtype=torch.float64).t(),
    }


def write(folder: Path, step: int, **options: Any) -> Path:
    return write_checkpoint(folder, step, sample(step), {"seed": 3}, **options)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return same(dict(sorted(a.items())), dict(sorted(b.items())))


def found_step(folder: Path, said: list[str] | None = None) -> int:
    """The step that is found, after its tensors were compared with what was written."""
    lines: list[str] = []
    checkpoint = find_checkpoint(folder, lines.append)
    assert checkpoint is not None
    assert equal(checkpoint.tensors(), sample(checkpoint.step))
    assert lines == (said or [])
    return checkpoint.step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def step_names(*steps: int) -> list[str]:
    return [f"step-{step:012d}" for step in steps]


# -- files -------------------------------------------------------------------------------------------------


def test_checkpoint_layout_on_disk(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        path = write(tmp_path / "run", 120)
    finally:
        os.umask(mask)
    assert path == tmp_path / "run/checkpoints/step-000000000120"
    manifest = json.loads((path / "manifest.json").read_text())
    file = weights_of(path).name
    data = (path / file).read_bytes()
    assert re.fullmatch(r"model-[0-9a-f]{8}\.safetensors", file)
    assert manifest["format"] == 2
    assert manifest["step"] == 120
    assert manifest["seed"] == 3
    assert manifest["files"] == {file: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    assert manifest["tensors"] == {
        "model.weight": {"file": file, "dtype": "F32", "shape": [5000]},
        "model.steps": {"file": file, "dtype": "I64", "shape": []},
        "optimizer.mean": {"file": file, "dtype": "F64", "shape": [3, 7]},
    }
    assert equal(load_file(path / file), sample(120))
    for each in (tmp_path / "run", tmp_path / "run/checkpoints", path):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    for each in path.iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600


def test_large_states_are_split_into_files(tmp_path: Path) -> None:
    state = {str(number): torch.full((10,), float(number)) for number in range(5)} | {"big": torch.ones(100)}
    path = write_checkpoint(tmp_path, 1, state, {}, file_bytes=80)
    found = [re.sub("-[0-9a-f]{8}", "", each.name) for each in path.iterdir()]
    assert sorted(found) == ["manifest.json", *(f"model.{number}.safetensors" for number in (1, 2, 3, 4))]
    found = find_checkpoint(tmp_path, pytest.fail)
    assert found is not None
    assert equal(found.tensors(), state)
    assert write_checkpoint(tmp_path, 2, {}, {}).exists()
    found = find_checkpoint(tmp_path, pytest.fail)
    assert found is not None
    assert found.tensors() == {}


def test_files_are_flushed_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    log: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def logged_fsync(fd: int) -> None:
        log.append("flush " + Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(tmp_path).as_posix())
        fsync(fd)

    def logged_replace(source: Path, target: Path) -> None:
        log.append(f"{source.name} > {target.name}")
        replace(source, target)

    def logged_unlink(path: Any, **options: Any) -> None:
        log.append(f"remove {Path(path).name}")
        unlink(path, **options)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    monkeypatch.setattr(os, "unlink", logged_unlink)
    path = write(tmp_path, 2, keep=1)
    folder = "checkpoints/step-000000000002"
    log = [line for line in log if line != "remove .manifest.json.tmp"]
    assert log[:7] == [
        "flush .",
        "flush checkpoints",
        f"flush {folder}/{weights_of(path).name}",
        f"flush {folder}",
        f"flush {folder}/.manifest.json.tmp",
        ".manifest.json.tmp > manifest.json",
        f"flush {folder}",
    ]
    assert log[7] == "remove manifest.json"  # of the older one: it is none from then on


def test_loaded_tensors_are_aligned_and_do_not_need_the_file(tmp_path: Path) -> None:
    state = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.ones(2)}
    file = weights_of(write_checkpoint(tmp_path, 1, state, {}))
    found = find_checkpoint(tmp_path, pytest.fail)
    assert found is not None
    assert [t.data_ptr() % t.element_size() for t in found.tensors(mapped=True).values()] == [0, 0, 0]
    read = found.tensors()
    with open(file, "r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    assert equal(read, state)


def test_find_checkpoint_in_an_empty_run_folder_gives_none(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "nowhere", pytest.fail) is None
    (tmp_path / "checkpoints").mkdir()
    assert find_checkpoint(tmp_path, pytest.fail) is None
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize(("keep", "left"), [(0, [5]), (1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in range(1, 6):
        write(tmp_path, step, keep=keep)
    assert names(tmp_path) == step_names(*left)
    listed = list_checkpoints(tmp_path)
    assert listed == [(step, f"step-{step:012d}") for step in reversed(left)]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep=9)
    os.truncate(weights_of(tmp_path / "checkpoints/step-000000000003"), 100)
    write(tmp_path, 4, keep=2)
    assert names(tmp_path) == step_names(2, 4)


def test_later_steps_stay_when_an_earlier_one_is_written(tmp_path: Path) -> None:
    # As after a resume that passed over the damaged step 9.
    for step in (1, 2, 9):
        write(tmp_path, step, keep=9)
    write(tmp_path, 3, keep=1)
    assert names(tmp_path) == step_names(3, 9)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5, {"a": torch.zeros(1)}, {})
    path = write(tmp_path, 5)
    assert names(tmp_path) == step_names(5)
    assert found_step(tmp_path) == 5
    assert sorted(each.name for each in path.iterdir()) == ["manifest.json", weights_of(path).name]


def test_version_1_checkpoint_killed_during_a_replacement_is_found(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    write(tmp_path, 5)
    (parent / "step-000000000005").rename(parent / ".step-000000000005.old-77")
    assert found_step(tmp_path) == 5
    write(tmp_path, 6, keep=1)
    assert names(tmp_path) == step_names(6)


def test_version_1_checkpoint_is_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints/step-000000000120"
    path.mkdir(parents=True)
    state = sample(120)
    size, digest = write_tensors(path / "model.safetensors", state)
    kinds = {"model.weight": "F32", "model.steps": "I64", "optimizer.mean": "F64"}
    manifest = {
        "seed": 3,
        "format": 1,
        "step": 120,
        "files": {"model.safetensors": {"bytes": size, "sha256": digest}},
        "tensors": {
            name: {"file": "model.safetensors", "dtype": kinds[name], "shape": list(tensor.shape)}
            for name, tensor in state.items()
        },
    }
    body = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items())
    seal = hashlib.sha256(body.encode()).hexdigest()
    (path / "manifest.json").write_text(f'{body},\n"sha256": "{seal}"\n}}\n')
    assert found_step(tmp_path) == 120
    write(tmp_path, 130)
    assert names(tmp_path) == step_names(120, 130)


def test_an_unfinished_checkpoint_is_passed_over_and_removed(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    write(tmp_path, 1)
    for step in (2, 9):
        (parent / f"step-{step:012d}").mkdir()
        (parent / f"step-{step:012d}" / "model-00000000-00001-of-00003.safetensors").write_bytes(b"torn")
    told = "checkpoint of step {} was not finished; using step 1"
    assert found_step(tmp_path, [told.format(9), told.format(2)]) == 1
    (write(tmp_path, 3) / "model-00000000-00002-of-00003.safetensors").write_bytes(b"torn")
    write(tmp_path, 3)  # again: files of another attempt go
    assert names(tmp_path) == step_names(1, 3, 9)
    assert len([*(parent / "step-000000000003").iterdir()]) == 2
    shutil.rmtree(parent / "step-000000000001")
    shutil.rmtree(parent / "step-000000000003")
    lines: list[str] = []
    assert find_checkpoint(tmp_path, lines.append) is None
    assert lines == ["checkpoint of step 9 was not finished; no earlier checkpoint was found"]


# -- damage ------------------------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


MODEL = r"model-[0-9a-f]{8}\.safetensors"
DAMAGE: list[tuple[str, str, Any]] = [
    ("model-*.safetensors", rf"{MODEL}: SHA-256 differs", lambda p: flip(p, -1)),
    ("model-*.safetensors", rf"{MODEL}: SHA-256 differs", lambda p: flip(p, 40)),
    ("model-*.safetensors", rf"{MODEL}: size is \d+ bytes instead of \d+", lambda p: os.truncate(p, 999)),
    ("model-*.safetensors", rf"{MODEL}: size is 0 bytes instead of \d+", lambda p: os.truncate(p, 0)),
    ("model-*.safetensors", rf"{MODEL}: size is \d+ bytes instead of \d+", lambda p: os.truncate(p, 10**5)),
    ("model-*.safetensors", rf"{MODEL} is missing", lambda p: p.unlink()),
    ("manifest.json", "manifest.json cannot be read", lambda p: os.truncate(p, 200)),
    ("manifest.json", "manifest.json cannot be read", lambda p: os.truncate(p, 0)),
    ("manifest.json", "manifest.json cannot be read", lambda p: p.write_bytes(bytes(200))),
    ("manifest.json", "manifest.json cannot be read", lambda p: p.write_text('["format"]')),
    ("manifest.json", "manifest.json: SHA-256 differs", lambda p: p.write_text('{"format": 2, "step": 120}')),
    ("manifest.json", "manifest.json: SHA-256 differs", lambda p: flip(p, p.read_bytes().index(b": 3") + 2)),
    ("manifest.json", "manifest.json: Is a directory", lambda p: (p.unlink(), p.mkdir())),
]


@pytest.mark.parametrize(("file", "reason", "damage"), DAMAGE)
def test_a_damaged_checkpoint_is_found_and_passed_over(tmp_path: Path, file: str, reason: str, damage: Any) -> None:
    write(tmp_path, 100)
    (damaged,) = write(tmp_path, 120).glob(file)
    damage(damaged)
    lines: list[str] = []
    found = find_checkpoint(tmp_path, lines.append)
    assert found is not None
    assert found.step == 100
    assert len(lines) == 1
    assert re.fullmatch(rf"checkpoint of step 120 is damaged \({reason}\); using step 100", lines[0])


def test_every_byte_of_a_checkpoint_is_guarded(tmp_path: Path) -> None:
    good = write_checkpoint(tmp_path, 1, {"a": torch.arange(3)}, {"seed": 1})
    for file in good.iterdir():
        data = file.read_bytes()
        for position in range(len(data)):
            flip(file, position)
            # Only the end of the manifest, after its seal, holds nothing that could be wrong.
            try:
                found = find_checkpoint(tmp_path, pytest.fail)
            except CheckpointError:
                pass
            else:
                assert found is not None
                assert same(found.tensors(), {"a": torch.arange(3)})
                assert found.manifest["seed"] == 1
                assert position > data.rindex(b'"sha256": "') + 64
                assert file.name == "manifest.json"
            file.write_bytes(data)


def test_each_of_several_damaged_checkpoints_is_named(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep=9)
    for step in (2, 3):
        flip(weights_of(tmp_path / f"checkpoints/step-{step:012d}"), -1)
    named = [weights_of(tmp_path / f"checkpoints/step-{step:012d}").name for step in (3, 2)]
    told = "checkpoint of step {} is damaged ({}: SHA-256 differs); using step 1"
    assert found_step(tmp_path, [told.format(3, named[0]), told.format(2, named[1])]) == 1


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    damaged = weights_of(write(tmp_path, 100))
    flip(damaged, -1)
    (write(tmp_path, 120) / "manifest.json").unlink()
    assert refusal(CheckpointError, find_checkpoint, tmp_path, pytest.fail) == (
        f"no checkpoint in {tmp_path}/checkpoints is intact: step 120 (manifest.json is missing), "
        f"step 100 ({damaged.name}: SHA-256 differs); "
        "restore one from a copy, or choose another --run-dir to train from the start"
    )


def test_a_folder_under_another_name_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path, 100)
    shutil.copytree(path, path.with_name("step-000000000200"))
    assert found_step(
        tmp_path, ["checkpoint of step 200 is damaged (manifest.json belongs to step 100); using step 100"]
    )


def test_a_newer_format_is_refused_and_never_removed(tmp_path: Path) -> None:
    write(tmp_path, 100)
    manifest = write(tmp_path, 120) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 3'))
    assert refusal(CheckpointError, find_checkpoint, tmp_path, pytest.fail) == (
        f"checkpoint of step 120 in {tmp_path}/checkpoints has format version 3, "
        "but this version of Paceline reads only versions up to 2; "
        "install the version of Paceline that wrote it, or choose another --run-dir"
    )
    write(tmp_path, 130, keep=1)
    assert names(tmp_path) == step_names(120, 130)


def test_files_that_do_not_match_their_manifest_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    found = find_checkpoint(tmp_path, pytest.fail)
    assert found is not None
    found.manifest["tensors"]["model.steps"]["shape"] = [1]
    wanted = f"{path}: tensor 'model.steps' does not match the manifest; use another checkpoint"
    assert refusal(CheckpointError, found.tensors) == wanted
    shutil.rmtree(path)
    assert refusal(CheckpointError, found.tensors).startswith(f"{path} could not be read: No such file")


# -- interruptions -----------------------------------------------------------------------------------------


KILLER = """
import json, os, random, shutil, signal, sys
from pathlib import Path
import torch
sys.path[:0] = sys.argv[1].split(os.pathsep)
from checkpoints import find_checkpoint, write_checkpoint
from test_checkpoint_write import equal, names, sample

torch.set_num_threads(1)
root, replace, sizes = Path(sys.argv[2]), sys.argv[3] == "replace", int(sys.argv[4])
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def write_and_die(folder, events, size):
    left = [events, size]
    def on_event(event, arguments):
        if event in EVENTS:
            left[0] -= 1
            if left[0] < 0:
                die()
    real = os.write
    def write(fd, data):
        if len(data) > left[1]:
            real(fd, data[:left[1]])
            die()
        left[1] -= len(data)
        return real(fd, data)
    os.write = write
    sys.addaudithook(on_event)
    # Replacing, the other content is under the same step, and nothing else is there.
    write_checkpoint(folder, 3, sample(3), {"version": "new"}, keep=1 if replace else 2)
    os._exit(0)

base = root / "base"
for step in (3,) if replace else (1, 2):
    write_checkpoint(base, step, sample(step if not replace else 30), {"version": "old"})

def trial(events, size):
    folder = root / f"{events}-{size}"
    shutil.copytree(base, folder)
    pid = os.fork()
    if pid == 0:
        write_and_die(folder, events, size)
    killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    said = []
    found = find_checkpoint(folder, said.append)
    version = found.manifest["version"]
    wanted = sample(3 if version == "new" else 30 if replace else found.step)
    whole = equal(found.tensors(), wanted)
    write_checkpoint(folder, 4, sample(4), {}, keep=2)
    print(json.dumps({"killed": killed, "found": [found.step, version], "whole": whole, "said": said,
                      "after": names(folder)}), flush=True)
    shutil.rmtree(folder)
    return killed

events = 0
while trial(events, 1 << 40):
    events += 1
total = sum(file.stat().st_size for file in (base / "checkpoints" / names(base)[-1]).iterdir())
for size in sorted(random.Random(7).sample(range(total - 20), sizes)):
    trial(1 << 40, size)
"""


@pytest.mark.parametrize("sizes", [12, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", ["next", "replace"])
def test_kill_of_a_writer_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, scenario: str, sizes: int) -> None:
    """SIGKILL before every operation on the file system, and after so many seeded numbers of bytes."""
    (tmp_path / "killer.py").write_text(KILLER)
    command = [
        sys.executable,
        tmp_path / "killer.py",
        f"{SUPPORT}:{Path(__file__).parent}",
        tmp_path,
        scenario,
        str(sizes),
    ]
    with Process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    trials = [json.loads(line) for line in stdout.splitlines()]
    killed = [trial for trial in trials if trial["killed"]]
    assert len(killed) == len(trials) - 1 >= 8 + sizes
    for trial in trials:
        assert trial["whole"], trial
        open_ = ["checkpoint of step 3 was not finished; using step 2"]
        assert trial["said"] in ([], open_ if scenario == "next" else []), trial
        assert trial["found"] in ([2, "old"], [3, "old"], [3, "new"]), trial
        assert trial["after"] in (step_names(2, 4), step_names(3, 4)), trial
    old, new = ("old", 2 if scenario == "next" else 3), ("new", 3)
    order = [(version, step) for step, version in (trial["found"] for trial in trials[:-sizes])]
    assert set(order) == {old, new}
    assert order == sorted(order, key=lambda found: found[0] == "new")  # once the new one is there, it stays


@contextmanager
def small_files() -> Iterator[None]:
    """This process may write 4096 bytes to a file, as under ulimit -f; Python ignores SIGXFSZ.

    For a few lines of a test only: pytest itself may be writing to a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_checkpoint_beyond_the_file_size_limit_names_ulimit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 100, {"a": torch.ones(2)}, {})
    with small_files():
        said = refusal(CheckpointError, write, tmp_path, 120)
    assert said == (
        f"checkpoint of step 120 could not be written to {tmp_path}/checkpoints: File too large; "
        "raise the file size limit (ulimit -f) or choose another --run-dir; "
        "the checkpoint of step 100 is intact"
    )
    assert names(tmp_path) == step_names(100)
    out = tmp_path / "model.safetensors"
    write_model({"a": torch.ones(2)}, out)
    before = out.read_bytes()
    with small_files():
        said = refusal(CheckpointError, write_model, sample(1), out)
    assert said == (
        f"the model could not be written to {out}: File too large; "
        "raise the file size limit (ulimit -f) or choose another file"
    )
    assert out.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoints", "model.safetensors"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "paceline-test", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.root
def test_checkpoint_on_a_full_or_read_only_disk(small_disk: Path) -> None:
    run = small_disk / "run"
    big = {"a": torch.zeros(500_000), "b": torch.zeros(1)}
    said = f"checkpoint of step {{}} could not be written to {run}/checkpoints: {{}}; {{}} another --run-dir"
    full = said.format(90, "No space left on device", "free some space (2.0 MB needed) or choose")
    assert refusal(CheckpointError, write_checkpoint, run, 90, big, {}) == full
    assert find_checkpoint(run, pytest.fail) is None
    write(run, 100)
    full = full.replace("step 90", "step 120") + "; the checkpoint of step 100 is intact"
    for _ in range(3):  # a failed try leaves nothing behind that the next one would lack
        assert refusal(CheckpointError, write_checkpoint, run, 120, big, {}) == full
    out = small_disk / "model.safetensors"
    assert refusal(CheckpointError, write_model, big, out) == (
        f"the model could not be written to {out}: No space left on device; "
        "free some space (2.0 MB needed) or choose another file"
    )
    assert sorted(each.name for each in small_disk.iterdir()) == ["run"]
    assert found_step(run) == 100
    write(run, 130)
    assert names(run) == step_names(100, 130)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    cure = "check that the folder exists and that you can write to it, or choose"
    wanted = said.format(140, "Read-only file system", cure)
    assert refusal(CheckpointError, write, run, 140) == f"{wanted}; the checkpoint of step 130 is intact"


@pytest.mark.root
@pytest.mark.parametrize("left", [20_000, 150_000])
def test_full_disk_error_says_how_much_a_checkpoint_needs(left: int, small_disk: Path, tmp_path: Path) -> None:
    """Its tensors, their names and the manifest; where there is no room for the tensors, or only for them. Nothing
    stays, so that the next one needs no more.
    """
    state, manifest = {f"w{number}": torch.zeros(10) for number in range(500)}, {"script": "x" * 200_000}
    whole = write_checkpoint(tmp_path / "elsewhere", 1, state, manifest)
    need = sum(path.stat().st_size for path in whole.iterdir())
    assert need > 250_000
    about = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(about.f_bavail * about.f_bsize - left))
    assert refusal(CheckpointError, write_checkpoint, small_disk / "run", 1, state, manifest) == (
        f"checkpoint of step 1 could not be written to {small_disk}/run/checkpoints: No space left on device; "
        f"free some space ({size_text(need)} needed) or choose another --run-dir"
    )
    assert [path for path in small_disk.rglob("*") if path.is_file()] == [small_disk / "filler"]


def test_a_run_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    assert refusal(CheckpointError, write, tmp_path / "run", 1) == (
        f"checkpoint of step 1 could not be written to {tmp_path}/run/checkpoints: File exists; "
        "check that the folder exists and that you can write to it, or choose another --run-dir"
    )
    assert refusal(CheckpointError, find_checkpoint, tmp_path / "run", pytest.fail) == (
        f"{tmp_path}/run/checkpoints could not be read: Not a directory; "
        "check that it is a folder that you can read, or choose another --run-dir"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_checkpoint_of_gpu_tensors(tmp_path: Path) -> None:
    state = {name: tensor.cuda() for name, tensor in sample(4).items()}
    write_checkpoint(tmp_path, 4, state, {})
    assert found_step(tmp_path) == 4
