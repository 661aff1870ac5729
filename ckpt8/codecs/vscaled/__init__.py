"""``vscaled/1``: first moments in steps of their decoded second moments, with a bound on the error of every update.

With v' the decoded second moment of the same element, v the second moment itself, and D the divisor of the rule:

    D(v)     (sqrt(v) / root_bias2 + eps) * bias1              u = m / D(v) is the update per unit of learning rate
    step     s = min(k v'^(1/4), (1 - 2^-7) u_max D(v'))       where v' = 0: s = (1 - 2^-7) u_max D(0), and no dither
    code     q = the integer nearest to m / s + t - 1/2 for which u' = m' / D(v') is within (1 - 2^-8) u_max / 2 of u
    decode   m' = (q + (1/2 - t)) * s                          where v' = 0: m' = q s

So |u' - u| <= u_max / 2 holds in fp32 for every element, and for bf16 up to the rounding of m'. Updates of 2^12 u_max
and more are refused: fp32 has too few digits for the bound. The dither t is that of ``lattice``. A step in proportion
to v^(1/4) lies between steps that are even in m and steps that are even in u.

``reference`` defines the arithmetic in torch. ``numba`` (CPU) and ``triton`` (CUDA) compute the same bits faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ckpt8.codecs.base import Codec, Direction, Factors
from ckpt8.core.backend import Backend
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, PartSpec, Role, TensorSpec

LARGEST = 2.0**100
"""The largest value of a field; 1 / LARGEST is the smallest above zero."""


def _factors(values: Sequence[Any]) -> Factors:
    if len(values) != len(Factors._fields) or not all(type(v) is int and v >= 0 for v in values) or not all(values[2:]):
        raise UsageError("vscaled: second must be a storage, or the list [rows, columns, height, width]")
    return Factors(*values)


CODES = 1 << 18
"""The smallest |q| that is refused."""

STEP_SHARE = 1 - 2.0**-7
"""The largest step of an update, in units of u_max."""

REACH = 0.5 - 2.0**-9
"""The largest error of an update that a code is chosen with, in units of u_max."""

LARGEST_UPDATE = 4096
"""The smallest update that is refused, in units of u_max."""

SMALLEST_STEP = 2.0**-126

REFUSAL = "holds NaN, Inf, or a value whose update is not defined or too large for its bound"


@dataclass(frozen=True, slots=True)
class VScaled(Codec):
    """First moments. ``second`` is the storage of the second moments, or their factors; ``salt`` is a uint32.

    ``k``, ``u_max``, ``bias1`` and ``root_bias2`` are positive, ``eps`` is not negative; all are rounded to fp32.
    Other values raise UsageError.
    """

    id = "vscaled/1"
    measured_as = "moment"
    has_kernels = True
    counts_elements = True
    compares_originals = True
    companions: ClassVar[dict[str, tuple[str, ...]]] = {"second": ("max_moment2", "moment2")}

    second: int | Factors | None = None
    k: float = 2.0**-8
    u_max: float = 1.0
    bias1: float = 1.0
    root_bias2: float = 1.0
    eps: float = 1e-8
    salt: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.second, (list, tuple)):
            object.__setattr__(self, "second", _factors(self.second))
        for name in ("k", "u_max", "bias1", "root_bias2", "eps"):
            value = getattr(self, name)
            least = 0.0 if name == "eps" else 1 / LARGEST
            if type(value) not in (int, float) or not least <= value <= LARGEST:
                raise UsageError(f"vscaled: {name} must be a number from {least:g} to {LARGEST:g}, not {value!r}")
        if not (type(self.salt) is int and 0 <= self.salt < 1 << 32):
            raise UsageError(f"vscaled: salt must be an integer from 0 to 2^32 - 1, not {self.salt!r}")

    def accepts(self, spec: TensorSpec) -> bool:
        """Whether the tensor is fp32 or bf16, and a first moment."""
        return spec.dtype in (DType.FLOAT32, DType.BFLOAT16) and spec.role in (Role.MOMENT1, Role.OTHER)

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """``codes``: a symbol for every element, zigzag of q."""
        return {"codes": PartSpec(DType.INT32, spec.numel)}

    def kernel(self, direction: Direction, backend: Backend) -> Callable[..., None]:
        """The function that encodes or decodes, see ``Codec.kernel``. Both compute in fp32.

        ``second`` are the decoded second moments. ``encode`` also takes ``original_second``, these as they were. It
        raises RefusedError for NaN, Inf, |q| from 2^18 on, and an update that is not defined or too large.
        """
        settings = {name: float(getattr(self, name)) for name in ("k", "u_max", "bias1", "root_bias2", "eps")}
        return partial(self._function(direction, backend), **settings, salt=self.salt)
