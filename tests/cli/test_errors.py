"""Bad input: what happened, where, what to do next. Every message is tested by its exact text, with real processes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from launching import paceline, train_basics, without_an_agent
from once import once

from paceline.errors import LossError

MEET = (
    "every worker must call the same ones in the same order: remove the condition around the call "
    "(files are written once anyway)"
)


def fails(body: str | None, tmp_path: Path, workers: int = 2, code: int = 1, options: tuple[str, ...] = ()) -> str:
    """Runs a script that must fail; returns its one failure block."""
    done = train_basics(tmp_path, body, workers, *options, code=code)
    blocks = re.findall(r"^worker \d+ failed \(.*", done.stderr, re.M)
    assert len(blocks) == 1, done.stderr
    return done.stderr[done.stderr.index(blocks[0]) :]


@pytest.mark.parametrize(
    ("plan", "workers", "message"),
    [
        ("shrad=4", 8, "unknown plan word 'shrad=4'; did you mean shard=4?"),
        ("shard=3", 8, "shard=3 does not divide 8 workers; try shard=2 or shard=4"),
        ("auto", 8, "auto is not built yet; use only what is: data=N, local=N, "),
    ],
)
def test_plans_are_refused_before_anything_starts(plan, workers, message, tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    args = ("run", "--workers", str(workers), "--plan", plan, "train.py")
    done = paceline(*args, cwd=tmp_path, code=2)
    assert done.stderr.startswith(f"paceline: {message}")
    assert "started" not in done.stderr
    assert not (tmp_path / "runs").exists()


LOSS_FORMS = "return a scalar (the mean over the rows it was given), (sum, count) or (sum, count, {name: (sum, count)})"


LOSSES = {
    "lambda o, b: F.cross_entropy(o, b[1], reduction='none')": "the loss returned a tensor of shape (3,); "
    + LOSS_FORMS,
    "lambda o, b: F.cross_entropy(o, b[1]).item()": "the loss returned a float; " + LOSS_FORMS,
    "lambda o, b: (o.sum(), 3, {}, {})": "the loss returned a tuple of 4; " + LOSS_FORMS,
    "lambda o, b: (o.sum(), 3, {'a': 1})": "the loss returned metrics {'a': 1}; " + LOSS_FORMS,
    "lambda o, b: F.cross_entropy(o, b[1]).detach()": "the loss does not depend on any trainable parameter; "
    "compute it from the model's output, without detach(), item() or no_grad()",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_another_form(loss, run):
    basics = import_module("basics")
    with pytest.raises(LossError) as caught:
        list(basics.make(loss=eval(loss, vars(basics))).steps(basics.data))
    assert str(caught.value) == LOSSES[loss]


def test_a_loss_of_another_form_ends_the_run_with_the_users_line(tmp_path):
    loss, message = next(iter(LOSSES.items()))
    block = fails(f"list(make(loss={loss}).steps(data))", tmp_path, workers=1)
    assert f"  LossError: {message}\n  at train.py:2 in <module>: list(make(" in block


def test_a_loss_that_is_not_a_number_names_worker_and_rows(tmp_path):
    body = (
        "def loss(o, b):\n"
        "    value = F.cross_entropy(o, b[1])\n"
        "    bad = t.steps_done == 2 and (b[0] == x[paceline.sample_index(60, 96)]).all(1).any()\n"
        "    return value * float('nan') if bad else value\n"
        "t = make(loss)\n"
        "list(t.steps(data))\n"
    )
    block = fails(body, tmp_path)
    assert (
        "NonFiniteLossError: the loss of step 3 is not finite (worker 1: micro-batch 4 (rows 60-62 of epoch 0)): "
        "the loss function makes the first nan; the step was not applied; look there for a logarithm or a division at "
        "0, and compute losses from logits, as cross_entropy does\n" in block
    )


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(tmp_path):
    body = (
        "t = make(lambda o, b: (o[:, 0] * 0).sqrt().sum() + F.cross_entropy(o, b[1]))\n"
        "before = [p.clone() for p in t.model.parameters()]\n"
        "try:\n"
        "    list(t.steps(data))\n"
        "finally:\n"
        "    print('same', all(torch.equal(p, q) for p, q in zip(before, t.model.parameters())))\n"
    )
    block = fails(body, tmp_path)
    assert "NonFiniteLossError: the gradient of step 1 is not finite, though its loss is (0." in block
    made = (
        "'0.weight' is nan, in micro-batch 0 (rows 0-2 of epoch 0) on worker 0, where the backward of the loss function"
    )
    assert f"): that of {made} makes it (SqrtBackward0); the step was not applied; look for a square root" in block
    assert "same True" in (tmp_path / "out/logs/worker-0.log").read_text()


def test_an_exception_on_one_worker_is_the_one_that_is_shown(tmp_path):
    body = (
        "def loss(o, b):\n"
        "    if t.steps_done == 1 and paceline.join().rank == 1:\n"
        "        raise ValueError('bad row')\n"
        "    return F.cross_entropy(o, b[1])\n"
        "t = make(loss)\n"
        "list(t.steps(data))\n"
    )
    block = fails(body, tmp_path, workers=3, options=("--max-restarts", "0"))
    assert block.startswith("worker 1 failed (")
    assert ", after step 1)" in block.splitlines()[0]
    assert block.splitlines()[1] == "  ValueError: bad row"
    assert block.splitlines()[2] == "  at train.py:4 in loss: raise ValueError('bad row')"
    assert "workers 0, 2 ended because of it\n" in block or "stopped by us: workers 0, 2\n" in block


def test_save_behind_a_condition(tmp_path):
    body = "t = make()\nfor report in t.steps(data, epochs=3):\n    if report.step == 3 and t.main:\n        t.save()\n"
    block = fails(body, tmp_path, workers=3)
    assert (
        "CollectiveMismatchError: workers do not meet: worker 0 is in save() at train.py:5, "
        f"workers 1, 2 are in step 4 at train.py:3; {MEET}\n" in block
    )


@pytest.mark.parametrize("call", ["export('m.safetensors')", "stop()", "evaluate(data, metric)"])
def test_the_other_collectives_behind_a_condition(call, tmp_path):
    body = (
        "metric = lambda o, b: {'n': (1, 1)}\n"
        "t = make()\n"
        "for report in t.steps(data, epochs=3):\n"
        "    if report.step == 3 and t.main:\n"
        f"        t.{call}\n"
    )
    block = fails(body, tmp_path)
    name = call.split("(")[0]
    assert (
        f"CollectiveMismatchError: workers do not meet: worker 0 is in {name}() at train.py:6, "
        f"worker 1 is in step 4 at train.py:4; {MEET}\n" in block
    )


def test_different_collectives_on_different_workers(tmp_path):
    body = (
        "team = paceline.join()\n"
        "if team.rank == 1:\n"
        "    team.broadcast(torch.ones(3), name='rate')\n"
        "else:\n"
        "    team.all_reduce(torch.ones(3), name='score')\n"
    )
    block = fails(body, tmp_path, workers=3)
    assert (
        "CollectiveMismatchError: workers do not meet: workers 0, 2 are in all_reduce 'score' of 3 float32 at "
        f"train.py:6, worker 1 is in broadcast 'rate' of 3 float32 at train.py:4; {MEET}\n" in block
    )


def test_a_worker_that_ends_while_the_others_train_on(tmp_path):
    body = (
        "t = make()\nfor report in t.steps(data, epochs=3):\n    if report.step == 3 and not t.main:\n        break\n"
    )
    block = fails(body, tmp_path)
    assert (
        "CollectiveMismatchError: workers do not meet: worker 0 is in step 4 at train.py:3, "
        f"worker 1 ended after step 3 at train.py:3; {MEET}\n" in block
    )


def test_workers_with_different_scripts(tmp_path):
    """As on two hosts whose checkouts differ."""
    scripts = [tmp_path / str(rank) / "train.py" for rank in range(2)]
    for rank, script in enumerate(scripts):
        script.parent.mkdir()
        script.write_text(f"import paceline\nteam = paceline.join()\n# checkout {rank}\n")
    for code, said in without_an_agent(*scripts):
        assert code == 1
        assert (
            "WorkersDifferError: worker 1 runs another script than worker 0; "
            "give every worker the same script and start again\n" in said
        )


@pytest.fixture
def interrupted_run(tmp_path_factory, tmp_path):
    """In the test's folder a run of the basics that ended after step 8 of 12: its checkpoints, of steps 4 and 8."""
    body = "t = make()\nlist(t.steps(data, epochs=3))\n"
    options = ("--save-every", "4", "--steps", "8")
    made = once(tmp_path_factory, "interrupted", lambda folder: train_basics(folder, body, 2, *options))
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    saved = sorted((tmp_path / "out/checkpoints").glob("step-*"))
    assert [path.name[-2:] for path in saved] == ["04", "08"]
    return saved


