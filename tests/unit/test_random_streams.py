"""Arithmetic of a step: stream seeds, shares, the grid, the agreed vector, the transaction; and the streams."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from draws import draws
from hypothesis import example, given
from hypothesis import strategies as st
from launching import SCRIPTS, paceline

from examples import examples
from paceline.base.batching import PARTS, Agreed, Grid, Moment, Transaction, VectorLayout, deal, stream_seed
from paceline.base.environment import parse_shares
from paceline.compute import rng as streams_of
from paceline.compute.rng import RngState
from paceline.errors import UsageError

GOLDEN = {
    (0, 0, 0): 1930131687265659556,
    (0, 0, 1): 6435492002756219236,
    (0, 1, 0): 5166260292987719240,
    (1, 0, 0): 834790228922758076,
    (7, 0, -1): 6415760096853204326,
    (42, 1000, 7): 2769959909453940763,
    (-1, 0, 0): 8187012317674064751,
    (3, 5, 6): 4412792630025512049,
    (0, 1 << 40, 3): 7198218122168988890,
}


# -- stream_seed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", GOLDEN)
def test_stream_seeds_never_change(place):
    """Were one of these to change, no run could be resumed or repeated by a later version."""
    assert stream_seed(*place) == GOLDEN[place]


def test_stream_seed_is_taken_modulo_two_to_the_64():
    assert stream_seed(2**64 + 3, 5, 6) == stream_seed(3, 5, 6)
    assert stream_seed(-1, 0, 0) == stream_seed(2**64 - 1, 0, 0)


def test_stream_seeds_are_unique():
    """Steps and micro-batches of training, the loader's places of rows and collate, model building, evaluation."""
    seeds = [0, 1, 2, 7, -1, 2**63, 12345]
    steps = [*range(40), *((1 << 40) + n for n in range(9)), *((1 << 41) + n for n in range(9)), 1 << 42, 1 << 43]
    places = list(itertools.product(seeds, steps, range(-1, 120)))
    assert len({stream_seed(*place) for place in places}) == len(places) > 50_000


def test_stream_seed_bits_are_balanced_and_independent():
    found = torch.tensor([stream_seed(3, step, part) for step in range(200) for part in range(100)])
    bits = torch.stack([(found >> bit) & 1 for bit in range(63)]).double()
    deviation = 1 / (2 * math.sqrt(bits.shape[1]))
    assert float((bits.mean(1) - 0.5).abs().max()) < 5 * deviation
    assert int(found.min()) >= 0
    together = torch.corrcoef(bits) - torch.eye(63, dtype=torch.float64)
    assert float(together.abs().max()) < 5.5 / math.sqrt(bits.shape[1])


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_stream_seed_changes_half_of_its_bits_with_any_argument_bit(argument):
    for bit in range(64):
        flips = 0
        for start in range(40):
            place = [start, 3 * start, 5 * start]
            before = stream_seed(*place)
            place[argument] ^= 1 << bit
            flips += (before ^ stream_seed(*place)).bit_count()
        assert abs(flips / 40 - 31.5) < 5 * math.sqrt(63 / 4 / 40)


# -- deal, Grid -------------------------------------------------------------------------------------------------

WEIGHTS = st.lists(
    st.one_of(st.integers(0, 100).map(float), st.floats(0, 1e9, allow_subnormal=True)), min_size=1, max_size=40
).filter(lambda weights: sum(weights) > 0)


@given(st.integers(0, 5000), WEIGHTS)
@example(8, [1.0, 0.0, 2.0])
@example(7, [0.1] * 10)
@example(10, [0.1, 0.2, 0.3])
@example(3, [5e-324, 5e-324])
def test_each_micro_batch_is_assigned_to_one_worker(micro_batches, weights):
    shares = deal(micro_batches, weights)
    assert len(shares) == len(weights)
    assert [index for share in shares for index in share] == list(range(micro_batches))
    for share, weight in zip(shares, weights, strict=True):
        ideal = micro_batches * (weight / sum(weights))
        assert abs(len(share) - ideal) < 1 + 1e-6
        if weight == 0:
            assert len(share) == 0


@given(st.integers(0, 500), st.integers(1, 50))
def test_equal_workers_differ_by_one_micro_batch_at_most(micro_batches, workers):
    lengths = [len(share) for share in deal(micro_batches, [1.0] * workers)]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("text", ["nan,1", "1,nan", "inf,1", "1e400,1", "1e308,1e308", "0,0", "-1,2", "1", "1,1,1"])
