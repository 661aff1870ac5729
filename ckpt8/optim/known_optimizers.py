"""What ckpt8 knows of each optimizer: one card each, from which every other package reads. Imports no torch.

A card names the tensors of a parameter's state, the settings of a group, the signs by which saved state is recognised,
the rule and its kernels, and the published classes with the same state: see ``card``. The facts about published classes
are those of torch 2.13, torch-optimi 0.3.3, came-pytorch 0.1.3, pytorch-optimizer 4.1.0 and lion-pytorch 0.2.5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import Role
from ckpt8.optim.card import Card, Form, Published, Shape, StateTensor
from ckpt8.optim.recognised.cards import RECOGNISED, VARIANTS

SPELLINGS = {"betas": ("beta1", "beta2"), "eps": ("eps1", "eps2")}
"""Settings with several numbers, and the names under which some packages store each number."""

CARDS: dict[str, Card] = {}
"""Every optimizer by its ``rule_id``; ``identify`` tries them in this order."""

TENSORS: dict[str, StateTensor] = {}
"""Every tensor of a state by its key."""

MOMENT_SLOTS: dict[str, str] = {}
"""Slots of the moments that presets may compress, by key."""

MASTER_KEYS = ("master_param", "master_params", "master_weight")
"""Keys of a state under which programs keep the fp32 master of a weight in 16 bits."""

MEGATRON_MASTER = "fp32_param"
"""The key of the fp32 master in a distributed checkpoint of Megatron."""

STATE_ROLES: dict[str, Role] = dict.fromkeys(MASTER_KEYS, Role.WEIGHT)
"""Roles of the tensors in a parameter's state, by key; other keys have the role ``other``."""

WHOLE_SHAPE = "whole_shape"
"""Key under which the state in the file of one rank has the shape of the parameter that it is a slice of."""

SIDE_STATE = {"step", WHOLE_SHAPE}
"""Keys of a state that no update is computed from, but for the step."""


def register(card: Card) -> None:
    """Add a card: from now on ckpt8 recognises the optimizer's saved state."""
    CARDS[card.rule_id] = card
    SIDE_STATE.update(card.side)
    if not card.cls:
        return
    TENSORS.update(card.tensors)
    SIDE_STATE.update(*({*published.state, *published.optional} for published in card.published))
    moments = {key: tensor for key, tensor in card.tensors.items() if tensor.is_moment and tensor.packable}
    MOMENT_SLOTS.update({key: moment.slot for key, moment in moments.items()})
    STATE_ROLES.update({key: moment.role for key, moment in moments.items()})


def trained_cards() -> list[Card]:
    """The optimizers of ``ckpt8.optim``."""
    return [card for card in CARDS.values() if card.cls]


def card_of(rule_id: str) -> Card:
    """The card of an optimizer of ``ckpt8.optim``. Raises UsageError for an unknown rule."""
    card = next((card for card in trained_cards() if card.rule_id == rule_id), None)
    if card is None:
        known = ", ".join(card.rule_id for card in trained_cards())
        raise UsageError(f"no optimizer has the rule {rule_id!r}; ckpt8 knows {known}")
    return card


def find_published(package: str, name: str) -> tuple[Card, Published] | None:
    """The card and the entry of the class ``name`` of a top-level package; None for an unknown class."""
    every = ((card, published) for card in trained_cards() for published in card.published)
    return next(
        ((card, published) for card, published in every if (published.package, published.name) == (package, name)), None
    )


def first_moments() -> list[str]:
    """Keys of first moments."""
    return [key for key, slot in MOMENT_SLOTS.items() if slot == "moment1"]


def setting_names() -> set[str]:
    """Names of the settings of ``ckpt8.optim``, in every spelling, without ``lr`` and ``weight_decay``."""
    names = {name for card in trained_cards() for name in (*card.settings, *(t.when for t in card.tensors.values()))}
    spelled = {part for name in names for part in SPELLINGS.get(name, ())}
    return (names | spelled) - {"", "lr", "weight_decay"}


def setting(group: Mapping[Any, Any], name: str) -> Any:
    """A setting of a group, in any spelling; None where it is missing."""
    parts = SPELLINGS.get(name, ())
    if not parts or not set(parts) <= group.keys():
        return group.get(name)
    third = ("beta3",) if name == "betas" and "beta3" in group else ()
    return [group[part] for part in (*parts, *third)]


