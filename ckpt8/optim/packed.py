"""``PackedOptimizer``, the base class of all optimizers here: it takes steps on packed state, saves and loads it.

An optimizer is a rule over blocks of fp32 values (see ``packed_tensor``). A block is a tile of 2^18 elements, so a step
needs a few megabytes more than the packed state. Operations on state are elementwise and rounded
once, sums run over fixed pieces, and random bits depend on (seed, index of the parameter, step, element) alone. So a
run is reproducible, resumes bit for bit, and does not depend on tile size or threads.

On a CUDA device Triton kernels take the step, with the same results (see ``triton``): a few launches for all of a
group, and the host reads nothing, so a CUDA graph can capture steps. There ``step`` lies on the device. A parameter
that the kernels cannot update is updated as on a CPU, and a warning says why.

Per parameter: ``step`` (int64), ``residual`` or ``master`` (see ``packed_tensor``), and for each moment ``NAME_codes``
of the parameter's shape and ``NAME_scales`` (see ``packed_tensor``), or ``NAME`` in fp32 where the parameter is small.
Row and column averages are fp32. The parameter group holds the configuration of the codecs under ``master``,
``moment1`` and ``moment2``.

A packed state dict is checked against the optimizer before anything changes, and copied.

``torch.optim.Optimizer.load_state_dict`` casts state to the element type of the parameter, which destroys codes and
scales, and it shares memory with the state dict. ``PackedOptimizer`` does neither.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import cached_property, partial
from typing import Any, ClassVar, cast, get_args

import torch

from ckpt8.codecs import Codec, codec_from_config, config_of, parse_codec
from ckpt8.codecs.base import TILE, StateKey
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.split24 import Split32
from ckpt8.core.errors import UsageError, require
from ckpt8.core.public import resolve
from ckpt8.core.tensors import is_small
from ckpt8.optim.cards import Card
from ckpt8.optim.known_optimizers import card_of
from ckpt8.optim.packed_tensor import (
    CHECKS,
    Moment,
    PackedTensor,
    StateLayout,
    flat_blocks,
    groups_of,
    master_part,
    row_blocks,
    stream_key,
    weight_check,
)
from ckpt8.optim.triton.dispatch import Fused, Work

MOMENT2 = "companded8(signed=False, Q=255, p=0.5)"
"""The default codec of second moments, chosen by the measurements in ``packed_tensor``."""

_LIMITS = {"betas": 1.0, **dict.fromkeys(("lr", "weight_decay", "momentum", "clip_threshold", "d", "eps"), math.inf)}
"""Settings whose numbers lie in [0, limit), and their limits."""


def as_codec(given: Any) -> Codec:
    """A codec from text, as in ``companded8(Q=31)``, or from its stored configuration. Raises UsageError."""
    if isinstance(given, Mapping):
        return codec_from_config(given)
    require(isinstance(given, str), f"{given!r} is neither the name of a codec nor a stored configuration", UsageError)
    cls, fields = parse_codec(given)
    return cast("Codec", cls(**fields))


def check_group(group: dict[str, Any]) -> None:
    """Replace the codecs of a group by their configurations. Raises UsageError for invalid options."""
    for key in get_args(StateKey):
        codec = as_codec(group[key])
        require(codec.trains(key), f"{key}={group[key]!r}: this codec does not hold {key}", UsageError)
        group[key] = config_of(codec)
    master = codec_from_config(group["master"])
    for param in group["params"]:
        master_part(param.dtype, master)
    card = card_of(group["rule"])
    for key, limit in _LIMITS.items():
        given, several = group.get(key, 0.0), card.settings.get(key, 1) > 1
        if several and not isinstance(given, (tuple, list)):
            raise UsageError(f"{key} must be several numbers, not {given!r}")
        for value in given if several else (given,):
            if value is not None or key not in card.nullable:
                _check_number(key, value, limit)
    decoupled = group.get("decoupled_weight_decay")
    if decoupled not in (None, card.fixed.get("decoupled", decoupled)) and group["weight_decay"]:
        other = "AdamW" if decoupled else "Adam"
        raise UsageError(f"decoupled_weight_decay={decoupled} is not supported; ckpt8.optim.{other} decays so")
    for key, kind in (("maximize", bool), ("seed", int)):
        require(
            isinstance(group[key], kind), f"{key} must be of the type {kind.__name__}, not {group[key]!r}", UsageError
        )


def _check_number(key: str, value: Any, limit: float) -> None:
    """Raise UsageError unless ``value``, a number or a tensor of one, lies in [0, limit)."""
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0.0 <= number < limit:
        raise UsageError(f"{key} must be a number in [0, {limit:g}), not {value!r}")


_UNSUPPORTED = {
    "amsgrad": "its largest second moment has no packed form; torch.optim.AdamW has it",
    "differentiable": "the step changes packed state, through which no gradient flows; torch.optim has it",
}
"""Arguments of torch's optimizers that must be False here, and what to say of True."""


