"""Tied weights: what output layers are called, and which of them were written a second time."""

from __future__ import annotations

from typing import Any

from ckpt8.converting.composite import Composite
from ckpt8.readers.base import TensorRef
from ckpt8.resuming.find import find
from ckpt8.resuming.streaming import Streamer

HEADS = frozenset({"lm_head", "head", "output", "output_layer", "embed_out", "proj_out", "decoder", "classifier"})
"""Last modules of names that lose against the other names of a tied weight: the output takes over the embedding."""


def module_of(name: str) -> str:
    """The last module in the name of a parameter."""
    return name.rpartition(".")[0].rpartition(".")[2]


def tie_again(data: Composite) -> None:
    """Let the matrix of an output layer that holds the same bits as another of its model be that one, in the tree.

    Only the first block is read of one that does not. Raises InputError.
    """
    for model in find(data.tree)[0]:
        matrices = {name: ref for name, ref in model.node.items() if isinstance(ref, TensorRef) and len(ref.shape) > 1}
        heads = [name for name in matrices if module_of(name) in HEADS]
        for head in heads:
            others = [ref for name, ref in matrices.items() if name not in heads]
            equal = next((ref for ref in others if _is_same(data, matrices[head], ref)), None)
            if equal is not None:
                model.node[head] = equal


def _is_same(data: Composite, one: Any, other: Any) -> bool:
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and Streamer(data).equal(one, other) and any(bool(block.any()) for block in data.blocks(one))
