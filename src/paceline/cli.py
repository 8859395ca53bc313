"""The command line: run, check, chaos, tokenize, export, import, inspect, explain, report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.launch import keeper
from paceline.launch.chaos import chaos
from paceline.launch.check import check
from paceline.launch.local import launch
from paceline.launch.options import LaunchOptions
from paceline.observe.report import write_report
from paceline.observe.summary import explain
from paceline.plan import describe

RESTARTS = "how often workers lost to one cause are started again (default 10); 0: any loss ends the run"


def _run(take_over: Path | None, **options: Any) -> int | str:
    if take_over is not None:
        return keeper.take_over(take_over)
    if options["script"] is None:
        raise UsageError("no script was given", "give the path of the Python file that trains")
    return launch(LaunchOptions(**options))


def _export(**options: Any) -> str:
    from paceline.checkpoint.export import export_model  # needs torch, which takes its time

    return export_model(**options)


def _tokenize(**options: Any) -> int | str:
    from paceline.data.tokenize import tokenize  # needs numpy

    try:
        return tokenize(**options)
    except KeyboardInterrupt:
        print("paceline: stopped; the same command goes on where it was", file=sys.stderr)
        return 130


def _import(**options: Any) -> str:
    from paceline.checkpoint.adopt import import_model

    return import_model(**options)


def _inspect(**options: Any) -> str:
    from paceline.checkpoint.contents import inspect_run

    return inspect_run(**options)


def _weights(add: Callable[..., Any]) -> None:
    """The commands that read and write checkpoints without a script."""
    dtype = "convert weights of floating point on the way"
    option = add(
        "export",
        _export,
        "write the weights of a run's newest checkpoint, for other programs",
        "examples:\n"
        "  paceline export runs/a model.safetensors\n"
        "  paceline export runs/a weights --max-file 2GB --dtype bf16    a folder as Hugging Face's libraries read it\n"
        "  paceline export runs/a weights --format dcp                   for torch.distributed.checkpoint.load",
        "Writes one .safetensors file, or a folder of them. Needs neither the script nor the model's code.",
    )
    option("run_dir", metavar="RUN", help="the run folder, or the URL at which it keeps its checkpoints")
    option("out", type=Path, metavar="OUT", help="the file to write, OUT.safetensors, or a folder")
    option("--format", dest="layout", choices=["safetensors", "dcp"], help="the format of a folder")
    option("--max-file", default="5GB", metavar="SIZE", help="most bytes of a file in a folder (default 5GB)")
    option("--dtype", metavar="bf16|fp16|fp32", help=dtype)
    option("--step", type=int, help="a checkpoint other than the newest")
    option("--trainer", type=int, default=0, help="which trainer of the script, from 0 (default 0)")
    option = add(
        "import",
        _import,
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
    option("--trainer", type=int, default=0, help="for which trainer of the script, from 0 (default 0)")
    option = add(
        "inspect",
        _inspect,
        "say what a checkpoint holds",
        "examples:\n  paceline inspect runs/a\n  paceline inspect runs/a --step 120 --tensors --json",
        "Lists and verifies the checkpoints of a run, and tells one of them, by default the newest.",
    )
    option("run_dir", metavar="RUN", help="the run folder, or the URL at which it keeps its checkpoints")
    option("--step", type=int, help="a checkpoint other than the newest")
    option("--tensors", action="store_true", help="list every tensor")
    option("--json", dest="as_json", action="store_true", help="print one JSON object")


def _script(option: Callable[..., Any]) -> None:
    """What a rehearsal starts, and with which plan."""
    option("script", help="the training script")
    option("--plan", metavar="TEXT", help="how the work is spread among the N workers")
    option("arguments", nargs="*", metavar="-- ARGUMENTS", help="the script's own arguments, after --")


def _rehearsals(add: Callable[..., Any]) -> None:
    option = add(
        "check",
        check,
        "train a few steps with one worker and with N, and compare",
        "example:\n  paceline check train.py --workers 4",
        "Tells whether a script trains the same on N workers as on one: it runs a few steps with one "
        "worker, with one worker that sums in another order (that is what rounding looks like), and with N.",
    )
    option("--workers", type=int, default=2, metavar="N", help="workers to compare with one (default 2)")
    option("--steps", type=int, default=5, metavar="K", help="optimizer steps to compare after (default 5)")
    _script(option)
    option = add(
        "chaos",
        chaos,
        "lose workers on purpose, and see what was lost with them",
        "examples:\n"
        "  paceline chaos train.py --workers 4 --plan exact\n"
        "  paceline chaos train.py --workers 4 --faults kill:0@10.backward,stop:2@30.reduced",
        "A rehearsal: trains a few steps undisturbed and again while workers are killed, stopped and made to fail, and "
        "compares the weights.",
    )
    option("--workers", type=int, default=4, metavar="N", help="workers (default 4)")
    option("--steps", type=int, default=100, metavar="K", help="optimizer steps (default 100)")
    option("--losses", type=int, default=4, metavar="N", help="how many workers to lose (default 4)")
    option("--seed", type=int, default=0, help="draws who is lost, when and how (default 0)")
    option("--faults", default="", metavar="TEXT", help="instead: KIND:WORKER@STEP.MOMENT, with commas between")
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
    option("--workers", type=int, metavar="N", help="processes (default: one for each core)")
    option("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens in a file (default 100,000,000)")
    option("--field", default="text", metavar="NAME", help="where a line of a .jsonl file has its text (default text)")
    option("--end", metavar="TOKEN", help='the token behind each document (default: the usual one; "": none)')


def _parser() -> argparse.ArgumentParser:
    """The options of a command have the names of its function's parameters."""
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Trains one PyTorch model on whatever machines there are.",
        epilog="`paceline COMMAND --help` shows options and examples. A script also runs alone: python train.py",
    )
    parser.add_argument("--version", action="version", version=f"paceline {version('paceline')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Callable[..., int | str], does: str, epilog: str, more: str | None = None) -> Any:
        form = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(name, help=does, description=more, epilog=epilog, formatter_class=form)
        added.set_defaults(command=command)
        return added.add_argument

    option = add(
        "run",
        _run,
        "train with several workers, on this machine and on others that join",
        "examples:\n"
        "  paceline run --workers 4 train.py\n"
        "  paceline run --workers 4 --run-dir runs/a train.py --epochs 3    the same command again resumes\n"
        "  paceline run --workers 2 --join runs/a train.py                  two more, at any time\n"
        '  paceline run --workers 2 --plan "precision=bf16 micro=16" train.py\n\n'
        "words of a plan:\n" + describe(),
        "Starts the workers, shows their progress, and ends with one report or one failure block.",
    )
    option("--workers", type=int, default=1, metavar="N", help="worker processes (default 1)")
    option("--join", metavar="RUN", help="bring these workers to a run: its folder, or HOST:PORT with --token-file")
    option("--token-file", metavar="FILE", help="the token of the run to join: a copy of the file token in its folder")
    option("--listen", metavar="ADDR[:PORT]", help="where other hosts reach this one (default: none can join)")
    option("--store", metavar="etcd://HOST:PORT/NAME", help="this etcd decides who keeps the coordinator, at once")
    option("--run-dir", metavar="DIR", help="run folder; the same one again resumes (default: a new one under runs/)")
    option("--plan", metavar="TEXT", help="how the work is spread; wins over the script's")
    option("--shares", metavar="A,B,..", help="weights of unequal workers in dealing rows, as 3,1")
    option("--save-every", metavar="60s|N|auto", help="interval of checkpoints: seconds, steps or auto (default 60s)")
    option("--keep", type=int, metavar="N", help="how many checkpoints stay (default 2)")
    option(
        "--checkpoints", metavar="PLACE", help="a folder or URL for them, as s3://bucket/a (default: the run folder)"
    )
    option("--mirror", type=int, metavar="K", help="every K steps, the state of a lone worker or replica in memory")
    option("--steps", dest="max_steps", type=int, metavar="N", help="end cleanly after N optimizer steps in all")
    option("--against", metavar="RUN", help="a finished run to compare the speed with, in the report")
    option("--max-restarts", type=int, default=10, metavar="N", help=RESTARTS)
    option("--min-workers", type=int, default=1, metavar="N", help="pause while there are fewer (default 1)")
    option("--debug", type=int, metavar="RANK", help="give this worker the terminal, for breakpoint()")
    option("--quiet", action="store_true", help="print only how the run ended, where it did not finish")
    option("--take-over", type=Path, metavar="RUN", help="the coordinator's host is lost: go on from here without it")
    option("script", nargs="?", help="the training script")
    option("arguments", nargs=argparse.REMAINDER, help="its own arguments")

    _rehearsals(add)
    _makers(add)
    _weights(add)
    does = "say why a run did what it did: plan, grid, decisions, time, bytes, failures"
    option = add("explain", explain, does, "example:\n  paceline explain runs/a")
    option("folder", type=Path, metavar="RUN", help="the run folder")
    does = "write RUN/report.html again and print its summary"
    option = add("report", write_report, does, "example:\n  paceline report runs/a")
    option("folder", type=Path, metavar="RUN", help="the run folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own: list[str] = []
    if words[:1] in (["check"], ["chaos"]) and "--" in words:  # argparse would refuse them behind options
        cut = words.index("--")
        words, own = words[:cut], words[cut + 1 :]
    options = vars(_parser().parse_args(words))
    if own:
        options["arguments"] = own
    elif options.get("arguments", [])[:1] == ["--"]:  # sets them apart, and is none of them
        del options["arguments"][0]
    command = options.pop("command")
    try:
        done: int | str = command(**options)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    if isinstance(done, int):
        return done
    print(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
