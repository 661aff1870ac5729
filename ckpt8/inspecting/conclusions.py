"""Compares what the manifest concludes, roles and parameters, with what its members show today.

A writer may know less than today, or other names. So roles and names of parameters may differ, but they must not
contradict the members, the codecs that follow from them, or each other. The numbers of a rule are facts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt8.checkpoint.meaning.parameter_names import split_member
from ckpt8.codecs import codec_from_config
from ckpt8.compressing.policy import Policy
from ckpt8.container.manifest import Manifest, ParameterRecord, StorageRecord
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import Role, TensorSpec
from ckpt8.optim.card import role_of

_NUMBERS = ("step", "beta1", "beta2", "eps")
_MEASURED = {Role.WEIGHT: "weight", Role.MOMENT1: "moment", Role.MOMENT2: "moment"}
_ALWAYS_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Keys of moments that every version knows."""

_MOST_PREFIXES = 8
"""Components that a weight may have before the name of its parameter."""


class View(NamedTuple):
    """A tensor of a storage: the names that rules know it by, the first one its own, and its shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


Views = Mapping[int, Sequence[View]]
"""The tensors of every storage of the container."""


def role_problems(stated: Manifest, found: Manifest, index_of: Mapping[int, int], views: Views) -> Iterator[str]:
    """Roles that contradict the tree, or the codec of their storage."""
    policy = _policy(stated)
    shown = {other: found.storages[index].role for index, other in index_of.items()}
    skeletons = {member.skeleton for member in stated.members}
    for index, record in enumerate(stated.storages):
        role, now = record.role, shown.get(index, Role.OTHER)
        if index in skeletons and role is not Role.OTHER:
            yield f"{record.name}: has the role {role.value} in the manifest, and is no tensor"
        elif Role.OTHER not in (role, now) and role is not now:
            yield f"{record.name}: has the role {role.value} in the manifest, and is a {now.value} in the file in it"
        elif policy is not None and (problem := _codec_problem(record, views.get(index, ()), policy)):
            yield f"{record.name}: has the role {role.value} in the manifest, and {problem}"


def _policy(stated: Manifest) -> Policy | None:
    """The preset and the rules of a container; None where this version does not know them."""
    try:
        return Policy.of(stated.preset, [text if isinstance(text, str) else "" for text in stated.rules])
    except UsageError:
        return None


def _codec_problem(record: StorageRecord, views: Sequence[View], policy: Policy) -> str | None:
    """Why a storage of this role does not have its codec from the preset, or None."""
    codec, paths = codec_from_config(record.codec), [name for view in views for name in view.names]
    if policy.has_rule(paths):
        return None
    kind = "weight" if codec.copied is not None or codec.measured_as == "noise" else codec.measured_as
    if kind not in (None, _MEASURED.get(record.role)):
        return f"is encoded as a {kind}"
    if kind is None and record.reason is None and views:
        spec = TensorSpec(record.name, record.role, record.dtype, (record.numel,))
        wanted, reason = policy.choose(spec, paths, [view.shape for view in views])
        return "is lossless for no reason" if reason or wanted.measured_as is not None else None
    return None


def parameter_problems(stated: Manifest, found: Manifest, index_of: Mapping[int, int], views: Views) -> Iterator[str]:
    """Parameters with moments of another one, with another name or other numbers, and moments of no parameter."""
    owners = {
        index_of[index]: (parameter, slot)
        for parameter in found.parameters
        for slot, index in parameter.moments.items()
        if index in index_of
    }
    names = _WeightNames(views)
    taken: set[int] = set()
    for parameter in stated.parameters:
        moments = parameter.moments.values()
        if not taken.isdisjoint(moments) or len(set(moments)) < len(moments):
            yield f"{parameter.name}: shares a moment with another parameter in the manifest"
        taken.update(moments)
        if problem := _slot_problem(parameter, stated, owners):
            yield f"{parameter.name}: {problem}"
            continue
        owner = next((owners[index][0] for index in moments if index in owners), None)
        if owner is not None:
            if problem := _number_problem(parameter, owner):
                yield f"{parameter.name}: {problem}"
            tensors = [view for index in moments for view in views.get(index, ())]
            if not names.fits(parameter.name, owner.name, tensors):
                yield f"{parameter.name}: is a parameter of the manifest, which the file in it calls {owner.name}"
    for index in owners:
        lossy = codec_from_config(stated.storages[index].codec).measured_as is not None
        if lossy and index not in taken and _is_always_moment(views.get(index, ())):
            yield f"{stated.storages[index].name}: is a moment of no parameter in the manifest"


def _is_always_moment(views: Sequence[View]) -> bool:
    return any(view.names[0].endswith(tuple(f".{key}" for key in _ALWAYS_MOMENTS)) for view in views)


def _slot_problem(
    parameter: ParameterRecord, stated: Manifest, owners: Mapping[int, tuple[ParameterRecord, str]]
) -> str | None:
    """Why the moments of a parameter cannot be its own, or None."""
    found: set[int] = set()
    for slot, index in parameter.moments.items():
        record, (owner, known) = stated.storages[index], owners.get(index, (None, slot))
        if known != slot:
            return f"{record.name} is its {slot} in the manifest, and its {known} in the file in it"
        if record.role not in (Role.OTHER, role_of(slot)):
            return f"{record.name} is its {slot}, and has the role {record.role.value} in the manifest"
        found.update(() if owner is None else [id(owner)])
    return "has moments of several parameters in the manifest" if len(found) > 1 else None


def _number_problem(parameter: ParameterRecord, owner: ParameterRecord) -> str | None:
    """The first number of its rule that is another one, or None."""
    mine, theirs = parameter.rule, owner.rule
    if not mine or not theirs or mine.get("kind") != theirs.get("kind"):
        return None
    other = next((key for key in _NUMBERS if mine.get(key) != theirs.get(key)), None)
    return other and f"{other} {mine.get(other)!r} in the manifest, {theirs.get(other)!r} in the file in it"


class _WeightNames:
    """Whether a parameter may have a name: that of today, the place of its state, or that of a weight like it."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self._known: set[tuple[str, tuple[int, ...]]] | None = None

    def fits(self, name: str, today: str, moments: Collection[View]) -> bool:
        """Whether ``name`` fits, where the tensors of the parameter are ``moments`` and ``today`` is its name now."""
        if name == today or _is_place(name, moments):
            return True
        bare, other = split_member(name)[1], split_member(today)[1]
        if _is_place(today, moments):
            return any((bare, view.shape) in self._weights() for view in moments)
        return f".{bare}".endswith(f".{other}") or f".{other}".endswith(f".{bare}")

    def _weights(self) -> set[tuple[str, tuple[int, ...]]]:
        """The ends of all names, with the shapes of their tensors."""
        if self._known is None:
            self._known = set()
            for view in (view for views in self._views.values() for view in views):
                parts = split_member(view.names[0])[1].split(".", _MOST_PREFIXES)
                self._known |= {(".".join(parts[at:]), view.shape) for at in range(len(parts))}
        return self._known


def _is_place(name: str, moments: Collection[View]) -> bool:
    """Whether a name is the place of the state that holds ``moments``."""
    return any(view.names[0].startswith(f"{name}.") for view in moments)
