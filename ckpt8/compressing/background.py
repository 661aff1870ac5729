"""Saves in the background: each writes in a thread of its own what it has taken of a checkpoint.

The interpreter waits for the thread before it exits. A second save to the same target waits until the first has
finished or failed. A process that is forced to exit earlier, by a second Ctrl-C for instance, removes its temporary
file as usual. A thread stays for later saves: on a busy processor its start takes longer than many a copy.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from ckpt8.container.manifest import Manifest
from ckpt8.core.errors import UsageError
from ckpt8.core.files.source_file import resolved
from ckpt8.core.summary import Summarised

T = TypeVar("T")

_lock = threading.RLock()
"""Reentrant: the garbage collector may call ``Job.drop`` while the same thread holds the lock."""

_pending: dict[str, Job] = {}
"""Unfinished saves, by the real path of their target. That of its base is in a job."""

_MOST_SAVES = 1 << 16
"""At once: no save waits for the thread of another one, which may wait for it."""


def _new_threads() -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(_MOST_SAVES, "ckpt8-save")


_threads = _new_threads()


def _after_fork() -> None:
    """Forget the saves of the parent: its threads do not run in the child, and its files are not the child's."""
    global _lock, _threads
    _lock, _threads = threading.RLock(), _new_threads()
    for job in _pending.values():
        job.leave()
    _pending.clear()


os.register_at_fork(after_in_child=_after_fork)


def in_thread(work: Callable[[], T]) -> futures.Future[T]:
    """Begin ``work`` in a thread of its own, for which the interpreter waits before it exits."""
    return _threads.submit(work)


class Unsaved(Protocol):
    """What a save has taken of a checkpoint; ``close`` frees it, also after ``write``."""

    def write(self) -> Manifest:
        """Write the file. Raises OutputError, and what is wrong with arguments and base."""

    def close(self) -> None:
        """Give up."""


class Job:
    """One save and its outcome. A failure becomes a warning where the handle was dropped before anybody asked.

    There are no links in the path of the ``target``.
    """

    def __init__(self, target: Path, base: Path | None) -> None:
        self.target, self.key = target, str(target)
        self.future: futures.Future[Manifest] = futures.Future()
        self.taken: Unsaved | None = None
        self.base = None if base is None else key_of(base)
        self.base_written: futures.Future[Manifest] | None = None
        self.is_asked = False
        self.is_going, self.caller = False, threading.get_ident()
        self._dropped = False
        self._go = threading.Event()

    def start(self, taken: Unsaved) -> None:
        """Write what was ``taken`` in a thread; in this one where an interpreter that exits waits for none."""
        self.taken = taken
        if not threading.main_thread().is_alive():
            self.go()
            self._run()
            return
        in_thread(self._run)
        self.go()

    def go(self) -> None:
        """Let the thread write. The last thing that the caller does: the thread would keep Python's lock from it."""
        self.is_going = True
        self._go.set()

    def _run(self) -> None:
        """Write the file and keep the outcome."""
        self._go.wait()
        if (taken := self.taken) is None:  # the caller was interrupted, and has failed
            return
        try:
            if self.base_written is not None:
                futures.wait([self.base_written])
            manifest = taken.write()
            self.release()
        except BaseException as exc:
            self.fail(exc)
        else:
            self.future.set_result(manifest)

    def fail(self, error: BaseException) -> None:
        """Make ``error`` the outcome."""
        try:
            self.release()
        finally:
            with _lock:
                self.future.set_exception(error)
                is_unasked = self._dropped
            self._go.set()
        if is_unasked:
            self._warn(error)

    def release(self) -> None:
        """Free the memory, and let the next save to this target begin."""
        taken, self.taken = self.taken, None
        try:
            if taken is not None:
                taken.close()
        finally:
            with _lock:
                if _pending.get(self.key) is self:
                    del _pending[self.key]

    def leave(self) -> None:
        """In a process that was forked meanwhile: its parent saves, and no thread here tells the outcome."""
        self.is_asked, self.future = True, futures.Future()
        self.future.set_exception(UsageError(f"{self.target}: is saved by the process that this one was forked from"))

    def drop(self) -> None:
        """Note that nobody can ask any more: a failure, now or later, becomes a warning unless somebody has asked."""
        with _lock:
            self._dropped = not self.is_asked
            error = self.future.exception() if self._dropped and self.future.done() else None
        if error is not None:
            self._warn(error)

    def _warn(self, error: BaseException) -> None:
        warnings.warn(f"{self.target}: was not saved: {error}", RuntimeWarning, stacklevel=2)


class PendingSave(Summarised):
    """A save in the background. As a context manager it waits for the file at the end of the block.

    When the save fails and nobody has asked for its result before the handle is gone, a RuntimeWarning says so.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        weakref.finalize(self, job.drop)

    def _summary(self) -> Iterator[tuple[str, str]]:
        error = self._job.future.exception() if self.done() else None
        state = "failed" if error else "written" if self.done() else "being written"
        yield "PendingSave", f"{self._job.target}: {state}"

    def done(self) -> bool:
        """Whether the save has finished or failed."""
        return self._job.future.done()

    def result(self, timeout: float | None = None) -> Manifest:
        """Wait for the file and return its manifest.

        Raises what the save raised, mostly OutputError, and TimeoutError after ``timeout`` seconds, while the save
        goes on.
        """
        if not futures.wait([self._job.future], timeout).done:
            raise TimeoutError(f"{self._job.target}: is still being written")
        self._job.is_asked = True
        return self._job.future.result()

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
    """Wait until every save to ``target``, or of differences to it, has finished or failed.

    Raises UsageError in a signal handler for one whose call it has interrupted.
    """
    _wait_for(target, key_of(target))


def _wait_for(target: Path, key: str) -> None:
    while True:
        with _lock:
            jobs = [job for own, job in _pending.items() if key in (own, job.base)]
        if not jobs:
            return
        if any(job.caller == threading.get_ident() and not job.is_going for job in jobs):
            raise UsageError(f"{target}: the call that a signal interrupted is saving it; save to another name")
        futures.wait([job.future for job in jobs])


def start_saving(target: Path, base: Path | None, take: Callable[[Job], Unsaved]) -> PendingSave:
    """Wait for the last save to ``target``, call ``take``, and write in a thread. Raises what ``take`` raises.

    The thread waits for a save to ``base``; one that comes later waits for the thread.
    """
    job = Job(target, base)
    is_first = False
    try:
        while not is_first:
            _wait_for(target, job.key)
            with _lock:
                is_first = _pending.setdefault(job.key, job) is job
                before = None if job.base is None else _pending.get(job.base)
        job.base_written = None if before in (None, job) else before.future
        job.start(take(job))
    except BaseException as exc:
        if job.is_going:  # its thread writes on
            job.go()
        else:
            job.fail(exc)
        raise
    return PendingSave(job)


def key_of(target: Path) -> str:
    """What identifies a target, by whatever path."""
    return str(resolved(target))
