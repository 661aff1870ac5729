"""Decides what ``--force`` may replace and what may be removed: checkpoints.

Removing a directory removes every file in it. So its content must show that it holds a checkpoint, and every file in it
must either be written again under the same path, or have a name that frameworks give to files of one checkpoint. A
directory without any file may be removed too.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path

from ckpt8.checkpoint.readers import match_reader
from ckpt8.checkpoint.readers.shards import is_named_shard
from ckpt8.container.header import HEAD_BYTES, is_container
from ckpt8.container.needed import unneeded_file
from ckpt8.container.sharded import INDEX, PART
from ckpt8.container.target_names import CONTAINER, SUFFIXES
from ckpt8.core.errors import InputError, OutputError
from ckpt8.core.files.atomic import any_file
from ckpt8.core.files.source_file import ByteRange, SourceFile

_MODEL = r"(?:pytorch_|adapter_|diffusion_pytorch_)?model"
_FILES = re.compile(
    "|".join(
        (
            # transformers, diffusers, peft, accelerate
            rf"{_MODEL}(?:[._-](?:fp16|bf16|\d+-of-\d+|\d+))*\.(?:safetensors|bin|pt|pth)(?:\.index\.json)?",
            r"(?:optimizer|scheduler|sampler|scaler|training_args)(?:_\d+)?\.(?:pt|bin)",
            r"rng_state(?:_\d+)?\.pth|(?:random_states|custom_checkpoint)_\d+\.pkl",
            r"(?:\w+_)?config\.json|trainer_state\.json|README\.md|\.gitattributes",
            r"(?:tokenizer|special_tokens_map|added_tokens|vocab|chat_template)\.json|(?:vocab|merges)\.txt",
            r"(?:tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.jinja",
            # torch.distributed.checkpoint, Ckpt8StorageWriter
            rf"\.metadata|__\d+_\d+\.(?:distcp|ckpt8)|{re.escape(INDEX)}|{PART}",
            # Lightning, beside the slices of its strategies
            r"meta\.pt",
            # DeepSpeed
            r"[\w-]*mp_rank_\d+[\w-]*_(?:model|optim)_states\.pt|latest|zero_to_fp32\.py",
        )
    )
)
_FOLDERS = re.compile(r"global_step\d+|(?:pytorch_model_fsdp|optimizer)_\d+|ckpt8")
_STEP = "global_step"
_ATTEMPTS = 20


def checkpoint_file(path: Path) -> str:
    """A description of the file at ``path``.

    Raises OutputError unless it is a checkpoint, a container that no other one needs as its base, or empty.
    """
    if not _is_checkpoint(path):
        raise OutputError(f"{path}: exists and is no checkpoint; to replace it all the same, give its name with -o")
    return unneeded_file(path)


def no_checkpoint(path: Path) -> str:
    """A description of the file at ``path``, which a report may replace.

    Raises OutputError where it may be a checkpoint or a part of one: it has such a name, or is no text. Raises OSError.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    names_one = is_part(path.name) or is_named_shard(path.name) or path.suffix.lower() in (*SUFFIXES, CONTAINER)
    if head and (names_one or b"\0" in head or not _is_utf8(head)):
        raise OutputError(f"{path}: may be a checkpoint, and a report never replaces one; give another name")
    return any_file(path)


def _is_utf8(head: bytes) -> bool:
    """Whether these first bytes of a file are text, of which the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def checkpoint_directory(written: Collection[str] = ()) -> Callable[[Path], str]:
    """A function that describes the directory at a path. ``written`` are the paths that are written in it again.

    It raises OutputError if the directory may not be replaced, and OSError.
    """

    def check(path: Path) -> str:
        contents = _contents(path, frozenset(written))
        if contents.problem is not None:
            raise OutputError(
                f"{path}: {contents.problem}; --force replaces checkpoints only: remove it, or give another name"
            )
        return f"{path}: {contents.files:,} files, {contents.nbytes:,} bytes"

    return check


def is_part(name: str) -> bool:
    """Whether frameworks give this name to a file of a checkpoint that has several."""
    return _FILES.fullmatch(name) is not None


def problem_of(path: Path) -> str | None:
    """Why a file or directory may not be removed as a checkpoint, or None. Raises OSError."""
    if path.is_dir():
        return _contents(path, frozenset()).problem
    return None if _is_checkpoint(path) else "it is no checkpoint"


def _contents(path: Path, written: frozenset[str]) -> _Contents:
    """The contents of the directory at ``path``, read again if another run replaces it. Raises OutputError."""
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):
            before = path.stat().st_ino
            contents = _Contents(path, written)
            if path.stat().st_ino == before:
                return contents
    raise OutputError(f"{path}: is changed by another run; wait for that")


def _is_checkpoint(path: Path) -> bool:
    """Whether a file begins as a checkpoint or is empty, as after an interrupted save. Raises OSError, OutputError."""
    try:
        with closing(SourceFile(ByteRange.of(path))) as file:
            return not file.source.length or is_container(path) or match_reader(file) is not None
    except InputError as exc:
        if isinstance(exc.__cause__, OSError):
            raise exc.__cause__ from None
        raise OutputError(str(exc)) from exc


class _Contents:
    """The files of a directory and their bytes. ``problem`` is the first reason to keep the directory, or None."""

    def __init__(self, root: Path, written: frozenset[str]) -> None:
        self.files = self.nbytes = 0
        self._written = written
        self._folders = {path[:end] for path in written for end, each in enumerate(path) if each == "/"} | {""}
        self._holds_checkpoint = False
        self.problem = next(self._problems(root), None)

    def _problems(self, root: Path) -> Iterator[str]:
        """Reasons to keep it, found file by file: nobody waits until all of a home directory is read."""
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            with os.scandir(root / folder) as entries:
                found = sorted(entries, key=lambda each: each.name)
            steps = [each.name for each in found if each.name.startswith(_STEP) and each.is_dir(follow_symlinks=False)]
            if len(steps) > 1 and not self._folders.issuperset(f"{folder}/{step}".strip("/") for step in steps):
                yield f"holds several checkpoints ({steps[0]!r}, {steps[1]!r})"
            for entry in found:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if not entry.is_dir(follow_symlinks=False):
                    yield from self._look_at(entry, path, folder)
                elif os.path.ismount(entry.path):
                    yield f"holds another file system, {path[:80]!r}"
                else:
                    waiting.append(path)
        if self.files and not self._holds_checkpoint:
            yield "holds no checkpoint"

    def _look_at(self, entry: os.DirEntry[str], path: str, folder: str) -> Iterator[str]:
        """Count a file. Yields a reason to keep it, if there is one."""
        status = entry.stat(follow_symlinks=False)
        self.files += 1
        self.nbytes += status.st_size
        if stat.S_ISLNK(status.st_mode):
            return  # the file that it leads to stays
        in_known_folder = folder in self._folders or _FOLDERS.fullmatch(folder)
        known = path in self._written or (in_known_folder and _FILES.fullmatch(entry.name))
        if not (known and stat.S_ISREG(status.st_mode)):
            yield f"holds {path[:80]!r}, which is no part of a checkpoint"
        elif not self._holds_checkpoint and status.st_size:
            self._holds_checkpoint = is_named_shard(entry.name) or _is_checkpoint(Path(entry.path))
