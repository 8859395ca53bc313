"""Trains on numbered rows of one kind of dataset, and writes which rows each step had: sources.py KIND FOLDER OUT.

The rows are distinct numbers, and each step writes the sums of their first three powers, which are exact in float64.
With FORMED=count steps go slowly until the run has formed so many teams, so that a killed worker joins again.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mixed import wait_for_teams
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, SubsetRandomSampler, WeightedRandomSampler

import paceline

ROWS, BATCH, EPOCHS, SEED = 50, 12, 3, 3


class Kind(NamedTuple):
    """How a dataset of the numbers 0, 1, 2, ... is written to a folder and opened, there or at the URL of a copy, and
    the number of a row.

    The rows of an iterable come in any order, which depends on the epoch alone. Those of a dataset that is `sampled`
    come in the order of a sampler of torch, which may leave some out or repeat them.
    """

    write: Callable[[Path], None]
    open: Callable[[Path | str], Any]
    number: Callable[[Any], int]
    is_iterable: bool = False
    is_sampled: bool = False


class Drawn(IterableDataset[int]):
    """The numbers in an order drawn from torch's generator; without a state, so that a resumed run reads again."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(ROWS).tolist())


class Ordered(list[int]):
    """The numbers, with a sampler."""

    order = SubsetRandomSampler(range(10, ROWS))


class ByLength(Sampler[list[int]]):
    """Batches of numbers whose "lengths" are similar, shuffled by a generator of its own and the epoch."""

    def __init__(self) -> None:
        self.generator, self.epoch = torch.Generator(), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(0, ROWS, BATCH))

    def __iter__(self) -> Iterator[list[int]]:
        by_length = sorted(range(ROWS), key=lambda number: (number + self.epoch) % 7)
        batches = [by_length[first : first + BATCH] for first in range(0, ROWS, BATCH)]
        return iter([batches[number] for number in torch.randperm(len(batches), generator=self.generator)])


def write_parquet(folder: Path) -> None:
    import datasets

    for part in range(4):
        numbers = range(ROWS)[part * 15 : part * 15 + 15]
        datasets.Dataset.from_dict({"number": [*numbers]}).to_parquet(folder / f"{part}.parquet")


def streamed(folder: Path | str) -> Any:
    import datasets

    files = sorted(map(str, Path(folder).glob("*.parquet")))
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)


def write_hugging_face(folder: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"number": [*range(ROWS)]}).save_to_disk(folder, num_shards=3)


def open_hugging_face(folder: Path | str) -> Any:
    import datasets

    return datasets.load_from_disk(folder).with_format("torch")


