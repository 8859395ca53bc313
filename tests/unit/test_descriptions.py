"""Descriptions of models and machines: what is written is read back, and what is wrong in a file is named."""

from __future__ import annotations

import json

import pytest

from paceline.errors import FormatError, UsageError
from paceline.planner.descriptions import (
    SHIPPED,
    BlockDescription,
    FailureDescription,
    LinkDescription,
    MachineDescription,
    ModelDescription,
    as_json,
    described,
)

LINK = LinkDescription("inside a host", 8, 450e9, latency=5e-6)
MACHINE = MachineDescription("m", {"bf16": 1e15}, 80e9, 3e12, (LINK,), failures=FailureDescription(worker_hours=5e4))
BLOCK = BlockDescription("blocks.*", 1000, count=4, saved=12.0, seconds={"1": 0.5, "8": 2.0})
MODEL = ModelDescription("GPT", (BLOCK, BlockDescription("head", 10)), global_batch=64, tokens=128)


@pytest.mark.parametrize("description", [MACHINE, MODEL], ids=["machine", "model"])
def test_a_description_is_read_as_it_was_written(description):
    assert described(type(description), json.dumps(as_json(description)).encode(), "a.json") == description


def test_parameters_of_repeated_blocks_count_each_time():
    assert MODEL.parameters == 4 * 1000 + 10


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_machines_are_descriptions_with_sources(path):
    machine = MachineDescription.read(path.stem)
    assert machine.source
    assert not machine.measured
    assert machine.memory > 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"memory": -1}, "a.json is damaged: memory: expected float >= 0.0; correct"),
        ({"links": [{"name": "x"}]}, "a.json is damaged: links[0]: object missing required field workers; correct"),
        ({"cores": 3}, "a.json is damaged: object contains unknown field cores; correct"),
        ({"version": 2}, "a.json has version 2 of descriptions, but this Paceline reads version 1; write it again"),
    ],
)
def test_the_wrong_field_is_named(change, what):
    with pytest.raises(FormatError) as error:
        described(MachineDescription, json.dumps({**as_json(MACHINE), **change}).encode(), "a.json")
    assert str(error.value).startswith(what)


def test_a_missing_file_names_the_shipped_machines(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file or directory; give a JSON file, or one of "):
        MachineDescription.read(str(tmp_path / "none.json"))
