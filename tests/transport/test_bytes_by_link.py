"""Bytes by link: the kernel's own count of connections, and what the journal makes of it."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from paceline.launch.traffic import Traffic
from paceline.observe.metrics import METRICS
from paceline.observe.summary import Summary, facts


@pytest.mark.parametrize(
    ("family", "here", "there"),
    [(socket.AF_INET, "127.0.0.2", "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.3", "::ffff:127.0.0.1")],
)
def test_what_a_process_sent_is_what_its_connections_sent(family: int, here: str, there: str) -> None:
    """Two addresses stand for two hosts; one that it reaches itself by does not count."""
    traffic, me = Traffic(), [os.getpid()]
    here_4, there_4 = (address.removeprefix("::ffff:") for address in (here, there))
    with (
        socket.socket(family) as listens,
        socket.socket(family) as sends,
        socket.create_server(("127.0.0.1", 0)) as own,
    ):
        listens.bind((there, 0))
        listens.listen()
        sends.bind((here, 0))
        sends.connect(listens.getsockname())
        takes, _ = listens.accept()
        alone = socket.create_connection(own.getsockname())
        with takes, alone:
            alone.sendall(bytes(77))
            before = traffic.look(me)[0].get(there_4, 0)
            for size in (100_000, 1):
                sends.sendall(bytes(size))
                left = size
                while left:
                    left -= len(takes.recv(left))
                end = time.monotonic() + 20
                while traffic.look(me)[0].get(there_4, 0) - before < size and time.monotonic() < end:
                    time.sleep(0.01)
                sent, ours = traffic.look(me)
                assert sent[there_4] - before == size
                assert here_4 in ours
                before = sent[there_4]
            assert set(sent) == {here_4, there_4}, "the other end is a connection of ours as well"
            assert sent[here_4] == 0
    assert traffic.look(me)[0][there_4] == before, "what has ended stays"


def test_links_of_a_journal(tmp_path: Path) -> None:
    """Of each agent what it told last; a host that told nothing is its address."""

    def told(host: str, agent: str, here: str, **sent: int) -> dict[str, object]:
        by = {address.replace("_", "."): count for address, count in sent.items()}
        return {"event": "loaded", "host": host, "workers": {}, "sent": by, "here": [here], "agent": agent}

    events: list[dict[str, object]] = [
        {"event": "start", "workers": 3},
        told("a", "1", "10.0.0.1", **{"10_0_0_2": 5, "10_0_0_9": 1}),
        told("b", "2", "10.0.0.2", **{"10_0_0_1": 2_000_000, "10_0_0_2": 0}),
        told("a", "1", "10.0.0.1", **{"10_0_0_2": 3_000_000, "10_0_0_9": 1}),
    ]
    lines = (json.dumps({"at": 1.0 + number, **event}) for number, event in enumerate(events))
    (tmp_path / "journal.jsonl").write_text("".join(f"{line}\n" for line in lines))
    summary = Summary(tmp_path)
    links = {"a to b": 3e6, "b to a": 2e6, "a to 10.0.0.9": 1.0}
    assert summary.sent == links
    (metric,) = (one for one in METRICS if one.name == "paceline_link_bytes_total")
    assert {label: value for (_, label), value in metric.values(summary)} == links
    assert dict(facts(summary)["Costs"])["sent"] == "a to b 3 MB, b to a 2 MB, a to 10.0.0.9 1 B"
