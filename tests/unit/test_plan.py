"""The plan: what is printed is read back, what is valid fits the workers, every refusal says what to do."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from examples import examples
from paceline.errors import PlanError
from paceline.plan import Plan, describe

AXES = ("data", "shard", "tensor", "pipeline", "context", "expert")
NUMBERS = st.integers(1, 999_999_999)
VALUES: dict[str, st.SearchStrategy[object]] = {
    "data": NUMBERS,
    "local": NUMBERS,
    "every": NUMBERS,
    "outer": st.sampled_from(["sgd:1", "sgd:.5", "nesterov:0.7:0.9"]),
    "fragments": NUMBERS,
    "delay": st.integers(0, 999_999_999),
    "outer_codec": st.sampled_from(["int8", "int4"]),
    "quorum": NUMBERS,
    "server": NUMBERS,
    "staleness": st.one_of(st.integers(0, 999_999_999), st.just(math.inf)),
    "window": NUMBERS,
    "backup": NUMBERS,
    "damping": st.just(True),
    "delayed": st.integers(0, 999_999_999),
    "copies": st.sampled_from([0, 1]),
    "shard": NUMBERS,
    "zero": st.sampled_from([1, 2, 3]),
    "offload": st.just("cpu"),
    "tensor": NUMBERS,
    "pipeline": NUMBERS,
    "schedule": st.sampled_from(["gpipe", "1f1b"]),
    "virtual": NUMBERS,
    "context": NUMBERS,
    "expert": NUMBERS,
    "micro": NUMBERS,
    "codec": st.sampled_from(
        ["bf16", "fp16", "int8", "topk:0.01", "topk:.5", "powersgd:4", "sign", "auto", "auto:lossy"]
    ),
    "lr_scaling": st.sampled_from(["linear", "sqrt"]),
    "precision": st.sampled_from(["bf16", "fp16", "bf16:pure", "bf16:pure,stochastic"]),
    "optimizer_states": st.just("int8"),
    "recompute": st.just("blocks"),
    "tiles": NUMBERS,
    "compile": st.just(True),
    "exact": st.just(True),
    "auto": st.just(True),
}
PLANS = st.fixed_dictionaries({}, optional=VALUES).map(lambda said: Plan(**said))  # type: ignore[arg-type]
SMALL_AXES = st.fixed_dictionaries({}, optional={name: st.integers(1, 12) for name in AXES})


def error_of(text: str, workers: int) -> PlanError | None:
    try:
        Plan.parse(text).validate(workers)
    except PlanError as error:
        return error
    return None


def refusal(text: str, workers: int = 8) -> str:
    error = error_of(text, workers)
    assert error is not None
    return str(error)


def test_plan_strategies_of_this_test_cover_all_words() -> None:
    assert list(VALUES) == [row.name for row in fields(Plan)]


@examples(PLANS, fast=40)
def test_printed_plan_is_parsed_back(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert str(Plan.parse(str(plan))) == str(plan)


@examples(PLANS, st.randoms(use_true_random=False), st.sampled_from([" ", "  ", "\t", "\n", " \n "]), fast=40)
def test_plan_ignores_word_order_and_white_space(plan: Plan, random, space: str) -> None:
    words = str(plan).split()
    random.shuffle(words)
    assert Plan.parse(space + space.join(words) + space) == plan


def test_canonical_plan_text_has_given_words_in_table_order() -> None:
    assert str(Plan()) == ""
    assert Plan.parse("") == Plan()
    text = "exact micro=4 codec=topk:0.01 staleness=inf server=2 data=08"
    assert str(Plan.parse(text)) == "data=8 server=2 staleness=inf micro=4 codec=topk:0.01 exact"
    assert str(Plan.parse("staleness=0")) == "staleness=0"


@examples(PLANS, st.integers(-1, 64), fast=40)
def test_valid_plan_uses_every_worker(plan: Plan, workers: int) -> None:
    try:
        valid = plan.validate(workers)
    except PlanError:
        return
    assert math.prod(getattr(valid, axis) or 1 for axis in AXES) == workers
    assert valid.data is not None
    assert valid.validate(workers) == valid


@given(st.integers(1, 10_000), st.one_of(st.none(), NUMBERS), st.sampled_from([None, "bf16"]))
def test_data_parallel_size_defaults_to_the_workers(workers: int, micro: int | None, precision: str | None) -> None:
    plan = Plan(micro=micro, precision=precision)
    assert plan.validate(workers) == Plan(data=workers, micro=micro, precision=precision)
    assert Plan(data=workers, micro=micro).validate(workers) == Plan(data=workers, micro=micro)


@given(SMALL_AXES, st.integers(1, 48))
def test_suggested_plan_fits_the_workers(axes: dict[str, int], workers: int) -> None:
    """Axes that do not fit are refused with axes that do: the same words, other numbers."""
    error = error_of(str(Plan(**axes)), workers)  # type: ignore[arg-type]
    others = {name: axes[name] for name in AXES if name in axes and name != "data"}
    product = math.prod(others.values())
    if workers % product:
        assert error is not None
        assert error.cure.startswith("try ")
        for text in error.cure.removeprefix("try ").split(" or "):
            words = [word.split("=") for word in text.split()]
            assert [name for name, _ in words] == list(others)
            assert workers % math.prod(int(number) for _, number in words) == 0
    elif axes.get("data", workers // product) != workers // product:
        assert error is not None
        assert error.cure == f"leave data out, or use data={workers // product}"
    else:
        assert (error is None) == (others.get("expert", 1) == 1 or others.get("context", 1) == 1)


@given(st.text())
@example("data=" + "9" * 5000)
@example("data=٣")
@example("=")
@example(",")
@example("--")
@example("micro=1e3")
def test_any_text_raises_only_plan_errors(text: str) -> None:
    error = error_of(text, 8)
    assert error is None or str(error) == f"{error.what}; {error.cure}"


WORDS = st.one_of(
    st.sampled_from(["data", "shard", "micro", "codec", "precision", "exact", "compile", "auto", "zero"]),
    st.text("abcdehimrstx", max_size=8),
)
WORD = st.tuples(WORDS, st.sampled_from(["", "=", "=1", "=0", "=-1", "=x", "=bf16", "=inf", ",", "=2=2"])).map("".join)


@given(st.lists(WORD, max_size=5).map(" ".join), st.integers(1, 12))
def test_nearly_right_plan_raises_only_plan_errors(text: str, workers: int) -> None:
    error = error_of(text, workers)
    assert error is None or str(error) == f"{error.what}; {error.cure}"


AXES_THAT_DO_NOT_FIT = [
    ("shard=3", 8),
    ("shard=16", 8),
    ("shard=2", 1),
    ("pipeline=5", 7),
    ("shard=2 pipeline=3", 8),
    ("shard=3 tensor=3", 8),
    ("data=3", 8),
    ("data=16", 8),
    ("data=3 shard=2", 8),
    ("data=8 shard=2", 8),
    ("", 0),
]
CONTRADICTING = [
    "every=50",
    "fragments=2",
    "quorum=1",
    "local=2 every=50 quorum=2",
    "outer=sgd:1",
    "zero=3",
    "offload=cpu",
    "staleness=inf",
    "staleness=0",
    "schedule=1f1b",
    "local=2",
    "delay=1",
    "outer_codec=int8",
    "local=2 every=4 fragments=5",
    "local=2 every=7 fragments=2 delay=3",
    "local=2 every=50 server=1",
    "codec=powersgd:4 exact",
    "server=1 window=9",
    "server=1 staleness=0 window=9",
    "server=1 damping",
    "window=9",
    "copies=1",
    "server=1 staleness=inf backup=1",
    "server=1 backup=1 exact",
    "server=1 backup=1 precision=fp16",
    "server=1 backup=8",
    "server=1 delayed=4",
    "server=1 staleness=4 delayed=0",
    "server=1 copies=1",
    "server=1 staleness=4 precision=fp16",
    "server=1 precision=bf16:pure",
    "local=2 every=8 precision=bf16:pure,stochastic",
    "server=1 optimizer_states=int8",
    "local=2 every=8 optimizer_states=int8",
    "shard=2 offload=cpu optimizer_states=int8",
    "server=1 staleness=inf exact",
    "local=3 every=50 fragments=2 quorum=2",
    "local=3 every=50 outer_codec=int8 quorum=2",
    "local=3 every=50 lr_scaling=sqrt",
    "expert=2 compile",
    "expert=2 exact",
    "expert=2 local=2 every=4",
    "expert=4 context=2",
    "precision=fp8 tensor=2",
    "context=2 precision=fp8",
    "virtual=2",
    "server=2 shard=2",
    "server=2 codec=topk:0.01",
    "server=2 codec=auto",
]
UNSUPPORTED = ["auto", "auto micro=2"]
UNREADABLE = [
    "shrad=4",
    "sharded",
    "Exact",
    "compil=1",
    "precison=bf16",
    "bf16",
    "FP16",
    "fp32",
    "ddp",
    "dp=4",
    "fsdp",
    "fsdp=2",
    "zero3",
    "ZeRO-1",
    "tp=2",
    "gradient_checkpointing",
    "quick",
    "data=2 data=3",
    "exact exact",
    "micro=0",
    "data=x",
    "staleness=-1",
    "zero=4",
    "fp8",
    "adamw8bit",
    "optimizer_states=int4",
    "precision=bf16:stochastic",
    "precision=bf16:pure,micro=4",
    "codec=topk:2",
    "compile=1",
    "shard",
    "data = 2",
    "data= 2",
    "data=2,micro=4",
    "data=2, micro=4",
    "--data=2",
]


@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        ("axes that do not fit the workers", AXES_THAT_DO_NOT_FIT),
        *(
            (kind, [(text, 8) for text in texts])
            for kind, texts in (
                ("contradicting", CONTRADICTING),
                ("unsupported", UNSUPPORTED),
                ("unreadable", UNREADABLE),
            )
        ),
    ],
)
def test_plan_words_are_refused_with_a_way_out(
    kind: str, plans: list[tuple[str, int]], golden: Callable[[str, str], None]
) -> None:
    for text, workers in plans:
        golden(f"{kind}: plan '{text}' on {workers} workers", refusal(text, workers))


def test_plan_checks_axes_then_pairs() -> None:
    assert refusal("shard=3 every=50 exact").startswith("shard=3 does not divide")
    assert refusal("shard=4 every=50 exact").startswith("every=50 needs local")
    assert refusal("shard=4 expert=2 compile codec=int8").startswith("expert=2 and compile cannot be used")


def test_plan_help_shows_each_word_once_in_its_group() -> None:
    blocks = [block.splitlines() for block in describe().split("\n\n")]
    titles = ["Spread", "Micro-batches", "Communication", "Memory and arithmetic", "Asynchronous"]
    assert [block[0].removesuffix(":") for block in blocks] == titles
    lines = [line for block in blocks for line in block[1:] if line[:3].strip()]
    assert sorted(line.split()[0].split("=")[0] for line in lines) == sorted(
        row.name for row in fields(Plan) if row.metadata["built"]
    )
    assert lines[0] == "  data=N               N replicas; gradients are all-reduced every step"
    assert "  compile              run the model with torch.compile" in blocks[3]
    assert max(len(line) for block in blocks for line in block) <= 120


def test_plan_does_not_import_torch() -> None:
    code = "import sys; from paceline.plan import Plan; Plan().validate(2); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
