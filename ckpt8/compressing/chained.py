"""Compresses a source as the continuation of a base, or whole where there is none that makes it smaller."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.compressing.base_choice import Auto, Wanted, is_unlinked, open_bases
from ckpt8.compressing.inheriting import Continuation, continue_base
from ckpt8.compressing.open_base import BrokenBaseError, OpenBase
from ckpt8.compressing.plan import Plan
from ckpt8.compressing.policy import Policy
from ckpt8.container.kept_bases import KeptBases

R = TypeVar("R")

_WORTH_IT = 0.95
"""A chain goes on where a difference takes less than this part of the whole."""

_CALLER = 9
"""Frames from a warning to the caller of ``save``."""

NO_BASE = "no container holds an earlier state of the same tensors under the same settings, in a chain with room"
RESUMED = "the run was resumed from a lossy container on the same lattice"
NO_LINKS = "files cannot be linked in its folder, which would keep its base"
NOT_SMALLER = "differences would hardly be smaller"

Compress = Callable[[Plan, OpenBase | None, str | None], R]
"""Compresses a plan with its differences to a base; without one, the text says why if one was looked for."""


def chained(
    source: Bundle,
    target: Path,
    plan: Plan,
    policy: Policy,
    base: Wanted,
    kept: KeptBases | None,
    threads: int | None,
    compress: Compress[R],
) -> R:
    """What ``compress`` returns for ``plan`` with its differences to the base, and for that base.

    An explicit base must be sound. One that is chosen is linked among those that are ``kept``, and left out where it is
    not sound, with a warning, and where it does not make the file smaller. Raises InputError and UsageError.
    """
    if base is None:
        return compress(plan, None, None)
    reason = None
    try:
        with closing(open_bases(base, target, plan, policy, kept)) as found:
            for each in found:
                continued = continue_base(plan, source, each, threads)
                reason = _why_new(continued) if isinstance(base, Auto) else None
                if reason is None:
                    return compress(continued.plan, each, None)
    except BrokenBaseError as exc:
        if not isinstance(base, Auto):
            raise
        reason = f"a file below it is damaged: {exc}"
        warnings.warn(f"{target}: is stored whole, as {reason}", stacklevel=_CALLER)
    if isinstance(base, Auto) and base.only_linked and is_unlinked(target):
        reason = NO_LINKS
    return compress(plan, None, reason or NO_BASE)


def _why_new(continued: Continuation) -> str | None:
    """Why a new chain begins with this container; None if it is one more of the chain."""
    if continued.resumed:
        return RESUMED
    return None if continued.nbytes < _WORTH_IT * continued.whole else NOT_SMALLER