@pytest.mark.usefixtures("interrupted_run")
def test_a_dataset_that_shrank_since_the_checkpoint(tmp_path):
    block = fails("t = make()\nlist(t.steps(TensorDataset(x[:90], x[:90, 0].long()), epochs=3))", tmp_path)
    assert (
        "DatasetError: the dataset had 96 rows when the checkpoint was written and has 90 now; "
        "bring the missing rows back, or start a new run in another --run-dir\n" in block
    )


def test_a_damaged_checkpoint_is_passed_over(interrupted_run, tmp_path):
    newest = interrupted_run[-1]
    (weights,) = newest.glob("*.safetensors")
    damaged = bytearray(weights.read_bytes())
    damaged[-5] ^= 4
    weights.write_bytes(damaged)
    done = train_basics(tmp_path, None, 1)
    assert f"checkpoint of step 8 is damaged ({weights.name}: SHA-256 differs); taking step 4\n" in done.stderr
    assert "resuming from step 4 of " in done.stderr


@pytest.mark.parametrize("how", ["damaged", "of a later format"])
def test_only_checkpoints_that_cannot_be_read_stop_the_run(how, interrupted_run, tmp_path):
    for place in interrupted_run:
        manifest = json.loads((place / "manifest.json").read_text())
        (place / "manifest.json").write_text(json.dumps({**manifest, "format": 3 if how != "damaged" else 2}))
    block = fails(None, tmp_path, 2)
    if how == "damaged":
        whats = ", ".join(f"step {step} (manifest.json: SHA-256 differs)" for step in (8, 4))
        what = (
            f"no checkpoint in out/checkpoints is whole: {whats}; restore one from a copy, or choose another --run-dir"
        )
        what += " to train from the start"
    else:
        what = (
            "checkpoint of step 8 in out/checkpoints has format version 3, and this Paceline reads versions up to 2; "
        )
        what += "install the Paceline that wrote it, or choose another --run-dir"
    assert block.splitlines()[1].replace(f"{tmp_path}/", "") == f"  CheckpointError: {what}"
    assert block.endswith(
        "next: fix the cause; then run `paceline run --workers 2 --run-dir out train.py`: it continues from the newest "
        "checkpoint that can be read, and fails like this as long as none can\n"
    )


