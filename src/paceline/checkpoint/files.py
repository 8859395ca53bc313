"""The checkpoint format: a folder per step, its manifest last; finds the newest intact one, removes old ones.

A folder without a manifest is not a checkpoint. The manifest holds size and SHA-256 of every file and ends with the
SHA-256 of its own text before it, so that damage anywhere is found before a value is used. Several workers may write
the files of one checkpoint: `layout` assigns blocks of tensors to each, from the shapes of the state only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError

from paceline.base.schema import find_wrong, parse
from paceline.base.sharding import Block, RowShards, ShardedTensor, ShardingSpec, assemble
from paceline.checkpoint.lazy import Deferred, tensors_elsewhere
from paceline.checkpoint.safetensors_file import DTYPES, file_bytes, open_tensors, size_text, tensor_chunks
from paceline.checkpoint.storage import Storage, storage_at
from paceline.errors import CheckpointError, FormatError

VERSION = 2
FOLDER, MANIFEST = "checkpoints", "manifest.json"
UNFINISHED = f"{MANIFEST} is missing"
FILE_BYTES = 4 << 30
_NAME = re.compile(r"step-(\d{12})|\.step-(\d{12})\.old-\d+")  # the second: version 1, about to be replaced
_SEAL = ',\n"sha256": "'
_SMALL = 1 << 20  # bytes of a tensor that is not divided
_TENSORS = {text: dtype for dtype, text in DTYPES.items()}

_T = TypeVar("_T")
Slice = tuple[str, Block | None]  # a tensor's name, and which block of it, if not all
_PlacedPart = tuple[list[int], torch.Tensor]  # the index in the full tensor at which the part begins
Files = dict[str, list[Slice]]  # what each file holds
FileDigests = Mapping[str, tuple[int, str]]  # bytes and SHA-256 of each


def checkpoints_of(run: str | Path) -> Storage:
    """The storage that holds a run's checkpoints, for a run folder or for the URL of its checkpoints."""
    storage = storage_at(run)
    return storage if storage.shared else storage_at(Path(run) / FOLDER)


class TensorInfo(NamedTuple):
    """Dtype and shape of a full tensor. It holds no data and costs less than an empty or meta tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, block: Block | None) -> TensorInfo:
        """Dtype and shape of a block of the tensor, or of all of it."""
        return self if block is None else TensorInfo(self.dtype, block.shape)

    def nbytes(self, block: Block | None) -> int:
        """The bytes of a block of the tensor, or of all of it."""
        return math.prod(self.of(block).shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. `manifest` holds the fields given to `commit`, and step, format, files and tensors."""

    step: int
    storage: Storage
    folder: str
    manifest: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.storage}/{self.folder}"

    def tensors(self, mapped: bool = False) -> dict[str, torch.Tensor]:
        """Reads every tensor, by name, to the CPU.

        With `mapped`, tensors are memory-mapped instead of copied; a tensor whose parts lie in several files is then a
        `Deferred` one, which reads its rows when they are needed. Raises CheckpointError if names, dtypes or shapes
        differ from the manifest's.
        """
        parts: dict[str, dict[str, torch.Tensor]] = {}
        try:
            for name in self.manifest["files"]:
                if self.storage.is_elsewhere(self.folder, name):
                    read = partial(self.storage.read_part, self.folder, name)
                    parts[name] = tensors_elsewhere(read, str(self.storage))
                    continue
                with open_tensors(self.storage.local(self.folder, name)) as file:
                    parts[name] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self} could not be read: {error}", "use another checkpoint") from error
        tensors = {}
        for name, entry in self.manifest["tensors"].items():
            placed_parts = self._placed(name, entry, parts)
            if len(placed_parts) == 1:
                tensors[name] = placed_parts[0][1] if mapped else placed_parts[0][1].clone()
            else:
                read_rows = partial(_assembled, entry, placed_parts)
                read_all = partial(read_rows, 0, entry["shape"][0])
                tensors[name] = (
                    Deferred(read_all, entry["shape"], _TENSORS[entry["dtype"]], read_rows) if mapped else read_all()
                )
        if leftover := [key for held in parts.values() for key in held]:
            raise self._differs(min(leftover))
        return tensors

    def _placed(self, name: str, entry: dict[str, Any], parts: dict[str, dict[str, torch.Tensor]]) -> list[_PlacedPart]:
        """Pops the parts of a tensor, with the index at which each begins, from the tensors of each file."""
        placed_parts: list[_PlacedPart] = []
        for file, at, shape in _part_locations(entry):
            part = parts[file].pop(name, None)
            if part is None or [DTYPES[part.dtype], list(part.shape)] != [entry["dtype"], shape]:
                raise self._differs(name)
            placed_parts.append((at, part))
        if sum(part.numel() for _, part in placed_parts) != math.prod(entry["shape"]):
            raise self._differs(name)
        return placed_parts

    def _differs(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self}: tensor {name!r} does not match the manifest", "use another checkpoint")


