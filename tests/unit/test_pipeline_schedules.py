"""Who computes what of a pipeline, and when: the tables of its schedules, and which stage has which part of a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from examples import examples
from paceline.errors import UsageError
from paceline.parallel.pipeline.partition import NAMED, StagePartition, divide, even
from paceline.parallel.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    INPUTS,
    KINDS,
    SPLIT,
    WEIGHTS,
    Action,
    Simulated,
    drawn,
    messages,
    simulate,
    stages_of,
    table,
    worker_of,
)

WIDTH = 4
WEIGHT = WIDTH * WIDTH + WIDTH  # of a Block
NUMBERS = st.lists(st.integers(0, 20), min_size=1, max_size=8)
TABLES = st.tuples(st.sampled_from(KINDS), st.integers(2, 8), st.integers(1, 4), st.integers(0, 20)).filter(
    lambda what: what[0] != "zbv" or what[2] % 2 == 0  # a V has two arms
)


def kinds_of(kind: str) -> tuple[str, ...]:
    """The actions of a schedule, in the order of their letters."""
    return (FORWARD, INPUTS, WEIGHTS) if kind in SPLIT else (BACKWARD, FORWARD)


def run(kind: str, workers: int, virtual: int, micro_batches: int) -> Simulated:
    """As if a backward took twice as long as a forward, and a worker's stages together as long as its only one."""
    stages = workers * virtual
    return simulate(table(kind, workers, virtual, micro_batches), [1 / virtual] * stages, [2 / virtual] * stages)


@examples(TABLES, fast=40)
def test_pipeline_schedule_has_every_action_once_on_its_stage(what: tuple[str, int, int, int]) -> None:
    kind, workers, virtual, micro_batches = what
    rows = table(*what)
    assert len(rows) == workers
    placed = [stages_of(kind, workers, virtual, worker) for worker in range(workers)]
    assert sorted(stage for stages in placed for stage in stages) == [*range(workers * virtual)]
    assert worker_of(kind, workers, workers * virtual - 1) == workers - 1  # which reports the loss
    for row, stages in zip(rows, placed, strict=True):
        assert len(stages) == virtual
        wanted = [Action(k, s, number) for k in kinds_of(kind) for s in stages for number in range(micro_batches)]
        assert sorted(row) == wanted
        for stage in stages:  # gradients are summed in this order, whatever the schedule
            for part in (BACKWARD, INPUTS, WEIGHTS) if micro_batches else ():
                order = [a.micro_batch for a in row if a[:2] == (part, stage)]
                assert order == ([*range(micro_batches)] if part in kinds_of(kind) else [])
    assert [[*spans] for spans in run(*what).spans] == [[*row] for row in rows]


@examples(TABLES, st.data(), fast=40)
def test_pipeline_action_starts_when_its_worker_and_inputs_are_ready(
    what: tuple[str, int, int, int], data: st.DataObject
) -> None:
    kind, workers, virtual, micro_batches = what
    stages = workers * virtual
    times = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)  # whole numbers add up exactly
    taken = {FORWARD: data.draw(times), BACKWARD: data.draw(times)}
    taken[INPUTS] = taken[WEIGHTS] = [seconds / 2 for seconds in taken[BACKWARD]]
    simulated = simulate(table(*what), taken[FORWARD], taken[BACKWARD])
    ends = {action: end for row in simulated.spans for action, (_, end) in row.items()}
    for row in simulated.spans:
        free = 0.0
        for action, (begin, end) in row.items():
            kind, stage, number = action
            needed = []
            if kind in (BACKWARD, INPUTS):
                needed = [(FORWARD, stage, number), *[(kind, stage + 1, number)] * (stage + 1 < stages)]
            elif kind == WEIGHTS:
                needed = [(INPUTS, stage, number)]
            elif stage:
                needed = [(FORWARD, stage - 1, number)]
            assert begin == max([free, *(ends[Action(*before)] for before in needed)])
            assert end == begin + taken[kind][stage]
            free = end
    assert simulated.end == max([0, *ends.values()])
    busy = micro_batches * (sum(taken[FORWARD]) + sum(taken[BACKWARD]))
    assert simulated.bubble * simulated.end * workers == pytest.approx(simulated.end * workers - busy)


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_pipeline_bubble_is_that_of_the_papers(workers: int, virtual: int, times: int) -> None:
    micro_batches = times * workers
    wanted = (workers - 1) / (virtual * micro_batches + workers - 1)
    assert run("1f1b", workers, virtual, micro_batches).bubble == pytest.approx(wanted, rel=0, abs=1e-9)
    if virtual == 1:
        assert run("gpipe", workers, virtual, micro_batches).bubble == pytest.approx(wanted, rel=0, abs=1e-9)