def test_parameters_without_gradient_are_named_once(tmp_path):
    body = (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.used, self.spare = nn.Linear(10, 2), nn.Linear(10, 2)\n"
        "    def forward(self, x):\n"
        "        return self.used(x)\n"
        "list(make(model=lambda: Net().double()).steps(data, epochs=2))\n"
    )
    for workers in (1, 2):
        done = train_basics(tmp_path, body, workers, "--run-dir", f"of-{workers}")
        assert done.stderr.count(f"2 of 4 {NO_GRADIENT.format(1, 'spare.weight, spare.bias')}") == 1


NO_GRADIENT = (
    "parameters got no gradient in step {} and were left as they are: {}; that is right for experts that no row chose, "
    "while parameters that are never used are better frozen with requires_grad_(False) before the Trainer is made; "
    "this is said once\n"
)


def test_experts_that_no_row_chose_and_parameters_that_the_script_freezes_take_one_line(tmp_path):
    """Each step has other experts, and none from step 2 on for the frozen one alone."""
    body = (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.experts = nn.ModuleList(nn.Linear(10, 2) for _ in range(8))\n"
        "        self.all = nn.Linear(10, 2)\n"
        "    def forward(self, x):\n"
        "        return self.all(x) + (self.experts[self.chosen](x) if self.chosen is not None else 0)\n"
        "model = Net().double()\n"
        "model.chosen = None if FREEZES else 0\n"
        "trainer = make(model=model)\n"
        "for expert in model.experts if FREEZES else ():\n"
        "    expert.requires_grad_(False)\n"
        "for report in trainer.steps(data, epochs=2):\n"
        "    model.chosen = None if FREEZES else report.step % 8\n"
    )
    shown = "experts.1.weight, experts.1.bias, experts.2.weight, experts.2.bias, experts.3.weight, ..."
    for freezes, line in ((False, f"14 of 18 {NO_GRADIENT.format(1, shown)}"), (True, "")):
        said = train_basics(tmp_path, f"FREEZES = {freezes}\n{body}", 1, "--run-dir", f"out-{freezes}").stderr
        assert [text for text in said.splitlines(keepends=True) if "got no gradient" in text] == [line][: not freezes]


