"""Hosts of a launcher that are folders of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from agents import WORKER, until
from warm import Process, environment

# An engine whose hosts are folders: each has a script of its own. `down` is a file that keeps one from answering.
HERE = """
import json, signal, sys
from pathlib import Path
from paceline.errors import PacelineError
from paceline.launch import engines
from paceline.launch.engines import launcher
from paceline.launch.engines.engine import End, Engine, Host
signal.signal(signal.SIGINT, signal.default_int_handler)
class Here(Engine):
    name = "here"
    def command(self, place):
        if Path(place.name, "down").exists():
            return ["sh", "-c", "exit 255"]
        return ["env", "-C", place.name, "sh"]
    def why_ended(self, place, code, said):
        return End("lost", said or "no answer") if code == 255 else None
given = json.loads(sys.argv[1])
launcher.FIRST_RETRY = 0.5
places = [Host(*place) for place in given.pop("places")]
python, listen, detach = given.pop("python", sys.executable), given.pop("listen"), given.pop("detach", False)
job = launcher.HostJob(given, python, ".", listen=listen, detach=detach, wait=given.pop("wait", None))
try:
    sys.exit(launcher.Launcher(Here(places), job).run())
except PacelineError as error:
    print(f"paceline: {error}", file=sys.stderr)
    sys.exit(2)
"""


class Launched:
    """Launchers of an engine whose hosts are folders of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen[str]]()

    def start(
        self, scripts: dict[str, str], counts: dict[str, int] | None = None, spare: str = "", **more: object
    ) -> subprocess.Popen[str]:
        """Starts the scripts of some hosts, of which one may be a spare."""
        for name, script in scripts.items():
            (self.folder / name).mkdir(exist_ok=True)
            if script:
                (self.folder / name / "train.py").write_text(WORKER + textwrap.dedent(script))
        places = [(name, (counts or {}).get(name), name == spare) for name in scripts]
        given = {
            "script": "train.py",
            "run_dir": "run",
            "cold_start": True,
            "again": "AGAIN",
            "places": places,
            "listen": "127.0.0.1",
            **more,
        }
        command = [sys.executable, "-c", HERE, json.dumps(given)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = Process(command, environment(CUDA_VISIBLE_DEVICES=""), cwd=self.folder, **streams)
        self.started.append(process)
        return process

    def ours(self) -> list[psutil.Process]:
        """All processes that work in our folders."""
        processes = psutil.process_iter(["cwd", "cmdline", "environ"])
        return [one for one in processes if (one.info["cwd"] or "").startswith(str(self.folder))]

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    made = Launched(tmp_path)
    yield made
    made.close()
    until(lambda: not made.ours())  # also where the launcher was killed
