"""Draws charts as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.base.console import markup
from paceline.base.text import number

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 360, 206
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 8, 38  # room for the labels of ticks and of the x axis
X_NAMES = {"s": "training time (s)", "min": "training time (min)", "h": "training time (h)"}
SHOWN = 240  # points in a chart, at most
PARTS = {"compute": 0, "reduce": 1, "data": 2, "update": 3, "other": 5}
PARTS |= {"load and compute": 0, "reduce, wait and others": 1}  # for workers with only a known compute time
# The accounts of a run's wall clock.
PARTS |= {"steps": 0, "evaluating": 0, "script": 0, "saving": 2, "detection": 3, "redone": 4, "paused": 5, "waiting": 5}
PARTS |= {"starting": 1, "forming": 1, "hand-over": 1}
COLOURS = 6
MOST = 240  # points of a smoothed curve
SMOOTH_FROM = 20  # fewer points are not smoothed


def ticks(low: float, high: float, count: int = 4, integers: bool = False) -> list[float]:
    """About `count` round numbers in [low, high], 1, 2 or 5 times a power of ten apart.

    With `integers` they are whole numbers. At least two from a `count` of 4 on, unless the range is too narrow.
    """
    span = high - low
    rough = span / count
    if not math.isfinite(span) or span <= max(abs(low), abs(high)) * 1e-9 or not rough:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power * factor for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    if integers:
        step = max(1.0, round(step))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [multiple * step for multiple in range(first, last + 1)] or [low]


def label(value: float, step: float) -> str:
    """A tick's label, with enough digits to distinguish it from a neighbour `step` away."""
    if value == 0:
        return "0"
    if abs(value) >= 1e12 or step < 1e-4:
        return f"{value:.3g}"
    if step >= 1e5 and abs(value) >= 1e6:
        return f"{value / 1e6:,.6g}M"
    if step >= 1000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def smooth(points: Points) -> list[tuple[float, float]]:
    """A local linear fit (LOWESS) over an eighth of the points, at least nine.

    At both ends the window is moved instead of cut, so that it has as many points there, and a line is fitted instead
    of a mean taken: the curve neither lags behind a slope nor collapses onto the last point. Returns at most `MOST`
    points: of more, the means of consecutive ones are smoothed.
    """
    size = -(-len(points) // MOST)
    groups = [points[at : at + size] for at in range(0, len(points), size or 1)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    wide = 2 * max(4, len(means) // 16) + 1
    starts = [max(0, min(index - wide // 2, len(means) - wide)) for index in range(len(means))]
    return [(x, _fitted(means[start : start + wide], x)) for start, (x, _) in zip(starts, means, strict=True)]


def _fitted(window: Points, at: float) -> float:
    """The value at `at` of a line through these points, the nearer ones with more weight."""
    reach = max(abs(x - at) for x, _ in window)
    weights = [(1 - (abs(x - at) / (1.1 * reach)) ** 3) ** 3 if reach > 0 else 1.0 for x, _ in window]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, window, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, window, strict=True)) / total
    variance = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, window, strict=True))
    if variance <= 1e-12 * total * reach**2:
        return mean_y
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, window, strict=True)) / variance
    return mean_y + slope * (at - mean_x)


