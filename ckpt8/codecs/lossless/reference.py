"""Byte planes in plain torch.

A float of 16 to 64 bits is rotated left by one bit, so that the sign moves from the top to the bottom, and cut into
byte planes, most significant first. For bf16 and fp32 the first plane is then exactly the exponent, the one plane
that entropy coding shrinks. Everything else is kept as raw bytes.

    r = (bits << 1) | (bits >> (width - 1))        plane k = byte (itemsize - 1 - k) of r
"""

from __future__ import annotations

import torch

from ckpt8.codecs.lossless import RAW_PART
from ckpt8.core.tensors import Parts


def _integers(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def encode(x: torch.Tensor, parts: Parts) -> None:
    """Fill ``plane0``, ``plane1``, ... or ``bytes`` with the elements of a flat tile."""
    if RAW_PART in parts:
        parts[RAW_PART].copy_(x.view(torch.uint8))
        return
    size = x.element_size()
    bits = _integers(x)
    rotated = (bits << 1).bitwise_or_((bits >> (8 * size - 1)).bitwise_and_(1))
    columns = rotated.view(torch.uint8).view(-1, size)
    for k in range(size):
        parts[f"plane{k}"].copy_(columns[:, size - 1 - k])


def decode(parts: Parts, out: torch.Tensor) -> None:
    """Fill the flat tile ``out`` from its planes or bytes."""
    if RAW_PART in parts:
        out.view(torch.uint8).copy_(parts[RAW_PART])
        return
    size = out.element_size()
    bits = _integers(out)
    columns = bits.view(torch.uint8).view(-1, size)
    for k in range(size):
        columns[:, size - 1 - k] = parts[f"plane{k}"]
    top = (bits & 1).bitwise_left_shift_(8 * size - 1)
    mask = (1 << (8 * size - 1)) - 1
    bits.bitwise_right_shift_(1).bitwise_and_(mask).bitwise_or_(top)
