"""The page and the trace of a simulation."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.console import markup
from paceline.base.text import number, plural, shares_of
from paceline.observe.charts import colour, overlay, stacked_bar, stroke
from paceline.observe.page import HEAD, STYLE, section, table
from paceline.observe.team_table import a_step
from paceline.planner.days import DAY, HOUR, REACTIONS, Day, simulate

if TYPE_CHECKING:
    from paceline.planner.simulate import Outcome

SIZES = 9  # numbers of workers in the chart
SEEDS = 5  # simulations of each


def page(outcome: Outcome, outcomes: Mapping[str, Outcome], seed: int) -> str:
    """A page of its own: key figures, the account over the day, progress by number of workers, and a step by part."""
    scenario = outcome.situation.scenario
    name = f"{plural(scenario.workers, 'worker')}, {scenario.reaction}"
    rows = [
        (label, f"goodput {each.goodput:.3f}, progress {each.progress:.3f} ({each.span[0]:.3f} to {each.span[1]:.3f})")
        for label, each in outcomes.items()
    ]
    a_day = outcome.per_day()
    rows += [
        (f"{label} a day", number(round(value, 1) if value < 100 else round(value))) for label, value in a_day.items()
    ]
    rows += [("note", note) for note in outcome.situation.notes]
    body = section("Result", table(rows))
    body += section("Account over the first day", _hours(outcome.days[0]))
    body += section("Progress by number of workers", _by_workers(outcome, seed))
    parts = shares_of(dict(outcome.situation.parts))
    about = f'<p class="soft">A step takes {a_step(scenario.step)}</p>'
    body += section("A step by part", about + stacked_bar(parts) + _legend(dict(parts)) if parts else "")
    head = f"{HEAD}<title>{name} - Paceline</title><style>{STYLE}</style></head>"
    return f"{head}<body><main><h1>{name}</h1>{body}</main></body></html>\n"


def _legend(parts: Mapping[str, float]) -> str:
    keys = (
        f'<li><svg class="key" aria-hidden="true"><rect class="{colour(name)}" width="100%" height="100%"/></svg>'
        f"{markup(name)} {part:.1%}</li>"
        for name, part in parts.items()
    )
    return f'<ul class="legend">{"".join(keys)}</ul>'


def by_hour(day: Day) -> list[dict[str, float]]:
    """The seconds of each account in each hour of the first day."""
    hours: list[dict[str, float]] = [{} for _ in range(math.ceil(min(day.seconds, DAY) / HOUR))]
    for span in day.spans:
        at = span.begin
        saving = span.saving / (span.end - span.begin)
        while at < span.end and at // HOUR < len(hours):
            until = min(span.end, (at // HOUR + 1) * HOUR)
            spent = hours[int(at // HOUR)]
            for account, part in ((span.account, 1 - saving), ("saving", saving)):
                if part > 0:
                    spent[account] = spent.get(account, 0.0) + (until - at) * part
            at = until
    return hours


def _hours(day: Day) -> str:
    """A bar for each hour. Steps that were repeated later are a part of the steps' time."""
    rows = []
    for hour, spent in enumerate(by_hour(day)):
        total = sum(spent.values())
        bar = stacked_bar([(account, seconds / total) for account, seconds in spent.items()]) if total else ""
        rows.append(f'<tr><th>hour {hour + 1}</th><td class="wide">{bar}</td></tr>')
    parts = {account: seconds / day.seconds for account, seconds in day.account.items()}
    about = '<p class="soft">Of one simulation; steps that were repeated later are steps here</p>'
    return f"{about}<table>{''.join(rows)}</table>{_legend(parts)}"


def _by_workers(outcome: Outcome, seed: int) -> str:
    """Progress against the number of workers, with a curve for each way of reacting."""
    scenario = outcome.situation.scenario
    counts = sorted({max(1, round(scenario.replicas * 2 ** ((size - 4) / 2))) for size in range(SIZES)})
    curves = []
    for index, reaction in enumerate(REACTIONS):
        points = []
        for count in counts:
            team = replace(
                scenario, workers=count * scenario.replica, reaction=reaction, least=min(count, scenario.least)
            )
            days = [simulate(team, outcome.days[0].seconds, seed + number) for number in range(SEEDS)]
            points.append((float(team.workers), sum(day.progress for day in days) / SEEDS))
        curves.append((index, points))
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 10 10" aria-hidden="true"><line class="curve {stroke(index)}" x1="0" '
        f'x2="10" y1="5" y2="5"/></svg>{markup(reaction)}</li>'
        for index, reaction in enumerate(REACTIONS)
    )
    chart = f"<figure>{overlay('progress', curves, 'workers')}</figure>" if len(counts) > 1 else ""
    return f'<ul class="legend">{keys}</ul><div class="many">{chart}</div>'


def trace(day: Day, out: Path) -> None:
    """Writes a timeline of the day for Perfetto, gzipped if the name ends in .gz."""
    events = [
        {
            "name": span.account,
            "ph": "X",
            "ts": 1e6 * span.begin,
            "dur": 1e6 * (span.end - span.begin),
            "pid": 0,
            "tid": 0,
            "args": {"seconds of saving": span.saving},
        }
        for span in day.spans
    ]
    events += [
        {"name": "speed", "ph": "C", "ts": 1e6 * span.begin, "pid": 0, "args": {"speed": span.speed}}
        for span in day.spans
    ]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    with gzip.open(out, "wt") if out.name.endswith(".gz") else out.open("w") as file:
        file.write(text)
