"""Lightning's Trainer and Fabric: checkpoints are ``.ckpt8`` containers, under the names that Lightning gives them.

    from ckpt8.integrations.lightning import Ckpt8CheckpointIO

    trainer = L.Trainer(..., plugins=[Ckpt8CheckpointIO(preset="flash")])
    trainer.fit(model, ckpt_path="last.ckpt")          # such a container, or a .ckpt of a run without the plugin

``MyModule.load_from_checkpoint`` reads files by itself, past every plugin: ``opened`` gives it one.

    with opened("last.ckpt") as file:
        model = MyModule.load_from_checkpoint(file)
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

from ckpt8.checkpoint.gate import load_allowed
from ckpt8.checkpoint.replacing import problem_of
from ckpt8.checkpoint.sources.one_file import member_index
from ckpt8.compressing.background import PendingSave, wait_for
from ckpt8.compressing.compress import save
from ckpt8.compressing.policy import Policy
from ckpt8.container.header import is_container
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, OutputError, UsageError
from ckpt8.core.workers import Workers
from ckpt8.integrations import missing

_HOMES = ("lightning.fabric.plugins", "lightning_fabric.plugins")
"""Where the interface is defined: for the package ``lightning``, and for ``pytorch_lightning``."""


def _interfaces() -> Iterator[Any]:
    for home in _HOMES:
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
    """Saves with ``ckpt8.save`` and loads with ``ckpt8.load``.

    ``preset``, ``rules``, ``threads``, ``stats`` and ``max_update_error`` are those of ``ckpt8.save``. With
    ``background`` a save returns once everything is packed in memory; the next save waits for the last one, and its
    failure is raised there or at the end of the run. A ``.ckpt`` of torch.save is loaded as well.

    No pickle is executed, whatever ``weights_only`` says: hyperparameters of a class that torch does not allow, such as
    Namespace, are refused with the call that allows them.
    """

    def __init__(
        self,
        *,
        preset: str = "flash",
        rules: Sequence[str] = (),
        background: bool = False,
        threads: int | None = None,
        stats: bool = True,
        max_update_error: float | None = None,
    ) -> None:
        super().__init__()
        Policy.of(preset, rules)
        self._options: dict[str, Any] = {
            "preset": preset,
            "rules": tuple(rules),
            "threads": threads,
            "stats": stats,
            "max_update_error": max_update_error,
        }
        self._background = background
        self._pending: PendingSave | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a container to ``path``. Raises OutputError, and UsageError for a path that is no local one."""
        if storage_options is not None:
            raise UsageError("Ckpt8CheckpointIO has no storage_options; leave them out")
        target = _local(path)
        self._finish()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise OutputError(f"{target}: cannot be written: {exc.strerror}") from exc
        if self._background:
            self._pending = save(checkpoint, target, background=True, **self._options)
        else:
            save(checkpoint, target, **self._options)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """The checkpoint at ``path``, always as ``weights_only=True`` gives it.

        Raises FileNotFoundError as Lightning's own does, UnsupportedError for a class that torch does not allow,
        InputError for damage.
        """
        source = _local(path)
        wait_for(source)
        if not source.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {source}")
        with opened(source) as file:
            return cast("dict[str, Any]", load_allowed(file, str(source), map_location))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the file, or the directory, if it is there. Raises OutputError, and for what is no checkpoint.

        A checkpoint that is loaded tells Lightning which older ones to remove: its paths may lead anywhere.
        """
        target = _local(path)
        wait_for(target)
        try:
            is_link = target.is_symlink()
            problem = problem_of(target) if target.exists() and not is_link else None
            if problem is not None:
                raise OutputError(f"{target}: is not removed: {problem}")
            if target.is_dir() and not is_link:
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        except OSError as exc:
            raise OutputError(f"{target}: cannot be removed: {exc.strerror}") from exc

    def teardown(self) -> None:
        """Wait for a save in the background. Raises what it failed with."""
        self._finish()

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


for _other in _FOUND[1:]:
    _other.register(Ckpt8CheckpointIO)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """The bytes that torch.save would have written, decoded as they are read; of a plain ``.ckpt`` its own bytes.

    Raises InputError for damage and for a container that was not made of one checkpoint of torch.
    """
    source = Path(path)
    if source.is_dir():
        raise InputError(f"{source}: is a directory; Ckpt8CheckpointIO reads checkpoints that are one file")
    if not is_container(source):
        try:
            with source.open("rb") as plain:
                yield plain
        except OSError as exc:
            raise InputError(f"{source}: cannot be read: {exc.strerror}") from exc
        return
    with ContainerReader(source) as reader, Workers() as workers:
        yield cast("IO[bytes]", MemberFile(reader, member_index(reader, None), workers))


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in str(path):
        raise UsageError(f"{path}: is not a path of the file system, which is where Ckpt8CheckpointIO writes and reads")
    return Path(path)
