"""What Prometheus scrapes: a real run, its serving process, and a real Prometheus."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agents import until
from clusters import Cluster
from clusters import cluster as cluster
from journals import write_run
from launching import environment, free_port, paceline, train_basics
from networks import Host
from networks import hosts as hosts
from prometheus_client.parser import text_string_to_metric_families
from warm import Process

from paceline.base.journal import Reader, effective_steps, read_journal
from paceline.cli.main import main
from paceline.errors import UsageError
from paceline.launch.serving import check_serving
from paceline.observe.alerts import ALERTS, dashboard
from paceline.observe.metrics import METRICS
from paceline.observe.prometheus import families
from paceline.observe.summary import Summary
from paceline.team.reading_key import reading_key

LONG = """
import time, os
trainer = make()
for report in trainer.steps(data, count=10_000):
    trainer.log(double=2 * report.loss)
    time.sleep(0.02)
    if os.path.exists("enough") and report.step % 100 == 0:
        trainer.stop()
trainer.export("out.safetensors")
"""


@contextmanager
def running(folder: Path, *options: str, body: str = LONG) -> Iterator[Process]:
    (folder / "train.py").write_text("from basics import *\n" + body)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--run-dir", "out", *options, "train.py"]
    process = Process(command, environment(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()


def asked(port: int, key: str = "", path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={"Authorization": f"Bearer {key}"} if key else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def figures(text: str) -> dict[str, dict[str, float]]:
    """By name and the labels but `run`, as Prometheus's own parser reads them."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.keys() <= {"run", "trainer", "name", "part", "kind", "worker", "account"}
            assert sample.labels["run"] == "out"
            rest = ",".join(value for name, value in sample.labels.items() if name != "run" and value)
            found.setdefault(sample.name, {})[rest] = sample.value
    return found


def answers(port: int, key: str) -> bool:
    try:
        return asked(port, key)[0] == 200
    except OSError:
        return False


def serving_process(folder: Path, run: str = "out") -> int:
    """That which serves from this run folder."""
    told = f'"folder": {json.dumps(str((folder / run).absolute()))}'
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"paceline.observe.server" in words and told.encode() in b" ".join(words):
            return int(entry.parent.name)
    return 0


def test_figures_of_a_run_are_scraped_to_the_last(tmp_path: Path) -> None:
    port = free_port()
    with running(tmp_path, "--metrics", f"127.0.0.1:{port}") as process:
        run = tmp_path / "out"
        until(lambda: (run / "metrics.json").exists())
        key = (run / "reading_key").read_text().strip()
        assert (run / "reading_key").stat().st_mode & 0o777 == 0o600
        assert json.loads((run / "metrics.json").read_text()) == [{"targets": [f"127.0.0.1:{port}"]}]
        until(lambda: answers(port, key))
        until(lambda: figures(asked(port, key)[1]).get("paceline_step", {}).get("", 0) > 50, 60)
        assert [asked(port, wrong)[0] for wrong in ("", "x" * 64, (run / "token").read_text().strip())] == [401] * 3
        assert (asked(port, key, "/")[0], asked(port, key, method="POST")[0]) == (404, 405)
        found = figures(asked(port, key)[1])
        assert found["paceline_worker_up"] == {"0": 1, "1": 1}
        assert found["paceline_running"] == {"": 1}
        assert {"double"} <= found["paceline_value"].keys()
        (tmp_path / "enough").touch()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert f"metrics for Prometheus: http://127.0.0.1:{port}/metrics; the key is in out/reading_key\n" in said
        last = figures(asked(port, key)[1])  # after the end, once
        until(lambda: not serving_process(tmp_path))
    assert json.loads((run / "metrics.json").read_text()) == []
    summary = Summary(run)
    assert last["paceline_running"] == {"": 0}
    assert last["paceline_journal_events_total"] == {"": len(read_journal(run))}
    assert last["paceline_step"] == {"": summary.steps_done}
    assert last["paceline_loss"] == {"": effective_steps(read_journal(run))[-1]["loss"]}
    assert last["paceline_goodput_ratio"] == {"": summary.goodput}
    assert last["paceline_samples_total"] == {"": summary.samples}
    assert (run / "logs" / "serving.log").read_text() == ""


FIXED = LONG.replace("10_000", "60").replace("0.02", "0.03")


