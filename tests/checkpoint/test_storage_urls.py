"""Where checkpoints are kept: folders and URLs keep the same contract, and no trouble of a server's stops training."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from basics import cross_entropy, data, net
from by_hand import Plain, built, grid
from checkpoints import find_checkpoint
from launching import train_basics
from oracle import apart
from s3 import Proxy, s3_server
from safetensors.torch import load_file
from test_checkpoint_tree import refusal, same
from token_folders import write_folder

from paceline.base.journal import read_journal
from paceline.checkpoint import files
from paceline.checkpoint.export import export_model
from paceline.checkpoint.files import checkpoints_of
from paceline.checkpoint.inspect import inspect_run
from paceline.checkpoint.storage import Folder, ObjectStore, Storage, storage_at
from paceline.data import Tokens
from paceline.errors import CheckpointError, DatasetError


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with pytest.MonkeyPatch.context() as patch, s3_server(tmp_path_factory.mktemp("s3"), patch) as server:
        yield server


@pytest.fixture
def s3(_server: Proxy, tmp_path: Path) -> Proxy:
    """The module's server with an empty bucket."""
    for method, path in (("POST", "/moto-api/reset"), ("PUT", "/bucket")):
        connection = http.client.HTTPConnection("127.0.0.1", _server.behind)
        connection.request(method, path)
        assert connection.getresponse().status == 200
        connection.close()
    _server.trouble, _server.met = tmp_path / "trouble", 0
    return _server


def places(tmp_path: Path) -> list[Storage]:
    return [storage_at(tmp_path / "a" / "b"), storage_at("memory://a/b"), storage_at("s3://bucket/runs/a")]


def test_folder_memory_and_s3_storage_keep_the_same_contract(s3: Proxy, tmp_path: Path) -> None:
    found = places(tmp_path)
    assert [type(place) for place in found] == [Folder, ObjectStore, ObjectStore]
    assert [str(place) for place in found] == [f"{tmp_path}/a/b", "memory://a/b", "s3://bucket/runs/a"]
    for place in found:
        assert place.folders() == []
        with pytest.raises(FileNotFoundError):
            place.sizes("none")
        with pytest.raises(FileNotFoundError):
            place.read("none", "x")
        with pytest.raises(FileNotFoundError):
            place.local("none", "x").stat()
        large = bytes(range(256)) * 80_000  # 20 MB: more than a block, and in parts
        size, digest = place.write("one", "large", [large[:1000], memoryview(large)[1000:]])
        assert (size, digest) == (len(large), hashlib.sha256(large).hexdigest())
        place.put("one", "small", b"first")
        place.put("one", "small", b"second")
        place.write("two", "empty", [])
        assert sorted(place.folders()) == ["one", "two"]
        assert place.sizes("one") == {"large": len(large), "small": 6}
        assert place.read("one", "small") == b"second"
        assert place.local("one", "large").read_bytes() == large
        place.remove("one", ["small"])
        assert place.sizes("one") == {"large": len(large)}
        place.remove("two", ["empty"])
        with suppress(FileNotFoundError):  # an object store has no folders without files
            place.tidy("two")
        place.tidy("one")
        assert place.folders() == ["one"]
        place.remove("one")
        assert place.folders() == []


def test_checkpoints_in_s3_survive_a_torn_write_and_a_failing_server(s3: Proxy, tmp_path: Path) -> None:
    storage = storage_at("s3://bucket/runs/a")
    state = {"w": torch.randn(300, 5), "b": torch.arange(4)}
    for step in (1, 2, 3):
        files.write_checkpoint(storage, step, state, {"seed": step, "tree": {}})
    storage.write("step-000000000009", "model-00000000.safetensors", [b"torn"])
    lines: list[str] = []
    found = files.find_checkpoint(storage_at("s3://bucket/runs/a"), lines.append)
    assert found is not None
    assert (found.step, found.manifest["seed"]) == (3, 3)
    assert lines == ["checkpoint of step 9 was not finished; using step 3"]
    assert same(found.tensors(), state)
    assert sorted(storage.folders()) == ["step-000000000002", "step-000000000003", "step-000000000009"]
    s3.trouble.write_text("500")
    said = refusal(CheckpointError, files.write_checkpoint, storage, 4, state, {})
    assert re.fullmatch(
        r"checkpoint of step 4 could not be written to s3://bucket/runs/a: .*; "
        r"check that this host can reach it and write to it, or choose other --checkpoints; "
        r"the checkpoint of step 3 is intact",
        said,
    )
    assert s3.met > 0


BODY = """
import time
from pathlib import Path

t = make()
for report in t.steps(data, count=60):
    if t.main:
        if report.step == 25 and Path("wanted").exists():
            Path("wanted").rename("trouble")
        if report.step == 45:
            Path("trouble").unlink(missing_ok=True)
    time.sleep(0.25 if Path("trouble").exists() else 0.1 if Path("wanted").exists() else 0)
t.export("out.safetensors")
"""


