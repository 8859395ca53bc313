"""What `paceline launch` cannot do is refused in one line, before anything starts."""

from __future__ import annotations

import shlex

import pytest
from golden import GoldenText

from paceline.cli.main import main

WRONG = [
    "ssh train.py",
    "ssh --hosts a,a:2 train.py",
    "ssh --hostfile none train.py",
    "ssh --hosts a",
    "ssh --hosts a none.py",
    "ssh --hosts a --env NO_SUCH_VARIABLE train.py",
    "ssh --hosts a --env 1=2 train.py",
    "mpi train.py",
    "slurm train.py",
    "kubernetes --image i train.py",
    "kubernetes -N 2 train.py",
    "kubernetes -N 2 --image i train.py",
    "kubernetes -N 2 --image i --checkpoints there train.py",
    "kubernetes -N 2 --image i --checkpoints s3://key:word@bucket/a train.py",
    "kubernetes -N 2 --image i --claim runs --run-dir /runs/a train.py",
    "kubernetes -N 2 --image i --claim runs --cpus many train.py",
    "kubernetes -N 2 --image i --claim runs --memory '16 GB' train.py",
    "kubernetes -N 2 --image i --claim runs none.py",
    "kubernetes -N 2 --image i --claim runs",
    "ray --engine=CPU train.py",
    "ray --engine=CPU=-1 train.py",
    "ray --hosts=a,b --nodes=2 train.py",
    "ray --address=ray://a:10001 train.py",
    "ray --address=nowhere train.py",
    "spark train.py",
    "spark -N 2 --master 10.0.0.7:7077 train.py",
    "spark -N 2 '--engine=--conf '\"'\"'a=b' train.py",
]


@pytest.mark.parametrize("words", WRONG)
@pytest.mark.usefixtures("with_a_script")
def test_launch_usage_errors(words: str, capsys: pytest.CaptureFixture[str], golden: GoldenText) -> None:
    assert main(["launch", *shlex.split(words)]) == 2
    golden(words, capsys.readouterr().err)
