"""Directories of torch.distributed.checkpoint: puts tensors together from the slices that the processes wrote.

Several checkpoints in one directory are one, unless two hold a value of the same name: some programs save the model
and the optimizer into two folders of a directory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ckpt8.checkpoint.readers.dcp.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.dcp.metadata import METADATA
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.walk import iter_leaves, iter_nodes
from ckpt8.converting.content import Content, add_prefix
from ckpt8.converting.layouts.dcp_nesting import build_tree
from ckpt8.converting.layouts.slices import Part, gather
from ckpt8.converting.ties import tie_again
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.text import listed, shown

_DEEPEST = 64
"""The deepest nesting of a value that is no tensor."""


def matches(members: Bundle) -> bool:
    """Whether there is a ``.metadata`` with its files."""
    return any(isinstance(member, DcpMember) or member.holds_tensors for member in members.found)


def assemble(members: Bundle) -> Content:
    """``{"model": {name: tensor}, "optimizer": ..., ...}`` as it was saved, with tied weights as one.

    Raises InputError for damage, UsageError where two checkpoints hold the same name.
    """
    data = Composite(str(members.path))
    found: dict[int, list[DcpMember]] = defaultdict(list)
    others = []
    for member in members.found:
        if isinstance(member, DcpMember):
            found[id(member.home)].append(member)
        elif member.holds_tensors:
            raise InputError(f"{data.label}: {member.path}: {member.reason}; it cannot be converted")
        elif member.path.rpartition("/")[2] != METADATA:
            others.append(member)
    content = Content(data, others=others)
    data.tree = {}
    for files in found.values():
        tree = _tree(data, files, content.notes)
        both = data.tree.keys() & tree.keys()
        if both:
            folders = listed(sorted({each[0].path.rpartition("/")[0] or "." for each in found.values()}))
            name = shown(min(map(str, both)))
            raise UsageError(f"{data.label}: several checkpoints hold {name}; choose one with --member: {folders}")
        data.tree |= tree
    tie_again(data)
    return content


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


def _tree(data: Composite, files: list[DcpMember], notes: list[str]) -> dict[str, Any]:
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
