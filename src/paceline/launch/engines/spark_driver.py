"""The process that talks to Spark: a barrier task per host.

Each task opens two connections to this driver, which become the standard streams of its `sh`. Both ends prove that they
know a secret of this driver, which is sent only with the code of the task. The driver is a process of its own, or a
thread of a process with a Spark session.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from paceline.base.handshake import NewConnections
from paceline.base.polling import can_read
from paceline.base.text import plural
from paceline.launch.engines.driver_engine import CHUNK, LOST, Asker, check_reachable, serve_hosts

LOOK = 2.0  # seconds between two checks why the hosts are not placed yet
ANSWER = 10  # seconds for a task to prove itself
DRAIN = 10.0  # seconds for the last output of a task to arrive after its end
FAREWELL = 60.0  # seconds for agents to save and end after the launcher has ended


def _task(address: tuple[str, int], key: bytes, name: str) -> Callable[[Any], Any]:
    """The function that Spark runs as a task. It is sent by value: executors need no Paceline."""

    def run(_: Any) -> Any:
        import subprocess
        from multiprocessing.connection import Client

        from pyspark import BarrierTaskContext

        added = (b"SPARK_", b"PYSPARK_", b"_PYSPARK_", b"PYTHON", b"OMP_NUM_THREADS=")
        with open("/proc/self/environ", "rb") as file:
            words = [word for word in file.read().split(b"\0") if b"=" in word and not word.startswith(added)]
        environment = dict(word.split(b"=", 1) for word in words)
        if gpus := BarrierTaskContext.get().resources().get("gpu"):
            environment[b"CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses).encode()
        with Client(address, authkey=key) as both, Client(address, authkey=key) as error:
            both.send_bytes(f"{name} 0".encode())
            error.send_bytes(f"{name} 1".encode())
            if both.recv_bytes():  # otherwise Spark has started this task a second time
                out, err = both.fileno(), error.fileno()
                yield subprocess.call(
                    ["sh"], stdin=out, stdout=out, stderr=err, env=environment, start_new_session=True
                )

    return run


class Gate:
    """Accepts the connections of tasks, which reach us as `host`. Each is served by a thread, until `close`."""

    def __init__(self, host: str, bind: str) -> None:
        self.key, self.hosts = secrets.token_bytes(32), dict[str, TaskBridge]()
        self._strangers, self._lock = NewConnections[socket.socket](), threading.Lock()
        self._listener = socket.create_server((bind, 0))
        self.address = (host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                wire, (where, *_) = self._listener.accept()
                now = time.monotonic()
                with self._lock:
                    oldest = self._strangers.come(wire, where, now)
                    late = [*self._strangers.late(now), *([] if oldest is None else [oldest])]
                for one in late:
                    with suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)  # its thread closes it
                threading.Thread(target=self._meet, args=(wire, where), daemon=True).start()

    def _meet(self, wire: socket.socket, where: str) -> None:
        limit = socket.SOL_SOCKET, socket.SO_RCVTIMEO
        wire.setsockopt(*limit, struct.pack("ll", ANSWER, 0))
        refused = OSError, EOFError, AuthenticationError, ValueError, KeyError
        with Connection(os.dup(wire.fileno())) as pipe, suppress(*refused):
            deliver_challenge(pipe, self.key)
            answer_challenge(pipe, self.key)
            name, stream = pipe.recv_bytes(100).decode().split()
            wire.setsockopt(*limit, struct.pack("ll", 0, 0))
            self._know(wire)
            self.hosts[name].meet(int(stream), wire, where)
            return
        self._know(wire)
        wire.close()

    def _know(self, wire: socket.socket) -> None:
        """Takes a connection off the list of unknown ones: it has shown the key, or is closed."""
        with self._lock:
            self._strangers.go(wire)

    def close(self) -> None:
        """Ends the input of all agents that are left, giving them a while to end before their tasks are cancelled."""
        self._listener.shutdown(socket.SHUT_RDWR)  # otherwise the accepting thread would keep it open
        self._listener.close()
        for host in self.hosts.values():
            host.leave()
        end = time.monotonic() + FAREWELL
        for host in self.hosts.values():
            host.job.join(max(0.0, end - time.monotonic()))
            host.cancel()


class TaskBridge:
    """The task of a host. After `attach`, it is connected to the standard streams of a process that waits for
    the host's end.
    """

    def __init__(self, gate: Gate, context: Any, number: int) -> None:
        from pyspark import InheritableThread

        self._gate, self._context, self._name = gate, context, f"{number}.{secrets.token_hex(8)}"
        self._wires: dict[int, socket.socket] = {}
        self._lock, self._left = threading.Lock(), False
        self.arrived, self.where = threading.Event(), ""  # set once the task has connected, or never will; its address
        self._code, self.why = LOST, ""
        gate.hosts[self._name] = self
        self.job = InheritableThread(target=self._run, args=(number,), daemon=True)
        self.job.start()

    def _run(self, number: int) -> None:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        context = self._context
        context.addJobTag(self._name)
        context.setJobDescription(f"paceline, host {number}")
        run = _task(self._gate.address, self._gate.key, self._name)
        try:
            codes = context.parallelize([0], 1).barrier().mapPartitions(run).collect()
            self._code, self.why = (codes[0], "") if codes else (LOST, "Spark restarted its task")
        except (Py4JError, PySparkException) as error:
            self.why = _why(error)
        self.arrived.set()

    def meet(self, stream: int, wire: socket.socket, where: str) -> None:
        """Takes a connection of the host's task. A third connection is that of a second task: the first is lost."""
        with self._lock, Connection(os.dup(wire.fileno())) as pipe:
            if self._left or self.arrived.is_set():
                self.hang_up()
                wire.close()
                if not stream:
                    pipe.send_bytes(b"")
                return
            self._wires[stream], self.where = wire, where
            if len(self._wires) == 2:
                with Connection(os.dup(self._wires[0].fileno())) as first:
                    first.send_bytes(b"begin")
                self.arrived.set()

    def attach(self, asker: Asker) -> TaskBridge:
        """Connects the task to the standard streams of the process that asked for its host. Returns itself."""
        self._asker = asker
        for work in (self._hear, self._follow):
            threading.Thread(target=work, daemon=True).start()
        return self

    def _hear(self) -> None:
        self.arrived.wait()
        asker = self._asker
        with open(asker.streams[0], "rb", buffering=0) as source, suppress(OSError, KeyError):  # `_follow` reports it
            while data := source.read(CHUNK):
                self._wires[0].sendall(data)
            self._wires[0].shutdown(socket.SHUT_WR)

    def _say(self, stream: int) -> None:
        with suppress(OSError):  # the launcher has ended
            while data := self._wires[stream].recv(CHUNK):
                self._asker.write(1 + stream, data)

    def _follow(self) -> None:
        self.arrived.wait()
        says = [threading.Thread(target=self._say, args=(stream,), daemon=True) for stream in self._wires]
        for thread in says:
            thread.start()
        self.job.join()
        for wait in (0.0 if self.why else DRAIN, None):
            for thread in says:
                thread.join(wait)
            self.hang_up()
        self._asker.finish(self._code, self.why)

    def hang_up(self) -> None:
        """Closes the connections of the task: its agent sees the end of its input."""
        self._left = True
        for wire in self._wires.values():
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)

    def cancel(self) -> None:
        """Cancels the task if it still runs."""
        if self.job.is_alive():
            self._context.cancelJobsWithTag(self._name)

    def leave(self) -> None:
        """Closes the connections of the task, or cancels it if it has not begun."""
        self.hang_up()
        if not self.arrived.is_set():
            self.cancel()

    def close(self) -> None:
        """Leaves the task and closes the connection to the process that waits."""
        self.leave()
        self._asker.close()


