"""The loggers that come with Paceline: their names, as ``--log-to`` takes them, and the package that each needs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from paceline.base.console import shown
from paceline.errors import UsageError

# Names of loggers, each with the module that it needs; the extra of the package has the logger's name. CSV needs none.
MODULES = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "comet": "comet_ml",
    "csv": "",
    "tensorboard": "tensorboard",
    "otlp": "opentelemetry.exporter.otlp.proto.http",
}


class LoggerName(NamedTuple):
    """A logger by name, and the target that was given after a colon: a project, an address or a folder."""

    kind: str
    target: str = ""


def parse_loggers(text: str, given_as: str = "--log-to") -> list[LoggerName]:
    """Parses ``wandb:team/digits,csv``. Raises UsageError for unknown names; its text begins with `given_as`."""
    names = [LoggerName(*part.strip().partition(":")[::2]) for part in text.split(",")]
    for name in names:
        if name.kind not in MODULES:
            what = f"{given_as} names {shown(text)}, and no logger has the name {shown(name.kind)}"
            raise UsageError(what, f"use one of {', '.join(sorted(MODULES))}")
    return names


def check_installed(kind: str) -> None:
    """Raises UsageError if the package that a logger needs is not installed. Nothing is imported, except for packages
    that contain the module.
    """
    module = MODULES[kind]
    try:
        is_there = not module or find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains it
        is_there = False
    if not is_there:
        package = module.partition(".")[0]
        what = f"nothing can be logged to {kind}, because the package {package} is not installed"
        raise UsageError(what, f"run pip install 'paceline[{kind}]'")
