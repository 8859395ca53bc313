"""`paceline plan`, and `--plan auto`: the plans that are tried, what is printed, and what is left of trials."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fake_ssh import install_ssh
from launching import paceline
from networks import hosts as hosts
from safetensors.torch import load_file
from warm import environment

from paceline.base.journal import read_journal
from paceline.launch.options import LaunchOptions
from paceline.launch.plan import probe
from paceline.plan import Plan
from paceline.planner.descriptions import ProbeRequest

TRAIN = """
import os, sys
from basics import *

model = lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
trainer = make(model=model, plan=sys.argv[1] if sys.argv[1:] else None)
for report in trainer.steps(data, count=int(os.environ.get("COUNT", 12))):
    if report.step == int(os.environ.get("FAILS", 0)) and os.environ["PACELINE_RUN_DIR"].endswith("/a"):  # no trial
        trainer.save()
        sys.exit(3)
    if report.step == 12:
        trainer.stop()
trainer.export("out.safetensors")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(*words: str, folder: Path, code: int = 0, **variables: str):
    return paceline(*words, cwd=folder, code=code, XDG_CACHE_HOME=str(folder / "cache"), **variables)


def test_plans_are_predicted_and_the_best_are_tried(folder):
    """The answer's first line is a command that trains; nothing of the trials is left."""
    words = ("plan", "train.py", "--workers", "2", "--try", "1", "--steps", "2")
    done = run(*words, "--explain", "shard=2 zero=1", "--svg", "plans.svg", folder=folder)
    command, empty, head, *rows = done.stdout.splitlines()
    assert empty == ""
    assert re.split("  +", head) == ["plan", "step", "tried", "memory", "sends", "what limits it"]
    assert any(re.match(r"data=2 .* ms .* ms .* of .*B .*computing \d+%", row) for row in rows)
    assert re.search(r"^shard=2 zero=1: number \d+ of \d+, predicted .* for a step", done.stdout, re.M)
    assert re.search(r"^  gathers +\d", done.stdout, re.M)
    assert "<title>computing " in (folder / "plans.svg").read_text()
    assert not (folder / "runs").exists()
    assert not (folder / "out.safetensors").exists()
    words = shlex.split(command, comments=True)
    assert (words[0], words[-1]) == ("paceline", "train.py")
    run(*words[1:], folder=folder)
    assert (folder / "out.safetensors").exists()


@pytest.mark.slow
def test_all_plans_as_data(folder):
    """JSON names each plan once, and those that a trial showed to be impossible with the reason."""
    words = ("plan", "train.py", "--workers", "2", "--try", "20", "--steps", "1", "--json", "--keep", "micro=4")
    answer = json.loads(run(*words, folder=folder).stdout)
    names = [one["plan"] for one in answer["plans"] if one["workers"] == 2]
    assert len(names) == len({*names})
    assert {"micro=4", "shard=2 zero=1 micro=4", "shard=2 zero=3 micro=4"} <= {*names}
    assert all("micro=4" in name.split() for name in names)
    assert all(one["tried"] > 0 for one in answer["plans"])
    history = (folder / "cache" / "paceline" / "predictions.jsonl").read_text().splitlines()
    assert len(history) == len(names) - 1  # but for the plan from whose steps the others are predicted
    assert answer["refused"]["data=1 context=2 micro=4"] == "rows have no sequence that context= could split"
    assert answer["best"] == min((one for one in answer["plans"] if one["fits"]), key=lambda one: one["tried"])


@pytest.mark.slow
def test_plans_are_found_for_fewer_workers_than_the_plan_of_the_script_needs(folder):
    words = ("plan", "train.py", "--workers", "2", "--try", "1", "--steps", "2", "--explain", "codec=sign")
    done = run(*words, "--", "shard=4 zero=1", folder=folder)
    assert re.match(r"paceline run --workers [12] --plan \S+ train.py", done.stdout)
    what = "'codec=sign' is not among the plans to choose from: see --keep and --allow, or leave words out"
    assert done.stdout.splitlines()[-1] == what


