"""The checkpoints in the folder of a run: which entries they are, their steps, whether they are complete.

Nothing here reads more than the first bytes of a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ckpt8.checkpoint.readers import match_reader
from ckpt8.checkpoint.readers.dcp.metadata import METADATA
from ckpt8.checkpoint.readers.shards import is_named_shard
from ckpt8.checkpoint.replacing import is_part
from ckpt8.checkpoint.vocabulary import words
from ckpt8.container import sharded
from ckpt8.container.header import is_container
from ckpt8.container.target_names import CONTAINER, SUFFIXES
from ckpt8.core.errors import InputError
from ckpt8.core.files.partial import SUFFIX as PARTIAL
from ckpt8.core.files.source_file import ByteRange, SourceFile

_NUMBER = r"[-_=.]?(\d{1,18})(?!\d)"
_STEPS = tuple(
    re.compile(rf"(?<![a-z])(?:{words})s?{_NUMBER}", re.IGNORECASE)
    for words in ("(?:global_?)?step|iter|iteration|update", "checkpoint|ckpt|batch", "epoch")
)
_LONE = re.compile(r"(?<![a-z\d])(\d{1,18})(?![a-z\d])", re.IGNORECASE)
"""A number that is no part of a word."""

_NAMES = frozenset({"best", "checkpoint", "ckpt", "final", "init", "last", "latest", "model", "resume", "snapshot"})
"""Words in the name of a file that is a checkpoint, though it has no number."""

_SILENT = (".bin",)
"""Suffixes that other files have, too."""

_NUMBERED_PART = re.compile(r"(?:model|optimizer)[._-]?\d+\.\w+")
_OF_ONE = re.compile(rf"{re.escape(METADATA)}|random_states_\d+\.pkl|.*_optim_states\.pt")
"""Files that stand in the folder of one checkpoint only."""

_DEEPEST = 3
"""Folders inside a checkpoint: DeepSpeed, Megatron and FSDP have one for a rank or a model."""

_TRAINER_STATE = "trainer_state.json"
_TRAINER_FIRST = frozenset({"training_args.bin", "rng_state.pth", "rng_state_0.pth"})
"""Files of Trainer that no other program writes; ``trainer_state.json`` comes after them."""

_POINTERS = ("latest", "latest_checkpointed_iteration.txt")
"""The files that DeepSpeed and Megatron write beside a checkpoint once it is complete."""

_POINTED = re.compile(r"global_step\d+|iter_\d{7}")


class RunEntry(NamedTuple):
    """A checkpoint of a run and the step that its name says. One that is ``doubtful`` has no telling name."""

    path: Path
    step: int | None
    doubtful: bool


def step_in_name(name: str) -> int | None:
    """The step in the name of a file or directory: after a word for it, or the last number that stands alone."""
    path = Path(name)
    text = path.stem if path.suffix.lower() in (*SUFFIXES, CONTAINER) else name
    for pattern in _STEPS:
        if found := pattern.findall(text):
            return int(found[-1])
    found = _LONE.findall(text)
    return int(found[-1]) if found else None


def written_once(paths: Iterable[Path]) -> list[Path]:
    """Those that nothing writes again and again, by their names: with a step.

    Where no name has one, those without a word such as ``last``.
    """
    found = list(paths)
    with_step = [path for path in found if step_in_name(path.name) is not None]
    return with_step or [path for path in found if _NAMES.isdisjoint(words(path.stem))]


def checkpoints_in(folder: Path) -> list[RunEntry]:
    """The raw checkpoints in a folder, by name. Raises InputError where it cannot be read.

    A link, a hidden entry, a container, what ranks have packed, and a file that belongs to a checkpoint of several
    files are none. A folder that is one checkpoint itself has none.
    """
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda each: each.name)
        if any(_OF_ONE.fullmatch(each.name) for each in found):
            return []
        return [run_entry for each in found if (run_entry := _run_entry(each)) is not None]
    except NotADirectoryError as exc:
        raise InputError(f"{folder}: is no folder; give that of a run, or ckpt8 compress a checkpoint") from exc
    except OSError as exc:
        raise InputError(f"{folder}: cannot be read: {exc.strerror}") from exc


def packed_in(folder: Path) -> list[str]:
    """The names of the directories in a folder that ranks have packed, as a whole or with other files around that."""
    try:
        return sorted(each.name for each in folder.iterdir() if _is_visible(each.name) and _is_packed(each))
    except OSError:
        return []


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(PARTIAL)


def _is_packed(path: Path) -> bool:
    return any(name == sharded.INDEX or sharded.is_part(name) for _, name in _files(path))


def _run_entry(entry: os.DirEntry[str]) -> RunEntry | None:
    if not _is_visible(entry.name) or entry.name.endswith(CONTAINER) or entry.is_symlink():
        return None
    path, step = Path(entry.path), step_in_name(entry.name)
    if entry.is_dir():
        is_checkpoint = _is_checkpoint_directory(path) and not _is_packed(path)
        return RunEntry(path, step, doubtful=False) if is_checkpoint else None
    if not entry.is_file() or _is_part(entry.name) or not _is_checkpoint_file(path):
        return None
    return RunEntry(path, step, step is None and _NAMES.isdisjoint(words(path.stem)))


def _is_part(name: str) -> bool:
    return is_named_shard(name) or (is_part(name) and _NUMBERED_PART.fullmatch(name) is None)


def _is_checkpoint_file(path: Path) -> bool:
    """Whether a file is a checkpoint, or has the name of one and may be damaged."""
    suffix = path.suffix.lower()
    if suffix in SUFFIXES and suffix not in _SILENT:
        return not is_container(path)
    return _is_known(path)


def _is_known(path: Path) -> bool:
    try:
        with closing(SourceFile(ByteRange.of(path))) as file:
            return bool(file.source.length) and not is_container(path) and match_reader(file) is not None
    except InputError:
        return False


def _is_checkpoint_directory(path: Path) -> bool:
    """Whether a directory holds the files of one checkpoint: by their names, or by its own name and their content."""
    has_step = any(pattern.search(path.name) for pattern in _STEPS)
    for folder, name in _files(path):
        if is_named_shard(name):
            return True
        if (is_part(name) or (has_step and step_in_name(name) is None)) and _is_known(path / folder / name):
            return True
    return False


def _files(root: Path) -> Iterator[tuple[str, str]]:
    """Folder and name of the files in a directory and a few levels below."""
    for folder, folders, names in os.walk(root):
        inside = os.path.relpath(folder, root)
        depth = 0 if inside == "." else inside.count(os.sep) + 1
        folders[:] = sorted(folders) if depth < _DEEPEST else []
        yield from ((inside, name) for name in sorted(names))


def incomplete(path: Path) -> str | None:
    """Why the program that writes a checkpoint has not finished it, from its own files; None where nothing says so."""
    if not path.is_dir():
        return None
    if (problem := _not_pointed_at(path)) is not None:
        return problem
    files = set(_files(path))
    at_top = {name for folder, name in files if folder == "."}
    if not at_top.isdisjoint(_TRAINER_FIRST) and _TRAINER_STATE not in at_top:
        return f"it has no {_TRAINER_STATE} yet"
    described = {folder for folder, name in files if name == METADATA}
    for folder, name in files:
        if is_named_shard(name) and described.isdisjoint((folder, ".", *map(str, Path(folder).parents))):
            return f"its shards have no {METADATA} yet"
    tags = {folder for folder, _ in files if _POINTED.fullmatch(folder)}
    return next((problem for tag in sorted(tags) if (problem := _not_pointed_at(path / tag)) is not None), None)


def _not_pointed_at(path: Path) -> str | None:
    """Why a folder of DeepSpeed or Megatron is not complete: its pointer is older than its files, and names another."""
    if _POINTED.fullmatch(path.name) is None:
        return None
    try:
        for pointer in (path.with_name(name) for name in _POINTERS):
            if pointer.is_file():
                named = pointer.read_text(errors="replace")[:200].strip()
                newest = max((path / folder / name).lstat().st_mtime_ns for folder, name in _files(path))
                is_named = named == path.name or (named.isdecimal() and int(named) == step_in_name(path.name))
                if not is_named and pointer.stat().st_mtime_ns < newest:
                    return f"{pointer.name} does not name it yet"
    except (OSError, ValueError):
        return "its files change"
    return None
