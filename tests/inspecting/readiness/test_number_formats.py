"""Rounding to every number format against a search among all its numbers, and the figures of one tensor from that."""

import math

import pytest
import torch
from readiness_kit import all_finite, expected, normal, numbers, round_one, same

from ckpt8.inspecting.readiness import CREST, FORMATS, RAW, SCALED, Casts, Extent, round_to_odd, scaled_by
from ckpt8.inspecting.tensors import TILE, tiles

by_format = pytest.mark.parametrize("number_format", FORMATS, ids=lambda each: each.id)


def check_rounding(number_format, x):
    """Whatever is rounded, and what is counted as an overflow, is as the search says."""
    rounded = number_format.round(x)
    overflows = number_format.overflows(x.abs()).tolist()
    assert rounded.dtype is torch.float32
    for value, found, over in zip(x.tolist(), rounded.tolist(), overflows, strict=True):
        wanted, wanted_over, _, _ = round_one(number_format.id, value)
        assert (found, over) == (wanted, wanted_over), value
        assert math.copysign(1, found) == math.copysign(1, wanted), value


@by_format
def test_range_is_that_of_the_numbers(number_format):
    (*_, last, largest, beyond), smallest_normal = numbers(number_format.id)
    assert (number_format.largest, number_format.smallest_normal) == (largest, smallest_normal)
    assert number_format.step == largest - last == beyond - largest


@pytest.mark.by_default(most=4)
@by_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number(number_format, dtype):
    check_rounding(number_format, all_finite(dtype))


@by_format
def test_ties_and_their_neighbours(number_format):
    line = torch.tensor(numbers(number_format.id)[0], dtype=torch.float64)
    if len(line) > 2048:
        line = line[torch.linspace(0, len(line) - 1, 2048).long()[:-1].unsqueeze(1) + torch.tensor([0, 1])].view(-1)
        ties = (line[::2] + line[1::2]) / 2
    else:
        ties = (line[:-1] + line[1:]) / 2
    ties = torch.cat([ties, -ties])
    check_rounding(number_format, ties)
    single = ties.float()
    for x in (ties, single[(single != 0) & single.isfinite()]):
        for end in (-math.inf, math.inf):
            near = torch.nextafter(x, torch.full_like(x, end))
            check_rounding(number_format, near[near.isfinite()])


@by_format
def test_special_values(number_format):
    largest, step = number_format.largest, number_format.step
    tie = largest + step / 2
    small = [2.0**-149, -(2.0**-149), 2.0**-126]
    values = [0.0, -0.0, largest, -largest, tie, -tie, *small, 3.4e38, -3.4e38, 1e300, 5e-324]
    check_rounding(number_format, torch.tensor(values, dtype=torch.float64))
    check_rounding(number_format, torch.tensor(values, dtype=torch.float64)[:-2].float())


@by_format
def test_ideal_is_what_a_normal_distribution_gets(number_format):
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if number_format.mantissa is None:
        x = x.clamp(-CREST, CREST) * (127 / CREST)
    error = number_format.round(x).double() - x
    snr = 10 * math.log10(float(x.square().sum() / error.square().sum()))
    assert abs(snr - number_format.ideal_snr) < 0.1


@pytest.mark.parametrize("number_format", [each for each in FORMATS if each.mantissa is not None], ids=lambda f: f.id)
def test_worst_normal_number_is_at_the_floor(number_format):
    """Half a step above a power of two: no normal number has a larger relative error."""
    bits = number_format.mantissa
    worst = torch.tensor([1 + 2.0 ** -(bits + 1)])
    error = float(number_format.round(worst) - worst)
    snr = 20 * math.log10(float(worst) / abs(error))
    assert math.isclose(snr, 20 * math.log10(2 ** (bits + 1) + 1))
    assert math.isclose(number_format.floor_snr, 20 * math.log10(2 ** (bits + 1)))
    assert number_format.floor_snr < snr < number_format.ideal_snr


def test_round_to_odd_is_never_on_a_tie_unless_it_was():
    values = [464.0, math.nextafter(464.0, 500), math.nextafter(464.0, 0), 1e-60, -1e-60, 1e300, -1e300, 0.1]
    x = torch.tensor(values, dtype=torch.float64)
    odd = round_to_odd(x)
    assert odd[0] == 464
    assert odd[1] > 464 > odd[2]
    assert odd[3] == 2.0**-149 == -odd[4]
    assert odd[5] == torch.finfo(torch.float32).max == -odd[6]
    assert abs(odd[7].double() - x[7]) < 2.0**-27


# The figures of one tensor, against rounding every element by itself


