"""Replayed steps: a rule of ``ckpt8.optim`` on the state of a checkpoint, with gradients that are made for it.

Gradients are noise at the scale of the original's own statistics. They are made in blocks of 2^16 elements, in the
order in which the first tensor of the state is stored. So a block alone is enough to make them, and whoever replays the
same state gets the same: ``compress``, which reads it piece by piece, and ``verify``. A block takes

    scale   by element from the second moment where there is one, else one number from its part of the momentum
    noise   (a + b + c + d - 2 (2^16 - 1)) / sqrt((2^32 - 1) / 3), rounded to fp32, where a, b, c, d make up the 64 bits
            of one output of PCG64. numpy seeds it with (0x5EED, crc32 of the block of the first tensor in fp32, number
            of the step from 0 on). Its mean is 0, its variance 1; it is nearly normal, and the same on every machine

The rule that a parameter of a checkpoint follows, and its settings, are found by the card of its optimizer.

``Confidence`` is CAME's confidence in an update, from the row and column averages of a saved state.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np

from ckpt8.checkpoint.meaning.optimizer_state import LARGEST_STEP, UNKNOWN, identify_state, is_low_bit, recognise
from ckpt8.checkpoint.tree import TensorRef, is_dense
from ckpt8.codecs.companded8.reference import square_root
from ckpt8.core.files.source_file import crc32
from ckpt8.core.lazy import torch
from ckpt8.core.public import resolve
from ckpt8.optim.cards import VARIANTS, Card, Form
from ckpt8.optim.known_optimizers import CARDS, first_moments, setting, state_roles, why_unknown
from ckpt8.optim.packed_tensor import Block, Values, flat_blocks, row_blocks

SEED = 0x5EED
BLOCK = 1 << 16
"""Elements that have one seed, and one scale where that comes from a momentum. Tiles are multiples of it."""

LARGEST_MATRIX = 1 << 22
"""The most elements of a parameter that ``compress`` replays as a whole, for the memory and the time that it takes."""

_UNIFORM_MEAN, _UNIFORM_DEVIATION = 2 * (2**16 - 1), math.sqrt((2**32 - 1) / 3)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A rule, the number of steps so far, the hyperparameters. ``coupled``: weight decay is part of the gradient."""

    card: Card
    form: Form
    step: int
    lr: float
    weight_decay: float
    coupled: bool
    arguments: Mapping[str, Any]

    @property
    def needs_weight(self) -> bool:
        """Whether the update depends on the weight."""
        return self.card.needs_weight or (self.coupled and self.weight_decay != 0)

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Why no step can be taken with a first tensor of ``shape``, or None."""
        if not math.prod(shape):
            return "it has no elements"
        if self.form.reach == "matrix" and len(shape) < 2:
            return "its step takes a matrix, and its state is a vector"
        return None

    def gradient_scale(self, state: Values) -> torch.Tensor:
        """The RMS of recent gradients, flat: by element from the second moment, else one number for each block.

        That number is the RMS of independent gradients that would give the momentum m = a m + b g its RMS:
        rms(m) sqrt(1-a^2)/b.
        """
        if self.card.gradient_rms is not None:
            return cast("torch.Tensor", self.card.gradient_rms(state, self.arguments, self.step))
        if "exp_avg_sq_row" in state:
            rows = state["exp_avg_sq_row"]
            square = (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * state["exp_avg_sq_col"].unsqueeze(-2)
            return square_root(square.clamp_(min=0).nan_to_num_(0.0)).reshape(-1)
        if "exp_avg_sq" in state:
            biased = self.card.counts and self.form.update in ("adam", "replayed")
            bias = 1 - self.arguments["betas"][1] ** self.step if biased else 1.0
            return square_root(state["exp_avg_sq"].clamp(min=0) / bias)
        assert self.card.average is not None  # noqa: S101
        a, b = self.card.average(self.arguments)
        factor, blocks = math.sqrt(1 - a * a) / b, _blocks(state[self.form.tensors[0].key])
        scales = ((block.double().square().mean().sqrt() * factor).float().expand(block.shape) for block in blocks)
        return torch.cat(list(scales))

    def advance(
        self,
        state: dict[str, torch.Tensor],
        weight: torch.Tensor | None,
        grad: torch.Tensor,
        shape: tuple[int, ...],
        step: int,
    ) -> torch.Tensor:
        """Take step number ``step`` in place; return the update u per unit of learning rate, flat.

        All tensors are flat fp32 of a parameter of ``shape``, but for the row and column statistics. The rule subtracts
        u from a weight of zero at a learning rate of one without decay; if the weight is unknown, this call alone makes
        the new state. Where the step depends on the weight, u is all that it loses, per unit of learning rate.
        """
        if self.card.needs_weight and weight is not None:
            before, moved = weight.clone(), {**state, "param": weight}
            self._call({**moved, "grad": grad}, moved, shape, step, self.lr, self.weight_decay)
            return (before - weight) / self.lr
        if self.coupled and self.weight_decay and weight is not None:
            grad = grad + weight * self.weight_decay
        update = self.update(state, grad, shape, step, state if weight is None else {})
        if weight is not None:
            decay = 0.0 if self.coupled else self.weight_decay
            moved = {**state, "param": weight}
            self._call({**moved, "grad": grad}, moved, shape, step, self.lr, decay)
        return update

    def update(
        self,
        state: Values,
        grad: torch.Tensor,
        shape: tuple[int, ...],
        step: int,
        new_state: Values | None = None,
    ) -> torch.Tensor:
        """The update u of step number ``step``, as ``advance``; the results of the rule go to ``new_state``, if any."""
        update, nothing = torch.empty_like(grad), torch.zeros(1).expand(grad.shape)
        inputs, outputs = {**state, "grad": grad, "param": nothing}, {**(new_state or {}), "param": update}
        self._call(inputs, outputs, shape, step, 1.0, 0.0)
        return update.neg_()

    def first_updates(self, original: Values, decoded: Values, order: Order) -> tuple[torch.Tensor, torch.Tensor]:
        """The updates of the first step after the state of the original, and after the decoded one.

        Moments are flat fp32 tensors as they are stored. Of a rule that reaches no further than the element they may be
        any run of the elements that begins at a multiple of ``BLOCK``, in an order of its own.
        """
        grad = order.plain(Gradients(self, original).at(0))
        u, v = (
            self.update({key: order.plain(x) for key, x in state.items()}, grad, order.shape, self.step + 1)
            for state in (original, decoded)
        )
        return u, v

    def _call(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        step: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Call the rule on ``inputs`` and copy its results into those tensors that ``outputs`` has."""

        def load(start: int, stop: int, view: tuple[int, ...], names: tuple[str, ...]) -> list[torch.Tensor]:
            return [inputs[name][start:stop].clone().view(view) for name in names]

        whole = {tensor.key: inputs[tensor.key] for tensor in self.form.tensors if not tensor.is_moment}
        numel = math.prod(shape)
        if self.form.reach == "matrix":
            cuts = [(0, numel, Block(lambda *names: load(0, numel, shape, names)))]
        else:
            cuts = row_blocks(shape, load) if whole else flat_blocks(numel, load)
        rule: Callable[..., Iterator[Values]] = resolve(self.form.rule)
        results = rule(
            [block for _, _, block in cuts], whole, step=step, lr=lr, weight_decay=weight_decay, **self.arguments
        )
        for start, stop, _ in cuts:
            for name, value in next(results).items():
                if name in outputs:
                    outputs[name][start:stop] = value.reshape(-1)
        for name, value in (pair for values in results for pair in values.items()):
            if name in outputs:
                outputs[name].copy_(value)


