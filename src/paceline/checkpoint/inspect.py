"""Shows the contents of a checkpoint as its manifest lists them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.base.console import in_one_line, say
from paceline.base.schema import parse
from paceline.base.terminal import Terminal, TextPage
from paceline.base.text import plural
from paceline.checkpoint.export import no_checkpoint
from paceline.checkpoint.files import (
    MANIFEST,
    UNFINISHED,
    Checkpoint,
    best_of,
    checkpoints_of,
    ended_in,
    list_checkpoints,
    open_checkpoint,
    trainers_in,
    with_ended,
)
from paceline.checkpoint.safetensors_file import DTYPES, size_text
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.tree import reading, unflatten
from paceline.errors import CheckpointError, FormatError

_KINDS = {name: dtype for dtype, name in DTYPES.items()}
_OPEN = "not finished"
_LARGE = 2_000_000_000  # bytes; verifying more takes so long that a line is printed first


def inspect_run(run_dir: str | Path, step: int | None = None, tensors: bool = False, as_json: bool = False) -> str:
    """Verifies every checkpoint of the run, and lists the contents of the one of `step` or of the newest intact one.

    `tensors` adds a line for each tensor. Returns tables, or one JSON object if `as_json` is set. Raises
    CheckpointError if the checkpoint does not exist or no checkpoint is intact.
    """
    storage = checkpoints_of(run_dir)
    listed = list_checkpoints(storage)
    if not any(step in (None, number) for number, _ in listed):
        raise no_checkpoint(run_dir, step)
    sizes = {folder: sum(storage.sizes(folder).values()) for _, folder in listed}
    if sum(sizes.values()) > _LARGE:
        say(f"verifying {size_text(sum(sizes.values()))}")
    looks = [(number, folder, _look(storage, number, folder)) for number, folder in listed]
    chosen = next(
        (
            checkpoint
            for _, _, checkpoint in looks
            if isinstance(checkpoint, Checkpoint) and step in (None, checkpoint.step)
        ),
        None,
    )
    if chosen is None:
        reasons = ", ".join(f"step {number} ({problem})" for number, _, problem in looks if step in (None, number))
        raise CheckpointError(f"no checkpoint in {storage} is intact: {reasons}", "restore one from a copy")
    with reading():
        facts = _facts(chosen)
    contents = {
        "run": str(run_dir),
        "checkpoints": [_listing(storage, *look, sizes[look[1]]) for look in looks],
        "best": list(best_of(checkpoint for _, _, checkpoint in looks).values()),
        **facts,
    }
    if tensors:
        contents["tensors"] = {name: _tensor(entry) for name, entry in sorted(chosen.manifest["tensors"].items())}
    return json.dumps(contents, indent=1) if as_json else _tables(contents)


def _look(storage: Storage, step: int, folder: str) -> Checkpoint | str:
    try:
        opened = open_checkpoint(storage, step, folder)
        return _OPEN if opened == UNFINISHED else opened
    except CheckpointError as error:  # a newer Paceline wrote it
        return error.what


def _listing(storage: Storage, step: int, folder: str, opened: Checkpoint | str, size: int) -> dict[str, Any]:
    damage = opened if isinstance(opened, str) else None
    written = ""
    with suppress(OSError, FormatError, AttributeError):  # a damaged checkpoint may still have a readable manifest
        written = str(parse(storage.read(folder, MANIFEST), MANIFEST).get("written", ""))
    path = f"{storage}/{folder}"
    return {"step": step, "written": written, "bytes": size, "whole": damage is None, "damage": damage, "path": path}


# -- the manifest ----------------------------------------------------------------------------------------------------


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = with_ended(checkpoint.manifest, ended_in(checkpoint.manifest, checkpoint.storage, lambda _: None))
    tensors = {name: _tensor(entry) for name, entry in manifest["tensors"].items()}
    given = {name: manifest.get(name) for name in ("format", "plan", "workers", "versions", "imported")}
    files = [{"name": name, **entry} for name, entry in manifest["files"].items()]
    trainers = [_trainer(saved, tensors) for saved in trainers_in(manifest)]
    return {"step": checkpoint.step, **given, "trainers": trainers, "files": files}


def _tensor(entry: dict[str, Any]) -> dict[str, Any]:
    kind = _KINDS[entry["dtype"]]
    count = math.prod(entry["shape"])
    return {
        "dtype": str(kind).removeprefix("torch."),
        "shape": entry["shape"],
        "values": count,
        "bytes": count * kind.itemsize,
    }


def _trainer(saved: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    model = _entries(saved.get("model", {}))
    optimizers = saved.get("optimizers", [])
    groups = [group for optimizer in optimizers for group in optimizer["groups"]]
    trained = {name for group in groups for param in group["params"] for name in _names(model.get(param))}
    weights = {name for part in model.values() for name in _names(part)}  # a parameter may be called $tensor
    grid, state = saved.get("grid"), _entries(saved.get("state", {}))
    return {
        "steps": saved.get("steps", 0),
        "grid": grid and {"global_batch": grid[0], "micro": grid[1]},
        "phases": [_phase(phase) for phase in saved.get("phases", [])],
        "stopped": saved.get("stopped", False),
        "weights": {
            "tensors": len(model),
            "values": _total(tensors, weights, "values"),
            "trained": _total(tensors, trained, "values") if optimizers else None,
            "dtypes": sorted({tensors[name]["dtype"] for name in weights}),
            "bytes": _total(tensors, weights, "bytes"),
        },
        "optimizers": [
            {
                "groups": [{**_plain(group), "params": len(group["params"])} for group in optimizer["groups"]],
                "bytes": _total(tensors, set(_names(optimizer["state"])), "bytes"),
            }
            for optimizer in optimizers
        ],
        "schedulers": [_plain(scheduler) for scheduler in saved.get("schedulers", [])],
        "state": {str(key): _type_of(value["$tuple"], tensors) for key, value in state.items()},
    }


def _phase(saved: dict[str, Any]) -> dict[str, Any]:
    epoch = saved["first_epoch"] + max(saved["begun"] - 1, 0)
    return {"epoch": epoch, **{name: saved[name] for name in ("done", "total", "epochs", "rows", "complete")}}


def _total(tensors: dict[str, Any], names: Iterable[str], what: str) -> int:
    return sum(tensors[name][what] for name in names)


def _entries(node: Any) -> dict[Any, Any]:
    """The items of a dict of the skeleton, in either of its two encodings."""
    return {str(key): value for key, value in node["$dict"]} if "$dict" in node else node


def _names(node: Any) -> Iterator[str]:
    """The names of the tensors in a part of the skeleton."""
    if isinstance(node, dict) and (name := node.get("$tensor", node.get("$array"))):
        yield name
    elif isinstance(node, dict | list):
        for item in node.values() if isinstance(node, dict) else node:
            yield from _names(item)


def _plain(node: Any) -> Any:
    """A part of the skeleton as plain JSON: tagged objects become their values, and a tensor becomes a text."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next((key for key in node if key.startswith("$")), "")
    if tag in ("$tensor", "$array"):
        return "a tensor"
    if tag == "$tuple":
        return _plain(node[tag])
    return str(unflatten(node, {})) if tag and tag != "$dict" else {k: _plain(v) for k, v in _entries(node).items()}


