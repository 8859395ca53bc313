"""Reads the JSON messages between workers, parameter servers and hosts."""

from __future__ import annotations

from typing import Any

from paceline.base.schema import SAME_VERSION, read_message
from paceline.errors import FormatError


def read_told(data: bytes | bytearray, about: str, who: str) -> Any:
    """What `who` tells `about` something, which names its type in `paceline.comm.message_types`.

    Raises FormatError for anything else, with the field that is wrong.
    """
    from paceline.comm.message_types import TOLD  # needs msgspec

    return read_message(data, TOLD[about], f"what {who} tells of its {about}")


def damaged(about: str, who: str, why: str) -> FormatError:
    """The error where what was told has its type and yet cannot be."""
    return FormatError(f"what {who} tells of its {about} is damaged: {why}", SAME_VERSION)
