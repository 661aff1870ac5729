"""One checkpoint of many: compress it, verify and remove it, and say what became of it. A failure is an outcome."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt8.chaining.removal import refuse_removal, remove_verified
from ckpt8.checkpoint.readers.entries import size_of
from ckpt8.compressing.compress import compress, default_target
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError, Ckpt8Error, OutputError
from ckpt8.core.workers import Progress
from ckpt8.inspecting.verify import verify

_VERIFIED = 2
"""How often ``verify`` reads a checkpoint: it decodes as many bytes, then compares them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for all checkpoints; ``options`` are those of ``compress``."""

    options: dict[str, Any] = field(default_factory=dict)
    remove: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a checkpoint: ``bytes`` of ``source`` and ``stored`` bytes of ``target``, None while it has none.

    ``present``: the container was there already. ``removed``: the source is gone. ``error``: what failed, after which
    the source is as it was.
    """

    source: Path
    target: Path
    bytes: int = 0
    stored: int | None = None
    seconds: float = 0.0
    base: str | None = None
    present: bool = False
    removed: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A checkpoint to compress into ``target``, with as much ``work`` as it has bytes to read.

    ``present``: the target is its container already, though ``doubted`` where the source may have changed since.
    ``problem``: why it cannot be compressed.
    """

    source: Path
    target: Path
    settings: Settings
    force: bool = False
    present: bool = False
    doubted: bool = False
    problem: Exception | None = None

    @property
    def work(self) -> int:
        """Bytes that will be read; 0 for a source that cannot be read."""
        try:
            times = (not self.present) + _VERIFIED * (self.doubted + self.settings.remove)
            return 0 if self.problem else size_of(self.source) * times
        except Ckpt8Error:
            return 0

    def run(self, progress: Progress = lambda _: None) -> Outcome:
        """Do it. An exception is part of the outcome."""
        started = time.perf_counter()
        found: dict[str, Any] = {}
        try:
            self._run(found, progress)
        except Exception as exc:
            found["error"] = exc
        return Outcome(self.source, self.target, seconds=time.perf_counter() - started, **found)

    def _run(self, found: dict[str, Any], progress: Progress) -> None:
        if self.problem is not None:
            raise self.problem
        if self.settings.remove:
            refuse_removal(self.source)
        found["present"] = self.present and not (self.doubted and self._is_another(progress))
        if not found["present"]:
            options = {**self.settings.options, "force": self.force, "progress": progress}
            # Unnamed, a target is replaced only if it is a checkpoint.
            compress(self.source, None if self.target == default_target(self.source) else self.target, **options)
        with ContainerReader(self.target) as reader:
            found["base"] = reader.manifest.base and reader.manifest.base.path
        found["bytes"] = size_of(self.source)
        found["stored"] = self.target.stat().st_size
        if self.settings.remove:
            remove_verified(self.source, self.target, threads=self.settings.options.get("threads"), progress=progress)
            found["removed"] = True

    def _is_another(self, progress: Progress) -> bool:
        """Whether the target, made from another source, is to be replaced. Raises OutputError where it may not be."""
        try:
            result = verify(self.target, self.source, threads=self.settings.options.get("threads"), progress=progress)
            if not result.failures:
                return False
        except CheckFailedError:
            pass
        if not self.force:
            raise OutputError(
                f"{self.target}: was not made from {self.source} as it is now; --force replaces it, or move it away"
            )
        return True