@pytest.mark.slow
def test_a_model_for_which_no_plan_can_be_used_is_explained(folder):
    done = run("plan", "train.py", "--workers", "2", "--steps", "2", "--keep", "context=2", folder=folder)
    what = "no plan can be used for this model, for the reasons below: use other words or another number of workers"
    assert done.stdout.splitlines()[0] == what
    assert "rows have no sequence that context= could split: 'data=1 context=2'" in done.stdout


@pytest.mark.slow
def test_days_of_a_script_are_simulated_without_a_description(folder):
    done = run("simulate", "train.py", "--on", "cpu", "--workers", "4", "--seeds", "1", folder=folder)
    assert "4 workers; a step in " in done.stdout
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_descriptions_can_be_printed(folder):
    done = run("plan", "train.py", "--workers", "2", "--try", "0", "--describe", folder=folder)
    described = json.loads(done.stdout)
    assert sum(block["parameters"] for block in described["model"]["blocks"]) == 10 * 16 + 16 + 16 * 4 + 4
    assert sum(block["matmul"] for block in described["model"]["blocks"]) == 2 * (10 * 16 + 16 * 4)
    assert sum(block["operations"] for block in described["model"]["blocks"]) == 3
    assert described["model"]["width"] > 0
    assert described["machine"]["measured"]
    assert described["machine"]["links"][0]["bandwidth"] > 0
    assert described["model"]["update"] > 0
    assert described["model"]["divided"]["2 1"] > 1  # layers of 16 columns gain nothing


@pytest.mark.slow
def test_a_plan_beyond_the_memory_does_not_fit(folder):
    done = run("plan", "train.py", "--workers", "2", "--try", "0", "--memory", "20MB", folder=folder)
    assert done.stdout.startswith("no plan fits: use more workers, on other hosts, or a smaller model\n")
    assert re.search(r"data=2 .* does not fit: \d+ MB too much", done.stdout)


LARGE = """
import os, re, sys, threading, time
from basics import *

def watch(most=0):
    while True:
        now = int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
        if now > most:
            most = now
            open(sys.argv[1] + ".new", "w").write(str(most))
            os.replace(sys.argv[1] + ".new", sys.argv[1])
        time.sleep(0.002)

if sys.argv[1:]:
    threading.Thread(target=watch, daemon=True).start()
layers = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(12)])
trainer = paceline.Trainer(
    model=layers,
    loss=lambda output, batch: output.square().mean(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    global_batch=24,
)
for report in trainer.steps(TensorDataset(torch.ones(64, 1024, dtype=torch.float32)), count=40):
    pass
"""


@pytest.mark.slow
def test_plans_that_are_predicted_not_to_fit_are_not_tried(folder):
    """Also not the script's own plan: the first trial is that of a plan that fits."""
    (folder / "large.py").write_text(LARGE)
    words = ("plan", "large.py", "--workers", "2", "--json")
    everything = json.loads(run(*words, "--try", "0", folder=folder).stdout)["plans"]
    needs = {one["plan"]: one["memory"] for one in everything}
    limit = round(1.01 * needs["shard=2 zero=3"] / 0.85)  # the first trial must leave so much free
    done = run(*words, "--try", "2", "--steps", "2", "--memory", str(limit), folder=folder)
    tried = re.findall(r"steps with (.*) on \d workers? ", done.stderr)
    assert tried
    assert "the script's plan" not in tried
    answer = json.loads(done.stdout)["plans"]
    fitting = {one["plan"] for one in answer if one["fits"]}
    assert "data=2" not in fitting
    assert {one.removeprefix("the plan ").strip("'") for one in tried} <= fitting


