"""Symbols of less than a byte: every mode holds them, backends agree to the bit, the chosen mode is small.

Differences of parts follow the rule that FORMAT.md states, number by number, and come back.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt8.container import frames, kernels, packing, symbols, unpacking
from ckpt8.container.manifest import DIGITS, MOST_BITS, NO_TOP, SYMBOL_LIMIT, Mode, Packing
from ckpt8.container.plain_reader import plane_lengths, unpacked
from ckpt8.core.arrays import as_array, as_arrays, as_tensors
from ckpt8.core.errors import InputError, RefusedError

BACKENDS = ("torch", "numba")
MODES = [
    (raw, base, over, bits)
    for raw in range(3)
    for base in DIGITS
    for bits in ((0, *range(1, MOST_BITS + 1)) if raw == 0 else (0,))
    for over in range(4 - raw - (bits > 0))
]  # every form that a manifest may state


def holding(raw, base, over, bits=0, count=103, seed=0):
    """Symbols that a mode can just hold, some of them -1."""
    torch.manual_seed(seed)
    most = min((base - 1 + 256**over - 1 if over else base - 1) + 1 << 8 * raw + bits, SYMBOL_LIMIT - 1) - 1
    x = (torch.rand(count, dtype=torch.float64) ** 4 * most).to(torch.int32)
    x[3], x[::7] = most - 1, -1
    return x


def unpack(planes, how, where, backend):
    """The symbols in memory of the host; as tensors, which may be on another device, too."""
    row = {"x": as_array(torch.cat(planes))}
    found = torch.from_numpy(unpacking.unpacked(row, {"x": how}, where, backend)["x"])
    if backend == "torch":
        assert torch.equal(symbols.unpack(planes, how, where), found)
    return found


def total(differences, base, where, backend):
    return as_tensors(unpacking.total(as_arrays(differences), as_arrays(base), where, backend))


def fill(x, mode, backend):
    how = Packing(mode, len(x))
    row = torch.empty(sum(how.plane_lengths), dtype=torch.uint8)
    planes = symbols.split(row, how)
    if backend == "numba":
        kernels.fill(x.numpy(), mode, [plane.numpy() for plane in planes])
    else:
        symbols.write_planes(x, mode, planes)
    return planes


def pack(x, backend="numba"):
    """The row of planes in memory of the host, and how symbols are packed; torch has the same on any device."""
    rows, hows = packing.packed({"x": x.numpy()}, backend)
    row = torch.from_numpy(rows["x"])
    if backend == "torch":
        there, how = symbols.pack(x)
        assert how == hows["x"]
        assert torch.equal(there, row)
    return row, hows["x"]


def difference(parts, base, backend):
    """In memory of the host; torch has the same on any device."""
    found = as_tensors(packing.difference(as_arrays(parts), as_arrays(base), backend))
    if backend == "torch":
        there = symbols.difference(parts, base)
        assert all(x.dtype is parts[name].dtype and torch.equal(x, there[name]) for name, x in found.items())
    return found


@pytest.mark.by_default(most=4)
@pytest.mark.parametrize("shape", MODES)
@pytest.mark.parametrize("zero_first", [False, True])
def test_every_mode_holds_its_symbols(shape, zero_first):
    """What a reader of FORMAT.md alone finds in the planes is what they were made of."""
    x = holding(*shape)
    *form, bits = shape
    mode = Mode(*form, 0 if zero_first else int(x.max()) + 1, bits)
    found = {backend: fill(x, mode, backend) for backend in BACKENDS}
    planes = [bytes(plane.tolist()) for plane in found["torch"]]
    assert [bytes(plane.tolist()) for plane in found["numba"]] == planes
    assert [len(plane) for plane in planes] == plane_lengths(mode.stated, len(x))
    assert unpacked(planes, mode.stated, len(x)).tolist() == x.tolist()
    assert Mode.of(list(mode.stated)) == mode
    for backend in BACKENDS:
        assert torch.equal(unpack(found["torch"], Packing(mode, len(x)), "x", backend), x)


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7, 29])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_count(count, backend):
    for values in ([-1], [0], [0, 0, 1], [0, 1, -1, 5, 2], [0, 300, 4], [2**19 - 3, -1, 0]):
        x = torch.tensor((values * count)[:count], dtype=torch.int32)
        row, how = pack(x, backend)
        assert torch.equal(unpack(symbols.split(row, how), how, "x", backend), x)
        assert how.mode == Mode.of(list(how.mode.stated))


@pytest.mark.parametrize("bits", range(1, MOST_BITS + 1))
@pytest.mark.parametrize("count", [1, 7, 8, 9, 15, 16, 17, 4095, 4096, 4097, 4104, 8193])
def test_bits_of_any_count(count, bits):
    """Also where some of the eight symbols of an integer are missing, or all of them in its last places."""
    x, mode = holding(0, 256, 1, bits, max(count, 4))[:count], Mode(0, 256, 2, 0, bits)
    found = [[bytes(plane.tolist()) for plane in fill(x, mode, backend)] for backend in BACKENDS]
    assert found[0] == found[1]
    assert unpacked(found[0], mode.stated, count).tolist() == x.tolist()
    for backend in BACKENDS:
        assert torch.equal(unpack(fill(x, mode, backend), Packing(mode, count), "x", backend), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_default_device(backend):
    """Symbols stay where they are; what chooses the mode is on the CPU."""
    x = drawn("gauss", 60.0, 0.1, 4099)
    expected = pack(x, backend)
    assert expected[1].mode.bits
    with torch.device("meta"):
        row, how = pack(x, backend)
        back = unpack(symbols.split(row, how), how, "x", backend)
    assert how == expected[1]
    assert torch.equal(row, expected[0])
    assert torch.equal(back, x)


def drawn(name, scale, zeros, count):
    torch.manual_seed(1)
    normal = torch.randn(count, dtype=torch.float64)
    uniform = torch.rand(count, dtype=torch.float64)
    q = {
        "gauss": normal * scale,
        "laplace": -(uniform - 0.5).sign() * torch.log1p(-2 * (uniform - 0.5).abs()) * scale,
        "uniform": (2 * uniform - 1) * 1.7 * scale,
        "spiky": normal * scale * (1.2 * torch.randn(count, dtype=torch.float64)).exp(),
    }[name]
    q = q.round().clamp(-(2**18) + 1, 2**18 - 1).to(torch.int32)
    x = torch.where(q < 0, -2 * q - 1, 2 * q)
    x[torch.rand(count) < zeros] = -1
    return x


def holds(largest, raw, base, over, bits):
    """Whether planes hold the largest stored symbol, and none of them is unused."""
    rest = largest >> 8 * raw + bits
    most = [base - 1 + (256**k - 1) for k in range(4)]
    return rest <= most[over] and (not over or rest > most[over - 1]) and (not raw + bits or rest > 0)


def stored_bytes(x, mode):
    return stored(torch.cat(fill(x, mode, "numba")), Packing(mode, len(x)))


def stored(row, how):
    return sum(len(frame) for frame, _ in frames.encode_part("codes", row.numpy(), how))


@pytest.mark.parametrize("name", ["gauss", "laplace", "uniform", "spiky"])
@pytest.mark.parametrize("scale", [0.25, 0.7, 2.0, 9.0, 60.0, 2000.0])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_the_choice_is_within_2_percent_of_the_best(name, scale, zeros):
    """By the bytes that zstd really makes of every mode that holds the symbols; alike on both backends."""
    x = drawn(name, scale, zeros, 1 << 17)
    row, how = pack(x, "numba")
    again, same = pack(x, "torch")
    assert same == how
    assert torch.equal(row, again)
    largest, tops = int(x.max()), (int(x.max()) + 1, 0) if -1 in x else (NO_TOP,)
    modes = [
        Mode(raw, base, over, top, bits)
        for top in tops
        for raw, base, over, bits in MODES
        if holds(largest + (top >= 0), raw, base, over, bits)
    ]
    assert len(modes) >= 4
    sizes = {mode: stored_bytes(x, mode) for mode in modes}
    assert sizes[how.mode] <= 1.02 * min(sizes.values())


@pytest.mark.parametrize("scale", [20.0, 60.0, 150.0, 400.0, 1000.0])
def test_large_alphabets_take_what_their_entropy_is(scale):
    """Of seven to twelve bits: a low byte of its own would take eight, and what is above it another one."""
    x = drawn("gauss", scale, 0.0, 1 << 18)
    shares = torch.bincount(x).double() / len(x)
    assert 8 * stored(*pack(x)) / len(x) < float(torch.special.entr(shares).sum() / math.log(2)) + 0.075


def test_small_alphabets_take_less_than_a_bit():
    """Entropy is 0.18 bits: a byte for each symbol would take one, as Huffman's codes do."""
    x = (torch.rand(1 << 17, generator=torch.Generator().manual_seed(0)) < 0.027).to(torch.int32)
    assert 8 * stored(*pack(x)) < 0.3 * len(x)


