"""What to say of weights that a container keeps for resuming, where they are converted to be published or served.

Tied weights: the names of output layers, and the ties that a distributed checkpoint lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from ckpt8.checkpoint.meaning.parameter_names import split_member
from ckpt8.checkpoint.meaning.state_dicts import find
from ckpt8.checkpoint.sources.composite import Composite, Streamer
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs.error_stats import LatticeError, read_error
from ckpt8.container.frames import bytes_of
from ckpt8.container.opening import Stored, is_stored, open_stored

PUBLISHED = frozenset({"safetensors", "compressed-tensors", "flashoptim"})
"""Formats for inference and publishing. A model without the rest of its checkpoint is for these, in any format."""

_GOOD_ENOUGH = 60.0
"""dB: beyond what bf16 keeps."""

_ADVICE = "for resuming, not for inference or publishing; convert the original, or a flash or lossless .ckpt8 of it"


def weights_snr(source: Path, member: str | None, key: str | None) -> tuple[float | None, str | None]:
    """The SNR in dB of the weights that a container keeps on a lattice, and a warning where it is low or unknown.

    ``member`` is the one that is converted, or a folder of members, ``key`` the model; None for all. Copies of masters
    count as these. The SNR is None where it was not measured, and for a source without such weights.
    """
    if not is_stored(source):
        return None, None
    with open_stored(source) as reader:
        members = [
            candidate for candidate in reader.manifest.members if member is None or _is_in(candidate.path, member)
        ]
        storages = {index for member in members for _, index in member.segments}
        if key is not None:
            in_files = reader.manifest.directory is not None
            named = [
                (split_member(tensor.name)[1] if in_files else tensor.name, tensor)
                for tensor in reader.manifest.tensors
            ]
            storages &= {tensor.storage for name, tensor in named if name.startswith(f"{key}.")}
        storages |= _masters(reader, storages)
        total = LatticeError()
        for index in sorted(storages):
            if reader.codec(index).measured_as != "lattice":
                continue
            error = read_error(reader.manifest.storages[index].error)
            if not isinstance(error, LatticeError):
                return None, f"{source}: keeps its weights {_ADVICE}; how well is unknown, it was not measured"
            total.merge(error)
    snr = total.snr_db
    return (
        snr,
        None if snr is None or snr >= _GOOD_ENOUGH else f"{source}: keeps its weights to {snr:.1f} dB, {_ADVICE}",
    )


def _masters(reader: Stored, storages: Iterable[int]) -> set[int]:
    """The storages that copies among ``storages`` are rounded from."""
    copies = (reader.codec(index).copied for index in storages)
    return {run.storage for copy in copies if copy is not None for run in copy.runs if run.storage is not None}


def _is_in(path: str, member: str) -> bool:
    return path == member or path.startswith(f"{member.rstrip('/')}/")


HEADS = frozenset({"lm_head", "head", "output", "output_layer", "embed_out", "proj_out", "decoder", "classifier"})
"""Last modules in the names of output layers. A tied weight keeps its other name: the output layer takes over the
embedding, not the other way round."""

_SAMPLE, _COMPARED = 1024, 4
"""Two matrices are compared where their first _SAMPLE elements agree, one matrix with at most _COMPARED others."""


def module_of(name: str) -> str:
    """The last module in the name of a parameter."""
    return name.rpartition(".")[0].rpartition(".")[2]


def tie_again(data: Composite) -> None:
    """Replace the matrix of an output layer by another matrix of its model with the same bits, in the tree.

    Of a matrix without such a twin it mostly reads only the first elements. Raises InputError.
    """
    streamer = Streamer(data)
    for model in find(data.tree)[0]:
        matrices = {
            name: ref
            for name, ref in model.node.items()
            if isinstance(ref, TensorRef) and len(ref.shape) > 1 and 0 not in ref.shape
        }
        heads = [name for name in matrices if module_of(name) in HEADS]
        kinds = {(matrices[head].shape, matrices[head].dtype) for head in heads}
        alike: dict[object, list[TensorRef]] = defaultdict(list)
        for name, ref in matrices.items():
            if name not in heads and (ref.shape, ref.dtype) in kinds:
                alike[_mark(data, ref)].append(ref)
        for head in heads if alike else ():
            others = alike.get(_mark(data, matrices[head]), [])[:_COMPARED]
            equal = next((ref for ref in others if streamer.equal(matrices[head], ref)), None)
            if equal is not None and any(bool(block.any()) for block in data.blocks(equal)):
                model.node[head] = equal


def _mark(data: Composite, ref: TensorRef) -> object:
    """A mark that equal tensors share, and others rarely do: shape, type and first elements."""
    return ref.shape, ref.dtype, bytes(bytes_of(data.elements(ref, 0, min(ref.numel, _SAMPLE))))
