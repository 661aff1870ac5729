"""Layouts that hold pieces of tensors by rank, which only the framework that wrote them puts together."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from ckpt8.checkpoint.sources.members import Members
from ckpt8.core.errors import UnsupportedError

_PARTITION = "_optim_states.pt"


class Partitions:
    """DeepSpeed's ZeRO checkpoints: flat partitions of the optimizer by rank. They are refused."""

    id: ClassVar[str] = "deepspeed-partitions"

    def matches(self, members: Members) -> bool:
        """Whether there are files of partitions."""
        return any(member.path.endswith(_PARTITION) for member in members.found)

    def assemble(self, members: Members) -> NoReturn:
        """Raise UnsupportedError that says what to do."""
        ranks = sum(member.path.endswith(_PARTITION) for member in members.found)
        raise UnsupportedError(
            f"{members.path}: DeepSpeed ZeRO partitions of {ranks} ranks; make a universal checkpoint of them first "
            "(python -m deepspeed.checkpoint.ds_to_universal), and convert that"
        )
