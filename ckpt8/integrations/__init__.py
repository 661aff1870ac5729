"""Optional parts for frameworks. Imports every package but cli; no other package imports it.

Each module needs its framework:

transformers    ``Ckpt8Callback`` and ``restored_checkpoint`` for Trainer, ``Ckpt8TrainerMixin`` for its FSDP
lightning       ``Ckpt8CheckpointIO`` for Lightning's Trainer and Fabric, ``Ckpt8StrategyMixin`` for sharded strategies
accelerate      ``save_state`` and ``load_state`` for its FSDP
torchtitan      ``Ckpt8CheckpointManager``
dcp             ``Ckpt8StorageWriter`` and ``Ckpt8StorageReader`` for torch.distributed.checkpoint
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ckpt8.core.errors import Ckpt8Error, OutputError, UsageError, require
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import RemotePath


def missing(module: str, package: str) -> ImportError:
    """The error of importing ``module`` where ``package`` is not installed."""
    return ImportError(f"{module} needs {package}: pip install {package}")


@contextlib.contextmanager
def required(package: str, importer: str, to_install: str = "") -> Iterator[None]:
    """For a block in which ``importer`` imports ``package``. Raises ImportError, with what to install, without it."""
    try:
        yield
    except ModuleNotFoundError as exc:
        if not f"{package}.".startswith(f"{exc.name}."):
            raise
        raise missing(importer, to_install or package) from None


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether this is a path of the file system, and not the address of a remote storage."""
    return "://" not in str(path)


def local_path(path: str | os.PathLike[str], advice: str) -> Path:
    """A path of the file system. Raises UsageError, closed by ``advice``, for anything else."""
    require(is_local(path), f"{path}: is not a path of the file system; {advice}", UsageError)
    return Path(path)


def directory_path(path: str | os.PathLike[str], advice: str) -> Path:
    """A path of the file system, or of a store that is written. Raises UsageError as ``local_path``."""
    place = as_path(str(path))
    if isinstance(place, RemotePath):
        place.check_target()
        return place
    return local_path(path, advice)


@contextlib.contextmanager
def removing(path: Path) -> Iterator[None]:
    """For a block that removes ``path``: what is gone, since the framework removed it first, is removed.

    Raises OutputError where it cannot be removed.
    """
    try:
        yield
    except Ckpt8Error:
        raise
    except FileNotFoundError:
        pass
    except OSError as exc:
        raise OutputError(f"{path}: cannot be removed: {exc.strerror}") from exc