def identify(tensors: Collection[str], state: Collection[Any], group: Mapping[Any, Any]) -> tuple[Card, Form] | None:
    """The optimizer that saved a state, and the form that the state has; None for an unknown optimizer.

    ``state`` are the keys of the state, ``tensors`` those of the tensors from which an update is computed.
    """
    keys = {*state, *group}
    if any(not card.signs.isdisjoint(keys) for card in CARDS.values() if card.unknown):
        return None
    own = CARDS.get(str(group.get("rule")))
    if own is not None and own.cls:  # saved by ckpt8.optim
        return _form_of(own, tensors)
    for card in CARDS.values():
        if (card.signs and card.signs.isdisjoint(keys)) or not card.lacks.isdisjoint(keys):
            continue
        if not all(_holds(group, name, card.settings.get(name, 1)) for name in card.needs):
            continue
        if not all(group.get(name) in allowed for name, allowed in {**VARIANTS, **card.choices}.items()):
            continue
        if card.agrees is not None and not card.agrees(group):
            continue
        if (known := _form_of(card, tensors)) is not None:
            return known
    return None


def _form_of(card: Card, tensors: Collection[str]) -> tuple[Card, Form] | None:
    return next(((card, form) for form in card.forms if form.update and _fits(form, tensors)), None)


def why_unknown(tensors: Collection[str], state: Collection[Any], group: Mapping[Any, Any]) -> str | None:
    """Why the step of an optimizer is not known although ckpt8 recognises its state, or None."""
    keys = {*state, *group}
    unknown = [card for card in CARDS.values() if card.unknown]
    by_sign = (card.unknown for card in unknown if not card.signs.isdisjoint(keys))
    by_state = (card.unknown for card in unknown if not card.signs and _fits(card.matrix, tensors))
    return next(by_sign, None) or next(by_state, None)


def is_projected(state: Collection[Any], group: Collection[Any]) -> bool:
    """Whether moments are of a projected gradient, as GaLore's are, and smaller than the parameter."""
    return any(card.projects and not card.signs.isdisjoint({*state, *group}) for card in CARDS.values())


def state_objects() -> frozenset[str]:
    """The classes of all objects that a state may hold."""
    return frozenset[str]().union(*(card.objects for card in CARDS.values()))


def state_roles(tensors: Collection[str]) -> dict[str, Role]:
    """Roles of the tensors of a state by all their keys together, where a key alone says too little; else empty."""
    forms = (form for card in CARDS.values() if not card.cls for form in card.forms)
    matching = next((form for form in forms if form.tensors and _fits(form, tensors)), None)
    return {} if matching is None else {tensor.key: tensor.role for tensor in matching.tensors}


def _fits(form: Form, tensors: Collection[str]) -> bool:
    """Whether a state with these tensors has the form."""
    required = {tensor.key for tensor in form.present({})}
    return bool(tensors) and required <= set(tensors) <= {tensor.key for tensor in form.tensors}


def _holds(group: Mapping[Any, Any], name: str, count: int) -> bool:
    value = setting(group, name)
    if count == 1:
        return name in group
    return isinstance(value, (list, tuple)) and len(value) == count and all(isinstance(n, (int, float)) for n in value)


# --- the cards ----------------------------------------------------------------------------------------------------

_M = StateTensor("exp_avg", "moment1")
_V = StateTensor("exp_avg_sq", "moment2")
_ADAM = Form(
    "ckpt8.optim.optimizers:adam", (_M, _V, StateTensor("max_exp_avg_sq", "max_moment2", when="amsgrad")), "adam"
)
_ADAM_SETTINGS = {"lr": 1, "betas": 2, "eps": 1, "weight_decay": 1}
_ADAM_SIGNS = frozenset({"amsgrad", "bias_correction", "correct_bias", "t_alpha", "use_muon"})

_TORCH: dict[str, Any] = {"foreach": None, "differentiable": False, "fused": None}
_TORCH_ADAM: dict[str, Any] = {**_TORCH, "amsgrad": False, "capturable": False}
_OPTIMI: dict[str, Any] = {
    "decouple_lr": False,
    "max_lr": None,
    "kahan_sum": False,
    "foreach": False,
    "triton": False,
    "gradient_release": False,
    "setup": True,
}
_KAHAN: dict[str, Any] = {"kahan_comp": None}
_OPTIMI_KEYS = frozenset({"mean_square", "group", "step"})
EMPTY_KEYS = frozenset({"kahan_comp", "momentum_buffer"})
"""Keys of state that packages keep as None until they need it."""


def _optimi(name: str, *, step: Literal["group"] | None = "group") -> Published:
    return Published("optimi", name, step=step, state=_KAHAN, optional=_OPTIMI_KEYS, group=_OPTIMI)


def _rows_and_columns(*names: str, kept: bool = False) -> tuple[StateTensor, ...]:
    """Averages over rows and columns, in turn; ``kept``: the averaged dimension stays, with size 1."""
    one = (1,) if kept else ()
    shapes: tuple[Callable[[Shape], Shape], ...] = (
        lambda shape: (*shape[:-1], *one),
        lambda shape: (*shape[:-2], *one, shape[-1]),
    )
    return tuple(StateTensor(name, "statistic", shapes[at % 2]) for at, name in enumerate(names))


