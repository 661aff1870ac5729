"""Weights in a safetensors file, alone or in a directory of Trainer.

A file is streamed: the header, then tensor after tensor, block by block. A checkpoint directory is that of Trainer of
transformers: weights, optimizer, and other files as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.readers.safetensors import DTYPES
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.container.frames import bytes_of
from ckpt8.container.header import LENGTH_BYTES, MAX_HEADER, METADATA, render_safetensors, tensor_entry
from ckpt8.container.manifest import DIRECTORY, SYMLINK
from ckpt8.converting.choice import FLOATS, Content, choose_model
from ckpt8.converting.request import OpenFile, Report, Request, new_file
from ckpt8.converting.weights import WeightTypes, choose_run, joined_weights, model_weights
from ckpt8.core.errors import UsageError
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.tensors import DType

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(request: Request, report: Report) -> None:
    """Write the weights of a model. Raises Ckpt8Error.

    Weights in fp32 become bf16 unless ``--dtype`` says otherwise. With float32 a run of ckpt8.optim gives its master
    weights.
    """
    with request.open(report) as content:
        data = content.data
        model = choose_model(data, request.key)
        if request.dtype is DType.FLOAT32:
            model = with_masters(data, model)
        only = frozenset({DType.FLOAT32}) if request.dtype is None else FLOATS
        weights = model_weights(data, model, WeightTypes(data, request.dtype or DType.BFLOAT16, report, only), report)
        with request.new_file(data, report, total_bytes(weights)) as out:
            write_safetensors(data, weights, out)
    report.tensors = len(weights)


def with_masters(data: Composite, model: Candidate) -> Candidate:
    """The model, in fp32 wherever a packed optimizer holds the residuals or masters of its 16-bit weights.

    Raises UsageError where it is not clear which weight a residual completes.
    """
    return Candidate(model.path, {**model.node, **joined_weights(data, model)})


def total_bytes(weights: Mapping[str, TensorRef]) -> int:
    """Bytes of all weights."""
    return sum(ref.nbytes for ref in weights.values())


def write_safetensors(data: Composite, weights: Mapping[str, TensorRef], out: OpenFile) -> None:
    """Write header and tensors from the start of an empty file. Raises UsageError, InputError, OutputError."""
    # The order of the safetensors library: wide types first, so that all are aligned, then by name.
    order = sorted(weights, key=lambda name: (-weights[name].dtype.itemsize, name))
    header = _make_header(weights, order)
    out.write(header, 0)
    position = len(header)
    for name in order:
        for block in data.blocks(weights[name]):
            view = bytes_of(block)
            out.write(view, position)
            position += len(view)
            out.progress(len(view))


def _make_header(weights: Mapping[str, TensorRef], order: list[str]) -> bytes:
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    position = 0
    for name in order:
        ref = weights[name]
        if ref.dtype not in _NAMES or name == METADATA:
            what = f"its element type {ref.dtype.label}" if name != METADATA else "its name"
            raise UsageError(f"{name}: a safetensors file cannot hold {what}")
        packed = 2 if ref.dtype is DType.FLOAT4_E2M1FN_X2 else 1
        shape = [*ref.shape[:-1], *(size * packed for size in ref.shape[-1:])]
        header[name] = tensor_entry(_NAMES[ref.dtype], shape, position, position + ref.nbytes)
        position += ref.nbytes
    try:
        text = render_safetensors(header, ascii_only=False)
    except UnicodeEncodeError as exc:
        raise UsageError("a name of a tensor is not valid UTF-8, which a safetensors file must have") from exc
    if (length := len(text) - LENGTH_BYTES) > MAX_HEADER:
        raise UsageError(f"{len(weights)} tensors make a header of {length} bytes, more than {MAX_HEADER}")
    return text


WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer.pt"
_STATE = "trainer_state.json"
_BLOCK_BYTES = 8 << 20


def write_trainer(request: Request, report: Report) -> None:
    """Write the directory. Raises Ckpt8Error.

    Weights keep their element type unless ``--dtype`` says otherwise; a packed optimizer of ckpt8 is unpacked.
    """
    from ckpt8.converting.writers.torch_zip import build_hollow, write_zip

    with request.open(report) as content:
        data = content.data
        model, optimizer = choose_run(data, request.key, "; convert to safetensors for the weights alone")
        weights = model_weights(data, model, WeightTypes(data, request.dtype, report), report)
        state = build_hollow(data, optimizer.node, report)
        with request.new_directory(data, report, [other.path for other in content.others]) as output:
            progress = request.progress_to(total_bytes(weights) + state.nbytes)
            with new_file(output, WEIGHTS, progress) as out:
                write_safetensors(data, weights, out)
            with new_file(output, _OPTIMIZER, progress) as out:
                write_zip(state, out, _OPTIMIZER)
            left = copy_others(content, output, _is_wanted)
            if not (output.path / _STATE).is_file():
                report.notes.append(f"the source has no {_STATE}, without which Trainer does not resume")
    report.dropped += [f"{path}: not copied" for path in left]
    report.tensors += len(weights)


def _is_wanted(member: DirectoryMember) -> bool:
    return member.checkpoint.format not in (SYMLINK, DIRECTORY) and member.path not in (WEIGHTS, _OPTIMIZER)


def copy_others(content: Content, output: AtomicDirectory, is_wanted: Callable[[DirectoryMember], bool]) -> list[str]:
    """Copy those of the other files of the source that are wanted. Returns the paths that are left.

    Raises InputError, OutputError.
    """
    for member in filter(is_wanted, content.others):
        size = member.checkpoint.size
        with new_file(output, member.path) as out:
            for start in range(0, size, _BLOCK_BYTES):
                block = memoryview(bytearray(min(_BLOCK_BYTES, size - start)))
                member.checkpoint.read_into(start, block)
                out.write(block, start)
        member.checkpoint.check_unchanged()
    return [member.path for member in content.others if not is_wanted(member)]
