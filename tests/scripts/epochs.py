"""Trains for some epochs with early stopping and two best checkpoints. Usage: epochs.py OUT PATIENCE [VALUE ...]: the
value that is reported at the end of each epoch.
"""

import json
import sys
import time

from basics import data, make

out, patience, values = sys.argv[1], int(sys.argv[2]), [float(text) for text in sys.argv[3:]]
trainer = make()
trainer.keep_best("loss", mode="min", k=2)
trainer.early_stop("loss", patience=patience)
seen = []
for report in trainer.steps(data, epochs=len(values)):
    time.sleep(0.01)
    if report.epoch_end:
        assert trainer.epoch == report.epoch
        value = values[report.epoch]
        trainer.export(f"{out}.{report.step}.safetensors")
        trainer.evaluate(data, lambda output, batch, value=value: {"loss": (value * len(output), len(output))})
    seen.append([report.step, report.epoch, report.epoch_end, trainer.steps_per_epoch])
trainer.load_best()
trainer.export(f"{out}.best.safetensors")
if trainer.main:
    with open(f"{out}.json", "w") as file:
        json.dump(seen, file)
