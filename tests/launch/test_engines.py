"""What all engines share, over one that starts its agents on this machine."""

from __future__ import annotations

import io
import re
import signal
import subprocess
from pathlib import Path

import pytest
from agents import until
from host_folders import Launched
from host_folders import launched as launched

from paceline.cli.main import main
from paceline.errors import LaunchError, UsageError
from paceline.launch.engines.engine import Host, parse_hosts, read_hosts
from paceline.launch.engines.launcher import HostJob
from paceline.launch.engines.remote_agent import unpack
from paceline.launch.engines.slurm import Slurm
from paceline.launch.engines.start import archive

ENDS = "print('out', RANK, flush=True)\nprint('error', file=sys.stderr, flush=True)\nsys.exit(CODE)\n"
WAITS = "mark('up')\nwhile not os.path.exists('go'): time.sleep(0.02)\n"


def test_launch_has_the_output_and_exit_code_of_a_local_run(launched: Launched) -> None:
    process = launched.start({"a": "CODE = 3\n" + ENDS}, max_restarts=0)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 3, error
    assert out == "out 0\n"
    assert "\nworker 0 failed (host " in error
    assert error.endswith("then run `AGAIN`: it starts over, as no checkpoint was written\n")


def test_token_is_in_the_run_folder_only(launched: Launched) -> None:
    process = launched.start({"a": WAITS, "b": WAITS}, {"a": 1, "b": 2})
    run = launched.folder / "a" / "run"
    until(lambda: (run / "up-0").exists() and (launched.folder / "b/run/hosts/b/up-1").exists())
    token = (run / "token").read_text().strip()
    assert len(token) == 64
    shown = [[*(one.info["cmdline"] or ()), *map(str, (one.info["environ"] or {}).items())] for one in launched.ours()]
    assert len(shown) > 6
    assert not any(token in word for words in shown for word in words)
    for name in "ab":
        (launched.folder / name / "go").touch()
    said = "".join(process.communicate(timeout=60))
    assert token not in said
    holders = [path for path in launched.folder.rglob("*") if path.is_file() and token in path.read_text("latin-1")]
    assert sorted(holders) == sorted([run / "token", launched.folder / "b/run/hosts/b/token"])
    assert all(path.stat().st_mode & 0o077 == 0 for path in holders)


def test_hosts_with_other_versions_or_scripts_are_refused_in_a_table(launched: Launched) -> None:
    process = launched.start({"a": "pass\n", "b": "pass # another\n", "c": ""})
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    lines = error.splitlines()
    torch = "torch".ljust(len(lines[2].split()[2]))
    assert lines[:2] == ["paceline: the hosts differ:", f"host  python  {torch}  paceline  script"]
    versions = lines[2].split()[1:4]
    assert [line.split()[:4] for line in lines[2:]] == [[name, *versions] for name in "abc"]
    assert lines[4].endswith("  missing; copy the same script to all hosts, or use --sync")
    assert not list(launched.folder.rglob("run"))


def test_host_without_python_is_refused(launched: Launched) -> None:
    process = launched.start({"a": "pass\n"}, python="/nowhere/python")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.startswith("paceline: the hosts differ:\nhost  python  torch  paceline  script\na     sh: ")
    assert error.endswith("/nowhere/python: not found; install the same versions, or use --python PATH and --setup\n")


def test_host_that_does_not_answer_joins_later(launched: Launched) -> None:
    (launched.folder / "b").mkdir()
    (launched.folder / "b" / "down").touch()
    process = launched.start({"a": WAITS, "b": WAITS})
    until(lambda: (launched.folder / "a/run/up-0").exists())
    (launched.folder / "b" / "down").unlink()
    until(lambda: (launched.folder / "b/run/hosts/b/up-1").exists())
    (launched.folder / "a" / "go").touch()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert error.startswith("b does not answer (no answer); Paceline retries until it answers\n")
    assert error.count("does not answer") == 1


def test_first_host_that_does_not_answer_ends_the_launch(launched: Launched) -> None:
    (launched.folder / "a").mkdir()
    (launched.folder / "a" / "down").touch()
    process = launched.start({"a": WAITS, "b": WAITS})
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.endswith(
        "paceline: the first host a does not answer (no answer), but it must run the coordinator; "
        "put another host first, or repair this one\n"
    )


@pytest.mark.slow
def test_begin_with_all_hosts_waits_for_them(launched: Launched) -> None:
    """As a function's are. The first host makes its first step, and no other one without them."""
    steps = """
        from basics import make, data
        for report in make().steps(data, count=5):
            open(f"made-{RANK}-{report.step}", "w").close()
    """
    (launched.folder / "b").mkdir()
    (launched.folder / "b" / "down").touch()
    process = launched.start({"a": steps, "b": steps}, wait=100, begin=2)
    assert process.stderr is not None
    told = process.stderr.readline()
    assert told == "b does not answer (no answer); Paceline retries until it answers\n"
    (launched.folder / "b" / "down").unlink()
    _, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    made = sorted(path.name for path in launched.folder.glob("*/made-*"))
    assert made == ["made-0-1", *(f"made-{rank}-{step}" for rank in range(2) for step in range(2, 6))], error


