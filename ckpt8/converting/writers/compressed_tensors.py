"""A directory of a model with quantised linear layers, in the layout of compressed-tensors.

For every quantised layer ``model.safetensors`` holds ``weight`` in eight bits and ``weight_scale`` in fp32 of shape
(rows, 1) or (1,). Buffers stay as they are, everything else is bf16. ``config.json`` tells loaders how to read it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath

import torch

from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.container.manifest import FILE
from ckpt8.converting.choice import choose_model, hold, model_tensors
from ckpt8.converting.quantizing import (
    CONFIG,
    Layers,
    QuantizationError,
    Scheme,
    choose_layers,
    encode_matrix,
    find_scales,
    make_scheme,
    matches,
    read_config,
    summary,
    with_quantization,
)
from ckpt8.converting.request import Report, Request, new_file
from ckpt8.converting.weights import WeightTypes, model_weights
from ckpt8.converting.writers.safetensors import WEIGHTS, copy_others, total_bytes, with_masters, write_safetensors
from ckpt8.core.errors import UsageError, require
from ckpt8.core.tensors import DType
from ckpt8.core.text import listed
from ckpt8.core.workers import Progress

_ALIGNED = 16
_TEXTS = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".md"})
_NOT_COPIED = frozenset({CONFIG, "trainer_state.json", "all_results.json", "train_results.json"})
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")
_LISTED = 20


def write(request: Request, report: Report) -> None:
    """Write the directory. Raises Ckpt8Error.

    Quantises linear layers to float8_e4m3fn, or as ``--dtype`` says, from their fp32 master weights where the source
    has them. ``quantizing.choose_layers`` says which layers, ``make_scheme`` how.
    """
    scheme = make_scheme(request.dtype, request.scale, request.per)
    with request.open(report) as content:
        data = content.data
        config = read_config(content, request.config)
        model = choose_model(data, request.key)
        weights = model_weights(data, model, WeightTypes(data, None, report), report)
        named = _by_plain_name(model)
        tied = [named[name] for name in report.aliases if 0 not in named[name].shape]
        layers = choose_layers(weights, tied, config, request.keep)
        for pattern in request.keep:  # a typo would quantise a layer that should stay
            if not any(matches(pattern, module) for module in layers.modules):
                modules = listed(layers.modules, _LISTED)
                raise UsageError(f"{data.label}: --keep {pattern!r} matches no layer: {modules}")
        masters = _masters(data, model, weights, report)
        with request.new_directory(data, report, [other.path for other in content.others]) as output:
            progress = request.progress_to(2 * sum(masters[name].nbytes for name in layers.quantized))
            scales = _find_scales(data, masters, layers, scheme, progress)
            if not scales:
                reasons = Counter(layers.kept.values())
                kept = listed((f"{count} {reason}" for reason, count in reasons.items()), _LISTED)
                raise UsageError(f"{data.label}: {model.path}: no linear layer to quantise ({kept or 'no matrix'})")
            types = WeightTypes(data, DType.BFLOAT16, report)
            written, errors = _make_tensors(data, weights, masters, scales, scheme, types)
            with new_file(output, WEIGHTS, request.progress_to(2 * total_bytes(written))) as out:
                write_safetensors(data, written, out)
            with new_file(output, CONFIG) as out:
                out.write(with_quantization(config, scheme.to_config(layers.ignore(report.aliases))), 0)
            left = [path for path in copy_others(content, output, _is_text) if path != CONFIG]
    if left:
        report.notes.append(f"not copied, since inference does not need them: {listed(left, _LISTED)}")
    report.tensors = len(written)
    report.quantized = summary(scheme, errors, layers)
    report.notes += _notes(scheme, scales, weights, has_config=config is not None)


def _find_scales(
    data: Composite, masters: Mapping[str, TensorRef], layers: Layers, scheme: Scheme, progress: Progress
) -> dict[str, torch.Tensor]:
    """The scales of the matrices by name, 4 bytes each. ``layers`` keeps matrices without any. Raises InputError."""
    by_name = {name: find_scales(data, masters[name], scheme, progress) for name in layers.quantized}
    for name, scales in by_name.items():
        if scales is None:
            layers.keep(name, "holds NaN, Inf or a magnitude of 2^127 and more")
    return {name: scales for name, scales in by_name.items() if scales is not None}


def _make_tensors(
    data: Composite,
    weights: Mapping[str, TensorRef],
    masters: Mapping[str, TensorRef],
    scales: Mapping[str, torch.Tensor],
    scheme: Scheme,
    types: WeightTypes,
) -> tuple[dict[str, TensorRef], dict[str, QuantizationError]]:
    """All tensors of the target, and the errors of the quantised ones, complete once their codes are read."""
    tensors, errors = {}, {}
    for name, ref in weights.items():
        if name not in scales:
            tensors[name] = types(name, ref)
            continue
        tensors[name], errors[name] = encode_matrix(data, masters[name], scales[name], scheme)
        scale = f"{name}_scale"
        require(scale not in weights, f"{data.label}: {scale} is there already; the model is quantised", UsageError)
        tensors[scale] = hold(data, scales[name])
    return tensors, errors


def _masters(
    data: Composite, model: Candidate, weights: Mapping[str, TensorRef], report: Report
) -> dict[str, TensorRef]:
    """The fp32 master weights where they are known, else the weights."""
    try:
        full = with_masters(data, model)
    except UsageError as exc:
        report.notes.append(f"16-bit weights were quantised, not their masters: {exc}")
        return dict(weights)
    named = _by_plain_name(full)
    return {name: named[name] for name in weights}


def _by_plain_name(model: Candidate) -> dict[str, TensorRef]:
    """The tensors of a model by their names in the file."""
    tensors = model_tensors(model)
    return {plain: tensors[name] for name, plain in plain_names(tensors).items()}


def _is_text(member: DirectoryMember) -> bool:
    """Whether inference reads a file: tokenizers, settings of generation, code."""
    is_text = member.checkpoint.format == FILE and PurePosixPath(member.path).suffix.lower() in _TEXTS
    return is_text and "/" not in member.path and member.path not in _NOT_COPIED


def _notes(
    scheme: Scheme, scales: Mapping[str, object], weights: Mapping[str, TensorRef], *, has_config: bool
) -> list[str]:
    odd = sum(any(size % _ALIGNED for size in weights[name].shape) for name in scales)
    notes = {
        f"the source has no {CONFIG}: the new one only says how the weights are quantised; "
        "give the model's with --config": not has_config,
        f"{odd} quantised matrices have a size that is no multiple of {_ALIGNED}; GPUs want multiples": odd,
        "holds experts, which transformers loads as float8_e4m3fn but not as int8": scheme.dtype is DType.INT8
        and any(map(_EXPERT.search, weights)),
    }
    return [note for note, holds in notes.items() if holds]
