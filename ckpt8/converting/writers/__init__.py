"""The formats that ``convert`` writes, a module each, chosen by name or by the suffix of the target.

A module has ``write(request, report)``: it writes the whole target or leaves nothing, completes the report, and raises
Ckpt8Error. This table imports none of them: the command line shows it without torch.
"""

from __future__ import annotations

from pathlib import Path

from ckpt8.container import target_names
from ckpt8.core.errors import UsageError

WRITERS = {
    "torch": "torch_zip",
    "safetensors": "safetensors",
    "trainer": "trainer",
    "dcp": "dcp",
    "flashoptim": "flashoptim",
    "compressed-tensors": "compressed_tensors",
    "ckpt8": "ckpt8",
}
"""The module of every format."""

SUFFIXES = {
    **dict.fromkeys(target_names.TORCH, "torch"),
    target_names.SAFETENSORS: "safetensors",
    target_names.CONTAINER: "ckpt8",
}
"""The format that the suffix of a target asks for."""


def choose_format(target: Path, to: str | None, *, is_directory: bool) -> str:
    """The format ``to``, or the one that the target's name asks for. Raises UsageError.

    ``is_directory``: the target was given as a directory, or is one.
    """
    choices = ", ".join(WRITERS)
    if to is None:
        to = None if is_directory else SUFFIXES.get(target.suffix.lower())
        if to is None:
            what = "is a directory" if is_directory else f"has the suffix {target.suffix!r}"
            raise UsageError(f"{target}: {what}, which does not tell the format; choose one with --to: {choices}")
    elif to not in WRITERS:
        raise UsageError(f"--to {to}: expected one of {choices}")
    return to
