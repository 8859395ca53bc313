"""Files that lie: whatever is in one, a reader takes it or refuses it by an error of ours, and never raw."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoints import find_checkpoint
from hypothesis import example, given, settings
from hypothesis import strategies as st
from journals import GRID, step
from mutations import MISSING, as_json, changed, garbled, mutated
from rich.console import Console
from safetensors.torch import load_file, save_file
from test_inspect_checkpoint import save
from warm import SCRIPTS, Process, environment

from paceline.base.journal import NAME
from paceline.base.schema import read_file
from paceline.checkpoint.export import export_model
from paceline.checkpoint.files import ended_in, trainers_in
from paceline.checkpoint.import_weights import import_model
from paceline.checkpoint.inspect import inspect_run
from paceline.checkpoint.tree import unflatten
from paceline.data import Tokens
from paceline.errors import FormatError, PacelineError
from paceline.launch.coordinator_process import ADDRESS, listening_at
from paceline.observe.doctor import doctor
from paceline.observe.live import Panels
from paceline.observe.metrics import values_of
from paceline.observe.page import Chosen
from paceline.observe.prometheus import families
from paceline.observe.report import write_report
from paceline.observe.runs import compare, runs
from paceline.observe.summary import Summary, explain
from paceline.observe.timeline import trace
from paceline.observe.trainjob import status
from paceline.observe.watch import watch
from paceline.session.user_streams import load_user_streams
from paceline.team.reading_key import write_targets

SCRIPT = SCRIPTS / "linear.py"
HELD = {"parameters": 2960, "gradients": 592, "optimizer": 9472, "sent": {"gradients": 197}, "seconds": 0.5}
LANES = {"0 data": 0.01, "0 compute": 0.4, "1 data": 0.02, "1 compute": 0.4, "0 update": 0.01}
# One event of each kind, as runs write them, and several of steps.
EVENTS: list[dict[str, Any]] = [
    {"event": "journal", "version": 1},
    {"event": "compare", "workers": 1, "samples_per_second": 2560.0},
    {"event": "decision", "what": "workers start cold", "why": "they were told to"},
    {"event": "worker", "worker": 0, "life": 0, "host": "a", "pid": 7, "what": "started"},
    {"event": "worker", "worker": 1, "life": 0, "host": "b", "pid": 8, "what": "ended", "cause": "exit code 1"},
    {"event": "server", "server": 0, "life": 0, "host": "a", "pid": 9, "what": "started"},
    {
        "event": "start",
        "workers": 2,
        "hosts": ["a", "b"],
        "plan": "data=2 micro=2",
        "plan_origin": "--plan",
        "script": "train.py",
        "module": None,
        "argv": ["train.py", "--size", "big one"],
        "script_sha256": "76a4c6",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "seed": 7,
        "threads": 1,
        "device": "cpu",
        "resumed_from": 0,
        "began": 1795764323.0,
    },
    {
        "event": "environment",
        "packages": {"numpy": "2.0"},
        "commit": "606060",
        "remote": "of",
        "diff": "d",
        "dirty": True,
    },
    {"event": "config", "trainer": 0, "values": {"lr": 0.1, "name": "small"}},
    {"event": "generation", "number": 1, "workers": [0, 1], "planned": True, "at_once": 1},
    {"event": "clock", "host": "a", "offset": 0.0004, "error": 0.0007, "workers": [0, 1]},
    {
        "event": "grid",
        "global_batch": 24,
        "micro": 3,
        "micro_batches": 8,
        "trainer": 0,
        "model": "Net",
        "rows": 60,
        "shares": [5, 3],
        "unit": 1,
        "text": GRID,
        "phase": 0,
        "epochs": None,
        "done": [0],
        "steps": 100,
    },
    {"event": "shares", "trainer": 0, "step": 5, "workers": [0, 1], "parts": [0.4, 0.6], "before": None},
    *(
        {
            "event": "step",
            **step(10 * n, lr=0.004, grad_norm=6.75 + n, tokens=99, metrics={"far": 0.7 / n}, lanes=LANES),
            "computed": {"0": 0.115, "1": 0.101 + n},
            "account": {"script": 0.08, "steps": 2.0},
        }
        for n in range(1, 12)
    ),
    {"event": "each", "trainer": 0, "step": 3, "steps": 3, "computed": {"0": 0.1, "1": 0.2}},
    {"event": "note", "trainer": 0, "step": 1, "text": "the loss is another one"},
    {
        "event": "evaluate",
        "trainer": 0,
        "step": 90,
        "results": {"accuracy": 0.5, "n": 500, "table": [[1, 2]], "x": None},
    },
    {"event": "evaluate", "trainer": 0, "step": 100, "results": {"accuracy": 0.6, "n": 500}},
    {"event": "log", "trainer": 0, "step": 110, "values": {"sample": "text", "speed": 3}},
    {
        "event": "media",
        "trainer": 0,
        "step": 1,
        "name": "weights",
        "kind": "histogram",
        "others": 1,
        "counts": [1, 2],
        "edges": [0.0, 1.0, 2.0],
        "mean": 0.5,
        "deviation": 1.0,
    },
    {"event": "media", "trainer": 0, "step": 1, "name": "a", "kind": "image", "file": "a.png", "width": 5, "height": 4},
    {
        "event": "loaded",
        "host": "a",
        "workers": {"0": [0.01, 23]},
        "sent": {"10.0.0.2": 85},
        "here": ["10.0.0.1"],
        "agent": "a (1)",
    },
    {
        "event": "loaded",
        "host": "b",
        "workers": {"1": [0.04, 23]},
        "sent": {"10.0.0.1": 80},
        "here": ["10.0.0.2"],
        "agent": "b (2)",
    },
    {"event": "links", "pairs": [[[0], [1], 3e8, 0.0009]], "over": "eth0"},
    {"event": "links", "rate": 3.5e7},
    {"event": "gives", "worker": 3, "bytes": 630, "whole": 630},
    {"event": "noise", "trainer": 0, "step": 100, "scale": 0.14, "looks": 10},
    {"event": "codec", "trainer": 0, "codec": "int8", "kind": "int8", "to": "other hosts", "sent": 88, "full": 800},
    {"event": "memory", "trainer": 0, "parameters": 29, "gradients": 58, "optimizer": 98, "process": 464},
    {
        "event": "figures",
        "trainer": 0,
        "plan": "pipeline=2",
        "stages": [
            {"blocks": "0 to 3 (Linear)", "passes": 512, "forward": 0.1, "backward": 0.2},
            {"blocks": "4 to 7 (Linear)", "passes": 0, "forward": 0.1, "backward": 0.2},
        ],
        "workers": 2,
        "micro_batches": 8,
        "predicted": [HELD, HELD],
        "measured": [{**HELD, "process": 2947, "waited": 0.1}, {**HELD, "process": 2947, "waited": 0.1}],
    },
    {
        "event": "late",
        "trainer": 0,
        "step": 2,
        "merged": [0, 1],
        "late": [2],
        "took": {"0": 2},
        "missed": {"2": [2, 2, 4]},
    },
    {"event": "uncounted", "trainer": 0, "step": 4, "island": 2, "rows": 8},
    {"event": "merge", "turn": 12, "number": 0, "trainer": 0, "step": 6, "islands": [0], "late": [], "void": False},
    {
        "event": "window",
        "trainer": 0,
        "step": 40,
        "updates": 20,
        "workers": [[0, 19], [1, 1]],
        "missed": [[0, 20], [2, 1]],
        "dropped": 15,
        "late": [[21, 0, 0, 1]],
    },
    {"event": "healed", "trainer": 0, "step": 7, "workers": [1], "tensors": ["exp_avg of 0.weight"]},
    {"event": "lost", "workers": [1], "why": "raised", "step": 1, "mates": [2], "causes": {"1": ["at train.py:12"]}},
    {"event": "formed", "number": 2, "workers": [0], "step": 13, "seconds": 0.13},
    {"event": "checkpoint", "step": 100, "path": "checkpoints/step-1", "seconds": 0.005, "took": 0.03, "bytes": 2056},
    {"event": "account", "seconds": {"script": 0.0013, "saving": 0.06}},
    {
        "event": "collectives",
        "kinds": {"gradients": [35, 42082, 0.13], "figures": [38, 6.0, 0.05], "steps": [1, 1, 0.1]},
    },
    {"event": "agreement", "trainer": 0, "checks": 4, "seconds": 0.02, "distance": 5.6e-09},
    {"event": "profiling", "steps": 2, "workers": [0, 4]},
    {"event": "refused", "what": "GET /status", "times": 1},
    {
        "event": "hang",
        "worker": 0,
        "life": 0,
        "host": "a",
        "pid": 29,
        "seconds": 120.0,
        "line": "a.py:33",
        "busy": False,
    },
    {
        "event": "failed",
        "worker": 1,
        "host": "b",
        "step": 4,
        "cause": "workers called different collectives",
        "code": 1,
        "text": "next: x",
    },
    {"event": "stopped", "step": 10, "why": "asked to"},
    {"event": "finished", "step": 110, "already": False},
]
for place, event in enumerate(EVENTS):
    event["at"] = 1795764323.0 + place
GOES_ON = [event for event in EVENTS if event["event"] not in ("failed", "stopped", "finished")]


def view(folder: Path) -> None:
    """The page, /metrics, what Kubeflow is told and what loggers get."""
    summary = Summary(folder)
    Panels(summary).html(Chosen(("more",), "0", True))
    [*families(summary, "run")]
    status(summary)
    [values_of(event) for records in summary.steps.values() for event in records]


JOURNAL_READERS: dict[str, Callable[[Path], Any]] = {
    "report": write_report,
    "explain": explain,
    "doctor": doctor,
    "compare": lambda run: compare([run, run], run / "compared.html"),
    "runs": lambda run: (runs([run]), runs([run], as_json=True)),
    "watch": lambda run: watch(run, once=True, console=Console(file=io.StringIO())),
    "trace": lambda run: (trace(run, run / "trace.json", None), trace(run, run / "trace.json", "1:50")),
    "view": view,
}


def refuse_or_do(act: Callable[[], Any]) -> str:
    """Does it, or says how it was refused."""
    try:
        act()
    except PacelineError as error:
        return str(error)
    return ""


def fuzz(
    examples: int, strategy: st.SearchStrategy[Any], act: Callable[[Any], None], seeds: Sequence[Any] = ()
) -> None:
    """`seeds` are what once ended raw."""

    def once(value: Any) -> None:
        act(value)

    tried = given(strategy)(once)
    for seed in seeds:
        tried = example(seed)(tried)
    settings(max_examples=examples, derandomize=True, database=None)(tried)()


def in_each(names: Iterable[str], together: Iterable[str] | None = None) -> list[Any]:
    """Readers together on few examples; in slow tests each on many."""
    slow = [pytest.param([name], 2_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)], id=name) for name in names]
    return [pytest.param([*(together or names)], 15, id="all"), *slow]


def write_events(folder: Path, events: list[Any]) -> None:
    (folder / NAME).write_bytes(b"".join(as_json(event) + b"\n" for event in events))


SEEDS = [
    changed(EVENTS, (place, *path), wrong)
    for place, path, wrong in [
        *[(place, ("at",), wrong) for place in (6, 14, -1) for wrong in (MISSING, 1e308, -1, "now")],
        *[(15, path, wrong) for path in (("account",), ("time",), ("computed",)) for wrong in ({"": None}, {"x": 1.0})],
        *[
            (15, (name,), wrong)
            for name in ("seconds", "steps", "step", "trainer")
            for wrong in (MISSING, None, 1e-308)
        ],
        (-14, ("event",), {}),
    ]
]


@pytest.mark.parametrize(("names", "examples"), in_each(JOURNAL_READERS))
def test_journal_with_a_changed_field_is_read_or_refused(names: list[str], examples: int, tmp_path: Path) -> None:
    def act(events: list[Any]) -> None:
        write_events(tmp_path, events if isinstance(events, list) else [events])
        for name in names:
            refuse_or_do(lambda name=name: JOURNAL_READERS[name](tmp_path))

    write_events(tmp_path, EVENTS)
    assert [refuse_or_do(lambda name=name: JOURNAL_READERS[name](tmp_path)) for name in names] == [""] * len(names)
    fuzz(examples, mutated(EVENTS) | mutated(GOES_ON), act, SEEDS)


@pytest.mark.parametrize("examples", [30, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_garbled_journal_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    """A line that is no JSON was torn by a crash, and is skipped."""
    write_events(tmp_path, EVENTS)
    whole = (tmp_path / NAME).read_bytes()

    def act(text: bytes) -> None:
        (tmp_path / NAME).write_bytes(text)
        refuse_or_do(lambda: view(tmp_path))

    fuzz(
        examples,
        garbled(whole),
        act,
        [b"[" * 100_000 + b"\n", b"\xff\n" + whole, b'{"event": "step", "step": 1e400}\n'],
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"event": "step", "step": "7"}', "step: expected int | null, got str"),
        ('{"event": "step", "step": -1}', "step: expected int >= 0"),
        (
            '{"event": "step", "computed": {"0": 1.0, "b": 1.0}}',
            "computed: expected str of another form",
        ),
        (
            '{"event": "start", "versions": {"torch": "2.14", "a b": 2}}',
            'versions["a b"]: expected str | null, got int',
        ),
        ('{"event": ["step"]}', "event: expected str, got array"),
        ("[" * 3000 + "]" * 3000, "it is nested too deeply"),
    ],
)
def test_journal_error_names_the_wrong_field(line: str, why: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"event": "journal", "version": 1}\n' + line + "\n")
    with pytest.raises(FormatError) as caught:
        write_report(tmp_path)
    assert (
        str(caught.value)
        == f"{tmp_path / NAME} is damaged in line 2: {why}; remove that line; the other lines can be read"
    )


def test_journal_of_a_later_version_is_read(tmp_path: Path) -> None:
    more = {"of a later version": [1, {"a": None}]}
    write_events(tmp_path, [{**event, **more} for event in EVENTS] + [{"event": "later", "at": 1795764999.0, **more}])
    assert [refuse_or_do(lambda read=read: read(tmp_path)) for read in JOURNAL_READERS.values()] == [""] * 8


# -- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint_of(run: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a checkpoint as a run writes one, and its manifest."""
    save(run, 7)
    (folder,) = (run / "checkpoints").iterdir()
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    manifest["streams"] = [{"torch": "00ff", "random": [3, [1, 2], None], "numpy": ["MT19937", [1], 0, 0, 0.0]}]
    manifest["best"] = [{"trainer": 0, "name": "accuracy", "mode": "max", "value": 0.5}]
    return folder, manifest


