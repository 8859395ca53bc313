"""`Trainer.early_stop`: when a training stops whose patience has changed before it was resumed."""

from __future__ import annotations

from paceline.session.early_stop import EarlyStop


def test_a_resumed_run_with_less_patience_stops_at_its_next_report() -> None:
    said: list[str] = []
    first = EarlyStop(said.append)
    first.follow("loss", 5, "min", 0.0)
    for step, value in enumerate([0.5, 1.0, 1.0, 1.0, 1.0], 1):
        first.take(value, step)
    assert first.saved() == ["loss", "min", 0.5, 4]
    second = EarlyStop(said.append)
    second.follow("loss", 3, "min", 0.0)
    second.restore(first.saved())
    assert (second.is_due, said) == (False, [])
    second.take(1.0, 6)
    assert second.is_due
    assert said == ["stopping early after step 6: 5 reports of loss brought no gain; the best is 0.5"]


def test_a_gain_after_the_resume_starts_the_count_again() -> None:
    said: list[str] = []
    stopping = EarlyStop(said.append)
    stopping.restore(["loss", "min", 0.5, 4])  # the checkpoint is read before the script calls early_stop()
    stopping.follow("loss", 3, "min", 0.0)
    for step, value in enumerate([0.4, 0.6, 0.6], 6):
        stopping.take(value, step)
    assert not stopping.is_due
    stopping.take(0.6, 9)
    assert said == ["stopping early after step 9: 3 reports of loss brought no gain; the best is 0.4"]
