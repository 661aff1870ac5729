"""Which paths and links the members of a directory may have, so that nothing lands outside of it.

A path is relative, its components are names, and what is above it is a directory, never a file or a link. A link leads
up with leading ``..`` only, and no higher than its directory: resolved step by step, over other links or not, it then
stays inside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise

from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK, Manifest, MemberRecord
from ckpt8.core.errors import InputError

MAX_PATH_BYTES = 4096
"""The longest path that systems take."""

MAX_COMPONENTS = 256
"""Names in a path: deeper directories cannot be removed by what Python has for that."""

_NO_NAMES = ("", ".", "..")


def is_plain_name(name: str) -> bool:
    """Whether a text names an entry of a directory and nothing else."""
    return name not in _NO_NAMES and not any(mark in name for mark in _separators())


def _separators() -> Iterable[str]:
    return ("/", "\0") if os.sep == "/" else ("/", "\0", os.sep, ":")


def is_inside(path: str) -> bool:
    """Whether a member's path stays in its directory."""
    return all(is_plain_name(component) for component in path.split("/"))


def link_stays_inside(path: str, target: str) -> bool:
    """Whether a link at ``path``, whose own directory is no link, leads nowhere but into the member directory."""
    components = target.split("/")
    depth = path.count("/")
    up = 0
    while up < len(components) and components[up] == "..":
        up += 1
    rest = components[up:]
    if rest and rest[-1] == "":
        rest.pop()  # a slash at the end says that it is a directory
    return up <= depth and bool(components[0]) and all(is_plain_name(part) or part == "." for part in rest)


def check_paths(manifest: Manifest, where: str) -> None:
    """Raise InputError unless the members of a directory can be written side by side, and only there."""
    if manifest.directory is None:
        if len(manifest.members) != 1:
            raise InputError(f"{where}: manifest is malformed: {len(manifest.members)} members, but no directory")
        return
    seen: set[str] = set()
    for member in manifest.members:
        _check_member(member, where)
        if member.path in seen:
            raise InputError(f"{where}: manifest is malformed: it has two members {member.path[:80]!r}")
        seen.add(member.path)
    # In this order whatever lies below a path follows it at once.
    for above, below in pairwise(sorted(path.split("/") for path in seen)):
        if below[: len(above)] == above:
            shown = repr("/".join(below)[:80])
            raise InputError(f"{where}: manifest is malformed: {shown} lies below another member")


def _check_member(member: MemberRecord, where: str) -> None:
    shown = repr(member.path[:80])
    if len(member.path.encode()) > MAX_PATH_BYTES:
        raise InputError(f"{where}: holds a member {shown}, whose path is longer than {MAX_PATH_BYTES} bytes")
    if member.path.count("/") >= MAX_COMPONENTS:
        raise InputError(f"{where}: holds a member {shown}, whose path has more than {MAX_COMPONENTS} components")
    if not is_inside(member.path):
        raise InputError(f"{where}: holds a member {shown}, whose path leaves its directory; nothing is written")
    if member.format == DIRECTORY and member.size:
        raise InputError(f"{where}: manifest is malformed: the directory {shown} has content")
    if member.format == SYMLINK and not 0 < member.size <= MAX_PATH_BYTES:
        raise InputError(f"{where}: manifest is malformed: the link {shown} has {member.size} bytes")
    if member.format in (FILE, SYMLINK, DIRECTORY) and (member.segments or member.crc_fields):
        raise InputError(f"{where}: manifest is malformed: {shown} is no checkpoint but has storages")
