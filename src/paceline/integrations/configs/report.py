"""Prints a conversion: plan, command, script and what became of every field."""

from __future__ import annotations

import json
import shlex
import textwrap
from typing import Any

from paceline.base.console import in_one_line
from paceline.integrations.configs.conversion import VERDICTS, Conversion, ConvertedField

_TITLES = {
    "used": "used",
    "no effect": "no effect, and why",
    "refused": "refused, and what to do",
    "unknown": "unknown names",
}


def command_of(conversion: Conversion) -> str:
    """The command that trains with the converted plan, on one host or on each."""
    each = conversion.workers // conversion.machines
    words = [f"--workers {each}", *conversion.options]
    if conversion.plan:
        words.append(f"--plan {shlex.quote(conversion.plan)}")
    return f"paceline run {' '.join(words)} train.py"


def script_of(conversion: Conversion) -> str:
    """The Python of the Trainer, with `Net`, `loss_function` and `dataset` as the script's own."""
    arguments = {"model": "Net", "loss": "lambda output, batch: loss_function(output, batch[1])"}
    arguments["optimizer"] = conversion.arguments.get("optimizer", "make_optimizer")
    arguments |= conversion.arguments
    body = [*conversion.definitions, *([""] if conversion.definitions else [])]
    body += ["trainer = paceline.Trainer(", *(f"    {name}={source}," for name, source in arguments.items()), ")"]
    text = "\n".join(body)
    imports = [name for name in ("functools", "math") if f"{name}." in text]
    others = ["paceline", *(["paceline.optim"] if "paceline.optim" in text else []), "torch"]
    head = [*(f"import {name}" for name in imports), *([""] if imports else []), *(f"import {name}" for name in others)]
    loop = f"for report in trainer.steps(dataset, {conversion.loop}):\n    pass"
    return "\n".join([*head, "", text, loop])


def text_of(conversion: Conversion, path: str) -> str:
    """The whole text that `paceline from` prints."""
    workers = f"{conversion.workers} worker{'' if conversion.workers == 1 else 's'}"
    origin = f" ({conversion.workers_from})" if conversion.workers_from else ""
    script = script_of(conversion)
    yours = f"Net, loss_function{', make_optimizer' * ('=make_optimizer' in script)} and dataset"
    blocks = [
        f"{in_one_line(path)}, {conversion.table.tool}, for {workers}{origin}",
        f"plan\n    {conversion.plan or '(empty: every worker is a replica)'}",
        f"command\n    {command_of(conversion)}",
        f"script ({yours} are yours)\n" + textwrap.indent(script, "    "),
    ]
    if conversion.changes:
        blocks.append("also\n" + "\n".join(f"    {line}" for line in dict.fromkeys(conversion.changes)))
    for verdict in VERDICTS:
        rows = [one for one in conversion.settled.values() if one.verdict == verdict]
        if rows:
            blocks.append("\n".join([_TITLES[verdict], *_lines(rows)]))
    return "\n\n".join(blocks)


def _lines(rows: list[ConvertedField]) -> list[str]:
    """A line for each field; fields of one section with the same text share one."""
    groups: dict[tuple[str, str], list[ConvertedField]] = {}
    for one in rows:
        groups.setdefault((one.name.partition(".")[0], one.text), []).append(one)
    lines = []
    for (head, text), members in groups.items():
        names = [_named(one, head if number else "") for number, one in enumerate(members)]
        lines += textwrap.wrap(
            f"{', '.join(names)}: {in_one_line(text)}", 116, initial_indent="    ", subsequent_indent="        "
        )
    return lines


def _named(one: ConvertedField, head: str) -> str:
    """A field and its value; without the section that a field before it has named."""
    value = "" if one.value is None else f" = {json.dumps(one.value, default=str)}"
    value = value if len(value) <= 43 else f"{value[:40]}..."
    return in_one_line(f".{one.name.removeprefix(head + '.')}{value}" if head else f"{one.name}{value}")


def json_of(conversion: Conversion) -> str:
    """The conversion as one JSON object."""
    rows: list[dict[str, Any]] = [
        {"name": one.name, "value": one.value, "verdict": one.verdict, "text": one.text}
        for one in conversion.settled.values()
    ]
    held = {
        "plan": conversion.plan,
        "workers": conversion.workers,
        "workers_from": conversion.workers_from,
        "machines": conversion.machines,
        "arguments": conversion.arguments,
        "command": command_of(conversion),
        "script": script_of(conversion),
        "changes": [*dict.fromkeys(conversion.changes)],
        "fields": rows,
    }
    return json.dumps(held, indent=1, default=str)
