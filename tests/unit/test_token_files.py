"""Tokens: every row is numpy's slice of the same tokens, wherever the files are and however they are cut; and a
training on them is that of one worker."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE

import fsspec
import numpy as np
import pytest
import torch
from alone import by_hand
from by_hand import built, grid
from hypothesis import strategies as st
from launching import paceline
from oracle import apart
from safetensors.torch import load_file
from token_folders import Unranged, served, write_folder
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader
from warm import Process

from examples import examples
from paceline.data import Tokens
from paceline.errors import DatasetError, UsageError

NAMES = ("uint8", "uint16", "uint32", "int32", "int64")


def some(count: int, dtype: str = "uint16", seed: int = 0) -> np.ndarray:
    most = min(np.iinfo(dtype).max, 60_000)
    return np.random.default_rng(seed).integers(0, most, count).astype(dtype)


def same(row: torch.Tensor, tokens: np.ndarray, index: int, length: int) -> None:
    assert row.dtype == torch.int64
    assert row.tolist() == tokens[index * length : index * length + length + 1].tolist()


def equal(data: Tokens, tokens: np.ndarray, length: int) -> None:
    """Every row, one by one and in one go."""
    assert len(data) == (len(tokens) - 1) // length
    together = data.__getitems__(range(len(data)))
    for index in range(len(data)):
        same(data[index], tokens, index, length)
        same(together[index], tokens, index, length)
    assert all(row.shape == (length + 1,) for row in together)


# ---- rows


@examples(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(1, 40),
    st.sampled_from(NAMES),
    st.data(),
    fast=25,
    slow=60,
)
def test_token_rows_equal_numpy_slices_across_files(sizes, length, dtype, draw):
    with tempfile.TemporaryDirectory() as folder:
        shards = [some(size, dtype, seed) for seed, size in enumerate(sizes)]
        tokens = write_folder(Path(folder, "t"), shards)
        if len(tokens) <= length:
            with pytest.raises(DatasetError):
                Tokens(f"{folder}/t", length)
            return
        data = Tokens(f"{folder}/t", length)
        equal(data, tokens, length)
        rows = draw.draw(st.lists(st.integers(-len(data), len(data) - 1), max_size=20))
        for index, row in zip(rows, data.__getitems__(rows), strict=True):
            same(row, tokens, index % len(data), length)
        store = fsspec.filesystem("memory")
        store.pipe({f"/t/{path.name}": path.read_bytes() for path in Path(folder, "t").iterdir()})
        equal(Tokens("memory://t", length), tokens, length)
        store.rm("/t", recursive=True)


@pytest.mark.parametrize("dtype", NAMES)
def test_single_token_files_of_each_dtype(dtype, tmp_path, monkeypatch):
    tokens = some(100, dtype)
    tokens.tofile(tmp_path / "raw.bin")
    tokens.tofile(tmp_path / "raw")
    np.save(tmp_path / "little.npy", tokens)
    np.save(tmp_path / "big.npy", tokens.astype(tokens.dtype.newbyteorder(">")))
    for name in ("raw.bin", "raw"):
        equal(Tokens(tmp_path / name, 7, dtype=dtype), tokens, 7)
    for name in ("little.npy", "big.npy"):
        equal(Tokens(tmp_path / name, 7), tokens, 7)
        equal(Tokens(tmp_path / name, 7, dtype=dtype), tokens, 7)
        equal(Tokens(f"file://{tmp_path}/{name}", 7), tokens, 7)
    monkeypatch.chdir(tmp_path)
    here = Tokens("raw.bin", 7, dtype)
    monkeypatch.chdir("/")  # who reads later may stand elsewhere
    equal(here, tokens, 7)


def test_token_rows_have_negative_indices_and_an_index_error(tmp_path):
    tokens = some(22)
    data = Tokens(tmp_path / write(tmp_path, tokens), 7, "uint16")
    assert data[-1].tolist() == data[2].tolist() == tokens[14:22].tolist()
    assert len(list(data)) == len(data) == 3
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"row {index} of 3"):
            data[index]
    assert data[np.int64(1)].tolist() == data[torch.tensor(1)].tolist() == tokens[7:15].tolist()


def write(folder: Path, tokens: np.ndarray) -> str:
    tokens.tofile(folder / "some.bin")
    return "some.bin"


def test_token_row_memory_is_not_shared(tmp_path):
    """Neighbours share a token, but not its memory, nor is anything written to the file."""
    tokens = some(22)
    data = Tokens(tmp_path / write(tmp_path, tokens), 7, "uint16")
    rows = data.__getitems__([0, 1, 0])
    rows[0].fill_(0)
    same(rows[1], tokens, 1, 7)
    same(rows[2], tokens, 0, 7)
    same(data[0], tokens, 0, 7)


def test_token_index_gives_count_dtype_and_vocabulary(tmp_path):
    write_folder(tmp_path, [some(10), some(5)], vocabulary=60_000)
    data = Tokens(tmp_path, 3)
    assert (data.tokens, data.length, data.dtype, data.vocabulary, data.end) == (15, 3, "uint16", 60_000, 0)
    np.save(tmp_path / "a.npy", some(10))
    alone = Tokens(tmp_path / "a.npy", 3)
    assert (alone.tokens, alone.dtype, alone.vocabulary, alone.end) == (10, "uint16", None, None)


# ---- what it costs

ONE_ROW = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: event == "open" and str(args[0]) == sys.argv[1] and opened.append(args))
from paceline.data import Tokens
data = Tokens(sys.argv[1], 1024, "uint16")
row = data[int(sys.argv[2])]
_, _, mapped = open("/proc/self/smaps").read().partition(sys.argv[1])
kib = int(mapped.partition("Rss:")[2].split()[0])
print(json.dumps({"rows": len(data), "first": row[0].item(), "opened": len(opened), "kib": kib}))
"""


