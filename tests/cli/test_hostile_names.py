"""Names, group values and exception texts that are made to be obeyed: by a terminal, a shell, Slurm, a browser, XML."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from launching import paceline
from prometheus_client import generate_latest
from prometheus_client.registry import Collector
from warm import Process, environment

from paceline.base.console import coloured, command_line, in_one_line, markup, printable
from paceline.base.terminal import Terminal
from paceline.cli.main import main
from paceline.launch.engines.slurm import directive
from paceline.observe.prometheus import families
from paceline.observe.summary import Summary

# What is in a name, and what people see of it in one line.
HOSTILE = {
    "a\nb": r"a\nb",
    "a\r\tb": r"a\r\tb",
    "a\x1b]0;title\x07b": r"a\x1b]0;title\x07b",
    "a\x1b[2J\x1b[31mb": r"a\x1b[2J\x1b[31mb",
    "a\x1bPq\x1b\\b": r"a\x1bPq\x1b" + "\\b",
    "a\x9b2Jb\x85\x00\x7f": r"a\u009b2Jb\u0085\x00\x7f",
    "a\u202eb\u2066c\u200f": r"a\u202eb\u2066c\u200f",
    "a\u2028b\u2029": r"a\u2028b\u2029",
    "a\udcffb\ud800": r"a\xffb\ud800",
    "<script>&\"'</script>": "<script>&\"'</script>",
    "$(touch x)`touch y`\\": "$(touch x)`touch y`\\",
    "a: b #SBATCH --wrap=x": "a: b #SBATCH --wrap=x",
    "日本 é 👩\u200d🔬": "日本 é 👩\u200d🔬",
}
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# All that a file name may hold, in one.
NAME = "a\nb\x1b]0;own\x07\x1b[2J\r\x9b31m\u202e<script>'\"$(touch x): #SBATCH --wrap=y"
SEEN = in_one_line(NAME)
TRAINS = f"""
import os, sys, time
from pathlib import Path
from basics import *
NAME = {NAME!r}
group = lambda params: torch.optim.SGD([{{"params": list(params), "about": NAME}}], lr=0.1)
t = paceline.Trainer(net, cross_entropy, group, global_batch=24)
saved = lambda: list(Path(os.environ["PACELINE_RUN_DIR"], "checkpoints").glob("*/manifest.json"))
for report in t.steps(data, epochs=1000):
    if report.step == 2:
        t.log(**{{NAME: 1.0}})
        t.evaluate(data, lambda output, batch: {{NAME: (output.sum(), len(output))}})
        t.save()
    if report.step == 4:
        while os.path.exists("wait"):
            time.sleep(0.01)
    if report.step >= 6 and saved():
        print(NAME, file=sys.stderr)
        print("\\x1b[32mgreen\\x1b[2J", file=sys.stderr)
        raise ValueError(NAME)
"""


@pytest.mark.parametrize(("name", "seen"), HOSTILE.items(), ids=map(str, range(len(HOSTILE))))
def test_what_people_see_of_a_name(name: str, seen: str) -> None:
    """In a line, in a text, laid out by rich, in markup, and as a word for a shell, which reads the name itself."""
    assert in_one_line(name) == seen
    assert printable(name) == seen.replace(r"\n", "\n").replace(r"\t", "\t")
    assert not OBEYED.search(re.sub("\x1b\\[[0-9;]*m", "", coloured(name)))
    out = StringIO()
    Terminal(file=out, width=200).print(name, markup=False, highlight=False)
    assert not OBEYED.search(out.getvalue())
    inside = ElementTree.fromstring(f'<a b="{markup(name)}">{markup(name)}</a>').text
    assert inside == printable(name)
    shell = command_line(["printf", "%s", name])
    assert "\n" not in shell
    assert not OBEYED.search(shell)
    if "\x00" not in name and "\ud800" not in name:
        done = subprocess.run(["bash", "-c", shell], stdout=subprocess.PIPE, check=True, env={"LC_ALL": "C.UTF-8"})
        assert os.fsdecode(done.stdout) == name


def test_a_colour_of_a_worker_ends_with_its_line() -> None:
    assert coloured("\x1b[1;31mred\x1b[2K") == "\x1b[1;31mred\\x1b[2K\x1b[0m"
    assert coloured("plain\x1b]8;;x") == "plain\\x1b]8;;x"


def read_directive(word: str) -> str:
    """As sbatch reads one word of an ``#SBATCH`` line (_get_argument in its src/sbatch/opt.c)."""
    found, quote, escaped = "", "", False
    for char in word:
        if escaped:
            found, escaped = found + char, False
        elif char == "\\":
            escaped = True
        elif quote:
            quote, found = ("", found) if char == quote else (quote, found + char)
        elif char in "\"'":
            quote = char
        elif char == "#" or char.isspace():
            break
        else:
            found += char
    return found


