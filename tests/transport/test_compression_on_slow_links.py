"""Plans with a codec among hosts: equal weights everywhere, few bytes between them, and nothing lost but what is named.

A loss that is linear in the weights shows the latter: they end where the sum of all gradients brings them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from clusters import Cluster
from clusters import cluster as cluster
from launching import SCRIPTS, paceline
from networks import Network
from networks import hosts as hosts
from once import once
from safetensors.torch import load_file

from paceline.checkpoint.files import checkpoints_of, find_checkpoint
from paceline.observe.summary import Summary, facts
from paceline.team.fault_injection import read_log

pytestmark = pytest.mark.root
STEPS = 45
LOSSY = ["topk:0.05", "sign", "powersgd:2"]
CODE = (SCRIPTS / "linear.py").read_text()


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one worker gives without a codec."""
    command = ("run", "--workers", "1", SCRIPTS / "linear.py", "out", str(STEPS))
    return once(tmp_path_factory, "linear", lambda folder: paceline(*command, cwd=folder))


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with 9000 rows of weights."""
    command = ("run", "--workers", "1", SCRIPTS / "linear.py", "out", str(STEPS))
    return once(tmp_path_factory, "wide", lambda folder: paceline(*command, cwd=folder, WIDE="9000"))


def off(cluster: Cluster, straight: Path) -> float:
    """How far the weights are from there, as a norm, beside how far they have come."""
    mine, other = (load_file(folder / "out.safetensors") for folder in (cluster.folder, straight))
    return float(sum(((mine[name] - value).double() ** 2).sum() for name, value in other.items()) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("codec", LOSSY)
def test_three_hosts_two_and_one(
    cluster: Callable[[int], Cluster], straight: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """What those who leave have not sent is sent by those who stay, and by the last one alone."""
    monkeypatch.setenv("PLAN", f"codec={codec}")
    here = cluster(3)
    here.steps = STEPS
    here.start(0, 2, code=CODE)
    here.until(lambda: here.status().get("step", 0) > 1)
    for host in (1, 2):
        here.start(host, 2, code=CODE)
    here.members(6)
    for host, left in ((2, 4), (1, 2)):
        at = here.status()["step"]
        here.until(lambda at=at: here.status()["step"] > at + 1)
        here.stop(host)
        here.members(left)
    here.end(0, 75, 75)

    assert off(here, straight) <= 1e-5


# Every codec in one run, each with a trainer of its own.
ALL = """
import hashlib, sys, torch, paceline
from torch import nn
from torch.utils.data import TensorDataset
chance = torch.Generator().manual_seed(1)
x, y = torch.randn(96, 40, generator=chance), torch.randint(0, 3, (96,), generator=chance)
for codec in sys.argv[1:]:
    trainer = paceline.Trainer(
        lambda: nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3)),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        global_batch=24, clip_norm=1.0, plan=codec,
    )
    for report in trainer.steps(TensorDataset(x, y), count=5):
        pass
    held = b"".join(param.detach().numpy().tobytes() for param in trainer.model.parameters())
    print(codec, hashlib.sha256(held).hexdigest(), report.loss)
"""
WORDS = [f"codec={one}" for one in ("bf16", "fp16", "int8", *LOSSY)]


@pytest.mark.slow
def test_weights_have_the_same_bytes_on_every_worker(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    (tmp_path / "all.py").write_text(ALL)
    ran = hosts(3).run((2, 2, 2), "all.py", "micro=3", *WORDS, everywhere={"PACELINE_RUN_DIR": str(tmp_path / "run")})
    assert len({worker.stdout for worker in ran}) == 1
    told = [line.split() for line in ran[0].stdout.splitlines()]
    assert len({digest for _, digest, _ in told}) == len(WORDS) + 1, "no codec did anything"
    losses = [float(loss) for *_, loss in told]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=0.1)
    rows = [text for name, text in facts(Summary(tmp_path / "run"))["Costs"] if name == "codec"]
    told = r"worker 0 sent [\d.]+ kB to other hosts instead of [\d.]+ kB \([\d.]+%\)"
    kinds = [*(f"{one} (rounding)" for one in ("bf16", "fp16", "int8")), *(f"{one} (lossy)" for one in LOSSY)]
    assert all(re.fullmatch(f"{re.escape(kind)}: {told}", row) for kind, row in zip(kinds, rows, strict=True)), rows


def test_on_one_host_there_is_nothing_to_do(tmp_path: Path) -> None:
    (tmp_path / "all.py").write_text(ALL)
    ran = paceline("run", "--workers", "2", "all.py", "micro=3", "codec=int8", "codec=topk:0.1", cwd=tmp_path)
    digests = {line.split()[1] for line in ran.stdout.splitlines() if len(line.split()) == 3}
    assert len(digests) == 1
    assert "codec=int8 is not used: all workers whose gradients are summed are on one host" in ran.stderr


# 4 MB of gradients in each step. Prints the bytes that left the host after the first one.
TRAFFIC = """
import sys, torch, paceline
from torch.utils.data import TensorDataset
plan, steps = sys.argv[1:]
trainer = paceline.Trainer(
    lambda: torch.nn.Linear(1000, 1000),
    loss=lambda output, batch: output.square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    global_batch=6, plan=plan,
)
left = []
for report in trainer.steps(TensorDataset(torch.ones(6, 1000)), count=int(steps)):
    device = next(line for line in open("/proc/net/dev") if "eth0:" in line)
    left.append(int(device.split(":")[1].split()[8]))
