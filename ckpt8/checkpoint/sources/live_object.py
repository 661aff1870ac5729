"""A live object as a source: the file that ``torch.save`` would write, with the storages read from memory.

``torch.save`` under ``skip_data`` writes all but the bytes of the storages into a sparse temporary file, which becomes
the skeleton. The storages that it meets on the way are streamed from where they are, on the CPU or a GPU.
"""

from __future__ import annotations

import errno
import pickle
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.tree import OpenCheckpoint
from ckpt8.core.arrays import Array
from ckpt8.core.errors import Ckpt8Error, InputError, OutputError, UsageError, require
from ckpt8.core.files.atomic import Partial, writing
from ckpt8.core.files.source_file import read_pieces
from ckpt8.core.lazy import torch

Read = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes of a storage from a first one on. Thread-safe."""

_WRITER_SAYS = ("inline_container", "PytorchStreamWriter", "iostream", "Parent directory")
"""Words in errors of torch's zip writer where a file cannot be written."""


def recording_pickle(storages: dict[str, torch.UntypedStorage], locations: Mapping[int, str]) -> ModuleType:
    """A pickle module for ``torch.save`` whose Pickler notes the storage behind every persistent id.

    ``locations`` are stated in place of those of storages with these ``_cdata``.
    """

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            # torch.save derives its pickler from this one and defines persistent_id there.
            identify = cls.persistent_id

            def persistent_id(self: Any, obj: Any) -> Any:
                identity = identify(self, obj)
                if identity is None:
                    return None
                kind, storage_type, key, location, size = identity
                storages[str(key)] = storage = getattr(obj, "_untyped_storage", obj)
                return kind, storage_type, key, locations.get(storage._cdata, location), size

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    module = ModuleType("pickle")
    names = ("dump", "dumps", "load", "loads", "Unpickler")
    module.__dict__.update({name: getattr(pickle, name) for name in names}, Pickler=Pickler)
    return module


@dataclass(slots=True)
class LiveCheckpoint(OpenCheckpoint):
    """A Checkpoint whose storages are tensors in memory and whose other bytes are a file of torch.save.

    ``memory`` are its storages by key, while it is open. Those whose address is in ``made`` are read by a call with the
    first byte and a buffer.
    """

    memory: dict[str, torch.UntypedStorage] = field(default_factory=dict)
    made: Mapping[int, Read] = field(default_factory=dict)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from memory where ``offset`` lies in a storage, else from the file."""
        at = bisect_right(self.storages, offset, key=lambda storage: storage.offset) - 1
        # An empty storage shares its offset with the bytes behind it.
        if at >= 0 and offset < self.storages[at].offset + self.storages[at].nbytes and len(buffer):
            storage = self.storages[at]
            if (read := self.made.get(self.memory[storage.key].data_ptr())) is not None:
                read(offset - storage.offset, buffer)
                return
            content = torch.empty(0, dtype=torch.uint8, device=self.memory[storage.key].device)
            content.set_(self.memory[storage.key])
            first = offset - storage.offset
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(content[first : first + len(buffer)])
        else:
            self.file.read_into(offset, buffer)

    def read_each(self, starts: Array, length: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with pieces of one storage: gathered where it is, and copied from there at once."""
        storage = self.storages[bisect_right(self.storages, int(starts[0]), key=lambda storage: storage.offset) - 1]
        memory = self.memory[storage.key]
        if memory.data_ptr() in self.made:
            read_pieces(self.read_into, starts, length, buffer)
            return
        content = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
        pieces = content.unfold(0, length, 1)[torch.from_numpy(starts).to(memory.device) - storage.offset]
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(pieces.reshape(-1))


@contextmanager
def live_checkpoint(
    obj: object, name: str, made: Mapping[int, Read] | None = None, *, locations: Mapping[int, str] | None = None
) -> Iterator[OpenCheckpoint]:
    """Open a live object as a checkpoint file of that ``name`` without its suffix; ``made`` is that of LiveCheckpoint.

    ``locations`` say where the storages have been that ``obj`` has copies of, by the ``_cdata`` of these.

    Raises UsageError for objects that cannot be pickled, and OutputError.
    """
    storages: dict[str, torch.UntypedStorage] = {}
    with _temporary_directory(f"{name}.pt") as directory:
        path = directory / f"{name}.pt"
        try:
            with torch.serialization.skip_data(), _writing(path):
                torch.save(obj, path, pickle_module=cast("Any", recording_pickle(storages, locations or {})))
        except RuntimeError:
            if made or locations is not None:
                raise
            # Quantized tensors cannot be written without their data: these few go through a whole file.
            with _writing(path):
                torch.save(obj, path)
            with open_checkpoint(path) as written:
                yield written
            return
        with ExitStack() as opened:
            try:
                skeleton = opened.enter_context(open_checkpoint(path))
            except InputError as exc:
                reason = exc.problem.removeprefix(f"{path}: ")
                raise UsageError(f"the object cannot be saved: {reason}") from exc
            try:
                # Other threads read the storages, each on a stream of its own: wait for what the caller has queued.
                for device in {storage.device for storage in storages.values() if storage.device.type == "cuda"}:
                    torch.cuda.current_stream(device).synchronize()
                # torch has left the checksums at zero.
                places = [replace(s, crc_fields=s.crc_fields or s.zero_fields) for s in skeleton.storages]
                yield LiveCheckpoint(
                    skeleton.format, skeleton.file, places, skeleton.tree, memory=storages, made=made or {}
                )
            finally:
                # A reference to the checkpoint, kept for its structure, must not keep the caller's memory.
                storages.clear()


@contextmanager
def _temporary_directory(name: str) -> Iterator[Path]:
    """A directory for temporary files. The next one of that ``name`` removes the remains of a killed process."""
    with writing(tempfile.gettempdir()):
        partial = Partial(Path(tempfile.gettempdir()) / name, directory=True)
    with closing(partial):
        yield partial.path


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn errors of pickling into a UsageError, and those of a temporary file into an OutputError."""
    try:
        with torch_writes():
            yield
    except Ckpt8Error:
        raise
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as exc:
        reason = (str(exc).splitlines() or [""])[0]
        raise UsageError(
            f"the object cannot be pickled: {reason}; save its state, in dicts, lists and tensors"
        ) from exc
    except RuntimeError as exc:
        require(
            "same data as different types" not in str(exc),
            "two tensors view the same memory as different types, which torch.save cannot write; clone one of them",
            UsageError,
        )
        if "during iteration" not in str(exc):
            raise
        raise UsageError(f"the object changed while it was saved: {exc}; let other threads wait meanwhile") from exc
    except OSError as exc:
        what = "a temporary file cannot be written; make room there, or set TMPDIR to another directory"
        raise OutputError(f"{path.parent.parent}: {what}") from exc


@contextmanager
def torch_writes() -> Iterator[None]:
    """Turn the RuntimeError of torch's zip writer where a file cannot be written into an OSError."""
    try:
        yield
    except RuntimeError as exc:
        if not any(words in str(exc) for words in _WRITER_SAYS):
            raise
        raise OSError(errno.EIO, "torch cannot write the file; is the disk full?") from exc
