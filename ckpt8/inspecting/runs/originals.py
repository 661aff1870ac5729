"""One row from files that are not compressed: what their readers say, without a value but the numbers of progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ckpt8.checkpoint.meaning.nodes import is_optimizer
from ckpt8.checkpoint.readers import match_reader
from ckpt8.checkpoint.readers.directory import open_directory
from ckpt8.checkpoint.readers.entries import Entry, kept
from ckpt8.checkpoint.run_folder import TRAINER_STATE
from ckpt8.checkpoint.scalars import read_scalar
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import Checkpoint, TensorRef
from ckpt8.checkpoint.walk import Components, iter_nodes
from ckpt8.container.manifest import FILE
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.inspecting.runs.facts import Facts
from ckpt8.inspecting.runs.finding import SUFFIXES
from ckpt8.inspecting.runs.progress import Number, Progress, of_trainer_state, of_tree, optimizer_step
from ckpt8.inspecting.survey.origin import origin_of, read_json

_PICKLE = b"\x80"


def read_file(path: Path) -> Facts | None:
    """The facts of a file; None if it is no checkpoint. Raises InputError for damage."""
    with closing(SourceFile(ByteRange.of(path))) as file:
        size = file.source.length
        reader = match_reader(file) if size else None
        if reader is None:
            if path.suffix not in SUFFIXES or (size and file.read(0, 1) == _PICKLE):
                return None
            what = "is no checkpoint; it is damaged" if size else "is empty"
            raise InputError(f"{path}: {what}, or its save was interrupted")
        try:
            checkpoint = reader.read(file)
        except UnsupportedError as exc:
            return Facts(kept(exc, file.source), size)
        if not any(storage.nbytes for storage in checkpoint.storages):
            return None
        number = _number(checkpoint)
        found = of_tree(checkpoint.tree, number)
        counted = optimizer_step(checkpoint.tree, number) if found.step is None else None
        trains = any(is_optimizer(node) for at, node in iter_nodes(checkpoint.tree) if at)
        return Facts(checkpoint.format, size, found, counted, trains)


def _number(checkpoint: Checkpoint) -> Number:
    storages = {storage.key: storage for storage in checkpoint.storages}

    def number(_: Components, ref: TensorRef) -> float | None:
        return read_scalar(checkpoint, storages[ref.key], ref) if ref.key in storages else None

    return number


def read_folder(path: Path, files: Sequence[str], *, needs_tensors: bool) -> Facts | None:
    """The facts of files in a folder; None if they need tensors and hold none. Raises InputError for damage."""
    with open_directory(path, [Entry(name, FILE) for name in files], decode=False) as found:
        bundle = Bundle(path, found, path.name)
        if needs_tensors and not bundle.holds_tensors:
            return None
        origin = origin_of(bundle)
        is_stated = origin["step_from"] == "file"
        progress = Progress(origin["step"] if is_stated else None, origin["epoch"])
        for member in found:
            if member.path.rpartition("/")[2] == TRAINER_STATE and member.checkpoint.format == FILE:
                progress.complete(of_trainer_state(read_json(member.checkpoint)))
        steps = (optimizer_step(each.checkpoint.tree, _number(each.checkpoint)) for each in found)
        counted = None if is_stated else origin["step"]
        if progress.step is None and counted is None:
            counted = next((step for step in steps if step is not None), None)
        return Facts(origin["framework"] or "directory", bundle.size, progress, counted)
