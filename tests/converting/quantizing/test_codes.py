"""Scales and codes against their definition in float64, whatever the order of the elements in memory."""

from __future__ import annotations

import math

import pytest
import torch

from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import Held, TensorRef
from ckpt8.converting.quantizing import (
    QuantizationError,
    Scheme,
    encode_matrix,
    find_scales,
    make_scheme,
    measured,
    quantize,
    row_parts,
)
from ckpt8.core.tensors import DType

FP8, INT8 = DType.FLOAT8_E4M3FN, DType.INT8
SCHEMES = [
    Scheme(dtype, scale, per)
    for dtype, scale in ((FP8, "absmax"), (FP8, "unit"), (INT8, "absmax"))
    for per in ("channel", "tensor")
]
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
BITS = E4M3.isfinite().nonzero().view(-1)


def nearest_e4m3(x):
    """Nearest value of the type, and among two as near the one with an even code, in float64."""
    x = x.double().clamp(-448, 448)
    values = E4M3[BITS]
    distance = (x.view(-1, 1) - values).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    found = values[(nearest * (2 - BITS % 2)).argmax(1)]
    return torch.copysign(found, x.view(-1)).view(x.shape)


def composite(x, dtype=DType.FLOAT32, transposed=False):
    data = Composite("run")
    stored = x.t().contiguous() if transposed else x
    key = data.add(Held(bytes(stored.view(torch.uint8).flatten().tolist())), dtype)
    return data, TensorRef(key, dtype, 0, tuple(x.shape), (1, x.shape[0]) if transposed else (x.shape[1], 1))


def encoded(data, ref, scheme):
    scales = find_scales(data, ref, scheme, lambda _: None)
    codes, error = encode_matrix(data, ref, scales, scheme)
    assert codes.dtype is scheme.dtype
    return data.elements(codes, 0, ref.numel).view(ref.shape), scales, error


def test_codes_of_float8_are_the_nearest():
    """Every half-way point between two values of the type, its neighbours in fp32, and what lies beyond the largest."""
    values = E4M3[BITS].unique()
    middle = ((values[1:] + values[:-1]) / 2).float()
    x = torch.cat([middle, middle.nextafter(torch.tensor(1e9)), middle.nextafter(torch.tensor(-1e9)), values.float()])
    x = torch.cat([x, torch.tensor([449.0, -1e30, 1e-30, -1e-30, 2.0**-10, 3 * 2.0**-11])])
    for scale in (1.0, 2.0**-9, 2.0**20):
        found = quantize(x * scale, torch.tensor([scale]), Scheme(FP8))
        assert torch.equal(found.double(), nearest_e4m3(x))


def test_codes_of_int8_are_the_nearest():
    x = torch.arange(-1300, 1301) / 10
    x = torch.cat([x, torch.arange(-140, 141) + 0.5])
    found = quantize(x * 0.25, torch.tensor([0.25]), Scheme(INT8, per="tensor"))
    expected = [max(-127, min(127, round(float(value)))) for value in x]
    assert found.tolist() == expected


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("transposed", [False, True])
def test_definition(scheme, transposed, monkeypatch):
    """Also where a tile ends inside a row: the tiles are small here."""
    monkeypatch.setattr("ckpt8.converting.quantizing.FRAME", 50)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(37, 23, generator=generator) * torch.logspace(-6, 3, 37).view(-1, 1)
    codes, scales, error = encoded(*composite(x, transposed=transposed), scheme)
    wide = x.double()
    dims = 1 if scheme.per == "channel" else (0, 1)
    largest, rms = wide.abs().amax(dims), wide.square().mean(dims).sqrt()
    if scheme.scale == "absmax":
        expected = (largest / scheme.largest).bfloat16()
    else:
        expected = 2.0 ** torch.maximum(rms.log2().round(), (largest / 448).log2().ceil())
    assert scales.dtype is torch.float32
    assert scales.shape == ((37, 1) if scheme.per == "channel" else (1,))
    assert torch.equal(scales.double().view(expected.shape), expected.double())
    assert torch.equal(scales, scales.bfloat16().float())
    ratio = x / scales
    assert torch.equal(codes.double(), nearest_e4m3(ratio) if scheme.dtype is FP8 else ratio.round().double())
    if scheme.scale == "absmax":
        assert torch.equal(codes.double().abs().amax(dims), torch.full_like(largest, scheme.largest))
    else:
        assert float((wide / scales).abs().max()) <= 448
    decoded = codes.double() * scales.double()
    relative = (decoded - wide).abs() / wide.abs()
    assert error.count == x.numel()
    assert error.zeroed == int((decoded == 0).sum())
    assert error.max_relative == pytest.approx(float(relative.max()), rel=1e-5)
    assert error.rms_relative == pytest.approx(float(relative.square().mean().sqrt()), rel=1e-5)
    noise = float((decoded - wide).square().sum() / wide.square().sum())
    assert error.snr_db == pytest.approx(-10 * math.log10(noise), rel=1e-4)


