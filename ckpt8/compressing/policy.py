"""What a user asks for: a preset, rules and a budget, which says how far a container may be from its source.

Presets choose codecs by role, rules by name, and some tensors always stay lossless. A budget counts steps of the
optimizer.

Weigh an error dW of the weights by v^, the mean square gradient: S_W = sum(v^ dW^2), the variance of the change of the
loss that it makes. One step of the optimizer moves the weights by M1 = sum(lr^2 m^^2) in the same measure. An error of
c steps is S_W + S_M + S_V = c^2 M1, where the errors of the moments count what they will move:

    S_M = sum((lr b1 / (1 - b1))^2 dm^^2)       an error of m decays by b1 in each step
    S_V = G^2 sum(lr^2 (e m^)^2)                e is the relative error of sqrt(v)
    G^2 = g^2 (1 + b1 b2) / ((1 - b2^2) (1 - b1 b2))

G is how far an error that decays by b2 in each step carries a weight whose updates correlate by b1 from step to step.
m^ and v^ are free of bias. Each of the three gets the share c / sqrt(3); what second moments cannot use, since their
steps are 1.4 octaves at most, goes to the other two. Steps follow from shares, since an error
that is even over a step s has the variance s^2 / 12. A budget is a cap: all steps are rounded down.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ckpt8.checkpoint.vocabulary import BUFFERS
from ckpt8.codecs import Codec, parse_codec
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.lattice import HIGHEST_K, LOWEST_K
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.rclog import LARGEST_STEP, OCTAVE, SMALLEST_STEP
from ckpt8.codecs.split24 import Split24
from ckpt8.core.errors import UsageError
from ckpt8.core.public import described
from ckpt8.core.tensors import Role, TensorSpec, is_small

LEAST_STEPS, MOST_STEPS = 0.01, 10.0

_LARGEST_U = 4.0
"""Errors of an update beyond it save nothing."""

_CARRY = 0.576
"""g, fitted at betas of .9 and .99."""

_SLOPE = math.sqrt(3 / (8 * math.log(2)))
"""What a relative error is to an error of the pseudo-logarithm: the root mean square of 1 / (1 + mantissa)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """An error of ``steps`` optimizer steps.

    ``u_max`` is twice the largest error of an update, in units of the learning rate. ``cap`` is the largest step of a
    lattice, in units of the RMS of its weights.
    """

    steps: float
    u_max: float
    cap: float

    @classmethod
    def of(cls, steps: float) -> Budget:
        """The budget of so many steps that somebody asked for. Raises UsageError unless from 0.01 to 10."""
        if not LEAST_STEPS <= steps <= MOST_STEPS:
            raise UsageError(
                f"a budget is a number of steps from {LEAST_STEPS:g} to {MOST_STEPS:g}, not {described(steps)}"
            )
        return cls(float(steps), min(_LARGEST_U, 2.0 ** math.floor(math.log2(steps))), 1.0)

    def bounded(self, error: float) -> Budget:
        """A budget of as many steps, with updates that err by ``error`` at most, or by what every budget allows."""
        return replace(self, u_max=float(min(_LARGEST_U, 2 * error)))

    def second(self, beta1: float, beta2: float) -> float:
        """The steps that second moments take: up to a third of the error, and 0 where they are kept exactly."""
        return (self.log_step(beta1, beta2) or 0) / OCTAVE * _SLOPE * carry(beta1, beta2) / (2 * math.sqrt(12))

    def rest(self, beta1: float, beta2: float) -> float:
        """The steps that each of weights and first moments may take: half of what second moments leave."""
        return math.sqrt((self.steps**2 - self.second(beta1, beta2) ** 2) / 2)

    def log_step(self, beta1: float, beta2: float) -> int | None:
        """S of ``rclog`` for the second moments of a parameter; None where its smallest would be too large."""
        octaves = self.steps / math.sqrt(3) * 2 * math.sqrt(12) / (_SLOPE * carry(beta1, beta2))
        return min(int(octaves * OCTAVE), LARGEST_STEP) if octaves * OCTAVE >= SMALLEST_STEP else None

    def moment_scale(self, energy: float, roots: float, lr: float, beta1: float, beta2: float, bias1: float) -> float:
        """The k of ``vscaled`` for the first moments of a parameter.

        ``energy`` is M1 and ``roots`` the sum of sqrt(v), both over all parameters of the optimizer.
        """
        reach = lr * beta1 / ((1 - beta1) * bias1)
        return self.rest(beta1, beta2) * math.sqrt(12 * energy / roots) / reach if roots and reach else math.inf

    @property
    def half(self) -> float:
        """The steps that each of weights and momentum may take, where there are no second moments."""
        return self.steps / math.sqrt(2)

    def weight_step(self, part: float, energy: float, numel: int, mean_square: float, rms: float) -> tuple[int, bool]:
        """The k of ``lattice`` for a tensor of weights, and whether the cap makes it smaller than the budget allows.

        ``part`` are the steps that weights may take. ``energy`` is M1 and ``numel`` N, over all parameters of the
        optimizer. ``mean_square`` is the mean of v^ over the tensor, ``rms`` the root mean square of its weights, above
        zero.
        """
        most = math.floor(4 * math.log2(self.cap * rms))
        if not mean_square:
            return _in_range(most), True
        step = part * math.sqrt(12 * energy / numel / mean_square)
        wanted = math.floor(4 * math.log2(step))
        return _in_range(min(wanted, most)), wanted > most

    def momentum_step(self, error: float, rms: float) -> int | None:
        """The k of ``lattice/2`` for the momentum of a tensor, ``rms`` the root mean square of it, above zero.

        ``error`` is the root mean square of its error; that is ``rms`` at most, and less where updates have a bound.
        None where the smallest step is too large.
        """
        k = math.floor(4 * math.log2(math.sqrt(12) * min(error, rms * min(1.0, self.u_max))))
        return None if k < LOWEST_K else _in_range(k)