def thin(points: Points, most: int = SHOWN) -> list[tuple[float, float]]:
    """Keeps at most `most` points: the lowest and the highest of each interval, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) * 2 / most)
    kept: set[tuple[float, float]] = set()
    for begin in range(0, len(points), size):
        stretch = sorted(points[begin : begin + size], key=lambda point: point[1])
        kept |= {stretch[0], stretch[-1]}
    return sorted(kept)


def _frame(
    described: str, points: Points, x_name: str, from_zero: bool = False, apart: bool = False
) -> tuple[list[str], Callable[[float, float], tuple[float, float]], float]:
    """Draws axes for these points; returns their SVG, a function from values to pixels, and the range of values.

    The x axis begins at zero if that is near, unless `apart`.
    """
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = (min(0.0, *ys) if from_zero else min(ys)), max(ys)
    pad = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    low, high = (low if from_zero else low - pad), high + pad
    left, right = min(xs), max(xs)
    left = 0.0 if 0 < left < right / 2 and not apart else left
    right = right if right > left else left + 1

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{markup(described)}">']
    rows = ticks(low, high)
    for value in rows:
        _, y = at(left, value)
        text = label(value, rows[1] - rows[0] if len(rows) > 1 else 0.1)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    about = markup(X_NAMES.get(x_name, x_name))
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{about}</text>')
    columns = ticks(left, max(xs), 3, integers=x_name == "step")
    for value in columns:
        x, _ = at(value, low)
        text = label(value, columns[1] - columns[0] if len(columns) > 1 else 1)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{text}</text>')
    return parts, at, high - low


def _drawn(points: Points, at: Callable[[float, float], tuple[float, float]], height: float) -> str:
    """The points of an SVG line through these, smoothed if they are many and noisy."""
    ys = [y for _, y in points]
    bends = sum(abs(a - 2 * b + c) for a, b, c in zip(ys, ys[1:], ys[2:], strict=False))
    noisy = len(points) >= SMOOTH_FROM and bends > 0.01 * height * len(ys)
    curve = smooth(points) if noisy else thin(points, 2 * SHOWN)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))


def line_chart(name: str, points: Points, x_name: str = "step", from_zero: bool = False) -> str:
    """A chart of one curve: its points, and a line through them, smoothed if they are many and noisy."""
    ys = [y for _, y in points]
    described = f"{name}: {number(ys[0])} to {number(ys[-1])} over {len(points)} points"
    parts, at, height = _frame(described, points, x_name, from_zero)
    many = len(points) >= SMOOTH_FROM
    for x, y in thin(points):
        cx, cy = at(x, y)
        title = f"<title>{markup(x_name)} {number(round(x, 2))}: {number(y)}</title>"
        radius = 1.4 if many else 2.6
        kind = "dot faint" if many else "dot"
        parts.append(f'<circle class="{kind}" cx="{cx:.1f}" cy="{cy:.1f}" r="{radius}">{title}</circle>')
    parts.append(f'<polyline class="curve" points="{_drawn(points, at, height)}"/></svg>')
    return "".join(parts)


def overlay(name: str, curves: Sequence[tuple[int, Points]], x_name: str = "step") -> str:
    """A chart of several curves, each with the index of its colour."""
    described = f"{name}: " + ", ".join(f"{number(points[0][1])} to {number(points[-1][1])}" for _, points in curves)
    parts, at, height = _frame(described, [point for _, points in curves for point in points], x_name)
    parts += [f'<polyline class="curve {stroke(n)}" points="{_drawn(points, at, height)}"/>' for n, points in curves]
    return "".join([*parts, "</svg>"])


def stroke(curve_index: int) -> str:
    """The style classes of a curve: its colour, and dashes from the index on at which colours repeat."""
    return f"line{curve_index % COLOURS}" + (" dashed" if curve_index >= COLOURS else "")


def stacked_bar(parts: Sequence[tuple[str, float]]) -> str:
    """A bar of named fractions side by side, each in the colour of its name."""
    drawn, begin = [], 0.0
    for name, share in parts:
        title = f"<title>{markup(name)}: {share:.1%}</title>"
        box = f'x="{begin:.3%}" width="{share:.3%}" height="100%"'
        drawn.append(f'<rect class="{colour(name)}" {box}>{title}</rect>')
        begin += share
    described = ", ".join(f"{name} {share:.0%}" for name, share in parts)
    return f'<svg class="stack" role="img" aria-label="{markup(described)}">{"".join(drawn)}</svg>'


def bars(name: str, edges: Sequence[float], counts: Sequence[int]) -> str:
    """Draws a histogram; `edges` has one entry more than `counts`."""
    described = f"{name}: {sum(counts):,} values from {number(edges[0])} to {number(edges[-1])}"
    corners = [(edges[0], 0.0), *zip(edges[1:], map(float, counts), strict=True)]
    parts, at, _ = _frame(described, corners, "value", from_zero=True, apart=True)
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        (x, y), (end, floor) = at(left, count), at(right, 0.0)
        title = f"<title>{number(left)} to {number(right)}: {count:,}</title>"
        box = f'x="{x:.1f}" y="{y:.1f}" width="{end - x:.1f}" height="{floor - y:.1f}"'
        parts.append(f'<rect class="part0" {box}>{title}</rect>')
    return "".join([*parts, "</svg>"])


def colour(name: str) -> str:
    """The style class of a part of the time; the same in every run."""
    return f"part{PARTS.get(name, 4)}"


def bar(fraction: float, strong: bool = True) -> str:
    """Draws one horizontal bar over `fraction` of the available width."""
    kind = "part0" if strong else "part5"
    rect = f'<rect class="{kind}" rx="2" width="{fraction:.2%}" height="100%"/>'
    return f'<svg class="bar" aria-hidden="true">{rect}</svg>'
