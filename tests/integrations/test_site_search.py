"""The search of the documentation site finds what people ask, in its first three results."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from agents import until
from browsers import Browser, needs_chromium
from paths import DOCS
from warm import environment

pytestmark = [pytest.mark.slow, needs_chromium]

DONE = "document.querySelector('.search-summary')?.textContent.match(/finished|did not match/) != null"
# A question, and the pages that answer it.
QUESTIONS = {
    "install": {"start/install"},
    "resume": {"start/resume", "howto/stop-and-resume", "checkpoints"},
    "two machines": {"start/two-machines", "howto/launch-ssh"},
    "slurm": {"start/slurm", "howto/launch-slurm"},
    "kubernetes": {"howto/launch-kubernetes"},
    "gradient accumulation": {"reference/glossary", "coming-from", "howto/make-it-fit", "reference/plan-words"},
    "out of memory": {"howto/make-it-fit", "larger-models", "reference/errors"},
    "early stopping": {"tutorials/image-classifier", "recipes"},
    "best checkpoint": {"tutorials/image-classifier", "recipes", "architecture"},
    "mixed precision": {"howto/make-it-fit", "larger-models", "reference/glossary", "reference/plan-words"},
    "spot instances": {"howto/spot-instances"},
    "tensorboard": {"howto/loggers", "watching"},
    "hang": {"howto/debug-a-hang", "howto/find-out-why"},
    "nan": {"howto/debug-a-nan", "howto/find-out-why", "reference/errors"},
    "lora": {"tutorials/lora"},
    "gan": {"tutorials/gan"},
    "optuna": {"tutorials/sweep"},
    "weighted sampler": {"tutorials/sampling"},
    "exit code": {"reference/exit-codes"},
    "diloco": {"islands"},
    "parameter server": {"servers"},
    "s3": {"howto/checkpoints-on-s3", "checkpoints"},
    "notebook": {"howto/notebooks"},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built and served on this machine."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", DOCS, folder]
    subprocess.run(command, env=environment(), check=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Prints nothing."""


def test_search_finds_what_people_ask(site: str, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "browser")
    found = {}
    try:
        for question in QUESTIONS:
            browser.call("Page.navigate", url=f"{site}/search.html?q={quote(question)}")
            until(lambda: browser.says(DONE), 60)
            links = "[...document.querySelectorAll('ul.search > li > a')].map(a => a.getAttribute('href')).join(' ')"
            pages = [link.partition(".html")[0] for link in browser.says(links).split()]
            found[question] = list(dict.fromkeys(pages))[:3]
    finally:
        browser.close()
    missed = {question: pages for question, pages in found.items() if not QUESTIONS[question] & {*pages}}
    assert not missed
