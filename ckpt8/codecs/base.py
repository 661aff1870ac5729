"""The contract of every codec: how it stores a tensor, and what other packages may ask about that.

A copy is a storage whose elements are those of other storages, maybe rounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache, cached_property, lru_cache
from importlib import import_module
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar, cast

from ckpt8.core import backend as backends
from ckpt8.core.tensors import DType, Parts, PartSpec, Role, TensorSpec, dtype_of

if TYPE_CHECKING:
    import torch

    from ckpt8.core.arrays import Array, Arrays


class Run(NamedTuple):
    """``length`` elements of a copy, rounded from ``storage`` from element ``start`` on.

    Without a storage they all have the bits ``start``, of the type that masters are rounded to: padding.
    """

    storage: int | None
    start: int
    length: int


class Copied:
    """Elements copied from other storages: ``runs`` in the order of the copy."""

    runs: tuple[Run, ...]

    is_exact: ClassVar[bool] = True
    """Whether the copy comes back bit for bit, which takes masters that ``keeps_masters``."""

    def rounded_type(self, copy: DType) -> DType:  # noqa: ARG002
        """What the fp32 elements of masters are rounded to for a copy of element type ``copy``."""
        return DType.BFLOAT16

    @cached_property
    def _starts(self) -> list[int]:
        """The first element of every run, then the number of all elements."""
        return list(accumulate((run.length for run in self.runs), initial=0))

    @property
    def numel(self) -> int:
        """Elements of the copy."""
        return self._starts[-1]

    def cut(self, first: int, count: int) -> Iterator[Run]:
        """The runs of ``count`` elements from ``first`` on."""
        at = bisect_right(self._starts, first) - 1
        while count:
            run, skipped = self.runs[at], first - self._starts[at]
            length = min(count, run.length - skipped)
            yield Run(run.storage, run.start if run.storage is None else run.start + skipped, length)
            at, first, count = at + 1, first + length, count - length


TILE = 1 << 18
"""Elements that a codec handles at once, so that its temporaries stay in the L2 cache."""


@lru_cache(maxsize=256)
def pieces(codec: Codec, dtype: DType, numel: int) -> tuple[tuple[slice, Mapping[str, slice]], ...]:
    """Cut a flat tensor into tiles: the slice of each, and its slice of every part."""
    runs = (slice(start, min(start + TILE, numel)) for start in range(0, numel, TILE))
    return tuple((run, codec.cuts(dtype, run)) for run in runs)


Direction = Literal["encode", "decode"]
StateKey = Literal["master", "moment1", "moment2"]
Companions = Mapping[str, "torch.Tensor"]
"""Decoded elements of other storages in fp32, by the name of the codec's field that holds the storage's index."""

NO_COMPANIONS: Mapping[str, Any] = MappingProxyType({})


class Factors(NamedTuple):
    """The storages of row and column statistics that give a companion, and the size of the matrices in its storage.

    They are kept exactly. See ``vscaled.reference``.
    """

    rows: int
    columns: int
    height: int
    width: int


class CodeRange(NamedTuple):
    """The part that holds a code for every element, and the smallest and the largest code."""

    part: str
    lowest: int
    highest: int


X = TypeVar("X", "Array", "torch.Tensor")


class Codec(ABC):
    """Base of all codecs: frozen dataclasses whose fields are the stored configuration.

    A codec defines ``id``, ``accepts`` and ``layout``. All else has a default, which fits a codec that loses nothing.
    ``id`` names one byte layout for ever: a change of layout is a new id.
    """

    __slots__ = ()

    id: ClassVar[str]

    measured_as: ClassVar[Literal["weight", "lattice", "moment"] | None] = None
    """The statistics that the error is reported in; None for a codec that makes none."""

    has_kernels: ClassVar[bool] = False
    """Whether Triton and numba kernels exist besides the reference in torch."""

    keeps_masters: ClassVar[bool] = False
    """Whether fp32 elements come back so that they round to the same bf16 as before."""

    may_be_copied: ClassVar[bool] = False
    """Whether the decoded fp32 elements may be the masters of copies that are not exact, though it changes them."""

    upper_parts: ClassVar[tuple[str, ...]] = ()
    """Parts from which ``upper`` gives the bf16 rounding of fp32 elements; () where only ``decode`` does."""

    residual: ClassVar[tuple[str, DType] | None] = None
    """Name and element type of the part that completes a bf16 weight to fp32."""

    companions: ClassVar[Mapping[str, tuple[str, ...]]] = NO_COMPANIONS
    """Other moments of the same parameter that encoding and decoding need, as they come back from the container.

    Maps a field of the codec to slots (``moment2``, ...). The plan takes the first slot that the parameter has, and
    sets the field, which is None before, to the index of its storage; or to ``Factors``, where it has these instead.
    """

    compares_originals: ClassVar[bool] = False
    """Whether encoding also needs each companion as it was: with ``original_`` before the name of its field."""

    by_chunk: ClassVar[bool] = False
    """Whether the parts of an element depend on the others of its chunk, which is encoded whole."""

    by_element: ClassVar[bool] = False
    """Whether tensors one behind the other have the parts of each one behind the other, wherever they meet."""

    counts_elements: ClassVar[bool] = False
    """Whether encoding and decoding depend on the index of an element in its storage."""

    inherited: ClassVar[tuple[str, ...]] = ()
    """Parts that encoding takes as they are where it is given them; the kernel then gets ``given=True``.

    Those of the first elements of a chunk are the beginning of those of all."""

    @abstractmethod
    def accepts(self, spec: TensorSpec) -> bool:
        """Whether the codec is defined for this element type and role."""

    @abstractmethod
    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """Element type and count of every part, from the specification alone.

        A part of int32 holds symbols: integers from 0 on, mostly small, and -1 for a value of its own. The container
        packs them. Unless the codec is ``by_chunk``, the parts of a tensor are the concatenation of the parts of its
        pieces, wherever it is cut at a multiple of 32 elements.
        """

    def kernel(self, direction: Direction, backend: backends.Backend) -> Callable[..., None]:
        """``encode(x, parts)``, which fills the parts of a flat tensor, or ``decode(parts, out)``, which fills ``out``.

        The default is the function of that name in the module of the backend, next to that of the codec. The kernel of
        a codec that counts elements takes ``first``, the index of the first one; each companion is a keyword, too.
        numba's take arrays (see ``core.arrays``) in place of tensors.
        """
        return self._function(direction, backend)

    def _function(self, name: str, backend: backends.Backend) -> Callable[..., Any]:
        return _function_of(type(self).__module__, "reference" if backend == "torch" else backend, name)

    def encode(
        self,
        x: torch.Tensor,
        *,
        backend: backends.Backend | None = None,
        first: int = 0,
        companions: Companions = NO_COMPANIONS,
        inherited: Parts | None = None,
        out: Mapping[str, torch.Tensor] = NO_COMPANIONS,
    ) -> Parts:
        """Parts of ``x``, taken flat in storage order. Raises RefusedError when ``x`` cannot be represented.

        ``first`` is the index of its first element in the storage; ``companions`` are flat, of the same elements.
        ``inherited`` holds the parts that the codec inherits, those of an earlier state of the same elements. Parts are
        written to those of ``out`` that have their name.
        """
        flat = x.detach().reshape(-1)
        used = self._resolve(backend, x.device, flat.numel())
        kernel = self.kernel("encode", used)
        spec = TensorSpec("", Role.OTHER, dtype_of(x.dtype), (flat.numel(),))
        parts = {**out}
        for name, part in self.layout(spec).items():
            if name not in parts:
                parts[name] = flat.new_empty(part.numel, dtype=part.dtype.torch)
        given = self._inherit(parts, inherited)
        if used == "numba":
            from ckpt8.core.arrays import as_array, as_arrays

            keywords = self._keywords("encode", first, as_arrays(companions), slice(0, flat.numel()))
            kernel(as_array(flat), as_arrays(parts), **keywords, **given)
            return parts
        for run, tile in self._tiles(spec, parts, used):
            kernel(flat[run], tile, **self._keywords("encode", first, companions, run), **given)
        return parts

    def decode(
        self,
        parts: Parts,
        spec: TensorSpec,
        *,
        out: torch.Tensor | None = None,
        backend: backends.Backend | None = None,
        first: int = 0,
        companions: Companions = NO_COMPANIONS,
    ) -> torch.Tensor:
        """The flat tensor of ``spec.numel`` elements and ``spec.dtype`` that ``parts`` stand for.

        It is written to ``out`` (flat, contiguous, of that type) when given. ``first`` and ``companions`` are those
        of ``encode``.
        """
        any_part = next(iter(parts.values()))
        used = self._resolve(backend, any_part.device, spec.numel)
        if out is None:
            # As bytes: torch warns of new tensors of some element types, but not of views.
            out = any_part.new_empty(spec.numel * spec.dtype.itemsize, dtype=DType.UINT8.torch).view(spec.dtype.torch)
        if used == "numba":
            from ckpt8.core.arrays import as_array, as_arrays

            given = as_arrays(companions)
            self.decode_arrays(as_arrays(parts), spec, as_array(out), backend=used, first=first, companions=given)
            return out
        kernel = self.kernel("decode", used)
        for run, tile in self._tiles(spec, parts, used):
            kernel(tile, out[run], **self._keywords("decode", first, companions, run))
        return out

    def decode_arrays(
        self,
        parts: Arrays,
        spec: TensorSpec,
        out: Array,
        *,
        backend: backends.Backend,
        first: int = 0,
        companions: Arrays = NO_COMPANIONS,
    ) -> None:
        """Fill ``out`` as ``decode`` does, from arrays: by the kernels of numba, or by torch."""
        if backend != "numba":
            from ckpt8.core.arrays import as_tensor, as_tensors

            given = as_tensors(companions)
            self.decode(
                as_tensors(parts), spec, out=as_tensor(out, spec.dtype), backend="torch", first=first, companions=given
            )
        elif spec.numel:
            keywords = self._keywords("decode", first, companions, slice(0, spec.numel))
            self.kernel("decode", "numba")(parts, out, **keywords)

    def encode_arrays(
        self,
        x: Array,
        spec: TensorSpec,
        *,
        backend: backends.Backend,
        first: int = 0,
        companions: Arrays = NO_COMPANIONS,
        inherited: Arrays | None = None,
        out: Arrays = NO_COMPANIONS,
    ) -> dict[str, Array]:
        """The parts that ``encode`` makes, of elements in an array: by the kernels of numba, or by torch."""
        from ckpt8.core.arrays import as_tensor, as_tensors, empty

        parts = {**out}
        for name, part in self.layout(spec).items():
            if name not in parts:
                parts[name] = empty(part.numel, part.dtype)
        if backend != "numba":
            below = None if inherited is None else as_tensors(inherited)
            given, room = as_tensors(companions), as_tensors(parts)
            tensor = as_tensor(x, spec.dtype)
            self.encode(tensor, backend="torch", first=first, companions=given, inherited=below, out=room)
        elif spec.numel:
            keywords = self._keywords("encode", first, companions, slice(0, spec.numel))
            keywords |= self._inherit(parts, inherited)
            self.kernel("encode", "numba")(x, parts, **keywords)
        return parts

    def _inherit(self, parts: Mapping[str, Any], inherited: Mapping[str, Any] | None) -> dict[str, bool]:
        """Fill the parts that are inherited; the keyword that says to the kernel whether any is."""
        taken = {} if inherited is None else {name: inherited[name] for name in self.inherited if name in parts}
        for name, earlier in taken.items():
            parts[name][:] = earlier[: len(parts[name])]
        return {"given": True} if taken else {}

    def tile(self, parts: Mapping[str, X], dtype: DType, first: int, run: slice) -> dict[str, X]:  # noqa: ARG002
        """Views of ``parts``, those of a chunk, that decode to its elements ``run``, from a multiple of 32 on.

        ``first`` is the index of the first element of the chunk, ``dtype`` the type of its elements.
        """
        return {name: parts[name][cut] for name, cut in self.cuts(dtype, run).items()}

    def cuts(self, dtype: DType, run: slice) -> dict[str, slice]:
        """Where the elements ``run`` of a tensor, from a multiple of 32 on, lie in every part."""
        before, upto = (self.layout(TensorSpec("", Role.OTHER, dtype, (count,))) for count in (run.start, run.stop))
        return {name: slice(part.numel, upto[name].numel) for name, part in before.items()}

    def _tiles(self, spec: TensorSpec, parts: Parts, backend: backends.Backend) -> Iterator[tuple[slice, Parts]]:
        """The slice and the parts of every tile. Kernels other than torch's take a tensor whole."""
        if spec.numel > TILE and backend == "torch" and not self.by_chunk:
            for run, cuts in pieces(self, spec.dtype, spec.numel):
                yield run, {name: parts[name][cut] for name, cut in cuts.items()}
        elif spec.numel or backend != "torch":
            yield slice(0, spec.numel), parts

    def _keywords(self, direction: Direction, first: int, companions: Mapping[str, Any], run: slice) -> dict[str, Any]:
        """The keywords that the kernel takes for the elements ``run``."""
        names = list(self.companions)
        if self.compares_originals and direction == "encode":
            names += [f"original_{name}" for name in self.companions]
        arguments: dict[str, Any] = {name: companions[name][run] for name in names}
        if self.counts_elements:
            arguments["first"] = first + run.start
        return arguments

    def _resolve(self, backend: backends.Backend | None, device: torch.device, numel: int) -> backends.Backend:
        return backends.resolve(backend, device, numel) if self.has_kernels else backends.resolve(backend)

    def continued(self, base: Codec) -> Codec | None:
        """The codec whose parts may be kept as differences to those of ``base``, in place of this one.

        It has the fields of ``base``. None where these are too far from those wanted.
        """
        return self if self.counts_from(base) else None

    def counts_from(self, base: Codec) -> bool:
        """Whether parts may be kept as differences to what ``base`` keeps of an earlier state of the same elements.

        Where ``base`` is another codec, they are differences to the parts of its decoded elements.
        """
        return self == base and not self.companions and self.copied is None

    @property
    def codes(self) -> CodeRange | None:
        """The part that holds codes; None where no part holds one for every element."""
        return None

    @property
    def is_lossy(self) -> bool:
        """Whether decoding may give other values than were encoded."""
        return self.measured_as is not None

    @property
    def stores_roots(self) -> bool:
        """Whether it stores square roots, which its error is then measured in."""
        return False

    @property
    def copied(self) -> Copied | None:
        """The elements of other storages that it is a copy of; None for a codec that stores its elements."""
        return None

    @property
    def companion_storages(self) -> dict[str, int]:
        """The index of the storage of each companion that has one of its own, by the name of its field."""
        return {name: getattr(self, name) for name in self.companions if name not in self.factored}

    @property
    def factored(self) -> dict[str, Factors]:
        """The statistics that give each other companion, by the name of its field."""
        return {name: value for name in self.companions if isinstance(value := getattr(self, name), Factors)}

    @classmethod
    def defaults_for(cls, role: Role) -> dict[str, Any]:  # noqa: ARG003
        """The fields that differ from their defaults for tensors of ``role``, where a rule does not give them."""
        return {}

    def trains(self, key: StateKey) -> bool:  # noqa: ARG002
        """Whether a packed optimizer can keep this part of its state with it."""
        return False

    def upper(self, parts: Arrays) -> Array:
        """The bits of the bf16 rounding (nearest, ties to even) of the fp32 elements, from ``upper_parts``."""
        raise NotImplementedError

    def group_scales(self, parts: Parts) -> torch.Tensor | None:  # noqa: ARG002
        """The fp32 scale of every group of 32, the unit of the largest error; None without scales."""
        return None


@cache
def _function_of(package: str, module: str, name: str) -> Callable[..., Any]:
    return cast("Callable[..., Any]", getattr(import_module(f"{package}.{module}"), name))


def config_of(codec: Codec) -> dict[str, Any]:
    """The stored form of a codec: its id and its fields."""
    return {"id": codec.id} | {own.name: getattr(codec, own.name) for own in fields(codec)}  # type: ignore[arg-type]
