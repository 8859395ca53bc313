"""The command line: run, check, export, explain, report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from paceline.errors import PacelineError

_FORM = argparse.RawDescriptionHelpFormatter


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Trains one PyTorch model on whatever machines there are.",
        epilog="`paceline COMMAND --help` shows options and examples. A script also runs alone: python train.py",
        formatter_class=_FORM,
    )
    parser.add_argument("--version", action="version", version=f"paceline {version('paceline')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _run_parser(commands)
    _check_parser(commands)
    export = commands.add_parser(
        "export",
        help="write the weights of a run's newest checkpoint as safetensors",
        epilog="example:\n  paceline export runs/a model.safetensors",
        formatter_class=_FORM,
    )
    export.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    export.add_argument("out", type=Path, metavar="OUT.safetensors", help="the file to write")
    export.add_argument("--step", type=int, help="a checkpoint other than the newest")
    export.add_argument("--trainer", type=int, default=0, help="which trainer of the script, from 0 (default 0)")
    explain = commands.add_parser(
        "explain",
        help="say why a run did what it did: plan, grid, decisions, time, bytes, failures",
        epilog="example:\n  paceline explain runs/a",
        formatter_class=_FORM,
    )
    explain.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    report = commands.add_parser(
        "report",
        help="write RUN/report.html again and print its summary",
        epilog="example:\n  paceline report runs/a",
        formatter_class=_FORM,
    )
    report.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    return parser


def _run_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from paceline.plan import describe

    run = commands.add_parser(
        "run",
        help="train with several workers on this machine",
        description="Starts the workers, shows their progress, and ends with one report or one failure block.",
        epilog="examples:\n"
        "  paceline run --workers 4 train.py\n"
        "  paceline run --workers 4 --run-dir runs/a train.py --epochs 3    the same command again resumes\n"
        '  paceline run --workers 2 --plan "precision=bf16 micro=16" train.py\n\n'
        "words of a plan:\n" + describe(),
        formatter_class=_FORM,
    )
    run.add_argument("--workers", type=int, default=1, metavar="N", help="worker processes (default 1)")
    run.add_argument(
        "--run-dir", metavar="DIR", help="run folder; the same one again resumes (default: a new one under runs/)"
    )
    run.add_argument("--plan", metavar="TEXT", help="how the work is spread; wins over the script's")
    run.add_argument("--shares", metavar="A,B,..", help="weights of unequal workers in dealing rows, as 3,1")
    run.add_argument("--save-every", metavar="60s|N", help="interval of checkpoints, seconds or steps (default 60s)")
    run.add_argument("--steps", type=int, metavar="N", help="end cleanly after N optimizer steps in all")
    run.add_argument("--against", metavar="RUN", help="a finished run to compare the speed with, in the report")
    run.add_argument("--debug", type=int, metavar="RANK", help="give this worker the terminal, for breakpoint()")
    run.add_argument("--quiet", action="store_true", help="print only how the run ended, where it did not finish")
    run.add_argument("script", help="the training script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")


def _check_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="train a few steps with one worker and with N, and compare",
        description="Tells whether a script trains the same on N workers as on one: it runs a few steps with one "
        "worker, with one worker that sums in another order (that is what rounding looks like), and with N.",
        epilog="example:\n  paceline check train.py --workers 4",
        formatter_class=_FORM,
    )
    check.add_argument("script", help="the training script")
    check.add_argument("--workers", type=int, default=2, metavar="N", help="workers to compare with one (default 2)")
    check.add_argument("--steps", type=int, default=5, metavar="K", help="optimizer steps to compare after (default 5)")
    check.add_argument("--plan", metavar="TEXT", help="the plan of the N workers")
    check.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="the script's own arguments, after --")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own: list[str] = []
    if words[:1] == ["check"] and "--" in words:
        cut = words.index("--")
        words, own = words[:cut], words[cut + 1 :]
    options = _parser().parse_args(words)
    if own:
        options.arguments = own
    try:
        return _command(options)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2


def _command(options: argparse.Namespace) -> int:
    if options.command == "run":
        return _run(options)
    if options.command == "check":
        from paceline.launch.check import check

        return check(options.script, _own(options.arguments), options.workers, options.steps, options.plan)
    if options.command == "export":
        from paceline.checkpoint.export import export_model

        print(export_model(options.run, options.out, options.trainer, options.step))
    elif options.command == "explain":
        from paceline.observe.explain import explain

        print(explain(options.run))
    else:
        from paceline.observe.report import write_report

        print(write_report(options.run))
    return 0


def _run(options: argparse.Namespace) -> int:
    from paceline.launch.local import LaunchOptions, launch
    from paceline.plan import Plan
    from paceline.world import parse_save_every, parse_shares

    # What can be refused is refused here, before any worker starts.
    if options.plan is not None:
        Plan.parse(options.plan).validate(options.workers)
    if options.shares is not None:
        parse_shares(options.shares, options.workers)
    if options.save_every is not None:
        parse_save_every(options.save_every)
    return launch(
        LaunchOptions(
            script=options.script,
            arguments=_own(options.arguments),
            workers=options.workers,
            run_dir=options.run_dir,
            plan=options.plan,
            shares=options.shares,
            save_every=options.save_every,
            max_steps=options.steps,
            against=options.against,
            debug=options.debug,
            quiet=options.quiet,
        )
    )


def _own(arguments: list[str]) -> list[str]:
    """The script's arguments, without the -- that may set them apart."""
    return arguments[1:] if arguments[:1] == ["--"] else arguments


if __name__ == "__main__":
    sys.exit(main())
