"""For torch.distributed.checkpoint: every rank packs its slices into a ``.ckpt8``, as ``ckpt8.save`` does.

    from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter

    dcp.save(state, storage_writer=Ckpt8StorageWriter("run/step-500"), planner=Ckpt8SavePlanner())  # or dcp.async_save
    dcp.load(state, storage_reader=Ckpt8StorageReader("run/step-500"))  # at any world size

A rank writes one file, ``__RANK_N.ckpt8``; the coordinator then writes ``ckpt8-dcp.json``, which makes the directory a
checkpoint. Until then an older checkpoint in the directory stays whole; its files go afterwards. Only values that are
no tensors are pickled, and loading them allows what ``weights_only`` allows. Where ranks hold replicas, the planner has
one rank write a parameter and its state, which compression takes together.
"""

from ckpt8.integrations.dcp.planner import Ckpt8SavePlanner
from ckpt8.integrations.dcp.storage import Ckpt8StorageReader, Ckpt8StorageWriter

__all__ = ["Ckpt8SavePlanner", "Ckpt8StorageReader", "Ckpt8StorageWriter"]
