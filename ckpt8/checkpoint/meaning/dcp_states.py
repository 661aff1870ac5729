"""Parameters whose optimizer state is spread over several members: the slices of a distributed checkpoint.

The moments of one slice of a parameter lie at the same place of tensors of one shape, often in one file and sometimes
not; the step and the options of its group are whole and may be in the file of another rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ckpt8.checkpoint.meaning.roles import ParameterState, short_name
from ckpt8.checkpoint.readers.dcp.dcp import DcpCheckpoint, StateSlice
from ckpt8.checkpoint.readers.dcp.metadata import Place
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.optim.known_optimizers import MOMENT_SLOTS

UNKNOWN = object()
"""State that is there and cannot be told for a slice: no update rule is recognised where it is."""


WHOLE: Place = ((), (-1,))
"""In place of the places of all that is no part."""


@dataclass(frozen=True, slots=True)
class JointState:
    """A slice of state in a member of the path ``member``; ``ref`` has the key that its storage has in the bundle."""

    home: DcpCheckpoint
    slice: StateSlice
    member: str
    ref: TensorRef


def joint_parameters(states: Iterable[JointState]) -> list[ParameterState]:
    """The states of all slices of parameters, each named by the member of the moment that comes first."""
    owners: dict[tuple[int, str, str], list[JointState]] = defaultdict(list)
    for state in states:
        key = state.slice.key
        owners[id(state.home), key.optimizer, key.parameter].append(state)
    return [parameter for owned in owners.values() for parameter in _slices(owned)]


def _slices(owned: list[JointState]) -> list[ParameterState]:
    """One parameter, slice by slice."""
    home, key = owned[0].home, owned[0].slice.key
    places: dict[Place, dict[str, JointState]] = defaultdict(dict)
    shared: dict[str, Any] = {}
    for each in owned:
        places[each.slice.place][each.slice.key.key] = each
        shared[each.slice.key.key] = each.ref if each.slice.whole and each.ref.numel == 1 else UNKNOWN
        if each.slice.whole:
            places[WHOLE][each.slice.key.key] = each
    wholes = places.pop(WHOLE, {})
    moments = [slices for slices in places.values() if not MOMENT_SLOTS.keys().isdisjoint(slices)]
    if not moments:
        return []
    shared |= home.state_values(key)
    group = home.group(key)
    found = []
    for slices in moments:
        first = next(each for name, each in slices.items() if name in MOMENT_SLOTS)
        here = wholes if first.slice.whole else slices
        state = shared | {name: each.ref for name, each in here.items()}
        found.append(ParameterState(_name(first), state, group))
    return found


def _name(state: JointState) -> str:
    """Of the parameter, or of its place in the optimizer where that has numbers in place of names."""
    key = state.slice.key
    name = key.parameter
    if name.isdecimal():
        name = f"{key.optimizer}.state.{name}" if key.optimizer else f"state.{name}"
    return short_name(f"{state.member}:{name}{state.slice.suffix}")


def in_bundle(home: DcpCheckpoint, states: Iterable[StateSlice], member: str, number: int) -> list[JointState]:
    """The slices of member ``number`` with the keys that their storages have among those of all members."""
    return [JointState(home, each, member, replace(each.ref, key=f"{number}/{each.ref.key}")) for each in states]