def _why(error: Exception) -> str:
    """The last line before the Java stack, which names the cause."""
    lines = str(error).partition("\n\tat ")[0].strip().splitlines()
    text = lines[-1].strip() if lines else type(error).__name__
    return f"preempted: {text}" if re.search("preempt|decommission", text, re.IGNORECASE) else text


def serve_tasks(context: Any, asked: Mapping[str, Any], input_fd: int, tell: Callable[..., None]) -> None:
    """Begins the tasks of the hosts and serves them until `input_fd` ends. `tell` sends a message to the launcher."""
    conf = context.getConf()
    host = conf.get("spark.driver.host")
    gate = Gate(host, conf.get("spark.driver.bindAddress", host))
    try:
        hosts = {number: TaskBridge(gate, context, number) for number in range(asked["nodes"])}
        last_reason, end = "", time.monotonic() + asked["wait"]
        while not all(host.arrived.wait(LOOK / len(hosts)) for host in hosts.values()):
            if can_read(input_fd, 0.0):  # the launcher has ended
                return
            executors = len(context._jsc.sc().statusTracker().getExecutorInfos()) - 1  # minus the driver itself
            ready = sum(host.arrived.is_set() for host in hosts.values())
            why = f"{ready} of {plural(len(hosts), 'task')} running, {plural(executors, 'executor')} available"
            if time.monotonic() > end:
                cure = "increase --wait, request less, or check the web page of Spark"
                tell(what=f"Spark has not placed the hosts within {asked['wait']} s: {why}", cure=cure)
                return
            if why != last_reason:
                last_reason = why
                tell(waits=why)
        if failed := next((host for host in hosts.values() if host.why), None):
            tell(what=f"Spark could not start a task ({failed.why})", cure="see the logs of the executors")
            return

        def begin(number: int, asker: Asker) -> TaskBridge:
            return (hosts.pop(number, None) or TaskBridge(gate, context, number)).attach(asker)

        serve_hosts(input_fd, tell, [host.where for host in hosts.values()], begin)
    finally:
        gate.close()


def main(asked: Mapping[str, Any]) -> int:
    """Starts a Spark session, serves its tasks until standard input ends, and returns the exit code."""
    launcher_output, error = os.fdopen(os.dup(1), "w"), os.dup(2)

    def tell(**what: Any) -> None:
        print(json.dumps(what), file=launcher_output, flush=True)

    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ModuleNotFoundError:
        tell(what=f"pyspark is not installed for {sys.executable}", cure="pip install 'paceline[spark]'")
        return 1
    master = asked["master"] or ""
    with os.fdopen(os.memfd_create("log"), "w+b") as log:
        for stream in (1, 2):  # the output of Spark goes to the log
            os.dup2(log.fileno(), stream)
        try:
            if master.startswith("spark://"):
                check_reachable(master.removeprefix("spark://").partition(",")[0])
            session = SparkSession.builder.getOrCreate()
            session.sparkContext.setLogLevel("ERROR")
        except (OSError, Py4JError, PySparkException) as failure:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-1:]
            why = "; ".join([_why(failure), *last])
            cure = "use --master spark://HOST:7077, yarn or local-cluster[2,1,1024]; Spark also needs Java"
            tell(what=f"Spark{master and f' at {master}'} cannot be reached ({why})", cure=cure)
            return 1
        finally:
            for stream in (1, 2):
                os.dup2(error, stream)
    try:
        serve_tasks(session.sparkContext, asked, 0, tell)
    finally:
        java = session.sparkContext._gateway.proc
        session.stop()
        java.stdin.close()  # this ends Java
        java.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
