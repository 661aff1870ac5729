"""Optimizer state in low precision: of bitsandbytes, torchao, flashoptim and ckpt8.optim."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt8.checkpoint.tree import Inert, TensorRef
from ckpt8.core.tensors import DType, Role, TensorSpec

_NESTED = "__bnb_optimizer_quant_state__"
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"


def bitsandbytes_moments(state: Mapping[Any, Any], group: Mapping[Any, Any]) -> dict[str, TensorRef]:
    """The 32-bit moments of one parameter in a state of bitsandbytes, by their names in torch; empty if unclear.

    Two of one shape are those of Adam, or of LAMB before its trust ratio. One alone is the moment of Lion where the
    second beta and the lack of an epsilon say so; else it might be the second moment of RMSprop or Adagrad.
    """
    nested = state.get(_NESTED, state)
    if not isinstance(nested, dict):
        return {}
    tensors = {key: value for key, value in nested.items() if isinstance(value, TensorRef) and key != "step"}
    betas, eps = group.get("betas"), group.get("eps")
    has_betas = isinstance(betas, (list, tuple)) and len(betas) == 2 and betas[1]
    if not has_betas or any(ref.dtype is not DType.FLOAT32 for ref in tensors.values()):
        return {}
    if tensors.keys() - {"unorm_vec"} == {"state1", "state2"}:
        first, second = tensors["state1"], tensors["state2"]
        return {"exp_avg": first, "exp_avg_sq": second} if first.shape == second.shape else {}
    return {"exp_avg": tensors["state1"]} if tensors.keys() == {"state1"} and eps == 0 else {}


def quantised_weights(node: Mapping[Any, Any]) -> list[str]:
    """The names of weights that are 8-bit codes for inference with a scale, as compressed-tensors writes them."""
    names = [key.removesuffix("_scale") for key in node if isinstance(key, str) and key.endswith("weight_scale")]
    codes = ((name, node.get(name)) for name in names)
    return [name for name, ref in codes if isinstance(ref, TensorRef) and ref.dtype.itemsize == 1]


def with_moments(state: Mapping[Any, Any], moments: Mapping[str, TensorRef]) -> Mapping[Any, Any]:
    """The state of one parameter with its ``moments`` of bitsandbytes under the names of torch."""
    if not moments:
        return state
    others = {**state, **state.get(_NESTED, state)}
    others = {key: value for key, value in others.items() if key not in (_NESTED, "state1", "state2")}
    return {**others, **moments}


def is_low_bit(state: Mapping[Any, Any]) -> bool:
    """Whether moments of a state are 8-bit codes, or of a tensor subclass that holds such."""
    nested = state.get(_NESTED)
    values = [*state.values(), *(nested.values() if isinstance(nested, dict) else ())]
    return any(
        (isinstance(value, TensorRef) and value.dtype.itemsize == 1 and bool(value.shape))
        or (isinstance(value, Inert) and value.name == _SUBCLASS)
        for value in values
    )


def parameter_shape(state: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """The shape of the parameter that a state belongs to, from a value that has its shape; None where none has."""
    rows, columns = state.get("exp_avg_sq_row"), state.get("exp_avg_sq_col")
    if isinstance(rows, TensorRef) and isinstance(columns, TensorRef):
        return rows.shape + columns.shape[-1:]
    rows, columns = state.get("row_var"), state.get("col_var")
    if isinstance(rows, TensorRef) and isinstance(columns, TensorRef) and len(rows.shape) == len(columns.shape):
        return tuple(map(max, rows.shape, columns.shape))
    nested = state.get(_NESTED)
    for holder in (state, nested if isinstance(nested, dict) else {}):
        for key in ("exp_avg", "exp_avg_sq", "exp_avg::quantized", "momentum_buffer::quantized", "state2", "state1"):
            value = holder.get(key)
            if isinstance(value, TensorRef):
                return value.shape
            if isinstance(value, Inert) and value.name == _SUBCLASS and len(value.args) == 4:
                match value.args[2]:
                    case (_, _, tuple(shape), *_) if all(type(size) is int for size in shape):
                        return shape
                return None
    return None


_PROGRAMS = {
    "bitsandbytes": re.compile(r"(?P<owner>.*)\.(?P<part>state[12]|absmax[12]|max[12]|qmap[12])"),
    "torchao": re.compile(r"(?P<owner>.*)\.[a-z_]+\.3\.(?P<part>codes|scale|qmap)"),
    "flashoptim": re.compile(r"(?P<owner>.*)\.[a-z_]+::(?P<part>quantized|scales)"),
    "ckpt8.optim": re.compile(r"(?P<owner>.*)\.[a-z_]+_(?P<part>codes|scales)"),
}
"""The names of a moment's parts, by program."""

