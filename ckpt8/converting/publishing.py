"""What to say of weights that a container keeps for resuming, where they are converted to be published or served."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckpt8.checkpoint.meaning.parameter_names import split_member
from ckpt8.codecs.error_stats import LatticeError, read_error
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
        members = [each for each in reader.manifest.members if member is None or _is_in(each.path, member)]
        storages = {index for each in members for _, index in each.segments}
        if key is not None:
            in_files = reader.manifest.directory is not None
            named = [(split_member(each.name)[1] if in_files else each.name, each) for each in reader.manifest.tensors]
            storages &= {each.storage for name, each in named if name.startswith(f"{key}.")}
        storages |= _masters(reader, storages)
        total = LatticeError()
        for index in sorted(storages):
            if reader.codec(index).measured_as != "noise":
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
    return {run.storage for each in copies if each is not None for run in each.runs if run.storage is not None}


def _is_in(path: str, member: str) -> bool:
    return path == member or path.startswith(f"{member.rstrip('/')}/")
