"""Bad input: the error says what happened, where, and what to do next. Every text is compared in full."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from golden import GoldenText
from launching import paceline, train_basics, without_an_agent
from once import once
from plain_python import python_train

from paceline.cli.main import main
from paceline.errors import LossError, UsageError


def failure_block(stderr: str) -> str:
    """The only failure block in what `paceline run` printed, and what follows it."""
    blocks = re.findall(r"^worker \d+ failed \(.*", stderr, re.M)
    assert len(blocks) == 1, stderr
    return stderr[stderr.index(blocks[0]) :]


def error_line(text: str) -> str:
    """The line that names the error, without its module."""
    found = re.findall(r"^(?:  |paceline\.errors\.)?(\w+Error: .*)$", text, re.M)
    assert found, text
    return str(found[-1])


@pytest.mark.parametrize(("plan", "workers"), [("shrad=4", 8), ("shard=3", 8), ("auto", 8)])
def test_wrong_plan_is_refused_before_anything_starts(
    plan: str,
    workers: int,
    tmp_path: Path,
    golden: GoldenText,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('started')")
    assert main(["run", "--workers", str(workers), "--plan", plan, "train.py"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    golden(f"plan {plan}", err)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


LOSSES = {
    "a tensor": "lambda o, b: F.cross_entropy(o, b[1], reduction='none')",
    "a float": "lambda o, b: F.cross_entropy(o, b[1]).item()",
    "a tuple of four": "lambda o, b: (o.sum(), 3, {}, {})",
    "metrics without counts": "lambda o, b: (o.sum(), 3, {'a': 1})",
    "a detached value": "lambda o, b: F.cross_entropy(o, b[1]).detach()",
}


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("form", LOSSES)
def test_loss_that_returns_another_form(form: str, golden: GoldenText) -> None:
    basics = import_module("basics")
    with pytest.raises(LossError) as caught:
        list(basics.make(loss=eval(LOSSES[form], vars(basics))).steps(basics.data))
    golden(f"a loss that returns {form}", str(caught.value))


def test_error_of_the_trainer_ends_the_run_with_the_line_of_the_script(tmp_path: Path, golden: GoldenText) -> None:
    body = f"list(make(loss={LOSSES['a tensor']}).steps(data))"
    block = failure_block(train_basics(tmp_path, body, 1, code=1).stderr)
    golden("a failure block with the line of the script", "\n".join(block.splitlines()[1:3]))


# Errors that each worker catches, after which the team trains on, and one at the end that ends the run.
CAUGHT = """
team = paceline.join()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(10, 2), nn.Linear(10, 2)
    def forward(self, x):
        return self.used(x)

def parameters_without_gradient():
    list(make(model=lambda: Net().double()).steps(data, epochs=2))

