"""The memory that the plans of a run need, to explain why it ran out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.base.environment import World
from paceline.base.memory import address_limit, advice, machine_memory
from paceline.compute.state_dict import held
from paceline.errors import OutOfMemoryError, first_line
from paceline.session.memory_snapshot import take_snapshot
from paceline.session.process_memory import memory_now, private_memory
from paceline.session.script_position import ScriptPosition
from paceline.session.training_loop import RegisteredTrainer


class MemoryNeeds:
    """The memory of the process before the first model exists, and what all `members` need.

    `baseline_bytes` is its own memory, `process_bytes` includes what it shares with other processes (on the CPU).
    """

    def __init__(self, members: Sequence[RegisteredTrainer]) -> None:
        self._members = members
        self.baseline_bytes = self.process_bytes = 0

    def measure_baseline(self, given: Any) -> None:
        """Measures the baseline before the first trainer is made; `given` is a model that the script has made already,
        or a function.
        """
        if not self._members:
            models = held(given.parameters()) if isinstance(given, torch.nn.Module) else 0
            self.baseline_bytes = private_memory() - models
            self.process_bytes = memory_now(torch.device("cpu")) - models

    def report(self, world: World, script: ScriptPosition) -> None:
        """Tells the agent before the first step what each plan needs: it then explains a kill for lack of memory."""
        if world.events_fd is not None and not script.took_step:
            world.tell("needs", plans=self._plans(), besides=self.baseline_bytes)

    def explain(self, error: Exception, device: torch.device, folder: Path | None, rank: int) -> OutOfMemoryError:
        """Returns the error to raise, with advice, after memory ran out in a step on this `device`; lists what is in
        memory in a file in the run `folder`.
        """
        cuda = device.type == "cuda"
        available = torch.cuda.mem_get_info(device)[1] if cuda else min(machine_memory(), address_limit())
        what, cure = advice(self._plans(), 0 if cuda else self.baseline_bytes, available)
        jobs = [job for member in self._members if (job := member.job) is not None]
        largest, path = take_snapshot(jobs, device, folder, rank)
        more = "" if path is None else f"; all of them are in {path} of the run folder"
        return OutOfMemoryError(f"{what} ({first_line(error)})", f"{cure}. The largest tensors: {largest}{more}")

    def _plans(self) -> list[tuple[str, list[int]]]:
        """Returns the needs of all trainers together, by plan, if their plans are the same."""
        first, *others = [needs for member in self._members if (needs := member.needs())]
        totals = [(text, list(sizes)) for text, sizes in first]
        for needs in others:
            if [text for text, _ in needs] == [text for text, _ in totals]:
                totals = [
                    (text, [a + b for a, b in zip(sizes, more, strict=True)])
                    for (text, sizes), (_, more) in zip(totals, needs, strict=True)
                ]
        return totals
