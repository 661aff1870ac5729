"""A codec that needs what no codec of the product needs yet: where an element stands, and the second moment there.

Its step follows the decoded second moment, and its dither the index of the element in the storage:

    s = 2^-8 * v'^(1/4), 2^-20 where v' = 0      t = (index * 0x9E3779B1 mod 2^32 >> 8) * 2^-24
    q = floor(m / s + t)                         m' = (q + (1/2 - t)) * s; an exact zero has a code of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch

from ckpt8 import codecs
from ckpt8.codecs.base import Codec
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import DType, PartSpec, Role, TensorSpec

ZERO = -(1 << 15)


def dither(first: int, count: int) -> torch.Tensor:
    index = torch.arange(first, first + count, dtype=torch.int64)
    return ((index * 0x9E3779B1 & 0xFFFFFFFF) >> 8).float() * 2.0**-24


def steps(second: torch.Tensor) -> torch.Tensor:
    return torch.where(second > 0, second.double().sqrt().sqrt().float() * 2.0**-8, 2.0**-20)


def encode(x: torch.Tensor, parts: dict[str, torch.Tensor], *, first: int, second: torch.Tensor) -> None:
    assert second.dtype is torch.float32
    q = (x / steps(second) + dither(first, len(x))).floor()
    if not bool((q.abs() < 1 << 15).all()):
        raise RefusedError("holds NaN, Inf or a value far above its second moment")
    parts["codes"].copy_(q.masked_fill(x == 0, ZERO))


def decode(parts: dict[str, torch.Tensor], out: torch.Tensor, *, first: int, second: torch.Tensor) -> None:
    assert second.dtype is torch.float32
    codes = parts["codes"]
    out.copy_((codes.float() + (0.5 - dither(first, len(out)))) * steps(second))
    out[codes == ZERO] = 0.0


@dataclass(frozen=True, slots=True)
class Neighbour(Codec):
    """First moments in steps of their second moments. ``second`` is the storage of these."""

    id = "neighbour/1"
    measured_as = "moment"
    counts_elements = True
    companions: ClassVar[Any] = {"second": ("max_moment2", "moment2")}

    second: int | None = None

    def accepts(self, spec: TensorSpec) -> bool:
        return spec.dtype is DType.FLOAT32 and spec.role in (Role.MOMENT1, Role.OTHER)

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        return {"codes": PartSpec(DType.INT16, spec.numel)}

    def kernel(self, direction: str, backend: str) -> Callable[..., None]:
        assert backend == "torch"
        return encode if direction == "encode" else decode


@contextmanager
def registered() -> Iterator[None]:
    """The registry with the codec in it."""
    entry = (Neighbour.id, f"{__name__}:Neighbour")
    codecs.codec_class.cache_clear()
    with mock.patch.object(codecs, "CODECS", (*codecs.CODECS, entry)):
        yield
    codecs.codec_class.cache_clear()
