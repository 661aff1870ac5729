"""Models and optimizers that ranks share, as one packed directory: every rank packs its own slices.

``Ckpt8TrainerMixin`` is the part of ``integrations.transformers`` for FSDP, ``Ckpt8StrategyMixin`` that of
``integrations.lightning`` for FSDP and tensor parallelism.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.sources.snapshot import give_back
from ckpt8.compressing.background import in_thread
from ckpt8.container.header import is_container
from ckpt8.container.joined import read_index
from ckpt8.container.kept_bases import remove_container
from ckpt8.container.sharded import FOLDER, is_sharded
from ckpt8.core.errors import Ckpt8Error, InputError, UsageError, require
from ckpt8.core.files.atomic import AtomicFile, remove, replace_directory
from ckpt8.core.public import checked
from ckpt8.integrations import removing
from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter
from ckpt8.integrations.dcp.staging import Staged
from ckpt8.restoring.restore import restore


class PacksSlices:
    """Takes the options of Ckpt8StorageWriter and ``background``, and gives the class behind it the other arguments."""

    @checked
    def __init__(
        self,
        *args: Any,
        preset: str | None = None,
        budget: float | None = None,
        rules: Sequence[str] = (),
        threads: int | None = None,
        background: bool = False,
        **kwargs: Any,
    ) -> None:
        self._packing: dict[str, Any] = {"preset": preset, "budget": budget, "rules": tuple(rules), "threads": threads}
        Ckpt8StorageWriter(".", **self._packing)  # raises UsageError now, not at the first save
        self._later = LaterSave() if background else None
        super().__init__(*args, **kwargs)


def save_packed(folder: Path, state: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Pack ``state`` into ``folder``, a weight and its moments into the file of one rank.

    ``options`` are those of Ckpt8StorageWriter.
    """
    writer = Ckpt8StorageWriter(folder, **options)
    with _alone_or_not() as alone:
        state_dict_saver.save(state, storage_writer=writer, planner=Ckpt8SavePlanner(), no_dist=alone)


class LaterSave:
    """Packs as ``save_packed``, in a thread: ``begin`` returns once the state is copied. One save at a time."""

    def __init__(self) -> None:
        self._saved: Future[None] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether nobody has waited for the last save yet."""
        return self._saved is not None

    def begin(
        self,
        folder: Path,
        state: dict[str, Any],
        options: Mapping[str, Any],
        end: Callable[[Future[Any]], object] = Future.result,
    ) -> None:
        """Wait for the last save, and begin another. Raises what the last one raises, which also is a warning.

        ``end`` gets the finished save, in the thread; what it raises is the failure of the whole.
        """
        self.wait()
        writer = Ckpt8StorageWriter(folder, **options)
        group = _group_of_threads(dist.group.WORLD) if dist.is_initialized() else None
        if group is None:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # the thread says so, at any time
        staged = Staged(state)
        saved: Future[None] = Future()

        def pack() -> None:
            how: Any = {"no_dist": group is None, "process_group": group}
            state_dict_saver.save(staged.state(), storage_writer=writer, planner=Ckpt8SavePlanner(), **how)

        def finish(packed: Future[Any]) -> None:
            try:
                end(packed)
            except BaseException as exc:
                saved.set_exception(exc)
                warnings.warn(f"{folder}: was not saved: {exc}", RuntimeWarning, stacklevel=2)
            else:
                saved.set_result(None)

        in_thread(pack).add_done_callback(finish)
        self._saved = saved  # not before: without a thread nothing ends it

    def wait(self) -> None:
        """Wait for the save, if any. Raises what it raises."""
        if (saved := self._saved) is not None:
            wait([saved])
            self._saved = None
            saved.result()


@lru_cache(1)
def _group_of_threads(job: Any) -> Any:  # noqa: ARG001 - one for each job
    """All ranks, over the CPU, for threads: training goes on in the group that it has."""
    return dist.new_group(backend="gloo")


def state_to_pack(model: Any, optimizers: Any, *, adapter_only: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of a model and the state of its optimizers.

    With ``adapter_only`` the model is one of peft, and its base is left out.
    """
    weights, moments = get_state_dict(model, optimizers)
    if adapter_only:
        groups: Any = moments["param_groups"]
        kept = {name for group in groups for name in group["params"]} - _parameters(model, trained=False)
        kept |= _adapters(model, weights)
        weights = {name: weight for name, weight in weights.items() if name in kept}
    return weights, moments


