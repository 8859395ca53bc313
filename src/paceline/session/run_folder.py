"""The storages of a run folder, and the checkpoint from which a resumed run continues."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.environment import World
from paceline.base.text import plural
from paceline.checkpoint.files import FOLDER
from paceline.checkpoint.host_memory import HostMemory
from paceline.checkpoint.lock import hold_lock
from paceline.checkpoint.storage import CHECKPOINTS, NO_MIRROR, RUN_DIR, Folder, storage_at
from paceline.checkpoint.tree import unflatten
from paceline.errors import CheckpointError
from paceline.session.script_info import changed_since, refuse_other_script
from paceline.session.user_streams import load_user_streams
from paceline.team.auth import handshake_key


class RunStorage:
    """The folder of the run, with its lock, and the storages of its checkpoints.

    Without a run folder, `path` is None, nothing is written and nothing can be resumed. A `mirror` is an interval in
    steps and a storage in the memory of the run's hosts.
    """

    def __init__(self, world: World, locks: bool) -> None:
        self.path = Path(world.run_dir) if world.run_dir else None
        location = world.checkpoints or (self.path / FOLDER if self.path is not None else None)
        self.mirror: tuple[int, HostMemory] | None = None
        if world.mirror is not None:
            steps, folder = world.mirror
            memory = HostMemory(Folder(Path(folder), NO_MIRROR), world.mirror_at, partial(handshake_key, world.run_dir))
            self.mirror = steps, memory
        setting = CHECKPOINTS if world.checkpoints else RUN_DIR
        self.storage = storage_at(location, setting) if location is not None and not world.serves else None
        self.name = self.path or location  # for messages
        self.lock = hold_lock(self.path) if self.path is not None and locks else None


class ResumePoint:
    """What this worker continues from: a checkpoint, imported weights, or the state that other workers handed over.

    `step` and `manifest` are those of the checkpoint, or None. Trainers take their parts out of the state `tree`.
    `imported` is where imported weights came from; a run that begins with them does its whole script. `streams` are the
    states of the script's own random generators, by rank; a single one if all workers had the same.
    """

    def __init__(self, checkpoint: tuple[int, dict[str, Any], dict[str, Any]] | None) -> None:
        self.step: int | None = None
        self.manifest: dict[str, Any] | None = None
        self.tree: dict[str, Any] = {}
        self.imported = ""
        self.streams: list[Any] = []
        if checkpoint is not None:
            self.step, self.manifest, tensors = checkpoint
            self.tree = unflatten(self.manifest["tree"], tensors)
            self.imported = self.manifest.get("imported", "")
            self.streams = self.manifest.get("streams", [])

    @property
    def continues(self) -> bool:
        """Whether it is a checkpoint of this run: what was done before it is not done again."""
        return self.manifest is not None and not self.imported

    def compare_script(self, folder: Any) -> str:
        """Returns a message if the script has changed since the checkpoint. Raises UsageError if the `folder` holds the
        run of another script.
        """
        if self.manifest is None or self.imported:
            return ""
        text = self.manifest.get("script", "")
        refuse_other_script(self.manifest.get("script_name", ""), text, folder)
        return changed_since(text)

    def describe(self, location: Any, workers: int, plan: str) -> str:
        """Returns a message about what a run of `workers` workers with this `plan` begins with; empty if it begins
        from scratch. `location` is where the checkpoint is.
        """
        if self.imported:
            what = "weights"
            if any("imported_optimizers" in trainer for trainer in self.tree["trainers"]):
                what = "weights and the optimizer state"
            return f"starting from the {what} imported from {self.imported}"
        if self.manifest is None:
            return ""
        before = self.manifest["plan"]
        writers, readers = (plural(number, "worker") for number in (self.manifest["workers"], workers))
        change = f": written by {writers} ({before}), now {readers} ({plan})" if before != plan else ""
        return f"resuming from step {self.step} of {location}{change}"

    def refuse_missing_trainers(self, trainers: int) -> None:
        """Raises CheckpointError if imported weights are for a trainer that the script has not made."""
        if self.imported and trainers < len(self.tree["trainers"]):
            what = f"the weights imported from {self.imported} are for trainer {len(self.tree['trainers']) - 1}"
            cure = "create all trainers before the first step, or import the weights again with another --trainer"
            raise CheckpointError(f"{what}, and the script has made {plural(trainers, 'trainer')}", cure)

    def load_streams(self, rank: int) -> None:
        """Restores the script's own random generators on the worker with this `rank`."""
        if len(self.streams) == 1 or rank < len(self.streams):
            load_user_streams(self.streams[min(rank, len(self.streams) - 1)])
