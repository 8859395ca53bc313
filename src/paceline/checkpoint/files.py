"""Checkpoints on disk, format version 1: a folder per step with safetensors files and a JSON manifest.

A checkpoint is written into a hidden folder beside its place, flushed, and renamed: it is there whole or not
at all. The manifest holds size and SHA-256 of every file and ends with the SHA-256 of its own text before it,
so that damage anywhere is found before a value is used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.checkpoint.tensorfile import DTYPES, flush_folder, size_text, write_file, write_tensors
from paceline.errors import CheckpointError

VERSION = 1
FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{12})|\.step-(\d{12})\.old-\d+")  # the second: about to be replaced by the same step
_STALE = re.compile(r"\.step-\d{12}\.tmp-(\d{1,9})")
_SEAL = ',\n"sha256": "'
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `manifest` is what `write_checkpoint` got, and step, format, files, tensors."""

    step: int
    path: Path
    manifest: dict[str, Any]

    def tensors(self, mapped: bool = False) -> dict[str, torch.Tensor]:
        """Every tensor by name, on the CPU; if `mapped` as pages of the file instead of memory of its own.

        Raises CheckpointError where names, dtypes or shapes differ from the manifest's.
        """
        cure = "take another checkpoint"
        found: dict[str, torch.Tensor] = {}
        try:
            for name in self.manifest["files"]:
                with safe_open(self.path / name, framework="pt") as file:
                    for key in file.keys():  # noqa: SIM118 (not a mapping)
                        tensor = file.get_tensor(key)
                        found[key] = tensor if mapped else tensor.clone()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} could not be read: {error}", cure) from error
        told = {name: (entry["dtype"], entry["shape"]) for name, entry in self.manifest["tensors"].items()}
        read = {name: (DTYPES[tensor.dtype], list(tensor.shape)) for name, tensor in found.items()}
        if told != read:
            name = min(name for name in told | read if told.get(name) != read.get(name))
            raise CheckpointError(f"{self.path}: {name!r} is not what the manifest says", cure)
        return found


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint in the run folder, newest first, not verified.

    Raises CheckpointError where the folder cannot be read.
    """
    parent = folder / FOLDER
    try:
        matches = [(_NAME.fullmatch(path.name), path) for path in parent.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        cure = "see that it is a folder that you may read, or choose another --run-dir"
        raise CheckpointError(f"{parent} could not be read: {error.strerror}", cure) from error
    found = [(int(match[1] or match[2]), match[1] is not None, path) for match, path in matches if match]
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def open_checkpoint(step: int, path: Path, hashes: bool = True) -> Checkpoint | str:
    """The checkpoint at `path`, or in a few words what is damaged there.

    Without `hashes` files only need their size. Raises CheckpointError where a newer Paceline wrote it.
    """
    current = path / _MANIFEST
    try:
        text = current.read_bytes()
        manifest = json.loads(text)
        version = manifest["format"]
        if isinstance(version, int) and version > VERSION:
            raise CheckpointError(
                f"checkpoint of step {step} in {path.parent} has format version {version}, "
                f"and this Paceline reads versions up to {VERSION}",
                "install the Paceline that wrote it, or choose another --run-dir",
            )
        body, _, seal = text.rpartition(_SEAL.encode())
        if seal[:64].decode() != hashlib.sha256(body).hexdigest():
            return f"{_MANIFEST}: SHA-256 differs"
        if manifest["step"] != step:
            return f"{_MANIFEST}: is of step {manifest['step']}"
        for name, entry in manifest["files"].items():
            current = path / name
            size = current.stat().st_size
            if size != entry["bytes"]:
                return f"{name}: {size} bytes instead of {entry['bytes']}"
            if hashes:
                with open(current, "rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                        return f"{name}: SHA-256 differs"
    except FileNotFoundError:
        return f"{current.name} is missing"
    except OSError as error:
        return f"{current.name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{_MANIFEST} cannot be read"
    return Checkpoint(step, path, manifest)


def find_checkpoint(folder: Path, say: Callable[[str], None], only: int | None = None) -> Checkpoint | None:
    """The run's newest checkpoint that verifies, or that of step `only`; None where there is none.

    Every damaged one that is passed over is told through `say`. Raises CheckpointError when there are
    checkpoints and none verifies, and when a newer Paceline wrote the newest.
    """
    damaged: list[tuple[int, str]] = []
    for step, path in list_checkpoints(folder):
        if only not in (None, step):
            continue
        found = open_checkpoint(step, path)
        if isinstance(found, Checkpoint):
            for bad, reason in damaged:
                say(f"checkpoint of step {bad} is damaged ({reason}); taking step {step}")
            return found
        damaged.append((step, found))
    if damaged:
        reasons = ", ".join(f"step {step} ({reason})" for step, reason in damaged)
        cure = "restore one from a copy, or choose another --run-dir to train from the start"
        raise CheckpointError(f"no checkpoint in {folder / FOLDER} is whole: {reasons}", cure)
    return None


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    manifest: Mapping[str, Any],
    keep: int = 2,
    file_bytes: int = 4 << 30,
) -> Path:
    """Writes ``folder/checkpoints/step-%012d`` durably and atomically, then removes older ones beyond `keep`.

    `manifest` is any JSON object; its fields come back in `Checkpoint.manifest`. Tensors are split into files
    of at most `file_bytes` each, unless one alone is larger. One writer at a time per folder (the run's lock
    sees to that). Raises CheckpointError; what was there before is intact then.
    """
    parent = folder / FOLDER
    final = parent / f"step-{step:012d}"
    temporary = parent / f".{final.name}.tmp-{os.getpid()}"
    try:
        for path in (folder, parent):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(parent)
        temporary.mkdir(mode=0o700)
        _fill(temporary, step, tensors, manifest, file_bytes)
        if final.exists():
            # A folder cannot replace a full one in one move; between the two the hidden one is found.
            os.rename(final, parent / f".{final.name}.old-{time.time_ns()}")
        os.rename(temporary, final)
        flush_folder(parent)
        flush_folder(folder)
    except OSError as error:
        cure = write_cure(error, sum(tensor.nbytes for tensor in tensors.values()), "another --run-dir")
        with contextlib.suppress(CheckpointError):
            for number, path in list_checkpoints(folder):
                if isinstance(open_checkpoint(number, path, hashes=False), Checkpoint):
                    cure += f"; the checkpoint of step {number} is intact"
                    break
        what = f"checkpoint of step {step} could not be written to {parent}: {error.strerror}"
        raise CheckpointError(what, cure) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _prune(folder, step, final, keep)
    return final


def _fill(
    target: Path, step: int, tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any], file_bytes: int
) -> None:
    groups: list[dict[str, torch.Tensor]] = []
    room = 0
    for name, tensor in tensors.items():
        if not groups or tensor.nbytes > room:
            groups.append({})
            room = file_bytes
        groups[-1][name] = tensor
        room -= tensor.nbytes
    files, entries = {}, {}
    for number, group in enumerate(groups, start=1):
        last = len(groups)
        file = "model.safetensors" if last == 1 else f"model-{number:05d}-of-{last:05d}.safetensors"
        size, digest = write_tensors(target / file, group)
        files[file] = {"bytes": size, "sha256": digest}
        for name, tensor in group.items():
            entries[name] = {"file": file, "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
    whole = {**manifest, "format": VERSION, "step": step, "files": files, "tensors": entries}
    body = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in whole.items())
    seal = hashlib.sha256(body.encode()).hexdigest()
    write_file(target / _MANIFEST, [f'{body}{_SEAL}{seal}"\n}}\n'.encode()])
    flush_folder(target)


def _sweep(parent: Path) -> None:
    """Tidies up after killed writers, also those that had our number before us."""
    for path in parent.iterdir():
        if match := _STALE.fullmatch(path.name):
            if int(match[1]) == os.getpid() or not os.path.exists(f"/proc/{match[1]}"):
                shutil.rmtree(path)
        elif (match := _NAME.fullmatch(path.name)) and match[2]:
            visible = parent / f"step-{match[2]}"
            if not visible.exists():
                os.rename(path, visible)


def _prune(folder: Path, step: int, final: Path, keep: int) -> None:
    """Removes older checkpoints beyond `keep`, and damaged older ones; nothing unless `final` is whole."""
    reason = open_checkpoint(step, final, hashes=False)
    if isinstance(reason, str):
        cure = "check that disk, or choose another --run-dir; older checkpoints were kept"
        what = f"checkpoint of step {step} was written to {final.parent} and is damaged ({reason})"
        raise CheckpointError(what, cure)
    kept = {step}
    for number, path in list_checkpoints(folder):
        if path == final or number > step:
            continue
        try:
            whole = isinstance(open_checkpoint(number, path, hashes=False), Checkpoint)
        except CheckpointError:
            continue  # a newer Paceline's: not ours to remove
        if whole and number not in kept and len(kept) < keep:
            kept.add(number)
            continue
        try:
            # Renamed first: an interrupted removal must not leave what looks like a damaged checkpoint.
            doomed = final.parent / f".step-{number:012d}.tmp-{os.getpid()}"
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            what = f"checkpoint of step {step} is written, but that of step {number} could not be removed"
            raise CheckpointError(f"{what} from {final.parent}: {error.strerror}", "remove it by hand") from error


def write_cure(error: OSError, need: int, instead: str) -> str:
    """What to do about a failed write of `need` bytes; `instead` names the other place to choose."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free some space (it needs {size_text(need)}) or choose {instead}"
    if error.errno == errno.EFBIG:
        return f"raise the limit on the size of a file (ulimit -f) or choose {instead}"
    return f"see that the folder exists and can be written to, or choose {instead}"
