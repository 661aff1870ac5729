"""How the parameters of an optimizer are shown: by name where one is established, else as unnamed with their place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ckpt8.resuming.names import plain_names


def display_names(parameters: Iterable[tuple[str, Sequence[str]]], *, directory: bool) -> list[dict[str, Any]]:
    """``name`` and ``named`` of every parameter, given by its recorded name and the names of its moments.

    A name is shown without what wrappers such as ``torch.compile`` add. A parameter that is not ``named`` has the place
    of its state for a name. In a ``directory`` both begin with the member.
    """
    given = [(name, _is_named(name, moments)) for name, moments in parameters]
    by_member: dict[str, list[str]] = defaultdict(list)
    for name, named in given:
        if named:
            member, bare = _split(name, directory)
            by_member[member].append(bare)
    plain = {member: plain_names(names) for member, names in by_member.items()}
    shown = []
    for name, named in given:
        member, bare = _split(name, directory)
        shown.append({"name": member + plain[member][bare] if named else name, "named": named})
    return shown


def _is_named(name: str, moments: Sequence[str]) -> bool:
    """Whether a name is more than the number of the state that the moments lie in."""
    in_place = any(moment.startswith(f"{name}.") for moment in moments)
    return not (in_place and name.rpartition(".")[2].isdecimal())


def _split(name: str, directory: bool) -> tuple[str, str]:
    member, colon, bare = name.partition(":")
    return (member + colon, bare) if directory and colon else ("", name)


def shown(row: dict[str, Any]) -> str:
    """The name for a table; one of something that always has a name has no ``named``."""
    return str(row["name"]) if row.get("named", True) else f"unnamed {row['name']}"
