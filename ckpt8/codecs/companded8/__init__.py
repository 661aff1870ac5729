"""``companded8/1``: optimizer moments as 8-bit codes with one 16-bit scale for every 32 elements.

8.5 bits a moment before entropy coding. A signed codec holds first moments, an unsigned one the square (or fourth)
roots of second moments, of which none that is not zero becomes zero. The arithmetic is in
``reference``, and for CUDA devices in ``triton``.
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

GROUP = 32
"""Elements that share one scale."""


@dataclass(frozen=True, slots=True)
class Companded8:
    """``signed`` for first moments, else second moments.

    ``Q`` is the largest code, 1 to 127 signed and 1 to 255 unsigned. ``p`` is the power of phi for second moments:
    1, or 0.5 for the fourth root.
    """

    id: ClassVar[str] = "companded8/1"
    measured_as: ClassVar[Literal["weight", "moment"] | None] = "moment"
    signed: bool = True
    Q: int = 127
    p: float = 1

    def __post_init__(self) -> None:
        if type(self.signed) is not bool:
            raise UsageError(f"companded8: signed must be True or False, not {self.signed!r}")
        top = 127 if self.signed else 255
        if not (type(self.Q) is int and 1 <= self.Q <= top):
            raise UsageError(f"companded8: Q must be an integer from 1 to {top}, not {self.Q!r}")
        if type(self.p) is bool or self.p not in ((1,) if self.signed else (1, 0.5)):
            raise UsageError(f"companded8: p must be 1, or 0.5 for second moments, not {self.p!r}")

    def accepts(self, spec: TensorSpec) -> bool:
        """Tensors of fp32 and bf16; the roles of moments each with their own kind."""
        wrong_kind = {Role.MOMENT1: not self.signed, Role.MOMENT2: self.signed}
        return spec.dtype in (DType.FLOAT32, DType.BFLOAT16) and not wrong_kind.get(spec.role, False)

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """``codes`` int8 or uint8, one per element; ``scales`` uint16, one per group of 32."""
        return {
            "codes": PartSpec(DType.INT8 if self.signed else DType.UINT8, spec.numel),
            "scales": PartSpec(DType.UINT16, -(-spec.numel // GROUP)),
        }

    def encode(self, x: torch.Tensor, *, backend: backends.Backend | None = None) -> Parts:
        """Compand an fp32 or bf16 tensor. Raises RefusedError on NaN, Inf, a negative second moment, overflow."""
        used = backends.resolve(backend, x.device, x.numel())
        role = Role.MOMENT1 if self.signed else Role.MOMENT2
        spec = TensorSpec("", role, DType.from_label(str(x.dtype)), tuple(x.shape))
        return encode_tiles(self, x, spec, self._kernel("encode", used), used)

    def decode(
        self,
        parts: Parts,
        spec: TensorSpec,
        *,
        out: torch.Tensor | None = None,
        backend: backends.Backend | None = None,
    ) -> torch.Tensor:
        """The moments, computed in fp32 and rounded to ``spec.dtype`` last."""
        used = backends.resolve(backend, parts["codes"].device, spec.numel)
        return decode_tiles(self, parts, spec, out, self._kernel("decode", used), used)

    def _kernel(self, direction: str, backend: backends.Backend) -> Callable[..., Any]:
        module = import_module(f"{__name__}.{'reference' if backend == 'torch' else backend}")
        if self.signed:
            return partial(getattr(module, f"{direction}_signed"), levels=self.Q)
        return partial(getattr(module, f"{direction}_unsigned"), levels=self.Q, fourth_root=self.p != 1)
