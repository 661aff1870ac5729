"""Tied weights: what output layers are called, and which of them were written a second time."""

from __future__ import annotations

from collections import defaultdict

from ckpt8.checkpoint.meaning.state_dicts import find
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.values import Streamer
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.container.frames import bytes_of

HEADS = frozenset({"lm_head", "head", "output", "output_layer", "embed_out", "proj_out", "decoder", "classifier"})
"""Last modules of names that lose against the other names of a tied weight: the output takes over the embedding."""

_SAMPLE, _COMPARED = 1024, 4
"""Elements that decide whether two matrices are compared, and with how many others a matrix is."""


def module_of(name: str) -> str:
    """The last module in the name of a parameter."""
    return name.rpartition(".")[0].rpartition(".")[2]


def tie_again(data: Composite) -> None:
    """Let the matrix of an output layer that holds the same bits as another of its model be that one, in the tree.

    Only the first elements are read of one that does not, as a rule. Raises InputError.
    """
    streamer = Streamer(data)
    for model in find(data.tree)[0]:
        matrices = {
            name: ref
            for name, ref in model.node.items()
            if isinstance(ref, TensorRef) and len(ref.shape) > 1 and 0 not in ref.shape
        }
        heads = [name for name in matrices if module_of(name) in HEADS]
        kinds = {(matrices[head].shape, matrices[head].dtype) for head in heads}
        alike: dict[object, list[TensorRef]] = defaultdict(list)
        for name, ref in matrices.items():
            if name not in heads and (ref.shape, ref.dtype) in kinds:
                alike[_mark(data, ref)].append(ref)
        for head in heads if alike else ():
            others = alike.get(_mark(data, matrices[head]), [])[:_COMPARED]
            equal = next((ref for ref in others if streamer.equal(matrices[head], ref)), None)
            if equal is not None and any(bool(block.any()) for block in data.blocks(equal)):
                model.node[head] = equal


def _mark(data: Composite, ref: TensorRef) -> object:
    """What two equal tensors have in common, and others rarely."""
    first = data.elements(ref, 0, min(ref.numel, _SAMPLE))
    return ref.shape, ref.dtype, bytes(bytes_of(first))
