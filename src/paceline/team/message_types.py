"""Types of messages between workers, agents, commands and the coordinator.

Imported with the first one that is
read: it needs msgspec. No torch.

The limits are far beyond what any run has, and keep a receiver from making millions of something. Fields that are not
named here belong to later versions, and are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
Worker = Annotated[int, Meta(ge=0, le=10**12)]
Last = Annotated[int, Meta(ge=-1, le=2**53)]  # a number, or -1 where there is none
Few = Annotated[int, Meta(ge=0, le=1 << 16)]  # a number of objects that the receiver makes
PositiveCount = Annotated[int, Meta(ge=1, le=1 << 16)]
Code = Annotated[int, Meta(ge=-(2**31), le=2**31)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
Attempts = Annotated[float, Meta(ge=0, le=1 << 16)]  # in parts where several workers compute together
Number = Annotated[str, Meta(pattern="^[0-9]{1,12}\\Z")]  # a worker's number as a key
Key = Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")]
Port = Annotated[int, Meta(ge=0, le=65535)]
Address = tuple[str, Port]
At = tuple[str, Port, str]
Workers = Annotated[list[Worker], Meta(max_length=1 << 16)]


def form(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> Any:
    """Makes the type of a dict that has all required fields, and may have the optional ones."""
    may = {name: NotRequired[kind] for name, kind in (optional or {}).items()}
    return TypedDict("Form", {**required, **may})  # type: ignore[operator]


def by_number(kind: Any) -> Any:
    """Makes the type of a dict by workers' numbers."""
    return dict.__class_getitem__((Number, kind))


def each(names: str, kind: Any) -> dict[str, Any]:
    """Makes fields of one type from names that are separated by spaces."""
    return dict.fromkeys(names.split(), kind)


# ---- requests to the coordinator, by the path's name

ROUND = form(
    {
        **each("turn number trainer step", Count),
        **each("made ready", list[Few]),
        **each("count quorum", Few),
        "void": bool,
    }
)
STATE = form(  # of a worker, see worker_slots.WorkerReport
    {},
    each("newcomer ready waiting current leaves ended final stopped declined holds", bool)
    | each("life formed alone", Last)
    | each("hung stands why", str)
    | each("cause tail", list[str])
    | each("servers copies", Few)
    | {"store": Address, "replica": PositiveCount, "at": At | None, "failed": tuple[str, Count, str] | None}
    | {"wrong": Attempts, "checked": tuple[Count, str, Seconds] | None}
    | {"since": Seconds, "status": Code | None, "round": ROUND | None},
)
SAME = form(  # a report whose other fields are the same as in the last one
    {"epoch": Count},
    each("same leaving over stop bye changes", bool)
    | {"clock": tuple[Seconds, Seconds] | None, "loaded": dict[Number, tuple[Seconds, Seconds]] | None}
    | {"sent": dict[str, Count] | None, "here": list[str], "busy": dict[Number, Seconds]}
    | {"troubles": Annotated[list[tuple[Seconds, str, str]], Meta(max_length=100)]},
)
REPORT = form({"step": Count, "workers": by_number(STATE)})
WAITING_PLACE = {"place": str | None, "since": Seconds | None, "group": str | None, "number": Count | None}
STAND = form(
    {"name": str, "files": tuple[str, str], "worker": Worker, "state": str, "newest": dict[str, Count], "at": Seconds},
    {"host": str | None, **WAITING_PLACE},
)
REQUESTS: dict[str, Any] = {
    "join": form(
        each("agent host logs", str)
        | {"standby": Address, "numbers": Workers, "count": Few, "same": dict[str, Any]}
        | {"generation": tuple[Count, Workers]},
        {"spares": Few, "machine": str, "failures": Annotated[list[tuple[Seconds, str]], Meta(max_length=1000)]},
    ),
    "fence": form({"address": Address, "epoch": Count}),
    "stop": dict[str, Any],
    "stacks": form({}, {"asked": Count | None}),
    "profile": form({"steps": Annotated[int, Meta(ge=1, le=10**12)], "workers": Workers | None}),
    "report": SAME,
    "stands": form({"asked": Count}, {"last": bool}),
}

