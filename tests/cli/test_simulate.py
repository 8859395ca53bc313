"""`paceline simulate`: what it prints and writes for descriptions and for runs, with one thing changed, and refuses."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from golden import GoldenText
from journals import step, write_run

from paceline.base.journal import Journal
from paceline.cli.main import main
from paceline.observe.summary import Summary
from paceline.observe.usual_step import usual_step
from paceline.plan import Plan
from paceline.planner.days import DAY, Day, DaySpan, GivenLoss, simulate
from paceline.planner.decoders import DecoderShape, decoder
from paceline.planner.descriptions import (
    FailureDescription,
    LinkDescription,
    MachineDescription,
    ModelDescription,
    as_json,
    described,
)
from paceline.planner.outlook import Outlook
from paceline.planner.scenarios import changed, from_descriptions, from_run
from paceline.planner.simulation_page import by_hour
from paceline.planner.step_time import step_time

FAILURES = FailureDescription(worker_hours=2000, detect=20, form=5, restart=300, repair_hours=12, spares=8)
LINKS = [{"name": "inside", "workers": 8, "bandwidth": 4e11}, {"name": "between", "workers": 0, "bandwidth": 1e9}]
CLUSTER = MachineDescription(
    "cluster",
    {"bf16": 1e15},
    8e10,
    3e12,
    workers_per_host=8,
    failures=FAILURES,
    checkpoint_bandwidth=2e10,
    price=2.5,
    watts=800.0,
)
SHAPE = DecoderShape(32, 4096, 32, tokens=4096, vocabulary=32000, key_value_heads=8, feed_forward=14336, gated=True)
MODEL = {
    "version": 1,
    "name": "GPT",
    "blocks": [{"name": "blocks", "parameters": 200_000_000, "count": 40}],
    "global_batch": 1024,
    "tokens": 4096,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with descriptions of machines and of a model."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.json").write_text(json.dumps({**as_json(CLUSTER), "links": LINKS}))
    Path("model.json").write_text(json.dumps(MODEL))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["simulate", *words]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


DESCRIBED = ("model.json", "--on", "cluster.json", "--workers", "512", "--plan", "tensor=8", "--step-seconds", "6")


def test_steps_of_a_described_model_are_predicted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From one file with both descriptions; other plans, links and teams are predicted, too."""
    model, machine = decoder(SHAPE, global_batch=256), MachineDescription.read("h100")
    Path("both.json").write_text(json.dumps({"model": as_json(model), "machine": as_json(machine)}))
    plan, other = "shard=64 zero=3 micro=1", "shard=16 zero=1 tensor=4 micro=1"
    words = ["both.json", "--on", "both.json", "--workers", "64", "--plan", plan, "--seeds", "1", "--json"]
    found = json.loads(printed(capsys, *words, "--with", f"plan={other}", "--with", "link=2x", "--with", "workers=128"))
    expected = {
        "redo": step_time(Plan.parse(plan), model, machine, 64).total,
        f"plan={other}": step_time(Plan.parse(other), model, machine, 64).total,
        "link=2x": step_time(Plan.parse(plan), model, machine.with_links(2), 64).total,
    }
    assert {name: found[name]["scenario"]["step"] for name in expected} == pytest.approx(expected)
    assert found["link=2x"]["scenario"]["step"] < found["redo"]["scenario"]["step"]


