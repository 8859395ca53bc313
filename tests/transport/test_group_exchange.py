"""`Group.exchange` sends messages of any lengths between real workers, and names who is in another collective."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import paceline

UNEQUAL = """
import torch
import paceline

team = paceline.join()
group, rank, size = team.group, team.rank, team.size


def message(source, target, dtype):
    length = (3 * source + 5 * target) % 7 * 1000 * (source + 1)  # totals differ, and some messages are empty
    return torch.arange(length).to(dtype) + 10 * source + target


totals = {sum(len(message(source, target, torch.uint8)) for target in range(size)) for source in range(size)}
assert len(totals) == size, totals
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8):
    received = [torch.empty_like(message(source, rank, dtype)) for source in range(size)]
    group.declare("messages", check=False)
    group.exchange([message(rank, target, dtype) for target in range(size)], received)
    for source, tensor in enumerate(received):
        assert torch.equal(tensor, message(source, rank, dtype)), (dtype, source)
total = torch.ones(1)
group.declare("a sum", check=False)
assert group.sum(total).item() == size
print("equal")
"""

DIFFERENT = """
import torch
import paceline

team = paceline.join()
group, ones = team.group, torch.ones(1000)
if team.rank == 1:
    group.declare("the sum of worker 1", check=False)
    group.sum(ones)
else:
    group.declare("messages of tokens", check=False)
    group.exchange([ones[: 7 * team.rank]] * team.size, [ones.clone()[: 7 * rank] for rank in range(team.size)])
"""


@pytest.mark.parametrize("workers", [3, 5, 1])
def test_messages_of_unequal_total_lengths_arrive(workers: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNEQUAL)
    printed = paceline("run", "--workers", str(workers), "train.py", cwd=tmp_path).stdout
    assert printed.split() == ["equal"]  # of the main worker; the others would fail


def test_worker_in_another_collective_is_named_by_all(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DIFFERENT)
    words = ("run", "--workers", "3", "--max-restarts", "0", "--run-dir", "out", "train.py")
    printed = paceline(*words, cwd=tmp_path, code=None)
    assert printed.returncode != 0
    logs = ["".join(path.read_text() for path in (tmp_path / "out").rglob(f"*{rank}*.log")) for rank in range(3)]
    assert all("messages of tokens" in text and "the sum of worker 1" in text for text in logs), (logs, printed.stderr)
