"""``companded8/1``: optimizer moments as 8-bit codes with one 16-bit scale for every 32 elements.

The 32 values x of a group share a scale s, the largest magnitude among them. Each value becomes a code:

    code = round(Q * phi(x / s)), from -Q (signed) or 0 (unsigned) to Q

phi compands: it gives small values, which are most, more codes than even steps would. The signed codec stores first
moments with phi(n) = 2n / (1 + |n|). The unsigned one stores the square roots of second moments with phi(n) = n^p; a
second moment above zero never decodes to zero. A scale is a float without a sign, of 8 exponent and 8 mantissa bits,
kept as uint16. An element takes 8 + 16/32 = 8.5 bits, before entropy coding.

``reference`` defines the arithmetic in torch. ``numba`` (CPU) and ``triton`` (CUDA) compute the same bits faster.
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
"""So many consecutive elements share one scale."""

INFINITE_SCALE = 0xFF00

QUIET_NAN = 0x7FC00000

REFUSAL_SIGNED = "holds NaN, Inf or a value whose scale overflows"

REFUSAL_ROOT = "holds NaN or a negative second moment"

REFUSAL_UNSIGNED = "holds Inf or a second moment whose decoded maximum overflows"


@dataclass(frozen=True, slots=True)
class Companded8(Codec):
    """Companded moments: ``signed`` for first moments, unsigned for second moments.

    ``Q`` is the largest code: from 1 to 127 if signed, from 1 to 255 if unsigned. ``p`` is the exponent of phi(n) = n^p
    for second moments: codes are even steps of their square roots with 1, of their fourth roots with 0.5. Other values
    raise UsageError.
    """

    id = "companded8/1"
    measured_as = "moment"
    has_kernels = True

    signed: bool = True
    Q: int = 127
    p: float = 1

    def __post_init__(self) -> None:
        # By type(), since True == 1: the fields are stored as they are, and a bool is no number in JSON.
        if type(self.signed) is not bool:
            raise UsageError(f"companded8: signed must be True or False, not {self.signed!r}")
        top = 127 if self.signed else 255
        if not (type(self.Q) is int and 1 <= self.Q <= top):
            raise UsageError(f"companded8: Q must be an integer from 1 to {top}, not {self.Q!r}")
        if type(self.p) is bool or self.p not in ((1,) if self.signed else (1, 0.5)):
            allowed = "1 for first moments (signed)" if self.signed else "1 or 0.5 for second moments (unsigned)"
            raise UsageError(f"companded8: p must be {allowed}, not {self.p!r}")

    def accepts(self, spec: TensorSpec) -> bool:
        """Whether the tensor is fp32 or bf16. ``signed`` must also match the role of a moment."""
        wrong_sign = {Role.MOMENT1: not self.signed, Role.MOMENT2: self.signed}
        return spec.dtype in (DType.FLOAT32, DType.BFLOAT16) and not wrong_sign.get(spec.role, False)

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """``codes``, int8 (signed) or uint8, one per element; ``scales``, uint16, one per group of 32."""
        return {
            "codes": PartSpec(DType.INT8 if self.signed else DType.UINT8, spec.numel),
            "scales": PartSpec(DType.UINT16, -(-spec.numel // GROUP)),
        }

    def kernel(self, direction: Direction, backend: Backend) -> Callable[..., None]:
        """The function that encodes or decodes, see ``Codec.kernel``. Both compute in fp32.

        ``encode`` raises RefusedError for NaN, Inf, a negative second moment, and a group whose scale or decoded
        maximum overflows.
        """
        function = self._function(direction, backend)
        return partial(function, signed=self.signed, levels=self.Q, fourth_root=self.p != 1)

    @property
    def codes(self) -> CodeRange:
        """The range of the part ``codes``: from -Q or 0 to Q."""
        return CodeRange("codes", -self.Q if self.signed else 0, self.Q)

    @property
    def stores_roots(self) -> bool:
        """Whether the codes stand for square roots: true for second moments."""
        return not self.signed

    @classmethod
    def defaults_for(cls, role: Role) -> dict[str, Any]:
        """For second moments an unsigned codec with all of its codes; else nothing differs."""
        return {"signed": False, "Q": 255} if role is Role.MOMENT2 else {}

    def trains(self, key: StateKey) -> bool:
        """Whether a packed optimizer can keep its ``moment1`` (signed) or ``moment2`` (unsigned) with this codec."""
        return key == ("moment1" if self.signed else "moment2")

    def group_scales(self, parts: Parts) -> torch.Tensor:
        """The scales as an fp32 tensor, one per group."""
        scales: torch.Tensor = self._function("decode_scales", "torch")(parts["scales"])
        return scales