def check_torch_arguments(given: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments of torch's optimizers that mean something that these cannot do."""
    for key in ("fused", "foreach", "capturable", *_UNSUPPORTED):
        value = given.get(key)
        require(value is None or isinstance(value, bool), f"{key} must be True or False, not {value!r}", UsageError)
        if value and key in _UNSUPPORTED:
            raise UsageError(f"{key}=True is not supported; {_UNSUPPORTED[key]}")


StateContent = Mapping[str, tuple[torch.dtype, tuple[int, ...]] | None]
"""Element type and shape of every entry of a saved state; None for an entry that is no tensor."""

State = defaultdict[torch.Tensor, dict[str, Any]]


def matched_state(optimizer: PackedOptimizer, state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], State]:
    """New parameter groups and state for ``optimizer``, copied from a state dict. Raises UsageError."""
    saved = state_dict["param_groups"]
    sizes, expected = ([len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups))
    require(
        sizes == expected,
        f"parameter groups of {sizes} parameters do not fit an optimizer with groups of {expected}",
        UsageError,
    )
    if extra := state_dict["state"].keys() - {identifier for group in saved for identifier in group["params"]}:
        raise UsageError(f"state of parameters that no group has: {sorted(map(str, extra))[:5]}")
    groups = [_matched_group(*pair, optimizer.rule_id) for pair in zip(optimizer.param_groups, saved, strict=True)]
    state: State = defaultdict(dict)
    for group, given in zip(groups, saved, strict=True):
        for param, identifier in zip(group["params"], given["params"], strict=True):
            if own := state_dict["state"].get(identifier):
                state[param] = _matched_tensors(optimizer, group, param, own, f"state of parameter {identifier}")
    return groups, state


def _matched_group(current: Mapping[str, Any], given: Mapping[str, Any], rule_id: str) -> dict[str, Any]:
    require(
        given.get("rule") == rule_id,
        f"state of {given.get('rule', 'another optimizer')!r} does not fit {rule_id!r}; "
        "see ckpt8.optim.state_conversion",
        UsageError,
    )
    group = {
        **current,
        **{key: deepcopy(value) for key, value in given.items() if key not in ("params", CHECKS)},
        "params": current["params"],
    }
    check_group(group)
    return group


