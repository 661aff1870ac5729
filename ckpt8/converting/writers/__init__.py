"""The writers of ``convert``: one module per output format, chosen by name or by the suffix of the target."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt8.container import target_names
from ckpt8.core.errors import UsageError

if TYPE_CHECKING:
    from ckpt8.converting.request import Writer

WRITERS: tuple[tuple[str, str], ...] = (
    ("torch", "ckpt8.converting.writers.torch_zip:TorchWriter"),
    ("safetensors", "ckpt8.converting.writers.safetensors:SafetensorsWriter"),
    ("trainer", "ckpt8.converting.writers.trainer:TrainerWriter"),
    ("dcp", "ckpt8.converting.writers.dcp:DcpWriter"),
    ("flashoptim", "ckpt8.converting.writers.flashoptim:FlashoptimWriter"),
    ("compressed-tensors", "ckpt8.converting.writers.compressed_tensors:CompressedTensorsWriter"),
    ("ckpt8", "ckpt8.converting.writers.ckpt8:ContainerWriter"),
)
"""Every format by id and class. Classes are imported when needed."""

SUFFIXES = {
    **dict.fromkeys(target_names.TORCH, "torch"),
    target_names.SAFETENSORS: "safetensors",
    target_names.CONTAINER: "ckpt8",
}
"""The format that the name of a target asks for."""


def get_writer(writer_id: str) -> Writer:
    """Make the writer of that id. Raises UsageError for an unknown id."""
    if writer_id not in dict(WRITERS):
        raise UsageError(f"--to {writer_id}: expected one of {', '.join(name for name, _ in WRITERS)}")
    module, _, name = dict(WRITERS)[writer_id].partition(":")
    writer: Writer = getattr(import_module(module), name)()
    return writer


def writer_for(target: Path, to: str | None, *, is_directory: bool) -> Writer:
    """The writer of the format ``to``, or of that which the target's name asks for. Raises UsageError.

    ``is_directory``: the target was given as a directory, or is one.
    """
    if to is not None:
        return get_writer(to)
    found = None if is_directory else SUFFIXES.get(target.suffix.lower())
    if found is None:
        what = "is a directory" if is_directory else f"has the suffix {target.suffix!r}"
        choices = ", ".join(name for name, _ in WRITERS)
        raise UsageError(f"{target}: {what}, which does not tell the format; choose one with --to: {choices}")
    return get_writer(found)
