"""Saves that go on in the background once their snapshot is packed in memory: one thread each, and who waits for whom.

The thread is not a daemon: leaving the interpreter waits for it. Of two saves to one target the second waits until the
first is done, whatever became of it. A process that is made to leave before that, by a second Ctrl-C say, removes its
temporary file as every other does.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ckpt8.container.manifest import Manifest


class Packed(Protocol):
    """What ``start`` needs of a packed checkpoint, see ``pipeline.Unwritten``."""

    def write(self) -> Manifest:
        """Write the file. Raises OutputError."""

    def close(self) -> None:
        """Give up, or do nothing after ``write``."""


_lock = threading.RLock()
"""Reentrant, since a handle may be collected, and says so, at any point of its own thread."""

_pending: dict[str, _Job] = {}
"""Saves that are under way, by the real path of their target."""


def _after_fork() -> None:
    """The threads stay with the parent, and so does the care for its files."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()
    _pending.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Job:
    """One save: its outcome, and whether anybody has asked for it, or still can."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.future: futures.Future[Manifest] = futures.Future()
        self.packed: Packed | None = None
        self._asked = False
        self._dropped = False

    def run(self, packed: Packed) -> None:
        """What the thread does."""
        try:
            manifest = packed.write()
        except BaseException as exc:
            self.fail(exc)
        else:
            self.release()
            self.future.set_result(manifest)

    def fail(self, error: BaseException) -> None:
        """The outcome is an error."""
        self.release()
        with _lock:
            self.future.set_exception(error)
            unheard = self._dropped
        if unheard:
            self._warn(error)

    def release(self) -> None:
        """Let the memory go, and the next save to this target begin."""
        if self.packed is not None:
            self.packed.close()
        self.packed = None
        with _lock:
            _pending.pop(_key(self.target), None)

    def ask(self, timeout: float | None) -> Manifest:
        """Wait for the outcome."""
        if not futures.wait([self.future], timeout).done:
            raise TimeoutError(f"{self.target}: is still being written")
        self._asked = True
        return self.future.result()

    def drop(self) -> None:
        """Nobody can ask any more: a failure that is known, or comes later, is then a warning."""
        with _lock:
            self._dropped = not self._asked
            error = self.future.exception() if self._dropped and self.future.done() else None
        if error is not None:
            self._warn(error)

    def _warn(self, error: BaseException) -> None:
        warnings.warn(f"{self.target}: was not saved: {error}", RuntimeWarning, stacklevel=2)


class PendingSave:
    """A save in the background. As a context manager it waits at the end of the block.

    A failure that nobody asks for, since the handle was dropped, is shown as a RuntimeWarning.
    """

    def __init__(self, job: _Job) -> None:
        self._job = job
        weakref.finalize(self, job.drop)

    def done(self) -> bool:
        """Whether the file is complete, or has failed."""
        return self._job.future.done()

    def result(self, timeout: float | None = None) -> Manifest:
        """Wait for the file and give its manifest.

        Raises what failed, above all OutputError, and TimeoutError after ``timeout`` seconds; the save then goes on.
        """
        return self._job.ask(timeout)

    def __enter__(self) -> PendingSave:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.result()
        else:
            futures.wait([self._job.future])


def wait_for(target: Path) -> None:
    """Return once no save to ``target`` is under way, whatever became of it."""
    while (job := _pending.get(_key(target))) is not None:
        futures.wait([job.future])


def start(target: Path, pack: Callable[[], Packed]) -> PendingSave:
    """Wait for the last save to ``target``, ``pack`` here and now, write in a thread. Raises what ``pack`` raises."""
    job = _reserve(target)
    try:
        job.packed = packed = pack()
        # Not a daemon, whatever the thread is that calls this.
        threading.Thread(target=job.run, args=(packed,), name="ckpt8-save", daemon=False).start()
    except BaseException as exc:
        job.fail(exc)
        raise
    return PendingSave(job)


def _reserve(target: Path) -> _Job:
    job = _Job(target)
    while True:
        wait_for(target)
        with _lock:
            if _pending.setdefault(_key(target), job) is job:
                return job


def _key(target: Path) -> str:
    return os.path.realpath(target)
