"""Reads an object of a store as a SourceFile: it decides which ranges to ask for, when, and what to keep.

The first bytes are fetched with the first question and kept; a reader of the last ones gets all near the end at once.
Everything else comes in pieces of at most 8 MiB, eight at a time: those that a reader said it expects, and what lies
ahead of a reader that goes forwards. A piece goes once all of it was read, or when memory runs out. Where a reader says
that it comes back, pieces go to a temporary file that has no name, and no byte is fetched twice.

Reading one by one what a file system serves in microseconds would take a round trip each: a zip has thousands of
headers of 64 bytes.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING

from ckpt8.core.errors import InputError
from ckpt8.core.files.atomic import writing
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.files.stores.contract import Readable, Stat

if TYPE_CHECKING:
    from ckpt8.core.arrays import Array

HEAD, TAIL = 512 << 10, 64 << 10
"""Bytes at the beginning and at the end that come together: header, manifest and seal of most containers."""

PIECE, IN_FLIGHT = 8 << 20, 8
"""The most bytes of one request, and the most requests at a time."""

GAP = 1 << 20
"""Bytes between two expected ranges that cost less than another request."""

_WINDOW = 64 << 20
"""Bytes in memory: no piece that nobody waits for is fetched beyond it."""

_CRUMB, _CRUMBS = 66 << 10, 16 << 20
"""The longest expected range that is kept for good, and the bytes of all of these: the headers of a zip are read when
it is opened, and again as what lies around its tensors."""

_OWN_PAGES = 1 << 20
"""Bytes from which a piece has pages of its own."""

_STREAMS = 6
"""Readers that go forwards, at most: a checkpoint has weights, two moments and their headers."""

_LEAST, _MOST_AHEAD = 256 << 10, 64 << 20
"""Bytes to read ahead of such a reader, four times as many when it catches up, and the most ahead of all of them."""


@dataclass(slots=True, eq=False)
class _Piece:
    """A stretch of the object: waiting, on its way, or here. ``used`` counts the bytes that were read of it."""

    start: int
    stop: int
    expected: bool
    used: int = 0
    is_read_to_end: bool = False
    is_waiting: bool = True
    fetched: Future[memoryview] | None = None
    is_spilled: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def is_done(self) -> bool:
        """Whether all of it was read. Some bytes are read twice, so that their count says too little."""
        return self.is_read_to_end and self.used >= self.size


@dataclass(slots=True, eq=False)
class _Stream:
    """A reader that goes forwards: where it is, up to where its bytes are asked for, how many more to ask for."""

    at: int
    asked: int
    ahead: int = _LEAST


class Memory:
    """The window of one object, or of all objects of a directory, and the threads that fetch their pieces."""

    def __init__(self) -> None:
        self.held: dict[_Piece, Content] = {}
        """Pieces in memory or on their way, the least recently read first."""
        self.size, self.window = 0, _WINDOW
        self.begin()

    def begin(self) -> None:
        """Have a lock and threads of this process."""
        self.lock = threading.RLock()
        self._pool: ThreadPoolExecutor | None = None

    def hold(self, piece: _Piece, content: Content, fetch: Callable[[], memoryview]) -> Future[memoryview]:
        """Have a piece fetched."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="ckpt8-store")
        self.held[piece] = content
        self.size += piece.size
        return self._pool.submit(fetch)

    def drop(self, piece: _Piece) -> None:
        """Let go of a piece."""
        del self.held[piece]
        self.size -= piece.size

    def of(self, content: Content) -> list[_Piece]:
        """The pieces of one object."""
        return [piece for piece, owner in self.held.items() if owner is content]

    def evict(self) -> bool:
        """Give up a piece that was read, in all its bytes or, beyond twice the window, in some; whether there is one.

        A piece that was fetched and not read yet stays, as fetching it again would cost most: beyond twice the window
        it goes where it only lay ahead of a reader.
        """
        degrees: list[Callable[[_Piece], object]] = [lambda piece: piece.is_done]
        if self.size >= 2 * _WINDOW:
            degrees += [lambda piece: piece.used, lambda piece: not piece.expected]
        for may_go in degrees:
            for piece, owner in self.held.items():
                if piece.fetched is not None and piece.fetched.done() and may_go(piece):
                    owner.give_up(piece, piece.fetched.result())
                    return True
        return False


