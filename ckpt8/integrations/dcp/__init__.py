"""torch.distributed.checkpoint, with every rank's slices packed into a ``.ckpt8`` as ``ckpt8.save`` packs a checkpoint.

    from ckpt8.integrations.dcp import Ckpt8StorageReader, Ckpt8StorageWriter

    dcp.save(state, storage_writer=Ckpt8StorageWriter("run/step-500"))          # or dcp.async_save
    dcp.load(state, storage_reader=Ckpt8StorageReader("run/step-500"))          # at any world size

A rank writes one file, ``__RANK_N.ckpt8``; the coordinator then writes ``ckpt8-dcp.json``, which makes the directory a
checkpoint. A save to a directory that has one leaves it whole until then, and removes its files afterwards. There is no
pickle but those of values that are no tensors, and these are loaded as far as ``weights_only`` allows.
"""

from __future__ import annotations

from ckpt8.integrations.dcp.reader import Ckpt8StorageReader
from ckpt8.integrations.dcp.writer import Ckpt8StorageWriter

__all__ = ["Ckpt8StorageReader", "Ckpt8StorageWriter"]