def _matched_tensors(
    optimizer: PackedOptimizer, group: dict[str, Any], param: torch.Tensor, given: Mapping[str, Any], what: str
) -> dict[str, torch.Tensor]:
    content: StateContent = {
        name: (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None
        for name, value in given.items()
    }
    if (problem := layout_problem(optimizer, group, param, content)) is not None:
        raise UsageError(f"{what}: {problem}")
    state = optimizer.initial_state(group, param, exact_names(content))
    for name, tensor in state.items():
        tensor.copy_(given[name])
    return state


def exact_names(content: StateContent) -> set[str]:
    """The exact tensors of a state: moments under their own name, and a residual of 16 bits."""
    return {name for name, what in content.items() if name != "residual" or (what and what[0] == torch.int16)}


def layout_problem(
    optimizer: PackedOptimizer, group: dict[str, Any], param: torch.Tensor, content: StateContent
) -> str | None:
    """Why ``param`` cannot have a state of these element types and shapes, or None."""
    layout = optimizer.state_layout(group, param, exact_names(content))
    if content.keys() != layout.keys():
        return f"has {', '.join(sorted(content))}, expected {', '.join(sorted(layout))}"
    for name, (dtype, shape) in layout.items():
        if (what := content[name]) != (dtype, shape):
            return f"{name} is {'no tensor' if what is None else f'{what[0]} {what[1]}'}, expected {dtype} {shape}"
    return None


Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class GradientRelease(ExitStack):
    """The hooks that update parameters during the backward pass. A context manager; they go when it ends."""

    remove = ExitStack.close
    """Take the hooks away: ``step`` has gradients again."""


class PackedOptimizer(torch.optim.Optimizer):
    """Base class. It takes these arguments besides those of the rule; a parameter group may override them.

    ``master``: what completes bf16 parameters: ``split24`` (int8 residual) or ``split32`` (int16, exact).
    ``moment1``, ``moment2``: ``companded8(...)`` or ``lossless`` (fp32), as text or as a stored configuration.
    ``maximize``: ascend instead of descend. ``seed``: the seed of stochastic rounding.
    ``fused``: True demands the kernels, False forbids them, None uses them on CUDA devices. It is not saved.
    ``capturable``: True demands the kernels, too, whose steps a CUDA graph can capture.
    ``foreach``: taken as torch's optimizers take it, and changes nothing: blocks are updated one after the other.
    ``differentiable``: must be False.

    Raises UsageError for arguments, parameters and gradients that it does not take: complex, integer, float64, sparse.
    """

    rule_id: ClassVar[str]
    fused: bool | None = None
    tile: int = TILE
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        master: str = "split24",
        moment1: str = "companded8",
        moment2: str = MOMENT2,
        maximize: bool = False,
        seed: int = 0,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        check_torch_arguments(
            {"fused": fused, "foreach": foreach, "capturable": capturable, "differentiable": differentiable}
        )
        if capturable and fused is False:
            raise UsageError("capturable=True with fused=False is not supported; only the kernels can be captured")
        self.fused = capturable or fused
        packing = {"master": master, "moment1": moment1, "moment2": moment2, "maximize": maximize, "seed": seed}
        super().__init__(params, {**defaults, **packing, "rule": self.rule_id})

    @property
    def card(self) -> Card:
        """The optimizer's card."""
        return card_of(self.rule_id)

    @property
    def rule_arguments(self) -> tuple[str, ...]:
        """The settings of a group that the rule takes."""
        return tuple(self.card.settings)

    def moments(self, group: dict[str, Any], shape: tuple[int, ...]) -> dict[str, str]:
        """Names of the moments of a parameter of this shape, each with its kind: ``moment1`` or ``moment2``."""
        return {tensor.key: tensor.slot for tensor in self.card.form(len(shape)).present(group) if tensor.is_moment}

    def factored(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the row and column averages of a parameter of this shape."""
        return {
            tensor.key: tensor.shape(shape) for tensor in self.card.form(len(shape)).tensors if not tensor.is_moment
        }

    def codec(self, group: dict[str, Any], key: str, param: torch.Tensor, exact: Collection[str] = ()) -> Codec:
        """The codec of ``master``, ``moment1`` or ``moment2`` for a parameter; an exact one for a small tensor.

        The codec of the master is exact, too, if ``exact`` contains ``residual``.
        """
        if is_small(tuple(param.shape)) or (key == "master" and "residual" in exact):
            return Split32() if key == "master" else Lossless()
        return codec_from_config(group[key])

    def state_layout(self, group: dict[str, Any], param: torch.Tensor, exact: Collection[str] = ()) -> StateLayout:
        """Element types and shapes of the whole state of a parameter.

        ``exact`` names the moments that stay in fp32 whatever the group says, and ``residual`` if it has 16 bits.
        """
        shape = tuple(param.shape)
        layout: StateLayout = {"step": (torch.int64, ())}
        if (part := master_part(param.dtype, self.codec(group, "master", param, exact))) is not None:
            layout[part[0]] = (part[1], shape)
        for name, kind in self.moments(group, shape).items():
            codec = Lossless() if name in exact else self.codec(group, kind, param)
            if codec.codes is None:
                layout[name] = (torch.float32, shape)
            else:
                layout[f"{name}_codes"] = (torch.uint8 if codec.stores_roots else torch.int8, shape)
                layout[f"{name}_scales"] = (torch.uint16, (groups_of(param.numel()),))
        return layout | {name: (torch.float32, size) for name, size in self.factored(shape).items()}

    def initial_state(
        self, group: dict[str, Any], param: torch.Tensor, exact: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """New tensors, the state before the first step. ``exact``: see ``state_layout``."""
        # Kernels read the step counter on the device, the torch path in the memory of the host.
        on_device = self.fused is not False and param.device.type == "cuda"
        state = {
            name: torch.zeros(shape, dtype=dtype, device="cpu" if name == "step" and not on_device else param.device)
            for name, (dtype, shape) in self.state_layout(group, param, exact).items()
        }
        if "master" in state:
            state["master"].copy_(param.detach())
        return state

    def views(
        self, group: dict[str, Any], param: torch.Tensor, state: dict[str, torch.Tensor]
    ) -> tuple[Codec, torch.Tensor | None, dict[str, Moment]]:
        """Flat views of a parameter's state: codec of the master weights, residual or fp32 master, moments by name."""
        residual = state.get("residual")
        # A residual of 16 bits is exact.
        exact = ("residual",) if residual is not None and residual.dtype == torch.int16 else ()
        codec, kinds = self.codec(group, "master", param, exact), self.moments(group, tuple(param.shape))
        # By the type that the parameter has now: it may have been cast since its state was made.
        part = master_part(param.dtype, codec)
        moments = {name: Moment.of(name, self.codec(group, kind, param), state) for name, kind in kinds.items()}
        return codec, None if part is None else state[part[0]].view(-1), moments

    def numbered(self) -> list[tuple[int, dict[str, Any], torch.Tensor]]:
        """Every parameter with its index over all groups, which selects its random bits, and its group."""
        return [
            (index, *pair)
            for index, pair in enumerate((group, param) for group in self.param_groups for param in group["params"])
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, check it, and keep its codecs as stored configurations. Raises UsageError."""
        check_torch_arguments(param_group)
        # The groups of another optimizer of ours name its rule.
        param_group["rule"] = self.rule_id
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            for index, group, param in self.numbered():
                if self.fused and group is self.param_groups[-1]:
                    self._fused.takes(index, param)
        except UsageError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. With a ``GradScaler``, gradients are unscaled here, and the step is skipped on overflow."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(i, group, p) for i, group, p in self.numbered() if p.grad is not None]
        for _, _, param in work:
            _check_gradient(param)
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        fused, plain = list[Work](), list[Work]()
        for index, group, param in work:
            (fused if self._fused.takes(index, param) else plain).append((index, group, param))
        self._fused.update(fused, scale, found_inf)
        if plain and (found_inf is None or float(found_inf) == 0):
            factor = 1.0 if scale is None else 1.0 / float(scale)
            for index, group, param in plain:
                self._update(index, group, param, factor)
        return loss

    @cached_property
    def _fused(self) -> Fused:
        """The kernels' launches, planned for the present state."""
        return Fused(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, and forget the plans for the old one."""
        self.__dict__.pop("_fused", None)
        super().__setstate__(state)

    @torch.no_grad()
    def _release(self, index: int, group: dict[str, Any], param: torch.Tensor) -> None:
        """Update one parameter from its gradient, and free the gradient."""
        _check_gradient(param)
        if self._fused.takes(index, param):
            self._fused.update([(index, group, param)], None, None, alone=True)
        else:
            self._update(index, group, param, 1.0)
        param.grad = None

    def _update(self, index: int, group: dict[str, Any], param: torch.Tensor, grad_factor: float) -> None:
        if not self.state[param]:
            self.state[param] = self.initial_state(group, param)
        state = self.state[param]
        if not param.numel():
            return
        state["step"] += 1
        step = int(state["step"])
        assert param.grad is not None  # noqa: S101
        weights, grad = param.detach().reshape(-1), param.grad.reshape(-1)
        factor, key = -grad_factor if group["maximize"] else grad_factor, stream_key(group["seed"], index, step)
        tensor = PackedTensor(weights, grad, *self.views(group, param, state), key, factor)
        shape = tuple(param.shape)
        whole = {name: state[name] for name in self.factored(shape)}
        # Rows where there are row averages.
        cuts = row_blocks(shape, tensor.load) if whole else flat_blocks(param.numel(), tensor.load, self.tile)
        arguments = {name: group[name] for name in self.rule_arguments} | {"lr": float(group["lr"])}
        results = resolve(self.card.form(param.dim()).rule)(
            [block for _, _, block in cuts], whole, step=step, **self.card.fixed, **arguments
        )
        for start, stop, _ in cuts:
            tensor.store(start, stop, next(results))
        for values in results:
            for name, value in values.items():
                state[name].copy_(value)
        if not param.is_contiguous():
            param.copy_(weights.view(param.shape))

    def release_gradients(self) -> GradientRelease:
        """Update each parameter during the backward pass, as soon as its gradient is there, and free the gradient.

        Only one gradient is in memory at a time. With bf16 parameters, an 8-bit residual and 8-bit moments this is
        FlashOptim's mode of 5 bytes a parameter (arXiv 2602.23349): 2 + 1 + 1 + 1, and 1/8 for the scales.

        Every backward pass is a step, and ``step`` finds nothing to do: do not combine it with gradient accumulation,
        clipping by global norm or a ``GradScaler``. ``remove()`` of the result, or its end as a context manager, undoes
        it.
        """
        hooks = GradientRelease()
        for index, group, param in self.numbered():
            if param.requires_grad:
                hooks.callback(
                    param.register_post_accumulate_grad_hook(partial(self._release, index, group)).remove  # type: ignore[no-untyped-call]
                )
        return hooks

    def state_dict(self) -> dict[str, Any]:
        """The packed state in torch's layout. Groups of 16-bit parameters also hold ``weight_checks``."""
        saved = super().state_dict()
        for group, saved_group in zip(self.param_groups, saved["param_groups"], strict=True):
            states = [self.state.get(param, {}) for param in group["params"]]
            checks = [
                weight_check(param) if {"residual", "master"} & state.keys() else None
                for param, state in zip(group["params"], states, strict=True)
            ]
            if any(check is not None for check in checks):
                saved_group[CHECKS] = checks
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state dict of the same class; every element type stays.

        Raises UsageError, and changes nothing, where groups, keys, shapes or element types do not match.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups, state = matched_state(self, state_dict)
        self.__setstate__({"state": state, "param_groups": groups})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _check_gradient(param: torch.Tensor) -> None:
    if param.grad is None or param.grad.layout != torch.strided:
        raise UsageError("sparse gradients are not supported; build the embedding with sparse=False")
