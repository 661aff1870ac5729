"""A ``.pt`` as ``torch.save`` writes it, streamed: torch writes everything but the storages, which come after.

Under ``skip_data`` torch leaves holes where the storages belong. They are filled block by block, and the checksums
that the zip format keeps of them are set.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from ckpt8.checkpoint.meaning.state_dicts import Candidate, find
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.sources.composite import BLOCK, Composite
from ckpt8.checkpoint.sources.live_object import recording_pickle, with_crc_fields
from ckpt8.checkpoint.sources.objects import CONSUMED
from ckpt8.checkpoint.tree import StorageInfo, TensorRef
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.member_layout import CRC_BYTES
from ckpt8.converting.choice import choose_model
from ckpt8.converting.request import Report, Request
from ckpt8.converting.unpacked import unpack_tree
from ckpt8.converting.weights import WeightTypes
from ckpt8.converting.writers.hollow import HollowBuilder
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.atomic import AtomicFile, Guard
from ckpt8.core.files.crc import combine, crc32
from ckpt8.core.files.temporary import temporary_directory
from ckpt8.core.files.write_at import write_at
from ckpt8.core.tensors import DType
from ckpt8.core.workers import Progress

_BLOCK_BYTES = 4 * BLOCK
_NOTHING = "holds no tensors that torch.load reads with weights_only; there is nothing to convert"


class TorchWriter:
    """The whole tree, or with a key the one state dict that it leads to, as ``torch.load(weights_only=True)`` reads it.

    Element types stay as they are. With ``--dtype`` every model in the tree is cast; moments never are. With float32, a
    run of ckpt8.optim becomes that of the published optimizer.
    """

    id: ClassVar[str] = "torch"
    directory: ClassVar[bool] = False

    def write(self, request: Request) -> Report:
        """Write the file. Raises Ckpt8Error."""
        report = Report(str(request.target), self.id)
        with request.open(report) as content:
            data, key = content.data, request.key
            if request.dtype is DType.FLOAT32:
                unpack_tree(data)
            models = find(data.tree)[0] if key is None else [choose_model(data, key)]
            tree = data.tree if key is None else models[0].node
            retype = _retype(data, models, request.dtype, report)
            with AtomicFile(request.target, force=request.force) as output:
                pt = TorchFile(data, tree, report, retype)
                progress = request.progress_to(pt.nbytes)
                pt.write(output.path, request.target.name, output.file.fileno(), output.guard, progress)
                content.data.check_unchanged()
                report.bytes = output.file.seek(0, 2)
                output.publish()
                report.replaced = output.replaced
        return report


def _retype(
    data: Composite, models: list[Candidate], dtype: DType | None, report: Report
) -> Callable[[TensorRef], TensorRef]:
    """What becomes of each tensor: those of models in another element type, all others as they are."""
    types = WeightTypes(data, dtype, report)
    weights = {id(ref): types(name, ref) for model in models for name, ref in _tensors(model.node)}
    return lambda ref: weights.get(id(ref), ref)


def _tensors(node: dict[Any, Any]) -> list[tuple[str, TensorRef]]:
    return [(name, ref) for name, ref in node.items() if isinstance(ref, TensorRef)]


class TorchFile:
    """One file of torch in the making: its objects without content, and which storage each of their storages is.

    Raises InputError for a tree of which nothing can be written, or no tensor.
    """

    def __init__(
        self,
        data: Composite,
        tree: Any,
        report: Report,
        retype: Callable[[TensorRef], TensorRef] = lambda ref: ref,
    ) -> None:
        self._data = data
        builder = HollowBuilder(data, retype)
        try:
            self._object = builder.build(tree)
        except (AttributeError, RuntimeError) as exc:
            raise UnsupportedError(f"{data.label}: a tensor cannot be made by this torch: {exc}") from exc
        report.dropped += builder.dropped
        if self._object is CONSUMED or not builder.keys:
            raise InputError(f"{data.label}: {_NOTHING}")
        # The objects behind these addresses live as long as the object does.
        self._keys = builder.keys
        report.tensors += builder.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(self._data.storage(key).nbytes for key in self._keys.values())

    def write(self, path: Path, name: str, descriptor: int, guard: Guard, progress: Progress) -> None:
        """Write the file at ``path``, which is open as ``descriptor`` and will have another ``name``.

        ``progress`` is called with bytes of storages.
        Raises InputError, OutputError, and UnsupportedError for what torch does not save.
        """
        with guard(), temporary_directory("ckpt8-") as folder:
            # The records in the file are named after it.
            link = folder / name
            link.symlink_to(path)
            storages = save_hollow(self._object, link, self._data.label)
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if not storages:
            raise InputError(f"{self._data.label}: {_NOTHING}")
        if unsafe:
            raise UnsupportedError(f"{self._data.label}: holds {unsafe[0]}, which this torch does not load")
        with open_checkpoint(path) as skeleton:
            places = with_crc_fields(path, skeleton)
        for place in places:
            source = self._data.storage(self._keys[storages[place.key]._cdata])
            fill_storage(self._data, source, place, descriptor, guard, progress)


def save_hollow(obj: object, path: Path, label: str) -> dict[str, torch.UntypedStorage]:
    """``torch.save`` of tensors without content: holes where they belong. The storages by their names in the file.

    Raises UnsupportedError, opened by ``label``, for what torch does not save.
    """
    storages: dict[str, torch.UntypedStorage] = {}
    try:
        with torch.serialization.skip_data():
            torch.save(obj, path, pickle_module=cast("Any", recording_pickle(storages)))
    except RuntimeError as exc:
        raise UnsupportedError(f"{label}: cannot be saved by torch: {exc}") from exc
    return storages


def fill_storage(
    data: Composite, source: StorageInfo, place: StorageInfo, descriptor: int, guard: Guard, progress: Progress
) -> None:
    """Copy a storage of ``data`` to its ``place`` in a file of torch.save, and set the checksums that are kept of it.

    Raises InputError, OutputError.
    """
    crc = 0
    for start in range(0, source.nbytes, _BLOCK_BYTES):
        content = host_bytes(min(_BLOCK_BYTES, source.nbytes - start))
        view = bytes_of(content)
        data.read_into(source.offset + start, view)
        with guard():
            write_at(descriptor, view, place.offset + start)
        crc = combine(crc, crc32(view), len(view))
        progress(len(view))
    with guard():
        for field in place.crc_fields:
            write_at(descriptor, memoryview(crc.to_bytes(CRC_BYTES, "little")), field)
