"""``split32/1``: an fp32 weight as bf16 plus a 16-bit remainder, bit for bit.

On disk three planes: ``exponent`` (the bf16 exponent) and ``mantissa`` (sign on top of 7 mantissa bits), one byte
each, and ``residual``, int16. It refuses what split24 refuses. The arithmetic is in ``reference``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ckpt8.codecs.base import decode_tiles, encode_tiles
from ckpt8.core import backend as backends
from ckpt8.core.tensors import DType, Parts, PartSpec, Role, TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Split32:
    """Has no parameters."""

    id: ClassVar[str] = "split32/1"
    measured_as: ClassVar[Literal["weight", "moment"] | None] = None

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

    def encode(self, x: torch.Tensor, *, backend: backends.Backend | None = None) -> Parts:
        """Split an fp32 tensor. Raises RefusedError on NaN, Inf and values outside the range of bf16."""
        from ckpt8.codecs.split32 import reference

        backends.resolve(backend)
        spec = TensorSpec("", Role.WEIGHT, DType.FLOAT32, tuple(x.shape))
        return encode_tiles(self, x, spec, reference.encode)

    def decode(
        self,
        parts: Parts,
        spec: TensorSpec,
        *,
        out: torch.Tensor | None = None,
        backend: backends.Backend | None = None,
    ) -> torch.Tensor:
        """The fp32 tensor, bit for bit."""
        from ckpt8.codecs.split32 import reference

        backends.resolve(backend)
        return decode_tiles(self, parts, spec, out, reference.decode)
