"""``split32/1``: an fp32 weight as bf16 plus a 16-bit remainder, bit for bit.

On disk three planes: ``exponent`` (the bf16 exponent) and ``mantissa`` (sign on top of 7 mantissa bits), one byte
each, and ``residual``, int16. It refuses the same values as split24. ``reference`` has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt8.codecs.base import Codec, StateKey
from ckpt8.core.tensors import DType, PartSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class Split32(Codec):
    """Exact split master weights, without parameters."""

    id = "split32/1"
    keeps_masters = True
    residual = ("residual", DType.INT16)

    def accepts(self, spec: TensorSpec) -> bool:
        """Tensors of fp32."""
        return spec.dtype is DType.FLOAT32

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """``exponent`` and ``mantissa`` uint8, ``residual`` int16; one element each per weight."""
        n = spec.numel
        return {
            "exponent": PartSpec(DType.UINT8, n),
            "mantissa": PartSpec(DType.UINT8, n),
            "residual": PartSpec(DType.INT16, n),
        }

    def trains(self, key: StateKey) -> bool:
        """Master weights."""
        return key == "master"
