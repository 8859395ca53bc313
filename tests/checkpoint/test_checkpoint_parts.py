"""Several writers of one checkpoint: they share a state equally, and what they wrote is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import find_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_checkpoint_tree import refusal
from test_checkpoint_write import equal, flip

from paceline.base.sharding import RowShards, ShardedTensor, ShardingSpec
from paceline.checkpoint import files
from paceline.checkpoint.export import write_model
from paceline.checkpoint.files import checkpoints_of
from paceline.checkpoint.lazy import Deferred
from paceline.errors import CheckpointError

SHAPES = st.lists(
    st.sampled_from([(), (0,), (3,), (700, 1024), (1 << 19,), (2, 1 << 20), (1, 1 << 20), (5, 3, 1 << 17)]), max_size=9
)


@given(shapes=SHAPES, writers=st.integers(1, 7), own=st.integers(0, 2))
@settings(deadline=None, max_examples=60)
def test_checkpoint_writers_divide_a_state_equally(shapes: list[tuple[int, ...]], writers: int, own: int) -> None:
    tensors = {str(number): torch.empty(shape, device="meta") for number, shape in enumerate(shapes)}
    alone = dict(list(tensors.items())[:own])
    common = {name: tensor for name, tensor in tensors.items() if name not in alone}
    plan = files.layout(alone, common, {}, range(writers), "aaaaaaaa", file_bytes=3 << 20)
    assert len(plan) == writers
    names = [file for part in plan for file in part]
    assert len(names) == len(set(names))
    for name, tensor in tensors.items():
        rows = [piece for part in plan for held in part.values() for key, piece in held if key == name]
        if rows != [None]:
            dealt_rows = [range(block.at[0], block.at[0] + block.shape[0]) for block in rows if block is not None]
            assert [row for some in dealt_rows for row in some] == [*range(tensor.shape[0])]
    dealt = [
        sum(files.take(common[name], rows).nbytes for held in part.values() for name, rows in held if name in common)
        for part in plan
    ]
    widest = [t.nbytes if t.nbytes <= 1 << 20 else t.nbytes // t.shape[0] for t in common.values()]
    assert max(dealt) - sum(dealt) / writers <= 2 * max(widest, default=0)


@given(st.data())
def test_sharded_rows_are_written_once_by_a_worker_that_has_them(data: st.DataObject) -> None:
    """Of what is in pieces, each row is dealt to one of the workers that have it; where nobody can, that is said."""
    count, replicas = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    writers = sorted(data.draw(st.sets(st.integers(0, count * replicas - 1), min_size=1)))

    def rows(place: int) -> dict[str, ShardedTensor]:
        wholes = {str(number): torch.arange(3 * length).view(length, 3) for number, length in enumerate(lengths)}
        cuts = {name: ShardingSpec.unsharded(whole.shape).in_rows(count) for name, whole in wholes.items()}
        return {
            name: ShardedTensor(cuts[name].pieces[place].of(whole), cuts[name], place) for name, whole in wholes.items()
        }

    places = {rank % count for rank in writers}
    missing = [RowShards(count).rows(length, p) for length in lengths for p in range(count) if p not in places]
    if any(missing):
        said = refusal(CheckpointError, files.layout, {}, {}, rows(0), writers, "aaaaaaaa")
        assert said.startswith("no worker that has rows ")
        assert said.endswith("; set --checkpoints to a folder that all hosts share, or to a URL")
        return
    plan = files.layout({}, {}, rows(0), writers, "aaaaaaaa")
    assert all(files.layout({}, {}, rows(place), writers, "aaaaaaaa") == plan for place in range(count))
    for name, length in enumerate(lengths):
        written = []
        for rank, part in zip(writers, plan, strict=True):
            for key, piece in (slice_ for held in part.values() for slice_ in held if slice_[0] == str(name)):
                assert piece is not None
                written += files.take(rows(rank % count)[key], piece).tolist()
        assert sorted(written) == torch.arange(3 * length).view(length, 3).tolist()


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_blocks_of_any_sharding_are_one_checkpoint(shard: int, tmp_path: Path) -> None:
    """Fused heads, columns, few heads that are held twice, what is whole everywhere: by two replicas."""
    cuts = {
        "qkv": ShardingSpec.split((12, 5), 0, 2, sections=(4, 4, 4)),
        "columns": ShardingSpec.split((5, 7), 1, 2),
        "both": ShardingSpec.unsharded((4, 3), 2),
        "keys": ShardingSpec.split((3, 4), 0, 1, each=2),
        "single": ShardingSpec.unsharded((), 2),
    }
    cuts = {name: cut.in_rows(shard) for name, cut in cuts.items()}
    wholes = {name: torch.randn(cut.shape) for name, cut in cuts.items()}
    places, storage = 2 * shard, checkpoints_of(tmp_path)

    def held(place: int) -> dict[str, ShardedTensor]:
        return {name: ShardedTensor(cut.pieces[place].of(wholes[name]), cut, place) for name, cut in cuts.items()}

    writers = range(2 * places)
    plan = files.layout({}, {}, held(0), writers, "cccccccc")
    told = {}
    for rank in writers:
        mine = held(rank % places)
        assert files.layout({}, {}, mine, writers, "cccccccc") == plan
        fetch = lambda name, block, mine=mine: files.take(mine[name], block)
        told |= files.write_files(storage, 7, plan[rank], fetch, lambda: 0)
    files.commit(storage, 7, plan, told, files.tensor_infos(held(0)), {})
    found = find_checkpoint(tmp_path, pytest.fail)
    assert found is not None
    assert equal(found.tensors(), wholes)
    mapped = found.tensors(mapped=True)
    assert equal({name: tensor + 0 for name, tensor in mapped.items()}, wholes)
    for place in range(places):
        for name, cut in cuts.items():
            assert cut.pieces[place].of(mapped[name]).equal(held(place)[name].tensor)


def test_files_of_several_writers_are_one_checkpoint(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    state = {
        "embed": torch.randn(3000, 333, generator=generator),
        "scale": torch.tensor(3.0),
        "head": torch.randn(700, 1024, generator=generator).bfloat16(),
        "state": torch.arange(9),
    }
    storage = checkpoints_of(tmp_path)
    common = {name: tensor for name, tensor in state.items() if name != "state"}
    plan = files.layout({"state": state["state"]}, common, {}, range(5), "bbbbbbbb")
    told = {}
    for part in reversed(plan):
        assert find_checkpoint(tmp_path, lambda _: None) is None  # not before the last one has come, and the manifest
        told |= files.write_files(storage, 7, part, lambda name, rows: files.take(state[name], rows), lambda: 0)
    files.commit(storage, 7, plan, told, files.tensor_infos(state), {"seed": 3})
    found = find_checkpoint(tmp_path, pytest.fail)
    assert found is not None
    entries = found.manifest["tensors"]
    assert len(entries["embed"]["parts"]) == 4
    assert entries["embed"]["parts"][1]["at"] == [entries["embed"]["parts"][0]["shape"][0], 0]
    assert len(found.manifest["files"]) == 5
    assert equal(found.tensors(), state)
    mapped = found.tensors(mapped=True)
    assert isinstance(mapped["embed"], Deferred)
    out = tmp_path / "model.safetensors"
    write_model(mapped, out)
    assert equal(load_file(out), state)
    first = next(file for file in plan[2])
    flip(tmp_path / "checkpoints/step-000000000007" / first, -1)
    assert refusal(CheckpointError, find_checkpoint, tmp_path, pytest.fail) == (
        f"no checkpoint in {tmp_path}/checkpoints is intact: step 7 ({first}: SHA-256 differs); "
        "restore one from a copy, or choose another --run-dir to train from the start"
    )
