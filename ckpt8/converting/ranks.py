"""Directories of per-rank files: joins the trees of the files that the ranks of one job wrote, key by key.

A tensor that is spread over ranks is put together from its parts, when somebody reads it. Of copies, and of all that is
no tensor, that of the lowest rank counts; a tensor that is not spread must be the same on all ranks.

``assemble`` finds the files that belong together: their names differ in the number of the rank alone, and their trees
become one. Model and optimizer mostly are in files of their own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from ckpt8.checkpoint.meaning.names import named_rank, rank_file, stated_world
from ckpt8.checkpoint.meaning.nodes import Inside, is_bare_state_dict, is_optimizer
from ckpt8.checkpoint.readers import READERS
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite, Streamer
from ckpt8.checkpoint.sources.distributed import Part, gather
from ckpt8.checkpoint.tree import Inert, Share, TensorRef, format_path, iter_leaves, iter_nodes
from ckpt8.converting.choice import Content, adopt_member, tie_again
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.tensors import Box
from ckpt8.core.text import listed, shown

_DEEPEST = 64

Files = Mapping[int, DirectoryMember]
"""Files that belong together, by rank, the lowest first."""

Path = tuple[str, ...]


class ApartError(InputError):
    """The files do not say how the tensors of the ranks belong together."""


def _opened(data: Composite, member: DirectoryMember) -> Any:
    where, tree = f"{data.label}: {member.path}", member.checkpoint.tree
    inert = Inside()
    for path, node in iter_nodes(tree):
        if len(path) > _DEEPEST:
            raise InputError(f"{where}: its objects are nested deeper than {_DEEPEST}")
        if inert.holds(path):
            if isinstance(node, TensorRef):
                raise InputError(f"{where}: {shown(format_path(path))}: a tensor in an object of another class")
        elif isinstance(node, Inert):
            inert.enter(path)
    return adopt_member(data, member, tree)


class _Joining:
    """Joins the trees of ``files``, whose names have a ``pattern``, into one with keys of ``data``.

    Containers that stand at several places are joined once. ``missing`` says which rank has no file.
    """

    def __init__(self, data: Composite, pattern: str, files: Files) -> None:
        self.trees = trees = {rank: _opened(data, member) for rank, member in files.items()}
        self._data = data
        self._where = f"{data.label}: {pattern}"
        self._streamer = Streamer(data)
        self._made: dict[tuple[int, ...], Any] = {}
        self._left = sum(1 for tree in trees.values() for _ in iter_nodes(tree))
        leaves = (leaf for tree in trees.values() for _, leaf in iter_leaves(tree) if isinstance(leaf, TensorRef))
        stated = max(leaf.share.ranks for leaf in leaves if leaf.share is not None)
        ranks = max(stated, stated_world(pattern), *(rank + 1 for rank in trees))
        missing = next((rank for rank in range(ranks) if rank not in trees), None)
        self.missing = None if missing is None else f"the file of rank {missing} of {ranks} is not there"

    def join(self, path: Path, values: Mapping[int, Any]) -> Any:
        """The values at one place, by rank, as one. Raises ApartError, InputError."""
        first = next(iter(values.values()))
        if isinstance(first, TensorRef):
            return self._tensor(path, values)
        if not isinstance(first, (dict, list, tuple)):
            return first
        alike = {rank: value for rank, value in values.items() if type(value) is type(first)}
        key = tuple(map(id, alike.values()))
        if key not in self._made:
            self._join_container(path, alike, key)
        made = self._made[key]
        return tuple(made) if isinstance(first, tuple) else made

    def _join_container(self, path: Path, values: Mapping[int, Any], key: tuple[int, ...]) -> None:
        self._left -= 1
        if self._left < 0:
            raise InputError(f"{self._where}: the files of the ranks do not have the same structure")
        made: Any = {} if isinstance(next(iter(values.values())), dict) else [None] * max(map(len, values.values()))
        self._made[key] = made
        entries = {rank: value if isinstance(value, dict) else dict(enumerate(value)) for rank, value in values.items()}
        for name in dict.fromkeys(name for value in entries.values() for name in value):
            inside = {rank: value[name] for rank, value in entries.items() if name in value}
            made[name] = self.join((*path, str(name)), inside)

    def _tensor(self, path: Path, values: Mapping[int, Any]) -> TensorRef:
        refs = {rank: value for rank, value in values.items() if isinstance(value, TensorRef)}
        lowest, first = next(iter(refs.items()))
        for rank, ref in refs.items():
            mine, its = (tensor.share and tensor.share.whole for tensor in (first, ref))
            if (mine, first.dtype) != (its, ref.dtype):
                raise InputError(f"{self._name(path)}: has another shape or type on rank {rank} than on rank {lowest}")
            if mine is None and (first.shape != ref.shape or not (ref is first or self._streamer.equal(first, ref))):
                raise ApartError(
                    f"{self._name(path)}: is another tensor on rank {rank} than on rank {lowest}, and nothing says how "
                    "they belong together"
                )
        return first if first.share is None else self._spread(path, refs, first.share)

    def _spread(self, path: Path, refs: Mapping[int, TensorRef], share: Share) -> TensorRef:
        """The whole of a tensor from the parts of all ranks."""
        held: Counter[Box] = Counter()
        parts: dict[Box, Part] = {}
        for rank, ref in refs.items():
            assert ref.share is not None  # noqa: S101 - see ``_tensor``
            box = ref.share.offsets, ref.shape
            part = parts.setdefault(box, Part(ref.share.offsets, ref))
            held[box] += 1
            # A mesh may be a part of a larger one, and stages of a pipeline may number their parameters alike.
            if share.copies is not None and held[box] > share.copies and not self._streamer.equal(part.ref, ref):
                raise ApartError(
                    f"{self._name(path)}: is another tensor on rank {rank} than on a rank with the same part of it"
                )
        name = self._name(path).removeprefix(f"{self._data.label}: ")
        try:
            return gather(self._data, name, next(iter(refs.values())).dtype, share.whole, list(parts.values()))
        except InputError:
            if self.missing is None:
                raise
            raise InputError(f"{self._where}: {self.missing}; the checkpoint is not complete") from None

    def _name(self, path: Path) -> str:
        return f"{self._where}: {shown(format_path(path))}"


_MODEL, _OPTIMIZER = "model", "optimizer"
_NUMBERED = re.compile(r"[_-]?(?:world[_-]?size[_-]?\d+|rank[_-]?\*|\*)|\.[^.]*$")
"""What the name of a file has beside a key: the number of ranks, that of its rank, a suffix."""


def matches(members: Bundle) -> bool:
    """Whether some file holds parts of tensors."""
    return any(rank_file(member.path, member.checkpoint.tree) for member in members.checkpoints)


def assemble(members: Bundle) -> Content:
    """``{"model": {name: tensor}, "optimizer": ..., ...}``, with tied weights as one.

    Raises InputError for damage and for missing ranks, UsageError where files of two folders hold the same. Leaves out,
    with a note, an optimizer that only the ranks themselves can put together.
    """
    data = Composite(str(members.path))
    by_pattern = _files_of_ranks(members)
    used = {member.path for files in by_pattern.values() for member in files.values()}
    content = Content(data, others=[member for member in members.opened if member.path not in used])
    # The optimizers of ranks whose tensors do not say what they are part of, such as those of FSDP1.
    own = (named_rank(member.path) for member in content.others if is_optimizer(member.checkpoint.tree))
    content.notes += (
        f"left out: {pattern}: its tensors do not say which parts of the parameters they belong to"
        for pattern in dict.fromkeys(file.pattern for file in own if file is not None)
    )
    kinds = {pattern: _kind(next(iter(files.values())).checkpoint.tree) for pattern, files in by_pattern.items()}
    alike = Counter((_folder(pattern), kind) for pattern, kind in kinds.items())
    data.tree = {}
    folders: dict[str, str] = {}
    for pattern, files in by_pattern.items():
        kind, folder = kinds[pattern], _folder(pattern)
        try:
            joining = _Joining(data, pattern, files)
            tree = joining.join((), joining.trees)
        except ApartError as exc:
            if kind != _OPTIMIZER:
                raise
            content.notes.append(f"left out: {str(exc).removeprefix(f'{data.label}: ')}")
            continue
        if joining.missing is not None:
            content.notes.append(f"{pattern}: {joining.missing}; other ranks have copies of its parts")
        if kind is not None or not isinstance(tree, dict):
            is_alone = kind is not None and alike[folder, kind] == 1
            tree = {kind if is_alone else _NUMBERED.sub("", pattern.rpartition("/")[2]): tree}
        both = min(map(str, data.tree.keys() & tree.keys()), default=None)
        if both is not None:
            choices = listed(sorted({folders[both], folder or "."}))
            raise UsageError(
                f"{data.label}: several files hold {shown(both)}; choose a folder with --member: {choices}"
            )
        folders |= dict.fromkeys(map(str, tree), folder or ".")
        data.tree |= tree
    tie_again(data)
    return content


def _files_of_ranks(members: Bundle) -> dict[str, Files]:
    """The files that belong together, by their pattern. Raises InputError where one of them could not be read."""
    by_pattern: dict[str, dict[int, DirectoryMember]] = defaultdict(dict)
    for member in members.checkpoints:
        if file := rank_file(member.path, member.checkpoint.tree):
            by_pattern[file.pattern][file.rank] = member
    for member in members.opened:
        file = named_rank(member.path)
        if file is None or file.pattern not in by_pattern:
            continue
        if member.reason is not None:
            raise InputError(f"{members.path}: {member.path}: {member.reason}; it cannot be converted")
        if member.checkpoint.format in READERS:
            by_pattern[file.pattern].setdefault(file.rank, member)  # a rank may have no part of any tensor
    return {pattern: dict(sorted(files.items())) for pattern, files in by_pattern.items()}


def _folder(pattern: str) -> str:
    return pattern.rpartition("/")[0]


def _kind(tree: Any) -> str | None:
    return _OPTIMIZER if is_optimizer(tree) else _MODEL if is_bare_state_dict(tree) else None