@pytest.mark.parametrize("name", [name for name in HOSTILE if in_one_line(name) == name] + ["a b", "it's", ""])
def test_a_directive_of_slurm_is_one_word(name: str) -> None:
    assert read_directive(directive(name)) == name


@pytest.mark.parametrize("place", ["the script", "--run-dir", "the working folder", "--python", "--engine"])
def test_slurm_is_given_no_name_that_ends_a_line(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "x\n#SBATCH --wrap=touch${IFS}pwned"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    script = f"{evil}.py" if place == "the script" else "train.py"
    Path(script).touch() if "/" not in script else None
    words = {"--run-dir": "a", "--cwd": "/c", "--python": "python3", "--engine": "--time=5"}
    words |= {"--cwd" if place == "the working folder" else place: evil} if place != "the script" else {}
    if place == "--engine":
        words["--engine"] = shlex.quote(evil)
    options = [f"{name}={value}" for name, value in words.items()]
    assert main(["launch", "slurm", "-N", "1", *options, "--dry-run", script]) == 2
    shown = f"$'{in_one_line(script if place == 'the script' else evil)}'"
    said = f"paceline: {place} {shown} contains a control character, which a Slurm batch script does not allow"
    assert capsys.readouterr() == ("", f"{said}; use another name\n")


def test_the_quotes_of_engine_options_have_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    for engine in (["slurm", "-N", "1"], ["ssh", "--hosts", "a"], ["spark", "-N", "1"]):
        assert main(["launch", *engine, "--engine='", "--dry-run", str(tmp_path / "train.py")]) == 2
        said = "paceline: --engine cannot be parsed (No closing quotation); close the quotes\n"
        assert capsys.readouterr() == ("", said)


def on_terminal(*words: str, cwd: Path, code: int = 0) -> str:
    """What `paceline WORDS` sends to a terminal, which is standard output and error of it."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "paceline", *words]
    with Process(command, environment(TERM="xterm", COLUMNS="200"), cwd=cwd, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                select.select([ours], [], [])
                data = os.read(ours, 1 << 16)
            except OSError:  # nobody has the terminal any more
                break
            said += data
    os.close(ours)
    assert process.returncode == code, said
    return said.decode().replace("\r\n", "\n")


def check_obeyed(text: str, live: bool = False) -> None:
    """Nothing in it moves a cursor, sets a title or clears; colours may be there, and what a live line needs."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    if live:
        text = re.sub(r"\x1b\[\?25[lh]|\x1b\[1?A|\x1b\[2K|\r", "", text)
    assert OBEYED.findall(text) == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs NAME, which failed, and one more of it."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / f"{NAME}.py").write_text(TRAINS)
    given = ("run", "--workers", "2", "--max-restarts", "0", "--run-dir")
    said = paceline(*given, NAME, f"{NAME}.py", cwd=folder, code=1)
    (folder / "console").write_text(said.stderr)
    (folder / "terminal").write_text(on_terminal(*given, f"b{NAME}", f"{NAME}.py", cwd=folder, code=1))
    return folder


def test_the_console_of_a_run_obeys_no_name(runs: Path) -> None:
    """Nor the text of an exception, which is in the journal as it was."""
    said = (runs / "console").read_text()
    check_obeyed(said)
    check_obeyed((runs / "terminal").read_text(), live=True)
    assert f", run folder {SEEN}\n" in said
    assert f"logs: {SEEN}/logs/\n" in said
    assert "\x1b[32mgreen\\x1b[2J\x1b[0m\n" in said  # what a worker writes may have colours
    assert "\n  | ValueError: a\n  | \\u009b31m\\u202e<script>" in said  # of a line that was painted over, the end
    assert f"paceline run --workers 2 --run-dir {command_line([NAME])} {command_line([f'{NAME}.py'])}`" in said
    events = [json.loads(line) for line in (runs / NAME / "journal.jsonl").read_text().splitlines()]
    assert next(e["results"] for e in events if e["event"] == "evaluate").keys() == {NAME, "n"}
    assert not (runs / "x").exists()


COMMANDS = {
    "report": ["report", NAME],
    "doctor": ["doctor", NAME],
    "explain": ["explain", NAME],
    "trace": ["trace", NAME],
    "inspect": ["inspect", NAME],
    "watch": ["watch", "--once", NAME],
    "runs": ["runs", "."],
    "compare": ["compare", NAME, f"b{NAME}"],
    "logs": ["logs", NAME],
    "export": ["export", NAME, "weights"],
}


@pytest.mark.parametrize("pipe", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_obeys_a_name(name: str, pipe: bool, runs: Path) -> None:
    words = COMMANDS[name]
    said = paceline(*words, cwd=runs).stdout if pipe else on_terminal(*words, cwd=runs)
    check_obeyed(said)
    if name not in ("logs", "export"):
        assert SEEN[:20] in re.sub(r"\x1b\[[0-9;]*m| |\n", "", said)
    if name == "inspect":
        assert rf", about {SEEN[:20]}" in said


REFUSED = {
    "report": f"no{SEEN} is not a run folder: it does not contain journal.jsonl; pass a folder made by --run-dir",
    "run": f"the script no{SEEN} does not exist; pass the path of a Python training script",
    "logs": f"no{SEEN} contains no logs; pass the folder of a run that was started on this host",
    "export": f"no{SEEN} does not contain a checkpoint; use the --run-dir of a run that has saved a checkpoint",
    "runs": f"no{SEEN} contains no run; pass a folder that contains runs: paceline runs FOLDER",
    "tokenize": f"found no text in no{SEEN}; pass .txt, .jsonl or .parquet files, folders of them, or globs",
}
MORE = {"export": ["x.safetensors"], "tokenize": ["--tokenizer", "gpt2", "--out", "o"]}


@pytest.mark.parametrize("command", REFUSED)
def test_no_refusal_obeys_a_name(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([command, f"no{NAME}", *MORE.get(command, [])]) == 2
    assert capfd.readouterr() == ("", f"paceline: {REFUSED[command]}\n")


@pytest.mark.parametrize("words", [["run", NAME, "--keep"], ["watch", "a:1", "--key-file", NAME]])
def test_no_name_begins_a_line(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capfd.readouterr().err
    check_obeyed(said)
    assert SEEN in said
    assert "\nb" not in said


def test_pages_and_drawings_hold_a_name_as_text(runs: Path) -> None:
    paceline("report", NAME, cwd=runs)
    paceline("compare", NAME, f"b{NAME}", "--html", "both.html", cwd=runs)
    paceline("explain", NAME, "--svg", "plan.svg", cwd=runs)
    ElementTree.parse(runs / "plan.svg")
    for page in (runs / NAME / "report.html", runs / "both.html", runs / "plan.svg"):
        text = page.read_text()
        assert not OBEYED.search(text)
        assert "<script>'" not in text
    assert markup(NAME.replace("\n", r"\n")) in (runs / NAME / "report.html").read_text().replace("\n", r"\n")


def test_stacks_of_a_run_that_goes_on_obey_no_name(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").write_text(TRAINS)
    (tmp_path / "wait").touch()
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--max-restarts", "0", "--run-dir", NAME]
    with Process([*command, f"{NAME}.py"], environment(), cwd=tmp_path, stdout=-3, stderr=-3) as process:
        journal = tmp_path / NAME / "journal.jsonl"
        while not (journal.exists() and '"evaluate"' in journal.read_text()):
            assert process.poll() is None
        said = ""
        place = r"in user code at a\x0ab\x1b]0;own\x07\x1b[2J\x0d\x9b31m\u202e<script>"  # as faulthandler writes it
        while place not in said:  # a worker may be on its way there
            assert process.poll() is None
            said = paceline("stacks", NAME, cwd=tmp_path).stdout
        (tmp_path / "wait").unlink()
    check_obeyed(said)


SSH = r"""#!/bin/sh
printf 'banner \033]0;own\007\033[2J \033[1mbold\n' >&2
exit 1
"""


def test_what_another_host_says_is_not_obeyed(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "train.py").touch()
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = paceline("launch", "ssh", "--hosts", "a", "train.py", cwd=tmp_path, code=2, PATH=path).stderr
    assert said == (
        "paceline: the hosts differ:\nhost  python  torch  paceline  script\n"
        r"a     banner \x1b]0;own\x07\x1b[2J \x1b[1mbold"
        "; install the same versions, or use --python PATH and --setup\n"
    )


def test_figures_for_prometheus_hold_a_name_as_text(runs: Path) -> None:
    """Also one that is no UTF-8, which their format is."""

    class Collects(Collector):
        def collect(self) -> Iterator[Any]:
            yield from families(Summary(runs / NAME), f"{NAME}\udcff")

    text = generate_latest(Collects()).decode()  # type: ignore[arg-type]
    assert not OBEYED.search(text)
    assert 'run="a\\nb\\\\x1b]0;own' in text  # a line end as the format itself escapes it
