"""For Trainer of transformers: compress every checkpoint that it saves, and resume from one in one line.

    from ckpt8.integrations.transformers import Ckpt8Callback, restored_checkpoint

    trainer = Trainer(..., callbacks=[Ckpt8Callback(keep_original=False)])
    trainer.train(resume_from_checkpoint=restored_checkpoint(trainer.args.output_dir))

``restored_checkpoint`` returns None where there is no checkpoint yet, and training starts from the beginning.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ckpt8.chaining.jobs import finish_removals, remove_as_verified
from ckpt8.chaining.thin import upkeep
from ckpt8.checkpoint.replacing import TRAINER_STATE
from ckpt8.compressing.chosen_base import only_auto
from ckpt8.compressing.compress import checked_options, compress, default_target
from ckpt8.container.header import CONTAINER
from ckpt8.container.kept_bases import remove_container
from ckpt8.core.errors import CheckFailedError, Ckpt8Error, InputError, OutputError, require
from ckpt8.core.files.atomic import discard, remove_abandoned_of
from ckpt8.core.public import checked, lazy_names
from ckpt8.core.workers import run_task
from ckpt8.inspecting.verify import verify
from ckpt8.integrations import removing, required
from ckpt8.restoring.restore import restore

with required("transformers", __name__):
    from transformers import TrainerCallback

if TYPE_CHECKING:
    from ckpt8.integrations.sharded import Ckpt8TrainerMixin

__all__ = ["Ckpt8Callback", "Ckpt8TrainerMixin", "restored_checkpoint", "temporary_checkpoint"]
if not TYPE_CHECKING:  # the class needs torch.distributed, which not every torch has
    __getattr__ = lazy_names(__name__, lambda: {"Ckpt8TrainerMixin": "ckpt8.integrations.sharded:Ckpt8TrainerMixin"})


_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def directories_in(folder: Path) -> dict[int, Path]:
    """The complete directories of checkpoints in a folder, by step."""
    return {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if (match := _CHECKPOINT.fullmatch(path.name)) and (path / TRAINER_STATE).is_file()
    }


def containers_in(folder: Path) -> dict[int, Path]:
    """The containers of checkpoints in a folder, by step, oldest first."""
    return dict(
        sorted(
            (int(match[1]), path)
            for path in folder.glob(f"*{CONTAINER}")
            if (match := _CHECKPOINT.fullmatch(path.stem)) and path.is_file()
        )
    )


def rotate(written: Path, limit: int | None, best: Path | None) -> None:
    """Remove the oldest containers above ``limit`` beside the one that was just written.

    As Trainer does with directories this keeps the newest and the best, and also what was ``written``: a run that
    begins again has lower steps than what is left of the one before. Raises OutputError.
    """
    if limit is None or limit <= 0:
        return
    present = list(containers_in(written.parent).values())
    kept = {present[-1], written, *(path for path in present if best is not None and path.stem == best.name)}
    surplus = max(len(present) - max(limit, len(kept)), 0)
    for path in [path for path in present if path not in kept][:surplus]:
        with removing(path):
            remove_container(path)


def _check(source: Path, threads: int | None) -> None:
    """Raise CheckFailedError where the container of a directory does not hold."""
    try:
        verify(default_target(source), threads=threads)
    except Ckpt8Error as exc:
        raise CheckFailedError(f"{source}: is kept, its container does not hold: {exc}") from exc


class Ckpt8Callback(TrainerCallback):
    """Compresses every checkpoint that Trainer saves: ``checkpoint-N/`` becomes ``checkpoint-N.ckpt8`` beside it.

    ``preset``, ``budget``, ``rules``, ``frozen_from`` and ``threads`` are those of ``ckpt8.compress``. With
    ``keep_original`` False the callback removes a directory once it has written its container and compared the two, but
    never the best one: Trainer reads that at the end. With ``background`` training goes on meanwhile, until the next
    save or the end. Of the containers it keeps as many as ``save_total_limit`` says, the newest, and that of the best
    checkpoint in any case.

    ``keep`` and ``to`` are those of ``ckpt8.thin``, which is applied to the folder after each save, between two steps.
    The best checkpoint and the one just saved stay as they are.

    With ``base="auto"`` a container is a delta to an earlier one, where that is smaller. ``bases/`` beside them keeps
    what they need, as hard links, however they are removed: move that folder with them.

    Rank 0 compresses; it must see all files of a checkpoint. A failure is a warning, and the directory stays; with
    ``strict`` it ends the run.

    >>> from ckpt8.integrations.transformers import Ckpt8Callback
    >>> callback = Ckpt8Callback(keep_original=False)  # Trainer(..., callbacks=[callback])
    """

    @checked
    def __init__(
        self,
        *,
        preset: str | None = None,
        budget: float | None = None,
        rules: Sequence[str] = (),
        base: str | None = None,
        frozen_from: str | os.PathLike[str] | None = None,
        keep_original: bool = True,
        keep: str | None = None,
        to: int | str | None = None,
        background: bool = False,
        strict: bool = False,
        threads: int | None = None,
    ) -> None:
        self._options = checked_options(
            preset=preset,
            budget=budget,
            rules=tuple(rules),
            base=only_auto(base),
            frozen_from=frozen_from,
            threads=threads,
        )
        self._keep = keep_original
        self._thin = upkeep(keep, to, threads=threads)
        self._background = background
        self._strict = strict
        self._job: tuple[Path, int | None, Future[None]] | None = None
        self._verified: list[Path] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Remove what a killed run did not finish removing. Warns of a newer container, which Trainer does not see."""
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        self._remove(finish_removals, folder, self._options["threads"])
        remove_abandoned_of(_CHECKPOINT.pattern, folder.glob(".checkpoint-*"))
        containers = containers_in(folder)
        newest = max(containers, default=0)
        if newest > state.global_step and newest not in directories_in(folder):
            warnings.warn(
                f"{containers[newest]}: is of step {newest}, and training begins at step {state.global_step}, since "
                "Trainer finds directories alone; to go on from the container call "
                f"trainer.train(resume_from_checkpoint=restored_checkpoint({str(folder)!r}))",
                RuntimeWarning,
                stacklevel=2,
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compress the checkpoint of this step."""
        if _is_distributed():
            dist.barrier()  # every rank writes files of its own into a checkpoint; Trainer does not wait for them
        if not state.is_world_process_zero:
            return
        self._harvest(state)
        source = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not source.is_dir():
            self._fail(OutputError(f"{source}: is not where Trainer saves; checkpoints of this run are not compressed"))
            return
        self._job = source, args.save_total_limit, Future()
        work = self._job[-1], self._compress, (source,)
        # After the last step no training goes on, and Trainer may remove this directory before on_train_end.
        if self._background and not control.should_training_stop:
            threading.Thread(target=run_task, args=work, name="ckpt8-compress", daemon=False).start()
        else:
            run_task(*work)
            self._harvest(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the running compression before Trainer rotates its checkpoint away, between this and ``on_save``."""
        # With the strategy "best", Trainer decides after the evaluation whether it saves.
        if self._job and (self._job[-1].done() or control.should_save or args.save_strategy == "best"):
            self._harvest(state)

    on_epoch_end = on_evaluate = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Wait for the last checkpoint."""
        self._harvest(state)

    def _compress(self, source: Path) -> None:
        target, threads = default_target(source), self._options["threads"]
        compress(source, target, force=True, **self._options)
        if not self._keep and (failures := verify(target, source, threads=threads).failures):
            raise CheckFailedError(f"{target}: {failures[0]}")

    def _harvest(self, state: Any) -> None:
        """Wait for the running job. Removes checkpoints here, in Trainer's own thread, between its steps."""
        if self._job is None:
            return
        (compressed, limit, job), self._job = self._job, None
        best = None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint)
        if (error := job.exception()) is not None:
            self._fail(error, compressed)
        elif not self._keep:
            self._verified.append(compressed)
        for source in [path for path in self._verified if path != best]:
            self._verified.remove(source)
            self._remove(self._discard, source, source == compressed)
        # After that: a limit may remove the container of what was the best until now.
        if error is None:
            self._remove(rotate, default_target(compressed), limit, best)
            if self._thin is not None:
                kept = [compressed] if best is None else [compressed, best]
                self._remove(
                    self._thin, compressed.parent, [path.name + end for path in kept for end in ("", CONTAINER)]
                )

    def _discard(self, source: Path, is_new: bool) -> None:
        if source.exists():  # Trainer may have removed it
            if not is_new:
                _check(source, self._options["threads"])
            remove_as_verified(source, default_target(source), {})

    def _remove(self, remove: Callable[..., None], *arguments: Any) -> None:
        try:
            remove(*arguments)
        except (CheckFailedError, InputError, OutputError) as exc:
            self._fail(exc)

    def _fail(self, error: BaseException, source: Path | None = None) -> None:
        if self._strict or not isinstance(error, Exception):
            raise error
        where = "" if source is None else f"{source}: was not compressed: "
        warnings.warn(f"{where}{error}", RuntimeWarning, stacklevel=2)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@checked