class Lookahead(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.slow = [param.detach().clone() for group in self.param_groups for param in group["params"]]

def hidden_optimizer_state():
    t = paceline.Trainer(net, cross_entropy, lambda params: Lookahead([p for _, p in params]), global_batch=24)
    list(t.steps(data))
    t.save()

def nonfinite_loss():
    def loss(o, b):
        value = F.cross_entropy(o, b[1])
        bad = t.steps_done == 2 and (b[0] == x[paceline.sample_index(60, 96)]).all(1).any()
        return value * float("nan") if bad else value
    t = make(loss)
    list(t.steps(data))

def nonfinite_gradient():
    t = make(lambda o, b: (o[:, 0] * 0).sqrt().sum() + F.cross_entropy(o, b[1]))
    before = [p.clone() for p in t.model.parameters()]
    try:
        list(t.steps(data))
    finally:
        print("the weights are the same:", all(torch.equal(p, q) for p, q in zip(before, t.model.parameters())))

def metrics_of_different_names():
    def loss(o, b):
        name = "right" if team.rank else "wrong"
        return F.cross_entropy(o, b[1], reduction="sum"), len(o), {name: (1, 1)}
    list(make(loss).steps(data))

def dtypes():
    for name in ("int16", "uint16", "uint64", "bool", "float8_e4m3fn"):
        attempt(lambda: team.all_reduce(torch.ones(3).to(getattr(torch, name)), name="flags"))
    from paceline.team.team import SUMS
    for name in SUMS:
        found = team.all_reduce(torch.ones(3).to(getattr(torch, name)))
        assert found.tolist() == [2, 2, 2] and found.dtype == getattr(torch, name), name
    print("added", len(SUMS))

def attempt(function):
    try:
        function()
    except paceline.PacelineError as error:
        print(f"{type(error).__name__}: {error}")

for case in (parameters_without_gradient, hidden_optimizer_state, nonfinite_loss, nonfinite_gradient,
             metrics_of_different_names, dtypes):
    print("====", case.__name__)
    attempt(case)

t = make(global_batch=None)  # Steps 1, 2, 4, 8 and so on are compared; a single row is the same by chance, and may be.
for number in range(1, 40):
    torch.manual_seed(number + (100 * team.rank if number in (1, 2) else 0))
    t.step((torch.randn(1, 10, dtype=torch.float64), torch.tensor([number % 2])))
for number in range(41, 80):
    torch.manual_seed(number)
    t.step((torch.randn(2, 10, dtype=torch.float64), torch.tensor([0, 1])))
"""
CASES = ("nonfinite_loss", "nonfinite_gradient", "metrics_of_different_names", "dtypes")


@pytest.fixture
def caught_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of CAUGHT on two workers; what it printed to standard error is in `stderr`."""

    def make(folder: Path) -> None:
        (folder / "stderr").write_text(train_basics(folder, CAUGHT, 2, code=2).stderr)

    return once(tmp_path_factory, "caught errors", make)


@pytest.mark.parametrize("case", CASES)
def test_error_is_raised_on_every_worker_and_the_team_goes_on(case: str, caught_run: Path, golden: GoldenText) -> None:
    """A nonfinite loss names worker and rows, a nonfinite gradient leaves the weights unchanged, metrics need the same
    names everywhere, and an all_reduce refuses dtypes that cannot be added before they travel.
    """
    for worker in range(2):
        text = (caught_run / f"out/logs/worker-{worker}.log").read_text()
        part = re.search(rf"^==== {case}\n(.*?)(?=^====|^Traceback|\Z)", text, re.M | re.S)
        assert part
        golden(case.replace("_", " "), part[1], {re.compile(r"\(0\.\d+\)"): "(LOSS)"} if "gradient" in case else {})


def test_workers_that_train_on_the_same_rows_are_refused(caught_run: Path, golden: GoldenText) -> None:
    golden("the same rows", failure_block((caught_run / "stderr").read_text()).splitlines()[1])


def test_note_of_parameters_without_gradient_is_printed_once(caught_run: Path, golden: GoldenText) -> None:
    (line,) = [line for line in (caught_run / "stderr").read_text().splitlines() if "got no gradient" in line]
    golden("parameters without gradient", line)


def test_note_of_hidden_optimizer_state_is_printed_once_at_the_first_checkpoint(
    caught_run: Path, golden: GoldenText
) -> None:
    (line,) = [line for line in (caught_run / "stderr").read_text().splitlines() if "outside of" in line]
    golden("an optimizer that hides its state", line)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("freezes", [False, True])
def test_note_of_experts_that_no_row_chose_takes_one_line_and_frozen_ones_none(
    freezes: bool, capfd: pytest.CaptureFixture[str], golden: GoldenText
) -> None:
    """Each step has other experts, and none from step 2 on for the frozen ones."""
    basics = import_module("basics")

    class Net(basics.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.experts = basics.nn.ModuleList(basics.nn.Linear(10, 2) for _ in range(8))
            self.all = basics.nn.Linear(10, 2)
            self.chosen = None if freezes else 0

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.all(x) + (self.experts[self.chosen](x) if self.chosen is not None else 0)

    model = Net().double()
    trainer = basics.make(model=model)
    for expert in model.experts if freezes else ():
        expert.requires_grad_(False)
    for report in trainer.steps(basics.data, epochs=2):
        model.chosen = None if freezes else report.step % 8
    notes = [line for line in capfd.readouterr().err.splitlines() if "got no gradient" in line]
    assert len(notes) == (not freezes)
    for note in notes:
        golden("experts without gradient", note)


def test_exception_on_one_worker_is_the_one_that_is_shown(tmp_path: Path) -> None:
    body = (
        "def loss(o, b):\n"
        "    if t.steps_done == 1 and paceline.join().rank == 1:\n"
        "        raise ValueError('bad row')\n"
        "    return F.cross_entropy(o, b[1])\n"
        "t = make(loss)\n"
        "list(t.steps(data))\n"
    )
    block = failure_block(train_basics(tmp_path, body, 3, "--max-restarts", "0", code=1).stderr)
    first, what, where, *rest = block.splitlines()
    assert re.fullmatch(r"worker 1 failed \(.*, after step 1\)", first)
    assert what == "  ValueError: bad row"
    assert where == "  at train.py:4 in loss: raise ValueError('bad row')"
    assert "workers 0, 2 ended because of this failure" in rest or "Paceline stopped the others: workers 0, 2" in rest


LOOP = "t = make()\nfor report in t.steps(data, epochs=3):\n    if report.step == 3 and t.main:\n        t.{}\n"
COLLECTIVES = (
    "team = paceline.join()\n"
    "if team.rank == 1:\n"
    "    team.broadcast(torch.ones(3), name='rate')\n"
    "else:\n"
    "    team.all_reduce(torch.ones(3), name='score')\n"
)
# Names longer than the header that checks them: equal ones meet, those that differ at the end do not.
LONG_NAMES = "team = paceline.join()\nteam.any(True, name='é' * 400)\nteam.any(True, name='a' * 400 + str(team.rank))\n"
MISMATCHES = {
    "export behind a condition": (2, LOOP.format("export('m.safetensors')")),
    "stop behind a condition": (2, LOOP.format("stop()")),
    "evaluate behind a condition": (2, LOOP.format("evaluate(data, lambda o, b: {'n': (1, 1)})")),
    "different collectives": (3, COLLECTIVES),
    "a worker that ends early": (2, LOOP.replace("t.main", "not t.main").replace("t.{}", "break")),
    "long names": (2, LONG_NAMES),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_collective_mismatch_is_an_error_on_every_worker(case: str, tmp_path: Path, golden: GoldenText) -> None:
    """It is no hang, and names the line of each worker, on the worker that ends first."""
    workers, body = MISMATCHES[case]
    script = tmp_path / "train.py"
    script.write_text("from basics import *\n" + body)
    ended = without_an_agent(*[script] * workers, cwd=tmp_path)
    assert [code for code, _ in ended] == [1] * workers
    texts = {error_line(stderr) for _, stderr in ended}
    # Who ends after another one may miss it, or have lost its peer.
    golden(case, max((text for text in texts if text.startswith("CollectiveMismatchError")), key=len))


def test_collective_mismatch_ends_a_run_with_one_failure_block(tmp_path: Path, golden: GoldenText) -> None:
    block = failure_block(train_basics(tmp_path, LOOP.format("save()"), 3, code=1).stderr)
    golden("save behind a condition", block.splitlines()[1])


def test_workers_with_different_scripts_are_refused(tmp_path: Path, golden: GoldenText) -> None:
    """As on two hosts whose checkouts differ."""
    scripts = [tmp_path / str(rank) / "train.py" for rank in range(2)]
    for rank, script in enumerate(scripts):
        script.parent.mkdir()
        script.write_text(f"import paceline\nteam = paceline.join()\n# checkout {rank}\n")
    for code, stderr in without_an_agent(*scripts):
        assert code == 1
        golden("different scripts", error_line(stderr))


def test_worker_0_failing_inside_main_first_is_the_error_of_the_others(tmp_path: Path, golden: GoldenText) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import paceline\nwith paceline.join().main_first():\n    raise OSError('there is no such corpus')\n"
    )
    (code, stderr), *others = without_an_agent(script, script, script)
    assert code == 1
    assert stderr.endswith("OSError: there is no such corpus\n")
    for code, stderr in others:
        assert code == 1
        golden("worker 0 failed inside main_first", error_line(stderr))


@pytest.fixture
def interrupted_run(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> list[Path]:
    """In the test's folder a run of the basics that ended after step 8 of 12: its checkpoints, of steps 4 and 8."""
    body = "t = make()\nlist(t.steps(data, epochs=3))\n"
    options = ("--save-every", "4", "--steps", "8")
    made = once(tmp_path_factory, "interrupted", lambda folder: train_basics(folder, body, 2, *options))
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    saved = sorted((tmp_path / "out/checkpoints").glob("step-*"))
    assert [path.name[-2:] for path in saved] == ["04", "08"]
    return saved


@pytest.mark.usefixtures("interrupted_run")
def test_resume_with_a_dataset_that_shrank_since_the_checkpoint(tmp_path: Path, golden: GoldenText) -> None:
    body = "t = make()\nlist(t.steps(TensorDataset(x[:90], x[:90, 0].long()), epochs=3))\n"
    golden("a dataset that shrank", error_line(python_train(tmp_path, body, code=1).stderr))


def test_resume_passes_over_a_damaged_checkpoint(interrupted_run: list[Path], tmp_path: Path) -> None:
    (weights,) = interrupted_run[-1].glob("*.safetensors")
    damaged = bytearray(weights.read_bytes())
    damaged[-5] ^= 4
    weights.write_bytes(damaged)
    stderr = python_train(tmp_path).stderr
    assert f"checkpoint of step 8 is damaged ({weights.name}: SHA-256 differs); using step 4\n" in stderr
    assert "resuming from step 4 of " in stderr


def test_resume_fails_where_every_checkpoint_is_damaged_or_of_a_later_format(
    interrupted_run: list[Path], tmp_path: Path, golden: GoldenText
) -> None:
    for version in (2, 3):
        for checkpoint in interrupted_run:
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "format": version}))
        if version == 2:
            block = failure_block(train_basics(tmp_path, None, 1, code=1).stderr).splitlines()
            golden("every checkpoint is damaged", f"{block[1]}\n{block[-1]}", {f"{tmp_path}/": ""})
        else:
            golden("every checkpoint is of a later format", error_line(python_train(tmp_path, code=1).stderr))


