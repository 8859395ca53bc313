"""`paceline run --config FILE`: options, script and configuration of a run from a file, and what overrides them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import paceline
from test_checkpoint_tree import refusal

from paceline import config
from paceline.base.script_config import flat
from paceline.cli.main import main
from paceline.errors import UsageError
from paceline.launch.options import LaunchOptions
from paceline.launch.run_config import OPTIONS, RunConfig, effective_config, script_part
from paceline.observe.runs import compare
from paceline.team.join_options import CONFIG
from paceline.team.join_options import OPTIONS as GIVEN

FILES = {
    "run.yaml": """
workers: 2
save_every: 100
plan: {data: 2, micro: 4, compile: false, recompute: blocks}
tensorboard: true
heal: false
script: train.py
arguments: [--epochs, 2, --name, "a b"]
config:
  lr: 1e-2
  model: {width: 16, layers: [1, 2]}
  name: null
""",
    "run.toml": """
workers = 2
save_every = 100
plan = "data=2 micro=4 recompute=blocks"
tensorboard = true
script = "train.py"
arguments = ["--epochs", 2, "--name", "a b"]
[config]
lr = 1e-2
[config.model]
width = 16
layers = [1, 2]
""",
    "run.json": json.dumps(
        {
            "workers": 2,
            "save-every": 100,
            "plan": "data=2 micro=4 recompute=blocks",
            "tensorboard": True,
            "script": "train.py",
            "arguments": ["--epochs", 2, "--name", "a b"],
            "config": {"lr": 0.01, "model": {"width": 16, "layers": [1, 2]}, "name": None},
        }
    ),
}


def written(folder: Path, text: str, name: str = "run.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("name", FILES)
def test_the_same_in_every_format(name: str, tmp_path: Path) -> None:
    read = RunConfig.read(written(tmp_path, FILES[name], name))
    words = ["--plan=data=2 micro=4 recompute=blocks", "--save-every=100", "--tensorboard", "--workers=2"]
    assert read.words == words
    assert (read.script, read.module, read.arguments) == ("train.py", False, ["--epochs", "2", "--name", "a b"])
    part = {"lr": 0.01, "model": {"width": 16, "layers": [1, 2]}} | ({} if name.endswith("toml") else {"name": None})
    assert read.part == part
    assert flat(read.part) == {"lr": 0.01, "model.width": 16, "model.layers": "[1, 2]"} | (
        {} if name.endswith("toml") else {"name": None}
    )


def test_every_option_of_the_command_can_be_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    usage = capsys.readouterr().out
    assert {"workers", "run-dir", "max-time", "raw", "nodes"} <= {*OPTIONS}
    assert all(f"--{name}" in usage for name in OPTIONS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker: 2", "{} has the unknown key worker; did you mean workers?"),
        ("skript: a.py", "{} has the unknown key skript; did you mean script?"),
        ("join: runs/a", "{} has the unknown key join; the keys are against, checkpoints, "),
        ("plan: [shard=2]", "{}: plan must be a number, a text or true; correct it"),
        (
            "plan: {shard: [2]}",
            "{}: the words of plan must have numbers, texts or true as values; write plan as a text",
        ),
        ("workers: {a: 1}", "{}: workers must be a number, a text or true; correct it"),
        ("script: 3", "{}: script must be a path, and module true or false; correct them"),
        ("arguments: {epochs: 3}", "{}: arguments must be a list of texts and numbers; write values that the script"),
        ("config: 3", "{}: config must be a mapping of names to values; write names below it"),
        ("config: {day: 2026-01-01}", "{}: config.day is a date, and not a number or a text; quote it"),
        ("config: {a: {3: 1}}", "{}: config.a has the key 3, which is not a text; quote it"),
        ("- a", "{} holds a list, not an object with named fields; pass the configuration file itself"),
        ("a: [", "{}, line 1, column 5: expected the node content"),
    ],
)
def test_files_that_cannot_be_used(text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    assert refusal(UsageError, RunConfig.read, path).startswith(said.format(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    said = refusal(UsageError, RunConfig.read, tmp_path / "no.yaml")
    cure = "pass a configuration file that exists"
    assert said == f"--config {tmp_path}/no.yaml could not be read: No such file or directory; {cure}"
    toml = written(tmp_path, "a = [", "run.toml")
    assert refusal(UsageError, RunConfig.read, toml) == (
        f"{toml}: invalid value (at end of document); correct the file there"
    )
    large = {"text": "a" * CONFIG}
    assert refusal(UsageError, script_part, large, toml) == (
        f"{toml}: config has 100,012 bytes, and at most 100,000 reach the workers; "
        "put the name of a file into it, and read that file in the script"
    )
    assert GIVEN["config"](script_part({"text": "a" * (CONFIG - 12)}, toml))
    assert not any(map(GIVEN["config"], ("[1]", "{", "a", 3, json.dumps(large))))


def test_settings_change_values_that_exist(tmp_path: Path) -> None:
    read = RunConfig.read(written(tmp_path, FILES["run.yaml"]))
    settings = ["lr=3e-4", "model.width=32", "name=a=b", "model.layers=[3]"]
    made = read.with_settings(settings)
    assert made == {"lr": 3e-4, "model": {"width": 32, "layers": [3]}, "name": "a=b"}
    assert read.part["lr"] == 0.01
    path = read.path
    for text, said in (
        ("lr", "--set lr does not contain '='; write --set NAME=VALUE"),
        ("model.wdth=3", f"--set model.wdth: {path} does not have this name in config; did you mean model.width?"),
        ("model=3", f"--set model: {path} does not have this name in config; did you mean model.width?"),
        (
            "x.y=3",
            f"--set x.y: {path} does not have this name in config; the names are lr, model.width, model.layers, name",
        ),
    ):
        assert refusal(UsageError, read.with_settings, [text]) == said


@pytest.mark.usefixtures("with_a_script")
@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("workers: 0", [], "paceline: run.yaml: --workers 0 is not a whole number from 1 to 999,999,999,999; "),
        ("workers: 2", [], "paceline: no script was given; pass the path of a Python training script"),
        ("plan: shrad=2", ["train.py"], "paceline: unknown plan word 'shrad"),
        (
            "workers: 2",
            ["--set", "lr=3", "train.py"],
            "paceline: --set lr: run.yaml does not have this name in config; ",
        ),
    ],
)
def test_errors_name_the_file(
    text: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, text)
    assert main(["run", "--config", "run.yaml", *words]) == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.usefixtures("with_a_script")
def test_settings_need_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--set", "lr=3", "train.py"]) == 2
    said = "paceline: --set needs --config; pass the configuration file that it changes\n"
    assert capsys.readouterr().err == said


def test_configuration_outside_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CONFIG", raising=False)
    assert config() == {}
    monkeypatch.setenv("PACELINE_CONFIG", str(written(tmp_path, FILES["run.toml"], "run.toml")))
    assert config() == {"lr": 0.01, "model": {"width": 16, "layers": [1, 2]}}
    config()["lr"] = 3
    assert config()["lr"] == 0.01
    monkeypatch.setenv("PACELINE_CONFIG", str(written(tmp_path, "config: [1]")))
    assert refusal(UsageError, config) == (
        f"{tmp_path}/run.yaml: config must be a mapping of names to values; write names below it"
    )


def test_effective_configuration_is_a_configuration_file(tmp_path: Path) -> None:
    options = LaunchOptions("train.py", ["--x"], 3, plan="data=3", tensorboard="1", max_steps=7, config='{"lr": 0.1}')
    path = written(tmp_path, effective_config(options, "runs/a").decode(), "config.json")
    read = RunConfig.read(path)
    assert read.words == ["--plan=data=3", "--run-dir=runs/a", "--tensorboard", "--workers=3"]
    assert (read.script, read.arguments, read.part) == ("train.py", ["--x"], {"lr": 0.1})


SCRIPT = """
import argparse
from basics import *

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--name", required=True)
arguments = parser.parse_args()
config = paceline.config()
assert config is not paceline.config()
width = config["model"]["width"]
t = make(model=lambda: nn.Sequential(nn.Linear(10, width), nn.Linear(width, 2)).double())
if t.main:
    print("given", sorted(vars(arguments).items()), config)
