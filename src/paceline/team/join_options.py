"""The options that a joining host takes from a run.

A joining host runs its own script with its own arguments. No field names a module, a script or a command to run: the
`script` of a run is only displayed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.base.environment import MOST, parse_save_every, parse_shares, parse_verify_steps
from paceline.base.logger_names import parse_loggers
from paceline.errors import PacelineError
from paceline.plan import Plan
from paceline.team.etcd_lease import parse_store

LONGEST = 4096  # characters of a text
CONFIG = 100_000  # characters of the script's configuration, which becomes an environment variable of the workers
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_ADDRESS = re.compile("[!-~]+:[0-9]{1,5}")
_KEY = re.compile("[0-9a-f]{32}")
Check = Callable[[Any], bool]


class TermsError(ValueError):
    """A coordinator's answer to a join has fields that a joining host does not accept."""


def whole_number(least: int) -> Check:
    """Checks for a whole number from `least` on."""
    return lambda value: type(value) is int and least <= value <= MOST


def text(value: Any) -> bool:
    """Whether a value is a short text without control characters."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST and not _CONTROL.search(value)


def path(value: Any) -> bool:
    """Whether a value can be a path."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST and "\0" not in value


def parsed(parse: Callable[[str], Any]) -> Check:
    """Checks for a text that `parse` accepts as the value of an option."""

    def check(value: Any) -> bool:
        if not isinstance(value, str) or len(value) > LONGEST or _CONTROL.search(value):
            return False
        try:
            parse(value)
        except PacelineError:
            return False
        return True

    return check


def optional(check: Check) -> Check:
    """Checks for None or what `check` accepts."""
    return lambda value: value is None or check(value)


def switch(value: Any) -> bool:
    """Whether a value can be a switch: true, false or "1"."""
    return value is True or value is False or value == "1"


def _served(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    *addresses, folder = value
    return path(folder) and all(one is None or (text(one) and bool(_ADDRESS.fullmatch(one))) for one in addresses)


def _names(value: Any) -> bool:
    return isinstance(value, dict)


def _json_object(value: Any) -> bool:
    """Whether a value is the JSON text of an object, of at most `CONFIG` characters."""
    try:
        return isinstance(value, str) and len(value) <= CONFIG and isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False


def _trial(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    steps, seconds = value
    return whole_number(1)(steps) and type(seconds) in (int, float) and 0 < seconds <= MOST


OPTIONS: dict[str, Check] = {
    "plan": parsed(Plan.parse),
    "shares": parsed(lambda value: parse_shares(value, value.count(",") + 1)),
    "save_every": parsed(parse_save_every),
    "keep": whole_number(1),
    "checkpoints": path,
    "max_steps": whole_number(1),
    "tensorboard": switch,
    "log_to": parsed(parse_loggers),
    "heal": switch,
    "verify_steps": parsed(parse_verify_steps),
    "config": _json_object,
    "mirror": whole_number(1),
}
FIELDS: dict[str, Check] = {
    "script": path,
    "workers": whole_number(1),
    "max_restarts": whole_number(0),
    "min_workers": whole_number(0),
    "begin": whole_number(0),
    "exclude_after": optional(whole_number(1)),
    "store": optional(parsed(parse_store)),
    "same": _names,
    "given": _names,
    "served": _served,
    "trial": optional(_trial),
}
JOINED: dict[str, Check] = {
    "session": lambda value: isinstance(value, str) and bool(_KEY.fullmatch(value)),
    "numbers": lambda value: isinstance(value, list) and all(map(whole_number(0), value)),
    "epoch": whole_number(0),
    "run": _names,
}


def check_terms(joined: Any) -> None:
    """Checks a coordinator's answer to a join. TermsError: it has other fields, or a field has a wrong value."""
    _check(joined, JOINED)
    run = joined["run"]
    _check(run, FIELDS)
    _check(run["given"], {name: optional(check) for name, check in OPTIONS.items()})


def _check(answer: Mapping[str, Any], fields: Mapping[str, Check]) -> None:
    if not isinstance(answer, dict):
        raise TermsError("its answer is not a JSON object")
    if other := sorted(answer.keys() - fields.keys()):
        raise TermsError(f"its answer has the unknown field {_shown(other[0])}")
    for name, check in fields.items():
        if name not in answer:
            raise TermsError(f"its answer lacks the field {name}")
        if not check(answer[name]):
            raise TermsError(f"its answer has the invalid value {name}={_shown(answer[name])}")


def _shown(value: Any) -> str:
    return ascii(value)[:80]
