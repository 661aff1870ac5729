"""What resume is going to do to an optimizer, decided before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt8.checkpoint.sources.values import Fill
from ckpt8.restoring.resume.live_parameters import Pair

NewState = tuple[dict[str, Any], list[Fill]]
"""The new state of one parameter, its tensors still empty, and what fills them."""


@dataclass(slots=True)
class StatePlan:
    """The new state of one parameter: ``allocate`` makes it, ``values`` is what it made.

    Both are None where the checkpoint has no state, as for a parameter that never had a gradient.
    """

    pair: Pair
    allocate: Callable[[], NewState] | None = None
    values: dict[str, Any] | None = None


@dataclass(slots=True)
class OptimizerPlan:
    """New states, and new values for each live group.

    ``wrong`` says why nothing of the checkpoint fits; ``problems`` are those of single parameters. ``rounded`` fills
    live parameters that take only the upper half of their saved weights, by ``id``. An optimizer that loads its state
    itself has ``build`` in place of states and groups: it gives the state dict, which ``loaded`` then keeps.
    """

    states: list[StatePlan] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wrong: str | None = None
    rounded: dict[int, Fill] = field(default_factory=dict)
    build: Callable[[], dict[str, Any]] | None = None
    loaded: dict[str, Any] | None = None
