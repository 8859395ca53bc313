"""What the page of the API shows names every parameter, so that nobody has to read the source for its meaning."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
SHOWN = re.findall(r"^\.\. auto\w+:: ([\w.]+)(\(\))?\n(?:   :members:(.*))?", PAGE, re.MULTILINE)


def shown() -> Iterator[tuple[str, Any]]:
    """Everything on the page, by name; a class that the page shows with ``()`` is not made by scripts."""
    for name, empty, members in SHOWN:
        found = locate(name)
        assert found is not None, name
        if not empty:
            yield name, found
        for member in re.findall(r"\w+", members):
            value = inspect.getattr_static(found, member)
            if callable(value) or isinstance(value, property):  # an attribute's text stands under it
                yield f"{name}.{member}", value


@pytest.mark.parametrize(("name", "found"), [*shown()], ids=lambda value: value if isinstance(value, str) else "")
def test_each_parameter_is_in_the_docstring(name: str, found: Any) -> None:
    call = found.fget if isinstance(found, property) else found
    text = inspect.getdoc(call)
    assert text, f"{name} has no docstring"
    if inspect.isclass(call) and call.__init__ is not object.__init__ and not issubclass(call, BaseException):
        text += inspect.getdoc(call.__init__) or ""
    named = [p.name for p in inspect.signature(call).parameters.values() if p.annotation not in ("Never", p.empty)]
    missing = [p for p in named if not re.search(rf"\b{p}\b", text)]
    assert not missing, f"the docstring of {name} does not mention {', '.join(missing)}"
