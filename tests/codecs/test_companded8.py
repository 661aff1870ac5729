"""companded8 against exact fractions, in which every fp32 operation is rounded once, by hand."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from ckpt8.codecs.base import TILE
from ckpt8.codecs.companded8 import Companded8, reference
from ckpt8.core.errors import RefusedError, UsageError
from ckpt8.core.tensors import DType, Role, TensorSpec

HALF = Fraction(1, 2)
TWO = Fraction(2)
SMALLEST_MOMENT1 = TWO**-100
SMALLEST_ROOT2 = TWO**-50

SIGNED = (Companded8(), Companded8(Q=31))
UNSIGNED = (Companded8(signed=False, Q=255), Companded8(signed=False, Q=63, p=0.5))
CODECS = SIGNED + UNSIGNED
each = pytest.mark.parametrize("codec", CODECS, ids=repr)
each_signed = pytest.mark.parametrize("codec", SIGNED, ids=repr)
each_unsigned = pytest.mark.parametrize("codec", UNSIGNED, ids=repr)
each_dtype = pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda dtype: dtype.label)


# --- the model --------------------------------------------------------------------------------------------------


def exponent_of(a: Fraction) -> int:
    """floor(log2(a)) of a positive fraction."""
    e = a.numerator.bit_length() - a.denominator.bit_length()
    return e if TWO**e <= a else e - 1


def rounded(q: Fraction, bits: int = 24) -> Fraction:
    """To the nearest float of ``bits`` significant bits and fp32's exponents, ties to even."""
    if q == 0:
        return q
    step = TWO ** (max(exponent_of(abs(q)), -126) - bits + 1)
    return round(q / step) * step


