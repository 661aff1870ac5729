"""Pieces of a file, read by a kernel or by Python, are slices of its bytes; what is missing is an error."""

from __future__ import annotations

import os
from contextlib import closing

import numpy as np
import pytest

from ckpt8.core import backend
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import ByteRange, SourceFile

CONTENT = np.random.default_rng(1).bytes(5000)
FIRST = 100
"""Where the range begins that is read."""


@pytest.fixture(params=["kernel", "Python"])
def file(request, tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "_runs_numba", request.param == "kernel")
    if request.param == "kernel":
        pytest.importorskip("numba", reason="numba is not installed")
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with closing(SourceFile(ByteRange(path, FIRST, 4000))) as file:
        yield file


def pieces(file, starts, length):
    buffer = bytearray(len(starts) * length)
    file.read_each(np.array(starts, np.int64), length, memoryview(buffer))
    return bytes(buffer)


def test_pieces_are_slices(file):
    starts = [3000, 0, 7, 7, 3990]
    assert pieces(file, starts, 10) == b"".join(CONTENT[FIRST + start :][:10] for start in starts)
    assert pieces(file, [], 10) == b""


def test_pieces_beyond_the_range_and_of_a_file_that_was_cut(file):
    with pytest.raises(InputError, match="ends at byte 4000, needed 4001"):
        pieces(file, [0, 3991, 5], 10)
    os.truncate(file.source.path, FIRST + 1000)
    with pytest.raises(InputError, match="became shorter while it was read"):
        pieces(file, [0, 995, 5], 10)
