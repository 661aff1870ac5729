"""The part of ``integrations.transformers`` for FSDP: every rank packs its own slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model

from ckpt8.container.sharded import FOLDER
from ckpt8.container.sharded.reading import is_sharded
from ckpt8.integrations.sharded_state import PacksSlices, load_model, load_optimizers, save_packed, state_to_pack

_KEYS = "model", "optimizer"
_SCHEDULER = "scheduler.pt"
"""The file of Trainer for it."""


class Ckpt8TrainerMixin(PacksSlices):
    """Before a Trainer of any kind: where it runs FSDP, every rank packs its slices instead of saving plain ones.

    ``preset``, ``budget``, ``rules`` and ``threads`` are those of ``ckpt8.save``; Trainer gets the other arguments.
    Model and optimizer go into the folder ``ckpt8`` of ``checkpoint-N``, Trainer writes the rest as always, and
    ``train(resume_from_checkpoint=True)`` goes on from there at any world size. Plain checkpoints of FSDP load too.
    Of a model of peft it packs the adapters, not the base, as Trainer does.
    Without FSDP it changes nothing. It takes the place of ``Ckpt8Callback``.

    >>> from transformers import Trainer
    >>> from ckpt8.integrations.transformers import Ckpt8TrainerMixin
    >>> class ShardedTrainer(Ckpt8TrainerMixin, Trainer): ...
    >>> trainer = ShardedTrainer(model, args, preset="archive")  # doctest: +SKIP
    """

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        state = state_to_pack(self.model, self.optimizer, adapter_only=is_peft_model(self.model))
        save_packed(Path(output_dir) / FOLDER, dict(zip(_KEYS, state, strict=True)), self._packing)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if (place := self._packed(resume_from_checkpoint)) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        else:
            self._load_packed(place, self.model if model is None else model)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if (place := self._packed(checkpoint)) is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        load_optimizers(place, _KEYS[1], self.model, self.optimizer.optimizer, threads=self._packing["threads"])
        self.lr_scheduler.load_state_dict(torch.load(place.with_name(_SCHEDULER), weights_only=True))

    def _load_best_model(self: Any) -> None:
        if (place := self._packed(self.state.best_model_checkpoint)) is None:
            super()._load_best_model()  # type: ignore[misc]
        else:
            self._load_packed(place, self.model)

    def _load_packed(self, place: Path, model: Any) -> None:
        load_model(place, _KEYS[0], model, has_adapters=is_peft_model(model), threads=self._packing["threads"])

    def _packed(self: Any, checkpoint: str | None) -> Path | None:
        """What is packed of a checkpoint, for a Trainer that runs FSDP, or None."""
        place = None if checkpoint is None else Path(checkpoint) / FOLDER
        return place if place is not None and self.is_fsdp_enabled and is_sharded(place) else None