UNSOUND = {
    "a digit beyond the base": (Mode(0, 3, 0, NO_TOP), [[243]], 5),
    "a digit behind the last": (Mode(0, 3, 0, NO_TOP), [[3]], 1),
    "six in the last byte": (Mode(0, 6, 0, NO_TOP), [[0, 6]], 4),
    "what no digit escapes to": (Mode(0, 3, 1, NO_TOP), [[1], [7]], 1),
    "a high byte that no digit escapes to": (Mode(0, 16, 2, NO_TOP), [[14], [1], [0]], 1),
    "a symbol beyond the top": (Mode(0, 16, 0, 3), [[4]], 1),
    "bits behind the last": (Mode(0, 256, 0, NO_TOP, 3), [[0] * 9, [0, 0, 0, 16, 0, 0]], 9),
    "bits behind the last in the lowest place": (Mode(0, 16, 0, NO_TOP, 7), [[0], [128, *[0] * 6]], 1),
    "what no digit escapes to above bits": (Mode(0, 16, 1, NO_TOP, 2), [[14], [1], [3, 0]], 1),
    "bits beyond the top": (Mode(0, 16, 0, 3, 2), [[1], [0, 0]], 1),
    "bits of a symbol that is too large": (Mode(0, 256, 2, NO_TOP, 7), [[255], [31], [1], [0] * 7], 1),
    "the largest with bits": (Mode(0, 256, 2, NO_TOP, 7), [[255], [255], [255], [127, *[0] * 6]], 1),
    "a symbol that is too large": (Mode(2, 256, 0, NO_TOP), [[16], [0], [0]], 1),
    "a far larger one": (Mode(0, 256, 3, NO_TOP), [[255], [255], [255], [255]], 1),
    "the largest of all": (Mode(2, 256, 1, NO_TOP), [[255], [255], [255], [255]], 1),
}


