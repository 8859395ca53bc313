"""The guard around each micro-batch: its random streams, the buffers that it changes, hooks that see its gradients.

Micro-batches must leave the same result whoever computes them, alone or merged with others. A model that was watched
for some steps, and drew nothing, changed no buffer and has no hook, needs none of this: only a look at the streams is
left then, by which a later draw is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.base.batching import stream_seed
from paceline.compute.batchnorm import OTHERS, BufferChangeDetector
from paceline.compute.buffers import DECLARED, BufferMerger
from paceline.compute.job import StepOptions, StepSums, TrainingJob
from paceline.compute.microbatch_merging import HOOKED, MergeProbe
from paceline.compute.microbatches import Chunk, MicroBatch
from paceline.compute.rng import RngState
from paceline.errors import ChangingBufferError

WATCHED = 8  # steps after which a model that needed no guard counts as one that needs none
_MERGED = "say how it is merged with paceline.buffer"


class MicroBatchGuard:
    """Guards the micro-batches of one job's steps. Call `begin` before a step, `before_forward`, `after_forward` and
    `after_backward` around each chunk, and `end` after the last one.

    What forwards leave in buffers is `carried` to the end of the step; other changes are noticed by the `detector`. The
    `probe` finds out whether micro-batches may be merged. While the guard is `idle`, only `end` looks at what forwards
    did: if one drew random numbers, all workers compute the step again.
    """

    def __init__(self, job: TrainingJob, gathered: bool) -> None:
        self.job = job
        self.streams = RngState(job.device)
        self.probe = MergeProbe(job, self.streams, gathered)
        self.may_idle = job.over is None  # whose outputs are computed by another run before
        self.idle = False
        self._calm = 0  # steps in a row that needed no guard
        self.outside: tuple[object, ...] = ()  # the script's own streams, before the step
        self._mark: tuple[object, ...] = ()  # the streams before the last forward
        self.look_around()

    def look_around(self) -> None:
        """Takes the other trainers' models into view, as many as there are by now: a loss may run one of them."""
        self._seen = len(self.job.beside), *DECLARED
        self.models = [self.job.model, *(model for model in self.job.beside if model is not self.job.model)]
        self.carried = BufferMerger(self.models, self.job.exact)
        self.detector = BufferChangeDetector(self.models, self.carried.buffers())
        self.probe.hooks.beside(self.models)
        self.idle, self._calm = False, 0

    def restore(self, void: bool = False) -> None:
        """Restores buffers to where the step began, or if it is `void` its first try."""
        self.carried.restore(void=void)
        self.detector.restore()

    def undo(self) -> None:
        """Restores buffers to where the run began."""
        self.carried.restore()
        if self.detector.changed(values=False) is not None:  # or else all would be copied
            self.detector.restore()

    # -- a step -------------------------------------------------------------------------------------------------

    def begin(self, options: StepOptions) -> StepSums:
        """Begins a step or another run of micro-batches: what follows may fail, and is undone to here."""
        if self._seen != (len(self.job.beside), *DECLARED):
            self.look_around()
        sums = StepSums()
        if not self.carried.is_empty:
            sums.records = self.carried.begin(options, self.job.device)
        self.detector.mark(values=not self.probe.done)
        return sums

    def may_merge(self, order: Sequence[MicroBatch], sums: StepSums) -> None:
        """Notes in the sums why micro-batches must be computed one by one, as far as it is known before the step."""
        sums.why = self.probe.why("" if self.carried.is_empty else self.carried.certain)
        sums.no_merge = bool(sums.why and order)
        if sums.no_merge:
            self.idle, self._calm = False, 0

    def before_forward(self, chunk: Chunk, sums: StepSums, options: StepOptions) -> None:
        """Starts the random streams of the chunk's first micro-batch, and its buffers."""
        self.streams.seed(stream_seed(self.job.seed, options.step, chunk.micro_batches[0].index))
        if sums.records is not None:
            self.carried.restore()
        # Also for the backward, where the forward draws nothing.
        self._mark = () if sums.no_merge else self.streams.snapshot()

    def after_forward(self, chunk: Chunk, sums: StepSums, options: StepOptions) -> bool:
        """Returns whether the forward of a chunk may be used; a merged one may not be if it drew or changed something.
        Raises ChangingBufferError.
        """
        looks = not sums.no_merge
        drew = looks and self.streams.has_changed(self._mark)
        moved = self.carried.moved(values=options.test_merging) if looks else ""
        # Values are compared while the model is being observed, versions ever after.
        changed = self.detector.changed(values=options.test_merging)
        if changed is not None:
            self._refuse_change(changed, options)
        hooked = bool(self.probe.hooks.where) and not sums.no_merge  # it has just been found
        if drew or moved or hooked or changed is not None:
            sums.no_merge = True
            sums.why = moved or (HOOKED if hooked else f"the forward changes the {changed}")
            sums.why = "the forward draws random numbers" if drew else sums.why
            if len(chunk.micro_batches) > 1:
                self.restore()
                return False
        return True

    def _refuse_change(self, changed: str, options: StepOptions) -> None:
        """Raises ChangingBufferError if a buffer or parameter was changed that other workers would change otherwise."""
        if options.record_buffers:
            self.detector.restore()
            cure = "change it in the body of the loop" if changed.startswith("parameter") else _MERGED
            cure += ", put that model in eval mode for the call" if cure is _MERGED and changed.endswith(OTHERS) else ""
            what = f"the forward changes the {changed}, which would come out differently on each worker"
            raise ChangingBufferError(what, f"{cure}, or train with one worker")
        self.probe.change = True

    def after_backward(self, chunk: Chunk, sums: StepSums, options: StepOptions) -> None:
        """Records what the chunk has left in buffers."""
        is_merged = len(chunk.micro_batches) > 1
        if (options.test_merging or is_merged) and not sums.no_merge and self.streams.has_changed(self._mark):
            sums.no_merge, sums.why = True, "the backward draws random numbers"
            if is_merged:  # its gradients are there already: the step is computed again
                sums.failed = True
                self.probe.forbid(sums.why)
        if sums.records is not None:  # not before: a checkpointed BatchNorm runs again in backward
            self.carried.record(sums.records, chunk)

    def end(self, sums: StepSums, options: StepOptions) -> None:
        """Ends a step: notices what an idle guard has missed, or that the guard may be idle from now on."""
        if not self.idle:
            calm = sums.records is None and not (sums.no_merge or sums.failed or self.probe.change)
            self._calm = self._calm + 1 if calm else 0
            self.idle = self.may_idle and self._calm >= WATCHED
            return
        changed = self.detector.changed(values=False)
        if changed is not None:
            self._refuse_change(changed, options)
        if self.streams.has_changed(self.outside):  # all workers compute the step again, with care
            sums.failed = True
        if sums.failed or changed is not None:
            self.idle, self._calm = False, 0

    def restore_streams(self) -> None:
        """Restores the script's own random streams."""
        self.streams.restore(self.outside)
