"""Which checkpoints of a run stay: rules such as ``last:3,best:1,every:1000,log``, which add up.

    last:N      those of the newest N steps
    best:N      those of the N lowest losses: the validation loss where one is known, else that of training
    every:K     those whose step is a multiple of K
    log         ever fewer towards the past

``log`` counts steps in units of the smallest distance between two of them. A checkpoint of number n stays up to the age
of twice the largest power of two that divides n: all stay up to an age of 2, every second one up to 4, every fourth up
to 8. Whether one stays depends on nothing but its own number and age, so that a rule that is applied after each save
keeps the same ones as one that is applied once at the end.

The newest always stays, and so does one whose step is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from ckpt8.core.errors import UsageError


class Known(Protocol):
    """What rules look at."""

    @property
    def step(self) -> int | None:
        """The step of a checkpoint, if it is known."""

    @property
    def loss(self) -> float | None:
        """Its loss of training, if it is known."""

    @property
    def val_loss(self) -> float | None:
        """Its validation loss, if it is known."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The rules. Without any, all checkpoints stay."""

    last: int = 0
    best: int = 0
    every: int = 0
    log: bool = False

    @classmethod
    def of(cls, text: str | None) -> Keep:
        """Read ``last:3,best:1,every:1000,log``. Raises UsageError."""
        rules: dict[str, int] = {}
        for rule in filter(None, (part.strip() for part in (text or "").split(","))):
            name, _, number = rule.partition(":")
            if name not in ("last", "best", "every", "log") or (name == "log") != (not number):
                raise UsageError(f"{rule!r} is no rule; give last:N, best:N, every:STEPS or log, with commas between")
            if name != "log" and not (number.isascii() and number.isdigit() and int(number)):
                raise UsageError(f"{rule!r}: {number!r} is no whole number from 1 on")
            if name in rules:
                raise UsageError(f"{name} is given twice")
            rules[name] = int(number or 1)
        return cls(**{**rules, "log": "log" in rules})  # type: ignore[arg-type]

    @property
    def is_given(self) -> bool:
        """Whether there is any rule."""
        return self != Keep()

    def kept(self, checkpoints: Sequence[Known]) -> set[int]:
        """The numbers, in the list, of those that stay. They are in the order of their steps."""
        if not self.is_given:
            return set(range(len(checkpoints)))
        steps = sorted({known.step for known in checkpoints if known.step is not None})
        stay = {*steps[-max(self.last, 1) :], *self._log(steps), *self._best(checkpoints)}
        stay |= {step for step in steps if self.every and step % self.every == 0}
        return {index for index, known in enumerate(checkpoints) if known.step is None or known.step in stay}

    def _best(self, checkpoints: Sequence[Known]) -> Iterable[int]:
        has_validation = any(known.val_loss is not None for known in checkpoints)
        losses: dict[int, float] = {}
        for known in checkpoints:
            loss = known.val_loss if has_validation else known.loss
            if known.step is not None and loss is not None:
                losses[known.step] = min(loss, losses.get(known.step, loss))
        return sorted(losses, key=lambda step: (losses[step], -step))[: self.best]

    def _log(self, steps: Sequence[int]) -> Iterable[int]:
        unit = interval(steps)
        numbers = {step: round(step / unit) for step in steps} if self.log else {}
        for step, number in numbers.items():
            if (steps[-1] - step) / unit <= 2 * (number & -number or steps[-1]):
                yield step


def interval(steps: Sequence[int]) -> int:
    """The smallest distance between two of some ascending steps; 1 where there are no two."""
    return min((later - earlier for earlier, later in pairwise(steps)), default=1)