def _part_locations(entry: dict[str, Any]) -> list[tuple[str, list[int], list[int]]]:
    """The file, the first indices and the shape of each part of a tensor."""
    if "parts" in entry:
        return [(part["file"], part["at"], part["shape"]) for part in entry["parts"]]
    return [(entry["file"], [0] * len(entry["shape"]), entry["shape"])]


def _assembled(entry: dict[str, Any], placed_parts: list[_PlacedPart], first: int, end: int) -> torch.Tensor:
    """Rows `first` to `end` of a tensor, copied from the parts that hold them."""
    rows = torch.empty([end - first, *entry["shape"][1:]], dtype=_TENSORS[entry["dtype"]])
    return assemble(rows, placed_parts, first)


# -- finding ---------------------------------------------------------------------------------------------------------


def list_checkpoints(storage: Storage) -> list[tuple[int, str]]:
    """Lists (step, folder) of every checkpoint, newest first. They are not verified, and may be unfinished.

    Raises CheckpointError if the storage cannot be listed.
    """
    try:
        matches = [(_NAME.fullmatch(name), name) for name in storage.folders()]
    except OSError as error:
        cure = f"check that it is a folder that you can read, or choose {storage.another}"
        cure = "check that this host can reach it, then start again" if storage.shared else cure
        raise CheckpointError(f"{storage} could not be read: {error.strerror}", cure) from error
    checkpoints = [(int(match[1] or match[2]), match[1] is not None, name) for match, name in matches if match]
    return [(step, name) for step, _, name in sorted(checkpoints, reverse=True)]


