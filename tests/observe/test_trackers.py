"""Trackers of experiments: what each has of a run, read back with its own library, and what happens if one fails."""

from __future__ import annotations

import csv
import json
import struct
import sys
import threading
import zipfile
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from journals import step
from launching import paceline, train_basics

from paceline.base.journal import Journal, effective_steps, read_journal
from paceline.base.logger_names import parse_loggers
from paceline.errors import UsageError
from paceline.launch.local import _check
from paceline.launch.options import LaunchOptions
from paceline.observe.loggers import Loggers
from paceline.observe.media import Histogram, Image
from paceline.observe.trackers.tensorboard_files import TensorBoard
from paceline.observe.trackers.tracker import LoggedRun
from paceline.observe.trackers.weights_and_biases import WandB

START = {
    "workers": 2,
    "plan": "data=2",
    "seed": 7,
    "device": "cpu",
    "script": "train.py",
    "argv": ["train.py", "--big"],
}
BEST = {"trainer": 0, "name": "accuracy", "mode": "max"}


def log_attempt(folder: Path, loggers: Loggers, resumed: int | None, last: int) -> None:
    """Trains until step `last`; the best checkpoint is that of the last step."""
    journal = Journal(folder, loggers)
    journal.write("start", **{**START, "workers": 2 if resumed is None else 3}, resumed_from=resumed)
    journal.write("config", trainer=0, values={"lr": 0.1, "name": "small"})
    for number in range((resumed or 0) + 1, last + 1):
        journal.write("step", **step(number, loss=1 / number, steps=1, samples=8, tokens=800, seconds=0.5))
        journal.write("log", trainer=0, step=number, values={"mine": number, "text": f"text {number}"})
        if number == (resumed or 0) + 1:  # a trainer that the script makes after the first step
            journal.write("config", trainer=1, values={"width": 8})
        journal.write("step", **step(number, trainer=1, loss=10 / number))
        media = {"sample": Image(np.full((2, 3), number / 10)), "weights": Histogram(np.arange(4.0), bins=2)}
        for name, medium in media.items() if number in (1, last) else ():
            journal.write("media", trainer=0, step=number, name=name, **medium.event(folder, name, number))
    journal.write("memory", trainer=0, parameters=10, gradients=20, optimizer=30, process=None)
    path = folder / "checkpoints" / f"step-{last:012}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"step": last}))
    best = [{**BEST, "value": last / 10}]
    journal.write("checkpoint", step=last, path=f"checkpoints/{path.name}", seconds=0.25, took=0.5, best=best)
    journal.write("finished", step=last)
    journal.close()


def log_run(folder: Path, name: str, upload: bool = False) -> str:
    """A first attempt makes four steps; the second resumes from step 2 and makes six. Returns the identifier."""
    said: list[str] = []
    kept = []
    for resumed, last in ((None, 4), (2, 6)):
        loggers = Loggers(folder, say=said.append)
        loggers.add(name, upload)
        log_attempt(folder, loggers, resumed, last)
        ((_, position),) = json.loads((folder / "loggers.json").read_text()).items()
        kept.append(position.get("id"))
    assert said == []
    assert kept[0] == kept[1]
    return str(kept[0])


def expected(tag: str) -> list[tuple[int, float]]:
    values = {"loss": lambda n: 1 / n, "mine": float, "trainer 1/loss": lambda n: 10 / n}
    return [(number, values[tag](number)) for number in range(1, 7)]


def test_csv_tables(tmp_path: Path) -> None:
    log_run(tmp_path, "csv")
    with (tmp_path / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for tag in ("loss", "mine", "trainer 1/loss"):
        assert [(int(row["step"]), float(row[tag])) for row in rows if row[tag]] == expected(tag)
    assert [row["text"] for row in rows] == [f"text {number}" for number in range(1, 7)]
    assert rows[-1]["memory/optimizer"] == "30.0"
    assert rows[0]["throughput/tokens_per_s"] == "1600.0"
    assert rows[-1]["best/accuracy"] == "0.6"
    assert Path(rows[-1]["best/accuracy checkpoint"], "manifest.json").exists()
    assert Path(rows[-1]["sample"]).exists()
    assert rows[-1]["weights mean"] == "1.5"
    with (tmp_path / "csv" / "config.csv").open(newline="") as file:
        config = dict(csv.reader(file))
    assert config["lr"] == "0.1"
    assert config["paceline.plan"] == "data=2"
    assert config["paceline.workers"] == "3"
    assert config["paceline.arguments"] == "--big"
    assert config["trainer 1/width"] == "8"
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "csv").iterdir()} == {0o600}


