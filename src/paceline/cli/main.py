"""The command line: parses `paceline run`, `launch`, `check` and the other commands."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.console import command_line, in_one_line, say, shown
from paceline.base.environment import PROGRESS, parse_whole
from paceline.base.schema import read_file
from paceline.base.text import parse_size
from paceline.cli.run_commands import late, returning, showing
from paceline.errors import LaunchError, PacelineError, UsageError
from paceline.launch.modules import find_module
from paceline.launch.options import LaunchOptions
from paceline.launch.raw import REFUSED, refusal
from paceline.observe.drawing import save
from paceline.observe.summary import explain
from paceline.plan import Plan, describe

if sys.platform.startswith("linux"):
    from paceline.launch.coordinator_process import take_over as taken_over
    from paceline.launch.local import launch

HANGS = (
    "kill a worker that makes no progress for this many seconds (default 1800; 0 = never, the default on a terminal)"
)
RESTARTS = "restart workers lost to one cause at most N times (default 10); 0: any loss ends the run"
RAW_RESTARTS = "; with --raw: restart all workers after a failure at most N times (default 0)"
_SYNC = "copy this folder (without files that git ignores) to hosts: at most 200 MB"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system says of a disk without room
ELSEWHERE = ("-n", "-np", "--np", "--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes")


# Options and commands that users bring from other launchers, with dashes instead of underscores, and what to use here.
FOREIGN_OPTIONS = {
    **dict.fromkeys(("--gpus", "--num-gpus", "--gpus-per-node", "--nproc", "--num-workers"), "use --workers N"),
    **dict.fromkeys(
        ("--nnodes", "--num-nodes", "--num-machines", "--node-rank", "--machine-rank"),
        "start the first host with --listen ADDR and each other host with --join, or use paceline launch",
    ),
    **dict.fromkeys(
        ("--master-addr", "--master-port", "--main-process-ip", "--main-process-port", "--rdzv-endpoint"),
        "use --listen ADDR:PORT on the first host and --join ADDR:PORT on the others",
    ),
    **dict.fromkeys(("--rdzv-backend", "--rdzv-id", "--standalone"), "leave it out: workers find each other"),
    **dict.fromkeys(("--mixed-precision", "--bf16", "--fp16"), "use --plan precision=bf16 or precision=fp16"),
    **dict.fromkeys(("--use-fsdp", "--fsdp", "--use-deepspeed", "--deepspeed"), "use --plan shard=N"),
    **dict.fromkeys(("--include", "--exclude"), "set CUDA_VISIBLE_DEVICES"),
    "--module": "use -m",
    "--max-steps": "use --steps N",
    **dict.fromkeys(("--output-dir", "--log-dir", "--resume"), "use --run-dir DIR, which also resumes the run in DIR"),
}
FOREIGN_COMMANDS = {
    **dict.fromkeys(("train", "start", "exec", "torchrun", "accelerate", "deepspeed", "resume"), "run"),
    **dict.fromkeys(("kill", "cancel"), "stop"),
    **dict.fromkeys(("status", "top", "monitor"), "watch"),
    **dict.fromkeys(("list", "ls", "ps"), "runs"),
}


class _Elsewhere(argparse.Action):
    """Refuses the options by which other launchers take the number of workers, and names --workers."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        number = values if re.fullmatch("[0-9]{1,12}", values or "") else "N"
        raise UsageError(f"unknown option {option_string}", f"use --workers {number}")


def _parse_number(name: str, least: int, text: str) -> int:
    return parse_whole(f"{name} ", text, least)


def _text(name: str, kind: Callable[[str], Any], text: str) -> Any:
    if not text:
        raise UsageError(f"{name} is empty", "give a value: perhaps a variable of the shell is not set")
    return kind(text)


def _option(
    parser: argparse.ArgumentParser, *names: str, least: int | None = None, allow_empty: bool = False, **more: Any
) -> None:
    """Adds an option or argument: an integer of at least `least`, or a text, which may be empty if `allow_empty`."""
    name = names[0] if names[0].startswith("-") else more.get("metavar", names[0].upper())
    if least is not None:
        more["type"] = partial(_parse_number, name, least)
    elif not allow_empty and more.get("action", "append") == "append":
        more["type"] = partial(_text, name, more.get("type", str))
    parser.add_argument(*names, **more)


def _launched(script: str | None, module: bool, **options: Any) -> LaunchOptions:
    if script is None:
        raise UsageError("no script was given", "pass the path of a Python training script")
    name = script if module else None
    return LaunchOptions(script=find_module(script) if module else script, module=name, **options)


