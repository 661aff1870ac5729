"""Optimizers that train on the packed state itself: split master weights and companded 8-bit moments.

    optimizer = ckpt8.optim.AdamW(model.parameters(), lr=1e-3)

To add an optimizer, write

1. its rule, a function over blocks of fp32 values (see ``blocks``), and its class, which names the ``rule_id`` and the
   arguments of the constructor: one module here, for example ``lion``;
2. kernels, if it is to have any: one module in ``triton``;
3. its card in ``known_optimizers``: state, settings, how saved state is recognised, the published classes.

Every other package reads the card: roles, policy, error in update space, replay, resume, conversion. An entry in
``optim_cases`` and in ``test_oracles`` runs the conformance tests, and ``tests/optim/test_own_optimizer.py`` shows all
of it with an optimizer that only the tests have. The imports for type checkers below are its public name.

Imports core and codecs only. Classes are imported when they are first used, so that the package needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt8.optim.known_optimizers import CARDS, resolve

if TYPE_CHECKING:
    from ckpt8.optim.adafactor import Adafactor as Adafactor
    from ckpt8.optim.adamw import Adam as Adam
    from ckpt8.optim.adamw import AdamW as AdamW
    from ckpt8.optim.came import CAME as CAME
    from ckpt8.optim.lion import Lion as Lion
    from ckpt8.optim.sgd import SGD as SGD
    from ckpt8.optim.stable_adamw import StableAdamW as StableAdamW

OPTIMIZERS: tuple[tuple[str, str], ...] = tuple((card.name, card.cls) for card in CARDS.values())
"""(name, "module:Class") of every optimizer."""

__all__ = ["CAME", "OPTIMIZERS", "SGD", "Adafactor", "Adam", "AdamW", "Lion", "StableAdamW"]


def __getattr__(name: str) -> Any:
    location = next((card.cls for card in CARDS.values() if card.name == name), None)
    if location is None:
        raise AttributeError(f"module 'ckpt8.optim' has no attribute {name!r}")
    return resolve(location)


def __dir__() -> list[str]:
    return sorted(__all__)