def steps_in(table: Path) -> list[int]:
    with table.open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def test_a_second_run_in_a_folder_of_tables_keeps_those_of_the_first(tmp_path: Path) -> None:
    said: list[str] = []
    results = tmp_path / "results"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for resumed, last in ((None, 4), (2, 6)):
            loggers = Loggers(tmp_path / name, parse_loggers(f"csv:{results}"), said.append)
            log_attempt(tmp_path / name, loggers, resumed, last)
        with (results / "config.csv").open("a") as file:
            file.write(f"of {name},1\n")
    assert said == [f"the logger csv writes to {results}/metrics-2.csv, because the folder has tables of another run"]
    assert steps_in(results / "metrics.csv") == steps_in(results / "metrics-2.csv") == [*range(1, 7)]
    with (results / "config-2.csv").open(newline="") as file:
        config = dict(csv.reader(file))
    assert (config["lr"], "of a" in config) == ("0.1", False)
    assert len(list(results.iterdir())) == 4


@pytest.mark.parametrize("name", ["metrics.csv", "config.csv"])
def test_files_of_others_in_a_folder_of_tables_stay(tmp_path: Path, name: str) -> None:
    said: list[str] = []
    tmp_path.joinpath("results").mkdir()
    (tmp_path / "results" / name).write_text("name,score,place\nmine,1,2\n")
    loggers = Loggers(tmp_path, parse_loggers(f"csv:{tmp_path}/results"), said.append)
    log_attempt(tmp_path, loggers, None, 4)
    assert (tmp_path / "results" / name).read_text() == "name,score,place\nmine,1,2\n"
    assert steps_in(tmp_path / "results" / "metrics-2.csv") == [1, 2, 3, 4]
    assert len(said) == 1


def test_a_table_that_was_changed_into_another_one_is_refused(tmp_path: Path) -> None:
    said: list[str] = []
    log_attempt(tmp_path, Loggers(tmp_path, parse_loggers("csv"), said.append), None, 4)
    table = tmp_path / "csv" / "metrics.csv"
    table.write_text(table.read_text().replace("step", "number", 1))
    changed = table.read_text()
    log_attempt(tmp_path, Loggers(tmp_path, parse_loggers("csv"), said.append), 2, 6)
    assert said == [f"nothing is logged to csv: {table} has no column 'step'; move it away, and resume the run"]
    assert table.read_text() == changed


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = f"file://{tmp_path}/store"
    number = log_run(tmp_path, f"mlflow:{store}", upload=True)
    from mlflow import MlflowClient

    client = MlflowClient(store)
    (run,) = client.search_runs(["0"])
    assert run.info.run_id == number
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    for tag in ("loss", "mine", "trainer 1/loss"):
        assert [(one.step, one.value) for one in client.get_metric_history(number, tag)] == expected(tag)
    assert run.data.metrics["memory/optimizer"] == 30
    assert run.data.params == {"lr": "0.1", "name": "small", "trainer 1/width": "8"}
    assert run.data.tags["paceline.workers"] == "3"
    assert run.data.tags["paceline.plan"] == "data=2"
    assert run.data.tags["best.accuracy"] == "0.6"
    stored = client.download_artifacts(number, "")
    assert Path(stored, "texts", "text", "step-6.txt").read_text() == "text 6"
    assert len(list(Path(stored, "media", "sample").iterdir())) == 3  # of steps 1, 4 and 6
    assert json.loads(Path(stored, "media", "weights", "step-6.json").read_text())["counts"] == [2, 2]
    assert Path(stored, "checkpoints", "best.accuracy", "step-6", "manifest.json").exists()


