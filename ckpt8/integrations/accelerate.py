"""For accelerate: packed models and optimizers in place of plain files. Under FSDP every rank packs its own slices.

    from ckpt8.integrations.accelerate import load_state, save_state

    save_state(accelerator, "run/step-500")            # in place of accelerator.save_state
    load_state(accelerator, "run/step-500")            # at any world size

With ``background=True`` training waits for a copy of models and optimizers only; ``finish(accelerator)`` ends the run.

Models and optimizers go into the folder ``ckpt8`` of the checkpoint, a weight and its moments into one file. accelerate
itself writes and reads the rest: schedulers, samplers, random states, objects of the user's own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed.checkpoint.api import CheckpointException

from ckpt8.chaining.thin import Upkeep, upkeep
from ckpt8.checkpoint.sources.snapshot import give_back
from ckpt8.container.header import is_container
from ckpt8.container.sharded import FOLDER, is_sharded
from ckpt8.core.errors import UsageError, require
from ckpt8.core.files.atomic import discard, remove, remove_abandoned_of
from ckpt8.core.public import checked
from ckpt8.integrations import local_path, removing, required
from ckpt8.integrations.sharded import LaterSave, load_model, load_optimizers, save_packed, state_to_pack

with required("accelerate", __name__):
    from accelerate.utils import is_peft_model

_ADVICE = "give a directory that every rank can reach"

_later: WeakKeyDictionary[Any, LaterSave] = WeakKeyDictionary()
"""The saves in the background, by accelerator."""


@dataclass(slots=True)
class _Saved:
    """The last checkpoint of the main process. One that accelerate has named ``is_new``; ``limit`` is for these."""

    folder: Path
    is_new: bool
    limit: int | None
    thin: Upkeep | None

    def keep_up(self) -> None:
        """Remove what the checkpoint makes superfluous. Raises OutputError, and as ``ckpt8.thin``."""
        if self.is_new and self.limit is not None:
            name, paths = r"checkpoint_(\d+)", list(self.folder.parent.iterdir())
            matches = ((re.fullmatch(name, path.name), path) for path in paths if path.name != self.folder.name)
            others = {int(match[1]): path for match, path in matches if match}
            for number in sorted(others)[: max(len(others) + 1 - self.limit, 0)]:
                with removing(others[number]):
                    discard(others[number])
            remove_abandoned_of(name, paths)
        if self.thin is not None:
            self.thin(self.folder.parent, [self.folder.name])


_saved: WeakKeyDictionary[Any, _Saved] = WeakKeyDictionary()
"""What may not be whole yet, by accelerator."""


@checked
def save_state(
    accelerator: Any,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    preset: str | None = None,
    budget: float | None = None,
    rules: Sequence[str] = (),
    threads: int | None = None,
    adapter_only: bool = False,
    keep: str | None = None,
    to: int | str | None = None,
    background: bool = False,
) -> str:
    """Save all that ``accelerator.save_state(output_dir)`` saves, models and optimizers packed. Every rank calls it.

    The other arguments are those of ``ckpt8.save``. With ``adapter_only`` models of peft are saved without their base,
    as Trainer saves them; ``accelerator.save_state`` has no such choice. Ranks write slices, whatever
    ``state_dict_type`` says. Returns the folder of the checkpoint. Raises OutputError, and UsageError where accelerate
    runs neither FSDP nor one process.

    ``keep`` and ``to`` are those of ``ckpt8.thin``, which the main process applies to the folder around that of the
    checkpoint, which itself stays. Packed directories go or stay; they do not get coarser. These and what is beyond
    accelerate's ``total_limit`` go once the checkpoint is whole, and stay where it fails; a folder that accelerate has
    named goes then.

    With ``background`` it returns once models and optimizers are copied to memory of the CPU, which is kept for the
    next save, and a thread packs them. What fails there is a warning, and raised by the next call for this accelerator:
    of this function, of ``load_state``, or of ``finish``. Each waits for the thread, and removes what is to go.

    >>> from ckpt8.integrations.accelerate import save_state
    >>> save_state(accelerator, "run/step-500", preset="archive")  # doctest: +SKIP
    'run/step-500'
    """
    options = {"preset": preset, "budget": budget, "rules": tuple(rules), "threads": threads}
    target = None if output_dir is None else str(local_path(output_dir, _ADVICE))
    thin = upkeep(keep, to, threads=threads)
    _wait(accelerator)
    project = accelerator.project_configuration
    is_new, limit = project.automatic_checkpoint_naming, project.total_limit
    with _taken_over(accelerator, "save_state") as pairs, contextlib.ExitStack() as hooks:

        def pack(models: list[Any], _: list[Any], folder: str) -> None:
            if accelerator.is_main_process:
                _saved[accelerator] = _Saved(Path(folder), is_new, limit, thin)
            models.extend(model for model, _ in pairs)  # hooks of the user's own, which come later, see them
            state: dict[str, Any] = {}
            for number, (model, own) in enumerate(pairs):
                weights, moments = state_to_pack(model, own, adapter_only=adapter_only and is_peft_model(model))
                state |= {_key("model", number): weights, _key("optimizer", number): moments}
            if background:
                _later.setdefault(accelerator, LaterSave()).begin(Path(folder) / FOLDER, state, options)
            else:
                save_packed(Path(folder) / FOLDER, state, options)

        hook = accelerator.register_save_state_pre_hook(pack)
        hooks.callback(hook.remove)
        accelerator._save_model_state_pre_hook.move_to_end(hook.id, last=False)
        project.total_limit = None  # accelerate would remove older ones now
        try:
            saved = str(Path(accelerator.save_state(target)))
        except BaseException:
            _give_up(accelerator)
            raise
        finally:
            project.total_limit = limit
    if not background:
        _wait(accelerator)
    return saved


@checked
def load_state(
    accelerator: Any, input_dir: str | os.PathLike[str] | None = None, *, threads: int | None = None
) -> None:
    """Load what ``save_state`` wrote into the accelerator, at any world size. Every rank calls it.

    Leaves a checkpoint that accelerate wrote to accelerate. Raises UsageError where accelerate runs
    neither FSDP nor one process, InputError for damage, which torch wraps in its CheckpointException.

    >>> from ckpt8.integrations.accelerate import load_state
    >>> load_state(accelerator, "run/step-500")  # doctest: +SKIP
    """
    source = None if input_dir is None else local_path(input_dir, _ADVICE)
    _wait(accelerator)
    if source is not None:
        _refuse_others(source)
    if source is not None and not is_sharded(source / FOLDER):
        accelerator.load_state(str(source))
        return
    with _taken_over(accelerator, "load_state") as pairs, contextlib.ExitStack() as hooks:

        def unpack(_: list[Any], folder: str) -> None:
            place = Path(folder) / FOLDER
            _refuse_others(Path(folder))
            require(is_sharded(place), f"{folder}: holds nothing that save_state packed; use accelerator.load_state")
            for number, (model, own) in enumerate(pairs):
                load_model(place, _key("model", number), model, has_adapters=is_peft_model(model), threads=threads)
                load_optimizers(place, _key("optimizer", number), model, own, threads=threads)

        hooks.callback(accelerator.register_load_state_pre_hook(unpack).remove)
        accelerator.load_state(None if source is None else str(source))


def finish(accelerator: Any) -> None:
    """Wait for a save in the background, and free the memory for the next one. Raises what the save raises.

    >>> from ckpt8.integrations.accelerate import finish
    >>> finish(accelerator)  # doctest: +SKIP
    """
    try:
        _wait(accelerator)
    finally:
        give_back()


def _wait(accelerator: Any) -> None:
    """Wait for a save in the background, if any, and remove what the checkpoint makes superfluous."""
    if (later := _later.get(accelerator)) is not None:
        try:
            later.wait()
        except BaseException:
            if not later.is_under_way:  # else the wait was interrupted
                _give_up(accelerator)
            raise
    if (saved := _saved.pop(accelerator, None)) is not None:
        saved.keep_up()


def _give_up(accelerator: Any) -> None:
    """Remove a new checkpoint that failed: accelerate would count it, and load it as the newest."""
    saved, later = _saved.pop(accelerator, None), _later.get(accelerator)
    if saved is not None and saved.is_new:
        if later is not None:
            with contextlib.suppress(CheckpointException, Exception):
                later.wait()
        remove(saved.folder)


def _refuse_others(path: Path) -> None:
    """Raise InputError for a container, and for a checkpoint whose save did not end."""
    require(not is_container(path), f"{path}: is a container; restore it, and load the directory that it gives")
    place = path / FOLDER
    require(is_sharded(place) or not place.is_dir(), f"{path}: is not complete, its save did not end; load another one")


@contextlib.contextmanager
def _taken_over(accelerator: Any, name: str) -> Iterator[list[tuple[Any, list[Any]]]]:
    """The models of accelerate with their optimizers; accelerate sees none of them meanwhile.

    Raises UsageError where accelerate runs neither FSDP nor one process, and where it is not clear which optimizer
    belongs to which model.
    """
    require(
        accelerator.distributed_type in ("FSDP", "NO"),
        f"{name}: accelerate runs {accelerator.distributed_type}, not FSDP or one process; use accelerator.{name}, and "
        "ckpt8.compress for the folder that it writes",
        UsageError,
    )
    models, optimizers = accelerator._models, accelerator._optimizers
    own = [optimizer.optimizer for optimizer in optimizers]
    require(
        not 1 < len(models) < len(own),
        f"{name}: {len(own)} optimizers for {len(models)} models; prepare one for each model",
        UsageError,
    )
    groups = [own] if len(models) == 1 else [own[number : number + 1] for number in range(len(models))]
    accelerator._models, accelerator._optimizers = [], []
    try:
        yield list(zip(models, groups, strict=True))
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers


def _key(kind: str, number: int) -> str:
    return f"{kind}_{number}" if number else kind
