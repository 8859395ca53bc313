"""Rich's console with control characters of foreign text made visible."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from rich.console import Console  # noqa: TID251 (the place for it)
from rich.segment import Segment
from rich.text import Text

from paceline.base.console import Coloured, printable


class Terminal(Console):
    """A console of rich that makes control characters in texts visible.

    The sequences that rich itself sends to move the cursor stay.
    """

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Renders as rich does, with control characters made visible."""
        if isinstance(renderable, Text) and (shown := printable(renderable.plain)) != renderable.plain:
            text = renderable  # its marks would be at other characters
            renderable = Text(
                shown, text.style, justify=text.justify, overflow=text.overflow, no_wrap=text.no_wrap, end=text.end
            )
        for segment in super().render(renderable, options):
            clean = segment.text if segment.control else printable(segment.text)
            yield segment if clean == segment.text else segment._replace(text=clean)


class TextPage:
    """Collects what rich lays out as one `text`, in `width` columns, with or without a terminal's colours."""

    def __init__(self, width: int, colour: bool) -> None:
        self._out = io.StringIO()
        system: Any = "standard" if colour else None
        self._console = Terminal(file=self._out, width=width, force_terminal=colour, color_system=system)
        self.print = self._console.print

    @property
    def text(self) -> Coloured:
        """Its lines without blanks at their ends."""
        return Coloured("\n".join(line.rstrip() for line in self._out.getvalue().splitlines()))
