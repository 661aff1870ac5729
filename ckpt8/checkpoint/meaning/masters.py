"""The fp32 masters that optimizers keep of weights in 16 bits: in the state of a parameter, or in a list beside it.

    state[3]["master_param"]                                              in the state
    {"optimizer": ..., "fp32_from_fp16_params": [[a, b], [c]]}            Megatron, apex: by parameter group
    {"base_optimizer_state": ..., "single_partition_of_fp32_groups": [flat]}    DeepSpeed: one for each parameter

A list is in the order in which the groups list their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt8.checkpoint.meaning.nodes import is_optimizer
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.vocabulary import MASTER_LISTS
from ckpt8.checkpoint.walk import iter_nodes
from ckpt8.optim.known_optimizers import MASTER_KEYS

Identifier = int | str


def lists_of_masters(tree: object) -> dict[int, list[Any]]:
    """The list of masters beside each optimizer that has one, by the ``id`` of the optimizer."""
    found: dict[int, list[Any]] = {}
    for _, node in iter_nodes(tree):
        lists = [node[key] for key in MASTER_LISTS & node.keys()] if isinstance(node, dict) else []
        if len(lists) == 1 and isinstance(lists[0], list):
            found.update((id(value), lists[0]) for value in node.values() if is_optimizer(value))
    return found


def find_masters(
    states: Mapping[Identifier, Mapping[Any, Any]],
    groups: Sequence[Mapping[Any, Any]],
    shapes: Mapping[Identifier, tuple[int, ...]],
    beside: Sequence[Any],
) -> dict[Identifier, TensorRef]:
    """The master of every parameter that has one; ``beside`` is the list of the optimizer, empty without one.

    The parameters of a group have masters from a list if these are as many, and of their shapes. Flat ones may end
    before the padding of the moments.
    """
    found: dict[Identifier, TensorRef] = {}
    listed: list[list[Identifier]] = [group["params"] for group in groups]
    by_group = [each if isinstance(each, list) else [each] for each in beside]
    if len(by_group) != len(listed) or not all(isinstance(each, list) for each in beside):
        listed, by_group = [[each for group in listed for each in group]], [[ref for refs in by_group for ref in refs]]
    for identifiers, masters in zip(listed, by_group, strict=True):
        pairs = list(zip(identifiers, masters, strict=False)) if len(identifiers) == len(masters) else []
        if all(isinstance(ref, TensorRef) and _may_be(ref, shapes.get(each)) for each, ref in pairs):
            found.update(pairs)
    for each, state in states.items():
        own = (state.get(key) for key in MASTER_KEYS)
        ref = next((ref for ref in own if isinstance(ref, TensorRef) and ref.shape == shapes.get(each)), None)
        if ref is not None:
            found[each] = ref
    return found


def _may_be(ref: TensorRef, shape: tuple[int, ...] | None) -> bool:
    return shape is None or ref.shape == shape or len(ref.shape) == len(shape) == 1
