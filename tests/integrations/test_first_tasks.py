"""The scripts of `benchmarks/first_tasks`: as short as the page says, and the same training on any workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import paceline
from paths import DOCS, ROOT

FOLDER = ROOT / "benchmarks" / "first_tasks"
sys.path.append(str(FOLDER))
import count  # noqa: E402

COUNTS = count.table()
PEERS = [(task, library) for task, counts in COUNTS.items() for library in counts if library != "paceline"]
# Steps until each script has evaluated. The GAN's are those of two trainers.
STEPS = {"image": 24, "bert": 14, "gpt": 10, "lora": 16, "gan": 48, "detection": 14, "a2c": 21, "tabular": 15}
COMPARED = 8  # later on, rounding decides between two boxes that are equally good
# Evaluate sooner, and print each loss in full.
SOONER = (r"every\(100\)", "every(5)")
EACH_LOSS = (r"(?m)^( +)(if (\w+)\.(?:epoch_end|every\(\d+\)):)$", r"\1print('loss', \3.step, repr(\3.loss))\n\1\2")
FEWER_STEPS = {
    "epochs=20": "epochs=1",
    "epochs=3": "epochs=1",
    "range(first, 20)": "range(first, 1)",
    "range(first, 3)": "range(first, 1)",
    "% 100": "% 5",
    "steps=100": "steps=5",
}


def test_scripts_are_as_short_as_the_page_says() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)`: [^|]*\| ([^\n]*) \|$", (DOCS / "first-tasks.md").read_text())
    shown = {task: [cell.strip() for cell in cells.split("|")] for task, cells in rows}
    expected = {
        task: [str(found[library][0]) if library in found else "" for library in count.LIBRARIES]
        for task, found in COUNTS.items()
    }
    assert shown == expected
    for task, found in COUNTS.items():
        assert found["paceline"][0] <= count.MOST[task]
        assert all(found["paceline"][0] < lines for library, (lines, _) in found.items() if library != "paceline")
    newest = max((ROOT / "benchmarks" / "records").glob("first_tasks-*.json"))
    recorded = json.loads(newest.read_text())["lines"]
    assert recorded == {task: {name: [*pair] for name, pair in found.items()} for task, found in COUNTS.items()}


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ('"""Text.\n\npaceline tokenize a\npaceline run b\n"""\n\nimport a\n', (2, 2)),
        ("from a import (\n    b,\n    c,\n)\n\n# why\nf(\n    1,  # one\n)\n", (4, 2)),
        ('def f():\n    """Text.\n    More."""\n    return 1\n', (2, 2)),
    ],
)
def test_lines_are_counted(source: str, counts: tuple[int, int]) -> None:
    assert count.count(source) == counts


def offline(folder: Path) -> dict[str, str]:
    return {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what `prepare.py` makes, and the tokens of the texts."""
    for module in ("transformers", "datasets", "peft", "gymnasium", "sklearn"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("first")
    command = [sys.executable, FOLDER / "prepare.py", "--rows", "400"]
    subprocess.run(command, cwd=folder, env=os.environ | offline(folder), check=True, capture_output=True)
    for part in ("train", "test"):
        options = ("--tokenizer", "llama/tokenizer.json", "--out", f"tokens/{part}")
        paceline("tokenize", f"source/{part}", *options, cwd=folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", COUNTS)
def test_one_and_two_workers_have_the_same_losses(task: str, prepared: Path) -> None:
    script = (FOLDER / task / "with_paceline.py").read_text()
    for pattern, text in (SOONER, EACH_LOSS):
        script = re.sub(pattern, text, script)
    (prepared / f"{task}.py").write_text(script)
    losses: list[list[float]] = []
    for workers in ("1", "2"):
        options = ("--workers", workers, "--run-dir", f"runs/{task}{workers}", "--steps", str(STEPS[task]))
        done = paceline("run", *options, f"{task}.py", cwd=prepared, timeout=400, **offline(prepared))
        assert re.search(r"(?m)^(epoch|step) \d+: \d+\.\d{4} ", done.stdout), done.stdout
        assert "in eval mode during training" not in done.stderr
        losses.append([float(loss) for loss in re.findall(r"(?m)^loss \d+ (.+)$", done.stdout)])
    assert len(losses[0]) == len(losses[1]) >= COMPARED
    assert losses[0][:COMPARED] == pytest.approx(losses[1][:COMPARED], rel=1e-5)
    assert len({*losses[0][:COMPARED]}) == COMPARED


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("task", "library"), PEERS)
def test_scripts_of_other_libraries_train_and_resume(task: str, library: str, prepared: Path, tmp_path: Path) -> None:
    """The second start finds the checkpoint of the first and does not train again."""
    pytest.importorskip({"hf_trainer": "accelerate"}.get(library, library))
    script = (FOLDER / task / f"with_{library}.py").read_text()
    for text, other in FEWER_STEPS.items():
        script = script.replace(text, other)
    (tmp_path / "train.py").write_text(script)
    for name in ("bert", "llama", "lines", "source"):
        (tmp_path / name).symlink_to(prepared / name)
    printed: list[Any] = []
    for _ in range(2):
        command = [sys.executable, "train.py"]
        env = os.environ | offline(prepared) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(re.findall(r"(?m)^(?:(?:epoch|step) \d+:.*|.*eval_loss.*)$", done.stdout))
    assert {path.name for path in tmp_path.iterdir()} & {"digits", "digits.pt", "bert-tuned", "gpt"}
    if library != "lightning":  # which draws a bar
        assert printed[0]
        assert not printed[1]
