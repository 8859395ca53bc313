"""The plan: one line of text that says how training is spread over workers; parsed, validated and printed.

Parse, print, validate. No torch.

The fields of `Plan` are the table that drives all of it: to build a word, add ``built=True`` to its line.
"""

from __future__ import annotations

import bisect
import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from paceline.base.mesh import AXES, Mesh
from paceline.errors import PlanError

_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
# A word's value is a literal or one of these: its pattern, and its description in error messages.
_NUMBERS = {
    **{name: ("0*[1-9][0-9]{0,8}", f"{name} is a whole number from 1 to 999999999") for name in "NHFQSVWB"},
    **{name: ("[0-9]{1,9}", f"{name} is a whole number from 0 to 999999999") for name in "KD"},
    "topk:R": (r"topk:0?\.[0-9]*[1-9][0-9]*", "R in topk:R is a fraction of the gradient, for example 0.01"),
    "sgd:RATE": (rf"sgd:{_NUMBER}", "RATE is a number, for example 0.7"),
    "nesterov:RATE:MOMENTUM": (rf"nesterov:{_NUMBER}:0?\.[0-9]+", "MOMENTUM is below 1, for example 0.9"),
    "powersgd:R": ("powersgd:[1-9][0-9]{0,3}", "R in powersgd:R is a rank from 1 to 9999"),
}

