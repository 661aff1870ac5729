"""CRC-32, and that of a whole from the CRC-32 of its pieces, so that pieces can be checked by different threads.

A CRC is linear over GF(2): appending n bytes to a message multiplies its checksum by x^(8n) modulo the polynomial,
and the checksum of the appended bytes is added. Polynomials are integers in the reflected order of zlib, x^0 on top.
"""

from __future__ import annotations

from functools import lru_cache

from isal.isal_zlib import crc32

__all__ = ["combine", "crc32"]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x^(8 * length), by squaring."""
    power, base = _ONE, 1 << 23
    while length:
        if length & 1:
            power = _multiply(power, base)
        base = _multiply(base, base)
        length >>= 1
    return power


def combine(first: int, second: int, second_length: int) -> int:
    """CRC-32 of A + B, given those of A and B and the length of B in bytes."""
    return _multiply(_shift(second_length), first) ^ second