def root(q: Fraction) -> Fraction:
    """The correctly rounded fp32 square root."""
    if q == 0:
        return q
    step = TWO ** (exponent_of(q) // 2 - 23)
    square = q / step**2
    below = math.isqrt(math.floor(square))
    return (below if square <= (below + HALF) ** 2 else below + 1) * step


@dataclass
class Model:
    signed: bool
    top: int
    fourth_root: bool

    @classmethod
    def of(cls, codec):
        return cls(codec.signed, codec.Q, codec.p == 0.5)

    def scale(self, values: list[Fraction]) -> Fraction:
        """``values`` are the moments; the scale of x, which is the moment or its root."""
        if self.signed:
            largest = max(abs(m) for m in values)
            return Fraction(0) if largest < SMALLEST_MOMENT1 else rounded(largest, 9)
        largest = root(max(values))
        return rounded(max(largest, SMALLEST_ROOT2), 9) if largest else largest

    def code(self, value: Fraction, scale: Fraction) -> int:
        if scale == 0:
            return 0
        n = rounded((value if self.signed else root(value)) / scale)
        t = rounded(2 * n / rounded(1 + abs(n))) if self.signed else root(n) if self.fourth_root else n
        code = math.floor(rounded(rounded(self.top * t) + HALF))
        code = min(max(code, -self.top if self.signed else 0), self.top)
        return max(code, 1) if not self.signed and value > 0 else code

    def value(self, code: int, scale: Fraction) -> Fraction:
        y = rounded(Fraction(code, self.top))
        if self.signed:
            return rounded(scale * rounded(y / rounded(2 - abs(y))))
        r = rounded(scale * (rounded(y * y) if self.fourth_root else y))
        return rounded(r * r)


def scale16(scale: Fraction) -> int:
    """8 bits of exponent, 8 of mantissa; scales are normal numbers or zero."""
    if scale == 0:
        return 0
    e = exponent_of(scale)
    return ((e + 127) << 8) | int(scale / TWO ** (e - 8)) - 256


def spec(codec, numel, dtype=DType.FLOAT32) -> TensorSpec:
    return TensorSpec("m", Role.MOMENT1 if codec.signed else Role.MOMENT2, dtype, (numel,))


def decode(codec, parts, dtype=DType.FLOAT32) -> torch.Tensor:
    return codec.decode(parts, spec(codec, parts["codes"].numel(), dtype))


def assert_as_modelled(codec, x: torch.Tensor) -> None:
    """Codes, scales and decoded fp32 values are those of the model, to the last bit."""
    model = Model.of(codec)
    parts = codec.encode(x)
    decoded = decode(codec, parts).tolist()
    values = [Fraction(v) for v in x.double().tolist()]
    codes, scales, expected = [], [], []
    for start in range(0, len(values), 32):
        group = values[start : start + 32]
        scale = model.scale(group)
        scales.append(scale16(scale))
        codes += [model.code(v, scale) for v in group]
        expected += [float(model.value(c, scale)) for c in codes[start:]]
    assert parts["scales"].to(torch.int32).tolist() == scales
    assert parts["codes"].tolist() == codes
    assert decoded == expected


def fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def neighbour(value: float, steps: int) -> float:
    """The positive fp32 number some steps away."""
    return struct.unpack("<f", struct.pack("<i", struct.unpack("<i", struct.pack("<f", value))[0] + steps))[0]


def test_the_model_rounds_as_ieee_does():
    rng = random.Random(8)
    for _ in range(2000):
        value = rng.choice([-1, 1]) * rng.random() * 2.0 ** rng.randrange(-150, 127)
        assert float(rounded(Fraction(value))) == fp32(value)
    for value in (2.0**-149, 1.5 * 2.0**-149, 2.5 * 2.0**-149, 2.0**-126, 1 + 2.0**-24, 1 + 3 * 2.0**-24):
        assert float(rounded(Fraction(value))) == fp32(value)
    for _ in range(2000):
        value = fp32(rng.random() * 2.0 ** rng.randrange(-148, 127))
        assert float(root(Fraction(value))) == fp32(math.sqrt(value))


def decades(codec, groups: int, seed: int, low: float = -45, high: float = 38) -> torch.Tensor:
    """Groups whose magnitudes run from 1e-45 to 1e38, with all kinds of spread inside a group."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.linspace(low, high, groups, dtype=torch.float64).unsqueeze(1)
    spread = torch.randint(0, 4, (groups, 1), generator=generator).double() * 2
    x = 10 ** (centre - spread * torch.rand(groups, 32, generator=generator, dtype=torch.float64))
    if codec.signed:
        x *= torch.randn(groups, 32, generator=generator).sign().double()
    x[torch.rand(groups, 32, generator=generator) < 0.03] = 0.0
    return x.float().flatten()


def awkward(codec) -> torch.Tensor:
    """All-zero groups, one outlier per group, denormals, groups at the floors, a short last group."""
    sign = -1.0 if codec.signed else 1.0
    floor = 2.0**-100
    groups = [
        [0.0] * 32,
        [-0.0] * 32,
        [1e-45] * 32,
        [1e-45] * 31 + [1e38],
        [sign * 1e38] + [1e-3] * 31,
        [1.0] + [0.0] * 31,
        [1.0] + [1e-45] * 31,
        [k * 1.4e-45 for k in range(32)],
        [sign * k * 1.3e-39 for k in range(32)],
        [neighbour(floor, -1)] * 16 + [0.0] * 16,
        [floor] + [neighbour(floor, -1)] * 31,
        [sign * floor] + [floor / 3] * 31,
        [neighbour(floor, 1)] + [1e-44] * 31,
        [neighbour(floor, 40_000)] + [floor / 100] * 31,
        [2.0**k for k in range(-16, 16)],
        [sign * 1.5 * 2.0 ** (-4 * k) for k in range(32)],
        [0.1, 0.2, sign * 0.3, 1e-9, 0.0],
    ]
    return torch.tensor([value for group in groups for value in group])


@pytest.mark.slow
@each
def test_bits_equal_the_model_over_all_magnitudes(codec):
    assert_as_modelled(codec, decades(codec, 167, seed=1))


@each
def test_bits_equal_the_model_in_awkward_groups(codec):
    assert_as_modelled(codec, awkward(codec))


@each
@pytest.mark.parametrize("numel", [1, 2, 31, 33, 65])
def test_bits_equal_the_model_in_short_groups(codec, numel):
    x = decades(codec, 3, seed=numel, low=-6, high=0)[-numel:]
    assert_as_modelled(codec, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", [Companded8(Q=1), Companded8(Q=100), Companded8(signed=False, Q=1), Companded8(signed=False, Q=200, p=0.5)]
)
def test_bits_equal_the_model_for_other_levels(codec):
    assert_as_modelled(codec, decades(codec, 40, seed=5))
    assert_as_modelled(codec, awkward(codec))


def boundaries(codec) -> torch.Tensor:
    """Values a few fp32 steps around every place where the code changes, in groups with scale 1."""
    values = []
    for k in range(codec.Q):
        y = Fraction(2 * k + 1, 2 * codec.Q)
        at = y / (2 - y) if codec.signed else (y if codec.p == 1 else y * y) ** 2
        near = [neighbour(fp32(float(at)), step) for step in range(-6, 7)]
        values += [sign * v for v in near for sign in ((1, -1) if codec.signed else (1,))]
    rows = [values[i : i + 31] for i in range(0, len(values), 31)]
    return torch.tensor([v for row in rows for v in [1.0, *row]])


@pytest.mark.by_default("Companded8(signed=True, Q=31, p=1)", "Companded8(signed=False, Q=63, p=0.5)")
@each
def test_bits_equal_the_model_where_the_code_changes(codec):
    """Here the order and the rounding of the operations decide: a fused multiply-add would differ."""
    x = boundaries(codec)
    assert_as_modelled(codec, x)
    codes = codec.encode(x)["codes"].to(torch.int32)
    assert set(codes.tolist()) == set(range(-codec.Q if codec.signed else 1, codec.Q + 1))


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """float64 of 16-bit scales, by exponent and mantissa."""
    u = scales.to(torch.int64)
    return torch.where(u > 0, torch.ldexp(1 + (u & 0xFF).double() / 256, (u >> 8) - 127), 0.0)


def tops(codec) -> torch.Tensor:
    """Largest values of a group: around every place where the scale rounds, in several binades."""
    found = []
    for exponent in (-60, -49, -1, 0, 1, 62):
        for k in range(256):
            tie = 1 + (2 * k + 1) / 512
            found += [neighbour(fp32(tie), step) * 2.0**exponent for step in (-2, -1, 0, 1, 2)]
            found.append((1 + k / 256) * 2.0**exponent)
    x = torch.tensor(found, dtype=torch.float64)
    if not codec.signed:
        x = x[x >= 2.0**-49].square().clamp(max=3.3e38)
    return x.float()


@each
def test_scales_round_to_nearest_even(codec):
    top = tops(codec)
    x = torch.zeros(len(top), 32)
    x[:, 5] = -top if codec.signed else top
    parts = codec.encode(x)
    largest = top.double() if codec.signed else top.double().sqrt().float().double()
    mantissa, exponent = torch.frexp(largest)
    expected = torch.ldexp(torch.round(mantissa * 512), exponent - 9)
    assert torch.equal(scale_values(parts["scales"]), expected)


@each
def test_the_largest_of_a_group_takes_the_top_code_and_decodes_to_the_scale(codec):
    top = tops(codec)
    x = (top / 3).unsqueeze(1).repeat(1, 32)
    x[:, 9] = -top if codec.signed else top
    parts = codec.encode(x)
    codes = parts["codes"].view(-1, 32).to(torch.int32)
    assert bool((codes[:, 9] == (-codec.Q if codec.signed else codec.Q)).all())
    assert bool((codes[:, 8].abs() < codec.Q).all())
    scale = scale_values(parts["scales"])
    decoded = decode(codec, parts).view(-1, 32)[:, 9]
    assert torch.equal(decoded.double(), -scale if codec.signed else scale.square().float().double())


@each_signed
def test_the_floor_of_first_moments(codec):
    floor = 2.0**-100
    for largest in (floor, neighbour(floor, 1), -floor):
        parts = codec.encode(torch.tensor([largest, floor / 2] + [0.0] * 30))
        assert parts["scales"].to(torch.int32).tolist() == [27 << 8]
        assert parts["codes"][0] == math.copysign(codec.Q, largest)
        assert decode(codec, parts)[0] == math.copysign(floor, largest)
    for largest in (neighbour(floor, -1), -neighbour(floor, -1), 1e-38, 1e-45):
        parts = codec.encode(torch.full((40,), largest))
        assert parts["scales"].to(torch.int32).tolist() == [0, 0]
        assert not parts["codes"].any()
        assert bits(decode(codec, parts)) == [0] * 40


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16).tolist()


@each_unsigned
def test_the_floor_of_second_moments(codec):
    smallest = 77 << 8  # 2^-50
    for v in (2.0**-100, neighbour(2.0**-100, -1), 1e-38, 1e-45):
        parts = codec.encode(torch.tensor([0.0, v] + [0.0] * 30))
        assert parts["scales"].to(torch.int32).tolist() == [smallest]
        assert [i for i, code in enumerate(parts["codes"].tolist()) if code] == [1]
        decoded = decode(codec, parts)
        assert 0 < float(decoded[1]) <= 2.0**-100
        assert bits(decoded[torch.arange(32) != 1]) == [0] * 31
    assert codec.encode(torch.tensor([2.0**-100]))["codes"].tolist() == [codec.Q]
    assert codec.encode(torch.tensor([2.0**-98]))["scales"].to(torch.int32).tolist() == [78 << 8]
    assert codec.encode(torch.zeros(40))["scales"].to(torch.int32).tolist() == [0, 0]


def expand(codec, y: torch.Tensor) -> torch.Tensor:
    """phi^-1 in float64, for 0 <= y."""
    if codec.signed:
        return y / (2 - y)
    return y if codec.p == 1 else y * y


def assert_within_bound(codec, x: torch.Tensor) -> None:
    """|x - x^| is at most half a code step there; at the top also the scale's half step; raised to 1: one step."""
    parts = codec.encode(x)
    decoded = decode(codec, parts)
    scale = scale_values(parts["scales"]).repeat_interleave(32)[: len(x)]
    code = parts["codes"].double().abs()
    original, restored = x.double(), decoded.double()
    if not codec.signed:
        original, restored = original.sqrt(), restored.sqrt()
    at = expand(codec, code / codec.Q)
    above = expand(codec, (code + 0.5) / codec.Q) - at
    above = torch.where(code == codec.Q, torch.full_like(above, 2.0**-9), above)
    below = at - expand(codec, (code - 0.5).clamp(min=0) / codec.Q)
    if not codec.signed:
        below = torch.where(code == 1, at, below)
    error = original.abs() - restored.abs()
    slack = 2e-6 * scale * at.clamp(min=1e-2) + 1e-50
    assert bool(((original * restored) >= 0).all())
    zero = scale == 0
    assert bool((original[zero].abs() < (2.0**-100 if codec.signed else 1e-50)).all())
    assert not restored[zero].any()
    assert bool((error <= above * scale + slack)[~zero].all())
    assert bool((-error <= below * scale + slack)[~zero].all())


@each
def test_errors_stay_within_half_a_step(codec):
    for seed in range(4):
        assert_within_bound(codec, decades(codec, 4001, seed=seed))
    assert_within_bound(codec, awkward(codec))
    assert_within_bound(codec, boundaries(codec))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_005, generator=generator) * 1e-4
    assert_within_bound(codec, x if codec.signed else x.square())