@pytest.mark.slow
def test_who_kills_what_serves_costs_the_run_nothing(tmp_path: Path) -> None:
    whole, killed, port = tmp_path / "whole", tmp_path / "killed", free_port()
    whole.mkdir()
    killed.mkdir()
    train_basics(whole, FIXED, 2, "--plan", "exact")
    with running(killed, "--plan", "exact", "--metrics", f"127.0.0.1:{port}", body=FIXED) as process:
        until(lambda: any(event["event"] == "step" for event in read_journal(killed / "out")), 60)
        os.kill(serving_process(killed), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    line = "the process for metrics and the live page was killed by SIGKILL; the run continues without it\n"
    assert said.count(line) == 1
    assert (killed / "out.safetensors").read_bytes() == (whole / "out.safetensors").read_bytes()


def test_text_is_read_by_the_parser_whatever_a_name_holds(tmp_path: Path) -> None:
    from prometheus_client import generate_latest

    write_run(tmp_path / "out")
    bad = '</script><img onerror="x">\n\\"{}'
    with (tmp_path / "out" / "journal.jsonl").open("a") as file:
        log = {"at": 1.0, "event": "log", "trainer": 0, "step": 100, "values": {bad: 2.5}}
        file.write(json.dumps(log) + "\n")

    class Once:
        def collect(self):
            return families(Summary(tmp_path / "out", Reader(tmp_path / "out")), "out")

    found = figures(generate_latest(Once()).decode())
    assert found["paceline_value"][bad] == 2.5
    assert found["paceline_worker_waited_for_seconds_total"] == {"1": pytest.approx(0.22)}
    assert found["paceline_step_part_seconds"]["compute"] == pytest.approx(0.0411)


def test_the_key_is_made_once(tmp_path: Path) -> None:
    assert reading_key(tmp_path) == reading_key(tmp_path)
    assert len(reading_key(tmp_path)) == 64


def test_what_cannot_be_served_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        check_serving("127.0.0.1", None)
    assert (
        str(caught.value) == "--metrics 127.0.0.1 has no port; use --metrics 127.0.0.1:PORT, for example 127.0.0.1:9464"
    )
    (tmp_path / "train.py").write_text("")
    ended = paceline("run", "--metrics", "203.0.113.7:9464", "--run-dir", "out", "train.py", cwd=tmp_path, code=2)
    assert ended.stderr == (
        "paceline: --metrics 203.0.113.7:9464: Cannot assign requested address; "
        "use an address of this host and a free port\n"
    )
    joins = paceline("run", "--join", "out", "--page", "127.0.0.1:0", "train.py", cwd=tmp_path, code=2)
    assert joins.stderr == (
        "paceline: --join cannot be combined with --metrics or --page, which belong "
        "to the command that starts the run; "
        "pass --metrics and --page to that command\n"
    )
    monkeypatch.setattr("paceline.launch.serving.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        check_serving("127.0.0.1:9464", None)
    assert str(caught.value) == (
        "--metrics needs the package prometheus_client, which is not installed; pip install 'paceline[prometheus]'"
    )


def test_rules_and_dashboard_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    names = {metric.name for metric in METRICS}
    for _, expression, _, _ in ALERTS:
        assert set(re.findall(r"paceline_\w+", expression)) <= names
    assert {metric.name for metric in METRICS} == {
        re.search(r"paceline_\w+", panel["targets"][0]["expr"])[0] for panel in json.loads(dashboard())["panels"]
    }
    for option, first in ((), "| Prometheus"), (("--rules",), "# Generated by"), (("--dashboard",), "{"):
        assert main(["metrics", *option]) == 0
        assert capsys.readouterr().out.startswith(first)


# ---- several hosts


def told_from(host: Host, folder: Path, path: str, key: str, port: int, *options: str) -> str:
    """What `curl` on this host is told where the file of targets says that figures are, by the port of another."""
    (told,) = json.loads((folder / "metrics.json").read_text())
    url = f"http://{told['targets'][0].rpartition(':')[0]}:{port}{path}"
    head = f"Authorization: Bearer {key}"
    asked = host.command("curl", "--silent", "--fail", "--max-time", "5", "--header", head, *options, url)
    return subprocess.run(asked, capture_output=True, text=True).stdout


def step_of(text: str) -> float:
    return sum(float(value) for value in re.findall(r'^paceline_step{run="run-0".*} (\S+)$', text, re.MULTILINE))


@pytest.mark.root
@pytest.mark.slow
def test_figures_and_the_page_go_on_where_the_coordinator_does(cluster: Callable[[int], Cluster]) -> None:
    """The first host is lost. The folder of the run is one that all see, as that of a cluster often is."""
    here = cluster(2)
    first, second = here.network.hosts
    here.spread(1, 1, options=["--metrics", f"{first.address}:9464", "--page", f"{first.address}:9465"])
    begun, then = (agent.folder for agent in here.agents)
    key = (begun / "reading_key").read_text().strip()
    here.until(lambda: step_of(told_from(second, begun, "/metrics", key, 9464)) > 2)
    here.agents[0].kill()
    here.until(lambda: "does not answer; the workers of this host wait" in here.agents[1].text)
    paceline("run", "--take-over", then, cwd=here.folder)
    here.members(1, agent=1)
    targets = [{"targets": [f"{second.address}:9464"]}]
    here.until(lambda: json.loads((begun / "metrics.json").read_text()) == targets)
    assert json.loads((then / "metrics.json").read_text()) == targets
    before = here.status(1)["step"]
    here.until(lambda: step_of(told_from(second, begun, "/metrics", key, 9464)) > before)
    for folder in begun, then:
        assert (folder / "page").read_text() == f"http://{second.address}:9465/#{key}\n"
        assert (folder / "page").stat().st_mode & 0o777 == 0o600
    jar = str(here.folder / "cookies")
    told_from(second, then, "/session", key, 9465, "--cookie-jar", jar)
    view = told_from(second, then, "/view", "", 9465, "--cookie", jar)
    assert ">Running<" in view
    here.until(lambda: not serving_process(here.folder, "run-0"))  # it has waited for a last question
    assert json.loads((begun / "metrics.json").read_text()) == targets, "it does not take back what is another's"
    here.end(-9, 0)
    here.until(lambda: json.loads((begun / "metrics.json").read_text()) == [])


# ---- a real Prometheus


def api(port: int, path: str) -> object:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert answer["status"] == "success", answer
    return answer["data"]


def query(port: int, text: str) -> list[dict[str, object]]:
    from urllib.parse import quote

    return api(port, f"/api/v1/query?query={quote(text)}")["result"]  # type: ignore[index]


@pytest.mark.slow
def test_a_real_prometheus_finds_scrapes_and_warns(tmp_path: Path) -> None:
    if not (shutil.which("prometheus") and shutil.which("promtool")):
        pytest.skip("no prometheus and promtool here: apt-get install prometheus")
    port, here, run = free_port(), free_port(), tmp_path / "out"
    for option, name in ("--rules", "rules.yml"), ("--dashboard", "dashboard.json"):
        (tmp_path / name).write_text(paceline("metrics", option, cwd=tmp_path).stdout)
    checked = subprocess.run(["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [rules.yml]\nscrape_configs:\n"
        f"- job_name: paceline\n  authorization: {{credentials_file: {run}/reading_key}}\n"
        f"  file_sd_configs: [{{files: [{run}/metrics.json], refresh_interval: 1s}}]\n"
    )
    run.mkdir()
    with running(tmp_path, "--metrics", f"127.0.0.1:{port}") as process:
        until((run / "metrics.json").exists)
        server = subprocess.Popen(
            [
                "prometheus",
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=db",
                f"--web.listen-address=127.0.0.1:{here}",
            ],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def has(text: str, *values: float) -> bool:
            try:
                found = [float(one["value"][1]) for one in query(here, text)]  # type: ignore[index]
            except (OSError, ValueError):  # it is not ready yet
                return False
            return bool(found) and (not values or sorted(found) == sorted(values))

        try:
            until(
                lambda: has("up", 1) and has("paceline_step > 0") and has("rate(paceline_samples_total[10s]) > 0"), 60
            )
            until(lambda: has("paceline_worker_up", 1, 1) and has("paceline_goodput_ratio"), 60)
            named = {metric["__name__"] for metric in (one["metric"] for one in query(here, '{run="out"}'))}  # type: ignore
            for panel in json.loads((tmp_path / "dashboard.json").read_text())["panels"]:
                text = panel["targets"][0]["expr"].replace("$run", ".*")
                name = re.search(r"paceline_\w+", text)[0]  # type: ignore[index]
                assert bool(query(here, text)) == (name in named), text
            assert {metric.name for metric in METRICS} - named == {
                *(
                    "paceline_tokens_per_second",
                    "paceline_step_metric",
                    "paceline_memory_bytes",
                ),
                "paceline_checkpoint_step",
                "paceline_link_bytes_total",  # one host
            }
            (rules,) = api(here, "/api/v1/rules")["groups"]  # type: ignore[index]
            assert {rule["name"]: rule["health"] for rule in rules["rules"]} == {name: "ok" for name, *_ in ALERTS}
            process.send_signal(signal.SIGKILL)  # the whole command: nobody says that the run has ended
            until(lambda: not serving_process(tmp_path), 30)
            until(lambda: not has("up"), 30)  # the target is gone from the file
        finally:
            server.kill()
            server.wait()