def test_wrong_shares_are_refused(text):
    with pytest.raises(UsageError) as caught:
        parse_shares(text, 2)
    assert (
        str(caught.value)
        == f"shares {text!r} do not fit 2 workers; give one number per worker; none may be negative, and not all"
        " may be zero"
    )


@given(st.integers(1, 300), st.data())
def test_batch_grid_covers_every_row_of_an_epoch_once_in_order(global_batch, data):
    micro = data.draw(st.one_of(st.none(), st.integers(1, global_batch)))
    rows = data.draw(st.integers(1, 3000))
    grid = Grid.of(global_batch, micro)
    assert grid.micro == (micro or math.ceil(global_batch / 8))
    covered: list[int] = []
    for batch in range(grid.batches(rows)):
        positions = grid.batch_rows(batch, rows)
        assert len(positions) == global_batch or batch == grid.batches(rows) - 1
        cuts = grid.cut(len(positions))
        assert all(len(cut) == grid.micro for cut in cuts[:-1])
        assert 0 < len(cuts[-1]) <= grid.micro
        covered.extend(positions.start + row for cut in cuts for row in cut)
    assert covered == list(range(rows))
    assert len(grid.batch_rows(grid.batches(rows), rows)) == 0


def test_batch_grid_without_rows_is_refused():
    for arguments, message in {
        (0, None): "global_batch=0 is too small; use the number of rows of one optimizer step, at least 1",
        (-8, None): "global_batch=-8 is too small; use the number of rows of one optimizer step, at least 1",
        (8, 9): "micro=9 is more than the global batch of 8 rows; use micro=8 or less",
    }.items():
        with pytest.raises(UsageError) as caught:
            Grid.of(*arguments)
        assert str(caught.value) == message


# -- the step's vector ------------------------------------------------------------------------------------------

COUNTS = st.integers(0, 2**40).map(float)


VECTOR = ("count", "loss", "tested", "no_merge", "stop", "save", "enter", "writing", "written", "look")


@examples(st.data(), fast=40)
def test_step_vector_unpacks_to_the_sum_of_workers(data):
    names = tuple(sorted(data.draw(st.sets(st.text(max_size=5), max_size=4))))
    workers, params = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 10))
    layout = VectorLayout(names, workers, params)
    parts = [
        {
            "seconds": data.draw(st.floats(0, 1e6)),
            "metrics": {name: (data.draw(COUNTS), data.draw(COUNTS)) for name in shown},
            "unused": data.draw(st.sets(st.integers(0, params - 1))) if params else set(),
            "fields": {name: data.draw(COUNTS) for name in VECTOR},
            "digest": float(data.draw(st.integers(0, 2**52))),
            "spent": dict(zip(PARTS, data.draw(st.tuples(*[st.floats(0, 1e6)] * len(PARTS))), strict=True)),
        }
        for shown in data.draw(st.lists(st.sampled_from([names, ()]), min_size=workers, max_size=workers))
    ]
    vectors = [layout.pack(rank, **part) for rank, part in enumerate(parts)]
    agreed = layout.unpack([sum(column) for column in zip(*vectors, strict=True)])
    assert agreed == Agreed(
        metrics={
            name: tuple(sum(part["metrics"].get(name, (0.0, 0.0))[k] for part in parts) for k in (0, 1))
            for name in names
        },
        seconds=tuple(part["seconds"] for part in parts),
        digests=tuple(part["digest"] for part in parts),
        spent=tuple(tuple(part["spent"].values()) for part in parts) if workers > 1 else (),
        unused=tuple(sorted(set.intersection(*(part["unused"] for part in parts)))),
        **{name: sum(part["fields"][name] for part in parts) for name in parts[0]["fields"]},
    )
    if workers == 1:
        (part,) = parts
        del part["spent"]
        assert layout.alone(**part) == agreed


def test_step_vector_fields_default_to_zero():
    layout = VectorLayout(("accuracy",), 2, 1)
    agreed = layout.unpack(layout.pack(1, 0.5, {}, {0}, {"count": 3}))
    nothing, more = {"accuracy": (0.0, 0.0)}, {"digests": (0.0, 0.0), "spent": ((0.0,) * len(PARTS),) * 2}
    assert agreed == Agreed(3.0, 0.0, 0, 0, 0, 0, 0, 0, 0, nothing, (0.0, 0.5), (0,), **more)


# -- the transaction --------------------------------------------------------------------------------------------

