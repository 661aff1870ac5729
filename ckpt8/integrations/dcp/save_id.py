"""Of a save that ranks make without waiting for each other: whether all of them do, and an id that they find alike."""

from __future__ import annotations

import inspect
import uuid
from collections import Counter
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.utils import _DistWrapper

_KEY = "ckpt8/job"

_GROUP = "distW"
"""The variable in which ``dcp.save`` keeps the group of the save."""

_begun: Counter[Path] = Counter()
"""How many saves this process has begun in each directory."""


def save_of_all_ranks(directory: Path) -> str:
    """The id of the next save into a directory: that of the job, and the number of this save there.

    The first rank that asks puts the id of the job into the store that all ranks have met in.
    """
    place = directory.absolute()
    _begun[place] += 1
    job = distributed_c10d._get_default_store().compare_set(_KEY, "", uuid.uuid4().hex)
    return f"{job.decode()}-{_begun[place]}"


def saves_with_all_ranks(rank: object) -> bool:
    """Whether the ``dcp.save`` that has called this is one of all ranks; ``rank`` is what torch tells the writer.

    torch tells a writer no more than its number in the group of the save, which is 0 for the first rank of any group,
    and for a rank alone. So the group is looked up where ``dcp.save`` keeps it; only what calls a writer in another way
    is judged by the number.
    """
    frame = inspect.currentframe()
    while frame is not None:
        group = frame.f_locals.get(_GROUP)
        if isinstance(group, _DistWrapper):
            return group.use_dist and group.get_world_size() == dist.get_world_size()
        frame = frame.f_back
    return rank == dist.get_rank()
