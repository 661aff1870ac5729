"""Brings the trees of members into the one address space of a composite: their storages get keys with a prefix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import StorageRef, TensorRef


def adopt_member(data: Composite, member: DirectoryMember, node: Any) -> Any:
    """A part of a member's tree with the keys of ``data``, which takes over the member's storages the first time."""
    prefix = f"{member.path}/"
    storages = member.checkpoint.storages
    if not storages or prefix + storages[0].key not in data:
        data.adopt(member.checkpoint, prefix)
    return add_prefix(node, prefix)


def add_prefix(node: Any, prefix: str) -> Any:
    """A copy of plain containers with ``prefix`` before the keys of all storages. Other objects stay as they are."""
    if isinstance(node, (TensorRef, StorageRef)):
        return replace(node, key=prefix + node.key)
    if isinstance(node, dict):
        return {key: add_prefix(value, prefix) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(add_prefix(value, prefix) for value in node)
    return node
