"""How often a request to a store is made, and when it is given up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

_ATTEMPTS, _SECONDS = 5, 45
"""Tries without a byte of progress, and seconds after which no other begins: the last one may take 70 more."""


class CutError(Exception):
    """A body ended before its time."""


class Attempts:
    """Tries of one request. Progress begins them anew."""

    def __init__(self) -> None:
        self.progress()

    def progress(self) -> None:
        """Count from zero."""
        self.count, self._begun = 0, time.monotonic()

    def are_over(self) -> bool:
        """Count one that failed; whether it was the last."""
        self.count += 1
        return self.count >= _ATTEMPTS or time.monotonic() - self._begun > _SECONDS

    def wait(self, asked: float = 0.0) -> None:
        """Wait before the next one, and as long as the store ``asked`` for, in seconds."""
        time.sleep(asked + min(0.1 * 2**self.count, 5) * random.uniform(0.5, 1))  # noqa: S311 - spreads requests


def filling(buffer: memoryview, receive: Callable[[int, memoryview], int]) -> Callable[[Attempts], None]:
    """What fills ``buffer`` in as many attempts as it takes: each goes on at the byte that the last one reached.

    ``receive`` fills the rest of the buffer from its byte on, and returns how many bytes came before the end or a cut.
    """
    done = 0

    def ask(attempts: Attempts) -> None:
        nonlocal done
        while done < len(buffer):
            count = receive(done, buffer[done:])
            done += count
            if count:
                attempts.progress()
            if done < len(buffer):
                raise CutError

    return ask


def one_line(exc: Exception) -> str:
    """What an exception says, in one line."""
    return " ".join(str(exc).split()) or type(exc).__name__