def load_model(
    folder: Path, key: str, model: Any, *, strict: bool = True, has_adapters: bool = False, threads: int | None = None
) -> None:
    """Load the weights under ``key`` into a model that is sharded in any way.

    ``has_adapters``: the model is one of peft, and keeps what ``folder`` does not have of its base.
    """
    state = get_model_state_dict(model)
    if has_adapters:
        stored, needed = read_index(folder).tensors, _adapters(model, state)
        state = {name: value for name, value in state.items() if name in needed or f"{key}.{name}" in stored}
    weights = _read(folder, key, state, strict, threads)
    set_model_state_dict(model, weights, options=StateDictOptions(strict=strict and not has_adapters))


def _adapters(model: Any, weights: dict[str, Any]) -> set[str]:
    """The names of those weights of a model of peft that its base does not have: what is trained, and what peft saves.

    Adapters may have frozen parts, which began at random. Buffers count too.
    """
    from peft import get_peft_model_state_dict

    saved: set[int] = set()
    for name, config in model.peft_config.items():
        if not config.is_prompt_learning:
            saved |= {id(tensor) for tensor in get_peft_model_state_dict(model, weights, adapter_name=name).values()}
    wanted = {name for name, weight in weights.items() if id(weight) in saved} | _parameters(model, trained=True)
    return weights.keys() & wanted.union(plain_names(name for name, _ in model.named_buffers()).values())


def _parameters(model: Any, *, trained: bool) -> set[str]:
    """All names of the parameters that are trained, or of those that are frozen."""
    parameters = model.named_parameters(remove_duplicate=False)
    return set(plain_names(name for name, parameter in parameters if parameter.requires_grad is trained).values())


def load_optimizers(folder: Path, key: str, model: Any, optimizers: Any, *, threads: int | None) -> None:
    """Load the state under ``key`` into the optimizers of a model."""
    state = get_optimizer_state_dict(model, optimizers)
    set_optimizer_state_dict(model, optimizers, _read(folder, key, state, True, threads))


def _read(folder: Path, key: str, state: Any, strict: bool, threads: int | None) -> Any:
    """``state``, with the values that ``folder`` has under ``key``."""
    wanted = {key: state}
    reader, planner = Ckpt8StorageReader(folder, threads=threads), DefaultLoadPlanner(allow_partial_load=not strict)
    with _alone_or_not() as alone:
        state_dict_loader.load(wanted, storage_reader=reader, planner=planner, no_dist=alone)
    return wanted[key]


@contextlib.contextmanager
def _alone_or_not() -> Iterator[bool]:
    """Whether this process belongs to no group: torch.distributed.checkpoint then works without, and warns of it."""
    if dist.is_initialized():
        yield False
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield True


def _is_of_peft(model: Any) -> bool:
    """Whether a model has adapters of peft."""
    from accelerate.utils import is_peft_model

    return bool(is_peft_model(model))


_SCHEDULER, _STATE = "scheduler.pt", "trainer_state.json"
"""Files of Trainer."""

_UNFINISHED = ".ckpt8-unfinished"
"""The folder, in that of a run, with the checkpoint that is being packed. Trainer neither finds nor counts it there."""


