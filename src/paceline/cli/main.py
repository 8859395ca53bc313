"""The command line: parses `paceline run`, `launch`, `check` and the other commands."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.console import command_line, in_one_line, say, shown
from paceline.base.environment import parse_whole
from paceline.base.schema import read_file
from paceline.cli.run_commands import late, returning, showing
from paceline.errors import LaunchError, PacelineError, UsageError
from paceline.launch.modules import find_module
from paceline.launch.options import LaunchOptions
from paceline.observe.drawing import save
from paceline.observe.summary import explain
from paceline.plan import describe

if sys.platform.startswith("linux"):
    from paceline.launch.coordinator_process import take_over as taken_over
    from paceline.launch.local import launch

HANGS = "ends a worker that does nothing for so long (default 1800, or 0, which is never, at a terminal)"
RESTARTS = "how often workers lost to one cause are started again (default 10); 0: any loss ends the run"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system says of a disk without room
ELSEWHERE = ("-n", "-np", "--np", "--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes")


class _Elsewhere(argparse.Action):
    """Refuses the options by which other launchers take the number of workers, and names --workers."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        number = values if re.fullmatch("[0-9]{1,12}", values or "") else "N"
        raise UsageError(f"{option_string} is another launcher's option", f"say --workers {number}")


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
        raise UsageError("no script was given", "give the path of the Python file that trains")
    name = script if module else None
    return LaunchOptions(script=find_module(script) if module else script, module=name, **options)


def _run(take_over: Path | None, **options: Any) -> int | str:
    return launch(_launched(**options)) if take_over is None else taken_over(take_over)


