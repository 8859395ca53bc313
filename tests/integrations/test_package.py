"""What people get: the wheel in an empty environment, the README's script as written, and documents that stay true."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doc_pages import python_blocks
from launching import paceline, without_an_agent
from once import once
from oracle import apart
from paths import ROOT
from safetensors.torch import load_file
from token_folders import write_folder
from warm import Process

import paceline as package
from paceline.base.environment import (
    SlurmJob,
    began,
    gpus,
    host_name,
    inherited_warm,
    is_raw,
    pulse_descriptor,
    raw_worker,
    reached_at,
    read_call,
    read_nodes,
    read_world,
    slurm_job,
    standstill,
    starts_cold,
    take_token,
    trainjob_server,
    tunnel,
)
from paceline.base.exit_codes import LEFT_OUT
from paceline.cli.main import main
from paceline.errors import UsageError
from paceline.launch.tuning import HUGE, worker_settings
from paceline.plan import Plan
from paceline.session.training_loop import RegisteredTrainer

SOURCE = ROOT / "src" / "paceline"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = "docs/reference/commands.md"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
BORROWED = (
    "torch",
    "numpy",
    "safetensors",
    "msgspec",
    "tornado",
    "rich",
)  # what the wheel requires, lent by the environment of the tests


def text(name: str) -> str:
    return (ROOT / name).read_text()


def section(page: str, heading: str) -> str:
    """The part of a page under a heading, up to the next one of its level."""
    level = heading.split()[0]
    _, found, rest = text(page).partition(f"\n{heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    return re.split(rf"^{level} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(table: str) -> list[list[str]]:
    """The cells of a Markdown table's rows, its head left out."""
    lines = [line.replace(r"\|", "\0") for line in table.splitlines() if line.startswith("|")]
    cells = [[cell.strip().replace("\0", "|") for cell in line.strip("|").split("|")] for line in lines]
    return [row for number, row in enumerate(cells) if number and not set(row[0]) <= set("- ")]


def blocks(page: str) -> list[str]:
    return python_blocks(text(page))


# ---- the wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as for a release: a source archive, and the wheel from that archive alone. The build's own requirements are
    installed once for both, into a folder beside them.
    """

    def build(out: Path) -> None:
        requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        python = [sys.executable, "-m"]
        checked([*python, "pip", "install", "--quiet", "--target", out / "requires", *requires])
        env = {**os.environ, "PYTHONPATH": str(out / "requires")}
        checked([*python, "build", "--no-isolation", "--outdir", out, ROOT], env)
        assert (out / f"paceline-{VERSION}.tar.gz").exists()

    return once(tmp_path_factory, "dist", build) / f"paceline-{VERSION}-py3-none-any.whl"


def checked(command: list[str | Path], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment that holds the wheel and nothing else; its requirements are seen from ours."""

    def install(home: Path) -> None:
        venv.create(home, with_pip=False)
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install"]
        checked([*pip, "--no-deps", "--no-index", "--no-compile", "--quiet", wheel])
        folders = {str(Path(str(import_module(name).__file__)).parents[1]) for name in BORROWED}
        # Lines of a .pth file are searched last, and .pth files in those places, such as ours, are not read.
        (site,) = home.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text("".join(f"{folder}\n" for folder in sorted(folders)))

    return once(tmp_path_factory, "environment", install) / "bin"


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        about = f"paceline-{VERSION}.dist-info"
        names = {name for name in archive.namelist() if not name.startswith(f"{about}/")}
        made = archive.read(f"{about}/WHEEL").decode()
        metadata = archive.read(f"{about}/METADATA").decode()
    files = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert names == {path.relative_to(SOURCE.parent).as_posix() for path in files}
    assert {name.rpartition(".")[2] for name in names} == {"py", "typed", "json"}
    assert "Root-Is-Purelib: true" in made
    required = re.findall(r"^Requires-Dist: ([a-z]+)[^;\n]*$", metadata, re.MULTILINE)
    assert sorted(required) == sorted(BORROWED)
    assert f"Version: {VERSION}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata


