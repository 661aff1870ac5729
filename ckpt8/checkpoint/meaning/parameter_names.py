"""Names of parameters, with and without what wrappers add to them.

``torch.compile`` puts ``_orig_mod.`` before every name, activation checkpointing and FSDP put their own components
anywhere, DataParallel and DDP put ``module.`` in front of all. Two names that differ in these alone are the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PARALLEL = re.compile(r"^(?:module\.)+")


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Every name mapped to itself without wrappers; to itself where two names would become one."""
    given = list(dict.fromkeys(names))
    plain = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in given]
    if plain:
        common = min(len(name) - len(_PARALLEL.sub("", name)) for name in plain)
        plain = [name[common:] for name in plain]
    return dict(zip(given, plain if len(set(plain)) == len(plain) else given, strict=True))


def match(saved: Iterable[str], live: Iterable[str]) -> dict[str, str]:
    """Live names mapped to the saved names that mean the same, by exact name if these agree best."""
    saved, live = list(saved), list(live)
    exact = {name: name for name in set(saved) & set(live)}
    by_plain = {plain: name for name, plain in plain_names(saved).items()}
    loose = {name: by_plain[plain] for name, plain in plain_names(live).items() if plain in by_plain}
    best = loose if len(loose) > len(exact) else exact
    return {name: best[name] for name in live if name in best}


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
