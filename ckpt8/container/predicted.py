"""What the parts of a difference count from: the parts of its base, or those of the base's decoded elements."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ckpt8.codecs import Codec
from ckpt8.container.layout import FRAME
from ckpt8.core.backend import Backend
from ckpt8.core.errors import InputError, RefusedError
from ckpt8.core.tensors import Parts, TensorSpec


class _Base(Protocol):
    @property
    def backend(self) -> Backend | None: ...

    def codec(self, storage: int) -> Codec: ...

    def chunk_spec(self, storage: int, chunk: int) -> TensorSpec: ...

    def read_parts(self, storage: int, chunk: int, only: Collection[str] | None = None) -> Parts: ...

    def where(self, storage: int) -> str: ...


def predicted_parts(codec: Codec, base: _Base, storage: int, chunk: int, only: Collection[str] | None = None) -> Parts:
    """The parts, all or ``only`` some, that those of a chunk under ``codec`` are compared with.

    They are those of ``storage`` of the base. A lattice with another step or salt counts from the points next to the
    decoded weights of the base. Raises InputError.
    """
    below = base.codec(storage)
    if codec == below:
        return base.read_parts(storage, chunk, only)
    spec, first = base.chunk_spec(storage, chunk), chunk * FRAME
    elements = below.decode(base.read_parts(storage, chunk), spec, backend=base.backend, first=first)
    try:
        parts = codec.encode(elements, backend=base.backend, first=first)
    except RefusedError as exc:
        raise InputError(f"{base.where(storage)}: {exc}, and no difference counts from that") from exc
    return parts if only is None else {name: parts[name] for name in only if name in parts}
