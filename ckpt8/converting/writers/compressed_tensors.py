"""A directory of a model with quantised linear layers, in the layout of compressed-tensors.

Of every quantised layer ``model.safetensors`` holds ``weight`` in eight bits and ``weight_scale`` in fp32, of the shape
(rows, 1) or (1,). Buffers stay as they are, everything else is bf16. ``config.json`` tells loaders how to read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import torch

from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import Held, TensorRef
from ckpt8.container.frames import bytes_of
from ckpt8.container.manifest import FILE
from ckpt8.converting.choice import choose_model, tensors_of
from ckpt8.converting.content import Content
from ckpt8.converting.quantizing.codes import Codes, QuantizationError
from ckpt8.converting.quantizing.config import CONFIG, read_config, with_quantization
from ckpt8.converting.quantizing.layers import Layers, choose_layers
from ckpt8.converting.quantizing.report import summary
from ckpt8.converting.quantizing.scales import measure_extent
from ckpt8.converting.quantizing.scheme import Scheme, make_scheme
from ckpt8.converting.request import Report, Request, new_file
from ckpt8.converting.weights import WeightTypes, model_weights
from ckpt8.converting.writers.safetensors import nbytes, total_bytes, with_masters, write_safetensors
from ckpt8.converting.writers.trainer import WEIGHTS, copy_member
from ckpt8.core.errors import UsageError
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.tensors import DType
from ckpt8.core.text import listed
from ckpt8.core.workers import Progress

_ALIGNED = 16
_TEXTS = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".md"})
_NOT_COPIED = frozenset({CONFIG, "trainer_state.json", "all_results.json", "train_results.json"})
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")
_NOT_FINITE = "holds NaN, Inf or a magnitude of 2^127 and more"
_LISTED = 20


def write(request: Request, report: Report) -> None:
    """Write the directory. Raises Ckpt8Error.

    Quantises linear layers to float8_e4m3fn, or as ``--dtype`` says, from their fp32 master weights where the source
    has them. ``quantizing.layers`` says which layers, ``quantizing.scheme`` how.
    """
    settings = request.quantization
    scheme = make_scheme(request.dtype, settings.scale, settings.per)
    with request.open(report) as content:
        data = content.data
        config = read_config(content, settings.config)
        model = choose_model(data, request.key)
        weights = model_weights(data, model, WeightTypes(data, None, report), report)
        layers = choose_layers(weights, _tied(weights, model, report), config, settings.keep)
        for pattern in layers.unmatched(settings.keep):  # a typo would quantise what was to be kept
            modules = listed(layers.modules, _LISTED)
            raise UsageError(f"{data.label}: --keep {pattern!r} matches no layer: {modules}")
        job = _Job(data, scheme, layers, _masters(data, model, weights, report))
        with request.new_directory(data, report, [each.path for each in content.others]) as output:
            job.measure_scales(request.progress_to(2 * job.nbytes))
            if not job.scales:
                kept = listed((f"{count} {reason}" for reason, count in layers.reasons().items()), _LISTED)
                raise UsageError(f"{data.label}: {model.path}: no linear layer to quantise ({kept or 'no matrix'})")
            written = job.make_tensors(weights, WeightTypes(data, DType.BFLOAT16, report))
            with new_file(output, WEIGHTS, request.progress_to(2 * total_bytes(written))) as out:
                write_safetensors(data, written, out)
            with new_file(output, CONFIG) as out:
                out.write(with_quantization(config, scheme.to_config(layers.ignore(report.aliases))), 0)
            _copy_texts(content, output, report)
    report.tensors = len(written)
    report.quantized = summary(scheme, job.errors, layers)
    report.notes += _notes(scheme, job.scales, weights, has_config=config is not None)


@dataclass(slots=True)
class _Job:
    """Quantises the matrices. ``scales`` and ``errors`` are by name; ``layers`` keeps what cannot be quantised.

    Holds the scales in memory, 4 bytes each, and streams the rest.
    """

    data: Composite
    scheme: Scheme
    layers: Layers
    masters: Mapping[str, TensorRef]
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    errors: dict[str, QuantizationError] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes to read for the scales."""
        return sum(nbytes(self.masters[name]) for name in self.layers.quantized)

    def measure_scales(self, progress: Progress) -> None:
        """Find the scales. Raises InputError."""
        for name in list(self.layers.quantized):
            extent = measure_extent(self.data, self.masters[name], self.scheme, progress)
            if extent.usable:
                self.scales[name] = extent.scales()
            else:
                self.layers.keep(name, _NOT_FINITE)

    def make_tensors(self, weights: Mapping[str, TensorRef], types: WeightTypes) -> dict[str, TensorRef]:
        """All tensors of the target. Errors are added up as codes are read."""
        found: dict[str, TensorRef] = {}
        for name, ref in weights.items():
            if name not in self.scales:
                found[name] = types(name, ref)
                continue
            scales = self.scales[name]
            codes = Codes(self.data, self.masters[name], scales, self.scheme)
            self.errors[name] = codes.error
            found[name] = self.data.tensor(codes, self.scheme.dtype, ref.shape)
            held = Held(bytes(bytes_of(scales.contiguous())))
            scale = f"{name}_scale"
            if scale in weights:
                raise UsageError(f"{self.data.label}: {scale} is there already; the model is quantised")
            found[scale] = self.data.tensor(held, DType.FLOAT32, tuple(scales.shape))
        return found


def _tied(weights: Mapping[str, TensorRef], model: Candidate, report: Report) -> list[TensorRef]:
    """The weights that have a second name, which the file does not hold."""
    named = _by_plain_name(model)
    places = {(ref.key, ref.offset) for name in report.aliases if 0 not in (ref := named[name]).shape}
    return [ref for ref in weights.values() if (ref.key, ref.offset) in places]


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
    """The tensors of a model by the names that they are written under."""
    tensors, _ = tensors_of(model)
    return {plain: tensors[name] for name, plain in plain_names(tensors).items()}


def _copy_texts(content: Content, output: AtomicDirectory, report: Report) -> None:
    """Copy what inference reads beside the weights: tokenizers, settings of generation, code."""
    left = []
    for member in content.others:
        path = PurePosixPath(member.path)
        is_text = member.checkpoint.format == FILE and path.suffix.lower() in _TEXTS and len(path.parts) == 1
        if is_text and path.name not in _NOT_COPIED:
            copy_member(member, output)
        elif member.path != CONFIG:
            left.append(member.path)
    if left:
        report.notes.append(f"not copied, as inference does without: {listed(left, _LISTED)}")


def _notes(
    scheme: Scheme, scales: Mapping[str, object], weights: Mapping[str, TensorRef], *, has_config: bool
) -> list[str]:
    notes = []
    if not has_config:
        notes.append(
            f"the source has no {CONFIG}: what is written says nothing but how the weights are quantised; "
            "give that of the model with --config"
        )
    odd = sum(any(size % _ALIGNED for size in weights[name].shape) for name in scales)
    if odd:
        notes.append(f"{odd} quantised matrices have a size that is no multiple of {_ALIGNED}, as GPUs want it")
    if scheme.dtype is DType.INT8 and any(_EXPERT.search(name) for name in weights):
        notes.append("holds experts, with which transformers loads float8_e4m3fn but not int8")
    return notes
