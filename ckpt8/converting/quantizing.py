"""How weights are quantised: the element type, what sets the scale, and what shares one.

    code = round(w / s), kept within [-Q, Q];   decoded = code * s

    type           Q    rounding                                scale s, fp32 with the value of a bf16
    float8_e4m3fn  448  to nearest of e4m3, halves to even      absmax: max|w| / Q, rounded to bf16
    int8           127  to nearest integer, halves to even      unit:   a power of two, see ``scales``

A whole matrix has one scale (``tensor``), or each of its rows has one (``channel``): the weights of one output. int8
with absmax is SwitchBack (arXiv 2304.13013): tensor-wise in SwitchBack itself, row-wise in its vector-wise variant; the
model quantises its inputs row by row when it runs. Scales have the value of a bf16 because loaders keep them in the
type of the model: so they are the same numbers in a bf16 and in an fp32 model, and code * s is rounded at most once.

``find_scales`` makes one pass over a matrix; codes and their error follow as they are read. Scales are

    absmax   s = bf16(max|w| / Q)
    unit     s = 2^e, e = max(round(log2(rms(w))), ceil(log2(max|w| / Q))): what is stored has an rms near 1 (Unit
             Scaling, arXiv 2303.11257), and nothing overflows

No level is lost where max|w| / Q is rounded down to bf16: max|w| / s is then below Q * (1 + 2^-8), and that still
rounds to Q. Rows of zeros have the scale 1; no other scale is below 2^-126.

``choose_layers`` chooses the weights to quantise: those of the linear layers inside a model, by their names, shapes and
biases.

A checkpoint does not say what its modules are. A matrix called ``weight`` counts as that of a linear layer, except for

* embeddings and position tables: by the name of their module, or a first dimension as long as the vocabulary;
* output layers: by the name of a module inside no numbered one, or by that dimension;
* tied weights;
* routers of experts, which inference engines want as they are;
* ``Conv1D`` of GPT-2 and its relatives, whose matrices are transposed, which the layout cannot express: by the model
  type in the configuration, or by a bias as long as a row;
* what the user keeps.

These stay bf16, and ``config.json`` tells loaders to leave them alone.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.names import LONGEST_CONFIG
from ckpt8.checkpoint.sources.composite import Composite, computed
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs.error_stats import SMALLEST_NORMAL, NoiseError
from ckpt8.container.frames import FRAME
from ckpt8.converting.choice import FLOATS, HEADS, Content
from ckpt8.core.arrays import as_tensor
from ckpt8.core.errors import InputError, UsageError, require
from ckpt8.core.files.source_file import reading, refuse_url
from ckpt8.core.json_text import parse_any_json
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType

LARGEST = {DType.FLOAT8_E4M3FN: 448.0, DType.INT8: 127.0}
"""Q by the element types that weights can be quantised to."""

ABSMAX, UNIT = "absmax", "unit"
TENSOR, CHANNEL = "tensor", "channel"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are quantised. ``scale`` is absmax or unit, ``per`` is tensor or channel."""

    dtype: DType = DType.FLOAT8_E4M3FN
    scale: str = ABSMAX
    per: str = CHANNEL

    @property
    def largest(self) -> float:
        """Q."""
        return LARGEST[self.dtype]

    def groups(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """How many scales a matrix has, and how many consecutive elements share one."""
        rows, columns = shape
        return (rows, columns) if self.per == CHANNEL else (1, rows * columns)

    def to_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config`` of a model whose linear layers are all quantised but those to ``ignore``.

        It has the model quantise its inputs row by row, as kernels for these types want them.
        """
        kind = "int" if self.dtype is DType.INT8 else "float"
        bits = {"num_bits": 8, "type": kind, "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**bits, "strategy": self.per, "dynamic": False},
            "input_activations": {**bits, "strategy": "token", "dynamic": True},
            "output_activations": None,
            "format": f"{kind}-quantized",
        }
        return {
            "quant_method": "compressed-tensors",
            "format": f"{kind}-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def make_scheme(dtype: DType | None, scale: str | None, per: str | None) -> Scheme:
    """The scheme of these settings; those that are None have the default of the type. Raises UsageError."""
    dtype = dtype or DType.FLOAT8_E4M3FN
    require(
        dtype in LARGEST,
        f"--dtype {dtype.label}: expected one of {', '.join(kind.label for kind in LARGEST)}",
        UsageError,
    )
    for option, value, known in (("--scale", scale, (ABSMAX, UNIT)), ("--per", per, (TENSOR, CHANNEL))):
        require(value is None or value in known, f"{option} {value}: expected one of {', '.join(known)}", UsageError)
    require(
        scale != UNIT or dtype is not DType.INT8,
        "--scale unit: int8 has no exponent that would make up for it; use absmax",
        UsageError,
    )
    return Scheme(dtype, scale or ABSMAX, per or (TENSOR if dtype is DType.INT8 else CHANNEL))


_BEYOND = 2.0**127
"""Magnitudes from here on are refused, as are NaN and Inf: their codes times the scale could overflow."""


def find_scales(
    data: Composite, ref: TensorRef, scheme: Scheme, progress: Callable[[int], None]
) -> torch.Tensor | None:
    """The fp32 scales of a matrix, of the shape (rows, 1), or (1,) for one scale of the whole matrix.

    None where an element is NaN, Inf or beyond 2^127. Reads the matrix once, and calls ``progress`` with the number of
    bytes read. Raises InputError.
    """
    rows, columns = scheme.groups(ref.shape)
    largest = torch.zeros(rows, device="cpu")
    squares = torch.zeros(rows if scheme.scale == UNIT else 0, dtype=torch.float64, device="cpu")
    start = 0
    for block in data.blocks(ref):
        for at in range(0, len(block), FRAME):
            values = as_tensor(block[at : at + FRAME], ref.dtype).float()
            for row, count, begin, end in row_parts(start, start + len(values), columns):
                part, place = values[begin - start : end - start].view(count, -1), slice(row, row + count)
                largest[place] = torch.maximum(largest[place], part.abs().amax(1))
                if scheme.scale == UNIT:
                    squares[place] += torch.linalg.vector_norm(part, dim=1, dtype=torch.float64).square_()
            start += len(values)
        progress(len(block) * ref.dtype.itemsize)
    # Compared this way round, since NaN is below nothing.
    if not bool((largest < _BEYOND).all()):
        return None
    scales = (largest / scheme.largest).bfloat16().float()
    if scheme.scale == UNIT:
        needed = torch.log2(largest.double() / scheme.largest).ceil()
        exponent = torch.maximum(needed, (torch.log2(squares / columns) / 2).round()).clamp_(-126, 127).int()
        scales = ((exponent + 127) << 23).view(torch.float32)
    scales = scales.clamp_min(SMALLEST_NORMAL).masked_fill(largest == 0, 1.0)
    return scales if scheme.per == TENSOR else scales.view(-1, 1)


def row_parts(start: int, stop: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Elements ``start`` to ``stop`` of a matrix as (first row, rows, first element, end): whole rows, parts of one.

    No more than three.
    """
    while start < stop:
        row, into = divmod(start, columns)
        rows = 0 if into else (stop - start) // columns
        end = start + rows * columns if rows else min(stop, start + columns - into)
        yield row, rows or 1, start, end
        start = end


@dataclass(slots=True)
class QuantizationError(NoiseError):
    """Error of quantised weights.

    The relative error of an element is |decoded - w| / max(|w|, 2^-126), so 1 for one that became zero, and ``zeroed``
    counts these. ``max_relative`` is the largest, ``sum_square_relative`` the sum of squares over ``count`` elements.
    """

    count: int = 0
    max_relative: float = 0.0
    sum_square_relative: float = 0.0
    zeroed: int = 0

    @property
    def rms_relative(self) -> float:
        """Root mean square of the relative errors of the elements."""
        return math.sqrt(self.sum_square_relative / self.count) if self.count else 0.0

    def figures(self) -> dict[str, Any]:
        """The figures of a report; ``snr_db`` is None where there is no error."""
        return {
            "elements": self.count,
            "max_relative": self.max_relative,
            "rms_relative": self.rms_relative,
            "snr_db": self.snr_db,
            "zeroed": self.zeroed,
        }


def measured(original: torch.Tensor, decoded: torch.Tensor) -> QuantizationError:
    """The error of decoded fp32 elements."""

    def squares(x: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2

    error = decoded - original
    zeroed = int(((decoded == 0) & (original != 0)).sum())
    noise, signal = squares(error), squares(original)
    relative = error.abs_().div_(original.abs().clamp_min_(SMALLEST_NORMAL))
    return QuantizationError(noise, signal, original.numel(), float(relative.amax()), squares(relative), zeroed)


def quantize(values: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes of finite fp32 values, in the element type of the scheme."""
    levels = (values / scales).clamp_(-scheme.largest, scheme.largest)
    # A cast to int8 cuts off, one to a float rounds.
    return (levels.round_() if scheme.dtype is DType.INT8 else levels).to(scheme.dtype.torch)


def encode_matrix(
    data: Composite, ref: TensorRef, scales: torch.Tensor, scheme: Scheme
) -> tuple[TensorRef, QuantizationError]:
    """The codes of a matrix as a tensor that is computed when it is read, and their error.

    Every read adds the error of what was read: read the codes once to know it.
    """
    error = QuantizationError()
    _, columns = scheme.groups(ref.shape)

    def encode(start: int, stop: int) -> torch.Tensor:
        values = data.elements(ref, start, stop).float()
        codes = torch.empty_like(values, dtype=scheme.dtype.torch)
        decoded = torch.empty_like(values)
        for row, count, begin, end in row_parts(start, stop, columns):
            place = slice(begin - start, end - start)
            shared = scales[row : row + count]
            encoded = quantize(values[place].view(count, -1), shared, scheme)
            codes[place] = encoded.view(-1)
            decoded[place] = (encoded.float() * shared).view(-1)
        error.merge(measured(values, decoded))
        return codes

    return computed(data, scheme.dtype, ref.shape, encode, FRAME), error


CONFIG = "config.json"
_QUANTIZATION = "quantization_config"
_TYPES = ("dtype", "torch_dtype")
"""Keys of a model's element type, in new and in old versions of transformers."""

_BF16 = "bfloat16"


def read_config(content: Content, given: Path | None) -> dict[str, Any] | None:
    """The configuration of the model: the file ``given``, or that of the source; None where there is none.

    Raises InputError where it cannot be read, UsageError where it says that the model is quantised already.
    """
    if given is not None:
        where, text = str(given), _read_file(given)
    else:
        member = next((other for other in content.others if other.path == CONFIG), None)
        if member is None:
            return None
        where = f"{content.data.label}: {CONFIG}"
        _check_size(where, member.checkpoint.size)
        text = bytearray(member.checkpoint.size)
        member.checkpoint.read_into(0, memoryview(text))
    try:
        config = parse_any_json(text, where)
        if not isinstance(config, dict):
            raise InputError(f"{where}: is not the configuration of a model")
        with_quantization(config, {})
    except (ValueError, RecursionError) as exc:
        raise InputError(f"{where}: is no JSON, or none that can be written again: {exc}") from exc
    require(
        _QUANTIZATION not in config,
        f"{where}: the model is quantised already; convert the checkpoint that it was made of",
        UsageError,
    )
    return config


def _read_file(path: Path) -> bytearray:
    refuse_url(path)
    with reading(path):
        _check_size(str(path), path.stat().st_size)
        return bytearray(path.read_bytes())


def _check_size(where: str, size: int) -> None:
    require(size <= LONGEST_CONFIG, f"{where}: has {size} bytes, too many for the configuration of a model")


def with_quantization(config: Mapping[str, Any] | None, quantization: Mapping[str, Any]) -> bytes:
    """The text of a configuration with that of the quantisation, and bf16 as the type of everything else."""
    extended = _as_bf16(config or {})
    if not any(key in extended for key in _TYPES):
        extended["torch_dtype"] = _BF16
    extended[_QUANTIZATION] = dict(quantization)
    return (json.dumps(extended, indent=2, ensure_ascii=True) + "\n").encode()


def _as_bf16(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with bf16 for every element type, of the model and of its parts."""
    return {
        key: _BF16 if key in _TYPES else _as_bf16(value) if isinstance(value, dict) else value
        for key, value in config.items()
    }


_WEIGHT = ".weight"
_EMBEDDINGS = frozenset({"wte", "wpe", "shared", "relative_attention_bias", "global_relative_attention_bias"})
_HEADS = HEADS | {"cls", "score", "qa_outputs", "output_projection", "logits_proj", "lm_loss", "vocab_projector"}
_HEAD_ENDINGS = ("head", "heads", "classifier")
_ROUTERS = frozenset({"gate", "router", "wg", "shared_expert_gate"})
_CONV1D = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})

ASKED, EMBEDDING, HEAD, TIED = "kept on request", "embedding", "output layer", "tied"
ROUTER, TRANSPOSED, TYPE = "router", "Conv1D, stored transposed", "not a float of 16 to 64 bits"

UNSAVED_HEADS = rf"re:(?:[A-Za-z_]\w*\.)*(?:{'|'.join(sorted(HEADS))})$"
"""Modules to ignore where the file has no output layer, because that is tied to a weight that it has."""


@dataclass(frozen=True, slots=True)
class Layers:
    """``quantized`` names the weights to quantise; ``kept`` the modules whose matrix stays, with the reason."""

    quantized: list[str]
    kept: dict[str, str]

    def keep(self, name: str, reason: str) -> None:
        """Take back a weight: it stays as it is."""
        self.quantized.remove(name)
        self.kept[name.removesuffix(_WEIGHT)] = reason

    def ignore(self, aliases: Iterable[str]) -> list[str]:
        """The modules that loaders leave alone: kept ones, and those of ``aliases``, tied weights without an entry."""
        tied = [name.removesuffix(_WEIGHT) for name in aliases if name.endswith(_WEIGHT)]
        heads = () if HEAD in self.kept.values() or tied else ("lm_head", UNSAVED_HEADS)
        return [*dict.fromkeys([*self.kept, *tied, *heads])]

    @property
    def modules(self) -> list[str]:
        """All modules with a matrix."""
        return [*(name.removesuffix(_WEIGHT) for name in self.quantized), *self.kept]


def choose_layers(
    weights: Mapping[str, TensorRef],
    tied: Iterable[TensorRef],
    config: Mapping[str, Any] | None,
    keep: Sequence[str] = (),
) -> Layers:
    """Decide on each weight of a model. ``tied`` have a second name; ``keep`` are patterns of names of modules."""
    places = {(ref.key, ref.offset) for ref in tied}
    vocabularies = _vocabularies(config or {})
    conv1d = _holds_conv1d(weights, config or {})
    quantized, kept = [], {}
    for name, ref in weights.items():
        module = name.removesuffix(_WEIGHT)
        if module == name or len(ref.shape) != 2 or 0 in ref.shape:
            continue
        if any(matches(pattern, module) for pattern in keep):
            reason: str | None = ASKED
        elif ref.dtype not in FLOATS:
            reason = TYPE
        elif (ref.key, ref.offset) in places:
            reason = TIED
        else:
            reason = _by_name(module) or _by_shape(module, ref, weights.get(f"{module}.bias"), vocabularies, conv1d)
        if reason is None:
            quantized.append(name)
        else:
            kept[module] = reason
    return Layers(quantized, kept)


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern of ``keep`` means a module, by its name or by that of its weight."""
    return fnmatchcase(module, pattern) or fnmatchcase(module + _WEIGHT, pattern)


def class_of(name: str) -> str:
    """The kind of layer that has a weight: the last part of its module's name that is not a number."""
    parts = name.removesuffix(_WEIGHT).split(".")
    return next((part for part in reversed(parts) if not part.isdecimal()), parts[-1])


def _by_name(module: str) -> str | None:
    parts = module.split(".")
    if "emb" in parts[-1].lower() or parts[-1] in _EMBEDDINGS:
        return EMBEDDING
    if parts[-1] in _ROUTERS:
        return ROUTER
    outside = parts[: next((at for at, part in enumerate(parts) if part.isdecimal()), len(parts))]
    # Whole models are also called "decoder" and "output".
    last = outside == parts and parts[-1] in _HEADS
    return HEAD if last or any(part.endswith(_HEAD_ENDINGS) for part in outside) else None


def _by_shape(
    module: str, ref: TensorRef, bias: TensorRef | None, vocabularies: frozenset[int], conv1d: bool
) -> str | None:
    if (conv1d and module.rpartition(".")[2] in _CONV1D) or _is_transposed(ref, bias):
        return TRANSPOSED
    return EMBEDDING if ref.shape[0] in vocabularies and not any(map(str.isdecimal, module.split("."))) else None


def _is_transposed(ref: TensorRef, bias: TensorRef | None) -> bool:
    return bias is not None and bias.shape != ref.shape[:1] and bias.shape == ref.shape[1:]


def _holds_conv1d(weights: Mapping[str, TensorRef], config: Mapping[str, Any]) -> bool:
    """Whether matrices with GPT-2's names are transposed. A square one does not tell: it follows the others."""
    return config.get("model_type") in _CONV1D_MODELS or any(
        module.rpartition(".")[2] in _CONV1D
        and len(ref.shape) == 2
        and _is_transposed(ref, weights.get(f"{module}.bias"))
        for name, ref in weights.items()
        if (module := name.removesuffix(_WEIGHT)) != name
    )


def _vocabularies(config: Mapping[str, Any]) -> frozenset[int]:
    """Sizes of vocabularies in a configuration and in the ones nested in it."""
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    return frozenset(size for part in parts if isinstance(size := part.get("vocab_size"), int))


def summary(scheme: Scheme, errors: Mapping[str, QuantizationError], layers: Layers) -> dict[str, Any]:
    """The settings, the error of all weights, by kind of layer and by tensor (worst first), and what was kept.

    Every error has elements, max_relative, rms_relative, snr_db (None without an error) and zeroed; see
    ``QuantizationError``. ``kept`` gives the reason for each module whose matrix stayed as it is.
    """
    classes: dict[str, list[QuantizationError]] = defaultdict(list)
    for name, error in errors.items():
        classes[class_of(name)].append(error)
    by_class = [
        {"class": kind, "tensors": len(own), **QuantizationError.total(own).figures()} for kind, own in classes.items()
    ]
    by_tensor = [{"tensor": name, **error.figures()} for name, error in errors.items()]
    return {
        "dtype": scheme.dtype.label,
        "scale": scheme.scale,
        "per": scheme.per,
        "all": {"tensors": len(errors), **QuantizationError.total(errors.values()).figures()},
        "classes": sorted(by_class, key=_noise),
        "tensors": sorted(by_tensor, key=_noise),
        "kept": dict(layers.kept),
    }


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The summary for a terminal."""
    whole, worst = facts["all"], facts["tensors"][0]
    yield f"quantised   {whole['tensors']:,} matrices to {facts['dtype']}, {facts['scale']} scales per {facts['per']}"
    yield f"error       {_error(whole)}"
    for row in facts["classes"]:
        yield f"            {row['class']} ({row['tensors']:,}): {_error(row)}"
    yield f"worst       {worst['tensor']}: {_error(worst)}"
    reasons: dict[str, list[str]] = defaultdict(list)
    for module, reason in facts["kept"].items():
        reasons[reason].append(module)
    for reason, modules in reasons.items():
        more = f" and {len(modules) - 1:,} more" if len(modules) > 1 else ""
        yield f"bf16        {modules[0]}{more}: {reason}"


def _noise(facts: Mapping[str, Any]) -> float:
    return float("inf") if facts["snr_db"] is None else float(facts["snr_db"])


def _error(facts: Mapping[str, Any]) -> str:
    if facts["snr_db"] is None:
        return "none"
    zeroed = f", {facts['zeroed'] / facts['elements']:.2g} of the weights became 0" if facts["zeroed"] else ""
    return (
        f"SNR {facts['snr_db']:.1f} dB, relative error of a weight RMS {facts['rms_relative']:.3g}, "
        f"max {facts['max_relative']:.3g}{zeroed}"
    )