class Ckpt8TrainerMixin(PacksSlices):
    """Before a Trainer of any kind: where it runs FSDP, every rank packs its slices instead of saving plain ones.

    ``preset``, ``budget``, ``rules`` and ``threads`` are those of ``ckpt8.save``; Trainer gets the other arguments.
    Model and optimizer go into the folder ``ckpt8`` of ``checkpoint-N``, Trainer writes the rest as always, and
    ``train(resume_from_checkpoint=True)`` goes on from there at any world size. Plain checkpoints of FSDP load too.
    Of a model of peft it packs the adapters, not the base, as Trainer does.
    Without FSDP it changes nothing. It takes the place of ``Ckpt8Callback``.

    With ``background`` training goes on once model and optimizer are copied, to memory that is kept for the next save,
    but not with ``push_to_hub``. ``checkpoint-N`` appears when it is whole; the next save and the end of training wait
    for it, raise its failure, and then remove what ``save_total_limit`` says.

    >>> from transformers import Trainer
    >>> from ckpt8.integrations.transformers import Ckpt8TrainerMixin
    >>> class ShardedTrainer(Ckpt8TrainerMixin, Trainer): ...
    >>> trainer = ShardedTrainer(model, args, preset="archive")  # doctest: +SKIP
    """

    _unpacked: dict[str, Any] | None = None
    """What ``_save_checkpoint`` has to pack; None where it does not ask for it."""

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        later, args = self._later, self.args
        if later is None or not self.is_fsdp_enabled or args.save_only_model or args.push_to_hub:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            return
        self._finish()
        run = Path(self._get_output_dir(trial))
        place, target = (folder / f"checkpoint-{self.state.global_step}" for folder in (run / _UNFINISHED, run))
        if args.should_save:
            remove(place.parent)
            place.mkdir(parents=True)  # Trainer knows the best checkpoint by its folder
        dist.barrier()
        self._unpacked = {}
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            state = self._unpacked
        finally:
            self._unpacked = None
        if self.state.best_model_checkpoint == str(place):
            self.state.best_model_checkpoint = str(target)
            if args.should_save:
                self.state.save_to_json(str(place / _STATE))

        def end(packed: Future[Any]) -> None:
            packed.result()
            if args.should_save:
                replace_directory(place, target)
                remove(place.parent)

        # Every rank has written all other files of its own before any save can end.
        later.begin(place / FOLDER, state, self._packing, end)
        self._written = run

    def _get_output_dir(self: Any, trial: Any) -> str:
        run: str = super()._get_output_dir(trial)  # type: ignore[misc]
        return run if self._unpacked is None else str(Path(run) / _UNFINISHED)

    def _finish(self: Any) -> None:
        """Wait for the save that is under way, and remove what is then too many."""
        if self._later is not None and self._later.is_under_way:
            self._later.wait()
            if self.args.should_save:
                from transformers.trainer_utils import rotate_checkpoints

                best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
                rotate_checkpoints(str(self._written), limit, best, use_mtime=True)

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As Trainer does. At the end, and at an error, it waits for the save that is under way."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            try:
                self._finish()
            finally:
                if self._later is not None:
                    give_back()

    def _finalize_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._finish()  # Trainer loads the best checkpoint now, and removes others
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        weights, moments = state_to_pack(self.model, self.optimizer, adapter_only=_is_of_peft(self.model))
        state = {"model": weights, "optimizer": moments}
        if self._unpacked is None:
            save_packed(Path(output_dir) / FOLDER, state, self._packing)
        else:
            self._unpacked |= state
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
        load_optimizers(place, "optimizer", self.model, self.optimizer.optimizer, threads=self._packing["threads"])
        self.lr_scheduler.load_state_dict(torch.load(place.with_name(_SCHEDULER), weights_only=True))

    def _load_best_model(self: Any) -> None:
        if (place := self._packed(self.state.best_model_checkpoint)) is None:
            super()._load_best_model()  # type: ignore[misc]
        else:
            self._load_packed(place, self.model)

    def _load_packed(self, place: Path, model: Any) -> None:
        load_model(place, "model", model, has_adapters=_is_of_peft(model), threads=self._packing["threads"])

    def _packed(self: Any, checkpoint: str | None) -> Path | None:
        """What is packed of a checkpoint, for a Trainer that runs FSDP, or None."""
        place = None if checkpoint is None else Path(checkpoint) / FOLDER
        return place if place is not None and self.is_fsdp_enabled and is_sharded(place) else None