MOVES = {
    "begin": (Moment.IDLE, Moment.COMPUTING),
    "prepared": (Moment.COMPUTING, Moment.PREPARED),
    "updating": (Moment.PREPARED, Moment.UPDATING),
    "applied": (Moment.UPDATING, Moment.IDLE),
}


@given(st.lists(st.sampled_from([*MOVES, "abort"]), max_size=30))
def test_transaction_accepts_only_moves_in_order(moves):
    transaction, moment, done = Transaction(), Moment.IDLE, 0
    for move in moves:
        allowed = moment is not Moment.UPDATING if move == "abort" else moment is MOVES[move][0]
        if allowed:
            result = getattr(transaction, move)()
            moment = Moment.IDLE if move == "abort" else MOVES[move][1]
            done += move == "applied"
            assert result == {"begin": done, "applied": done}.get(move)
        else:
            with pytest.raises(RuntimeError) as caught:
                getattr(transaction, move)()
            assert str(caught.value) == (
                f"step {done} has begun to change weights and cannot be aborted"
                if move == "abort"
                else f"step {done}: {MOVES[move][1].value} cannot follow {moment.value}"
            )
        assert (transaction.moment, transaction.done) == (moment, done)


# -- the streams themselves -------------------------------------------------------------------------------------

DRAWS = {
    "torch": lambda: torch.rand(3).tolist(),
    "python": lambda: [random.random() for _ in range(3)],
    "numpy": lambda: np.random.rand(3).tolist(),
    "python, one normal of a pair": lambda: [random.gauss(0, 1)],
    "numpy, one normal of a pair": lambda: [np.random.normal()],
    "torch, one normal of a pair": lambda: [torch.randn(()).item()],
    "torch, a mask": lambda: torch.nn.functional.dropout(torch.ones(40)).tolist(),
    "torch, an order": lambda: torch.randperm(40).tolist(),
    "python, an order": lambda: random.sample(range(40), 40),
    "python, bits": lambda: [random.getrandbits(32)],
    "numpy, a raw word": lambda: [np.random.mtrand._rand._bit_generator.random_raw()],
    "numpy, an order": lambda: np.random.permutation(40).tolist(),
    "numpy, small integers": lambda: np.random.randint(0, 256, 4, dtype=np.uint8).tolist(),
}
SEEDS = {"torch": torch.manual_seed, "python": random.seed, "numpy": np.random.seed}


def draw_all() -> list[list[float]]:
    return [draw() for draw in DRAWS.values()]


@pytest.fixture(params=["words in memory", "numpy's functions", "Python's functions"])
def streams(request, monkeypatch):
    streams = RngState(torch.device("cpu"))
    streams.snapshot()
    assert streams_of._NUMPY._words is not None
    assert streams_of._PYTHON_WORDS is not None
    if request.param == "numpy's functions":  # its memory is not what we know
        monkeypatch.setattr(streams_of._NUMPY, "_words", None)
    if request.param == "Python's functions":
        monkeypatch.setattr(streams_of, "_PYTHON_WORDS", None)
    with streams.preserved():
        streams.seed(99)
        yield streams


@pytest.mark.parametrize("generator", DRAWS)
def test_random_draw_of_any_generator_is_noticed(streams, generator):
    before = streams.snapshot()
    assert not streams.has_changed(before)
    DRAWS[generator]()
    assert streams.has_changed(before)
    streams.restore(before)
    assert not streams.has_changed(before)


def test_random_draw_of_the_second_normal_of_a_pair_is_noticed(streams):
    """Generators that make normals in pairs draw nothing for the second: only a flag says that it is gone."""
    for draw in (lambda: random.gauss(0, 1), np.random.normal):
        draw()
        before = streams.snapshot()
        draw()
        assert streams.has_changed(before)


@pytest.mark.parametrize("generator", SEEDS)
def test_new_seed_is_noticed_after_draws_too(streams, generator):
    for before in (lambda: None, draw_all):
        streams.seed(99)
        before()
        before = streams.snapshot()
        SEEDS[generator](12345)
        assert streams.has_changed(before)
        streams.restore(before)
        assert not streams.has_changed(before)


def numpys() -> tuple[bytes, object]:
    _, words, *rest = np.random.get_state(legacy=True)
    return words.tobytes(), rest


