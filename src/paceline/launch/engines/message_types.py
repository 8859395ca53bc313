"""Types of the JSON lines between launcher, drivers and hosts.

This module needs msgspec, so it is imported only when the first line is read. No torch.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict, get_type_hints

from msgspec import Meta

from paceline.launch.options import LaunchOptions
from paceline.team.message_types import Port, PositiveCount, Seconds, each, form

Size = Annotated[int, Meta(ge=0, le=2**53)]
At = tuple[str, Port, str]  # address, port and secret at which a host listens for measurements of its links
Secret = Annotated[str, Meta(pattern=r"^[!-~]+\Z")]
Amount = Annotated[float, Meta(ge=0, le=1e15)]
_BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?\Z"
_HINTS = get_type_hints(LaunchOptions)
_LOCAL = "warm_holder", "token", "on_listening", "workers", "chosen", "trial", "hosts"  # that no host gets as options
OPTIONS = {name: kind for name, kind in _HINTS.items() if name not in _LOCAL}

# ---- from a launcher to a host

JOB: Any = (
    form(
        {"options": form({}, OPTIONS), "workers": PositiveCount | None, "token": Secret, "files": Size, "call": Size}
        | {"tunnel": form(each("own goes comes", str)) | None, "preflight": bool, "spare": bool}
    )
    | None
)
ORDER: Any = (
    form(
        {"name": str, "listen": str | None, "towards": str | None, "join": str | None, "detach": bool, "size": Size},
        {"slow": list[str], "hosts": list[PositiveCount]},
    )
    | None
)
SENT: Any = dict[str, Any] | None  # an order, or what follows
ASKED: Any = form({"measure": At})  # the link to another host

# ---- from a host, by kind of message

AGENT_MESSAGES: dict[str, Any] = {
    "ready": form({}),
    "like": form(each("script python torch paceline", str), {"workers": PositiveCount}),
    "figures": form({"at": At, "clock": Seconds}, each("memory products flush free", Amount)),
    "link": form({}, {"rate": Amount, "latency": Seconds, "refused": str}),
    "listens": form({"address": tuple[str, Port]}),
    "value": form({"data": Annotated[str, Meta(pattern=_BASE64)]}),
}

# ---- from a driver, by a field of the message

DRIVEN: dict[str, Any] = {
    "waits": form({"waits": str}),
    "what": form(each("what cure", str)),
    "placed": form({"door": str, "placed": Annotated[list[str], Meta(min_length=1)]}),
}

# ---- of `paceline doctor --hosts`

MEASURE: Any = At | None
RATE = Amount
FACTS = form({"versions": dict[str, str], "found": list[tuple[str, str, str]], "at": At})
ANSWER = form({}, {"clock": Seconds, "rate": RATE, "latency": Seconds, "refused": str})

# ---- from kubectl


class Metadata(TypedDict):
    """The metadata of a Kubernetes object, as far as we read it."""

    name: str
    uid: NotRequired[str]
    creationTimestamp: NotRequired[str | None]
    annotations: NotRequired[dict[str, Any]]


_ITEM = form({"metadata": Metadata}, {"involvedObject": form({}, {"name": str}), **each("status spec", dict[str, Any])})
ITEMS = form({"items": list.__class_getitem__(_ITEM)})
