"""The examples for SkyPilot, dstack and Docker: their fields are those of the tools, and what they name exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import EXAMPLES

from paceline.base.console import RUN_OPTIONS

ROOT = EXAMPLES.parent
# Fields of a task of SkyPilot 0.14.1 and of dstack 0.22.5, which refuse others, and kinds of their values.
FIELDS: dict[str, dict[str, Any]] = {
    "skypilot.yaml": {
        "name": str,
        "num_nodes": int,
        "workdir": str,
        "secrets": dict,
        "setup": str,
        "run": str,
        "resources": {"accelerators": str},
    },
    "digits.dstack.yml": {
        "type": "task",
        "name": str,
        "nodes": int,
        "python": float,
        "files": list,
        "env": list,
        "commands": list,
        "resources": {"gpu": str, "shm_size": str},
    },
}


def check_fields(values: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raises AssertionError if a value has a name that is not among the fields, or another kind."""
    for name, value in values.items():
        kind = fields[name]
        if isinstance(kind, dict):
            check_fields(value, kind)
        else:
            assert value == kind if isinstance(kind, str) else isinstance(value, kind), name


def commands(name: str) -> list[list[str]]:
    """The words of the commands of an example, those of all nodes."""
    task = yaml.safe_load((EXAMPLES / name).read_text())
    lines = task.get("commands") or (task["setup"] + task["run"]).splitlines()
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_those_of_the_tool(name: str) -> None:
    task = yaml.safe_load((EXAMPLES / name).read_text())
    check_fields(task, FIELDS[name])
    assert task.get("nodes", task.get("num_nodes")) == 2
    assert task.get("env", [*task.get("secrets", {})]) == ["PACELINE_TOKEN"]
    assert not any(task.get("secrets", {}).values())  # its value comes from the user's environment


@pytest.mark.parametrize("name", FIELDS)
def test_each_node_runs_a_script_that_is_there(name: str) -> None:
    (run,) = [words for words in commands(name) if words[:2] == ["paceline", "run"]]
    options, script = run[2:-1], run[-1]
    assert options[:2] == ["--nodes", "auto"]
    assert {word for word in options if word.startswith("--")} <= RUN_OPTIONS
    assert (ROOT / script).exists()


def test_files_that_dstack_copies_are_those_that_the_package_is_built_from() -> None:
    task = yaml.safe_load((EXAMPLES / "digits.dstack.yml").read_text())
    copied = dict(entry.split(":") for entry in task["files"])
    assert all((EXAMPLES / source).resolve() == ROOT / target for source, target in copied.items())
    assert {*copied.values()} >= {*built_from()}


def built_from() -> list[str]:
    """The files and folders that pip needs to build the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return ["pyproject.toml", project["readme"], "LICENSE", "src"]


def test_dockerfile_copies_what_is_there_and_ends_without_privileges() -> None:
    text = (ROOT / "Dockerfile").read_text()
    admitted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [word for line in re.findall(r"(?m)^COPY (?:--\S+ )?(.+) \S+$", text) for word in line.split()]
    assert {*copied} == {*built_from(), "examples"} == {*admitted}
    assert all((ROOT / name).exists() for name in copied)
    assert re.findall(r"(?m)^USER (\S+)$", text)[-1] == "1000"  # a number: Kubernetes cannot look up a name
    assert "useradd --uid 1000 " in text


def test_extras_that_the_examples_install_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in (ROOT / "Dockerfile", *(EXAMPLES / name for name in FIELDS)):
        (named,) = re.findall(r'"\.\[([\w,]+)\]"', Path(path).read_text())
        assert {*named.split(",")} <= extras.keys(), path.name