def test_begin_with_all_hosts_ends_without_one_of_them(launched: Launched) -> None:
    (launched.folder / "b").mkdir()
    (launched.folder / "b" / "down").touch()
    process = launched.start({"a": WAITS, "b": WAITS}, wait=2, begin=2)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.endswith(
        "paceline: b has not answered within 2 s (no answer), but the run needs all hosts; "
        "fix the cause, or use fewer hosts\n"
    )
    assert not (launched.folder / "a" / "run").exists()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 75), pytest.param(signal.SIGUSR2, 75, marks=pytest.mark.slow)],
)
def test_stop_signal_to_the_launcher_ends_all_hosts(launched: Launched, number: int, code: int) -> None:
    """Of two; what SIGTERM does is shown on one."""
    process = launched.start(dict.fromkeys("a" if number == signal.SIGTERM else "ab", WAITS))
    up = "a/run/up-0" if number == signal.SIGTERM else "b/run/hosts/b/up-1"
    until(lambda: (launched.folder / up).exists())
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert "start again with: AGAIN\n" in error
    until(lambda: not launched.ours())


def test_host_without_an_address_asks_for_listen(launched: Launched) -> None:
    process = launched.start({"a": WAITS, "no.such.host": WAITS}, listen=None)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    what = r"paceline: \S+ cannot reach no\.such\.host \(.+\); "
    assert re.fullmatch(what + "pass --listen ADDR, at which the other hosts reach the first host\n", error)


def test_kill_of_the_launcher_stops_the_run(launched: Launched) -> None:
    """The workers are asked to stop, as upon a SIGTERM; nobody is left."""
    hears = "signal.signal(signal.SIGUSR2, lambda *_: (mark('asked'), sys.exit(75)))\nevent('phase')\n"
    process = launched.start({"a": hears + WAITS, "b": hears + WAITS})
    until(lambda: (launched.folder / "b/run/hosts/b/up-1").exists())
    process.kill()
    until(lambda: (launched.folder / "a/run/asked-0").exists())
    until(lambda: not launched.ours())


def test_detached_run_goes_on(launched: Launched) -> None:
    """Not before all hosts are of it; what it says from then on is in its folders."""
    (launched.folder / "c").mkdir()
    (launched.folder / "c" / "down").touch()
    process = launched.start({"a": WAITS, "b": WAITS, "c": WAITS}, detach=True)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    console = [line for line in error.splitlines() if not line.startswith("b | ")]
    address = r"127\.0\.0\.1:[0-9]+"
    assert console[0] == "c does not answer (no answer); Paceline retries until it answers"
    assert "c has not joined; the run continues without it" in console
    assert any(
        re.fullmatch(f"the run continues by itself, at {address}, in the folder a:run", line) for line in console
    )
    ours = [" ".join(one.info["cmdline"] or ()) for one in launched.ours()]
    assert len([command for command in ours if command.endswith("-m paceline agent")]) == 2
    until(lambda: (launched.folder / "b/run/hosts/b/up-1").exists())
    (launched.folder / "a" / "go").touch()  # with the first worker's script the run is over, and so is b's
    until(lambda: not launched.ours())
    for folder in ("a/run", "b/run/hosts/b"):
        console = (launched.folder / folder / "console.log").read_text().splitlines()
        assert any("ended without using paceline" in line or "the run has ended" in line for line in console), console


