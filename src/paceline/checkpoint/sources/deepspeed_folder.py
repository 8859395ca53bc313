"""Reads checkpoints of DeepSpeed: of ZeRO 0 to 3, and universal ones.

ZeRO keeps the float32 weights and the states of the optimizer in flat vectors, of which each worker has a part. Stages
1 and 2 cut the vector of a parameter group into equal parts; stage 3 cuts each parameter, and a worker's vector is a
row of its parts (https://www.deepspeed.ai/tutorials/zero/, "Extracting weights", and `deepspeed.utils.zero_to_fp32`). A
universal checkpoint has a folder for each parameter (https://www.deepspeed.ai/tutorials/universal-checkpointing/).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.base.schema import read_file
from paceline.checkpoint.lazy import Deferred
from paceline.checkpoint.sources.contents import Contents, contents_of
from paceline.checkpoint.sources.torch_file import AGAIN, UNREADABLE, load_torch, unreadable
from paceline.errors import CheckpointError, UsageError

_LATEST = ("latest_universal", "latest")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNIVERSAL = "convert it with `python -m deepspeed.checkpoint.ds_to_universal`, and import the folder that it writes"
_FLAT = {"single_partition_of_fp32_groups": "base_optimizer_state", "fp32_flat_groups": "optimizer_state_dict"}


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed, or contains some."""
    names = {path.name for path in folder.iterdir()}
    return bool(names & {*_LATEST}) or any(_MODEL.fullmatch(name) for name in names)


def read_folder(folder: Path) -> Contents:
    """Returns the contents of the newest checkpoint in a folder. Raises CheckpointError, UsageError."""
    folder = _newest(folder)
    names = sorted(path.name for path in folder.iterdir())
    models = {int(match[1] or 0): match for name in names if (match := _MODEL.fullmatch(name))}
    if not models:
        raise CheckpointError(f"{folder} contains no *_model_states.pt", AGAIN)
    is_universal = (folder / "zero").is_dir()
    parts = {int(match[2]) for name in names for match in [_MODEL.fullmatch(name)] if match}
    apart = [name for name in names if re.match(r"(layer_|expp_rank_)", name)]
    if (len(parts) > 1 or apart) and not is_universal:
        what = (
            f"{folder} was written with the model itself in parts ({apart[0] if apart else f'mp_rank_{max(parts):02}'})"
        )
        raise UsageError(what, _UNIVERSAL)
    saved = [load_torch(folder / models[rank].string) for rank in sorted(models)]
    try:
        if not all(isinstance(one, Mapping) and isinstance(one.get("module"), Mapping) for one in saved):
            raise ValueError("it has no module")
        if is_universal:
            return _universal(folder / "zero", saved)
        files = sorted((int(m[1]), name) for name in names if (m := _OPTIMIZER.fullmatch(name)))
        if not files:
            return _unpartitioned(saved[0], str(folder))
        states = [load_torch(folder / name)["optimizer_state_dict"] for _, name in files]
        return _partitioned(saved, states, folder)
    except UNREADABLE as error:
        raise unreadable(str(folder), error) from error


def _newest(folder: Path) -> Path:
    """The checkpoint that the file `latest` of a folder names, or the folder itself."""
    for name in _LATEST:
        if (folder / name).is_file():
            tag = read_file(folder / name)[:1000].decode(errors="replace").strip()
            if Path(tag).name != tag or not (folder / tag).is_dir():
                raise CheckpointError(f"{folder / name} names the folder {tag!r}, which does not exist", AGAIN)
            return folder / tag
    return folder


def _unpartitioned(saved: Mapping[str, Any], what: str) -> Contents:
    """Stage 0: every worker had all weights and the optimizer's state. With bf16 and fp16, DeepSpeed's own optimizer
    holds float32 weights without names.
    """
    tree = {key: saved[key] for key in ("module", "optimizer", "lr_scheduler") if saved.get(key) is not None}
    inner = (saved.get("optimizer") or {}).get("optimizer_state_dict")
    if inner is not None:
        tree["optimizer"] = inner
    contents = contents_of(tree, what)
    if inner is not None:
        why = "they have no names; train with ZeRO 1 to keep them"
        contents.leave_out("the optimizer's float32 copies of the weights", why)
    return contents


