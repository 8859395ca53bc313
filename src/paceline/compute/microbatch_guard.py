"""Guards each micro-batch: its random streams, the buffers that it changes, and hooks that see its gradients.

A micro-batch must give the same result on any worker, by itself or merged with others. A model that drew no random
numbers, changed no buffer and has no hooks for some steps does not need the guard: then only the random streams are
checked after each step, to notice a later draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.base.batching import stream_seed
from paceline.compute.batchnorm import OTHERS, BufferChangeDetector
from paceline.compute.buffers import DECLARED, BufferMerger
from paceline.compute.job import StepOptions, StepSums, TrainingJob
from paceline.compute.microbatch_merging import HOOKED, MergeProbe
from paceline.compute.microbatches import Chunk, MicroBatch
from paceline.compute.rng import RngState
from paceline.errors import ChangingBufferError

WATCHED = 8  # steps without need of the guard after which it becomes idle
_MERGED = "declare with paceline.buffer how to merge it"


class MicroBatchGuard:
    """Guards the micro-batches of one job's steps. Call `begin` before a step, `before_forward`, `after_forward` and
    `after_backward` around each chunk, and `end` after the last one.

    `carried` records declared buffer changes for the merge at the end of the step; the `detector` notices other
    changes. The `probe` tests whether micro-batches may be merged. While the guard is `idle`, only `end` checks the
    forwards: if one drew random numbers, all workers compute the step again.
    """

    def __init__(self, job: TrainingJob, gathered: bool) -> None:
        self.job = job
        self.streams = RngState(job.device)
        self.probe = MergeProbe(job, self.streams, gathered)
        self.may_idle = job.over is None  # a loss over the global batch runs each forward twice
        self.idle = False
        self._calm = 0  # steps in a row that needed no guard
        self.outside: tuple[object, ...] = ()  # the script's own streams, before the step
        self._mark: tuple[object, ...] = ()  # the streams before the last forward
        self.include_models()

    def include_models(self) -> None:
        """Includes the models of all trainers made so far: a loss may run one of them."""
        self._seen = len(self.job.beside), *DECLARED
        self.models = [self.job.model, *(model for model in self.job.beside if model is not self.job.model)]
        self.carried = BufferMerger(self.models, self.job.exact)
        self.detector = BufferChangeDetector(self.models, self.carried.buffers())
        self.probe.hooks.beside(self.models)
        self.idle, self._calm = False, 0

    def restore(self, void: bool = False) -> None:
        """Restores buffers to the step's initial values. With `void`, the step is abandoned."""
        self.carried.restore(void=void)
        self.detector.restore()

    def undo(self) -> None:
        """Restores buffers to the initial values of the run, between its forwards."""
        self.carried.restore()
        if self.detector.changed(values=False) is not None:  # else all buffers would be copied for nothing
            self.detector.restore()

    def wake(self) -> None:
        """Guards the next step even if the model needed no guard before."""
        self.idle = False

    @contextmanager
    def unlearning(self) -> Iterator[None]:
        """Forgets what micro-batches in the context show about the model, so that those of the step show it again."""
        known = self._calm, self.probe.done, self.probe.change
        try:
            yield
        finally:
            self.idle, (self._calm, self.probe.done, self.probe.change) = False, known

    # -- a step -------------------------------------------------------------------------------------------------

    def begin(self, options: StepOptions) -> StepSums:
        """Begins a step or another run of micro-batches; `restore` undoes buffer changes back to this moment."""
        if self._seen != (len(self.job.beside), *DECLARED):
            self.include_models()
        sums = StepSums()
        if not self.carried.is_empty:
            sums.records = self.carried.begin(options, self.job.device)
        self.detector.mark(values=not self.probe.done)
        return sums

    def may_merge(self, order: Sequence[MicroBatch], sums: StepSums) -> None:
        """Sets in the sums why micro-batches must be computed one by one, as far as it is known before the step."""
        sums.why = self.probe.why("" if self.carried.is_empty else self.carried.certain)
        sums.no_merge = bool(sums.why and order)
        if sums.no_merge:
            self.idle, self._calm = False, 0

    def before_forward(self, chunk: Chunk, sums: StepSums, options: StepOptions) -> None:
        """Seeds the random streams for the chunk's first micro-batch, and restores buffers."""
        self.streams.seed(stream_seed(self.job.seed, options.step, chunk.micro_batches[0].index))
        if sums.records is not None:
            self.carried.restore()
        # Also for the backward, where the forward draws nothing.
        self._mark = () if sums.no_merge else self.streams.snapshot()

    def after_forward(self, chunk: Chunk, sums: StepSums, options: StepOptions) -> bool:
        """Returns whether the result of a chunk's forward is valid. That of a merged chunk is not if the forward drew
        random numbers or changed a buffer. Raises ChangingBufferError.
        """
        looks = not sums.no_merge
        drew = looks and self.streams.has_changed(self._mark)
        moved = self.carried.moved(values=options.test_merging) if looks else ""
        # Values are compared while the model is being observed, versions ever after.
        changed = self.detector.changed(values=options.test_merging)
        if changed is not None:
            self._refuse_change(changed, options)
        hooked = bool(self.probe.hooks.where) and not sums.no_merge  # found in this forward
        if drew or moved or hooked or changed is not None:
            sums.no_merge = True
            sums.why = moved or (HOOKED if hooked else f"the forward changes the {changed}")
            sums.why = "the forward draws random numbers" if drew else sums.why
            if len(chunk.micro_batches) > 1:
                self.restore()
                return False
        return True

    def _refuse_change(self, changed: str, options: StepOptions) -> None:
        """Raises ChangingBufferError for a change of a buffer or parameter that would differ between workers."""
        if options.record_buffers:
            self.detector.restore()
            cure = "change it in the training loop instead" if changed.startswith("parameter") else _MERGED
            cure += (
                ", put that model into eval mode for the call" if cure is _MERGED and changed.endswith(OTHERS) else ""
            )
            what = f"the forward changes the {changed}, which would then differ between workers"
            raise ChangingBufferError(what, f"{cure}, or train with one worker")
        self.probe.change = True

    def after_backward(self, chunk: Chunk, sums: StepSums, options: StepOptions) -> None:
        """Records the chunk's buffer changes."""
        is_merged = len(chunk.micro_batches) > 1
        if (options.test_merging or is_merged) and not sums.no_merge and self.streams.has_changed(self._mark):
            sums.no_merge, sums.why = True, "the backward draws random numbers"
            if is_merged:  # its gradients are already added: the step must be computed again
                sums.failed = True
                self.probe.forbid(sums.why)
        if sums.records is not None:  # not before: a checkpointed BatchNorm runs again in backward
            self.carried.record(sums.records, chunk)

    def end(self, sums: StepSums, options: StepOptions) -> None:
        """Ends a step: checks what an idle guard has skipped, or decides that the guard may be idle from now on."""
        if not self.idle:
            calm = sums.records is None and not (sums.no_merge or sums.failed or self.probe.change)
            self._calm = self._calm + 1 if calm else 0
            self.idle = self.may_idle and self._calm >= WATCHED
            return
        changed = self.detector.changed(values=False)
        if changed is not None:
            self._refuse_change(changed, options)
        if self.streams.has_changed(self.outside):  # all workers compute the step again, with the guard
            sums.failed = True
        if sums.failed or changed is not None:
            self.idle, self._calm = False, 0

    def restore_streams(self) -> None:
        """Restores the script's own random streams."""
        self.streams.restore(self.outside)
