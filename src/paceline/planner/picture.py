"""Draws the plans of an answer as an SVG picture: a bar for each, with the parts of its step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.base.console import markup
from paceline.observe.drawing import STYLE
from paceline.planner.choose import Answer, Prospect, milliseconds

NAMES, BAR, LINE, PAD = 330.0, 420.0, 26.0, 12.0  # width of the names and of the longest bar, height of a line, margin
MOST = 16  # plans that are drawn
KINDS = ("computing", "recomputing", "bubble", "sums", "gathers", "messages", "hops", "update", "fixed")
COLOURS = 6  # style classes k0, k1, ...


def save(answer: Answer, path: Path) -> None:
    """Writes the picture to the SVG file `path`."""
    path.write_text(draw(answer.prospects[:MOST]), encoding="utf-8")


def draw(prospects: Sequence[Prospect]) -> str:
    """Draws predicted steps as stacked bars, with a line at the measured time of plans that were tried."""
    longest = max((max(one.seconds, one.step_seconds) for one in prospects), default=1.0) or 1.0
    shown = [name for name in KINDS if any(one.parts.get(name, 0.0) > 0.005 * longest for one in prospects)]
    rows = [_row(one, BAR / longest, shown) for one in prospects]
    lines = "".join(
        f'<g transform="translate({PAD:g} {PAD + number * LINE:g})">{row}</g>' for number, row in enumerate(rows)
    )
    height = 2 * PAD + (len(rows) + 1) * LINE
    key = f'<g transform="translate({PAD:g} {PAD + len(rows) * LINE:g})">{_key(shown)}</g>'
    box = f'viewBox="0 0 {NAMES + BAR + 90:.0f} {height:.0f}" width="{NAMES + BAR + 90:.0f}"'
    label = markup("; ".join(f"{one.name} {milliseconds(one.step_seconds)}" for one in prospects))
    paper = f'<style>{STYLE}</style><rect class="paper" width="100%" height="100%"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" {box} role="img" aria-label="{label}">'
    return f"{head}{paper}{lines}{key}</svg>\n"


def _row(prospect: Prospect, scale: float, shown: Sequence[str]) -> str:
    """Returns the name of a plan, the bar of its parts, and its seconds."""
    drawn = [f'<text x="0" y="17">{markup(prospect.name)}</text>']
    begin = NAMES
    for name in shown:
        width, title = scale * prospect.parts.get(name, 0.0), f"{name} {milliseconds(prospect.parts.get(name, 0.0))}"
        box = f'x="{begin:.1f}" y="5" width="{width:.1f}" height="16"'
        drawn.append(f'<rect class="{_colour(shown, name)}" {box}><title>{markup(title)}</title></rect>')
        begin += width
    if prospect.trial is not None:
        at = NAMES + scale * prospect.step_seconds
        drawn.append(f'<line class="go" x1="{at:.1f}" x2="{at:.1f}" y1="2" y2="24" stroke-width="2"/>')
        begin = max(begin, at)
    text = milliseconds(prospect.step_seconds) if prospect.fits else "does not fit"
    return "".join([*drawn, f'<text class="soft" x="{begin + 6:.1f}" y="17">{text}</text>'])


def _key(shown: Sequence[str]) -> str:
    drawn, at = [], 0.0
    for name in shown:
        drawn.append(f'<rect class="{_colour(shown, name)}" x="{at:.0f}" y="6" width="11" height="11"/>')
        drawn.append(f'<text class="soft" x="{at + 16:.0f}" y="16">{name}</text>')
        at += 30 + 6.5 * len(name)
    return "".join([*drawn, f'<text class="soft" x="{at:.0f}" y="16">| measured</text>'])


def _colour(shown: Sequence[str], name: str) -> str:
    return f"k{shown.index(name) % COLOURS}"