def _configured(words: list[str], options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options of `paceline run`, with those of the file of `--config` under them, and the unknown words."""
    from paceline.launch.run_config import RunConfig, script_part  # not with every run

    if options["config"] is None:
        raise UsageError("--set needs --config", "pass the configuration file that it changes")
    file = RunConfig.read(options["config"])
    try:
        parsed, unknown = _parser("run").parse_known_args(["run", *file.words, *words[1:]])
    except UsageError as error:
        raise UsageError(f"{in_one_line(file.path)}: {error.what}", error.cure) from error
    options = vars(parsed)
    if options["script"] is None:
        options |= {"script": file.script, "module": options["module"] or file.module}
    if not options["arguments"] and file.arguments is not None:
        options |= {"arguments": [*file.arguments], "separated": True}
    part = script_part(file.with_settings(options["settings"]), file.path)
    return options | {"config": part}, unknown


def _run(
    take_over: Path | None,
    raw: bool,
    max_restarts: int | None,
    settings: Sequence[str],
    workers: int | None,
    **options: Any,
) -> int | str:
    if take_over is not None:
        if raw:
            raise refusal(*REFUSED["take_over"])
        return taken_over(take_over)
    if max_restarts is None:
        max_restarts = 0 if raw else LaunchOptions.max_restarts
    if workers is None:
        workers = 0 if options["join"] and options["spares"] else 1
    launched = _launched(raw=raw, max_restarts=max_restarts, workers=workers, **options)
    if launched.chooses_plan:
        from paceline.launch.auto import launch_with_chosen_plan

        return launch_with_chosen_plan(launched)
    return launch(launched)


INSIDE = "python", "cwd", "setup", "env", "engine"  # options that say how programs start on other hosts
FAR = (
    *("hosts", "hostfile", "sync", "tunnel", "nodes", "detach", "address", "master", "wait"),  # of one engine
    *("image", "namespace", "gpus", "cpus", "memory", "claim", "shape"),  # of pods
    *("labels", "annotations", "node_selector", "tolerations", "queue", "pull_secrets", "volumes", "priority_class"),
    *("workers_per_host", "listen", "dry_run", "no_preflight", *INSIDE),
)


def _launch(where: str, words: list[str], **options: Any) -> int:
    from paceline.launch.engines.start import launch_on  # not with every run

    given = {name: options.pop(name, None) for name in FAR}
    return launch_on(where, words, given, options)


def _check(steps: int, **options: Any) -> int:
    from paceline.launch.check import check  # not with every run

    return check(_launched(**options), steps)


def _chaos(steps: int, losses: int, seed: int, faults: str, **options: Any) -> int:
    from paceline.launch.chaos import chaos

    return chaos(_launched(**options), steps, losses, seed, faults)


def _explain(what: str, script: str | None, workers: int | None, svg: Path | None, **options: Any) -> str:
    from paceline.launch.explain import explain_plan

    if script is None and workers is None and ("=" not in what or Path(what).exists()):
        return explain(Path(what), svg)
    explanation = explain_plan(what, workers, None if script is None else _launched(script, **options))
    if svg is not None:
        save(explanation, svg)
    return explanation.text()


def _plan(workers: int | None, **options: Any) -> str:
    from paceline.launch.plan import Question, local_workers, parse_allowed, plan

    memory, fixed_words, allowed = (options.pop(name) for name in ("memory", "fixed_words", "allowed"))
    shows = {name: options.pop(name) for name in ("form", "svg", "explained")}
    hosts, given = options.pop("hosts"), {name: options.pop(name) for name in INSIDE}
    if hosts is not None:
        from paceline.launch.engines.rehearse import rehearsal_on

        where = rehearsal_on(hosts, workers, **given)
        shows["launcher"] = ("launch", "ssh", "--hosts", hosts)
        workers = where.workers
    question = Question(
        options.pop("tries"),
        options.pop("steps"),
        None if memory is None else parse_size(memory),
        Plan.parse(fixed_words),
        parse_allowed(allowed),
        machines=options.pop("machines"),
    )
    if hosts is not None:
        question = replace(question, rehearse=where.run, hosts=where.counts)
    return plan(_launched(workers=workers or local_workers(), plan=fixed_words or None, **options), question, **shows)


def _tokenize(**options: Any) -> int | str:
    from paceline.data.text_files import AGAIN
    from paceline.data.tokenize import tokenize  # needs numpy

    try:
        return tokenize(**options)
    except KeyboardInterrupt as stopped:
        stopped.add_note(AGAIN)
        raise


def _weights(add: Callable[..., Any]) -> None:
    """The commands that read and write checkpoints without a script."""
    dtype = "convert floating-point weights to this type (default: as they are)"
    option = add(
        "export",
        late("checkpoint.export", "export_model"),
        "write the weights of a run's newest checkpoint, for other programs",
        "examples:\n"
        "  paceline export runs/a model.safetensors\n"
        "  paceline export runs/a model.safetensors --best             the one kept by trainer.keep_best()\n"
        "  paceline export runs/a weights --max-file 2GB --dtype bf16    a folder that Hugging Face's libraries read\n"
        "  paceline export runs/a weights --format dcp                   for torch.distributed.checkpoint.load",
        "Writes one .safetensors file, or a folder of several. Does not need the script or the model's code.",
    )
    option("run_dir", metavar="RUN", help="run folder, or URL of its checkpoints")
    option("out", type=Path, metavar="OUT", help="file to write, OUT.safetensors, or a folder")
    option(
        "--format",
        dest="layout",
        choices=["safetensors", "dcp"],
        help="format of a folder (default: that of Hugging Face)",
    )
    option("--max-file", default="5GB", metavar="SIZE", help="maximum size of a file in a folder (default 5GB)")
    option("--dtype", metavar="bf16|fp16|fp32", help=dtype)
    option("--step", least=0, help="step of the checkpoint (default: the newest)")
    option("--best", action="store_true", help="use the checkpoint kept by trainer.keep_best()")
    option("--trainer", least=0, default=0, help="number of the trainer in the script, from 0 (default 0)")
    option = add(
        "import",
        late("checkpoint.import_weights", "import_model"),
        "create a run that starts from weights of another program",
        "examples:\n"
        "  paceline import model.safetensors runs/b\n"
        "  paceline import gpt2/ runs/b --map transformer.= --dtype fp32\n"
        "  paceline import lightning_logs/version_0/checkpoints/last.ckpt runs/b\n"
        "  paceline import dcp_folder/ runs/b --no-optimizer\n"
        "  paceline run --run-dir runs/b --workers 4 train.py            starts from them, at step 0",
        "Reads files of safetensors, torch.save and Lightning, and folders of Hugging Face, Accelerate,"
        " torch.distributed.checkpoint and DeepSpeed. Optimizer states come along. Nothing in these files is executed,"
        " and everything that is not taken is listed. Names, shapes and dtypes are compared when the script creates its"
        " model.",
    )
    option("source", type=Path, metavar="SOURCE", help="file or folder that another program has written")
    option("run_dir", type=Path, metavar="RUN", help="run folder to create")
    option(
        "--map",
        dest="renames",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="rename a prefix of parameter names; repeatable",
    )
    option("--no-optimizer", dest="optimizer", action="store_false", help="import only the weights")
    option("--dtype", metavar="bf16|fp16|fp32", help=dtype)
    option("--trainer", least=0, default=0, help="number of the trainer in the script, from 0 (default 0)")
    option = add(
        "inspect",
        late("checkpoint.inspect", "inspect_run"),
        "list and verify checkpoints, and show the contents of one",
        "examples:\n  paceline inspect runs/a\n  paceline inspect runs/a --step 120 --tensors --json",
        "Shows the newest checkpoint, or that of --step.",
    )
    option("run_dir", metavar="RUN", help="run folder, or URL of its checkpoints")
    option("--step", least=0, help="step of the checkpoint (default: the newest)")
    option("--tensors", action="store_true", help="list every tensor")
    option("--json", dest="as_json", action="store_true", help="print one JSON object")


def _workers(option: Callable[..., Any], default: int | None, does: str) -> None:
    """How many workers, and what to run as a module."""
    option("--workers", least=1, default=default, metavar="N", help=f"{does} (default {default or 1})")
    option(*ELSEWHERE, dest=argparse.SUPPRESS, nargs="?", action=_Elsewhere, help=argparse.SUPPRESS)
    option("-m", dest="module", action="store_true", help="run SCRIPT as a module, like `python -m`")


def _script(option: Callable[..., Any]) -> None:
    """Adds the script of a rehearsal, its plan and its arguments."""
    option("script", help="training script")
    option("--plan", allow_empty=True, metavar="TEXT", help="plan: how the work is spread over the workers")
    option("arguments", allow_empty=True, nargs="*", metavar="-- ARGUMENTS", help="arguments of the script, after --")


def _rehearsals(add: Callable[..., Any]) -> None:
    option = add(
        "check",
        _check,
        "train a few steps with one worker and with N, and compare",
        "example:\n  paceline check train.py --workers 4",
        "The script must train the same on N workers as on one. The steps are trained with one worker, with one"
        " worker that sums in another order (to measure rounding), and with N workers.",
    )
    _workers(option, 2, "number of workers to compare with one")
    option("--steps", least=1, default=5, metavar="K", help="number of optimizer steps (default 5)")
    _script(option)
    option = add(
        "chaos",
        _chaos,
        "rehearse failures: kill workers on purpose and compare the weights",
        "examples:\n"
        "  paceline chaos train.py --workers 4 --plan exact\n"
        "  paceline chaos train.py --workers 4 --faults kill:0@10.backward,stop:2@30.reduced",
        "Trains a few steps undisturbed, then again while workers are killed, stopped and made to fail, and compares"
        " the weights.",
    )
    _workers(option, 4, "workers")
    option("--steps", least=1, default=100, metavar="K", help="number of optimizer steps (default 100)")
    option("--losses", least=1, default=4, metavar="N", help="number of failures (default 4)")
    option("--seed", least=0, default=0, help="seed that chooses workers, moments and kinds of failures (default 0)")
    option(
        "--faults",
        default="",
        allow_empty=True,
        metavar="TEXT",
        help="exact failures instead: KIND:WORKER@STEP.MOMENT, separated by commas",
    )
    _verifying(option)
    _script(option)


def _makers(add: Callable[..., Any]) -> None:
    option = add(
        "tokenize",
        _tokenize,
        "convert text into a folder of tokens, for paceline.data.Tokens",
        "examples:\n"
        "  paceline tokenize texts/ --tokenizer tokenizer.json --out tokens/\n"
        "  paceline tokenize 'web-*.jsonl.gz' --field content --tokenizer gpt2 --out tokens/ --workers 8",
        "A .txt file is one document, and so is each line of a .jsonl file and each row of a .parquet file. .txt and"
        " .jsonl files may be compressed (.gz, .zst). If it is killed, the same command continues. The result does not"
        " depend on the number of workers.",
    )
    option("inputs", nargs="+", metavar="INPUT", help="a .txt, .jsonl or .parquet file, a folder of them, or a glob")
    option("--tokenizer", required=True, metavar="FILE|NAME", help="a tokenizer.json, or a name on Hugging Face's hub")
    option("--out", required=True, type=Path, metavar="FOLDER", help="folder to create")
    option("--workers", least=1, metavar="N", help="number of processes (default: one per core)")
    option("--shard-tokens", least=1, default=100_000_000, metavar="N", help="tokens per file (default 100,000,000)")
    option(
        "--field",
        default="text",
        metavar="NAME",
        help="field of a .jsonl line, or column of a .parquet file, that has the text (default text)",
    )
    option(
        "--end",
        allow_empty=True,
        metavar="TOKEN",
        help='token written after each document (default: that of the tokenizer; "": none)',
    )


def _converting(add: Callable[..., Any]) -> None:
    """Adds the command that reads configurations of other tools."""
    option = add(
        "from",
        late("integrations.configs.command", "convert"),
        "convert a configuration of DeepSpeed, Accelerate or FSDP to a plan and Trainer arguments",
        "examples:\n"
        "  paceline from deepspeed ds_config.json --workers 8\n"
        "  paceline from accelerate default_config.yaml\n"
        "  paceline from deepspeed ds_config.json --set learning_rate=2e-5 --set bf16=true",
        "Prints the plan, the command, the Trainer arguments and what becomes of every field: used, without effect and"
        " why, or refused and what to do. Ends with exit code 1 if a field is refused or unknown.",
    )
    option("kind", choices=["deepspeed", "accelerate", "fsdp"], help="tool that the file is for")
    option("path", type=Path, metavar="FILE", help="JSON, or YAML if its name ends in .yaml or .yml")
    option("--workers", least=1, metavar="N", help="number of workers (default: that of the file)")
    option(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help='option of TrainingArguments, for fields that are "auto"; repeatable',
    )
    option("--json", dest="as_json", action="store_true", help="print one JSON object")


def _running(option: Callable[..., Any], restarts: int | None = 10, more: str = "") -> None:
    """Adds the options that every run has, on this host or on others. `restarts`: the default of --max-restarts, about
    which `more` says more.
    """
    option("--run-dir", metavar="DIR", help="run folder; an existing one is resumed (default: a new one under runs/)")
    option(
        "--plan",
        allow_empty=True,
        metavar="TEXT",
        help="plan: how the work is spread; overrides the script's (see below)",
    )
    option("--save-every", metavar="60s|N|auto", help="interval of checkpoints: seconds, steps or auto (default 60s)")
    option("--keep", least=1, metavar="N", help="number of checkpoints to keep (default 2)")
    option(
        "--checkpoints",
        metavar="PLACE",
        help="folder or URL for checkpoints, like s3://bucket/a (default: the run folder)",
    )
    option(
        "--mirror",
        least=1,
        metavar="K",
        help="copy the state of a lone worker or replica into memory every K steps; on several hosts, into the memory"
        " of two (default: off)",
    )
    option(
        "--steps",
        dest="max_steps",
        least=1,
        metavar="N",
        help="stop cleanly after N optimizer steps in total (default: no limit)",
    )
    option(
        "--max-time",
        metavar="TIME",
        help="stop with a checkpoint after this time, as 3h or 90m (default: two minutes before a Slurm job ends, or"
        " a fifth of a short job)",
    )
    option("--tensorboard", action="store_const", const="1", help="write TensorBoard files into the run folder")
    option(
        "--log-to",
        metavar="NAME[:TARGET],...",
        help="log to wandb, mlflow, trackio, comet, csv, tensorboard or otlp (see docs/howto/loggers.md; default: off)",
    )
    option("--heal", action="store_const", const="1", help="repair workers whose weights differ from the majority's")
    _verifying(option)
    option("--max-restarts", least=0, default=restarts, metavar="N", help=RESTARTS + more)
    option("--min-workers", least=1, default=1, metavar="N", help="pause while there are fewer workers (default 1)")
    option(
        "--exclude-after",
        least=1,
        metavar="K",
        help="leave a host out after K failures within seven days, if other hosts can go on (default: never)",
    )
    option("--hang-timeout", least=0, metavar="SECONDS", help=HANGS)
    option("--cold-start", action="store_true", help="start each worker as a new interpreter, not from a warm process")
    option("--quiet", action="store_true", help="print only how the run ended, and only if it did not finish")
    option("--verbose", action="store_true", help="print all figures of the report at the end")


def _verifying(option: Callable[..., Any]) -> None:
    """Adds the option that has steps computed twice."""
    option(
        "--verify-steps",
        metavar="1%|N",
        help="compute 1%% of the steps, or one step of N, a second time on another worker, and compare (default: none)",
    )


def _reading(option: Callable[..., Any]) -> None:
    """Adds the options of a run that is described in a file."""
    option("--config", type=Path, metavar="FILE", help="options, script and its configuration, in YAML, TOML or JSON")
    option(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a value of the script's configuration in that file; repeatable",
    )


def _several_hosts(option: Callable[..., Any]) -> None:
    """Adds the options of a run that workers or hosts may join."""
    option(
        "--join",
        metavar="RUN",
        help="add these workers to a run, given by its folder, or by HOST:PORT with --token-file",
    )
    option("--token-file", metavar="FILE", help="token of the run to join: a copy of the file token in its folder")
    option(
        "--listen",
        metavar="ADDR[:PORT]",
        help="address at which other hosts reach this one (default: other hosts cannot join)",
    )
    option("--nodes", choices=["auto"], help="run this same command on every node; the nodes find the first one")
    option(
        "--store",
        metavar="etcd://HOST:PORT/NAME",
        help="let this etcd decide which host keeps the coordinator (default: none)",
    )


def _served(option: Callable[..., Any], at: str = "there") -> None:
    option(
        "--metrics",
        metavar="ADDR:PORT",
        help=f"serve metrics to Prometheus {at} (with the run's reading_key; default: off)",
    )
    option("--page", metavar="ADDR:PORT", help=f"serve the live page {at} (with the run's reading_key; default: off)")


def _launching(add: Callable[..., Any]) -> None:
    does = "Starts one agent per host, whose workers join one run; the coordinator runs on the first host."
    option = add(
        "launch ssh",
        partial(_launch, "ssh"),
        "train on hosts reached by ssh",
        "examples:\n"
        "  paceline launch ssh --hosts a,b:2,c train.py\n"
        "  paceline launch ssh --hostfile hosts --sync --setup 'module load cuda' train.py",
        does,
    )
    _by_name(option, "ssh")
    option = add(
        "launch mpi",
        partial(_launch, "mpi"),
        "train on hosts reached by mpirun",
        "examples:\n"
        "  paceline launch mpi --hosts a,b:2,c train.py\n"
        "  paceline launch mpi --engine='--mca plm_rsh_agent rsh' train.py     within a PBS job: on its hosts",
        does,
    )
    _by_name(option, "mpirun")
    option = add(
        "launch slurm",
        partial(_launch, "slurm"),
        "train on nodes of a Slurm cluster",
        "examples:\n"
        "  paceline launch slurm -N 4 --engine='--time=2:00:00 -p gpu' train.py     submits the job and follows it\n"
        "  paceline launch slurm -N 4 --dry-run train.py                            only prints the batch script",
        f"{does} Within an allocation it uses srun; otherwise it submits a batch script.",
    )
    option("-N", "--nodes", least=1, metavar="N", help="number of nodes")
    option("--detach", action="store_true", help="submit the job and do not follow it")
    _far(option, "sbatch and srun")
    _launching_clusters(add, does)


def _launching_clusters(add: Callable[..., Any], does: str) -> None:
    """Adds the launchers that ask a Ray, Spark or Kubernetes cluster for places."""
    option = add(
        "launch ray",
        partial(_launch, "ray"),
        "train on nodes of a Ray cluster",
        "examples:\n"
        "  paceline launch ray --nodes 4 --engine='CPU=8 GPU=4' train.py\n"
        "  paceline launch ray --hosts 10.0.0.7,10.0.0.8:2 --sync train.py     nodes by address",
        f"{does} Requests a placement group from Ray, with one bundle per host, each on its own node.",
    )
    option("-N", "--nodes", least=1, metavar="N", help="number of nodes (default: all that fit)")
    option(
        "--address",
        metavar="HOST:PORT",
        help="address of the cluster (default: RAY_ADDRESS, or the cluster on this host)",
    )
    _waiting(option, "Ray")
    _by_name(option, "Ray")
    option = add(
        "launch spark",
        partial(_launch, "spark"),
        "train on executors of a Spark cluster",
        "examples:\n"
        "  paceline launch spark -N 4 --master spark://a:7077 train.py\n"
        "  paceline launch spark -N 4 --master yarn --workers-per-host 4 --engine='--executor-memory 32g' train.py",
        f"{does} Requests one barrier task per host from Spark, each on its own executor.",
    )
    option("-N", "--nodes", least=1, metavar="N", help="number of executors")
    option(
        "--master",
        metavar="URL",
        help="Spark master, like spark://HOST:7077 or yarn (default: from Spark's configuration)",
    )
    _waiting(option, "Spark")
    option("--sync", action="store_true", help=_SYNC)
    _far(option, "spark-submit")
    option = add(
        "launch kubernetes",
        partial(_launch, "kubernetes"),
        "train in pods of a Kubernetes cluster",
        "examples:\n"
        "  paceline launch kubernetes -N 4 --image train:1 --gpus 8 --claim runs train.py\n"
        "  paceline launch kubernetes -N 4 --image train:1 --claim runs --dry-run /app/train.py   # in the image",
        "Creates a Job with one pod per host, and follows it to the end. The script is sent along unless its path is"
        " absolute.",
    )
    option("-N", "--nodes", least=1, metavar="N", help="number of hosts")
    option(
        "--as",
        dest="shape",
        choices=["job", "jobset", "trainjob"],
        default="job",
        help="kind of the object to create (default: job)",
    )
    option("--image", metavar="IMAGE", help="image of the pods, with Python and Paceline")
    option("--namespace", metavar="NAME", help="namespace (default: kubectl's)")
    option("--claim", metavar="NAME", help="PersistentVolumeClaim for the run folder, writable by all hosts")
    option("--gpus", least=1, metavar="N", help="NVIDIA GPUs per host (default: none)")
    option("--cpus", metavar="Q", help="cores per host, like 8 or 500m (default: one per worker)")
    option("--memory", metavar="Q", help="memory per host, like 16Gi (default: no limit)")
    option("--detach", action="store_true", help="create the Job and do not follow it")
    _pods(option)
    _far(option, "kubectl")


def _pods(option: Callable[..., Any]) -> None:
    """Adds what users add to the objects and pods of a run."""
    many: dict[str, Any] = {"action": "append", "default": []}
    option("--label", dest="labels", metavar="NAME=VALUE", help="label of the Job and its pods; repeatable", **many)
    text = "annotation of the Job and its pods; repeatable"
    option("--annotation", dest="annotations", metavar="NAME=VALUE", help=text, **many)
    option("--queue", metavar="KIND:NAME", help="queue of the Job: kueue:NAME, volcano:NAME or kai:NAME")
    option("--node-selector", metavar="NAME=VALUE", help="label of the nodes to use; repeatable", **many)
    text = "taint of nodes that the pods tolerate, like nvidia.com/gpu:NoSchedule; repeatable"
    option("--toleration", dest="tolerations", metavar="TAINT", help=text, **many)
    option("--priority-class", metavar="NAME", help="PriorityClass of the pods")
    text = "Secret for pulling the image; repeatable"
    option("--pull-secret", dest="pull_secrets", metavar="NAME", help=text, **many)
    text = "another volume, like pvc:data:/data:ro, hostPath:/a:/a, emptyDir:10Gi:/cache; repeatable"
    option("--volume", dest="volumes", metavar="KIND:SOURCE:PATH[:ro]", help=text, **many)


def _waiting(option: Callable[..., Any], engine: str) -> None:
    """Adds the option of a run on hosts that a cluster chooses."""
    text = f"seconds to wait until {engine} has placed all hosts (default 300)"
    option("--wait", least=0, default=300, metavar="SECONDS", help=text)


def _by_name(option: Callable[..., Any], engine: str) -> None:
    """Options of a run on hosts that the user names."""
    option("--hosts", metavar="A,B:2,..", help=f"hosts, as {engine} accepts them; HOST:N sets the number of workers")
    option("--hostfile", type=Path, metavar="FILE", help="file with one host per line")
    option("--sync", action="store_true", help=_SYNC)
    if engine == "ssh":
        option("--tunnel", action="store_true", help="send all traffic between hosts through ssh and this machine")
    if engine != "Ray":  # where `ray job submit --no-wait` does it
        option(
            "--detach", action="store_true", help="let the run continue without this command once all hosts have joined"
        )
    _far(option, engine)


def _far(option: Callable[..., Any], engine: str) -> None:
    """Adds the options of a run on other hosts."""
    option("--workers-per-host", least=1, metavar="N", help="workers per host (default: one per GPU, else 1)")
    default_python, default_folder = (
        ("the path of this one",) * 2 if engine != "kubectl" else ("python", "the run's volume")
    )
    if engine != "kubectl":
        option(
            "--listen",
            metavar="ADDR[:PORT]",
            help="address at which the others reach the first host (default: found automatically)",
        )
        _served(option, "from the first host")
        option("--no-preflight", action="store_true", help="begin without measuring and comparing the hosts")
    _inside(option, engine, default_python, default_folder)
    option("--dry-run", action="store_true", help="print what would be started, without starting it")
    option("-m", dest="module", action="store_true", help="run SCRIPT as a module, like `python -m`")
    _running(option)
    option("script", nargs="?", help="training script")
    option("arguments", allow_empty=True, nargs=argparse.REMAINDER, help="arguments of the script")


def _inside(option: Callable[..., Any], engine: str, default_python: str, default_folder: str) -> None:
    """Adds the options that say how the program is started on other hosts."""
    option("--python", metavar="PATH", help=f"Python on the hosts (default: {default_python})")
    option("--cwd", metavar="DIR", help=f"folder to run in (default: {default_folder})")
    option("--setup", metavar="SHELL", help="shell command to run first on each host, like 'module load cuda'")
    option(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable for the workers; repeatable",
    )
    option("--engine", default="", allow_empty=True, metavar="OPTIONS", help=f"options passed to {engine} unchanged")


def _explaining(add: Callable[..., Any]) -> None:
    option = add(
        "explain",
        _explain,
        "explain a plan (what workers store, send and wait for), or the decisions of a run",
        "examples:\n"
        '  paceline explain "pipeline=2 tensor=2 data=2"\n'
        '  paceline explain "pipeline=4 virtual=2" --workers 8 train.py -- --size large\n'
        "  paceline explain runs/a --svg plan.svg\n\n"
        "words of a plan:\n" + describe(),
        "Describes and draws a plan. With a script, which runs on one worker up to its first step, also blocks, bytes "
        "and seconds. For a run: plan, grid, decisions, time, bytes and failures.",
    )
    option("what", metavar="RUN|PLAN", help="run folder, or a plan in quotes")
    option("script", nargs="?", help="training script, to predict bytes and seconds for its model")
    option("--workers", least=1, metavar="N", help="number of workers of the plan (default: the fewest possible)")
    option("--svg", type=Path, metavar="FILE", help="write the drawing of the report to this file")
    option("-m", dest="module", action="store_true", help="run SCRIPT as a module, like `python -m`")
    option("arguments", allow_empty=True, nargs="*", metavar="-- ARGUMENTS", help="arguments of the script, after --")


def _planning(add: Callable[..., Any]) -> None:
    option = add(
        "plan",
        _plan,
        "find the fastest plan for a script, by prediction and short trials",
        "examples:\n"
        "  paceline plan train.py --workers 4\n"
        '  paceline plan train.py --workers 8 --keep "precision=bf16 micro=4" -- --size large\n'
        "  paceline plan train.py --allow lossy,local --try 5 --json > plans.json\n"
        "  paceline plan train.py --hosts a,b:2                             workers on hosts reached by ssh",
        "The first line of the answer is the command to train with. The blocks of the model and the links are "
        "measured, and all plans are predicted from that; the best ones that fit are tried for a few steps. Nothing of "
        "these trials is kept.",
    )
    option(
        "--workers", least=1, metavar="N", help="number of workers (default: the GPUs, or the CPU cores, of this host)"
    )
    option(
        "--hosts", metavar="A,B:2,..", help="hosts, as ssh accepts them; HOST:N sets the number of workers (default 1)"
    )
    _inside(option, "ssh", *("the path of this one",) * 2)
    option("--try", dest="tries", least=0, default=3, metavar="K", help="plans to try (default 3; 0: only predict)")
    option(
        "--steps", least=1, default=20, metavar="S", help="steps to measure in each trial (default 20; at most 15 s)"
    )
    option("--memory", metavar="SIZE", help="memory that a worker may take (default: its part of the host's)")
    option(
        "--on",
        dest="machines",
        metavar="FILE",
        help="predict for other machines, by a description or a name, as h100; nothing is tried",
    )
    option(
        "--keep",
        dest="fixed_words",
        default="",
        allow_empty=True,
        metavar="WORDS",
        help="plan words that stay as they are",
    )
    option(
        "--allow",
        dest="allowed",
        default="",
        allow_empty=True,
        metavar="A,B,..",
        help="also plans that change the result: lossy (codecs), local (local SGD), precision",
    )
    option("--explain", dest="explained", metavar="PLAN", help="also show the parts of a step under this plan")
    option("--svg", type=Path, metavar="FILE", help="draw the plans, with the parts of their steps, to this file")
    option("--json", dest="form", action="store_const", const="json", default="text", help="print all plans as JSON")
    option(
        "--describe",
        dest="form",
        action="store_const",
        const="describe",
        help="print the measured descriptions of the model and the machines instead",
    )
    option("-m", dest="module", action="store_true", help="run SCRIPT as a module, like `python -m`")
    option("script", help="training script")
    option("arguments", allow_empty=True, nargs="*", metavar="-- ARGUMENTS", help="arguments of the script, after --")


def _parser(wanted: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the command `wanted` alone, or of all commands if no command has that name.

    To make those of all commands takes ten times as long. The options of a command have the names of its function's
    parameters.
    """
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Train one PyTorch model on any number of machines.",
        epilog="`paceline COMMAND --help` shows options and examples. A script also runs without it: python train.py",
    )
    parser.add_argument("--version", action="version", version=f"paceline {sys.modules['paceline'].__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    names: list[str] = []

    def add(name: str, command: Callable[..., int | str], does: str, epilog: str, more: str | None = None) -> Any:
        names.append(name)
        if wanted not in (name, None):
            return lambda *_, **__: None
        form = argparse.RawDescriptionHelpFormatter
        about = textwrap.fill(f"{does[0].upper()}{does[1:]}." + (f" {more}" if more else ""), 79)
        added = commands.add_parser(name, help=does, description=about, epilog=epilog, formatter_class=form)
        added.set_defaults(command=command, usage=added.format_usage)
        return partial(_option, added)

    option = add(
        "run",
        _run,
        "train with several workers, on this machine and on others that join",
        "examples:\n"
        "  paceline run --workers 4 train.py\n"
        "  paceline run --workers 4 --run-dir runs/a train.py --epochs 3    run it again to resume\n"
        "  paceline run --workers 2 --join runs/a train.py                  adds two workers, at any time\n"
        '  paceline run --workers 2 --plan "precision=bf16 micro=16" train.py\n'
        "  paceline run --workers 2 --raw train.py                          as torchrun runs it\n"
        "  paceline run --notify 'jq -r .what | mail -s training me' train.py\n\n"
        "words of a plan:\n" + describe(),
        "Starts the workers, shows their progress, and ends with a report or an explanation of the failure.",
    )
    _workers(option, None, "number of worker processes")
    option("--spares", least=0, default=0, metavar="N", help="further workers that replace lost ones (default 0)")
    option(
        "--raw",
        action="store_true",
        help="run an unchanged script of torch.distributed, Accelerate, Lightning or Hugging Face, as torchrun would",
    )
    _several_hosts(option)
    _running(option, None, RAW_RESTARTS)
    option("--progress", choices=PROGRESS, help="show progress as lines, as a bar or not at all (default: by terminal)")
    _reading(option)
    option("--shares", metavar="A,B,..", help="shares of unequal workers, like 3,1 (default: measured)")
    option("--against", metavar="RUN", help="finished run to compare the speed with in the report")
    _served(option)
    option(
        "--notify", metavar="COMMAND", help="shell command that receives a JSON object at a failure, a hang and the end"
    )
    option("--debug", least=0, metavar="RANK", help="give this worker the terminal, for breakpoint()")
    option(
        "--take-over", type=Path, metavar="RUN", help="replace a lost first host by this one (RUN: the run folder here)"
    )
    option("script", nargs="?", help="training script")
    option("arguments", allow_empty=True, nargs=argparse.REMAINDER, help="arguments of the script")

    _launching(add)
    returning(add)
    _rehearsals(add)
    _makers(add)
    _weights(add)
    _converting(add)
    _explaining(add)
    _planning(add)
    showing(add)
    if commands.choices:
        return parser
    if wanted is None or wanted.startswith("-"):
        return _parser(None)
    raise _unknown_command(wanted, names)


def _unknown_command(wanted: str, names: Sequence[str]) -> UsageError:
    """An error that names the command most like `wanted`, or the one that does what another launcher's does."""
    near = [FOREIGN_COMMANDS[wanted]] if wanted in FOREIGN_COMMANDS else difflib.get_close_matches(wanted, names, n=1)
    cure = f"did you mean paceline {near[0]}?" if near else "see `paceline --help`"
    return UsageError(f"unknown command {shown(wanted)}", cure)


def _unknown_option(word: str, command: str, usage: str) -> UsageError:
    """An error that names the option most like `word`, or the one that does what another launcher's option does."""
    if not word.startswith("-"):
        return UsageError(
            f"unexpected argument {shown(word)} of paceline {command}", f"see `paceline {command} --help`"
        )
    name = word.partition("=")[0]
    what, options = f"unknown option {shown(word)} of paceline {command}", re.findall(r"--[a-z-]+", usage)
    dashed = name.replace("_", "-")
    if dashed in options:
        return UsageError(what, f"use {dashed}")
    if dashed in FOREIGN_OPTIONS and (
        "--run-dir" in options or (command in ("check", "chaos") and "--workers N" in FOREIGN_OPTIONS[dashed])
    ):
        return UsageError(what, FOREIGN_OPTIONS[dashed])
    near = difflib.get_close_matches(dashed, options, n=1, cutoff=0.7)
    hint = "; pass the script's own arguments after --" if command in ("check", "chaos", "explain", "plan") else ""
    return UsageError(what, f"did you mean {near[0]}?" if near else f"see `paceline {command} --help`{hint}")


def _refuse_misplaced(usage: str, arguments: Sequence[str] = (), **given: Any) -> None:
    """Raises UsageError for options of Paceline after the script, unless the script's text has them."""
    names = dict.fromkeys(word.partition("=")[0] for word in arguments)
    misplaced = [name for name in names if name in re.findall(r"--[a-z-]+", usage)]
    if not misplaced:
        return
    script = given["script"]
    with suppress(OSError):
        text = read_file(find_module(script) if given["module"] else script).decode(errors="replace")
        misplaced = [name for name in misplaced if f'"{name}"' not in text and f"'{name}'" not in text]
    if misplaced:
        shown_script, them = in_one_line(script), "it" if len(misplaced) == 1 else "them"
        what = f"{', '.join(misplaced)} after {shown_script} would go to the script"
        raise UsageError(what, f"put {them} before {shown_script}, or write -- after {shown_script} to pass {them} on")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    words = [*given]
    for stream in (sys.stdout, sys.stderr):  # names of files need not be UTF-8
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    script_arguments: list[str] = []
    if (
        words[:1] in (["check"], ["chaos"], ["explain"], ["plan"]) and "--" in words
    ):  # argparse would refuse them behind options
        cut = words.index("--")
        words, script_arguments = words[:cut], words[cut + 1 :]
    try:
        if words[:1] in (["run"], ["launch"], ["check"], ["chaos"], ["plan"]) and not sys.platform.startswith("linux"):
            what = f"the workers of `paceline {words[0]}` need Linux, and this is {sys.platform}"
            raise LaunchError(what, "run `python train.py` here, which trains with one")
        if words == ["agent"]:  # what `paceline launch` starts on a host
            from paceline.launch.engines.remote_agent import run_job

            return run_job()
        if words[:1] == ["launch"]:
            if words[1:2] not in (["ssh"], ["mpi"], ["slurm"], ["ray"], ["spark"], ["kubernetes"]):
                raise UsageError(
                    "paceline launch needs the name of a launcher",
                    "use paceline launch ssh, mpi, slurm, ray, spark or kubernetes",
                )
            words[:2] = [" ".join(words[:2])]
        if words and words[0].endswith(".py"):
            raise UsageError(f"unknown command {shown(words[0])}", f"use paceline run {shown(words[0])}")
        at = words.index("--shares") if "--shares" in words else len(words)
        if words[at + 1 : at + 2] and re.match("-[0-9]", words[at + 1]):  # argparse takes it for an option
            words[at : at + 2] = [f"--shares={words[at + 1]}"]
        parsed, unknown = _parser(next(iter(words), None)).parse_known_args(words)
        options = vars(parsed)
        if words[0] == "run" and (options["config"] is not None or options["settings"]):
            options, unknown = _configured(words, options)
        command, usage = options.pop("command"), options.pop("usage")
        if unknown and words[0] == "explain" and options["script"] is None and unknown[0][0] != "-":
            options["script"] = unknown.pop(0)  # argparse looks for it before the options alone
        if unknown:
            raise _unknown_option(unknown[0], words[0], usage())
        if script_arguments:
            options["arguments"] = script_arguments
        elif options.get("arguments", [])[:1] == ["--"]:  # sets them apart, and is none of them
            del options["arguments"][0]
        elif "--" not in words and "separated" not in options:
            _refuse_misplaced(usage(), **options)
        if "--" in words and options.get("arguments") and (words[0] == "run" or words[0].startswith("launch ")):
            options["separated"] = True  # argparse may have removed it
        if words[0] in ("check", "chaos", "explain", "plan"):  # what a rehearsal says to run once more
            options["again"] = command_line(["paceline", *given])
        if words[0].startswith("launch "):
            options["words"] = [*words[0].split(), *words[1:]]
        done: int | str = command(**options)
        if isinstance(done, int):
            return done
        say(done, sys.stdout)
        return 0
    except PacelineError as error:
        say(f"paceline: {error}")
        return 2
    except OSError as error:
        if error.filename is None:  # it is not about something that the user named
            if error.errno not in _FULL:
                raise
            why = f"the output could not be written completely ({error.strerror})"
            say(f"paceline: {why}; free some space where it goes")
            return 2
        why = f"{shown(str(error.filename))} cannot be used ({error.strerror})"
        say(f"paceline: {why}; correct that, or give another path")
        return 2


if __name__ == "__main__":
    sys.exit(main())