for _card in (
    Card(
        rule_id="came",
        name="CAME",
        cls="ckpt8.optim.optimizers:CAME",
        settings={"lr": 1, "betas": 3, "eps": 2, "clip_threshold": 1, "weight_decay": 1},
        matrix=Form(
            "ckpt8.optim.optimizers:came",
            (_M, *_rows_and_columns("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")),
            "came",
            "tensor",
        ),
        vector=Form("ckpt8.optim.optimizers:came_vector", (_M, _V), "momentum", "tensor"),
        signs=frozenset({"RMS"}),
        kernels="came",
        published=(
            Published("came_pytorch", "CAME", step="int", state={"RMS": 0.0}, widened=True),
            Published("pytorch_optimizer", "CAME", step="group", state={"RMS": 0.0}, widened=True),
        ),
    ),
    Card(
        rule_id="stable_adamw",
        name="StableAdamW",
        cls="ckpt8.optim.optimizers:StableAdamW",
        settings=_ADAM_SETTINGS,
        matrix=Form("ckpt8.optim.optimizers:stable_adamw", (_M, _V), "stable_adamw", "tensor"),
        fixed={"clip_threshold": 1.0},
        signs=frozenset({"beta1", "kahan_comp", "eps_sq"}),  # optimi's AdamW and Adam keep these averages too
        counts=True,
        kernels="stable_adamw",
        published=(
            Published(
                "optimi",
                "StableAdamW",
                step="group",
                state={"eps_sq": lambda group: group["eps"] ** 2, **_KAHAN},
                optional=_OPTIMI_KEYS,
                sign="eps_sq",
                group=_OPTIMI,
            ),
            Published("pytorch_optimizer", "StableAdamW", step="group", state=_KAHAN, sign="kahan_comp", widened=True),
        ),
    ),
    Card(
        rule_id="adamw",
        name="AdamW",
        cls="ckpt8.optim.optimizers:AdamW",
        settings=_ADAM_SETTINGS,
        matrix=_ADAM,
        fixed={"decoupled": True},
        signs=_ADAM_SIGNS,
        counts=True,
        kernels="adamw",
        flashoptim=True,
        published=(
            Published("torch", "AdamW", step="tensor", group={**_TORCH_ADAM, "decoupled_weight_decay": True}),
            _optimi("AdamW"),
        ),
    ),
    Card(
        rule_id="adam",
        name="Adam",
        cls="ckpt8.optim.optimizers:Adam",
        settings=_ADAM_SETTINGS,
        matrix=_ADAM,
        fixed={"decoupled": False},
        signs=_ADAM_SIGNS,
        counts=True,
        kernels="adamw",
        flashoptim=True,
        published=(
            Published("torch", "Adam", step="tensor", group={**_TORCH_ADAM, "decoupled_weight_decay": False}),
            _optimi("Adam"),
        ),
    ),
    Card(
        rule_id="sgd",
        name="SGD",
        cls="ckpt8.optim.optimizers:SGD",
        settings={"lr": 1, "momentum": 1, "dampening": 1, "weight_decay": 1, "nesterov": 1},
        matrix=Form(
            "ckpt8.optim.optimizers:sgd", (StateTensor("momentum_buffer", "moment1", when="momentum"),), "momentum"
        ),
        needs=("momentum", "dampening", "nesterov"),  # Muon has no dampening
        lacks=frozenset({"eps"}),  # LARS has all keys of SGD, and an eps
        coupled=True,
        average=lambda given: (given["momentum"], 1 - given["dampening"]),
        kernels="sgd",
        flashoptim=True,
        published=(Published("torch", "SGD", group=_TORCH),),
    ),
    Card(
        rule_id="lion",
        name="Lion",
        cls="ckpt8.optim.optimizers:Lion",
        settings={"lr": 1, "betas": 2, "weight_decay": 1},
        matrix=Form("ckpt8.optim.optimizers:lion", (_M,), "replayed"),
        needs=("betas",),
        average=lambda given: (given["betas"][1], 1 - given["betas"][1]),
        kernels="lion",
        flashoptim=True,
        published=(
            Published("lion_pytorch", "Lion"),
            _optimi("Lion", step=None),
            Published("pytorch_optimizer", "Lion", step="group"),
        ),
    ),
    Card(
        rule_id="adafactor",
        name="Adafactor",
        cls="ckpt8.optim.optimizers:Adafactor",
        settings={"lr": 1, "beta2_decay": 1, "eps": 2, "d": 1, "weight_decay": 1},
        matrix=Form("ckpt8.optim.optimizers:adafactor", _rows_and_columns("row_var", "col_var", kept=True)),
        vector=Form("ckpt8.optim.optimizers:adafactor", (StateTensor("variance", "moment2", packable=False),)),
        nullable=frozenset({"eps"}),
        counts=True,
        published=(Published("torch", "Adafactor", step="tensor", group={"foreach": None}),),
    ),
    *RECOGNISED,
):
    register(_card)