print(left[-1] - left[0])
"""


def test_int8_sends_a_quarter(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    """By the counters of the interfaces."""
    (tmp_path / "traffic.py").write_text(TRAFFIC)
    here = hosts(3)

    def sent(plan: str) -> list[float]:
        return [float(worker.stdout.split()[-1]) for worker in here.run((2, 2, 2), "traffic.py", plan, "4")[::2]]

    whole, codes = sent("micro=1"), sent("micro=1 codec=int8")
    assert min(whole) > 3 * 4e6
    for few, many in zip(codes, whole, strict=True):
        assert few <= 0.27 * many


# The backward of the first layer begins when the sum of the second one's 4 MB has ended. Prints what had left by then.
LONG = """
import sys, time, torch, paceline
from torch.utils.data import TensorDataset
from paceline.base.flight_recorder import FLIGHT_RECORDER, read_flight
def sent():
    device = next(line for line in open("/proc/net/dev") if "eth0:" in line)
    return int(device.split(":")[1].split()[8])
class Long(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.sent = sent()
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        (last,), until = last_sum(), time.monotonic() + 60
        while last["ended"] is None and time.monotonic() < until:
            time.sleep(0.01)
            (last,) = last_sum()
        print(last["name"], last["bytes"], last["ended"] is not None, sent() - ctx.sent)
        return grad
def last_sum():
    return read_flight(bytes(FLIGHT_RECORDER._ring))[-1:]
trainer = paceline.Trainer(
    lambda: torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1000)),
    loss=lambda output, batch: output.square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    global_batch=3, plan=sys.argv[1], forward=lambda model, batch: model[1](Long.apply(model[0](batch[0]))),
)
for report in trainer.steps(TensorDataset(torch.ones(3, 1000)), count=3):
    pass
"""


@pytest.mark.parametrize(
    ("plan", "bytes_"),
    [
        ("codec=int8", 1e6),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [("", 4e6), ("codec=powersgd:2", 3e4)]),
    ],
)
def test_sums_go_on_through_a_long_backward(
    hosts: Callable[[int], Network], tmp_path: Path, plan: str, bytes_: float
) -> None:
    """On every worker, while its own thread is in the backward. The last bytes may still be on their way out."""
    (tmp_path / "long.py").write_text(LONG)
    for worker in hosts(2).run((2, 1), "long.py", f"micro=1 {plan}"):
        told = re.findall(r"^(step \d) (\d+) (True|False) (\d+)$", worker.stdout, re.M)
        assert [(name, size, ended) for name, size, ended, _ in told] == [
            (f"step {step}", "4004000", "True") for step in (1, 2, 3)
        ]
        assert min(float(sent) for *_, sent in told) >= bytes_ / 2


# Prints how many sums between hosts were under way at a time, at most.
BESIDE = """
import torch, paceline
from paceline.comm.hierarchical import Gloo
from torch.utils.data import TensorDataset
now, most, all_reduce = 0, 0, Gloo.all_reduce
def counted(self, *arguments):
    global now, most
    now += 1
    most = max(most, now)
    yield from all_reduce(self, *arguments)
    now -= 1
Gloo.all_reduce = counted
trainer = paceline.Trainer(
    lambda: torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1000)),
    loss=lambda output, batch: output.square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    global_batch=6, plan="micro=1",
)
for report in trainer.steps(TensorDataset(torch.ones(6, 1000)), count=2):
    pass
