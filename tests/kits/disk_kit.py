"""A disk that is full, for this process."""

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