def test_a_script_that_never_calls_the_trainer(tmp_path):
    (tmp_path / "train.py").write_text("print('hello')\n")
    done = paceline("run", "--workers", "3", "train.py", cwd=tmp_path, code=1)
    assert (
        "train.py ended without using paceline: no Trainer was made and paceline.join() was not called, "
        "so 3 workers did the same work 3 times; make a paceline.Trainer, or run it with plain python" in done.stderr
    )


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.root
def test_no_disk_space_keeps_training_and_fails_at_the_end(small_disk, tmp_path):
    """Checkpoints on the way that cannot be written are said and passed over; the last one is the result, and fails."""
    body = (
        "t = make(model=lambda: nn.Sequential(nn.Linear(10, 9000), nn.ReLU(), nn.Linear(9000, 2)).double())\n"
        "list(t.steps(data))\n"
    )
    done = train_basics(tmp_path, body, 2, "--save-every", "2", code=1)
    said = f"could not be written to {small_disk}/checkpoints: No space left on device; free some space"
    assert f"training goes on without it: checkpoint of step 2 {said}" in done.stderr
    assert f"  CheckpointError: checkpoint of step 4 {said}" in done.stderr
    assert "step 4/4" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_a_worker_killed_by_a_signal(number, tmp_path):
    body = (
        "import os\n"
        "t = make()\n"
        "for report in t.steps(data, epochs=3):\n"
        "    if report.step == 5 and paceline.join().rank == 1:\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
    )
    block = fails(body, tmp_path, workers=3, code=128 + number, options=("--max-restarts", "0"))
    assert block.startswith("worker 1 failed (")
    assert ("SIGKILL" if number == signal.SIGKILL else "SIGSEGV") in block.splitlines()[1]


def test_metrics_of_different_names(tmp_path):
    body = (
        "def loss(o, b):\n"
        "    name = 'right' if paceline.join().rank else 'wrong'\n"
        "    return F.cross_entropy(o, b[1], reduction='sum'), len(o), {name: (1, 1)}\n"
        "list(make(loss).steps(data))\n"
    )
    block = fails(body, tmp_path)
    assert (
        "MetricError: the loss returned metrics ['wrong'] on worker 0 and ['right'] on worker 1; "
        "return the same names everywhere, with count 0 where there is nothing to count\n" in block
    )


def shared_names():
    return {path.name for path in Path("/dev/shm").glob("*") if "paceline" in path.name or "torch" in path.name}


@pytest.fixture(scope="module", autouse=True)
def names_of_others():
    """What was there before: of a run whose agent was killed, say, after which nobody tidies up."""
    return shared_names()


def test_clean_up_of_shared_names(names_of_others):
    """None of these runs left anything in /dev/shm; what runs beside these have there bears a living process's id."""
    owners = {name: re.search(r"\d+", name) for name in shared_names() - names_of_others}
    assert [name for name, owner in owners.items() if not (owner and psutil.pid_exists(int(owner[0])))] == []


def test_names_of_any_length_meet_and_differ(tmp_path):
    """Names longer than the header that checks them: equal ones meet, those that differ at the end do not."""
    body = "team = paceline.join()\nteam.any(True, name='é' * 400)\nteam.any(True, name='a' * 400 + str(team.rank))\n"
    block = fails(body, tmp_path)
    assert "CollectiveMismatchError: workers do not meet: worker 0 is in any 'aaaa" in block


