"""What the saved state of a parameter is: its update rule, and whether its moments are in low precision.

Update space is the step that an optimizer would take per unit of learning rate, from its saved state alone.

    adam          u = (m / (1 - b1^t)) / (sqrt(v) / sqrt(1 - b2^t) + eps)     amsgrad: v is max_exp_avg_sq
    stable_adamw  u = m / (sqrt(v) + eps)                                      state already free of bias
    came          u = m * rsqrt(R / mean(R)) (x) rsqrt(C)                      R, C: exp_avg_res_row, exp_avg_res_col
    momentum      u = m                                                        SGD, CAME below two dimensions
    replayed      the step with a seeded gradient, see ``replayed``            Lion, SGD with Nesterov's momentum

Prodigy averages d g and d^2 g^2 for gradients g, and steps by lr d m / (sqrt(v) + d eps); its group may ask for Adam's
corrections. That is a step of Adam for m / d and v / d^2 at the rate lr d, so that errors weigh by g^2 as Adam's do.
The next step has the d of the file in its rate and averages, and a new one in d eps, which depends on all parameters.

Sources: torch.optim.AdamW; Mishchenko and Defazio, arXiv 2306.06101 (Prodigy); Wortsman et al., arXiv 2304.13013
(StableAdamW of optimi and pytorch_optimizer); Luo et al., arXiv 2307.02047. The keys that it alone writes tell an
optimizer. For an unknown optimizer there is no figure: a guess would be a claim that nobody measured.

Optimizer state in low precision is that of bitsandbytes, torchao, flashoptim and ckpt8.optim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from ckpt8.checkpoint.tree import Inert, TensorRef
from ckpt8.core.grouping import grouped
from ckpt8.core.tensors import DType, Role, TensorSpec
from ckpt8.core.text import counted
from ckpt8.optim.cards import Card, Form, Update
from ckpt8.optim.known_optimizers import SIDE_STATE, identify, setting, why_unknown

if TYPE_CHECKING:
    import torch

LARGEST_STEP = 2**53
UNKNOWN = "the optimizer is not one whose update rule is known"
_ADAM_OR_RADAM = "optimi's Adam, AdamW and RAdam write the same, and their steps still differ at this step"
_INCOMPLETE = "betas or eps are missing from the parameter group"


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """One parameter of a source: its optimizer state by key, its parameter group, and its weight.

    ``name`` is for people. ``whole`` is the shape of the parameter where its tensors are a slice of it, else None.
    ``optimizer`` tells its optimizer from others of the source; ``identifier`` stands for the parameter in its group.
    ``shape`` is that of the first moment or residual, None without one. ``unpaired`` says why the ``weight`` is
    unknown; ``home`` is the path of the file that holds it, None for the file of the state. ``master`` is the fp32
    weight that the optimizer keeps itself, if it does.
    """

    name: str
    state: Mapping[Any, Any]
    group: Mapping[Any, Any]
    whole: tuple[int, ...] | None = None
    optimizer: Any = 0
    identifier: int | str = ""
    shape: tuple[int, ...] | None = None
    weight: TensorRef | None = None
    unpaired: str | None = None
    home: str | None = None
    master: TensorRef | None = None

    @property
    def tensors(self) -> dict[Any, TensorRef]:
        """The tensors of its state."""
        return {key: ref for key, ref in self.state.items() if isinstance(ref, TensorRef)}


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The rule that turns the state into a step. ``step`` counts from 1; it and the betas matter to ``adam`` only.

    ``scale`` is what m and the root of v are divided by to be averages of gradients and of their squares. ``rate``
    multiplies the learning rate.
    A ``replayed`` rule has no closed form: nothing but its ``kind`` says anything here, and ``apply`` is not defined.
    """

    kind: Update
    step: int = 0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    scale: float = 1.0
    rate: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Its plain values by name, with an eps for which u is the same at a ``scale`` of one."""
        numbers = {name: getattr(self, name) for name in ("kind", "step", "beta1", "beta2", "eps")}
        return {**numbers, "eps": self.eps * self.scale}

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
        return self.scale * (1.0 - self.beta1**self.step if self.kind == "adam" else 1.0)

    @property
    def root_bias2(self) -> float:
        """What sqrt(v) is divided by to be free of bias; 1 where the rule corrects none."""
        return self.scale * (math.sqrt(1.0 - self.beta2**self.step) if self.kind == "adam" else 1.0)

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
    return float(value) if is_number and abs(value) < 1e300 else None


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
    if scale_key := card_and_form[0].scale_key:
        return _scaled_rule(group, group[scale_key])
    if kind == "momentum" and group.get("nesterov"):
        kind = "replayed"
    return adam_rule(kind, state, group, step) if kind in ("adam", "stable_adamw") else UpdateRule(kind)


def adam_rule(kind: Update, state: Mapping[Any, Any], group: Mapping[Any, Any], step: float | None) -> UpdateRule | str:
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
    if count is None or not 1 <= count <= LARGEST_STEP or count != int(count):
        return "the step is missing"
    return UpdateRule("adam", int(count), betas[0], betas[1], eps)


def _scaled_rule(group: Mapping[Any, Any], scale: float) -> UpdateRule | str:
    """The rule of Prodigy. pytorch_optimizer counts steps from one, prodigyopt from zero."""
    corrected = group.get("bias_correction", group.get("use_bias_correction"))
    taken = finite(group.get("k", group.get("step")))
    step = taken if taken is None or "k" in group else taken - 1
    rule = adam_rule("adam", {}, {**group, "bias_correction": True}, step)
    if isinstance(rule, str):
        return rule
    root, eps = rule.root_bias2, rule.eps / rule.root_bias2
    if corrected:
        return replace(rule, eps=eps, scale=scale, rate=scale)
    return UpdateRule("stable_adamw", rule.step, eps=eps, scale=scale * root, rate=scale)


def _is_rectified(betas: list[float], step: float | None) -> bool:
    """Whether RAdam's step is that of Adam to a thousandth: see ``recognised_rules``."""
    if len(betas) < 2 or step is None or not 1 <= step <= LARGEST_STEP:
        return False
    last = 2 / (1 - betas[1]) - 1
    length: float = last - 2 * step * betas[1] ** step / (1 - betas[1] ** step)
    return length > 5 and (length - 4) * (length - 2) * last / ((last - 4) * (last - 2) * length) > 0.998


