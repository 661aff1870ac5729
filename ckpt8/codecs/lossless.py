"""``lossless/1``: every bit of every element, in byte planes.

A float of 16 to 64 bits is rotated left by one bit, so that the sign moves from the top to the bottom, and cut into
byte planes, most significant first. For bf16 and fp32 the first plane is then exactly the exponent, the one plane
that entropy coding shrinks. Everything else is kept as raw bytes.

    r = (bits << 1) | (bits >> (width - 1))        plane k = byte (itemsize - 1 - k) of r
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt8.codecs.base import Codec, Direction, StateKey
from ckpt8.core.backend import Backend
from ckpt8.core.tensors import DType, Parts, PartSpec, TensorSpec

if TYPE_CHECKING:
    import torch

RAW_PART = "bytes"


@dataclass(frozen=True, slots=True)
class Lossless(Codec):
    """Bit-exact for every element type, NaN payloads included."""

    id = "lossless/1"
    keeps_masters = True
    by_element = True

    def accepts(self, spec: TensorSpec) -> bool:  # noqa: ARG002
        """Tensors of any type and role."""
        return True

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """``plane0`` .. ``planeN`` for a float of N + 1 bytes, ``bytes`` for the rest; all uint8."""
        if not spec.dtype.is_plane_float:
            return {RAW_PART: PartSpec(DType.UINT8, spec.numel * spec.dtype.itemsize)}
        plane = PartSpec(DType.UINT8, spec.numel)
        return {f"plane{k}": plane for k in range(spec.dtype.itemsize)}

    def kernel(self, direction: Direction, backend: Backend) -> Callable[..., None]:
        """The function of this module for tensors, that of ``planes_numba`` for arrays."""
        if backend == "numba":
            from ckpt8.codecs import planes_numba

            return planes_numba.encode if direction == "encode" else planes_numba.decode
        return encode if direction == "encode" else decode

    def trains(self, key: StateKey) -> bool:
        """Moments, which stay in fp32."""
        return key != "master"


_INTEGERS = {2: DType.INT16, 4: DType.INT32, 8: DType.INT64}


def encode(x: torch.Tensor, parts: Parts) -> None:
    """Fill ``plane0``, ``plane1``, ... or ``bytes`` with the elements of a flat tile."""
    if RAW_PART in parts:
        parts[RAW_PART].copy_(x.view(DType.UINT8.torch))
        return
    size = x.element_size()
    bits = x.view(_INTEGERS[size].torch)
    rotated = (bits << 1).bitwise_or_((bits >> (8 * size - 1)).bitwise_and_(1))
    columns = rotated.view(DType.UINT8.torch).view(-1, size)
    for k in range(size):
        parts[f"plane{k}"].copy_(columns[:, size - 1 - k])


def decode(parts: Parts, out: torch.Tensor) -> None:
    """Fill the flat tile ``out`` from its planes or bytes."""
    if RAW_PART in parts:
        out.view(DType.UINT8.torch).copy_(parts[RAW_PART])
        return
    size = out.element_size()
    bits = out.view(_INTEGERS[size].torch)
    columns = bits.view(DType.UINT8.torch).view(-1, size)
    for k in range(size):
        columns[:, size - 1 - k] = parts[f"plane{k}"]
    top = (bits & 1).bitwise_left_shift_(8 * size - 1)
    mask = (1 << (8 * size - 1)) - 1
    bits.bitwise_right_shift_(1).bitwise_and_(mask).bitwise_or_(top)