FAR = (
    *("hosts", "hostfile", "sync", "tunnel", "nodes", "detach", "address", "master", "wait"),  # of one engine
    *("image", "namespace", "gpus", "cpus", "memory", "claim", "shape"),  # of pods
    *("workers_per_host", "listen", "python", "cwd", "setup", "env", "engine", "dry_run"),
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
    from paceline.launch.explain import foretold

    if script is None and workers is None and ("=" not in what or Path(what).exists()):
        return explain(Path(what), svg)
    explanation = foretold(what, workers, None if script is None else _launched(script, **options))
    if svg is not None:
        save(explanation, svg)
    return explanation.text()


def _tokenize(**options: Any) -> int | str:
    from paceline.data.tokenize import AGAIN, tokenize  # needs numpy

    try:
        return tokenize(**options)
    except KeyboardInterrupt as stopped:
        stopped.add_note(AGAIN)
        raise


def _weights(add: Callable[..., Any]) -> None:
    """The commands that read and write checkpoints without a script."""
    dtype = "convert weights of floating point on the way"
    option = add(
        "export",
        late("checkpoint.export", "export_model"),
        "write the weights of a run's newest checkpoint, for other programs",
        "examples:\n"
        "  paceline export runs/a model.safetensors\n"
        "  paceline export runs/a model.safetensors --best             the one that trainer.keep_best() kept\n"
        "  paceline export runs/a weights --max-file 2GB --dtype bf16    a folder as Hugging Face's libraries read it\n"
        "  paceline export runs/a weights --format dcp                   for torch.distributed.checkpoint.load",
        "Writes one .safetensors file, or a folder of them. Needs neither the script nor the model's code.",
    )
    option("run_dir", metavar="RUN", help="the run folder, or the URL at which it keeps its checkpoints")
    option("out", type=Path, metavar="OUT", help="the file to write, OUT.safetensors, or a folder")
    option("--format", dest="layout", choices=["safetensors", "dcp"], help="the format of a folder")
    option("--max-file", default="5GB", metavar="SIZE", help="most bytes of a file in a folder (default 5GB)")
    option("--dtype", metavar="bf16|fp16|fp32", help=dtype)
    option("--step", least=0, help="a checkpoint other than the newest")
    option("--best", action="store_true", help="the checkpoint that trainer.keep_best() kept")
    option("--trainer", least=0, default=0, help="which trainer of the script, from 0 (default 0)")
    option = add(
        "import",
        late("checkpoint.import_weights", "import_model"),
        "make a run that begins with weights from elsewhere",
        "examples:\n"
        "  paceline import model.safetensors runs/b\n"
        "  paceline import gpt2/ runs/b --map transformer.= --dtype fp32\n"
        "  paceline run --run-dir runs/b --workers 4 train.py            begins with them, at step 0",
        "Reads safetensors alone. Names, shapes and dtypes are compared when the script makes its model.",
    )
    option("source", type=Path, metavar="SOURCE", help="a .safetensors file, or a folder in Hugging Face's layout")
    option("run_dir", type=Path, metavar="RUN", help="the run folder to make")
    option("--map", dest="renames", action="append", default=[], metavar="OLD=NEW", help="rename a prefix; repeatable")
    option("--dtype", metavar="bf16|fp16|fp32", help=dtype)
    option("--trainer", least=0, default=0, help="for which trainer of the script, from 0 (default 0)")
    option = add(
        "inspect",
        late("checkpoint.inspect", "inspect_run"),
        "say what a checkpoint holds",
        "examples:\n  paceline inspect runs/a\n  paceline inspect runs/a --step 120 --tensors --json",
        "Lists and verifies the checkpoints of a run, and tells one of them, by default the newest.",
    )
    option("run_dir", metavar="RUN", help="the run folder, or the URL at which it keeps its checkpoints")
    option("--step", least=0, help="a checkpoint other than the newest")
    option("--tensors", action="store_true", help="list every tensor")
    option("--json", dest="as_json", action="store_true", help="print one JSON object")


def _workers(option: Callable[..., Any], default: int, does: str) -> None:
    """How many workers, and what to run as a module."""
    option("--workers", least=1, default=default, metavar="N", help=f"{does} (default {default})")
    option(*ELSEWHERE, dest=argparse.SUPPRESS, nargs="?", action=_Elsewhere, help=argparse.SUPPRESS)
    option("-m", dest="module", action="store_true", help="SCRIPT is a module's name, run as `python -m` runs it")


def _script(option: Callable[..., Any]) -> None:
    """Adds the script of a rehearsal, its plan and its arguments."""
    option("script", help="the training script")
    option("--plan", allow_empty=True, metavar="TEXT", help="how the work is spread among the N workers")
    option(
        "arguments", allow_empty=True, nargs="*", metavar="-- ARGUMENTS", help="the script's own arguments, after --"
    )


def _rehearsals(add: Callable[..., Any]) -> None:
    option = add(
        "check",
        _check,
        "train a few steps with one worker and with N, and compare",
        "example:\n  paceline check train.py --workers 4",
        "Tells whether a script trains the same on N workers as on one: it runs a few steps with one "
        "worker, with one worker that sums in another order (that is what rounding looks like), and with N.",
    )
    _workers(option, 2, "workers to compare with one")
    option("--steps", least=1, default=5, metavar="K", help="optimizer steps to compare after (default 5)")
    _script(option)
    option = add(
        "chaos",
        _chaos,
        "lose workers on purpose, and see what was lost with them",
        "examples:\n"
        "  paceline chaos train.py --workers 4 --plan exact\n"
        "  paceline chaos train.py --workers 4 --faults kill:0@10.backward,stop:2@30.reduced",
        "A rehearsal: trains a few steps undisturbed and again while workers are killed, stopped and made to fail, and "
        "compares the weights.",
    )
    _workers(option, 4, "workers")
    option("--steps", least=1, default=100, metavar="K", help="optimizer steps (default 100)")
    option("--losses", least=1, default=4, metavar="N", help="how many workers to lose (default 4)")
    option("--seed", least=0, default=0, help="draws who is lost, when and how (default 0)")
    option(
        "--faults",
        default="",
        allow_empty=True,
        metavar="TEXT",
        help="instead: KIND:WORKER@STEP.MOMENT, separated by commas",
    )
    _script(option)


def _makers(add: Callable[..., Any]) -> None:
    option = add(
        "tokenize",
        _tokenize,
        "make a folder of tokens out of text, for paceline.data.Tokens",
        "examples:\n"
        "  paceline tokenize texts/ --tokenizer tokenizer.json --out tokens/\n"
        "  paceline tokenize 'web-*.jsonl' --field content --tokenizer gpt2 --out tokens/ --workers 8",
        "A .txt file is one document, and so is each line of a .jsonl file. Killed at any moment, the same command "
        "goes on. The files do not depend on the number of workers.",
    )
    option("inputs", nargs="+", metavar="INPUT", help="a .txt or .jsonl file, a folder of them, or a glob")
    option("--tokenizer", required=True, metavar="FILE|NAME", help="a tokenizer.json, or a name on Hugging Face's hub")
    option("--out", required=True, type=Path, metavar="FOLDER", help="the folder to make")
    option("--workers", least=1, metavar="N", help="processes (default: one for each core)")
    option("--shard-tokens", least=1, default=100_000_000, metavar="N", help="tokens in a file (default 100,000,000)")
    option("--field", default="text", metavar="NAME", help="where a line of a .jsonl file has its text (default text)")
    option(
        "--end",
        allow_empty=True,
        metavar="TOKEN",
        help='the token behind each document (default: the usual one; "": none)',
    )


def _running(option: Callable[..., Any]) -> None:
    """Adds the options that every run has, on this host or on others."""
    option("--run-dir", metavar="DIR", help="run folder; the same one again resumes (default: a new one under runs/)")
    option("--plan", allow_empty=True, metavar="TEXT", help="how the work is spread; wins over the script's")
    option("--save-every", metavar="60s|N|auto", help="interval of checkpoints: seconds, steps or auto (default 60s)")
    option("--keep", least=1, metavar="N", help="how many checkpoints stay (default 2)")
    option(
        "--checkpoints", metavar="PLACE", help="a folder or URL for them, as s3://bucket/a (default: the run folder)"
    )
    option("--mirror", least=1, metavar="K", help="every K steps, the state of a lone worker or replica in memory")
    option("--steps", dest="max_steps", least=1, metavar="N", help="end cleanly after N optimizer steps in all")
    option("--tensorboard", action="store_const", const="1", help="write TensorBoard's files into the run folder, too")
    option("--heal", action="store_const", const="1", help="let workers whose weights differ take a majority's")
    option("--max-restarts", least=0, default=10, metavar="N", help=RESTARTS)
    option("--min-workers", least=1, default=1, metavar="N", help="pause while there are fewer (default 1)")
    option("--hang-timeout", least=0, metavar="SECONDS", help=HANGS)
    option("--cold-start", action="store_true", help="start each worker from nothing, and not from a warm process")
    option("--quiet", action="store_true", help="print only how the run ended, where it did not finish")
    option("--verbose", action="store_true", help="end with all figures of the report")


def _served(option: Callable[..., Any], at: str = "there") -> None:
    option("--metrics", metavar="ADDR:PORT", help=f"serve figures to Prometheus {at}, with the run's reading_key")
    option("--page", metavar="ADDR:PORT", help=f"serve the live page {at}, with the run's reading_key")


def _launching(add: Callable[..., Any]) -> None:
    does = "Starts one agent a host, which brings its workers to one run; the first host keeps the coordinator."
    option = add(
        "launch ssh",
        partial(_launch, "ssh"),
        "train on hosts behind OpenSSH",
        "examples:\n"
        "  paceline launch ssh --hosts a,b:2,c train.py\n"
        "  paceline launch ssh --hostfile hosts --sync --setup 'module load cuda' train.py",
        does,
    )
    _by_name(option, "ssh")
    option = add(
        "launch mpi",
        partial(_launch, "mpi"),
        "train on hosts that mpirun reaches",
        "examples:\n"
        "  paceline launch mpi --hosts a,b:2,c train.py\n"
        "  paceline launch mpi --engine='--mca plm_rsh_agent rsh' train.py     in a job of PBS: on its hosts",
        does,
    )
    _by_name(option, "mpirun")
    option = add(
        "launch slurm",
        partial(_launch, "slurm"),
        "train on nodes of a Slurm",
        "examples:\n"
        "  paceline launch slurm -N 4 --engine='--time=2:00:00 -p gpu' train.py     submits, and follows to the end\n"
        "  paceline launch slurm -N 4 --dry-run train.py                            prints what it would submit",
        f"{does} Inside an allocation it uses srun, else it submits itself as a batch script.",
    )
    option("-N", "--nodes", least=1, metavar="N", help="how many nodes")
    option("--detach", action="store_true", help="submit, and do not follow")
    _far(option, "sbatch and srun")
    option = add(
        "launch ray",
        partial(_launch, "ray"),
        "train on nodes of a Ray cluster",
        "examples:\n"
        "  paceline launch ray --nodes 4 --engine='CPU=8 GPU=4' train.py\n"
        "  paceline launch ray --hosts 10.0.0.7,10.0.0.8:2 --sync train.py     nodes by their addresses",
        f"{does} Ray is asked for a placement group with a bundle a host, each on a node of its own.",
    )
    option("-N", "--nodes", least=1, metavar="N", help="how many nodes (default: all that fit)")
    option("--address", metavar="HOST:PORT", help="of the cluster (default: RAY_ADDRESS, or that which runs here)")
    option("--wait", least=0, default=300, metavar="SECONDS", help="for Ray to place all hosts (default 300)")
    _by_name(option, "Ray")
    option = add(
        "launch spark",
        partial(_launch, "spark"),
        "train on executors of a Spark",
        "examples:\n"
        "  paceline launch spark -N 4 --master spark://a:7077 train.py\n"
        "  paceline launch spark -N 4 --master yarn --workers-per-host 4 --engine='--executor-memory 32g' train.py",
        f"{does} Spark is asked for a barrier task a host, each on an executor of its own.",
    )
    option("-N", "--nodes", least=1, metavar="N", help="how many executors")
    option("--master", metavar="URL", help="Spark's, as spark://HOST:7077 or yarn (default: that of its configuration)")
    option("--wait", least=0, default=300, metavar="SECONDS", help="for Spark to place all hosts (default 300)")
    option("--sync", action="store_true", help="copy the files that git has here, at most 200 MB")
    _far(option, "spark-submit")
    option = add(
        "launch kubernetes",
        partial(_launch, "kubernetes"),
        "train in pods of a Kubernetes",
        "examples:\n"
        "  paceline launch kubernetes -N 4 --image train:1 --gpus 8 --claim runs train.py\n"
        "  paceline launch kubernetes -N 4 --image train:1 --claim runs --dry-run /app/train.py     of the image",
        "Makes a Job with a pod a host, and follows it to the end. The script goes along, unless its path is absolute.",
    )
    option("-N", "--nodes", least=1, metavar="N", help="how many hosts")
    option("--as", dest="shape", choices=["job", "jobset", "trainjob"], default="job", help="its kind (default: job)")
    option("--image", metavar="IMAGE", help="the pods' image: it has Python and Paceline")
    option("--namespace", metavar="NAME", help="where they run (default: kubectl's)")
    option("--claim", metavar="NAME", help="a PersistentVolumeClaim that all hosts may write, for the run folder")
    option("--gpus", least=1, metavar="N", help="NVIDIA's GPUs of each host (default: none)")
    option("--cpus", metavar="Q", help="cores that each host asks for, as 8 or 500m (default: one for each worker)")
    option("--memory", metavar="Q", help="memory of each host, as 16Gi (default: no limit)")
    option("--detach", action="store_true", help="let it go on by itself, and do not follow")
    _far(option, "kubectl")


def _by_name(option: Callable[..., Any], engine: str) -> None:
    """Options of a run on hosts that the user names."""
    option("--hosts", metavar="A,B:2,..", help=f"the hosts, as {engine} takes them, some with their number of workers")
    option("--hostfile", type=Path, metavar="FILE", help="a file with a host on each line")
    option("--sync", action="store_true", help="copy the files that git has here, at most 200 MB")
    if engine == "ssh":
        option("--tunnel", action="store_true", help="all between hosts through ssh and this machine: only ssh is open")
    if engine != "Ray":  # where `ray job submit --no-wait` does it
        option("--detach", action="store_true", help="let the run go on by itself once all hosts are of it")
    _far(option, engine)


def _far(option: Callable[..., Any], engine: str) -> None:
    """Adds the options of a run on other hosts."""
    option("--workers-per-host", least=1, metavar="N", help="workers on each host (default: its GPUs, else 1)")
    default_python, default_folder = (
        ("the path of this one",) * 2 if engine != "kubectl" else ("python", "the run's volume")
    )
    if engine != "kubectl":
        option("--listen", metavar="ADDR[:PORT]", help="where the others reach the first host (default: found out)")
        _served(option, "from the first host")
    option("--python", metavar="PATH", help=f"the hosts' Python (default: {default_python})")
    option("--cwd", metavar="DIR", help=f"the folder to run in (default: {default_folder})")
    option("--setup", metavar="SHELL", help="what a shell runs there first, as 'module load cuda'")
    option("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for the workers; repeatable")
    option("--engine", default="", allow_empty=True, metavar="OPTIONS", help=f"handed on to {engine} as it is")
    option("--dry-run", action="store_true", help="print what would be started, and start nothing")
    option("-m", dest="module", action="store_true", help="SCRIPT is a module's name, run as `python -m` runs it")
    _running(option)
    option("script", nargs="?", help="the training script")
    option("arguments", allow_empty=True, nargs=argparse.REMAINDER, help="its own arguments")


def _parser(wanted: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the command `wanted` alone, or of all commands if no command has that name.

    To make those of all commands takes ten times as long. The options of a command have the names of its function's
    parameters.
    """
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Trains one PyTorch model on whatever machines there are.",
        epilog="`paceline COMMAND --help` shows options and examples. A script also runs alone: python train.py",
    )
    parser.add_argument("--version", action="version", version=f"paceline {sys.modules['paceline'].__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Callable[..., int | str], does: str, epilog: str, more: str | None = None) -> Any:
        if wanted not in (name, None):
            return lambda *_, **__: None
        form = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(name, help=does, description=more, epilog=epilog, formatter_class=form)
        added.set_defaults(command=command, usage=added.format_usage)
        return partial(_option, added)

    option = add(
        "run",
        _run,
        "train with several workers, on this machine and on others that join",
        "examples:\n"
        "  paceline run --workers 4 train.py\n"
        "  paceline run --workers 4 --run-dir runs/a train.py --epochs 3    the same command again resumes\n"
        "  paceline run --workers 2 --join runs/a train.py                  two more, at any time\n"
        '  paceline run --workers 2 --plan "precision=bf16 micro=16" train.py\n'
        "  paceline run --notify 'jq -r .what | mail -s training me' train.py\n\n"
        "words of a plan:\n" + describe(),
        "Starts the workers, shows their progress, and ends with one report or one failure block.",
    )
    _workers(option, 1, "worker processes")
    option("--join", metavar="RUN", help="bring these workers to a run: its folder, or HOST:PORT with --token-file")
    option("--token-file", metavar="FILE", help="the token of the run to join: a copy of the file token in its folder")
    option("--listen", metavar="ADDR[:PORT]", help="where other hosts reach this one (default: none can join)")
    option("--nodes", choices=["auto"], help="each node starts this by itself, and finds the first one")
    option("--store", metavar="etcd://HOST:PORT/NAME", help="this etcd decides who keeps the coordinator, at once")
    _running(option)
    option("--shares", metavar="A,B,..", help="weights of unequal workers in dealing rows, as 3,1")
    option("--against", metavar="RUN", help="a finished run to compare the speed with, in the report")
    _served(option)
    option("--notify", metavar="COMMAND", help="a shell command that gets a JSON object at a failure, a hang, the end")
    option("--debug", least=0, metavar="RANK", help="give this worker the terminal, for breakpoint()")
    option("--take-over", type=Path, metavar="RUN", help="the coordinator's host is lost: go on from here without it")
    option("script", nargs="?", help="the training script")
    option("arguments", allow_empty=True, nargs=argparse.REMAINDER, help="its own arguments")

    _launching(add)
    returning(add)
    _rehearsals(add)
    _makers(add)
    _weights(add)
    option = add(
        "explain",
        _explain,
        "say what a plan makes workers hold, send and wait for, or why a run did what it did",
        "examples:\n"
        '  paceline explain "pipeline=2 tensor=2 data=2"\n'
        '  paceline explain "pipeline=4 virtual=2" --workers 8 train.py -- --size large\n'
        "  paceline explain runs/a --svg plan.svg\n\n"
        "words of a plan:\n" + describe(),
        "A plan in words and drawn; with a script, which one worker runs up to its first step, with its blocks, bytes "
        "and seconds. Or of a run: plan, grid, decisions, time, bytes, failures.",
    )
    option("what", metavar="RUN|PLAN", help="a run folder, or a plan in quotes")
    option("script", nargs="?", help="the training script, for its figures")
    option("--workers", least=1, metavar="N", help="how many the plan is for (default: as few as it takes)")
    option("--svg", type=Path, metavar="FILE", help="write the drawing, as the report has it")
    option("-m", dest="module", action="store_true", help="SCRIPT is a module's name, run as `python -m` runs it")
    option(
        "arguments", allow_empty=True, nargs="*", metavar="-- ARGUMENTS", help="the script's own arguments, after --"
    )
    showing(add)
    return parser if commands.choices else _parser(None)


def _misplaced(usage: str, arguments: Sequence[str] = (), quiet: bool = False, **given: Any) -> str:
    """A note on options of Paceline passed to the script, which does not have them; empty if there are none."""
    names = dict.fromkeys(word.partition("=")[0] for word in arguments)
    misplaced = [name for name in names if name in re.findall(r"--[a-z-]+", usage)]
    if quiet or not misplaced:
        return ""
    script = given["script"]
    name = in_one_line(script)
    with suppress(OSError):
        text = read_file(find_module(script) if given["module"] else script).decode(errors="replace")
        misplaced = [name for name in misplaced if f'"{name}"' not in text and f"'{name}'" not in text]
    after = f"note: what stands after {name} is the script's own: {', '.join(misplaced)}"
    return f"{after}; what is meant for paceline stands before {name}" if misplaced else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    words = [*given]
    for stream in (sys.stdout, sys.stderr):  # names of files need not be UTF-8
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    script_arguments: list[str] = []
    if words[:1] in (["check"], ["chaos"], ["explain"]) and "--" in words:  # argparse would refuse them behind options
        cut = words.index("--")
        words, script_arguments = words[:cut], words[cut + 1 :]
    try:
        if words[:1] in (["run"], ["launch"], ["check"], ["chaos"]) and not sys.platform.startswith("linux"):
            what = f"the workers of `paceline {words[0]}` need Linux, and this is {sys.platform}"
            raise LaunchError(what, "run `python train.py` here, which trains with one")
        if words == ["agent"]:  # what `paceline launch` starts on a host
            from paceline.launch.engines.remote_agent import hosted

            return hosted()
        if words[:1] == ["launch"]:
            if words[1:2] not in (["ssh"], ["mpi"], ["slurm"], ["ray"], ["spark"], ["kubernetes"]):
                raise UsageError(
                    "where to launch is not said", "write paceline launch ssh, mpi, slurm, ray, spark or kubernetes"
                )
            words[:2] = [" ".join(words[:2])]
        if words and words[0].endswith(".py"):
            raise UsageError(f"{shown(words[0])} is no command", f"write paceline run {shown(words[0])}")
        at = words.index("--shares") if "--shares" in words else len(words)
        if words[at + 1 : at + 2] and re.match("-[0-9]", words[at + 1]):  # argparse takes it for an option
            words[at : at + 2] = [f"--shares={words[at + 1]}"]
        parsed, unknown = _parser(next(iter(words), None)).parse_known_args(words)
        options = vars(parsed)
        command, usage = options.pop("command"), options.pop("usage")
        if unknown and words[0] == "explain" and options["script"] is None and unknown[0][0] != "-":
            options["script"] = unknown.pop(0)  # argparse looks for it before the options alone
        if unknown:
            near = difflib.get_close_matches(unknown[0], re.findall(r"--[a-z-]+", usage()), n=1, cutoff=0.7)
            hint = "; the script's own arguments stand after --" if words[0] in ("check", "chaos", "explain") else ""
            cure = f"did you mean {near[0]}?" if near else f"see `paceline {words[0]} --help`{hint}"
            raise UsageError(f"paceline {words[0]} does not know {shown(unknown[0])}", cure)
        if script_arguments:
            options["arguments"] = script_arguments
        elif options.get("arguments", [])[:1] == ["--"]:  # sets them apart, and is none of them
            del options["arguments"][0]
        elif "--" not in words and (note := _misplaced(usage(), **options)):
            say(note)
        if words[0] in ("check", "chaos", "explain"):  # what a rehearsal says to run once more
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
            say(f"paceline: not all could be written ({error.strerror}); free some space where the output goes")
            return 2
        why = f"{shown(str(error.filename))} cannot be used ({error.strerror})"
        say(f"paceline: {why}; see to that, or give another path")
        return 2


if __name__ == "__main__":
    sys.exit(main())
