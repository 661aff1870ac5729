"""Checks the paths and links of the members of a directory, so that nothing lands outside of it.

A path is relative, its components are names, and everything above it is a directory, never a file or a link. A link
goes up with leading ``..`` only, and no higher than its directory: resolved step by step, over other links or not, it
then stays inside.
"""

from __future__ import annotations

import os
from itertools import dropwhile, pairwise

from ckpt8.container.json_fields import is_unicode
from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK, Manifest, MemberRecord
from ckpt8.core.errors import InputError

MAX_PATH_BYTES = 4096
"""The longest path that systems take."""

MAX_NAME_BYTES = 255
"""The longest name in a directory that systems take."""

MAX_COMPONENTS = 256
"""The most names in a path: Python cannot remove deeper directories."""

_NO_NAMES = ("", ".", "..")
_SEPARATORS = ("/", "\0") if os.sep == "/" else ("/", "\0", os.sep, ":")


def is_plain_name(name: str) -> bool:
    """Whether a text names an entry of a directory and nothing else."""
    return name not in _NO_NAMES and not any(mark in name for mark in _SEPARATORS)


def name_problem(name: str) -> str | None:
    """What is wrong with a name that a file states, of a file beside it; None where every system takes it."""
    if not is_plain_name(name):
        return "is no name of a file"
    if not is_unicode(name):
        return "is not valid UTF-8"
    return f"has a name longer than {MAX_NAME_BYTES} bytes" if len(name.encode()) > MAX_NAME_BYTES else None


def path_problem(path: str) -> str | None:
    """What is wrong with the path of a file in a directory, which a file states; None where every system takes it."""
    if not is_unicode(path):
        return "is not valid UTF-8"
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES} bytes"
    names = path.split("/")
    if len(names) > MAX_COMPONENTS:
        return f"has more than {MAX_COMPONENTS} components"
    if not all(map(is_plain_name, names)):
        return "leaves its directory"
    return next(filter(None, map(name_problem, names)), None)


def link_stays_inside(path: str, target: str) -> bool:
    """Whether a link at ``path``, whose own directory is no link, leads nowhere but into the member directory."""
    components = target.split("/")
    rest = list(dropwhile("..".__eq__, components))
    up = len(components) - len(rest)
    if rest and rest[-1] == "":
        rest.pop()  # a slash at the end says that it is a directory
    return up <= path.count("/") and bool(components[0]) and all(is_plain_name(part) or part == "." for part in rest)


def check_paths(manifest: Manifest, where: str) -> None:
    """Raise InputError unless the members of a directory can be written side by side, and only there."""
    if manifest.directory is None:
        if len(manifest.members) != 1:
            raise InputError(f"{where}: manifest is malformed: {len(manifest.members)} members, but no directory")
        return
    seen: set[str] = set()
    for member in manifest.members:
        check_path(member.path, where)
        _check_member(member, where)
        if member.path in seen:
            raise InputError(f"{where}: manifest is malformed: it has two members {member.path[:80]!r}")
        seen.add(member.path)
    # In this order whatever lies below a path follows it at once.
    for above, below in pairwise(sorted(path.split("/") for path in seen)):
        if below[: len(above)] == above:
            shown = repr("/".join(below)[:80])
            raise InputError(f"{where}: manifest is malformed: {shown} lies below another member")


def check_path(path: str, where: str) -> None:
    """Raise InputError for the path of a member that no directory can have."""
    problem = path_problem(path)
    if problem is not None:
        raise InputError(f"{where}: holds a member {path[:80]!r}, whose path {problem}; nothing is written")


def _check_member(member: MemberRecord, where: str) -> None:
    shown, malformed = repr(member.path[:80]), "manifest is malformed:"
    no_checkpoint = member.format in (FILE, SYMLINK, DIRECTORY)
    checks = (
        (member.format == DIRECTORY and member.size, f"{malformed} the directory {shown} has content"),
        (
            member.format == SYMLINK and not 0 < member.size <= MAX_PATH_BYTES,
            f"{malformed} the link {shown} has {member.size} bytes",
        ),
        (
            no_checkpoint and (member.segments or member.crc_fields),
            f"{malformed} {shown} is no checkpoint but has storages",
        ),
    )
    for wrong, what in checks:
        if wrong:
            raise InputError(f"{where}: {what}")
