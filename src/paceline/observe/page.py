"""Renders the HTML of the report and of the panels of a live page."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.base.console import markup
from paceline.base.journal import Event
from paceline.base.schema import read_file
from paceline.base.text import duration, number, plural, rounded, shares_of, size_of, total
from paceline.observe.charts import Points, bar, bars, colour, line_chart, stacked_bar
from paceline.observe.drawing import draw
from paceline.observe.summary import Rows, Summary, facts
from paceline.observe.team_table import HEAD as HEADINGS
from paceline.observe.team_table import SHOWN as FEW
from paceline.observe.team_table import OneWorker, by_host, describe_team, members

SHOWN = 1 << 19  # bytes of a picture up to which the page embeds it
HOSTS = 32  # the slowest hosts, which are listed at once
TINY = 96  # pixels of width below which a picture is shown enlarged
TIMES = "\u00d7"
STYLE = """
:root{color-scheme:light dark;--paper:#faf8f4;--ink:#1f2328;--soft:#6b6f76;--rule:#e2ddd3;--wash:#f1ede5;
 --accent:#b5432a;--c0:#2f6db0;--c1:#d8892b;--c2:#3b9474;--c3:#8560b5;--c4:#b8506e;--c5:#aeb0b4}
@media (prefers-color-scheme:dark){:root{--paper:#15181c;--ink:#e7e4dd;--soft:#969ba3;--rule:#2e343b; --wash:#1d2126;
--accent:#ef8b6c;--c0:#6ba5e3;--c1:#e7aa52;--c2:#62bf9c;--c3:#b595e0;--c4:#e0859f;--c5:#6c7278}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);overflow-wrap:anywhere;font-variant-numeric:tabular-nums;
 font:16px/1.5 ui-sans-serif,system-ui,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif}
main{max-width:68rem;margin:0 auto;padding:2.5rem 1.5rem 4rem}
.brand{display:flex;align-items:center;gap:.6rem;color:var(--soft);font-size:.875rem;letter-spacing:.02em}
.brand svg{height:.8rem;width:auto}.brand circle{fill:none;stroke:var(--c5);stroke-width:1.6}
.brand circle:first-child{stroke:var(--accent)}
h1{font-size:2rem;line-height:1.2;letter-spacing:-.015em;font-weight:650;margin:.6rem 0 .2rem}
h2{font-size:1.0625rem;font-weight:650;margin:0 0 .8rem}p{margin:.2rem 0}
.why{margin:.35rem 0 .6rem;font-size:.9375rem;line-height:1.4}.gap{margin-top:1.2rem}small{font-size:.84em}
.soft,small{color:var(--soft)}.bad{color:var(--accent)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(8rem,1fr));gap:1.4rem;margin:1.8rem 0 0}
.figures b{display:block;font-size:1.5rem;line-height:1.3;font-weight:600;letter-spacing:-.015em;white-space:nowrap}
.figures span{display:block;color:var(--soft);font-size:.875rem;line-height:1.35}
section{border-top:1px solid var(--rule);padding-top:1.2rem;margin-top:2rem}
.many{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,18.5rem),1fr));gap:1.5rem 1.8rem}
.two{columns:26rem;column-gap:2.5rem;margin-top:2rem}.two section{break-inside:avoid;margin:0 0 2rem}figure{margin:0}
figcaption{display:flex;justify-content:space-between;gap:1rem;font-size:.9375rem;margin-bottom:.3rem}
figcaption b{font-weight:650}svg,img{display:block;max-width:100%}
.tiny{width:12rem;image-rendering:pixelated}.chart{width:100%;height:auto;overflow:visible}
.chart text{font-size:11px;fill:var(--soft)}.grid{stroke:var(--rule)}
.curve{fill:none;stroke:var(--c0);stroke-width:1.8;stroke-linejoin:round;pointer-events:none}
.line0{stroke:var(--c0)}.line1{stroke:var(--c1)}.line2{stroke:var(--c2)}.line3{stroke:var(--c3)}.line4{stroke:var(--c4)}
.line5{stroke:var(--c5)}.dashed{stroke-dasharray:5 3}.key line{stroke-width:4}
.dot{fill:var(--c0);stroke:transparent;stroke-width:9}.faint{fill-opacity:.35}
.dot:hover{fill:var(--accent);fill-opacity:1}.stack{width:100%;height:1.75rem;border-radius:4px;overflow:hidden}
.bar{width:100%;height:.8rem}.part0{fill:var(--c0)}.part1{fill:var(--c1)}.part2{fill:var(--c2)}.part3{fill:var(--c3)}
.part4{fill:var(--c4)}.part5{fill:var(--c5)}.key{width:.7rem;height:.7rem;display:inline-block;margin-right:.45rem}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.4rem;margin:.7rem 0 0;padding:0;list-style:none;font-size:.9375rem}
table{border-collapse:collapse;width:100%;font-size:.9375rem}
td,th{padding:.35rem 1rem .35rem 0;text-align:left;vertical-align:top;font-weight:400}
tr+tr td,tr+tr th{border-top:1px solid var(--rule)}th{color:var(--soft);width:8rem;overflow-wrap:normal}
td.wide{vertical-align:middle}td.num{text-align:right;white-space:nowrap;padding-right:0;width:1%}
pre{background:var(--wash);padding:1rem 1.1rem;border-radius:6px;margin:.4rem 0 1rem;white-space:pre-wrap;
 font:.875rem/1.55 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
details{border-top:1px solid var(--rule)}summary{padding:.35rem 0;cursor:pointer}
summary b{font-weight:600;margin-right:.6rem}details table{margin:0 0 .8rem 1.1rem;width:auto}
details details{margin-left:1.1rem}[aria-current]{background:var(--wash)}
footer{margin-top:2.5rem;color:var(--soft);font-size:.875rem}
@media (max-width:32rem){main{padding:1.4rem 1rem 3rem}h1{font-size:1.6rem}th{width:7rem}
 .figures{grid-template-columns:1fr 1fr}.figures b{font-size:1.35rem}}@media print{section,figure{break-inside:avoid}}
"""
HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
)


def render(summary: Summary) -> str:
    """Renders the report of a run as an HTML page."""
    head = f"{HEAD}<title>{_name(summary)} - Paceline</title><style>{STYLE}</style></head>"
    return f"{head}<body><main>{panels(summary)}</main></body></html>\n"


def _name(summary: Summary) -> str:
    return markup(summary.script.rsplit("/", 1)[-1] or "A run")


@dataclass(frozen=True)
class Chosen:
    """What a reader has chosen in a list of very many workers.

    `opened` are the open entries, by their `data-of`; `find` is a worker's number or a host's name to look for, whose
    entry opens when the reader `seeks` it for the first time.
    """

    opened: Collection[str] = ()
    find: str = ""
    seeks: bool = False


def panels(summary: Summary) -> str:
    """The content of the page, from the journal up to the event named at its end.

    Sections without data are left out.
    """
    before, after = around(summary)
    return before + team_of(summary, None) + after


def around(summary: Summary) -> tuple[str, str]:
    """The content before the team's section, and after it."""
    tables = facts(summary)
    curves = "".join(_curve(*curve) for curve in curves_of(summary) if len(curve[1]) > 1)
    sections = {
        "Results": table(tables["Results"]),
        "Where the time went": _time(summary),
        "Speed": _speed(summary),
        "Bytes moved": "".join(f"<p>{text}</p>" for name, text in tables["Costs"] if name == "bytes"),
        "Plan": table(tables["Plan"]),
        "Decisions": _decisions(summary),
        "What happened": table(tables["What happened"]),
        "Environment": table(tables["Environment"]),
    }
    before = section("Curves", f'<div class="many">{curves}</div>' if curves else "")
    body = section("Workers", "".join(map(draw, summary.drawn)) + table(tables["Workers"]))
    body += f'<div class="two">{"".join(section(*titled) for titled in sections.items())}</div>'
    media = "".join(_medium(summary.folder, event) for event in summary.media)
    body += section("Logged pictures and histograms", f'<div class="many">{media}</div>' if media else "")
    body += section("Logged text", _texts(summary))
    foot = f"<footer>{markup(str(summary.folder))}, up to event {summary.number}</footer>"
    return _header(summary, _name(summary)) + before, body + foot


def team_of(summary: Summary, wanted: Chosen | None) -> str:
    """The section of the workers; of very many, a list of hosts that open.

    Only the entries that are open in `wanted` have content; without `wanted` all of them have.
    """
    team = members(summary)
    few = len(team) <= FEW or len({member.host for member in team}) == 1
    return section("Team", (_workers(team) if few else _hosts(team, wanted)) if team else "")


def _workers(team: Sequence[OneWorker], marked_worker: str = "") -> str:
    rows = [f"<tr>{''.join(f'<th>{markup(cell)}</th>' for cell in HEADINGS)}</tr>"]
    for member in team:
        cells = (*(f"<td>{markup(cell)}</td>" for cell in member.row[:-1]), f"<td>{_lane(member.lane)}</td>")
        mark = ' id="found" aria-current="true" tabindex="-1"' if member.worker == marked_worker else ""
        rows.append(f"<tr{mark}>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _hosts(team: Sequence[OneWorker], wanted: Chosen | None) -> str:
    """The list of hosts, slowest first; those after the first `HOSTS` are in one entry."""
    hosts = by_host(team)
    sought = wanted.find if wanted is not None else ""
    found_index = next(
        (
            host_index
            for host_index, (name, host_members) in enumerate(hosts)
            if sought in (name, *(m.worker for m in host_members))
        ),
        None,
    )
    found_index = found_index if sought else None
    lost = f'<p class="bad">there is no worker or host {markup(sought)}</p>' if sought and found_index is None else ""

    def opens(key: str, title: str, inner: Callable[[], str], has: bool, mark: str = "") -> str:
        opened = wanted is not None and (key in wanted.opened or (wanted.seeks and has))
        content = inner() if opened or wanted is None else ""
        about = f'data-of="{markup(key)}"{" open" * opened}'
        return f"<details {about}><summary{mark}>{title}</summary>{content}</details>"

    def host(host_index: int) -> str:
        name, host_members = hosts[host_index]
        about = f"<b>{markup(name or 'an unknown host')}</b> {markup(describe_team(host_members))}"
        mark = ' id="found" aria-current="true"' if host_index == found_index and sought == name else ""
        return opens(f"host {name}", about, lambda: _workers(host_members, sought), host_index == found_index, mark)

    rest = range(HOSTS, len(hosts))
    more = opens(
        "more", f"and {plural(len(rest), 'faster host')}", lambda: "".join(map(host, rest)), found_index in rest
    )
    total_line = f'<p class="soft">on {len(hosts):,} hosts {markup(describe_team(team))}</p>'
    return total_line + lost + "".join(map(host, range(min(HOSTS, len(hosts))))) + (more if rest else "")


def _lane(spent: dict[str, float]) -> str:
    """A worker's bar of seconds by part, in the same order on all workers."""
    total_seconds = sum(spent.values())
    return stacked_bar([(part, seconds / total_seconds) for part, seconds in spent.items()]) if total_seconds else ""


def section(title: str, inner: str) -> str:
    """A titled section of a page; empty without content."""
    return f"<section><h2>{title}</h2>{inner}</section>" if inner else ""


def table(rows: Iterable[tuple[str, str]]) -> str:
    """An HTML table of (name, text) rows; empty without rows."""
    inner = "".join(f"<tr><th>{markup(name)}</th><td>{markup(text)}</td></tr>" for name, text in rows)
    return f"<table>{inner}</table>" if inner else ""


def _bars(rows: list[tuple[str, float, str]]) -> str:
    """Bars of (name, value, text) rows on one scale; the first row is emphasized."""
    most = max(value for _, value, _ in rows) or 1
    cells = (
        f'<tr><th>{markup(name)}</th><td class="wide">{bar(value / most, strong=row_index == 0)}</td>'
        f'<td class="num">{markup(text)}</td></tr>'
        for row_index, (name, value, text) in enumerate(rows)
    )
    return f"<table>{''.join(cells)}</table>"


def _header(summary: Summary, name: str) -> str:
    speed, gain, steps = summary.samples_per_second, summary.speedup, summary.steps_done
    first, last = summary.workers, len(summary.formed[-1].get("workers") or []) if summary.formed else summary.workers
    figures: Rows = [
        *((number(b), f"loss {trainer}".strip() + f", from {number(a)}") for trainer, (a, b) in summary.losses.items()),
        (number(rounded(speed)) if speed else "", "samples/s"),
        (f"{gain:.2f}{TIMES}" if gain else "", f"as fast as {plural(summary.compare.get('workers') or 1, 'worker')}"),
        (f"{steps:,}" if steps else "", f"steps, {summary.samples:,} samples"),
        (duration(summary.wall_seconds) if steps else "", "so far" if summary.running else "from start to end"),
        (
            str(last) if summary.start else "",
            plural(last, "worker").partition(" ")[2] + f", from {first}" * (last != first),
        ),
    ]
    shown = "".join(f"<div><b>{markup(value)}</b><span>{markup(text)}</span></div>" for value, text in figures if value)
    riders = min(summary.workers, 12)  # one wheel for each worker, the first one coloured
    wheels = "".join(f'<circle cx="{7 + 15 * wheel_index}" cy="7" r="5.8"/>' for wheel_index in range(riders))
    mark = f'<svg viewBox="0 0 {15 * riders} 14" aria-hidden="true">{wheels}</svg>'
    ending = markup(summary.ending[0].upper() + summary.ending[1:])
    state = f'<p class="{"soft" if summary.finished or summary.running else "bad"}">{ending}</p>'
    top = f'<div class="brand">{mark}<span>paceline</span></div><h1>{name}</h1>{state}'
    return f'<header>{top}<div class="figures">{shown}</div></header>'


def curves_of(summary: Summary) -> Iterator[tuple[str, Points, str]]:
    """Yields every loss, speed, metric, evaluated and logged value as (name, points, unit of the x axis)."""
    for trainer, records in summary.steps.items():
        yield f"loss {trainer}", _points(records, "loss"), "step"
        total_seconds = total(records, "seconds")
        unit, unit_name = (3600, "h") if total_seconds > 10800 else (60, "min") if total_seconds > 180 else (1, "s")
        spent, rates = 0.0, []
        for record in records:
            spent += record.get("seconds") or 0.0
            if record.get("seconds") and record.get("samples"):
                rates.append((spent / unit, record["samples"] / record["seconds"]))
        yield f"samples/s {trainer}", rates, unit_name
        for metric in dict.fromkeys(name for record in records for name in record.get("metrics") or {}):
            inner = [{**(record.get("metrics") or {}), "step": record.get("step")} for record in records]
            yield f"{metric} {trainer}", _points(inner, metric), "step"
        for key, name in (("grad_norm", "gradient norm"), ("lr", "learning rate")):
            points = _points(records, key)
            if len({value for _, value in points}) > 1:
                yield f"{name} {trainer}", points, "step"
    for name, values in summary.series.items():
        yield name, values, "step"


def _points(records: list[Event], key: str) -> list[tuple[float, float]]:
    pairs = ((record.get("step"), record.get(key)) for record in records)
    return [(float(step), float(value)) for step, value in pairs if step is not None and value is not None]


def _curve(name: str, points: Points, x_name: str) -> str:
    name, last = name.strip(), number(points[-1][1]) if x_name == "step" else ""
    caption = f"<figcaption><b>{markup(name)}</b><span>{last}</span></figcaption>"
    return f"<figure>{caption}{line_chart(name, points, x_name, from_zero=x_name != 'step')}</figure>"


def _speed(summary: Summary) -> str:
    if not summary.speedup or not summary.samples_per_second:
        return ""
    compared_workers = int(summary.compare.get("workers") or 1)
    speeds = ((summary.workers, summary.samples_per_second), (compared_workers, summary.compare["samples_per_second"]))
    return _bars([(plural(count, "worker"), speed, f"{speed:,.0f} samples/s") for count, speed in speeds])


def _time(summary: Summary) -> str:
    shares = shares_of(summary.time)
    items = (
        f'<li><svg class="key" aria-hidden="true"><rect class="{colour(name)}" width="100%" height="100%"/>'
        f"</svg>{markup(name)} {share:.1%} <small>{duration(summary.time[name])}</small></li>"
        for name, share in shares
    )
    rows = [(f"worker {name}", wait, duration(wait)) for wait, name in summary.waits]
    waited = f'<p class="soft gap">How long the others waited for</p>{_bars(rows)}' if rows else ""
    return f'{stacked_bar(shares)}<ul class="legend">{"".join(items)}</ul>{waited}' if shares else ""


def _decisions(summary: Summary) -> str:
    reasons = ((markup(str(event.get("what"))), markup(str(event.get("why")))) for event in summary.decisions)
    return "".join(f'<p class="why">{what}<br><small>because {why}</small></p>' for what, why in reasons)


def _texts(summary: Summary) -> str:
    return "".join(
        f'<p class="soft">{markup(name)}, step {step}</p><pre>{markup(text)}</pre>'
        for name, (step, text) in summary.texts.items()
    )


def _medium(folder: Path, event: Event) -> str:
    """The figure of a logged picture or histogram."""
    name, step = str(event.get("name")), event.get("step")
    if event.get("kind") == "histogram":
        others = f", {event['others']} not finite" if event.get("others") else ""
        about = f"step {step}, mean {number(event.get('mean'))}, deviation {number(event.get('deviation'))}{others}"
        edges, counts = event.get("edges", ()), event.get("counts", ())
        inner = bars(name, edges, counts) if len(edges) == len(counts) + 1 > 1 else ""
    else:
        width, file = event.get("width", 0), str(event.get("file"))
        about = f"step {step}, {width} x {event.get('height', 0)}"
        try:
            inner = _picture(name, folder / file, width < TINY)
        except (OSError, ValueError):  # ValueError: the name has a NUL
            inner = f"<p>{markup(file)} is not there any more</p>"
    return f'<figure><figcaption><b>{markup(name)}</b></figcaption><p class="soft">{markup(about)}</p>{inner}</figure>'


def _picture(name: str, path: Path, tiny: bool) -> str:
    size = path.stat().st_size
    if size > SHOWN:
        return f"<p>{size_of(size)}, in {markup(str(path))}</p>"
    source = f"data:image/png;base64,{base64.b64encode(read_file(path)).decode()}"
    style = ' class="tiny"' if tiny else ""
    return f'<img{style} alt="{markup(name)}" src="{source}">'
