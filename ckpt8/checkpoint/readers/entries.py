"""The entries of a directory by path: files, links and empty directories, closed or as open members.

``check_shares`` and ``refuse_share`` refuse the files of one rank that mean nothing without those of the other ranks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.readers.rebuild import EMPTY, is_distributed
from ckpt8.checkpoint.tree import Checkpoint, Global, Inert, TensorRef, format_path, iter_leaves, iter_nodes
from ckpt8.container.checks import MAX_COMPONENTS, link_stays_inside, path_problem
from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK
from ckpt8.core.errors import InputError, UnsupportedError, require
from ckpt8.core.files.source_file import ByteRange, reading, refuse_url, scan
from ckpt8.core.json_text import is_unicode
from ckpt8.core.tensors import DType
from ckpt8.core.text import shown


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, link or empty directory. ``path`` is relative, with slashes; ``target`` is empty unless it is a link."""

    path: str
    format: str
    target: str = ""


@dataclass(frozen=True, slots=True)
class DirectoryMember:
    """An open entry. ``reason`` says why a file that may be a checkpoint is kept as it is.

    ``holds_tensors``: the file is kept as it is although it holds tensors.
    """

    path: str
    checkpoint: Checkpoint
    reason: str | None = None
    holds_tensors: bool = False


def is_directory(path: Path) -> bool:
    """Whether a path leads to a directory. Raises InputError where it cannot be looked up."""
    with reading(path):
        return path.is_dir()


def directory_name(path: Path) -> str:
    """The name of a directory however it was given: ``.``, ``run/``, ``run/..``. Raises InputError for the root."""
    name = path.name if path.name not in ("", "..") else path.resolve().name
    require(name, f"{path}: the root of the file system; give a checkpoint directory")
    return name


def walk(root: Path, *, nested: bool = True) -> list[Entry]:
    """The entries below ``root``, sorted by path; unless ``nested`` those right in it, without directories.

    Raises InputError for an entry that a container cannot hold.
    """
    below: list[Entry] = []
    waiting = [""]
    for above in waiting:
        with reading(root / above):
            names = sorted(entry.name for entry in scan(root / above))
        require(
            above.count("/") < MAX_COMPONENTS - 1, f"{root}: its directories are nested deeper than {MAX_COMPONENTS}"
        )
        if above and not names:
            below.append(Entry(above, DIRECTORY))
        for path in (f"{above}/{name}".lstrip("/") for name in names):
            if (entry := _entry(root, path)) is not None:
                below.append(entry)
            elif nested:
                waiting.append(path)
    return sorted(below, key=lambda entry: entry.path.split("/"))


def _entry(root: Path, path: str) -> Entry | None:
    """The entry at ``path``; None for a directory. Raises InputError for an entry that a container cannot hold."""
    full = root / path
    if (problem := path_problem(path)) is not None:
        raise InputError(f"{full}: its path in {root} {problem}; rename it")
    with reading(full):
        mode = full.lstat().st_mode
        target = os.readlink(full) if stat.S_ISLNK(mode) else ""  # noqa: PTH115 - a Path would drop redundant parts
        require(is_unicode(target), f"{full}: the target of the link is not valid UTF-8; make the link again")
        stays = bool(target) and link_stays_inside(path, target)
        leads_nowhere = bool(target) and not stays and not full.is_file()
    if leads_nowhere:
        raise InputError(
            f"{full}: a link that leads out of the directory, and to no file; remove it, or copy its target"
        )
    if not (target or stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise InputError(f"{full}: is neither a file nor a directory nor a link; remove it")
    entry = Entry(path, SYMLINK, target) if stays else Entry(path, FILE)
    return None if stat.S_ISDIR(mode) else entry


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a directory. Raises InputError, UsageError for a URL."""
    refuse_url(path)
    files = [path / entry.path for entry in walk(path) if entry.format == FILE] if is_directory(path) else [path]
    with reading(path):
        return sum(file.stat().st_size for file in files)


def kept(why: Exception | str, source: ByteRange) -> str:
    """The text of a member's ``reason``, from the error that ``source`` raised."""
    return f"kept as it is: {str(why).removeprefix(f'{source}: ')}"


def is_named_shard(name: str) -> bool:
    """Whether a file has the name of a shard, which torch.distributed.checkpoint writes next to its ``.metadata``.

    Content cannot tell: a shard of one slice looks like a file of torch.save, one of several like a damaged file.
    """
    return name.endswith(".distcp")


def refuse_lone_shard(name: str, where: str) -> None:
    """Raise UnsupportedError for a file with the name of a shard, which no ``.metadata`` lists."""
    require(
        not is_named_shard(name),
        f"{where}: a file of a distributed checkpoint without the .metadata that tells what is in it; "
        "give the folder of the checkpoint",
        UnsupportedError,
    )


def check_shares(tree: Any, names: Collection[str], where: str) -> None:
    """Leave out the tensors of which this rank has nothing. ``names`` are the globals of the pickle.

    Raises UnsupportedError for a tensor whose place in the whole is not understood, and for one that shares its storage
    with what tells the place.
    """
    if not any(map(is_distributed, names)):
        return
    keys, rests = set(), []
    for path, node in iter_nodes(tree):
        if type(node) is TensorRef:
            keys.add(node.key)
            rests += [node.share.rest] if node.share is not None else []
        elif type(node) is Inert and any(
            type(argument) is Global and is_distributed(argument.name) for argument in node.args
        ):
            raise UnsupportedError(
                f"{where}: a file of one rank: the place of {shown(format_path(path))} in the whole tensor is not known"
            )
        elif isinstance(node, dict):
            empty = [key for key, value in node.items() if type(value) is Inert and value.name == EMPTY]
            rests += [node.pop(key) for key in empty]
    require(
        not any(leaf.key in keys for _, leaf in iter_leaves(rests)),
        f"{where}: a file of one rank: a tensor shares its storage with the mesh of the ranks",
        UnsupportedError,
    )


def refuse_share(tree: Any, where: str) -> None:
    """Raise UnsupportedError for the tree of a file with a part of a tensor that is spread over ranks."""
    require(
        not any(
            type(leaf) is TensorRef and leaf.share is not None and leaf.share.whole != leaf.shape
            for _, leaf in iter_leaves(tree)
        ),
        f"{where}: the file of one rank, with its parts of the tensors; give the folder with the files of all ranks",
        UnsupportedError,
    )


def refuse_buckets(tree: Any, where: str) -> None:
    """Raise UnsupportedError for a ``distrib_optim.pt`` of Megatron."""
    # The state of a distributed optimizer is kept by buffer, then by type of parameter and gradient.
    buffers = [value for key, value in tree.items() if type(key) is int] if type(tree) is dict else []
    is_bucketed = any(type(buffer) is dict and any(map(_is_dtypes, buffer)) for buffer in buffers)
    require(
        not is_bucketed and (type(tree) is not dict or "buckets_coalesced" not in tree),
        f"{where}: a distrib_optim.pt of Megatron: buckets of an optimizer without names or shapes; "
        "save in the torch_dist format, with an optimizer that is sharded by parameter",
        UnsupportedError,
    )


def _is_dtypes(key: Any) -> bool:
    types = key if type(key) is tuple else (key,)
    return bool(types) and all(type(kind) is Global and kind.name in DTYPE_NAMES for kind in types)


DTYPE_NAMES = frozenset(f"torch.{dtype.label}" for dtype in DType)
"""The names of element types in a pickle."""
