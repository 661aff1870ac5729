"""Directories of torch.distributed.checkpoint: tensors are put together from the slices that processes wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

from ckpt8.checkpoint.readers.dcp.dcp import DcpCheckpoint, DcpFile, DcpMember
from ckpt8.checkpoint.readers.dcp.metadata import METADATA
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.members import Members
from ckpt8.checkpoint.tree import Checkpoint, StorageRef, TensorRef
from ckpt8.checkpoint.walk import iter_leaves, iter_nodes
from ckpt8.converting.layouts.dcp_tree import build_tree
from ckpt8.converting.layouts.slices import Part, gather
from ckpt8.converting.sources import Content
from ckpt8.converting.ties import tie_again
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.text import listed, shown

_DEEPEST = 64
"""Nesting of a value that is no tensor."""


class Distributed:
    """See the module. Several checkpoints in one directory are one where each has values of its own.

    So they are where a program saves the model and the optimizer into folders of one directory.
    """

    id: ClassVar[str] = "dcp"

    def matches(self, members: Members) -> bool:
        """Whether a ``.metadata`` was found with its files."""
        return any(isinstance(member, DcpMember) or member.holds_tensors for member in members.found)

    def assemble(self, members: Members) -> Content:
        """``{"model": {name: tensor}, "optimizer": ..., ...}`` as it was saved, with tied weights as one.

        Raises InputError, UsageError.
        """
        data = Composite(str(members.path))
        found: dict[int, list[DcpMember]] = defaultdict(list)
        for member in members.found:
            if isinstance(member, DcpMember):
                found[id(member.home)].append(member)
            elif member.holds_tensors:
                raise InputError(f"{data.label}: {member.path}: {member.reason}; it cannot be converted")
        notes: list[str] = []
        tree: dict[str, Any] = {}
        for files in found.values():
            part = _tree(data, files, notes)
            both = tree.keys() & part.keys()
            if both:
                folders = listed(sorted({each.path.rpartition("/")[0] or "." for each in _files(found)}))
                name = shown(min(map(str, both)))
                raise UsageError(f"{data.label}: several checkpoints hold {name}; choose one with --member: {folders}")
            tree |= part
        data.tree = tree
        tie_again(data)
        others = [each for each in members.found if not isinstance(each, DcpMember)]
        rest = [each for each in others if each.path.rpartition("/")[2] != METADATA]
        return Content(data, self.id, others=rest, notes=notes)


def _files(found: Mapping[int, list[DcpMember]]) -> list[DcpMember]:
    return [member for files in found.values() for member in files]


def _tree(data: Composite, files: list[DcpMember], notes: list[str]) -> dict[str, Any]:
    """The tree of one checkpoint. What cannot be read and is no tensor is left out, with a note."""
    parts: dict[str, list[Part]] = defaultdict(list)
    for member in files:
        prefix = f"{member.path}/"
        data.adopt(member.checkpoint, prefix)
        if isinstance(member.checkpoint, DcpFile):
            for piece, ref in member.checkpoint.parts:
                if piece.place is not None:
                    parts[piece.name].append(Part(piece.place[0], replace(ref, key=prefix + ref.key)))
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
    """A value that is no tensor; tensors in it become some of ``data``. Raises InputError."""
    try:
        opened = home.open_value(name)
    except KeyError:
        raise InputError(f"{shown(name)}: its file is not there") from None
    if any(len(path) > _DEEPEST for path, _ in iter_nodes(opened.tree)):
        raise InputError(f"{shown(name)}: its objects are nested deeper than {_DEEPEST}")
    if not any(True for _ in iter_leaves(opened.tree)):
        return opened.tree
    prefix = f"{name}/value/"
    value = _renamed(opened.tree, prefix)
    if any(not leaf.key.startswith(prefix) for _, leaf in iter_leaves(value)):
        raise InputError(f"{shown(name)}: an object with tensors in it")
    data.adopt(cast("Checkpoint", opened), prefix)
    return value


def _renamed(node: Any, prefix: str) -> Any:
    """Plain containers with ``prefix`` before the keys of all storages."""
    if isinstance(node, (TensorRef, StorageRef)):
        return replace(node, key=prefix + node.key)
    if isinstance(node, dict):
        return {key: _renamed(value, prefix) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(_renamed(value, prefix) for value in node)
    return node