def carry(beta1: float, beta2: float) -> float:
    """G: how far a relative error of sqrt(v) carries a weight, in steps."""
    both = beta1 * beta2
    return _CARRY * math.sqrt((1 + both) / ((1 - beta2 * beta2) * (1 - both)))


def _in_range(k: int) -> int:
    return min(max(k, LOWEST_K), HIGHEST_K)


PRESET_BUDGETS = {"archive": Budget(1.0, 1.0, 0.25), "compact": Budget(0.15, 0.125, 0.25)}
"""The budgets of presets."""

LOSSLESS = Lossless()

_FLASH: Mapping[Role, Codec] = {
    Role.WEIGHT: Split24(),
    Role.MOMENT1: Companded8(),
    Role.MOMENT2: Companded8(signed=False, Q=255),
}

PRESETS: Mapping[str, Mapping[Role, Codec]] = {"flash": _FLASH, "compact": _FLASH, "archive": _FLASH, "lossless": {}}
"""The codec of each role. Under a budget these are the codecs of what a budget cannot be given to."""


_COMPONENTS = re.compile(r"[.:]")
"""Separates the components of a path; a colon follows the name of a member."""


@dataclass(frozen=True, slots=True)
class Rule:
    """``GLOB=CODEC``: tensors whose path matches get that codec. ``text`` is what the user wrote."""

    text: str
    glob: str
    codec: type[Any]
    fields: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule. Raises UsageError."""
        match = re.fullmatch(r"(.+?)=([a-z0-9]+\s*(?:\(.*\))?)", text.strip())
        if match is None:
            raise UsageError(f"rule {text!r}: expected GLOB=CODEC, as in '*.lm_head.weight=lossless'")
        codec, fields = parse_codec(match[2])
        rule = cls(text, match[1].strip(), codec, fields)
        if rule.codec_for(Role.OTHER) is None and rule.codec_for(Role.MOMENT2) is None:
            codec(**fields)
        return rule

    def matches(self, names: Sequence[str]) -> bool:
        """Whether the glob matches one of ``names``."""
        return any(fnmatchcase(name, self.glob) for name in names)

    def codec_for(self, role: Role) -> Codec | None:
        """The codec with the fields of the rule, or None where they do not suit the role.

        Fields that the rule does not give have the defaults of the role: second moments are unsigned.
        """
        try:
            codec: Codec = self.codec(**{**self.codec.defaults_for(role), **self.fields})
        except UsageError:
            return None
        return codec


@dataclass(frozen=True, slots=True)
class Policy:
    """A preset and rules; the first rule that matches wins over the preset.

    ``budget`` is that of the preset, or the one that was asked for; None without one.
    """

    preset: str = "flash"
    rules: tuple[Rule, ...] = ()
    budget: Budget | None = None

    @classmethod
    def of(
        cls,
        preset: str | None = None,
        rules: Sequence[str] = (),
        budget: float | None = None,
        max_update_error: float | None = None,
    ) -> Policy:
        """Read a preset, flash by default, and rules. A ``budget`` in steps is a preset of its own.

        Moments under a budget keep ``max_update_error``. Raises UsageError for an unknown preset, a preset beside a
        budget, a budget out of range, and a malformed rule.
        """
        if budget is not None and preset is not None:
            raise UsageError(f"preset {preset!r} and budget {described(budget)} exclude each other; give one of them")
        if preset is None:
            preset = "flash" if budget is None else "archive"
        if preset not in PRESETS:
            raise UsageError(f"preset {preset!r}: expected one of {', '.join(PRESETS)}")
        steps = PRESET_BUDGETS.get(preset) if budget is None else Budget.of(budget)
        if steps is not None and max_update_error:
            steps = steps.bounded(max_update_error)
        return cls(preset, tuple(Rule.parse(text) for text in rules), steps)

    @property
    def keeps_compressed(self) -> bool:
        """Whether slices that a framework has compressed stay as they are, so that every file comes back exactly."""
        return self.preset == "lossless"

    def check_rules(self, names: Sequence[str]) -> None:
        """Raise UsageError for a rule that matches no tensor: with a typo, it would protect nothing."""
        for rule in self.rules:
            if not rule.matches(names):
                raise UsageError(f"rule {rule.text!r} matches no tensor; inspect --tensors lists them")

    def has_rule(self, names: Sequence[str]) -> bool:
        """Whether a rule matches any of these tensors."""
        return any(rule.matches(names) for rule in self.rules)

    def choose(
        self, spec: TensorSpec, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Codec, str | None]:
        """The codec of a storage, and the reason where it is lossless although its role or a rule says otherwise.

        ``spec`` is that of the storage, flat; ``names`` and ``shapes`` are those of its tensors.
        """
        for rule in self.rules:
            if rule.matches(names):
                codec = rule.codec_for(spec.role)
                if codec is not None and codec.accepts(spec):
                    return codec, None
                return LOSSLESS, f"rule {rule.text!r} does not fit {spec.dtype.label} {spec.role.value}"
        wanted = PRESETS[self.preset].get(spec.role)
        if wanted is None or not wanted.accepts(spec):
            return LOSSLESS, None
        kept = _why_kept(names, shapes)
        return (wanted, None) if kept is None else (LOSSLESS, kept)

    def is_free(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether a budget may choose the codec of a storage: no rule names it, and it is not kept as it is."""
        return _why_kept(names, shapes) is None and not self.has_rule(names)


def _why_kept(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str | None:
    """Why a storage stays exact under every preset, or None."""
    if any(_COMPONENTS.split(name)[-1] in BUFFERS for name in names):
        return "buffer"
    return "small" if any(is_small(shape) for shape in shapes) else None
