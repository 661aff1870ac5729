"""``rclog/1``: second moments in even steps of a pseudo-logarithm, less what their row and column have in common.

The bits of a positive fp32 number, as an integer, are nearly its logarithm: 2^23 for each octave. A row factor r_i and
a column factor c_j, integers in units of 2^20, take away what second moments of one row and one column share:

    code     q = floordiv(bits - p + S / 2, S)                  p = (r_i + c_j) 2^20, integers throughout
    decode   bits' = clamp(q S + p, 1, 0x7f7fffff)              |bits' - bits| <= S / 2; v = 0 has a code of its own

For bf16 the clamp is to its smallest and largest number, and half a unit of it is added to the bound: rounding makes
neither zero nor infinity of a second moment.

Factors belong to a chunk: r_i is the mean of the bits over the elements of the row in the chunk that are not zero, c_j
that of bits - r_i 2^20 over a column, both in units of 2^20, rounded to nearest, halves up. Without ``columns`` the c_j
are zero and not stored.

``reference`` defines the arithmetic in torch. ``numba`` (CPU) and ``triton`` (CUDA) compute the same bits faster.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ckpt8.codecs.base import Codec, Direction, X
from ckpt8.core.backend import Backend
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, PartSpec, Role, TensorSpec

OCTAVE = 1 << 23
SMALLEST_STEP, LARGEST_STEP = 1 << 14, 7 * OCTAVE // 5
"""The values that S may have: 1.4 octaves at most."""

FLAT_ROW = 64
"""The row length of tensors of one dimension, and of storages of several tensors."""

MOST_COLUMNS = 1 << 13
"""Longer rows are stored without column factors: they would cost more than they save."""

UNIT = 20
"""Factors are in units of 2 to this."""

REFUSAL = "holds NaN, Inf or a negative second moment"
STRANGE_FACTORS = "its factors are not those of second moments"

RANGES = {True: (1, 0x7F7FFFFF), False: (0x10000, 0x7F7F0000)}
"""The smallest and the largest bits that decode, of fp32 and of bf16."""

ABOVE = 1 << 12
"""Added to factors and taken away again: integer division truncates on some devices."""


@dataclass(frozen=True, slots=True)
class RowColumnLog(Codec):
    """Second moments with a step ``S`` (2^23 is an octave of v), rows of ``C`` elements, and maybe column factors.

    Other values raise UsageError: S from 2^14 to 1.4 * 2^23, C from 1 to 2^40, columns only for C up to 2^13.
    """

    id = "rclog/1"
    measured_as = "moment"
    has_kernels = True
    counts_elements = True
    by_chunk = True
    inherited = ("rows", "columns")

    S: int = OCTAVE // 4
    C: int = FLAT_ROW
    columns: bool = False

    def __post_init__(self) -> None:
        if not (type(self.S) is int and SMALLEST_STEP <= self.S <= LARGEST_STEP):
            raise UsageError(f"rclog: S must be an integer from {SMALLEST_STEP} to {LARGEST_STEP}, not {self.S!r}")
        if not (type(self.C) is int and 1 <= self.C <= 1 << 40):
            raise UsageError(f"rclog: C must be an integer from 1 to 2^40, not {self.C!r}")
        if type(self.columns) is not bool or (self.columns and self.C > MOST_COLUMNS):
            raise UsageError(f"rclog: columns must be True or False, and False for C above {MOST_COLUMNS}")

    def accepts(self, spec: TensorSpec) -> bool:
        """Whether the tensor is fp32 or bf16, and a second moment."""
        return spec.dtype in (DType.FLOAT32, DType.BFLOAT16) and spec.role in (Role.MOMENT2, Role.OTHER)

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """``codes``: a symbol for every element, zigzag of q; -1 for zero. ``rows`` and ``columns``: int16 factors.

        There is a row factor for as many rows as so many elements can touch, the last one zero where they touch fewer.
        """
        n = spec.numel
        parts = {"codes": PartSpec(DType.INT32, n), "rows": PartSpec(DType.INT16, (n - 1) // self.C + 2 if n else 0)}
        if self.columns:
            parts["columns"] = PartSpec(DType.INT16, self.C if n else 0)
        return parts

    def tile(self, parts: Mapping[str, X], dtype: DType, first: int, run: slice) -> dict[str, X]:  # noqa: ARG002
        """The parts of a run: its codes, the factors of rows from the one that it begins in, and those of columns."""
        rows = parts["rows"][(first % self.C + run.start) // self.C :]
        return {**parts, "codes": parts["codes"][run], "rows": rows}

    def continued(self, base: Codec) -> Codec | None:
        """``base`` where its S is at most half an octave away, and its factors are of the same rows and columns."""
        if not isinstance(base, RowColumnLog) or (base.C, base.columns) != (self.C, self.columns):
            return None
        return base if max(base.S, self.S) ** 2 <= 2 * min(base.S, self.S) ** 2 else None

    def kernel(self, direction: Direction, backend: Backend) -> Callable[..., None]:
        """The function that encodes or decodes, see ``Codec.kernel``. Elements are those of one whole chunk.

        ``encode`` raises RefusedError for NaN, Inf and values below zero, and for given factors that no means are.
        """
        return partial(self._function(direction, backend), S=self.S, C=self.C)
