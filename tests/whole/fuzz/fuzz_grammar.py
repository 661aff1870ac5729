"""What a field of a manifest may hold, by its kind, and what it may not."""

from __future__ import annotations

import math
from typing import Any

from ckpt8.core.tensors import DType

HUGE = 10**400
NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 255, 256, 2**20 - 1, 2**20, 2**20 + 1, 2**24, 2**31 - 1, 2**31, 2**32,
    2**53, 2**53 + 1, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64, HUGE, -HUGE, 0.0, -0.0, 0.5, 1.0, 2.0, 1e308, 5e-324,
    math.nan, math.inf, -math.inf,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, "", "1", "x", [], [1], [[]], {}, {"id": 1}, [None], "\ud800")
PATHS = (
    "", ".", "..", "../x", "a/../b", "/x", "x/", "//x", "a//b", "a\0b", "x" * 255, "x" * 256, "x" * 4097,
    "a/" * 255 + "x", "a/" * 300 + "x", "é", "e\u0301", "a\nb", "a\\b", "-o", "~", "[bold]x", "\x1b[2J", "\ud800",
    "model.safetensors", "model.safetensors/x", "optimizer.pt", ".metadata", "x:y", "con", "\u202ex", ".ckpt8", "%s{}",
)  # fmt: skip
CHOICES: dict[str, tuple[Any, ...]] = {
    "role": ("weight", "moment1", "moment2", "other", "Weight", ""),
    "format": ("torch-zip", "torch-legacy", "safetensors", "dcp", "file", "symlink", "directory", "tar", ""),
    "dtype": (*(dtype.label for dtype in DType), "torch.float32", "FloatStorage", "int3", ""),
    "version": ("1.0", "1.1", "1.2", "1.3", "1.4", "1.5", "1.6", "1.99", "2.0", "0.9", "1", "", "1.0.0", "1.\u0664"),
    "preset": ("flash", "compact", "archive", "lossless", "x", "", "[red]", "x" * 5000),
    "flags": ([], ["conj"], ["neg"], ["conj", "neg"], ["neg"] * 9, ["x"], [[]], [1]),
    "rules": ([], ["*=lossless"], ["x"], [1], [["a"]], ["[red]" * 99]),
    "kind": ("adam", "stable_adamw", "came", "momentum", "lion", "", None, 1),
    "id": (
        "lossless/1",
        "split24/1",
        "split32/1",
        "companded8/1",
        "reference/1",
        "reference/2",
        "lattice/1",
        "rclog/1",
        "vscaled/1",
        "delta/1",
        "shared/1",
        "lossless/2",
        "x",
        "",
        None,
        1,
        [],
    ),
    "seal": ("", "0" * 64, "f" * 63, "A" * 64, None, 1, []),
    "key": ("", "0" * 64, "f" * 63, None, 1),
    "columns": (True, False, 0, 1, None, "x"),
}
MODES = (
    [0, 3, 0, -1], [0, 6, 0, -1], [0, 16, 1, 0], [0, 256, 0, 0], [0, 256, 3, -1], [1, 3, 2, 7], [2, 256, 1, 2**20 - 1],
    [2, 16, 0, 2**20], [3, 3, 0, -1], [0, 3, 4, -1], [0, 243, 0, -1], [0, 3, 0], [], None, "x",
    [0, 256, 0, -1, 1], [0, 16, 1, 0, 7], [0, 256, 2, -1, 3], [0, 256, 3, -1, 3], [1, 256, 0, -1, 3], [0, 6, 0, -1, 0],
    [0, 6, 0, -1, 8],
)  # fmt: skip
"""How symbols are packed, or nearly so."""
NAMES = ("name", "path", "directory", "writer", "reason")
REFERENCES = ("storage", "skeleton", "moment1", "moment2", "max_moment2", "second", "weight_storage", "base")
LISTS = ("storages", "tensors", "parameters", "members")
TABLES = ("member_table", "tensor_table")  # records by column, where small storages share entries
