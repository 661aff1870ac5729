"""What a user gives as the place of a checkpoint, as a Path: a local one, or one of a store.

The modules of stores are imported where a URL is given, and not before.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckpt8.core.files.source_file import RemotePath

_URL = re.compile(r"(s3:|hf:)/+.*", re.DOTALL)


def as_path(place: str | os.PathLike[str]) -> Path:
    """The path of a source. Of ``s3://bucket/key`` and ``hf://owner/name/file`` one in the store.

    A folder ``s3:`` or ``hf:`` here comes first, and a Path has lost one of the two slashes. Raises UsageError for a
    URL that names no object.
    """
    if isinstance(place, RemotePath):
        return place
    text = os.fspath(place)
    match = _URL.fullmatch(text)
    if match is None or os.path.lexists(match[1]):
        return Path(place)
    from ckpt8.core.files.stores.path import store_path

    return store_path(text)