print("beside", most)
"""


@pytest.mark.parametrize(("counts", "most"), [((1, 1), 2), ((2, 1), 1)])
def test_sums_of_lone_workers_share_the_link(
    hosts: Callable[[int], Network], tmp_path: Path, counts: tuple[int, int], most: int
) -> None:
    """What is in shared memory goes in order."""
    (tmp_path / "beside.py").write_text(BESIDE)
    here = hosts(2)
    for host in here.hosts:
        host.cap(100)
    said = [worker.stdout.splitlines()[-1] for worker in here.run(counts, "beside.py")]
    assert said[:: counts[0]] == [f"beside {most}"] * 2


def test_links_are_measured_and_followed(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    """No faster than they are: the last host's lets 20 Mbit/s out, and for a moment more."""
    (tmp_path / "traffic.py").write_text(TRAFFIC)
    here = hosts(3)
    here.hosts[2].cap(20)
    ran = here.run((2, 1, 1), "traffic.py", "micro=1", "3", everywhere={"PACELINE_RUN_DIR": str(tmp_path / "run")})
    number, over = r"[\d.]+ Mbit/s", r"over eth0 \(10\.77\.0\.1\)"
    told = rf"{number}, [\d.]+ ms between workers? [-\d]+ and worker 3, the slowest of 3 pairs, 3 hosts, {over}"
    assert len(re.findall(f"^the link between hosts: {told}$", ran[0].stderr, re.M)) == 1, ran[0].stderr
    summary = Summary(tmp_path / "run")
    (row,) = (text for name, text in facts(summary)["Costs"] if name == "links")
    assert re.fullmatch(f"{told}; {number} in the last reductions", row), row
    rates = {(tuple(one), tuple(other)): rate for one, other, rate, _ in summary.links["pairs"]}
    near, *far = (rates[pair] for pair in (((0, 1), (2,)), ((0, 1), (3,)), ((2,), (3,))))
    assert max(far) <= 1.3 * 20e6 / 8 < near
    assert summary.links["rate"] <= 1.3 * 20e6 / 8
    figure = r"[\d.e-]+"
    advice = (
        rf"gradient sums send {figure} MB to other hosts in each step, which takes {figure} s at {figure} Mbit/s, "
        rf"while computing takes {figure} s; so a step takes {figure} s or more; doubling global_batch= would halve "
        rf"this time per row, codec=int8 would take {figure} s and codec=powersgd:4 {figure} s; local=3 every=16 would "
        "send once in 16 steps; each of these changes the mathematics"
    )
    (said,) = (line for line in ran[0].stderr.splitlines() if line.startswith("gradient sums send "))
    assert re.fullmatch(advice, said), said


@pytest.mark.slow
@pytest.mark.parametrize("codec", LOSSY)
def test_a_run_that_is_resumed(hosts: Callable[[int], Network], tmp_path: Path, straight: Path, codec: str) -> None:
    """On as many hosts each goes on with what it had not sent; on one it goes into the next gradient."""
    here, script = hosts(3), (SCRIPTS / "linear.py", "out", str(STEPS))
    variables = {"PLAN": f"codec={codec}", "PACELINE_RUN_DIR": str(tmp_path / "run")}

    def go_on(counts: tuple[int, ...], to: int) -> str:
        more = {"PACELINE_MAX_STEPS": str(to), "PACELINE_SHARES": ",".join("1" * sum(counts))}
        return here.run((*counts, 0, 0)[:3], *script, everywhere=variables | more)[0].stderr

    def state() -> dict[str, torch.Tensor]:
        found = find_checkpoint(checkpoints_of(tmp_path / "run"), print)
        assert found is not None
        assert found.manifest["tree"]["trainers"][0]["own"]["rule"] == "add"
        return found.tensors()

    go_on((1, 2, 1), 20)
    undisturbed = state()
    shutil.rmtree(tmp_path / "run")
    assert "resuming" not in go_on((1, 2, 1), 10)
    said = go_on((1, 2, 1), 20)
    assert "resuming from step 10 " in said
    assert "are added to the next gradient" not in said
    if codec[:8] != "powersgd":  # whose basis begins anew
        now = state()
        for name in (name for name in now if ".own." in name):  # but for what rounding makes of a sign
            assert (now[name] - undisturbed[name]).norm() <= 1e-2 * undisturbed[name].norm(), name
        assert [len(value) for name, value in undisturbed.items() if ".own." in name] == [3, 3]
    said = go_on((2,), STEPS + 1)
    assert (
        "changed mathematics: gradient sums that codecs had not sent when the checkpoint was taken, on 3 hosts, are "
        "added to the next gradient" in said
    )
    assert off(Cluster(here, tmp_path), straight) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["powersgd:2", *LOSSY[:2]])
