"""DeepSpeed's ZeRO checkpoints: flat partitions of the optimizer by rank. Only DeepSpeed can put them together."""

from __future__ import annotations

from typing import NoReturn

from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.core.errors import UnsupportedError


def matches(members: Bundle) -> bool:
    """Whether the directory holds files of partitions."""
    return _count_ranks(members) > 0


def assemble(members: Bundle) -> NoReturn:
    """Raise UnsupportedError that says what to do."""
    raise UnsupportedError(
        f"{members.path}: DeepSpeed ZeRO partitions of {_count_ranks(members)} ranks; make a universal checkpoint of "
        "them first (python -m deepspeed.checkpoint.ds_to_universal), and convert that"
    )


def _count_ranks(members: Bundle) -> int:
    return sum(member.path.endswith("_optim_states.pt") for member in members.opened)