def write_arrow(folder: Path, streams: tuple[int, ...] = (1,)) -> None:
    import pyarrow

    for part in range(3):
        table = pyarrow.table({"number": [*range(ROWS)[part * 20 : part * 20 + 20]]})
        make = pyarrow.ipc.new_stream if part in streams else pyarrow.ipc.new_file
        with make(folder / f"{part}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=7)


def write_lance(folder: Path) -> None:
    import lance
    import pyarrow

    lance.write_dataset(pyarrow.table({"number": [*range(ROWS)]}), folder / "rows.lance", max_rows_per_file=20)


def packed(folder: Path | str) -> Any:
    """Documents of several lengths, each alone in its row."""
    documents = [[number] * (3 + number % 2) for number in range(ROWS)]
    return paceline.data.pack(documents, 5, "first-fit")


def write_lines(folder: Path) -> None:
    for part in range(2):
        lines = (f'{{"number": {number}}}\n' for number in range(ROWS)[part * 30 : part * 30 + 30])
        (folder / f"{part}.jsonl").write_text("".join(lines))


def write_shards(folder: Path) -> None:
    import webdataset

    for part in range(3):
        with webdataset.TarWriter(str(folder / f"{part}.tar")) as shard:
            for number in range(ROWS)[part * 20 : part * 20 + 20]:
                shard.write({"__key__": f"{number:04}", "cls": number, "txt": f"row {number}" * (number % 5)})


def write_images(folder: Path) -> None:
    from PIL import Image

    for number in range(ROWS):
        (below := folder / f"class {number // 20}").mkdir(exist_ok=True)
        Image.new("L", (2, 3), number).save(below / f"{number:03}.png")


def write_by_library(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        from shards_of_libraries import unpack

        unpack(folder.parent)
        shutil.copytree(folder.parent / name, folder, dirs_exist_ok=True)

    return write


KINDS = {
    "drawn": Kind(lambda folder: None, lambda folder: Drawn(), int, True),
    "arrow": Kind(
        write_arrow, lambda folder: paceline.data.ArrowRows(f"{folder}/*.arrow"), lambda row: int(row["number"])
    ),
    "hugging face": Kind(write_hugging_face, open_hugging_face, lambda row: int(row["number"])),
    "hugging face streaming": Kind(write_parquet, streamed, lambda row: row["number"], True),
    "hugging face shuffled": Kind(
        write_parquet,
        lambda folder: paceline.data.Stream(lambda: streamed(folder).shuffle(seed=5, buffer_size=16)),
        lambda row: row["number"],
        True,
    ),
    "images": Kind(
        write_images, lambda folder: paceline.data.ImageFolder(folder, images="l8"), lambda row: int(row[0][0, 0])
    ),
    "parquet": Kind(write_parquet, paceline.data.ParquetRows, lambda row: int(row["number"])),
    "lance": Kind(
        write_lance, lambda folder: paceline.data.LanceRows(f"{folder}/rows.lance"), lambda row: int(row["number"])
    ),
    "packed": Kind(lambda folder: None, packed, lambda row: int(row["input_ids"][0])),
    "mds": Kind(write_by_library("mds/none"), paceline.data.MDSRows, lambda row: row["number"]),
    "mds zstd": Kind(write_by_library("mds/zstd"), paceline.data.MDSRows, lambda row: row["number"]),
    "litdata": Kind(write_by_library("litdata/images"), paceline.data.LitDataRows, lambda row: row["number"]),
    "litdata arrow": Kind(write_by_library("litdata/arrow"), paceline.data.LitDataRows, lambda row: row["number"]),
    "json lines": Kind(
        write_lines, lambda folder: paceline.data.JsonLines(f"{folder}/*.jsonl"), lambda row: row["number"]
    ),
    "weighted sampler": Kind(
        lambda folder: None,
        lambda folder: DataLoader(
            range(ROWS),  # type: ignore[arg-type]
            BATCH,
            sampler=WeightedRandomSampler([number % 5 for number in range(ROWS)], 40),
        ),
        int,
        is_sampled=True,
    ),
    "subset sampler": Kind(lambda folder: None, lambda folder: Ordered(range(ROWS)), int, is_sampled=True),
    "grouped sampler": Kind(
        lambda folder: None,
        lambda folder: DataLoader(range(ROWS), batch_sampler=ByLength()),  # type: ignore[arg-type]
        int,
        is_sampled=True,
    ),
    "webdataset": Kind(
        write_shards, lambda folder: paceline.data.WebDatasetRows(f"{folder}/{{0..2}}.tar"), lambda row: row["cls"]
    ),
}


# Of which a copy at a URL is read. An Arrow file in the stream format has to be on a disk.
REMOTE = ["arrow files", "images", "json lines", "litdata", "litdata arrow", "mds", "mds zstd", "parquet", "webdataset"]
ALL = {**KINDS, "arrow files": KINDS["arrow"]._replace(write=lambda folder: write_arrow(folder, ()))}


def numbers_of(batch: Any) -> torch.Tensor:
    """The numbers of a batch, which Paceline has made of columns or `collate` of rows."""
    return batch["number"].double() if isinstance(batch, dict) else batch


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int, dict[str, Any]]:
    rows = numbers_of(batch)
    sums = {f"power {power}": (float((rows**power).sum()), len(rows)) for power in (1, 2, 3)}
    return (output[:, 0] - rows / 1000).square().sum(), len(rows), sums


def main(name: str, folder: str, out: str) -> None:
    kind = ALL[name]
    trainer = paceline.Trainer(
        lambda: nn.Linear(1, 1).double(),
        loss=loss,
        forward=lambda model, batch: model(numbers_of(batch)[:, None] / 1000),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        global_batch=BATCH,
        plan="micro=2",
        seed=SEED,
    )
    trainer.state.setdefault("steps", [])
    dataset = kind.open(folder)
    one_by_one = lambda rows: torch.tensor([kind.number(row) for row in rows], dtype=torch.float64)
    collate = None if name.split()[0] in ("arrow", "parquet", "lance") else one_by_one
    order = None if name == "packed" else getattr(dataset, "order", None)  # which has a global batch as its argument
    for report in trainer.steps(dataset, epochs=EPOCHS, collate=collate, order=order):
        sums = [round(report.metrics[f"power {power}"] * report.samples) for power in (1, 2, 3)]
        trainer.state["steps"].append([report.samples, *sums])
        wait_for_teams()
    if trainer.main:
        Path(out).write_text(json.dumps(trainer.state["steps"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
