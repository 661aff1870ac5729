"""What the manifest of a delta says of its base: the container that it is a difference to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ckpt8.container.json_fields import Fields

MOST_LINKS = 255
"""The most containers below a delta."""

_SEAL = re.compile(r"[0-9a-f]{64}")
_LONGEST_PATH = 4096


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """The base of a container; the place of a container and its links count from the key, which has none.

    ``seal`` identifies the base and ``key`` the first container of the chain, both in hexadecimal digits. ``path`` is
    that of the base, relative to the folder of the container, with slashes. ``place`` is the number of the container in
    its chain, and ``links`` that of the containers below it.
    """

    seal: str
    path: str
    key: str
    place: int
    links: int


def read_base(fields: Fields) -> BaseRecord | None:
    """The record at ``base``; None without one. Raises InputError."""
    found = fields.optional("base", dict)
    if found is None:
        return None
    base = fields.nested(found)
    record = BaseRecord(
        seal=base.get("seal", str),
        path=base.get("path", str),
        key=base.get("key", str),
        place=base.count("place"),
        links=base.count("links", MOST_LINKS + 1),
    )
    for name, is_sound in (
        ("seal", _SEAL.fullmatch(record.seal)),
        ("path", _is_relative(record.path)),
        ("key", _SEAL.fullmatch(record.key)),
        ("links", record.links),
        ("place", record.place >= record.links),
    ):
        if not is_sound:
            raise base.fail(name)
    return record


def base_json(record: BaseRecord) -> dict[str, Any]:
    """The values of JSON of a record."""
    return {name: getattr(record, name) for name in BaseRecord.__slots__}


def _is_relative(path: str) -> bool:
    """Whether this is a path that can be looked for below or beside a folder."""
    return 0 < len(path.encode()) <= _LONGEST_PATH and not path.startswith("/") and "\0" not in path