def seal(folder: Path, manifest: Any) -> None:
    """Writes a manifest with the SHA-256 of its text, as whoever makes a wrong one would."""
    body = json.dumps(manifest).removesuffix("}")
    digest = hashlib.sha256(body.encode(errors="backslashreplace")).hexdigest()
    (folder / "manifest.json").write_bytes(f'{body},\n"sha256": "{digest}"\n}}\n'.encode(errors="backslashreplace"))


def resume(run: Path) -> None:
    """What a run reads of a checkpoint before it makes anything of it."""
    found = find_checkpoint(run, lambda _: None)
    if found is not None:
        trainers_in(found.manifest)
        unflatten(found.manifest["tree"], found.tensors())
        ended_in(found.manifest, found.storage, lambda _: None)
        for streams in found.manifest.get("streams", []):
            load_user_streams(streams)


CHECKPOINT_READERS: dict[str, Callable[[Path], Any]] = {
    "inspect": lambda run: inspect_run(run, tensors=True),
    "export": lambda run: export_model(run, run / "out.safetensors"),
    "resume": resume,
}


@pytest.mark.parametrize(("names", "examples"), in_each(CHECKPOINT_READERS, together=["inspect", "resume"]))
def test_manifest_with_a_changed_field_is_read_or_refused(names: list[str], examples: int, tmp_path: Path) -> None:
    folder, manifest = checkpoint_of(tmp_path)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()

    def act(wrong: Any) -> None:
        seal(folder, wrong)
        for name in names:
            refuse_or_do(lambda name=name: CHECKPOINT_READERS[name](tmp_path))

    seal(folder, manifest)
    assert inspect_run(tmp_path)
    try:
        fuzz(examples, mutated(manifest), act)
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


