"""What `paceline check`, `paceline explain` and `paceline plan` ask of a run that they start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never

import torch

from paceline.checkpoint.export import write_together
from paceline.comm.communicator import Group
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import in_pieces
from paceline.errors import UsageError
from paceline.session.notices import Notices
from paceline.session.process_memory import room_of_worker
from paceline.session.reporter import Reporter

PART = 0.25  # of a worker's memory that the parameters of a model take at most in a probe


class CheckRequest:
    """The request of `paceline check` (the weights after `steps` steps), `paceline explain` (a probe) or `paceline
    plan` (a probe or a trial), if one of them started this run. `peers` is the number of workers on this host.
    """

    def __init__(self, request: str | None, reporter: Reporter, notices: Notices, peers: int) -> None:
        fields: dict[str, Any] = json.loads(request) if request else {}
        self.steps: int | None = fields.get("steps")
        # What a probe of the model and the machines is asked (`planner.descriptions.ProbeRequest`).
        self.probe: dict[str, Any] | None = fields.get("probe")
        self.script_plan = ""  # that the run would have without a probe
        # Steps to measure, and the most seconds of steps.
        self.trial: tuple[int, float] | None = fields.get("trial")
        self.asks = request is not None
        self.reverse = bool(fields.get("reverse"))  # micro-batches are summed in the opposite order
        self._out: str = fields.get("out", "")
        self._answer = Path(fields.get("answer") or f"{self._out}.json")
        self._reporter, self._notices, self._peers = reporter, notices, peers

    def limit(self, device: torch.device) -> float | None:
        """Returns the most bytes of parameters with which a model is probed with memory for all of it; None without a
        probe.
        """
        if self.probe is None:
            return None
        return PART * float(self.probe.get("memory") or room_of_worker(device, self._peers))

    def write_weights(self, job: TrainingJob, group: Group, mixes: str, step: int) -> Never:
        """Writes the weights after the last `step` of a check, and ends the script."""
        params = dict(job.model.named_parameters())
        with torch.no_grad():
            double = in_pieces({name: p.double() for name, p in params.items()}, job.cuts, job.shard_index)
        write_together(double, Path(f"{self._out}.safetensors"), self._reporter.main, job.replica, group)
        dtype = str(next(iter(params.values())).dtype).removeprefix("torch.")
        self.answer({"dtype": dtype, "mixes": mixes, "steps": step})

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Answers a request for a trial with a UsageError of the code in it: why the plan cannot be used."""
        try:
            yield
        except UsageError as error:
            self.refuse(error)
            raise

    def refuse(self, error: UsageError) -> None:
        """Answers a request for a trial with the reason why its plan cannot be used, and ends the script then."""
        if self.trial is not None:
            self.answer({"refused": error.what})

    def answer(self, result: Any) -> Never:
        """Writes the `result`, and ends the script."""
        if self._reporter.main:
            self._answer.write_text(json.dumps(result))
        self._notices.end_script(0)