def test_workers_are_lost_at_any_moment_of_a_step(
    cluster: Callable[[int], Cluster], straight: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """They have nothing of their own, and what others have left out stays theirs: once, if the step is redone, and also
    where it is taken over.
    """
    monkeypatch.setenv("PLAN", f"codec={codec}")
    here, moments = cluster(2), ("backward", "summed", "reduced", "applied")
    here.steps = STEPS
    here.start(0, 2, code=CODE)
    here.until(lambda: here.status().get("step", 0) > 1)
    faults = [f"kill:{worker}@{4 * place + 4}.{moment}" for place, moment in enumerate(moments) for worker in (3,)]
    here.start(1, 2, code=CODE, faults=",".join(faults))
    here.members(4)
    here.until(lambda: len(read_log(here.agents[1].folder)) == len(faults))
    here.members(4)
    here.stop(1)
    here.members(2)
    here.end(0, 75)
    assert "was lost with unsent gradient sums" not in here.agents[0].text
    assert off(here, straight) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["backward", "summed", "reduced", "applied"])
@pytest.mark.parametrize("codec", LOSSY)
def test_a_lost_leader_takes_along_what_it_names_and_nothing_else(
    cluster: Callable[[int], Cluster], straight: Path, monkeypatch: pytest.MonkeyPatch, codec: str, moment: str
) -> None:
    """Also where others go forward with the step that it had all but made, from the reduction on."""
    monkeypatch.setenv("PLAN", f"codec={codec}")
    monkeypatch.setenv("ALL", "4")  # so that all are there before the fault
    here = cluster(2)
    here.steps = STEPS
    here.start(0, 2, code=CODE)
    here.until(lambda: here.status().get("step", 0) > 1)
    here.start(1, 2, code=CODE, faults=f"kill:2@22.{moment}")
    here.members(4)
    assert here.status()["step"] < 21
    here.until(lambda: len(read_log(here.agents[1].folder)) == 1)
    here.members(4)
    here.stop(1)
    here.members(2)
    here.end(0, 75)
    lost = "worker 2 was lost with unsent gradient sums of its codec, of norm"
    (norm,) = re.findall(f"^{lost} (.*)$", here.agents[0].text, re.M)
    assert off(here, straight) == pytest.approx(float(norm) / 20, rel=1e-3, abs=1e-5)  # a mean over 20 rows