@pytest.mark.slow
def test_a_model_is_probed_without_memory_for_all_of_it(folder):
    """Its parameters take 50 MB. If a worker may take 100, one block after another is measured, and the same found."""
    (folder / "large.py").write_text(LARGE)
    models, peaks = [], []
    for number, memory in enumerate((0.0, 1e8)):
        peak = folder / f"peak-{number}"
        options = LaunchOptions(str(folder / "large.py"), [str(peak)], environment=environment(), quiet=True)
        request = ProbeRequest(2, memory=memory, measures_machine=False)
        found = probe(folder / str(number), options, request)
        models.append([(block.parameters, block.saved, block.passes) for block in found.model.blocks])
        assert all(seconds > 0 for block in found.model.blocks for seconds in block.seconds.values())
        peaks.append(int(peak.read_text()))
    assert models[0] == models[1]
    assert len(models[0]) == 12
    assert peaks[0] - peaks[1] > 30e6


def test_a_trial_writes_no_checkpoints(folder):
    """The copies that they are written from would count as memory of a step."""
    words = ("run", "--workers", "2", "--save-every", "1")
    asked = json.dumps({"trial": [4, 60.0], "out": str(folder / "out")})
    run(*words, "--run-dir", "trial", "train.py", folder=folder, PACELINE_CHECK=asked)
    assert json.loads((folder / "out.json").read_text())["peaks"]
    run(*words, "--run-dir", "run", "train.py", folder=folder)
    saved = {
        name: [e["step"] for e in read_journal(folder / name) if e["event"] == "checkpoint"]
        for name in ("trial", "run")
    }
    assert saved["trial"] == []
    assert saved["run"]


