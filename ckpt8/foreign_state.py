"""State of optimizers that are not torch's, as the objects of a checkpoint hold it: see ``low_bit`` for its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt8.core.tensors import DType
from ckpt8.readers.base import Inert, TensorRef

_NESTED = "__bnb_optimizer_quant_state__"
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"


def bitsandbytes_moments(state: Mapping[Any, Any], group: Mapping[Any, Any]) -> dict[str, TensorRef]:
    """The 32-bit moments of one parameter in a state of bitsandbytes, by the names that torch has for them.

    Two of one shape are those of Adam, and LAMB's before its trust ratio. One alone is Lion's where the second beta and
    the lack of an epsilon say so; else it might be the second moment of RMSprop or Adagrad, and there is none here.
    """
    nested = state.get(_NESTED, state)
    if not isinstance(nested, dict):
        return {}
    tensors = {key: value for key, value in nested.items() if isinstance(value, TensorRef) and key != "step"}
    betas, eps = group.get("betas"), group.get("eps")
    if not isinstance(betas, (list, tuple)) or len(betas) != 2 or not betas[1]:
        return {}
    if any(ref.dtype is not DType.FLOAT32 for ref in tensors.values()):
        return {}
    if tensors.keys() - {"unorm_vec"} == {"state1", "state2"}:
        first, second = tensors["state1"], tensors["state2"]
        return {"exp_avg": first, "exp_avg_sq": second} if first.shape == second.shape else {}
    return {"exp_avg": tensors["state1"]} if tensors.keys() == {"state1"} and eps == 0 else {}


def quantised_weights(node: Mapping[Any, Any]) -> list[str]:
    """Weights of a dict that are codes for inference: of 8 bits, with a scale beside them, as in compressed-tensors."""
    names = [key.removesuffix("_scale") for key in node if isinstance(key, str) and key.endswith("weight_scale")]
    codes = ((name, node.get(name)) for name in names)
    return [name for name, ref in codes if isinstance(ref, TensorRef) and ref.dtype.itemsize == 1]


def plain_state(state: Mapping[Any, Any], group: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The state of one parameter with its moments under torch's names, where another program's can be told."""
    moments = bitsandbytes_moments(state, group)
    if not moments:
        return state
    nested = state.get(_NESTED, state)
    rest = {key: value for key, value in {**state, **nested}.items() if key not in (_NESTED, "state1", "state2")}
    return {**rest, **moments}


def parameter_shape(state: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """The shape of the parameter that a state belongs to, from whatever has its shape; None where nothing has."""
    rows, columns = state.get("exp_avg_sq_row"), state.get("exp_avg_sq_col")
    if isinstance(rows, TensorRef) and isinstance(columns, TensorRef):
        return rows.shape + columns.shape[-1:]
    nested = state.get(_NESTED)
    for each in (state, nested if isinstance(nested, dict) else {}):
        for key in ("exp_avg", "exp_avg_sq", "exp_avg::quantized", "momentum_buffer::quantized", "state2", "state1"):
            value = each.get(key)
            if isinstance(value, TensorRef):
                return value.shape
            if isinstance(value, Inert) and value.name == _SUBCLASS and len(value.args) == 4:
                return _subclass_shape(value.args[2])
    return None


def _subclass_shape(arguments: Any) -> tuple[int, ...] | None:
    shape = arguments[2] if isinstance(arguments, tuple) and len(arguments) > 2 else None
    known = isinstance(shape, tuple) and all(type(size) is int for size in shape)
    return shape if known else None
