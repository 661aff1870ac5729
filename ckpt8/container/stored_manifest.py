"""Stores the JSON of a manifest in one frame of zstd, within the bounds of a reader."""

from __future__ import annotations

import json
from typing import Any

import zstandard

from ckpt8.core.errors import InputError
from ckpt8.core.json_text import FREE, MANIFEST_COST, cost, parse_json

_FLOOR = 1 << 20
_RATIO = 64
"""A manifest may inflate to 1 MiB plus 64 times its stored size: most stay below 12."""

_LEVELS = (9, -1, -10, -100, -1000, -10_000, -100_000)
"""Levels of zstd, the best one first. Nearly equal records compress better than a reader accepts."""


def pack_manifest(tree: dict[str, Any], rest: int) -> bytes:
    """The stored manifest of a container of ``rest`` more bytes, as small as a reader accepts it."""
    text = json.dumps(tree, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    costs = cost(text)
    for level in _LEVELS:
        stored = zstandard.ZstdCompressor(level=level).compress(text)
        if len(text) <= _FLOOR + _RATIO * len(stored) and costs <= _allowed(rest + len(stored)):
            break
    return stored


def unpack_manifest(stored: bytes, size: int, where: str) -> Any:
    """The tree of a stored manifest in a container of ``size`` bytes. Raises InputError."""
    return parse_manifest(manifest_text(stored, where), size, where)


def manifest_text(stored: bytes, where: str) -> bytes:
    """The JSON of a stored manifest. Raises InputError."""
    try:
        declared = zstandard.frame_content_size(stored)
        if not 0 <= declared <= _FLOOR + _RATIO * len(stored):
            raise InputError(f"{where}: manifest declares an implausible size")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=declared)
    except zstandard.ZstdError as exc:
        raise InputError(f"{where}: manifest cannot be decompressed: {exc}") from exc


def parse_manifest(text: bytes, size: int, where: str) -> Any:
    """The tree of the JSON of a manifest in a container of ``size`` bytes. Raises InputError."""
    return parse_json(text, f"{where}: manifest", _allowed(size))


def _allowed(size: int) -> int:
    return FREE + MANIFEST_COST * size
