"""``lossless/1``: every bit of every element, in byte planes. The arithmetic is in ``reference``."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt8.codecs.base import Codec, StateKey
from ckpt8.core.tensors import DType, PartSpec, TensorSpec

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

    def trains(self, key: StateKey) -> bool:
        """Moments, which stay in fp32."""
        return key != "master"