NESTED = "__bnb_optimizer_quant_state__"
SUBCLASS = "torch._tensor._rebuild_from_type_v2"


def bitsandbytes_moments(state: Mapping[Any, Any], group: Mapping[Any, Any]) -> dict[str, TensorRef]:
    """The 32-bit moments of one parameter in a state of bitsandbytes, by their names in torch; empty if unclear.

    Two of one shape are those of Adam, or of LAMB before its trust ratio. One alone is the moment of Lion where the
    second beta and the lack of an epsilon say so; else it might be the second moment of RMSprop or Adagrad.
    """
    nested = state.get(NESTED, state)
    if not isinstance(nested, dict):
        return {}
    tensors = {key: value for key, value in nested.items() if isinstance(value, TensorRef) and key != "step"}
    betas = group.get("betas")
    has_betas = isinstance(betas, (list, tuple)) and len(betas) == 2 and betas[1]
    if not has_betas or any(ref.dtype is not DType.FLOAT32 for ref in tensors.values()):
        return {}
    if tensors.keys() - {"unorm_vec"} == {"state1", "state2"}:
        first, second = tensors["state1"], tensors["state2"]
        return {"exp_avg": first, "exp_avg_sq": second} if first.shape == second.shape else {}
    return {"exp_avg": tensors["state1"]} if tensors.keys() == {"state1"} and group.get("eps") == 0 else {}


def quantised_weights(node: Mapping[Any, Any]) -> list[str]:
    """The names of weights that are 8-bit codes for inference with a scale, as compressed-tensors writes them."""
    names = (key.removesuffix("_scale") for key in node if isinstance(key, str) and key.endswith("weight_scale"))
    return [name for name in names if isinstance(ref := node.get(name), TensorRef) and ref.dtype.itemsize == 1]


def with_moments(state: Mapping[Any, Any], moments: Mapping[str, TensorRef]) -> Mapping[Any, Any]:
    """The state of one parameter with its ``moments`` of bitsandbytes under the names of torch."""
    if not moments:
        return state
    others = {**state, **state.get(NESTED, state), **moments}
    return {key: value for key, value in others.items() if key not in (NESTED, "state1", "state2")}


def is_low_bit(state: Mapping[Any, Any]) -> bool:
    """Whether moments of a state are 8-bit codes, or of a tensor subclass that holds such."""
    nested = state.get(NESTED)
    return any(
        (isinstance(value, TensorRef) and value.dtype.itemsize == 1 and bool(value.shape))
        or (isinstance(value, Inert) and value.name == SUBCLASS)
        for value in [*state.values(), *(nested.values() if isinstance(nested, dict) else ())]
    )


