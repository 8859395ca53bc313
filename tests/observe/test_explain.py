"""`paceline explain`: what a run did and why, from its journal; and what a plan comes to."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from agents import journal
from journals import GRID, write_run
from launching import SCRIPTS, paceline, train_basics

from paceline.base.console import RUN_OPTIONS
from paceline.base.environment import FUNCTION
from paceline.base.journal import Journal
from paceline.cli.main import _parser, main
from paceline.observe.drawing import draw, save
from paceline.observe.plan_explanation import PlanExplanation
from paceline.observe.summary import explain
from paceline.plan import Plan


def test_explain_a_finished_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    text = explain(tmp_path)
    for line in (
        "  script              train.py --size 'big one'",
        "  threads per worker  1",
        "  plan    data=2 (from --plan)",
        f"  grid    {GRID}",
        "  micro-batches are merged\n    because the forward drew no random numbers",
        "  waited for  worker 1 0.2 s",
        "  bytes       1 MB per step, 100 MB in total, sent by worker 0",
        "  attempts     2, the last resumed from step 50",
        "  checkpoints  1 written in 0.2 s, the last to checkpoints/step-000000000100",
        "  ended        finished at step 100",
    ):
        assert line in text
    assert text.endswith(f"\n\nNext: paceline export {tmp_path} model.safetensors")


def test_predictions_of_auto_are_shown_beside_what_was_measured(tmp_path: Path) -> None:
    """Those of the plan that was chosen last, with the steps of the attempt under it."""
    journal = Journal(tmp_path)
    about = {"asked": "auto", "workers": 2, "why": "it is fast"}
    journal.write("decision", plan="data=2", what="the plan is 'data=2'", predicted=1.0, memory=1e8, **about)
    journal.write("start", workers=2, plan="data=2", script="train.py")
    journal.write("step", step=1, steps=1, seconds=9.0)
    chosen = {"predicted": 0.16, "tried": 0.18, "memory": 4e8}
    journal.write("decision", plan="pipeline=2", what="the plan changes", **chosen, **about)
    journal.write("start", workers=2, plan="data=1 pipeline=2", script="train.py", resumed_from=1)
    for step in range(2, 12):
        journal.write("step", step=step, steps=1, seconds=0.2)
    journal.write("memory", process=5e8)
    sent = [{"sent": {"stages": 3e6}}] * 2
    journal.write("figures", trainer=0, plan="data=1 pipeline=2", workers=2, predicted=sent, measured=sent)
    row = (
        "  predictions  a step of 160 ms (180 ms in its trial), 200 ms measured (-20%); "
        "400 MB of memory, 500 MB measured (-20%); 3 MB sent in a step, 3 MB measured (+0%)\n"
    )
    assert row in explain(tmp_path)


def test_explain_separates_arguments_that_look_like_options_of_a_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    script = {"script": "train.py", "argv": ["train.py", "--steps=3"]}
    journal.write("start", workers=2, plan="data=2", plan_origin="default", **script)
    assert explain(tmp_path).endswith(f"\nNext: paceline run --workers 2 --run-dir {tmp_path} train.py -- --steps=3")


def test_explain_knows_the_options_of_a_run() -> None:
    usage = vars(_parser("run").parse_args(["run", "train.py"]))["usage"]()
    assert set(re.findall(r"--[a-z-]+", usage)) | {"--help"} == RUN_OPTIONS


def test_explain_the_run_of_a_function(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("start", workers=2, plan="data=2", plan_origin="default", script="a/function.py", module=FUNCTION)
    assert explain(tmp_path).endswith(f"\nNext: call paceline.launch(...) again with run_dir='{tmp_path}'")


def test_explain_a_failed_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    journal = Journal(tmp_path)
    journal.write("start", workers=3, plan="data=3", plan_origin="default", script="a b.py", argv=["a b.py", "-x"])
    journal.write("stopped", step=0, why="a worker failed")
    journal.write("failed", worker=2, host="ada", cause="ValueError: no", code=1, text="worker 2 failed\n  line 3")
    text = explain(tmp_path)
    assert "  failure   worker 2 on ada: ValueError: no\n  ended     failed at step 0: worker 2" in text
    assert text.endswith(
        f"\n\nworker 2 failed\n  line 3\n\nNext: paceline run --workers 3 --run-dir {tmp_path} 'a b.py' -x"
    )


def test_decisions_say_whose_they_are_where_there_are_several_trainers(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for attempt in range(2):  # the second attempt repeats those of the first
        journal.write("start", script="train.py", attempt=attempt)
        for trainer in (0, 1):
            journal.write("decision", trainer=trainer, what="one by one", why=f"reason {trainer}")
    text = explain(tmp_path)
    assert "  trainer 0: one by one\n    because reason 0\n  trainer 1: one by one\n    because reason 1\n" in text


def test_what_kinds_of_collectives_cost_and_the_small_ones_together(tmp_path: Path) -> None:
    write_run(tmp_path)
    kinds = {"gradients": [200, 5_000_000, 2.0], "a checkpoint": [5, 100, 1e4], "export()": [1, 0, 0.0], "x": [2, 9, 0]}
    Journal(tmp_path).write("collectives", kinds=kinds)
    lines = [line for line in explain(tmp_path).splitlines() if "worker 0 waited" in line]
    assert [" ".join(line.split()) for line in lines] == [
        "gradients 200 collectives, 5 MB, worker 0 waited 2.0 s",
        "a checkpoint 5 collectives, 100 B, worker 0 waited 2 h 46 min",
        "other kinds 3 collectives, 9 B, worker 0 waited 0.0 s",
    ]


# ---- a plan

ALL = """\
data=2 tensor=2 pipeline=2: 8 workers; a step of 8 micro-batches, at most 4 for each of 2 units of 4 workers

