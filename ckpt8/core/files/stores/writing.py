"""Writes an object of a store while its bytes come: in parts, several at a time, and the first part last.

Nothing is there before the last request, and then all of it: there is no temporary object and no rename. A process that
is killed leaves parts that nobody sees.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt8.core.closing import Closing
from ckpt8.core.files.atomic import Check, note_replaced
from ckpt8.core.files.stores.contract import Part, Stat, Write

if TYPE_CHECKING:
    from ckpt8.core.files.stores.path import StorePath

PART, IN_FLIGHT = 5 << 20, 12
"""Bytes of a part, the fewest that S3 takes, and parts on their way. Four more may be in memory: the first one, that
to come, and those to which a writer may go back."""

_MOST_PARTS = 9000
"""Of an object. S3 takes 10,000."""

_PATIENCE = 5
"""Seconds to wait for the parts on their way before an upload that was given up is removed."""

_unfinished: dict[ObjectOutput, int] = {}
"""Outputs that have begun to send, with the process of each: a forced exit closes them too."""


@atexit.register
def _give_up_unfinished() -> None:
    for output, process in [*_unfinished.items()]:
        if process == os.getpid():
            output.close()


class ObjectOutput(Closing):
    """A new object, which is there once it is published; ``close`` gives it up before that.

    Its bytes are appended behind ``reserved`` bytes for a head, which comes at the end. ``bound`` is the most bytes
    that are expected: all parts have one size, but the last one and a first one whose head is longer than that.
    ``replaced`` describes what is there, which ``check`` accepts.
    """

    def __init__(
        self,
        path: StorePath,
        write: Write,
        replaced: str | None = None,
        check: Check = str,
        *,
        reserved: int = 0,
        bound: int = 0,
    ) -> None:
        self._path, self._store, self._write = path, path.store, write
        self.replaced, self._accept = replaced, check
        self._part_size = max(PART, -(-bound // _MOST_PARTS), reserved)
        self._number, self._room = 1, self._part_size - reserved
        """Of the part that is being filled, and the bytes that it still takes."""
        self._buffers: list[bytes | memoryview] = []
        self._marked = self._number, self._room, self._buffers, 0
        self._first = self._head = b""
        self._size = 0
        self._upload = ""
        """Its name, once a part was to be sent."""
        self._beginning = threading.Lock()
        self._slots = threading.Semaphore(IN_FLIGHT)
        self._senders: dict[int, threading.Thread] = {}
        self._parts: dict[int, Part] = {}
        self._failure: BaseException | None = None
        self._is_given_up = False

    def append(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Add bytes. Raises OutputError, also for a part that was sent before."""
        for buffer in buffers:
            view = memoryview(buffer)
            self._size += len(view)
            while view:
                if not self._room:
                    self._end_part()
                piece = view[: self._room]
                self._buffers.append(piece)
                self._room -= len(piece)
                view = view[len(piece) :]

    def _end_part(self) -> None:
        content = b"".join(self._buffers)
        if self._number == 1:
            self._first = content
        else:
            self._send(self._number, content)
        self._number, self._room, self._buffers = self._number + 1, self._part_size, []

    def mark(self) -> None:
        """Note the place to which ``rollback`` returns."""
        self._marked = self._number, self._room, self._buffers, len(self._buffers)

    def rollback(self, size: int) -> None:
        """Take back what was appended since the last mark, when there were ``size`` bytes.

        Parts from there on are sent again, under their numbers.
        """
        self._number, self._room, buffers, count = self._marked
        self._buffers, self._size = buffers[:count], size

    def end(self, head: bytes, tail: Sequence[bytes]) -> Path:
        """Add the last bytes, and the first ones in front of all; return where both can be read.

        The last parts go already, while that is done.
        """
        self.append(tail)
        self._head = head
        self._send_rest()
        return self._path.that_reads(_Ends(head, b"".join(tail), len(head) + self._size))

    def publish(self, last_look: Callable[[Path], object] = lambda _: None) -> None:
        """Send what is left, and make the object. Raises OutputError, and what ``last_look`` at its path raises."""
        self._send_rest()
        last_look(self._path)
        self._look_again()
        is_shown = False
        if self._number == 1:
            self._store.put(self._write, b"".join([self._head, *self._buffers]))
        else:
            numbers = range(1, self._number + 1)
            for number in numbers:
                self._senders[number].join()
            self._check()
            is_shown = self._store.complete(self._write, self._upload, [self._parts[number] for number in numbers])
            self._upload = ""
        if not is_shown:
            self._store.check(self._write, len(self._head) + self._size)
        self._path.forget()
        if self.replaced is not None:
            note_replaced(self.replaced)

    def _send_rest(self) -> None:
        """Send the last part and the first one, once, if there are parts."""
        if self._number > 1 and 1 not in self._senders:
            self._send(self._number, b"".join(self._buffers))
            self._send(1, self._head + self._first)

    def _look_again(self) -> None:
        """Raise OutputError where what is there may not be replaced any more."""
        if self.replaced is not None:
            self._accept(self._path)

    def _send(self, number: int, content: bytes) -> None:
        """Send a part in a thread of its own, once there are fewer than IN_FLIGHT. Raises OutputError."""
        if (earlier := self._senders.get(number)) is not None:
            earlier.join()  # one that came late would take the place of this
        self._slots.acquire()
        self._check()
        _unfinished[self] = os.getpid()
        # No pool of concurrent.futures: it takes no work once the interpreter exits, which waits for this.
        self._senders[number] = threading.Thread(
            target=self._run, args=(number, content), name=f"ckpt8-part-{number}", daemon=True
        )
        self._senders[number].start()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, number: int, content: bytes) -> None:
        try:
            # Here and not in the main thread, in which a signal may come between the answer and its being noted.
            with self._beginning:
                begins = not self._upload and not self._is_given_up
                if begins:
                    self._upload = self._store.begin(self._write)
            if self._upload:
                self._parts[number] = self._store.send(
                    self._write, self._upload, number, content, lambda: self._is_given_up
                )
            if begins:
                self._store.tidy(self._write, self._upload)
        except BaseException as exc:
            self._failure = self._failure or exc
            self._is_given_up = True
        finally:
            self._slots.release()

    def close(self) -> None:
        """Stop sending, and remove what was sent, unless the object is there."""
        self._is_given_up = True
        until = time.monotonic() + _PATIENCE
        for sender in self._senders.values():
            sender.join(max(0, until - time.monotonic()))
        if self._upload:
            self._store.abort(self._write, self._upload)
            self._upload = ""
        _unfinished.pop(self, None)


class _Ends:
    """An object that is not there yet, as Readable: its first and last bytes, and zeros between them."""

    def __init__(self, head: bytes, tail: bytes, size: int) -> None:
        self._ends = (0, head), (size - len(tail), tail)
        self._version = Stat(size, "", 0)

    def stat(self, key: str) -> Stat:  # noqa: ARG002 - there is one object
        """The version that is about to be there."""
        return self._version

    def first(self, key: str, length: int) -> tuple[Stat, bytes]:
        """The version that is about to be there, and its first bytes."""
        head = bytearray(min(length, self._version.size))
        self.fill(key, "", 0, memoryview(head))
        return self._version, bytes(head)

    def objects(self, prefix: str, *, deep: bool = False) -> Mapping[str, Stat]:  # noqa: ARG002
        """Nothing lies below."""
        return {}

    def fill(self, key: str, tag: str, start: int, buffer: memoryview) -> None:  # noqa: ARG002
        """Put the bytes at ``start`` that are known into a ``buffer`` of zeros."""
        for offset, content in self._ends:
            first, last = max(start, offset), min(start + len(buffer), offset + len(content))
            if first < last:
                buffer[first - start : last - start] = content[first - offset : last - offset]