def restored_checkpoint(
    output_dir: str | os.PathLike[str], target: str | os.PathLike[str] | None = None, *, threads: int | None = None
) -> str | None:
    """The newest checkpoint of a run as a directory that Trainer resumes from; None where there is none.

    Restores a ``checkpoint-N.ckpt8`` to ``target``, by default ``checkpoint-N`` beside it, unless the directory that it
    was made from is still there. Where torch.distributed runs, rank 0 restores and every rank gets the path. Raises
    InputError for damage, OutputError for the target.

    >>> from ckpt8.integrations.transformers import restored_checkpoint
    >>> restored_checkpoint("outputs") is None  # no checkpoint yet
    True
    """
    return _on_first_rank(lambda: _restore_newest(Path(output_dir), target, threads, []))


@checked
@contextlib.contextmanager
def temporary_checkpoint(output_dir: str | os.PathLike[str], *, threads: int | None = None) -> Iterator[str | None]:
    """The newest checkpoint as a directory, for a ``with`` block whose end removes what ``restored_checkpoint`` made.

    >>> from ckpt8.integrations.transformers import temporary_checkpoint
    >>> with temporary_checkpoint("outputs") as path:
    ...     path is None  # no checkpoint yet
    True
    """
    made: list[Path] = []
    try:
        yield _on_first_rank(lambda: _restore_newest(Path(output_dir), None, threads, made))
    finally:
        for path in made:
            with removing(path):
                discard(path)


def _restore_newest(
    folder: Path, target: str | os.PathLike[str] | None, threads: int | None, made: list[Path]
) -> str | None:
    """The path of the newest checkpoint. Adds it to ``made`` where this restores it."""
    directories, containers = directories_in(folder), containers_in(folder)
    newest = max([*directories, *containers], default=None)
    if newest is None or newest in directories:
        return None if newest is None else str(directories[newest])
    place = folder / f"checkpoint-{newest}" if target is None else Path(target)
    require(
        target is not None or not place.exists(),
        f"{place}: is not complete (no {TRAINER_STATE}), and in the way of {containers[newest]}; remove it",
        OutputError,
    )
    made.append(restore(containers[newest], place, threads=threads))
    return str(made[-1])


def _on_first_rank(restore: Callable[[], str | None]) -> str | None:
    """Restore on rank 0. Returns its result, or raises its error, on every rank."""
    if not _is_distributed() or dist.get_world_size() == 1:
        return restore()
    result: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = restore()
        except Exception as exc:
            result[1] = str(exc)
            dist.broadcast_object_list(result, src=0)
            raise
    dist.broadcast_object_list(result, src=0)
    require(result[1] is None, result[1])
    return result[0]  # type: ignore[no-any-return]