@pytest.mark.parametrize("name", UNSOUND)
@pytest.mark.parametrize("backend", BACKENDS)
def test_planes_that_no_writer_makes(name, backend):
    mode, planes, count = UNSOUND[name]
    rows = [torch.tensor(plane, dtype=torch.uint8) for plane in planes]
    rows += [torch.empty(0, dtype=torch.uint8)] * (4 - len(rows))
    assert [len(row) for row in rows] == mode.plane_lengths(count)
    with pytest.raises(InputError, match=r"^w\.weight: "):
        unpack(rows, Packing(mode, count), "w.weight", backend)


@pytest.mark.parametrize(
    "value",
    [None, 3, "abcd", [], [0, 3, 0], [0, 3, 0, -1, 0], [0, 4, 0, -1], [3, 3, 0, -1], [-1, 3, 0, -1], [0, 3, 4, -1],
     [1, 3, 3, -1], [2, 3, 2, -1], [0, 3, -1, -1], [0, 3, 0, -2], [0, 3, 0, 1 << 20], [0, 3.0, 0, -1],
     [False, 3, 0, -1], ["0", 3, 0, -1], {"raw": 0, "base": 3, "over": 0, "top": -1}, [0, 256, 0, -1, -1],
     [0, 256, 0, -1, 8], [1, 256, 0, -1, 4], [0, 256, 3, -1, 4], [0, 256, 0, -1, True], [0, 256, 0, -1, "4"],
     [0, 256, 0, -1, None], [0, 256, 0, -1, 4, 0], [0, 256, 0, -1, 4.0]],
)  # fmt: skip
def test_modes_that_are_none(value):
    with pytest.raises((TypeError, ValueError)):
        Mode.of(value)