def test_pipeline_without_work_has_no_bubble() -> None:
    for kind in KINDS:
        simulated = run(kind, 3, 2, 0)  # also where there is nothing to split
        assert (simulated.end, simulated.bubble, simulated.in_flight) == (0.0, 0.0, [0, 0, 0])
        assert drawn(simulated) == ["", "", ""]


@examples(TABLES, fast=40)
def test_pipeline_schedule_keeps_its_promised_activations(what: tuple[str, int, int, int]) -> None:
    _, workers, virtual, micro_batches = what
    few = run("1f1b", workers, 1, micro_batches).in_flight
    assert few == [min(workers - worker, micro_batches) for worker in range(workers)]
    assert run("gpipe", workers, virtual, micro_batches).in_flight == [virtual * micro_batches] * workers


@examples(st.integers(2, 8), st.integers(2, 4), st.integers(0, 4), fast=40)
def test_interleaved_pipeline_keeps_the_activations_of_the_paper(workers: int, virtual: int, times: int) -> None:
    """However many micro-batches there are: one round for each of its stages but one, and two for each worker after
    it.
    """
    ahead = [(virtual - 1) * workers + 2 * (workers - worker - 1) for worker in range(workers)]
    most = virtual * times * workers
    assert run("1f1b", workers, virtual, times * workers).in_flight == [min(number + 1, most) for number in ahead]


@examples(TABLES.filter(lambda what: what[0] in SPLIT), fast=40)
def test_split_pipeline_waits_no_longer_and_keeps_no_more_than_1f1b(what: tuple[str, int, int, int]) -> None:
    _, workers, virtual, micro_batches = what
    split, usual = run(*what), run("1f1b", workers, 1, micro_batches)
    assert split.bubble <= usual.bubble + 1e-9
    assert max(split.in_flight) <= virtual * max(usual.in_flight)  # activations of a V-th of the layers each


def test_split_pipeline_has_the_bubble_of_the_papers() -> None:
    """With parts of equal length: ZB-H1 of p workers waits (p-1)(F+B-W) = p-1 forwards in place of 3(p-1)."""
    waits = {kind: run(kind, 4, virtual, 8) for kind, virtual in (("1f1b", 1), ("zb", 1), ("zbv", 2))}
    lost = {kind: simulated.end - 8 * 3 for kind, simulated in waits.items()}
    assert lost["1f1b"] == 9
    assert lost["zbv"] <= lost["zb"] <= 5
    assert waits["zbv"].bubble <= 0.25 * waits["1f1b"].bubble


@examples(TABLES, fast=40)
def test_pipeline_messages_are_expected_in_the_order_of_sending(what: tuple[str, int, int, int]) -> None:
    _, workers, virtual, _ = what
    rows, stages = table(*what), workers * virtual
    for worker, row in enumerate(rows):
        expected = messages(*what, worker)
        back = (BACKWARD, INPUTS)
        received = [a for a in row if (a.stage if a.kind == FORWARD else a.kind in back and a.stage < stages - 1)]
        assert sorted(action for queue in expected for action in queue) == sorted(received)
        for sender, queue in enumerate(expected):
            made_by = [a._replace(stage=a.stage - 1 if a.kind == FORWARD else a.stage + 1) for a in queue]
            assert made_by == sorted(made_by, key=rows[sender].index)


