"""The plan: what is printed is read back, what is valid fits the workers, every refusal says what to do."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from examples import examples
from paceline.errors import PlanError
from paceline.plan import Plan, describe

AXES = ("data", "shard", "tensor", "pipeline", "context")
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
    "micro": NUMBERS,
    "codec": st.sampled_from(
        ["bf16", "fp16", "int8", "topk:0.01", "topk:.5", "powersgd:4", "sign", "auto", "auto:lossy"]
    ),
    "lr_scaling": st.sampled_from(["linear", "sqrt"]),
    "precision": st.sampled_from(["bf16", "fp16"]),
    "recompute": st.just("blocks"),
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
        assert error.cure == f"leave data out, or say data={workers // product}"
    else:
        apart = "shard" in others and any(size > 1 for axis, size in others.items() if axis != "shard")  # or zero=1
        assert (error is None) == (not others.keys() - {"shard", "tensor", "pipeline", "context"} and not apart)


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


@pytest.mark.parametrize(
    ("text", "workers", "message"),
    [
        ("shard=3", 8, "shard=3 does not divide 8 workers; try shard=2 or shard=4"),
        ("shard=16", 8, "shard=16 does not divide 8 workers; try shard=8"),
        ("shard=2", 1, "shard=2 does not divide 1 worker; try shard=1"),
        ("pipeline=5", 7, "pipeline=5 does not divide 7 workers; try pipeline=1 or pipeline=7"),
        (
            "shard=2 pipeline=3",
            8,
            "shard=2 pipeline=3 need 6 workers and do not divide 8; try shard=2 pipeline=2 or shard=2 pipeline=4",
        ),
        (
            "shard=3 tensor=3",
            8,
            "shard=3 tensor=3 need 9 workers and do not divide 8; try shard=2 tensor=4",
        ),
        ("data=3", 8, "data=3 does not use 8 workers; leave data out, or say data=8"),
        ("data=16", 8, "data=16 needs 16 workers and there are 8; leave data out, or say data=8"),
        ("data=3 shard=2", 8, "data=3 shard=2 use 6 of 8 workers; leave data out, or say data=4"),
        (
            "data=8 shard=2",
            8,
            "data=8 shard=2 need 16 workers and there are 8; leave data out, or say data=4",
        ),
        ("", 0, "a plan cannot use 0 workers; start at least one"),
    ],
)
def test_plan_axes_that_do_not_fit_the_workers_are_refused(text: str, workers: int, message: str) -> None:
    assert refusal(text, workers) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("every=50", "every=50 needs local; add local=N, or leave every=50 out"),
        ("fragments=2", "fragments=2 needs local; add local=N, or leave fragments=2 out"),
        ("quorum=1", "quorum=1 needs local; add local=N, or leave quorum=1 out"),
        (
            "local=2 every=50 quorum=2",
            "quorum=2 of local=2 leaves nobody to be late; leave quorum out: a merge waits for all islands unless said",
        ),
        ("outer=sgd:1", "outer=sgd:1 needs local; add local=N, or leave outer=sgd:1 out"),
        ("zero=3", "zero=3 needs shard; add shard=N, or leave zero=3 out"),
        ("offload=cpu", "offload=cpu needs shard; add shard=N, or leave offload=cpu out"),
        ("staleness=inf", "staleness=inf needs server; add server=N, or leave staleness=inf out"),
        ("staleness=0", "staleness=0 needs server; add server=N, or leave staleness=0 out"),
        ("schedule=1f1b", "schedule=1f1b needs pipeline; add pipeline=N, or leave schedule=1f1b out"),
        ("local=2", "local=2 does not say how often; add every=H, as every=50"),
        ("delay=1", "delay=1 needs fragments; add fragments=N, or leave delay=1 out"),
        ("outer_codec=int8", "outer_codec=int8 needs local; add local=N, or leave outer_codec=int8 out"),
        (
            "local=2 every=4 fragments=5",
            "fragments=5 are more than the steps of a round, every=4; say fragments=4, or every=5",
        ),
        (
            "local=2 every=7 fragments=2 delay=3",
            "delay=3 is not less than the steps from one fragment to the next, of which there are 3; "
            "say delay=2, or every=8",
        ),
        (
            "local=2 every=50 server=1",
            "local=2 and server=1 both synchronise the replicas; keep one of them",
        ),
        (
            "codec=powersgd:4 exact",
            "exact and codec=powersgd:4 contradict each other; leave exact or codec=powersgd:4 out",
        ),
        (
            "server=1 window=9",
            "window=9 is for workers that are not in step; "
            "add staleness=K, or leave window out: in step all meet after each update",
        ),
        (
            "server=1 staleness=0 window=9",
            "window=9 is for workers that are not in step; "
            "add staleness=K, or leave window out: in step all meet after each update",
        ),
        (
            "server=1 damping",
            "damping is for workers that are not in step; "
            "add staleness=K, or leave damping out: in step all meet after each update",
        ),
        ("window=9", "window=9 needs server; add server=N, or leave window=9 out"),
        ("copies=1", "copies=1 needs server; add server=N, or leave copies=1 out"),
        (
            "server=1 staleness=inf backup=1",
            "backup=1 is for workers that are in step, and with staleness=inf nobody is late; "
            "leave backup=1 or staleness out",
        ),
        ("server=1 backup=1 exact", "exact and backup=1 contradict each other; leave exact or backup=1 out"),
        (
            "server=1 backup=1 precision=fp16",
            "precision=fp16 looks for one loss scale, and backup=1 has no step that all make; say precision=bf16",
        ),
        ("server=1 backup=8", "backup=8 of 8 workers leaves nobody to make a step; say backup=7"),
        (
            "server=1 delayed=4",
            "delayed=4 is for workers that are not in step; "
            "add staleness=K, or leave delayed out: in step all meet after each update",
        ),
        (
            "server=1 staleness=4 delayed=0",
            "delayed=0 would never refresh the momentum; say delayed=N, N the number of workers",
        ),
        (
            "server=1 copies=1",
            "copies=1 needs another server that holds them; say server=2, or leave copies out",
        ),
        (
            "server=1 staleness=4 precision=fp16",
            "precision=fp16 looks for one loss scale, and staleness=4 has no step that all make; say precision=bf16",
        ),
        (
            "server=1 staleness=inf exact",
            "exact and staleness=inf contradict each other; leave exact or staleness=inf out",
        ),
        (
            "local=3 every=50 fragments=2 quorum=2",
            "quorum=2 and fragments=2 are not built together yet; leave one of them out",
        ),
        (
            "local=3 every=50 outer_codec=int8 quorum=2",
            "quorum=2 and outer_codec=int8 are not built together yet; leave one of them out",
        ),
        (
            "local=3 every=50 lr_scaling=sqrt",
            "lr_scaling=sqrt and local=3 are not built together yet; leave lr_scaling=sqrt or local out",
        ),
        ("tensor=2 compile", "compile and tensor=2 are not built together yet; leave compile or tensor out"),
        ("pipeline=2 exact", "exact and pipeline=2 are not built together yet; leave exact or pipeline out"),
        ("context=2 exact", "exact and context=2 are not built together yet; leave exact or context out"),
        ("shard=2 context=2", "zero=3 and context=2 are not built together yet; say zero=1"),
        ("virtual=2", "virtual=2 needs pipeline; add pipeline=N, or leave virtual=2 out"),
        ("shard=2 tensor=2", "zero=3 and tensor=2 are not built together yet; say zero=1"),
        (
            "tensor=2 precision=fp16",
            "precision=fp16 and tensor=2 are not built together yet; leave precision=fp16 or tensor out",
        ),
        ("shard=2 auto", "auto and shard=2 both decide the layout; leave auto or shard=2 out"),
        (
            "server=2 shard=2",
            "shard=2 and server=2 both divide a model; keep one of them: under server=2 each worker has a whole one",
        ),
        (
            "server=2 codec=topk:0.01",
            "beside server=2 there are rounding codecs alone, and codec=topk:0.01 is none; "
            "say codec=bf16, codec=fp16 or codec=int8",
        ),
        (
            "server=2 codec=auto",
            "beside server=2 there are rounding codecs alone, and codec=auto is none; "
            "say codec=bf16, codec=fp16 or codec=int8",
        ),
        ("server=2 auto", "auto and server=2 both decide the layout; leave auto or server=2 out"),
    ],
)
def test_contradicting_plan_words_are_refused(text: str, message: str) -> None:
    assert refusal(text) == message


BUILT = "use only what is: data=N, local=N, every=H, outer=sgd:RATE|nesterov:RATE:MOMENTUM, "
BUILT += "fragments=F, delay=D, outer_codec=int8|int4, quorum=Q, server=S, staleness=K|inf, window=W, "
BUILT += "backup=B, damping, delayed=D, copies=0|1, "
BUILT += "shard=N, zero=1|2|3, offload=cpu, tensor=N, pipeline=N, schedule=gpipe|1f1b, "
BUILT += "virtual=V, context=N, micro=N, codec=bf16|fp16|int8|topk:R|powersgd:R|sign|auto|auto:lossy, "
BUILT += "lr_scaling=linear|sqrt, precision=bf16|fp16, "
BUILT += "recompute=blocks, compile, exact"


@pytest.mark.parametrize(
    ("text", "named"),
    [("auto", "auto is"), ("auto micro=2", "auto is")],
)
def test_unsupported_plan_words_are_refused(text: str, named: str) -> None:
    assert refusal(text) == f"{named} not built yet; {BUILT}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shrad=4", "unknown plan word 'shrad=4'; did you mean shard=4?"),
        ("sharded", "unknown plan word 'sharded'; did you mean shard=N?"),
        ("Exact", "unknown plan word 'Exact'; did you mean exact?"),
        ("compil=1", "unknown plan word 'compil=1'; did you mean compile?"),
        ("precison=bf16", "unknown plan word 'precison=bf16'; did you mean precision=bf16?"),
        ("bf16", "unknown plan word 'bf16'; say precision=bf16"),
        ("FP16", "unknown plan word 'FP16'; say precision=fp16"),
        ("fp32", "unknown plan word 'fp32'; leave it out: it is what is done unless said"),
        ("ddp", "unknown plan word 'ddp'; say data=N, or leave it out: all workers are replicas unless said"),
        ("dp=4", "unknown plan word 'dp=4'; say data=4, or leave it out: all workers are replicas unless said"),
        ("fsdp", "unknown plan word 'fsdp'; say shard=N"),
        ("fsdp=2", "unknown plan word 'fsdp=2'; say shard=2"),
        ("zero3", "unknown plan word 'zero3'; say shard=N zero=3"),
        ("ZeRO-1", "unknown plan word 'ZeRO-1'; say shard=N zero=1"),
        ("tp=2", "unknown plan word 'tp=2'; say tensor=2"),
        ("gradient_checkpointing", "unknown plan word 'gradient_checkpointing'; say recompute=blocks"),
        (
            "quick",
            "unknown plan word 'quick'; the known ones are data=N local=N every=H "
            "outer=sgd:RATE|nesterov:RATE:MOMENTUM fragments=F delay=D outer_codec=int8|int4 quorum=Q "
            "server=S staleness=K|inf window=W backup=B damping delayed=D copies=0|1 shard=N zero=1|2|3 offload=cpu "
            "tensor=N pipeline=N schedule=gpipe|1f1b virtual=V context=N micro=N "
            "codec=bf16|fp16|int8|topk:R|powersgd:R|sign|auto|auto:lossy "
            "lr_scaling=linear|sqrt precision=bf16|fp16 recompute=blocks compile exact auto",
        ),
        ("data=2 data=3", "plan word 'data' is said twice: data=2 and data=3; keep one of them"),
        ("exact exact", "plan word 'exact' is said twice: exact and exact; keep one of them"),
        (
            "micro=0",
            "plan word 'micro=0' has a value that does not fit; say micro=N, N a whole number from 1 to 999999999",
        ),
        (
            "data=x",
            "plan word 'data=x' has a value that does not fit; say data=N, N a whole number from 1 to 999999999",
        ),
        (
            "staleness=-1",
            "plan word 'staleness=-1' has a value that does not fit; "
            "say staleness=K|inf, K a whole number from 0 to 999999999",
        ),
        ("zero=4", "plan word 'zero=4' has a value that does not fit; say zero=1|2|3"),
        ("precision=fp8", "plan word 'precision=fp8' has a value that does not fit; say precision=bf16|fp16"),
        (
            "codec=topk:2",
            "plan word 'codec=topk:2' has a value that does not fit; "
            "say codec=bf16|fp16|int8|topk:R|powersgd:R|sign|auto|auto:lossy, "
            "topk:R with a fraction R of the gradient, as 0.01, powersgd:R with a rank R from 1 to 9999",
        ),
        ("compile=1", "plan word 'compile=1' takes no value; say compile, or leave it out"),
        ("shard", "plan word 'shard' has no value; say shard=N, without spaces"),
        ("data = 2", "plan word 'data' has no value; say data=N, without spaces"),
        ("data= 2", "plan word 'data=' has no value; say data=N, without spaces"),
        (
            "data=2,micro=4",
            "plan word 'data=2,micro=4' holds a comma; separate words with spaces: data=2 micro=4",
        ),
        ("data=2, micro=4", "plan word 'data=2,' holds a comma; separate words with spaces: data=2"),
        ("--data=2", "plan word '--data=2' begins with a dash; write it without: data=2"),
    ],
)
def test_unreadable_plan_words_are_refused(text: str, message: str) -> None:
    assert refusal(text) == message


def test_plan_checks_axes_then_pairs_then_support() -> None:
    assert refusal("shard=3 every=50 exact").startswith("shard=3 does not divide")
    assert refusal("shard=4 every=50 exact").startswith("every=50 needs local")
    assert refusal("shard=4 pipeline=2 codec=int8").startswith("zero=3 and pipeline=2 are not built together yet")
    assert refusal("pipeline=2 local=2 every=8 auto").startswith("auto and local=2 both decide")


def test_plan_help_has_one_line_per_word() -> None:
    lines = describe().splitlines()
    assert [line.split("=")[0].split()[0] for line in lines] == [row.name for row in fields(Plan)]
    assert lines[0] == "data=N               N replicas, gradients all-reduced every step"
    assert lines[15].endswith("parameters, gradients and optimizer state in N shards")
    assert lines[17].startswith("offload=cpu          the optimizer's state and rows wait in the host's memory")
    assert lines[18] == "tensor=N             the model cut N times inside its layers"
    assert lines[28] == "compile              torch.compile"


def test_plan_does_not_import_torch() -> None:
    code = "import sys; from paceline.plan import Plan; Plan().validate(2); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
