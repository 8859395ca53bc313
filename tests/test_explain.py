"""`paceline explain`: what a run did and why, from its journal."""

from __future__ import annotations

from pathlib import Path

from journals import GRID, write_run

from paceline.observe.journal import Journal
from paceline.observe.summary import explain


def test_explain_a_finished_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    text = explain(tmp_path)
    for line in (
        "  script        train.py --size 'big one'",
        "  threads each  1",
        "  plan    data=2 (from --plan)",
        f"  grid    {GRID}",
        "  micro-batches are merged\n    because the forward drew no random numbers",
        "  waited for  worker 1 0.2 s",
        "  bytes       1 MB a step, 100 MB in all, sent by worker 0",
        "  attempts     2, the last went on from step 50",
        "  checkpoints  1 in 0.2 s, the last checkpoints/step-000000000100",
        "  ended        finished at step 100",
    ):
        assert line in text
    assert text.endswith(f"\n\nNext: paceline export {tmp_path} model.safetensors")


def test_explain_a_failed_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    journal = Journal(tmp_path)
    journal.write("start", workers=3, plan="data=3", plan_origin="default", script="a b.py", argv=["a b.py", "-x"])
    journal.write("stopped", step=0, why="a worker failed")
    journal.write("failed", worker=2, host="ada", cause="ValueError: no", code=1, text="worker 2 failed\n  line 3")
    text = explain(tmp_path)
    assert "  failure   worker 2 on ada: ValueError: no\n  ended     failed at step 0: worker 2" in text
    assert text.endswith(
        f"\n\nworker 2 failed\n  line 3\n\nNext: paceline run --workers 3 --run-dir {tmp_path} 'a b.py' -x"
    )


def test_decisions_say_whose_they_are_where_there_are_several_trainers(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for attempt in range(2):  # the second attempt repeats those of the first
        journal.write("start", script="train.py", attempt=attempt)
        for trainer in (0, 1):
            journal.write("decision", trainer=trainer, what="one by one", why=f"reason {trainer}")
    text = explain(tmp_path)
    assert "  trainer 0: one by one\n    because reason 0\n  trainer 1: one by one\n    because reason 1\n" in text


def test_what_kinds_of_collectives_cost_and_the_small_ones_together(tmp_path: Path) -> None:
    write_run(tmp_path)
    kinds = {"gradients": [200, 5_000_000, 2.0], "a checkpoint": [5, 100, 1e4], "export()": [1, 0, 0.0], "x": [2, 9, 0]}
    Journal(tmp_path).write("collectives", kinds=kinds)
    lines = [line for line in explain(tmp_path).splitlines() if "stood still" in line]
    assert [" ".join(line.split()) for line in lines] == [
        "gradients 200 collectives, 5 MB, worker 0 stood still 2.0 s",
        "a checkpoint 5 collectives, 100 B, worker 0 stood still 2 h 46 min",
        "all others 3 collectives, 9 B, worker 0 stood still 0.0 s",
    ]
