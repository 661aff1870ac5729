"""For torchtitan: its CheckpointManager with our writer and reader.

    from ckpt8.integrations.torchtitan import Ckpt8CheckpointManager

    config.checkpoint = Ckpt8CheckpointManager.Config(enable=True, interval=500, preset="archive")

Everything else is torchtitan's own: its folders, its schedule, what it purges, the step that it resumes from.
"""

import gc
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckpt8.container.header import is_container
from ckpt8.container.sharded import is_sharded
from ckpt8.integrations import is_local, required
from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter

with required("torchtitan.components.checkpointer", __name__, "torchtitan>=0.3"):
    from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager


class Ckpt8CheckpointManager(CheckpointManager):
    """Torchtitan's CheckpointManager; every rank packs its slices.

    Its ``Config`` has ``preset``, ``budget`` in optimizer steps, and ``threads``, as ``ckpt8.save``. Plain checkpoints
    in the folder load too, and exports for Hugging Face stay torchtitan's own.

    >>> from ckpt8.integrations.torchtitan import Ckpt8CheckpointManager
    >>> Ckpt8CheckpointManager.Config(enable=True, preset="archive").preset
    'archive'
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """What torchtitan is told about checkpoints, and how they are packed."""

        preset: str | None = None
        """The preset, one of those of ``ckpt8.save``."""

        budget: float | None = None
        """The largest error in optimizer steps, in place of a preset."""

        threads: int | None = None
        """Threads of each rank."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            Ckpt8StorageWriter(".", preset=self.preset, budget=self.budget, threads=self.threads)

    def __init__(self, config: Config, **runtime: Any) -> None:
        self._packing: dict[str, Any] = {"preset": config.preset, "budget": config.budget, "threads": config.threads}
        super().__init__(config, **runtime)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Pack ``state_dict``; torchtitan writes what is for Hugging Face. Raises OutputError."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        how: dict[str, Any] = {
            "storage_writer": Ckpt8StorageWriter(checkpoint_id, **self._packing),
            "planner": Ckpt8SavePlanner(),
        }
        if async_mode == AsyncMode.DISABLED:
            state_dict_saver.save(state_dict, **how)
            if enable_garbage_collection:
                gc.collect()  # torchtitan has switched off that Python does so by itself
            return None
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            how |= {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self.stager}
        return state_dict_saver.async_save(state_dict, process_group=self.pg, **how)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load what was packed; torchtitan loads anything else. Raises InputError, in torch's CheckpointException."""
        if from_hf or not is_local(checkpoint_id) or not is_sharded(Path(checkpoint_id)):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        state_dict_loader.load(
            state_dict, storage_reader=Ckpt8StorageReader(checkpoint_id, threads=self._packing["threads"])
        )
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)  # its weights stand flat among the other states

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step that is complete, packed or plain; -1 where there is none. Warns of a newer container."""
        place = folder or self.folder
        newest: int = super()._find_load_step(folder)
        if not is_local(place) or not Path(place).is_dir():
            return newest
        steps = [
            (int(match[1]), path) for path in Path(place).iterdir() if (match := re.search(r"step-(\d+)", path.name))
        ]
        newest = max([newest, *(step for step, path in steps if is_sharded(path))])
        step, path = max(steps, default=(-1, Path()))
        if step > newest and is_container(path) and (not dist.is_initialized() or dist.get_rank() == 0):
            begins = f"the run goes on from step {newest}" if newest >= 0 else "the run begins anew"
            warnings.warn(
                f"{path}: is newer, and {begins}, since torchtitan finds directories alone; restore the container, and "
                "start again",
                RuntimeWarning,
                stacklevel=2,
            )
        return newest
