"""Reads the JSON messages between workers, parameter servers and hosts."""

from __future__ import annotations

from typing import Any

from paceline.base.schema import SAME_VERSION, read_message
from paceline.errors import FormatError


def decode_message(data: bytes | bytearray, about: str, who: str) -> Any:
    """Decodes a JSON message from `who` about `about`, which names its type in `paceline.comm.message_types`.

    Raises FormatError, naming the field, for a message of another type.
    """
    from paceline.comm.message_types import MESSAGE_TYPES  # needs msgspec

    return read_message(data, MESSAGE_TYPES[about], f"the message from {who} about its {about}")


def damaged(about: str, who: str, why: str) -> FormatError:
    """Returns the error for a message of the right type with impossible contents."""
    return FormatError(f"the message from {who} about its {about} is damaged: {why}", SAME_VERSION)
