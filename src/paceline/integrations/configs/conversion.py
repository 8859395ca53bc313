"""A conversion in progress: what becomes of each field of a configuration, the plan's words and Trainer arguments."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.base.mesh import AXES
from paceline.errors import PlanError
from paceline.plan import Plan

USED, NO_EFFECT, REFUSED, UNKNOWN = "used", "no effect", "refused", "unknown"
VERDICTS = (USED, NO_EFFECT, REFUSED, UNKNOWN)
_OFF: tuple[Any, ...] = (None, False, "", "no", "none", "None", "null")  # values that ask for nothing


@dataclass(frozen=True)
class FieldRefusal:
    """Why a field cannot be honoured, and what to do instead."""

    why: str
    cure: str
    # Values that ask for nothing, beside null, false and "".
    harmless: tuple[Any, ...] = ()

    def asks(self, value: Any) -> bool:
        """Whether this value of the field asks for something."""
        if value is False:
            return any(one is True for one in self.harmless)
        plain = value in ([], {}) or any(type(off) is type(value) and value == off for off in _OFF)
        same = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.harmless)
        return not (plain or same)

    def __str__(self) -> str:
        return f"{self.why}; {self.cure}"


@dataclass(frozen=True)
class FieldTable:
    """Every field of a kind of configuration file, by its dotted name, in exactly one of the dicts."""

    # The name of the tool, for messages.
    tool: str
    # What becomes of a field.
    used: Mapping[str, str]
    # Why a field changes nothing.
    no_effect: Mapping[str, str]
    refused: Mapping[str, FieldRefusal]
    # Sections whose fields are not told apart: refused as a whole where they are switched on, or why without effect.
    sections: Mapping[str, FieldRefusal | str]

    def names(self) -> list[str]:
        """The dotted names of all fields and sections."""
        return [*self.used, *self.no_effect, *self.refused, *self.sections]

    def section_of(self, name: str) -> str:
        """The section of the table that a field belongs to; empty if none."""
        parts = name.split(".")
        heads = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((head for head in heads if head in self.sections), "")

    def nearest(self, name: str) -> str:
        """The known field most like an unknown one; empty if none is near."""
        head, _, last = name.rpartition(".")
        siblings = {one.rpartition(".")[2]: one for one in self.names() if one.rpartition(".")[0] == head}
        if close := difflib.get_close_matches(last.lower(), list(siblings), n=1, cutoff=0.75):
            return siblings[close[0]]
        if elsewhere := [one for one in self.names() if one.rpartition(".")[2] == last]:
            return elsewhere[0]
        return next(iter(difflib.get_close_matches(name, self.names(), n=1, cutoff=0.8)), "")


@dataclass(frozen=True)
class ConvertedField:
    """What became of one field of the file."""

    name: str
    value: Any
    verdict: str
    text: str


@dataclass
class Conversion:
    """What a configuration file asks for, in Paceline's words."""

    table: FieldTable
    config: Mapping[str, Any]
    # Number of workers; 0 until it is known.
    workers: int = 0
    # Where the number of workers comes from.
    workers_from: str = ""
    machines: int = 1
    # Words of the plan, and the field that each comes from.
    words: dict[str, tuple[str, str]] = field(default_factory=dict)
    # Arguments of the Trainer as Python source.
    arguments: dict[str, str] = field(default_factory=dict)
    # Lines of Python before the Trainer: imports are added when the script is written.
    definitions: list[str] = field(default_factory=list)
    # Options of `paceline run`.
    options: list[str] = field(default_factory=list)
    # Sentences on what else changes in the script.
    changes: list[str] = field(default_factory=list)
    # Length of the training, as an argument of `trainer.steps`.
    loop: str = "epochs=1"
    settled: dict[str, ConvertedField] = field(default_factory=dict)
    # Names of fields of another file, which this one names.
    adopted: set[str] = field(default_factory=set)
    plan: str = ""

    # -- reading ------------------------------------------------------------------------------------------------

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field by its dotted name; the default if the file lacks it or has null."""
        value: Any = self.config
        for part in name.split("."):
            if not isinstance(value, Mapping) or value.get(part) is None:
                return default
            value = value[part]
        return value

    def is_on(self, name: str) -> bool:
        """Whether a field is true. Refuses a value that is neither true nor false."""
        value = self.get(name, False)
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"):
            return value.lower() in ("true", "yes")
        if not isinstance(value, bool):
            self.refuse(name, f"it must be true or false, not {value!r:.40}", "correct the file")
            return False
        return value

    def number(self, name: str, least: float, default: Any = None, integer: bool = False) -> Any:
        """A number of the file that is at least `least`. Refuses other values, and returns the default for them."""
        value = self.get(name)
        if value is None:
            return default
        if value == "auto":
            self.refuse(name, 'nothing fills "auto" in this field', "write the number")
            return default
        fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= least
        if not fits or (integer and int(value) != value) or value == float("inf"):
            kind = "a whole number" if integer else "a number"
            self.refuse(name, f"it must be {kind} of at least {least:g}, not {value!r:.40}", "correct the file")
            return default
        return int(value) if integer else value

    def numbers(self, name: str, count: int, default: Any = None) -> Any:
        """A list of numbers of the file. Refuses other values, and returns the default for them."""
        value = self.get(name)
        if value is None:
            return default
        plain = isinstance(value, list) and len(value) == count
        if not plain or any(isinstance(one, bool) or not isinstance(one, int | float) for one in value):
            self.refuse(name, f"it must be a list of {count} numbers, not {value!r:.40}", "correct the file")
            return default
        return value

    # -- verdicts -----------------------------------------------------------------------------------------------

    def settle(self, name: str, verdict: str, text: str) -> None:
        """Says what becomes of a field, whether the file has it or means its default. The first verdict stays."""
        self.settled.setdefault(name, ConvertedField(name, self.get(name), verdict, text))

    def refuse(self, name: str, why: str, cure: str) -> None:
        """Refuses a field with its reason and what to do instead."""
        self.settle(name, REFUSED, f"{why}; {cure}")

    def word(self, word: str, name: str) -> None:
        """Puts a word into the plan, for a field."""
        self.words.setdefault(word.partition("=")[0], (word, name))
        self.settle(name, USED, f"plan word {word}")

    def argument(self, argument: str, source: str, name: str) -> None:
        """Gives the Trainer an argument, for a field."""
        self.arguments[argument] = source
        self.settle(name, USED, f"{argument}={source}")

    def assume(self, workers: int) -> None:
        """Takes a number of workers that the file does not name."""
        self.workers = workers
        self.workers_from = "assumed: the file does not name a number; pass --workers N"

    # -- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Makes the plan of its words, and says what becomes of every field."""
        self._fit_plan()
        for name, value in leaves(self.config):
            self._settle_by_table(name, value)
        known = {name for name, _ in leaves(self.config)} | self.adopted
        kept = {name: one for name, one in self.settled.items() if name in known or one.verdict == REFUSED}
        self.settled = kept  # without remarks on fields that the file lacks

    def _fit_plan(self) -> None:
        """Leaves words out, or weakens them, until the plan is accepted. What is left out is refused by name."""
        while True:
            text = " ".join(word for word, _ in self.words.values())
            try:
                self.plan = str(Plan.parse(text))
                Plan.parse(text).validate(self.workers)
                return
            except PlanError as error:
                self._weaken(error)

    def _weaken(self, error: PlanError) -> None:
        """Takes one word out of the plan, or makes `zero` weaker: a word that the error names, and after which the plan
        is accepted, if there is one.
        """
        candidates: list[tuple[str, dict[str, tuple[str, str]]]] = []
        for name, (word, origin) in self.words.items():
            if name == "zero" and word != "zero=1":
                candidates.append((name, {**self.words, name: ("zero=1", origin)}))
            candidates.append((name, {key: value for key, value in self.words.items() if key != name}))

        def rank(one: tuple[str, dict[str, tuple[str, str]]]) -> tuple[bool, bool, bool, bool]:
            name, words = one
            is_named = self.words[name][0] in error.what
            return not is_named, not _fits(words, self.workers), name not in words, name in AXES

        candidates.sort(key=rank)
        name, words = candidates[0]
        word, origin = self.words[name]
        instead = f"the plan has {words[name][0]} instead" if name in words else f"the plan leaves {word} out"
        self.words = words
        self.settled[origin] = ConvertedField(origin, self.get(origin), REFUSED, f"{error.what}; {instead}")

    def _settle_by_table(self, name: str, value: Any) -> None:
        table = self.table
        if name in self.settled:
            return
        if section := table.section_of(name):
            refusal = table.sections[section]
            if isinstance(refusal, str):
                self.settle(name, NO_EFFECT, refusal)
            elif is_switched_on(self.get(section)):
                self.settle(name, REFUSED, str(refusal))
            else:
                self.settle(name, NO_EFFECT, "the section is switched off")
        elif name in table.used:
            self.settle(name, USED, table.used[name])
        elif name in table.no_effect:
            self.settle(name, NO_EFFECT, table.no_effect[name])
        elif name in table.refused:
            refusal = table.refused[name]
            if refusal.asks(value):
                self.settle(name, REFUSED, str(refusal))
            else:
                self.settle(name, NO_EFFECT, f"it asks for nothing: {refusal.why} only with another value")
        elif value in (None, {}, []) and any(one.startswith(f"{name}.") for one in table.names()):
            self.settle(name, NO_EFFECT, "the section is empty")
        elif any(one.startswith(f"{name}.") for one in table.names()):
            self.refuse(name, f"it must be a section with fields, not {value!r:.40}", "correct the file")
        else:
            near = table.nearest(name)
            cure = f"did you mean {near}?" if near else f"{table.tool} does not document a field of this name"
            self.settle(name, UNKNOWN, cure)


def _fits(words: Mapping[str, tuple[str, str]], workers: int) -> bool:
    try:
        Plan.parse(" ".join(word for word, _ in words.values())).validate(workers)
    except PlanError:
        return False
    return True


def leaves(config: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every field that holds no further fields."""
    for key, value in config.items():
        name = f"{head}.{key}" if head else str(key)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, name)
        else:
            yield name, value


def is_switched_on(section: Any) -> bool:
    """Whether a section of the file asks for something: `enabled` is not false, at its top or anywhere in it."""
    if not isinstance(section, Mapping):
        return section not in _OFF
    if not section:
        return False
    switches = [value for name, value in leaves(section) if name.split(".")[-1] == "enabled"]
    top = section.get("enabled")
    if top is not None:
        return top not in _OFF
    return not switches or any(value not in _OFF for value in switches)
