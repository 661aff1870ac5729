"""A safetensors file, streamed: the header, then tensor after tensor, block by block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.readers.safetensors import DTYPES
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.container.frames import bytes_of
from ckpt8.container.header import MAX_HEADER
from ckpt8.converting.choice import choose_model
from ckpt8.converting.request import Report, Request
from ckpt8.converting.sources import Content
from ckpt8.converting.unpacked import joined_weights
from ckpt8.converting.weights import FLOATS, WeightTypes, model_weights
from ckpt8.core.errors import UsageError
from ckpt8.core.files.atomic import AtomicFile, Guard
from ckpt8.core.files.write_at import write_at
from ckpt8.core.tensors import DType
from ckpt8.core.workers import Progress

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
_RESERVED = "__metadata__"


class SafetensorsWriter:
    """Weights of a model alone. fp32 weights become bf16 unless ``--dtype`` says otherwise."""

    id: ClassVar[str] = "safetensors"
    directory: ClassVar[bool] = False

    def write(self, request: Request) -> Report:
        """Write the weights. Raises Ckpt8Error."""
        report = Report(str(request.target), self.id)
        with request.open(report) as content:
            weights = chosen_weights(request, content, report)
            with AtomicFile(request.target, force=request.force) as output:
                progress = request.progress_to(total_bytes(weights))
                write_safetensors(content.data, weights, output.file.fileno(), output.guard, progress)
                content.data.check_unchanged()
                report.bytes = output.file.seek(0, 2)
                output.publish()
                report.replaced = output.replaced
            report.tensors = len(weights)
        return report


def chosen_weights(request: Request, content: Content, report: Report) -> dict[str, TensorRef]:
    """The weights of the chosen model in the element type that was asked for. Raises UsageError.

    fp32 of a run of ckpt8.optim is that of its master weights.
    """
    data = content.data
    model = choose_model(data, request.key)
    if request.dtype is DType.FLOAT32:
        model = with_masters(data, model)
    only = FLOATS if request.dtype is not None else frozenset({DType.FLOAT32})
    types = WeightTypes(data, request.dtype or DType.BFLOAT16, report, only)
    return model_weights(data, model, types, report)


def with_masters(data: Composite, model: Candidate) -> Candidate:
    """A model with the fp32 weights of which its 16-bit ones are the upper half, where a packed optimizer has the rest.

    Raises UsageError where it is not clear which weight a residual completes.
    """
    return Candidate(model.path, {**model.node, **joined_weights(data, model)})


def total_bytes(weights: Mapping[str, TensorRef]) -> int:
    """Bytes of all weights."""
    return sum(nbytes(ref) for ref in weights.values())


def nbytes(ref: TensorRef) -> int:
    """Size of a contiguous copy of a tensor."""
    return ref.nbytes


def write_safetensors(
    data: Composite, weights: Mapping[str, TensorRef], descriptor: int, guard: Guard, progress: Progress
) -> None:
    """Write header and tensors from the start of an empty file. Raises UsageError, InputError, OutputError."""
    # As the library does it: wide types first, so that all are aligned, then by name.
    order = sorted(weights, key=lambda name: (-weights[name].dtype.itemsize, name))
    position = _write_header(weights, order, descriptor, guard)
    for name in order:
        for block in data.blocks(weights[name]):
            view = bytes_of(block)
            with guard():
                write_at(descriptor, view, position)
            position += len(view)
            progress(len(view))


def _write_header(weights: Mapping[str, TensorRef], order: list[str], descriptor: int, guard: Guard) -> int:
    header: dict[str, object] = {_RESERVED: {"format": "pt"}}
    position = 0
    for name in order:
        ref = weights[name]
        if ref.dtype not in _NAMES or name == _RESERVED:
            what = f"its element type {ref.dtype.label}" if name != _RESERVED else "its name"
            raise UsageError(f"{name}: {what} cannot be held by a safetensors file")
        shape = list(ref.shape)
        if ref.dtype is DType.FLOAT4_E2M1FN_X2:
            shape[-1] *= 2
        end = position + nbytes(ref)
        header[name] = {"dtype": _NAMES[ref.dtype], "shape": shape, "data_offsets": [position, end]}
        position = end
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise UsageError("a name of a tensor is not valid UTF-8, which a safetensors file must have") from exc
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise UsageError(f"{len(weights)} tensors make a header of {len(text)} bytes, more than {MAX_HEADER}")
    with guard():
        write_at(descriptor, memoryview(len(text).to_bytes(_ALIGNMENT, "little") + text), 0)
    return _ALIGNMENT + len(text)
