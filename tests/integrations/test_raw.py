"""`paceline run --raw`: unchanged scripts of torch.distributed and of frameworks over it, with gloo as oracle."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from launching import SCRIPTS, free_port, paceline
from warm import Process, environment

from paceline.cli.main import _parser
from paceline.comm.raw_groups import choose_backend
from paceline.errors import UsageError
from paceline.launch.foreign_scripts import refuse_foreign
from paceline.launch.options import LaunchOptions
from paceline.launch.raw import REFUSED, USED, refuse_options, worker_variables

DDP = SCRIPTS / "raw_ddp.py"
HEAD = re.compile(r"^worker \d+ failed \(host", re.MULTILINE)  # the first line of a failure block


def raw(folder: Path, *words: str | Path, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """`paceline run --raw` with two workers in a folder."""
    return paceline("run", "--raw", "--workers", "2", "--run-dir", "out", *words, cwd=folder, code=code, **env)


def by_hand(folder: Path, script: Path, *words: str) -> str:
    """The output of worker 0 of two that are started with the variables of torchrun, without Paceline."""
    options, store = LaunchOptions(script=str(script), workers=2), ("127.0.0.1", free_port())
    started = []
    for rank in range(2):
        variables = {**worker_variables(options, "by-hand", rank, store), "PACELINE_RAW": "0"}
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks this machine's own name up
        command, streams = [sys.executable, script, *words], {"stdout": subprocess.PIPE}
        with (folder / f"worker{rank}.stderr").open("w") as stderr:
            started.append(Process(command, environment(**variables), cwd=folder, **streams, stderr=stderr))
    printed = []
    for process in started:
        try:
            printed.append(process.communicate(timeout=60)[0])
        except subprocess.TimeoutExpired:
            for other in started:
                other.send_signal(signal.SIGABRT)  # prints the stack of each thread
            printed.append(process.communicate()[0])
    stderr = [(folder / f"worker{rank}.stderr").read_text() for rank in range(2)]
    assert [process.returncode for process in started] == [0, 0], "\n".join(stderr)
    return printed[0]


def losses(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("step ")]


def equal_states(one: Path, other: Path) -> bool:
    first, second = (torch.load(folder / "state.pt")["model"] for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_ddp_has_the_bits_of_gloo(tmp_path: Path) -> None:
    for name in ("unnamed", "named", "gloo"):
        (tmp_path / name).mkdir()
    unnamed = raw(tmp_path, DDP, "unnamed").stdout
    named = raw(tmp_path, DDP, "named", "backend=gloo").stdout
    gloo = by_hand(tmp_path, DDP, "gloo", "backend=gloo")
    assert len(losses(gloo)) == 8
    assert "backend gloo, restarts 0" in gloo
    assert "backend paceline, restarts 0" in unnamed
    assert "backend paceline, restarts 0" in named
    assert losses(unnamed) == losses(named) == losses(gloo)
    assert equal_states(tmp_path / "gloo", tmp_path / "unnamed")
    assert equal_states(tmp_path / "gloo", tmp_path / "named")


def test_a_kill_ends_in_one_block_and_restarts_on_request(tmp_path: Path) -> None:
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    killed = raw(tmp_path, DDP, "killed", "kill=4", code=137)
    assert len(HEAD.findall(killed.stderr)) == 1
    assert "\nworker 1 failed (host" in killed.stderr
    assert "\n  killed by SIGKILL" in killed.stderr
    assert f"then run `paceline run --raw --workers 2 --run-dir out {DDP} killed kill=4`: it continues" in killed.stderr
    (tmp_path / "killed/state.pt").unlink()
    again = raw(tmp_path, "--max-restarts", "1", DDP, "killed", "kill=4")
    assert len(HEAD.findall(again.stderr)) == 1
    assert "restarting from the script's own checkpoints, if it loads any (1 of 1)" in again.stderr
    assert "backend paceline, restarts 1" in again.stdout
    assert losses(again.stdout) == losses(raw(tmp_path, DDP, "whole").stdout)
    assert equal_states(tmp_path / "killed", tmp_path / "whole")
    assert "finished" in paceline("doctor", "out", cwd=tmp_path).stdout


def test_an_exception_is_the_cause_and_its_peers_are_not(tmp_path: Path) -> None:
    failed = raw(tmp_path, DDP, ".", "raise=3", code=1).stderr
    assert len(HEAD.findall(failed)) == 1
    assert "\nworker 1 failed (host" in failed
    assert "\n  ArithmeticError: worker 1 cannot go on\n  at " in failed
    assert "also failed" not in failed
    assert "raw_ddp.py" in failed.partition("\n  at ")[2].partition("\n")[0]


def test_stacks_hang_report_and_stop(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        "import time\nimport torch.distributed as dist\ndist.init_process_group()\n"
        "while dist.get_rank() == 1:\n    time.sleep(0.1)\nprint('up', flush=True)\ndist.barrier()\n"
    )
    command = [sys.executable, "-m", "paceline", "run", "--raw", "--workers", "2", "--run-dir", "out", "stuck.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = Process(command, environment(PACELINE_STANDSTILL="1"), cwd=tmp_path, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    end = time.monotonic() + 60
    while '"hang"' not in (log := (tmp_path / "out/journal.jsonl").read_text()):
        assert time.monotonic() < end, log
        time.sleep(0.1)
    table = paceline("stacks", "out", cwd=tmp_path).stdout
    assert re.search(r"worker 0 +waiting in barrier .* at stuck.py:7", table), table
    assert re.search(r"worker 1 +in user code at stuck.py:5", table), table
    assert "out stops\n" in paceline("stop", "out", cwd=tmp_path).stderr
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 75
    assert not HEAD.search(stderr)
    assert "worker 1 has made no progress for 2 s: waiting at stuck.py:5" in stderr
    assert "stopped\ncheckpoints are those of the script itself\nstart again with: paceline run --raw" in stderr


def test_a_signal_reaches_the_script(tmp_path: Path) -> None:
    (tmp_path / "saving.py").write_text(
        "import signal, sys, time\nimport torch.distributed as dist\ndist.init_process_group()\n"
        "def save(*_):\n    open(f'saved-{dist.get_rank()}', 'w').close()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\ndist.barrier()\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "paceline", "run", "--raw", "--workers", "2", "--run-dir", "out", "saving.py"]
    process = Process(command, environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert "stopped\n" in process.communicate(timeout=60)[1]
    assert process.returncode == 75
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


def test_a_trainer_is_refused_under_raw(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import paceline\npaceline.join()\n")
    failed = raw(tmp_path, "train.py", code=2).stderr
    assert "the run was started with --raw, but its script uses Paceline's own workers; leave out --raw" in failed


def options_of_run() -> list[argparse.Action]:
    commands = next(a for a in _parser("run")._actions if isinstance(a, argparse._SubParsersAction))
    actions: Sequence[argparse.Action] = commands.choices["run"]._actions
    return [a for a in actions if a.option_strings and a.help != argparse.SUPPRESS and a.dest != "help"]


def test_every_option_works_with_raw_or_is_refused() -> None:
    names = [action.option_strings[0] for action in options_of_run()]
    refused = [option for option, _, _ in REFUSED.values()]
    assert sorted([*USED, *refused]) == sorted(names)


@pytest.mark.parametrize("name", [name for name in REFUSED if name in {field.name for field in fields(LaunchOptions)}])
def test_options_that_make_no_sense_are_refused_by_name(name: str) -> None:
    given = LaunchOptions(script="train.py", raw=True, **{name: 7})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"^{REFUSED[name][0]} cannot be combined with --raw: "):
        refuse_options(given)
    refuse_options(LaunchOptions(script="train.py", raw=True, workers=4, max_restarts=3, hang_timeout=9, quiet=True))


def test_the_command_line_refuses_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for words in (["--plan", "data=2"], ["--min-workers", "2"], ["--take-over", "out"]):
        stderr = raw(tmp_path, *words, "train.py", code=2).stderr
        assert f"paceline: {words[0]} cannot be combined with --raw: " in stderr


@pytest.mark.parametrize(
    ("asked", "backend"),
    [
        ("undefined", "paceline"),  # no name
        ("gloo", "paceline"),
        ("cpu:gloo", "paceline"),
        ("cpu:gloo,cuda:nccl", "paceline"),
        ("paceline", "paceline"),
        ("nccl", "nccl"),
        ("mpi", "mpi"),
        ("cpu:mpi,cuda:gloo", "cpu:mpi,cuda:gloo"),
        ("cpu:gloo,xpu:xccl", "cpu:gloo,xpu:xccl"),
    ],
)
def test_which_groups_become_ours(asked: str, backend: str) -> None:
    assert choose_backend(asked) == backend


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import torch.distributed as dist\ndist.init_process_group()", "calls torch.distributed.init_process_group()"),
        (
            "from torch.distributed import init_process_group as f, init_process_group\ninit_process_group('gloo')",
            "calls",
        ),
        ("from accelerate import Accelerator\na = Accelerator()", "uses Accelerator of accelerate"),
        ("import lightning as L\nL.Trainer(devices=2)", "uses Trainer of lightning"),
        ("import lightning.pytorch as pl\npl.Trainer()", "uses Trainer of lightning"),
        ("import pytorch_lightning as pl\npl.Trainer()", "uses Trainer of pytorch_lightning"),
        ("import transformers\ntransformers.Trainer(1)", "uses Trainer of transformers"),
        ("from transformers import Trainer as T\nT(1)", "uses Trainer of transformers"),
        ("from trl import SFTTrainer\nSFTTrainer(1)", "uses SFTTrainer of trl"),
    ],
)
def test_scripts_that_need_raw_are_named(text: str, what: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{text}\n")
    with pytest.raises(UsageError) as error:
        refuse_foreign(script, 2)
    assert str(error.value).startswith(f"train.py {what}")
    assert "add --raw before the script" in str(error.value)
    script.write_text(f"import paceline\n{text}\n")
    refuse_foreign(script, 2)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/deep.py").write_text("from paceline import Trainer\n")
    (tmp_path / "beside.py").write_text("from lib import deep\n")
    script.write_text(f"import beside\n{text}\n")
    refuse_foreign(script, 2)


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)",
        "import torch.distributed as dist\ndist.init_process_group('gloo', 'file:///tmp/x', rank=0, world_size=1)",
        "from accelerate import load_checkpoint_and_dispatch\nload_checkpoint_and_dispatch(1)",
        "import os\nos.environ['HOME']",
        "class Trainer: ...\nTrainer()",
        "this is no Python",
    ],
)
def test_other_scripts_are_not(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    refuse_foreign(tmp_path / "train.py", 2)


def test_one_worker_needs_raw_only_for_a_process_group(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from accelerate import Accelerator\nAccelerator()\n")
    refuse_foreign(script, 1)
    script.write_text("import torch\ntorch.distributed.init_process_group()\n")
    stderr = paceline("run", "train.py", cwd=tmp_path, code=2).stderr
    assert "paceline: train.py calls torch.distributed.init_process_group() and does not import paceline; add" in stderr


# ---- frameworks, and torchrun itself


def torchrun(folder: Path, script: Path, *words: str) -> str:
    """The output of two workers under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", script, *words]
    done = subprocess.run(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0
    return done.stdout


@pytest.mark.slow
def test_variables_are_those_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import json, os\nif os.environ['RANK'] == '0':\n    print(json.dumps(dict(os.environ)))\n")
    ours, theirs = json.loads(raw(tmp_path, script).stdout), json.loads(torchrun(tmp_path, script))
    names = {name for name in theirs.keys() - environment().keys() if not name.startswith(("_", "TORCHELASTIC_RUN"))}
    differ = {name for name in names if ours.get(name) != theirs[name]}
    # The store is that of worker 0 here, and NCCL's handling of errors is torch's own default.
    ours_alone = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"}
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"} <= names
    assert differ <= ours_alone | {"TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}, differ


HF = """
import sys
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
ids = torch.randint(0, 97, (64, 16), generator=torch.Generator().manual_seed(3))
rows = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
config = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
given = dict(per_device_train_batch_size=4, max_steps=8, logging_steps=2, save_steps=4, eval_strategy="steps")
given |= dict(eval_steps=4, report_to=[], use_cpu=True, learning_rate=1e-3, disable_tqdm=True)
trainer = Trainer(BertForSequenceClassification(config), TrainingArguments(sys.argv[1], **given), None, rows, rows)
trainer.train()
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        print("step", entry["step"], {name: value for name, value in entry.items() if name in ("loss", "eval_loss")})
"""

LIGHTNING = """
import sys
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel


class Net(BoringModel):
    def training_step(self, batch, number):
        out = super().training_step(batch, number)
        if self.global_rank == 0:
            print("step", number, out["loss"].item())
        return out


seed_everything(1)
given = dict(limit_train_batches=6, limit_val_batches=2, limit_test_batches=2, logger=False, max_epochs=1)
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", enable_progress_bar=False, **given,
                  default_root_dir=sys.argv[1])
net = Net()
trainer.fit(net)
trainer.test(net)
if trainer.is_global_zero:
    print("step", [parameter.double().sum().item() for parameter in net.parameters()])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("package", "text"), [("transformers", HF), ("lightning", LIGHTNING)])
def test_a_framework_computes_what_it_does_under_torchrun(package: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    script = tmp_path / "train.py"
    script.write_text(text)
    ours = losses(raw(tmp_path, script, "ours").stdout)
    assert len(ours) > 5
    assert ours == losses(torchrun(tmp_path, script, "theirs"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_script", "test_sync", "test_ops"])
def test_scripts_of_accelerate_run(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    done = raw(tmp_path, "-m", f"accelerate.test_utils.scripts.{name}")
    assert not HEAD.search(done.stderr)
    assert json.loads((tmp_path / "out/journal.jsonl").read_text().splitlines()[-1])["event"] == "finished"
