"""The tree of a torch file from its bytes outside of the tensors: no storage need be there, and none is looked for.

For reports over many files; a reader checks more, and takes three times as long.
"""

from __future__ import annotations

import io
import struct
from typing import Any

from ckpt8.checkpoint.readers.pickle.inert_pickle import load_pickle
from ckpt8.checkpoint.readers.storage_table import StorageTable
from ckpt8.checkpoint.readers.zip_directory import LOCAL_SIGNATURE
from ckpt8.core.errors import InputError

_NAME = b"/data.pkl"
_LENGTHS = struct.Struct("<26x2H")
"""Of the name and the extra field, in a local header of a zip file."""

_PICKLES_BEFORE = 3
"""Magic number, version and system stand in front of the tree in a file of torch before 1.6."""


def tree_of_head(format_id: str, head: bytes, where: str) -> Any:
    """The tree of a file of the format, which begins with the bytes ``head``; None for formats without values.

    Raises InputError, also where the head ends within the pickle.
    """
    stream = io.BytesIO(head)
    if format_id == "torch-zip":
        stream.seek(_start_of_pickle(head, where))
    elif format_id == "torch-legacy":
        for _ in range(_PICKLES_BEFORE):
            load_pickle(stream, len(head), where)
    else:
        return None
    return load_pickle(stream, len(head), where, StorageTable(where).load)


def _start_of_pickle(head: bytes, where: str) -> int:
    name = head.find(_NAME)
    at = head.rfind(LOCAL_SIGNATURE, 0, max(name, 0))
    if at >= 0 and at + _LENGTHS.size <= name:
        name_length: int
        extra_length: int
        name_length, extra_length = _LENGTHS.unpack_from(head, at)
        if at + _LENGTHS.size + name_length == name + len(_NAME):
            return name + len(_NAME) + extra_length
    raise InputError(f"{where}: has no data.pkl at its start")
