"""The part of ``integrations.lightning`` for FSDP and tensor parallelism: every rank packs its own slices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ckpt8.container.header import is_container
from ckpt8.container.kept_bases import remove_container
from ckpt8.container.sharded.reading import is_sharded
from ckpt8.core.errors import Ckpt8Error, InputError, UsageError
from ckpt8.core.files.atomic import AtomicFile, remove
from ckpt8.integrations import removing
from ckpt8.integrations.sharded_state import PacksSlices, load_model, load_optimizers, save_packed
from ckpt8.restoring.restore import restore

_REST = "meta.pt"
"""The file of Lightning with what is neither weights nor optimizer; it makes a directory a sharded checkpoint."""


class Ckpt8StrategyMixin(PacksSlices):
    """Before Lightning's FSDPStrategy or ModelParallelStrategy: every rank packs its slices instead of plain ones.

    ``preset``, ``budget``, ``rules`` and ``threads`` are those of ``ckpt8.save``; the others are the strategy's own.
    ``fit(ckpt_path=...)`` goes on from such a directory at any world size. Plain checkpoints load too, and so do files
    of ``Ckpt8CheckpointIO``, which still writes those that are no slices (``state_dict_type="full"``).

    >>> from lightning.pytorch.strategies import FSDPStrategy
    >>> from ckpt8.integrations.lightning import Ckpt8StrategyMixin
    >>> class PackedFSDP(Ckpt8StrategyMixin, FSDPStrategy): ...
    >>> strategy = PackedFSDP(preset="archive", state_dict_type="sharded")  # Trainer(..., strategy=strategy)
    """

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Pack a sharded checkpoint; the strategy saves one that is whole. Raises OutputError."""
        by_slices = getattr(self, "_state_dict_type", None) == "sharded"
        if not by_slices and not getattr(self, "_save_distributed_checkpoint", False):
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        if storage_options is not None:
            raise UsageError("Ckpt8StrategyMixin has no storage_options; leave them out")
        path = Path(self.broadcast(filepath))
        states = {"state_dict": checkpoint.pop("state_dict")}
        states |= {_optimizer(number): state for number, state in enumerate(checkpoint.pop("optimizer_states", []))}
        with contextlib.ExitStack() as stack:
            rest = None
            if self.global_rank == 0:
                stack.enter_context(_in_place_of(path))
            self.barrier()
            if self.global_rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                rest = stack.enter_context(AtomicFile(path / _REST, force=True))
                with rest.guard():
                    torch.save(checkpoint, rest.file)
            save_packed(path, states, self._packing)
            if rest is not None:
                rest.publish()

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and, to fit, optimizers; the rest is returned. Raises InputError."""
        path = Path(self.broadcast(checkpoint_path))
        if is_container(path):
            with self._restored(path) as plain:
                return super().load_checkpoint(plain, weights_only)  # type: ignore[misc,no-any-return]
        if not is_sharded(path):
            return super().load_checkpoint(path, weights_only)  # type: ignore[misc,no-any-return]
        module, threads = self.lightning_module, self._packing["threads"]
        load_model(path, "state_dict", self.model, strict=module.strict_loading, threads=threads)
        if module.trainer.state.fn == "fit":
            for number, optimizer in enumerate(self.optimizers):
                load_optimizers(path, _optimizer(number), self.model, optimizer, threads=threads)
        return torch.load(path / _REST, weights_only=weights_only)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _restored(self: Any, path: Path) -> Iterator[Path]:
        """A container as the file that torch would have saved, beside it, for all ranks."""
        plain, problem = path.with_name(f".{path.name}.ckpt8-restored"), None
        try:
            if self.global_rank == 0:
                try:
                    restore(path, plain, force=True, threads=self._packing["threads"])
                except Ckpt8Error as exc:
                    problem = str(exc)
            if (problem := self.broadcast(problem)) is not None:
                raise InputError(problem)
            yield plain
            self.barrier()  # every rank has read it
        finally:
            if self.global_rank == 0:
                plain.unlink(missing_ok=True)


def _optimizer(number: int) -> str:
    return f"optimizer_{number}"


@contextlib.contextmanager
def _in_place_of(path: Path) -> Iterator[None]:
    """Set a checkpoint of another kind aside, which Lightning removes, until the block has written ``path``.

    Where the block fails it comes back. What a kill left aside goes with it. Raises OutputError.
    """
    is_other = not is_sharded(path) and (path.is_file() or (path / _REST).is_file())
    aside = path.with_name(f".{path.name}.ckpt8-discarded")
    if is_other:
        remove(aside)
        with removing(path):
            path.rename(aside)
    try:
        yield
    except BaseException:
        if is_other:
            remove(path)
            aside.rename(path)
        raise
    with removing(aside):
        if aside.is_file():
            remove_container(aside)
    remove(aside)
