"""Which checkpoints of a run stay: rules such as ``last:3,best:1,every:1000,log``, which add up.

    last:N      those of the newest N steps
    best:N      the N best by the metric that the framework recorded and in its direction, and the one it calls the
                best; else those of the lowest losses: the validation loss where one is known, else that of training
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

from ckpt8.checkpoint.replacing import bare_name
from ckpt8.core.errors import UsageError
from ckpt8.inspecting.runs import RunRecord


@dataclass(frozen=True, slots=True)
class Ranking:
    """Which of some checkpoints are the best: by ``metric``, where the highest of ``scores`` wins if ``is_highest``.

    ``named`` are the numbers of those that the framework called the best when it wrote the newest, by step and by time.
    """

    metric: str
    is_highest: bool
    scores: list[float | None]
    named: set[int]

    @classmethod
    def of(cls, checkpoints: Sequence[RunRecord]) -> Ranking:
        """The ranking of checkpoints that are in the order of their steps."""
        metric, mode = next(((known.metric, known.mode) for known in reversed(checkpoints) if known.metric), (None, ""))
        naming = [known for known in checkpoints if known.best]
        latest = {id(known): known for known in (*naming[-1:], *sorted(naming, key=lambda known: known.time)[-1:])}
        best = {bare_name(name) for known in latest.values() for name in known.best}
        named = {at for at, known in enumerate(checkpoints) if bare_name(known.name.rpartition("/")[2]) in best}
        if metric is not None:
            scores = [known.score if known.metric == metric else None for known in checkpoints]
            return cls(metric, mode == "max", scores, named)
        if any(known.val_loss is not None for known in checkpoints):
            return cls("val. loss", False, [known.val_loss for known in checkpoints], named)
        return cls("loss", False, [known.loss for known in checkpoints], named)

    def order(self) -> list[int]:
        """The numbers of all that have a score, the best first, and of two equal ones the newer."""
        known = [(score, index) for index, score in enumerate(self.scores) if score is not None]
        known.sort(key=lambda pair: (-pair[0] if self.is_highest else pair[0], -pair[1]))
        return [index for _, index in known]


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

    def kept(self, checkpoints: Sequence[RunRecord]) -> set[int]:
        """The numbers, in the list, of those that stay. They are in the order of their steps."""
        if not self.is_given:
            return set(range(len(checkpoints)))
        steps = sorted({known.step for known in checkpoints if known.step is not None})
        stay = {*steps[-max(self.last, 1) :], *self._log(steps), *self._best(checkpoints)}
        stay |= {step for step in steps if self.every and step % self.every == 0}
        named = Ranking.of(checkpoints).named if self.best else set()
        return named | {index for index, known in enumerate(checkpoints) if known.step is None or known.step in stay}

    def _best(self, checkpoints: Sequence[RunRecord]) -> Iterable[int]:
        steps = dict.fromkeys(checkpoints[index].step for index in Ranking.of(checkpoints).order())
        return [step for step in steps if step is not None][: self.best]

    def _log(self, steps: Sequence[int]) -> Iterable[int]:
        unit = interval(steps)
        numbers = {step: round(step / unit) for step in steps} if self.log else {}
        for step, number in numbers.items():
            if (steps[-1] - step) / unit <= 2 * (number & -number or steps[-1]):
                yield step


def interval(steps: Sequence[int]) -> int:
    """The smallest distance between two of some ascending steps; 1 where there are no two."""
    return min((later - earlier for earlier, later in pairwise(steps)), default=1)
