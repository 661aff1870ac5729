"""What kernels need to know of a parameter: the layout that they are compiled for, and its row of the table.

Imports no Triton: ``dispatch`` imports it where there is none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ckpt8.codecs import Codec
from ckpt8.optim.packed_state import PackedState
from ckpt8.optim.packed_tensor import Moment
from ckpt8.optim.rounding import stream_key


class Layout(NamedTuple):
    """What kernels are compiled for: see ``blocks``. ``grad`` is torch's name of the element type.

    ``matrix``: for rules that work row by row, whether it has rows; ``even``: whether those are multiples of 16.
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
    """One tensor. ``values``: addresses of parameter, its part, and codes and scales of both moments; 0 for none.

    ``step``: the address of the counter; ``stream``: ``stream_key(seed, index)``; ``factored``: the addresses of row
    and column averages, and ``shape`` the shape of a tensor that has them.
    """

    values: tuple[int, ...]
    step: int
    numel: int
    stream: int
    factored: tuple[int, ...]
    shape: tuple[int, ...]


def describe(optimizer: PackedState, index: int, group: dict[str, Any], param: torch.Tensor) -> tuple[Layout, Row]:
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
    layout = Layout(
        *_weight(param.dtype, codec),
        grad=str(grad.dtype),
        first=_levels(first),
        second=_levels(second),
        fourth_root=second is not None and second.codec is not None and second.codec.p != 1,
        aligned=not any(address % 16 for address in (*addresses, grad.data_ptr())),
        matrix=bool(factored),
        even=bool(factored) and shape[-1] % 16 == 0,
    )
    stream = stream_key(group["seed"], index)
    row = Row(addresses, state["step"].data_ptr(), param.numel(), stream, factored, shape if factored else ())
    return layout, row


def _weight(dtype: torch.dtype, codec: Codec) -> tuple[str, int]:
    """Name of the layout of weights, and the levels of the residual."""
    if dtype != torch.bfloat16:
        return ("fp32" if dtype == torch.float32 else "fp16"), 0
    return ("split32", 0) if codec.codes is None else ("split24", codec.codes.highest)


def _levels(moment: Moment | None) -> int | None:
    """The largest code of a moment, 0 for fp32; None without one."""
    if moment is None:
        return None
    return 0 if moment.codec is None else moment.codec.Q
