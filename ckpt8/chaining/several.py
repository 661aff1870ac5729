"""Several sources that a user names: each gets a container beside itself, or in one folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt8.chaining.chain import source_name
from ckpt8.chaining.jobs import Job, Settings, finishing
from ckpt8.compressing.compress import checked_options, default_target
from ckpt8.core.errors import OutputError, UsageError
from ckpt8.core.files.source_file import refuse_url


def target_in(folder: Path, source: Path) -> Path:
    """The container of ``source`` in ``folder``."""
    return folder / default_target(source).name


@contextmanager
def collected(
    sources: Sequence[Path], folder: Path | None, settings: Settings, *, force: bool, dry: bool = False
) -> Iterator[Iterator[list[Job]]]:
    """The jobs for ``sources``, in lists to run one after the other: see ``_batches``.

    A ``folder`` that is missing is made, unless ``dry``, and goes again if nothing was written into it.

    Raises UsageError for arguments that no source can have and for two sources with the same target, OutputError for
    the folder.
    """
    checked_options(**settings.options)
    targets = {source: default_target(source) if folder is None else target_in(folder, source) for source in sources}
    _refuse_twice(sources, targets)
    is_new = folder is not None and _make(folder, dry=dry)
    try:
        yield _batches(targets, settings, force=force)
    finally:
        if folder is not None and is_new:
            with suppress(OSError):
                folder.rmdir()


def _batches(targets: dict[Path, Path], settings: Settings, *, force: bool) -> Iterator[list[Job]]:
    """First the removals that killed processes left; then the sources, but for those that went so."""
    folders = dict.fromkeys(source.parent for source in targets) if settings.remove else ()
    left = [
        job for folder in folders for job in finishing(folder, [target.parent for target in targets.values()], settings)
    ]
    yield left
    finished = {job.source for job in left if not os.path.lexists(job.source)}
    yield [job_for(*each, settings, force=force) for each in targets.items() if each[0] not in finished]


def job_for(source: Path, target: Path, settings: Settings, *, force: bool) -> Job:
    """The job for a source. A container of that name may be of another checkpoint, so that it is verified."""
    is_there = not force and source_name(target) == source.name
    return Job(source, target, settings, force=force, present=is_there, doubted=is_there)


def _refuse_twice(sources: Sequence[Path], targets: dict[Path, Path]) -> None:
    if len(targets) < len(sources):
        twice = next(source for at, source in enumerate(sources) if source in sources[:at])
        raise UsageError(f"{twice}: is given twice")
    owners: dict[str, Path] = {}
    for source, target in targets.items():
        other = owners.setdefault(os.path.realpath(target), source)
        if other is not source:
            raise UsageError(f"{other} and {source}: would both become {target}; compress one of them with -o NAME")


def _make(folder: Path, *, dry: bool) -> bool:
    """Make a folder; False if it is there. Raises OutputError. If ``dry`` say only whether it could be made."""
    refuse_url(folder)
    try:
        if folder.is_dir() or (dry and not folder.exists()):
            folder.parent.stat()
            return False
        folder.mkdir()
    except FileExistsError as exc:
        raise UsageError(f"{folder}: is a file; for several sources -o names a folder") from exc
    except OSError as exc:
        raise OutputError(f"{folder}: cannot be made: {exc.strerror}") from exc
    return True
