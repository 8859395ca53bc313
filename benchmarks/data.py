"""Rows per second of each format read by Paceline and by the format's own loader, and the time to skip a million rows.

    python benchmarks/data.py [--rows 20000] [--rounds 7] [--loaders 0] [--cpu] [--formats NAME ...]
                              [--folder FOLDER] [--record FILE]

Each side makes shuffled batches of 64 rows: 64 numbers and a label, or an image of 96 x 96 pixels and a label. The
sides take turns, an epoch each; the ratio is the own loader's time over Paceline's, in each round, so more than 1 is
faster. The first round warms up. Both must give the same rows. The own loader is the one that the documentation of a
format shows for training; some of these shuffle less. With `columns` it is a loop over the columns of shuffled parts of
the table, which is the most that the format can do; with `rows` this loop makes a dict of each row, and both sides give
the dicts to the same collate function. With --cpu, times are those of the processor, of all threads of the process,
which other programs on the machine hardly change. `skip` is the time in which Paceline opens the dataset,
whose index is there, and has the first batch after a million rows. Formats whose loader cannot be imported are named
and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from turns import compare, record

from paceline import data
from paceline.base.batching import Grid
from paceline.data.loader import Assignment, Feed, Source

BATCH, WIDTH, SHARDS, SIDE, SKIPPED = 64, 64, 8, 96, 1_000_000
GRID = Grid(8 * BATCH, BATCH)  # as the Trainer cuts a global batch

Batches = Iterable[Any]


class Format(NamedTuple):
    """A format: how rows are written to a folder, opened by Paceline, and by its own loader for each epoch.

    `own` gets the folder and the number of loader processes. `needs` are the modules of the own loader and the writer.
    """

    needs: tuple[str, ...]
    write: Callable[[Path, int], None]
    open: Callable[[Path], Any]
    own: Callable[[Path, int], Callable[[], Batches]]
    collate: Callable[[list[Any]], Any]


def numbers(rows: int) -> Iterator[tuple[int, Any, int]]:
    """The number of each row, its values and its label."""
    generator = np.random.default_rng(0)
    for number in range(rows):
        yield number, generator.random(WIDTH, dtype=np.float32), number % 10


def table(rows: int) -> Any:
    import pyarrow

    _, x, y = zip(*numbers(rows), strict=True)
    lists = pyarrow.array([row.tolist() for row in x], pyarrow.list_(pyarrow.float32()))
    return pyarrow.table({"x": lists, "y": pyarrow.array(y, pyarrow.int64())})


def named(samples: list[Any]) -> Any:
    """Collates rows that are dicts with x and y."""
    batch = default_collate([{"x": row["x"], "y": row["y"]} for row in samples])
    return batch["x"].float(), batch["y"]


def torch_loader(dataset: Any, loaders: int, shuffle: bool | None = True) -> Callable[[], Batches]:
    return lambda: DataLoader(dataset, BATCH, shuffle, num_workers=loaders)


# -- WebDataset ------------------------------------------------------------------------------------------------------


def write_webdataset(folder: Path, rows: int) -> None:
    from webdataset import ShardWriter

    with ShardWriter(str(folder / "%04d.tar"), maxcount=-(-rows // SHARDS), verbose=0) as shards:
        for number, x, y in numbers(rows):
            shards.write({"__key__": f"{number:07}", "npy": x, "cls": y})


def own_webdataset(folder: Path, loaders: int) -> Callable[[], Batches]:
    from webdataset import WebDataset, WebLoader

    def begin() -> Batches:
        samples = WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=100, empty_check=False)
        samples = samples.shuffle(1000).decode().to_tuple("npy", "cls").batched(BATCH)
        return WebLoader(samples, batch_size=None, num_workers=loaders)

    return begin


def collate_webdataset(samples: list[Any]) -> Any:
    return default_collate([(row["npy"], row["cls"]) for row in samples])


# -- JSON lines, Hugging Face datasets, Arrow ------------------------------------------------------------------------


def write_lines(folder: Path, rows: int) -> None:
    with (folder / "rows.jsonl").open("w") as file:
        for _, x, y in numbers(rows):
            file.write(json.dumps({"x": x.tolist(), "y": y}) + "\n")


def own_lines(folder: Path, loaders: int) -> Callable[[], Batches]:
    import datasets

    files = str(folder / "rows.jsonl")
    rows = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    rows = rows.shuffle(seed=0, buffer_size=1000).with_format("torch")
    return torch_loader(rows, loaders, shuffle=None)


def write_dataset(folder: Path, rows: int) -> None:
    import datasets

    datasets.Dataset(table(rows)).save_to_disk(folder, num_shards=SHARDS)


def open_dataset(folder: Path) -> Any:
    import datasets

    return datasets.load_from_disk(folder).with_format("torch")


def own_dataset(folder: Path, loaders: int) -> Callable[[], Batches]:
    return torch_loader(open_dataset(folder), loaders)


# -- Parquet, Arrow and Lance by columns -----------------------------------------------------------------------------


def write_parquet(folder: Path, rows: int) -> None:
    from pyarrow import parquet

    parquet.write_table(table(rows), folder / "rows.parquet", row_group_size=-(-rows // SHARDS))


def columns_of(part: Any) -> Iterator[tuple[Any, Any]]:
    """The columns of batches of a shuffled part of a table."""
    part = part.take(np.random.permutation(len(part))).combine_chunks()
    for first in range(0, len(part), BATCH):
        some = part.slice(first, BATCH)
        x = some["x"].chunk(0).flatten().to_numpy().reshape(-1, WIDTH)
        yield x.copy(), some["y"].to_numpy().copy()


def batches_of(part: Any) -> Iterator[Any]:
    """Batches of a shuffled part of a table, column by column."""
    return (tuple(map(torch.from_numpy, columns)) for columns in columns_of(part))


def batches_of_rows(part: Any) -> Iterator[Any]:
    """Batches of a shuffled part of a table, which a function has made of a dict for each row."""
    return (named([{"x": x, "y": y} for x, y in zip(*columns, strict=True)]) for columns in columns_of(part))


Cut = Callable[[Any], Iterator[Any]]


class Parts(IterableDataset[Any]):
    """Reads the parts of a table in random order, batch by batch. Each loader process reads some of the parts."""

    def __init__(self, read: Callable[[int], Any], count: int, cut: Cut) -> None:
        self.read, self.count, self.cut = read, count, cut

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        for part in np.random.permutation(self.count).tolist():
            if process is None or part % process.num_workers == process.id:
                yield from self.cut(self.read(part))


def by_parts(read: Callable[[int], Any], count: int, loaders: int, cut: Cut) -> Callable[[], Batches]:
    """Reads a table by its parts; in this process without a DataLoader, which would take time."""
    parts = Parts(read, count, cut)
    return lambda: DataLoader(parts, None, num_workers=loaders) if loaders else iter(parts)


def own_parquet(folder: Path, loaders: int, cut: Cut = batches_of) -> Callable[[], Batches]:
    from pyarrow import parquet

    file = parquet.ParquetFile(folder / "rows.parquet")
    return by_parts(lambda group: file.read_row_group(group, use_threads=False), file.num_row_groups, loaders, cut)


def open_arrow(folder: Path) -> Any:
    return data.ArrowRows(folder / "*.arrow")


def own_arrow(folder: Path, loaders: int, cut: Cut = batches_of) -> Callable[[], Batches]:
    import pyarrow

    files = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))) for path in sorted(folder.glob("*.arrow"))]
    parts = [part for file in files for part in file]
    return by_parts(lambda part: pyarrow.Table.from_batches([parts[part]]), len(parts), loaders, cut)


def write_lance(folder: Path, rows: int) -> None:
    import lance
    import pyarrow

    lists = table(rows)  # of one width, which Lance's loader needs
    x = lists["x"].cast(pyarrow.list_(pyarrow.float32(), WIDTH))
    lance.write_dataset(lists.set_column(0, "x", x), folder / "rows.lance")


def open_lance(folder: Path) -> Any:
    return data.LanceRows(folder / "rows.lance")


def own_lance(folder: Path, loaders: int) -> Callable[[], Batches]:
    """Lance's loader as its documentation has it, which reads all rows in their order."""
    from lance.torch.data import LanceDataset

    rows = LanceDataset(str(folder / "rows.lance"), batch_size=BATCH)
    return lambda: DataLoader(rows, None, num_workers=loaders)


