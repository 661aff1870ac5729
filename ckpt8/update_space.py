"""Update space: the step that an optimizer would take per unit of learning rate, from its stored state alone.

    adam          u = (m / (1 - b1^t)) / (sqrt(v) / sqrt(1 - b2^t) + eps)     amsgrad: v is max_exp_avg_sq
    stable_adamw  u = m / (sqrt(v) + eps)                                      state already free of bias
    came          u = m * rsqrt(R / mean(R)) (x) rsqrt(C)                      R, C: exp_avg_res_row, exp_avg_res_col
    momentum      u = m                                                        SGD, Lion, CAME below two dimensions

Sources: torch.optim.AdamW; Wortsman et al., arXiv 2304.13013 (optimi's and pytorch_optimizer's StableAdamW); Luo et
al., arXiv 2307.02047. An optimizer is recognised by the keys that it alone writes. One that is not is unknown, and
then no figure is given: a guess would be a claim that nobody measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckpt8.readers.base import TensorRef

if TYPE_CHECKING:
    import torch

_UNKNOWN = "the optimizer is not one whose update rule is known"

Kind = Literal["adam", "stable_adamw", "came", "momentum"]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How a step is made of the state. ``step`` counts from 1; it and the betas matter to ``adam`` only."""

    kind: Kind
    step: int = 0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0

    @property
    def factor(self) -> float:
        """What ``apply`` leaves out: 1 / (1 - b1^t) for adam, else 1."""
        return 1.0 / (1.0 - self.beta1**self.step) if self.kind == "adam" else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def apply(self, moment1: torch.Tensor, root2: torch.Tensor | None, confidence: torch.Tensor | None) -> torch.Tensor:
        """The update divided by ``factor``, for a flat fp32 tile.

        ``root2`` is sqrt(v) and ``confidence`` is CAME's factored term, each for the same elements.
        """
        if self.kind == "came" and confidence is not None:
            return moment1 * confidence
        if self.kind == "momentum" or root2 is None:
            return moment1
        if self.kind == "adam":
            root2 = root2 / math.sqrt(1.0 - self.beta2**self.step)
        return moment1 / (root2 + self.eps)


@dataclass(frozen=True, slots=True)
class Confidence:
    """CAME's approx(Rr, Cr) = rsqrt(R / mean(R)) (x) rsqrt(C), unfolded only for the elements asked for.

    ``rows`` has the shape of the parameter without its last dimension, ``columns`` without its second to last.
    """

    rows: torch.Tensor
    columns: torch.Tensor

    def at(self, start: int, stop: int) -> torch.Tensor:
        """The factors of elements ``start`` to ``stop`` of the flat parameter."""
        import torch

        height, width = self.rows.shape[-1], self.columns.shape[-1]
        row = (self.rows / self.rows.mean(dim=-1, keepdim=True)).rsqrt_().reshape(-1)
        column = self.columns.rsqrt().reshape(-1, width)
        index = torch.arange(start // width, -(-stop // width))
        block = row[index].unsqueeze(1) * column[index // height]
        first = int(index[0]) * width
        return block.reshape(-1)[start - first : stop - first]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _betas(group: Mapping[Any, Any]) -> tuple[float, ...] | None:
    betas = group.get("betas")
    if isinstance(betas, (tuple, list)) and all(_number(beta) is not None for beta in betas):
        return tuple(float(beta) for beta in betas)
    return None


def _adam(group: Mapping[Any, Any], step: float | None) -> UpdateRule | str:
    betas, eps = _betas(group), _number(group.get("eps"))
    if not {"amsgrad", "bias_correction", "correct_bias"} & group.keys() or betas is None or len(betas) != 2:
        return _UNKNOWN
    if eps is None or not all(0 <= beta < 1 for beta in betas):
        return "betas or eps are missing from the parameter group"
    if group.get("bias_correction", group.get("correct_bias", True)) in (False, 0):
        return UpdateRule("stable_adamw", eps=eps)
    if step is None or step < 1 or step != int(step) or step > 2**53:
        return "the step is missing"
    return UpdateRule("adam", int(step), betas[0], betas[1], eps)


def recognise(state: Mapping[Any, Any], group: Mapping[Any, Any], step: float | None) -> UpdateRule | str:
    """The update rule of one parameter, or why it is unknown.

    ``state`` is the parameter's optimizer state, ``group`` its parameter group, ``step`` the step found in either.
    """
    tensors = {key for key, value in state.items() if isinstance(value, TensorRef)}
    if {"exp_avg", "exp_avg_res_row", "exp_avg_res_col"} <= tensors:
        return UpdateRule("came")
    if "RMS" in state and "exp_avg" in tensors:
        return UpdateRule("momentum")
    if {"exp_avg", "exp_avg_sq"} <= tensors:
        eps = _number(group.get("eps"))
        # optimi's own group keys, and the state that only the two StableAdamW write: no bias is left in the state.
        unbiased = eps is not None and ("beta1" in group or "kahan_comp" in state or "eps_sq" in state)
        if not tensors & {"exp_avg_diff", "la_param"}:
            return UpdateRule("stable_adamw", eps=eps or 0.0) if unbiased else _adam(group, step)
    elif tensors & {"exp_avg", "momentum_buffer"} and "exp_inf" not in tensors:
        return UpdateRule("momentum")
    return _UNKNOWN
