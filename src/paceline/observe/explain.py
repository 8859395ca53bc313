"""Why did it do that: a run's choices and their reasons, in plain text. No torch."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.summary import facts, summarise


def explain(folder: Path) -> str:
    """What ``paceline explain RUN`` prints. UsageError: not the folder of a run."""
    summary = summarise(folder)
    tables = facts(summary)
    lines: list[str] = []
    for title in ("Environment", "Plan", "Decisions", "Results", "Costs", "What happened"):
        if title == "Decisions":
            rows = [f"  {event.get('what')}\n    because {event.get('why')}" for event in summary.decisions]
        else:
            width = max((len(name) for name, _ in tables[title]), default=0)
            rows = [f"  {name:{width}}  {text}" for name, text in tables[title]]
        if rows:
            lines += [title, *rows, ""]
    if summary.outcome and summary.outcome.get("text"):
        lines += [str(summary.outcome["text"]).strip(), ""]
    return "\n".join([*lines, f"Next: {summary.command}"])