def row_of(text: str) -> list[Action]:
    """``F1.0 B1.0``: the kind, the stage and the micro-batch."""
    return [Action(word[0], *map(int, word[1:].split("."))) for word in text.split()]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            ["B0.0 F0.0", "B1.0 F1.0"],
            "the schedule deadlocks: worker 0 waits before B0 of stage 0, worker 1 waits before B0 of stage 1",
        ),
        (
            ["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.1 B1.0"],
            "the schedule deadlocks: worker 0 waits before B0 of stage 0, worker 1 waits before F1 of stage 1",
        ),
        (["F0.0", "F1.0 F1.3 B1.0"], "the schedule deadlocks: worker 1 waits before F3 of stage 1"),
    ],
)
def test_pipeline_schedule_with_a_deadlock_is_refused(rows: list[str], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        simulate([row_of(row) for row in rows], [1.0, 1.0], [2.0, 2.0])
    assert str(caught.value) == text


def test_pipeline_schedule_is_drawn_to_scale() -> None:
    assert drawn(run("1f1b", 2, 1, 2), 18) == [
        "0-1-    [0 ]  [1 ]",
        "  0-[0 ]1-[1 ]",
    ]
    assert drawn(run("zb", 2, 1, 2), 21) == [
        "-0--1-   [0](0)[1](1)",
        "   -0-[0]-1-[1](0)(1)",
    ]
    assert drawn(run("gpipe", 2, 1, 2), 27) == [
        "-0--1-         [ 0  ][ 1  ]",
        "   -0--1-[ 0  ][ 1  ]",
    ]
    assert drawn(run("1f1b", 2, 1, 2), 9) == ["01  [0 [1", " 0[01[1"]  # too narrow for whole brackets


def test_pipeline_action_without_duration_is_drawn() -> None:
    assert drawn(simulate([row_of("F0.0 B0.0")], [1.0], [0.0]), 4) == ["-0--["]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Model(nn.Module):
    """Only what it has matters here: it is never called."""

    def __init__(self, blocks: int = 8, words: int = 1, out: int = 0, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        if out:
            self.head = nn.Linear(WIDTH, out)
        if tied:
            self.head.weight = self.embedding.weight


class Two(nn.Module):
    """Of two lists neither is the one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.Sequential(Block(), nn.ReLU(), Block(), nn.ReLU(), Block(), Block())


def heaviest(weights: Sequence[int], starts: Sequence[int]) -> int:
    return max(sum(weights[begin:end]) for begin, end in pairwise([*starts, len(weights)]))


@given(NUMBERS, st.data())
def test_stage_partition_minimizes_the_heaviest_stage(weights: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(weights)))
    cuts = [(0, *later) for later in combinations(range(1, len(weights)), count - 1)]
    found = even(weights, count)
    assert found in cuts
    assert heaviest(weights, found) == min(heaviest(weights, starts) for starts in cuts)


@given(st.integers(1, 9), st.integers(1, 24), st.data())
def test_stage_partition_of_equal_blocks_differs_by_one(weight: int, blocks: int, data: st.DataObject) -> None:
    starts = even([weight] * blocks, data.draw(st.integers(1, blocks)))
    lengths = [end - begin for begin, end in pairwise([*starts, blocks])]
    assert lengths == sorted(lengths)
    assert lengths[-1] - lengths[0] <= 1


def test_stage_partition_divides_equal_blocks_evenly() -> None:
    stages = divide(Model(), 4, 4, None)
    assert stages == StagePartition(tuple(f"blocks.{number}" for number in range(8)), (0, 2, 4, 6))
    assert divide(Model(), 4, 2, None) == stages  # two stages on each of two workers
    assert divide(Model(), 8, 8, None).starts == (*range(8),)
    assert divide(Model(), 1, 1, None).starts == (0,)


def test_stage_partition_counts_a_large_head_and_no_embedding() -> None:
    head = 2 * WEIGHT // WIDTH  # as much arithmetic as two blocks
    assert divide(Model(out=head), 2, 2, None).starts == (0, 5)
    assert divide(Model(out=head), 4, 4, None).starts == (0, 2, 4, 7)
    assert divide(Model(out=100 * head), 2, 2, None).starts == (0, 7)
    assert divide(Model(words=100 * head), 2, 2, None).starts == (0, 4)
    assert divide(Model(words=head, out=head, tied=True), 2, 2, None).starts == (0, 5)


def test_stage_has_the_blocks_from_its_start_to_the_next() -> None:
    stages = divide(Model(), 3, 3, "blocks:1,5")
    assert stages.count == 3
    assert [stages.blocks_of(stage) for stage in range(3)] == [range(1), range(1, 5), range(5, 8)]
    assert [stages.stage_of_block(number) for number in range(8)] == [0, 1, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("said", "starts"),
    [
        ("blocks:1,3", (0, 1, 3)),
        ("blocks: 1, 3", (0, 1, 3)),
        ("blocks:6,7", (0, 6, 7)),
        ("blocks", (0, 2, 5)),
        (None, (0, 2, 5)),
    ],
)
def test_stage_starts_given_by_the_user_decide(said: str | None, starts: tuple[int, ...]) -> None:
    assert divide(Model(), 3, 3, said).starts == starts


def test_stage_path_selects_one_of_several_block_lists() -> None:
    assert divide(Two(), 3, 3, "encoder") == StagePartition(("encoder.0", "encoder.1", "encoder.2"), (0, 1, 2))
    names = ("decoder.0", "decoder.2", "decoder.4", "decoder.5")  # without those that have no parameters
    assert divide(Two(), 2, 2, "decoder:1") == StagePartition(names, (0, 1))
    assert divide(nn.Sequential(Two()), 2, 2, "0.encoder").blocks == ("0.encoder.0", "0.encoder.1", "0.encoder.2")


@pytest.mark.parametrize(
    ("workers", "seconds", "better"),
    [
        (2, [1.0, 1.0], None),
        (2, [1.0, 1.1], None),  # nothing that moving a block would gain
        (2, [1.0, 3.0], ("blocks:6", 3.0, 1.5)),
        (4, [1.0, 1.0, 4.0, 1.0], ("blocks:1,3,4", 4.0, 2.0)),
        (2, [1.0, 3.0, 1.0, 3.0], ("blocks:3,4,7", 6.0, 3.0)),
    ],
)
def test_stage_partition_follows_unequal_workers(
    workers: int, seconds: list[float], better: tuple[str, float, float] | None
) -> None:
    of = [stage % workers for stage in range(len(seconds))]
    found = divide(Model(), len(seconds), workers, None).suggest(seconds, of)
    assert found == (better if better is None else (better[0], *map(pytest.approx, better[1:])))


def homes(model: nn.Module, stages: StagePartition) -> dict[str, tuple[int, ...]]:
    """By name, where a parameter lives."""
    found = stages.homes(model)
    assert {*found} == {id(param) for param in model.parameters()}
    return {name: found[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}


def test_modules_before_and_after_the_blocks_are_in_the_first_and_last_stage() -> None:
    model = Model(blocks=12, words=3, out=3)
    found = homes(model, divide(model, 3, 3, "blocks:2,11"))
    assert found.pop("embedding.weight") == (0,)
    assert [found.pop(name) for name in ("norm.weight", "norm.bias", "head.weight", "head.bias")] == [(2,)] * 4
    wanted = [0, 0, *[1] * 9, 2]  # also of blocks.1, whose name begins that of blocks.11
    kinds = ("weight", "bias")
    assert found == {f"blocks.{number}.linear.{kind}": (wanted[number],) for number in range(12) for kind in kinds}


def test_module_between_two_blocks_is_in_the_stage_of_the_first() -> None:
    model = nn.Sequential(Block(), nn.LayerNorm(WIDTH), Block())
    stages = divide(model, 2, 2, None)
    assert stages == StagePartition(("0", "2"), (0, 1))
    assert homes(model, stages) == {
        "0.linear.weight": (0,),
        "0.linear.bias": (0,),
        "1.weight": (0,),
        "1.bias": (0,),
        "2.linear.weight": (1,),
        "2.linear.bias": (1,),
    }


@given(st.lists(st.booleans(), max_size=12).filter(any), st.data())
@settings(max_examples=50)
def test_module_is_in_the_stage_of_the_last_block_before_it(kinds: list[bool], data: st.DataObject) -> None:
    """Or to the first one, where there is none before."""
    model = nn.Sequential(*(Block() if kind else nn.LayerNorm(WIDTH) for kind in kinds))
    blocks = tuple(str(place) for place, kind in enumerate(kinds) if kind)
    later = data.draw(st.sets(st.integers(1, len(blocks) - 1))) if len(blocks) > 1 else set()
    stages = StagePartition(blocks, (0, *sorted(later)))
    for name, found in homes(model, stages).items():
        last = max(0, sum(kinds[: int(name.partition(".")[0]) + 1]) - 1)
        assert found == (sum(start <= last for start in later),)


def test_tied_weight_is_in_both_stages() -> None:
    model = Model(words=3, out=3, tied=True)
    found = homes(model, divide(model, 4, 4, None))
    assert found["embedding.weight"] == found["head.weight"] == (0, 3)
    assert found["head.bias"] == (3,)
    assert homes(model, divide(model, 1, 1, None))["head.weight"] == (0,)


def refusal(model: nn.Module, count: int, workers: int, said: str | None) -> str:
    with pytest.raises(UsageError) as caught:
        divide(model, count, workers, said)
    return str(caught.value)


@pytest.mark.parametrize(
    "numbers",
    ["1", "1,2,3", "0,3", "3,1", "2,2", "1,8", "1,9", "-1,3", "one,3", "1.5,3", "1,", ",", "1;3", "1:3", "1,\u00b2"],
)
def test_wrong_stage_starts_are_refused(numbers: str) -> None:
    assert refusal(Model(), 3, 3, f"blocks:{numbers}") == (
        f"pipeline_blocks='blocks:{numbers}' does not give the first block of stages 1 to 2; "
        "give increasing block numbers below 8, for example blocks:2,5"
    )


@pytest.mark.parametrize("said", ["layers", "layers:1", "blocks.8", " blocks"])
def test_stage_path_that_the_model_lacks_is_refused(said: str) -> None:
    path = said.partition(":")[0]
    assert refusal(Model(), 2, 2, said) == (
        f"the model has no module {path!r}, which pipeline_blocks= names; give the path of a module"
    )


@pytest.mark.parametrize("said", [None, "blocks", "blocks:1,2,3,4,5,6,7,8"])
def test_fewer_blocks_than_stages_are_refused(said: str | None) -> None:
    assert refusal(Model(), 9, 9, said) == "blocks has 8 blocks, too few for 9 stages; use at most pipeline=8"
    assert refusal(Model(), 10, 5, said) == (
        "blocks has 8 blocks, too few for 10 stages; use at most pipeline=4, or leave virtual= out"
    )


def test_model_without_a_single_block_list_needs_a_stage_path() -> None:
    assert NAMED == 'name the list of blocks: Trainer(..., pipeline_blocks="model.layers")'
    assert refusal(Two(), 2, 2, None) == (
        f"Two has several lists of blocks: encoder, decoder; pipeline= splits exactly one list; {NAMED}"
    )
    assert (
        refusal(Model(blocks=1), 2, 2, None)
        == f"Model has no list of repeated blocks; pipeline= splits exactly one list; {NAMED}, or leave pipeline= out"
    )
    shared = Block()  # called twice, it would have to be on two stages at once
    assert refusal(nn.Sequential(shared, shared), 2, 2, None) == (
        "Sequential calls one module several times instead of a list of blocks (Sequential), but pipeline= runs each "
        "block once; leave pipeline= out, or split the layers inside with tensor=N"
    )