# Differences

EDGES = (-1, 0, 1, 2, 3, 254, 255, 256, (1 << 19) - 2, (1 << 19) - 1)
BYTES = (torch.uint8, torch.int8, torch.int16, torch.uint16)


def integer(symbol):
    return -(symbol + 1) // 2 if symbol % 2 else symbol // 2


def symbol_of(q):
    return 2 * q if q >= 0 else -2 * q - 1


def rule(own, base):
    """The difference of a symbol to that of the base."""
    if base == -1:
        return 0 if own == -1 else own + 1
    return -1 if own == -1 else symbol_of(integer(own) - integer(base))


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def pairs():
    return zip(*((own, base) for own in EDGES for base in EDGES), strict=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_symbols_follow_the_rule_and_come_back(backend):
    own, base = map(list, pairs())
    found = difference({"codes": int32(own)}, {"codes": int32(base)}, backend)
    assert found["codes"].tolist() == [rule(*each) for each in zip(own, base, strict=True)]
    assert total(found, {"codes": int32(base)}, "x", backend)["codes"].tolist() == own


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_every_symbol_has_one_difference(backend, data):
    base = data.draw(st.integers(-1, (1 << 19) - 1))
    own = data.draw(st.lists(st.integers(-1, (1 << 19) - 1), min_size=1, max_size=40, unique=True))
    below = {"codes": torch.full((len(own),), base, dtype=torch.int32)}
    found = difference({"codes": int32(own)}, below, backend)
    assert len(set(found["codes"].tolist())) == len(own)
    assert total(found, below, "x", backend)["codes"].tolist() == own


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_be_packed_is_refused(backend):
    far = {"codes": int32([2 * ((1 << 18) + 5)])}, {"codes": int32([2 * ((1 << 18) + 5) - 1])}
    with pytest.raises(RefusedError, match="too far"):
        difference(*far, backend)
    with pytest.raises(RefusedError, match="too far"):
        difference({"codes": int32([SYMBOL_LIMIT - 2])}, {"codes": int32([-1])}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("found", "base"),
    [(-1, -1), (SYMBOL_LIMIT - 2, SYMBOL_LIMIT - 2), (SYMBOL_LIMIT - 1, SYMBOL_LIMIT - 1), (2, SYMBOL_LIMIT - 2)],
)
def test_sums_that_are_no_symbols_are_damage(backend, found, base):
    """Among symbols that are fine."""
    differences, below = {"codes": int32([0, found, 1])}, {"codes": int32([0, base, -1])}
    with pytest.raises(InputError, match=r"a\.ckpt8: w: its symbols are not differences"):
        total(differences, below, "a.ckpt8: w", backend)


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_other_parts_differ_by_their_bits(dtype):
    own, base = (torch.randint(0, 256, (64,), dtype=torch.uint8).view(dtype) for _ in range(2))
    before = own.clone()
    found = difference({"rows": own}, {"rows": base}, "torch")["rows"]
    assert found.dtype is dtype
    bits = [a ^ b for a, b in zip(own.view(torch.uint8).tolist(), base.view(torch.uint8).tolist(), strict=True)]
    assert found.view(torch.uint8).tolist() == bits
    assert own.view(torch.uint8).equal(before.view(torch.uint8))
    assert total({"rows": found}, {"rows": base}, "x", "torch")["rows"].view(torch.uint8).equal(own.view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_without_elements(backend):
    empty = {"codes": int32([]), "rows": torch.empty(0, dtype=torch.int16)}
    found = difference(empty, empty, backend)
    assert [len(x) for x in total(found, empty, "x", backend).values()] == [0, 0]
