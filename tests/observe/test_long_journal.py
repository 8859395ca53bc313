"""Journals of long runs: they grow ever more slowly, are read in little memory, and who needs their end reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import step

from paceline.base import journal as journals
from paceline.base.journal import NAME, Journal, effective_steps, lines_from_end, read_journal
from paceline.base.text import total, totals
from paceline.observe.step_totals import KEPT
from paceline.observe.summary import Summary
from paceline.team.coordinator_server import last_generation, last_restart
from paceline.team.membership import Membership


def bytes_read() -> int:
    """So far, by this process."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def long_journal(folder: Path, *more: tuple[str, dict[str, Any]], lines: int = 20_000) -> int:
    """A journal of so many records of steps, and then others; where the others begin."""
    Journal(folder).close()
    with (folder / NAME).open("a") as file:
        file.writelines(
            json.dumps({"at": number, "event": "step", **step(number)}) + "\n" for number in range(1, lines + 1)
        )
    since, written = (folder / NAME).stat().st_size, Journal(folder)
    for event, fields in more:
        written.write(event, **fields)
    written.close()
    return since


@given(st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=9), st.binary(max_size=5))
def test_lines_from_the_end_are_the_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], torn: bytes
) -> None:
    path, before = tmp_path_factory.mktemp("lines") / "file", journals.BLOCK
    path.write_bytes(b"".join(line + b"\n" for line in lines) + torn.replace(b"\n", b""))
    try:
        for journals.BLOCK in (1, 3, 1000):
            assert [*lines_from_end(path)][::-1] == lines
            if lines:
                assert [*lines_from_end(path, len(lines[0]) + 1)][::-1] == lines[1:]
    finally:
        journals.BLOCK = before


def test_a_coordinator_reads_the_last_generation_from_the_end(tmp_path: Path) -> None:
    generations = [
        ("generation", {"number": n, "workers": [*range(n, 4)], "planned": n != 2, "at_once": min(n, 2)})
        for n in (1, 2, 3)
    ]
    since = long_journal(tmp_path, *generations)
    with (tmp_path / NAME).open("a") as file:
        file.write('{"event": "generation", "number"')  # torn, then gone on after
        file.write('\n{"event": "generation", "number": 4, "workers": [3]}')  # not whole yet
    first = (0, [0, 1, 2, 3])
    before = bytes_read()
    assert last_generation(tmp_path, 0, first) == Membership((3,), 3, 2, before=(2, 3))
    assert bytes_read() - before < 2 * journals.BLOCK < since / 10
    assert last_generation(tmp_path, since, first) == Membership((3,), 3, 2, before=(2, 3))


@pytest.mark.parametrize(
    ("generations", "membership"),
    [
        ([], Membership((0, 1, 2), 7, 7)),
        ([[1, 2]], Membership((1, 2), 8, 8, before=(0, 1, 2))),
        ([[1, 2], [2]], Membership((2,), 9, 9, before=(1, 2))),
    ],
)
def test_generations_before_this_coordinator_do_not_count(
    generations: list[list[int]], membership: Membership, tmp_path: Path
) -> None:
    long_journal(tmp_path, ("generation", {"number": 7, "workers": [5]}), lines=3)
    since, written = (tmp_path / NAME).stat().st_size, Journal(tmp_path)
    for number, workers in enumerate(generations, start=8):
        written.write("generation", number=number, workers=workers, planned=False)
    written.close()
    assert last_generation(tmp_path, since, (7, [0, 1, 2])) == membership


@pytest.mark.parametrize("follows", [False, True])
def test_a_coordinator_reads_that_the_first_team_starts_again(follows: bool, tmp_path: Path) -> None:
    """Unless a generation has followed."""
    long_journal(tmp_path, ("restarted", {"number": 7, "workers": [5], "lives": {"5": 3}}), lines=3)
    since, written = (tmp_path / NAME).stat().st_size, Journal(tmp_path)
    written.write("generation", number=8, workers=[0, 1], planned=False)
    assert last_restart(tmp_path, since) is None
    written.write("restarted", number=8, workers=[0, 1], lives={"0": 1, "1": 2})
    if follows:
        written.write("generation", number=9, workers=[0, 1], planned=False)
    written.close()
    restart = last_restart(tmp_path, since)
    assert (restart or {}).get("lives") == (None if follows else {"0": 1, "1": 2})


