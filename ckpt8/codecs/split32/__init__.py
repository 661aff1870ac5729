"""``split32/1``: an fp32 weight as bf16 plus a 16-bit remainder, bit for bit.

On disk three planes: ``exponent`` (the bf16 exponent) and ``mantissa`` (sign on top of 7 mantissa bits), one byte
each, and ``residual``, int16. It refuses the same values as split24. ``reference`` has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt8.codecs.split24 import SplitWeight
from ckpt8.core.tensors import DType


@dataclass(frozen=True, slots=True)
class Split32(SplitWeight):
    """Exact split master weights, without parameters."""

    id = "split32/1"
    residual = ("residual", DType.INT16)
