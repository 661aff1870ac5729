"""Makes a row of the overview from the files of one checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from ckpt8.checkpoint.run_folder import epoch_in_name
from ckpt8.codecs.error_stats import StepError
from ckpt8.container.base_record import BaseRecord
from ckpt8.container.header import is_container
from ckpt8.container.sharded import INDEX, is_part
from ckpt8.container.sharded.reading import read_index
from ckpt8.container.target_names import CONTAINER, container_names
from ckpt8.core.errors import InputError
from ckpt8.inspecting.runs.containers import read_container
from ckpt8.inspecting.runs.facts import Facts
from ckpt8.inspecting.runs.finding import Place
from ckpt8.inspecting.runs.progress import Progress, step_of
from ckpt8.inspecting.runs.record import RunRecord
from ckpt8.inspecting.step_facts import step_figures

_LATEST = datetime(9999, 1, 1, tzinfo=timezone.utc).timestamp()


@dataclass(slots=True)
class Row:
    """A record, its containers by seal, the bases that they name, and the device and inode of every file.

    ``original`` is the name of what the container at ``path`` was made from.
    """

    record: RunRecord
    path: Path
    original: str | None = None
    seals: list[str] = field(default_factory=list)
    bases: list[tuple[Path, BaseRecord]] = field(default_factory=list)
    inodes: set[tuple[int, int]] = field(default_factory=set)


def read(place: Place) -> Row | None:
    """What the files of a checkpoint say; None if they are none."""
    row = Row(RunRecord(place.name, place.run), place.path)
    paths = [place.path / name for name in place.files] if place.files else [place.path]
    containers = [path for path in paths if path.suffix == CONTAINER or is_container(path)]
    found: list[Facts] = []

    def attempt(read_facts: Callable[[], Facts | None]) -> Facts | None:
        try:
            facts = read_facts()
        except InputError as exc:
            row.record.damage = row.record.damage or str(exc)
            return None
        found.extend([] if facts is None else [facts])
        return facts

    seals: dict[str, str] = {}
    if any(name == INDEX or is_part(name) for name in place.files):
        attempt(lambda: seals.update(read_index(place.path).files))
        containers = [path for path in containers if not seals or path.name in seals]
        paths = [path for path in paths if path.suffix != CONTAINER or path in containers]
    packed = {path.name for path in containers} if len(containers) < len(paths) else set()
    copies = [path for path in paths if path not in containers and not packed.isdisjoint(container_names(path.name))]
    paths = [path for path in paths if path not in copies]
    attempt(lambda: _measure(row, paths, copies))
    if len(containers) < len(paths):
        attempt(lambda: _read_originals(place, {*containers, *copies}))
    for path in containers:
        facts = attempt(lambda path=path: read_container(path))  # type: ignore[misc]
        if facts is not None and facts.base is not None:
            row.bases.append((path, facts.base))
        row.original = None if facts is None else facts.original
        if facts is not None and seals.pop(path.name, facts.seal) != facts.seal:
            row.record.damage = row.record.damage or f"{path}: belongs to another save than the {INDEX} beside it"
    if seals and row.record.damage is None:
        row.record.damage = f"{place.path / min(seals)}: is missing, and {INDEX} names it"
    if not found and row.record.damage is None:
        return None
    row.seals += [facts.seal for facts in found if facts.seal is not None]
    _fill(row, found, is_raw=not containers)
    return row


def _measure(row: Row, paths: Sequence[Path], copies: Sequence[Path]) -> None:
    """Add up the sizes of files, and take the newest time. Raises InputError for one that cannot be looked up.

    ``copies`` are those whose containers are among ``paths``.
    """
    newest = 0.0
    row.record.raw = ", ".join(path.name for path in copies) or None
    for path in (*paths, *copies):
        try:
            status = path.stat()
        except OSError as exc:
            raise InputError(f"{path}: cannot be read: {exc.strerror}") from exc
        row.inodes.add((status.st_dev, status.st_ino))
        if path in copies:
            row.record.raw_bytes += status.st_size
        else:
            row.record.stored_bytes += status.st_size
        newest = max(newest, status.st_mtime)
    row.record.time = datetime.fromtimestamp(min(newest, _LATEST), timezone.utc)


def _read_originals(place: Place, containers: set[Path]) -> Facts | None:
    # They import the readers, which take as long as a hundred containers.
    from ckpt8.inspecting.runs.originals import read_file, read_folder

    if not place.files:
        return read_file(place.path)
    indexes = {name for name in place.files if name == INDEX or is_part(name)}
    files = [name for name in place.files if place.path / name not in containers and name not in indexes]
    return read_folder(place.path, files, needs_tensors=not containers) if files else None


def _fill(row: Row, found: Sequence[Facts], *, is_raw: bool) -> None:
    """Put together what the files say."""
    record, error = row.record, None
    progress, counted = Progress(), None
    for facts in found:
        progress.complete(facts.progress)
        counted = facts.counted if counted is None else counted
        record.asked = record.asked or facts.asked
        if facts.error is not None:
            error = error or StepError()
            error.merge(facts.error)
    if is_raw:
        record.kind = "raw"
    elif row.seals:
        record.kind = "delta" if row.bases else "key"
    record.format = ", ".join(dict.fromkeys(facts.format for facts in found)) or None
    record.bytes = None if record.damage else sum(facts.bytes for facts in found)
    record.steps = None if error is None else step_figures(error)["steps"]
    record.seal = row.seals[0] if len(row.seals) == 1 else None
    record.epoch, record.loss, record.val_loss = progress.epoch, progress.loss, progress.val_loss
    record.step, record.step_from = step_of(record.name, progress.step, counted)
    if record.epoch is None:
        record.epoch = epoch_in_name(record.name.rpartition("/")[2])
