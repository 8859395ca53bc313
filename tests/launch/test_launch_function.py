"""`paceline.launch(function)`: what comes back, what is shown, and what cannot be sent."""

from __future__ import annotations

import functools
import io
import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import journal
from basics import data, make
from launching import SCRIPTS
from paths import SUPPORT
from warm import environment

import paceline
from paceline.errors import LaunchError, UsageError
from paceline.launch.engines.engine import Engine, Host


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def trained(epochs: int) -> dict[str, torch.Tensor]:
    """What a `Trainer` of basics.py has after some epochs, alone or with others."""
    trainer = make(plan="exact")
    for report in trainer.steps(data, epochs=epochs):
        print(f"step {report.step}", flush=True)
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


# A program like a notebook's kernel: the function is of __main__, and captures what stands around it.
PROGRAM = """
import sys
import paceline
epochs = 2
def train(scale):
    from basics import make, data
    trainer = make(plan="exact")
    for report in trainer.steps(data, epochs=epochs):
        print("step", report.step, flush=True)
    return scale * report.step
assert "torch" not in sys.modules
print("value", paceline.launch(train, 10, workers=2, run_dir="run"))
assert "torch" not in sys.modules
"""


def test_a_function_of_a_program_and_its_value(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"step {step}\n" for step in range(1, 9)) + "value 80\n"
    assert " finished at step 8\n" in done.stderr


@pytest.mark.slow
def test_a_function_of_a_module_gives_what_one_process_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SCRIPTS}:{SUPPORT}:{Path(__file__).parent}")
    found = paceline.launch(trained, 1, workers=2)
    alone = paceline.launch(trained, 1, workers=1)
    assert all(torch.equal(found[name], value) for name, value in alone.items())


def answers() -> bytes:
    paceline.join()
    print("from a worker", flush=True)
    return bytes(3_000_000)


class Two(Engine):
    """Two hosts that are this machine."""

    name, listen = "ray", "127.0.0.1"

    def command(self, place: Host) -> list[str]:
        return ["env", f"PYTHONPATH={SCRIPTS}:{os.pathsep.join(filter(None, sys.path))}", "sh"]


@pytest.mark.slow
def test_a_function_begins_with_all_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine's, of which this one has the hosts here. Nobody makes more than a step without the others."""
    monkeypatch.setattr("paceline.launch.function._ray", lambda asked: Two([Host("a"), Host("b")]))

    def train(folder: str) -> int:
        trainer = make()
        for report in trainer.steps(data, count=5):
            Path(folder, f"made-{os.environ['PACELINE_RANK']}-{report.step}").touch()
        return int(os.environ["PACELINE_RANK"])

    assert paceline.launch(train, str(tmp_path), workers=2, where="ray", run_dir="run") == 0
    made = sorted(path.name for path in tmp_path.glob("made-*"))
    assert made == ["made-0-1", *(f"made-{rank}-{step}" for rank in range(2) for step in range(2, 6))]
    assert not journal(tmp_path / "run", "refused")


@pytest.mark.slow
def test_a_value_of_any_size_comes_to_a_thread_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose standard output takes text alone; a thread hears of no signals."""
    out, found = io.StringIO(), list[bytes]()
    monkeypatch.setattr(sys, "stdout", out)
    thread = threading.Thread(target=lambda: found.append(paceline.launch(answers, run_dir="run")))
    thread.start()
    thread.join()
    assert found == [bytes(3_000_000)]
    assert out.getvalue() == "from a worker\n"


def fails() -> None:
    paceline.join()
    raise ValueError("no")


def test_a_failure_is_shown_and_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError) as raised:
        paceline.launch(fails, run_dir="run")
    assert str(raised.value) == "fails ended with exit code 1; see above, or run/logs"
    shown = capsys.readouterr().err
    assert "ValueError: no" in shown
    assert "then run `paceline.launch(fails, ..., run_dir='run')`" in shown


KERNEL = """
import signal, sys, time
import paceline
def train():
    import paceline, time
    from basics import make, data
    for report in make().steps(data, epochs=1000):
        print("step", report.step, flush=True)
        time.sleep(0.05)
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    paceline.launch(train, workers=2, run_dir="run")
except KeyboardInterrupt:
    print("interrupted, and goes on", flush=True)
