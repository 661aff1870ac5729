"""The checkpoints of a run, oldest first: by the step in the name, else by the step in the file, else by time."""

from __future__ import annotations

import math
from pathlib import Path

from ckpt8.checkpoint.meaning.nodes import is_optimizer
from ckpt8.checkpoint.run_folder import RunEntry, checkpoints_in
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.walk import iter_nodes
from ckpt8.core.errors import Ckpt8Error
from ckpt8.inspecting.survey.origin import origin_of

_Known = dict[Path, tuple[int, float | None, bool]]


class RunOrder:
    """Lists the checkpoints in a folder. What it has read in a file it does not read again while the file stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: _Known = {}

    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first; those that have no step come last, by time. Raises InputError.

        A file that its name does not tell to be a checkpoint is one if it has a step or an optimizer in it.
        """
        found: list[tuple[float, int, str, Path]] = []
        for entry in checkpoints_in(self.folder):
            try:
                changed = entry.path.stat().st_mtime_ns
            except OSError:
                continue
            step = entry.step if entry.step is not None else self._step_in(entry, changed)
            if step is not None:
                found.append((step, changed, entry.path.name, entry.path))
        return [path for *_, path in sorted(found)]

    def _step_in(self, entry: RunEntry, changed: int) -> float | None:
        """The step in a checkpoint, infinite where it does not say; None for a file that is no checkpoint of a run."""
        known = self._known.get(entry.path)
        if known is None or known[0] != changed:
            step, trains = _looked_up(entry.path)
            known = self._known[entry.path] = changed, step, trains
        _, step, trains = known
        return None if entry.doubtful and not trains else math.inf if step is None else step


def _looked_up(path: Path) -> tuple[float | None, bool]:
    """The step in a checkpoint, and whether training goes on from it. A damaged one counts: its error says so later."""
    try:
        with open_source(path, containers=False, decode=False) as source:
            step = origin_of(source)["step"]
            trees = (member.checkpoint.tree for member in source.members)
            return step, step is not None or any(is_optimizer(node) for tree in trees for _, node in iter_nodes(tree))
    except (Ckpt8Error, OSError):
        return None, True