def test_the_worst_relative_errors_are_those_of_the_levels():
    """So that a bound computed from wrong codes cannot pass: the figures follow from Q alone."""
    x = torch.linspace(0, 1, 31 * 4000, dtype=torch.float64).float().view(-1, 31)
    x = torch.cat([x, torch.ones(4000, 1)], 1).flatten()
    for codec in CODECS:
        worst = float(
            (decode(codec, codec.encode(x if codec.signed else x.square())) ** (1 if codec.signed else 0.5) - x)
            .abs()
            .max()
        )
        q = codec.Q
        # The widest step is the topmost: phi^-1 is convex.
        expected = 1 - float(expand(codec, torch.tensor((q - 0.5) / q, dtype=torch.float64)))
        if not codec.signed and codec.p == 1:
            expected = 1 / q  # the lowest code, which everything below it is raised to
        assert expected * 0.98 < worst < expected * 1.001


@each
def test_decoding_keeps_order(codec):
    generator = torch.Generator().manual_seed(3)
    n = 31 * 3000
    x = torch.cat([torch.rand(n // 2, generator=generator), 10 ** (-40 * torch.rand(n - n // 2, generator=generator))])
    if codec.signed:
        x *= torch.randn(n, generator=generator).sign()
    x = x.sort().values.view(-1, 31)
    groups = torch.cat([x, torch.ones(len(x), 1)], 1)  # one scale for all of them
    parts = codec.encode(groups)
    assert set(parts["scales"].to(torch.int32).tolist()) == {127 << 8}
    decoded = decode(codec, parts).view(-1, 32)[:, :31].flatten()
    assert bool((decoded[1:] >= decoded[:-1]).all())
    assert decoded.unique().numel() > codec.Q * 0.9


@each_signed
def test_odd_symmetry_up_to_ties(codec):
    for x in (decades(codec, 4001, seed=6), boundaries(codec), awkward(codec)):
        plus, minus = codec.encode(x), codec.encode(-x)
        assert torch.equal(plus["scales"].to(torch.int32), minus["scales"].to(torch.int32))
        off = plus["codes"].to(torch.int32) + minus["codes"].to(torch.int32)
        assert set(off.tolist()) <= {0, 1}  # ties go towards +inf
        scale = scale_values(plus["scales"]).repeat_interleave(32)[: len(x)]
        n = x.double().abs()[off == 1] / scale[off == 1]
        place = codec.Q * 2 * n / (1 + n)
        assert bool(((place - place.floor() - 0.5).abs() < 2e-5).all())
    off = codec.encode(boundaries(codec))["codes"].int() + codec.encode(-boundaries(codec))["codes"].int()
    assert 0 < int(off.sum()) < len(off) // 4


@pytest.mark.parametrize("codec", [*UNSIGNED, Companded8(signed=False, Q=1), Companded8(signed=False, Q=255, p=0.5)])
@each_dtype
def test_no_second_moment_becomes_zero(codec, dtype):
    for x in (decades(codec, 4001, seed=7), awkward(codec)):
        v = x.to(dtype.torch)
        decoded = decode(codec, codec.encode(v), dtype)
        assert torch.equal(decoded > 0, v > 0)
        assert not decoded[v == 0].any()


@each_unsigned
def test_second_moments_are_not_under_estimated_beyond_their_step(codec):
    """Too small a v makes too large a step: a lost outlier or a clipped top would show here."""
    v = decades(codec, 2001, seed=8, low=-28)
    decoded = decode(codec, codec.encode(v))
    ratio = (decoded.double() / v.double())[v > 0].sqrt()
    # The worst place is just below the boundary from code 1 to code 2.
    y = torch.tensor([1.0, 1.5], dtype=torch.float64)
    worst = expand(codec, y)[0] / expand(codec, y)[1]
    assert float(ratio.min()) >= float(worst) * (1 - 1e-5)


def test_dead_rows_stay_compressed():
    """Embedding rows that were never seen hold m = 5.6e-45 and v = 1.3e-44 in real checkpoints."""
    for codec in SIGNED:
        m = torch.full((256,), 5.6e-45)
        assert bits(m) == [4] * 256
        assert not decode(codec, codec.encode(m)).any()
    for codec in UNSIGNED:
        v = torch.full((256,), 1.3e-44)
        assert bits(v) == [9] * 256
        decoded = decode(codec, codec.encode(v))
        assert bool((decoded > 0).all())
        assert float(decoded.max()) < 2.0**-100  # sqrt is below 1e-15: nothing beside an eps of 1e-8


def assert_stable(codec, parts, dtype) -> None:
    again = codec.encode(decode(codec, parts, dtype))
    assert torch.equal(again["codes"], parts["codes"])
    assert torch.equal(again["scales"].to(torch.int32), parts["scales"].to(torch.int32))


@each
@each_dtype
def test_random_groups_are_stable(codec, dtype):
    for seed in range(3):
        x = decades(codec, 6001, seed=20 + seed, low=-44, high=37)
        assert_stable(codec, codec.encode(x.to(dtype.torch)), dtype)
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(100_001, generator=generator) * 1e-3
    x = x if codec.signed else x.square()
    assert_stable(codec, codec.encode(x.to(dtype.torch)), dtype)
    assert_stable(codec, codec.encode(awkward(codec).to(dtype.torch)), dtype)


@each
def test_every_code_under_every_scale_mantissa_is_stable(codec):
    codes = [c for c in range(-codec.Q if codec.signed else 0, codec.Q + 1)]  # noqa: C416
    rows = torch.tensor([[codec.Q, *(codes[i : i + 31] + [0] * 31)[:31]] for i in range(0, len(codes), 31)])
    exponents = [27, 28, 77, 127, 180, 254] if codec.signed else [77, 78, 127, 150, 189]
    scales = torch.tensor([(e << 8) | k for e in exponents for k in range(256)])
    parts = {
        "codes": rows.repeat(len(scales), 1).flatten().to(torch.int8 if codec.signed else torch.uint8),
        "scales": scales.repeat_interleave(len(rows)).to(torch.int32).to(torch.uint16),
    }
    assert_stable(codec, parts, DType.FLOAT32)


@each
def test_every_bf16_as_the_largest_is_stable(codec):
    top = torch.arange(0x7F00, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(top), 32, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = top, top / 3
    if codec.signed:
        x[:, 2] = -top / 50
    assert_stable(codec, codec.encode(x), DType.BFLOAT16)


@each
def test_bf16_is_widened_first_and_rounded_last(codec):
    x = torch.cat([decades(codec, 2001, seed=9, high=37), awkward(codec)]).bfloat16()
    parts, wide = codec.encode(x), codec.encode(x.float())
    assert torch.equal(parts["codes"], wide["codes"])
    assert torch.equal(parts["scales"].to(torch.int32), wide["scales"].to(torch.int32))
    narrow, full = decode(codec, parts, DType.BFLOAT16), decode(codec, parts, DType.FLOAT32)
    assert narrow.dtype == torch.bfloat16
    pattern = full.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    nearest_even = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
    assert torch.equal(narrow.view(torch.int16).to(torch.int64) & 0xFFFF, nearest_even)


def refused(codec, values) -> bool:
    x = torch.cat([torch.full((TILE,), 0.5), torch.tensor(values)])
    try:
        codec.encode(x)
    except RefusedError:
        return True
    return False


@each
def test_not_finite_values_are_refused(codec):
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        assert refused(codec, [0.5, value, 0.5])
        assert refused(codec, [value] * 32)
    assert not refused(codec, [0.5, 1e-45, 0.0])


def test_no_nan_rounds_to_a_finite_scale():
    """Neither do those of all ones, which CUDA devices make of every NaN."""
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert bool((reference._round_scale(nans) >= 0xFF00).all())


@each_unsigned
def test_negative_second_moments_are_refused(codec):
    for value in (-1e-45, -1e-30, -1.0, -3e38):
        assert refused(codec, [0.5, value])
        assert refused(codec, [value])
    assert not refused(codec, [-0.0, 0.5])
    assert not refused(codec, [-0.0] * 33)


@each_signed
def test_first_moments_whose_scale_overflows_are_refused(codec):
    # A mantissa of 511.5/256 is a tie that goes to 512/256 = 2, the next exponent, which is infinity.
    first = 511.5 / 256 * 2.0**127
    for sign in (1, -1):
        assert refused(codec, [sign * first])
        assert refused(codec, [sign * neighbour(first, 1)])
        largest = sign * neighbour(first, -1)
        assert not refused(codec, [largest])
        assert decode(codec, codec.encode(torch.tensor([largest])))[0] == sign * 511 / 256 * 2.0**127


@each_unsigned
def test_second_moments_whose_decoded_maximum_overflows_are_refused(codec):
    # The largest scale with a finite square is 511/256 * 2^63; roots from 511.5/256 * 2^63 on round to 2^64.
    limit = Fraction(1023, 512) * TWO**63
    first = fp32(float(limit**2) * (1 - 1e-6))
    while root(Fraction(first)) < limit:
        first = neighbour(first, 1)
    last = neighbour(first, -1)
    assert root(Fraction(last)) < limit <= root(Fraction(first))
    assert math.isfinite(first)
    assert refused(codec, [first])
    assert refused(codec, [neighbour(first, 1)])
    assert refused(codec, [3.4028234e38])
    assert not refused(codec, [last])
    assert decode(codec, codec.encode(torch.tensor([last])))[0] == fp32((511 / 256 * 2.0**63) ** 2)
    narrow = decode(codec, codec.encode(torch.tensor([last])), DType.BFLOAT16)
    assert bool(narrow.isfinite().all())


def test_types_and_roles():
    for dtype in DType:
        wide = dtype in (DType.FLOAT32, DType.BFLOAT16)
        for role, signed, unsigned in [
            (Role.MOMENT1, True, False),
            (Role.MOMENT2, False, True),
            (Role.WEIGHT, True, True),
            (Role.OTHER, True, True),
        ]:
            place = TensorSpec("m", role, dtype, (64,))
            assert Companded8().accepts(place) is (wide and signed)
            assert Companded8(signed=False, Q=255).accepts(place) is (wide and unsigned)


OF_SIGNED = [{"Q": 0}, {"Q": -1}, {"Q": 128}, {"Q": 31.0}, {"Q": "31"}, {"p": 0.5}, {"p": 2}]
OF_UNSIGNED = [{"Q": 0}, {"Q": 256}, {"Q": 63, "p": 0.25}, {"Q": 63, "p": 0}, {"Q": 63, "p": None}]


@pytest.mark.parametrize("fields", [*OF_SIGNED, *({"signed": False, **each} for each in OF_UNSIGNED)], ids=str)
def test_parameters_that_do_not_exist(fields):
    with pytest.raises(UsageError):
        Companded8(**fields)


def test_the_refusal_of_a_power_names_the_powers_of_this_sign():
    with pytest.raises(UsageError, match=r"p must be 1 for first moments \(signed\), not 0\.5$"):
        Companded8(p=0.5)
    with pytest.raises(UsageError, match=r"p must be 1 or 0\.5 for second moments \(unsigned\), not 2$"):
        Companded8(signed=False, Q=255, p=2)
