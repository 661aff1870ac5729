"""Names of parameters, with and without what wrappers add to them.

``torch.compile`` puts ``_orig_mod.`` before every name, activation checkpointing and FSDP put their own components
anywhere, DataParallel and DDP put ``module.`` in front of all. Two names that differ in these alone are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