def wandb_records(path: Path) -> list[Any]:
    """The records of an offline run: blocks of 32 KiB with parts of records, as LevelDB writes its log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, records, rest, at = path.read_bytes(), [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        rest += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of one
            records.append(Record.FromString(rest))
            rest = b""
    return records


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    wandb.teardown()  # it has read the variables
    number = log_run(tmp_path, "wandb:team/digits", upload=True)
    wandb.teardown()  # ends the service that writes the files
    values: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    config, summary, runs = {}, {}, []
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    for record in (record for path in files for record in wandb_records(path)):
        for item in record.history.item:
            values["/".join(item.nested_key) or item.key].append((record.history.step.num, json.loads(item.value_json)))
        for update in (record.run.config.update, record.config.update):
            config |= {item.key: json.loads(item.value_json) for item in update}
        summary |= {"/".join(item.nested_key) or item.key: item.value_json for item in record.summary.update}
        runs += [record.run] if record.HasField("run") else []
    assert {(run.run_id, run.display_name, run.entity, run.project) for run in runs} == {
        (number, tmp_path.name, "team", "digits")
    }
    assert values["loss"] == expected("loss")
    assert values["mine"] == expected("mine")
    assert values["trainer 1/loss"] == expected("trainer 1/loss")
    assert values["text"] == [(step, f"text {step}") for step in range(1, 7)]
    assert {config[name] for name in ("lr", "paceline.plan", "paceline.workers")} == {0.1, "data=2", 3}
    assert config["trainer 1/width"] == 8
    assert json.loads(summary["best/accuracy"]) == 0.6
    images = [item for name, item in values.items() if name.startswith("sample")]
    assert images
    assert any(name.startswith("weights") for name in values)


class ResumedRun:
    """A run of W&B that was resumed online: values of a step before the last one are dropped, as W&B does."""

    id, starting_step = "abc", 7

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        pass

    def log(self, values: dict[str, float], step: int) -> None:
        if step >= max([self.starting_step, *(number for number, _ in self.rows)]):
            self.rows.append((step, values))


def test_a_resumed_run_of_wandb_loses_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # it has read the variables
    run = ResumedRun()
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    tracker = WandB("digits")
    assert tracker.begin(LoggedRun(tmp_path, "a", "train", "abc")) == "abc"
    for step_number, name in ((5, "loss"), (5, "trainer 1/loss"), (6, "loss"), (20, "loss")):
        tracker.write(step_number, {name: 0.5})
    assert run.rows == [
        (7, {"loss": 0.5, "step": 5}),
        (7, {"trainer 1/loss": 0.5, "trainer 1/step": 5}),
        (8, {"loss": 0.5, "step": 6}),
        (20, {"loss": 0.5, "step": 20}),
    ]
    wandb.teardown()


@pytest.mark.slow
def test_comet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path / "comet"))
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "CRITICAL")
    key = log_run(tmp_path, "comet:team/digits", upload=True)
    messages, about = [], []
    for path in sorted((tmp_path / "comet").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        with zipfile.ZipFile(path) as file:
            about.append(json.loads(file.read("experiment.json")))
            messages += [json.loads(line) for line in file.read("messages.json").splitlines()]
    assert {(one["offline_id"], one["workspace"], one["project_name"]) for one in about} == {(key, "team", "digits")}
    assert len(about) == 2
    metrics: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for message in messages:
        if message["type"] == "metric_msg":
            metric = message["payload"]["metric"]
            metrics[metric["metricName"]].append((metric["step"], metric["metricValue"]))
    for tag in ("loss", "mine", "trainer 1/loss"):
        assert metrics[tag] == expected(tag)
    parameters = {
        m["payload"]["param"]["paramName"]: m["payload"]["param"] for m in messages if m["type"] == "parameter_msg"
    }
    assert {parameters[name]["paramValue"] for name in ("lr", "paceline.plan", "paceline.workers")} == {
        0.1,
        "data=2",
        3,
    }
    others = {m["payload"]["key"]: m["payload"]["value"] for m in messages if m["type"] == "log_other"}
    assert others["best/accuracy"] == 0.6
    uploads = [m["payload"]["additional_params"] for m in messages if m["type"] == "file_upload"]
    names = {one.get("fileName") or one["figName"] for one in uploads}
    assert {"sample", "weights.json", "step-000000000006/manifest.json"} <= names


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip("trackio", reason="no Trackio: pip install 'paceline[trackio]'")
    name = log_run(tmp_path, "trackio:digits", upload=True)
    assert name == tmp_path.name
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("digits") == [name]
    rows = SQLiteStorage.get_logs("digits", name)
    for tag in ("loss", "mine", "trainer 1/loss"):
        assert [(row["step"], row[tag]) for row in rows if tag in row] == expected(tag)
    assert [row["text"] for row in rows if "text" in row] == [f"text {number}" for number in range(1, 7)]
    assert [row["best/accuracy"] for row in rows if "best/accuracy" in row] == [0.4, 0.6]
    assert any("sample" in row for row in rows)
    assert any("weights" in row for row in rows)
    config = SQLiteStorage.get_run_config("digits", name)
    assert (config["lr"], config["paceline.plan"], config["trainer 1/width"]) == (0.1, "data=2", 8)
    (artifact,) = SQLiteStorage.list_artifacts("digits")
    assert artifact["name"] == f"best-accuracy-{name}".replace("_", "-")


class StandInRun:
    def log(self, values: dict[str, Any], step: int) -> None:
        pass

    def finish(self) -> None:
        pass


def test_trackio_gets_the_config_of_all_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a config only when a run begins, and replaces the one before. `width` comes after the first values."""
    begun: list[dict[str, Any]] = []

    def init(**about: Any) -> StandInRun:
        begun.append(about)
        return StandInRun()

    kinds = {"Image": lambda path: path, "Histogram": lambda np_histogram: np_histogram}
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init, **kinds))
    monkeypatch.setattr("paceline.base.logger_names.find_spec", lambda name: name)
    log_attempt(tmp_path, Loggers(tmp_path, parse_loggers("trackio:digits")), None, 4)
    configs = [about["config"] for about in begun]
    assert [(config["lr"], config["paceline.workers"], config.get("trainer 1/width")) for config in configs] == [
        (0.1, 2, None),
        (0.1, 2, 8),
    ]
    assert {(about["name"], about["resume"]) for about in begun} == {(tmp_path.name, "allow")}
    begun.clear()
    journal = Journal(tmp_path, Loggers(tmp_path, parse_loggers("trackio:digits")))  # of a worker that takes over
    journal.write("step", **step(5))
    journal.close()
    assert [about["config"] for about in begun] == configs[1:]


