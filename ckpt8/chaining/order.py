"""The checkpoints of a run, oldest first: by the step that ``step_of`` finds, then by epoch, then by time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ckpt8.chaining.rest import Look, look_at
from ckpt8.checkpoint.readers.entries import walk
from ckpt8.checkpoint.run_folder import checkpoints_in, epoch_in_name, written_once
from ckpt8.container.manifest import FILE
from ckpt8.core.errors import InputError
from ckpt8.inspecting.runs.facts import Facts
from ckpt8.inspecting.runs.originals import read_file, read_folder
from ckpt8.inspecting.runs.progress import step_of


@dataclass(frozen=True, slots=True)
class Listing:
    """The ``steps`` of the checkpoints in a folder, oldest first; None where nothing says it.

    ``skipped`` says of other files that look like checkpoints why they are left alone.
    """

    steps: dict[Path, int | None]
    skipped: dict[Path, str]

    def newest(self, count: int, among: list[Path]) -> set[Path]:
        """The checkpoints of the newest steps ``among`` some of them, oldest first.

        Those of the same step count once, such as ``last.pt`` and the checkpoint that it is a copy of. What is written
        again and again, and has no step, does not count: it may be the newest, and is one of them.
        """
        once = set(written_once(among))
        counted = [path for path in among if self.steps[path] is not None or path in once] or among
        slots = list(dict.fromkeys(self._slot(path) for path in counted))
        kept = set(slots[max(len(slots) - count, 0) :])
        return {path for path in among if count and (self._slot(path) in kept or path not in counted)}

    def _slot(self, path: Path) -> int | Path:
        step = self.steps[path]
        return path if step is None else step


class RunOrder:
    """Lists the checkpoints in a folder. What it has read in a file it does not read again while the file stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Path, tuple[Look, Facts | None]] = {}

    def listing(self) -> Listing:
        """What is in the folder. Those that have no step come last, by epoch and time. Raises InputError."""
        found = []
        skipped = {}
        for entry in checkpoints_in(self.folder):
            try:
                look = look_at(entry.path)
                changed = entry.path.stat().st_mtime_ns
            except OSError:
                continue
            facts = None if entry.skipped else self._facts(entry.path, look)
            step, epoch = (None, None) if facts is None else (facts.progress.step, facts.progress.epoch)
            problem = entry.skipped
            if entry.is_doubtful and step is None and not (facts and facts.trains):
                problem = "it holds neither a step nor an optimizer"
            if problem is not None:
                skipped[entry.path] = problem
                continue
            name = entry.path.name
            step, _ = step_of(name, step, None if facts is None else facts.counted)
            epoch = epoch_in_name(name) if epoch is None else epoch
            order = (math.inf if step is None else step, math.inf if epoch is None else epoch)
            found.append((*order, changed, name, entry.path, step))
        return Listing({path: step for *_, path, step in sorted(found, key=lambda each: each[:4])}, skipped)

    def _facts(self, path: Path, look: Look) -> Facts | None:
        """What a checkpoint says; None for a file that is none."""
        known = self._known.get(path)
        if known is None or known[0] != look:
            known = self._known[path] = look, _read(path)
        return known[1]


def _read(path: Path) -> Facts | None:
    """As ``RunOrder._facts``. A damaged one counts as a checkpoint: its error says so later."""
    try:
        if not path.is_dir():
            return read_file(path)
        return read_folder(path, [entry.path for entry in walk(path) if entry.format == FILE], needs_tensors=False)
    except (InputError, OSError):
        return Facts("damaged", 0, trains=True)
