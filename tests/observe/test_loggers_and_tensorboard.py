"""What is seen of a run: figures, TensorBoard's files and loggers, each made of the journal alone."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from journals import step, write_run
from launching import train_basics
from paths import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PageReader

from paceline.base.journal import Journal, Reader, effective_steps, read_journal
from paceline.base.logger_names import LoggerName
from paceline.errors import UsageError
from paceline.observe.loggers import Loggers
from paceline.observe.metrics import METRICS, table, unit_of, values_of
from paceline.observe.summary import Summary
from paceline.observe.trackers.tensorboard_files import TensorBoard

SLOWLY = """
import time
trainer = make()
for report in trainer.steps(data, count=COUNT):
    trainer.log(double=2 * report.loss, note=f"step {report.step}")
    time.sleep(0.1)
trainer.export("out.safetensors")
"""


def shown(folder: Path) -> EventAccumulator:
    """As TensorBoard reads it."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def steps_of(found: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(scalar.step, scalar.value) for scalar in found.Scalars(tag)]


def expected(folder: Path, field: str = "loss") -> list[tuple[int, object]]:
    return [(record["step"], pytest.approx(record[field])) for record in effective_steps(read_journal(folder))]


# ---- the table


def figures(summary: Summary) -> dict[str, dict[tuple[str, str], float]]:
    return {metric.name: dict(metric.values(summary)) for metric in METRICS}


def test_the_docs_have_the_table() -> None:
    assert table() in (ROOT / "docs" / "reference" / "journal.md").read_text()


def test_names_are_told_apart() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert (metric.of is None) != (metric.record is None)
        assert metric.name.endswith("_total") == metric.counter
        assert metric.meaning
        assert metric.unit


def test_figures_are_those_of_the_report(tmp_path: Path) -> None:
    write_run(tmp_path)
    summary = Summary(tmp_path)
    found = {name: values.get(("", "")) for name, values in figures(summary).items()}
    assert found["paceline_loss"] == summary.losses[""][1]
    assert found["paceline_step"] == summary.steps_done == 100
    assert (summary.samples, found["paceline_samples_total"]) == (10 * 2560, 11 * 2560)  # one record was done again
    assert found["paceline_steps_total"] == 110
    assert found["paceline_step_seconds"] == 0.05
    assert found["paceline_samples_per_second"] == 5120
    assert found["paceline_journal_events_total"] == summary.number == len(read_journal(tmp_path))
    assert found["paceline_running"] == 0
    assert figures(summary)["paceline_value"][("", "accuracy")] == 0.5


def test_who_reads_as_it_grows_sees_the_same_for_the_same_number(tmp_path: Path) -> None:
    write_run(tmp_path / "whole")
    lines = (tmp_path / "whole" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "part").mkdir()
    path, growing = tmp_path / "part" / "journal.jsonl", Reader(tmp_path / "part")
    for number in range(1, len(lines) + 1):
        half = len(lines[number - 1]) // 2
        with path.open("ab") as file:
            file.write(lines[number - 1][:half])
            file.flush()
            if number > 1:
                assert Summary(path.parent, growing).number == number - 2
            file.write(lines[number - 1][half:])
        live, after = Summary(path.parent, growing), Summary(path.parent)
        assert live.number == after.number == number - 1
        assert figures(live) == figures(after)


def test_workers_are_up_until_they_are_lost(tmp_path: Path) -> None:
    journal, up = Journal(tmp_path), []
    for event in (
        {"event": "start", "workers": 3, "resumed_from": None},
        {"event": "lost", "workers": [1], "mates": [2], "step": 5},
        {"event": "generation", "number": 1, "workers": [0, 3]},
        {"event": "finished", "step": 9},
    ):
        journal.write(event.pop("event"), **event)
        up.append(Summary(tmp_path).up)
    journal.close()
    assert up[0] == {"0": True, "1": True, "2": True}
    assert up[1] == {"0": True, "1": False, "2": False}
    assert up[2] == {"0": True, "1": False, "2": False, "3": True}
    assert up[3] == {}


