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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from agents import POLITE, WORKER, journal
from basics import data, make
from launching import SCRIPTS
from paths import SUPPORT
from warm import environment

import paceline
from paceline.errors import LaunchError, UsageError
from paceline.launch import function
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


def test_launch_function_of_a_program_returns_the_value_of_worker_0(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"step {step}\n" for step in range(1, 9)) + "value 80\n"
    assert " finished at step 8\n" in done.stderr


@pytest.mark.slow
def test_launch_function_of_a_module_gives_the_weights_of_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_launch_function_waits_for_all_hosts_before_the_second_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
def test_launch_function_in_a_thread_returns_a_large_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose standard output takes text alone; a thread hears of no signals."""
    out, found = io.StringIO(), list[bytes]()
    monkeypatch.setattr(sys, "stdout", out)
    thread = threading.Thread(target=lambda: found.append(paceline.launch(answers, run_dir="run")))
    thread.start()
    thread.join()
    assert found == [bytes(3_000_000)]
    assert out.getvalue() == "from a worker\n"


# ---- what fails

# A cell of a notebook that is interrupted: by a worker of two lines, or by a Trainer.
KERNEL = """
import signal
import paceline
def train():
    {}
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    paceline.launch(train, workers=2, run_dir="run")
except KeyboardInterrupt:
    print("interrupted, and goes on", flush=True)
"""
WORKER_PART = "import runpy; runpy.run_path('train.py')"
TRAINER = """import time
    from basics import make, data
    for report in make().steps(data, epochs=1000):
        print("up", flush=True)
        time.sleep(0.05)"""


@pytest.mark.parametrize(
    "body", [WORKER_PART, pytest.param(TRAINER, marks=pytest.mark.slow)], ids=["worker", "trainer"]
)
def test_launch_function_ctrl_c_saves_a_checkpoint_and_raises_keyboard_interrupt(tmp_path: Path, body: str) -> None:
    """And ends nothing else: the program goes on."""
    (tmp_path / "train.py").write_text(WORKER + POLITE)
    (tmp_path / "kernel.py").write_text(KERNEL.format(body))
    env = environment(PACELINE_COLD_START=str(int(body == WORKER_PART)))
    process = piped_program("kernel.py", env)
    assert process.stdout is not None
    while process.stdout.readline() != "up\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    assert out.endswith("interrupted, and goes on\n")
    assert "continue with: paceline.launch(train, ..., run_dir='run')" in error
    assert list((tmp_path / "run/checkpoints").glob("step-*/manifest.json"))


def piped_program(name: str, env: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, name], env=env, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """For functions that use no torch. As functions of a test they travel whole: nothing is imported."""
    monkeypatch.setenv("PACELINE_COLD_START", "1")


@pytest.mark.usefixtures("cold_start")
def test_launch_function_exception_is_shown_and_raised(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(LaunchError, match=r"^fails ended with exit code 1; see the output above, or run/logs$"):
        paceline.launch(fails, run_dir="run")
    shown = capsys.readouterr().err
    assert "ValueError: no" in shown
    assert "then run `paceline.launch(fails, ..., run_dir='run')`" in shown


@pytest.mark.usefixtures("cold_start")
def test_launch_function_that_calls_sys_exit_is_an_error(
    capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    def exits() -> None:
        sys.exit(0)

    with pytest.raises(LaunchError) as raised:
        paceline.launch(exits, run_dir="run")
    golden("exit code 0 without a value", str(raised.value))
    assert "\nnote: the function ended without using paceline, so Paceline trained" in capsys.readouterr().err


def test_worker_names_a_value_that_cannot_be_pickled(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    def generates() -> Any:
        return (row for row in range(3))

    (tmp_path / "call").write_bytes(cloudpickle.dumps((generates, ())))
    with pytest.raises(UsageError) as raised:
        function._called(str(tmp_path / "call"), str(tmp_path / "result"))
    golden("a value that cannot be pickled", f"UsageError: {raised.value}")


@pytest.mark.usefixtures("cold_start")
def test_launch_function_value_that_cannot_be_unpickled_is_named(golden: Callable[[str, str], None]) -> None:
    class OnlyThere:
        def __reduce__(self) -> Any:
            return int, ("x",)

    with pytest.raises(LaunchError) as raised:
        paceline.launch(OnlyThere, run_dir="run")
    golden("a value that cannot be unpickled", str(raised.value))


NO_PLACE: list[dict[str, Any]] = [
    {"where": "mars"},
    {"where": "ray"},
    {"where": "spark"},
    {"where": "ray", "workers": 3, "hosts": 2},
    {"workers": 2, "hosts": 2},
]


def test_launch_function_usage_errors(golden: Callable[[str, str], None]) -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError) as raised:
        paceline.launch(lambda: lock)
    golden("a function that cannot be pickled", str(raised.value))
    for given in NO_PLACE:
        with pytest.raises(UsageError) as raised:
            paceline.launch(answers, **given)
        golden(f"no place: {given}", str(raised.value))


def test_launch_function_names_large_values_that_it_carries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(function, "LARGE", 1_000_000)
    rows, small = bytes(3_000_000), bytes(10)
    function._packed(lambda: (rows, small), (), "train")
    note = "note: train carries 3 MB to each worker, 3 MB of it in rows; load large data inside the function instead\n"
    assert capsys.readouterr().err == note
    lock = threading.Lock()
    module = types.ModuleType("of_a_module")
    monkeypatch.setitem(sys.modules, "of_a_module", module)
    vars(module).update(LOCK=lock)
    exec("def train(rows): return LOCK", vars(module))
    for called in (module.train, functools.partial(len)):  # of what they see some cannot travel, or nothing is known
        function._packed(called, (rows,), "train")
        assert capsys.readouterr().err == note.replace("rows", "argument 0")
