"""What workers hold of a tensor that is divided: together all of it, whatever the order of the cuts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from examples import examples
from paceline.base.batching import exact_sum
from paceline.base.environment import World
from paceline.base.mesh import Mesh
from paceline.base.sharding import LocalShard, RowShards, ShardedTensor, ShardingSpec, assemble, stacked
from paceline.comm.communicator import Group
from paceline.comm.gradient_memory import zeros
from paceline.compute.job import StepOptions, TrainingJob, default_forward
from paceline.compute.state_dict import in_pieces, load_model
from paceline.parallel.layout import Layout
from paceline.train.replica import Replica


@st.composite
def cuts(draw: st.DrawFn) -> ShardingSpec:
    """Whole or cut along a dimension, maybe in sections, maybe each part twice; then by rows or not."""
    sections = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    made = ShardingSpec.unsharded(shape, draw(st.integers(1, 3)))
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        shape[dim] = sum(sections)
        made = ShardingSpec.split(shape, dim, draw(st.integers(1, 4)), sections, draw(st.integers(1, 2)))
    return made.in_rows(draw(st.integers(1, 4)))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


@examples(cuts(), fast=40)
def test_every_element_of_a_sharded_tensor_is_counted_once(cut: ShardingSpec) -> None:
    counts = torch.zeros(cut.shape, dtype=torch.int64)
    for place, piece in enumerate(cut.pieces):
        for block in cut.counted(place):
            assert block in piece.blocks
            block.of_whole(counts).add_(1)
    assert counts.eq(1).all()


@examples(cuts(), fast=40)
def test_shard_blocks_fill_the_shard(cut: ShardingSpec) -> None:
    for piece in cut.pieces:
        filled = torch.zeros(piece.shape)
        for block in piece.blocks:
            block.of(filled).add_(1)
        assert filled.eq(1).all()


@examples(cuts(), fast=40)
def test_holders_of_a_block_have_the_same_values(cut: ShardingSpec) -> None:
    whole = numbered(cut.shape)
    locals_ = [piece.of(whole) for piece in cut.pieces]
    for (at, shape), held in cut.blocks.items():
        for place, block in held.items():
            assert (block.at, block.shape) == (at, shape)
            assert block.of(locals_[place]).equal(block.of_whole(whole))
    assert sum(len(held) for held in cut.blocks.values()) == sum(len(piece.blocks) for piece in cut.pieces)


@examples(cuts(), fast=40)
def test_shards_are_assembled_to_the_full_tensor(cut: ShardingSpec) -> None:
    whole = numbered(cut.shape)
    parts = []
    for place, piece in enumerate(cut.pieces):
        local = torch.full(piece.shape, -1)
        piece.put(whole, local)
        assert local.equal(piece.of(whole))
        assert ShardedTensor(local, cut, place).shape == cut.shape
        parts += [(block.at, block.of(local)) for block in cut.counted(place)]
    assert assemble(torch.full(cut.shape, -1), parts).equal(whole)


@examples(cuts(), st.data(), fast=40)
def test_per_worker_state_is_stacked(cut: ShardingSpec, data: st.DataObject) -> None:
    """Some replicas have a row each, of which every place writes its own part; the others have none."""
    count, places = data.draw(st.integers(1, 3)), len(cut.pieces)
    order = data.draw(st.permutations([*range(count), None]))
    stack = stacked(cut, [row for row in order for _ in range(places)])
    whole = numbered((count, *cut.shape))
    assert stack.shape == whole.shape
    locals_ = [piece.of(whole) for piece in stack.pieces]
    for rank, local in enumerate(locals_):
        row, own = order[rank // places], cut.at(rank).of(numbered(cut.shape)).reshape(-1)
        assert local.reshape(-1).equal(own[:0] if row is None else own + row * math.prod(cut.shape))
    parts = [(at, block.of(locals_[rank])) for (at, _), held in stack.blocks.items() for rank, block in held.items()]
    assert assemble(torch.full_like(whole, -1), parts).equal(whole)


@examples(cuts(), st.data(), fast=40)
def test_rows_are_assembled_from_the_shards_that_have_them(cut: ShardingSpec, data: st.DataObject) -> None:
    whole = numbered(cut.shape)
    if not whole.dim():
        return
    first = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(first, len(whole)))
    parts = [(block.at, block.of_whole(whole)) for block in (held[min(held)] for held in cut.blocks.values())]
    assert assemble(torch.full((end - first, *cut.shape[1:]), -1), parts, first).equal(whole[first:end])


@examples(cuts(), st.data(), fast=40)
def test_rows_of_a_shard_block_are_a_block(cut: ShardingSpec, data: st.DataObject) -> None:
    whole = numbered(cut.shape)
    for piece in cut.pieces:
        local = piece.of(whole)
        for block in piece.blocks:
            length = (block.shape or (1,))[0]
            first = data.draw(st.integers(0, length))
            rows = range(first, data.draw(st.integers(first, length)))
            part = block.rows(rows)
            assert part.of(local).equal(part.of_whole(whole))
            if block.shape:
                assert part.of(local).equal(block.of(local)[rows.start : rows.stop])


@given(st.lists(st.integers(0, 9), max_size=3), st.integers(2, 5))
def test_row_shards_are_those_of_torch_chunk(shape: list[int], count: int) -> None:
    """A tensor without dimensions is a row of one, which the first place has."""
    whole = numbered(tuple(shape))
    cut, shards = ShardingSpec.unsharded(shape).in_rows(count), RowShards(count)
    for place in range(count):
        assert cut.pieces[place].of(whole).equal(shards.of(whole, place))
        assert shards.size(shape, place) == math.prod(cut.pieces[place].shape)
    chunks = (whole if shape else whole.view(1)).chunk(count)
    assert [piece.of(whole).tolist() for piece in cut.pieces if piece.blocks] == [c.tolist() for c in chunks if len(c)]


def test_fused_attention_weight_is_sharded_by_heads_and_rows() -> None:
    """Of 4 heads two are at each of the places of the tensor axis, and their queries, keys and values in three blocks;
    the outer axis cuts the six rows that one of these has in three and three, and so the keys.
    """
    mesh = Mesh(shard=2, tensor=2)
    cut = ShardingSpec.split((12, 8), 0, mesh.tensor, (4, 4, 4)).in_rows(mesh.shard)
    assert len(cut.pieces) == mesh.replica
    blocks = [[(block.at[0], block.shape[0]) for block in piece.blocks] for piece in cut.pieces]
    rows = [[row for first, length in some for row in range(first, first + length)] for some in blocks]
    assert rows == [[0, 1, 4], [2, 3, 6], [5, 8, 9], [7, 10, 11]]
    assert [block.start for block in cut.pieces[3].blocks] == [(0, 0), (1, 0)]
    assert [cut.shard_index_of(rank) for rank in range(6)] == [mesh.shard_index_of(rank) for rank in range(6)]


def test_replicated_key_heads_are_counted_once() -> None:
    cut = ShardingSpec.split((2, 8), 0, 2, each=2)
    assert [piece.blocks[0].at[0] for piece in cut.pieces] == [0, 0, 1, 1]
    assert [len(cut.counted(place)) for place in range(4)] == [1, 0, 1, 0]


@pytest.mark.parametrize("dim", [0, 1])
def test_shard_may_be_empty(dim: int) -> None:
    cut = ShardingSpec.split((3, 3), dim, 4)
    assert cut.pieces[-1] == LocalShard((0, 3) if dim == 0 else (3, 0), ())
    assert cut.pieces[-1].of(numbered((3, 3))).shape == cut.pieces[-1].shape


LAYERS = {
    "weight": ShardingSpec.split((6, 4), 0, 2, (2, 2, 2)).in_rows(2),
    "bias": ShardingSpec.unsharded((6,), 2).in_rows(2),
}


@pytest.mark.parametrize("exact", [False, True])
def test_replicated_shard_counts_once_in_a_norm(exact: bool) -> None:
    """The weight is cut by columns of heads, the bias is whole on both places of the tensor axis."""
    grads = {name: torch.randn(cut.shape, dtype=torch.float64) for name, cut in LAYERS.items()}
    found = []
    for place in range(4):
        own = {name: nn.Parameter(cut.pieces[place].of(grads[name]).clone()) for name, cut in LAYERS.items()}
        model = nn.Linear(4, 6, dtype=torch.float64)
        cuts = {"cuts": LAYERS, "shard_index": place}
        job = TrainingJob(
            model, default_forward, lambda *_: None, torch.device("cpu"), 0, exact=exact, named=own, **cuts
        )
        replica = Replica(job, Layout(job, zeros if exact else None), group := Group(World()), group, Mesh())
        if replica.grad_buffers.exact is not None:
            replica.grad_buffers.exact.largest = [float(grads[name].abs().max()) for name in own]
        for param in own.values():
            param.grad = param.detach().clone()
        found.append(replica.squares(StepOptions(0, 1.0, 1)))
    true = sum(float(grad.square().sum()) for grad in grads.values())
    assert exact_sum(sum(found).tolist()) == pytest.approx(true, rel=1e-12)


def test_sharded_model_gives_and_loads_shards_and_full_tensors() -> None:
    wholes = {name: torch.randn(cut.shape) for name, cut in LAYERS.items()}
    for place in range(4):
        model = nn.Module()
        for name, cut in LAYERS.items():
            model.register_parameter(name, nn.Parameter(torch.zeros(cut.pieces[place].shape)))
        load_model(model, wholes, LAYERS, place)
        told = in_pieces(model.state_dict(), LAYERS, place)
        for name, held in told.items():
            assert held.tensor.equal(LAYERS[name].pieces[place].of(wholes[name]))
            assert (held.cut, held.shard_index, held.shape) == (LAYERS[name], place, tuple(wholes[name].shape))
        again = {name: torch.zeros_like(held.tensor) for name, held in told.items()}
        load_model(model, again, LAYERS, place)
        assert all(not value.any() for value in model.state_dict().values())
