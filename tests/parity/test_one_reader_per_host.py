"""An iterable dataset is read by one worker of each host, which sends the others their rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import train_basics
from networks import Network
from networks import hosts as hosts
from PIL import Image

from paceline.base.journal import read_journal
from paceline.data import host_reader
from paceline.errors import DatasetError

# Each process appends the number of each row that it reads to a file of its own.
COUNTED = """
import os
from pathlib import Path
class Counted(torch.utils.data.IterableDataset):
    def __init__(self, rows=96):
        self.rows, self.at = rows, 0
    def __iter__(self):
        for row in range(self.at, self.rows):
            with open(f"read-{os.getpid()}", "a") as file: print(row, file=file)
            self.at = row + 1
            yield data[row]
        self.at = 0
class Resumable(Counted):
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]
trainer = make()
trainer.state.setdefault("losses", [])
def train(dataset, epochs=2, **more):
    for report in trainer.steps(dataset, epochs=epochs, **more):
        trainer.state["losses"].append(report.loss)
    if trainer.main:
        Path("losses").write_text(repr(trainer.state["losses"]))
"""
ORACLE = """
rows = torch.utils.data.TensorDataset(*data.tensors)
by_hand = make()
in_order = lambda position, size, seed, epoch: position
print([report.loss for report in by_hand.steps(rows, epochs=2, order=in_order)])
"""


def read_by(folder: Path) -> list[list[int]]:
    """The rows that each process has read, those that read most first; the files are removed."""
    files = sorted(folder.glob("read-*"), key=lambda path: (-path.stat().st_size, path.name))
    rows = [[int(line) for line in path.read_text().split()] for path in files]
    for path in files:
        path.unlink()
    return rows


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return json.loads(train_basics(tmp_path_factory.mktemp("oracle"), ORACLE, 1).stdout)


def trained(folder: Path) -> list[float]:
    return json.loads((folder / "losses").read_text())


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        ("paceline.data.Stream(Counted())", 3),
        *(
            pytest.param(dataset, workers, marks=pytest.mark.slow)
            for dataset in ("Counted()", "paceline.data.Stream(Counted)", "paceline.data.Stream(Resumable)")
            for workers in (2, 5)
        ),
    ],
)
def test_one_worker_reads_the_dataset(dataset: str, workers: int, losses: list[float], tmp_path: Path) -> None:
    """The others of the host read nothing of a Stream, and the first rows, once, of another iterable."""
    train_basics(tmp_path, COUNTED + f"train({dataset})\n", workers)
    reader, *others = read_by(tmp_path)
    assert reader == 2 * [*range(96)]
    assert others == ([[0, 1, 2, 3]] * (workers - 1) if dataset == "Counted()" else [])
    assert trained(tmp_path) == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("kind", [pytest.param("Counted", marks=pytest.mark.slow), "Resumable"])
def test_resumed_run_reads_on_where_the_state_says(kind: str, losses: list[float], tmp_path: Path) -> None:
    """Two workers stop in the second epoch, three continue. Without a state, rows are read again."""
    body = COUNTED + f"train(paceline.data.Stream({kind}))\n"
    train_basics(tmp_path, body, 2, "--steps", "5")
    (reader,) = read_by(tmp_path)
    assert reader == [*range(96), *range(24)]
    done = train_basics(tmp_path, None, 3)
    (reader,) = read_by(tmp_path)
    assert reader == ([*range(24, 96)] if kind == "Resumable" else 2 * [*range(96)])
    again = "skipping the first 5 global batches: an iterable dataset must be read from its start"
    assert (again in done.stderr) == (kind == "Counted")
    assert trained(tmp_path) == pytest.approx(losses, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill:0@3.loading", "kill:0@3.forward", "kill:1@3.loading"])
@pytest.mark.parametrize("kind", ["Counted", "Resumable"])
def test_another_worker_reads_on_when_the_reader_is_lost(
    kind: str, fault: str, losses: list[float], tmp_path: Path
) -> None:
    body = COUNTED + f"train(paceline.data.Stream({kind}))\n"
    train_basics(tmp_path, body, 3, chaos=fault)
    assert trained(tmp_path) == pytest.approx(losses, rel=1e-12)
    formed = [event for event in read_journal(tmp_path / "out") if event["event"] == "formed"]
    assert len(formed) > 1
    readers = read_by(tmp_path)
    if fault.startswith("kill:1"):
        assert readers == [2 * [*range(96)]]
        return
    *_, lost, second = sorted(readers, key=lambda rows: (len(rows) > 24 * 3, len(rows)))
    assert lost == [*range(len(lost))]  # up to the step in which it was lost, which is read again
    begin = 24 * (len(lost) // 24 - (fault == "kill:0@3.forward")) if kind == "Resumable" else 0
    assert len(readers) == 2
    assert second == [*range(begin, 96), *range(96)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["--plan shard=2 zero=3", "--plan tensor=2", "--plan local=2 every=2", "--plan exact"]
)
def test_one_reader_under_other_plans(options: str, tmp_path: Path) -> None:
    """Also where several workers compute the same rows. Islands read by themselves."""
    model = "torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).double()"
    body = COUNTED.replace("make()", f"make(model=lambda: {model})") + "train(paceline.data.Stream(Counted))\n"
    option, _, plan = options.partition(" ")
    train_basics(tmp_path, body, 2, option, plan)
    assert len(read_by(tmp_path)) == (2 if "local" in plan else 1)


ROWS = """
class Pair(tuple): pass
class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        for row in range(96):
            yield {row}
