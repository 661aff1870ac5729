"""``reference/1``: the bf16 copy of fp32 master weights. It stores only where its masters are.

Mixed-precision training keeps every weight twice: fp32 in the optimizer, and rounded to bf16 in the model. The copy
follows from the masters of the same container, kept exactly or as split24: a value decoded from split24 rounds to the
same bf16 as before. Rounding is to nearest, ties to even:

    hi = ((bits + 0x7fff + ((bits >> 16) & 1)) mod 2^32) >> 16      of the fp32 bits, the sign among them

This formula need not give NaN for NaN. A copy that differs from the formula is not stored as a reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt8.codecs.base import NO_COMPANIONS, Codec, Companions, Copied, Run
from ckpt8.core import backend as backends
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, Parts, PartSpec, TensorSpec

if TYPE_CHECKING:
    import torch

ROUNDED = "rounded"
"""The one part that ``decode`` needs: the rounded masters, bf16. The reader computes it; it is never stored."""

_LARGEST = 1 << 62


def fill_padding(out: torch.Tensor, bits: int) -> None:
    """Give every element of a bf16 tensor the 16 ``bits``."""
    out.view(DType.INT16.torch).fill_(bits - (bits >> 15 << 16))


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
        x: torch.Tensor,  # noqa: ARG002
        *,
        backend: backends.Backend | None = None,
        first: int = 0,  # noqa: ARG002
        companions: Companions = NO_COMPANIONS,  # noqa: ARG002
    ) -> Parts:
        """No parts. The compressor has checked before that ``x`` is what the masters give."""
        backends.resolve(backend)
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

    @property
    def copied(self) -> Reference:
        """Itself, with its runs."""
        return self
