"""``verify``: checks every byte of a container, and every figure that it states against the original.

Opening a container checks its seal; ``check_frames`` reads and decodes all other bytes; ``check_table`` compares the
tensors that the manifest lists with those that the decoded members have. ``check_statistics`` compares what it states
with what is measured against the original.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import count_whole
from ckpt8.codecs.error_stats import UpdateError, read_error, read_step_error
from ckpt8.container.decoding import check_frames
from ckpt8.container.manifest import Manifest
from ckpt8.container.opening import Stored, containers_of, open_stored
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.joined import JoinedReader
from ckpt8.core.arguments import checked
from ckpt8.core.collection import without_collection
from ckpt8.core.errors import UsageError
from ckpt8.core.workers import Progress, Workers
from ckpt8.inspecting.measuring import Measured, measure
from ckpt8.inspecting.replay.figures import ReplayFigures
from ckpt8.inspecting.replay.replay import replay_files
from ckpt8.inspecting.sharded import differing_values, measure_ranks, replay_ranks
from ckpt8.inspecting.slice_originals import open_originals
from ckpt8.inspecting.step_facts import step_facts
from ckpt8.inspecting.tensor_table import check_table, table_differences

_OTHER_KIND = "the stored figures are of another kind"


def check_statistics(reader: ContainerReader, measured: Measured) -> list[str]:
    """A line for every stored figure that does not hold. Maxima must agree exactly, sums to 1e-9."""
    failures = [f"{name}: differs from the original" for name in measured.differing]
    storages, parameters = reader.manifest.storages, reader.manifest.parameters
    for index, error in measured.storages.items():
        known = read_error(storages[index].error)
        difference = error.disagreement(known) if isinstance(known, type(error)) else _OTHER_KIND
        if storages[index].error is not None and difference:
            failures.append(f"{storages[index].name}: {difference}")
    for index, update in measured.parameters.items():
        known = read_error(parameters[index].error)
        difference = update.disagreement(known) if isinstance(known, UpdateError) else _OTHER_KIND
        if parameters[index].error is not None and difference:
            failures.append(f"{parameters[index].name} (update): {difference}")
    for index, parameter in enumerate(parameters):
        if parameter.steps is not None:
            difference = _steps_disagreement(measured.steps.get(index), parameter.steps)
            if difference is not None:
                failures.append(f"{parameter.name} (in steps): {difference}")
    return failures


def _steps_disagreement(measured: dict[str, Any] | None, stated: dict[str, Any]) -> str | None:
    """The first figure of an error in steps that differs; None if all agree."""
    mine, theirs = read_step_error(measured), read_step_error(stated)
    if measured is None or mine is None or theirs is None:
        return _OTHER_KIND
    for key, words in {"optimizer": "optimizer", "weight_storage": "weight"}.items():
        if measured[key] != stated.get(key):
            return f"its {words} is another"
    return mine.disagreement(theirs)


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``verify``. ``failures`` is empty if all holds; ``against`` says whether there was an original.

    ``resume`` holds the figures of the replayed steps, see ``ReplayFigures.to_json``, and ``steps`` the measured error
    in steps of a container under a budget, see ``step_facts``. ``links`` are the paths of the files that a delta needs,
    its base first. Of these all that it needs holds.
    """

    frames: int
    nbytes: int
    against: bool
    statistics: int
    unmeasured: int
    failures: tuple[str, ...]
    resume: dict[str, Any] | None = None
    steps: dict[str, Any] | None = None
    links: tuple[str, ...] = ()


