"""The report and the live page in a Chromium: light, dark, and as wide as a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import until
from browsers import Browser, needs_chromium
from journals import step
from test_live_page import served

from paceline.base.journal import Journal
from paceline.observe.report import write_report
from paceline.team.reading_key import reading_key

pytestmark = needs_chromium

BLOCKS = "encoder.layers.0 to 11 (torch.nn.TransformerEncoderLayer), head.a_projection_with_a_long_name (Linear)"
WINDOWS = {"light": (1280, False), "dark": (1280, True), "phone": (390, False), "dark phone": (390, True)}
FIGURES = [
    "step 60 of 480",
    "12.5%",
    "Loss 1.667 step 60; 10.00 at step 10",
    "Best accuracy 0.8750 step 50, highest so far",
    "Samples/s 5,120 last 3 s",
    "Samples/s 5,120 mean of the run without its first 10% of steps",
]
COLUMNS = ["Worker", "Status", "Host", "Device", "Share", "Samples/s", "Compute", "Others waited", "Time by part"]
# Contrast as in WCAG 2: of every text of the page with the background that is behind it.
CONTRASTS = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = rgb(colour).map((c) => c / 255 <= .04045 ? c / 255 / 12.92 : ((c / 255 + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const found = {};
  for (const node of document.querySelectorAll("body *")) {
    if (![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) continue;
    if (["style", "script", "noscript", "title"].includes(node.localName) || node.closest(".plan .on")) continue;
    let behind = node;
    while (behind && rgb(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const style = getComputedStyle(node), colour = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const paper = getComputedStyle(behind ?? document.body).backgroundColor;
    const pair = [light(colour), light(paper)].sort((a, b) => b - a);
    found[node.tagName + "." + node.getAttribute("class")] = (pair[0] + .05) / (pair[1] + .05);
  }
  return JSON.stringify(found);
})()"""


def write_wide(folder: Path) -> Journal:
    """A run that is still going on, with long names: three stages on three hosts, and a best value."""
    journal = Journal(folder)
    about = {"plan": "pipeline=3", "plan_origin": "--plan", "script": "train.py", "device": "cuda", "hosts": 3}
    journal.write("start", workers=3, resumed_from=None, **about)
    for worker in range(3):
        host = f"node{worker}.rack-17.a-cluster.example"
        journal.write("worker", worker=worker, life=0, host=host, pid=1, what="started")
    journal.write("grid", trainer=0, phase=0, steps=480, shares=[1, 1, 1], text="global batch 256")
    stage = {"blocks": BLOCKS, "passes": 1e6}
    journal.write("figures", trainer=0, workers=3, plan="pipeline=3", model="GPT", micro_batches=8, stages=[stage] * 3)
    for done in range(10, 70, 10):
        computed = {str(worker): 0.2 + worker / 10 for worker in range(3)}
        lanes = {f"{worker} {part}": 0.1 for worker in range(3) for part in ("data", "compute", "reduce")}
        journal.write("step", **step(done, loss=100.0 / done, computed=computed, lanes=lanes))
        if done == 50:
            best = [{"trainer": 0, "name": "accuracy", "mode": "max", "value": 0.875}]
            journal.write("checkpoint", step=done, path="checkpoints/step-000000000050", seconds=0.25, best=best)
    return journal


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    tab = Browser(tmp_path_factory.mktemp("browser"))
    yield tab
    tab.close()


def read(browser: Browser, what: str) -> Any:
    return browser.says(f"(() => {{ const main = document.querySelector('main'); return {what}; }})()")


