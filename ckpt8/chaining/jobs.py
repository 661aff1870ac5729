"""One checkpoint of many: compress it, verify and remove it, and say what became of it. A failure is an outcome."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckpt8.chaining.removal import finish_removal, interrupted, refuse_removal, remove_verified
from ckpt8.checkpoint.meaning.parameter_names import count_whole
from ckpt8.checkpoint.readers.entries import size_of
from ckpt8.codecs import codec_from_config
from ckpt8.compressing.base_choice import wanted
from ckpt8.compressing.compress import compress, default_target, target_of
from ckpt8.compressing.policy import Policy
from ckpt8.container.facts import total_errors
from ckpt8.container.manifest import Manifest
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError, Ckpt8Error, InputError, OutputError
from ckpt8.core.files.atomic import any_file, noting_replaced
from ckpt8.core.text import counted, listed
from ckpt8.core.workers import Progress
from ckpt8.inspecting.manifest_facts import asked_words
from ckpt8.inspecting.prediction import predicted_bytes
from ckpt8.inspecting.step_facts import step_facts
from ckpt8.inspecting.verify import verify

_VERIFIED = 2
"""How often ``verify`` reads a checkpoint: it decodes as many bytes, then compares them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for all checkpoints; ``options`` are those of ``compress``."""

    options: dict[str, Any] = field(default_factory=dict)
    remove: bool = False

    def difference(self, manifest: Manifest) -> str | None:
        """How a container is not what these settings make, by what it states; None where it is."""
        preset, budget, rules, bound = map(self.options.get, ("preset", "budget", "rules", "max_update_error"))
        policy = Policy.of(preset, rules or (), budget)
        there, asked = (
            asked_words(manifest.preset, manifest.budget),
            asked_words(policy.preset, asdict(policy.budget) if policy.budget else None),
        )
        if there != asked:
            default = ", the default" if preset is None and budget is None else ""
            return f"was made with {there}, not with {asked}{default}"
        if manifest.rules != (wanted := [rule.text for rule in policy.rules]):
            return f"was made with {_rules(manifest.rules)}, not with {_rules(wanted)}"
        if bound is not None:
            errors = total_errors(manifest, count_whole)
            if unknown := errors["update_unknown"]:
                return f"does not state the max |Δu| of {counted(unknown, 'parameter')}, which is to keep to {bound:g}"
            most = max((errors[kind]["max_error"] for kind in ("update", "replayed") if errors[kind]), default=0.0)
            if not most <= bound:
                return f"has a max |Δu| of {most:.3g}, above {bound:g}"
        lossy = [each for each in manifest.storages if codec_from_config(each.codec).measured_as is not None]
        if lossy and all(each.error is None for each in lossy):
            return "carries no statistics, by which it could be checked"
        return None


def _rules(texts: Sequence[str]) -> str:
    return f"the rules {listed(texts)}" if texts else "no rules"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a checkpoint: ``bytes`` of ``source`` and ``stored`` bytes of ``target``, None while it has none.

    ``steps`` is the error in steps that it states, and what is under no budget: see ``step_facts``; None without a
    budget. ``present``: the container was there already. ``removed``: the source is gone. ``replaced`` says what the
    container took the place of. ``error``: what failed, after which the source is as it was.

    Of a job that was not done: ``predicted`` are the bytes that a container would take, at most where it may become a
    delta, ``would_remove`` says whether the source would go, and ``replaced`` what would be replaced.
    """

    source: Path
    target: Path
    bytes: int = 0
    stored: int | None = None
    seconds: float = 0.0
    base: str | None = None
    steps: dict[str, Any] | None = field(default=None, repr=False)
    present: bool = False
    removed: bool = False
    replaced: str | None = None
    predicted: int | None = None
    would_remove: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A checkpoint to compress into ``target``, with as much ``work`` as it has bytes to read.

    ``present``: the target is its container already, though ``doubted`` where the source may have changed since.
    ``problem``: why it cannot be compressed. ``aside``: where a killed process left it, for its removal to be finished.
    """

    source: Path
    target: Path
    settings: Settings
    force: bool = False
    present: bool = False
    doubted: bool = False
    problem: Exception | None = None
    aside: Path | None = None

    @property
    def work(self) -> int:
        """Bytes that will be read; 0 for a source that cannot be read."""
        try:
            times = (not self.present) + _VERIFIED * (self.doubted + self.settings.remove)
            return 0 if self.problem else size_of(self.aside or self.source) * times
        except Ckpt8Error:
            return 0

    def run(self, progress: Progress = lambda _: None) -> Outcome:
        """Do it. An exception is part of the outcome."""
        return self._outcome(lambda found: self._run(found, progress))

    def preview(self) -> Outcome:
        """Find out what ``run`` would do, without writing anything. An exception is part of the outcome."""
        return self._outcome(self._preview)

    def _outcome(self, fill: Callable[[dict[str, Any]], None]) -> Outcome:
        started = time.perf_counter()
        found: dict[str, Any] = {}
        with noting_replaced() as replaced:
            try:
                fill(found)
            except Exception as exc:
                found["error"] = exc
        found.setdefault("replaced", next(iter(replaced), None))
        return Outcome(self.source, self.target, seconds=time.perf_counter() - started, **found)

    def _run(self, found: dict[str, Any], progress: Progress) -> None:
        if self.problem is not None:
            raise self.problem
        if self.aside is not None:
            self._finish(self.aside, found, progress)
            return
        if self.settings.remove:
            refuse_removal(self.source)
        found["present"] = self.is_done(progress)
        if not found["present"]:
            options = {**self.settings.options, "force": self.force, "progress": progress}
            compress(self.source, self._named_target, **options)
        self._read(found)
        if self.settings.remove:
            remove_verified(self.source, self.target, threads=self.settings.options.get("threads"), progress=progress)
            found["removed"] = True

    def _preview(self, found: dict[str, Any]) -> None:
        options = self.settings.options
        if self.problem is not None:
            raise self.problem
        if self.aside is not None and not self.present:
            raise InputError(
                f"{self.source}: its removal was interrupted, and its container is gone; it gets its name back"
            )
        if self.aside is None and self.settings.remove:
            refuse_removal(self.source)
        found["present"] = self.is_done(None)
        if found["present"]:
            self._read(found)
        else:
            target_of(self.source, self._named_target, force=self.force)
            found["replaced"] = any_file(self.target) if self.target.exists() else None
            if self.target.parent.is_dir() and not os.access(self.target.parent, os.W_OK | os.X_OK):
                raise OutputError(f"{self.target}: cannot be written: {os.strerror(errno.EACCES)}")
            if isinstance(base := wanted(options.get("base")), Path):
                with ContainerReader(base) as reader:
                    found["base"] = reader.path.name
            preset, rules, budget, bound = map(options.get, ("preset", "rules", "budget", "max_update_error"))
            policy = Policy.of(preset, rules or (), budget, bound)
            found["bytes"], found["predicted"] = predicted_bytes(self.source, policy, options.get("threads"))
        found["would_remove"] = self.settings.remove

    @property
    def _named_target(self) -> Path | None:
        """The target; None for the default one, which is replaced only if it is a checkpoint."""
        return None if self.target == default_target(self.source) else self.target

    def _finish(self, aside: Path, found: dict[str, Any], progress: Progress) -> None:
        """Finish a removal that was interrupted."""
        container, threads = self.target if self.present else None, self.settings.options.get("threads")
        unwanted = self.settings.difference
        finish_removal(aside, self.source, container, unwanted=unwanted, threads=threads, progress=progress)
        self._read(found)
        found["present"] = found["removed"] = True

    def _read(self, found: dict[str, Any]) -> None:
        """Add what the target says of itself."""
        with ContainerReader(self.target) as reader:
            manifest = reader.manifest
            found["base"] = manifest.base and manifest.base.path
            found["steps"] = step_facts(manifest, count_whole)
            found["bytes"] = sum(member.size for member in manifest.members)
            found["stored"] = reader.size

    def is_done(self, progress: Progress | None) -> bool:
        """Whether the target is what was asked for; False where it is to be replaced. Without ``progress`` by its head.

        Unless ``force`` replaces them, raises CheckFailedError for a container of other settings, OutputError for one
        of another source, and InputError where a file below it is missing.
        """
        if not self.present:
            return False
        error: Ckpt8Error | None = None
        with ContainerReader(self.target) as reader:
            difference = self.settings.difference(reader.manifest)
            try:
                reader.links()
            except InputError as exc:
                error = exc
        if difference is not None:
            error = CheckFailedError(
                f"{self.target}: {difference}; {self.source} stays as it is, --force compresses it anew"
            )
        elif error is None and self.doubted and progress is not None and not self._is_of_source(progress):
            error = OutputError(
                f"{self.target}: was not made from {self.source} as it is now; --force replaces it, or move it away"
            )
        if error is not None and not self.force:
            raise error
        return error is None

    def _is_of_source(self, progress: Progress) -> bool:
        """Whether the target holds against the source."""
        try:
            result = verify(self.target, self.source, threads=self.settings.options.get("threads"), progress=progress)
        except CheckFailedError:
            return False
        return not result.failures and not result.unmeasured


def finishing(folder: Path, homes: Iterable[Path], settings: Settings) -> list[Job]:
    """Jobs that finish the removals which killed processes left in ``folder``; the containers may be in ``homes``."""
    return [
        Job(source, container or default_target(source), settings, present=container is not None, aside=aside)
        for aside, source, container in interrupted(folder, homes)
    ]