@pytest.mark.slow
def test_what_a_lost_host_had_not_sent_is_named(
    cluster: Callable[[int], Cluster], straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAN", "codec=topk:0.05")
    here = cluster(2)
    here.steps = STEPS
    here.start(0, 2, code=CODE)
    here.until(lambda: here.status().get("step", 0) > 1)
    here.start(1, 2, code=CODE)
    here.members(4)
    at = here.status()["step"]
    here.until(lambda: here.status()["step"] > at + 2)
    here.agents[1].kill()
    here.members(2)
    here.end(0, -9)
    named = re.search(
        r"^worker [23] was lost with unsent gradient sums of its codec, of norm (.*)$",
        here.agents[0].text,
        re.M,
    )
    assert named is not None
    assert off(here, straight) == pytest.approx(float(named[1]) / 20, rel=1e-3)  # a mean over 20 rows


@pytest.mark.parametrize("codec", ["auto", pytest.param("auto:lossy", marks=pytest.mark.slow)])
def test_the_cheapest_is_chosen_for_each_bucket(hosts: Callable[[int], Network], tmp_path: Path, codec: str) -> None:
    """At 10 Mbit/s 4 MB need more than three seconds; the same on all, in log, report and checkpoint."""
    (tmp_path / "traffic.py").write_text(TRAFFIC)
    here, where = hosts(2), {"PACELINE_RUN_DIR": str(tmp_path / "run")}
    for host in here.hosts:
        host.cap(10)
    ran = here.run((2, 1), "traffic.py", f"micro=1 codec={codec}", "2", everywhere=where)
    tried = "none, bf16, fp16, int8" + (", powersgd:4, topk:0.01, sign" if codec == "auto:lossy" else "")
    assert f"codec={codec} ({tried}) between 2 hosts: sums within a host are exact" in ran[0].stderr
    shown = "powersgd:4" if codec == "auto" else "powersgd:4 N, topk:0.01 N, sign"
    line = rf"bucket 0, 4 MB, link N Mbit/s: none N s, bf16 N, fp16 N, int8 N, \({shown} N, lossy\)"
    said = re.findall(rf"^({line} -> (.*))$".replace("N", r"[\d.]+"), ran[0].stderr, re.M)
    assert len(said) == 1, ran[0].stderr
    ((text, word),) = said
    assert word != "none"
    assert word in tried
    summary = Summary(tmp_path / "run")
    assert {"what": text, "why": f"it takes the least time of {tried}"}.items() <= next(
        event for event in summary.decisions if event["what"].startswith("bucket")
    ).items()
    (row,) = (text for name, text in facts(summary)["Costs"] if name == "codec")
    assert row.startswith(f"{codec} ({word} in 1 of 1 buckets): ")
    found = find_checkpoint(checkpoints_of(tmp_path / "run"), print)
    assert found is not None
    assert found.manifest["tree"]["trainers"][0]["chosen"]["words"] == {"bias": word}


@pytest.mark.slow
def test_a_choice_goes_on_when_hosts_come_and_leave(
    cluster: Callable[[int], Cluster], wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two come, one is lost, and one leaves: equal weights, and nothing lost but what is named."""
    monkeypatch.setenv("PLAN", "codec=auto:lossy")
    monkeypatch.setenv("WIDE", "9000")
    here = cluster(3)
    here.steps = STEPS
    for host in here.network.hosts:
        host.cap(40)
    here.start(0, 2, code=CODE)
    here.until(lambda: here.status().get("step", 0) > 1)
    for host in (1, 2):
        here.start(host, 1, code=CODE)
        here.members(host + 2)
    at = here.status()["step"]
    here.until(lambda: here.status()["step"] > at + 1)
    here.agents[2].kill()
    here.members(3)
    at = here.status()["step"]
    here.until(lambda: here.status()["step"] > at + 1)
    here.stop(1)
    here.members(2)
    here.end(0, 75, -9)
    chosen = re.findall(r"^bucket 0, 1.12 MB, link .* -> (.*)$", here.agents[0].text, re.M)
    assert chosen, here.agents[0].text
    named = re.search(r"^worker 3 was lost with .* of norm (.*)$", here.agents[0].text, re.M)
    assert off(here, wide) <= (float(named[1]) / 20 if named else 0.0) * 1.001 + 1e-4


STEEP = """
import torch, paceline
from torch.utils.data import TensorDataset


def loss(output, batch):
    weight = trainer.model.weight.sum()
    more = torch.sqrt(weight - weight.detach()) if batch[0][0, 0] == 3 else 0.0  # whose derivative is infinite
    return output.mean() + more


trainer = paceline.Trainer(
    lambda: torch.nn.Linear(4, 4), loss, lambda params: torch.optim.SGD(params, lr=0.1), global_batch=6,
    plan="micro=1 codec=int8",
)
for report in trainer.steps(TensorDataset(torch.arange(6.0)[:, None].expand(6, 4)), count=1, order=lambda p, *_: p):
    pass
"""


def test_the_worker_and_the_parameter_that_are_not_finite_are_named(
    hosts: Callable[[int], Network], tmp_path: Path
) -> None:
    (tmp_path / "steep.py").write_text(STEEP)
    here = hosts(2)
    here.start((1, 1), "steep.py", everywhere={"PACELINE_SHARES": "1,1"})
    for worker in here.end():
        assert worker.code == 1
        said = re.search(r"NonFiniteLossError: (.*)", worker.stderr)
        assert said is not None, worker.stderr
        what = "the gradient of step 1 is not finite, on worker 1: weight, though its loss is ("
        assert said[1].startswith(what)
        made = (
            "): that of 'weight' is inf, in micro-batch 3 (rows 3-3 of epoch 0) on worker 1, produced in the backward"
            " of the "
        )
        assert said[1].partition(made)[2] == (
            "loss function (SqrtBackward0); the step was not applied; "
            "check for a square root, division or logarithm at 0"
        )