for report in t.steps(data, epochs=arguments.epochs): pass
"""


def test_runs_with_a_file_an_override_and_a_repetition(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    written(tmp_path, FILES["run.yaml"].replace(" recompute: blocks", "").replace("tensorboard: true", ""))
    paceline("run", "--config", "run.yaml", "--run-dir", "a", cwd=tmp_path)
    words = ("--run-dir", "b", "--workers", "1", "--plan", "", "--set", "model.width=8", "--steps", "2")
    done = paceline("run", "--config", "run.yaml", *words, "train.py", "--name", "c", cwd=tmp_path)
    given = "{'lr': 0.01, 'model': {'width': 8, 'layers': [1, 2]}, 'name': None}"
    assert f"given [('epochs', 1), ('name', 'c')] {given}\n" in done.stdout
    assert done.stderr.endswith("\ncontinue with: paceline run --config b/config.json\n")
    done = paceline("run", "--config", "b/config.json", cwd=tmp_path)
    assert f"resuming from step 2 of {tmp_path}/b\n" in done.stderr
    assert "train.py finished at step 4\n" in done.stderr
    kept = {name: json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"}
    assert kept["a"]["workers"] == 2
    assert kept["a"]["plan"] == "data=2 micro=4"
    assert kept["a"]["arguments"] == ["--epochs", "2", "--name", "a b"]
    assert (kept["b"]["plan"], kept["b"].get("workers"), kept["b"]["save-every"]) == ("", None, "100")
    assert (tmp_path / "a" / "config.json").stat().st_mode & 0o777 == 0o600
    rows = [line.split() for line in compare([tmp_path / "a", tmp_path / "b"]).splitlines()]
    assert ["config", "model.width", "16", "8"] in rows
    assert ["workers", "2", "1"] in rows
    assert not any(row[:2] == ["config", "lr"] for row in rows)


HYDRA = """
import hydra
from basics import *

@hydra.main(version_base=None, config_path=".", config_name="defaults")
def main(settings):
    width = settings.model.width
    t = make(model=lambda: nn.Sequential(nn.Linear(10, width), nn.Linear(width, 2)).double())
    for report in t.steps(data, epochs=1): pass
    if t.main:
        print("given", width, paceline.config())

main()
"""


def test_a_script_with_hydra(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    (tmp_path / "train.py").write_text(HYDRA)
    written(tmp_path, "model: {width: 4}\n", "defaults.yaml")
    written(tmp_path, "workers: 2\nscript: train.py\narguments: [model.width=8, hydra.run.dir=.]\nconfig: {lr: 1}\n")
    done = paceline("run", "--config", "run.yaml", "--run-dir", "a", cwd=tmp_path)
    assert done.stdout == "given 8 {'lr': 1}\n"
    done = paceline("run", "--run-dir", "b", "train.py", "model.width=6", "hydra.run.dir=.", cwd=tmp_path)
    assert done.stdout == "given 6 {}\n"