def test_script_that_never_uses_paceline_is_an_error(tmp_path: Path, golden: GoldenText) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    done = paceline("run", "--workers", "3", "--cold-start", "train.py", cwd=tmp_path, code=1)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("train.py ended")]
    golden("a script that never uses paceline", line)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "out"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.root
def test_full_disk_keeps_training_and_fails_at_the_last_checkpoint(small_disk: Path, tmp_path: Path) -> None:
    """A checkpoint on the way that cannot be written is passed over with a line; the last one is the result."""
    body = (
        "t = make(model=lambda: nn.Sequential(nn.Linear(10, 9000), nn.ReLU(), nn.Linear(9000, 2)).double())\n"
        "list(t.steps(data))\n"
    )
    stderr = train_basics(tmp_path, body, 1, "--save-every", "2", code=1).stderr
    reason = f"could not be written to {small_disk}/checkpoints: No space left on device; free some space"
    assert f"training continues without this checkpoint: checkpoint of step 2 {reason}" in stderr
    assert f"  CheckpointError: checkpoint of step 4 {reason}" in stderr
    assert "step 4/4" in stderr


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("convert", ["float", "half"])
def test_model_converted_in_the_loop_is_refused(convert: str, golden: GoldenText) -> None:
    basics = import_module("basics")
    trainer = basics.make()
    with pytest.raises(UsageError) as caught:
        for _ in trainer.steps(basics.data):
            getattr(trainer.model, convert)()
    golden(f"a model converted by {convert}()", str(caught.value))


