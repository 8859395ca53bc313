"""Renders the HTML of the report and of the panels of a live page."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.base.console import markup
from paceline.base.journal import Event
from paceline.base.schema import read_file
from paceline.base.text import duration, number, plural, shares_of, size_of, total
from paceline.observe.charts import Points, bar, bars, colour, line_chart, stacked_bar
from paceline.observe.drawing import draw
from paceline.observe.key_figures import WHOLE_RUN, StepCount, key_figures, speed, started_at, step_count
from paceline.observe.summary import Summary, facts
from paceline.observe.team_table import HEAD as HEADINGS
from paceline.observe.team_table import NUMERIC, OneWorker, by_host, describe_team, members, span_of
from paceline.observe.team_table import SHOWN as FEW

SHOWN = 1 << 19  # bytes of a picture up to which the page embeds it
HOSTS = 32  # the slowest hosts, which are listed at once
TINY = 96  # pixels of width below which a picture is shown enlarged
CLASS_NUMBER = ' class="num"'
TITLES = {"compute": "compute<br>per step", "waited for": "others waited<br>for it, per step"}  # of columns
STYLE = """
:root{color-scheme:light dark;--paper:#f7f7f5;--card:#fff;--ink:#1b1f24;--soft:#5b626b;--rule:#e3e3df;--wash:#f0f0ec;
 --accent:#b5432a;--go:#1f63a8;--good:#1d7348;--warn:#8a5a00;--bad:#b3261e;
 --c0:#2f6db0;--c1:#d8892b;--c2:#3b9474;--c3:#8560b5;--c4:#b8506e;--c5:#a9adb3}
@media (prefers-color-scheme:dark){:root{--paper:#121518;--card:#1a1e23;--ink:#e8e8e4;--soft:#a3aab3;--rule:#2d333a;
 --wash:#22272d;--accent:#ef8b6c;--go:#7db4ee;--good:#6fcf9b;--warn:#e7b75a;--bad:#ff8f85;
 --c0:#6ba5e3;--c1:#e7aa52;--c2:#62bf9c;--c3:#b595e0;--c4:#e0859f;--c5:#78808a}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);overflow-wrap:anywhere;font-variant-numeric:tabular-nums;
 font:15px/1.5 ui-sans-serif,system-ui,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif}
main{max-width:70rem;margin:0 auto;padding:2rem 1.5rem 4rem}
p{margin:.25rem 0}small{font-size:.867em}.soft,small{color:var(--soft)}.bad{color:var(--bad)}
.brand{display:flex;align-items:center;gap:.6rem;color:var(--soft);font-size:.867rem;letter-spacing:.02em}
.brand svg{height:.8rem;width:auto}.brand circle{fill:none;stroke:var(--c5);stroke-width:1.6}
.brand circle:first-child{stroke:var(--accent)}
.title{display:flex;flex-wrap:wrap;align-items:center;gap:.4rem .9rem;margin:.7rem 0 .3rem}
h1{font-size:1.867rem;line-height:1.2;letter-spacing:-.015em;font-weight:650;margin:0}
.badge{display:inline-flex;align-items:center;gap:.45rem;border:1px solid;border-radius:2rem;padding:.1rem .75rem;
 font-size:.867rem;font-weight:600;color:var(--soft);white-space:nowrap}
.badge::before{content:"";width:.5rem;height:.5rem;border-radius:50%;background:currentColor}
.badge.running{color:var(--go)}.badge.finished{color:var(--good)}.badge.stopped,.badge.unknown{color:var(--warn)}
.badge.failed{color:var(--bad)}
.progress{margin:1.3rem 0 0}.progress p{display:flex;flex-wrap:wrap;gap:0 1.4rem;margin:0 0 .4rem}
.progress b{font-weight:600}.track{width:100%;height:.5rem;border-radius:.25rem;background:var(--rule)}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(11rem,1fr));gap:.75rem;margin:1.3rem 0 0}
.figures div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:.7rem .9rem .75rem}
.figures dt,.figures dd{margin:0;color:var(--soft);font-size:.867rem;line-height:1.35}
.figures dt::first-letter,.facts th::first-letter,.team thead th::first-letter{text-transform:uppercase}
.figures dd:nth-child(2){color:var(--ink);font-size:1.467rem;line-height:1.35;font-weight:600;letter-spacing:-.01em}
section{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:1.1rem 1.25rem 1.25rem;
 margin-top:1rem;min-width:0}
