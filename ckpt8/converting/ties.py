"""Tied weights: the names of output layers, and the ties that a distributed checkpoint lost."""

from __future__ import annotations

from collections import defaultdict

from ckpt8.checkpoint.meaning.state_dicts import find
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.values import Streamer
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.container.frames import bytes_of

HEADS = frozenset({"lm_head", "head", "output", "output_layer", "embed_out", "proj_out", "decoder", "classifier"})
"""Last modules in the names of output layers. A tied weight keeps its other name: the output layer takes over the
embedding, not the other way round."""

_SAMPLE, _COMPARED = 1024, 4
"""Two matrices are compared where their first _SAMPLE elements agree, one matrix with at most _COMPARED others."""


def module_of(name: str) -> str:
    """The last module in the name of a parameter."""
    return name.rpartition(".")[0].rpartition(".")[2]


def tie_again(data: Composite) -> None:
    """Replace the matrix of an output layer by another matrix of its model with the same bits, in the tree.

    Of a matrix without such a twin it mostly reads only the first elements. Raises InputError.
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
    """A mark that equal tensors share, and others rarely do: shape, type and first elements."""
    return ref.shape, ref.dtype, bytes(bytes_of(data.elements(ref, 0, min(ref.numel, _SAMPLE))))
