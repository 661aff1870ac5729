"""The contract that every codec keeps: how it stores a tensor, and what the other packages ask it about that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, cast

from ckpt8.core import backend as backends
from ckpt8.core.tensors import DType, Parts, PartSpec, Role, TensorSpec

if TYPE_CHECKING:
    import torch

Direction = Literal["encode", "decode"]
StateKey = Literal["master", "moment1", "moment2"]
Companions = Mapping[str, "torch.Tensor"]
"""Decoded elements of other storages in fp32, by the name of the field that gives the storage."""

NO_COMPANIONS: Mapping[str, Any] = MappingProxyType({})


class Run(NamedTuple):
    """``length`` elements of a copy, rounded from ``storage`` from element ``start`` on.

    Without a storage they all have the bf16 bits ``start``: padding.
    """

    storage: int | None
    start: int
    length: int


class Copied(Protocol):
    """The runs that a copy consists of, one after the other; ``numel`` elements in all."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, in the order of the copy."""

    @property
    def numel(self) -> int:
        """Elements of the copy."""

    def cut(self, first: int, count: int) -> Iterator[Run]:
        """The runs of ``count`` elements from ``first`` on."""


class CodeRange(NamedTuple):
    """The part that holds a code for every element, and the smallest and the largest code."""

    part: str
    lowest: int
    highest: int


class Codec(ABC):
    """Base of all codecs: frozen dataclasses whose fields are the stored configuration.

    A codec defines ``id``, ``accepts``, ``layout`` and ``kernel``. All else has a default, which fits a codec that
    loses nothing. ``id`` names one byte layout for ever: a change of layout is a new id.
    """

    __slots__ = ()

    id: ClassVar[str]

    measured_as: ClassVar[Literal["weight", "moment"] | None] = None
    """The statistics that the error is reported in; None for a codec that makes none."""

    measured_in_one_pass: ClassVar[bool] = False
    """Whether ``error_stats_numba`` decodes and measures its parts."""

    has_kernels: ClassVar[bool] = False
    """Whether there are Triton and numba kernels beside the reference in torch."""

    keeps_masters: ClassVar[bool] = False
    """Whether fp32 elements come back so that they round to the same bf16 as before."""

    upper_parts: ClassVar[tuple[str, ...]] = ()
    """Parts from which ``upper`` gives the bf16 rounding of fp32 elements; () where only ``decode`` does."""

    residual: ClassVar[tuple[str, DType] | None] = None
    """Name and element type of the part that completes a bf16 weight to fp32."""

    companions: ClassVar[Mapping[str, tuple[str, ...]]] = NO_COMPANIONS
    """Other moments of the same parameter that encoding and decoding need, as they come back from the container.

    By the name of a field, which holds the index of their storage in the container and is None before the plan sets
    it: the slots that it may be taken from (``moment2``, ...), the first that the parameter has.
    """

    counts_elements: ClassVar[bool] = False
    """Whether encoding and decoding depend on the index of an element in its storage."""

    @abstractmethod
    def accepts(self, spec: TensorSpec) -> bool:
        """Whether the codec is defined for this element type and role."""

    @abstractmethod
    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """Element type and count of every part, from the specification alone.

        The parts of a tensor are the concatenation of the parts of its pieces, wherever it is cut at a multiple
        of 32 elements.
        """

    def kernel(self, direction: Direction, backend: backends.Backend) -> Callable[..., None]:
        """``encode(x, parts)``, which fills the parts of a flat tensor, or ``decode(parts, out)``, which fills ``out``.

        The default is the function of that name in the module of the backend, beside that of the codec. A codec that
        counts elements takes the index of the first as keyword ``first``, and each companion as keyword of its name.
        """
        return self._function(direction, backend)

    def _function(self, name: str, backend: backends.Backend) -> Callable[..., Any]:
        module = import_module(f"{type(self).__module__}.{'reference' if backend == 'torch' else backend}")
        return cast("Callable[..., Any]", getattr(module, name))

    def encode(
        self,
        x: torch.Tensor,
        *,
        backend: backends.Backend | None = None,
        first: int = 0,
        companions: Companions = NO_COMPANIONS,
    ) -> Parts:
        """Parts of ``x``, taken flat in storage order. Raises RefusedError when ``x`` cannot be represented.

        ``first`` is the index of its first element in the storage; ``companions`` are flat, of the same elements.
        """
        from ckpt8.codecs import tiles

        used = self._resolve(backend, x.device, x.numel())
        keywords = partial(self._keywords, first, companions)
        return tiles.encode(self, x, self.kernel("encode", used), keywords, in_tiles=used == "torch")

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
        from ckpt8.codecs import tiles

        used = self._resolve(backend, next(iter(parts.values())).device, spec.numel)
        keywords = partial(self._keywords, first, companions)
        return tiles.decode(self, parts, spec, out, self.kernel("decode", used), keywords, in_tiles=used == "torch")

    def _keywords(self, first: int, companions: Companions, run: slice) -> dict[str, Any]:
        """The keywords that the kernel takes for the elements ``run``."""
        found: dict[str, Any] = {name: companions[name][run] for name in self.companions}
        if self.counts_elements:
            found["first"] = first + run.start
        return found

    def _resolve(self, backend: backends.Backend | None, device: torch.device, numel: int) -> backends.Backend:
        return backends.resolve(backend, device, numel) if self.has_kernels else backends.resolve(backend)

    @property
    def codes(self) -> CodeRange | None:
        """The part that holds codes; None where no part holds one for every element."""
        return None

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
        """The index of the storage of each companion, by the name of its field."""
        return {name: getattr(self, name) for name in self.companions}

    @classmethod
    def defaults_for(cls, role: Role) -> dict[str, Any]:  # noqa: ARG003
        """The fields that differ from their defaults for tensors of ``role``, where a rule does not give them."""
        return {}

    def trains(self, key: StateKey) -> bool:  # noqa: ARG002
        """Whether a packed optimizer can keep this part of its state with it."""
        return False

    def upper(self, parts: Parts) -> torch.Tensor:
        """The bf16 rounding (nearest, ties to even) of the fp32 elements, flat, from ``upper_parts``."""
        raise NotImplementedError

    def group_scales(self, parts: Parts) -> torch.Tensor | None:  # noqa: ARG002
        """The fp32 scale of every group of 32, which the largest error is measured by; None without scales."""
        return None


def config_of(codec: Codec) -> dict[str, Any]:
    """The stored form of a codec: its id and its fields."""
    return {"id": codec.id, **asdict(codec)}  # type: ignore[call-overload]