def test_tokens_are_read_from_s3(s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same store; what its packages raise where it is away has the form of every error of the data."""
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)  # where all is gone, it pauses longer before each
    tokens = write_folder(tmp_path / "tokens", [np.arange(70, dtype=np.uint16), np.arange(31, dtype=np.uint16)])
    for path in (tmp_path / "tokens").iterdir():
        storage_at("s3://bucket/data").put("tokens", path.name, path.read_bytes())
    rows = Tokens("s3://bucket/data/tokens", 10)
    assert [rows[at].tolist() for at in range(len(rows))] == [tokens[at : at + 11].tolist() for at in range(0, 100, 10)]
    s3.trouble.write_text("all gone")
    with pytest.raises(
        DatasetError, match=r"^s3://bucket/data/tokens cannot be read \(.+\); repair that, and start again$"
    ):
        rows[0]
    assert s3.met > 0


def run_to_s3(folder: Path, trouble: str) -> Any:
    if trouble:
        (folder / "wanted").write_text(trouble)
    where = ("--checkpoints", "s3://bucket/runs/a", "--save-every", "2")
    return train_basics(folder, BODY, 2, *where)


@pytest.mark.parametrize("protocol", ["file", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_run_saves_checkpoints_to_a_url_and_resumes_from_there(
    protocol: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if protocol == "s3":
        request.getfixturevalue("s3")
    url = "s3://bucket/runs/a" if protocol == "s3" else f"file://{tmp_path}/kept"
    stopped = train_basics(tmp_path, BODY, 2, "--checkpoints", url, "--save-every", "10", "--steps", "19")
    assert f"--checkpoints {url}" in stopped.stderr
    assert not (tmp_path / "out/checkpoints").exists()
    again = train_basics(tmp_path, BODY, 1, "--checkpoints", url)
    assert f"resuming from step 19 of {url}" in again.stderr
    contents = json.loads(inspect_run(url, as_json=True))
    assert (contents["step"], contents["checkpoints"][0]["path"]) == (60, f"{url}/step-000000000060")
    export_model(url, tmp_path / "from_url.safetensors")
    exported, from_url = (load_file(tmp_path / name) for name in ("out.safetensors", "from_url.safetensors"))
    assert same(exported, from_url)
    model = built(net)
    plain = Plain(model, cross_entropy, [torch.optim.SGD(model.parameters(), lr=0.1)]).train(grid(data, 24, count=60))
    assert apart(exported, dict(plain.model.state_dict())) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["500", "gone"])
def test_a_failing_s3_server_does_not_stop_training(s3: Proxy, tmp_path: Path, trouble: str) -> None:
    done = run_to_s3(tmp_path, trouble)
    assert s3.met > 0, "the trouble was met"
    assert re.search(
        r"training continues without this checkpoint: checkpoint of step \d+ could not be written to"
        r" s3://bucket/runs/a: ",
        done.stderr,
    )
    found = files.find_checkpoint(checkpoints_of("s3://bucket/runs/a"), pytest.fail)
    assert found is not None
    assert found.step == 60


@pytest.mark.slow
def test_training_does_not_wait_for_a_slow_s3_server(s3: Proxy, tmp_path: Path) -> None:
    run_to_s3(tmp_path, "0.2")
    assert s3.met > 0
    events = read_journal(tmp_path / "out")
    late = [
        (event["step"], max(other["step"] for other in events[:place] if other["event"] == "step"))
        for place, event in enumerate(events)
        if event["event"] == "checkpoint"
    ]
    assert any(done > saved + 1 for saved, done in late), "training went on while one was written"


@pytest.mark.slow
def test_an_s3_server_that_stays_away_fails_only_the_last_save(s3: Proxy, tmp_path: Path) -> None:
    (tmp_path / "wanted").write_text("gone")
    body = BODY.replace("report.step == 45", "False")
    where = ("--checkpoints", "s3://bucket/runs/a", "--save-every", "2")
    done = train_basics(tmp_path, body, 2, *where, code=1)
    assert "checkpoint of step 60 could not be written to s3://bucket/runs/a: " in done.stderr
    (tmp_path / "trouble").unlink()
    found = files.find_checkpoint(checkpoints_of("s3://bucket/runs/a"), lambda _: None)
    assert found is not None
    saved = [event["step"] for event in read_journal(tmp_path / "out") if event["event"] == "checkpoint"]
    # What was there before the trouble. Of the last one its manifest may have come, and the answer to that not.
    assert saved[-1] <= found.step <= 26
    done = train_basics(tmp_path, BODY, 1, *where)
    assert f"resuming from step {found.step} of s3://bucket/runs/a" in done.stderr


def test_checkpoint_storage_of_a_run_folder_or_url(tmp_path: Path) -> None:
    assert str(checkpoints_of(tmp_path)) == f"{tmp_path}/checkpoints"
    assert str(checkpoints_of("s3://a/b/")) == "s3://a/b"
    assert find_checkpoint(tmp_path, pytest.fail) is None
