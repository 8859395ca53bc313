"""Who is where: every rank has one place along every axis, and the groups along axes divide all ranks among them."""

from __future__ import annotations

import json
import math
import sys
from subprocess import PIPE

import numpy
from hypothesis import given
from hypothesis import strategies as st
from launching import SCRIPTS, free_port
from warm import Process

from examples import examples
from paceline.base.mesh import AXES, UNIT_AXES, Mesh, run_of
from paceline.plan import Plan

SIZES = st.tuples(*[st.sampled_from([1, 1, 2, 3])] * len(AXES))
SOME = st.lists(st.sampled_from(AXES), unique=True)


@given(SIZES)
def test_mesh_coordinates_are_those_of_a_row_major_array(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(*sizes)
    ranks = range(mesh.size)
    found = [[mesh.coordinate(rank, axis) for axis in AXES] for rank in ranks]
    assert found == numpy.transpose(numpy.unravel_index(ranks, sizes)).tolist()
    assert len({*map(tuple, found)}) == mesh.size


@examples(SIZES, SOME, fast=30)
def test_mesh_peers_along_axes_partition_the_ranks(sizes: tuple[int, ...], axes: list[str]) -> None:
    mesh = Mesh(*sizes)
    groups = {mesh.peers(rank, *axes) for rank in range(mesh.size)}
    assert sorted(rank for group in groups for rank in group) == [*range(mesh.size)]
    for group in groups:
        assert [*group] == sorted(group)
        assert all(mesh.peers(rank, *axes) == group for rank in group)
        others = {tuple(mesh.coordinate(rank, axis) for axis in AXES if axis not in axes) for rank in group}
        assert len(others) == 1
        assert len({tuple(mesh.coordinate(rank, axis) for axis in axes) for rank in group}) == len(group)


@examples(SIZES, fast=20)
def test_mesh_replicas_consist_of_units_and_twins_share_an_index(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(*sizes)
    assert (mesh.unit, mesh.replica) == (math.prod(sizes[3:]), math.prod(sizes[1:]))
    assert [rank for replica in mesh.replicas for rank in replica] == [*range(mesh.size)]
    for rank in range(mesh.size):
        replica, unit = mesh.peers(rank, *AXES[1:]), mesh.peers(rank, *UNIT_AXES)
        assert replica == tuple(mesh.replicas[mesh.replica_of(rank)]) == tuple(run_of(rank, mesh.replica))
        assert unit == tuple(run_of(rank, mesh.unit))
        assert {mesh.unit_of(other) for other in unit} == {mesh.unit_of(rank)} == {unit[0] // mesh.unit}
        assert replica[mesh.shard_index_of(rank)] == rank
        assert mesh.twins(rank) == tuple(
            other for other in range(mesh.size) if mesh.shard_index_of(other) == mesh.shard_index_of(rank)
        )
        assert mesh.twins(rank)[mesh.replica_of(rank)] == rank
        assert (mesh.peers(rank), mesh.peers(rank, *AXES)) == ((rank,), tuple(range(mesh.size)))


@given(SIZES, st.integers(0, 5))
def test_mesh_over_other_workers_keeps_the_inner_axes(sizes: tuple[int, ...], data: int) -> None:
    mesh = Mesh(*sizes)
    other = mesh.over(data * mesh.replica)
    assert (other.data, other.size, other.replica) == (data, data * mesh.replica, mesh.replica)
    assert mesh.over(mesh.size) == mesh
    for rank in range(min(mesh.size, other.size)):
        assert all(mesh.coordinate(rank, axis) == other.coordinate(rank, axis) for axis in AXES[1:])
    assert mesh.over(mesh.replica - 1).data == 0  # too few for one


def test_plan_gives_its_mesh() -> None:
    assert Plan.parse("").mesh(3) == Mesh(data=3)
    assert Plan.parse("shard=2 zero=1").mesh(6) == Mesh(data=3, shard=2)
    assert Plan.parse("tensor=2 shard=3 pipeline=2").mesh(24) == Mesh(data=2, shard=3, pipeline=2, tensor=2)


def test_process_groups_along_axes_survive_lost_and_joined_workers() -> None:
    """Workers 2 and 3 are lost, 4 and 5 come, who connect what the others have had long since."""
    port = free_port()
    workers = [
        Process([sys.executable, SCRIPTS / "along.py", str(worker), str(port)], stdin=PIPE, stdout=PIPE)
        for worker in range(6)
    ]
    found = [json.loads(worker.communicate()[0].splitlines()[-1]) for worker in workers[:2] + workers[4:]]
    assert [worker.communicate() and worker.returncode for worker in workers[2:4]] == [0, 0]
    first, second, third = (found[0][number] for number in "012")
    assert first == {
        "data": [[0, 2], 5],
        "tensor": [[0, 1], 3],
        "shard": [[0], 1],
        "data tensor": [[0, 1, 2, 3], 15],
        "lent": 3,
    }
    assert second == {"data": [[0], 1], "tensor": [[0, 1], 3], "shard": [[0], 1], "data tensor": [[0, 1], 3]}
    assert third == {
        "data": [[0, 4], 17],
        "tensor": [[0, 1], 3],
        "shard": [[0], 1],
        "data tensor": [[0, 1, 4, 5], 51],
        "lent": 3,
    }
    assert found[3]["2"] == {
        "data": [[1, 5], 34],
        "tensor": [[4, 5], 48],
        "shard": [[5], 32],
        "data tensor": [[0, 1, 4, 5], 51],
        "lent": 48,
    }
