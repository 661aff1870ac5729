"""Inflates the frames of plain bytes, such as skeletons, without torch."""

from __future__ import annotations

import zstandard

from ckpt8.container.layout import MAX_WINDOW
from ckpt8.core.errors import InputError


def inflate_plain(stored: bytes, length: int, where: str) -> bytes:
    """The ``length`` bytes of one plane. Raises InputError when the frame does not hold as many."""
    if len(stored) == length:
        return stored
    try:
        declared = zstandard.get_frame_parameters(stored)
        if declared.content_size == length and declared.window_size <= MAX_WINDOW:
            return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompress(stored)
    except zstandard.ZstdError as exc:
        raise InputError(f"{where}: frame cannot be decompressed: {exc}") from exc
    raise InputError(f"{where}: frame does not declare the {length} bytes it must hold")
