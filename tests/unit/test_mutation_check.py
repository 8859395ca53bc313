"""Every mistake of the mutation check still has its place in the source, and the check finds what tests reach it."""

from __future__ import annotations

from collections import Counter

import pytest
from mutation_check import ROOT, Mutation, in_order, mutations, probed, statement

RECORDS = mutations()
TEXT = """
def f(x):
    if x:
        y = (
            1
        )
    elif x is None:
        y = 2
    return y
"""


def test_mutations_are_forty_with_unique_names() -> None:
    assert [name for name, times in Counter(one.name for one in RECORDS).items() if times > 1] == []
    assert len(RECORDS) == 40
    assert [one.name for one in RECORDS if not one.mistake.endswith(".") or one.before == one.after] == []


@pytest.mark.parametrize("one", RECORDS, ids=lambda one: one.name)
def test_mutation_applies_once_and_compiles(one: Mutation) -> None:
    """Where this fails after a refactoring, mend `before` and `after` of the record: the mistake stays the same."""
    text = (ROOT / one.file).read_text()
    assert text.count(one.before) == 1, f"{one.file} has the text of `before` {text.count(one.before)} times"
    compile(one.applied(text), one.file, "exec")
    compile(probed(text, [one]), one.file, "exec")


@pytest.mark.parametrize(("line", "first"), [(5, 4), (7, 3), (8, 8), (9, 9)])
def test_mutation_probe_is_inserted_before_the_statement(line: int, first: int) -> None:
    assert statement(TEXT, line).lineno == first


def test_mutation_probe_outside_of_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2 is in no statement of a function"):
        statement(TEXT, 2)


def test_mutation_check_order_takes_short_tests_of_different_files_first() -> None:
    seconds = {"a::1": 1.0, "a::2[x]": 0.1, "a::2[y]": 0.1, "b::1": 0.5, "b::2": 0.7, "c::1": 9.0}
    assert in_order(seconds, seconds) == ["a::2[x]", "b::1", "c::1", "b::2", "a::1", "a::2[y]"]
