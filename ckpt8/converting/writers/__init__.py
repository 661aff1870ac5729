"""The formats that ``convert`` writes, chosen by name or by the suffix of the target.

Each has a function of ``(request, report)``: it writes the whole target or leaves nothing, completes the report, and
raises Ckpt8Error. This table imports none of them: the command line shows it without torch.
"""

from __future__ import annotations

from pathlib import Path

from ckpt8.container import header
from ckpt8.core.errors import UsageError

WRITERS = {
    "torch": (f"{__name__}.torch_zip", "write"),
    "safetensors": (f"{__name__}.safetensors", "write"),
    "trainer": (f"{__name__}.safetensors", "write_trainer"),
    "dcp": (f"{__name__}.dcp", "write"),
    "flashoptim": (f"{__name__}.flashoptim", "write"),
    "compressed-tensors": (f"{__name__}.compressed_tensors", "write"),
    "ckpt8": ("ckpt8.converting.convert", "write_container"),
}
"""The module and function of every format."""

SUFFIXES = {
    **dict.fromkeys(header.TORCH, "torch"),
    header.SAFETENSORS: "safetensors",
    header.CONTAINER: "ckpt8",
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