# -- ZeRO 1 to 3 -----------------------------------------------------------------------------------------------------


def _partitioned(saved: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]], folder: Path) -> Contents:
    """Stages 1 to 3, from what the workers saved of the model (stages 1 and 2: only the first) and the optimizer."""
    key = next((key for key in _FLAT if key in states[0]), "")
    inner: list[Any] = [one.get(_FLAT[key]) if key else None for one in states]
    if not all(isinstance(one, Mapping) and "state" in one for one in inner):
        raise UsageError(f"{folder} has an optimizer state of an unknown layout", _UNIVERSAL)
    count = states[0]["partition_count"]
    written = max(count) if isinstance(count, list) else count
    if written != len(states):
        what = f"{folder} has the optimizer states of {len(states)} workers, but {written} workers have written it"
        raise CheckpointError(what, AGAIN)
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in saved[0]["param_shapes"]]
    sizes = [flat.numel() for flat in states[0][key]]
    if key == "fp32_flat_groups":
        layout = _by_parameter(shapes, sizes, written)
    else:
        layout = _by_group(shapes, sizes, written, states[0].get("param_alignment_paddings"))
    contents = Contents(_other_weights(saved))
    state: dict[str, dict[str, Any]] = {}
    groups = _groups(inner[0]["param_groups"], shapes)
    options = {name: group for group in groups for name in group["params"]}
    for name, shape, pieces in layout:
        contents.weights[name] = _joined([states[rank][key][flat] for rank, flat, *_ in pieces], pieces, shape)
        of_pieces = [inner[rank]["state"].get(flat, {}) for rank, flat, *_ in pieces]
        state[name] = {
            kind: _joined([kept[kind] for kept in of_pieces], pieces, shape) if _is_vector(value) else value
            for kind, value in of_pieces[0].items()
        }
        if state[name] and "step" in options[name]:  # of DeepSpeed's fused Adam
            state[name].setdefault("step", options[name]["step"])
    contents.weights |= {tied: contents.weights[name] for tied, name in (saved[0].get("shared_params") or {}).items()}
    contents.take_optimizer({"state": state, "param_groups": groups}, "optimizer")
    return _with_rest(contents, saved[0])


def _groups(saved: Sequence[Mapping[str, Any]], vectors: Sequence[Iterable[str]]) -> list[dict[str, Any]]:
    """The parameter groups with their options and, as ``params``, the names of their parameters. `vectors` has the
    names in each flat vector. A saved group lists the numbers of its vectors: one, or in stage 3 also several.
    """
    groups = [{**group, "params": list[str]()} for group in saved]
    owners = {number: group for group, one in enumerate(saved) for number in one.get("params", ())}
    for number, names in enumerate(vectors):
        groups[owners.get(number, 0)]["params"] += names
    return groups


Piece = tuple[
    int, int, int, int
]  # the worker, the number of its flat vector, the first element, the number of elements
Layout = Iterator[tuple[str, tuple[int, ...], list[Piece]]]


def _by_group(
    shapes: Sequence[Mapping[str, tuple[int, ...]]], sizes: Sequence[int], workers: int, paddings: Any
) -> Layout:
    """Where each parameter is in stages 1 and 2: a worker has a stretch of `sizes` elements of each group's vector."""
    for number, (group, size) in enumerate(zip(shapes, sizes, strict=True)):
        first = 0
        gaps = paddings[number] if paddings else [0] * len(group)
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            end = first + math.prod(shape)
            stretches = ((rank, max(first, rank * size), min(end, (rank + 1) * size)) for rank in range(workers))
            yield name, shape, [(rank, number, at - rank * size, to - at) for rank, at, to in stretches if at < to]
            first = end + gap


