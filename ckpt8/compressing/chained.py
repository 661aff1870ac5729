"""Compresses a source as the continuation of a base, or whole where there is none that makes it smaller."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.compressing.base_choice import Auto, Wanted, open_bases
from ckpt8.compressing.inheriting import Continuation, continue_base
from ckpt8.compressing.open_base import BrokenBaseError, OpenBase
from ckpt8.compressing.plan import Plan
from ckpt8.compressing.policy import Policy

R = TypeVar("R")

_WORTH_IT = 0.95
"""A chain goes on where a difference takes less than this part of the whole."""

_MOST_FAR = 0.5
"""A chain ends where more weights than this part of them want steps that are far from those of the base."""

_CALLER = 7
"""Frames from a warning to the caller of ``save``."""

Compress = Callable[[Plan, OpenBase | None], R]


def chained(
    source: Bundle, target: Path, plan: Plan, policy: Policy, base: Wanted, threads: int | None, compress: Compress[R]
) -> R:
    """What ``compress`` returns for ``plan`` with its differences to the base, and for that base.

    An explicit base must be sound. One that is chosen is left out where it is not, with a warning, and where it does
    not make the file smaller. Raises InputError and UsageError.
    """
    if base is not None:
        try:
            with closing(open_bases(base, target, plan, policy)) as found:
                for each in found:
                    continued = continue_base(plan, source, each, threads)
                    if not isinstance(base, Auto) or _goes_on(continued):
                        return compress(continued.plan, each)
        except BrokenBaseError as exc:
            if not isinstance(base, Auto):
                raise
            warnings.warn(f"{target}: is stored whole, as a file below it is damaged: {exc}", stacklevel=_CALLER)
    return compress(plan, None)


def _goes_on(continued: Continuation) -> bool:
    """Whether this container is one more of the chain, and not the first of a new one."""
    is_small = continued.nbytes < _WORTH_IT * continued.whole
    return is_small and not continued.resumed and continued.far <= _MOST_FAR
