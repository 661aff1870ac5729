"""``verify``: checks every byte of a container, and every figure that it states against the original.

Opening a container checks its seal; ``check_frames`` reads and decodes all other bytes; ``check_table`` compares the
tensors that the manifest lists with those that the decoded members have. ``check_statistics`` compares what it states
with what is measured against the original.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import count_whole
from ckpt8.codecs.error_stats import UpdateError, read_error, read_step_error
from ckpt8.container.decoding import check_frames
from ckpt8.container.reader import ContainerReader
from ckpt8.core.arguments import checked
from ckpt8.core.errors import UsageError
from ckpt8.core.workers import Progress, Workers
from ckpt8.inspecting.measuring import Measured, measure
from ckpt8.inspecting.replay.replay import replay_files
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

    Of a delta this checks the files below it, too, as far as it needs them.

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
    with ContainerReader(Path(source), kernels=True) as reader, Workers(threads) as workers:
        check_frames(reader, workers, progress)
        table = check_table(reader, workers)
        storages = reader.manifest.storages
        tables = [record.parts for record in storages] + [pack.parts for pack in reader.manifest.packs]
        count = sum(len(table.lengths) for parts in tables for table in parts.values())
        statistics, unmeasured, failures, resume, steps = 0, 0, [], None, None
        if original is not None:
            measured = measure(reader, Path(original), workers, progress)
            statistics = sum(record.error is not None for record in storages)
            statistics += sum(
                (each.error is not None) + (each.steps is not None) for each in reader.manifest.parameters
            )
            unmeasured = sum(storages[index].error is None for index in measured.storages)
            failures = [*table_differences(table, measured.table), *check_statistics(reader, measured)]
            if resume_steps:
                figures = replay_files(reader, Path(original), resume_steps, workers)
                failures += figures.failures(max_replay_error)
                resume = figures.to_json()
            measured.replace_stated(reader.manifest)
            steps = step_facts(reader.manifest, count_whole)
        links = tuple(str(each.path) for each in reader.links())
        return Verification(
            count, reader.size, original is not None, statistics, unmeasured, tuple(failures), resume, steps, links
        )
