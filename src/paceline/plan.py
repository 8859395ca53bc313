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
# A word's value is a literal or one of these: its pattern, and what the user is told it stands for.
_NUMBERS = {
    **{name: ("0*[1-9][0-9]{0,8}", f"{name} a whole number from 1 to 999999999") for name in "NHFQSVWB"},
    **{name: ("[0-9]{1,9}", f"{name} a whole number from 0 to 999999999") for name in "KD"},
    "topk:R": (r"topk:0?\.[0-9]*[1-9][0-9]*", "topk:R with a fraction R of the gradient, as 0.01"),
    "sgd:RATE": (rf"sgd:{_NUMBER}", "RATE a number, as 0.7"),
    "nesterov:RATE:MOMENTUM": (rf"nesterov:{_NUMBER}:0?\.[0-9]+", "MOMENTUM below 1, as 0.9"),
    "powersgd:R": ("powersgd:[1-9][0-9]{0,3}", "powersgd:R with a rank R from 1 to 9999"),
}

# What other tools call a word, without dashes, and what is said here.
_ELSEWHERE = {
    **dict.fromkeys(("bf16", "bfloat16", "amp"), "say precision=bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "say precision=fp16"),
    **dict.fromkeys(("fp32", "float32"), "leave it out: it is what is done unless said"),
    **dict.fromkeys(("ddp", "dp"), "say data=N, or leave it out: all workers are replicas unless said"),
    **dict.fromkeys(("fsdp", "fsdp2"), "say shard=N"),
    **{f"zero{level}": f"say shard=N zero={level}" for level in (1, 2, 3)},
    **{short: f"say {word}=N" for short, word in {"tp": "tensor", "pp": "pipeline", "cp": "context"}.items()},
    **dict.fromkeys(("checkpointing", "gradientcheckpointing"), "say recompute=blocks"),
}


def _word(value: str, caption: str, of: str = "", axis: bool = False, built: bool = False) -> Any:
    """One row: the values of the word ("" for a flag), what it means, the word that it refines, whether its
    number multiplies the workers needed, and whether it works in this version."""
    metadata = {"value": value, "caption": caption, "of": of, "axis": axis, "built": built}
    return field(default=None if value else False, metadata=metadata)


@dataclass(frozen=True)
class Plan:
    """How the training is laid out over the workers. None or False: the word was not said.

    `Plan.parse` reads the text that `str` prints, and `validate` fits the plan to a number of workers.
    """

    data: int | None = _word("N", "N replicas, gradients all-reduced every step", axis=True, built=True)
    local: int | None = _word("N", "N islands, merged every H steps (local SGD, DiLoCo)", built=True)
    every: int | None = _word("H", "steps between two merges of the islands", of="local", built=True)
    outer: str | None = _word(
        "sgd:RATE|nesterov:RATE:MOMENTUM", "how far a merge goes, nesterov:0.7:0.9 unless said", of="local", built=True
    )
    fragments: int | None = _word("F", "one of F parts of the model is merged at a time", of="local", built=True)
    delay: int | None = _word(
        "D", "steps that are made while a part's sum travels; 0 unless said", of="fragments", built=True
    )
    outer_codec: str | None = _word("int8|int4", "how far islands have come travels as codes", of="local", built=True)
    quorum: int | None = _word(
        "Q", "a merge waits for Q islands and a grace window; later ones are in a later merge", of="local", built=True
    )
    server: int | None = _word("S", "S parameter servers beside the workers keep the optimizer", built=True)
    staleness: float | None = _word(
        "K|inf", "steps a worker may run ahead: 0 synchronous, inf asynchronous", of="server", built=True
    )
    window: int | None = _word(
        "W", "with staleness or backup: updates until all workers meet again, 256 unless said", of="server", built=True
    )
    backup: int | None = _word(
        "B", "in step: the first N-B workers make the step, and rows of later ones are dropped", of="server", built=True
    )
    damping: bool = _word(
        "",
        "with staleness: the learning rate of an update is divided by 1 + those that it missed",
        of="server",
        built=True,
    )
    delayed: int | None = _word(
        "D", "with staleness: Nesterov's momentum is refreshed in each D-th update alone", of="server", built=True
    )
    copies: int | None = _word(
        "0|1", "each server's part is held by another one as well: a lost server loses nothing", of="server", built=True
    )
    shard: int | None = _word("N", "parameters, gradients and optimizer state in N shards", axis=True, built=True)
    zero: int | None = _word(
        "1|2|3", "sharded: 1 optimizer state, 2 and gradients, 3 and parameters", of="shard", built=True
    )
    offload: str | None = _word(
        "cpu", "the optimizer's state and rows wait in the host's memory, which updates them", of="shard", built=True
    )
    tensor: int | None = _word("N", "the model cut N times inside its layers", axis=True, built=True)
    pipeline: int | None = _word("N", "the model cut in N stages", axis=True, built=True)
    schedule: str | None = _word(
        "gpipe|1f1b", "the order of micro-batches through the stages; 1f1b unless said", of="pipeline", built=True
    )
    virtual: int | None = _word("V", "V stages on each worker, for less waiting", of="pipeline", built=True)
    context: int | None = _word("N", "the sequence cut in N parts", axis=True, built=True)
    micro: int | None = _word("N", "rows of a micro-batch; an eighth of the global batch unless said", built=True)
    codec: str | None = _word(
        "bf16|fp16|int8|topk:R|powersgd:R|sign|auto|auto:lossy",
        "sums of gradients between hosts as codes; auto: as each costs least, measured",
        built=True,
    )
    lr_scaling: str | None = _word(
        "linear|sqrt", "a run that goes on with another global batch scales its learning rates", built=True
    )
    precision: str | None = _word("bf16|fp16", "arithmetic of forward and backward", built=True)
    recompute: str | None = _word(
        "blocks", "activations are computed again in backward, which saves memory", built=True
    )
    compile: bool = _word("", "torch.compile", built=True)
    exact: bool = _word("", "bit-identical for any number of workers", built=True)
    auto: bool = _word("", "the planner decides")

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that `text` says: words with white space between. Raises PlanError if it cannot."""
        values: dict[str, Any] = {}
        for word in text.split():
            row, value = _read(word)
            if row.name in values:
                first = _say(row.name, values[row.name])
                raise PlanError(f"plan word {row.name!r} is said twice: {first} and {word}", "keep one of them")
            values[row.name] = value
        return cls(**values)

    def __str__(self) -> str:
        """The canonical text: only what was said, in the order of the table."""
        return " ".join(word for _, _, word in self.stated_words())

    def validate(self, workers: int) -> Plan:
        """This plan over `workers`, with `data` resolved: the product of the axes is the number of workers.

        Raises PlanError if the axes do not fit the workers, words contradict each other, or one is not built.
        """
        if workers < 1:
            raise PlanError(f"a plan cannot use {workers} workers", "start at least one")
        data = self._divide(workers)
        if self.backup and self.backup >= workers:
            what = f"backup={self.backup} of {workers} worker{'' if workers == 1 else 's'} leaves nobody to make a step"
            raise PlanError(what, f"say backup={workers - 1}" if workers > 1 else "leave backup out")
        resolved = replace(self, zero=self.zero or (3 if self.shard else None))
        resolved._check_pairs()
        unbuilt = [word for row, _, word in resolved.stated_words() if not row.metadata["built"]]
        if unbuilt:
            verb = "is" if len(unbuilt) == 1 else "are"
            known = ", ".join(_usage(row) for row in fields(Plan) if row.metadata["built"])
            raise PlanError(f"{' '.join(unbuilt)} {verb} not built yet", f"use only what is: {known}")
        return replace(resolved, data=data)

    @cached_property
    def one_by_one(self) -> bool:
        """Whether micro-batches are executed whole and one after another: together they would round other than apart,
        which `exact` forbids and makes other sums overflow in fp16; or workers run a model that is in pieces together.
        """
        return self.exact or self.precision == "fp16" or self.together > 1 or self.mesh(1).unit > 1

    def mesh(self, workers: int) -> Mesh:
        """Where each of so many workers is, if the plan is right for them."""
        axes = {axis: getattr(self, axis) or 1 for axis in AXES if axis != "data"}
        return Mesh(**axes).over(workers)

    def without(self, script: str, workers: int) -> Plan:
        """This plan for a trainer whose own one says that its model is whole: `pipeline=1`, `context=1`, `tensor=1`."""
        disabled = {axis for axis in AXES[2:] if f"{axis}=1" in script.split() and (getattr(self, axis) or 1) > 1}
        out: dict[str, Any] = {row.name: None for row in fields(self) if {row.name, row.metadata["of"]} & disabled}
        return replace(self, data=None, **out).validate(workers) if out else self

    @cached_property
    def together(self) -> int:
        """How many workers gather a model's parameters from one another, and therefore run it equally often."""
        return self.mesh(1).replica if self.zero in (2, 3) else 1

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
        unit = self.mesh(1).unit
        for zero in (1, 2, 3) if unit == 1 else (1,):
            for shard in (n for n in range(2, workers // unit + 1) if workers % (n * unit) == 0):
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
            what = f"need {product} workers and do not divide {workers}"
            if len(axes) == 1:
                what = f"does not divide {workers} worker{'' if workers == 1 else 's'}"
            raise PlanError(f"{text} {what}", f"try {' or '.join(_nearest(axes, workers))}")
        data = workers // product
        if stated not in (None, data):
            used = stated * product
            what = f"use {used} of {workers} workers" if axes else f"does not use {workers} workers"
            if used > workers:
                what = f"need{'' if axes else 's'} {used} workers and there are {workers}"
            raise PlanError(f"{_say_all({'data': stated, **axes})} {what}", f"leave data out, or say data={data}")
        return data

    def _check_pairs(self) -> None:
        """An error where a word lacks the one it refines, or two words cannot both hold."""
        for row, _, word in self.stated_words():
            owner = row.metadata["of"]
            if owner and getattr(self, owner) is None:
                raise PlanError(f"{word} needs {owner}", f"add {owner}=N, or leave {word} out")
        if self.local and not self.every:
            raise PlanError(f"local={self.local} does not say how often", "add every=H, as every=50")
        self._check_fragments()
        if self.local and self.server:
            what = f"local={self.local} and server={self.server} both synchronise the replicas"
            raise PlanError(what, "keep one of them")
        if self.local and (self.quorum or 0) >= self.local:
            what = f"quorum={self.quorum} of local={self.local} leaves nobody to be late"
            raise PlanError(what, "leave quorum out: a merge waits for all islands unless said")
        beside = next((word for row, _, word in self.stated_words() if row.name in ("fragments", "outer_codec")), "")
        if self.quorum and beside:
            raise PlanError(f"quorum={self.quorum} and {beside} are not built together yet", "leave one of them out")
        for row, value, word in self.stated_words():
            if self.exact and row.name in ("codec", "staleness", "backup") and value:
                raise PlanError(f"exact and {word} contradict each other", f"leave exact or {word} out")
            for axis in (axis for axis in AXES[2:] if (getattr(self, axis) or 1) > 1):
                if word in ("compile", "zero=2", "zero=3", "precision=fp16") or (word == "exact" and axis != "tensor"):
                    what = f"{word} and {axis}={getattr(self, axis)} are not built together yet"
                    raise PlanError(what, "say zero=1" if row.name == "zero" else f"leave {word} or {axis} out")
            if self.local and (word in ("exact", "precision=fp16") or row.name in ("codec", "lr_scaling")):
                what = f"{word} and local={self.local} are not built together yet"
                raise PlanError(what, f"leave {word} or local out")
            if self.server:
                self._check_beside_servers(row, value, word)
            if self.auto and (row.metadata["axis"] or row.name in ("local", "server")):
                raise PlanError(f"auto and {word} both decide the layout", f"leave auto or {word} out")

    def _check_beside_servers(self, row: Field[Any], value: Any, word: str) -> None:
        """An error where a word cannot stand, or not yet, beside `server`."""
        if row.metadata["axis"] and row.name != "data" and (value > 1 or row.name == "shard"):
            what = f"{word} and server={self.server} both divide a model"
            raise PlanError(what, f"keep one of them: under server={self.server} each worker has a whole one")
        if word == "delayed=0":
            raise PlanError("delayed=0 would never refresh the momentum", "say delayed=N, N the number of workers")
        if row.name == "backup" and self.staleness:
            what = f"{word} is for workers that are in step, and with staleness={self.staleness:g} nobody is late"
            raise PlanError(what, f"leave {word} or staleness out")
        windows = self.in_windows if row.name == "window" else self.staleness
        if row.name in ("window", "damping", "delayed") and not windows:
            what = f"{word} is for workers that are not in step"
            raise PlanError(what, f"add staleness=K, or leave {row.name} out: in step all meet after each update")
        if word == "copies=1" and self.server == 1:
            raise PlanError("copies=1 needs another server that holds them", "say server=2, or leave copies out")
        if word == "precision=fp16" and self.in_windows:
            what = f"{word} looks for one loss scale, and {self.several} has no step that all make"
            raise PlanError(what, "say precision=bf16")
        if row.name == "codec" and value not in ("bf16", "fp16", "int8"):
            what = f"beside server={self.server} there are rounding codecs alone, and {word} is none"
            raise PlanError(what, "say codec=bf16, codec=fp16 or codec=int8")

    def _check_fragments(self) -> None:
        """An error where a round has fewer steps than parts, or a part's sum would travel longer than to the next."""
        count, every, delay = self.fragments or 1, self.every or 1, self.delay or 0
        if count > every:
            what = f"fragments={count} are more than the steps of a round, every={every}"
            raise PlanError(what, f"say fragments={every}, or every={count}")
        if delay >= every // count:
            each = every // count
            what = f"delay={delay} is not less than the steps from one fragment to the next, of which there are {each}"
            raise PlanError(what, f"say delay={each - 1}, or every={(delay + 1) * count}")


def describe() -> str:
    """The words of a plan, one a line, for the help of the command line."""
    lines = []
    for row in fields(Plan):
        note = "" if row.metadata["built"] else " (not built yet)"
        lines.append(f"{_usage(row):<20} {row.metadata['caption']}{note}")
    return "\n".join(lines)


def _read(word: str) -> tuple[Field[Any], Any]:
    """The row of the table that `word` names, and its value."""
    if "," in word and word.strip(","):
        words = " ".join(word.replace(",", " ").split())
        raise PlanError(f"plan word {word!r} holds a comma", f"separate words with spaces: {words}")
    if word.startswith("-") and word.strip("-"):
        raise PlanError(f"plan word {word!r} begins with a dash", f"write it without: {word.lstrip('-')}")
    name, equals, text = word.partition("=")
    row = next((row for row in fields(Plan) if row.name == name), None)
    if row is None:
        raise _unknown(word)
    spec = row.metadata["value"]
    if not spec:
        if equals:
            raise PlanError(f"plan word {word!r} takes no value", f"say {name}, or leave it out")
        return row, True
    if not text:
        raise PlanError(f"plan word {word!r} has no value", f"say {_usage(row)}, without spaces")
    if not _fits(text, spec.split("|")):
        notes = [_NUMBERS[kind][1] for kind in spec.split("|") if kind in _NUMBERS]
        cure = ", ".join([f"say {_usage(row)}", *notes])
        raise PlanError(f"plan word {word!r} has a value that does not fit", cure)
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
        return PlanError(f"unknown plan word {word!r}", f"the known ones are {known}")
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
