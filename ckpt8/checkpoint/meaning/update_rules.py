"""Update space: the step that an optimizer would take per unit of learning rate, from its saved state alone.

    adam          u = (m / (1 - b1^t)) / (sqrt(v) / sqrt(1 - b2^t) + eps)     amsgrad: v is max_exp_avg_sq
    stable_adamw  u = m / (sqrt(v) + eps)                                      state already free of bias
    came          u = m * rsqrt(R / mean(R)) (x) rsqrt(C)                      R, C: exp_avg_res_row, exp_avg_res_col
    momentum      u = m                                                        SGD, CAME below two dimensions
    replayed      the step with a seeded gradient, see ``replayed``            Lion, SGD with Nesterov's momentum

Sources: torch.optim.AdamW; Wortsman et al., arXiv 2304.13013 (StableAdamW of optimi and pytorch_optimizer); Luo et al.,
arXiv 2307.02047. The keys that it alone writes tell an optimizer. For an unknown optimizer there is no figure: a guess
would be a claim that nobody measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from ckpt8.checkpoint.tree import TensorRef
from ckpt8.optim.cards import Card, Form, Update
from ckpt8.optim.known_optimizers import SIDE_STATE, identify, setting, why_unknown

if TYPE_CHECKING:
    import torch

_LARGEST, _LARGEST_STEP = 1e300, 2**53
UNKNOWN = "the optimizer is not one whose update rule is known"
_ADAM_OR_RADAM = "optimi's Adam, AdamW and RAdam write the same, and their steps still differ at this step"
_INCOMPLETE = "betas or eps are missing from the parameter group"


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The rule that turns the state into a step. ``step`` counts from 1; it and the betas matter to ``adam`` only.

    A ``replayed`` rule has no closed form: nothing but its ``kind`` says anything here, and ``apply`` is not defined.
    """

    kind: Update
    step: int = 0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Its plain values by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def factor(self) -> float:
        """What ``apply`` leaves out: sqrt(1 - b2^t) / (1 - b1^t) for adam, else 1."""
        return self.root_bias2 / self.bias1 if self.kind == "adam" else 1.0

    @property
    def divisor_eps(self) -> float | None:
        """What ``apply`` adds to sqrt(v) before it divides; None for a rule that does not divide by it."""
        return self.eps * self.root_bias2 if self.kind in ("adam", "stable_adamw") else None

    @property
    def bias1(self) -> float:
        """What m is divided by to be free of bias; 1 where the rule corrects none."""
        return 1.0 - self.beta1**self.step if self.kind == "adam" else 1.0

    @property
    def root_bias2(self) -> float:
        """What sqrt(v) is divided by to be free of bias; 1 where the rule corrects none."""
        return math.sqrt(1.0 - self.beta2**self.step) if self.kind == "adam" else 1.0

    def apply(self, moment1: torch.Tensor, root2: torch.Tensor | None, confidence: torch.Tensor | None) -> torch.Tensor:
        """The update divided by ``factor``, for a flat fp32 tile.

        ``root2`` is sqrt(v) and ``confidence`` is CAME's factored term, each for the same elements.
        """
        if self.kind == "came" and confidence is not None:
            return moment1 * confidence
        if self.divisor_eps is None or root2 is None:
            return moment1
        return moment1 / (root2 + self.divisor_eps)


def read_rule(stored: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The plain values of a rule that a container states; None where they make no rule."""
    try:
        rule = UpdateRule(**stored or {"kind": None})
    except TypeError:
        return None
    valid = None not in map(finite, (rule.beta1, rule.beta2, rule.eps)) and type(rule.step) is int
    return rule.to_json() if valid and rule.kind in get_args(Update) else None


def finite(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _LARGEST else None


def identify_state(state: Mapping[Any, Any], group: Mapping[Any, Any]) -> tuple[Card, Form] | None:
    """The optimizer of a parameter's state, and its form; None where it explains not every key of the state."""
    tensors = _tensors(state)
    return identify(tensors, state, group) if state.keys() - SIDE_STATE <= tensors else None


def _tensors(state: Mapping[Any, Any]) -> set[Any]:
    return {key for key, value in state.items() if isinstance(value, TensorRef)} - SIDE_STATE


def recognise(state: Mapping[Any, Any], group: Mapping[Any, Any], step: float | None) -> UpdateRule | str:
    """The update rule of one parameter, or why it is unknown.

    ``state`` is the parameter's optimizer state, ``group`` its parameter group, ``step`` the step found in either.
    """
    return rule_of(identify_state(state, group), state, group, step)


def rule_of(
    card_and_form: tuple[Card, Form] | None, state: Mapping[Any, Any], group: Mapping[Any, Any], step: float | None
) -> UpdateRule | str:
    """The rule of the optimizer that ``identify_state`` recognised, or why its update is unknown."""
    if card_and_form is None or card_and_form[1].update is None:
        return why_unknown(_tensors(state), state, group) or UNKNOWN
    kind = card_and_form[1].update
    if kind == "momentum" and group.get("nesterov"):
        kind = "replayed"
    return _adam(kind, state, group, step) if kind in ("adam", "stable_adamw") else UpdateRule(kind)


def _adam(kind: Update, state: Mapping[Any, Any], group: Mapping[Any, Any], step: float | None) -> UpdateRule | str:
    """The rule of Adam, or that of StableAdamW where the moments are free of bias."""
    eps, given = finite(group.get("eps")), setting(group, "betas")
    numbers = [finite(beta) for beta in given] if isinstance(given, (tuple, list)) else []
    betas = [beta for beta in numbers if beta is not None and 0 <= beta < 1]
    if eps is None:
        return _INCOMPLETE
    if kind == "stable_adamw":
        may_be_radam = "beta1" in group and "eps_sq" not in state and not _is_rectified(betas, step)
        return _ADAM_OR_RADAM if may_be_radam else UpdateRule(kind, eps=eps)
    if not len(betas) == len(numbers) == 2:
        return _INCOMPLETE
    if group.get("bias_correction", group.get("correct_bias", True)) in (False, 0):
        return UpdateRule("stable_adamw", eps=eps)
    count = finite(step)
    if count is None or not 1 <= count <= _LARGEST_STEP or count != int(count):
        return "the step is missing"
    return UpdateRule("adam", int(count), betas[0], betas[1], eps)


def _is_rectified(betas: list[float], step: float | None) -> bool:
    """Whether RAdam's step is that of Adam to a thousandth: see ``recognised.rules``."""
    if len(betas) < 2 or step is None or not 1 <= step <= _LARGEST_STEP:
        return False
    last = 2 / (1 - betas[1]) - 1
    length: float = last - 2 * step * betas[1] ** step / (1 - betas[1] ** step)
    return length > 5 and (length - 4) * (length - 2) * last / ((last - 4) * (last - 2) * length) > 0.998