@dataclass(frozen=True, slots=True)
class Order:
    """Between the plain order of a tensor's elements and that in which its storage has them.

    ``dimensions`` are those of the storage, outermost first; None where both orders are the same, and for a rule with
    row or column statistics, which takes all in plain order.
    """

    shape: tuple[int, ...]
    dimensions: tuple[int, ...] | None = None

    @classmethod
    def of(cls, form: Form, first: TensorRef) -> Order:
        """The order of the first tensor of a form, and with it of its seeds."""
        plain = tuple(range(len(first.shape)))
        dimensions = tuple(sorted(plain, key=lambda dim: -first.stride[dim]))
        is_plain = dimensions == plain or not is_dense(first) or not all(tensor.is_moment for tensor in form.tensors)
        return cls(first.shape, None if is_plain else dimensions)

    def stored(self, values: torch.Tensor) -> torch.Tensor:
        """Flat values in the order of the storage."""
        return values if self.dimensions is None else values.view(self.shape).permute(self.dimensions).reshape(-1)

    def plain(self, values: torch.Tensor) -> torch.Tensor:
        """Flat values in the plain order."""
        if self.dimensions is None:
            return values
        back = sorted(range(len(self.shape)), key=self.dimensions.__getitem__)
        return values.view([self.shape[dimension] for dimension in self.dimensions]).permute(back).reshape(-1)


class Gradients:
    """The gradients that both sides take, step by step; see the module."""

    def __init__(self, rule: Replayed, state: Values) -> None:
        self._scale = rule.gradient_scale(state)
        blocks = _blocks(state[rule.form.tensors[0].key])
        self._seeds = [(crc32(block.contiguous().numpy()), block.numel()) for block in blocks]

    def at(self, step: int) -> torch.Tensor:
        """The gradient of step number ``step``, counted from 0, flat."""
        return torch.cat([_noise(crc, step, numel) for crc, numel in self._seeds]) * self._scale


