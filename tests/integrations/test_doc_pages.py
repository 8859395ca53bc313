"""The pages of the documentation site: their commands print what they say, and the site is built."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import blocks_of, commands_of, missing_line, run_page
from paths import DOCS, EXAMPLES
from warm import environment

TUTORIALS = ["image-classifier", "fine-tune-transformers", "lora", "sampling", "cross-validation", "sweep"]
PAGES = [
    *[
        "start/install",
        "start/first-script",
        "start/two-workers",
        "start/resume",
        "howto/spot-instances",
        "howto/loggers",
    ],
    "howto/simulate-failures",
    "howto/continue-other-checkpoints",
    "howto/configuration-files",
    "howto/read-your-files",
    "howto/launch-elsewhere",
    *[f"tutorials/{name}" for name in TUTORIALS],
]
FILES = {"train.py": "start/first-script.md"}  # pages that go on with a file of another page


def file_of(page: str, name: str) -> str:
    return next(block.text for block in blocks_of((DOCS / page).read_text()) if block.file == name)


@pytest.mark.slow
@pytest.mark.timeout(600)  # the page with Ray Tune takes 80 s on a quiet machine
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_print_what_it_says(page: str, tmp_path: Path) -> None:
    for name, other in FILES.items():
        (tmp_path / name).write_text(file_of(other, name))
    (tmp_path / "examples").symlink_to(EXAMPLES)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    count, _ = run_page(DOCS / f"{page}.md", tmp_path, environment(PATH=path))
    assert count > 0


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Links between pages and to their headings lead somewhere, and each page is in the table of contents."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", DOCS, tmp_path / "site"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site" / "searchindex.js").read_text()
    assert all(f'"{page}"' in index for page in PAGES)


def test_each_block_of_a_page_is_run_or_says_why_not() -> None:
    for page in sorted(page for folder in ("start", "tutorials", "howto") for page in (DOCS / folder).glob("*.md")):
        blocks = [*blocks_of(page.read_text())]
        assert blocks
        for block in blocks:
            assert block.reason or block.file or block.language == "console", page.name
        is_run = f"{page.parent.name}/{page.stem}" in PAGES
        assert is_run or all(block.reason for block in blocks), f"{page.name} is not in the list PAGES"


def test_each_example_is_the_script_of_one_tutorial() -> None:
    shown = [
        name
        for page in (DOCS / "tutorials").glob("*.md")
        for name in re.findall(r"examples/(\w+\.py)\n:lang", page.read_text())
    ]
    others = {"digits.py", "llama.py"}  # the test of launchers, and the larger sister of gpt.py
    assert sorted(shown) == sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in others)


def test_blocks_and_commands_are_read() -> None:
    page = "```{code-block} python\n:caption: a.py\n\nprint(1)\n```\n<!-- not run: why -->\n```console\n$ ls\n```\n"
    file, command = blocks_of(page)
    assert (file.file, file.text, file.reason) == ("a.py", "print(1)\n", None)
    assert (command.language, command.text, command.reason) == ("console", "$ ls\n", "why")
    (first, second) = commands_of("$ ls\na  b\n...\n$ pwd\n")
    assert (first.line, first.output, second.line, second.output) == ("ls", ("a  b", "..."), "pwd", ())
    assert missing_line(("a ... c", "d"), "x\na b c\ny\nd\n") is None
    assert missing_line(("d", "a ... c"), "x\na b c\ny\nd\n") == "a ... c"
