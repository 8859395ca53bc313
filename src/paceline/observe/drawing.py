"""Draws a plan as an SVG picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from paceline.base.console import markup
from paceline.base.mesh import AXES
from paceline.base.text import plural, size_of
from paceline.observe.plan_explanation import DRAWN, HELD, PlanExplanation, took
from paceline.parallel.pipeline.schedule import BACKWARD, FORWARD, INPUTS, SPLIT, WEIGHTS

Box = tuple[float, float, str]  # width, height, and SVG drawn from the upper left corner on
SHOWN = 2, 4  # workers along an axis that are drawn: below each other, side by side
WIDTH, GAP, DROP, PAD = 176.0, 92.0, 34.0, 10.0  # width of a worker, gaps to its right and below, padding in boxes
STEP, NAMED = 620.0, 96.0  # width of the schedule, and least width of the names of its rows
LINE, CHARACTER = 26, 6.2  # characters of a line in a worker's box, and the width of one
TRAVELS = {
    "data": "gradients",
    "pipeline": "activations",
    "context": "heads",
    "expert": "tokens",
    "tensor": "activations",
}
STYLE = """
.plan{font:12px ui-sans-serif,system-ui,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif}
.plan text{fill:#1b1f24}.plan .soft{fill:#5b626b;font-size:11px}.plan .bold{font-weight:650}.plan .on{fill:#fff}
.plan .paper{fill:#f7f7f5}.plan .box{fill:#fff;stroke:#c9c9c4}
.plan .frame{fill:none;stroke:#c9c9c4;stroke-dasharray:3 3}
.plan .go{stroke:#5b626b;fill:none}.plan .tip{fill:#5b626b}.plan .wait{fill:#e9d9d3}
.plan .k0{fill:#2f6db0}.plan .k1{fill:#d8892b}.plan .k2{fill:#3b9474}.plan .k3{fill:#8560b5}
.plan .k4{fill:#2a7f8f}.plan .k5{fill:#b8506e}
@media (prefers-color-scheme:dark){.plan text{fill:#e8e8e4}.plan .soft{fill:#a3aab3}.plan .on{fill:#121518}
.plan .paper{fill:#121518}.plan .box{fill:#22272d;stroke:#3d444d}.plan .frame{stroke:#3d444d}.plan .go{stroke:#a3aab3}
.plan .tip{fill:#a3aab3}.plan .wait{fill:#46302b}.plan .k0{fill:#6ba5e3}.plan .k1{fill:#e7aa52}.plan .k2{fill:#62bf9c}
.plan .k3{fill:#b595e0}.plan .k4{fill:#5fb7c6}.plan .k5{fill:#e0859f}}
"""


def draw(explanation: PlanExplanation) -> str:
    """Draws the plan as one SVG picture, with colours for light and dark pages."""
    axes = [axis for axis in AXES if getattr(explanation.mesh, axis) > 1]
    kinds = [kind for kind in HELD if any(one.get(kind) for one in [*explanation.predicted, *explanation.measured])]
    parts = [_along(explanation, axes, 0), _key([(f"k{HELD.index(kind)}", kind) for kind in kinds])]
    parts += [_schedule(explanation)] if explanation.mesh.pipeline > 1 else []
    title = f"{explanation.plan}: {plural(explanation.workers, 'worker')}" + f", {explanation.model}" * bool(
        explanation.model
    )
    inner, down = _text(PAD, 24, title, "bold"), 42.0
    for _, height, drawn in parts:
        inner, down = inner + _at(PAD, down, drawn), down + height + 18 * bool(height)
    wide = max(wide for wide, _, _ in parts) + 2 * PAD
    box = f'viewBox="0 0 {wide:.0f} {down:.0f}" width="{wide:.0f}" role="img" aria-label="{markup(title)}"'
    paper = f'<style>{STYLE}</style><rect class="paper" width="100%" height="100%"/>'
    return f'<svg class="plan" {box}>{paper}{inner}</svg>\n'


def save(explanation: PlanExplanation, path: Path) -> None:
    """Writes the picture to the SVG file `path`."""
    path.write_text(draw(explanation).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1), encoding="utf-8")


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{markup(text)}</text>'


def _rect(kind: str, x: float, y: float, width: float, height: float, title: str = "") -> str:
    inner = f"<title>{markup(title)}</title>" * bool(title)
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2">{inner}</rect>'
    )


def _arrow(x: float, y: float, right: float, down: float = 0.0) -> str:
    back = -7 if right + down > 0 else 7
    tip = f"l{back},-3.5v7z" if right else f"l-3.5,{back}h7z"
    line = f'<path class="go" d="M{x:.1f},{y:.1f}l{right:.1f},{down:.1f}"/>'
    return f'{line}<path class="tip" d="M{x + right:.1f},{y + down:.1f}{tip}"/>'


def _at(x: float, y: float, drawn: str) -> str:
    return f'<g transform="translate({x:.1f},{y:.1f})">{drawn}</g>'


def _key(kinds: Sequence[tuple[str, str]]) -> Box:
    cells = [_rect(kind, 118 * n, 0, 11, 11) + _text(118 * n + 17, 10, text) for n, (kind, text) in enumerate(kinds)]
    return 118.0 * len(cells), 12.0 * bool(cells), "".join(cells)


def _block_lines(explanation: PlanExplanation, rank: int) -> list[str]:
    """The complete names of a worker's blocks, wrapped between words into lines of about `LINE` characters."""
    return wrap(explanation.blocks(rank), LINE, break_long_words=False, break_on_hyphens=False)


def _worker(explanation: PlanExplanation, axis: str, rank: int) -> Box:
    """Draws a worker with bars of the memory it holds, predicted and measured, on one scale for all workers.

    The boxes of all workers are equally large, so that the longest names of blocks fit.
    """
    blocks = [_block_lines(explanation, ranks[0]) for ranks in explanation.lines]
    box_width = max(WIDTH, 2 * PAD + CHARACTER * max((len(line) for lines in blocks for line in lines), default=0))
    inner, down = _text(PAD, 20, f"worker {rank}", "bold"), 20.0
    position, own_blocks = explanation.position_text(rank, axis), _block_lines(explanation, rank)
    missing = max(map(len, blocks), default=0) - len(own_blocks)
    for line in [*filter(None, [position]), *own_blocks]:
        down += 16
        inner += _text(PAD, down, line, "soft")
    down += 16.0 * missing
    sources = [
        (name, by_worker)
        for name, by_worker in (("predicted ", explanation.predicted), ("measured ", explanation.measured))
        if by_worker
    ]
    most = (
        max(
            (sum(amounts.get(kind) or 0 for kind in HELD) for _, by_worker in sources for amounts in by_worker),
            default=0,
        )
        or 1
    )
    for name, by_worker in sources:
        x, down, amounts = PAD, down + 34, by_worker[explanation.mesh.shard_index_of(rank)]
        if by_worker is explanation.measured and rank >= explanation.mesh.replica:  # only the first replica is measured
            continue
        for number, kind in enumerate(HELD):
            wide = (box_width - 2 * PAD) * (amounts.get(kind) or 0) / most
            inner += _rect(f"k{number}", x, down - 20, wide, 7, f"{name}{kind}: {size_of(amounts.get(kind) or 0)}")
            x += wide
        seconds = f", {took(amounts['seconds'])}" if amounts.get("seconds") else ""
        inner += _text(PAD, down, f"{name}{size_of(sum(amounts.get(kind) or 0 for kind in HELD))}{seconds}", "soft")
    return box_width, down + PAD, _rect("box", 0, 0, box_width, down + PAD) + inner


def _along(explanation: PlanExplanation, axes: Sequence[str], rank: int) -> Box:
    """Draws the workers along the first axis, each in a frame with those along the other axes."""
    axis, *others = axes
    peers, across = (
        explanation.mesh.peers(rank, axis),
        axis == "pipeline" or (not others and explanation.mesh.pipeline == 1),
    )
    boxes = []
    for peer in peers[: SHOWN[across]]:
        wide, high, inner = _along(explanation, others, peer) if others else _worker(explanation, axis, peer)
        if others:
            inner = _text(PAD, 17, explanation.position_text(peer, axis), "soft") + _at(PAD, PAD + 14, inner)
            wide, high = wide + 2 * PAD, high + 2 * PAD + 14
            inner = _rect("frame", 0, 0, wide, high) + inner
        boxes.append(inner)
    travels = TRAVELS.get(axis) or ("weights" if explanation.plan.zero == 1 else "parameters")
    right, down = (wide + GAP, 0.0) if across else (0.0, high + DROP)
    between = _sideways(travels, wide, high / 2, axis == "pipeline") if across else _below(travels, wide / 2, high)
    shown = "".join(_at(right * n, down * n, box) for n, box in enumerate(boxes))
    shown += "".join(_at(right * n, down * n, between) for n in range(len(boxes) - 1))
    wide, high = wide + right * (len(boxes) - 1), high + down * (len(boxes) - 1)
    if rest := len(peers) - len(boxes):
        shown, high = shown + _text(0, high + 20, f"and {rest} more of the same kind", "soft"), high + 26
    return wide, high, shown


def _sideways(travels: str, x: float, y: float, stages: bool) -> str:
    """Draws arrows to the right neighbour and back; between `stages`, gradients go back."""
    arrows = _arrow(x + 6, y, GAP - 12) + _arrow(x + GAP - 6, y + 10 * stages, 12 - GAP)
    back = _text(x + GAP / 2, y + 24, "gradients", "soft", "middle") * stages
    return arrows + _text(x + GAP / 2, y - 6, travels, "soft", "middle") + back


def _below(travels: str, x: float, y: float) -> str:
    arrows = _arrow(x, y + 6, 0, DROP - 12) + _arrow(x, y + DROP - 6, 0, 12 - DROP)
    return arrows + _text(x + 8, y + DROP / 2 + 4, travels, "soft")


# The class and the name of each kind of action.
LOOKS = {FORWARD: ("k4", "forward"), BACKWARD: ("k5", "backward")}
SPLIT_LOOKS = {
    FORWARD: ("k4", "forward"),
    INPUTS: ("k5", "input gradients"),
    WEIGHTS: ("k3", "weight gradients"),
}


def _schedule(explanation: PlanExplanation) -> Box:
    """Draws which stage computes which micro-batch when; the rest of each row is waiting."""
    simulation, down = explanation.schedule(DRAWN), 46.0
    names = [explanation.position_text(ranks[0], "pipeline") for ranks in explanation.lines]
    named = max(NAMED, CHARACTER * max(map(len, names)) + PAD)
    scale = STEP / simulation.end
    used = SPLIT_LOOKS if explanation.kind[0] in SPLIT else LOOKS
    legend = [(look, name) for look, name in used.values()]
    inner = _key([*legend, ("wait", "waiting")])[2] + _text(0, 34, explanation.waiting, "soft")
    for stage_ranks, row in zip(explanation.lines, simulation.spans, strict=True):
        inner += _text(0, down + 14, explanation.position_text(stage_ranks[0], "pipeline"), "soft")
        inner += _rect("wait", named, down, STEP, 20)
        for action, (begin, end) in row.items():
            x, wide, (look, name) = named + begin * scale, (end - begin) * scale, used[action.kind]
            what = f"{name} of micro-batch {action.micro_batch}, stage {action.stage}"
            inner += _rect(look, x + 0.5, down, max(wide - 1, 0.5), 20, what)
            inner += _text(x + wide / 2, down + 14, str(action.micro_batch), "on", "middle") * (wide > 14)
        if explanation.waited is not None:
            most = [
                took(max(explanation.measured[rank].get(key) or 0.0 for rank in stage_ranks))
                for key in ("seconds", "waited")
            ]
            inner += _text(named + STEP + 10, down + 14, ", waited ".join(most), "soft")
        down += 26
    return named + STEP + 150 * (explanation.waited is not None), down, inner