def _blocks(values: torch.Tensor) -> list[torch.Tensor]:
    return [values[start : start + BLOCK] for start in range(0, values.numel(), BLOCK)]


def _noise(crc: int, step: int, numel: int) -> torch.Tensor:
    bits: np.ndarray[Any, Any] = np.random.PCG64([SEED, crc, step]).random_raw(numel)
    total = sum(((bits >> shift) & 0xFFFF for shift in (16, 32, 48)), bits & 0xFFFF).astype(np.int64)
    return torch.from_numpy(((total - _UNIFORM_MEAN) / _UNIFORM_DEVIATION).astype(np.float32))


_DECOUPLED = ("decoupled_weight_decay", "decouple_wd", "weight_decouple")
"""Settings that are False where weight decay is an L2 penalty, as in Adam; else the card tells."""

_MISSING = object()


def find_rule(state: Mapping[Any, Any], group: Mapping[Any, Any], step: object) -> Replayed | str:
    """The rule of one parameter from its saved state and group, or why there is no replay.

    Numbers in tensors must have been read, see ``tree.read_settings``.
    """
    card_and_form = identify_state(state, group)
    if card_and_form is None or card_and_form[1].update is None or card_and_form[0].unknown:
        return _why_unknown(state, group)
    card, form = card_and_form
    if card.step_key != "step":
        step = group.get(card.step_key)
    taken = _steps_taken(card, state, group, step)
    if isinstance(taken, str):
        return taken
    names = card.settings.keys() | card.fixed.keys()
    settings = {**{key: value for key, value in state.items() if key in card.settings}, **group}
    read = {name: _read(name, card, state, settings) for name in names - {"lr", "weight_decay"}}
    shared = _numbers([group.get("lr"), group.get("weight_decay", 0.0)])
    if not shared or _MISSING in read.values():
        return "hyperparameters are missing from the parameter group, or out of range"
    lr, weight_decay = shared
    if weight_decay and (group.get("decouple_lr") or group.get("fixed_decay")):
        return "its weight decay does not follow the learning rate, which is not replayed"
    choices = {*VARIANTS, *card.choices, *names}
    present = {
        tensor.when: tensor.key in state for tensor in form.tensors if tensor.when and tensor.when not in choices
    }
    counted = {"taken": taken} if "taken" in card.fixed else {}
    stated = (group[key] is False for key in _DECOUPLED if key in group)
    coupled = not card.own_decay and next(stated, card.coupled)
    rule = Replayed(card, form, taken, lr, weight_decay, coupled, read | present | counted)
    return _why_impossible(rule, state) or rule


def _why_impossible(rule: Replayed, state: Mapping[Any, Any]) -> str | None:
    """Why the rule takes no step from a state, or None."""
    tensors = tuple(tensor.key for tensor in rule.form.tensors if isinstance(state.get(tensor.key), TensorRef))
    if not {tensor.key for tensor in rule.form.present(rule.arguments)} <= set(tensors):
        return "its state lacks a tensor that its hyperparameters ask for"
    shape = state[tensors[0]].shape
    if problem := rule.misfit(shape):
        return problem
    numbers = rule.step, rule.lr, rule.weight_decay, rule.coupled
    where = rule.card.rule_id, rule.card.forms.index(rule.form)
    given = tuple(sorted(rule.arguments.items()))
    is_possible = _takes_a_step(*where, numbers, given, tensors, len(shape))
    return None if is_possible else "its rule takes no step from such a state with such hyperparameters"


@lru_cache(maxsize=4096)
def _takes_a_step(
    rule_id: str,
    form: int,
    numbers: tuple[int, float, float, bool],
    given: tuple[tuple[str, Any], ...],
    tensors: tuple[str, ...],
    dimensions: int,
) -> bool:
    """Whether the rule takes a step of a few elements: some settings divide by zero, some rules take matrices alone."""
    card = CARDS[rule_id]
    rule = Replayed(card, card.forms[form], *numbers, dict(given))
    shape = (*[1] * (dimensions - 2), *[2] * min(dimensions, 2))
    try:
        state = {}
        for needed in (tensor for tensor in rule.form.tensors if tensor.key in tensors):
            values = torch.full(needed.shape(shape), 0.5)
            state[needed.key] = values.reshape(-1) if needed.is_moment else values
        grad = rule.gradient_scale(state)
        rule.advance(state, torch.ones(grad.shape), grad, shape, rule.step + 1)
    except (ArithmeticError, ValueError, TypeError, RuntimeError):
        return False
    return True


