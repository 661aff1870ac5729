"""The public ``convert``: checks the arguments, chooses the format, and calls the module that writes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ckpt8.checkpoint.readers.entries import is_directory
from ckpt8.container.bases import sources_of
from ckpt8.converting import writers
from ckpt8.converting.publishing import PUBLISHED, weights_snr
from ckpt8.converting.quantizing import LARGEST
from ckpt8.converting.request import Report, Request, parse_dtype
from ckpt8.core.arguments import checked
from ckpt8.core.errors import UsageError
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
    path, wanted = Path(source), Path(target)
    request = Request(
        path,
        wanted,
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
    with sources_of(path, wanted):
        in_directory = os.fspath(target).endswith((os.sep, "/")) or is_directory(wanted)
        chosen = _choose_format(request, to, in_directory=in_directory)
        report = Report(str(wanted), chosen)
        import_module(f"{writers.__name__}.{writers.WRITERS[chosen]}").write(request, report)
    if chosen in PUBLISHED or key is not None:
        report.weights_snr, report.warning = weights_snr(path, member, key)
    return report


def _choose_format(request: Request, to: str | None, *, in_directory: bool) -> str:
    """The format of the target. An element type with scales needs the format that holds them. Raises UsageError."""
    target, dtype = request.target, request.dtype
    to_file = not in_directory and target.suffix.lower() in writers.SUFFIXES
    if to is None and dtype in LARGEST and not to_file:
        to = _QUANTIZING
    chosen = writers.choose_format(target, to, is_directory=in_directory)
    if chosen == _QUANTIZING and not to_file:
        return chosen
    if dtype in LARGEST or chosen == _QUANTIZING:
        what = "quantised weights" if dtype is None else f"{dtype.label} weights"
        raise UsageError(f"{target}: {what} need a config.json beside them that says so; give a directory, DST/")
    if (request.scale, request.per, request.keep, request.config) != (None, None, (), None):
        raise UsageError("--scale, --per, --keep and --config are for quantised weights: --dtype float8_e4m3fn or int8")
    return chosen