replica 0    [0 1] > [2 3]
replica 1    [4 5] > [6 7]

data=2       holds a copy of its part of the model, for 1/2 of the micro-batches
             sends its gradients once per step
             waits at the end of a step, for the gradients of other replicas
tensor=2     holds 1/2 of each large layer, and all of the other layers
             sends its part of the outputs of each large layer
             waits in each large layer, for the parts of the other workers
pipeline=2   holds the blocks of 1 of 2 stages, and the activations of at most 2 micro-batches
             sends its outputs to the next stage, and the gradients of its inputs to the previous stage
             waits in a forward pass for the previous stage, in a backward pass for the next one: 20.0% of a step

workers 0-1  stage 0
workers 2-3  stage 1
waiting      1f1b: 20.0% of a step if all stages take equally long, (p-1)/(m+p-1) with p=2, m=4

stage 0      -0----1--         [  0   ]--2--[   1   ]-3--[   2   ]    [   3   ]
stage 1          --0--[   0   ]-1--[   1   ]-2--[   2   ]-3--[   3   ]

a number is the forward pass of a micro-batch, in brackets its backward pass; gaps are waiting time
"""
SHARDS = """\
data=1 shard=6 zero=3 recompute=blocks: 6 workers; a step of 8 micro-batches, at most 2 for each of 6 units of 1 worker

shard 0           0
shard 1           1
shard 2           2
shard 3           3
                  and 2 more units

shard=6           holds 1/6 of the parameters, gradients and optimizer state, and one full block at a time
                  sends its shard of each block twice per micro-batch, and gradients once
                  waits before each block, for the shards of the other workers
recompute=blocks  recompute activations in backward to save memory (activation checkpointing)
"""
SCRIPT = """\
data=2 shard=2 zero=1 micro=3: 4 workers, Net; a step of 8 micro-batches of 3 rows, at most 2 for each of 4 units of \
1 worker

replica 0, shard 0  0
replica 0, shard 1  1
replica 1, shard 0  2
replica 1, shard 1  3

data=2              holds a copy of its part of the model, for 1/2 of the micro-batches
                    sends its gradients once per step
                    waits at the end of a step, for the gradients of other replicas
shard=2             holds all parameters and gradients, and 1/2 of the optimizer state
                    sends its gradients once per step, then the weights that it has updated
                    waits at the end of a step, first for gradients, then for weights
micro=3             samples in a micro-batch (default: an eighth of the global batch)

each worker         layers.0 to 3 (Sequential)
predicted           holds parameters 10.4 kB, gradients 10.4 kB, activations 2.24 kB; sends gradients 10.4 kB, weights \
5.19 kB; computes T

the model is a Net, 1,298 parameters, all trained
seconds and activations were measured on this machine with one micro-batch
"""
BLOCKS = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        x = self.up(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


t = make(model=lambda: Net().double())
for report in t.steps(data, count=6):
    pass
"""
LAYER = (16 * 16 + 16) * 8  # bytes
FIRST, LAST = (10 * 16 + 16) * 8 + 2 * LAYER, (2 * 16 + 2) * 8 + 2 * LAYER