def test_unit_scales_give_an_rms_near_1():
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(2)) * torch.logspace(-20, 20, 64).view(-1, 1)
    _, scales, error = encoded(*composite(x), Scheme(FP8, "unit"))
    rms = (x / scales).square().mean(1).sqrt()
    assert 0.7 < float(rms.min()) <= float(rms.max()) < 1.42
    assert error.snr_db > 30


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_zeros_and_of_the_smallest_numbers(scheme):
    x = torch.zeros(4, 6)
    x[1], x[2], x[3] = 2.0**-149, -(2.0**-127), 2.0**126
    codes, scales, _ = encoded(*composite(x), scheme)
    assert bool(scales.isfinite().all())
    assert float(scales.min()) >= 2.0**-126
    decoded = codes.float() * scales
    assert bool(decoded.isfinite().all())
    assert torch.equal(decoded[0], torch.zeros(6))
    if scheme.per == "channel":
        assert float(scales[0]) == 1.0
        assert float((decoded[3] / x[3] - 1).abs().max()) < 2.0**-8
        # Half of the smallest code times the smallest scale, which is as fine as it gets.
        assert float((decoded[1:3] - x[1:3]).abs().max()) <= 2.0**-127


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**127])
def test_what_has_no_scale(value):
    x = torch.ones(5, 7)
    x[3, 2] = value
    for scheme in SCHEMES:
        assert find_scales(*composite(x), scheme, lambda _: None) is None
    x[3, 2] = 2.0**126
    for scheme in SCHEMES:
        assert find_scales(*composite(x), scheme, lambda _: None) is not None


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.BFLOAT16, DType.FLOAT16])
def test_other_types_are_widened(dtype):
    x = torch.randn(9, 31, generator=torch.Generator().manual_seed(3)).to(dtype.torch)
    found = encoded(*composite(x, dtype), Scheme())
    expected = encoded(*composite(x.float()), Scheme())
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


def test_no_error_has_no_ratio():
    error = measured(torch.ones(8), torch.ones(8))
    assert (error.snr_db, error.max_relative, error.zeroed) == (None, 0.0, 0)
    assert QuantizationError().rms_relative == 0.0


def test_parts_of_rows():
    for start, stop in ((0, 20), (3, 20), (3, 4), (5, 10), (0, 0), (4, 6), (2, 17)):
        parts = list(row_parts(start, stop, 5))
        assert [k for _, _, begin, end in parts for k in range(begin, end)] == list(range(start, stop))
        for row, rows, begin, end in parts:
            assert begin // 5 == row
            assert (end - 1) // 5 == row + rows - 1
            assert rows == 1 or (begin % 5 == 0 and end % 5 == 0)
        assert len(parts) <= 3


def test_defaults():
    assert make_scheme(None, None, None) == make_scheme(FP8, "absmax", "channel") == Scheme()
    assert make_scheme(INT8, None, None) == Scheme(INT8, "absmax", "tensor")