@checked
def verify(
    source: str | os.PathLike[str],
    original: str | os.PathLike[str] | None = None,
    *,
    resume_steps: int = 0,
    max_replay_error: float | None = None,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Verification:
    """Check a container with all tensors that its manifest lists, and with ``original`` every statistic it states.

    Of a directory that ranks wrote this checks all containers and what the index says of them; its ``original`` is a
    plain directory of torch.distributed.checkpoint, cut in any way. Of a delta this checks the files below it, too, as
    far as it needs them.

    It then replays ``resume_steps`` steps of the optimizer on both; a replay error, the largest NMSE of an update,
    above ``max_replay_error`` is a failure. Raises InputError for damage, CheckFailedError for another original,
    UsageError for arguments that ask for nothing. A statistic that does not hold is in ``failures``.

    >>> ckpt8.verify("run.ckpt8", "run.pt").failures
    ()
    """
    if resume_steps and original is None:
        raise UsageError("replayed steps need the original to compare with; give --against ORIGINAL")
    if max_replay_error is not None and not max_replay_error >= 0:
        raise UsageError(f"a limit of the replay error is a number from 0 on, not {max_replay_error}")
    if max_replay_error is not None and not resume_steps:
        raise UsageError("a limit on the replay error needs steps to replay; give --resume-steps N")
    with without_collection(), open_stored(Path(source), kernels=True) as stored, Workers(threads) as workers:
        tables = []
        for reader in containers_of(stored):
            check_frames(reader, workers, progress)
            tables.append(check_table(reader, workers))
        checking = _Checking(stored, resume_steps, max_replay_error, workers, progress)
        if original is not None:
            (checking.one if isinstance(stored, ContainerReader) else checking.ranks)(tables, Path(original))
        return checking.result(against=original is not None)


class _Checking:
    """Checks what an open source states, and collects the result."""

    def __init__(
        self, stored: Stored, resume_steps: int, max_replay_error: float | None, workers: Workers, progress: Progress
    ) -> None:
        self._stored, self._workers, self._progress = stored, workers, progress
        self._resume_steps, self._limit = resume_steps, max_replay_error
        self._statistics = self._unmeasured = 0
        self._failures: list[str] = []
        self._resume: dict[str, Any] | None = None

    def one(self, tables: Sequence[Manifest], original: Path) -> None:
        """Check a container against its original. Raises as ``verify``."""
        (reader,) = containers_of(self._stored)
        self._add(reader, tables[0], measure(reader, original, self._workers, self._progress), "")
        if self._resume_steps:
            self._replayed(replay_files(reader, original, self._resume_steps, self._workers))

    def ranks(self, tables: Sequence[Manifest], original: Path) -> None:
        """Check the containers of ranks against a plain directory. Raises as ``verify``."""
        joined = self._stored
        assert isinstance(joined, JoinedReader)  # noqa: S101
        with open_originals(joined, original, self._workers) as originals:
            measured = measure_ranks(joined, originals, self._workers, self._progress)
            for (reader, found), table in zip(measured, tables, strict=True):
                self._add(reader, table, found, f"{reader.path.name}: ")
            self._failures += differing_values(joined, originals, self._workers)
            if self._resume_steps:
                self._replayed(replay_ranks(joined, originals, self._resume_steps, self._workers))

    def _add(self, reader: ContainerReader, table: Manifest, measured: Measured, prefix: str) -> None:
        storages, parameters = reader.manifest.storages, reader.manifest.parameters
        self._statistics += sum(record.error is not None for record in storages)
        self._statistics += sum((each.error is not None) + (each.steps is not None) for each in parameters)
        self._unmeasured += sum(storages[index].error is None for index in measured.storages)
        found = [*table_differences(table, measured.table), *check_statistics(reader, measured)]
        self._failures += (prefix + each for each in found)
        measured.replace_stated(reader.manifest)

    def _replayed(self, figures: ReplayFigures) -> None:
        self._failures += figures.failures(self._limit)
        self._resume = figures.to_json()

    def result(self, *, against: bool) -> Verification:
        """What was found."""
        readers = containers_of(self._stored)
        manifests = [reader.manifest for reader in readers]
        parts = [record.parts for each in manifests for record in each.storages]
        parts += [pack.parts for each in manifests for pack in each.packs]
        return Verification(
            sum(len(table.lengths) for tables in parts for table in tables.values()),
            self._stored.size,
            against,
            self._statistics,
            self._unmeasured,
            tuple(self._failures),
            self._resume,
            step_facts(self._stored.manifest, count_whole) if against else None,
            tuple(str(each.path) for reader in readers for each in reader.links()),
        )