def train(run: Path, steps: int) -> str:
    """Trains in a run folder, or goes on there: what came of it."""
    env = environment(PACELINE_PLAN="exact", PACELINE_RUN_DIR=str(run))
    pipe = subprocess.PIPE
    with Process([sys.executable, SCRIPTS / "restored.py", str(steps)], env, stdout=pipe, stderr=pipe) as process:
        said, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    return said.strip()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("begun") / "run"
    assert train(run, 4) == ""
    return run


@pytest.mark.parametrize(
    ("name", "wrong", "word"),
    [
        ("exact", {"weight": "much"}, "cannot continue from the field exact of"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("owed", [], "owed: expected object"),
                ("owed", {"none": 1.0}, "cannot continue from the field owed of"),
                ("exact", [], "exact: expected object"),
                ("islands", 7, "islands: expected object"),
                ("islands", {"each": {}}, "cannot continue from the field islands of"),
                ("scaling", ["high", 4], "scaling[0]: expected float"),
                ("phases", [{"number": "0"}], "phases[0]"),
                ("grid", [12], "grid: expected array of length 2"),
                ("expected", MISSING, "cannot continue from the field expected of"),
                ("schedulers", MISSING, "cannot continue from the field schedulers of"),
                ("said", {"seed": []}, "cannot continue from the field said of"),
            ]
        ),
    ],
)
def test_resume_names_a_trainer_field_it_cannot_use(
    name: str, wrong: Any, word: str, begun: Path, tmp_path: Path
) -> None:
    """By the one error that a run ends with when it resumes, not by a raw one."""
    run = shutil.copytree(begun, tmp_path / "run")
    (whole,) = (run / "checkpoints").iterdir()
    manifest = json.loads((whole / "manifest.json").read_bytes())
    del manifest["sha256"]
    seal(whole, changed(manifest, ("tree", "trainers", 0, name), wrong))
    said = train(run, 6)
    assert said.startswith("CheckpointError: ")
    assert word in said