def test_who_writes_a_journal_on_reads_its_last_step_from_the_end(tmp_path: Path) -> None:
    long_journal(tmp_path, ("checkpoint", {"step": 20_000}))
    written, before = Journal(tmp_path), bytes_read()
    assert written.last_step(0) == 20_000
    assert bytes_read() - before < 2 * journals.BLOCK
    written.close()


@given(
    st.lists(st.tuples(st.sampled_from(["step", "start", "log"]), st.integers(0, 9), st.integers(0, 1)), max_size=12)
)
def test_the_last_step_is_that_of_those_that_count(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    written, done = Journal(folder), [0, 0]
    for event, number, trainer in events:
        if event == "start":
            written.write("start", resumed_from=number or None)
            done = [min(one, number) for one in done]
        elif event == "step":
            done[trainer] += 1
            written.write("step", trainer=trainer, step=done[trainer])
        else:
            written.write("log", step=number)
    counting = effective_steps(read_journal(folder))
    for trainer in (0, 1):
        last = max((one["step"] for one in counting if one["trainer"] == trainer), default=0)
        assert written.last_step(trainer) == last
    written.close()


# ---- fewer records of steps


def test_the_longer_a_journal_the_fewer_records_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no step is lost, nor a second; what others write counts for its length."""
    clock = [0.0]
    monkeypatch.setattr(journals.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(journals, "THIN", 1 << 18)
    written, other = Journal(tmp_path), Journal(tmp_path)
    counts: list[int] = []
    for part in range(4):
        before = len(read_journal(tmp_path))
        for number in range(120):
            clock[0] += 0.25
            written.steps(**step(120 * part + number + 1, steps=1, loss=float(number)))
        counts.append(len(read_journal(tmp_path)) - before)
        while (tmp_path / NAME).stat().st_size < (part + 1) * journals.THIN:
            other.write("refused", what="a request " * 1000)
    assert counts == [120, 60, 30, 15]
    written.close()
    found = [event for event in read_journal(tmp_path) if event["event"] == "step"]
    assert [event["step"] - event["steps"] for event in found] == [0, *(event["step"] for event in found[:-1])]
    assert found[-1]["step"] == sum(event["steps"] for event in found) == 480
    assert total(found, "samples") == 480 * 2560
    assert total(found, "seconds") == 480 * 0.5
    assert totals(found, "waited_for") == {"1": pytest.approx(480 * 0.02)}
    assert found[-1]["loss"] == 119.0


def test_a_record_is_of_no_more_steps_than_another_worker_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "THIN", 1)
    written = Journal(tmp_path)
    for number in range(1, 11):
        written.steps(**step(1000 * number, steps=1000))
    assert [event["steps"] for event in read_journal(tmp_path)] == [3000] * 3
    written.flush()
    assert [event["steps"] for event in read_journal(tmp_path)] == [3000] * 3 + [1000]
    written.close()
    assert KEPT >= 2 * journals.TOGETHER


def test_a_reader_keeps_so_many_records_and_the_same_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two attempts, the second of which goes on from a checkpoint in the middle of the first."""
    written = Journal(tmp_path)
    written.write("start", resumed_from=None)
    for number in range(1, 2001):
        trainer, done = number % 2, (number + 1) // 2
        written.write("step", **step(done, trainer=trainer, steps=1, loss=done / 10, account={"steps": 0.5}))
        if number % 202 == 0:
            written.write("checkpoint", step=done, path="somewhere", seconds=1.0)
    written.write("start", resumed_from=505)
    for done in range(506, 1001):
        for trainer in (0, 1):
            written.write("step", **step(done, trainer=trainer, steps=1, loss=done / 10, account={"steps": 0.5}))
    written.write("finished", step=1000)
    written.close()
    all_events, whole = read_journal(tmp_path), Summary(tmp_path)
    monkeypatch.setattr(journals, "APART", 64)
    some_events, thin = read_journal(tmp_path), Summary(tmp_path)
    assert len(all_events) > 2900
    assert len(some_events) < 400
    assert thin.losses == whole.losses
    assert (thin.steps_done, thin.samples, thin.bytes_moved) == (whole.steps_done, whole.samples, whole.bytes_moved)
    assert thin.time == pytest.approx(whole.time)
    assert thin.account == pytest.approx(whole.account)
    assert thin.account["redone"] > 0
    assert [event for event in some_events if event["event"] != "step"] == [
        event for event in all_events if event["event"] != "step"
    ]
