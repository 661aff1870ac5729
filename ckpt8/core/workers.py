"""A small thread pool with ordered results and bounded look-ahead.

zstandard, torch and file reads all release the GIL. Each thread runs torch with one intra-op thread; the caller's own
setting stays. The threads are not those of ``concurrent.futures``, which accept no work once the interpreter exits: a
save in the background may still have most of its work to do then.

Buffers are used again: what threads allocate and free in turn, the allocator keeps in pieces of no use.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ckpt8.core.arrays import Array
from ckpt8.core.closing import Closing
from ckpt8.core.tensors import cut_into_boxes, view_of_box

if TYPE_CHECKING:
    import torch

_MOST = 8

T = TypeVar("T")
R = TypeVar("R")

_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]

LOOK_AHEAD = 2
"""Results per thread that may wait for the consumer; bounds memory."""


NO_THREADS = -1
"""In place of a number of threads: none but the caller's."""


def default_threads() -> int:
    """One thread for each processor this process may run on, at most eight."""
    return min(_processors(), _MOST)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of_rank() -> int:
    """Threads of one of the ranks that work at once: torchrun says how many of them this machine has.

    NO_THREADS where there are more ranks than processors: a thread would wait for its caller, and its caller for it.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    share = min(_processors() // max(int(ranks), 1), _MOST) if ranks.isdecimal() else default_threads()
    return share or NO_THREADS


class Workers(Closing):
    """A context manager. ``threads`` of None takes ``default_threads()``; with NO_THREADS the caller does the work."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = max(threads or default_threads(), 0)
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._has_one_of_torch = False
        # Daemons: a pool that nobody closed must not keep the interpreter from exiting.
        self._pool = [threading.Thread(target=self._serve, name=f"ckpt8_{k}", daemon=True) for k in range(self.threads)]
        for thread in self._pool:
            thread.start()
        if self._pool:
            self._start()

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            run_task(*task)
            del task

    def _submit(self, function: Callable[..., R], *args: Any) -> Future[R]:
        future: Future[R] = Future()
        self._queue.put((future, function, args))
        return future

    def _start(self) -> None:
        # Freeing one mapped block tells glibc to keep blocks up to this size for reuse from now on. Otherwise it gives
        # the temporaries of every tile back to the kernel and fetches them again: a quarter of the time, measured.
        np.empty(24 << 20, np.uint8)
        self._restrict()

    def _restrict(self) -> None:
        """Have torch, once it is imported, use one thread in each of these, and as many as before in all others."""
        torch: Any = sys.modules.get("torch")
        if self._has_one_of_torch or not hasattr(torch, "set_num_threads"):
            return
        self._has_one_of_torch = True
        # torch.set_num_threads acts on the calling thread, and on the default for threads that have not used torch yet.
        # So each thread uses torch once, sets its own number to one, and afterwards the default is restored.
        before = torch.get_num_threads()
        barrier = threading.Barrier(self.threads)

        def enter() -> None:
            torch.get_num_threads()
            barrier.wait()
            torch.set_num_threads(1)

        for future in [self._submit(enter) for _ in range(self.threads)]:
            future.result()
        torch.set_num_threads(before)

    def close(self) -> None:
        """Drop waiting work, wait for running work, end the threads."""
        with contextlib.suppress(Empty):
            while (task := self._queue.get_nowait()) is not None:
                task[0].cancel()
        for _ in self._pool:
            self._queue.put(None)
        for thread in self._pool:
            thread.join()
        if not self._pool:
            _local.__dict__.clear()

    def map(self, function: Callable[[T], R], items: Iterable[T], ahead: int = LOOK_AHEAD) -> Iterator[R]:
        """Results in the order of ``items``. Takes items only ``ahead`` of the consumer; threads start at once.

        ``items`` may be results of another ``map``, whose threads are the same.
        """
        if not self._pool:
            return map(function, items)
        self._restrict()
        source, limit = iter(items), self.threads * (1 + ahead)
        waiting: deque[Future[R]] = deque()
        try:
            waiting.extend(self._submit(function, item) for item in islice(source, limit))
        except BaseException:
            _cancel(waiting)
            raise
        return self._results(function, source, waiting, max(self.threads * ahead // 2, 1))

    def _results(
        self, function: Callable[[T], R], items: Iterator[T], waiting: deque[Future[R]], at_once: int
    ) -> Iterator[R]:
        try:
            while waiting:
                # Who waits is woken in the middle of the threads' work: once for several results, not for each.
                waiting[min(at_once, len(waiting)) - 1].exception()
                for _ in range(min(at_once, len(waiting))):
                    yield waiting.popleft().result()
                    waiting.extend(self._submit(function, item) for item in islice(items, 1))
        finally:
            _cancel(waiting)


def _cancel(waiting: Iterable[Future[Any]]) -> None:
    for future in waiting:
        future.cancel()


def run_task(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run the call and hand its result or exception to ``future``."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args)
    except BaseException as exc:
        future.set_exception(exc)
    else:
        future.set_result(result)


Progress = Callable[[int], None]
"""Called with the number of source bytes just finished."""


_local = threading.local()


def scratch(slot: int | str, length: int) -> memoryview:
    """``length`` bytes of this thread's buffer for ``slot``; the next call for the slot reuses them."""
    buffers: dict[int | str, memoryview] = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get(slot)
    if buffer is None or len(buffer) < length:
        # A bytearray would be cleared, for as long as a kernel takes to fill it, while all other threads wait.
        buffer = buffers[slot] = np.empty(length, np.uint8).data
    return buffer[:length]


def scratch_array(slot: int | str, dtype: Any, numel: int) -> Array:
    """Scratch memory of this thread as a flat array of ``numel`` elements."""
    return np.frombuffer(scratch(slot, numel * np.dtype(dtype).itemsize), dtype)


B = TypeVar("B", bound=Sized)


class Buffers(Generic[B]):
    """A pool of buffers; it grows to as many as are in use at once. Thread-safe.

    ``make`` makes one of so many bytes.
    """

    def __init__(self, make: Callable[[int], B]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._free: list[B] = []

    def take(self, nbytes: int) -> B:
        """The smallest free buffer of at least ``nbytes``, or a new one; its content is arbitrary."""
        with self._lock:
            fitting = [k for k, buffer in enumerate(self._free) if len(buffer) >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda k: len(self._free[k])))
        return self._make(max(1 << 20, 1 << (nbytes - 1).bit_length()))

    def give(self, buffer: B) -> None:
        """Give back a buffer that no copy uses any more."""
        with self._lock:
            self._free.append(buffer)


def rows(x: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """The views of a tensor, whole rows and parts of rows, that make up its elements ``start`` to ``stop``."""
    if (start, stop) == (0, x.numel()):
        yield x
    else:
        for _, box in cut_into_boxes(tuple(x.shape), start, stop):
            yield view_of_box(x, box)


def assign(target: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Set the elements from ``start`` on, counted in the order of dimensions, of a tensor of any stride."""
    is_flat, stop = target.is_contiguous(), start + len(values)
    for part in [target.view(-1)[start:stop]] if is_flat else rows(target, start, stop):
        part.copy_(values[: part.numel()].view(part.shape))
        values = values[part.numel() :]


def settle() -> None:
    """Hide all objects made so far from the garbage collector, which takes a tenth of a second to look through them.

    For our own processes only: none of these objects is freed before the exit.
    """
    gc.freeze()
    # Some libraries count their remaining objects at exit.
    atexit.register(gc.unfreeze)