def test_names_of_the_users_do_not_hide_ours() -> None:
    values = {"loss": 1.0, "mine": 2, "list": [1], "n": 3, "throughput/mfu": 0.5}
    assert values_of({"event": "log", "step": 1, "values": values}) == {
        "own/loss": 1.0,
        "own/throughput/mfu": 0.5,
        "mine": 2,
        "n": 3,
    }
    found = values_of({"event": "step", **step(10, loss=None, metrics={"lr": 0.5, "error": 0.25}, lr=0.1)})
    assert math.isnan(found.pop("loss"))
    assert found == {
        "lr": 0.1,
        "own/lr": 0.5,
        "error": 0.25,
        "throughput/samples_per_s": 5120,
        "time/step": 0.05,
        **{f"time/{part}": seconds / 10 for part, seconds in step(10)["time"].items()},
    }


@pytest.mark.parametrize(("device", "peak"), [("NVIDIA H100 80GB HBM3", 2 * 989e12), ("cpu", None)])
def test_loggers_get_the_speed_of_the_model(tmp_path: Path, device: str, peak: float | None) -> None:
    """Once its operations are counted, and also from a worker that continues the journal later."""
    kept: dict[int, dict[str, float]] = {}

    class Kept:
        def write(self, step: int, values: dict[str, float]) -> None:
            kept[step] = {tag: values[tag] for tag in values if "flops" in tag or "mfu" in tag}

    def log(*events: dict[str, object]) -> None:
        loggers = Loggers(tmp_path)
        loggers.add(Kept())
        journal = Journal(tmp_path, loggers)
        for event in events:
            journal.write(str(event.pop("event")), **event)
        journal.close()

    flops = {"event": "flops", "trainer": 0, "device": device, "per_row": 1e9, "estimated": False, "uncounted": []}
    start = {"event": "start", "workers": 2, "plan": "data=2 precision=bf16", "resumed_from": None}
    log(start, {"event": "step", **step(10)}, flops, {"event": "step", **step(20)})
    log({"event": "step", **step(30)}, {"event": "step", **step(40, trainer=1)})
    speed = {"throughput/flops_per_s": 1e9 * 5120, **({"throughput/mfu": 1e9 * 5120 / peak} if peak else {})}
    assert kept == {10: {}, 20: speed, 30: speed, 40: {}}
    summary = Summary(tmp_path)
    assert (summary.flops_per_second, summary.utilisation) == (1e9 * 5120, speed.get("throughput/mfu"))
    assert unit_of("throughput/flops_per_s") == "1/s"


# ---- TensorBoard


def test_a_journal_becomes_event_files(tmp_path: Path) -> None:
    loggers = Loggers(tmp_path, [LoggerName("tensorboard")])
    journal = Journal(tmp_path, loggers)
    journal.write("start", workers=1, resumed_from=None)
    for number in (1, 2, 3):
        tokens = {"steps": 1, "samples": 8, "tokens": 800, "seconds": 0.5}
        journal.write("step", **step(number, loss=1 / number if number < 3 else math.inf, **tokens))
        journal.write("log", trainer=0, step=number, values={"mine": number, "text": f"**{number}**"})
    journal.write("memory", trainer=0, parameters=10, gradients=20, optimizer=30, process=None)
    journal.close()
    found = shown(tmp_path / "tensorboard")
    assert steps_of(found, "loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(math.nan, nan_ok=True))]
    assert steps_of(found, "throughput/tokens_per_s")[0] == (1, 1600)
    assert steps_of(found, "mine") == [(1, 1), (2, 2), (3, 3)]
    assert steps_of(found, "memory/optimizer") == [(3, 30)]
    texts = [tensor.tensor_proto.string_val for tensor in found.Tensors("text")]
    assert [list(text) for text in texts] == [[b"**1**"], [b"**2**"], [b"**3**"]]
    assert (tmp_path / "tensorboard").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "tensorboard").iterdir()} == {0o600}


@pytest.mark.parametrize("keeps", [False, True], ids=["killed before it wrote how far it was", "after"])
def test_who_takes_over_writes_no_step_twice_and_leaves_none_out(tmp_path: Path, keeps: bool) -> None:
    """The first writer handed on all, half, or nothing of what it did not note; the journal has two more steps."""
    loggers = Loggers(tmp_path, [LoggerName("tensorboard")])
    journal = Journal(tmp_path, loggers)
    journal.write("start", workers=1, resumed_from=None)
    for number in (1, 2, 3):
        journal.write("log", trainer=0, step=number - 1, values={"before": number})
        journal.write("step", **step(number))
        loggers._looked = 0.0
        loggers.hear()
        note = (tmp_path / "loggers.json").read_text()
    journal.write("log", trainer=0, step=3, values={"mine": 3})
    journal.write("step", **step(4))
    loggers._looked = 0.0
    loggers.hear()  # and is killed
    if not keeps:
        (tmp_path / "loggers.json").write_text(note)
    others = Loggers(tmp_path)
    others.add(TensorBoard())
    journal = Journal(tmp_path, others)
    journal.write("log", trainer=0, step=4, values={"mine": 4})
    journal.write("step", **step(5))
    journal.close()
    found = shown(tmp_path / "tensorboard")
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert [number for number, _ in steps_of(found, "loss")] == [1, 2, 3, 4, 5]
    assert steps_of(found, "before") == [(0, 1), (1, 2), (2, 3)]
    assert steps_of(found, "mine") == [(3, 3), (4, 4)]


