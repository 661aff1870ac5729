"""What kernels need to know of a parameter: the layout that they are compiled for, and its row of the table.

Imports no Triton, since ``dispatch`` is imported on machines without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ckpt8.optim.packed_state import PackedState
from ckpt8.optim.packed_tensor import signed, stream_key

_WEIGHTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class KernelLayout(NamedTuple):
    """What kernels are compiled for: see ``kernels``. ``grad`` is torch's name of the element type.

    ``matrix``: whether the state has row and column averages; ``even``: whether rows are then multiples of 16.
    """

    weight: str
    levels: int
    grad: str
    first: int | None
    second: int | None
    fourth_root: bool
    aligned: bool
    matrix: bool
    even: bool


class Row(NamedTuple):
    """The table row of one tensor, made of addresses and sizes.

    ``values``: parameter, its residual or master, codes and scales of both moments; 0 where it has none. ``step``: the
    step counter. ``stream``: the bits of ``stream_key(seed, index)``. ``factored``: row and column averages; ``shape``
    is the shape of a tensor that has them.
    """

    values: tuple[int, ...]
    step: int
    numel: int
    stream: int
    factored: tuple[int, ...]
    shape: tuple[int, ...]


def describe(
    optimizer: PackedState, index: int, group: dict[str, Any], param: torch.Tensor
) -> tuple[KernelLayout, Row]:
    """Layout and table row of a parameter and its gradient."""
    state, grad, shape = optimizer.state[param], param.grad, tuple(param.shape)
    assert grad is not None  # noqa: S101
    codec, part, moments = optimizer.views(group, param, state)
    by_kind = {kind: moments[name] for name, kind in optimizer.moments(group, shape).items()}
    first, second = by_kind.get("moment1"), by_kind.get("moment2")
    tensors = [param, part]
    for moment in (first, second):
        parts = {} if moment is None else moment.parts
        tensors += parts.get("codes", parts.get("values")), parts.get("scales")
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    factored = tuple(state[name].data_ptr() for name in optimizer.factored(shape))
    layout = KernelLayout(
        weight=_WEIGHTS[param.dtype],
        levels=0 if codec.codes is None else codec.codes.highest,
        grad=str(grad.dtype),
        first=None if first is None else first.levels,
        second=None if second is None else second.levels,
        fourth_root=second is not None and second.codec is not None and second.codec.p != 1,
        aligned=not any(address % 16 for address in (*addresses, grad.data_ptr())),
        matrix=bool(factored),
        even=bool(factored) and shape[-1] % 16 == 0,
    )
    stream = signed(stream_key(group["seed"], index), 64)
    row = Row(addresses, state["step"].data_ptr(), param.numel(), stream, factored, shape if factored else ())
    return layout, row
