"""Lossless planes in one pass on a CPU: the bits of ``lossless``."""

import numpy as np

from ckpt8.core.arrays import Array, Arrays
from ckpt8.core.numba import kernel

u2, u4, u8 = np.uint16, np.uint32, np.uint64


@kernel
def _cut2(bits, high, low):
    for i in range(bits.size):
        r = u2(u2(bits[i] << u2(1)) | u2(bits[i] >> u2(15)))
        high[i] = r >> u2(8)
        low[i] = r


@kernel
def _cut4(bits, first, second, third, fourth):
    for i in range(bits.size):
        r = u4(u4(bits[i] << u4(1)) | u4(bits[i] >> u4(31)))
        first[i] = r >> u4(24)
        second[i] = r >> u4(16)
        third[i] = r >> u4(8)
        fourth[i] = r


@kernel
def _cut_plane(bits, shift, plane):
    shift = u8(shift)
    for i in range(bits.size):
        plane[i] = u8(u8(bits[i] << u8(1)) | u8(bits[i] >> u8(63))) >> shift


def encode(x: Array, out: Arrays) -> None:
    """Fill the planes or bytes of ``x``."""
    if "bytes" in out:
        out["bytes"][:] = x.view(np.uint8)
        return
    planes = [out[f"plane{k}"] for k in range(x.itemsize)]
    if x.itemsize == 2:
        _cut2(x.view(u2), *planes)
    elif x.itemsize == 4:
        _cut4(x.view(u4), *planes)
    else:
        for k, plane in enumerate(planes):
            _cut_plane(x.view(u8), 8 * (7 - k), plane)


@kernel
def _join2(high, low, out):
    for i in range(out.size):
        r = u2(u2(u2(high[i]) << u2(8)) | u2(low[i]))
        out[i] = u2(u2(r >> u2(1)) | u2(r << u2(15)))


@kernel
def _join4(first, second, third, fourth, out):
    for i in range(out.size):
        high = u4(u4(u4(first[i]) << u4(24)) | u4(u4(second[i]) << u4(16)))
        r = u4(high | u4(u4(u4(third[i]) << u4(8)) | u4(fourth[i])))
        out[i] = u4(u4(r >> u4(1)) | u4(r << u4(31)))


@kernel
def _add_plane(plane, out):
    for i in range(out.size):
        out[i] = u8(out[i] << u8(8)) | u8(plane[i])


@kernel
def _rotate(out):
    for i in range(out.size):
        out[i] = u8(out[i] >> u8(1)) | u8(out[i] << u8(63))


def decode(parts: Arrays, out: Array) -> None:
    """Fill ``out`` from its planes or bytes."""
    if "bytes" in parts:
        out.view(np.uint8)[:] = parts["bytes"]
        return
    planes = [parts[f"plane{k}"] for k in range(out.itemsize)]
    if out.itemsize == 2:
        _join2(*planes, out.view(u2))
    elif out.itemsize == 4:
        _join4(*planes, out.view(u4))
    else:
        bits = out.view(u8)
        bits[:] = 0
        for plane in planes:
            _add_plane(plane, bits)
        _rotate(bits)