# Names that other tools use, without dashes, and the plan word to use instead.
_ELSEWHERE = {
    **dict.fromkeys(("bf16", "bfloat16", "amp"), "use precision=bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "use precision=fp16"),
    **dict.fromkeys(("fp8", "float8"), "use precision=fp8"),
    **dict.fromkeys(("adam8bit", "adamw8bit"), "use optimizer_states=int8"),
    **dict.fromkeys(("fp32", "float32"), "leave it out: float32 is the default"),
    **dict.fromkeys(("ddp", "dp"), "use data=N, or leave it out: by default every worker is a replica"),
    **dict.fromkeys(("fsdp", "fsdp2"), "use shard=N"),
    **{f"zero{level}": f"use shard=N zero={level}" for level in (1, 2, 3)},
    **{short: f"use {word}=N" for short, word in {"tp": "tensor", "pp": "pipeline", "cp": "context"}.items()},
    **dict.fromkeys(("ep", "experts", "expertparallel"), "use expert=N"),
    **dict.fromkeys(("checkpointing", "gradientcheckpointing"), "use recompute=blocks"),
}

# Bytes that codecs which round send for 256 elements, with the scale of these.
CODED_BYTES = {"bf16": 512, "fp16": 516, "int8": 260, "int4": 132}

# The words as the help shows them.
GROUPS = {
    "Spread": ("data", "shard", "zero", "tensor", "pipeline", "schedule", "virtual", "context", "expert", "auto"),
    "Micro-batches": ("micro", "lr_scaling"),
    "Communication": ("codec",),
    "Memory and arithmetic": ("precision", "optimizer_states", "recompute", "tiles", "offload", "compile", "exact"),
    "Asynchronous": (
        *("local", "every", "outer", "fragments", "delay", "outer_codec", "quorum"),
        *("server", "staleness", "window", "backup", "damping", "delayed", "copies"),
    ),
}


def _word(value: str, caption: str, of: str = "", axis: bool = False, built: bool = False) -> Any:
    """One row: the values of the word ("" for a flag), what it means, the word that it refines, whether its
    number multiplies the workers needed, and whether it works in this version."""
    metadata = {"value": value, "caption": caption, "of": of, "axis": axis, "built": built}
    return field(default=None if value else False, metadata=metadata)


@dataclass(frozen=True)
class Plan:
    """How the training is laid out over the workers. A word that is not in the plan is None or False.

    `Plan.parse` reads the text that `str` prints, and `validate` fits the plan to a number of workers.
    """

    data: int | None = _word("N", "N replicas; gradients are all-reduced every step", axis=True, built=True)
    local: int | None = _word("N", "N islands that are merged every H steps (local SGD, DiLoCo)", built=True)
    every: int | None = _word("H", "merge the islands every H steps", of="local", built=True)
    outer: str | None = _word(
        "sgd:RATE|nesterov:RATE:MOMENTUM",
        "outer optimizer of a merge (default nesterov:0.7:0.9)",
        of="local",
        built=True,
    )
    fragments: int | None = _word(
        "F", "split the model into F fragments and merge one at a time", of="local", built=True
    )
    delay: int | None = _word(
        "D", "steps that overlap with the all-reduce of a fragment (default 0)", of="fragments", built=True
    )
    outer_codec: str | None = _word(
        "int8|int4", "quantize the differences that islands exchange", of="local", built=True
    )
    quorum: int | None = _word(
        "Q", "a merge waits for Q islands and a grace period; late islands join a later merge", of="local", built=True
    )
    server: int | None = _word("S", "S parameter servers, in addition to the workers, run the optimizer", built=True)
    staleness: float | None = _word(
        "K|inf", "steps that a worker may run ahead: 0 synchronous, inf asynchronous", of="server", built=True
    )
    window: int | None = _word(
        "W",
        "with staleness or backup: updates between two synchronisations of all workers (default 256)",
        of="server",
        built=True,
    )
    backup: int | None = _word(
        "B", "the fastest N-B workers make each step; samples of the slower ones are dropped", of="server", built=True
    )
    damping: bool = _word(
        "",
        "with staleness: divide the learning rate of an update by 1 + its staleness",
        of="server",
        built=True,
    )
    delayed: int | None = _word(
        "D", "with staleness: refresh Nesterov momentum only in every D-th update", of="server", built=True
    )
    copies: int | None = _word(
        "0|1",
        "copies of each server's shard on another server: with 1, losing a server loses nothing",
        of="server",
        built=True,
    )
    shard: int | None = _word(
        "N", "parameters, gradients and optimizer state in N shards (ZeRO, FSDP)", axis=True, built=True
    )
    zero: int | None = _word(
        "1|2|3",
        "1: shard optimizer state, 2: also gradients, 3: also parameters (default 3)",
        of="shard",
        built=True,
    )
    offload: str | None = _word(
        "cpu",
        "keep optimizer state and parameter shards in host memory and update them on the CPU",
        of="shard",
        built=True,
    )
    tensor: int | None = _word("N", "split each layer over N workers (tensor parallelism)", axis=True, built=True)
    pipeline: int | None = _word("N", "split the model into N stages (pipeline parallelism)", axis=True, built=True)
    schedule: str | None = _word(
        "gpipe|1f1b|zb|zbv",
        "order of micro-batches in the pipeline (default 1f1b); zb and zbv split each backward",
        of="pipeline",
        built=True,
    )
    virtual: int | None = _word(
        "V", "V stages on each worker, which reduces idle time (interleaved schedule)", of="pipeline", built=True
    )
    context: int | None = _word("N", "split each sequence over N workers (sequence parallelism)", axis=True, built=True)
    expert: int | None = _word(
        "N", "divide the experts of each layer among N workers, which exchange tokens", axis=True, built=True
    )
    micro: int | None = _word("N", "samples in a micro-batch (default: an eighth of the global batch)", built=True)
    codec: str | None = _word(
        "bf16|fp16|int8|topk:R|powersgd:R|sign|auto|auto:lossy",
        "compress gradient sums between hosts; auto: the codec measured to be fastest for each",
        built=True,
    )
    lr_scaling: str | None = _word(
        "linear|sqrt", "scale learning rates when a run resumes with a different global batch", built=True
    )
    precision: str | None = _word(
        "bf16|fp16|fp8|bf16:pure|bf16:pure,stochastic",
        "precision of forward and backward (default: the model's dtype); bf16:pure: also of weights",
        built=True,
    )
    optimizer_states: str | None = _word(
        "int8", "keep the states of Adam and AdamW in 8 bits, with a scale for each block", built=True
    )
    recompute: str | None = _word(
        "blocks", "recompute activations in backward to save memory (activation checkpointing)", built=True
    )
    tiles: int | None = _word("N", "compute logits and their loss in N tiles of tokens to save memory", built=True)
    compile: bool = _word("", "run the model with torch.compile", built=True)
    exact: bool = _word("", "bit-identical results for any number of workers", built=True)
    auto: bool = _word("", "try several plans before the run starts, and use the fastest", built=True)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Parses the words of `text`, separated by white space. Raises PlanError if the text is not a plan."""
        values: dict[str, Any] = {}
        for word in text.split():
            row, value = _read(word)
            if row.name in values:
                first = _say(row.name, values[row.name])
                raise PlanError(f"plan word {row.name!r} is given twice: {first} and {word}", "keep one of them")
            values[row.name] = value
        return cls(**values)

    def __str__(self) -> str:
        """Returns the canonical text: the given words, in the order of the table."""
        return " ".join(word for _, _, word in self.stated_words())

    def validate(self, workers: int) -> Plan:
        """This plan over `workers`, with `data` resolved: the product of the axes is the number of workers.

        Raises PlanError if the axes do not fit the workers, words contradict each other, or one is not built.
        """
        if workers < 1:
            raise PlanError(f"a plan cannot use {workers} workers", "start at least one worker")
        data = self._divide(workers)
        if self.backup and self.backup >= workers:
            what = (
                f"backup={self.backup} of {workers} worker{'' if workers == 1 else 's'} leaves no worker to make a step"
            )
            raise PlanError(what, f"use backup={workers - 1}" if workers > 1 else "leave backup out")
        virtual = self.virtual or (2 if self.schedule == "zbv" else None)  # a V has two arms
        resolved = replace(self, zero=self.zero or (3 if self.shard else None), virtual=virtual)
        resolved._check_pairs()
        if self.auto:
            what = "auto chooses a plan before the workers start, and these have started without one"
            raise PlanError(what, "start the script with `paceline run --plan auto`")
        unbuilt = [word for row, _, word in resolved.stated_words() if not row.metadata["built"]]
        if unbuilt:
            verb = "is" if len(unbuilt) == 1 else "are"
            known = ", ".join(_usage(row) for row in fields(Plan) if row.metadata["built"])
            raise PlanError(f"{' '.join(unbuilt)} {verb} not supported yet", f"use only {known}")
        return replace(resolved, data=data)

    @property
    def bf16_weights(self) -> bool:
        """Whether weights and gradients are in bfloat16 (`precision=bf16:pure`)."""
        return (self.precision or "").startswith("bf16:pure")

    @cached_property
    def one_by_one(self) -> bool:
        """Whether micro-batches are executed whole and one after another: together they would round other than apart,
        which `exact` forbids and makes other sums overflow in fp16, and would have other scales in fp8; or workers run
        a model that is in pieces together.
        """
        return self.exact or self.precision in ("fp16", "fp8") or self.together > 1 or self.mesh(1).unit > 1

    def mesh(self, workers: int) -> Mesh:
        """Where each of so many workers is, if the plan is right for them."""
        axes = {axis: getattr(self, axis) or 1 for axis in AXES if axis != "data"}
        return Mesh(**axes).over(workers)

    def first_team(self, workers: int) -> int:
        """Returns how many workers a run begins with whose first host has `workers`: these, or the number that the plan
        needs at least if that is larger.
        """
        needed: int = math.prod(value for row, value, _ in self.stated_words() if row.metadata["axis"])
        return max(workers, needed)

    def without(self, script: str, workers: int) -> Plan:
        """This plan for a trainer whose own one says that its model is whole: `pipeline=1`, `context=1`, `tensor=1`."""
        disabled = {axis for axis in AXES[2:] if f"{axis}=1" in script.split() and (getattr(self, axis) or 1) > 1}
        out: dict[str, Any] = {row.name: None for row in fields(self) if {row.name, row.metadata["of"]} & disabled}
        return replace(self, data=None, **out).validate(workers) if out else self

    @cached_property
    def together(self) -> int:
        """How many units run a model equally often: they gather its parameters from one another, or exchange tokens."""
        mesh = self.mesh(1)
        return (mesh.shard if self.zero in (2, 3) else 1) * mesh.expert

    @property
    def stage_order(self) -> str:
        """The order of micro-batches in a pipeline: `schedule`, or its default."""
        return self.schedule or "1f1b"

    @property
    def apart(self) -> bool:
        """Whether a worker keeps but a part of a model's parameters."""
        return self.together > 1 or (self.pipeline or 1) * (self.tensor or 1) > 1

    @property
    def several(self) -> str:
        """The word that makes several steps of a turn of the user's loop, if one does."""
        if self.local:
            return f"local={self.local}"
        if self.backup:
            return f"backup={self.backup}"
        return f"staleness={self.staleness:g}" if self.staleness else ""

    @property
    def in_windows(self) -> bool:
        """Whether workers meet servers alone between the ends of windows: who is late holds up nobody there."""
        return bool(self.staleness or self.backup)

    @property
    def divides_servers(self) -> bool:
        """Whether no parameter server holds all parameters."""
        return (self.server or 0) - (self.copies or 0) > 1

    def in_shards(self, workers: int) -> Iterator[Plan]:
        """The plans over `workers` that are like this one and keep a model in more or fewer pieces: those that cost the
        least time first.
        """
        each = self.mesh(1).each_shard
        for zero in (1, 2, 3):
            for shard in (n for n in range(2, workers // each + 1) if workers % (n * each) == 0):
                if (shard, zero) != (self.shard, self.zero):
                    yield replace(self, data=None, shard=shard, zero=zero)

    def stated_words(self) -> Iterator[tuple[Field[Any], Any, str]]:
        """Yields each word of the plan: its row of the table, its value, and its text."""
        for row in fields(self):
            value = getattr(self, row.name)
            if value is not None and value is not False:
                yield row, value, _say(row.name, value)

    def _divide(self, workers: int) -> int:
        """The replicas that the other axes leave; an error if some worker would be left over."""
        axes = {row.name: value for row, value, _ in self.stated_words() if row.metadata["axis"]}
        stated = axes.pop("data", None)
        text, product = _say_all(axes), int(math.prod(axes.values()))
        if workers % product:
            what = f"need {product} workers, which does not divide {workers}"
            if len(axes) == 1:
                what = f"does not divide {workers} worker{'' if workers == 1 else 's'}"
            raise PlanError(f"{text} {what}", f"try {' or '.join(_nearest(axes, workers))}")
        data = workers // product
        if stated not in (None, data):
            used = stated * product
            what = f"use {used} of {workers} workers" if axes else f"does not use {workers} workers"
            if used > workers:
                what = (
                    f"need{'' if axes else 's'} {used} workers, but there {'is' if workers == 1 else 'are'} {workers}"
                )
            raise PlanError(f"{_say_all({'data': stated, **axes})} {what}", f"leave data out, or use data={data}")
        return data

    def _check_pairs(self) -> None:
        """An error where a word lacks the one it refines, or two words cannot both hold."""
        for row, _, word in self.stated_words():
            owner = row.metadata["of"]
            if owner and getattr(self, owner) is None:
                raise PlanError(f"{word} needs {owner}", f"add {owner}=N, or leave {word} out")
        if self.local and not self.every:
            raise PlanError(
                f"local={self.local} needs the number of steps between merges", "add every=H, for example every=50"
            )
        self._check_fragments()
        if self.local and self.server:
            what = f"local={self.local} and server={self.server} both synchronise the replicas"
            raise PlanError(what, "keep one of them")
        if self.local and (self.quorum or 0) >= self.local:
            what = f"quorum={self.quorum} of local={self.local} leaves no island that could be late"
            raise PlanError(what, "leave quorum out: by default a merge waits for all islands")
        beside = next((word for row, _, word in self.stated_words() if row.name in ("fragments", "outer_codec")), "")
        if self.quorum and beside:
            raise PlanError(f"quorum={self.quorum} and {beside} cannot be used together yet", "leave one of them out")
        if self.schedule == "zbv" and (self.virtual or 2) % 2:
            what = (
                f"schedule=zbv and virtual={self.virtual} contradict each other: the stages of a worker come in pairs"
            )
            raise PlanError(what, "use virtual=2, or schedule=zb")
        if self.tiles and (self.tensor or 1) > 1:
            what = f"tiles={self.tiles} and tensor={self.tensor} both divide the logits"
            raise PlanError(what, "leave tiles out: tensor= leaves each worker a part of the vocabulary")
        if self.tiles and self.compile:
            raise PlanError(f"compile and tiles={self.tiles} cannot be used together yet", "leave compile or tiles out")
        if self.optimizer_states:
            self._check_beside_int8_states()
        if (self.expert or 1) > 1:
            self._check_beside_experts()
        for axis in ("tensor", "context"):
            size = getattr(self, axis) or 1
            if self.precision == "fp8" and size > 1:  # the scale of a tensor would be that of a part
                what = f"precision=fp8 and {axis}={size} cannot be used together yet"
                raise PlanError(what, f"use precision=bf16, or leave {axis} out")
        if self.schedule in ("zb", "zbv") and self.zero in (2, 3):
            what = f"schedule={self.schedule} and zero={self.zero} cannot be used together yet"
            raise PlanError(what, "use zero=1, or schedule=1f1b")
        for row, value, word in self.stated_words():
            if self.exact and row.name in ("codec", "staleness", "backup") and value:
                raise PlanError(f"exact and {word} contradict each other", f"leave exact or {word} out")
            if self.local and (
                word in ("exact", "precision=fp16")
                or row.name in ("codec", "lr_scaling")
                or (row.name == "precision" and self.bf16_weights)
            ):
                what = f"{word} and local={self.local} cannot be used together yet"
                raise PlanError(what, f"leave {word} or local out")
            if self.server:
                self._check_beside_servers(row, value, word)

    def _check_beside_int8_states(self) -> None:
        """Raises PlanError for a word that cannot be used with `optimizer_states`."""
        for row, _, word in self.stated_words():
            if row.name in ("local", "server", "offload"):
                what = f"optimizer_states={self.optimizer_states} and {word} cannot be used together yet"
                raise PlanError(what, f"leave optimizer_states or {row.name} out")

    def _check_beside_experts(self) -> None:
        """Raises PlanError for a word that cannot be used with `expert`."""
        for row, value, word in self.stated_words():
            if word in ("compile", "exact") or (row.name in ("context", "local") and value > 1):
                what = f"expert={self.expert} and {word} cannot be used together yet"
                raise PlanError(what, f"leave expert or {row.name} out")

    def _check_beside_servers(self, row: Field[Any], value: Any, word: str) -> None:
        """Raises PlanError for a word that cannot be used with `server`."""
        if row.metadata["axis"] and row.name != "data" and (value > 1 or row.name == "shard"):
            what = f"{word} and server={self.server} both shard the model"
            raise PlanError(what, f"keep one of them: with server={self.server} each worker has the complete model")
        if word == "delayed=0":
            raise PlanError(
                "delayed=0 would never refresh the momentum", "use delayed=N with the number of workers as N"
            )
        if row.name == "backup" and self.staleness:
            what = f"{word} is only for synchronous workers; with staleness={self.staleness:g} no step waits"
            raise PlanError(what, f"leave {word} or staleness out")
        windows = self.in_windows if row.name == "window" else self.staleness
        if row.name in ("window", "damping", "delayed") and not windows:
            what = f"{word} is only for asynchronous workers"
            raise PlanError(
                what, f"add staleness=K, or leave {row.name} out: synchronous workers meet after each update"
            )
        if row.name == "precision" and self.bf16_weights:
            what = f"{word} and server={self.server} cannot be used together yet"
            raise PlanError(what, "use precision=bf16, or leave server out")
        if word == "copies=1" and self.server == 1:
            raise PlanError("copies=1 needs a second server to hold the copies", "use server=2, or leave copies out")
        if word == "precision=fp16" and self.in_windows:
            what = (
                f"{word} needs one loss scale for all workers, but with {self.several} they do not make the same steps"
            )
            raise PlanError(what, "use precision=bf16")
        if row.name == "codec" and value not in ("bf16", "fp16", "int8"):
            what = f"server={self.server} supports only codecs that round, not {word}"
            raise PlanError(what, "use codec=bf16, codec=fp16 or codec=int8")

    def _check_fragments(self) -> None:
        """An error where a round has fewer steps than parts, or a part's sum would travel longer than to the next."""
        count, every, delay = self.fragments or 1, self.every or 1, self.delay or 0
        if count > every:
            what = f"fragments={count} is more than the {every} step{'' if every == 1 else 's'} between merges"
            raise PlanError(what, f"use fragments={every}, or every={count}")
        if delay >= every // count:
            each = every // count
            what = f"delay={delay} must be less than the {each} step{'' if each == 1 else 's'} between two fragments"
            raise PlanError(what, f"use delay={each - 1}, or every={(delay + 1) * count}")


def describe() -> str:
    """Returns the words of a plan in their groups, one word a line, for the help of the command line."""
    rows = {row.name: row for row in fields(Plan)}
    blocks = []
    for title, names in GROUPS.items():
        lines = [f"{title}:"]
        for row in (rows[name] for name in names if rows[name].metadata["built"]):
            usage = _usage(row)
            lines.append(f"  {usage}\n{'':<22}" if len(usage) > 20 else f"  {usage:<20}")
            lines[-1] += f" {row.metadata['caption']}"
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _read(word: str) -> tuple[Field[Any], Any]:
    """The row of the table that `word` names, and its value."""
    literals = {f"{row.name}={literal}" for row in fields(Plan) for literal in row.metadata["value"].split("|")}
    if "," in word and word.strip(",") and word not in literals:
        words = " ".join(word.replace(",", " ").split())
        raise PlanError(f"plan word {word!r} contains a comma", f"separate words with spaces: {words}")
    if word.startswith("-") and word.strip("-"):
        raise PlanError(f"plan word {word!r} begins with a dash", f"write it without the dash: {word.lstrip('-')}")
    name, equals, text = word.partition("=")
    row = next((row for row in fields(Plan) if row.name == name), None)
    if row is None:
        raise _unknown(word)
    spec = row.metadata["value"]
    if not spec:
        if equals:
            raise PlanError(f"plan word {word!r} takes no value", f"use {name} without a value, or leave it out")
        return row, True
    if not text:
        raise PlanError(f"plan word {word!r} has no value", f"use {_usage(row)}, without spaces")
    if not _fits(text, spec.split("|")):
        notes = [_NUMBERS[kind][1] for kind in spec.split("|") if kind in _NUMBERS]
        cure = ", ".join([f"use {_usage(row)}", *notes])
        raise PlanError(f"plan word {word!r} has an invalid value", cure)
    return row, math.inf if text == "inf" else int(text) if text.isdecimal() else text


def _fits(text: str, kinds: Iterable[str]) -> bool:
    return any(re.fullmatch(_NUMBERS[kind][0] if kind in _NUMBERS else kind, text) for kind in kinds)


def _unknown(word: str) -> PlanError:
    """An error that names the word most like it, or all."""
    name, _, text = word.partition("=")
    meant = _ELSEWHERE.get(re.sub("[-_]", "", name.lower()))
    if meant:
        return PlanError(f"unknown plan word {word!r}", meant.replace("=N", f"={text}") if text.isdecimal() else meant)
    close = difflib.get_close_matches(name.lower(), [row.name for row in fields(Plan)], n=1)
    if not close:
        known = " ".join(_usage(row) for row in fields(Plan))
        return PlanError(f"unknown plan word {word!r}", f"the plan words are {known}")
    row = next(row for row in fields(Plan) if row.name == close[0])
    meant = f"{row.name}={text}" if text and row.metadata["value"] else _usage(row)
    return PlanError(f"unknown plan word {word!r}", f"did you mean {meant}?")


def _nearest(axes: dict[str, int], workers: int) -> list[str]:
    """The legal axes that change these least, by the product of their factors: a smaller and a larger cut."""
    best: dict[bool, tuple[Fraction, str]] = {}
    for legal in _cuts(list(axes.values()), workers):
        larger = math.prod(legal) > math.prod(axes.values())
        pairs = zip(legal, axes.values(), strict=True)
        change = math.prod((Fraction(max(pair), min(pair)) for pair in pairs), start=Fraction(1))
        if larger not in best or change < best[larger][0]:
            best[larger] = change, _say_all(dict(zip(axes, legal, strict=True)))
    return [text for _, (_, text) in sorted(best.items())]


def _cuts(axes: list[int], workers: int) -> Iterator[tuple[int, ...]]:
    """Tuples of numbers near those of `axes` whose product divides `workers`."""
    if not axes:
        yield ()
        return
    low = [n for n in range(1, math.isqrt(workers) + 1) if workers % n == 0]
    legal = sorted({*low, *(workers // n for n in low)})
    nearest = bisect.bisect(legal, axes[0])
    for n in sorted({1, *legal[max(0, nearest - 3) : nearest + 3]}):  # three each way: five axes stay quick
        for rest in _cuts(axes[1:], workers // n):
            yield n, *rest


def _say(name: str, value: Any) -> str:
    return name if value is True else f"{name}={value}"


def _say_all(axes: dict[str, Any]) -> str:
    return " ".join(_say(name, value) for name, value in axes.items())


def _usage(row: Field[Any]) -> str:
    """How a word is written: ``data=N``."""
    value: str = row.metadata["value"]
    return f"{row.name}={value}" if value else str(row.name)