h2{font-size:1.067rem;font-weight:650;margin:0 0 .7rem}h2+.soft{margin-top:-.4rem;margin-bottom:.7rem}
h3{font-size:.933rem;font-weight:600;margin:1.2rem 0 .4rem}
.many{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,18.5rem),1fr));gap:1.6rem 1.8rem}
.two{columns:26rem;column-gap:1rem;margin-top:1rem}.two section{break-inside:avoid;margin:0 0 1rem}figure{margin:0}
figcaption{display:flex;justify-content:space-between;gap:1rem;font-size:.933rem;margin-bottom:.3rem}
figcaption b{font-weight:600}svg,img{display:block;max-width:100%}
.tiny{width:12rem;image-rendering:pixelated}.chart{width:100%;height:auto;overflow:visible}
.chart text{font-size:11px;fill:var(--soft)}.grid{stroke:var(--rule)}
.curve{fill:none;stroke:var(--c0);stroke-width:1.8;stroke-linejoin:round;pointer-events:none}
.line0{stroke:var(--c0)}.line1{stroke:var(--c1)}.line2{stroke:var(--c2)}.line3{stroke:var(--c3)}.line4{stroke:var(--c4)}
.line5{stroke:var(--c5)}.dashed{stroke-dasharray:5 3}.key line{stroke-width:4}
.dot{fill:var(--c0);stroke:transparent;stroke-width:9}.faint{fill-opacity:.5}
.dot:hover{fill:var(--accent);fill-opacity:1}.stack{width:100%;height:1.5rem;border-radius:4px;overflow:hidden}
.bar{width:100%;height:.8rem}.part0{fill:var(--c0)}.part1{fill:var(--c1)}.part2{fill:var(--c2)}.part3{fill:var(--c3)}
.part4{fill:var(--c4)}.part5{fill:var(--c5)}
.key{width:.75rem;height:.75rem;display:inline-block;margin-right:.45rem;border-radius:2px;vertical-align:-.05em}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.4rem;margin:.7rem 0 0;padding:0;list-style:none;font-size:.867rem}
.scroll{overflow-x:auto;padding-bottom:.4rem;overscroll-behavior-x:contain}.scroll>.plan{max-width:none;margin-bottom:1rem}
.scroll>.plan .paper{fill:none}
table{border-collapse:collapse;width:100%;font-size:.933rem}
td,th{padding:.4rem 1rem .4rem 0;text-align:left;vertical-align:top;font-weight:400}
tr+tr td,tr+tr th,tbody td,tbody th{border-top:1px solid var(--rule)}
th{color:var(--soft);width:8rem;overflow-wrap:normal}
td.wide{vertical-align:middle}td.num{text-align:right;white-space:nowrap;padding-right:0;width:1%}
.team{overflow-wrap:normal;white-space:nowrap}.team td,.team th{padding-right:1.5rem;vertical-align:middle;width:auto}
.team thead th{font-size:.867rem;vertical-align:bottom;line-height:1.3}.team tbody th{color:var(--ink)}
.team .num{text-align:right;padding-right:1.5rem;width:auto}
.team td:last-child,.team th:last-child{padding-right:0;min-width:9rem;width:30%}
.team .stack{height:1rem;border-radius:3px}
.state::before{content:"";display:inline-block;width:.5rem;height:.5rem;border-radius:50%;margin-right:.5rem;
 background:var(--c5)}.state.up::before,.state.spare::before{background:var(--good)}.state.lost::before{background:var(--bad)}
