"""Processes that are the ranks of a gloo job.

They are forked from one process that has imported what they need: a job of 4 ranks starts in a fifth of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.checkpoint.api import CheckpointException

IMPORTED = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "ckpt8.integrations.dcp",
)
multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED))


def run_ranks(work, world, *arguments):
    """Call ``work(rank, *arguments)`` in ``world`` processes of one gloo job, and wait for all of them.

    Raises ProcessRaisedException with the traceback of the rank that failed first.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = (world, f"{folder}/store", work, arguments)
        torch.multiprocessing.start_processes(_run_rank, job, nprocs=world, start_method="forkserver")


def _run_rank(rank, world, store, work, arguments):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        work(rank, *arguments)
        dist.barrier()
    except CheckpointException as exc:
        raise RuntimeError("see above") from exc  # torch reports no other exceptions
    finally:
        dist.destroy_process_group()
    # Threads of gloo outlive their group while a mesh refers to it. One that lets go of a tensor while Python is torn
    # down aborts the process (torch 2.15, one run in ten), so Python is not torn down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
