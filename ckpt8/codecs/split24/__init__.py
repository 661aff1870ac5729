"""``split24/1``: an fp32 weight as bf16 plus an 8-bit residual, 24-bit master weights.

On disk three byte planes: ``exponent`` (the bf16 exponent), ``mantissa`` (sign on top of 7 mantissa bits) and
``rho``. With R = 127 the error is at most 129 fp32 steps, 1.54e-5 relative for |w| >= 2^-126; a value that is exactly
bf16 comes back exactly. ``reference`` has the arithmetic, ``numba`` and ``triton`` the same for large tensors and CUDA
devices.

``split32/1`` has a 16-bit remainder in place of the residual, ``residual`` int16, and is exact bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ckpt8.codecs.base import Codec, CodeRange, Direction, StateKey
from ckpt8.core.backend import Backend
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, PartSpec, TensorSpec

if TYPE_CHECKING:
    from ckpt8.core.arrays import Array, Arrays

REFUSAL = "holds NaN, Inf or a value outside the range of bf16"

FIRST_OVERFLOW = 0x7F7F8000
"""The smallest fp32 magnitude whose bf16 rounding is infinite; Inf and NaN lie above it."""


class SplitWeight(Codec):
    """Base of codecs that split an fp32 weight into bf16, in two byte planes, and a residual."""

    __slots__ = ()

    keeps_masters = True
    by_element = True
    residual: ClassVar[tuple[str, DType]]

    def accepts(self, spec: TensorSpec) -> bool:
        """Tensors of fp32."""
        return spec.dtype is DType.FLOAT32

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """``exponent`` and ``mantissa`` uint8, and the residual; one element each per weight."""
        name, dtype = self.residual
        byte = PartSpec(DType.UINT8, spec.numel)
        return {"exponent": byte, "mantissa": byte, name: PartSpec(dtype, spec.numel)}

    def trains(self, key: StateKey) -> bool:
        """Master weights."""
        return key == "master"


@dataclass(frozen=True, slots=True)
class Split24(SplitWeight):
    """Split master weights. ``R`` is the number of residual levels on each side of zero: odd, 1 to 127."""

    id = "split24/1"
    measured_as = "weight"
    has_kernels = True
    upper_parts = ("exponent", "mantissa")
    residual = ("rho", DType.INT8)

    R: int = 127

    def __post_init__(self) -> None:
        if not (type(self.R) is int and 1 <= self.R <= 127 and self.R % 2):
            raise UsageError(f"split24: R must be an odd integer from 1 to 127, not {self.R!r}")

    def kernel(self, direction: Direction, backend: Backend) -> Callable[..., None]:
        """Refuses NaN, Inf and values outside the range of bf16."""
        return partial(self._function(direction, backend), levels=self.R)

    @property
    def codes(self) -> CodeRange:
        """The residuals."""
        return CodeRange("rho", -self.R, self.R)

    def upper(self, parts: Arrays) -> Array:
        """``hi``, which the two planes hold."""
        mantissa, exponent = (parts[name].astype("uint16") for name in ("mantissa", "exponent"))
        joined: Array = (mantissa & 0x7F) | (mantissa & 0x80) << 8 | exponent << 7
        return joined


@dataclass(frozen=True, slots=True)
class Split32(SplitWeight):
    """Exact split master weights, without parameters."""

    id = "split32/1"
    residual = ("residual", DType.INT16)

    def kernel(self, direction: Direction, backend: Backend) -> Callable[..., None]:
        """``encode_exact`` or ``decode_exact``; it refuses the same values as ``Split24``."""
        return self._function(f"{direction}_exact", backend)
