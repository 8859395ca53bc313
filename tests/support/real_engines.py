"""What tests of ssh, Slurm, MPI, Ray, Spark and Kubernetes share."""

from __future__ import annotations

import shutil
from pathlib import Path

from conftest import lacking
from launching import paceline
from paths import EXAMPLES

DIGITS = EXAMPLES / "digits.py"
STEPS = {"PACELINE_MAX_STEPS": "30", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# 400 steps, slow ones until there is a file `go`.
SLOWLY = """
from basics import *
import os, time
trainer = make()
for report in trainer.steps(data, epochs=100):
    if not os.path.exists("go"):
        time.sleep(0.2)
trainer.export("out.safetensors")
"""


def needs(*commands: str) -> None:
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        lacking(f"there is no {', '.join(missing)}: run .ci/servers")


def weights(run: Path) -> bytes:
    paceline("export", run, "weights.safetensors", cwd=run)
    return (run / "weights.safetensors").read_bytes()
