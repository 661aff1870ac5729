"""What resume is going to do to an optimizer, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt8.checkpoint.sources.values import Fill
from ckpt8.restoring.resume.live_parameters import Pair
from ckpt8.restoring.resume.own_loading import OwnState

Made = tuple[dict[str, Any], list[Fill]]
"""New state, and what fills it."""


@dataclass(slots=True)
class StatePlan:
    """The new state of one parameter; None where the checkpoint has none, as for one that never had a gradient.

    ``make``, where there is one, gives it when the time has come to allocate memory.
    """

    pair: Pair
    values: dict[str, Any] | None
    make: Callable[[], Made] | None = None


@dataclass(slots=True)
class OptimizerPlan:
    """What to assign. ``wrong`` says why nothing of the checkpoint fits; ``problems`` are single parameters.

    ``rounded``: what fills a live parameter that takes only the upper half of its saved weights, by ``id``.
    ``own``: what the optimizer loads by itself, in place of all the rest; ``loaded`` is that once it was read.
    """

    states: list[StatePlan] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wrong: str | None = None
    rounded: dict[int, Fill] = field(default_factory=dict)
    own: OwnState | None = None
    loaded: dict[str, Any] | None = None
