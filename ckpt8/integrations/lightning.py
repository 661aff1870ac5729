"""For Lightning's Trainer and Fabric: save checkpoints as ``.ckpt8`` containers, under the names Lightning gives them.

    from ckpt8.integrations.lightning import Ckpt8CheckpointIO

    trainer = L.Trainer(..., plugins=[Ckpt8CheckpointIO(preset="flash")])
    trainer.fit(model, ckpt_path="last.ckpt")          # such a container, or a .ckpt of a run without the plugin

``MyModule.load_from_checkpoint`` reads files without asking a plugin. ``opened`` gives it a file that it can read:

    with opened("last.ckpt") as file:
        model = MyModule.load_from_checkpoint(file)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from ckpt8.chaining.thin import upkeep
from ckpt8.checkpoint.replacing import problem_of
from ckpt8.checkpoint.sources.gate import load_allowed
from ckpt8.checkpoint.sources.snapshot import give_back
from ckpt8.checkpoint.sources.stored_member import member_index
from ckpt8.compressing.background import PendingSave, key_of, wait_for
from ckpt8.compressing.chosen_base import only_auto
from ckpt8.compressing.compress import checked_options, save
from ckpt8.container.header import is_container
from ckpt8.container.kept_bases import remove_container
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import OutputError, UsageError, require
from ckpt8.core.files.atomic import writing
from ckpt8.core.files.source_file import reading
from ckpt8.core.public import checked, lazy_names
from ckpt8.core.workers import Workers, run_task
from ckpt8.integrations import local_path, missing, removing

if TYPE_CHECKING:
    from ckpt8.integrations.sharded import Ckpt8StrategyMixin

__all__ = ["Ckpt8CheckpointIO", "Ckpt8StrategyMixin", "opened"]
if not TYPE_CHECKING:  # the class needs torch.distributed, which not every torch has
    __getattr__ = lazy_names(__name__, lambda: {"Ckpt8StrategyMixin": "ckpt8.integrations.sharded:Ckpt8StrategyMixin"})

_ADVICE = "Ckpt8CheckpointIO writes and reads local files; give a local path"


def _interfaces() -> Iterator[Any]:
    """Lightning's interface: that of the package ``lightning``, and that of ``pytorch_lightning``."""
    for home in ("lightning.fabric.plugins", "lightning_fabric.plugins"):
        try:
            yield import_module(home).CheckpointIO
        except ModuleNotFoundError as exc:
            if not f"{home}.".startswith(f"{exc.name}."):
                raise


_FOUND = tuple(_interfaces())
if not _FOUND:
    raise missing(__name__, "lightning")
CheckpointIO: Any = _FOUND[0]


