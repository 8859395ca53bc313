"""Replicas that span hosts: `paceline launch` starts them over several hosts together."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from host_teams import HostTeam, undisturbed
from host_teams import host_team as host_team
from host_teams import hosts as hosts
from oracle import apart
from safetensors.torch import load_file

from paceline.base.mesh import Mesh, pick_ranks

pytestmark = pytest.mark.root
PLANS = ["shard=8 zero=3", "pipeline=4 data=2 micro=2", "tensor=2 pipeline=2 data=2 micro=2"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_launch_starts_a_plan_over_four_hosts(
    plan: str, host_team: Callable[..., HostTeam], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No host has enough workers for it; the weights are one worker's."""
    team = host_team(2, 2, 2, 2)
    team.start(plan)
    team.end()
    whole = undisturbed(tmp_path_factory, "micro=2")
    assert apart(load_file(team.folder / "out.safetensors"), load_file(whole / "out.safetensors")) <= 1e-12
    (start,) = team.events("start")
    assert start["workers"] == 8, json.dumps(start)
    assert " needs 8 workers: the run begins on several hosts together\n" in team.text


MIRRORED = ["shard=8 zero=3 micro=2 exact", "pipeline=4 micro=2 exact", "tensor=2 pipeline=2 data=2 micro=2 exact"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", MIRRORED)
def test_loss_of_a_host_loses_nothing(
    plan: str, host_team: Callable[..., HostTeam], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All of its processes are killed. Another agent takes its place, and training goes on from memory: there is no
    checkpoint that all workers can read.
    """
    workers = (1, 1, 1, 1) if plan.startswith("pipeline") else (2, 2, 2, 2)
    calm = undisturbed(tmp_path_factory, plan, sum(workers))
    team = host_team(*workers)
    team.start(plan, "--mirror", "1")
    team.until_step(6)
    team.lose(3 if "data=2" in plan else 1)  # the first replica goes on, or none is left
    team.end()
    assert (team.folder / "out.safetensors").read_bytes() == (calm / "out.safetensors").read_bytes()
    lost = team.events("lost")[0]
    if "data=2" in plan:  # the other replica has gone on
        assert len(team.events("start")) == 1
        return
    _, start = team.events("start")
    assert 0 < start["resumed_from"] <= lost["step"]
    assert start["resumed_in"] == "the copies in the memory of 4 hosts"
    (recovered,) = team.events("recovered")
    assert recovered["workers"] == [*range(sum(workers))]
    assert f"resuming from step {start['resumed_from']} of the copies in the memory of 4 hosts\n" in team.text
    assert f" workers train again {recovered['seconds']:.1f} s after the loss\n" in team.text


COSTS = """
import json
from paceline.parallel.plan_cost import cost, facts_of
from paceline.parallel.tensor_parallel.script_view import call_without_script_view
from paceline.session.run import Run
memory = Run.current().checkpoints._mirror[1]
(folder,) = memory._local.folders()
held = sum(size for name, size in memory._local.sizes(folder).items() if name.endswith(".safetensors"))
facts = call_without_script_view(lambda: facts_of(trainer._job))
team = paceline.join()
predicted = cost(trainer.plan, facts, team.size, mirror=2)
told = [predicted.copies, predicted.sent["copies"], held, team.group.ledger["copies"]]
open(f"costs-{team.rank}.json", "w").write(json.dumps(told))
"""


@pytest.mark.slow
def test_cost_predicts_memory_and_traffic_of_copies(host_team: Callable[..., HostTeam]) -> None:
    team = host_team(1, 1)
    team.more = COSTS
    team.start("shard=2 zero=3", "--mirror", "2", WIDE="8192")
    team.end()
    for rank in range(2):
        copies, sent, held, (count, total, _) = json.loads((team.folder / f"costs-{rank}.json").read_text())
        assert count >= 1
        assert sent == pytest.approx(total / count / 2, rel=0.05)
        # While a copy is written, the last one is still there.
        assert copies == pytest.approx(2 * held, rel=0.05)


def hosts_of(counts: list[int], mesh: Mesh) -> list[list[int]]:
    """The ranks of each host, in the order in which hosts come."""
    free, picked = set(range(mesh.size)), list[list[int]]()
    for count in counts:
        picked.append(pick_ranks(free, count, mesh.group_sizes))
        free -= {*picked[-1]}
    return picked


def test_ranks_that_exchange_most_are_on_one_host() -> None:
    assert hosts_of([2, 2, 2, 2], Mesh(2, pipeline=2, tensor=2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert hosts_of([3, 3, 2], Mesh(2, pipeline=2, tensor=2)) == [[0, 1, 7], [2, 3, 6], [4, 5]]
    assert hosts_of([6, 2], Mesh(2, pipeline=2, tensor=2)) == [[0, 1, 2, 3, 6, 7], [4, 5]]
    assert hosts_of([1, 1, 1, 1], Mesh(pipeline=4)) == [[0], [1], [2], [3]]
    assert hosts_of([3, 9], Mesh(shard=8)) == [[0, 1, 2], [3, 4, 5, 6, 7]]
