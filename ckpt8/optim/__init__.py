"""Optimizers that train on the packed state itself: split master weights and companded 8-bit moments.

    optimizer = ckpt8.optim.AdamW(model.parameters(), lr=1e-3)

To add an optimizer, write

1. its rule, a function over blocks of fp32 values (see ``packed_tensor``), and its class, which names the ``rule_id``
   and the arguments of the constructor, in ``optimizers``;
2. kernels, if it is to have any: a rule in ``triton.rules``;
3. its card in ``cards``: state, settings, the signs of its saved state, the published classes.

Optimizers that ckpt8 recognises and does not train with have a card in ``recognised_cards``, and a rule in
``recognised_rules``.

Every other package reads the card: roles, policy, error in update space, replay, resume, conversion. An entry in
``optim_cases`` and one in ``test_oracles`` run the conformance tests; ``tests/optim/test_own_optimizer.py`` shows all
steps with an optimizer that only the tests have. An import for type checkers, below, gives it its public name.

Imports core and codecs only. A class is imported when it is first used, so that the package needs no torch.
"""

from typing import TYPE_CHECKING

from ckpt8.core.public import lazy_names
from ckpt8.optim.known_optimizers import trained_cards

if TYPE_CHECKING:
    from ckpt8.optim.optimizers import CAME, SGD, Adafactor, Adam, AdamW, Lion, StableAdamW

OPTIMIZERS: tuple[tuple[str, str], ...] = tuple((card.name, card.cls) for card in trained_cards())
"""(name, "module:Class") of every optimizer."""

__all__ = ["CAME", "OPTIMIZERS", "SGD", "Adafactor", "Adam", "AdamW", "Lion", "StableAdamW"]


if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, lambda: {card.name: card.cls for card in trained_cards()})


def __dir__() -> list[str]:
    return sorted(__all__)
