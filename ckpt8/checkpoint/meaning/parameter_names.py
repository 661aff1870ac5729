"""Names of parameters without the components that wrappers add, and the layers that the names tell.

``torch.compile`` puts ``_orig_mod.`` before every name, activation checkpointing and FSDP put their own components
anywhere, DataParallel and DDP put ``module.`` in front of all. Two names that differ in these alone are the same. In a
directory a name begins with its member and a colon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ckpt8.checkpoint.vocabulary import MODEL_ROOTS
from ckpt8.core.grouping import grouped

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PARALLEL = re.compile(r"^(?:module\.)+")

_DIGITS = "0123456789"
_LONGEST_NUMBER = 18
"""The first digits of a layer's number, which decide: a name may hold thousands."""

SLICE = re.compile(r"\[(?:\d+)?:(?:\d+)?(?:,(?:\d+)?:(?:\d+)?)*\]$")
"""The end of the name of a slice: its place in the distributed tensor, such as ``[0:8,:]``."""

_REPEATED = re.compile(r"#\d+$")
"""The end of a name that occurs again: the second ``bias`` is ``bias#2``."""

_AROUND = _WRAPPERS | MODEL_ROOTS | {"_modules"}
"""Components that name a state dict or a wrapper of the model, and no layer."""


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Every name mapped to the name without wrappers; to itself where two names would become one."""
    given = list(dict.fromkeys(names))
    plain = [
        name
        if _WRAPPERS.isdisjoint(parts := name.split("."))
        else ".".join(part for part in parts if part not in _WRAPPERS)
        for name in given
    ]
    if plain and all(name.startswith("module.") for name in plain):
        common = min(len(name) - len(_PARALLEL.sub("", name)) for name in plain)
        plain = [name[common:] for name in plain]
    return dict(zip(given, plain if len(set(plain)) == len(plain) else given, strict=True))


def match(saved: Iterable[str], live: Iterable[str]) -> dict[str, str]:
    """Live names mapped to the saved names that mean the same, by exact name unless more agree without wrappers."""
    saved, live = list(saved), list(live)
    exact = {name: name for name in set(saved) & set(live)}
    by_plain = {plain: name for name, plain in plain_names(saved).items()}
    loose = {name: by_plain[plain] for name, plain in plain_names(live).items() if plain in by_plain}
    best = loose if len(loose) > len(exact) else exact
    return {name: best[name] for name in live if name in best}


def split_member(name: str) -> tuple[str, str]:
    """The member and the name in it, around the first colon; the member is empty for a name without one.

    Colons in the place of a slice do not count.
    """
    part = SLICE.search(name) if "[" in name else None
    at = name.find(":", 0, None if part is None else part.start())
    return ("", name) if at < 0 else (name[:at], name[at + 1 :])


def display_names(parameters: Iterable[tuple[str, Sequence[str]]], *, directory: bool) -> list[dict[str, Any]]:
    """``name`` and ``named`` of every parameter, given by its recorded name and the names of its moments.

    The name comes without the components that wrappers such as ``torch.compile`` add. A parameter that is not ``named``
    has the place of its state for a name. In a ``directory`` both begin with the member.
    """
    given = [(name, *(split_member(name) if directory else ("", name)), moments) for name, moments in parameters]
    named = ((member, (name, bare)) for name, member, bare, moments in given if _is_named(name, moments))
    plain: dict[str, str] = {}
    for member, names in grouped(named).items():
        plain_of = plain_names(bare for _, bare in names)
        plain.update((name, f"{member}:{plain_of[bare]}" if member else plain_of[bare]) for name, bare in names)
    return [{"name": plain.get(name, name), "named": _is_named(name, moments)} for name, _, _, moments in given]


def _is_named(name: str, moments: Sequence[str]) -> bool:
    """Whether a name is more than the number of the state that holds the moments."""
    state = SLICE.sub("", name)
    is_number = state.rpartition(".")[2].isdecimal()
    return not (is_number and any(moment.startswith(f"{state}.") for moment in moments))


def whole_tensor(name: str) -> str:
    """The name of a tensor without the place of a slice and without ``#2``."""
    return SLICE.sub("", _REPEATED.sub("", name)) if "[" in name or "#" in name else name


def plain_path(name: str) -> str:
    """The path of a tensor in the model: as ``whole_tensor``, without the member and without wrappers."""
    bare = split_member(whole_tensor(name))[1]
    return ".".join(part for part in bare.split(".") if part not in _AROUND) or bare


def layer_of(path: str) -> str:
    """The layer of a plain path: all up to the first number, as ``transformer.h.3``; without a number, the module."""
    parts = path.split(".")
    end = next((end for end, part in enumerate(parts, 1) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[:end]) or path


def in_model_order(layers: Iterable[str]) -> list[str]:
    """Layers in the given order, but those of one stack behind each other, by number."""
    places = {layer: place for place, layer in enumerate(layers)}
    stacks = grouped((layer.rstrip(_DIGITS), place) for layer, place in places.items())

    def key(layer: str) -> tuple[int, int, int]:
        stack = layer.rstrip(_DIGITS)
        return stacks[stack][0], int(layer[len(stack) :][:_LONGEST_NUMBER] or 0), places[layer]

    return sorted(places, key=key)


def without_file(name: str) -> str:
    """The name of a distributed tensor without the file that holds a slice of it; its folder stays."""
    member, bare = split_member(name)
    folder = member.rpartition("/")[0]
    return f"{folder}:{bare}" if folder else bare


def whole_name(name: str) -> str:
    """The name of a tensor from the name of a slice: without the place of the slice and without the file of it."""
    part = SLICE.search(name)
    return name if part is None else without_file(name[: part.start()])


def count_whole(names: Iterable[str]) -> int:
    """How many tensors or parameters these names mean: all slices of one count once."""
    given = list(names)
    slices = [name for name in given if SLICE.search(name)]
    return len(given) - len(slices) + len(set(map(whole_name, slices)))


def shown(row: dict[str, Any]) -> str:
    """The name for a table. A row without ``named`` always has a name."""
    return str(row["name"]) if row.get("named", True) else f"unnamed {row['name']}"
