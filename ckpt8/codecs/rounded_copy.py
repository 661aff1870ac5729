"""The bf16 or fp16 copy of fp32 master weights, stored as where its masters are.

    reference/1     bf16 copies of masters that are kept so well that they round to the same bf16
    reference16/1   fp16 copies of such masters
    reference/2     bf16 and fp16 copies of masters on a lattice: as many bits as the decoded masters have

Mixed-precision training keeps every weight twice: fp32 in the optimizer, and rounded to bf16 in the model. The copy
follows from the masters of the same container, kept exactly or as split24: a value decoded from split24 rounds to the
same bf16 as before. Rounding is to nearest, ties to even:

    hi = ((bits + 0x7fff + ((bits >> 16) & 1)) mod 2^32) >> 16      of the fp32 bits, the sign among them

This formula need not give NaN for NaN. A copy that differs from the formula is not stored as a reference.

fp16 has three more bits of mantissa than bf16, and split24 does not keep them exactly. So ``reference16/1`` also stores
one part, ``delta``: what the bits of the copy, as integers, have more than those of ``hi`` rounded to fp16. Rounding is
to nearest, ties to even, with subnormals; what is too large becomes Inf, and NaN has the bits ``sign << 15 | 0x7e00``.
The differences are few and small: four units for rounding to bf16, eight where the exponent changes. They take 0.4
bytes an element, where the copy takes 1.7. Larger ones are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt8.codecs.base import NO_COMPANIONS, Codec, Companions, Copied, Run
from ckpt8.core import backend as backends
from ckpt8.core.errors import RefusedError, UsageError
from ckpt8.core.tensors import DType, Parts, PartSpec, TensorSpec, dtype_of

if TYPE_CHECKING:
    import torch

    from ckpt8.core.arrays import Array, Arrays

ROUNDED = "rounded"
"""The one part that ``decode`` needs: the rounded masters. The reader computes it; it is never stored."""

DELTA = "delta"
"""The part of an fp16 copy: its bits less those of the rounded master."""

_MOST = 127
_SIGN, _NAN = -(1 << 15), 0x7E00
_LARGEST = 1 << 62
_SHORT = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}


def round_to(dtype: DType, x: torch.Tensor) -> torch.Tensor:
    """fp32 elements rounded to bf16 or fp16: to nearest, ties to even, as ``reference/2`` says it of each."""
    from ckpt8.codecs.split24.reference import round_masters

    if dtype is DType.BFLOAT16:
        return round_masters(x)
    sign = (x.view(DType.INT32.torch) >> 16).to(DType.INT16.torch) & _SIGN
    return _bits(x.to(DType.FLOAT16.torch)).where(~x.isnan(), sign | _NAN).view(DType.FLOAT16.torch)


def _run(value: Any) -> Run:
    match value:
        case [storage, start, length] if type(start) is type(length) is int and start >= 0 and 0 < length < _LARGEST:
            limit = _LARGEST if type(storage) is int and storage >= 0 else 1 << 16 if storage is None else 0
            if start < limit:
                return Run(storage, start, length)
    raise UsageError("reference: runs must be lists of storage, start and length")


@dataclass(frozen=True)
class Reference(Codec, Copied):
    """``runs`` give the elements of the copy one after the other; storages by their index in the container."""

    id = "reference/1"
    runs: tuple[Run, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.runs, (list, tuple)):
            raise UsageError("reference: runs must be a list")
        object.__setattr__(self, "runs", tuple(_run(run) for run in self.runs))

    def accepts(self, spec: TensorSpec) -> bool:
        """Tensors of bf16."""
        return spec.dtype is DType.BFLOAT16

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:  # noqa: ARG002
        """Nothing is stored."""
        return {}

    def encode(
        self,
        x: torch.Tensor,
        *,
        backend: backends.Backend | None = None,
        first: int = 0,  # noqa: ARG002
        companions: Companions = NO_COMPANIONS,
        inherited: Parts | None = None,  # noqa: ARG002
        out: Companions = NO_COMPANIONS,  # noqa: ARG002
    ) -> Parts:
        """What ``x`` has more than the companion ``rounded``. Raises RefusedError where the parts cannot hold that.

        Without this companion nothing is checked: the size is about the same.
        """
        backends.resolve(backend)
        return self._differences(x, companions.get(ROUNDED))

    def _differences(self, x: torch.Tensor, rounded: torch.Tensor | None) -> Parts:
        """No parts: ``x`` is, bit for bit, ``rounded`` of its own type."""
        if rounded is not None and not bool((_bits(x) == _bits(rounded)).all()):
            raise RefusedError(f"differs from its fp32 master rounded to {_SHORT[dtype_of(x.dtype)]}")
        return {}

    def encode_arrays(
        self,
        x: Array,
        spec: TensorSpec,
        *,
        backend: backends.Backend,  # noqa: ARG002
        first: int = 0,  # noqa: ARG002
        companions: Arrays = NO_COMPANIONS,
        inherited: Arrays | None = None,  # noqa: ARG002
        out: Arrays = NO_COMPANIONS,  # noqa: ARG002
    ) -> dict[str, Array]:
        """As ``encode``, with the bits of the copy and of the companion."""
        return self._array_differences(x, spec, companions.get(ROUNDED))

    def _array_differences(self, x: Array, spec: TensorSpec, rounded: Array | None) -> dict[str, Array]:
        """As ``_differences``, of bits."""
        if rounded is not None and bool((x != rounded).any()):
            raise RefusedError(f"differs from its fp32 master rounded to {_SHORT[spec.dtype]}")
        return {}

    def decode(
        self,
        parts: Parts,
        spec: TensorSpec,  # noqa: ARG002
        *,
        out: torch.Tensor | None = None,
        backend: backends.Backend | None = None,
        first: int = 0,  # noqa: ARG002
        companions: Companions = NO_COMPANIONS,  # noqa: ARG002
    ) -> torch.Tensor:
        """The copy, from the part ``rounded``, which the reader has put together from the masters."""
        backends.resolve(backend)
        return parts[ROUNDED].clone() if out is None else out.copy_(parts[ROUNDED])

    def decode_arrays(
        self,
        parts: Arrays,
        spec: TensorSpec,  # noqa: ARG002
        out: Array,
        *,
        backend: backends.Backend,  # noqa: ARG002
        first: int = 0,  # noqa: ARG002
        companions: Arrays = NO_COMPANIONS,  # noqa: ARG002
    ) -> None:
        """Fill ``out`` with the copy."""
        out[:] = self._copy_of(parts)

    def _copy_of(self, parts: Arrays) -> Array:
        """The bits of the copy: the part ``rounded``."""
        return parts[ROUNDED]

    @property
    def copied(self) -> Reference:
        """Itself, with its runs."""
        return self


@dataclass(frozen=True)
class HalfReference(Reference):
    """The fp16 copy: as ``Reference``, with the difference that bf16 leaves."""

    id = "reference16/1"

    def accepts(self, spec: TensorSpec) -> bool:
        """Tensors of fp16."""
        return spec.dtype is DType.FLOAT16

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """One difference for every element."""
        return {DELTA: PartSpec(DType.INT8, spec.numel)}

    def _differences(self, x: torch.Tensor, rounded: torch.Tensor | None) -> Parts:
        """The differences between ``x`` and ``rounded``, bf16; without it, ``x`` itself is rounded."""
        base = _half_bits(x.to(DType.BFLOAT16.torch) if rounded is None else rounded)
        delta = _bits(x).to(DType.INT32.torch) - base.to(DType.INT32.torch)
        if bool((delta.abs() > _MOST).any()):
            raise RefusedError("differs from its fp32 master rounded to fp16")
        return {DELTA: delta.to(DType.INT8.torch)}

    def _array_differences(self, x: Array, spec: TensorSpec, rounded: Array | None) -> dict[str, Array]:
        """As ``_differences``, of bits."""
        from ckpt8.core import arrays

        if rounded is None:
            rounded = arrays.rounded(arrays.floats(x, spec.dtype), DType.BFLOAT16)
        base = arrays.rounded(arrays.widened(rounded), DType.FLOAT16)
        # As int16: the sign of either is its top bit.
        delta = x.view("i2").astype("i4") - base.view("i2").astype("i4")
        if (abs(delta) > _MOST).any():
            raise RefusedError("differs from its fp32 master rounded to fp16")
        return {DELTA: delta.astype("i1")}

    def decode(
        self,
        parts: Parts,
        spec: TensorSpec,
        *,
        out: torch.Tensor | None = None,
        backend: backends.Backend | None = None,
        first: int = 0,  # noqa: ARG002
        companions: Companions = NO_COMPANIONS,  # noqa: ARG002
    ) -> torch.Tensor:
        """The copy, from the differences and the part ``rounded``."""
        backends.resolve(backend)
        # int16 wraps around, as the format says.
        copy = (_half_bits(parts[ROUNDED]) + parts[DELTA].to(DType.INT16.torch)).view(spec.dtype.torch)
        return copy if out is None else out.copy_(copy)

    def _copy_of(self, parts: Arrays) -> Array:
        """The bits of the copy: the part ``rounded`` in fp16, and the differences to that."""
        from ckpt8.core import arrays

        # uint16 wraps around, as the format says.
        bits = arrays.rounded(arrays.widened(parts[ROUNDED]), DType.FLOAT16)
        bits += parts[DELTA].astype(bits.dtype)
        return bits


@dataclass(frozen=True)
class LatticeReference(Reference):
    """The copy of masters on a lattice: the decoded masters rounded to its type, not the copy as it was."""

    id = "reference/2"
    is_exact = False

    def accepts(self, spec: TensorSpec) -> bool:
        """Tensors of bf16 and fp16."""
        return spec.dtype in (DType.BFLOAT16, DType.FLOAT16)

    def rounded_type(self, copy: DType) -> DType:
        """The type of the copy itself."""
        return copy

    @property
    def is_lossy(self) -> bool:
        """True: it follows its masters, whatever these lose. Nothing is measured of it."""
        return True


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of flat 16-bit floats, int16."""
    return x.reshape(-1).view(DType.INT16.torch)


def _half_bits(rounded: torch.Tensor) -> torch.Tensor:
    """The bits, int16, of flat bf16 elements rounded to fp16, padding as it is in bf16."""
    bits = _bits(rounded.to(DType.FLOAT32.torch).to(DType.FLOAT16.torch))
    # Processors differ in the bits of a NaN.
    return bits.where(rounded.isfinite() | rounded.isinf(), (_bits(rounded) & _SIGN) | _NAN)