"""


def test_ctrl_c_ends_the_cell_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    process = subprocess.Popen(
        [sys.executable, "kernel.py"], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while process.stdout.readline() != "step 3\n":
        pass
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    assert out.endswith("interrupted, and goes on\n")
    assert "continue with: paceline.launch(train, ..., run_dir='run')" in error
    assert list((tmp_path / "run/checkpoints").glob("step-*/manifest.json"))


def exits() -> None:
    sys.exit(0)


def test_a_function_that_ends_its_process_is_told_from_one_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError) as raised:
        paceline.launch(exits, run_dir="run")
    assert str(raised.value) == (
        "exits ended the process of worker 0 with exit code 0, and so returned nothing; "
        "return from it instead of sys.exit() or os._exit(); its output is in run/logs"
    )
    assert "\nnote: the function ended without using paceline, which trained" in capsys.readouterr().err


def generates() -> Any:
    paceline.join()
    return (row for row in range(3))


def test_a_value_that_cannot_be_sent_back_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"^generates ended with exit code 2; see above, or run/logs$"):
        paceline.launch(generates, run_dir="run")
    what = "generates returned a generator, which cannot be sent back (cannot pickle 'generator' object)"
    said = f"  UsageError: {what}; return numbers, text or tensors, and keep what cannot travel inside\n"
    assert said in capsys.readouterr().err


class OnlyThere:
    """What it is pickled as cannot be made."""

    def __reduce__(self) -> Any:
        return int, ("x",)


def returns_it() -> OnlyThere:
    paceline.join()
    return OnlyThere()


def test_a_value_that_cannot_be_made_again_here_is_named() -> None:
    with pytest.raises(LaunchError) as raised:
        paceline.launch(returns_it, run_dir="run")
    assert str(raised.value) == (
        "what returns_it returned cannot be made again here (ValueError: invalid literal for int() with base 10: 'x'); "
        "return numbers, text or tensors of the CPU; what it saved is in run"
    )


def test_what_cannot_be_sent() -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError) as raised:
        paceline.launch(lambda: lock)
    assert str(raised.value) == (
        "<lambda> cannot be sent to workers (cannot pickle '_thread.lock' object); "
        "make inside of the function what cannot travel: files, locks, a Trainer, a loader"
    )


NOWHERE = [
    ({"where": "mars"}, 'where=\'mars\' is no place for workers; say "local", "ray" or "spark"'),
    ({"where": "ray"}, "there is no Ray here; call ray.init(address=...) before"),
    (
        {"where": "spark"},
        "there is no session of Spark here; make one before, by SparkSession.builder.getOrCreate()",
    ),
    (
        {"where": "ray", "workers": 3, "hosts": 2},
        "3 workers cannot be on 2 hosts; give each as many, on this machine all",
    ),
    ({"workers": 2, "hosts": 2}, "2 workers cannot be on 2 hosts; give each as many, on this machine all"),
]


@pytest.mark.parametrize(("given", "told"), NOWHERE, ids=[told.split(";")[0] for _, told in NOWHERE])
def test_where_no_function_can_be(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as raised:
        paceline.launch(fails, **given)
    assert str(raised.value) == told


def test_what_is_large_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.launch import function

    monkeypatch.setattr(function, "LARGE", 1_000_000)
    rows, small = bytes(3_000_000), bytes(10)
    function._packed(lambda: (rows, small), (), "train")
    told = "note: train carries 3 MB to each worker, of which rows has 3; load it inside of the function\n"
    assert capsys.readouterr().err == told
    lock = threading.Lock()
    module = types.ModuleType("of_a_module")
    monkeypatch.setitem(sys.modules, "of_a_module", module)
    vars(module).update(LOCK=lock)
    exec("def train(rows): return LOCK", vars(module))
    for called in (module.train, functools.partial(len)):  # of what they see some cannot travel, or nothing is known
        function._packed(called, (rows,), "train")
        assert capsys.readouterr().err == told.replace("rows", "argument 0")