# ---- OpenTelemetry


class Collector(ThreadingHTTPServer):
    """Takes OTLP/HTTP as the protocol's own messages. The first `refused` requests are answered with an error."""

    def __init__(self, refused: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.refused, self.errors = refused, 0
        self.metrics: list[Any] = []
        self.spans: list[Any] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def points(self, name: str) -> list[Any]:
        return [
            point
            for request in self.metrics
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.gauge.data_points
        ]

    def all_spans(self) -> list[Any]:
        return [
            span
            for request in self.spans
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.errors < self.server.refused:
            self.server.errors += 1
            self.send_error(400)
            return
        if self.path == "/v1/metrics":
            self.server.metrics.append(ExportMetricsServiceRequest.FromString(body))
        else:
            assert self.path == "/v1/traces"
            self.server.spans.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_opentelemetry(tmp_path: Path) -> None:
    with Collector() as collector:
        trace = log_run(tmp_path, f"otlp:{collector.address}")
    for tag, name in (("loss", "paceline.loss"), ("mine", "paceline.mine")):
        points = [point for point in collector.points(name) if not point.attributes]
        assert [point.as_double for point in points] == [value for _, value in expected(tag)]
        assert [point.time_unix_nano for point in points] == sorted(point.time_unix_nano for point in points)
    other = [point for point in collector.points("paceline.loss") if point.attributes]
    assert [point.as_double for point in other] == [value for _, value in expected("trainer 1/loss")]
    assert attributes(other[0]) == {"trainer": 1}
    assert {point.as_double for point in collector.points("paceline.memory.optimizer")} == {30}
    (unit,) = {
        metric.unit
        for request in collector.metrics
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
        if metric.name == "paceline.time.compute"
    }
    assert unit == "s"
    spans = collector.all_spans()
    assert {span.trace_id.hex() for span in spans} == {trace}
    first, second = (span for span in spans if span.name == "attempt")
    assert attributes(second)["paceline.workers"] == 3
    assert attributes(second)["config.lr"] == 0.1
    assert attributes(second)["config.trainer 1/width"] == 8
    assert not first.parent_span_id
    steps = [span for span in spans if span.name == "steps" and attributes(span)["trainer"] == 0]
    assert [attributes(span)["step"] for span in steps] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert {span.parent_span_id for span in steps[:4]} == {first.span_id}
    assert {span.parent_span_id for span in steps[4:]} == {second.span_id}
    assert [span.end_time_unix_nano - span.start_time_unix_nano for span in steps] == [pytest.approx(5e8, rel=1e-6)] * 8
    saved = [span for span in spans if span.name == "checkpoint"]
    assert [attributes(span)["step"] for span in saved] == [4, 6]
    assert [event.name for event in second.events][-1] == "finished"


def test_a_collector_that_refuses_gets_everything_later(tmp_path: Path) -> None:
    said: list[str] = []
    with Collector(refused=1) as collector:
        loggers = Loggers(tmp_path, parse_loggers(f"otlp:{collector.address}"), said.append)
        log_attempt(tmp_path, loggers, None, 4)
    assert collector.errors == 1
    assert said == [
        "the logger otlp failed (ConnectionError: the collector did not take metrics); "
        "training goes on, and it gets the missing values later"
    ]
    points = [point.as_double for point in collector.points("paceline.loss") if not point.attributes]
    assert points == [value for _, value in expected("loss")[:4]]


# ---- failures


class Failing:
    """Raises an exception at one step, the first time."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error
        self.steps: list[int] = []

    def write(self, step: int, values: dict[str, Any]) -> None:
        if step == 2 and self.error is not None:
            error, self.error = self.error, None
            raise error
        self.steps += [step] if "mine" in values else []


@pytest.mark.parametrize(
    ("error", "steps", "text"),
    [
        (
            KeyError("loss"),
            [1, 2, 3, 4],
            "the logger Failing failed at step 2 (KeyError: 'loss'); training goes on without this record",
        ),
        (
            TimeoutError("no answer"),
            [1, 2, 3, 4],
            "the logger Failing failed (TimeoutError: no answer); "
            "training goes on, and it gets the missing values later",
        ),
    ],
)
def test_a_logger_that_fails(tmp_path: Path, error: Exception, steps: list[int], text: str) -> None:
    said: list[str] = []
    logger, loggers = Failing(error), Loggers(tmp_path, say=said.append)
    loggers.add(logger)
    log_attempt(tmp_path, loggers, None, 4)
    assert logger.error is None
    assert said == [text]
    assert list(dict.fromkeys(logger.steps)) == steps


class Hanging:
    background = True

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.has_written = threading.Event()

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.has_written.set()
        self.go_on.wait()


def test_a_logger_that_hangs_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.observe.loggers.LINGER", 0.5)
    said: list[str] = []
    logger, loggers = Hanging(), Loggers(tmp_path, say=said.append)
    loggers.add(logger)
    log_attempt(tmp_path, loggers, None, 4)
    assert logger.has_written.is_set()
    logger.go_on.set()
    assert said == ["the logger Hanging has not taken everything within 0 s; it gets the rest when the run is resumed"]


def test_wandb_without_a_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    for name, value in (("WANDB_MODE", "online"), ("HOME", str(tmp_path / "home")), ("NETRC", str(tmp_path / "no"))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()  # it has read the variables
    said: list[str] = []
    log_attempt(tmp_path, Loggers(tmp_path, parse_loggers("wandb"), said.append), None, 2)
    assert said == [
        "nothing is logged to wandb: W&B knows no API key; "
        "run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
    ]


def test_unknown_names_and_missing_packages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = Loggers(tmp_path)
    with pytest.raises(UsageError) as caught:
        loggers.add("csv,wandbb:x")
    assert str(caught.value) == (
        "log_to() names csv,wandbb:x, and no logger has the name wandbb; "
        "use one of comet, csv, mlflow, otlp, tensorboard, trackio, wandb"
    )
    monkeypatch.setattr("paceline.base.logger_names.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        loggers.add("mlflow")
    assert str(caught.value) == (
        "nothing can be logged to mlflow, because the package mlflow is not installed; "
        "run pip install 'paceline[mlflow]'"
    )


def test_the_command_line_and_the_script_name_one_logger(tmp_path: Path) -> None:
    loggers = Loggers(tmp_path, parse_loggers("csv:a, mlflow,csv:b"))
    for name in ("csv", "csv:b", "mlflow:sqlite:///x.db", "csv:c"):
        loggers.add(name, upload=True)
    assert [(feed.name, feed.target) for feed in loggers._all] == [
        ("csv", "a"),
        ("mlflow", ""),
        ("csv 2", "b"),
        ("csv 3", "c"),
    ]
    assert loggers._all[1].logger.upload


SLOWLY = """
import time
trainer = make()
trainer.keep_best("double", mode="min")
trainer.config(lr=0.1)
trainer.log_to("csv:table")
for report in trainer.steps(data, count=12):
    trainer.log(double=2 * report.loss)
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_through_a_loss_of_worker_0_and_a_resume(tmp_path: Path) -> None:
    with Collector() as collector:
        options = ("--log-to", f"otlp:{collector.address}", "--save-every", "3", "--plan", "micro=12")
        stopped = train_basics(tmp_path, SLOWLY, 2, *options, "--steps", "8", chaos="kill:0@5.backward")
        assert "worker 0 was killed by SIGKILL" in stopped.stderr
        train_basics(tmp_path, None, 2, *options)
    run = tmp_path / "out"
    records = {event["step"]: event["loss"] for event in effective_steps(read_journal(run))}
    with (tmp_path / "table" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert {int(row["step"]): float(row["loss"]) for row in rows if row["loss"]} == records
    assert all(row["double"] for row in rows)
    assert {int(row["step"]): float(row["double"]) / 2 for row in rows if row["loss"]} == pytest.approx(records)
    best = [row["best/double checkpoint"] for row in rows if row["best/double"]]
    assert Path(best[-1], "manifest.json").exists()
    points = {point.as_double for point in collector.points("paceline.loss")}
    assert points == set(records.values())
    assert {span.trace_id.hex() for span in collector.all_spans()} == {
        json.loads((run / "loggers.json").read_text())["otlp"]["id"]
    }


def test_a_line_says_where_upload_has_no_effect(tmp_path: Path) -> None:
    said: list[str] = []
    loggers = Loggers(tmp_path, say=said.append)
    loggers.add("mlflow:sqlite:///x.db,csv:c", upload=True)
    loggers.add(Failing(KeyError()))
    assert said == []
    loggers.add("csv,otlp", upload=True)
    loggers.add(TensorBoard(), upload=True)
    loggers.add(Failing(KeyError()), upload=True)
    assert said == [
        f"upload=True has no effect on {name}: only wandb, mlflow, trackio and comet store checkpoints"
        for name in ("csv,otlp", "TensorBoard", "Failing")
    ]


def test_run_refuses_what_it_cannot_log_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    refused = paceline("run", "--log-to", "csv,nothing", script, cwd=tmp_path, code=2)
    assert refused.stderr == (
        "paceline: --log-to names csv,nothing, and no logger has the name nothing; "
        "use one of comet, csv, mlflow, otlp, tensorboard, trackio, wandb\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    monkeypatch.setattr("paceline.base.logger_names.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^nothing can be logged to otlp, because the package opentelemetry is not"):
        _check(LaunchOptions(str(script), log_to="csv,otlp"))
