"""What a card of ``known_optimizers`` says of an optimizer: its state, its settings, and the published classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt8.core.tensors import Role

Shape = tuple[int, ...]
Slot = Literal[
    "moment1", "moment1_2", "moment1_3", "moment2", "moment2_2", "max_moment2", "weight", "statistic", "exact"
]
Update = Literal["adam", "stable_adamw", "came", "momentum", "replayed"]
Reach = Literal["element", "tensor", "matrix"]


_MOMENTS = {"moment1": Role.MOMENT1, "moment2": Role.MOMENT2}


def role_of(slot: str) -> Role:
    """What presets take the tensor in a slot for."""
    if slot == "weight":
        return Role.WEIGHT
    return next((role for name, role in _MOMENTS.items() if name in slot), Role.OTHER)


def _same(shape: Shape) -> Shape:
    return shape


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of a parameter's state.

    ``slot`` is the moment that it holds, each slot once in a form; ``weight`` for a copy of the weight, ``statistic``
    for fp32 averages over rows or columns. ``shape`` computes its shape from the parameter's. ``when`` names the
    setting without which it is absent. ``packable``: presets may compress it, whatever else the state holds. A key that
    says little without its neighbours is not packable here; ``other_states`` gives it a role.
    """

    key: str
    slot: Slot
    shape: Callable[[Shape], Shape] = _same
    when: str = ""
    packable: bool = True

    @property
    def is_moment(self) -> bool:
        """Whether it has the shape of the parameter."""
        return self.slot not in ("statistic", "exact")

    @property
    def role(self) -> Role:
        """What presets take it for."""
        return role_of(self.slot)


@dataclass(frozen=True, slots=True)
class Form:
    """State and rule of the matrices, or of the vectors, of a model.

    ``rule`` locates the function that takes a step (see ``packed_tensor``). ``update`` says how the state determines a
    step (see ``checkpoint.meaning.update_rules``): ``replayed`` where it takes a gradient as well, so that the figure
    is that of the first replayed step; None means that errors are not measured in update space, and that steps are not
    replayed. ``reach`` says on what the step of an element depends: on the values of that element, on sums over its
    tensor, or on the whole matrix, which the rule then gets as one block of the shape of the parameter.
    """

    rule: str
    tensors: tuple[StateTensor, ...]
    update: Update | None = None
    reach: Reach = "element"

    def present(self, settings: Mapping[str, Any]) -> list[StateTensor]:
        """The tensors that a state has under these settings."""
        return [tensor for tensor in self.tensors if not tensor.when or settings.get(tensor.when)]


@dataclass(frozen=True, slots=True)
class Published:
    """A class of another package with the same state.

    ``step``: where it counts steps: in the state, as a 0-d float tensor or an int, or in the group; None: nowhere.
    ``state``: what else a state holds; a function computes the value from the group. ``optional``: keys that a state
    may hold. ``sign``: the key that only its state has. ``group``: more entries of a new group. ``widened``: the state
    of a 16-bit parameter may be fp32.
    """

    package: str
    name: str
    step: Literal["tensor", "int", "group"] | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    sign: str | None = None
    group: Mapping[str, Any] = field(default_factory=dict)
    widened: bool = False

    @property
    def splits_betas(self) -> bool:
        """Whether groups have ``beta1`` and ``beta2`` in place of ``betas``."""
        return self.package == "optimi"

    @property
    def takes_maximize(self) -> bool:
        """Whether groups have ``maximize``."""
        return self.package == "torch"


_UNPUBLISHED = Published("", "", step="int")
"""How ``unpack`` writes the state of an optimizer that no package publishes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One optimizer. ``name`` is its class in ``ckpt8.optim``; ``cls`` locates it as ``module:name``.

    ``cls`` is empty for an optimizer that ckpt8 recognises and does not train: only all the tensors of its state
    together have roles, since one key alone may be of any optimizer. ``unknown`` says why its step is not known.
    ``settings``: the settings that the rule takes from a group, and how many numbers each has; 0: any value that
    ``choices`` allows. ``choices``: the values that a setting must have for the rule to be that of the card; a missing
    setting is None. ``fixed``: arguments of the rule that a group does not set; ``taken`` gets the number of the steps
    so far. ``nullable``: settings with numbers that may be None. ``side``: keys of a state that the rule does not read.
    ``step_key``: the setting that counts steps, if it is not ``step``.
    ``objects``: classes of which a state holds objects, with nothing but attributes. ``projects``: its moments are of a
    projected gradient, and smaller than the parameter.
    ``signs``: keys of which a saved state or its group must have one. ``needs``: keys that the group must have.
    ``lacks``: keys that neither may have. ``agrees``: whether the settings agree with one another as the card says.
    ``counts``: the rule depends on the number of the step. ``coupled``: weight decay is always part of the gradient;
    ``own_decay``: the rule alone decides. ``needs_weight``: the step depends on the weight beyond its decay.
    ``average``: computes (a, b) of m = a m + b g from the arguments, where ``tensors[0]`` of a form is m and there is
    no ``exp_avg_sq``. ``gradient_rms``: computes the RMS of recent gradients, element by element, from (state,
    arguments, step); without it, it follows from row and column statistics, from ``exp_avg_sq`` and the second beta, or
    from ``average``.
    ``kernels``: the module of ``ckpt8.optim.triton``, if any. ``flashoptim``: whether flashoptim has the optimizer.
    ``published``: the classes with the same state; ``unpack`` writes the state of the first.
    """

    rule_id: str
    name: str
    cls: str = ""
    unknown: str = ""
    settings: Mapping[str, int]
    matrix: Form
    vector: Form | None = None
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    side: frozenset[str] = frozenset()
    step_key: str = "step"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    nullable: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()
    projects: bool = False
    signs: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    lacks: frozenset[str] = frozenset()
    counts: bool = False
    coupled: bool = False
    own_decay: bool = False
    needs_weight: bool = False
    agrees: Callable[[Mapping[Any, Any]], bool] | None = None
    average: Callable[[Mapping[str, Any]], tuple[float, float]] | None = None
    gradient_rms: Callable[[Mapping[str, Any], Mapping[str, Any], int], Any] | None = None
    kernels: str | None = None
    flashoptim: bool = False
    published: tuple[Published, ...] = (_UNPUBLISHED,)

    def form(self, ndim: int) -> Form:
        """State and rule of a parameter of ``ndim`` dimensions."""
        return self.matrix if ndim > 1 or self.vector is None else self.vector

    @property
    def forms(self) -> tuple[Form, ...]:
        """Both forms, or the only one."""
        return (self.matrix,) if self.vector is None else (self.matrix, self.vector)

    @property
    def tensors(self) -> dict[str, StateTensor]:
        """Every tensor that a state may hold, by key."""
        return {tensor.key: tensor for form in self.forms for tensor in form.tensors}
