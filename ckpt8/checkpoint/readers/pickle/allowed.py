"""The names that ``torch.load(..., weights_only=True)`` allows in a pickle, of all versions of torch, without torch."""

from __future__ import annotations

from collections.abc import Iterable

_KINDS = ("BFloat16", "Half", "Float", "Double", "Byte", "Char", "Short", "Int", "Long")
_STORED = (*_KINDS, "Bool", "ComplexFloat", "ComplexDouble")
_FLOATS = (
    *("bfloat16", "float16", "float32", "float64", "bcomplex32", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_QUANTISED = ("qint8", "qint32", "quint8", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
_SCHEMES = (
    *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"),
    "per_channel_affine_float_qparams",
)
_REBUILD = (
    *("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state", "qtensor", "sparse_tensor"),
    *("nested_tensor", "wrapper_subclass", "meta_tensor_no_storage"),
    *("device_tensor_from_cpu_tensor", "device_tensor_from_numpy"),
)

ALLOWED = frozenset(
    {
        *("_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set"),
        *("collections.Counter", "collections.OrderedDict"),
        *("torch.Size", "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter"),
        *("torch.storage.TypedStorage", "torch.storage.UntypedStorage"),
        *("torch._tensor._rebuild_from_type_v2", "torch.serialization._get_layout"),
        *(f"torch._utils._rebuild_{name}" for name in _REBUILD),
        *(f"torch.{name}" for name in ("bool", *_FLOATS, *_QUANTISED, *_SCHEMES)),
        *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (*range(1, 9), 16, 32, 64)),
        *(f"torch.{place}{kind}Storage" for place in ("", "cuda.") for kind in _STORED),
        *(f"torch.Q{kind}Storage" for kind in ("Int8", "Int32", "UInt8", "UInt4x2", "UInt2x4")),
        *(f"torch.{place}{kind}Tensor" for place in ("", "cuda.") for kind in (*_KINDS, "Bool")),
        *(f"torch.{place}sparse.{kind}Tensor" for place in ("", "cuda.") for kind in _KINDS),
    }
)


def foreign_names(names: Iterable[str]) -> list[str]:
    """Those of the names that torch does not allow, sorted."""
    return sorted(name for name in names if name not in ALLOWED)