# ---- the coordinator's answers, by path

GENERATION = form(
    {"number": Count, "members": Annotated[list[Worker], Meta(min_length=1)], "store": Address},
    {"at_once": Count, "hold": bool, "detection": Seconds, "admits": bool},
)
MERGE = form(each("turn number trainer step", Count) | each("islands late", list[Few]) | {"void": bool})
ORDERS = form(
    each("epoch version agents stacks", Count)
    | each("over finished stop", bool)
    | each("coming servers", dict[Number, At])
    | {"workers": by_number(form({"life": Last, "newcomer": bool, "out": bool})), "store": Address | None}
    | {"generation": GENERATION | None, "failing": list[tuple[Worker, str, str]], "merge": MERGE | None}
    | {"standbys": list[Address], "moved": Address | None, "lines": list[tuple[Count, str, bool]]}
    | {"profile": form({}, {"asked": Count, "steps": Count, "workers": Workers})},
    {"failures": list[tuple[Seconds, str]], "excluded": str, "changes": bool, "hosts": list[tuple[str, Few]]}
    | {"damaged": Last},
)
STANDS = by_number(form({"state": str, "newest": dict[str, Count], "at": Seconds, **WAITING_PLACE}))
ANSWERS: dict[str, Any] = {
    "/challenge": form({"challenge": Key, "epoch": Count}),
    "/report": form({"version": Count, "open": bool}, {"clock": tuple[Seconds, Seconds] | None}),
    "/orders": ORDERS,
    "/stop": form({"step": Count}),
    "/stacks": form({"asked": Count, "waits": list[str], "folder": str, "workers": STANDS}),
    "/profile": form({"asked": Count, "workers": Workers, "folder": str}),
}
REFUSAL = form({}, {"refused": str, "differs": list[tuple[str, Any, Any]], "script": str})

# ---- messages of a worker to its agent, by event

EVENTS: dict[str, Any] = {
    **each("ready waiting", form({}, {"replica": PositiveCount, "at": At})),
    **each("formed alone", form({"number": Count})),
    **each("found stopped finished", form({}, {"step": Count | None, "checkpoint": str | None})),
    "serving": form({"at": At}),
    "servers": form(each("count copies", Few)),
    "round": form({"told": ROUND}),
    "failed": form({}, {"step": Count | None, **each("kind text", str), **each("what at within hint", str | None)}),
    "step": form(
        {},
        each("step trainer epoch", Count | None)
        | each("seconds samples tokens steps", Seconds | None)
        | {"loss": float | None, "metrics": dict[str, Any] | None, "time": dict[str, Seconds] | None},
    ),
    "phase": form({}, each("trainer steps epochs", Count | None) | {"done": list[Count] | None, "model": str | None}),
    "evaluate": form({}, {"trainer": Count | None, "results": dict[str, Any] | None}),
    "loaders": form({"pids": list[Annotated[int, Meta(ge=1, le=2**31)]]}),
    "needs": form({"plans": list[tuple[str, list[Count]]], "besides": int}),
    "saved": form({"step": Count}),
    "corrupted": form({"attempts": Attempts}),
    "checked": form({"step": Count, "damage": str, "seconds": Seconds}),
}

# ---- messages of an agent to its worker: a generation, or one of these

COMMAND = form(
    {},
    {**each("coming servers", dict[Number, At]), "merge": MERGE | None, "wait": bool, "damaged": Last}
    | {"profile": form({}, {"asked": Count, "steps": Count, "workers": Workers})},
)

# ---- etcd's answers; its numbers are texts

DIGITS = Annotated[str, Meta(pattern="^[0-9]{1,20}\\Z")]
ETCD: dict[str, Any] = {
    "kv/range": form({}, {"kvs": list[form({"value": str, "mod_revision": DIGITS})]}),  # type: ignore[misc]
    "kv/txn": form({}, {"succeeded": bool}),
    "lease/grant": form({"ID": DIGITS}),
    "lease/keepalive": form({}, {"result": form({}, {"TTL": DIGITS})}),
    "lease/revoke": form({}),
}