def own_lance_columns(folder: Path, loaders: int, cut: Cut = batches_of) -> Callable[[], Batches]:
    import lance

    rows, size = lance.dataset(folder / "rows.lance"), 64 * BATCH
    count = -(-rows.count_rows() // size)
    return by_parts(lambda part: rows.to_table(offset=part * size, limit=size), count, loaders, cut)


def by_rows(own: Callable[[Path, int, Cut], Callable[[], Batches]]) -> Callable[[Path, int], Callable[[], Batches]]:
    return lambda folder, loaders: own(folder, loaders, batches_of_rows)


# -- MDS and litdata -------------------------------------------------------------------------------------------------


def write_mds(folder: Path, rows: int) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"x": "ndarray:float32:64", "y": "int"}, size_limit=1 << 20) as writer:
        for _, x, y in numbers(rows):
            writer.write({"x": x, "y": y})


def own_mds(folder: Path, loaders: int) -> Callable[[], Batches]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    rows = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    return torch_loader(rows, loaders, shuffle=False)


def write_litdata(folder: Path, rows: int) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_size=-(-rows // SHARDS))
    for number, x, y in numbers(rows):
        writer[number] = {"x": torch.from_numpy(x), "y": y}
    writer.done()
    writer.merge()


def own_litdata(folder: Path, loaders: int) -> Callable[[], Batches]:
    from litdata import StreamingDataLoader, StreamingDataset

    rows = StreamingDataset(str(folder), shuffle=True)
    return lambda: StreamingDataLoader(rows, batch_size=BATCH, num_workers=loaders)


# -- images ----------------------------------------------------------------------------------------------------------


def write_images(folder: Path, rows: int) -> None:
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(rows // 10):
        (below := folder / f"class {number % 10}").mkdir(exist_ok=True)
        small = Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8))
        small.resize((SIDE, SIDE)).save(below / f"{number:06}.jpg")