# -- weights from elsewhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["$tensor", "$dict", "__metadata__.weight", "a b\u2028c", "\x1b]0;x\x07", ""])
def test_a_tensor_of_any_name_is_imported_inspected_and_exported(name: str, tmp_path: Path) -> None:
    weights = {name: torch.ones(2, 3), "plain": torch.zeros(1)}
    source, run, out = tmp_path / "given.safetensors", tmp_path / "run", tmp_path / "out.safetensors"
    save_file(weights, source)
    import_model(source, run)
    inspect_run(run, tensors=True)
    found = json.loads(inspect_run(run, as_json=True))["trainers"][0]["weights"]
    assert (found["tensors"], found["values"]) == (2, 7)
    export_model(run, out)
    assert {key: value.tolist() for key, value in load_file(out).items()} == {
        key: value.tolist() for key, value in weights.items()
    }


@pytest.mark.parametrize("examples", [30, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_import_reads_or_refuses_a_wrong_index_or_header(examples: int, tmp_path: Path) -> None:
    folder, index = tmp_path / "given", tmp_path / "given/model.safetensors.index.json"
    folder.mkdir()
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / "one.safetensors")
    text = (folder / "one.safetensors").read_bytes()
    length = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + length])
    whole = {"metadata": {"total_size": 20}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}

    def bring(data: bytes, source: Path) -> None:
        index.write_bytes(data)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        refuse_or_do(lambda: import_model(source, tmp_path / "run"))

    def lie(wrong: Any) -> None:
        head = json.dumps(wrong).encode()
        (folder / "two.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + text[8 + length :])
        bring(as_json(whole), folder / "two.safetensors")

    fuzz(examples // 2, mutated(whole), lambda wrong: bring(as_json(wrong), folder))
    fuzz(examples // 4, garbled(as_json(whole)), lambda wrong: bring(wrong, folder))
    fuzz(examples // 4, mutated(header), lie)


# -- small files of folders ------------------------------------------------------------------------------------------

LISTENING = {"host": "127.0.0.1", "port": 29400, "epoch": 1}
TARGETS = [{"targets": ["127.0.0.1:9100"]}]
FLIGHT: list[dict[str, Any]] = [
    {"worker": 0, "host": "a", "at": 1795764323.0},
    {
        "name": "step 1",
        "group": "team",
        "begun": 1795764323.0,
        "ended": None,
        "number": 1,
        "site": "a.py:3",
        "bytes": 9,
    },
    {"name": "figures", "group": "team", "begun": 1795764323.0, "ended": 1795764324.0, "number": 2, "failed": False},
]
TOKENS = {
    "format": 1,
    "dtype": "uint16",
    "vocabulary": 50,
    "end": 0,
    "tokenizer": {"name": "a", "sha256": "b"},
    "shards": [{"file": "00000.bin", "tokens": 4, "bytes": 8, "sha256": hashlib.sha256(bytes(8)).hexdigest()}],
}


def read_flights(folder: Path, data: Any) -> None:
    (folder / "stacks").mkdir(exist_ok=True)
    lines = data if isinstance(data, list) else [data]
    (folder / "stacks/worker-0.jsonl").write_bytes(b"".join(as_json(line) + b"\n" for line in lines))
    trace(folder, folder / "trace.json", None)


def read_tokens(folder: Path, data: Any) -> None:
    (folder / "tokens.json").write_bytes(as_json(data))
    (folder / "00000.bin").write_bytes(bytes(8))
    Tokens(folder, 2)[0]


def read_listening(folder: Path, data: Any) -> None:
    (folder / ADDRESS).write_bytes(as_json(data))
    listening_at(folder)


def read_targets(folder: Path, data: Any) -> None:
    (folder / "metrics.json").write_bytes(as_json(data))
    write_targets(folder, [], instead_of=["127.0.0.1:9100"])


SMALL: dict[str, tuple[Any, Callable[[Path, Any], None]]] = {
    "coordinator.json": (LISTENING, read_listening),
    "metrics.json": (TARGETS, read_targets),
    "stacks": (FLIGHT, read_flights),
    "tokens.json": (TOKENS, read_tokens),
}


@pytest.mark.parametrize(("names", "examples"), in_each(SMALL))
def test_small_files_with_a_changed_field_are_read_or_refused(names: list[str], examples: int, tmp_path: Path) -> None:
    write_events(tmp_path, EVENTS)
    for name in names:
        whole, read = SMALL[name]
        assert refuse_or_do(lambda read=read, whole=whole: read(tmp_path, whole)) == ""
        fuzz(examples, mutated(whole), lambda wrong, read=read: refuse_or_do(lambda: read(tmp_path, wrong)))


# -- names that are not UTF-8, and full disks --------------------------------------------------------------------------


@pytest.mark.slow
def test_commands_take_the_name_of_a_folder_that_is_not_utf8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    folder.mkdir()
    write_events(folder, EVENTS)
    for words in (["report"], ["explain"], ["doctor"], ["watch", "--once"], ["runs"], ["compare", folder], ["trace"]):
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *words, folder],
            capture_output=True,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
        assert (done.returncode, done.stderr) == (0, b""), words
    view(folder)


@pytest.mark.slow
def test_a_script_whose_path_is_not_utf8_trains_goes_on_and_is_exported(tmp_path: Path) -> None:
    """Its folder is not, either; its run folder is renamed afterwards."""
    work = Path(os.fsdecode(os.fsencode(tmp_path) + b"/w\xff"))
    work.mkdir()
    script = shutil.copy(SCRIPT, os.fsdecode(os.fsencode(work) + b"/train\xff.py"))

    def paceline(*words: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "paceline", *words]
        return subprocess.run(command, cwd=work, capture_output=True, env={**os.environ, "LC_ALL": "C.UTF-8"})

    for steps in "46":
        done = paceline("run", "--workers", "2", "--run-dir", "run", Path(script).name, "out", steps)
        assert (done.returncode, b"finished at step " + steps.encode() in done.stderr) == (0, True), done.stderr
    view(work / "run")
    renamed = os.fsdecode(b"run\xfe")
    (work / "run").rename(work / renamed)
    for words in (["inspect", "--tensors"], ["export", os.fsdecode(b"out\xfe.safetensors")]):
        done = paceline(words[0], renamed, *words[1:])
        assert (done.returncode, done.stderr) == (0, b""), words
    view(work / renamed)
    done = paceline("import", os.fsdecode(b"out\xfe.safetensors"), "other")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.root
def test_run_on_a_full_disk_says_so_when_it_begins(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "paceline-test", disk], check=True)
    try:
        (disk / "run").mkdir()
        write_events(disk / "run", EVENTS)
        with suppress(OSError), (disk / "rest").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "run", "--run-dir", disk / "run", SCRIPT],
            capture_output=True,
            text=True,
        )
        what = f"paceline: the run folder {disk}/run cannot be written: No space left on device"
        assert (done.returncode, done.stderr) == (2, f"{what}; free some space, or choose another --run-dir\n")
    finally:
        subprocess.run(["umount", disk], check=True)


