"""Prints text to terminals with control characters made visible.

Every text that a process of Paceline prints goes through `say`, or through `observe.terminal.Terminal` where it is laid
out. Journals and logs keep what came.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import TextIO

# Control characters of ASCII (C0) and of Latin-1 (C1), separators of lines, overrides of the writing direction, and
# the surrogates that stand for bytes which are no UTF-8.
_NAMED = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_HIDDEN_IN_LINE = re.compile(f"[{_NAMED}]")
_HIDDEN = re.compile(f"(?![\n\t])[{_NAMED}]")
_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")  # the one kind of escape sequence that only changes how text looks
_RESET = "\x1b[0m"
_LONGEST = 1 << 16  # bytes of a line without an end
_LONGEST_EXCERPT = 80  # characters of what a user gave, in an error
# Options of `paceline run`: arguments of the script with these names need a `--` before them.
RUN_OPTIONS = {f"--{name}" for name in re.findall("[a-z-]+", """
    workers spares raw join token-file listen nodes store run-dir plan save-every keep checkpoints mirror steps max-time
    tensorboard log-to heal verify-steps max-restarts min-workers exclude-after hang-timeout cold-start quiet verbose
    progress shares against metrics page notify debug take-over config set help""")}  # fmt: skip
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


class Coloured(str):
    """Text whose escape sequences are ours, or were found to be colours: it is printed as it is."""


def _visible(match: re.Match[str]) -> str:
    char = match[0]
    if "\udc80" <= char <= "\udcff":  # a byte of a name that is no UTF-8
        return f"\\x{ord(char) - 0xDC00:02x}"
    return _SHORT.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 128 else f"\\u{ord(char):04x}")


def printable(text: str) -> str:
    """`text` with each control character as an escape of Python's, as ``\\x1b``; line ends and tabs stay."""
    return _HIDDEN.sub(_visible, text)


def separated(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a script, after a `--` if `paceline run` would take one of them for its own option."""
    return [*(["--"] if {argument.partition("=")[0] for argument in arguments} & RUN_OPTIONS else []), *arguments]


def in_one_line(name: object) -> str:
    """A name or path, which must not begin a line of its own: as `printable`, and line ends and tabs are visible."""
    return _HIDDEN_IN_LINE.sub(_visible, str(name))


def coloured(text: str) -> Coloured:
    """What a worker has written: its colours stay, and end with the text; everything else is as in `printable`."""
    if "\x1b" not in text:
        return Coloured(printable(text))
    parts = [part if at % 2 else printable(part) for at, part in enumerate(_COLOUR.split(text))]
    return Coloured("".join(parts) + _RESET * (len(parts) > 1))


def markup(text: str) -> str:
    """Text inside of HTML or SVG, or in an attribute there. XML has no escape for control characters."""
    return escape(printable(text))


def without_colours(text: str) -> str:
    """The same without colours, for a text that is printed inside another one."""
    return printable(_COLOUR.sub("", text))


def say(text: str, out: TextIO | None = None, end: str = "\n") -> None:
    """Prints a text with nothing hidden in it, on standard error unless `out` is given."""
    shown = text if isinstance(text, Coloured) else printable(text)
    print(str(shown), end=end, file=sys.stderr if out is None else out, flush=True)


def command_line(words: Iterable[str]) -> str:
    """A command to copy into a shell. Words with control characters are in ``$'...'``, which bash, zsh and ksh read."""
    return " ".join(quoted(word) for word in words)


def quoted(word: str) -> str:
    """One word of a command line for people; scripts that a shell runs take `shlex.quote`."""
    if not _HIDDEN_IN_LINE.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", r"\\").replace("'", r"\'")
    return f"$'{in_one_line(escaped)}'"


def shown(text: str) -> str:
    """What a user gave, quoted as a shell would need it; of what is longer than a line its beginning."""
    return quoted(text if len(text) <= _LONGEST_EXCERPT else f"{text[:_LONGEST_EXCERPT]}...")


def last_painted(line: bytes) -> str:
    """A line as a terminal would show it in the end: one with carriage returns was painted over."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class Passing:
    """Passes what other processes write on to a stream of this one.

    A file or pipe gets it byte for byte, a terminal line by line, without control characters other than colours.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._rest = out, b""

    def write(self, data: bytes) -> None:
        """Passes data on; to a terminal only up to the last end of a line, and the rest later."""
        if hasattr(self._out, "buffer") and not self._out.isatty():
            self._out.flush()
            self._out.buffer.write(data)
            self._out.flush()
            return
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = b"" if len(rest) > _LONGEST else rest
        for line in (*lines, rest) if len(rest) > _LONGEST else lines:
            say(coloured(last_painted(line)), self._out)

    def close(self) -> None:
        """Shows a last line that has no end."""
        if self._rest:
            say(coloured(last_painted(self._rest)), self._out)
        self._rest = b""