def _why_unknown(state: Mapping[Any, Any], group: Mapping[Any, Any]) -> str:
    """Why no rule fits a state: what can be seen of it, and nothing about how it is stored."""
    tensors = {key: ref for key, ref in state.items() if isinstance(ref, TensorRef) and ref.shape}
    if is_low_bit(state):
        return "its state is in low precision already, which is not replayed"
    if reason := why_unknown(tensors, state, group):
        return reason
    known = {*first_moments(), *state_roles(tensors)}
    return UNKNOWN if not tensors or tensors.keys() & known else "its state has no first moment"


def _steps_taken(card: Card, state: Mapping[Any, Any], group: Mapping[Any, Any], step: object) -> int | str:
    """The number of the last step, or why it is unknown; 1 if the rule needs none, since there is a momentum."""
    if not card.counts:
        return 1
    number = float(step) if isinstance(step, (int, float)) and abs(step) <= LARGEST_STEP else None
    if isinstance(rule := recognise(state, group, number), str):
        return rule
    if group.keys() & {"bias_correction", "correct_bias"}:
        return "an Adam whose group has bias_correction or correct_bias is not replayed"
    return int(number) if number is not None and number >= 0 and number == int(number) else "the step is missing"


_RANGES: dict[str, Callable[[float], bool]] = {
    "betas": lambda beta: 0 <= beta < 1,
    "momentum": lambda momentum: 0 <= momentum < 1,
    "dampening": lambda dampening: dampening < 1,
    "clip_threshold": lambda threshold: threshold > 0,
    "ns_steps": lambda steps: 0 <= steps <= 64,  # of Newton and Schulz; five are usual
}


def _read(name: str, card: Card, state: Mapping[Any, Any], group: Mapping[Any, Any]) -> Any:
    """An argument of the rule from the group, else the fixed one of the card; _MISSING, also if it is out of range."""
    if name == "clip_threshold" and "beta1" in group and "eps_sq" not in state:
        return math.inf  # optimi's AdamW has StableAdamW's averages, but does not clip.
    if name not in card.settings and (name not in group or not card.cls):
        return card.fixed[name]
    given, count = setting(group, name), card.settings.get(name, 1)
    if not count:
        return given
    # Some packages keep the threshold outside the group.
    given = 1.0 if name == "clip_threshold" and name not in group else given
    numbers = _numbers(given if isinstance(given, (tuple, list)) else [given])
    if len(numbers) != count or not all(map(_RANGES.get(name, math.isfinite), numbers)):
        return _MISSING
    return numbers if count > 1 else numbers[0]


def _numbers(values: Any) -> tuple[float, ...]:
    """Finite numbers as floats; empty for anything else."""
    given = tuple(values) if isinstance(values, (tuple, list)) else ()
    numeric = all(isinstance(n, (int, float)) and abs(n) <= sys.float_info.max for n in given)
    return tuple(map(float, given)) if numeric else ()


@dataclass(frozen=True)
class Confidence:
    """CAME's approx(Rr, Cr) = rsqrt(R / mean(R)) (x) rsqrt(C), computed for a range of elements at a time.

    ``rows`` has the shape of the parameter without its last dimension, ``columns`` without its second to last. They may
    be those of a slice. mean(R) is that of all rows; where ``has_some_rows``, it is the mean of the columns, since both
    average the same squares.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    has_some_rows: bool = field(default=False, kw_only=True)

    @cached_property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column factors, computed in float64 and rounded once: the same on every machine."""
        row = (self.rows.double() / self._means).rsqrt().float().reshape(-1)
        return row, self.columns.double().rsqrt().float().reshape(-1, self.columns.shape[-1])

    @property
    def _means(self) -> torch.Tensor:
        """mean(R) of every matrix."""
        return (self.columns if self.has_some_rows else self.rows).double().mean(dim=-1, keepdim=True)

    @property
    def least_share(self) -> float:
        """How large the rows are beside all rows of their matrix, on average: the least of all matrices."""
        if not self.has_some_rows:
            return 1.0
        return float((self.rows.double().mean(dim=-1, keepdim=True) / self._means).min())

    def at(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """The factors of elements ``start`` to ``stop`` of the flat parameter, on ``device`` or else the CPU."""
        row, column = (factor.to(device) for factor in self.factors)
        height, width = self.rows.shape[-1], self.columns.shape[-1]
        index = torch.arange(start // width, -(-stop // width), device=device)
        block = row[index].unsqueeze(1) * column[index // height]
        first = start // width * width
        return block.reshape(-1)[start - first : stop - first]