def own_images(folder: Path, loaders: int) -> Callable[[], Batches]:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import ToTensor

    return torch_loader(ImageFolder(str(folder), ToTensor()), loaders)


FORMATS = {
    "webdataset": Format(
        ("webdataset",),
        write_webdataset,
        lambda folder: data.WebDatasetRows(folder / "*.tar"),
        own_webdataset,
        collate_webdataset,
    ),
    "mds": Format(("streaming",), write_mds, data.MDSRows, own_mds, default_collate),
    "litdata": Format(("litdata",), write_litdata, data.LitDataRows, own_litdata, default_collate),
    "json lines": Format(
        ("datasets",), write_lines, lambda folder: data.JsonLines(folder / "rows.jsonl"), own_lines, named
    ),
    "hugging face": Format(("datasets",), write_dataset, open_dataset, own_dataset, default_collate),
    "arrow": Format(("datasets",), write_dataset, open_arrow, own_dataset, default_collate),
    "arrow columns": Format(("datasets",), write_dataset, open_arrow, own_arrow, default_collate),
    "parquet": Format(("pyarrow",), write_parquet, data.ParquetRows, own_parquet, default_collate),
    "lance": Format(("lance",), write_lance, open_lance, own_lance, default_collate),
    "lance columns": Format(("lance",), write_lance, open_lance, own_lance_columns, default_collate),
    "parquet rows": Format(("pyarrow",), write_parquet, data.ParquetRows, by_rows(own_parquet), named),
    "arrow rows": Format(("datasets",), write_dataset, open_arrow, by_rows(own_arrow), named),
    "lance rows": Format(("lance",), write_lance, open_lance, by_rows(own_lance_columns), named),
    "images": Format(
        ("torchvision", "PIL"),
        write_images,
        lambda folder: data.ImageFolder(folder, images="torchrgb"),
        own_images,
        default_collate,
    ),
}