def test_version_is_the_same_everywhere() -> None:
    assert package.__version__ == VERSION
    assert f"\n## [{VERSION}]" in text("CHANGELOG.md")


EXTRAS = {"configs": "configs", "huggingface": "hf", "keras": "keras", "lightning": "lightning", "horovod": None}
PACKAGE_OF = {"yaml": "pyyaml", "lightning_utilities": "lightning"}  # lightning requires lightning-utilities


@pytest.mark.parametrize(("folder", "extra"), EXTRAS.items())
def test_extra_has_what_its_integration_imports(folder: str, extra: str | None) -> None:
    """So ``pip install "paceline[hf]"`` alone is enough."""
    assert {path.parent.name for path in (SOURCE / "integrations").glob("*/*.py")} == {*EXTRAS}
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {re.split(r"[<>=\[]", line)[0] for line in given[extra]} if extra else set()
    roots: set[str] = set()
    for path in (SOURCE / "integrations" / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots |= {item.name.partition(".")[0] for item in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                roots.add(node.module.partition(".")[0])
    foreign = roots - sys.stdlib_module_names - {*BORROWED, "paceline"}
    assert {PACKAGE_OF.get(root, root) for root in foreign} - named == set()


def train_readme(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> tuple[str, str]:
    """The output and the errors of the README's script, which also prints where its package is."""
    (script,) = blocks("README.md")
    folder.mkdir()
    (folder / "train.py").write_text(script + "\nimport sys\nprint(paceline.__file__, file=sys.stderr)\n")
    process = start(cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stdout + stderr
    return stdout, stderr


@pytest.fixture(scope="module")
def readme_on_one_worker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the README's script has trained, and its output."""
    folder = tmp_path_factory.mktemp("readme") / "one"
    return folder, train_readme(folder, partial(Process, [sys.executable, "train.py"]))[0]


RUN = ("run", "--workers", "2", "--run-dir", "runs/a", "train.py")


def compare_readme(one: tuple[Path, str], folder: Path, output: str) -> None:
    """Two workers have printed and trained what one did."""
    assert output == one[1]
    assert output in text("README.md")
    assert apart(*(load_file(place / "model.safetensors") for place in (folder, one[0]))) < 1e-5
    assert (folder / "runs" / "a" / "report.html").exists()


def test_readme_script_gives_the_same_weights_on_one_and_two_workers(
    readme_on_one_worker: tuple[Path, str], tmp_path: Path
) -> None:
    start = partial(Process, [sys.executable, "-m", "paceline", *RUN])
    compare_readme(readme_on_one_worker, tmp_path / "two", train_readme(tmp_path / "two", start)[0])


def environment_of_a_user() -> dict[str, str]:
    """Ours without what points Python at this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {
        "OMP_NUM_THREADS": "1"
    }


def test_installed_wheel_runs_a_script(installed: Path, tmp_path: Path) -> None:
    """Its command starts workers that import the package from the wheel."""
    (tmp_path / "train.py").write_text("import paceline\nprint(paceline.__file__)\n")
    command = [installed / "paceline", "run", "--cold-start", "--run-dir", "run", "train.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=environment_of_a_user(), text=True, stdout=pipe) as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert Path(output.strip()).is_relative_to(installed.parent / "lib")


@pytest.mark.slow
def test_installed_wheel_trains_the_readme_script(
    installed: Path, readme_on_one_worker: tuple[Path, str], tmp_path: Path
) -> None:
    start = partial(subprocess.Popen, [installed / "paceline", *RUN], env=environment_of_a_user(), text=True)
    output, errors = train_readme(tmp_path / "two", start)
    assert re.search(rf"^{re.escape(str(installed.parent))}/lib/.*/paceline/__init__.py$", errors, re.M)
    compare_readme(readme_on_one_worker, tmp_path / "two", output)


# ---- the documents


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_documents_exist(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_of_documents_compile(page: Path) -> None:
    for block in re.findall(r"^( *)```python\n(.*?)^\1```$", page.read_text(), re.MULTILINE | re.DOTALL):
        ast.parse("if True:\n" + block[1] if block[0] else block[1])


YOURS = """
import importlib.util
import torch
from torch import nn
from torch.utils.data import TensorDataset

def made(seed, count):
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :10].sum(1) > 0).long())

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

class Output:
    def __init__(self, logits):
        self.logits = logits

class GPT2LMHeadModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed, self.out = nn.Embedding(*config), nn.Linear(config[1], config[0])
    def forward(self, input_ids, attention_mask, labels):
        return Output(self.out(self.embed(input_ids)))

def collate(samples):
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.where(ids > 0, -100)}