def _type_of(saved: list[Any], tensors: dict[str, Any]) -> str:
    """The type of a value of `trainer.state`, as text for people."""
    kind, node = saved
    if kind == "object":
        return f"object with state_dict(), {size_text(_total(tensors, set(_names(node)), 'bytes'))} of tensors"
    if isinstance(node, dict) and "$tensor" in node:
        return "tensor {dtype} {shape}".format(**tensors[node["$tensor"]])
    if isinstance(node, dict) and "$array" in node:
        return f"array {node['dtype']} {node['shape']}"
    if isinstance(node, dict) and (tag := next(iter(node), "")).startswith("$"):
        return tag[1:]
    return "None" if node is None else type(node).__name__


# -- tables ----------------------------------------------------------------------------------------------------------


def _tables(contents: dict[str, Any]) -> str:
    ahead = Terminal()
    console = TextPage(
        ahead.width if ahead.is_terminal else 240, ahead.is_terminal
    )  # lines in a file or a pipe are not wrapped
    listing = [(row["step"], row["written"], size_text(row["bytes"]), _state(row)) for row in contents["checkpoints"]]
    console.print(_table(("step", "written", "size", "state"), listing, right=(0, 2)))
    for mark in contents["best"]:
        console.print(Text("\nbest of trainer {trainer}: {name} {value:.6g} at step {step}".format(**mark)))
    console.print(Text(f"\nstep {contents['step']} of {in_one_line(contents['run'])}", style="bold"))
    versions = ", ".join(f"{name} {value}" for name, value in (contents["versions"] or {}).items())
    facts = [("format", contents["format"]), ("plan", contents["plan"]), ("workers", contents["workers"] or "")]
    console.print(_grid([*facts, ("versions", versions), ("imported", contents["imported"] or "")]))
    for number, trainer in enumerate(contents["trainers"]):
        console.print(Text(f"\ntrainer {number}", style="bold"))
        console.print(_grid(_rows(trainer)))
    files = [(file["name"], size_text(file["bytes"]), f"{file['sha256'][:12]}...") for file in contents["files"]]
    console.print("", _table(("file", "size", "SHA-256"), files, right=(1,)))
    if "tensors" in contents:
        named = [(name, t["dtype"], t["shape"], f"{t['bytes']:,}") for name, t in contents["tensors"].items()]
        console.print("", _table(("tensor", "dtype", "shape", "bytes"), named, right=(3,)))
    return console.text


