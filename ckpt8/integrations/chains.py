"""Chains that frameworks write: every save may be a delta to an earlier one, and removals break none."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.run_folder import step_in_name
from ckpt8.compressing.base_choice import AUTO, Auto
from ckpt8.container.kept_bases import KeptBases, drop_unneeded
from ckpt8.core.errors import UsageError


class Chains:
    """The saves of a run, with the argument ``base`` of a framework's integration. Raises UsageError for that.

    Where files cannot be linked, it warns once and all saves are whole.
    """

    def __init__(self, base: str | None) -> None:
        if base not in (None, AUTO):
            raise UsageError(f"base is 'auto' or None, not {base!r}")
        self._base = base

    @contextlib.contextmanager
    def saving(self, target: Path) -> Iterator[dict[str, Any]]:
        """The arguments of ``save`` or ``compress`` that write ``target``. The context ends when the file is there."""
        if self._base is None:
            yield {}
            return
        target = target.resolve()
        with contextlib.ExitStack() as kept:
            kept.callback(drop_unneeded, target.parent)
            candidates: list[Path] = []
            try:
                candidates = kept.enter_context(KeptBases(target.parent)).link_newest(target, _is_kept)
            except OSError as exc:
                self._base = None
                warnings.warn(
                    f"{target.parent}: files cannot be linked there ({exc.strerror}), which keeps the bases of deltas "
                    "when checkpoints are removed; checkpoints are saved whole",
                    RuntimeWarning,
                    stacklevel=2,
                )
            yield {"base": Auto(candidates)} if candidates else {}


def _is_kept(container: Path) -> bool:
    """Whether this is no ``last.ckpt``, which is written again and again: nothing builds on that."""
    return step_in_name(container.name) is not None
