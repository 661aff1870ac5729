"""CRC-32 of a whole from its pieces, against zlib."""

from __future__ import annotations

import zlib
from functools import reduce

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt8.core.files.source_file import combine

PIECES = st.binary(max_size=300)


@given(PIECES, PIECES)
@example(b"", b"")
@example(b"", b"a")
@example(b"a", b"")
@example(b"\x00", b"\x00" * 9)
def test_two_pieces(first, second):
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [1, 2, 255, 256, 4095, 4096, 65_535, 65_536, 1_000_003, (1 << 22) + 1])
def test_long_pieces(length):
    first = b"checkpoint"
    second = bytes(range(251)) * (length // 251 + 1)
    second = second[:length]
    assert combine(zlib.crc32(first), zlib.crc32(second), length) == zlib.crc32(first + second)


@pytest.mark.parametrize("doublings", [32, 40, 45])
def test_lengths_beyond_32_bits(doublings):
    """Zeros double by combining with themselves; the same length in one step has to agree with that."""
    block = zlib.crc32(bytes(1024))
    doubled, length = block, 1024
    for _ in range(doublings):
        doubled = combine(doubled, doubled, length)
        length *= 2
    first = zlib.crc32(b"weights")
    one_by_one = reduce(lambda crc, _: combine(crc, 0, 0), range(3), first)
    assert one_by_one == first
    halves = combine(doubled, doubled, length)
    tail = combine(combine(first, doubled, length), doubled, length)
    assert combine(first, halves, 2 * length) == tail
    # x^(8n) has order 2^32 - 1 in n: so long a run of zeros leaves a mark that the short one does not.
    assert combine(first, 0, length) != combine(first, 0, length + 1)
    assert combine(first, 0, 2**32 - 1) == first
    assert combine(first, 0, length) == combine(first, 0, length % (2**32 - 1))
