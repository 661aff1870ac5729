"""``companded8/1``: optimizer moments as 8-bit codes with one 16-bit scale for every 32 elements.

8.5 bits a moment before entropy coding. The signed codec holds first moments, the unsigned one the square (or fourth)
roots of second moments; a second moment above zero never becomes zero. ``reference`` has the arithmetic, ``numba`` and
``triton`` the same for large tensors and CUDA devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt8.codecs.base import Codec, CodeRange, Direction, StateKey
from ckpt8.core.backend import Backend
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, Parts, PartSpec, Role, TensorSpec

if TYPE_CHECKING:
    import torch

GROUP = 32
"""Elements that share one scale."""


@dataclass(frozen=True, slots=True)
class Companded8(Codec):
    """Companded moments: ``signed`` for first moments, unsigned for second moments.

    ``Q`` is the largest code, 1 to 127 signed and 1 to 255 unsigned. ``p`` is the power of phi for second moments:
    1, or 0.5 for the fourth root.
    """

    id = "companded8/1"
    measured_as = "moment"
    measured_in_one_pass = True
    has_kernels = True

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

    def kernel(self, direction: Direction, backend: Backend) -> Callable[..., None]:
        """Computes in fp32. Refuses NaN, Inf, a negative second moment and a scale or maximum that overflows."""
        function = self._function(direction, backend)
        return partial(function, signed=self.signed, levels=self.Q, fourth_root=self.p != 1)

    @property
    def codes(self) -> CodeRange:
        """One code for every element."""
        return CodeRange("codes", -self.Q if self.signed else 0, self.Q)

    @property
    def stores_roots(self) -> bool:
        """Second moments: their square roots are quantised."""
        return not self.signed

    @classmethod
    def defaults_for(cls, role: Role) -> dict[str, Any]:
        """Second moments are unsigned."""
        return {"signed": False, "Q": 255} if role is Role.MOMENT2 else {}

    def trains(self, key: StateKey) -> bool:
        """The moments of its kind."""
        return key == ("moment1" if self.signed else "moment2")

    def group_scales(self, parts: Parts) -> torch.Tensor:
        """The stored scales."""
        scales: torch.Tensor = self._function("decode_scales", "torch")(parts["scales"])
        return scales
