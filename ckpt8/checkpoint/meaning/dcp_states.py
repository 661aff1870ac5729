"""Parameters whose optimizer state is spread over several members: the slices of a distributed checkpoint.

The moments of one slice of a parameter have one place in tensors of one shape, mostly in one file. The step and the
options of the group are whole, and may be in the file of another rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckpt8.checkpoint.meaning.roles import ParameterState, short_name
from ckpt8.checkpoint.readers.dcp.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.dcp.metadata import Place, Slice
from ckpt8.checkpoint.readers.dcp.names import StateKey
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.optim.known_optimizers import MOMENT_SLOTS

UNKNOWN = object()
"""A value that exists but is unknown for a slice; it prevents that an update rule is recognised."""


@dataclass(frozen=True, slots=True)
class StateSlice:
    """A slice of the state of a parameter. The key of ``ref`` is that of its storage in the bundle."""

    home: DcpCheckpoint
    key: StateKey
    piece: Slice
    member: str
    ref: TensorRef

    @property
    def name(self) -> str:
        """The name of the parameter, or its place in an optimizer that numbers its parameters."""
        name = self.key.parameter
        if name.isdecimal():
            name = f"{self.key.optimizer}.state.{name}" if self.key.optimizer else f"state.{name}"
        return short_name(f"{self.member}:{name}{self.home.metadata.suffix(self.piece)}")


def state_slices(member: DcpMember, number: int) -> list[StateSlice]:
    """The slices of optimizer state in a member, which has that ``number`` in the bundle."""
    states = member.home.roles.states
    return [
        StateSlice(member.home, states[piece.name], piece, member.path, replace(ref, key=f"{number}/{ref.key}"))
        for piece, ref in member.parts
        if piece.name in states
    ]


def joint_parameters(states: Iterable[StateSlice]) -> list[ParameterState]:
    """The states of all slices of parameters, each named by the member of the moment that comes first."""
    owners: dict[tuple[int, str, str], list[StateSlice]] = defaultdict(list)
    for state in states:
        owners[id(state.home), state.key.optimizer, state.key.parameter].append(state)
    return [parameter for owned in owners.values() for parameter in _joined(owned)]


def _joined(owned: list[StateSlice]) -> Iterator[ParameterState]:
    """One parameter, slice by slice: each with the state that is whole, such as the step."""
    home, key = owned[0].home, owned[0].key
    places: dict[Place | None, dict[str, StateSlice]] = defaultdict(dict)
    shared: dict[str, Any] = {}
    for each in owned:
        is_whole = home.metadata.is_whole(each.piece)
        places[None if is_whole else each.piece.place][each.key.key] = each
        shared[each.key.key] = each.ref if is_whole and each.ref.numel == 1 else UNKNOWN
    shared |= home.state_values(key)
    group = home.roles.group(key, home.value)
    for place, slices in places.items():
        first = next((each for name, each in slices.items() if name in MOMENT_SLOTS), None)
        if first is not None:
            state = shared | {name: each.ref for name, each in slices.items()}
            whole = None if place is None else home.metadata.tensors[first.piece.name].shape
            yield ParameterState(first.name, state, group, whole)
