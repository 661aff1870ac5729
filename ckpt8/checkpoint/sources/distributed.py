"""One checkpoint of torch.distributed.checkpoint as a tree: tensors put together from slices, nested as they were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ckpt8.checkpoint.readers.dcp.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.sources.composite import Composite, add_prefix
from ckpt8.checkpoint.sources.dcp_nesting import build_tree
from ckpt8.checkpoint.sources.slices import Part, gather
from ckpt8.checkpoint.walk import iter_leaves, iter_nodes
from ckpt8.core.errors import InputError
from ckpt8.core.text import shown

_DEEPEST = 64
"""The deepest nesting of a value that is no tensor."""


def adopt_parts(data: Composite, files: Iterable[DcpMember]) -> dict[str, list[Part]]:
    """The slices of tensors in ``files`` by name; ``data`` takes over the files."""
    parts: dict[str, list[Part]] = defaultdict(list)
    for member in files:
        prefix = f"{member.path}/"
        data.adopt(member.checkpoint, prefix)
        for piece, ref in member.parts:
            if piece.place is not None:
                parts[piece.name].append(Part(piece.place[0], replace(ref, key=prefix + ref.key)))
    return parts


def tree_of(data: Composite, files: Sequence[DcpMember], notes: list[str]) -> dict[str, Any]:
    """The tree of one checkpoint. Leaves out, with a note, a value that is no tensor and cannot be read."""
    parts = adopt_parts(data, files)
    home = files[0].home
    tensors = home.metadata.tensors
    values: dict[str, Any] = {
        name: gather(data, shown(name), tensor.dtype, tensor.shape, parts.pop(name, []))
        for name, tensor in tensors.items()
    }
    for name in home.metadata.names:
        if name not in tensors:
            try:
                values[name] = _value(data, home, name)
            except InputError as exc:
                notes.append(f"left out: {str(exc).removeprefix(f'{data.label}: ')}")
    return build_tree(home, values, data)


def _value(data: Composite, home: DcpCheckpoint, name: str) -> Any:
    """A value that is no tensor; ``data`` takes over the tensors in it. Raises InputError."""
    try:
        opened = home.open_value(name)
    except KeyError:
        why = "its file is not there, or it is in parts that only its class can join"
        raise InputError(f"{shown(name)}: {why}") from None
    if any(len(path) > _DEEPEST for path, _ in iter_nodes(opened.tree)):
        raise InputError(f"{shown(name)}: its objects are nested deeper than {_DEEPEST}")
    if not any(True for _ in iter_leaves(opened.tree)):
        return opened.tree
    prefix = f"{name}/value/"
    value = add_prefix(opened.tree, prefix)
    if any(not leaf.key.startswith(prefix) for _, leaf in iter_leaves(value)):
        raise InputError(f"{shown(name)}: an object with tensors in it")
    data.adopt(opened, prefix)
    return value
