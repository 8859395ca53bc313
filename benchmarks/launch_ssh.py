"""What `paceline launch ssh` takes longer than to type `paceline run` and its joins by hand, on three hosts.

    python benchmarks/launch_ssh.py [--rounds 7] [--record FILE]

As root, with OpenSSH's server: each host is a network namespace with its own sshd, and a fourth one launches. The same
small script each time, and one worker a host. The clock runs from the launch to the end of the first step, and until
all three train together, by the run's journal. By hand the other hosts join as soon as the first one listens, and
nobody takes time to type. `tunnel`: the same launch with --tunnel.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from turns import record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "scripts"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from networks import PORT, Host, Network, join_over, network
from ssh_hosts import Shore

from paceline.base.journal import read_journal

SCRIPT = """
import time, torch, torch.nn.functional as F, paceline
from torch import nn
from torch.utils.data import TensorDataset
data = TensorDataset(torch.randn(96, 64, generator=torch.Generator().manual_seed(0)), torch.arange(96) % 10)
trainer = paceline.Trainer(nn.Linear(64, 10), lambda o, b: F.cross_entropy(o, b[1]), torch.optim.AdamW, global_batch=24)
for report in trainer.steps(data, count=10_000): time.sleep(0.01)
"""
HOSTS, NAMES = 3, "a,b,c"


def by_hand(net: Network, folder: Path) -> list[subprocess.Popen[Any]]:
    def start(host: Host, run: Path, *options: str) -> subprocess.Popen[bytes]:
        command = host.command(sys.executable, "-m", "paceline", "run", *options, "--run-dir", run, "train.py")
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    processes = join_over(net, folder, 1, start)
    at, token = f"{net.hosts[0].address}:{PORT}", str(folder / "run" / "token")
    return [*processes, start(net.hosts[2], folder / "third", "--join", at, "--token-file", token)]


def times(run: Path, began: float) -> tuple[float, float]:
    """Seconds to the end of the first step, and until a team of all has formed."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        events = read_journal(run) if (run / "journal.jsonl").exists() else []
        steps = [event["at"] for event in events if event["event"] == "step"]
        whole = [event["at"] for event in events if event["event"] == "formed" and len(event["workers"]) == HOSTS]
        if steps and whole:
            return steps[0] - began, whole[0] - began
        time.sleep(0.05)
    raise SystemExit(f"no team of {HOSTS} has formed in {run}")


def take(side: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as name, network(HOSTS + 1, Path(name)) as net:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        shore = None if side == "by hand" else Shore(net, folder, "ssh")
        began = time.time()
        processes: list[subprocess.Popen[Any]]
        if shore is None:
            processes = by_hand(net, folder)
        else:
            more = ["--tunnel"] if side == "tunnel" else []
            processes = [shore.start("--hosts", NAMES, "--run-dir", "run", *more, "train.py")]
        found = times(folder / "run", began)
        processes[0].send_signal(signal.SIGTERM)
        for process in processes:
            process.communicate(timeout=60)
        if shore is not None:
            shore.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    taken: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.rounds + 1):  # the first round warms the disk's cache and does not count
        for side in ("by hand", "launch ssh", "tunnel"):
            taken.setdefault(side, []).append(take(side))
    seconds = {side: [*map(list, rounds[1:])] for side, rounds in taken.items()}
    for side, rounds in seconds.items():
        for what, which in (("first step", 0), ("all together", 1)):
            more = statistics.median(a[which] - b[which] for a, b in zip(rounds, seconds["by hand"], strict=True))
            median = statistics.median(one[which] for one in rounds)
            print(f"{side:12} {what:14} {median:6.2f} s   {more:+.2f} s")
    if options.record:
        record(options.record, hosts=HOSTS, seconds=seconds)


if __name__ == "__main__":
    main()