def parameter_shape(state: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """The shape of the parameter that a state belongs to, from a value that has its shape; None where none has."""
    rows, columns = state.get("exp_avg_sq_row"), state.get("exp_avg_sq_col")
    if isinstance(rows, TensorRef) and isinstance(columns, TensorRef):
        return rows.shape + columns.shape[-1:]
    rows, columns = state.get("row_var"), state.get("col_var")
    if isinstance(rows, TensorRef) and isinstance(columns, TensorRef) and len(rows.shape) == len(columns.shape):
        return tuple(map(max, rows.shape, columns.shape))
    nested = state.get(NESTED)
    keys = ("exp_avg", "exp_avg_sq", "exp_avg::quantized", "momentum_buffer::quantized", "state2", "state1")
    for value in (holder.get(key) for holder in (state, nested) if isinstance(holder, Mapping) for key in keys):
        if isinstance(value, TensorRef):
            return value.shape
        if isinstance(value, Inert) and value.name == SUBCLASS and len(value.args) == 4:
            match value.args[2]:
                case (_, _, tuple(shape), *_) if all(type(size) is int for size in shape):
                    return shape
            return None
    return None


_PROGRAMS = {
    "bitsandbytes": re.compile(r"(?P<owner>.*)\.(?P<part>state[12]|absmax[12]|max[12]|qmap[12])"),
    "torchao": re.compile(r"(?P<owner>.*)\.[a-z_]+\.3\.(?P<part>codes|scale|qmap)"),
    "flashoptim": re.compile(r"(?P<owner>.*)\.[a-z_]+::(?P<part>quantized|scales)"),
    "ckpt8.optim": re.compile(r"(?P<owner>.*)\.[a-z_]+_(?P<part>codes|scales)"),
}
"""The names of a moment's parts, by program."""


def find_low_bit(parts: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """The optimizer state in low precision, sorted by program and bits: program, bits, block, parameters and bytes.

    ``block`` is the number of values that share a scale, None where unknown. ``reason`` says why 32 bits stay 32.
    """
    matches = (
        (program, match, part)
        for part in parts
        if part.role is Role.OTHER
        for program, pattern in _PROGRAMS.items()
        if (match := pattern.fullmatch(part.name)) is not None
    )
    owners = grouped(((program, match["owner"]), (match["part"], part)) for program, match, part in matches)
    rows: dict[tuple[str, str, int | None], dict[str, Any]] = {}
    for (program, _), owned in owners.items():
        if (described := _describe(program, grouped(owned))) is not None:
            row = rows.setdefault((program, *described), {"parameters": 0, "bytes": 0})
            row["parameters"] += 1
            row["bytes"] += sum(part.numel * part.dtype.itemsize for _, part in owned)
    return [
        {
            "program": program,
            "bits": bits,
            "block": block,
            **row,
            "reason": "what its moments are cannot be told" if bits == "32-bit" else None,
        }
        for (program, bits, block), row in sorted(rows.items(), key=lambda item: (*item[0][:2], item[0][2] or 0))
    ]


def _describe(program: str, owned: Mapping[str, list[TensorSpec]]) -> tuple[str, int | None] | None:
    """Bits and block of the state of one parameter; None where the program does not write such a state."""
    if program == "bitsandbytes":
        return _describe_bitsandbytes(owned)
    codes = next((owned[name][0] for name in ("codes", "quantized") if name in owned), None)
    scales = next((owned[name][0] for name in ("scale", "scales") if name in owned), None)
    if codes is None or scales is None:
        return None
    if program != "torchao":
        return ("8-bit", 32) if codes.dtype in (DType.INT8, DType.UINT8) else None
    if "qmap" not in owned:
        return "fp8", codes.numel // max(scales.numel, 1)
    packed = 2 if owned["qmap"][0].numel == 16 else 1
    return f"{8 // packed}-bit", packed * codes.numel // max(scales.numel, 1)


def _describe_bitsandbytes(owned: Mapping[str, list[TensorSpec]]) -> tuple[str, int | None] | None:
    state = next((owned[name][0] for name in ("state1", "state2") if name in owned), None)
    if state is not None and state.dtype is DType.FLOAT32:
        return "32-bit", None
    if state is None or state.dtype is not DType.UINT8 or "qmap1" not in owned:
        return None
    scales = owned["absmax1"][0].numel if "absmax1" in owned else 0
    blocks = (1 << k for k in range(13))  # up to 4096
    return "8-bit", next((block for block in blocks if -(-state.numel // block) == scales), None)


def line(row: Mapping[str, Any]) -> str:
    """One row of ``find_low_bit`` for people."""
    block = f" (block {row['block']})" if row["block"] else ""
    reason = f": {row['reason']}" if row["reason"] else ""
    count = counted(row["parameters"], "parameter")
    return f"{row['program']} {row['bits']} state of {count}{block}, kept as it is{reason}"
