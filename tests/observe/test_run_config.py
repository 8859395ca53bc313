"""What a run is made with: trainer.config(), the commit and its changes, packages."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from launching import train_basics
from scripts.basics import make
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from paceline.base.journal import Journal, read_journal
from paceline.errors import UsageError
from paceline.observe.loggers import Loggers
from paceline.observe.summary import Summary, facts
from paceline.session.script_info import MOST_DIFF, without_secrets

BODY = """
import json
class Lines:
    def write(self, step, values):
        self.config({"step": step})
    def config(self, values):
        with open("lines.jsonl", "a") as file:
            file.write(json.dumps(values) + "\\n")
t = make()
t.config(lr=0.1, name="small")
t.config(deep=False)
t.log_to(Lines())
list(t.steps(data, count=2))
"""


def hparams(folder: Path) -> dict[str, object]:
    """As TensorBoard's own plugin reads them."""
    found = EventAccumulator(str(folder))
    found.Reload()
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    told = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in told.items()}


def git(folder: Path, *words: str) -> str:
    whose = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    return subprocess.run(
        ["git", *whose, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_what_a_run_is_made_with_is_kept_and_shown(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "used.py").write_text("one = 1\n")
    git(tmp_path, "add", "used.py")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "remote", "add", "origin", "https://me:secret@example.org/it.git")
    (tmp_path / "used.py").write_text("one = 2\n")
    train_basics(tmp_path, BODY, 2, "--tensorboard")
    run, commit = tmp_path / "out", git(tmp_path, "rev-parse", "HEAD")
    (told,) = (event for event in read_journal(run) if event["event"] == "environment")
    diff = told["diff"]
    assert {key: told[key] for key in ("commit", "remote", "dirty")} == {
        "commit": commit,
        "remote": "https://example.org/it.git",
        "dirty": True,
    }
    assert "-one = 1\n+one = 2" in (run / diff).read_text()
    assert (run / diff).stat().st_mode & 0o777 == 0o600
    assert "secret" not in (run / "journal.jsonl").read_text()
    assert told["packages"]["torch"] == version("torch")
    shown = dict(facts(Summary(run))["Environment"])
    assert shown["config"] == "lr 0.1, name small, deep False"
    assert shown["commit"] == f"{commit[:12]} of https://example.org/it.git, with local changes ({diff})"
    assert hparams(run / "tensorboard") == {"lr": 0.1, "name": "small", "deep": False}
    lines = (tmp_path / "lines.jsonl").read_text().splitlines()
    assert lines[0] == '{"lr": 0.1, "name": "small", "deep": false}'
    assert sum("lr" in line for line in lines) == 1


def test_a_resume_tells_what_it_is_made_with_now(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        journal = Journal(tmp_path, Loggers(tmp_path))
        journal.write("start", workers=1, resumed_from=None)
        journal.write("config", trainer=0, values={"lr": lr, "depth": 3})
        journal.write("config", trainer=1, values={"lr": lr})
        journal.close()
    assert Summary(tmp_path).config == {"lr": 0.2, "depth": 3, "trainer 1/lr": 0.2}


@pytest.mark.usefixtures("run")
def test_what_cannot_be_kept_is_refused() -> None:
    trainer = make()
    with pytest.raises(UsageError) as caught:
        trainer.config(layers=[1, 2])
    assert str(caught.value) == (
        "config() cannot store layers, which is a list; pass numbers, texts and bools, for example str() of it"
    )
    with pytest.raises(UsageError) as caught:
        trainer.config({"lr": 1})
    assert str(caught.value) == "config() needs values by name; write trainer.config(**{'lr': 1})"


@pytest.mark.parametrize(
    ("remote", "kept"),
    [
        ("https://token@example.org/a/b.git", "https://example.org/a/b.git"),
        ("https://me:p@ss@example.org:8443/a?private_token=x#y", "https://example.org:8443/a"),
        ("git@example.org:a/b.git", "example.org:a/b.git"),
        ("ssh://git:secret@example.org/a", "ssh://example.org/a"),
        ("../elsewhere", "../elsewhere"),
        ("", ""),
    ],
)
def test_no_credential_of_a_remote_is_kept(remote: str, kept: str) -> None:
    assert without_secrets(remote) == kept


def test_of_many_changes_a_part_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.session.script_info import code

    git(tmp_path, "init", "-q")
    (tmp_path / "much").write_text("x\n")
    git(tmp_path, "add", "much")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "much")])
    assert code(tmp_path)["dirty"] is False
    (tmp_path / "much").write_text("y" * 99 + "\n" * 2 * MOST_DIFF)
    told = code(tmp_path)
    assert told["dirty"]
    assert (tmp_path / told["diff"]).stat().st_size == MOST_DIFF
