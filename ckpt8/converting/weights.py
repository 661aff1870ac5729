"""The weights to write: their names, their element types, and the one name that tied weights keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.vocabulary import BUFFERS
from ckpt8.converting.choice import model_tensors
from ckpt8.converting.computed import FLOATS, cast
from ckpt8.converting.request import Report
from ckpt8.converting.ties import HEADS, module_of
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType


@dataclass(slots=True)
class WeightTypes:
    """Casts weights to the element type of the target, and counts the casts in ``report``.

    ``dtype`` None leaves all as they are. ``only`` are the types to cast, by default all floats of 16 to 64 bits.
    Buffers keep their type. Weights that are one tensor stay one.
    """

    data: Composite
    dtype: DType | None
    report: Report
    only: frozenset[DType] = FLOATS
    _made: dict[tuple[object, ...], TensorRef] = field(default_factory=dict)

    def __call__(self, name: str, ref: TensorRef) -> TensorRef:
        """The tensor to write."""
        stays = self.dtype in (None, ref.dtype) or ref.dtype not in self.only
        if self.dtype is None or stays or name.rpartition(".")[2] in BUFFERS:
            return ref
        self.report.casts[f"{ref.dtype.label} -> {self.dtype.label}"] += 1
        identity = (ref.key, ref.offset, ref.shape, ref.stride, ref.neg, ref.dtype)
        if identity not in self._made:
            self._made[identity] = cast(self.data, name, ref, self.dtype)
        return self._made[identity]


def model_weights(data: Composite, model: Candidate, types: WeightTypes, report: Report) -> dict[str, TensorRef]:
    """The weights of a model as transformers loads them: names without wrappers, every tied weight once.

    Notes in ``report`` the names that it changes or leaves out. Raises UsageError for a state dict without tensors.
    """
    tensors = model_tensors(model)
    report.dropped += [f"{name}: not a tensor" for name in model.node if name not in tensors]
    if not tensors:
        raise UsageError(f"{data.label}: {model.path} holds no tensors")
    plain = strip_wrappers(tensors, report)
    named = {plain[name]: ref for name, ref in tensors.items()}
    names: dict[tuple[object, ...], list[str]] = {}
    for name, ref in named.items():
        # An empty tensor has no place that it could share.
        identity = (ref.key, ref.offset, ref.shape, ref.stride, ref.dtype) if ref.numel else (name,)
        names.setdefault(identity, []).append(name)
    # A tied weight keeps the first name that is not an output layer's.
    kept = {next((name for name in tied if module_of(name) not in HEADS), tied[0]) for tied in names.values()}
    report.aliases += [name for name in named if name not in kept]
    found = {name: types(name, ref) for name, ref in named.items() if name in kept}
    for name, ref in found.items():
        data.check_extent(name, ref)
    return found


def strip_wrappers(names: Iterable[str], report: Report) -> dict[str, str]:
    """The names without wrappers, by the old names. Notes an example in ``report``."""
    plain = plain_names(names)
    changed = [f"{name} -> {short}" for name, short in plain.items() if name != short]
    if changed:
        report.notes.append(f"names without wrappers, as in {changed[0]}")
    return plain
