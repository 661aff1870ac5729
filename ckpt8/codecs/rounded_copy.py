"""``reference/1``: the bf16 copy of fp32 master weights, of which nothing is stored but where its masters are.

Mixed-precision training keeps every weight twice: fp32 in the optimizer, and rounded to bf16 in the model. The copy
follows from the masters of the same container, whether these are kept exactly or as split24: that holds the rounded
weight as it is, and a value decoded from it rounds to the same. Rounding is to nearest, ties to even:

    hi = ((bits + 0x7fff + ((bits >> 16) & 1)) mod 2^32) >> 16      of the fp32 bits, the sign among them

What this makes of NaN need not be NaN: a copy that differs from it is not stored as a reference.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from ckpt8.core import backend as backends
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, Parts, PartSpec, TensorSpec

if TYPE_CHECKING:
    import torch

ROUNDED = "rounded"
"""The one part that ``decode`` wants: the rounded masters, bf16. It is computed, never stored."""

_LARGEST = 1 << 62


class Run(NamedTuple):
    """``length`` elements of the copy, rounded from ``storage`` from element ``start`` on.

    Without a storage they all have the bf16 bits ``start``: padding.
    """

    storage: int | None
    start: int
    length: int


def _run(value: Any) -> Run:
    match value:
        case [storage, start, length] if type(start) is type(length) is int and start >= 0 and 0 < length < _LARGEST:
            limit = _LARGEST if type(storage) is int and storage >= 0 else 1 << 16 if storage is None else 0
            if start < limit:
                return Run(storage, start, length)
    raise UsageError("reference: runs must be lists of storage, start and length")


@dataclass(frozen=True)
class Reference:
    """``runs`` give the elements of the copy one after the other; storages by their index in the container."""

    id: ClassVar[str] = "reference/1"
    measured_as: ClassVar[Literal["weight", "moment"] | None] = None
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

    def encode(self, x: torch.Tensor, *, backend: backends.Backend | None = None) -> Parts:  # noqa: ARG002
        """No parts. That ``x`` is what the masters give is checked before, see ``encoder.check_copy``."""
        backends.resolve(backend)
        return {}

    def decode(
        self,
        parts: Parts,
        spec: TensorSpec,  # noqa: ARG002
        *,
        out: torch.Tensor | None = None,
        backend: backends.Backend | None = None,
    ) -> torch.Tensor:
        """The copy, from the part ``rounded``, which whoever reads the masters has put together."""
        backends.resolve(backend)
        return parts[ROUNDED].clone() if out is None else out.copy_(parts[ROUNDED])

    @property
    def numel(self) -> int:
        """Elements of the copy."""
        return self._starts[-1]

    @cached_property
    def _starts(self) -> list[int]:
        """The first element of every run, and behind them the number of all."""
        return list(accumulate((run.length for run in self.runs), initial=0))

    def cut(self, first: int, count: int) -> Iterator[Run]:
        """The runs of ``count`` elements from ``first`` on."""
        at = bisect_right(self._starts, first) - 1
        while count:
            run, skipped = self.runs[at], first - self._starts[at]
            length = min(count, run.length - skipped)
            yield Run(run.storage, run.start if run.storage is None else run.start + skipped, length)
            at, first, count = at + 1, first + length, count - length


def round_masters(x: torch.Tensor) -> torch.Tensor:
    """Flat fp32 masters rounded to bf16, on any device."""
    import torch

    from ckpt8.codecs.split24.reference import upper_half

    return upper_half(x.view(torch.int32)).view(torch.bfloat16)