def test_token_row_of_a_huge_file_opens_one_file_and_maps_little(tmp_path):
    """Counted: files opened, and how much of the map was touched. The file is sparse."""
    count, path = 2**33, tmp_path / "large.bin"
    middle = (count - 1) // 1024 // 2
    with path.open("wb") as file:
        os.truncate(path, 2 * count)
        for row, token in ((0, 11), (middle, 22)):
            file.seek(2 * 1024 * row)
            file.write(token.to_bytes(2, "little"))
    told = []
    for row in (0, middle):
        with Process([sys.executable, "-c", ONE_ROW, path, str(row)], stdout=PIPE, stderr=PIPE) as process:
            out, error = process.communicate()
        assert process.returncode == 0, error
        told.append(json.loads(out))
    assert [one["first"] for one in told] == [11, 22]
    for one in told:
        assert one["rows"] == (count - 1) // 1024
        assert one["opened"] == 1
        assert 0 < one["kib"] <= 4096  # a large page at most, and one around it
    with served(tmp_path) as (url, log):
        assert Tokens(f"{url}/large.bin", 1024, "uint16")[middle][0] == 22
        assert log == [("/large.bin", 2050)]


def test_token_files_keep_few_files_open(tmp_path):
    tokens = write_folder(tmp_path, [some(3, seed=seed) for seed in range(400)])
    before = len(os.listdir("/proc/self/fd"))
    data = Tokens(tmp_path, 2)
    equal(data, tokens, 2)
    assert len(os.listdir("/proc/self/fd")) <= before + 128


# ---- over the network


def test_token_files_over_http_read_only_the_bytes_of_the_rows(tmp_path):
    tokens = write_folder(tmp_path, [some(100), some(50), some(300)])
    with served(tmp_path) as (url, log):
        data = Tokens(url, 10)
        assert [path for path, _ in log] == ["/tokens.json"]
        del log[:]
        same(data[3], tokens, 3, 10)
        assert log == [("/00000.bin", 22)]
        del log[:]
        for index, row in zip((20, 21, 40, 22, 2), data.__getitems__([20, 21, 40, 22, 2]), strict=True):
            same(row, tokens, index, 10)
        # Three neighbours at once, and each other row by itself.
        assert sorted(log) == [("/00000.bin", 22), ("/00002.bin", 22), ("/00002.bin", 62)]
        del log[:]
        same(data[9], tokens, 9, 10)  # over the border
        assert sorted(log) == [("/00000.bin", 20), ("/00001.bin", 2)]
        equal(data, tokens, 10)


def test_http_server_without_byte_ranges_is_refused(tmp_path):
    write_folder(tmp_path, [some(100)])
    with served(tmp_path, Unranged) as (url, _):
        data = Tokens(url, 10)
        with pytest.raises(DatasetError) as caught:
            data[0]
    assert str(caught.value) == (
        f"{url}/00000.bin returned 200 bytes instead of 22; "
        "copy it to this machine: it has changed, or its server does not support byte ranges"
    )


