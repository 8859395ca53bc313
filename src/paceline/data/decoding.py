"""Decodes the bytes of a file by the extension of its name, as the webdataset library does."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable
from itertools import pairwise
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import msgspec
import numpy as np

from paceline.errors import DatasetError, UsageError, first_line

IMAGES = frozenset(
    ("bmp", "gif", "jfif", "jpe", "jpeg", "jpg", "pbm", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp")
)
_IMAGE_FORMS = re.compile(r"(?P<kind>torch|pil|)(?P<mode>l|rgb|rgba|)(?P<bytes>8?)")


class Decoder:
    """Decodes files by their extensions; `images` is what images become, see `WebDatasetRows`. Raises UsageError."""

    def __init__(self, images: str | None) -> None:
        self._images = images
        match = _IMAGE_FORMS.fullmatch(images or "pil")
        if match is None or (not match["mode"] and (not match["kind"] or match["bytes"])):
            known = '"pil", "rgb8", "torchrgb8", "torchrgb", the same with l or rgba, or None'
            raise UsageError(f"images={images!r} is not a form of images", f"use {known}")
        self._kind, self._mode, self._is_bytes = match["kind"], (match["mode"] or "rgb").upper(), bool(match["bytes"])

    def __call__(self, name: str, data: bytes, where: str) -> Any:
        """Returns the value of a file with this name or extension. `where` names it in errors. Raises DatasetError."""
        try:
            if name.endswith(".gz"):
                name, data = name[:-3], gzip.decompress(data)
            kind = name.rpartition(".")[2].lower()
            if kind in IMAGES and self._images is not None:
                return self._image(data)
            return _BY_EXTENSION[kind](data) if kind in _BY_EXTENSION else data
        except (ValueError, OSError, EOFError, RuntimeError, BadZipFile, zlib.error, msgspec.MsgspecError) as error:
            what = f"{where} cannot be decoded ({first_line(error)})"
            raise DatasetError(what, "repair or remove it, or pass a function as decode=") from error

    def _image(self, data: bytes) -> Any:
        image = open_image(data, self._mode)
        if self._kind == "pil":
            return image
        array = np.asarray(image)
        if not self._is_bytes:
            array = array.astype(np.float32) / 255
        if self._kind != "torch":
            return array
        import torch

        return torch.from_numpy((array.transpose(2, 0, 1) if array.ndim == 3 else array).copy())


def open_image(data: bytes, mode: str | None = None) -> Any:
    """Returns an image of pillow, in this mode ("RGB", "L", ...) or as it is. Raises UsageError, and OSError."""
    with _pillow().open(io.BytesIO(data)) as image:
        if mode is not None:
            return image.convert(mode)
        image.load()
        return image


def raw_image(data: bytes) -> Any:
    """Returns the image of pillow whose width, height, mode and pixels these bytes are. Raises UsageError."""
    width, height, mode = np.frombuffer(data, "<u4", 3).tolist()
    return _pillow().frombytes(data[12 : 12 + mode].decode(), (width, height), data[12 + mode :])


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise UsageError("images need pillow", "pip install 'paceline[images]'") from error
    return Image


def _text(data: bytes) -> str:
    return data.decode()


def _tensors(data: bytes) -> Any:
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except UnpicklingError:
        raise ValueError("it has more than tensors and plain values") from None


def _array(data: bytes) -> Any:
    return np.lib.format.read_array(io.BytesIO(data))


def _arrays(data: bytes) -> dict[str, Any]:
    return dict(np.load(io.BytesIO(data)))


_BY_EXTENSION: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("mp", "msg"), msgspec.msgpack.decode),
    "npy": _array,
    "npz": _arrays,
    "pth": _tensors,
}


class Images:
    """Decodes lists of images, which follow their number and their sizes, both from byte `start` on."""

    def __init__(self, start: int, decode: Callable[[bytes], Any]) -> None:
        self._start, self._decode = start, decode

    def __call__(self, data: bytes) -> list[Any]:
        (count,) = np.frombuffer(data, "<u4", 1, self._start).tolist()
        begin = self._start + 4
        ends = np.cumsum([begin + 4 * count, *np.frombuffer(data, "<u4", count, begin)]).tolist()
        return [self._decode(data[one:other]) for one, other in pairwise(ends)]