.why{margin:.35rem 0 .6rem;font-size:.933rem;line-height:1.4}
pre{background:var(--wash);padding:.9rem 1rem;border-radius:6px;margin:.4rem 0 1rem;white-space:pre-wrap;
 font:.867rem/1.55 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
details{border-top:1px solid var(--rule)}summary{padding:.4rem 0;cursor:pointer}
summary b{font-weight:600;margin-right:.6rem}details .scroll{margin:0 0 .8rem 1.1rem}
details details{margin-left:1.1rem}[aria-current]{background:var(--wash)}
a{color:var(--go)}:focus-visible{outline:2px solid var(--go);outline-offset:2px;border-radius:3px}
footer{margin-top:1.5rem;color:var(--soft);font-size:.867rem}
@media (max-width:34rem){main{padding:1.2rem 1rem 2.5rem}h1{font-size:1.533rem}th{width:6.5rem}
 section{padding:.9rem 1rem 1rem}.figures{grid-template-columns:1fr 1fr;gap:.6rem}
 .figures div{padding:.6rem .7rem}.figures dd:nth-child(2){font-size:1.267rem}}
@media print{section,figure{break-inside:avoid}}
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
    return markup(summary.name or "Unnamed run")


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
    """The content of the page before the section of the workers, and after it."""
    tables = facts(summary)
    curves = "".join(_curve(*curve) for curve in curves_of(summary) if len(curve[1]) > 1)
    sections = {
        "Results": table(tables["Results"]),
        "Where the time went": _time(summary),
        "Speed": _speed(summary),
        "Communication and memory": table(row for row in tables["Costs"] if row[0] not in ("time", "waited for")),
        "Decisions": _decisions(summary),
        "History": table(tables["What happened"]),
        "Environment": table(tables["Environment"]),
    }
    legend = '<p class="soft">Dots are measured values. Lines through 20 or more noisy dots are smoothed.</p>'
    before = section("Curves", f'{legend}<div class="many">{curves}</div>' if curves else "")
    drawings = "".join(f'<div class="scroll">{draw(explanation)}</div>' for explanation in summary.drawn)
    body = section("Plan", drawings + table([*tables["Plan"], *tables["Workers"]]))
    body += f'<div class="two">{"".join(section(*titled) for titled in sections.items())}</div>'
    media = "".join(_medium(summary.folder, event) for event in summary.media)
    body += section("Logged pictures and histograms", f'<div class="many">{media}</div>' if media else "")
    body += section("Logged text", _texts(summary))
    foot = f"<footer>Run folder {markup(str(summary.folder))}, journal up to event {summary.number:,}</footer>"
    return _header(summary, _name(summary)) + before, body + foot


def team_of(summary: Summary, wanted: Chosen | None) -> str:
    """The section of the workers; for a large team on several hosts, a list of hosts that open.

    Only the entries that are open in `wanted` have content; without `wanted` all of them have.
    """
    team = members(summary)
    few = len(team) <= FEW or len({member.host for member in team}) == 1
    span = f'<p class="soft">{span_of(summary).capitalize()} of training</p>' if summary.steps else ""
    parts = dict.fromkeys(part for member in team for part in member.lane)
    legend = f'<ul class="legend">{"".join(_key(part, markup(part)) for part in parts)}</ul>' if parts else ""
    return section("Workers", span + (_workers(team) if few else _hosts(team, wanted)) + legend if team else "")


def _workers(team: Sequence[OneWorker], marked_worker: str = "") -> str:
    """The table of workers, in a box of its own that scrolls if the page is narrow."""
    last = len(HEADINGS) - 1
    columns = [index for index in range(2, last) if any(member.row[index] for member in team)]  # not empty
    kinds = [CLASS_NUMBER * (heading in NUMERIC) for heading in HEADINGS]
    cells = (
        f'<th scope="col"{kinds[index]}>{TITLES.get(HEADINGS[index], HEADINGS[index])}</th>'
        for index in (0, 1, *columns, last)
    )
    rows = []
    for member in team:
        worker, state, *_ = texts = [markup(cell) for cell in member.row]
        inner = f'<th scope="row">{worker}</th><td><span class="state {state}">{state}</span></td>'
        inner += "".join(f"<td{kinds[index]}>{texts[index]}</td>" for index in columns)
        mark = ' id="found" aria-current="true" tabindex="-1"' if member.worker == marked_worker else ""
        rows.append(f"<tr{mark}>{inner}<td>{_lane(member.lane)}</td></tr>")
    head = f"<thead><tr>{''.join(cells)}</tr></thead>"
    return f'<div class="scroll"><table class="team">{head}<tbody>{"".join(rows)}</tbody></table></div>'


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
    missing = f'<p class="bad">This run has no worker or host {markup(sought)}.</p>'
    missing = missing if sought and found_index is None else ""

    def opens(key: str, title: str, inner: Callable[[], str], has: bool, mark: str = "") -> str:
        opened = wanted is not None and (key in wanted.opened or (wanted.seeks and has))
        content = inner() if opened or wanted is None else ""
        about = f'data-of="{markup(key)}"{" open" * opened}'
        return f"<details {about}><summary{mark}>{title}</summary>{content}</details>"

    def host(host_index: int) -> str:
        name, host_members = hosts[host_index]
        about = f"<b>{markup(name or 'unknown host')}</b> {markup(describe_team(host_members))}"
        mark = ' id="found" aria-current="true"' if host_index == found_index and sought == name else ""
        return opens(f"host {name}", about, lambda: _workers(host_members, sought), host_index == found_index, mark)

    rest = range(HOSTS, len(hosts))
    more = opens("more", f"{plural(len(rest), 'faster host')}", lambda: "".join(map(host, rest)), found_index in rest)
    total_line = f"<p>{plural(len(hosts), 'host')}: {markup(describe_team(team))}</p>"
    return total_line + missing + "".join(map(host, range(min(HOSTS, len(hosts))))) + (more if rest else "")


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
    return f'<table class="facts">{inner}</table>' if inner else ""


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
    """The head of the page: name and state of the run, its progress, and the key figures."""
    count = step_count(summary)
    kind, state, reason = _state(summary)
    badge = f'<span class="badge {kind}" data-state="{kind}">{state}</span>'
    riders = min(summary.workers, 12)  # one wheel for each worker, the first one coloured
    wheels = "".join(f'<circle cx="{7 + 15 * wheel_index}" cy="7" r="5.8"/>' for wheel_index in range(riders))
    mark = f'<svg viewBox="0 0 {15 * riders} 14" aria-hidden="true">{wheels}</svg>'
    top = f'<div class="brand">{mark}<span>paceline</span></div><div class="title"><h1>{name}</h1>{badge}</div>'
    about = f"<p>{markup(reason)}</p>" if reason else ""
    line = ", ".join(filter(None, _about(summary)))
    about += f'<p class="soft">{markup(line)}</p>' if line else ""
    shown = "".join(
        f"<div><dt>{markup(figure.name)}</dt><dd>{markup(figure.value)}</dd><dd>{markup(figure.span)}</dd></div>"
        for figure in key_figures(summary)
    )
    figures = f'<dl class="figures">{shown}</dl>' if shown else ""
    return f"<header>{top}{about}{_progress(count)}{figures}</header>"


def _state(summary: Summary) -> tuple[str, str, str]:
    """The style of the state's badge, its text, and the reason in a sentence, which may be empty."""
    if summary.running:
        return "running", "Running", ""
    event = summary.outcome
    if event is None:
        known = "The journal records no end of this run: it was killed or is still running."
        return "unknown", "No end recorded", known if summary.start else ""
    if event["event"] == "failed":
        worker = f"Worker {event['worker']}: " if event.get("worker") is not None else ""
        return "failed", "Failed", f"{worker}{event.get('cause')}"
    why = f"{summary.ending[0].upper()}{summary.ending[1:]}" if event.get("why") else ""
    return ("finished", "Finished", "") if summary.finished else ("stopped", "Stopped", why)


def _about(summary: Summary) -> Iterator[str]:
    """The size of the run, its plan, and when it was started."""
    if not summary.start:
        return
    first, last = summary.workers, len(summary.formed[-1].get("workers") or []) if summary.formed else summary.workers
    hosts = {*summary.hosts.values(), *(str(event["host"]) for event in summary.loaded)} - {""}
    yield plural(last, "worker") + (f" ({first} at the start)" if last != first else "")
    yield plural(len(summary.ready_spares), "spare") if summary.spares and summary.outcome is None else ""
    yield plural(len(hosts), "host") if hosts else ""
    yield f"plan {summary.start['plan']}" if summary.start.get("plan") else ""
    yield f"device {summary.start['device']}" if summary.start.get("device") else ""
    yield f"started {started_at(summary)}" if summary.attempts else ""


def _progress(count: StepCount) -> str:
    """The line ``step N of M``, the percentage and the time left, over a bar."""
    if not count.done:
        return ""
    parts = [f"<b>step {count.done:,}{f' of {count.total:,}' if count.total else ''}</b>"]
    if count.fraction is not None:
        parts.append(f"<span data-percent>{count.fraction:.1%}</span>")
    if count.time_left:
        parts.append(f"<span>about {count.time_left} left</span>")
    track = ""
    if count.fraction is not None:
        track = (
            f'<svg class="track" role="img" aria-label="{count.fraction:.1%} of all steps are done">'
            f'<rect class="part0" width="{count.fraction:.2%}" height="100%"/></svg>'
        )
    return f'<div class="progress"><p>{"".join(parts)}</p>{track}</div>'


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
    about = f'<p class="soft">{WHOLE_RUN[0].upper()}{WHOLE_RUN[1:]}</p>'
    return about + _bars([(plural(count, "worker"), rate, f"{speed(rate)} samples/s") for count, rate in speeds])


def _key(part: str, text: str) -> str:
    """An entry of a legend: the colour of a part of the time, and a text."""
    mark = f'<svg class="key" aria-hidden="true"><rect class="{colour(part)}" width="100%" height="100%"/></svg>'
    return f"<li>{mark}{text}</li>"


def _time(summary: Summary) -> str:
    shares = shares_of(summary.time)
    items = "".join(
        _key(name, f"{markup(name)} {share:.1%} <small>{duration(summary.time[name])}</small>")
        for name, share in shares
    )
    about = f'<p class="soft">All steps of worker 0: {duration(sum(summary.time.values()))}</p>'
    rows = [(f"worker {name}", wait, duration(wait)) for wait, name in summary.waits]
    waited = f"<h3>Time that the other workers waited for each worker</h3>{_bars(rows)}" if rows else ""
    return f'{about}{stacked_bar(shares)}<ul class="legend">{items}</ul>{waited}' if shares else ""


def _decisions(summary: Summary) -> str:
    reasons = ((markup(str(event.get("what"))), markup(str(event.get("why")))) for event in summary.decisions)
    return "".join(f'<p class="why">{what}<br><small>{why}</small></p>' for what, why in reasons)


def _texts(summary: Summary) -> str:
    return "".join(
        f'<p class="soft">{markup(name)}, step {step}</p><pre>{markup(text)}</pre>'
        for name, (step, text) in summary.texts.items()
    )


def _medium(folder: Path, event: Event) -> str:
    """The figure of a logged picture or histogram."""
    name, step = str(event.get("name")), event.get("step")
    if event.get("kind") == "histogram":
        others = f", {event['others']} values not finite" if event.get("others") else ""
        mean, deviation = number(event.get("mean")), number(event.get("deviation"))
        about = f"step {step}, mean {mean}, standard deviation {deviation}{others}"
        edges, counts = event.get("edges", ()), event.get("counts", ())
        inner = bars(name, edges, counts) if len(edges) == len(counts) + 1 > 1 else ""
    else:
        width, file = event.get("width", 0), str(event.get("file"))
        about = f"step {step}, {width} x {event.get('height', 0)}"
        try:
            inner = _picture(name, folder / file, width < TINY)
        except (OSError, ValueError):  # ValueError: the name has a NUL
            inner = f"<p>{markup(file)} no longer exists</p>"
    return f'<figure><figcaption><b>{markup(name)}</b></figcaption><p class="soft">{markup(about)}</p>{inner}</figure>'


def _picture(name: str, path: Path, tiny: bool) -> str:
    size = path.stat().st_size
    if size > SHOWN:
        return f"<p>Too large to show here ({size_of(size)}): {markup(str(path))}</p>"
    source = f"data:image/png;base64,{base64.b64encode(read_file(path)).decode()}"
    style = ' class="tiny"' if tiny else ""
    return f'<img{style} alt="{markup(name)}" src="{source}">'