def test_sync_copies_files_that_git_tracks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracked and unignored files, and what is gone here goes there; neither the token nor what git ignores."""
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    for name, text in {"a.py": "a", "b/c.py": "c", ".gitignore": "runs/\n", "runs/x": "x", "token": "t"}.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    monkeypatch.chdir(source)
    subprocess.run(["git", "init", "-q"], check=True)
    for gone in ("", "b/c.py"):
        if gone:
            (source / gone).unlink()
        data = archive()
        monkeypatch.chdir(target)
        unpack(io.BytesIO(data), len(data))
        monkeypatch.chdir(source)
        found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
        assert found == {"a.py", "b/c.py", ".gitignore", ".paceline-files"} - {gone}
    monkeypatch.setattr("paceline.launch.engines.start.MOST", 1)
    with pytest.raises(
        LaunchError, match=r"--sync would copy 0 MB; the largest file is .gitignore; move data to another folder"
    ):
        archive()


def test_hosts_option_and_hostfile(tmp_path: Path) -> None:
    assert parse_hosts("a,me@b:2") == [Host("a"), Host("me@b", 2)]
    assert parse_hosts("a,b:spare,c:2:spare") == [Host("a"), Host("b", None, spare=True), Host("c", 2, spare=True)]
    with pytest.raises(UsageError, match="the first host, a, cannot be a spare: it starts the run; list another"):
        parse_hosts("a:spare,b")
    (tmp_path / "hosts").write_text("# ours\na\n\nb:2\nc slots=4  # large\n")
    assert read_hosts(tmp_path / "hosts") == [Host("a"), Host("b", 2), Host("c", 4)]
    for text in ("-oProxyCommand=x", "a b", "", "a,,b", "a:0"):
        with pytest.raises(UsageError, match="is not a host; use names that ssh accepts, like --hosts a,b:2,user@c"):
            parse_hosts(text)


@pytest.mark.parametrize("folder", ["/srv/it's here", "~/run", "/a b/$HOME/`x`"])
def test_remote_script_is_quoted_for_sh(folder: str) -> None:
    job = HostJob({}, "/opt/my python/bin/python", folder, setup="module load cuda")
    done = subprocess.run(["sh", "-n"], input=job.script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert job.script.endswith("&& exec '/opt/my python/bin/python' -m paceline agent\n")
    assert "{ module load cuda\n} </dev/null && " in job.script


@pytest.mark.usefixtures("with_a_script")
def test_mpi_takes_the_hosts_of_a_pbs_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    words = ["launch", "mpi", "--engine=--mca plm tm", "--python", "/py", "--cwd", "/c", "--dry-run", "train.py"]
    assert main(words) == 0
    shell = "sh <<< $'cd /c && exec /py -m paceline agent\\n'\n"
    each = "mpirun -q -n 1 --host {} --bind-to none --mca plm tm " + shell
    assert capsys.readouterr().out == each.format("n1") + each.format("n2")


@pytest.mark.usefixtures("with_a_script")
def test_dry_run_shows_commands_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--dry-run", "--python", "/py", "--cwd", "/c d", "--run-dir", "runs/a", "--env", "KEY=secret"]
    assert main(["launch", "ssh", "--hosts", "a,b", *given, "train.py"]) == 0
    one = "ssh -T -a -x -o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=5 -- {} sh <<< "
    script = r"""$'cd \'/c d\' && exec /py -m paceline agent\n'"""
    assert capsys.readouterr().out == "".join(f"{one.format(name)}{script}\n" for name in "ab")
    assert main(["launch", "slurm", "-N", "4", "--engine=--time=1:00:00 -p gpu", *given, "train.py", "--lr", "1"]) == 0
    assert capsys.readouterr().out == (
        "#!/bin/sh\n#SBATCH --job-name=paceline-train\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --requeue\n#SBATCH --open-mode=append\n#SBATCH --signal=B:USR2@120\n"
        '#SBATCH "--output=/c d/runs/a/slurm-%j.out"\n#SBATCH --time=1:00:00 -p gpu\n'
        "cd '/c d' || exit\nexec /py -m paceline launch slurm -N 4 '--engine=--time=1:00:00 -p gpu' "
        "--python /py --cwd '/c d' --run-dir runs/a --env KEY train.py --lr 1\n"
    )


SCONTROL = """#!/bin/sh
echo "JobId=7 JobName=paceline JobState=RUNNING NodeList=n[1-2]
   ReqNodeList=(null) ExcNodeList=$EXCLUDED NumNodes=2"
"""


@pytest.mark.parametrize(
    ("asked", "of_the_job", "excluded"),
    [
        ([], "(null)", "n1,n2"),
        (["--partition=all"], "n[7-8]", "n[7-8],n1,n2"),
        (["-x", "n9", "--mem=4G"], "(null)", "n9,n1,n2"),
        (["-xn9"], "n9", "n9,n1,n2"),
        (["--exclude", "n3", "--exclude=n8,n9"], "n7", "n7,n8,n9,n1,n2"),
        (["--exclude=./bad-nodes"], "(null)", "n5,n6,n1,n2"),
    ],
)
def test_slurm_job_of_a_further_node_excludes_what_the_user_excludes(
    asked: list[str], of_the_job: str, excluded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad-nodes").write_text("n5\nn6\n")
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("EXCLUDED", of_the_job)
    engine = Slurm([Host("n1"), Host("n2")], [], "7", 0, True, asked)
    further = engine.request_replacement(Host("n2"))
    assert further is not None
    command = engine.command(further)
    assert [word for word in command if word.startswith("--exclude")][-1] == f"--exclude={excluded}"
    assert command.index(f"--exclude={excluded}") > max([0, *(command.index(word) for word in asked)])


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        (["-w", "n[1-2]", "--time=1:00", "-p", "gpu"], ["--time=1:00", "-p", "gpu"]),
        (["-wn1,n2", "--mem", "4G", "--nodelist=n1"], ["--mem", "4G"]),
        (["--nice=5", "-N2", "-n", "2", "--ntasks-per-node=1", "--nodes", "2-4", "--nodefile=a"], ["--nice=5"]),
        (["-F", "names", "--ntasks"], []),
    ],
)
def test_slurm_job_of_a_further_node_may_have_any_node(asked: list[str], left: list[str]) -> None:
    engine = Slurm([Host("n1"), Host("n2")], [], "7", 0, True, asked)
    further = engine.request_replacement(Host("n2"))
    assert further is not None
    words = engine.command(further)
    first, last = (words.index(word) for word in ("--unbuffered", "--exclude=n1,n2"))
    assert words[first + 1 : last] == left