def check(browser: Browser, width: int, dark: bool) -> None:
    """What both pages show, however wide the window is and in both colour schemes."""
    text = " ".join(read(browser, "main.innerText").split())
    for figure in FIGURES:
        assert figure in text
    assert read(browser, "[...main.querySelectorAll('h2')].filter(h => h.textContent === 'Workers').length") == 1
    headings = read(browser, "[...main.querySelectorAll('.team thead th')].map(h => h.innerText).join('|')").split("|")
    assert [heading.startswith(column) for heading, column in zip(headings, COLUMNS, strict=True)] == [True] * 9
    drawn = read(browser, "[...main.querySelectorAll('.plan text')].map(t => t.textContent).join(' ')")
    assert drawn.count(BLOCKS) == 3, "complete, in lines"
    assert read(browser, "innerWidth") == width
    assert read(browser, "document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    over = "[...document.querySelectorAll('body *')].filter(n => !n.closest('.scroll, svg')"
    assert read(browser, f"{over} && n.getBoundingClientRect().right > innerWidth + .5).length") == 0
    if width == 390:
        assert read(browser, "(b => b.scrollWidth > b.clientWidth)(main.querySelector('.team').closest('.scroll'))")
    paper = read(browser, "getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(18, 21, 24)" if dark else "rgb(247, 247, 245)")
    contrasts = json.loads(browser.says(CONTRASTS))
    assert len(contrasts) > 20
    assert {name: value for name, value in contrasts.items() if value < 4.5} == {}


@pytest.mark.parametrize(("width", "dark"), WINDOWS.values(), ids=WINDOWS)
def test_the_report(browser: Browser, width: int, dark: bool, tmp_path: Path) -> None:
    journal = write_wide(tmp_path)
    journal.write("stopped", step=60, why="--steps 60")
    write_report(tmp_path)
    browser.show((tmp_path / "report.html").as_uri(), width, dark=dark)
    until(lambda: browser.says("document.readyState") == "complete" and read(browser, "main !== null"))
    browser.picture(tmp_path / "report.png")
    assert read(browser, "main.querySelector('.badge').textContent") == "Stopped"
    assert "Stopped at step 60: --steps 60" in read(browser, "main.innerText")
    check(browser, width, dark)


@pytest.mark.parametrize(("width", "dark"), WINDOWS.values(), ids=WINDOWS)
def test_the_live_page(browser: Browser, width: int, dark: bool, tmp_path: Path) -> None:
    journal = write_wide(tmp_path)
    with served(tmp_path) as run:
        browser.show(f"http://127.0.0.1:{run.port}/#{reading_key(tmp_path)}", width, dark=dark)
        until(lambda: browser.says("document.querySelector('.badge')?.textContent") == "Running")
        browser.picture(tmp_path / "live.png")
        assert "about 21 s left" in read(browser, "main.innerText")
        check(browser, width, dark)
        assert browser.says("document.title") == "12.5% - train.py - Paceline"
        journal.write("finished", step=60)
        until(lambda: browser.says("document.querySelector('.badge').textContent") == "Finished")
        assert "left" not in read(browser, "main.querySelector('.progress').innerText")


def test_a_run_that_ends_without_a_result_does_not_stay_running(browser: Browser, tmp_path: Path) -> None:
    write_wide(tmp_path)
    badge, line = "document.querySelector('.badge').textContent", "document.querySelector('#live').textContent"
    with served(tmp_path) as run:
        browser.show(f"http://127.0.0.1:{run.port}/#{reading_key(tmp_path)}")
        until(lambda: browser.says("document.querySelector('.badge')?.textContent") == "Running")
        assert run.process.stdin is not None
        run.process.stdin.close()
        run.process.stdin = None
        until(lambda: browser.says(badge) == "Ended, no result recorded")
        assert browser.says(line) == "The run has ended. This page is no longer updated."


def test_a_lost_connection_and_a_wrong_key_are_named(browser: Browser, tmp_path: Path) -> None:
    write_wide(tmp_path)
    badge, line = "document.querySelector('.badge').textContent", "document.querySelector('#live')?.textContent"
    with served(tmp_path) as run:
        browser.show(f"http://127.0.0.1:{run.port}/#{'0' * 64}")
        until(lambda: str(browser.says(line)).startswith("The key in this address does not belong to this run. Open "))
        browser.show(f"http://127.0.0.1:{run.port}/?again#{reading_key(tmp_path)}")
        until(lambda: browser.says("document.querySelector('.badge')?.textContent") == "Running")
        run.process.kill()
        until(lambda: browser.says(badge) == "Not connected")
        assert str(browser.says(line)).startswith("No connection since ")