class Ckpt8CheckpointIO(CheckpointIO):
    """Saves with ``ckpt8.save``. Loads what it saved, and a ``.ckpt`` of torch.save.

    ``preset``, ``budget``, ``rules``, ``frozen_from``, ``threads``, ``stats``, ``max_update_error`` and ``snapshot``
    are those of ``ckpt8.save``. With ``background`` a save returns once everything is copied in memory, which stays for
    the next one until the run ends. The next save waits for it, and raises its failure; so does the end of the run. An
    older file that Lightning removes goes once the newer one is whole, and stays where the save fails.
    With ``base="auto"`` a container is a delta to an earlier one of its folder, where that is smaller. ``bases/``
    beside them keeps what they need, as hard links, however they are removed: move that folder with them.

    ``keep`` and ``to`` are those of ``ckpt8.thin``, which is applied to the folder after each save; in the background
    before the next one. What a ModelCheckpoint calls the best, and the file just saved, stay as they are. Give that
    ``save_top_k=-1``, so that it removes nothing itself.

    Never executes a pickle, whatever ``weights_only`` says. Refuses hyperparameters of a class that torch does not
    allow, such as Namespace, and names the call that allows them.

    >>> from ckpt8.integrations.lightning import Ckpt8CheckpointIO
    >>> files = Ckpt8CheckpointIO()  # Trainer(..., plugins=[files])
    >>> files.save_checkpoint({"state_dict": model.state_dict()}, "last.ckpt")
    >>> list(files.load_checkpoint("last.ckpt"))
    ['state_dict']
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
        keep: str | None = None,
        to: int | str | None = None,
        background: bool = False,
        threads: int | None = None,
        stats: bool = True,
        max_update_error: float | None = None,
        snapshot: str = "copy",
    ) -> None:
        super().__init__()
        self._options = checked_options(
            preset=preset,
            budget=budget,
            rules=tuple(rules),
            base=only_auto(base),
            frozen_from=frozen_from,
            threads=threads,
            stats=stats,
            max_update_error=max_update_error,
            snapshot=snapshot,
        )
        self._thin, self._thinned = upkeep(keep, to, threads=threads), (Path(), [""])
        self._background = background
        self._pending: tuple[str, PendingSave] | None = None
        self._removals: list[Future[None]] = []

    @checked
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a container to ``path``. Raises OutputError, and UsageError for a path that is not local."""
        require(storage_options is None, "Ckpt8CheckpointIO has no storage_options; leave them out", UsageError)
        target = local_path(path, _ADVICE)
        self._wait()
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        self._thinned = target.parent, [target.name, *(Path(name).name for name in _best_of(checkpoint))]
        if self._background:
            self._pending = key_of(target), save(checkpoint, target, background=True, **self._options)
        else:
            save(checkpoint, target, **self._options)
            self._keep_up()

    @checked
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """The checkpoint at ``path``, always as ``weights_only=True`` loads it.

        Raises FileNotFoundError as Lightning's own plugin does, UnsupportedError for a class that torch does not allow,
        InputError for damage.
        """
        source = local_path(path, _ADVICE)
        wait_for(source)
        if not source.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {source}")
        with opened(source) as file:
            return cast("dict[str, Any]", load_allowed(file, str(source), map_location))

    @checked
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the file or directory, if it is there. Raises OutputError, also for anything but a checkpoint.

        A loaded checkpoint tells Lightning which older ones to remove, and its paths may lead anywhere.
        """
        target = local_path(path, _ADVICE)
        with removing(target):
            _check_removable(target)
        if self._pending is not None and self._pending[0] != key_of(target):
            self._removals.append(Future())
            work = self._removals[-1], _remove_after, (self._pending[1], target)
            threading.Thread(target=run_task, args=work, name="ckpt8-remove").start()
        else:
            self._wait()
            _remove(target)

    def teardown(self) -> None:
        """Wait for a save in the background, and free the memory for the next one. Raises the error of the save."""
        try:
            self._wait()
        finally:
            give_back()

    def _wait(self) -> None:
        """Wait for the save that is under way, and the removal of what it makes superfluous. Raises their errors."""
        pending, self._pending = self._pending, None
        removals, self._removals = self._removals, []
        if pending is not None:
            pending[1].result()
        for removal in removals:
            removal.result()
        if pending is not None:
            self._keep_up()

    def _keep_up(self) -> None:
        """Thin the folder of the last save. Raises as ``ckpt8.thin``."""
        if self._thin is not None:
            self._thin(*self._thinned)


def _best_of(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    """The files that ModelCheckpoints of Lightning call the best."""
    callbacks = checkpoint.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict) and isinstance(path := state.get("best_model_path"), str):
            yield path


def _remove_after(pending: PendingSave, target: Path) -> None:
    """Remove a checkpoint once the newer one is whole, which until then may not be what is left."""
    try:
        pending.result()
    except BaseException:
        return  # whoever waits for the save gets it
    _remove(target)


def _remove(target: Path) -> None:
    """Remove a checkpoint, if it is there. Raises OutputError, also for anything but a checkpoint."""
    wait_for(target)
    with removing(target):
        _check_removable(target)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            remove_container(target)


def _check_removable(target: Path) -> None:
    if target.exists() and not target.is_symlink() and (problem := problem_of(target)):
        raise OutputError(f"{target}: is not removed: {problem}")


for _other in _FOUND[1:]:
    _other.register(Ckpt8CheckpointIO)


@checked
@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file with the bytes that torch.save would have written, decoded on reading; a plain ``.ckpt`` as it is.

    Raises InputError for damage and for a container that was not made of one checkpoint of torch.

    >>> from ckpt8.integrations.lightning import opened
    >>> with opened("run.ckpt8") as file:
    ...     list(torch.load(file, weights_only=True))
    ['model', 'optimizer', 'step']
    """
    source = Path(path)
    require(not source.is_dir(), f"{source}: is a directory; Ckpt8CheckpointIO reads checkpoints that are one file")
    if not is_container(source):
        with reading(source), source.open("rb") as plain:
            yield plain
        return
    with ContainerReader(source) as reader, Workers() as workers:
        yield cast("IO[bytes]", MemberFile(reader, member_index(reader, None), workers))