CONVERTED = "trainer = make()\nfor report in trainer.steps(data):\n    trainer.model.{}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "workers", "plan", "kinds"),
    [
        ("half()", 2, "", ("float64", "float16")),
        ("float()", 2, "shard=2 zero=3", ("float64", "float32")),
        ("float()", 2, "tensor=2", ("float64", "float32")),
        ("to('meta')", 3, "", ("cpu", "meta")),
    ],
)
def test_model_converted_in_the_loop_is_refused_under_every_plan(
    call: str, workers: int, plan: str, kinds: tuple[str, str], tmp_path: Path
) -> None:
    options = ["--max-restarts", "0", *(["--plan", plan] if plan else [])]
    stderr = train_basics(tmp_path, CONVERTED.format(call), workers, *options, code=2).stderr
    assert "UsageError: the script converted the model after creating the Trainer: 0.weight was " in stderr
    assert " was {} and is {}; convert the model before creating the Trainer".format(*kinds) in stderr


def shared_memory_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*") if "paceline" in path.name or "torch" in path.name}


@pytest.fixture(scope="module", autouse=True)
def names_before() -> set[str]:
    """Names that were there before, for example of a run whose agent was killed, after which nobody tidies up."""
    return shared_memory_names()


def test_shared_memory_is_cleaned_up_after_failed_runs(names_before: set[str]) -> None:
    """What runs beside these tests has names in /dev/shm that bear a living process's id."""
    owners = {name: re.search(r"\d+", name) for name in shared_memory_names() - names_before}
    assert [name for name, owner in owners.items() if not (owner and psutil.pid_exists(int(owner[0])))] == []
