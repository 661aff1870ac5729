"""The operations of ckpt8 and of torch that ``bench`` measures: each imports what its first call would, then works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ckpt8.inspecting.verify
import ckpt8.restoring.restore
from ckpt8.cli.bench.probe import flush
from ckpt8.cli.bench.source import Job, load_file
from ckpt8.core.workers import settle

Run = Callable[[], object]


def compress(job: Job, **options: Any) -> Run:
    """``ckpt8.compress`` with ``options``."""
    settle(kernels=True)
    return lambda: ckpt8.compress(job.source.path, job.target, threads=job.threads, force=True, **options)


def restore(job: Job) -> Run:
    """``ckpt8.restore``."""
    settle(kernels=True)
    return lambda: ckpt8.restore(job.container, job.target, threads=job.threads, force=True)


def verify(job: Job) -> Run:
    """``ckpt8.verify``."""
    settle(kernels=True)
    return lambda: ckpt8.verify(job.container, threads=job.threads)


def load(job: Job) -> Run:
    """``ckpt8.load`` of every member that ``torch.load`` opens."""
    settle(kernels=False)
    members = [member or None for member in job.source.loaded]
    return lambda: [ckpt8.load(job.container, member=member, threads=job.threads) for member in members]


def torch_load(job: Job) -> Run:
    """``torch.load`` of the same members."""
    return lambda: [load_file(file) for file in job.source.files]


def save(job: Job) -> Run:
    """``ckpt8.save`` of the objects in memory."""
    settle(kernels=True)
    objects = _objects(job)
    return lambda: ckpt8.save(objects, job.target, threads=job.threads)


def torch_save(job: Job) -> Run:
    """``torch.save`` and fsync of the objects in memory."""
    objects = _objects(job)

    def run() -> None:
        torch.save(objects, job.target)
        flush(job.target)

    return run


def _objects(job: Job) -> Any:
    """The checkpoint in memory: one object, or a list of those of several files."""
    objects = [load_file(file) for file in job.source.files]
    return objects[0] if len(objects) == 1 else objects