def collate(rows):
    return torch.utils.data.default_collate([data[number] for number in rows])
"""


@pytest.mark.slow
def test_rows_that_cannot_be_sent_are_read_by_each_worker(losses: list[float], tmp_path: Path) -> None:
    body = (
        COUNTED
        + ROWS.format(row="Pair(data[row])")
        + "train(Rows(), collate=lambda rows: torch.utils.data.default_collate([tuple(row) for row in rows]))\n"
    )
    train_basics(tmp_path, body, 3)
    assert trained(tmp_path) == pytest.approx(losses, rel=1e-12)
    text = (
        "the rows of a Stream have values of a type that cannot be sent to other workers; yield tensors, arrays, images"
        " of pillow, numbers, text, and dicts or lists of these"
    )
    body = COUNTED + ROWS.format(row="Pair(data[row])") + "train(paceline.data.Stream(Rows))\n"
    (tmp_path / "other").mkdir()
    done = train_basics(tmp_path / "other", body, 2, code=1)
    assert text in " ".join(done.stderr.split())


MODES = (
    "the rows of a Stream have images of pillow with the mode P that cannot be sent to other workers; convert them, for"
    ' example with image.convert("RGB"); these modes can be sent: 1, L, LA, RGB, RGBA, CMYK, YCbCr, I, F'
)


def test_images_that_cannot_be_sent_are_named() -> None:
    image = Image.new("P", (2, 3))
    with pytest.raises(DatasetError) as raised:
        host_reader._portable({"image": [image]})
    assert str(raised.value) == MODES
    for mode in host_reader._MODES:
        sent = host_reader._restored(host_reader._portable((image.convert("RGB").convert(mode),)))[0]
        assert (sent.mode, sent.size) == (mode, image.size)


@pytest.mark.slow
def test_all_workers_name_an_image_that_cannot_be_sent(tmp_path: Path) -> None:
    body = COUNTED + "from PIL import Image\n" + ROWS.format(row='Image.new("P", (2, 3))')
    done = train_basics(tmp_path, body + "train(paceline.data.Stream(Rows))\n", 2, code=1)
    assert MODES in " ".join(done.stderr.split())
    logs = [path.read_text() for path in sorted((tmp_path / "out" / "logs").glob("worker-*.log"))]
    assert [MODES in " ".join(log.split()) for log in logs] == [True, True]


@pytest.mark.slow
def test_error_of_the_reader_ends_all_workers(tmp_path: Path) -> None:
    body = "class Broken(torch.utils.data.IterableDataset):\n"
    body += "    def __iter__(self):\n        yield from list(data)[:30]\n        raise ValueError('row 30')\n"
    done = train_basics(tmp_path, f"{body}list(make().steps(Broken()))\n", 3, code=1)
    assert "worker 0 failed (" in done.stderr
    assert "  ValueError: row 30\n" in done.stderr
    log = (tmp_path / "out" / "logs" / "worker-2.log").read_text()
    text = "worker 0 cannot read the dataset (ValueError: row 30); see the error of that worker"
    assert f"ReaderError: {text}\n" in log


@pytest.mark.root
@pytest.mark.slow
def test_each_host_has_a_reader(hosts: Callable[[int], Network], losses: list[float], tmp_path: Path) -> None:
    """Of three workers on two hosts, two read."""
    (tmp_path / "train.py").write_text(f"from basics import *\n{COUNTED}train(paceline.data.Stream(Counted))\n")
    hosts(2).run([1, 2], "train.py")
    assert read_by(tmp_path) == [2 * [*range(96)]] * 2
    assert trained(tmp_path) == pytest.approx(losses, rel=1e-12)