_LARGEST_BLOCK = 4096


def find_low_bit(parts: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """The optimizer state in low precision, sorted by program and bits: program, bits, block, parameters and bytes.

    ``block`` is the number of values that share a scale, None where unknown. ``reason`` says why 32 bits stay 32.
    """
    owners: dict[tuple[str, str], dict[str, list[TensorSpec]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        for program, pattern in _PROGRAMS.items() if part.role is Role.OTHER else ():
            match = pattern.fullmatch(part.name)
            if match is not None:
                owners[program, match["owner"]][match["part"]].append(part)
                break
    rows: dict[tuple[str, str, int | None], dict[str, Any]] = {}
    for (program, _), owned in owners.items():
        described = _describe(program, owned)
        if described is not None:
            row = rows.setdefault((program, *described), {"parameters": 0, "bytes": 0})
            row["parameters"] += 1
            row["bytes"] += sum(part.numel * part.dtype.itemsize for parts in owned.values() for part in parts)
    return [
        {
            "program": program,
            "bits": bits,
            "block": block,
            **row,
            "reason": "what its moments are cannot be told" if bits == "32-bit" else None,
        }
        for (program, bits, block), row in sorted(rows.items(), key=lambda item: (*item[0][:2], item[0][2] or 0))
    ]


def _describe(program: str, owned: Mapping[str, list[TensorSpec]]) -> tuple[str, int | None] | None:
    """Bits and block of the state of one parameter; None where the program does not write such a state."""
    if program == "bitsandbytes":
        return _describe_bitsandbytes(owned)
    codes = next((owned[name][0] for name in ("codes", "quantized") if name in owned), None)
    scales = next((owned[name][0] for name in ("scale", "scales") if name in owned), None)
    if codes is None or scales is None:
        return None
    if program != "torchao":
        return ("8-bit", 32) if codes.dtype in (DType.INT8, DType.UINT8) else None
    if "qmap" not in owned:
        return "fp8", codes.numel // max(scales.numel, 1)
    packed = 2 if owned["qmap"][0].numel == 16 else 1
    return f"{8 // packed}-bit", packed * codes.numel // max(scales.numel, 1)


def _describe_bitsandbytes(owned: Mapping[str, list[TensorSpec]]) -> tuple[str, int | None] | None:
    state = next((owned[name][0] for name in ("state1", "state2") if name in owned), None)
    if state is not None and state.dtype is DType.FLOAT32:
        return "32-bit", None
    if state is None or state.dtype is not DType.UINT8 or "qmap1" not in owned:
        return None
    scales = owned["absmax1"][0].numel if "absmax1" in owned else 0
    blocks = (1 << k for k in range(_LARGEST_BLOCK.bit_length()))
    return "8-bit", next((block for block in blocks if -(-state.numel // block) == scales), None)


def line(row: Mapping[str, Any]) -> str:
    """One row of ``find_low_bit`` for people."""
    block = f" (block {row['block']})" if row["block"] else ""
    reason = f": {row['reason']}" if row["reason"] else ""
    count = f"{row['parameters']:,} parameter" + ("s" if row["parameters"] > 1 else "")
    return f"{row['program']} {row['bits']} state of {count}{block}, kept as it is{reason}"
