"""Finds the card of an optimizer, by its name or by the state that it saved; every other package asks here.

Imports no torch.
"""

from collections.abc import Collection, Mapping
from typing import Any

from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import Role
from ckpt8.optim.cards import TRAINED, VARIANTS, Card, Form, Published, StateTensor
from ckpt8.optim.recognised_cards import RECOGNISED

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

EMPTY_KEYS = frozenset({"kahan_comp", "momentum_buffer"})
"""Keys of state that packages keep as None until they need it."""

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
    card = CARDS.get(rule_id)
    if card is None or not card.cls:
        known = ", ".join(card.rule_id for card in trained_cards())
        raise UsageError(f"no optimizer has the rule {rule_id!r}; ckpt8 knows {known}")
    return card


def find_published(package: str, name: str) -> tuple[Card, Published] | None:
    """The card and the entry of the class ``name`` of a top-level package; None for an unknown class."""
    return next(
        (
            (card, published)
            for card in trained_cards()
            for published in card.published
            if (published.package, published.name) == (package, name)
        ),
        None,
    )


def first_moments() -> list[str]:
    """Keys of first moments."""
    return [key for key, slot in MOMENT_SLOTS.items() if slot == "moment1"]


def setting_names() -> set[str]:
    """Names of the settings of ``ckpt8.optim``, in every spelling, without ``lr`` and ``weight_decay``."""
    names = {name for card in trained_cards() for name in (*card.settings, *(t.when for t in card.tensors.values()))}
    return (names | {part for name in names for part in SPELLINGS.get(name, ())}) - {"", "lr", "weight_decay"}


def setting(group: Mapping[Any, Any], name: str) -> Any:
    """A setting of a group, in any spelling; None where it is missing."""
    parts = SPELLINGS.get(name, ())
    if not parts or not set(parts) <= group.keys():
        return group.get(name)
    return [group[part] for part in (*parts, *(("beta3",) if name == "betas" and "beta3" in group else ()))]


def identify(tensors: Collection[str], state: Collection[Any], group: Mapping[Any, Any]) -> tuple[Card, Form] | None:
    """The optimizer that saved a state, and the form that the state has; None for an unknown optimizer.

    ``state`` are the keys of the state, ``tensors`` those of the tensors from which an update is computed.
    """
    keys = {*state, *group}
    if told := [card for card in CARDS.values() if card.unknown and not card.signs.isdisjoint(keys)]:
        return _form_of(told[0], tensors) if len(told) == 1 and _agrees(told[0], keys, group) else None
    own = CARDS.get(str(group.get("rule")))
    if own is not None and own.cls:  # saved by ckpt8.optim
        return _form_of(own, tensors)
    return next(filter(None, (_form_of(card, tensors) for card in CARDS.values() if _agrees(card, keys, group))), None)


def _agrees(card: Card, keys: Collection[Any], group: Mapping[Any, Any]) -> bool:
    """Whether a state may be of the optimizer by its ``keys`` and settings."""
    return (
        (not card.signs or not card.signs.isdisjoint(keys))
        and card.lacks.isdisjoint(keys)
        and all(_holds(group, name, card.settings.get(name, 1)) for name in card.needs)
        and all(group.get(name) in allowed for name, allowed in {**VARIANTS, **card.choices}.items())
        and (card.agrees is None or card.agrees(group))
    )


def _form_of(card: Card, tensors: Collection[str]) -> tuple[Card, Form] | None:
    return next(((card, form) for form in card.forms if form.update and _fits(form, tensors)), None)


def why_unknown(tensors: Collection[str], state: Collection[Any], group: Mapping[Any, Any]) -> str | None:
    """Why the step of an optimizer is not known although ckpt8 recognises its state, or None."""
    keys = {*state, *group}
    unknown = [card for card in CARDS.values() if card.unknown]
    matching = [card for card in unknown if not card.signs.isdisjoint(keys)]
    matching += [card for card in unknown if not card.signs and _fits(card.matrix, tensors)]
    return matching[0].unknown if matching else None


def is_projected(state: Collection[Any], group: Collection[Any]) -> bool:
    """Whether moments are of a projected gradient, as GaLore's are, and smaller than the parameter."""
    return any(card.projects and not card.signs.isdisjoint({*state, *group}) for card in CARDS.values())


def state_objects() -> frozenset[str]:
    """The classes of all objects that a state may hold."""
    return frozenset[str]().union(*(card.objects for card in CARDS.values()))


def state_roles(tensors: Collection[str]) -> dict[str, Role]:
    """Roles of the tensors of a state by all their keys together, where a key alone says too little; else empty."""
    forms = (form for card in CARDS.values() if not card.cls for form in card.forms)
    matching = (form.tensors for form in forms if form.tensors and _fits(form, tensors))
    return {tensor.key: tensor.role for tensor in next(matching, ())}


def _fits(form: Form, tensors: Collection[str]) -> bool:
    """Whether a state with these tensors has the form."""
    return bool(tensors) and (
        {tensor.key for tensor in form.present({})} <= set(tensors) <= {tensor.key for tensor in form.tensors}
    )


def _holds(group: Mapping[Any, Any], name: str, count: int) -> bool:
    if count == 1:
        return name in group
    value = setting(group, name)
    return isinstance(value, (list, tuple)) and len(value) == count and all(isinstance(n, (int, float)) for n in value)


for _card in (*TRAINED, *RECOGNISED):
    register(_card)
