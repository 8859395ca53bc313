"""Logs images and histograms.

A picture may be an array, a PIL image or a matplotlib figure; this module imports neither package.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import struct
import zlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.base.journal import replace_file
from paceline.errors import UsageError, a

FOLDER = "media"  # in the run folder
_COLOURS = {1: 0, 3: 2, 4: 6}  # channels by PNG's number for them
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Medium(Protocol):
    """A logged value that is neither a number nor a text."""

    def event(self, folder: Path, name: str, step: int) -> dict[str, Any]:
        """The fields of the journal's event; writes files to the run folder. Raises OSError."""


class Histogram:
    """A histogram of the elements of an array or tensor, for `trainer.log`.

    Args:
        values: Numbers, in an array or tensor of any shape.
        bins: Number of bins of equal width, 1 to 1000.

    Attributes:
        counts: Elements per bin.
        edges: Bounds of the bins, one more than there are bins.
        mean: Mean of the finite elements.
        deviation: Standard deviation of the finite elements.
        others: Number of elements that are not finite.

    Raises:
        UsageError: The values are not numbers, or the number of bins is out of range.
    """

    def __init__(self, values: Any, bins: int = 30) -> None:
        every = _array(values).reshape(-1)
        if not 1 <= bins <= 1000:
            raise UsageError(f"a Histogram cannot have {bins} bins", "set bins= to a number from 1 to 1000")
        if not np.issubdtype(every.dtype, np.number) and every.dtype != bool:
            raise UsageError(
                f"a Histogram needs numbers, got an array of dtype {every.dtype}", "convert the values to numbers"
            )
        finite = every[np.isfinite(every)].astype(np.float64)
        self.others = len(every) - len(finite)
        try:
            counts, edges = np.histogram(finite, bins)
        except ValueError:  # the range has fewer distinct numbers than bins, or is infinite
            counts, edges = np.array([len(finite)]), np.array([finite.min(), finite.max()])
        self.counts, self.edges = counts.tolist(), edges.tolist()
        self.mean = float(finite.mean()) if len(finite) else 0.0
        self.deviation = float(finite.std()) if len(finite) else 0.0

    def event(self, folder: Path, name: str, step: int) -> dict[str, Any]:
        """The fields of the journal's event."""
        return {"kind": "histogram", **vars(self)}


class Image:
    """A picture for `trainer.log`.

    Args:
        picture: An array of [height, width] or [height, width, channels]; a tensor of [height, width] or [channels,
            height, width]; a picture of PIL or a figure of matplotlib; or the bytes of a PNG. Arrays and tensors have
            1, 3 or 4 channels, of bytes or of numbers from 0 to 1.

    Raises:
        UsageError: The picture has another type, shape or dtype.
    """

    def __init__(self, picture: Any) -> None:
        self.png = _png(picture)
        self.width, self.height = struct.unpack(">II", self.png[16:24])

    def event(self, folder: Path, name: str, step: int) -> dict[str, Any]:
        """Writes the PNG to the run folder; returns the fields of the journal's event. Raises OSError."""
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:60].strip(".-")
        if safe != name:  # two names may differ only in the replaced characters: the hash keeps their files apart
            safe += f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        path = folder / FOLDER / f"{safe}-step-{step:012}.png"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(path, self.png)
        return {"kind": "image", "file": f"{FOLDER}/{path.name}", "width": self.width, "height": self.height}


def medium(name: str, value: Any) -> Medium | None:
    """Converts a value to a picture or histogram; None if it is a number or text. Raises UsageError."""
    if isinstance(value, (Histogram, Image)):
        return value
    if hasattr(value, "savefig") or _of_pil(value):
        return Image(value)
    shape = getattr(value, "shape", None)
    if shape is None or math.prod(shape) == 1:
        return None
    if len(shape) == 1:
        return Histogram(value)
    if len(shape) == 2 or (len(shape) == 3 and {shape[0], shape[-1]} & _COLOURS.keys()):
        return Image(value)
    what = f"log() got {name} of shape {tuple(shape)}, which is neither a vector of numbers nor an image"
    raise UsageError(what, f"use trainer.log({name}=paceline.Histogram(...)) or paceline.Image(...)")


def _of_pil(value: Any) -> bool:
    return hasattr(value, "save") and hasattr(value, "mode") and hasattr(value, "size")


def _array(values: Any) -> np.ndarray:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    return np.asarray(values)


def _png(picture: Any) -> bytes:
    if isinstance(picture, bytes):
        if not picture.startswith(_SIGNATURE) or len(picture) < 33:
            raise UsageError("the bytes of an Image are not a PNG file", "pass an array, or the bytes of a PNG file")
        return picture
    file = io.BytesIO()
    if hasattr(picture, "savefig"):
        picture.savefig(file, format="png")
    elif _of_pil(picture):
        picture.save(file, "PNG")
    else:
        return _encoded(picture)
    return file.getvalue()


def _encoded(picture: Any) -> bytes:
    """The PNG of an array (ISO/IEC 15948), without filters."""
    pixels = _array(picture)
    if hasattr(picture, "detach") and pixels.ndim == 3:
        pixels = np.moveaxis(pixels, 0, -1)
    shaped = pixels[..., None] if pixels.ndim == 2 else pixels
    if shaped.ndim != 3 or shaped.shape[2] not in _COLOURS or not shaped.size:
        form = "[channels, height, width]" if hasattr(picture, "detach") else "[height, width, channels]"
        what = (
            f"an Image cannot be made from {a(type(picture).__name__)} of shape {tuple(getattr(picture, 'shape', ()))}"
        )
        raise UsageError(what, f"use the shape [height, width], or {form} with 1, 3 or 4 channels")
    if shaped.dtype != np.uint8:
        if not np.issubdtype(shaped.dtype, np.floating) and shaped.dtype != bool:
            raise UsageError(
                f"an Image cannot have the dtype {shaped.dtype}", "use uint8, or floating-point numbers from 0 to 1"
            )
        shaped = (np.nan_to_num(shaped.astype(np.float64)).clip(0, 1) * 255).round().astype(np.uint8)
    height, width, channels = shaped.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), shaped.reshape(height, -1)], 1)
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
