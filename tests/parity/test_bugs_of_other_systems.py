"""Silent errors that users of other systems have reported: the same training gives the weights of one process here.

The reports are in tests/scripts/reported_bugs.py, and on the page docs/bugs-of-other-systems.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mixtures import check_figures, result_once, train_cases
from oracle import Result, apart, train
from paths import DOCS
from reported_bugs import REPORTS

NEAREST = {report.plan for report in REPORTS.values()}
# Plans with the number of workers, and shares of the units where these are unequal.
PLANS = {
    "data=3": (3, "2,0,1"),
    "shard=2 zero=1": (2, ""),
    "shard=2 zero=2 offload=cpu": (2, ""),
    "shard=2 zero=3 recompute=blocks": (2, ""),
    "tensor=2": (2, ""),
    "pipeline=2": (2, ""),
    "context=2": (2, ""),
    "data=2 tensor=2": (4, "3,3,1,1"),
    "shard=2 tensor=2 zero=3": (4, ""),
    "pipeline=2 schedule=zbv": (2, ""),
    "data=2 pipeline=2 virtual=2": (4, "3,3,1,1"),
    "shard=2 pipeline=2 zero=3": (4, ""),
    "pipeline=2 context=2": (4, ""),
    "shard=2 pipeline=2 tensor=2 zero=3": (8, ""),
}


def expected(name: str, factory: pytest.TempPathFactory) -> Result:
    """What plain PyTorch makes of the training, which is not what it makes of the reported mistake."""
    report = REPORTS[name]

    def make() -> Result:
        right = train(report.case)
        assert apart(dict(train(report.mistake).weights), dict(right.weights)) > 1e-5
        return right

    return result_once(factory, f"report: {name}", make)


def check(folder: Path, plan: str, names: list[str], factory: pytest.TempPathFactory) -> None:
    workers, shares = PLANS[plan]
    train_cases(folder, plan, workers, names, shares)
    check_figures(folder, {name: expected(name, factory) for name in names})


@pytest.mark.parametrize("plan", sorted(NEAREST))
def test_reported_bug_does_not_happen_under_the_plan_of_the_report(
    plan: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKS", "2")
    check(tmp_path, plan, [name for name, report in REPORTS.items() if report.plan == plan], tmp_path_factory)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", PLANS)
def test_other_reported_bugs_do_not_happen_either(
    plan: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    others = {name: report for name, report in REPORTS.items() if report.plan != plan}
    names = [name for name, report in others.items() if not re.search(report.refused, plan)]
    check(tmp_path, plan, names, tmp_path_factory)


def test_page_has_each_report() -> None:
    text = " ".join((DOCS / "bugs-of-other-systems.md").read_text().split())
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # without the addresses of links
    for report in REPORTS.values():
        assert all(where in page for where in report.where), report.where
        assert report.what in page, report.what
    assert f"{len(REPORTS)} kinds" in page
    assert f"under {len(PLANS)} plans" in page
