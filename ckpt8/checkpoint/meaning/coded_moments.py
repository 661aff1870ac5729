"""Moments of Adam that are codes of 8 or 4 bits, as bitsandbytes and torchao write them.

An element is ``table[code] * scale`` of its block, or ``code * scale`` where codes are fp8. bitsandbytes has these for
both moments in one dictionary, of tensors of 4,096 elements and more; torchao in a tensor subclass for each:

    __bnb_optimizer_quant_state__: {state1, absmax1, qmap1, state2, absmax2, qmap2}
    exp_avg, exp_avg_sq: (codes, scale, qmap), two codes in a byte at 4 bits

Optimizers that keep anything else beside these are not Adam: LAMB has ``unorm_vec``, AMSGrad a maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt8.checkpoint.meaning.optimizer_state import NESTED, SUBCLASS
from ckpt8.checkpoint.tree import Inert, TensorRef, is_dense
from ckpt8.core.tensors import DType, contiguous_stride
from ckpt8.optim.known_optimizers import SIDE_STATE

_BLOCKS = (256, 2048)
"""Elements that share a scale in bitsandbytes: now, and in earlier versions."""


class CodedMoment(NamedTuple):
    """The tensors of one moment: codes, the scales of ``block`` elements each, and the table, None for codes of fp8.

    ``packed`` codes share a byte.
    """

    codes: TensorRef
    scales: TensorRef
    table: TensorRef | None
    block: int
    packed: int

    @property
    def tensors(self) -> list[TensorRef]:
        """All tensors."""
        return [ref for ref in (self.codes, self.scales, self.table) if ref is not None]


def coded_moments(state: Mapping[Any, Any]) -> tuple[tuple[int, ...], CodedMoment, CodedMoment] | None:
    """The shape of a parameter and its first and second moments; None for the states of other optimizers."""
    return _of_torchao(state) if NESTED not in state and "state1" not in state else _of_bitsandbytes(state)


def _of_bitsandbytes(state: Mapping[Any, Any]) -> tuple[tuple[int, ...], CodedMoment, CodedMoment] | None:
    nested = state.get(NESTED, state)
    names = [f"{name}{k}" for k in (1, 2) for name in ("state", "absmax", "qmap")]
    own = nested.keys() - SIDE_STATE if isinstance(nested, dict) else set()
    refs = [nested[name] for name in names if isinstance(nested.get(name), TensorRef)] if own == set(names) else []
    if len(refs) < len(names) or (nested is not state and state.keys() - SIDE_STATE != {NESTED}):
        return None
    shape, count, moments = refs[0].shape, refs[0].numel, []
    for codes, scales, table in (refs[:3], refs[3:]):
        blocks = [block for block in _BLOCKS if -(-count // block) == scales.numel]
        if codes.shape != shape or len(blocks) != 1:
            return None
        moments.append(CodedMoment(codes, scales, table, blocks[0], 1))
    return _checked(shape, *moments)


def _of_torchao(state: Mapping[Any, Any]) -> tuple[tuple[int, ...], CodedMoment, CodedMoment] | None:
    if state.keys() - SIDE_STATE != {"exp_avg", "exp_avg_sq"}:
        return None
    shapes, moments = set(), []
    for value in (state["exp_avg"], state["exp_avg_sq"]):
        match value:
            case Inert(name=name, args=(_, _, (_, _, tuple(shape), tuple(stride), *_), dict(parts))) if (
                name == SUBCLASS
            ):
                codes, scales, table = (parts.get(key) for key in ("codes", "scale", "qmap"))
            case _:
                return None
        if not (isinstance(codes, TensorRef) and isinstance(scales, TensorRef) and scales.numel):
            return None
        if table is not None and not isinstance(table, TensorRef):
            return None
        packed = 2 if table is not None and table.numel == 16 else 1
        shapes.add((shape, stride))
        moments.append(CodedMoment(codes, scales, table, codes.numel * packed // scales.numel, packed))
    if len(shapes) != 1:
        return None
    (shape, stride) = shapes.pop()
    known = all(type(size) is int and size >= 0 for size in shape)
    return _checked(shape, *moments) if known and stride == contiguous_stride(shape) else None


def _checked(
    shape: tuple[int, ...], first: CodedMoment, second: CodedMoment
) -> tuple[tuple[int, ...], CodedMoment, CodedMoment] | None:
    """What was found if codes, scales and tables have the types and sizes that they must have, in plain order."""
    for moment in (first, second):
        codes, scales, table = moment.codes, moment.scales, moment.table
        count = codes.numel * moment.packed
        plain = all(ref.stride == contiguous_stride(ref.shape) and is_dense(ref) for ref in moment.tensors)
        coded = codes.dtype is (DType.FLOAT8_E4M3FN if table is None else DType.UINT8)
        mapped = table is None or (table.dtype is DType.FLOAT32 and table.numel == (16 if moment.packed == 2 else 256))
        fits = count == math.prod(shape) > 0 and moment.block > 0
        if not (plain and coded and mapped and fits and scales.dtype is DType.FLOAT32):
            return None
        if -(-count // moment.block) != scales.numel:
            return None
    return shape, first, second