def by_paceline(form: Format, rows: Any, loaders: int, start: int = 0) -> Iterator[Any]:
    """An epoch of micro-batches, from the global batch `start` on."""
    options = {"num_workers": loaders} if loaders else {}
    source = Source.of(rows, 0, form.collate, getattr(rows, "order", None), options)
    assert source.rows is not None
    stop = start + GRID.batches(source.rows)
    feed = Feed(source, GRID, (start, stop, 1 << 62), lambda *_, **__: None)
    try:
        for step in range(start, stop):
            for micro_batch in feed.at(step, Assignment(0, (1.0,)))[2]:
                yield micro_batch.batch
    finally:
        feed.close()


def timed(batches: Batches, clock: Callable[[], float]) -> tuple[float, int, int, float]:
    """Seconds of an epoch, its rows, and the sums of its labels and values."""
    began, rows, labels, values = clock(), 0, 0, 0.0
    for batch in batches:
        x, y = batch.values() if isinstance(batch, dict) else batch
        rows, labels, values = rows + len(x), labels + int(y.sum()), values + float(x.double().sum())
    return clock() - began, rows, labels, values


def measure(form: Format, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    form.write(folder, options.rows)
    rows, begin = form.open(folder), form.own(folder, options.loaders)
    sides: dict[str, Callable[[], Batches]] = {
        "own": begin,
        "paceline": lambda: by_paceline(form, rows, options.loaders),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    counts: dict[str, tuple[int, int]] = {}
    values: dict[str, float] = {}
    clock = time.process_time if options.cpu else time.perf_counter
    for number in range(options.rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            took, count, labels, values[side] = timed(sides[side](), clock)
            counts[side] = count, labels
            seconds[side] += [took] if number else []
        assert counts["own"] == counts["paceline"], counts
        assert abs(values["own"] / values["paceline"] - 1) < 1e-6, values
    count = counts["own"][0]
    speeds = {side: count / statistics.median(seconds[side]) for side in sides}
    began = time.perf_counter()
    next(iter(by_paceline(form, form.open(folder), 0, SKIPPED // GRID.global_batch)))
    skip = time.perf_counter() - began
    print(f"  own {speeds['own']:,.0f} rows/s, paceline {speeds['paceline']:,.0f} rows/s, skip {skip:.3f} s")
    ratio = compare(seconds, "own", "paceline")
    return {"rows": count, "rows per second": speeds, "seconds": seconds, "skip": skip, **ratio}


def missing(modules: tuple[str, ...]) -> str:
    """Returns the first module that cannot be imported, and the reason; an empty text if all can be."""
    for name in modules:
        try:
            import_module(name)
        except (ImportError, RuntimeError, OSError) as error:  # of a compiled part that does not fit torch, too
            return f"{name} cannot be imported ({error})"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 20_000), ("rounds", 7), ("loaders", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpu", action="store_true", help="measure processor time; needs --loaders 0")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--folder", type=Path, help="where the files are written; by default a temporary folder")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.cpu and options.loaders:
        parser.error("--cpu does not see the time of loader processes; use --loaders 0")
    measured: dict[str, Any] = {}
    for name in options.formats:
        form = FORMATS[name]
        if why := missing(form.needs):
            print(f"{name}: left out, {why}")
            measured[name] = {"left out": why}
            continue
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measured[name] = measure(form, Path(folder), options)
    if options.record:
        counts = {name: getattr(options, name) for name in ("rows", "rounds", "loaders", "cpu")}
        record(options.record, **counts, formats=measured)


if __name__ == "__main__":
    main()
