"""The public ``convert``: checks the arguments, chooses the format, and calls the function that writes it.

``weights_snr`` says how well a container keeps weights that are converted to be published or served.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ckpt8.checkpoint.meaning.parameter_names import split_member
from ckpt8.checkpoint.readers.entries import is_directory
from ckpt8.codecs.error_stats import LatticeError, read_error
from ckpt8.container.bases import sources_of
from ckpt8.container.joined import is_stored, open_stored
from ckpt8.converting import writers
from ckpt8.converting.quantizing import LARGEST
from ckpt8.converting.request import Report, Request, parse_dtype
from ckpt8.core.errors import UsageError, require
from ckpt8.core.files.paths import as_path
from ckpt8.core.public import checked
from ckpt8.core.workers import Progress

_QUANTIZING = "compressed-tensors"


@checked
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    dtype: str | None = None,
    key: str | None = None,
    member: str | None = None,
    scale: str | None = None,
    per: str | None = None,
    keep: str | Sequence[str] = (),
    config: str | os.PathLike[str] | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """Write a checkpoint in another format. Returns a report of what was written, cast and left out.

    ``source`` is anything that ``compress`` takes, or a ``.ckpt8`` of it. The slices of a distributed checkpoint become
    whole tensors. ``to`` is torch, safetensors, trainer, dcp, flashoptim, compressed-tensors or ckpt8; without it the
    name of ``target`` decides. ``dtype`` is the element type of the weights: float32, bfloat16 or float16. Without it
    they keep theirs, except that fp32 becomes bf16 in safetensors and in flashoptim's layout. ``key`` chooses one of
    several models by its path in the tree, with dots; ``member`` one file of a directory, or a folder of it with a
    distributed checkpoint. ``progress`` is called with numbers of bytes that add up to the size of the source.

    A ``dtype`` of float8_e4m3fn or int8 quantises the linear layers of a model for inference: the target is a directory
    in the layout of compressed-tensors, everything else in it bf16. ``scale`` is absmax (the default) or, for float8,
    unit: powers of two. ``per`` says what shares a scale: channel (a row, the default of float8) or tensor (the default
    of int8, as in SwitchBack). ``keep`` are patterns of names of modules that stay bf16; ``config`` is the config.json
    of the model, for a source without one. ``quantized`` of the report has the error of the weights.

    ``warning`` of the report says where weights go into a format for inference or publishing, or are written without
    the rest of the checkpoint, and come from a ``.ckpt8`` that keeps them only well enough to resume.

    Memory is bounded by blocks, no pickle is executed, and the target appears whole or not at all. Raises InputError
    for a source that is damaged or in pieces by rank, UsageError for wrong arguments and for what the source does not
    hold, OutputError for the target.

    >>> ckpt8.convert("run.ckpt8", "model.safetensors").casts
    Counter({'float32 -> bfloat16': 2})
    """
    request = Request(
        as_path(source),
        as_path(target),
        parse_dtype(dtype),
        key,
        member,
        force,
        threads,
        progress,
        scale,
        per,
        (keep,) if isinstance(keep, str) else tuple(keep),
        None if config is None else Path(config),
    )
    with sources_of(request.source, request.target):
        in_directory = str(target).endswith((os.sep, "/")) or is_directory(request.target)
        chosen = _choose_format(request, to, in_directory=in_directory)
        report = Report(str(request.target), chosen)
        module, function = writers.WRITERS[chosen]
        getattr(import_module(module), function)(request, report)
    if chosen in PUBLISHED or key is not None:
        report.weights_snr, report.warning = weights_snr(request.source, member, key)
    return report


def write_container(request: Request, report: Report) -> None:
    """Write a ``.ckpt8``: what ``compress`` makes of the source, with the default preset. Raises Ckpt8Error."""
    from ckpt8.compressing.compress import compress

    for option in ("dtype", "key", "member"):
        require(
            getattr(request, option) is None,
            f"--{option}: a .ckpt8 holds its source as it is; convert to another format first",
            UsageError,
        )
    manifest = compress(
        request.source, request.target, threads=request.threads, force=request.force, progress=request.progress
    )
    report.layout = "file" if manifest.directory is None else "directory"
    report.tensors = len(manifest.tensors)
    report.bytes = request.target.stat().st_size


def _choose_format(request: Request, to: str | None, *, in_directory: bool) -> str:
    """The format of the target. An element type with scales needs the format that holds them. Raises UsageError."""
    target, dtype = request.target, request.dtype
    to_file = not in_directory and target.suffix.lower() in writers.SUFFIXES
    quantizes = to is None and dtype in LARGEST and not to_file
    chosen = _QUANTIZING if quantizes else writers.choose_format(target, to, is_directory=in_directory)
    if chosen == _QUANTIZING and not to_file:
        return chosen
    if dtype in LARGEST or chosen == _QUANTIZING:
        what = "quantised weights" if dtype is None else f"{dtype.label} weights"
        raise UsageError(f"{target}: {what} need a config.json beside them that says so; give a directory, DST/")
    require(
        (request.scale, request.per, request.keep, request.config) == (None, None, (), None),
        "--scale, --per, --keep and --config are for quantised weights: --dtype float8_e4m3fn or int8",
        UsageError,
    )
    return chosen


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
        storages = {
            index
            for own in reader.manifest.members
            if member is None or own.path == member or own.path.startswith(f"{member.rstrip('/')}/")
            for _, index in own.segments
        }
        if key is not None:
            in_files = reader.manifest.directory is not None
            storages &= {
                tensor.storage
                for tensor in reader.manifest.tensors
                if (split_member(tensor.name)[1] if in_files else tensor.name).startswith(f"{key}.")
            }
        copies = (reader.codec(index).copied for index in storages)
        storages |= {run.storage for copy in copies if copy is not None for run in copy.runs if run.storage is not None}
        total = LatticeError()
        for index in sorted(storages):
            if reader.codec(index).measured_as != "lattice":
                continue
            error = read_error(reader.manifest.storages[index].error)
            if not isinstance(error, LatticeError):
                return None, f"{source}: keeps its weights {_ADVICE}; how well is unknown, it was not measured"
            total.merge(error)
    snr = total.snr_db
    is_low = snr is not None and snr < _GOOD_ENOUGH
    return snr, f"{source}: keeps its weights to {snr:.1f} dB, {_ADVICE}" if is_low else None
