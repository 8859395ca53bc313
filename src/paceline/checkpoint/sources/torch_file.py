"""Reads files of `torch.save` with torch's weights-only loader, which runs no code of theirs.

The loader makes tensors, plain containers and numbers. Objects of any other class, such as an `argparse.Namespace`
beside the weights, become `Untaken`: a stand-in without behaviour, so that the rest of the file can be read.
"""

from __future__ import annotations

import re
import struct
import warnings
import zipfile
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from paceline.base.schema import refuse_pipe
from paceline.errors import CheckpointError

AGAIN = "check that you can read it, or copy it again from its source"
_RESAVE = "load it with the program that wrote it, and save model.state_dict() with torch.save or as safetensors"
# Errors of the loader for a file that is damaged, or that torch did not write.
UNREADABLE = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    EOFError,
    OverflowError,
    UnpicklingError,
    struct.error,
)


class Untaken:
    """Stands for an object of a class that is not created. The names of its subclasses are those of such classes."""

    def __new__(cls, *arguments: Any) -> Untaken:
        """Makes an object without using the arguments."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Drops the state."""


def _new_dict(*arguments: Any) -> dict[Any, Any]:
    """A plain dict where the file has a defaultdict; its items follow."""
    return {}


def stand_in(name: str) -> tuple[Any, str]:
    """The stand-in for the class or function with this full name, as `torch.serialization.safe_globals` takes it."""
    return (_new_dict if name == "collections.defaultdict" else type(name, (Untaken,), {})), name


def load_torch(file: Path | BytesIO, what: str = "") -> Any:
    """Returns the value in a file of `torch.save`. Tensors of a file on disk are memory-mapped.

    `what` names the file in errors. Raises CheckpointError if it cannot be read.
    """
    what = what or str(file)
    try:
        if isinstance(file, Path):
            refuse_pipe(file)
        is_archive = zipfile.is_zipfile(file)  # files of torch before 1.6 are none
        if isinstance(file, BytesIO):
            file.seek(0)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if is_archive else []
        if isinstance(file, BytesIO):
            file.seek(0)
        stand_ins: list[Any] = [stand_in(name) for name in names]
        with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings(action="ignore"):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive and isinstance(file, Path))
    except OSError as error:
        raise CheckpointError(f"{what} could not be read: {error.strerror or error}", AGAIN) from error
    except UNREADABLE as error:
        raise unreadable(what, error) from error


def unreadable(what: str, error: BaseException) -> CheckpointError:
    """The error for a file that the loader refuses or does not understand."""
    text = str(error)
    if (match := re.search(r"GLOBAL (\S+)", text)) is not None:
        return CheckpointError(f"{what} could not be read: it uses {match[1]}, which is never executed", _RESAVE)
    if "unrecognized function" in text:
        what = f"{what} could not be read: it calls an object that it makes, and nothing in it is executed"
        return CheckpointError(what, _RESAVE)
    if "torchscript" in text.lower():
        return CheckpointError(f"{what} could not be read: it is a TorchScript program, not weights", _RESAVE)
    if "Unsupported operand" in text:
        return CheckpointError(f"{what} could not be read: torch.save did not write it as it does by default", _RESAVE)
    why = text.partition("\n")[0][:120] or "it ends too early"
    return CheckpointError(f"{what} could not be read: {type(error).__name__}: {why}", AGAIN)