@pytest.mark.slow
def test_plans_for_several_hosts_are_tried_on_these(hosts, tmp_path):
    """The slow link between these is measured. Replicas that span hosts are tried as well, and launched so."""
    (tmp_path / "train.py").write_text(TRAIN)
    net = hosts(3)
    for host in net.hosts[:2]:
        host.cap(50)
    path = f"{install_ssh(tmp_path, dict(zip('ab', net.hosts, strict=False)))}:{os.environ['PATH']}"
    env = environment(PATH=path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    given = ("--env=OMP_NUM_THREADS=1", "--env=CUDA_VISIBLE_DEVICES=-1", f"--env=PYTHONPATH={env['PYTHONPATH']}")
    words = ("plan", "--hosts", "a,b", *given, "--try", "1", "--steps", "2", "--allow", "lossy", "train.py")

    def answer(*more: str) -> str:
        command = net.hosts[2].command(sys.executable, "-m", "paceline", *words[:-1], *more, words[-1])
        with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            output = process.communicate()[0]
        assert process.returncode == 0
        assert not [*Path("/tmp").glob(f"paceline-plan-*-{process.pid}")], "the hosts remove what they have written"
        return output

    machine = json.loads(answer("--describe"))["machine"]
    between = machine["links"][-1]
    assert between["name"] == "between hosts"
    assert 2e6 < between["bandwidth"] < 7e6
    text = answer("--keep", "pipeline=2")
    assert re.search(r"^pipeline=2.*  [\d.]+ m?s +[\d.]+ m?s ", text, re.M), "it was predicted and tried"
    first = text.splitlines()[0]
    command, _, note = first.partition("   # ")
    assert shlex.split(command)[:6] == ["paceline", "launch", "ssh", "--hosts", "a,b", "--plan"]
    assert Plan.parse(shlex.split(command)[6]).first_team(1) == 2
    assert note == "give --checkpoints, too: a folder or URL that all hosts share"


@pytest.mark.slow
def test_auto_trains_as_the_plan_that_it_chose(folder):
    """The weights are those of the plan without trials; a resumed run keeps it; the report says why."""
    words = ("run", "--workers", "2", "--plan", "auto exact", "--run-dir", "a", "train.py")
    first = run(*words, folder=folder, code=3, COUNT="1000000", FAILS="6")
    assert "then run `paceline run --workers 2 --run-dir a --plan 'auto exact' train.py`" in first.stderr
    (decision,) = [e for e in read_journal(folder / "a") if e["event"] == "decision" and "plan" in e]
    assert decision["workers"] == 2
    assert "exact" in decision["plan"]
    assert re.match(r"a step of .* was measured; others took .*; trials took ", decision["why"])
    again = run(*words, folder=folder, COUNT="1000000")
    assert f"auto: the plan stays '{decision['plan']}': the run began with it" in again.stderr
    chosen = load_file(folder / "out.safetensors")
    run("run", "--workers", "2", "--plan", decision["plan"], "train.py", folder=folder)
    direct = load_file(folder / "out.safetensors")
    assert all((chosen[name] == direct[name]).all() for name in direct)
    explained = run("explain", "a", folder=folder).stdout
    assert decision["why"] in explained
    assert re.search(r"predictions  a step of .*, .* measured \([+-]\d+%\); .* of memory, .* measured", explained)


@pytest.mark.slow
def test_a_short_run_keeps_the_plan_of_the_script(folder):
    """No other plan is tried where that takes longer than it could save."""
    done = run("run", "--workers", "2", "--plan", "auto", "--run-dir", "a", "train.py", folder=folder)
    (decision,) = [e for e in read_journal(folder / "a") if e["event"] == "decision" and "plan" in e]
    assert decision["plan"] == "data=2"
    pattern = r"a step of .* was measured; the run takes about .*, too short for trials of other plans to pay"
    assert re.fullmatch(pattern, decision["why"])
    assert "with the plan" not in done.stderr
    assert (folder / "out.safetensors").exists()


@pytest.mark.slow
def test_auto_with_one_worker_needs_no_trial(folder):
    done = run("run", "--workers", "1", "--plan", "auto micro=4", "train.py", folder=folder)
    assert "auto:" not in done.stderr
    assert "plan: data=1 micro=4" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("plan", "train.py", "--allow", "lossy,fast"),
            "paceline: --allow does not know 'fast'; use lossy, local, precision",
        ),
        (
            ("plan", "train.py", "--svg", "nowhere/plans.svg"),
            "paceline: --svg cannot be written to nowhere; give a folder that can be written",
        ),
        (
            ("plan", "train.py", "--json", "--explain", "data=2"),
            "paceline: --explain is text, and --json prints JSON; leave one of them out; --json has all parts",
        ),
        (
            ("plan", "train.py", "--memory", "much"),
            "paceline: 'much' is not a size in bytes; write a number and a unit, for example 500MB or 5GB",
        ),
        (
            ("plan", "train.py", "--hosts", "a,b:2", "--workers", "2"),
            "paceline: --workers 2 is another number than that of --hosts, which is 3; leave --workers out: HOST:N "
            "sets the number of workers of a host",
        ),
    ],
)
def test_wrong_requests(words, message, folder):
    assert run(*words, folder=folder, code=2).stderr.splitlines()[-1] == message


def test_auto_in_a_script_is_refused(folder):
    done = run("run", "--workers", "2", "train.py", "auto", folder=folder, code=2)
    what = "auto chooses a plan before the workers start, and these have started without one"
    assert f"{what}; start the script with `paceline run --plan auto`" in done.stderr


def test_a_script_that_fails_in_its_trial(folder):
    (folder / "train.py").write_text("raise SystemExit(3)")
    done = run("plan", "train.py", "--workers", "2", folder=folder, code=2)
    assert "train.py did not reach its first step: exit code 3; see the output above" in done.stderr


def test_a_script_that_fails_is_to_be_run_again_without_the_folder_of_the_trial(folder):
    (folder / "train.py").write_text("import nowhere_to_be_found")
    done = run("plan", "train.py", "--workers", "2", folder=folder, code=2)
    assert "\nnext: fix the cause; then run `paceline run --workers 2 train.py`\n" in done.stderr