data, held_out, config = made(0, 600), made(1, 101), (50, 8)
texts = [{"input_ids": torch.arange(1, length)} for length in range(3, 40)]
"""


@pytest.mark.slow
def test_scripts_of_coming_from_page_run(tmp_path: Path) -> None:
    """Each "after" of coming-from.md, one behind the other in one script, on two workers."""
    after = [block for block in blocks("docs/coming-from.md") if "paceline.Trainer(" in block]
    assert len(after) == 5
    asks = "assert trainer.complete and trainer.steps_done > 0\n"
    script = YOURS + "".join(block.replace("from transformers import GPT2LMHeadModel\n", "") + asks for block in after)
    (tmp_path / "train.py").write_text(script)
    done = paceline("run", "--workers", "2", "--run-dir", "run", "train.py", cwd=tmp_path)
    assert len(re.findall(r"^epoch \d: accuracy 0\.\d{3}$", done.stdout, re.MULTILINE)) == 3
    assert "embed.weight" in load_file(tmp_path / "model.safetensors")


def test_token_script_of_data_page_trains(tmp_path: Path) -> None:
    write_folder(tmp_path / "tokens", [np.arange(128 * 1025, dtype=np.uint16) % 50], vocabulary=50)
    block, *_ = blocks("docs/data.md")
    (tmp_path / "train.py").write_text(block + "print('trained', trainer.steps_done)\n")
    done = paceline("run", "--workers", "2", "--run-dir", "run", "train.py", cwd=tmp_path)
    assert "trained 2\n" in done.stdout


def test_script_of_mixed_datasets_trains(tmp_path: Path) -> None:
    """The trainer is that of the page's first script."""
    for number, name in enumerate(("web", "code", "wiki")):
        write_folder(tmp_path / "tokens" / name, [np.full(40 * 1024 + 1, number, dtype=np.uint16)], vocabulary=3)
    first, *others = blocks("docs/data.md")
    (block,) = [block for block in others if "data.Mix(" in block]
    trainer = first.partition("for report")[0].replace('"tokens/"', '"tokens/web/"')
    (tmp_path / "train.py").write_text(
        trainer + block.replace("count=100_000", "count=2") + "print(trainer.steps_done)\n"
    )
    done = paceline("run", "--run-dir", "run", "train.py", cwd=tmp_path)
    assert done.stdout == "{'web': 4480000, 'code': 1280000, 'wiki': 640000}\n2\n"


def test_script_of_json_lines_trains(tmp_path: Path) -> None:
    (tmp_path / "reviews").mkdir()
    for name in "ab":
        lines = [{"features": [n / 4, 1, n % 3, 0.5], "label": n % 2, "text": "not read"} for n in range(20)]
        (tmp_path / "reviews" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (block,) = [block for block in blocks("docs/data.md") if "data.JsonLines(" in block]
    imports = "import paceline\nimport torch.nn.functional as F\nfrom torch import nn, optim\n"
    (tmp_path / "train.py").write_text(imports + block + "print('steps', trainer.steps_done)\n")
    assert paceline("run", "--run-dir", "run", "train.py", cwd=tmp_path).stdout == "steps 6\n"


def test_script_of_transport_page_runs(tmp_path: Path) -> None:
    (block,) = blocks("docs/transport.md")
    script = tmp_path / "ours.py"
    script.write_text(
        f"{block}import torch\ntensor = torch.full((3,), dist.get_rank() + 1.0)\ndist.all_reduce(tensor)\n"
        "assert tensor.tolist() == [3.0] * 3\ndist.destroy_process_group()\n"
    )
    assert [code for code, _ in without_an_agent(script, script)] == [0, 0]


def options_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out.partition("\nexample")[0]))