def test_token_file_that_is_shorter_than_its_index_says_is_refused(tmp_path):
    write_folder(tmp_path, [some(100)])
    with served(tmp_path) as (url, _):
        data, local = Tokens(url, 10), Tokens(tmp_path, 10)
        os.truncate(tmp_path / "00000.bin", 10)
        for rows, text in (
            (
                data,
                f"{url}/00000.bin returned 10 bytes instead of 22; upload it again: it is incomplete, or has changed",
            ),
            (
                local,
                f"{tmp_path}/00000.bin is incomplete: it has 10 bytes instead of at least 22; copy or write it again",
            ),
        ):
            with pytest.raises(DatasetError) as caught:
                rows[0]
            assert str(caught.value) == text


def test_empty_token_file_is_refused(tmp_path):
    (tmp_path / "empty.npy").touch()
    for url in (f"{tmp_path}/empty.npy", f"file://{tmp_path}/empty.npy"):
        with pytest.raises(DatasetError) as caught:
            Tokens(url, 8)
        assert str(caught.value) == f"{url} is empty; write or copy the file again"


def test_list_of_token_files_is_refused(tmp_path):
    with pytest.raises(UsageError) as caught:
        Tokens([tmp_path / "a.npy"], 8)
    cure = "pass a token file, or a folder that `paceline tokenize` has finished"
    assert str(caught.value) == f"url= needs a path or a URL, got a list; {cure}"


@pytest.mark.parametrize("where", ["local", "http", "memory"])
def test_token_files_work_in_forked_and_pickled_copies(where, tmp_path):
    """After rows were read here: maps and connections stay behind in a fork and in a pickle."""
    tokens = write_folder(tmp_path / "t", [some(40, seed=seed) for seed in range(3)])
    fsspec.filesystem("memory").pipe({f"/t/{path.name}": path.read_bytes() for path in (tmp_path / "t").iterdir()})
    with served(tmp_path) as (url, _):
        data = Tokens({"local": str(tmp_path / "t"), "http": f"{url}/t", "memory": "memory://t"}[where], 8)
        same(data[0], tokens, 0, 8)
        equal(pickle.loads(pickle.dumps(data)), tokens, 8)
        batches = list(DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"))
        for index, row in enumerate(torch.cat(batches)):
            same(row, tokens, index, 8)
        same(data[1], tokens, 1, 8)


def test_token_dataset_pickle_has_no_data(tmp_path):
    data = Tokens(tmp_path / write(tmp_path, some(500_000)), 1000, "uint16")
    data.__getitems__(range(len(data)))
    assert len(pickle.dumps(data)) < 1000


# ---- what is refused


def index_with(folder: Path, **changed: object) -> None:
    write_folder(folder, [some(10)])
    told = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps(told | changed))