READ_PIPES = """
import sys
from pathlib import Path
from paceline.cli.main import main
from paceline.data import Tokens
from paceline.errors import PacelineError
from paceline.launch.coordinator_process import listening_at
from paceline.team.reading_key import reading_key
from paceline.team.auth import read_token
for words in (
    "explain 0",
    "logs 1",
    "inspect 2",
    "watch --once 0",
    "run pipe --workers 2",
    "watch 127.0.0.1:1 --key-file pipe",
    "launch ssh --hostfile pipe train.py",
    "import weights run",
):
    print(f"$ paceline {words}", file=sys.stderr)
    main(words.split())
tokens = lambda path: Tokens(path, 4)
for read, path in ((read_token, "token"), (reading_key, "."), (listening_at, "."), (tokens, "data")):
    print(f"$ read {path}", file=sys.stderr)
    try:
        read(Path(path))
    except (OSError, PacelineError) as error:
        print(error, file=sys.stderr)
"""
PIPES = ["0/journal.jsonl", "1/logs/worker-0.log", "2/checkpoints/step-000000000001/manifest.json", "token"]
PIPES += ["coordinator.json", "reading_key", "pipe", "weights/model.safetensors", "data/tokens.json"]


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(
    golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    """Read in a process of its own, which would wait in vain where the pipe is opened as a file."""
    for name in PIPES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(tmp_path / name, 0o600)
    (tmp_path / "train.py").touch()
    (tmp_path / "read.py").write_text(READ_PIPES)
    with Process([sys.executable, "read.py"], environment(), cwd=tmp_path, stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(timeout=60)
    golden("pipes in place of files", errors.replace(str(tmp_path), "FOLDER"))


def test_a_pipe_of_a_shell_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"text")
    os.close(writing)
    assert read_file(f"/dev/fd/{reading}") == b"text"
    os.close(reading)
