"""The operations of ckpt8 from file to file that ``bench`` measures: they do without torch.

Each imports what its first call would, then works against the clock.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import ckpt8
import ckpt8.compressing.compress
import ckpt8.inspecting.verify
import ckpt8.restoring.restore
from ckpt8.cli.bench.probe import Job, Operation
from ckpt8.core.workers import settle


def _ours(run: Callable[[Job], object], job: Job) -> Callable[[], object]:
    settle()
    return partial(run, job)


def _compress(job: Job, **options: Any) -> object:
    """``ckpt8.compress`` with ``options``."""
    return ckpt8.compress(job.source.path, job.target, threads=job.threads, force=True, **options)


OPERATIONS: dict[str, Operation] = {
    "compress": partial(_ours, _compress),
    "compress --no-stats": partial(_ours, partial(_compress, stats=False)),
    "compress --preset compact": partial(_ours, partial(_compress, preset="compact")),
    "compress --preset archive": partial(_ours, partial(_compress, preset="archive")),
    "restore": partial(_ours, lambda job: ckpt8.restore(job.container, job.target, threads=job.threads, force=True)),
    "verify": partial(_ours, lambda job: ckpt8.verify(job.container, threads=job.threads)),
}
"""The operations of this module by their names in the report."""