def open_checkpoint(storage: Storage, step: int, folder: str, hashes: bool = True) -> Checkpoint | str:
    """Verifies the checkpoint in `folder`. Returns it, or a short text that says what is damaged.

    Without `hashes`, only the sizes of files are compared. Raises CheckpointError if a newer Paceline wrote the
    checkpoint, or if a remote storage cannot be reached.
    """
    current = MANIFEST
    try:
        text = storage.read(folder, current)
        manifest = parse(text, current)
        version = manifest.get("format") if isinstance(manifest, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise CheckpointError(
                f"checkpoint of step {step} in {storage} has format version {version}, "
                f"but this version of Paceline reads only versions up to {VERSION}",
                f"install the version of Paceline that wrote it, or choose {storage.another}",
            )
        body, _, seal = text.rpartition(_SEAL.encode())
        if version is None:
            return f"{MANIFEST} cannot be read"
        if seal[:64] != hashlib.sha256(body).hexdigest().encode():
            return f"{MANIFEST}: SHA-256 differs"
        if wrong := _find_wrong(manifest):
            return f"{MANIFEST}: {wrong}"
        if manifest["step"] != step:
            return f"{MANIFEST} belongs to step {manifest['step']}"
        sizes = storage.sizes(folder)
        for current, entry in manifest["files"].items():
            if current not in sizes:
                return f"{current} is missing"
            if sizes[current] != entry["bytes"]:
                return f"{current}: size is {sizes[current]} bytes instead of {entry['bytes']}"
            if hashes and storage.digest(folder, current) != entry["sha256"]:
                return f"{current}: SHA-256 differs"
    except FileNotFoundError:
        return f"{current} is missing"
    except OSError as error:
        if storage.shared:  # an unreachable checkpoint need not be damaged
            cure = "check that this host can reach it, then start again"
            raise CheckpointError(f"{storage}/{folder}/{current} could not be read: {error.strerror}", cure) from error
        return f"{current}: {error.strerror}"
    except FormatError:
        return f"{MANIFEST} cannot be read"
    return Checkpoint(step, storage, folder, manifest)


def _find_wrong(manifest: Any) -> str:
    """Describes the first invalid field of a manifest, or the first tensor that its files cannot hold; else empty."""
    from paceline.checkpoint.file_types import Manifest  # needs msgspec

    if wrong := find_wrong(manifest, Manifest):
        return wrong
    for name, entry in manifest["tensors"].items():
        fits = ("parts" in entry) != ("file" in entry)
        for file, at, shape in _part_locations(entry) if fits else ():
            ends = [*zip(at, shape, entry["shape"], strict=False)]
            fits &= file in manifest["files"] and len(at) == len(shape) == len(entry["shape"])
            fits &= all(begin + length <= dim_size for begin, length, dim_size in ends)
        if not fits:
            return f"tensors[{json.dumps(name)}] does not match the files"
    return ""


def trainers_in(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The saved state of each trainer. Raises CheckpointError if no run of version 2 wrote it, or if it is damaged."""
    from paceline.checkpoint.file_types import SavedTree  # needs msgspec

    if "tree" not in manifest:
        what = f"the checkpoint of step {manifest['step']} contains tensors but no trainers"
        raise CheckpointError(what, "choose a checkpoint that a training run wrote")
    if wrong := find_wrong({"tree": manifest["tree"]}, dict[str, SavedTree]):
        raise CheckpointError(
            f"the checkpoint of step {manifest['step']} is damaged: {wrong}", "use another checkpoint"
        )
    trainers: list[dict[str, Any]] = manifest["tree"]["trainers"]
    return trainers


def find_checkpoint(storage: Storage, say: Callable[[str], None], only: int | None = None) -> Checkpoint | None:
    """Finds the newest intact checkpoint, or that of step `only`; None if no checkpoint was ever finished.

    Calls `say` with a line for each checkpoint that was skipped. Raises CheckpointError if there are damaged
    checkpoints and no intact one, or if a newer Paceline wrote the newest.
    """
    skipped: list[tuple[int, str]] = []
    chosen: Checkpoint | None = None
    for step, folder in list_checkpoints(storage):
        if only not in (None, step):
            continue
        opened = open_checkpoint(storage, step, folder)
        if isinstance(opened, Checkpoint):
            chosen = opened
            break
        skipped.append((step, opened))
    if chosen is None and any(reason != UNFINISHED for _, reason in skipped):
        reasons = ", ".join(f"step {step} ({reason})" for step, reason in skipped)
        cure = f"restore one from a copy, or choose {storage.another} to train from the start"
        raise CheckpointError(f"no checkpoint in {storage} is intact: {reasons}", cure)
    then = f"using step {chosen.step}" if chosen is not None else "no earlier checkpoint was found"
    for step, reason in skipped:
        state = "was not finished" if reason == UNFINISHED else f"is damaged ({reason})"
        say(f"checkpoint of step {step} {state}; {then}")
    return chosen


def last_weights(storage: Storage, trainer: int) -> Storage:
    """The storage of the last weights of an ended trainer, in a subfolder of the run's checkpoints."""
    return storage.inside(f"trainer-{trainer}")


def ended_in(manifest: Mapping[str, Any], storage: Storage, say: Callable[[str], None]) -> dict[int, Checkpoint]:
    """Opens the last weights of each trainer that the manifest says has ended; returns them by trainer number.

    Raises CheckpointError if such weights are missing or damaged.
    """
    last_checkpoints = {}
    for number, saved in enumerate(trainers_in(manifest)):
        step = saved.get("closed")
        if step is not None:
            weights_storage = last_weights(storage, number)
            checkpoint = find_checkpoint(weights_storage, say, step)
            if checkpoint is None or len(trainers_in(checkpoint.manifest)) <= number:
                what = f"the final weights of trainer {number} are missing: {weights_storage}/{folder_of(step)}"
                raise CheckpointError(what, f"restore them from a copy, or choose {storage.another}")
            last_checkpoints[number] = checkpoint
    return last_checkpoints


def with_ended(manifest: Mapping[str, Any], ended: Mapping[int, Checkpoint]) -> dict[str, Any]:
    """Returns `manifest` with the last weights of `ended` trainers added to its tree and its tensors."""
    trainers, tensors = list(trainers_in(manifest)), dict(manifest["tensors"])
    for number, checkpoint in ended.items():
        trainers[number] = {**trainers_in(checkpoint.manifest)[number], **trainers[number]}
        tensors |= checkpoint.manifest["tensors"]
    return {**manifest, "tree": {**manifest["tree"], "trainers": trainers}, "tensors": tensors}


# -- writing ---------------------------------------------------------------------------------------------------------


def folder_of(step: int) -> str:
    """The name of the folder that holds the checkpoint of `step`."""
    return f"step-{step:012d}"


def layout(
    main_only: Mapping[str, torch.Tensor],
    common: Mapping[str, torch.Tensor],
    cut: Mapping[str, ShardedTensor],
    writers: Sequence[int],
    attempt: str,
    file_bytes: int = FILE_BYTES,
) -> list[Files]:
    """Plans which files each writer writes; returns one plan per rank in `writers`.

    The first writer writes the `main_only` tensors. The bytes of the `common` tensors, which all workers have, are
    divided equally. The rows of each block of the `cut` tensors are divided among the writers that hold the block.
    Workers get the same plan if the names, shapes and dtypes of their common and cut tensors agree. A file has at most
    `file_bytes`, unless one tensor is larger. Raises CheckpointError if no writer holds some rows of a tensor.
    """
    shares = _divide(common, len(writers))
    for name, held in cut.items():
        for share, block_share in zip(shares, _divide_blocks(name, held.cut, writers), strict=True):
            share += block_share
    shares[0] = [*((name, None) for name in main_only), *shares[0]]
    plans: list[Files] = []
    tensors = tensor_infos({**main_only, **common, **cut})
    for number, share in enumerate(shares, start=1):
        sized = [[(slice_, tensors[slice_[0]].nbytes(slice_[1])) for slice_ in layer] for layer in _apart(share)]
        groups = [group for layer in sized for group in grouped(layer, file_bytes)]
        of = f"-{number:05d}-of-{len(writers):05d}" if len(writers) > 1 else ""
        last = len(groups)
        plans.append(
            {
                f"model-{attempt}{of}{f'.{count}' if last > 1 else ''}.safetensors": group
                for count, group in enumerate(groups, start=1)
            }
        )
    return plans


def tensor_infos(tensors: Mapping[str, torch.Tensor | ShardedTensor]) -> dict[str, TensorInfo]:
    """Dtype and full shape of each tensor; of a sharded tensor those of all its shards together."""
    return {
        n: TensorInfo(t.tensor.dtype if isinstance(t, ShardedTensor) else t.dtype, tuple(t.shape))
        for n, t in tensors.items()
    }


def _divide_blocks(name: str, cut: ShardingSpec, writers: Sequence[int]) -> list[list[Slice]]:
    """Divides the rows of each block of a sharded tensor among the writers that hold the block."""
    shares: list[list[Slice]] = [[] for _ in writers]
    at: dict[int, list[int]] = {}
    for number, rank in enumerate(writers):
        at.setdefault(cut.shard_index_of(rank), []).append(number)
    for (first, shape), held in cut.blocks.items():
        holders = sorted((number, shard_index) for shard_index in held for number in at.get(shard_index, ()))
        begin, length = (first or (0,))[0], (shape or (1,))[0]
        if length and not holders:
            what = f"no worker that has rows {begin}-{begin + length - 1} of {name} can reach the checkpoints"
            raise CheckpointError(what, "set --checkpoints to a folder that all hosts share, or to a URL")
        among = RowShards(len(holders))
        for part, (number, shard_index) in enumerate(holders):
            part_rows = among.rows(length, part)
            if part_rows:
                shares[number].append((name, held[shard_index].rows(part_rows)))
    return shares


def _apart(share: list[Slice]) -> list[list[Slice]]:
    """Splits a share into layers with at most one slice of each tensor, because a file holds one slice per name."""
    layers: list[list[Slice]] = []
    seen: Counter[str] = Counter()
    for slice_ in share:
        if seen[slice_[0]] == len(layers):
            layers.append([])
        layers[seen[slice_[0]]].append(slice_)
        seen[slice_[0]] += 1
    return layers


def grouped(sized: Iterable[tuple[_T, int]], most: int) -> list[list[_T]]:
    """Groups items in order so that the sizes in a group add up to at most `most`, unless one item is larger."""
    groups: list[list[_T]] = []
    room = 0
    for thing, size in sized:
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(thing)
        room -= size
    return groups


def _divide(tensors: Mapping[str, torch.Tensor], writers: int) -> list[list[Slice]]:
    """Divides tensors among the writers by bytes: large tensors by rows, small tensors undivided."""
    total, at = sum(tensor.nbytes for tensor in tensors.values()), 0
    shares: list[list[Slice]] = [[] for _ in range(writers)]
    for name, tensor in tensors.items():
        rows = tensor.shape[0] if tensor.dim() and tensor.nbytes > _SMALL else 1
        width = tensor.nbytes // rows
        ends = [min(rows, max(0, -((at * writers - end * total) // (width * writers or 1)))) for end in range(writers)]
        for number, (first, end) in enumerate(zip(ends, [*ends[1:], rows], strict=True)):
            if first < end:
                (block,) = ShardingSpec.unsharded(tensor.shape).pieces[0].blocks if end - first < rows else (None,)
                shares[number].append((name, block and block.rows(range(first, end))))
        at += tensor.nbytes
    return shares


def take(tensor: torch.Tensor | ShardedTensor, block: Block | None) -> torch.Tensor:
    """A view of one `block` of this worker's tensor or shard, or of all of it."""
    local = tensor.tensor if isinstance(tensor, ShardedTensor) else tensor
    return local if block is None else block.of(local)


def write_files(
    storage: Storage,
    step: int,
    files: Files,
    fetch: Callable[[str, Block | None], torch.Tensor],
    need: Callable[[], int],
) -> dict[str, tuple[int, str]]:
    """Writes one writer's files; returns the bytes and the SHA-256 of each.

    `fetch` returns the values of a tensor's block; `need` returns the bytes of the complete checkpoint, for the
    error text. Raises CheckpointError after removing the files that were written.
    """
    written: dict[str, tuple[int, str]] = {}
    try:
        for file, slices in files.items():
            chunks = tensor_chunks({name: fetch(name, block) for name, block in slices})
            written[file] = storage.write(folder_of(step), file, chunks)
    except OSError as error:
        raise write_error(storage, step, error, need()) from error
    finally:
        if len(written) < len(files):
            with suppress(OSError):
                storage.remove(folder_of(step), files)
    return written


def write_error(storage: Storage, step: int, error: OSError, need: int | None = None) -> CheckpointError:
    """Builds the error for a checkpoint of `step`, of `need` bytes, that could not be written."""
    cure = write_cure(error, need, storage.another)
    if storage.shared:
        cure = "check that this host can reach it and write to it, or choose other --checkpoints"
    with suppress(CheckpointError):
        for number, folder in list_checkpoints(storage):
            if isinstance(open_checkpoint(storage, number, folder, hashes=False), Checkpoint):
                cure += f"; the checkpoint of step {number} is intact"
                break
    return CheckpointError(f"checkpoint of step {step} could not be written to {storage}: {error.strerror}", cure)


def commit(
    storage: Storage,
    step: int,
    plan: Iterable[Files],
    digests: FileDigests,
    tensors: Mapping[str, TensorInfo],
    manifest: Mapping[str, Any],
    keep: int = 2,
) -> Checkpoint:
    """Makes a checkpoint of files that are all written, then removes older ones beyond `keep`.

    `manifest` is any JSON object; its fields come back in `Checkpoint.manifest`. Raises CheckpointError.
    """
    sealed, text = _sealed(step, plan, digests, tensors, manifest)
    try:
        storage.put(folder_of(step), MANIFEST, text)
    except OSError as error:
        with suppress(OSError):  # the manifest first: it may exist in spite of the error
            storage.remove(folder_of(step), [MANIFEST, *digests])
        give_up(storage, step)
        need = sum(size for size, _ in digests.values()) + len(text)
        raise write_error(storage, step, error, need) from error
    _prune(storage, step, keep)
    return Checkpoint(step, storage, folder_of(step), sealed)


def bytes_of(step: int, plan: Iterable[Files], tensors: Mapping[str, TensorInfo], manifest: Mapping[str, Any]) -> int:
    """The bytes of all files of a checkpoint, with its manifest."""
    contents = {
        file: {name: tensors[name].of(block) for name, block in held} for part in plan for file, held in part.items()
    }
    sizes = {file: file_bytes(held) for file, held in contents.items()}
    digests = {file: (size, hashlib.sha256().hexdigest()) for file, size in sizes.items()}
    return sum(sizes.values()) + len(_sealed(step, plan, digests, tensors, manifest)[1])


def _sealed(
    step: int,
    plan: Iterable[Files],
    digests: FileDigests,
    tensors: Mapping[str, TensorInfo],
    manifest: Mapping[str, Any],
) -> tuple[dict[str, Any], bytes]:
    """The complete manifest, and its text with the SHA-256 at the end."""
    entries: dict[str, dict[str, Any]] = {}
    held = [(file, *slice_) for files in plan for file, slices in files.items() for slice_ in slices]
    for file, name, block in held:
        shape = list(tensors[name].shape)
        entry = entries.setdefault(name, {"dtype": DTYPES[tensors[name].dtype], "shape": shape})
        if block is None or not shape:
            entry["file"] = file
        else:
            part = {"file": file, "at": list(block.at), "shape": list(block.shape)}
            entry.setdefault("parts", []).append(part)
    files = {file: {"bytes": size, "sha256": digest} for file, (size, digest) in digests.items()}
    written = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    sealed = {**manifest, "format": VERSION, "written": written, "step": step, "files": files, "tensors": entries}
    body = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sealed.items())
    seal = hashlib.sha256(body.encode()).hexdigest()
    return sealed, f'{body}{_SEAL}{seal}"\n}}\n'.encode()


def write_checkpoint(
    storage: Storage,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    manifest: Mapping[str, Any],
    keep: int = 2,
    file_bytes: int = FILE_BYTES,
) -> Checkpoint:
    """Writes a checkpoint as its only writer. If it raises CheckpointError, earlier checkpoints are intact."""
    plan = layout(tensors, {}, {}, [0], new_attempt(), file_bytes)
    try:
        need = partial(bytes_of, step, plan, tensor_infos(tensors), manifest)
        digests = write_files(storage, step, plan[0], lambda name, block: take(tensors[name], block), need)
    except CheckpointError:
        give_up(storage, step)
        raise
    return commit(storage, step, plan, digests, tensor_infos(tensors), manifest, keep)


def give_up(storage: Storage, step: int) -> None:
    """Removes the folder of a failed attempt whose writers have removed their files."""
    with suppress(OSError):
        storage.tidy(folder_of(step))


def new_attempt() -> str:
    """A random name for the files of one attempt at a checkpoint, so that two attempts never share a file."""
    return secrets.token_hex(4)


def _prune(storage: Storage, step: int, keep: int) -> None:
    """Removes older checkpoints beyond `keep`, damaged or unfinished older ones, and files of other attempts at `step`.

    Removes nothing unless the checkpoint of `step` is intact.
    """
    newest = open_checkpoint(storage, step, folder_of(step), hashes=False)
    if isinstance(newest, str):
        cure = f"check the disk, or choose {storage.another}; older checkpoints were kept"
        raise CheckpointError(f"checkpoint of step {step} was written to {storage} but is damaged ({newest})", cure)
    for number, folder in _doomed(storage, newest, keep):
        try:
            # The manifest first: an interrupted removal must not leave what looks like a damaged checkpoint.
            storage.remove(folder, [MANIFEST])
            storage.remove(folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            what = f"checkpoint of step {step} was written, but checkpoint of step {number} could not be removed"
            raise CheckpointError(f"{what} from {storage}: {error.strerror}", "delete it by hand") from error
    with suppress(OSError):
        storage.remove(folder_of(step), storage.sizes(folder_of(step)).keys() - {MANIFEST, *newest.manifest["files"]})


def best_in(checkpoint: Checkpoint) -> dict[int, dict[str, Any]]:
    """Name, mode and value of each trainer whose best value so far belongs to this checkpoint."""
    return {mark["trainer"]: mark for mark in checkpoint.manifest.get("best", ())}


def best_of(newest_first: Iterable[Checkpoint | str]) -> dict[int, dict[str, Any]]:
    """The step of each trainer's best checkpoint, with what `best_in` returns for it."""
    marks = _marks((one.step, one) for one in newest_first if isinstance(one, Checkpoint))
    return {trainer: _leading(of_trainer)[0] for trainer, of_trainer in marks.items()}


def _marks(newest_first: Iterable[tuple[int, Checkpoint]]) -> dict[int, list[dict[str, Any]]]:
    """The marks of each trainer's best checkpoints with their steps, the newest first."""
    marks: dict[int, list[dict[str, Any]]] = {}
    for step, checkpoint in newest_first:
        for trainer, mark in best_in(checkpoint).items():
            marks.setdefault(trainer, []).append({"step": step, **mark})
    return marks


def _leading(marks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The marks to keep of a trainer, whose newest one says how many: the best first, of equal ones the newest."""
    newest = marks[0]
    alike = [mark for mark in marks if (mark["name"], mark["mode"]) == (newest["name"], newest["mode"])]
    sign = -1 if newest["mode"] == "max" else 1
    return sorted(alike, key=lambda mark: sign * mark["value"])[: newest.get("kept", 1)]


def _doomed(storage: Storage, newest: Checkpoint, keep: int) -> Iterator[tuple[int, str]]:
    step, kept = newest.step, {newest.step}
    older: list[tuple[int, str, Checkpoint | str]] = []
    for number, folder in list_checkpoints(storage):
        if folder == folder_of(step) or number > step:
            continue
        try:
            older.append((number, folder, open_checkpoint(storage, number, folder, hashes=False)))
        except CheckpointError:
            continue  # a newer Paceline wrote it: this version must not remove it
    intact = [(step, newest), *((number, opened) for number, _, opened in older if isinstance(opened, Checkpoint))]
    kept |= {*list(dict.fromkeys(number for number, _ in intact))[:keep]}
    kept |= {mark["step"] for of_trainer in _marks(intact).values() for mark in _leading(of_trainer)}
    for number, folder, opened in older:
        if number in kept and isinstance(opened, Checkpoint):
            kept.discard(number)  # of several folders of a step, one stays
        else:
            yield number, folder


def write_cure(error: OSError, need: int | None, instead: str) -> str:
    """Says how to repair a failed write of `need` bytes; `instead` names another target to choose."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        space = "some space" if need is None else f"some space ({size_text(need)} needed)"
        return f"free {space} or choose {instead}"
    if error.errno == errno.EFBIG:
        return f"raise the file size limit (ulimit -f) or choose {instead}"
    return f"check that the folder exists and that you can write to it, or choose {instead}"
