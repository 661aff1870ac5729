"""The folder of a Trainer run: its checkpoints, as directories and as containers, and how they go."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ckpt8.container.kept_bases import remove_container
from ckpt8.container.target_names import CONTAINER
from ckpt8.core.errors import CheckFailedError, Ckpt8Error
from ckpt8.inspecting.verify import verify
from ckpt8.integrations import removing

STATE = "trainer_state.json"
"""The file that Trainer writes last: a directory without it is not complete."""

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_DISCARDED = re.compile(r"\.(checkpoint-\d+)\.ckpt8-discarded")


def container_of(source: Path) -> Path:
    """Where the container of a directory lies."""
    return source.with_name(source.name + CONTAINER)


def directories(folder: Path) -> dict[int, Path]:
    """The complete directories of checkpoints in a folder, by step."""
    matches = ((_CHECKPOINT.fullmatch(path.name), path) for path in _entries(folder))
    return {int(match[1]): path for match, path in matches if match is not None and (path / STATE).is_file()}


def containers(folder: Path) -> dict[int, Path]:
    """The containers of checkpoints in a folder, by step, oldest first."""
    matches = ((_CHECKPOINT.fullmatch(path.stem), path) for path in _entries(folder) if path.suffix == CONTAINER)
    return dict(sorted((int(match[1]), path) for match, path in matches if match is not None and path.is_file()))


def rotate(written: Path, limit: int | None, best: Path | None) -> None:
    """Remove the oldest containers above ``limit`` beside the one that was just written.

    As Trainer does with directories this keeps the newest and the best, and also what was ``written``: a run that
    begins again has lower steps than what is left of the one before. Raises OutputError.
    """
    if limit is None or limit <= 0:
        return
    present = list(containers(written.parent).values())
    kept = {present[-1], written, *(path for path in present if best is not None and path.stem == best.name)}
    surplus = len(present) - max(limit, len(kept))
    for path in [path for path in present if path not in kept][: max(surplus, 0)]:
        with removing(path):
            remove_container(path)


def discard(source: Path) -> None:
    """Remove a directory, and first rename it: it never looks like a checkpoint with files missing.

    The framework may have removed it already. Raises OutputError.
    """
    aside = source.with_name(f".{source.name}.ckpt8-discarded")
    shutil.rmtree(aside, ignore_errors=True)
    with removing(source):
        source.rename(aside)
        shutil.rmtree(aside)


def remove_discarded(folder: Path, threads: int | None) -> None:
    """Remove the directories that a killed run did not finish removing, once their containers hold.

    Raises CheckFailedError where one does not.
    """
    for path in _entries(folder):
        if match := _DISCARDED.fullmatch(path.name):
            check(folder / match[1], f"{path}: is kept, what is left of {match[1]} is in it", threads)
            shutil.rmtree(path, ignore_errors=True)


def check(source: Path, kept: str, threads: int | None) -> None:
    """Raise CheckFailedError, which begins with ``kept``, where the container of a directory does not hold."""
    try:
        verify(container_of(source), threads=threads)
    except Ckpt8Error as exc:
        raise CheckFailedError(f"{kept}: {exc}") from exc


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
