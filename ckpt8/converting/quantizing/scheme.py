"""How weights are quantised: the element type, what sets the scale, and what shares one.

    code = round(w / s), kept within [-Q, Q];   decoded = code * s

    type           Q    rounding                                scale s, fp32 with the value of a bf16
    float8_e4m3fn  448  to nearest of e4m3, halves to even      absmax: max|w| / Q, rounded to bf16
    int8           127  to nearest integer, halves to even      unit:   a power of two, see ``scales``

A whole matrix has one scale (``tensor``), or each of its rows has one (``channel``): the weights of one output. int8
with absmax is SwitchBack (arXiv 2304.13013): tensor-wise in SwitchBack itself, row-wise in its vector-wise variant; the
model quantises its inputs row by row when it runs. Scales have the value of a bf16 because loaders keep them in the
type of the model: so they are the same numbers in a bf16 and in an fp32 model, and code * s is rounded at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType

LARGEST = {DType.FLOAT8_E4M3FN: 448.0, DType.INT8: 127.0}
"""Q by the element types that weights can be quantised to."""

ABSMAX, UNIT = "absmax", "unit"
TENSOR, CHANNEL = "tensor", "channel"
_SCALES, _SHARES = (ABSMAX, UNIT), (TENSOR, CHANNEL)
_DEFAULT_SHARE = {DType.FLOAT8_E4M3FN: CHANNEL, DType.INT8: TENSOR}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are quantised. ``scale`` is absmax or unit, ``per`` is tensor or channel."""

    dtype: DType = DType.FLOAT8_E4M3FN
    scale: str = ABSMAX
    per: str = CHANNEL

    @property
    def largest(self) -> float:
        """Q."""
        return LARGEST[self.dtype]

    def groups(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """How many scales a matrix has, and how many consecutive elements share one."""
        rows, columns = shape
        return (rows, columns) if self.per == CHANNEL else (1, rows * columns)

    def to_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config`` of a model whose linear layers are all quantised but those to ``ignore``.

        It has the model quantise its inputs row by row, as kernels for these types want them.
        """
        kind = "int" if self.dtype is DType.INT8 else "float"
        bits = {"num_bits": 8, "type": kind, "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**bits, "strategy": self.per, "dynamic": False},
            "input_activations": {**bits, "strategy": "token", "dynamic": True},
            "output_activations": None,
            "format": f"{kind}-quantized",
        }
        return {
            "quant_method": "compressed-tensors",
            "format": f"{kind}-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def make_scheme(dtype: DType | None, scale: str | None, per: str | None) -> Scheme:
    """The scheme of these settings; those that are None have the default of the type. Raises UsageError."""
    dtype = dtype or DType.FLOAT8_E4M3FN
    if dtype not in LARGEST:
        raise UsageError(f"--dtype {dtype.label}: expected one of {', '.join(each.label for each in LARGEST)}")
    for option, value, known in (("--scale", scale, _SCALES), ("--per", per, _SHARES)):
        if value is not None and value not in known:
            raise UsageError(f"{option} {value}: expected one of {', '.join(known)}")
    if scale == UNIT and dtype is DType.INT8:
        raise UsageError("--scale unit: int8 has no exponent that would make up for it; use absmax")
    return Scheme(dtype, scale or ABSMAX, per or _DEFAULT_SHARE[dtype])