class Content:
    """One version of one object, shared by all that read it. Thread-safe.

    ``memory`` is that of its directory. Such a version was listed, and every read names it, so that no more is checked.
    """

    _spill: IO[bytes] | None = None

    def __init__(
        self, name: str, store: Readable, key: str, version: Stat, head: bytes, memory: Memory | None = None
    ) -> None:
        self.name, self.version = name, version
        self._store, self._key = store, key
        self._head = memoryview(head)
        self._is_listed, self._memory = memory is not None, memory or Memory()
        self._pieces: list[_Piece] = []
        self._waiting: deque[_Piece] = deque()
        self._streams: list[_Stream] = []
        self._given_up: list[tuple[int, int]] = []
        """Stretches of pieces that were read and given up, in order: no reader goes ahead into them."""
        self._crumbs: list[tuple[int, int]] = []
        self._crumb_bytes = 0
        self._readers = 0
        _contents.add(self)

    @classmethod
    def at(cls, name: str, store: Readable, key: str) -> Content | None:
        """The present version of an object, None where there is none. Raises InputError."""
        found = store.first(key, HEAD)
        return None if found is None else cls(name, store, key, *found)

    @classmethod
    def listed(cls, name: str, store: Readable, key: str, version: Stat, memory: Memory, most: int) -> Content:
        """The version of an object that a list has shown, of which ``most`` bytes come at once. Raises InputError."""
        head = bytearray(min(most, version.size))
        if head:
            store.fill(key, version.tag, 0, memoryview(head))
        return cls(name, store, key, version, bytes(head), memory)

    def __del__(self) -> None:
        if self._spill is not None:
            self._spill.close()

    def leave_parent(self) -> None:
        """In a forked process: the threads are those of the parent, so what was on its way is asked for again."""
        self._memory.begin()
        for piece in self._memory.of(self):
            if piece.fetched is None or not piece.fetched.done():
                self._drop(piece)
                self._pieces.remove(piece)
        self._pieces = [piece for piece in self._pieces if not piece.is_waiting]
        self._waiting.clear()

    def retain(self) -> None:
        """Count one more reader."""
        with self._memory.lock:
            self._readers += 1

    def release(self) -> None:
        """Count one reader less. After the last nothing more is fetched; what is here stays for those that come."""
        with self._memory.lock:
            self._readers -= 1
            if self._readers:
                return
            for piece in self._memory.of(self):
                if piece.fetched is not None and piece.fetched.cancel():
                    self._drop(piece)
                    self._pieces.remove(piece)
            self._pieces = [piece for piece in self._pieces if not piece.is_waiting]
            self._waiting.clear()
            self._streams.clear()

    def keep_all(self, *, needs_room: bool) -> None:
        """From now on keep what was fetched, in a temporary file. Raises OutputError.

        Where there is no room for it and it ``needs_room``, it is fetched again instead.
        """
        with self._memory.lock:
            if self._spill is None:
                with writing(tempfile.gettempdir()):
                    if needs_room and shutil.disk_usage(tempfile.gettempdir()).free < 2 * self.version.size:
                        return
                    self._spill = tempfile.TemporaryFile(prefix="ckpt8-")  # noqa: SIM115

    def check(self) -> None:
        """Raise InputError where the object is no longer this version."""
        if not self._is_listed and self._store.stat(self._key) != self.version:
            raise InputError(f"{self.name}: changed while it was read; nothing was written")

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Ask ahead for offsets and lengths, in the order in which they will be read."""
        spans: list[list[int]] = []
        for start, length in ranges:
            if length <= _CRUMB and self._crumb_bytes < _CRUMBS:
                self._crumbs.append((start, start + length))
                self._crumb_bytes += length
            if spans and spans[-1][0] <= start <= spans[-1][1] + GAP:
                spans[-1][1] = max(spans[-1][1], start + length)
            elif length:
                spans.append([start, start + length])
        if spans != sorted(spans) and self.version.size <= 2 * _WINDOW:
            # What is read back and forth is fetched in its order, and all of it stays until it was read.
            self._memory.window = 2 * _WINDOW
            spans = [[min(start for start, _ in spans), max(stop for _, stop in spans)]]
        with self._memory.lock:
            self._crumbs.sort()
            for start, stop in spans:
                self._ask(start, stop, expected=True)

    def expect_all(self) -> None:
        """Ask for the end, which says what is where, and then for all from the beginning on."""
        with self._memory.lock:
            self._ask(self.version.size - TAIL, self.version.size, expected=True)
            self._ask(0, self.version.size, expected=True)

    def need(self, start: int, length: int) -> None:
        """Fetch bytes that are about to be read, as one read of them would."""
        start, stop = max(start, len(self._head)), start + min(length, _WINDOW // 2)
        with self._memory.lock:
            if start < stop and self._piece_at(start) is None:
                self._follow(start, stop - start)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset``. Raises InputError."""
        done = 0
        while done < len(buffer):
            done += self._read_some(offset + done, buffer[done:])

    def _read_some(self, at: int, out: memoryview) -> int:
        if at < len(self._head):
            return _copy(self._head, at, out)
        with self._memory.lock:
            piece = self._piece_at(at)
            if piece is None or not piece.expected:
                self._follow(at, len(out))
                piece = self._piece_at(at)
            if piece is None:
                self._ask(at, at + len(out), now=True)
                piece = self._piece_at(at)
            if piece is None:
                raise InputError(f"{self.name}: ends at byte {self.version.size}, needed {at + len(out)}")
            if piece.is_spilled and self._spill is not None:
                return os.preadv(self._spill.fileno(), [out[: piece.stop - at]], at)
            fetched = self._start(piece)
            if piece in self._memory.held:
                self._memory.held[piece] = self._memory.held.pop(piece)
        count = _copy(fetched.result(), at - piece.start, out)
        with self._memory.lock:
            piece.used += count
            piece.is_read_to_end |= at + count == piece.stop
            if self._spill is not None and piece in self._memory.held:
                self._move_to_disk(piece, fetched.result())
            self._advance()
        return count

    def _follow(self, at: int, length: int) -> None:
        """Ask for what is read now, and for what lies ahead of the reader that this continues."""
        stream = next((each for each in self._streams if -_LEAST <= at - each.at <= GAP), None)
        end = self.version.size
        is_missing = self._piece_at(at) is None
        if at >= end - TAIL:
            self._ask(max(end - TAIL, len(self._head)), end)
        elif stream is None and is_missing:
            stop = min(max(at + length, at + _LEAST), end)
            self._ask(at, stop, now=True)
            self._streams = [_Stream(at + length, stop), *self._streams[: _STREAMS - 1]]
        elif stream is not None:
            stream.at = max(stream.at, at + length)
            self._streams.remove(stream)
            self._streams.insert(0, stream)
            if is_missing or stream.at + stream.ahead // 2 > stream.asked:
                stream.ahead = min(4 * stream.ahead, _MOST_AHEAD // len(self._streams))
                ahead = min(at + length + stream.ahead, self._unread_until(at + length))
                stream.asked = max(stream.asked, at + length, ahead)
                self._ask(at, stream.asked)

    def _unread_until(self, at: int) -> int:
        """Where the next stretch begins that was read and given up, or the end of the object."""
        index = bisect_right(self._given_up, (at, 0))
        return self._given_up[index][0] if index < len(self._given_up) else self.version.size

    def give_up(self, piece: _Piece, content: memoryview) -> None:
        """Forget a piece of this content, but for what is small and expected."""
        self._drop(piece)
        self._pieces.remove(piece)
        start, stop = piece.start, piece.stop
        self._keep_crumbs(start, content)
        first, last = (
            bisect_right(self._given_up, (start, start)),
            bisect_right(self._given_up, (stop, self.version.size)),
        )
        if first and self._given_up[first - 1][1] >= start:
            first -= 1
        touched = self._given_up[first:last]
        self._given_up[first:last] = [(min([start, *(x for x, _ in touched)]), max([stop, *(y for _, y in touched)]))]

    def _keep_crumbs(self, start: int, content: memoryview) -> None:
        """Keep the small ranges in the ``content`` of a piece from ``start`` on."""
        at, stop = start, start + len(content)
        for begin, end in self._crumbs[max(0, bisect_right(self._crumbs, (start, 0)) - 1) :]:
            if begin >= stop:
                break
            first, last = max(begin, at), min(end, stop)
            if first < last:
                fetched: Future[memoryview] = Future()
                fetched.set_result(memoryview(bytes(content[first - start : last - start])))
                crumb = _Piece(first, last, expected=True, is_waiting=False, fetched=fetched)
                self._pieces.insert(bisect_right(self._pieces, first, key=_start_of), crumb)
                at = last

    def _piece_at(self, at: int) -> _Piece | None:
        index = bisect_right(self._pieces, at, key=_start_of) - 1
        return self._pieces[index] if index >= 0 and self._pieces[index].stop > at else None

    def _gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The stretches from ``start`` to ``stop`` that were not asked for, in order."""
        at, stop = max(start, len(self._head)), min(stop, self.version.size)
        index = max(0, bisect_right(self._pieces, at, key=_start_of) - 1)
        for piece in self._pieces[index:]:
            if piece.start >= stop:
                break
            if at < piece.start:
                yield at, piece.start
            at = max(at, piece.stop)
        if at < stop:
            yield at, stop

    def _ask(self, start: int, stop: int, *, expected: bool = False, now: bool = False) -> None:
        """Have all pieces from ``start`` to ``stop`` fetched, ``now`` or when it is their turn."""
        for first, last in list(self._gaps(start, stop)):
            count = -(-(last - first) // PIECE)
            size = -(-(last - first) // count)
            for at in range(first, last, size):
                piece = _Piece(at, min(at + size, last), expected)
                self._pieces.insert(bisect_right(self._pieces, at, key=_start_of), piece)
                if now:
                    self._start(piece)
                else:
                    self._waiting.append(piece)
        self._advance()

    def _advance(self) -> None:
        """Fetch what waits, as far as the window has room."""
        while self._waiting:
            if self._waiting[0].is_waiting:
                while self._memory.size >= self._memory.window:
                    if not self._memory.evict():
                        return
                self._start(self._waiting[0])
            self._waiting.popleft()
        while self._memory.size >= _WINDOW and self._memory.evict():
            pass

    def _start(self, piece: _Piece) -> Future[memoryview]:
        if piece.fetched is None:
            piece.is_waiting = False
            piece.fetched = self._memory.hold(piece, self, partial(self._fetch, piece.start, piece.size))
        return piece.fetched

    def _fetch(self, start: int, size: int) -> memoryview:
        # Pages of their own go back to the system at once: a heap of each thread would keep many.
        buffer = memoryview(mmap.mmap(-1, size) if size >= _OWN_PAGES else bytearray(size))
        self._store.fill(self._key, self.version.tag, start, buffer)
        return buffer

    def _move_to_disk(self, piece: _Piece, fetched: memoryview) -> None:
        if self._spill is not None:
            with writing(tempfile.gettempdir()):
                done = 0
                while done < piece.size:
                    done += os.pwrite(self._spill.fileno(), fetched[done:], piece.start + done)
            self._drop(piece)
            piece.is_spilled = True

    def _drop(self, piece: _Piece) -> None:
        self._memory.drop(piece)
        piece.fetched = None


_contents: weakref.WeakSet[Content] = weakref.WeakSet()


def _leave_parent() -> None:
    for content in list(_contents):
        content.leave_parent()


os.register_at_fork(after_in_child=_leave_parent)


def _start_of(piece: _Piece) -> int:
    return piece.start


def _copy(content: memoryview, at: int, out: memoryview) -> int:
    count = min(len(content) - at, len(out))
    out[:count] = content[at : at + count]
    return count


class StoreFile(SourceFile):
    """An open range of an object in a store."""

    ahead, in_order = 0, True

    def __init__(self, source: ByteRange, content: Content) -> None:
        self.source = source
        self._content: Content | None = content
        content.retain()
        self._shared = content

    def close(self) -> None:
        """Stop what is being fetched for nobody."""
        if self._content is not None:
            self._content.release()
            self._content = None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset`` of the range. Raises InputError, also where they changed."""
        self._check_extent(offset, len(buffer))
        self._shared.read_into(self.source.offset + offset, buffer)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Have these ranges fetched ahead."""
        self._shared.expect((self.source.offset + start, length) for start, length in ranges)

    def expect_all(self) -> None:
        """Have all of the object fetched ahead."""
        self._shared.expect_all()

    def need(self, start: int, length: int) -> None:
        """Have these bytes fetched at once."""
        self._shared.need(self.source.offset + start, length)

    def read_each(self, starts: Array, length: int, buffer: memoryview) -> None:
        """As that of a SourceFile, with all pieces on their way at once."""
        self.expect((start, length) for start in starts.tolist())
        super().read_each(starts, length, buffer)

    def keep_all(self, *, needs_room: bool = False) -> None:
        """Fetch no byte twice."""
        self._shared.keep_all(needs_room=needs_room)

    def check_unchanged(self) -> None:
        """Raise InputError when the object was replaced or deleted."""
        self._shared.check()

    def check_in_place(self) -> None:
        """Raise InputError when the object was replaced or deleted."""
        self._shared.check()