def test_seconds_that_were_measured_elsewhere_say_nothing_about_a_data_sheet(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = as_json(decoder(SHAPE, global_batch=256))
    steps = []
    for seconds in ({}, {"1": 3.0}):
        blocks = [{**block, "seconds": seconds} for block in model["blocks"]]
        Path("measured.json").write_text(json.dumps({**model, "blocks": blocks}))
        words = [
            "measured.json",
            "--on",
            "h100",
            "--workers",
            "64",
            "--plan",
            "shard=64 zero=3 micro=1",
            "--seeds",
            "1",
        ]
        steps.append(json.loads(printed(capsys, *words, "--json"))["redo"]["scenario"]["step"])
    assert steps[0] == steps[1]


def test_changes_apply_to_all_values_of_a_sweep(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--save-seconds", "4", "--sweep", "every=60..7200", "--seeds", "1", "--days", "0.1", "--json")
    found = json.loads(printed(capsys, *DESCRIBED, *words, "--with", "workers=256", "--with", "spares=3"))
    scenarios = [each["redo"]["scenario"] for each in found]
    assert {(one["workers"], one["spares"]) for one in scenarios} == {(256, 3)}
    assert len({one["every"] for one in scenarios}) == len(found)


def test_what_is_printed(folder: Path, capsys: pytest.CaptureFixture[str], golden: GoldenText) -> None:
    golden("descriptions", printed(capsys, *DESCRIBED, "--save-seconds", "4", "--save-every", "600s"))
    golden("a sweep", printed(capsys, *DESCRIBED, "--save-seconds", "4", "--sweep", "every=60..7200", "--seeds", "4"))
    calm = json.dumps({**as_json(CLUSTER), "failures": {}})
    Path("calm.json").write_text(calm)
    never = (
        "--on",
        "calm.json",
        "--workers",
        "64",
        "--step-seconds",
        "2",
        "--save-every",
        "auto",
        "--reaction",
        "redo",
    )
    golden("nothing fails", printed(capsys, *never))
    golden("one reaction", printed(capsys, *DESCRIBED, "--reaction", "restart", "--save-every", "auto", "--seeds", "2"))


def test_json_has_an_account_that_adds_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = json.loads(printed(capsys, *DESCRIBED, "--json", "--days", "2", "--with", "spares=+3", "--seeds", "3"))
    assert [*out] == ["restart", "leave-out", "spare", "redo", "spares=+3"]
    for entry in out.values():
        assert sum(entry["account"].values()) == pytest.approx(2 * DAY, rel=1e-9)
        low, high = entry["progress_5_95"]
        assert low <= entry["progress"] <= high
    spare = out["spares=+3"]
    assert spare["scenario"]["spares"] == 11
    assert spare["scenario"]["transfer"] == pytest.approx(8e9 * 4 * 3 / 8 / 1e9), "a worker's part of the state"
    assert spare["scenario"]["write"] == pytest.approx(8e9 * 4 * 3 / 2e10)
    per_day = spare["per_day"]
    assert per_day["tokens"] == pytest.approx(per_day["steps"] * 1024 * 4096)
    assert per_day["price"] == pytest.approx(24 * 523 * 2.5)
    assert per_day["kWh"] == pytest.approx(24 * 523 * 0.8)


def test_the_same_seed_gives_the_same_days(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (printed(capsys, *DESCRIBED, "--json", "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("spares=0..3", [0, 1, 2, 3]),
        ("workers=512..1024", [512, 600, 680, 768, 856, 936, 1024]),
        ("worker_hours=1000..10000", [1000, 1500, 2200, 3200, 4600, 6800, 10000]),
        ("bandwidth=1..4", [1, 1.5, 2, 2.5, 3, 3.5, 4]),
    ],
)
def test_a_sweep_has_a_result_for_each_value(
    sweep: str, values: list[float], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = json.loads(printed(capsys, *DESCRIBED, "--json", "--seeds", "2", "--sweep", sweep))
    word = sweep.partition("=")[0]
    assert [entry[word] for entry in out] == pytest.approx(values)
    scenarios = [entry["redo"]["scenario"] for entry in out]
    if word == "bandwidth":
        assert [scenario["transfer"] * value for scenario, value in zip(scenarios, values, strict=True)] == [12.0] * 7
    else:
        assert [scenario[word] for scenario in scenarios] == pytest.approx(values)
    if word == "workers":  # the same global batch
        assert [scenario["step"] * scenario["workers"] for scenario in scenarios] == pytest.approx([6 * 512] * 7)


def test_given_faults_are_simulated(folder: Path, capsys: pytest.CaptureFixture[str], golden: GoldenText) -> None:
    words = (*DESCRIBED, "--reaction", "redo", "--steps", "100", "--faults", "kill:3@12.forward,stop:500@40.reduced")
    golden("given faults", printed(capsys, *words))


def test_page_and_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, *DESCRIBED, "--html", "days.html", "--trace", "day.json.gz", "--seeds", "2")
    page = Path("days.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", page) == [
        "Result",
        "Account over the first day",
        "Progress by number of workers",
    ]
    assert page.count("<th>hour ") == 24
    assert page.count('class="curve line') == 8, "a curve and a key for each way of reacting"
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    events = json.loads(gzip.decompress(Path("day.json.gz").read_bytes()))["traceEvents"]
    assert sum(event["dur"] for event in events if event["ph"] == "X") == pytest.approx(DAY * 1e6)
    assert {event["name"] for event in events} >= {"steps", "detection", "forming", "speed"}


def test_hours_have_the_parts_of_the_spans() -> None:
    spans = [DaySpan("steps", 0, 3000, 1.0), DaySpan("forming", 3000, 4000), DaySpan("steps", 4000, 5400, 1.0, 140.0)]
    day = Day(5400.0, {}, 0.0, 0, spans)
    assert by_hour(day) == [{"steps": 3000.0, "forming": 600.0}, {"forming": 400.0, "steps": 1260.0, "saving": 140.0}]


def test_refused(folder: Path, capsys: pytest.CaptureFixture[str], golden: GoldenText) -> None:
    write_run(folder / "run")
    for words in (
        [],
        ["--on", "cluster.json"],
        [*DESCRIBED, "--sweep", "every=60"],
        [*DESCRIBED, "--sweep", "luck=1..2"],
        [*DESCRIBED, "--sweep", "every=60..600", "--html", "days.html"],
        [*DESCRIBED, "--with", "luck=3"],
        [*DESCRIBED, "--with", "spares=2.5"],
        [*DESCRIBED, "--with", "link=3"],
        [*DESCRIBED, "--with", "plan=tensor=4"],
        [*DESCRIBED, "--with", "workers=-5"],
        [*DESCRIBED, "--days", "0"],
        [*DESCRIBED, "--faults", "slow:1@2.forward"],
        [*DESCRIBED, "--faults", "kill:512@2.forward"],
        ["run", "--plan", "data=2"],
        ["run", "--with", "host b gone"],
        ["run", "--with", "plan=shard=2 zero=1"],
        ["nowhere"],
    ):
        golden(" ".join(words), printed(capsys, *words, code=2))


def test_better_machines_give_better_figures() -> None:
    model = described(ModelDescription, json.dumps(MODEL).encode(), "model.json")
    links = (LinkDescription("between hosts", 0, 1e9, 1e-5),)
    usual = from_descriptions(msgspec.structs.replace(CLUSTER, links=links), model, 512, "tensor=8", 6.0).scenario
    links = (msgspec.structs.replace(links[0], bandwidth=2e9),)
    faster = msgspec.structs.replace(CLUSTER, links=links, checkpoint_bandwidth=4e10, memory=1.6e11)
    better = from_descriptions(faster, model, 512, "tensor=8", 6.0).scenario
    assert better == replace(usual, write=usual.write / 2, transfer=better.transfer)
    assert better.transfer == pytest.approx(usual.transfer / 2, rel=1e-3)


# ---- of a run


OF_LOSS = {"detection": 0.5, "forming": 0.4, "redone": 0.2, "hand-over": 0.1}


def recorded(folder: Path) -> Summary:
    """A run of four workers on two hosts: 200 steps of 0.5 s, a worker lost and back, two checkpoints."""
    journal = Journal(folder)
    for worker in range(4):
        journal.write("worker", worker=worker, life=0, host="ab"[worker // 2], what="started")
    journal.write("start", workers=4, hosts=2, plan="data=4")
    computed = {"0": 4.0, "1": 4.0, "2": 4.0, "3": 4.0}
    for done in range(10, 210, 10):
        account = {"steps": 5.0} | (OF_LOSS if done == 100 else {})
        account |= {"starting": 3.0} if done == 10 else {"saving": 0.3} if done in (50, 150) else {}
        seconds = {"seconds": 5.0, "time": {"data": 0.0, "compute": 4.0, "reduce": 1.0}, "waited_for": {}}
        fields: dict[str, Any] = {**seconds, "computed": computed, "account": account}
        journal.write("step", **step(done, **fields))
        if done == 100:
            journal.write("lost", workers=[3], why="was killed by SIGKILL", step=100)
            journal.write("formed", number=1, workers=[0, 1, 2], step=100, seconds=0.1)
            journal.write("formed", number=2, workers=[0, 1, 2, 3], step=103, seconds=0.1)
        if done in (50, 150):
            journal.write("checkpoint", step=done, path="x", seconds=0.3, took=2.3, bytes=10)
    journal.write("finished", step=200)
    journal.close()
    lines = (folder / "journal.jsonl").read_text().splitlines()
    stamped = [json.dumps({**json.loads(line), "at": 1000.0 + number}) for number, line in enumerate(lines)]
    (folder / "journal.jsonl").write_text("".join(f"{line}\n" for line in stamped))
    return Summary(folder)


def test_a_runs_own_figures(tmp_path: Path) -> None:
    scenario = from_run(recorded(tmp_path)).scenario
    assert (scenario.workers, scenario.replica, scenario.spares) == (4, 1, 0)
    assert scenario.step == pytest.approx(0.5)
    assert scenario.save == pytest.approx(0.3)
    assert scenario.write == pytest.approx(2.0)
    assert (scenario.detect, scenario.form, scenario.hand_over) == pytest.approx((0.5, 0.2, 0.1))
    assert scenario.restart == pytest.approx(2.0), "from the loss until the team with the worker formed"
    wall = 20 * 5 + 3 + 0.6 + 1.2
    assert scenario.seconds_between_losses == pytest.approx(wall), "one loss"
    with_machine = from_run(recorded(tmp_path / "b"), CLUSTER).scenario
    assert (with_machine.worker_hours, with_machine.spares, with_machine.detect) == (2000, 8, 0.5)
    write_run(tmp_path / "c")
    nothing_lost = from_run(Summary(tmp_path / "c"), CLUSTER).scenario
    assert (nothing_lost.detect, nothing_lost.form, nothing_lost.restart) == (20, 5, 300)


def test_a_run_with_one_thing_changed_is_replayed_as_the_doctor_does(tmp_path: Path) -> None:
    summary = recorded(tmp_path)
    situation, usual = from_run(summary), usual_step(summary)
    assert usual is not None
    assert usual.step_seconds == pytest.approx(0.5)
    # All rows on one worker would take 4 * 0.4 s, and 0.1 s come on top.
    assert changed(situation, "workers=+2").scenario.step == pytest.approx(0.1 + 1.6 / 6)
    assert changed(situation, "workers=+2").scenario.step == pytest.approx(usual.what_if()["with two more workers"])
    assert changed(situation, "workers=3").scenario.step == pytest.approx(0.1 + 1.6 / 3)
    for name in ("b", "1"):
        gone = changed(situation, f"host {name} gone").scenario
        assert (gone.workers, gone.step) == (2, pytest.approx(0.1 + 1.6 / 2))
    faster = changed(situation, "link=2x").scenario
    assert (faster.step, faster.hand_over) == (pytest.approx(0.5 - usual.link / 2), pytest.approx(0.05))
    assert changed(situation, "every=300").scenario == replace(situation.scenario, every=300.0)
    assert changed(situation, "worker_hours=2x").scenario.seconds_between_losses == pytest.approx(
        2 * situation.scenario.seconds_between_losses
    )


@pytest.mark.parametrize("is_auto", [True, False], ids=["a run with auto", "a description"])
def test_a_runs_step_is_changed_by_what_is_predicted_for_another_plan(
    is_auto: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(folder / "run")
    model, machine = decoder(SHAPE, global_batch=256), MachineDescription.read("h100")
    plan, other = "data=4", "shard=4 zero=3"
    before, after = (step_time(Plan.parse(words), model, machine, 4).total for words in (plan, other))
    words = ["run", "--with", f"plan={other}", "--json", "--seeds", "1", "--days", "0.01"]
    if is_auto:
        Outlook(plan, 4, before, before, plan, "", model, machine).write(folder / "run")
    else:
        Path("both.json").write_text(json.dumps({"model": as_json(model), "machine": as_json(machine)}))
        words += ["--on", "both.json"]
    found = json.loads(printed(capsys, *words))
    assert found["redo"]["scenario"]["step"] == pytest.approx(0.5)
    assert found[f"plan={other}"]["scenario"]["step"] == pytest.approx(0.5 * after / before)
    assert found["redo"]["scenario"]["worker_hours"] > 0, "failures are those of the run"


def test_a_run_is_simulated(folder: Path, capsys: pytest.CaptureFixture[str], golden: GoldenText) -> None:
    recorded(folder / "run")
    golden("a run", printed(capsys, "run", "--with", "workers=+2", "--with", "host b gone", "--days", "0.1"))
    printed(capsys, "run", "--html", "run.html", "--days", "0.1", "--seeds", "2")
    assert "<h2>A step by part</h2>" in Path("run.html").read_text()


def test_a_recorded_loss_costs_what_the_journal_has(tmp_path: Path) -> None:
    summary = recorded(tmp_path)
    day = simulate(from_run(summary).scenario, DAY, losses=[GivenLoss(100.0, 3)], steps=200)
    for name in ("detection", "forming", "hand-over", "redone"):
        assert day.account.get(name, 0.0) == pytest.approx(summary.account[name], abs=0.3), name
    # Two of three seconds with three of four workers are longer steps.
    assert day.account["steps"] == pytest.approx(summary.account["steps"], rel=0.02)