def measure(x, block=None):
    """Both passes over ``x``, in blocks."""
    blocks = x.split(block or max(len(x), 1))
    extent = Extent()
    casts = Casts(extent)
    for add in (extent.add, casts.add):
        for (tile,) in tiles(zip(blocks)):
            add(tile)
    return extent, casts.to_json()


def check(x):
    """Every figure of ``x``, which may hold NaN and infinities, is what its elements give one by one."""
    extent, figures = measure(x)
    finite = [value for value in x.tolist() if math.isfinite(value)]
    largest = max(map(abs, finite))
    rms = largest * math.sqrt(math.fsum((value / largest) ** 2 for value in finite) / len(finite))
    assert math.isclose(extent.rms, rms, rel_tol=1e-12)
    assert (extent.count, extent.nonfinite) == (len(finite), len(x) - len(finite))
    assert extent.unit == 2.0 ** round(-math.log2(rms))
    # In units of the RMS the search keeps clear of the ends of float64.
    for each in FORMATS:
        for kind, by in ((RAW, 1.0), (SCALED, extent.unit if each.scaling == "unit" else 127 / largest)):
            same(figures[each.id][kind], expected(each.id, finite, by, extent.unit), each.id, kind)
    return extent, figures


@pytest.mark.parametrize("scale", [1e-43, 1e-30, 1e-6, 0.02, 1.0, 300.0, 1e20])
def test_scales(scale):
    check(normal(600, scale=scale))


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_float64_beyond_float32(scale):
    check(normal(200).double() * scale)


def test_float64_between_the_numbers_of_float32_and_outliers_and_subnormals():
    """Values a hair beside the ties of fp16: by way of float32 they would fall onto them."""
    ties = 1 + (torch.arange(400, dtype=torch.float64) + 0.5) * 2.0**-10
    check(torch.cat([ties * (1 + 2.0**-45), ties * (1 - 2.0**-45)]))
    x = normal(500, scale=1e-6)
    x[::100] = 3e4
    x[7:12] = torch.tensor([2.0**-149, -(2.0**-140), 2.0**-127, 2.0**-133, 3.3e38])
    check(x)


def test_what_is_not_finite_is_counted_and_left_out():
    x = normal(300)
    extent, figures = check(
        torch.cat([torch.tensor([math.nan, math.inf]), x[:100], torch.tensor([-math.inf]), x[100:]])
    )
    assert extent.nonfinite == 3
    assert figures == measure(x)[1]


@pytest.mark.parametrize(
    "x", [torch.zeros(40), torch.full((3,), math.nan), torch.zeros(0)], ids=["zero", "nan", "none"]
)
def test_nothing_to_round(x):
    extent, figures = measure(x)
    assert (extent.nonzero, extent.unit, extent.rms) == (0, 1.0, 0.0)
    nothing = {"overflow": 0, "underflow": 0, "subnormal": 0, "snr_db": None}
    assert all(figures[each.id][kind] == nothing for each in FORMATS for kind in (RAW, SCALED))


def test_exact_values_make_no_noise():
    _, figures = measure(torch.tensor([0.0, 1.0, -2.0, 0.5]))
    assert all(figures[each.id][RAW]["snr_db"] is None for each in FORMATS if each.scaling == "unit")
    # 1/2 is a tie, and goes to 0: the noise is 1/4 of 21/4.
    assert figures["int8"][RAW]["underflow"] == 1 / 3
    assert math.isclose(figures["int8"][RAW]["snr_db"], 10 * math.log10(21))


@pytest.mark.parametrize("exponent", [-140, -60, -1, 0, 60, 126, 127, 149])
def test_scaling_rounds_nothing(exponent):
    low = max(-149, -126 - exponent - 20)
    x = torch.tensor([(1 + 2.0**-4 + 2.0**-23) * 2.0**k for k in range(low, 1, 7)]) * normal(1).sign()
    scaled = scaled_by(x, 2.0**exponent)
    assert all(math.ldexp(a, exponent) == b for a, b in zip(x.tolist(), scaled.tolist(), strict=True))


def test_blocks_and_powers_of_two_do_not_matter():
    """Where blocks and tiles end changes nothing, and unit scaling makes every scale the same scale."""
    x = normal(2 * TILE + 999, scale=0.3)
    whole, cut = measure(x), measure(x, 1000)
    figures = [measure(normal(2000, scale=1e-3) * 2.0**k)[1] for k in (-60, -20, 0, 30)]
    assert whole[0].unit == cut[0].unit
    for each in FORMATS:
        for kind in (RAW, SCALED):
            assert cut[1][each.id][kind] == pytest.approx(whole[1][each.id][kind], rel=1e-9)
        assert all(other[each.id][SCALED] == figures[0][each.id][SCALED] for other in figures)