def test_dtypes_that_can_be_added_are_and_others_are_refused_before_they_travel(tmp_path):
    """On every worker alike, and the team goes on after it."""
    (tmp_path / "train.py").write_text(
        "import paceline, torch\nfrom paceline.team.team import SUMS\nteam = paceline.join()\n"
        "for name in ('int16', 'uint16', 'uint64', 'bool', 'float8_e4m3fn'):\n"
        "    try:\n"
        "        team.all_reduce(torch.ones(3).to(getattr(torch, name)), name='flags')\n"
        "    except paceline.PacelineError as error:\n"
        "        print(type(error).__name__, error)\n"
        "for name in SUMS:\n"
        "    found = team.all_reduce(torch.ones(3).to(getattr(torch, name)))\n"
        "    assert found.tolist() == [2, 2, 2] and found.dtype == getattr(torch, name), name\n"
        "print(len(SUMS))\n"
    )
    paceline("run", "--workers", "2", "--run-dir", "out", "train.py", cwd=tmp_path)
    refused = [
        f"UsageError all_reduce 'flags' cannot add {name}; convert it to one of float64, float32, float16, bfloat16, "
        "int64, int32, int8, uint8, complex128, complex64\n"
        for name in ("int16", "uint16", "uint64", "bool", "float8_e4m3fn")
    ]
    for worker in (0, 1):
        assert (tmp_path / f"out/logs/worker-{worker}.log").read_text() == "".join([*refused, "10\n"])


def test_worker_0_failing_inside_main_first_is_what_the_others_say(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import paceline\nwith paceline.join().main_first():\n    raise OSError('there is no such corpus')\n"
    )
    (code, said), *others = without_an_agent(script, script, script)
    assert code == 1
    assert said.endswith("OSError: there is no such corpus\n")
    for code, said in others:
        assert code == 1
        assert "PeerLostError: worker 0 failed inside main_first at train.py:2; see the log of worker 0\n" in said


def test_workers_whose_rows_become_the_same_are_refused_soon(tmp_path):
    """Steps 1, 2, 4, 8 and so on are looked at; a single row is the same by chance, and may be."""
    body = (
        "t, team = make(global_batch=None), paceline.join()\n"
        "for number in range(1, 40):\n"
        "    torch.manual_seed(number + (100 * team.rank if number in (1, 2) else 0))\n"
        "    t.step((torch.randn(1, 10, dtype=torch.float64), torch.tensor([number % 2])))\n"
        "for number in range(41, 80):\n"
        "    torch.manual_seed(number)\n"
        "    t.step((torch.randn(2, 10, dtype=torch.float64), torch.tensor([0, 1])))\n"
    )
    block = fails(body, tmp_path, code=2)
    assert (
        "UsageError: workers 0 and 1 brought the same rows to step 64; seed each worker's own data apart, "
        "e.g. with paceline.stream_seed(seed, 0, paceline.join().rank)\n" in block
    )


CONVERTED = """
trainer = make()
for report in trainer.steps(data):
    trainer.model.{}
"""


@pytest.mark.parametrize(
    ("call", "workers", "plan", "kinds"),
    [
        ("float()", 1, "", ("float64", "float32")),
        ("half()", 2, "", ("float64", "float16")),
        pytest.param("float()", 2, "shard=2 zero=3", ("float64", "float32"), marks=pytest.mark.slow),
        pytest.param("float()", 2, "tensor=2", ("float64", "float32"), marks=pytest.mark.slow),
        pytest.param("to('meta')", 3, "", ("cpu", "meta"), marks=pytest.mark.slow),
    ],
)
def test_a_model_that_the_body_converts(
    call: str, workers: int, plan: str, kinds: tuple[str, str], tmp_path: Path
) -> None:
    options = ["--max-restarts", "0", *(["--plan", plan] if plan else [])]
    done = train_basics(tmp_path, CONVERTED.format(call), workers, *options, code=2)
    assert (
        "UsageError: the script has converted the model after the Trainer was made: 0.weight was {} and is {}; convert "
        "the model before the Trainer is made, or a copy.deepcopy of it in the loop; for arithmetic in bfloat16 say "
        "precision=bf16 in the plan\n"
    ).format(*kinds) in done.stderr