def _state(row: dict[str, Any]) -> str:
    return "intact" if row["whole"] else row["damage"] if row["damage"] == _OPEN else f"damaged: {row['damage']}"


def _rows(trainer: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    weights, grid = trainer["weights"], trainer["grid"]
    yield "steps", f"{trainer['steps']}{', stopped' if trainer['stopped'] else ''}"
    if grid:
        yield "grid", f"global batch {grid['global_batch']} in micro-batches of {plural(grid['micro'], 'row')}"
    for number, phase in enumerate(trainer["phases"]):
        done = plural(phase["done"], "step")
        if phase["total"] is not None:
            done = f"{phase['done']} of {plural(phase['total'], 'step')}"
        complete = ", complete" if phase["complete"] else ""
        yield f"phase {number}", f"epoch {phase['epoch']}, {done} done{complete}"
    trained = "" if weights["trained"] is None else f", {weights['trained']:,} of them trained"
    count = f"{plural(weights['values'], 'value')} in {plural(weights['tensors'], 'tensor')}"
    text = f"{count}{trained}, {', '.join(weights['dtypes'])}"
    yield "weights", f"{text}, {size_text(weights['bytes'])}"
    for number, optimizer in enumerate(trainer["optimizers"]):
        yield f"optimizer {number}", f"{size_text(optimizer['bytes'])} of state"
        for group_index, group in enumerate(optimizer["groups"]):
            settings = [f"{name} {value}" for name, value in group.items() if name != "params" and value is not None]
            yield f"  group {group_index}", f"{plural(group['params'], 'parameter')}, {', '.join(settings)}"
    for number, scheduler in enumerate(trainer["schedulers"]):
        short = {name: value for name, value in scheduler.items() if not isinstance(value, dict)}
        yield f"scheduler {number}", ", ".join(f"{name} {value}" for name, value in short.items())
    for key, kind in trainer["state"].items():
        yield f"state {key!r}", kind


def _grid(rows: Iterable[tuple[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value != "":
            table.add_row(in_one_line(name), Text(in_one_line(value)))
    return table


def _table(names: tuple[str, ...], rows: Iterable[tuple[Any, ...]], right: tuple[int, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for column_index, name in enumerate(names):
        table.add_column(name, justify="right" if column_index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(in_one_line(value)) for value in row))
    return table
