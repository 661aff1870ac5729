"""A ``.pt`` as ``torch.save`` writes it, streamed: torch writes everything but the storages, which follow.

Under ``skip_data`` torch leaves holes for the storages. This fills them block by block, and then sets their checksums
in the zip directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from ckpt8.checkpoint.meaning.state_dicts import find
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.sources.composite import BLOCK, Composite
from ckpt8.checkpoint.sources.live_object import recording_pickle, torch_writes, with_crc_fields
from ckpt8.checkpoint.tree import StorageInfo, TensorRef
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.member_layout import CRC_BYTES
from ckpt8.converting.choice import choose_model, model_tensors
from ckpt8.converting.request import OpenFile, Report, Request
from ckpt8.converting.unpacked import unpack_tree
from ckpt8.converting.weights import WeightTypes
from ckpt8.converting.writers.hollow import NOTHING, Hollow, build_hollow
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.atomic import Guard
from ckpt8.core.files.crc import combine, crc32
from ckpt8.core.files.temporary import temporary_directory
from ckpt8.core.tensors import DType

_BLOCK_BYTES = 4 * BLOCK


def write(request: Request, report: Report) -> None:
    """Write the whole tree, or with a key the one state dict there, as ``torch.load(weights_only=True)`` reads it.

    Element types stay as they are; ``--dtype`` casts every model in the tree, never moments. float32 turns a run of
    ckpt8.optim into one of the published optimizer. Raises Ckpt8Error.
    """
    with request.open(report) as content:
        data, key = content.data, request.key
        if request.dtype is DType.FLOAT32:
            unpack_tree(data)
        models = find(data.tree)[0] if key is None else [choose_model(data, key)]
        types = WeightTypes(data, request.dtype, report)
        retyped = {id(ref): types(name, ref) for model in models for name, ref in model_tensors(model).items()}
        tree = data.tree if key is None else models[0].node
        write_torch(request, report, data, tree, lambda ref: retyped.get(id(ref), ref))


def write_torch(
    request: Request,
    report: Report,
    data: Composite,
    tree: Any,
    retype: Callable[[TensorRef], TensorRef] = lambda ref: ref,
) -> None:
    """Write ``tree`` to the target, a file of torch. Raises Ckpt8Error."""
    hollow = build_hollow(data, tree, report, retype)
    with request.new_file(data, report, hollow.nbytes) as out:
        write_zip(hollow, out, request.target.name)


def write_zip(hollow: Hollow, out: OpenFile, name: str) -> None:
    """Write a file of torch, which will have the name ``name``.

    Raises InputError where there is no storage, OutputError, and UnsupportedError for what torch does not save.
    """
    label = hollow.data.label
    with out.guard(), temporary_directory("ckpt8-") as folder:
        # torch names the records in the file after the file.
        link = folder / name
        link.symlink_to(out.path)
        storages = save_hollow(hollow.built, link, label, out.guard)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(out.path)
    if not storages:
        raise InputError(f"{label}: {NOTHING}")
    if unsafe:
        raise UnsupportedError(f"{label}: holds {unsafe[0]}, which this torch does not load")
    with open_checkpoint(out.path) as skeleton:
        places = with_crc_fields(skeleton)
    fill_storages(hollow, storages, places, out)


def save_hollow(obj: object, path: Path, label: str, guard: Guard) -> dict[str, torch.UntypedStorage]:
    """Save hollow objects with holes in place of their storages, which are returned by their names in the file.

    Raises OutputError by way of ``guard``, and UnsupportedError, opened by ``label``, for what torch does not save.
    """
    storages: dict[str, torch.UntypedStorage] = {}
    try:
        with guard(), torch_writes(), torch.serialization.skip_data():
            torch.save(obj, path, pickle_module=cast("Any", recording_pickle(storages)))
    except RuntimeError as exc:
        raise UnsupportedError(f"{label}: cannot be saved by torch: {exc}") from exc
    return storages


def fill_storages(
    hollow: Hollow,
    saved: Mapping[str, torch.UntypedStorage],
    places: Iterable[StorageInfo],
    out: OpenFile,
) -> None:
    """Copy the content of the ``saved`` storages to their ``places`` in a file of torch, with their checksums.

    Raises InputError, OutputError.
    """
    for place in places:
        source = hollow.data.storage(hollow.keys[saved[place.key]._cdata])
        crc = 0
        for start in range(0, source.nbytes, _BLOCK_BYTES):
            content = host_bytes(min(_BLOCK_BYTES, source.nbytes - start))
            view = bytes_of(content)
            hollow.data.read_into(source.offset + start, view)
            out.write(view, place.offset + start)
            crc = combine(crc, crc32(view), len(view))
            out.progress(len(view))
        for field in place.crc_fields:
            out.write(crc.to_bytes(CRC_BYTES, "little"), field)
