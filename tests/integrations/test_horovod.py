"""Horovod's PyTorch API on the workers of a run: results against numpy and one process, errors, and losses."""

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path

import pytest
from doc_pages import blocks_of
from launching import SCRIPTS, paceline

import paceline.horovod.torch as hvd
from paceline.integrations.horovod import arguments
from paceline.integrations.horovod.exceptions import HorovodArgumentError
from paceline.integrations.horovod.runtime import number_of

PAGE = Path(__file__).parents[2] / "docs" / "coming-from" / "horovod.md"
SIGNATURES = json.loads((Path(__file__).parents[1] / "support" / "horovod_signatures.json").read_text())
COLLECTIVES = [
    "reductions",
    "factors",
    "gathers",
    "exchanges",
    "gradients",
    "orders",
    "process_sets",
    "joins",
    "places",
]
TRAINING = ["training", "optimizer_states", "batch_norms"]


def run(folder: Path, workers: int, *cases: str, code: int = 0, **env: str) -> str:
    options = ("run", "--workers", str(workers), "--max-restarts", "0", "--run-dir", "out")
    done = paceline(*options, SCRIPTS / "horovod_cases.py", *cases, cwd=folder, code=code, **env)
    return done.stdout + done.stderr


def test_two_workers(tmp_path: Path) -> None:
    cases = [*COLLECTIVES, "disagreements", "adasum", "timelines", *TRAINING]
    text = run(tmp_path, 2, *cases)
    assert [case for case in cases if f"passed {case}" not in text] == []


@pytest.mark.slow
def test_one_worker(tmp_path: Path) -> None:
    cases = [case for case in [*COLLECTIVES, "adasum", *TRAINING] if case != "process_sets"]
    text = run(tmp_path, 1, *cases)
    assert [case for case in cases if f"passed {case}" not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, 4])
def test_more_workers(workers: int, tmp_path: Path) -> None:
    cases = [*COLLECTIVES, *TRAINING, *(["adasum"] if workers == 4 else [])]
    text = run(tmp_path, workers, *cases)
    assert [case for case in cases if f"passed {case}" not in text] == []


def test_a_missing_worker_is_named(tmp_path: Path) -> None:
    text = run(tmp_path, 2, "waits", HOROVOD_STALL_CHECK_TIME_SECONDS="0.4")
    assert "worker 1 did not submit allreduce 'allreduce.late' within" in text
    assert "passed waits" in text  # of worker 0; the exit code is that of both


@pytest.mark.slow
def test_a_wait_ends_where_it_is_asked_for(tmp_path: Path) -> None:
    times = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.4"}
    text = run(tmp_path, 2, "waits", code=1, **times)
    assert "within HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=0.4" in text


@pytest.mark.slow
def test_elastic_training_survives_a_kill(tmp_path: Path) -> None:
    done = paceline("run", "--workers", "3", "--run-dir", "out", SCRIPTS / "horovod_elastic.py", cwd=tmp_path)
    result = json.loads((tmp_path / "elastic.json").read_text())
    assert len(result["sizes"]) == result["step"]  # every step counts once
    assert [size for size, _ in itertools.groupby(result["sizes"])] == [3, 2, 3]
    assert "worker 1 was killed by SIGKILL: 2 workers go on" in done.stdout + done.stderr


def test_signatures_are_horovods() -> None:
    shown = {}
    for name in SIGNATURES:
        thing = getattr(hvd.elastic, name.removeprefix("elastic."), None) or getattr(hvd, name)
        kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        given = inspect.signature(thing).parameters.values()
        shown[name] = [f"{kinds.get(one.kind, '')}{one.name}" for one in given]
    assert shown == SIGNATURES


def test_each_argument_is_in_one_table_at_most_and_on_the_page() -> None:
    page = PAGE.read_text()
    assert not arguments.NO_EFFECT.keys() & arguments.REFUSED.keys()
    for name in [*arguments.NO_EFFECT, *arguments.REFUSED]:
        function, _, argument = name.rstrip(")").partition("(")
        assert argument in SIGNATURES[function], name
    for table in (arguments.NO_EFFECT, arguments.REFUSED, arguments.VARIABLES, arguments.LAUNCHER):
        for name, text in table.items():
            assert f"| `{name}` | {text} |" in page, name


def test_calls_before_init_are_refused() -> None:
    with pytest.raises(ValueError, match=r"call hvd.init\(\) first"):
        hvd.rank()
    with pytest.raises(HorovodArgumentError, match="MPI communicators are not supported"):
        hvd.ProcessSet(3)  # type: ignore[arg-type]


def test_variables_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "soon")
    with pytest.raises(HorovodArgumentError, match="HOROVOD_CYCLE_TIME=soon is not a number from 0 on"):
        number_of("HOROVOD_CYCLE_TIME", 1.0)


@pytest.mark.slow
def test_the_script_of_the_page_trains_on_four_workers(tmp_path: Path) -> None:
    script = next(block.text for block in blocks_of(PAGE.read_text()) if "hvd.init()" in block.text)
    (tmp_path / "train.py").write_text(script)
    done = paceline("run", "--workers", "4", "--run-dir", "run", "train.py", cwd=tmp_path)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