_REST = "meta.pt"
"""The file of Lightning with what is neither weights nor optimizer; it makes a directory a sharded checkpoint."""


class Ckpt8StrategyMixin(PacksSlices):
    """Before Lightning's FSDPStrategy or ModelParallelStrategy: every rank packs its slices instead of plain ones.

    ``preset``, ``budget``, ``rules`` and ``threads`` are those of ``ckpt8.save``; the others are the strategy's own.
    ``fit(ckpt_path=...)`` goes on from such a directory at any world size. Plain checkpoints load too, and so do files
    of ``Ckpt8CheckpointIO``, which still writes those that are no slices (``state_dict_type="full"``).

    With ``background`` training goes on once weights and optimizers are copied, to memory that is kept for the next
    save. ``meta.pt``, without which a directory is no checkpoint, comes last. The next save and the end of the run wait
    for it, raise its failure, and then remove the older ones that Lightning has removed meanwhile.

    >>> from lightning.pytorch.strategies import FSDPStrategy
    >>> from ckpt8.integrations.lightning import Ckpt8StrategyMixin
    >>> class PackedFSDP(Ckpt8StrategyMixin, FSDPStrategy): ...
    >>> strategy = PackedFSDP(preset="archive", state_dict_type="sharded")  # Trainer(..., strategy=strategy)
    """

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Pack a sharded checkpoint; the strategy saves one that is whole. Raises OutputError."""
        self._finish()
        if getattr(self, "_state_dict_type", None) != "sharded" and not getattr(
            self, "_save_distributed_checkpoint", False
        ):
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        require(storage_options is None, "Ckpt8StrategyMixin has no storage_options; leave them out", UsageError)
        path = Path(self.broadcast(filepath))
        states = {"state_dict": checkpoint.pop("state_dict")}
        states |= {f"optimizer_{at}": state for at, state in enumerate(checkpoint.pop("optimizer_states", []))}
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
            if self._later is None:
                save_packed(path, states, self._packing)
                if rest is not None:
                    rest.publish()
                return
            opened = stack.pop_all()
            stack.push(opened)

            def end(packed: Future[Any]) -> None:
                with opened:
                    packed.result()
                    if rest is not None:
                        rest.publish()

            self._later.begin(path, states, self._packing, end)
            stack.pop_all()  # the thread closes what is open

    def remove_checkpoint(self: Any, filepath: Any) -> None:
        """Remove a checkpoint; while another one is packed in the background, once that is whole."""
        if self._later is not None and self._later.is_under_way:
            self._outdated = [*self._outdated, filepath]
        else:
            super().remove_checkpoint(filepath)  # type: ignore[misc]

    _outdated: Sequence[Any] = ()

    def _finish(self: Any) -> None:
        """Wait for the save that is under way, then remove what it makes superfluous."""
        outdated, self._outdated = self._outdated, ()
        if self._later is not None:
            self._later.wait()
        for path in outdated:
            super().remove_checkpoint(path)  # type: ignore[misc]

    def teardown(self: Any) -> None:
        """As the strategy does, after a save in the background. Raises the error of that save."""
        try:
            self._finish()
        finally:
            if self._later is not None:
                give_back()
            super().teardown()  # type: ignore[misc]

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and, to fit, optimizers; the rest is returned. Raises InputError."""
        self._finish()
        path = Path(self.broadcast(checkpoint_path))
        if is_container(path):
            with self._restored(path) as plain:
                return super().load_checkpoint(plain, weights_only)  # type: ignore[misc,no-any-return]
        if not is_sharded(path):
            return super().load_checkpoint(path, weights_only)  # type: ignore[misc,no-any-return]
        module, threads = self.lightning_module, self._packing["threads"]
        load_model(path, "state_dict", self.model, strict=module.strict_loading, threads=threads)
        if module.trainer.state.fn == "fit":
            for at, optimizer in enumerate(self.optimizers):
                load_optimizers(path, f"optimizer_{at}", self.model, optimizer, threads=threads)
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
