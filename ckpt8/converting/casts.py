"""Computed storages: what they share, and tensors of another element type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt8.checkpoint.sources.composite import Composite, cut, put
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Cast:
    """The elements of ``ref`` rounded to ``dtype``: to nearest, halves to even; float64 by way of float32.

    ``name`` is for messages.
    """

    source: Composite
    name: str
    ref: TensorRef
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Size of the result."""
        return self.ref.numel * self.dtype.itemsize

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``. Raises InputError, and UsageError where a finite value would become infinite in fp16."""
        for start, stop, place in cut(offset, buffer, self.dtype.itemsize):
            values = self.source.elements(self.ref, start, stop)
            found = values.to(self.dtype.torch)
            if self.dtype is DType.FLOAT16 and bool((found.isinf() & values.isfinite()).any()):
                largest = float(values[values.isfinite()].abs().max())
                raise UsageError(
                    f"{self.source.label}: {self.name}: {largest:.6g} is beyond the range of float16; use bfloat16"
                )
            put(found, place)


class Caster:
    """Gives every tensor in another element type once, so that tensors that were one stay one."""

    def __init__(self, source: Composite) -> None:
        self._source = source
        self._made: dict[tuple[object, ...], TensorRef] = {}

    def cast(self, name: str, ref: TensorRef, dtype: DType) -> TensorRef:
        """``ref`` in ``dtype``, contiguous. Raises InputError for a tensor that was expanded."""
        if ref.dtype is dtype:
            return ref
        identity = (ref.key, ref.offset, ref.shape, ref.stride, ref.neg, ref.dtype, dtype)
        if identity not in self._made:
            self._source.check_extent(name, ref)
            self._made[identity] = self._source.tensor(Cast(self._source, name, ref, dtype), dtype, ref.shape)
        return self._made[identity]