ISLANDS = """\
data=3 local=4 every=64 fragments=8 delay=2 outer_codec=int8: 3 workers; \
a step of 8 micro-batches, at most 4 for each of 3 units of 1 worker

replica 0         0
replica 1         1
replica 2         2

data=3            replicas that compute the islands: each computes at most 2 islands
local=4           holds the inner optimizer state of each of its islands, and the weights from the start of the round
                  sends the weight changes of its islands every 64 steps
                  waits at the end of a round, for the slowest island
fragments=8       holds also the weights of each of its islands in fragments that are not merged yet
                  sends the weight changes of its islands in one of 8 fragments at a time
                  waits after each fragment, if its reduction takes longer than 2 steps of training
outer_codec=int8  quantize the differences that islands exchange
"""


LATE = """\
data=3 local=4 every=64 quorum=3: 3 workers; a step of 8 micro-batches, at most 4 for each of 3 units of 1 worker

replica 0  0
replica 1  1
replica 2  2

data=3     replicas that compute the islands: each computes at most 2 islands
local=4    holds the inner optimizer state of each of its islands, and the weights from the start of the round
           sends the weight changes of its islands every 64 steps
           waits at the end of a round, for 3 islands and a grace window
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("from basics import *\n" + BLOCKS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ("pipeline=2 tensor=2 data=2", ALL),
        ("recompute=blocks shard=6", SHARDS),
        ("data=3 local=4 every=64 fragments=8 delay=2 outer_codec=int8", ISLANDS),
        ("data=3 local=4 every=64 quorum=3", LATE),
    ],
)
def test_a_plan_in_words(plan: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", plan]) == 0
    assert capsys.readouterr().out == text


def test_a_plan_of_a_script(script: Path) -> None:
    said = paceline("explain", "shard=2 zero=1 micro=3", "--workers", "4", "train.py", cwd=script).stdout
    assert re.sub(r"computes [\d.]+ m?s", "computes T", said) == SCRIPT
    assert [path.name for path in script.iterdir() if path.name != "__pycache__"] == ["train.py"]


def test_stages_of_a_script(script: Path) -> None:
    said = paceline("explain", "pipeline=2", "--svg", "plan.svg", "train.py", cwd=script).stdout
    held = "holds parameters {0}, gradients {0}, activations "
    for line in (
        "worker 0    stage 0: layers.0 to 1; sends 384 B to the next stage in each micro-batch",
        "predicted   " + held.format("5.76 kB"),
        "worker 1    stage 1: layers.2 to 3",
        "predicted   " + held.format("4.62 kB"),
        "waiting     1f1b: 11.1% of a step if all stages take equally long, (p-1)/(m+p-1) with p=2, m=8; ",
    ):
        assert f"\n{line}" in said
    assert (FIRST, LAST) == (5760, 4624)
    assert {"worker 0", "layers.0 to 1", "layers.2 to 3"} <= labels(ElementTree.parse(script / "plan.svg").getroot())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shard=3", "--workers", "8"], "shard=3 does not divide 8 workers; try shard=2 or shard=4"),
        (["pipelin=2"], "unknown plan word 'pipelin=2'; did you mean pipeline=2?"),
        (
            ["expert=2 compile"],
            "expert=2 and compile cannot be used together yet; leave expert or compile out",
        ),
        (
            ["gone"],
            "gone is not a run folder: it does not contain journal.jsonl; pass a folder made by --run-dir",
        ),
        (["data=2", "gone.py"], "the script gone.py does not exist; pass the path of a Python training script"),
        (["data=2", "train.py", "--svgg", "a"], "unknown option --svgg of paceline explain; did you mean --svg?"),
        (
            ["data=2", "--svg", "gone/a.svg"],
            "gone/a.svg cannot be used (No such file or directory); correct that, or give another path",
        ),
    ],
)
def test_what_cannot_be_explained(
    words: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words]) == 2
    assert capsys.readouterr() == ("", f"paceline: {message}\n")


def test_what_a_model_does_not_allow_is_said_as_a_run_says_it(script: Path) -> None:
    wanted = "layers has 4 blocks, too few for 5 stages; use at most pipeline=4"
    said = paceline("explain", "pipeline=5", "train.py", cwd=script, code=2)
    assert (said.stdout, said.stderr) == ("", f"paceline: {wanted}\n")
    run = paceline("run", "--workers", "5", "--plan", "pipeline=5", "train.py", cwd=script, code=2)
    assert f"UsageError: {wanted}\n" in run.stderr


def test_a_script_that_does_not_come_to_a_step(script: Path) -> None:
    (script / "train.py").write_text("from basics import *\nmake()\n")
    said = paceline("explain", "data=2", "train.py", cwd=script, code=2)
    assert said.stderr.endswith(
        "paceline: train.py did not reach its first step: it ended before its first step; see the output above\n"
    )


def of(plan: str, **more: Any) -> PlanExplanation:
    parsed = Plan.parse(plan)
    workers = parsed.mesh(1).replica * (parsed.data or 1)
    return PlanExplanation(parsed.validate(workers), workers, more)


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("rounds", [1, 4])
def test_stages_wait_as_the_formula_says(workers: int, virtual: int, schedule: str, rounds: int) -> None:
    plan, m = f"pipeline={workers} virtual={virtual} schedule={schedule}", rounds * workers
    found = of(plan, micro_batches=m)
    assert found.bubble == pytest.approx((workers - 1) / (virtual * m + workers - 1), rel=1e-12)
    assert f"{found.bubble:.1%} of a step if all stages take equally long, (p-1)/(" in found.waiting


def test_stages_that_take_unequally_long_wait_longer() -> None:
    """Of two, the second one takes half as long. So the first one never waits but once: when it has made two forwards,
    the second one began at half of that, and takes one longer than what is left.
    """
    told = of("pipeline=2", micro_batches=4, stages=[{"forward": 2, "backward": 4}, {"forward": 1, "backward": 2}])
    assert told.schedule(4).bubble == pytest.approx(1 - 4 * (6 + 3) / (2 * (4 * 6 + 1)))


# ---- the drawing


def labels(root: ElementTree.Element) -> set[str]:
    return {str(node.text) for node in root.iter() if node.tag.endswith("text")}


@pytest.mark.parametrize(
    ("plan", "some"),
    [
        ("data=3", {"worker 0", "worker 2", "replica 2", "gradients"}),
        ("data=6", {"worker 3", "and 2 more of the same kind"}),
        ("shard=2", {"shard 1", "parameters"}),
        ("shard=2 zero=1 data=2", {"replica 1", "worker 3", "weights"}),
        ("tensor=2", {"part 1", "activations"}),
        ("context=2 tensor=2", {"sequence shard 1", "heads", "part 0", "worker 3"}),
        ("pipeline=2 virtual=2", {"stages 0, 2", "stages 1, 3", "waiting", "7"}),
        ("pipeline=2 schedule=zbv", {"stages 1, 2", "stages 0, 3", "waiting"}),
        ("data=2 shard=2 zero=1 pipeline=3 context=2 tensor=2", {"replica 1", "shard 1", "stage 2", "worker 47"}),
    ],
)
def test_every_plan_is_drawn(plan: str, some: set[str], tmp_path: Path) -> None:
    told = of(plan)
    save(told, tmp_path / "plan.svg")
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert labels(root) >= {f"{told.plan}: {told.workers} workers", *some}
    if told.mesh.pipeline > 1:
        kinds = [node.get("class") for node in root.iter() if node.tag.endswith("rect")]
        actions = told.each * told.mesh.pipeline * (told.plan.virtual or 1)
        looks = ["k3", "k4", "k5"] if told.plan.schedule == "zbv" else ["k4", "k5"]
        assert [kinds.count(look) for look in looks] == [actions + 1] * len(looks), "one is in the legend"


def test_a_team_that_has_become_smaller_is_drawn_as_it_is() -> None:
    assert str(PlanExplanation.of({"plan": "data=3 micro=2", "workers": 2}).plan) == "data=2 micro=2"


def test_names_are_escaped() -> None:
    names = {"model": "<A&B>", "stages": [{"blocks": '"<b>"'}, {"blocks": "x" * 40}]}
    root = ElementTree.fromstring(draw(of("pipeline=2", **names)))
    assert labels(root) >= {"pipeline=2: 2 workers, <A&B>".replace("pipe", "data=1 pipe"), '"<b>"'}


class Page(HTMLParser):
    """The text of a page, and its drawings."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(page)
        self.drawings = [ElementTree.fromstring(text) for text in re.findall('<svg class="plan".*?</svg>', page, re.S)]

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


