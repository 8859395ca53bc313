"""Describes a model in words: its parameters, those that are trained, and what each worker holds of it."""

from __future__ import annotations

from typing import Any

from paceline.base.journal import Event
from paceline.base.text import count_of, size_of

_HELD = ("parameters", "gradients", "optimizer state")


def model_line(event: Event) -> str:
    """One line about a model, from the journal's ``model`` event; empty if there is none."""
    if not event.get("parameters"):
        return ""
    parameters, trained = event["parameters"], event.get("trained") or 0
    which = "all trained" if trained == parameters else f"{count_of(trained)} of them trained"
    parts = [f"{event.get('model')}, {count_of(parameters)} parameters, {which}"]
    if event.get("buffers"):
        parts.append(f"{count_of(event['buffers'])} values in buffers")
    line = ", ".join(parts)
    held = [f"{size_of(size)} of {kind}" for kind, size in zip(_HELD, event.get("held") or (), strict=False) if size]
    return f"{line}; each worker holds {', '.join(held)}" if held else line


def block_rows(event: Event) -> list[tuple[str, str]]:
    """(name, text) of each block of a model."""
    return [(name, _block(*about)) for name, *about in event.get("blocks") or ()]


def block_table(event: Event) -> str:
    """The same as lines of text."""
    rows = block_rows(event)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:{width}}  {text}" for name, text in rows)


def _block(kind: str, count: int, parameters: int, trained: Any) -> str:
    of = f"{count} x {kind}" if count > 1 else kind
    each = " each" if count > 1 else ""
    which = "" if trained == parameters else f", {count_of(trained)} trained"
    return f"{of}, {count_of(parameters)} parameters{each}{which}"