def _by_parameter(shapes: Sequence[Mapping[str, tuple[int, ...]]], sizes: Sequence[int], workers: int) -> Layout:
    """Where each parameter is in stage 3: every worker has an equal stretch of it, the last one less. Its vector is cut
    into subgroups of `sizes` elements.
    """
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    first = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        left, each = math.prod(shape), math.ceil(math.prod(shape) / workers)
        pieces: list[Piece] = []
        for rank in range(workers):
            for number, end in enumerate(ends):
                begin = end - sizes[number]
                at, to = max(first, begin), min(first + each, end)
                if taken := min(left, to - at) if at < to else 0:
                    pieces.append((rank, number, at - begin, taken))
                    left -= taken
        yield name, shape, pieces
        first += each


def _is_vector(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _joined(flats: Sequence[torch.Tensor], pieces: Sequence[Piece], shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that is put together from pieces of flat vectors when it is used."""
    if sum(piece[3] for piece in pieces) != math.prod(shape):
        raise ValueError("the vectors of the optimizer are too short for the parameters")

    def read() -> torch.Tensor:
        parts = [flat.detach()[at : at + length] for flat, (_, _, at, length) in zip(flats, pieces, strict=True)]
        return torch.cat(parts).view(shape)

    return Deferred(read, shape, flats[0].dtype) if pieces else torch.empty(shape, dtype=torch.float32)


def _other_weights(saved: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Buffers, and parameters that were not trained: of stage 3 each worker has a part of them. As in DeepSpeed's own
    conversion they become float32.
    """
    frozen = saved[0].get("frozen_param_shapes") or {}
    made = {name: _wide([value], value.shape) for name, value in saved[0]["module"].items() if name not in frozen}
    for name, shape in frozen.items():
        made[name] = _wide([one["frozen_param_fragments"][name] for one in saved], shape)
    return made


def _wide(parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    kind = torch.float32 if parts[0].is_floating_point() and parts[0].itemsize < 4 else parts[0].dtype

    def read() -> torch.Tensor:
        flat = torch.cat([part.detach().flatten() for part in parts])
        return flat[: math.prod(shape)].view(tuple(shape)).to(kind)

    return Deferred(read, tuple(shape), kind)


def _with_rest(contents: Contents, saved: Mapping[str, Any]) -> Contents:
    """Notes what of a model's file is not taken."""
    for name in ("lr_scheduler", "data_sampler", "random_ltd"):
        if saved.get(name) is not None:
            contents.leave_out(name)
    return contents


# -- universal checkpoints -------------------------------------------------------------------------------------------


def _universal(folder: Path, saved: Sequence[Mapping[str, Any]]) -> Contents:
    """A folder for each parameter, with a file for its weights and one for each kind of state."""
    contents = Contents(_other_weights(saved))
    about = load_torch(folder / "optimizer_state.pt") if (folder / "optimizer_state.pt").exists() else {}
    shapes = {name: tuple(shape) for group in saved[0].get("param_shapes") or () for name, shape in group.items()}
    state: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        kept = {file.stem: _parameter(load_torch(file), shapes.get(path.name)) for file in sorted(path.glob("*.pt"))}
        contents.weights[path.name] = kept.pop("fp32")
        state |= {path.name: kept} if kept else {}
    vectors = [[name for name in group if name in state] for group in saved[0].get("param_shapes") or ()]
    groups = _groups(about.get("param_groups") or [{}], vectors)
    groups[0]["params"] += sorted(state.keys() - {name for names in vectors for name in names})
    common = (about.get("optimizer_state_dict") or {}).get("state", {}).get(0, {})  # of stage 3
    for group in groups:
        step = common.get("step", group.get("step"))
        for name in group["params"] if step is not None else ():
            state[name].setdefault("step", step)
    contents.weights |= {tied: contents.weights[name] for tied, name in (saved[0].get("shared_params") or {}).items()}
    if state:
        contents.take_optimizer({"state": state, "param_groups": groups}, "optimizer")
    return _with_rest(contents, saved[0])


def _parameter(value: Any, shape: tuple[int, ...] | None) -> Any:
    """The value of a file, which may be in a dict with notes about tensor parallelism. Of stage 3 tensors are flat."""
    value = value["param"] if isinstance(value, Mapping) else value
    return value.detach().view(shape) if shape is not None and _is_vector(value) else value
