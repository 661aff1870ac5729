"""``lattice/1``: weights on a lattice with one step for the whole tensor, and a dither for every element.

``lattice/2``: first moments on the same lattice, of optimizers that do not divide them by second moments.

With i the index of an element in its storage and t = t(i, salt) a number from 0 to 1 that follows from it:

    code     q = floor(w / step + t)            |q| < 2^18, else the tensor is refused
    decode   w' = (q + (1/2 - t)) * step        |w - w'| <= step (1/2 + (|q| + 1) 2^-22)

The dither is subtractive: the error is uniform and does not depend on the weight. Rounding to the nearest point of a
fixed lattice would pull a restored run back to where it was, and erase its progress. So every file has another salt.

The step follows the gradients and not the weights: an error costs as much loss as its size times the root of the
second moment. One step for a tensor is as good as one for each row, and no side information. Steps are quarter octaves.
An exact zero has a code of its own, and comes back as +0.

``DitheredLattice`` is either of the two, ``Lattice`` is that of weights, and ``MomentLattice`` that of first moments.

``reference`` defines the arithmetic in torch. ``numba`` (CPU) and ``triton`` (CUDA) compute the same bits faster.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ckpt8.codecs.base import Codec, Direction
from ckpt8.core.backend import Backend
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, PartSpec, Role, TensorSpec

LOWEST_K, HIGHEST_K = -408, 400
"""Steps from 2^-102 to 2^100."""

NEAR = 2
"""The most quarter octaves between the step that is wanted and that of an earlier file, which is taken instead."""

_QUARTERS = (0x800000, 0x9837F0, 0xB504F3, 0xD744FD)
"""2^0, 2^(1/4), 2^(1/2) and 2^(3/4), rounded to fp32, times 2^23."""


def step_of(k: int) -> float:
    """The step 2^(k/4), an fp32 number."""
    return math.ldexp(_QUARTERS[k % 4], k // 4 - 23)


RESERVED = -1
"""The symbol of an exact zero."""

MULTIPLIERS = (0x9E3779B1, 0x2C1B3C6D, 0x297A2D39)
"""Those of the hash of an element's index, see ``dither``."""

CODES = 1 << 18
"""The smallest |q| that is refused."""

REFUSAL = "holds NaN, Inf or a value of 2^18 steps or more"


def modulo(number: int) -> int:
    """The ``number`` modulo 2^32, as kernels take an index in a storage."""
    return number & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DitheredLattice(Codec):
    """Elements in steps of 2^(k/4), from 2^-102 to 2^100. ``salt`` is a uint32. Other values raise UsageError."""

    has_kernels = True
    counts_elements = True
    holds: ClassVar[tuple[Role, ...]]
    """The roles of the tensors that it takes."""

    k: int = -40
    salt: int = 0

    def __post_init__(self) -> None:
        if not (type(self.k) is int and LOWEST_K <= self.k <= HIGHEST_K):
            raise UsageError(f"lattice: k must be an integer from {LOWEST_K} to {HIGHEST_K}, not {self.k!r}")
        if not (type(self.salt) is int and 0 <= self.salt < 1 << 32):
            raise UsageError(f"lattice: salt must be an integer from 0 to 2^32 - 1, not {self.salt!r}")

    def accepts(self, spec: TensorSpec) -> bool:
        """Whether the tensor is fp32 or bf16, and has one of the roles."""
        return spec.dtype in (DType.FLOAT32, DType.BFLOAT16) and spec.role in self.holds

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """``codes``: a symbol for every element, zigzag of q; -1 for an exact zero."""
        return {"codes": PartSpec(DType.INT32, spec.numel)}

    def continued(self, base: Codec) -> Codec | None:
        """``base`` where it is of the same class, and its step at most half an octave away."""
        return base if isinstance(base, type(self)) and abs(self.k - base.k) <= NEAR else None

    def counts_from(self, base: Codec) -> bool:
        """Whether ``base`` is of the same class, of any step and salt: what it decodes to lies near points of this."""
        return isinstance(base, type(self))

    def kernel(self, direction: Direction, backend: Backend) -> Callable[..., None]:
        """The function that encodes or decodes, see ``Codec.kernel``. Both compute in fp32.

        ``encode`` raises RefusedError for NaN, Inf and |q| from 2^18 on.
        """
        return partial(self._function(direction, backend), k=self.k, salt=self.salt)


@dataclass(frozen=True, slots=True)
class Lattice(DitheredLattice):
    """Weights on a lattice."""

    id = "lattice/1"
    measured_as = "lattice"
    may_be_copied = True
    holds = (Role.WEIGHT, Role.OTHER)


@dataclass(frozen=True, slots=True)
class MomentLattice(DitheredLattice):
    """First moments on a lattice."""

    id = "lattice/2"
    measured_as = "moment"
    holds = (Role.MOMENT1,)
