"""Companded 8-bit moments in one pass on a CPU: the arithmetic of ``reference``, group by group.

Maxima are taken of the bits of magnitudes, which are ordered as the magnitudes are, with NaN above all.
"""

from __future__ import annotations

import numpy as np
import torch

from ckpt8.codecs.companded8 import GROUP, reference
from ckpt8.errors import RefusedError
from ckpt8.jit import kernel
from ckpt8.tensors import Parts

_i4 = np.int32
_f4 = np.float32

_MAGNITUDE = 0x7FFFFFFF
_INFINITE = 0x7F800000
_SMALLEST_MOMENT1 = 0x0D800000
"""The bits of 2^-100."""
_SMALLEST_ROOT2 = 0x26800000
"""The bits of 2^-50."""


@kernel
def _round_scale(largest):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    bits = min(np.int64(largest), np.int64(reference.QUIET_NAN))
    return (((bits >> 15) & 1) + bits + 0x3FFF) >> 15


@kernel
def _encode_signed(x, bits, codes, scales, scale, scale_bits, levels):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    one, half, top = _f4(1), _f4(0.5), _f4(levels)
    highest = np.int64(0)
    for g in range(scales.size):
        first = g * GROUP
        largest = _i4(0)
        for i in range(first, first + GROUP):
            largest = max(largest, _i4(bits[i] & _i4(_MAGNITUDE)))
        if largest < _SMALLEST_MOMENT1:
            largest = _i4(0)
        scale16 = _round_scale(largest)
        highest = max(highest, scale16)
        scales[g] = scale16
        scale_bits[0] = scale16 << 15
        s = scale[0] if scale16 else one
        for i in range(first, first + GROUP):
            n = x[i] / s
            t = (n + n) / (abs(n) + one)
            codes[i] = _i4(min(max(np.floor(t * top + half), -top), top))
    return highest


@kernel
def _encode_unsigned(v, bits, codes, scales, scale, scale_bits, root, root_bits, levels, fourth):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0913
    one, half, top = _f4(1), _f4(0.5), _f4(levels)
    negative, highest, overflow = _i4(0), _i4(0), False
    for g in range(scales.size):
        first = g * GROUP
        largest = _i4(0)
        for j in range(GROUP):
            b = bits[first + j]
            largest = max(largest, b)
            # Of a number below zero its magnitude, which is none for -0.
            negative = max(negative, _i4(_i4(b & _i4(_MAGNITUDE)) & _i4(b >> _i4(31))))
            root[j] = np.sqrt(v[first + j])
        highest = max(highest, largest)
        largest = _i4(0)
        for j in range(GROUP):
            largest = max(largest, root_bits[j])
        if largest > 0:
            largest = max(largest, _i4(_SMALLEST_ROOT2))
        scale16 = _round_scale(largest)
        scales[g] = scale16
        scale_bits[0] = scale16 << 15
        s = scale[0] if scale16 else one
        overflow |= not s * s < np.inf
        for j in range(GROUP):
            t = root[j] / s
            if fourth:
                t = np.sqrt(t)
            code = _i4(min(max(np.floor(t * top + half), _f4(0)), top))
            codes[first + j] = max(code, _i4(root_bits[j] > 0))
    return max(negative, _i4(highest > _INFINITE)), overflow


@kernel
def _decode_signed(codes, scales, scale, scale_bits, out, levels):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    two, top = _f4(2), _f4(levels)
    for g in range(scales.size):
        first = g * GROUP
        scale_bits[0] = _i4(scales[g]) << 15
        s = scale[0]
        for i in range(first, first + GROUP):
            y = _f4(_i4(codes[i])) / top
            out[i] = (y / (two - abs(y))) * s


@kernel
def _decode_unsigned(codes, scales, scale, scale_bits, out, levels, fourth):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    top = _f4(levels)
    for g in range(scales.size):
        first = g * GROUP
        scale_bits[0] = _i4(scales[g]) << 15
        s = scale[0]
        for i in range(first, first + GROUP):
            y = _f4(_i4(codes[i])) / top
            if fourth:
                y = y * y
            x = y * s
            out[i] = x * x


def _both(length: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """The same memory as fp32 and as its bits."""
    memory = np.empty(length, np.float32)
    return memory, memory.view(np.int32)


def _whole(tensor: torch.Tensor, length: int) -> np.ndarray:  # type: ignore[type-arg]
    return tensor[:length].numpy()  # type: ignore[no-any-return]


def _rest(parts: Parts, groups: int) -> Parts:
    return {"codes": parts["codes"][groups * GROUP :], "scales": parts["scales"][groups:]}


def encode_signed(x: torch.Tensor, out: Parts, levels: int) -> None:
    """As ``reference.encode_signed``, of any length."""
    x = x.float()
    groups = x.numel() // GROUP
    flat = _whole(x, groups * GROUP)
    codes, scales = _whole(out["codes"], groups * GROUP), _whole(out["scales"], groups)
    if not _encode_signed(flat, flat.view(np.int32), codes, scales, *_both(1), levels) < reference.INFINITE_SCALE:
        raise RefusedError(reference.REFUSAL_SIGNED)
    if x.numel() % GROUP:
        reference.encode_signed(x[groups * GROUP :], _rest(out, groups), levels)


def encode_unsigned(v: torch.Tensor, out: Parts, levels: int, fourth_root: bool) -> None:
    """As ``reference.encode_unsigned``, of any length."""
    v = v.float()
    groups = v.numel() // GROUP
    flat = _whole(v, groups * GROUP)
    codes, scales = _whole(out["codes"], groups * GROUP), _whole(out["scales"], groups)
    wrong, overflow = _encode_unsigned(
        flat, flat.view(np.int32), codes, scales, *_both(1), *_both(GROUP), levels, fourth_root
    )
    if wrong or overflow:
        raise RefusedError(reference.REFUSAL_ROOT if wrong else reference.REFUSAL_UNSIGNED)
    if v.numel() % GROUP:
        reference.encode_unsigned(v[groups * GROUP :], _rest(out, groups), levels, fourth_root)


def decode_signed(parts: Parts, out: torch.Tensor, levels: int) -> None:
    """As ``reference.decode_signed``, of any length."""
    flat = out if out.dtype is torch.float32 else torch.empty(out.numel())
    groups = out.numel() // GROUP
    codes, scales = _whole(parts["codes"], groups * GROUP), _whole(parts["scales"], groups)
    _decode_signed(codes, scales, *_both(1), _whole(flat, groups * GROUP), levels)
    if out.numel() % GROUP:
        reference.decode_signed(_rest(parts, groups), flat[groups * GROUP :], levels)
    if flat is not out:
        out.copy_(flat)


def decode_unsigned(parts: Parts, out: torch.Tensor, levels: int, fourth_root: bool) -> None:
    """As ``reference.decode_unsigned``, of any length."""
    flat = out if out.dtype is torch.float32 else torch.empty(out.numel())
    groups = out.numel() // GROUP
    codes, scales = _whole(parts["codes"], groups * GROUP), _whole(parts["scales"], groups)
    _decode_unsigned(codes, scales, *_both(1), _whole(flat, groups * GROUP), levels, fourth_root)
    if out.numel() % GROUP:
        reference.decode_unsigned(_rest(parts, groups), flat[groups * GROUP :], levels, fourth_root)
    if flat is not out:
        out.copy_(flat)
