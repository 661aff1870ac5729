"""``lossless/1``: every bit of every element.

A float of 16 to 64 bits is rotated left by one bit, so that the sign moves from the top to the bottom, and cut into
byte planes, most significant first. For bf16 and fp32 the first plane is then exactly the exponent, the one plane
that entropy coding shrinks. Everything else is kept as raw bytes.

    r = (bits << 1) | (bits >> (width - 1))        plane k = byte (itemsize - 1 - k) of r
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ckpt8.codecs.base import decode_tiles, encode_tiles
from ckpt8.core import backend as backends
from ckpt8.core.tensors import DType, Parts, PartSpec, Role, TensorSpec

if TYPE_CHECKING:
    import torch

RAW_PART = "bytes"


def _integers(x: torch.Tensor) -> torch.Tensor:
    import torch

    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _encode_planes(x: torch.Tensor, parts: Parts) -> None:
    import torch

    size = x.element_size()
    bits = _integers(x)
    rotated = (bits << 1).bitwise_or_((bits >> (8 * size - 1)).bitwise_and_(1))
    columns = rotated.view(torch.uint8).view(-1, size)
    for k in range(size):
        parts[f"plane{k}"].copy_(columns[:, size - 1 - k])


def _decode_planes(parts: Parts, out: torch.Tensor) -> None:
    import torch

    size = out.element_size()
    bits = _integers(out)
    columns = bits.view(torch.uint8).view(-1, size)
    for k in range(size):
        columns[:, size - 1 - k] = parts[f"plane{k}"]
    top = (bits & 1).bitwise_left_shift_(8 * size - 1)
    mask = (1 << (8 * size - 1)) - 1
    bits.bitwise_right_shift_(1).bitwise_and_(mask).bitwise_or_(top)


@dataclass(frozen=True, slots=True)
class Lossless:
    """Bit-exact for every element type, NaN payloads included."""

    id: ClassVar[str] = "lossless/1"
    measured_as: ClassVar[Literal["weight", "moment"] | None] = None

    def accepts(self, spec: TensorSpec) -> bool:  # noqa: ARG002
        """Everything."""
        return True

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """``plane0`` .. ``planeN`` for a float of N + 1 bytes, ``bytes`` for the rest; all uint8."""
        if not spec.dtype.is_plane_float:
            return {RAW_PART: PartSpec(DType.UINT8, spec.numel * spec.dtype.itemsize)}
        return {f"plane{k}": PartSpec(DType.UINT8, spec.numel) for k in range(spec.dtype.itemsize)}

    def encode(self, x: torch.Tensor, *, backend: backends.Backend | None = None) -> Parts:
        """Byte planes or raw bytes of ``x``; never refuses."""
        import torch

        backends.resolve(backend)
        spec = TensorSpec("", Role.OTHER, DType.from_label(str(x.dtype)), tuple(x.shape))
        if not spec.dtype.is_plane_float:
            return {RAW_PART: x.reshape(-1).view(torch.uint8).clone()}
        return encode_tiles(self, x, spec, _encode_planes)

    def decode(
        self,
        parts: Parts,
        spec: TensorSpec,
        *,
        out: torch.Tensor | None = None,
        backend: backends.Backend | None = None,
    ) -> torch.Tensor:
        """The tensor, bit for bit."""
        import torch

        backends.resolve(backend)
        if spec.dtype.is_plane_float:
            return decode_tiles(self, parts, spec, out, _decode_planes)
        if out is None:
            return parts[RAW_PART].clone().view(spec.dtype.torch)
        out.view(torch.uint8).copy_(parts[RAW_PART])
        return out