@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from([1, 2, 3, 623, 624, 625]), max_size=4), st.integers(0, 3))
@example(0, [], 1)
@example(0, [], 2)
@example(3, [624], 0)
def test_numpy_snapshot_changes_nothing_and_restores_all(seed, words, normals):
    """Wherever it stands among its words, and with or without a normal left of a pair."""
    streams = RngState(torch.device("cpu"))
    with streams.preserved():
        np.random.seed(seed)
        for count in words:
            np.random.bytes(4 * count)
        for _ in range(normals):
            np.random.normal()
        before = numpys()
        mark = streams.snapshot()
        assert numpys() == before
        assert not streams.has_changed(mark)
        assert numpys() == before
        follows = [np.random.normal() for _ in range(3)]
        assert streams.has_changed(mark)
        streams.restore(mark)
        assert numpys() == before
        assert [np.random.normal() for _ in range(3)] == follows


def test_numpy_state_with_a_cached_normal_differs_from_one_without(streams):
    """One normal and two after the same seed leave the same words."""
    np.random.seed(7)
    first, second = np.random.normal(), np.random.normal()
    streams.snapshot()
    np.random.seed(7)
    assert np.random.normal() == first
    with streams.preserved():
        streams.seed(1)
    assert np.random.normal() == second


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox, np.random.SFC64, np.random.MT19937])
def test_other_numpy_bit_generators_are_restored(kind):
    streams = RngState(torch.device("cpu"))
    usual = np.random.get_bit_generator()
    state = np.random.get_state()
    try:
        np.random.set_bit_generator(kind(5))
        np.random.normal()
        with streams.preserved():
            mark = streams.snapshot()
            assert not streams.has_changed(mark)
            follows = np.random.normal(size=3).tolist()
            assert streams.has_changed(mark)
            streams.seed(3)
            assert streams.has_changed(mark)
        assert not streams.has_changed(mark)
        assert np.random.normal(size=3).tolist() == follows
    finally:
        np.random.set_bit_generator(usual)
        np.random.set_state(state)


def test_seed_restarts_every_generator(streams):
    streams.seed(2**62 + 5)
    first = draw_all()
    draw_all()
    streams.seed(2**62 + 5)
    assert draw_all() == first
    streams.seed(2**62 + 6)
    assert all(one != other for one, other in zip(draw_all(), first, strict=True))


def test_preserved_streams_are_restored_after_an_error(streams):
    before = streams.snapshot()
    expected = draw_all()
    streams.restore(before)
    with pytest.raises(ZeroDivisionError), streams.preserved():
        streams.seed(1)
        with streams.preserved():
            draw_all()
            raise ZeroDivisionError
    assert draw_all() == expected


def test_pickled_streams_seed_the_generators_of_their_process(streams):
    """A spawned loader process unpickles them: they must seed the generators that its dataset draws from."""
    other = pickle.loads(pickle.dumps(streams))
    other.seed(5)
    first = draw_all()
    streams.seed(5)
    assert draw_all() == first


# -- the script's own streams -----------------------------------------------------------------------------------


def draws_after_a_trainer(folder: Path, workers: int, *plans: str) -> dict[str, list[float]]:
    folder.mkdir()
    fixed = ("--max-restarts", "0") if len(plans) > 1 else ()  # else all trainers must have replicas of one size
    paceline("run", "--workers", str(workers), *fixed, SCRIPTS / "draws.py", "out.json", *plans, cwd=folder)
    found: dict[str, list[float]] = json.loads((folder / "out.json").read_text())
    return found


@pytest.mark.parametrize(
    ("workers", "plans"),
    [
        (2, ("data=2", "shard=2 zero=3", "tensor=2", "pipeline=2", "context=2")),
        *(
            pytest.param(workers, plans, marks=pytest.mark.slow)
            for workers, plans in (
                (2, ("shard=2 zero=1", "shard=2 zero=2")),
                (3, ("data=3", "shard=3 zero=3", "pipeline=3", "context=3")),
                (2, ("data=2 exact",)),
                (2, ("local=2 every=2",)),
                (2, ("server=1",)),
                (2, ("data=2 recompute=blocks",)),
            )
        ),
    ],
)
def test_making_a_trainer_moves_the_random_streams_of_the_script_equally_under_every_plan(
    workers, plans, run, tmp_path
):
    """Only by what the script itself draws for its model and its optimizer."""
    alone = {f"data=1, {kind}": draws("data=1", kind) for kind in ("function", "module")}
    for title, found in draws_after_a_trainer(tmp_path / "together", workers, *plans).items():
        assert found == alone[f"data=1, {title.rpartition(', ')[2]}"], title
