"""A file of a distributed checkpoint in a container: the manifest knows its tensors, its metadata is not needed."""

from __future__ import annotations

from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import SourceFile
from ckpt8.core.tensors import DType
from ckpt8.readers.base import Checkpoint, StorageInfo, StorageRef, TensorRef
from ckpt8.readers.dcp import DcpFile
from ckpt8.readers.rebuild import make_tensor


def stored_checkpoint(reader: ContainerReader, index: int, file: SourceFile) -> Checkpoint:
    """Member ``index``, whose bytes are ``file``: a dict of its tensors by name, without the path of the member.

    Raises InputError for a tensor that does not fit its storage.
    """
    manifest = reader.manifest
    record = manifest.members[index]
    storages = {
        storage: StorageInfo(str(storage), manifest.storages[storage].dtype, offset, manifest.storages[storage].nbytes)
        for offset, storage in record.segments
    }
    tree: dict[str, TensorRef] = {}
    for tensor in manifest.tensors:
        place = storages.get(tensor.storage)
        if place is None:
            continue
        whole = StorageRef(place.key, DType.UINT8, place.nbytes)
        try:
            ref = make_tensor(whole, tensor.dtype, tensor.offset, tuple(tensor.shape), tuple(tensor.stride))
        except ValueError as exc:
            raise InputError(f"{reader.path}: {tensor.name}: does not fit its storage: {exc}") from exc
        tree[tensor.name.removeprefix(f"{record.path}:")] = ref
    return DcpFile(file, list(storages.values()), tree)
