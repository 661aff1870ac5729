"""Saves in the background: once a checkpoint is packed in memory, a thread of its own compresses and writes it.

The thread is not a daemon, so the interpreter waits for it before it exits. A second save to the same target waits
until the first has finished or failed. A process that is forced to exit earlier, by a second Ctrl-C for instance,
removes its temporary file as usual.
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

from ckpt8.compressing.compressor import Unwritten
from ckpt8.container.manifest import Manifest

_lock = threading.RLock()
"""Reentrant: the garbage collector may call ``_Job.drop`` while the same thread holds the lock."""

_pending: dict[str, _Job] = {}
"""Unfinished saves, by the real path of their target. That of its base is in a job."""


def _after_fork() -> None:
    """Forget the saves of the parent: its threads do not run in the child, and its files are not the child's."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()
    _pending.clear()


os.register_at_fork(after_in_child=_after_fork)


class _Job:
    """One save and its outcome. A failure becomes a warning where the handle was dropped before anybody asked."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.future: futures.Future[Manifest] = futures.Future()
        self.packed: Unwritten | None = None
        self.base: str | None = None
        self._asked = False
        self._dropped = False

    def run(self, packed: Unwritten) -> None:
        """Write the file and keep the outcome, in the thread of the save."""
        try:
            manifest = packed.write()
        except BaseException as exc:
            self.fail(exc)
        else:
            self.release()
            self.future.set_result(manifest)

    def fail(self, error: BaseException) -> None:
        """Make ``error`` the outcome."""
        self.release()
        with _lock:
            self.future.set_exception(error)
            is_unasked = self._dropped
        if is_unasked:
            self._warn(error)

    def release(self) -> None:
        """Free the memory, and let the next save to this target begin."""
        if self.packed is not None:
            self.packed.close()
        self.packed = None
        with _lock:
            _pending.pop(_key(self.target), None)

    def ask(self, timeout: float | None) -> Manifest:
        """Wait for the outcome. Raises TimeoutError, and what the save raised."""
        if not futures.wait([self.future], timeout).done:
            raise TimeoutError(f"{self.target}: is still being written")
        self._asked = True
        return self.future.result()

    def drop(self) -> None:
        """Note that nobody can ask any more: a failure, now or later, becomes a warning unless somebody has asked."""
        with _lock:
            self._dropped = not self._asked
            error = self.future.exception() if self._dropped and self.future.done() else None
        if error is not None:
            self._warn(error)

    def _warn(self, error: BaseException) -> None:
        warnings.warn(f"{self.target}: was not saved: {error}", RuntimeWarning, stacklevel=2)


class PendingSave:
    """A save in the background. As a context manager it waits for the file at the end of the block.

    When the save fails and nobody has asked for its result before the handle is gone, a RuntimeWarning says so.
    """

    def __init__(self, job: _Job) -> None:
        self._job = job
        weakref.finalize(self, job.drop)

    def done(self) -> bool:
        """Whether the save has finished or failed."""
        return self._job.future.done()

    def result(self, timeout: float | None = None) -> Manifest:
        """Wait for the file and return its manifest.

        Raises what the save raised, mostly OutputError, and TimeoutError after ``timeout`` seconds, while the save
        goes on.
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
    """Wait until every save to ``target``, or of differences to it, has finished or failed."""
    key = _key(target)
    while True:
        with _lock:
            jobs = [job.future for own, job in _pending.items() if key in (own, job.base)]
        if not jobs:
            return
        futures.wait(jobs)


def start(target: Path, pack: Callable[[], Unwritten]) -> PendingSave:
    """Wait for the last save to ``target``, call ``pack``, and write in a thread. Raises what ``pack`` raises."""
    job = _reserve(target)
    try:
        job.packed = packed = pack()
        if (record := packed.compressor.base) is not None and not packed.keeps_base:
            job.base = _key(Path(_key(target)).parent / record.path)
        # Stated because a thread inherits it: the caller may be a daemon.
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
