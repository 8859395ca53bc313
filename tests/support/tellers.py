"""A real message of each kind that workers, parameter servers and hosts tell each other, from what writes it."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn import Parameter

from paceline.base.batching import NOTHING
from paceline.checkpoint.tree import pack
from paceline.comm.hierarchical import HierarchicalTransport, _find_hosts
from paceline.comm.message_reader import decode_message
from paceline.comm.peer_status import PeerStatus
from paceline.compute.job import StepOptions
from paceline.compute.sparse_grads import pack_gradients, pack_weights
from paceline.launch.engines import preflight_hosts as checkup_hosts
from paceline.launch.engines import ray_driver
from paceline.launch.engines import remote_agent as hosted
from paceline.launch.engines.engine import Host
from paceline.launch.engines.kubernetes import Kubectl
from paceline.launch.engines.launcher import HostJob, Launcher
from paceline.launch.engines.message_types import ANSWER, FACTS
from paceline.launch.engines.remote_agent import MARK
from paceline.launch.preflight import Finding
from paceline.parallel.pipeline.stage import HEAD, Pipeline
from paceline.param_server.async_server import AsyncServer
from paceline.param_server.backup_workers import BackupWorkerServer
from paceline.param_server.client import RANKED, AsyncReplica, ServerClient, SyncReplica
from paceline.param_server.parameter_shard import Client
from paceline.param_server.protocol import Kind
from paceline.param_server.server import ParameterServer
from paceline.param_server.sync_server import SyncServer
from paceline.param_server.window import AppliedUpdate, PushedGradients
from paceline.param_server.worker_window import ticket_report
from paceline.team.etcd_lease import Lease

AT = ("127.0.0.1", 29501, "salt")
AGREED = replace(NOTHING, count=12.0, loss=3.5, unused=(1,), metrics={"accuracy": (9.0, 12.0)})
OPTIONS = StepOptions(3, 12.0, 8)
Told = tuple[str, bytes]


def fake(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


class Ear:
    """Hears what goes to a connection, or to servers."""

    broken = False

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def put(self, *_: Any, content: bytes = b"", **__: Any) -> None:
        self.heard.append(bytes(content))

    def tell(self, server: int, *content: Any) -> None:
        self.heard.append(bytes(content[-1]))


def heard(call: Callable[[Any], Any]) -> bytes:
    ear = Ear()
    call(ear)
    return ear.heard[-1]


# -- of workers ------------------------------------------------------------------------------------------------------


def servers_used(ear: Ear) -> None:
    ServerClient._tell_used(fake(used={0: AT, 1: AT}, links={0: ear}, _generation=1), 0)


def in_step(ear: Ear) -> Any:
    servers = fake(used={0: AT}, put=ear.tell, answers=lambda *_: {}, count=0, advance=lambda: None)
    runner = fake(guard=fake(carried=fake(merge=lambda _: None)))
    job, home = fake(exact=True), fake(exact=fake(largest=[0.5, float("inf")]))
    about = {"number": 0, "key": (3, 1, 0), "_rates": lambda: [[0.1], [0.2, 0.3]]}
    return fake(servers=servers, team=fake(rank=0, size=2), job=job, grad_buffers=home, runner=runner, **about)


def since(worker: Any = None) -> bytes:
    return AsyncReplica._since(fake(_have=defaultdict(lambda: -1)), 0, 1)


def wish(ear: Ear, answer: bytes, said: dict[str, Any]) -> dict[str, Any]:
    """What a worker wishes of the dealing server, and what it reads of the `answer`."""

    def of_first(*content: Any) -> bytes:
        ear.heard.append(content[-1])
        return answer

    servers = fake(of_first=of_first, begin=lambda _: None)
    return AsyncReplica.deal(cast(Any, fake(servers=servers, number=0, _asked=0)), 0, said)


def pushed(ear: Ear) -> None:
    """As a worker tells of a ticket that it has computed."""
    servers = fake(count=2, copies=0, used={0: AT}, put=ear.tell, advance=lambda: None)
    of = fake(servers=servers, push_rows=lambda: None, number=0, key=(3, 7, 0))
    batch = fake(share=[fake(rows=12)], count=8, epoch=0)
    AsyncReplica.push(of, fake(records=None), ticket_report(AGREED, 0.5, OPTIONS, batch))


def stage(ear: Ear) -> None:
    """The head of what a stage of a pipeline sends to the next."""
    sent: Callable[..., Any] = lambda _, tensors: ear.heard.append(bytes(torch.cat(tensors[:2])[8:].tolist()))
    line: Any = fake(messages=fake(send=sent), _number=0)
    values = [torch.ones(2, 3, requires_grad=True)]
    drawn = [[0, {"tensor": "AAAA"}], [1, {"tuple": [3, {"tuple": [1, 2]}, None]}]]
    forms = [{"a": [1, None]}, "x" * HEAD]
    Pipeline._send(line, 0, forms, drawn, values)


# -- of servers ------------------------------------------------------------------------------------------------------


Server = type[AsyncServer] | type[BackupWorkerServer]


def server(kind: Server = AsyncServer, leads: bool = False) -> Any:
    """A server of two, with an update in its log and a push of each worker; its shard only counts updates."""
    plan = fake(copies=1, server=2, staleness=0.0, damping=False, backup=1)
    shard = fake(trainer=0, server=0, applied=4, plan=plan, replica=fake(job=fake(optimizers=[])))
    done: Callable[..., None] = lambda *_, **__: None
    vars(shard).update(set_gradients=done, merge_buffers=done, apply=done, sum_gradients=lambda *_: {0: [0.5]})
    one: Any = kind(cast(Any, shard), str, lambda: {0, 1})
    told = {"count": 12.0, "loss": 3.5, "unused": [1], "metrics": {"accuracy": [9.0, 12.0]}, "rows": 12, "epoch": 0}
    told_once = {**told, "ticket": 3, "norm": 0.5}
    one.scheduler.start, one.scheduler.end = 3, 8
    if kind is BackupWorkerServer:
        one.scheduler.workers = {0, 1}
        entry, decision = {**told_once, "workers": [0, 1], "missed": 0, "late": [[2, 4, 8]]}, [[0, 1], 0.5, [[2, 4, 8]]]
    else:
        one.scheduler.clocks, one.scheduler.done = {0: 2, 1: 1}, {3}
        entry, decision = {**told_once, "worker": 0, "missed": 1, "clock": 2}, [0, 1, 2]
    one.window.log = [AppliedUpdate(decision, entry)]
    push = PushedGradients(4, 2**59, {"log": told, "micro_batches": 8, "expected": 12.0, **told}, {}, None, bytearray())
    one.window.pushed, one.window.first_dealing = {0: push, 1: push}, 2**59
    one.replication.used, one.replication.leads = {0, 1}, leads
    return one


def squares(ear: Ear) -> None:
    of = fake(shard=fake(applied=4, trainer=0), summed=None, squares={0: [0.5], 1: [0.25, 1e-300]})
    SyncServer._sum(of, cast(Any, ear), cast(Any, fake(key=(3, 1, 0))))


def dealt(ended: bool) -> bytes:
    """A ticket, or the log of a window that has `ended`."""
    one, ear = server(leads=True), Ear()
    one.replication.used = {0}
    one.window.waiting = {1: (ear, (3, 1, 0))}
    one.window.broken = ended
    one._advance()
    return ear.heard[-1]


def chosen(ear: Ear) -> None:
    """Whose shares make an update."""
    one = server(BackupWorkerServer, leads=True)
    one.replication.peers = {1: ear}
    one.scheduler.members, one.scheduler.arrived = (0, 1, 2), [0, 1]
    one._advance()


def update(kind: Server, ear: Ear) -> None:
    """The last update of the log."""
    one = server(kind)
    one.replication.peers = {1: ear}
    one.replication.send_last(3)


# -- of all ----------------------------------------------------------------------------------------------------------


class Store(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


def places() -> Iterator[bytes]:
    store = Store()
    side = PeerStatus(cast(Any, store), 0, 2)
    yield store["at/0"]
    side.set_state("in", ("all_reduce", "tr\udcffain.py:3"))
    side.publish()
    yield store["at/0"]


def hosts() -> Iterator[Told]:
    store = dist.HashStore()
    HierarchicalTransport(store, 0, 1, "127.0.0.1", lambda: False)
    yield "host", (mine := store.get("host/0"))
    yield "hosts", store.get("host/all")
    yield "hosts", _find_hosts([mine.replace(b'""', key).decode() for key in (b'"a"', b'"a"', b'"b"')]).encode()


PARAMS = [Parameter(torch.ones(4, 3)), Parameter(torch.ones(2, dtype=torch.float64))]


def rows() -> Iterator[bytearray]:
    table = Parameter(torch.ones(4, 3))
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 3), (4, 3), check_invariants=True)
    yield bytearray(pack_gradients({0: table}))
    yield bytearray(pack_weights({0: (table, torch.tensor([2])), 1: (PARAMS[1], None)}))


def trees() -> Iterator[bytes]:
    for tree in ({"a": [torch.ones(2, 3), (1, None)], 3: float("nan")}, [], {"steps": 3, "b": torch.ones(0)}):
        yield bytes(pack(tree).tolist())


def told() -> Iterator[Told]:
    """What is told, and about what."""
    yield "servers", heard(servers_used)
    yield "largest gradients", heard(lambda ear: SyncReplica.norm(in_step(ear), AGREED, OPTIONS))[RANKED.size :]
    yield "largest gradients", b"null"
    yield "squares", heard(squares)
    yield (
        "step",
        heard(lambda ear: SyncReplica.update(in_step(ear), cast(Any, fake(records=None)), AGREED, OPTIONS, 0.5)),
    )
    yield "updates", since()
    yield "ticket", dealt(False)
    yield "window", dealt(True)
    for said in ({"updates": 8, "stop": False}, {"updates": 8, "stop": True, "cut": 5, "broken": True}):
        yield "wish", heard(lambda ear, said=said: wish(ear, dealt(True), said))
    yield "push", heard(pushed).partition(b"\n")[0]
    for kind, how in ((AsyncServer, ""), (BackupWorkerServer, " by shares")):
        yield f"standing{how}", heard(lambda ear, kind=kind: server(kind).replication.report(ear))
        yield f"update{how}", heard(lambda ear, kind=kind: update(kind, ear))
    yield "workers", heard(chosen)
    yield from (("rows", bytes(text.partition(b"\n")[0])) for text in rows())
    yield "values", heard(stage)
    yield from (("place", place) for place in places())
    yield from hosts()


def hear(about: str, data: bytes) -> None:
    """Has a server or a worker hear that, and do what it does with it then."""
    frame = fake(kind=KINDS.get(about), trainer=0, key=(4, 0, 0), text=bytearray(data))
    if about in ("ticket", "window"):
        wish(Ear(), data, {})
    elif about == "servers":
        part = fake(_generation=3, _used={0: AT, 1: AT}, _replicated=[], _connect_leader=lambda: None)
        ParameterServer._take_used(part, cast(Any, frame))
    elif about in KINDS:
        by_shares = "shares" in about or about == "workers"
        one = server(BackupWorkerServer if by_shares else AsyncServer, leads=about == "wish")
        one.handle(Ear(), Client(), 1 if about == "wish" else -2, frame)
    else:
        decode_message(data, about, "worker 1")


KINDS = {"wish": Kind.DEAL, "workers": Kind.SUM}
KINDS |= {
    f"{name}{how}": kind
    for name, kind in (("standing", Kind.STAND), ("update", Kind.APPLY))
    for how in ("", " by shares")
}


# -- launchers, drivers and hosts ------------------------------------------------------------------------------------


def lines_of(call: Callable[[], Any]) -> list[bytes]:
    """What it says on standard output, a line of JSON each."""
    with patch("sys.stdout", io.TextIOWrapper(said := io.BytesIO(), "utf-8")):
        call()
        sys.stdout.flush()
        return [line.removeprefix(MARK) for line in said.getvalue().splitlines()]


def launcher() -> Any:
    one = Launcher.__new__(Launcher)
    options = {"script": "train.py", "arguments": ["--size", "1"], "environment": {"A": "1"}, "keep": 2, "heal": "1"}
    engine = fake(tunnel_arguments=lambda _: {"own": "a", "goes": "b", "comes": "c"}, listen=None)
    vars(one).update(_job=HostJob(options, "python", "~/a", files=b"abc"), _token="ab", _engine=engine, _listens="a:1")
    vars(one).update(sent=[], value=bytearray(), _hosts=[fake(spec=Host("a"))], _preflight=None)
    one._send = lambda _, data: one.sent.append(data.partition(b"\n")[0])
    return one


def heard_by_launcher(line: bytes) -> bytes:
    one = launcher()
    one._receive(fake(spec=Host("a", 2), first=True), line)
    return b"".join(one.sent)


def ordered() -> bytes:
    one = launcher()
    one._order(fake(spec=Host("a"), first=False))
    return cast(bytes, one.sent[0])


def said_by_hosts() -> list[bytes]:
    like = {
        "script": "76a4c6",
        "module": None,
        "arguments": [],
        "plan": None,
        "torch": "2",
        "paceline": "0",
        "python": "3",
    }

    def say() -> None:
        hosted._say("ready")
        hosted._say("like", **like, workers=2)
        hosted._say("listens", address=("10.0.0.1", 29400))
        hosted._say("value", data="YWJj")

    return lines_of(say)


def said_by_drivers() -> list[bytes]:
    def say() -> None:
        ray_driver._tell(waits="for two hosts")
        ray_driver._tell(what="there is no Ray", cure="start it")
        ray_driver._tell(door="paceline-ab", placed=["10.0.0.1", "10.0.0.2"])

    return lines_of(say)


def checked() -> list[bytes]:
    """What a host says to `paceline doctor --hosts`: of itself, and its clock."""
    found, asked = (
        patch.object(checkup_hosts, "checkup", lambda _: [Finding("a thing", "mend it")]),
        'null\n["", 1, "ab"]\n',
    )
    with found, patch("sys.stdin", io.StringIO(asked)):
        return lines_of(checkup_hosts.serve)


def heard_by_doctor(line: bytes) -> None:
    for kind in (FACTS, ANSWER):
        far = checkup_hosts._RemoteHost.__new__(checkup_hosts._RemoteHost)
        far.process = cast(Any, fake(stdout=[MARK + line]))
        far.receive(kind)


def answered_by_etcd(answers: dict[str, bytes]) -> None:
    """A lease that such answers are given to."""

    def answer(request: Any, **_: Any) -> io.BytesIO:
        return io.BytesIO(answers[request.full_url.partition("/v3/")[2]])

    with patch("urllib.request.urlopen", answer):
        lease = Lease("etcd://a:1/run", ("10.0.0.1", 29400))
        lease._try_to_acquire()
        lease._renew()


def etcd(own: bytes | None = None) -> dict[str, bytes]:
    """As etcd answers, in this form: a key that nobody has, or its value."""
    kvs = [{"key": "cnVu", "value": base64.b64encode(own).decode(), "mod_revision": "7", "version": "1"}] if own else []
    said: dict[str, Any] = {"kv/range": {"header": {"revision": "7"}, "kvs": kvs} if own else {"header": {}}}
    said |= {"kv/txn": {"header": {}, "succeeded": True}, "lease/grant": {"ID": "7587870", "TTL": "5"}}
    said |= {"lease/keepalive": {"result": {"ID": "7587870", "TTL": "5"}}}
    return {path: json.dumps(value).encode() for path, value in said.items()}


def listed(text: bytes) -> Any:
    """The items that kubectl lists."""
    done = fake(returncode=0, stdout=text.decode(errors="replace"))
    with patch.object(Kubectl, "__call__", lambda *_: done):
        return Kubectl(None, []).items("get", "pods")


PODS = json.dumps(
    {
        "kind": "List",
        "items": [
            {
                "kind": "Pod",
                "metadata": {"name": "a-0", "uid": "1", "creationTimestamp": "2026", "annotations": {"index": "0"}},
                "status": {"phase": "Running", "containerStatuses": []},
            },
            {"kind": "Event", "metadata": {"name": "e"}, "involvedObject": {"name": "a-0"}, "reason": "Failed"},
        ],
    }
).encode()
