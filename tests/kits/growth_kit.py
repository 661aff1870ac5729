"""How the time of a call grows with the size of its input."""

from __future__ import annotations

import time


def growth(call, size: int, times: int = 4) -> float:
    """How much longer ``call(times * size)`` takes than ``call(size)``, in processor time: the least of three tries.

    About ``times`` where the time grows with the size, ``times`` squared where it grows with its square.
    """

    def seconds(given: int) -> float:
        start = time.process_time()
        call(given)
        return time.process_time() - start

    return min(seconds(times * size) / seconds(size) for _ in range(3))
