"""Folders that MosaicML's streaming and litdata have written, and the rows that they were given.

`tests/integrations/shards.tar.gz` was written once by streaming 0.13.0 and litdata 0.2.76, which cannot be installed
together with the packages that Paceline is tested with:

    python tests/support/shards_of_libraries.py tests/integrations/shards.tar.gz
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

ARCHIVE = Path(__file__).parents[1] / "integrations" / "shards.tar.gz"
ROWS, EVERY = 50, 9  # of most folders, and of those with values of every type
MDS_COLUMNS = {
    "number": "int",
    "text": "str",
    "bytes": "bytes",
    "json": "json",
    "u8": "uint8",
    "f2": "float16",
    "f4": "float32",
    "array": "ndarray",
    "typed": "ndarray:float32",
    "shaped": "ndarray:int16:2,3",
    "str_int": "str_int",
    "str_float": "str_float",
    "str_decimal": "str_decimal",
    "pil": "pil",
    "jpeg": "jpeg",
    "png": "png",
    "pngs": "list[png]",
    "pils": "list[pil]",
    "jpegs": "jpeg_array",
}
MDS_KINDS = ("none", "zstd", "gz", "br", "snappy", "bz2")
# Arguments of litdata's writer.
LITDATA_KINDS: dict[str, dict[str, Any]] = {
    "images": {},
    "arrow": {},
    "arrow zstd": {"compression": "zstd"},
    "zstd chunk": {"compression": "zstd", "compression_level": "chunk"},
    "zstd batch": {"compression": "zstd", "compression_batch_size": 7},
    "zstd sample": {"compression": "zstd:3", "compression_level": "sample"},
}


def picture(number: int, mode: str = "RGB") -> Image.Image:
    colour = (number, 2 * number, 200)
    return Image.new(mode, (3, 2), colour if mode == "RGB" else number)


def encoded(number: int, form: str) -> bytes:
    picture(number).save(data := io.BytesIO(), form)
    return data.getvalue()


def mds_row(number: int) -> dict[str, Any]:
    """A row with every encoding; lists of JPEG images are given as their bytes."""
    return {
        "number": number - 4,
        "text": f"ä{number}" * (number % 3),
        "bytes": bytes([number]) * number,
        "json": {"a": [number, None], "b": "x"},
        "u8": number,
        "f2": number / 2,
        "f4": number / 3,
        "array": np.arange(number + 1, dtype=np.float64).reshape(1, -1),
        "typed": np.full((2, number + 1), number, np.float32),
        "shaped": np.full((2, 3), number, np.int16),
        "str_int": 10**30 + number,
        "str_float": number / 7,
        "str_decimal": Decimal(number) / Decimal(7),
        "pil": picture(number, "L"),
        "jpeg": picture(number),
        "png": picture(number),
        "pngs": [picture(number)] * (number % 3),
        "pils": [picture(number), picture(1)],
        "jpegs": [encoded(number, "JPEG")] * (1 + number % 2),
    }


def litdata_row(number: int) -> dict[str, Any]:
    """A row with every type; the last one is a JPEG image that was opened from a file."""
    return {
        "number": number - 4,
        "text": f"ä{number}",
        "bytes": bytes([number]) * number,
        "flag": number % 2 == 0,
        "float": number / 7,
        "flat": np.arange(number, dtype=np.int16),
        "array": np.full((2, 3), number / 2, np.float32),
        "tensor": torch.arange(number + 1, dtype=torch.int32),
        "square": torch.full((2, 2), number, dtype=torch.bfloat16).float(),
        "nested": ({"a": [number, {"b": "x"}]}, [number, number + 1]),
        "records": [{"i": number, "n": None, "f": 1.5, "t": "ä", "b": True}] * 2,
        "lists": {"s": ["a", "ä"], "f": [1.5, -2.0], "b": [True, False], "none": [], "big": [2**70]},
        "pil": picture(number, "L"),
        "jpeg": Image.open(io.BytesIO(encoded(number, "JPEG"))),
    }


def small_row(number: int, with_image: bool = False) -> dict[str, Any]:
    row: dict[str, Any] = {"number": number, "text": f"row {number}"}
    return row | ({"image": picture(number)} if with_image else {})


def tokens(number: int) -> torch.Tensor:
    return torch.arange(100 * number, 100 * number + 37, dtype=torch.int64)


def unpack(folder: Path) -> Path:
    """Unpacks the folders; returns the one that holds them."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def write(folder: Path) -> None:
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter
    from streaming import MDSWriter

    def write_mds(name: str, columns: dict[str, str], rows: int, row: Any, **options: Any) -> None:
        with MDSWriter(out=str(folder / "mds" / name), columns=columns, **options) as writer:
            for number in range(rows):
                writer.write({column: value for column, value in row(number).items() if column in columns})

    def write_litdata(name: str, rows: int, row: Any, **options: Any) -> None:
        (made := folder / "litdata" / name).mkdir(parents=True)
        writer = BinaryWriter(str(made), **{"chunk_size": 20, **options})
        for number in range(rows):
            writer[number] = row(number)
        writer.done()
        writer.merge()

    write_mds("every", MDS_COLUMNS, EVERY, mds_row, size_limit=5000)
    write_mds("pickles", {"number": "int", "what": "pkl"}, 2, lambda number: {"number": number, "what": {1}})
    for kind in MDS_KINDS:
        compression = None if kind == "none" else kind
        write_mds(kind, {"number": "int", "text": "str"}, ROWS, small_row, compression=compression, size_limit=800)
    write_litdata("every", EVERY, litdata_row, chunk_size=4)
    write_litdata("tuples", EVERY, lambda number: (number, [torch.ones(2) * number, {"q": "x"}]))
    write_litdata("plain", EVERY, lambda number: number)
    write_litdata("pickles", 2, lambda number: {"number": number, "what": {1}})
    write_litdata("tokens", ROWS, tokens, item_loader=TokensLoader(), chunk_size=200)
    for kind, options in LITDATA_KINDS.items():
        write_litdata(kind, ROWS, lambda number, kind=kind: small_row(number, "arrow" not in kind), **options)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, tarfile.open(sys.argv[1], "w:gz") as archive:
        write(Path(made))
        for path in sorted(Path(made).rglob("*")):
            archive.add(path, path.relative_to(made), recursive=False)
