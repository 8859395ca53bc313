"""The live page: its process, its sockets and its cookies are real; the browser too, where there is one."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from agents import until
from browsers import Browser, needs_chromium
from journals import step, write_run
from launching import environment
from test_prometheus import FIXED, running, serving_process

from paceline.base.journal import NAME, Journal, read_journal
from paceline.cli.main import main
from paceline.observe.page import render
from paceline.observe.summary import Summary
from paceline.team.reading_key import KEY, reading_key

EVENT = "document.querySelector('#live')?.dataset.event"
BAD = "</script><img src=x onerror=\"document.title='owned'\">"


@dataclass
class Served:
    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, dict(answer.getheaders()), text

    def session(self) -> str:
        status, headers, _ = self.ask("/session", Authorization=f"Bearer {reading_key(self.folder)}")
        assert status == 204
        return headers["Set-Cookie"]


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """The process alone, for a folder that holds a journal."""
    listener = socket.create_server(("127.0.0.1", 0))
    given = {"folder": str(folder), "page": listener.fileno(), "hosts": ["127.0.0.1", "localhost", "::1"]}
    given |= {"run": folder.name, "told": [], "targets": []}
    command = [sys.executable, "-m", "paceline.observe.server", json.dumps(given)]
    process = subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, pass_fds=[listener.fileno()], stderr=subprocess.PIPE
    )
    port = listener.getsockname()[1]
    listener.close()
    try:
        yield Served(folder, port, process)
    finally:
        process.kill()
        _, said = process.communicate()
        assert said == b""


def followed(run: Served, cookie: str, count: int) -> list[int]:
    """The first numbers that the stream of events tells."""
    connection = http.client.HTTPConnection("127.0.0.1", run.port, timeout=20)
    connection.request("GET", "/events", headers={"Cookie": cookie.partition(";")[0]})
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("Content-Type")) == (200, "text/event-stream")
    found: list[int] = []
    while len(found) < count:
        line = answer.readline().decode()
        if line.startswith("data: "):
            found.append(int(line[6:]))
            Journal(run.folder).write("step", **step(100 + 10 * len(found)))
    connection.close()
    return found


def test_only_who_has_the_key_sees_the_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    with served(tmp_path) as run:
        status, headers, shell = run.ask("/")
        assert status == 200
        assert "train.py" not in shell
        assert [run.ask(path)[0] for path in ("/view", "/events")] == [401, 401]
        assert run.ask("/session")[0] == run.ask("/session", Authorization="Bearer " + "0" * 64)[0] == 401
        cookie = run.session()
        assert re.fullmatch(r"paceline_\w{12}=\w{64}; HttpOnly; Path=/; SameSite=Strict", cookie)
        assert reading_key(tmp_path) not in cookie
        given = {"Cookie": cookie.partition(";")[0]}
        status, told, view = run.ask("/view", **given)
        assert (status, int(told["X-Event"])) == (200, len(read_journal(tmp_path)))
        assert view in render(Summary(tmp_path))  # the same panels as the report's
        assert run.ask("/view", Cookie=given["Cookie"][:-1] + "x")[0] == 401
        for wrong in (
            {"Host": "evil.example"},
            {"Host": f"evil.example:{run.port}"},
            {"Origin": "http://evil.example"},
        ):
            assert [run.ask(path, **given, **wrong)[0] for path in ("/", "/session", "/view", "/events")] == [403] * 4
        assert run.ask("/view", **given, Host=f"localhost:{run.port}", Origin=f"http://localhost:{run.port}")[0] == 200
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert run.ask("/view", method, **given)[0] == 405
        assert [run.ask(path, **given)[0] for path in ("/token", "/reading_key", "/../token", "/view/x")] == [404] * 4
        (script,) = re.findall(r"<script>(.*?)</script>", shell, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'sha256-"
            in headers["Content-Security-Policy"]
        )
        assert "unsafe" not in headers["Content-Security-Policy"]


def test_a_run_elsewhere_is_watched_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    journal = (tmp_path / NAME).read_bytes()
    with served(tmp_path) as run:
        given = {"Authorization": f"Bearer {reading_key(tmp_path)}"}
        assert run.ask("/journal")[0] == run.ask("/journal", Authorization="Bearer 1")[0] == 401
        assert run.ask("/journal", Cookie=run.session().partition(";")[0])[0] == 401  # no page reads it
        assert run.ask("/journal?from=x", **given)[0] == 400
        assert run.ask("/journal?from=100", **given)[2].encode() == journal[100:]
        for beyond in (len(journal), 999999999999999, 10**300):
            assert run.ask(f"/journal?from={beyond}", **given)[::2] == (200, "")
        for none in ("-1", "1.5", "%ff", "", "1" * 1000):
            assert run.ask(f"/journal?from={none}", **given)[0] == 400
        watched = ["watch", "--once", "--key-file", str(tmp_path / KEY)]
        assert main([*watched, f"127.0.0.1:{run.port}"]) == main([*watched, str(tmp_path)]) == 0
        there, here = re.findall(r"(?s)(.*?\n)event \d+ of .*?\n", capsys.readouterr().out)
        assert there == here
        assert "step" in here
        (tmp_path / "other").write_text("0" * 64)
        assert main([*watched[:3], str(tmp_path / "other"), f"127.0.0.1:{run.port}"]) == 2
        other = (
            f"the run at 127.0.0.1:{run.port} has a different reading key; use the file reading_key from its run folder"
        )
        assert main([*watched[:2], f"127.0.0.1:{run.port}"]) == 2
        wants = f"the run at 127.0.0.1:{run.port} requires its reading key"
        cure = "pass --key-file FILE, a copy of the file reading_key in its run folder"
        assert capsys.readouterr().err == f"paceline: {other}\npaceline: {wants}; {cure}\n"
    assert main([*watched, f"127.0.0.1:{run.port}"]) != 0
    assert capsys.readouterr().err == (
        f"paceline: no live page answers at 127.0.0.1:{run.port} (Connection refused); pass the address of `paceline "
        "run --page`; through ssh: `ssh -L 8765:127.0.0.1:8765 HOST`\n"
    )


def test_events_tell_of_what_is_new(tmp_path: Path) -> None:
    write_run(tmp_path)
    first = len(read_journal(tmp_path))
    with served(tmp_path) as run:
        assert followed(run, run.session(), 3) == [first, first + 1, first + 2]


def test_whatever_a_name_holds_is_text(tmp_path: Path) -> None:
    write_run(tmp_path, script=f"{BAD}.py")
    journal = Journal(tmp_path)
    journal.write("start", workers=2, script=f"{BAD}.py", resumed_from=100)
    journal.write("worker", worker=1, life=0, host=BAD, pid=1, what="started")
    for number in (110, 120):
        journal.write("step", **step(number, metrics={BAD: 1.0 / number}))
        journal.write("log", trainer=0, step=number, values={f"a{BAD}": number, f"b{BAD}": BAD})
    journal.write("lost", workers=[1], why=BAD, step=120)
    with served(tmp_path) as run:
        _, _, view = run.ask("/view", Cookie=run.session().partition(";")[0])
    assert view.count("&lt;img src=x") > 5
    assert "<img" not in view
    assert "</script" not in view


def test_500_slow_readers_cost_little(tmp_path: Path) -> None:
    """They ask, and read nothing; who then asks is answered."""
    write_run(tmp_path)
    with served(tmp_path) as run:
        cookie = run.session().partition(";")[0]
        request = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{run.port}\r\nCookie: {cookie}\r\n\r\n".encode()
        slow = []
        for _ in range(500):
            slow.append(socket.create_connection(("127.0.0.1", run.port)))
            slow[-1].sendall(request)
        assert run.ask("/view", Cookie=cookie)[0] == 200
        pages = int(Path(f"/proc/{run.process.pid}/statm").read_text().split()[1])
        assert pages * os.sysconf("SC_PAGE_SIZE") < 300e6
        for connection in slow:
            connection.close()


def test_a_run_with_its_page_and_without_what_serves_it(tmp_path: Path) -> None:
    with running(tmp_path, "--page", "127.0.0.1:0", body=FIXED) as process:
        address = tmp_path / "out" / "page"
        until(lambda: address.exists() and any(e["event"] == "step" for e in read_journal(tmp_path / "out")), 60)
        assert address.stat().st_mode & 0o777 == 0o600
        url, _, key = address.read_text().strip().partition("#")
        assert key == reading_key(tmp_path / "out")
        run = Served(tmp_path / "out", int(url.rstrip("/").rpartition(":")[2]), process)
        assert "step" in run.ask("/view", Cookie=run.session().partition(";")[0])[2]
        os.kill(serving_process(tmp_path), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert f"live page: {url}#{key}\n" in said
    assert (
        said.count("the process for metrics and the live page was killed by SIGKILL; the run continues without it\n")
        == 1
    )


def write_many(folder: Path, workers: int = 1000, each: int = 8) -> Journal:
    """A run of very many workers, so many on a host; worker 517 takes three times as long, and worker 803 is lost."""
    journal = Journal(folder)
    journal.write("start", workers=workers, script="train.py", resumed_from=None)
    for first in range(0, workers, each):
        about = {str(worker): [0.0, 10] for worker in range(first, min(workers, first + each))}
        journal.write("loaded", host=f"node{first // each}", workers=about)
    journal.write("formed", workers=[*range(workers)])
    journal.write("lost", workers=[803], why="was killed by SIGKILL", step=5)
    computed = {str(worker): 0.6 if worker == 517 else 0.2 + worker / 1e5 for worker in range(workers)}
    journal.write("step", **step(10, waited_for={"517": 0.4}))
    journal.write("each", trainer=0, step=10, steps=10, computed=computed)
    return journal


def test_a_thousand_workers_are_their_hosts_until_one_is_opened(tmp_path: Path) -> None:
    write_many(tmp_path)
    with served(tmp_path) as run:
        cookie = run.session().partition(";")[0]

        def view(query: str = "") -> str:
            return run.ask(f"/view?{query}", Cookie=cookie)[2]

        whole = view()
        assert whole.count("<details") == 33
        assert len(whole) < 40_000
        slowest = "median compute time 20.5 ms per step, slowest 60 ms (worker 517); others waited 40 ms per step"
        assert f"<p>125 hosts: 1,000 workers, 999 up; {slowest}</p>" in whole
        slow = f"8 workers; {slowest}"
        assert re.findall(r'<details data-of="(.*?)"><summary><b>.*?</b> (.*?)</summary>', whole)[0] == (
            "host node64",
            slow,
        )
        assert "<summary>93 faster hosts</summary>" in whole
        opened = view("open=host+node64")
        assert '<details data-of="host node64" open>' in opened
        assert [f'<th scope="row">{worker}</th>' in opened for worker in (511, 512, 517, 519, 520)] == [
            False,
            *[True] * 3,
            False,
        ]
        assert 'aria-label="load and compute 41%, reduce, wait and others 59%"' in opened
        found = view("find=3&seeks=true")  # it is among the rest
        assert re.findall(r'<details data-of="([^"]*)" open>', found) == ["more", "host node0"]
        assert re.findall(r'<tr id="found" aria-current="true" tabindex="-1"><th scope="row">(\d+)</th>', found) == [
            "3"
        ]
        assert " open>" not in view("find=3")
        assert 'open><summary id="found" aria-current="true"><b>node100</b> 8 workers, 7 up; ' in view(
            "find=node100&seeks=true"
        )
        assert "This run has no worker or host &lt;b&gt;." in view("find=%3Cb%3E&seeks=true")
    report = render(Summary(tmp_path))
    assert report.count("<details") == 33 + 93
    assert '<th scope="row">517</th>' in report


@pytest.mark.slow
@needs_chromium
def test_a_browser_follows_a_run_to_its_end_and_runs_nothing_of_its(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    journal = Journal(folder)
    journal.write("start", workers=3, plan="data=3", script=f"{BAD}.py", resumed_from=None)
    for worker in range(3):
        journal.write("worker", worker=worker, life=0, host=f"node{worker}", pid=1, what="started")
    for number in range(10, 60, 10):
        computed = {str(worker): 0.2 + worker / 10 for worker in range(3)}
        journal.write("step", **step(number, loss=10.0 / number, metrics={BAD: 1.0 / number}, computed=computed))
    with served(folder) as run:
        browser = Browser(tmp_path / "browser")
        try:
            browser.call("Page.navigate", url=f"http://127.0.0.1:{run.port}/#{reading_key(folder)}")
            said = "document.querySelector('#live')?.textContent"
            until(lambda: browser.says(EVENT) == str(len(read_journal(folder))))
            assert str(browser.says(said)).startswith("Live, updated at ")
            assert browser.says("location.href") == f"http://127.0.0.1:{run.port}/"  # the key is not in the history
            assert browser.says("document.cookie") == ""
            assert "node2" in browser.says("document.querySelector('main').textContent")
            assert "step 50" in browser.says("document.querySelector('main').textContent")
            assert browser.says("document.querySelector('.badge').textContent") == "Running"
            box = "getComputedStyle(document.querySelector('.plan .box')).stroke"
            assert browser.says(box) == "rgb(201, 201, 196)"  # the drawing's own style is let through
            journal.write("lost", workers=[2], why="was killed by SIGKILL", step=50)
            journal.write("step", **step(60, loss=0.125))
            until(lambda: browser.says(EVENT) == str(len(read_journal(folder))))
            assert "was killed by SIGKILL" in browser.says("document.querySelector('main').textContent")
            journal.write("finished", step=60)
            until(lambda: browser.says("document.querySelector('.badge').textContent") == "Finished")
            assert browser.says("document.title").endswith(" - Paceline")
            assert browser.says("document.querySelectorAll('img, main script').length") == 0
            assert browser.says("document.querySelectorAll('main svg').length") > 0
            browser.picture(tmp_path / "page.png")
            assert run.process.stdin is not None
            run.process.stdin.close()
            run.process.stdin = None
            until(lambda: browser.says(said) == "The run has ended. This page is no longer updated.")
            assert browser.says("document.querySelector('.badge').textContent") == "Finished"
        finally:
            browser.close()


@pytest.mark.slow
@needs_chromium
def test_a_browser_goes_from_hosts_to_a_worker_by_keyboard(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    journal = write_many(folder)
    with served(folder) as run:
        browser = Browser(tmp_path / "browser")

        def key(name: str, code: int, text: str = "") -> None:
            for kind in ("keyDown", "keyUp"):
                browser.call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, text=text)

        def newer() -> None:
            journal.write("step", **step(20, loss=1.0))
            until(lambda: browser.says(EVENT) == str(len(read_journal(folder))))

        focus = "document.activeElement.textContent"
        try:
            browser.call("Page.navigate", url=f"http://127.0.0.1:{run.port}/#{reading_key(folder)}")
            until(lambda: browser.says("document.querySelectorAll('main details').length") == 33)
            browser.picture(tmp_path / "hosts.png")
            key("Tab", 9)
            assert browser.says("document.activeElement.labels[0].textContent") == "Worker or host: "
            key("Tab", 9)
            assert browser.says(focus).startswith("node64 8 workers")
            key("Enter", 13, "\r")
            until(lambda: "load and compute 41%" in browser.says("document.querySelector('main details').innerHTML"))
            newer()
            assert browser.says(focus).startswith("node64 8 workers"), "what is new leaves the reader where they are"
            assert browser.says("document.querySelector('main details').open")
            key("Enter", 13, "\r")
            until(lambda: not browser.says("document.querySelector('main details table') !== null"))
            browser.says("document.querySelector('#find input').focus()")
            browser.call("Input.insertText", text="3")
            key("Enter", 13, "\r")
            until(lambda: str(browser.says(focus)).startswith("3upnode0"))
            browser.picture(tmp_path / "found.png")
            newer()
            assert str(browser.says(focus)).startswith("3upnode0")
            assert browser.says("document.querySelectorAll('img, main script').length") == 0
        finally:
            browser.close()
