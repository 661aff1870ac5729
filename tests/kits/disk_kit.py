"""A disk that is full, for this process, and one that flips bits."""

from __future__ import annotations

import resource
from contextlib import contextmanager


@contextmanager
def longest_file(length):
    """Files of this process cannot grow beyond ``length`` bytes, which fails a write as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def flip_bit(path, at=0.5):
    """Flip a bit of a file, in the byte at an offset or at a share of its length."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * at) if isinstance(at, float) else at] ^= 1
    path.write_bytes(content)
