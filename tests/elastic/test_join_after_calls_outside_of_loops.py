"""A worker that joins passes over what its team did together outside of loops: export(), save(), evaluate()."""

from __future__ import annotations

from pathlib import Path

from launching import train_basics
from oracle import apart
from safetensors.torch import load_file

TWO_PHASES = """
trainer = make()
for report in trainer.steps(data, epochs=3): pass
trainer.export("first.safetensors")
trainer.save()
trainer.evaluate(data, lambda output, batch: {"rows": (len(output), 1)})
trainer = make()
for report in trainer.steps(data, epochs=3): pass
trainer.export("second.safetensors")
"""


def test_kill_in_a_second_phase_after_export_and_save_gives_the_undisturbed_weights(tmp_path: Path) -> None:
    for folder, workers, chaos in (("killed", 3, "kill:1@17.backward"), ("undisturbed", 1, "")):
        (tmp_path / folder).mkdir()
        done = train_basics(tmp_path / folder, TWO_PHASES, workers, chaos=chaos)
        assert done.stderr.count("worker 1 was killed by SIGKILL: 2 workers go on") == bool(chaos)
    for name in ("first.safetensors", "second.safetensors"):
        killed, undisturbed = (load_file(tmp_path / folder / name) for folder in ("killed", "undisturbed"))
        assert apart(killed, undisturbed) < 1e-6  # basics.py trains in float32