SHARD = {"file": "00000.bin", "tokens": 10, "bytes": 20, "sha256": ""}
REFUSED = {
    "rows of no tokens": (lambda t: Tokens(t, 0), UsageError),
    "no raw file": (lambda t: Tokens(t / "no.bin", 4, "uint16"), DatasetError),
    "no .npy file": (lambda t: Tokens(t / "no.npy", 4), DatasetError),
    "no index": (lambda t: Tokens(t, 4), DatasetError),
    "raw file without dtype": (lambda t: Tokens(t / write(t, some(5, "uint8")), 4), UsageError),
    "dtype of no tokens": (lambda t: Tokens(t / write(t, some(5, "uint8")), 4, "float32"), UsageError),
    "bytes that are no multiple of the dtype": (
        lambda t: Tokens(t / write(t, some(5, "uint8")), 4, "uint16"),
        DatasetError,
    ),
    "fewer tokens than a row": (lambda t: Tokens(t / write(t, some(5)), 5, "uint16"), DatasetError),
    "array of two dimensions": (
        lambda t: (np.save(t / "a.npy", some(9).reshape(3, 3)), Tokens(t / "a.npy", 2)),
        DatasetError,
    ),
    "array of objects": (
        lambda t: (np.save(t / "a.npy", np.array(["a", {}], object)), Tokens(t / "a.npy", 2)),
        DatasetError,
    ),
    "array cut short": (
        lambda t: (np.save(t / "a.npy", some(9)), os.truncate(t / "a.npy", 140), Tokens(t / "a.npy", 2)),
        DatasetError,
    ),
    "no .npy content": (lambda t: ((t / "a.npy").write_bytes(b"12345678"), Tokens(t / "a.npy", 2)), DatasetError),
    "dtype that contradicts the .npy file": (
        lambda t: (np.save(t / "a.npy", some(9)), Tokens(t / "a.npy", 2, "uint32")),
        UsageError,
    ),
    "dtype that contradicts the index": (lambda t: (write_folder(t, [some(9)]), Tokens(t, 2, "uint32")), UsageError),
    "shard cut short": (
        lambda t: (write_folder(t, [some(9), some(8)]), os.truncate(t / "00001.bin", 14), Tokens(t, 2)),
        DatasetError,
    ),
    "missing shard": (
        lambda t: (write_folder(t, [some(9), some(8)]), (t / "00001.bin").unlink(), Tokens(t, 2)),
        DatasetError,
    ),
    "later format": (lambda t: (index_with(t, format=2), Tokens(t, 2)), DatasetError),
    "broken JSON": (lambda t: ((t / "tokens.json").write_text("[1"), Tokens(t, 2)), DatasetError),
    **{
        name: (lambda t, wrong=wrong: (index_with(t, **wrong), Tokens(t, 2)), DatasetError)
        for name, wrong in (
            ("index with a wrong dtype", {"dtype": "float32"}),
            ("index with another dtype", {"dtype": "uint32"}),
            ("index without shards", {"shards": []}),
            ("index with a wrong count", {"shards": [SHARD | {"tokens": 9}]}),
            ("index with a path outside", {"shards": [SHARD | {"file": "../00000.bin"}]}),
            ("index with a missing field", {"shards": [{"file": "00000.bin"}]}),
            ("index with a wrong vocabulary", {"vocabulary": None}),
        )
    },
    "missing URL of a .npy file": (lambda t: Tokens("memory://nothing/x.npy", 2), DatasetError),
    "missing shard of a URL": (
        lambda t: (
            (index_with(t), fsspec.filesystem("memory").put(str(t / "tokens.json"), "/lone/tokens.json"))
            and Tokens("memory://lone", 2)
        ),
        DatasetError,
    ),
    "missing index of a URL": (lambda t: Tokens("memory://nothing", 2), DatasetError),
    "unknown protocol": (lambda t: Tokens("nowhere://a", 2), UsageError),
    "verify without an index": (lambda t: Tokens(t / write(t, some(5)), 2, "uint16").verify(), UsageError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_token_files_are_refused(case, golden, tmp_path):
    ask, kind = REFUSED[case]
    with pytest.raises(kind) as caught:
        ask(tmp_path)
    golden(case, str(caught.value).replace(str(tmp_path), "FOLDER"))


def test_token_url_without_fsspec_is_refused(golden, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fsspec", None)  # the import fails as if it were not installed
    with pytest.raises(UsageError) as caught:
        Tokens("s3://bucket/tokens", 4)
    golden("token url without fsspec is refused", str(caught.value))
    equal(Tokens(tmp_path / write(tmp_path, some(20)), 4, "uint16"), some(20), 4)


def test_verify_finds_changed_bytes_and_tokens_out_of_the_vocabulary(tmp_path):
    write_folder(tmp_path, [some(50), np.arange(50, dtype="uint16")], vocabulary=60_000)
    Tokens(tmp_path, 4).verify()
    write_folder(tmp_path, [np.zeros(50, "uint16"), np.arange(50, dtype="uint16")], vocabulary=49)
    with pytest.raises(DatasetError) as caught:
        Tokens(tmp_path, 4).verify()
    assert str(caught.value) == (
        f"{tmp_path}/00001.bin holds the token 49, and the vocabulary has 49; "
        "create the folder again with `paceline tokenize`"
    )
    data = bytearray((tmp_path / "00000.bin").read_bytes())
    data[77] ^= 1
    (tmp_path / "00000.bin").write_bytes(data)
    with pytest.raises(DatasetError) as caught:
        Tokens(tmp_path, 4).verify()
    assert str(caught.value) == f"{tmp_path}/00000.bin does not have the SHA-256 of its index; copy it again"


def test_a_file_that_is_shortened_while_it_is_mapped_ends_in_an_error(tmp_path):
    (tmp_path / "a.bin").write_bytes(some(40_000).tobytes())
    tokens = Tokens(tmp_path / "a.bin", 4, dtype="uint16")
    last = tokens[len(tokens) - 1]
    os.truncate(tmp_path / "a.bin", 8)  # reading the map past it would end the process with SIGBUS
    with pytest.raises(DatasetError) as caught:
        tokens[len(tokens) - 1]
    assert str(caught.value) == (
        f"{tmp_path}/a.bin was shortened from 80000 to 8 bytes after it was opened; "
        "write or copy the file again, and start again"
    )
    (tmp_path / "b.bin").write_bytes(some(40_000).tobytes())
    tokens = Tokens(tmp_path / "b.bin", 4, dtype="uint16")
    assert tokens[0].tolist() == some(40_000)[:5].tolist()
    (tmp_path / "b.bin").unlink()  # its map stays intact
    assert tokens[len(tokens) - 1].tolist() == last.tolist()


def test_import_of_paceline_imports_no_heavy_modules():
    script = (
        "import sys, paceline\n"
        "heavy = {'torch', 'numpy', 'fsspec', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "kind = paceline.data.Tokens\n"
        "print(sorted(heavy & set(sys.modules)), kind.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n['numpy'] Tokens\n"


# ---- training

TRAINING = """
import os, signal, sys
from pathlib import Path
import torch.nn.functional as F
from torch import nn, optim
import paceline

data = paceline.data.Tokens("tokens", 8)


def loss(output, rows):
    return F.cross_entropy(output.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"), rows[:, 1:].numel()


trainer = paceline.Trainer(
    model=lambda: nn.Sequential(nn.Embedding(data.vocabulary, 12), nn.Linear(12, data.vocabulary)).double(),
    forward=lambda model, rows: model(rows[:, :-1]),
    loss=loss,
    optimizer=lambda params: optim.AdamW(params, lr=0.01),
    global_batch=24,
)
for report in trainer.steps(data, epochs=2, loader={"num_workers": 1}):
    if report.step == int(os.environ.get("KILL_AT", 0)) and paceline.join().rank == paceline.join().size - 1:
        Path("killed").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
trainer.export(sys.argv[1])
print(trainer.steps_done)
"""


def train(cwd: Path, workers: int, folder: str, code: int = 0, **env: str):
    options = ("--workers", str(workers), "--run-dir", folder, "--save-every", "4")
    return paceline("run", *options, "train.py", f"{folder}.safetensors", cwd=cwd, code=code, **env)


@pytest.fixture(scope="module")
def plain_training(tmp_path_factory):
    """A folder with tokens and a script, and the weights of a loop in plain PyTorch."""
    folder = tmp_path_factory.mktemp("training")
    shards = [some(size, seed=size) % 50 for size in (701, 1, 1000, 299, 455)]
    write_folder(folder / "tokens", shards, vocabulary=50)
    (folder / "train.py").write_text(TRAINING)

    def loss(output: torch.Tensor, rows: torch.Tensor):
        return F.cross_entropy(output.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"), rows[:, 1:].numel()

    model = built(lambda: nn.Sequential(nn.Embedding(50, 12), nn.Linear(12, 50)).double())
    plain = by_hand(model, lambda p: AdamW(p, lr=0.01), loss=loss, forward=lambda model, rows: model(rows[:, :-1]))
    plain.train(grid(Tokens(folder / "tokens", 8), 24, epochs=2))
    return folder, len(plain.losses), dict(model.state_dict())


@pytest.mark.parametrize("workers", [2, *(pytest.param(workers, marks=pytest.mark.slow) for workers in (1, 3))])
def test_workers_train_on_token_files_as_plain_pytorch(workers, plain_training):
    folder, steps, weights = plain_training
    assert train(folder, workers, f"of {workers}").stdout == f"{steps}\n"
    assert apart(load_file(folder / f"of {workers}.safetensors"), weights) <= 1e-12


@pytest.mark.slow
def test_killed_and_resumed_run_trains_on_token_files_as_plain_pytorch(plain_training):
    folder, _, weights = plain_training
    train(folder, 3, "again", code=-signal.SIGKILL, KILL_AT="15")  # in the second epoch
    assert (folder / "killed").exists(), "the fault did not fire"
    assert not (folder / "again.safetensors").exists()
    resumed = re.search(r"resuming from step (\d+) of ", train(folder, 2, "again").stderr)
    assert resumed is not None
    assert 4 <= int(resumed[1]) < 15, "the first checkpoint is due after step 4"
    assert apart(load_file(folder / "again.safetensors"), weights) <= 1e-12