def test_launch_mpi_has_the_options_of_launch_ssh(capsys: pytest.CaptureFixture[str]) -> None:
    assert options_of("launch mpi", capsys) == options_of("launch ssh", capsys) - {"--tunnel"}


@pytest.mark.parametrize(
    "command",
    [
        *("run", "launch ssh", "launch slurm", "stop", "stacks", "profile", "trace", "doctor", "logs", "check"),
        *("tokenize", "export", "import", "inspect", "explain", "report", "metrics", "watch", "runs", "compare"),
        *("from", "simulate", "plan", "chaos"),
    ],
)
def test_every_option_is_documented(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(command, capsys)
    told = set(re.findall(r"`(--[a-z-]+)", section(COMMANDS, f"## `paceline {command}`")))
    assert told >= options
    assert told - options == set()
    assert f"`paceline {command}`" in text(COMMANDS)


def test_every_word_of_a_plan_is_documented() -> None:
    page = "docs/reference/plan-words.md"
    groups = re.findall(r"^## (.+)$", text(page), re.MULTILINE)
    is_built = {
        word.partition("=")[0]: group != "Not built yet"
        for group in groups
        for words, _ in rows(section(page, f"## {group}"))
        for word in words.strip("`").split()
    }
    assert is_built == {word.name: word.metadata["built"] for word in fields(Plan)}


class Asked(dict[str, str]):
    """An environment that remembers what it was asked for."""

    def __init__(self, **values: str) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return super().__getitem__(name)


def asked() -> Iterator[str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for values in (
        {},
        {"PACELINE_WORLD_SIZE": "2", "PACELINE_STORE": "127.0.0.1:1"},
        {"RANK": "0", "WORLD_SIZE": "2", **place},
        {"OMPI_COMM_WORLD_SIZE": "2", **place},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", **place},
    ):
        environment = Asked(**values)
        assert read_world(environment).size == (2 if values else 1)
        assert (began(environment), starts_cold(environment), inherited_warm(environment)) == (None, False, None)
        assert (pulse_descriptor(environment), standstill(environment)) == (None, 30.0)
        assert (is_raw(environment), raw_worker(environment).launcher) == (False, "paceline")
        environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
        assert (slurm_job(environment), reached_at(environment)) == (SlurmJob("7", "n1", 0, False), "")
        assert gpus(environment) >= 0
        yield from environment.names - {""}
    nodes = Asked(SKYPILOT_NODE_RANK="1", DSTACK_NODE_RANK="1", PET_NODE_RANK="1")
    assert (read_nodes(nodes), take_token(nodes)) == ((1, 1, "", 0), None)
    yield from nodes.names
    pod = Asked(JOB_COMPLETION_INDEX="0", PACELINE_FIRST="first")
    assert read_nodes(pod) == (0, 0, "", 0)
    yield from pod.names - {""}
    called = Asked(PACELINE_CALL="/function:/value")
    assert read_call(called) == ("/function", "/value")
    yield from called.names
    told = Asked(KUBEFLOW_TRAINER_SERVER_URL="https://a")
    assert trainjob_server(told) == {"url": "https://a", "certificate": "", "token": ""}
    yield from told.names
    inside = Asked(PACELINE_TUNNEL="127.64.0.1=/asked")
    assert tunnel(inside) == ("127.64.0.1", "/asked")
    yield from inside.names
    named = Asked(PACELINE_HOST="node-7")
    assert host_name(named) == "node-7"
    yield from named.names
    assert 'variable("PACELINE_AGAIN")' in (SOURCE / "launch" / "local.py").read_text()
    yield "PACELINE_AGAIN"


def test_every_environment_variable_is_documented() -> None:
    names = set(asked())
    assert "PACELINE_RANK" in names
    page = "docs/reference/configuration.md"
    told = set(re.findall(r"`([A-Z][A-Z_]+)\b", section(page, "## Environment variables")))
    assert names - told == set()
    given_by_agent = {*worker_settings(2, {}, [0, 1])[0], HUGE, "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"}
    given_by_agent.add("PACELINE_CONFIG")  # which paceline.config() reads
    assert told - names == given_by_agent


def errors(kind: type) -> Iterator[str]:
    """The public ones below a kind of them."""
    for below in kind.__subclasses__():
        if below.__module__ == "paceline.errors":
            yield below.__name__
        yield from errors(below)


def test_every_event_and_public_name_is_documented() -> None:
    source = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    written = set(re.findall(r"(?:\.(?:write|show)|record)\(\s*\"([a-z]+)\"", source)) - {"journal"}
    told = set(re.findall(r"\.tell(?:\(\s*|, )\"([a-z]+)\"", source)) | {"step", "evaluate"}
    assert {"start", "grid", "failed"} <= written
    events = [row[0].strip("`") for row in rows(section("docs/reference/journal.md", "## Events"))]
    assert {*events} - {"event"} == written
    assert {
        row[0].strip("`") for row in rows(section("docs/reference/worker-protocol.md", "## Events of a worker"))
    } == told
    public = text("docs/reference/public-names.md")
    own = [
        f"Trainer.{name}"
        for name in {**vars(package.Trainer), **vars(package.Trainer.__base__)}
        if not name.startswith("_")
    ]
    for name in [*package.__all__, *own]:
        if name != "__version__" and name.removeprefix("Trainer.") not in vars(
            RegisteredTrainer
        ):  # those are the run's
            assert re.search(rf"`{name}\b|`\.{name.removeprefix('Trainer.')}`", public), name
    kinds = set(errors(package.PacelineError))
    assert UsageError.__name__ in kinds
    assert set(re.findall(r"`(\w+Error)`", text("docs/reference/errors.md"))) == kinds | {"PacelineError"}


# ---- exit codes

SLEEP = "import time\nprint('here', flush=True)\ntime.sleep(60)\n"
CODES: list[tuple[str, int, str, list[str], int]] = [  # the table's row, code, script, options, signal
    ("0", 0, "print('here', flush=True)\n", [], 0),
    ("1", 1, "raise ValueError('no')\n", [], 0),
    ("2", 2, "", ["--no-such-option"], 0),
    ("75", 75, SLEEP, [], signal.SIGTERM),
    ("130", 130, SLEEP, [], signal.SIGINT),
    ("128 + N", 137, "import os\nos.kill(os.getpid(), 9)\n", [], 0),
    ("any other", 3, "import sys\nsys.exit(3)\n", [], 0),
]
# The agent's own tests have these in their fast runs: test_agent.py and test_agent_ends.py.
MORE_CODES: list[tuple[str, int, str, list[str], int]] = [
    ("1", 1, "print('no paceline')\n", ["--workers", "2"], 0),
    ("2", 2, "", ["--plan", "shard=3", "--workers", "2"], 0),
    ("75", 75, SLEEP, [], signal.SIGHUP),
    ("128 + N", 139, "import os\nos.kill(os.getpid(), 11)\n", [], 0),
]


@pytest.mark.parametrize(
    ("row", "code", "script", "options", "number"),
    [*CODES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CODES)],
    ids=[f"{case[1]}-{number}" for number, case in enumerate(CODES + MORE_CODES)],
)
def test_exit_codes(row: str, code: int, script: str, options: list[str], number: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "paceline", "run", *options, "train.py"]
    process = Process(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if number:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors


def test_every_exit_code_of_the_table_is_tested() -> None:
    of_hosts = {str(LEFT_OUT)}  # tests/elastic/test_exclude_after.py
    assert {row[0] for row in rows(text("docs/reference/exit-codes.md"))} == {row for row, *_ in CODES} | of_hosts
