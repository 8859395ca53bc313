"""`paceline doctor --hosts`: checks hosts, their clocks and links before a run.

On each host, one process that is started over ssh answers each line of JSON with a line of JSON. Links are measured in
rounds in which each host belongs to one pair: all pairs for up to `ALL` hosts, and the same number of rounds for more.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.console import say
from paceline.base.schema import read_message
from paceline.base.text import plural
from paceline.errors import FormatError
from paceline.launch.engines.engine import parse_hosts, split_options
from paceline.launch.engines.links import ANSWER, PATIENCE, SENT, measure_link, offer_links
from paceline.launch.engines.remote_agent import MARK
from paceline.launch.engines.ssh import Ssh
from paceline.launch.preflight import Finding, checkup, versions
from paceline.observe import doctor as observe

ALL = 8
APART = 1.0  # seconds between two clocks, above which the difference is reported


def doctor(folder: Path | None, hosts: str | None, python: str, engine: str | None, serves: bool) -> int | str:
    """Returns a diagnosis of a run as text, if its `folder` is given. Otherwise it prints the findings about this host,
    or about `hosts` and the links between them, and returns 1 if a run may fail. With `serves` it answers the questions
    of the `doctor` that started it over ssh instead. UsageError: `folder` is not a run folder.
    """
    if folder is not None:
        return observe.doctor(folder)
    if serves:
        return serve()
    tell = partial(say, out=sys.stdout)
    findings = [*checkup(Path())] if hosts is None else examine_hosts(hosts, python, engine, tell)
    for finding in findings:
        tell(str(finding))
    open_findings = sum(bool(finding.cure) for finding in findings)
    tell(f"{plural(open_findings, 'problem')} to fix" if open_findings else "ready to start a run")
    return min(open_findings, 1)


# ---- on a host


def serve() -> int:
    """Answers the requests of the process that started us, until its end."""
    endpoint, _ = offer_links()
    from paceline.launch.engines.message_types import MEASURE  # needs msgspec

    findings = [[finding.what, finding.cure, finding.note] for finding in checkup(Path())]
    _say({"versions": versions(), "found": findings, "at": endpoint})
    for line in sys.stdin:
        target = read_message(line.encode(), MEASURE, "the request of paceline doctor")
        _say({"clock": time.time()} if target is None else measure_link(*target))
    return 0


def _say(what: Any) -> None:
    sys.stdout.buffer.write(MARK + json.dumps(what).encode() + b"\n")
    sys.stdout.flush()


# ---- on the host of the command


class _RemoteHost:
    """A remote host and the facts that it has sent; `why`: the reason for its silence, if it is silent."""

    def __init__(self, name: str, command: Sequence[str], script: str) -> None:
        self.name, self.why = name, ""
        self.facts: dict[str, Any] = {}
        self.clock = 0.0
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._send(script.encode())

    def _send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # `receive` notices its end
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def end(self) -> None:
        """Kills the connection to the host."""
        self.process.kill()

    def receive(self, kind: Any) -> Any:
        """The host's next answer, checked against a type; None if it has ended or its answer has another type."""
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if line.startswith(MARK)), None)
        if line is not None:
            try:
                return read_message(line.removeprefix(MARK), kind, "its message")
            except FormatError as error:
                self.why = str(error)
                return None
        assert self.process.stderr is not None
        last = self.process.stderr.read().decode(errors="replace").strip().splitlines()
        self.why = last[-1] if last else "no output"
        return None

    def ask(self, what: Any) -> Any:
        """Sends a request and returns the host's answer, or ``{"refused": reason}``."""
        self._send(json.dumps(what).encode() + b"\n")
        from paceline.launch.engines.message_types import ANSWER as FORM  # needs msgspec

        return self.receive(FORM) or {"refused": self.why or "no output"}

    def receive_facts(self) -> None:
        """Receives the host's facts and measures how far its clock is from ours, by the quickest of three answers."""
        from paceline.launch.engines.message_types import FACTS  # needs msgspec

        self.facts = self.receive(FACTS) or {}
        measurements = []
        for _ in range(3 if self.facts else 0):
            before = time.time()
            remote_clock = self.ask(None).get("clock", before)
            after = time.time()
            measurements.append((after - before, remote_clock - (before + after) / 2))
        self.clock = min(measurements)[1] if measurements else 0.0


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs `count` hosts in rounds: each host is once in a round, each pair in one round (the circle method)."""
    places = [*range(count + count % 2)]
    for _ in range(min(len(places) - 1, ALL - 1)):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        places = [places[0], places[-1], *places[1:-1]]


def examine_hosts(hosts: str, python: str, engine: str | None, say: Callable[[str], None]) -> list[Finding]:
    """Checks the hosts of a --hosts option and the links between them. `say` prints a line. UsageError: the option does
    not name hosts.
    """
    specs, given = parse_hosts(hosts), split_options(engine)
    script = f"exec {shlex.quote(python)} -m paceline doctor --here\n"
    ssh = Ssh(specs, given)
    remote_hosts = [_RemoteHost(spec.name, ssh.command(spec), script) for spec in specs]
    watch = threading.Timer(ANSWER + ALL * (SENT + PATIENCE), lambda: [*map(_RemoteHost.end, remote_hosts)])
    watch.start()
    try:
        with ThreadPoolExecutor(len(remote_hosts)) as pool:
            [*pool.map(_RemoteHost.receive_facts, remote_hosts)]
            alive = [one for one in remote_hosts if one.facts]
            links = dict[tuple[str, str], Any]()
            for pairs in rounds(len(alive)) if len(alive) > 1 else ():
                host_pairs = [(alive[one], alive[other]) for one, other in pairs]
                answers = pool.map(lambda pair: pair[0].ask(pair[1].facts["at"]), host_pairs)
                links |= {
                    (one.name, other.name): answer for (one, other), answer in zip(host_pairs, answers, strict=True)
                }
    finally:
        watch.cancel()
        for one in remote_hosts:
            one.end()
            one.process.wait()
    return [*_of_hosts(remote_hosts, say), *_of_links(links, say)]


def _of_hosts(remote_hosts: Sequence[_RemoteHost], say: Callable[[str], None]) -> Iterator[Finding]:
    answering = [host for host in remote_hosts if host.facts]
    names = max(len(host.name) for host in remote_hosts)
    for host in answering:
        version_text = ", ".join(f"{name} {number}" for name, number in host.facts["versions"].items())
        say(f"{host.name:{names}}  {host.facts['at'][0]}, {version_text}, clock {host.clock:+.3f} s")
    for host in remote_hosts:
        if not host.facts:
            yield Finding(f"{host.name} does not answer", host.why)
        for what, cure, note in host.facts.get("found", ()):
            if cure or note:
                yield Finding(f"{host.name}: {what}", cure, note)
        if abs(host.clock) > APART:
            yield Finding(f"the clock of {host.name} is {host.clock:+.1f} s off this host's", note="set it with NTP")
    if len({json.dumps(host.facts["versions"]) for host in answering}) > 1:
        yield Finding("the hosts have different versions", "install the same ones everywhere, or use --python PATH")


def _of_links(links: dict[tuple[str, str], Any], say: Callable[[str], None]) -> Iterator[Finding]:
    measured = {pair: link for pair, link in links.items() if link.keys() >= {"rate", "latency"}}
    by_rate = sorted(measured, key=lambda pair: float(measured[pair]["rate"]))
    for one, other in by_rate[:ALL]:  # the slowest
        link = measured[one, other]
        say(f"{one} to {other}: {8e-6 * link['rate']:,.0f} Mbit/s, {1000 * link['latency']:.1f} ms round trip")
    if len(measured) > ALL:
        slowest = 8e-6 * measured[by_rate[ALL]]["rate"]
        say(f"the other {len(measured) - ALL} of {len(measured)} links reach at least {slowest:,.0f} Mbit/s")
    for (one, other), link in links.items():
        if "refused" in link:
            what = f"{one} cannot reach {other} ({link['refused']})"
            yield Finding(what, "open all ports between the hosts, or those of --listen and of the coordinator")
