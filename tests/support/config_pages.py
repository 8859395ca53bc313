"""The tables of fields on the pages about `paceline from`, made of the dicts in the code.

python tests/support/config_pages.py    # write the tables into the pages
"""

from __future__ import annotations

from pathlib import Path

from paceline.integrations.configs.accelerate_fields import ACCELERATE
from paceline.integrations.configs.conversion import FieldTable
from paceline.integrations.configs.deepspeed_fields import DEEPSPEED

PAGES = Path(__file__).resolve().parents[2] / "docs" / "coming-from"
TABLES = {"deepspeed.md": DEEPSPEED, "accelerate-fsdp-configs.md": ACCELERATE}
BEGIN, END = "<!-- fields: begin -->\n", "<!-- fields: end -->\n"


def rows(texts: dict[str, str]) -> str:
    """A line for each section and text, with all fields of the section that share it."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, text in texts.items():
        head, _, last = name.rpartition(".")
        groups.setdefault((head, text), []).append(last)
    lines = []
    for (head, text), names in groups.items():
        prefix = f"`{head}`: " if head else ""
        fields = prefix + ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {fields} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def tables(table: FieldTable) -> str:
    """The three tables of a page."""
    free = dict(table.sections)
    refused = {name: str(refusal) for name, refusal in table.refused.items()}
    refused |= {f"{name}.*": str(refusal) for name, refusal in free.items() if not isinstance(refusal, str)}
    silent = dict(table.no_effect) | {f"{name}.*": text for name, text in free.items() if isinstance(text, str)}
    return (
        f"### Used\n\n| fields | what becomes of them |\n| --- | --- |\n{rows(dict(table.used))}\n\n"
        f"### Without effect\n\n| fields | why |\n| --- | --- |\n{rows(silent)}\n\n"
        "### Refused\n\nA field is refused only where it asks for something: `null` and its default do not.\n\n"
        f"| fields | why, and what to do |\n| --- | --- |\n{rows(refused)}\n"
    )


def page(text: str, table: FieldTable) -> str:
    """A page with the tables as the code has them now."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{tables(table)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for name, table in TABLES.items():
        path = PAGES / name
        path.write_text(page(path.read_text(), table))
