"""The keys under which training programs count steps and epochs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

STEP_KEYS = ("global_step", "step", "iter_num", "iteration", "iter", "global_steps", "num_updates", "steps")
GLOBAL_KEYS = ("global_step", "iter_num", "iteration", "global_steps", "num_updates")
"""Those that no scheduler or random generator uses for a count of its own."""

EPOCH_KEYS = ("epoch", "current_epoch", "epochs")

LARGEST = 1 << 53


def first_number(trees: Sequence[Mapping[Any, Any]], keys: Iterable[str], *, whole: bool) -> int | float | None:
    """The first number under one of the keys, in their order; whole numbers only if ``whole``."""
    kinds = (int,) if whole else (int, float)
    values: Iterator[Any] = (tree.get(key) for key in keys for tree in trees)
    return next((value for value in values if type(value) in kinds and 0 <= value < LARGEST), None)
