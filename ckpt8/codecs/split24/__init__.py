"""``split24/1``: an fp32 weight as bf16 plus an 8-bit residual, 24-bit master weights.

On disk three byte planes: ``exponent`` (the bf16 exponent), ``mantissa`` (sign on top of 7 mantissa bits) and
``rho``. With R = 127 the error is at most 129 fp32 steps, 1.54e-5 relative for |w| >= 2^-126; a value that is exactly
bf16 comes back exactly. The arithmetic is in ``reference``, and for CUDA devices in ``triton``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ckpt8.codecs.base import decode_tiles, encode_tiles
from ckpt8.core import backend as backends
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, Parts, PartSpec, Role, TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Split24:
    """``R`` is the number of residual levels a side: odd, 1 to 127."""

    id: ClassVar[str] = "split24/1"
    measured_as: ClassVar[Literal["weight", "moment"] | None] = "weight"
    R: int = 127

    def __post_init__(self) -> None:
        if not (type(self.R) is int and 1 <= self.R <= 127 and self.R % 2):
            raise UsageError(f"split24: R must be an odd integer from 1 to 127, not {self.R!r}")

    def accepts(self, spec: TensorSpec) -> bool:
        """Tensors of fp32."""
        return spec.dtype is DType.FLOAT32

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """``exponent`` and ``mantissa`` uint8, ``rho`` int8; one element each per weight."""
        n = spec.numel
        return {
            "exponent": PartSpec(DType.UINT8, n),
            "mantissa": PartSpec(DType.UINT8, n),
            "rho": PartSpec(DType.INT8, n),
        }

    def encode(self, x: torch.Tensor, *, backend: backends.Backend | None = None) -> Parts:
        """Split an fp32 tensor. Raises RefusedError on NaN, Inf and values outside the range of bf16."""
        used = backends.resolve(backend, x.device, x.numel())
        spec = TensorSpec("", Role.WEIGHT, DType.FLOAT32, tuple(x.shape))
        return encode_tiles(self, x, spec, self._kernel("encode", used), used)

    def decode(
        self,
        parts: Parts,
        spec: TensorSpec,
        *,
        out: torch.Tensor | None = None,
        backend: backends.Backend | None = None,
    ) -> torch.Tensor:
        """The fp32 tensor, each value within the error of the layout."""
        used = backends.resolve(backend, parts["rho"].device, spec.numel)
        return decode_tiles(self, parts, spec, out, self._kernel("decode", used), used)

    def _kernel(self, direction: str, backend: backends.Backend) -> Callable[..., Any]:
        module = import_module(f"{__name__}.{'reference' if backend == 'torch' else backend}")
        return partial(getattr(module, direction), levels=self.R)
