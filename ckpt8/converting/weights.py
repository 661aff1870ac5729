"""The weights that writers write: their names, their element types, and which of tied ones stays."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.vocabulary import BUFFERS
from ckpt8.converting.choice import model_tensors
from ckpt8.converting.computed import FLOATS, Caster
from ckpt8.converting.request import Report
from ckpt8.converting.ties import HEADS, module_of
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType


class WeightTypes:
    """Casts weights to the element type of the target, and counts the casts in ``report``.

    ``dtype`` None leaves all as they are. ``only`` are the types to cast, by default all floats of 16 to 64 bits.
    Buffers keep their type.
    """

    def __init__(self, data: Composite, dtype: DType | None, report: Report, only: frozenset[DType] = FLOATS) -> None:
        self._caster = Caster(data)
        self._dtype = dtype
        self._report = report
        self._only = only

    def __call__(self, name: str, ref: TensorRef) -> TensorRef:
        """The tensor to write."""
        stays = self._dtype in (None, ref.dtype) or ref.dtype not in self._only
        if self._dtype is None or stays or name.rpartition(".")[2] in BUFFERS:
            return ref
        self._report.casts[f"{ref.dtype.label} -> {self._dtype.label}"] += 1
        return self._caster.cast(name, ref, self._dtype)


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
    kept = {_kept(tied) for tied in names.values()}
    report.aliases += [name for name in named if name not in kept]
    found = {name: types(name, ref) for name, ref in named.items() if name in kept}
    for name, ref in found.items():
        data.check_extent(name, ref)
    return found


def strip_wrappers(names: Iterable[str], report: Report) -> dict[str, str]:
    """The names without those of wrappers, by what they were. Notes an example in ``report``."""
    plain = plain_names(names)
    changed = [f"{name} -> {short}" for name, short in plain.items() if name != short]
    if changed:
        report.notes.append(f"names without wrappers, as in {changed[0]}")
    return plain


def _kept(names: list[str]) -> str:
    """The name that a tied weight keeps: the first that is not an output layer's."""
    return next((name for name in names if module_of(name) not in HEADS), names[0])
