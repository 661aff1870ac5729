"""Chooses what to convert of a source: a model, and its optimizer.

``Content`` is an opened source: one tree over one address space, and the files that are not in it.

The address space is a ``Composite``. It takes over the storages of members, with a prefix before their keys. ``cast``
and ``hold`` make tensors for a target: cast when somebody reads them, or held in memory. ``tie_again`` finds the ties
of weights that a distributed checkpoint lost.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt8.checkpoint.meaning.nodes import is_bare_state_dict
from ckpt8.checkpoint.meaning.pairing import saved_names
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.composite import Composite, Streamer, add_prefix, computed
from ckpt8.checkpoint.tree import TensorRef, format_path, iter_nodes
from ckpt8.core.arrays import Array, doubles, floats, rounded
from ckpt8.core.errors import InputError, UsageError, require
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType, dtype_of
from ckpt8.core.text import listed

_LISTED = 20


def choose_model(data: Composite, key: str | None) -> Candidate:
    """The state dict of the model, or with a ``key`` the dictionary of tensors at that path.

    Raises UsageError that lists the models.
    """
    models, _ = find(data.tree)
    paths = listed((model.path for model in models), _LISTED)
    if key is not None:
        fitting = [model for model in models if model.path == key] or [
            Candidate(key, node)
            for path, node in iter_nodes(data.tree)
            if isinstance(node, dict) and format_path(path) == key and is_bare_state_dict(node)
        ]
        if fitting:
            return fitting[0]
        what = paths or "no state dict of a model"
        raise UsageError(f"{data.label}: --key {key!r} leads to no dictionary of tensors; there is {what}")
    if len(models) == 1:
        return models[0]
    what = f"{len(models)} models; choose one with --key: {paths}" if models else "no state dict of a model"
    raise UsageError(f"{data.label}: holds {what}")


def choose_optimizer(data: Composite) -> Candidate | None:
    """The only optimizer, or None. Raises UsageError where there are several, InputError for a malformed one."""
    _, optimizers = find(data.tree)
    if len(optimizers) > 1:
        paths = listed((optimizer.path for optimizer in optimizers), _LISTED)
        raise UsageError(f"{data.label}: holds {len(optimizers)} optimizers ({paths}), and this format takes one")
    for optimizer in optimizers:
        check_optimizer(data.label, optimizer)
    return optimizers[0] if optimizers else None


def check_optimizer(label: str, optimizer: Candidate) -> None:
    """Raise InputError unless its groups list each parameter once, and every state is a dictionary."""
    groups, states = optimizer.node["param_groups"], optimizer.node["state"]
    require(
        all(isinstance(entry, dict) for entry in (*groups, *states.values())),
        f"{label}: {optimizer.path}: a group or a state of its optimizer is not a dictionary",
    )
    if isinstance(names := saved_names(groups), str):
        raise InputError(f"{label}: {optimizer.path}: {names}")


def model_tensors(model: Candidate) -> dict[str, TensorRef]:
    """The tensors of a state dict by name."""
    return {name: value for name, value in model.node.items() if isinstance(value, TensorRef)}


SINGLE_FILE = "file"
"""The layout of a source that is no directory."""


@dataclass(slots=True)
class Content:
    """An opened source.

    ``data`` is the checkpoint with its tree; ``layout`` is an id of ``sources.LAYOUTS``, or ``file``. ``others`` are
    members that the tree does not hold; a writer of directories may copy them. ``notes`` are lines for the report about
    anything else that the tree does not hold. ``ordered``: the weights have the order of the model, so that order tells
    weights of one shape apart.
    """

    data: Composite
    layout: str = SINGLE_FILE
    others: list[DirectoryMember] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ordered: bool = True


def adopt_member(data: Composite, member: DirectoryMember, node: Any) -> Any:
    """A part of a member's tree, with keys of ``data``. The first call for a member gives its storages to ``data``."""
    prefix, storages = f"{member.path}/", member.checkpoint.storages
    if not storages or prefix + storages[0].key not in data.places:
        data.adopt(member.checkpoint, prefix)
    return add_prefix(node, prefix)


FLOATS = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
"""The element types that can be cast."""


def hold(data: Composite, values: torch.Tensor) -> TensorRef:
    """A tensor of ``data`` with the values of one in memory, such as a step."""
    flat, dtype = values.contiguous().view(-1), dtype_of(values.dtype)
    return computed(data, dtype, tuple(values.shape), lambda start, stop: flat[start:stop])


def cast(data: Composite, name: str, ref: TensorRef, dtype: DType) -> TensorRef:
    """``ref`` in ``dtype``, contiguous: rounded to nearest, halves to even, float64 by way of float32.

    Raises InputError for a tensor that was expanded. Reading it raises InputError, and UsageError, opened by ``name``,
    where a finite value would become infinite in fp16.
    """
    if ref.dtype is dtype:
        return ref
    data.check_extent(name, ref)

    def convert(start: int, stop: int) -> Array:
        values = data.array(ref, start, stop)
        if dtype is DType.FLOAT64:
            return doubles(values, ref.dtype)
        wide = floats(values, ref.dtype)
        if dtype is DType.FLOAT32:
            return wide
        converted = rounded(wide, dtype)
        if dtype is DType.BFLOAT16:
            # The formula for masters makes Inf of some NaN.
            return np.where(np.isnan(wide), np.uint16(_QUIET_NAN), converted)
        too_large = np.abs(doubles(values[np.isinf(converted.view(np.float16))], ref.dtype))
        if (too_large := too_large[np.isfinite(too_large)]).size:
            raise UsageError(
                f"{data.label}: {name}: {too_large.max():.6g} is beyond the range of float16; use bfloat16"
            )
        return converted

    return computed(data, dtype, ref.shape, convert)


_QUIET_NAN = 0x7FC0
"""The bits of any NaN in bf16."""

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
    return ref.shape, ref.dtype, data.array(ref, 0, min(ref.numel, _SAMPLE)).tobytes()