def test_written_through_a_loss_of_worker_0_and_a_resume(tmp_path: Path) -> None:
    """Worker 0 is killed; the run is stopped, goes on from its checkpoint in other files, and ends."""
    options = ("--tensorboard", "--save-every", "3", "--plan", "micro=12")
    stopped = train_basics(
        tmp_path, SLOWLY.replace("COUNT", "12"), 2, *options, "--steps", "8", chaos="kill:0@5.backward"
    )
    assert "worker 0 was killed by SIGKILL" in stopped.stderr
    run = tmp_path / "out"
    first = len(list((run / "tensorboard").iterdir()))
    assert first == 2  # one of each who was main
    train_basics(tmp_path, None, 2, *options)
    found = shown(run / "tensorboard")
    assert len(list((run / "tensorboard").iterdir())) == 3
    assert steps_of(found, "loss") == expected(run)
    assert steps_of(found, "lr") == expected(run, "lr")
    assert [number for number, _ in steps_of(found, "double")] == [*range(1, 13)]
    page = PageReader(str(run / "tensorboard"), size_guidance={"tensors": 0})  # which drops texts, too
    page.Reload()
    texts = [(tensor.step, tensor.tensor_proto.string_val[0].decode()) for tensor in page.Tensors("note")]
    assert texts == [(number, f"step {number}") for number in range(1, 13)]


def test_without_the_package_one_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("paceline.base.logger_names.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        TensorBoard()
    assert str(caught.value) == (
        "nothing can be logged to tensorboard, because the package tensorboard is not installed; "
        "run pip install 'paceline[tensorboard]'"
    )


# ---- loggers of others


OWN = """
import json, pathlib
class Lines:
    def write(self, step, values):
        with open("lines.jsonl", "a") as file:
            file.write(json.dumps([step, values]) + "\\n")
trainer = make()
trainer.log_to(Lines())
trainer.log_to(paceline.TensorBoard("board"))
for report in trainer.steps(data, count=4):
    trainer.log(double=2 * report.loss)
"""


def test_a_logger_of_five_lines(tmp_path: Path) -> None:
    train_basics(tmp_path, OWN, 2)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    told = [(number, values["loss"]) for number, values in lines if "loss" in values]
    assert told == [(record["step"], record["loss"]) for record in effective_steps(read_journal(tmp_path / "out"))]
    assert [(number, *values) for number, values in lines if "double" in values] == [
        (n, "double") for n in (1, 2, 3, 4)
    ]
    assert steps_of(shown(tmp_path / "board"), "loss") == expected(tmp_path / "out")


def test_what_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Loggers(tmp_path).add(7)
    assert str(caught.value) == (
        "log_to() needs an object with a method write(step, values), got 7; "
        'pass the name of a logger, as "wandb" or "csv", or add this method'
    )


def test_without_a_run_folder_nothing_is_logged(tmp_path: Path) -> None:
    said = []
    loggers = Loggers(None, say=lambda text, once: said.append(text))
    loggers.add(TensorBoard(tmp_path))
    loggers.hear()
    loggers.close()
    assert said == ["nothing is logged to TensorBoard, because this run has no run folder"]
    assert list(tmp_path.iterdir()) == []


def test_where_workers_are_is_known_though_they_begin_before_their_attempt(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for attempt, workers in enumerate((3, 2)):
        for worker in range(workers):
            journal.write("worker", worker=worker, life=0, host=f"{'ab'[attempt]}{worker}", pid=1, what="started")
        journal.write("start", workers=workers, resumed_from=None)
    assert Summary(tmp_path).hosts == {"0": "b0", "1": "b1"}