def test_the_report_puts_what_was_measured_beside_what_was_predicted(tmp_path: Path) -> None:
    train_basics(tmp_path, BLOCKS, 4, "--plan", "data=2 pipeline=2", "--max-restarts", "0")
    (figures,) = journal(tmp_path / "out", "figures")
    assert [stage["blocks"] for stage in figures["stages"]] == ["layers.0 to 1", "layers.2 to 3"]
    predicted, measured = figures["predicted"], figures["measured"]
    for kind in ("parameters", "gradients"):
        assert [one[kind] for one in predicted] == [one[kind] for one in measured] == [FIRST, LAST]
    # Of 4 micro-batches of 3 rows, with a head each, and the gradients of what came.
    passed = 4 * (3 * 16 * 8 + 1024), 4 * 3 * 16 * 8
    assert [one["sent"] for one in predicted] == [
        {"gradients": held, "pipeline": sent} for held, sent in zip((FIRST, LAST), passed, strict=True)
    ]
    for one, held, sent in zip(measured, (FIRST, LAST), passed, strict=True):
        assert one["seconds"] > 0
        assert one["waited"] > 0
        assert one["sent"]["pipeline"] == sent
        assert held <= one["sent"]["gradients"] <= held + 500  # with the step's vector
    page = Page((tmp_path / "out" / "report.html").read_text())
    (drawing,) = page.drawings
    waited = sum(one["waited"] for one in measured)
    bubble = f"{waited / (waited + sum(one['seconds'] for one in measured)):.1%} measured"
    for text in (
        bubble,
        "stage 0: layers.0 to 1",
        "holds parameters 5.76 kB, gradients 5.76 kB; sends gradients 5.76 kB, pipeline 5.63 kB",
    ):
        assert text in page.text
    told = [text for text in labels(drawing) if text.startswith("measured 11.5 kB, ")]
    assert len(told) == 1
    said = paceline("explain", "out", "--svg", "plan.svg", cwd=tmp_path).stdout
    assert f"; {bubble}\n" in said
    assert labels(ElementTree.parse(tmp_path / "plan.svg").getroot()) == labels(drawing)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 virtual=2",
        "pipeline=2 tensor=2",
        "shard=2 zero=1 context=2",
        "shard=2 zero=3",
        "data=2 zero=1 shard=2",
    ],
)
def test_one_worker_foretells_what_all_will_hold(plan: str, tmp_path: Path) -> None:
    script, workers = (SCRIPTS / "staging.py", "gpt2"), of(plan).workers
    foretold = paceline("explain", plan, script[0], "--", script[1], cwd=tmp_path).stdout
    paceline("run", "--workers", str(workers), "--plan", plan, "--run-dir", "out", *script, cwd=tmp_path)
    told = paceline("explain", "out", cwd=tmp_path).stdout
    before, found, measured = (
        [re.sub(", (activations|[^,]* in total).*", "", line) for line in re.findall(rf"{name} +holds ([^;\n]*)", text)]
        for name, text in (("predicted", foretold), ("predicted", told), ("measured", told))
    )
    assert len(before) == of(plan).mesh.pipeline
    assert before == found
    sizes = [[float(size) for size in re.findall(r"[\d.]+", line)] for lines in (found, measured) for line in lines]
    assert sizes[: len(found)] == [pytest.approx(size, rel=0.01) for size in sizes[len(found) :]]


def test_a_run_of_one_worker_has_no_plan_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    Journal(tmp_path).write("start", workers=1, plan="data=1", script="a.py", argv=["a.py"])
    assert main(["explain", str(tmp_path), "--svg", str(tmp_path / "a.svg")]) == 2
    what = f"{tmp_path} has no plan for several workers to draw; omit --svg"
    assert capsys.readouterr() == ("", f"paceline: {what}\n")


def test_a_run_that_lost_all_but_one_worker_is_explained(tmp_path: Path) -> None:
    """The plan of its last team cannot spare a worker."""
    journal = Journal(tmp_path)
    journal.write("start", workers=3, plan="server=2 backup=1 window=3", script="train.py", resumed_from=None)
    figures = {"plan": "server=2 backup=1 window=3", "workers": 1, "micro_batches": 8, "stages": [{"blocks": 1}]}
    journal.write("figures", trainer=0, **figures, predicted=[], measured=[{"seconds": 0.1, "waited": 0.0}])
    assert "server=2 backup=1 window=3" in explain(tmp_path)
