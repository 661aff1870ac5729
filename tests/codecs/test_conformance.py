"""The contract that every codec keeps, tested over the registry: a new codec is tested by being registered."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import former_presets
import pytest
import torch

from ckpt8 import codecs
from ckpt8.codecs import codec_class, codec_from_config, config_of, parse_codec
from ckpt8.codecs.base import TILE
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.lattice import MomentLattice
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.split24 import Split24
from ckpt8.compressing.policy import PRESETS
from ckpt8.core.errors import RefusedError, UnsupportedError, UsageError
from ckpt8.core.tensors import DType, Role, TensorSpec

SIZES = (0, 1, 2, 31, 32, 33, 63, 64, 65, 1000, TILE, TILE + 1, 2 * TILE + 45)
FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)


BUDGETED = {"rclog/1": {"S": 1 << 19, "C": 48, "columns": True}}
"""The fields that a budget would give, so that the values of ``sample`` come back closely."""


def _codecs():
    """Every codec of the registry and of presets, today's and former."""
    seen = {}
    for codec_id, _ in (*codecs.CODECS, *codecs.BUDGETED):
        codec = codec_class(codec_id)(**BUDGETED.get(codec_id, {}))
        seen[json.dumps(config_of(codec))] = codec
    for codec in (*former_presets.COMPACT, *(codec for preset in PRESETS.values() for codec in preset.values())):
        seen.setdefault(json.dumps(config_of(codec)), codec)
    return list(seen.values())


CODECS_UNDER_TEST = _codecs()
FORMAT = (Path(codecs.__file__).parents[1] / "container" / "FORMAT.md").read_text()
CUT_ANYWHERE = [codec for codec in CODECS_UNDER_TEST if not codec.by_chunk]
LOSSY = [codec for codec in CODECS_UNDER_TEST if codec.measured_as is not None]
each_codec = pytest.mark.parametrize("codec", CODECS_UNDER_TEST, ids=repr)
each_that_is_cut = pytest.mark.parametrize("codec", CUT_ANYWHERE, ids=repr)
each_lossy = pytest.mark.parametrize("codec", LOSSY, ids=repr)


def spec_of(codec, dtype, numel) -> TensorSpec | None:
    """A specification with a role that the codec is made for, or None where it does not take the type."""
    for role in Role:
        spec = TensorSpec("w", role, dtype, (numel,))
        if codec.accepts(spec):
            return spec
    return None


def only_nonnegative(codec) -> bool:
    """Second moments: a codec that takes them and not first moments."""
    shape = (64,)
    return any(codec.accepts(TensorSpec("v", Role.MOMENT2, d, shape)) for d in FLOATS) and not any(
        codec.accepts(TensorSpec("m", Role.MOMENT1, d, shape)) for d in FLOATS
    )


def sample(codec, dtype, numel, seed=0) -> torch.Tensor:
    """Finite values over many magnitudes, zeros among them, that every codec has to take."""
    x = _values(numel, seed)
    return (x.abs() if only_nonnegative(codec) else x).to(dtype.torch, copy=True)


@cache
def _values(numel, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator, dtype=torch.float64)
    x *= torch.exp2(torch.randint(-12, 4, (numel,), generator=generator).double())
    x[torch.rand(numel, generator=generator) < 0.05] = 0.0
    return x


def float_cases(codec) -> list[DType]:
    return [dtype for dtype in FLOATS if spec_of(codec, dtype, 8) is not None]


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def assert_same_parts(one, other):
    assert list(one) == list(other)
    for name, part in one.items():
        assert part.dtype == other[name].dtype, name
        assert torch.equal(raw(part), raw(other[name])), name


def context(codec, first, numel):
    """What a codec may need beside ``numel`` elements from ``first`` on: values that follow from their index."""
    index = torch.arange(first, first + numel, dtype=torch.float64)
    companions = {name: (index * 0.618).frac().add(0.5).float() for name in codec.companions}
    if codec.compares_originals:
        companions |= {f"original_{name}": x * 1.01 for name, x in companions.items()}
    return {"first": first, "companions": companions}


def encode(codec, x, first=0, **given):
    return codec.encode(x, **context(codec, first, x.numel()), **given)


def decode(codec, parts, spec, first=0, **given):
    return codec.decode(parts, spec, **context(codec, first, spec.numel), **given)


def both_ways(codec, dtype, numel, seed=0):
    spec = spec_of(codec, dtype, numel)
    x = sample(codec, dtype, numel, seed)
    parts = encode(codec, x)
    return spec, x, parts, decode(codec, parts, spec)


def test_ids_are_unique_those_of_the_classes_and_in_the_format():
    ids = [codec_id for codec_id, _ in (*codecs.CODECS, *codecs.BUDGETED, *codecs.RELATIONS)]
    assert len(set(ids)) == len(ids)
    assert set(codecs.RULED.values()) == {*dict(codecs.CODECS), "lattice/2"}
    assert len(codecs.RULED) == len(codecs.CODECS) + 1
    for codec_id in ids:
        assert codec_class(codec_id).id == codec_id
        assert codec_id.partition("/")[2].isdigit()
        assert f"`{codec_id}`" in FORMAT, f"{codec_id} has no section in FORMAT.md"


def test_the_codecs_under_test_hold_every_registered_one_and_every_preset():
    registry = {codec_id for codec_id, _ in (*codecs.CODECS, *codecs.BUDGETED)}
    assert {codec.id for codec in CODECS_UNDER_TEST} == registry
    assert {Split24(R=7), Companded8(Q=31), Companded8(signed=False, Q=63, p=0.5)} <= set(CODECS_UNDER_TEST)
    assert {codec for preset in PRESETS.values() for codec in preset.values()} <= set(CODECS_UNDER_TEST)
    assert {codec.id for codec in LOSSY} == {
        "split24/1",
        "companded8/1",
        "lattice/1",
        "lattice/2",
        "rclog/1",
        "vscaled/1",
    } | {codec.id for codec in CODECS_UNDER_TEST if codec.measured_as in ("weight", "lattice", "moment")}


@each_codec
def test_codecs_are_frozen_values_whose_configuration_survives_json(codec):
    stored = json.loads(json.dumps(config_of(codec)))
    assert stored["id"] == codec.id
    assert set(stored) == {"id"} | {field.name for field in dataclasses.fields(codec)}
    assert codec_from_config(stored) == codec
    assert type(codec_from_config(stored)) is type(codec)
    assert hash(codec) == hash(codec_from_config(config_of(codec)))
    for field in dataclasses.fields(codec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(codec, field.name, getattr(codec, field.name))


def test_stored_parameters_reach_the_codec():
    assert codec_from_config({"id": "split24/1", "R": 7}) == Split24(R=7) != Split24()
    config = {"id": "companded8/1", "signed": False, "Q": 63, "p": 0.5}
    assert codec_from_config(config) == Companded8(signed=False, Q=63, p=0.5)
    assert codec_from_config({"id": "lossless/1"}) == Lossless()


UNKNOWN = {
    "split24": [{}],
    "split24/2": [{}],
    "Split24/1": [{}],
    "split24/1": [{"Q": 127}, {"R": 8}, {"R": 129}, {"R": "127"}, {"R": 127.0}, {"R": True}],
    "companded8/1": [
        *({"Q": 128}, {"Q": 0}, {"Q": True}, {"p": 0.5}, {"p": True}, {"signed": "no"}, {"signed": 2}),
        *({"signed": False, **fields} for fields in ({"Q": 256}, {"p": 2}, {"p": [1]})),
    ],
    "lossless/1": [{"level": 3}],
    "lattice/1": [{"k": -409}, {"k": 401}, {"k": -40.0}, {"salt": 1 << 32}, {"salt": -1}, {"salt": True}],
    "lattice/2": [{"k": -409}, {"k": "-40"}, {"salt": 1 << 32}, {"step": 1}],
    "rclog/1": [
        *({"S": 0}, {"S": 12 << 20}, {"S": 1e6}, {"C": 0}, {"C": 1 << 41}, {"C": 8193, "columns": True}),
        {"columns": 1},
    ],
    "vscaled/1": [
        *({"u_max": 0}, {"u_max": math.inf}, {"k": math.nan}, {"k": True}, {"eps": -1e-8}, {"eps": "1e-8"}),
        *({"salt": 1 << 32}, {"salt": 3.0}),
    ],
}
"""Ids, and fields that their codecs do not have, of values or types that they do not take."""


@pytest.mark.parametrize(
    "config",
    [
        *({}, {"R": 127}, {"id": None}, {"id": ["split24/1"]}),
        *({"id": codec_id, **fields} for codec_id, cases in UNKNOWN.items() for fields in cases),
    ],
    ids=str,
)
def test_unknown_configurations_are_unsupported(config):
    with pytest.raises(UnsupportedError):
        codec_from_config(config)


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("lossless", Lossless()),
        ("lossless()", Lossless()),
        ("split24", Split24()),
        (" split24 ( R = 7 ) ", Split24(R=7)),
        ("companded8(Q=31)", Companded8(Q=31)),
        ("companded8(signed=False, Q=63, p=0.5)", Companded8(signed=False, Q=63, p=0.5)),
        ("lattice2(k=-61, salt=5)", MomentLattice(-61, 5)),
    ],
)
def test_codecs_as_text(text, codec):
    cls, fields = parse_codec(text)
    assert cls(**fields) == codec


MALFORMED = """
    split split24/1 Split24 split24( split24(R) split24(7) split24(R=) split24(R=7 split24(R==7) split24(R=seven)
    split24(R=__import__('os')) split24(Q=7) split24(id='lossless/1') split24(measured_as=None) companded8(*[3])
    lossless(level=3) lattice(k=-60) lattice1(k=-60) lattice2 lattice2() lattice2(salt=5) lattice2(k=--6) lattice2(k=-)
"""


@pytest.mark.parametrize(
    "text", ["", *MALFORMED.split(), "split24(R=7) x", "companded8(**{'Q': 3})", "split24\n(R=7)\nlossless"]
)
def test_malformed_text_is_a_usage_error(text):
    with pytest.raises(UsageError) as caught:
        parse_codec(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


NOT_ONE_CALL = {
    "sum": "companded8(Q=1)+(2)",
    "or": "companded8() or (Q)",
    "unhashable": "companded8(Q={[]: 1})",
    "deep": "companded8(Q=" + "-" * 5000 + "1)",
    "called twice": "companded8(Q=3)(Q=31)",
    "given twice": "companded8(Q=3, Q=31)",
}


@pytest.mark.parametrize("case", NOT_ONE_CALL)
def test_text_that_is_not_one_call_is_a_usage_error(case):
    with pytest.raises(UsageError):
        parse_codec(NOT_ONE_CALL[case])


@pytest.mark.parametrize("codec_id", [codec.id for codec in CODECS_UNDER_TEST])
def test_unavailable_backends_are_usage_errors(codec_id):
    codec = codec_class(codec_id)()
    x = torch.zeros(40)
    spec = TensorSpec("w", Role.OTHER, DType.FLOAT32, (40,))
    with pytest.raises(UsageError):
        encode(codec, x, backend="abacus")
    with pytest.raises(UsageError):
        decode(codec, encode(codec, x), spec, backend="abacus")


@each_codec
def test_every_codec_takes_some_float_and_its_layout_is_what_encode_gives(codec):
    assert float_cases(codec)
    for dtype in float_cases(codec):
        for numel in SIZES:
            spec, x, parts, y = both_ways(codec, dtype, numel)
            layout = codec.layout(spec)
            assert list(layout) == list(parts)
            for name, part in parts.items():
                assert (part.dtype, part.shape) == (layout[name].dtype.torch, (layout[name].numel,)), (name, numel)
            assert (y.dtype, y.shape) == (x.dtype, (numel,))


@each_codec
def test_layout_depends_on_the_count_alone(codec):
    for dtype in float_cases(codec):
        flat = spec_of(codec, dtype, 6 * 35)
        for shape in [(6, 35), (2, 3, 35), (210, 1)]:
            assert codec.layout(flat._replace(shape=shape)) == codec.layout(flat)
            x = sample(codec, dtype, 210)
            assert_same_parts(encode(codec, x.view(shape)), encode(codec, x))


def _cuts(numel) -> Iterator[list[int]]:
    """Places to cut at: multiples of 32, regular, around tiles, and at random."""
    yield list(range(32, numel, 32 * 331))
    yield [cut for cut in (32, TILE - 32, TILE, TILE + 32) if cut < numel]
    generator = torch.Generator().manual_seed(numel)
    yield sorted({32 * int(i) for i in torch.randint(1, numel // 32 + 1, (7,), generator=generator)} - {numel})


@each_that_is_cut
def test_parts_do_not_depend_on_cutting(codec):
    for dtype in float_cases(codec):
        for numel in (32, 1000, TILE, 2 * TILE + 45):
            spec, x, parts, y = both_ways(codec, dtype, numel)
            for cuts in _cuts(numel):
                bounds = list(zip([0, *cuts], [*cuts, numel], strict=True))
                pieces = [encode(codec, x[a:b], first=a) for a, b in bounds]
                assert_same_parts({name: torch.cat([piece[name] for piece in pieces]) for name in parts}, parts)
                runs = [
                    decode(codec, piece, spec._replace(shape=(b - a,)), first=a)
                    for piece, (a, b) in zip(pieces, bounds, strict=True)
                ]
                assert torch.equal(raw(torch.cat(runs)), raw(y))


@pytest.mark.parametrize("codec", [codec for codec in CODECS_UNDER_TEST if codec.by_chunk], ids=repr)
def test_a_chunk_stands_alone(codec):
    """A chunk has its parts from its own elements and the index of the first, wherever that lies."""
    for dtype in float_cases(codec):
        x = sample(codec, dtype, 3000)
        for a, b in ((0, 1000), (1000, 1001), (1001, 3000)):
            spec = spec_of(codec, dtype, b - a)
            y = decode(codec, encode(codec, x[a:b], first=a), spec, first=a)
            assert (y.double() - x[a:b].double()).square().sum() < 1e-3 * x[a:b].double().square().sum()


@each_that_is_cut
def test_a_group_of_32_stands_alone(codec):
    """Changing the values of one group leaves the parts and the values of all others as they were."""
    for dtype in float_cases(codec):
        spec, x, parts, y = both_ways(codec, dtype, 320)
        changed = x.clone()
        changed[96:128] = sample(codec, dtype, 32, seed=9) * 4
        other = encode(codec, changed)
        for name, part in parts.items():
            share = len(part) * 32 // 320  # of a part for one group; 1 for a scale
            keep = torch.ones(len(part), dtype=torch.bool)
            keep[3 * share : 4 * share] = False
            assert torch.equal(part.to(torch.int32)[keep], other[name].to(torch.int32)[keep])
        z = decode(codec, other, spec)
        assert torch.equal(raw(y[:96]), raw(z[:96]))
        assert torch.equal(raw(y[128:]), raw(z[128:]))
        assert not torch.equal(raw(y[96:128]), raw(z[96:128]))


@each_codec
def test_decode_into_out_whatever_was_in_it(codec):
    for dtype in float_cases(codec):
        for numel in SIZES:
            spec, _, parts, y = both_ways(codec, dtype, numel)
            for byte in (0x00, 0xFF, 0xA5) if numel == 1000 else ():
                out = torch.full((numel * dtype.itemsize,), byte, dtype=torch.uint8).view(dtype.torch)
                decode(codec, parts, spec, out=out)
                assert torch.equal(raw(out), raw(y)), byte
            around = torch.full((numel + 6,), 77.0, dtype=dtype.torch)
            out = around[3 : numel + 3]
            result = decode(codec, parts, spec, out=out)
            assert result.data_ptr() == out.data_ptr()
            assert torch.equal(raw(around[3 : numel + 3]), raw(y))
            assert torch.equal(around[:3], torch.full((3,), 77.0, dtype=dtype.torch))
            assert torch.equal(around[numel + 3 :], torch.full((3,), 77.0, dtype=dtype.torch))


@each_codec
def test_inputs_are_left_alone(codec):
    for dtype in float_cases(codec):
        for numel in (33, 2 * TILE + 45):
            spec, x, parts, _ = both_ways(codec, dtype, numel)
            before = x.clone()
            again = encode(codec, x)
            assert torch.equal(raw(x), raw(before))
            kept = {name: part.clone() for name, part in again.items()}
            decode(codec, again, spec)
            assert_same_parts(again, kept)
            x.zero_()  # the parts are the codec's own memory
            assert_same_parts(again, parts)


@each_codec
def test_other_memory_layouts_mean_flat_order(codec):
    for dtype in float_cases(codec):
        base = sample(codec, dtype, 96 * 70, seed=2)
        views = {
            "transposed": base.view(96, 70).t(),
            "strided": base.view(96, 70)[::2, 1::3],
            "expanded": base[:70].expand(5, 70),
            "channels last": base.view(8, 12, 10, 7).contiguous(memory_format=torch.channels_last),
            "offset": base[3:],
            "zero-dim": base[5],
        }
        for name, x in views.items():
            flat = torch.tensor([v for v in x.double().flatten()], dtype=torch.float64).to(dtype.torch)  # noqa: C416
            assert_same_parts(encode(codec, x), encode(codec, flat)), name


@each_codec
def test_values_keep_their_type_and_stay_near(codec):
    """A coarse check that no codec loses the values altogether; the exact bounds stand in its own tests."""
    for dtype in float_cases(codec):
        _, x, _, y = both_ways(codec, dtype, 2 * TILE + 45)
        assert y.dtype == x.dtype == dtype.torch
        noise, signal = (y.double() - x.double()).square().sum(), x.double().square().sum()
        assert noise < 1e-3 * signal
        assert torch.equal(y == 0, x == 0) or not only_nonnegative(codec)


def _repeats(codec, dtype) -> bool:
    """Whether decoded values have the codes that they come from.

    Factors of a chunk are means of its values, updates are compared with the second moments as they were, and bf16
    rounds what lies between the points of a dithered lattice.
    """
    return not (codec.by_chunk or codec.compares_originals or (codec.counts_elements and dtype.itemsize == 2))


@each_codec
def test_coding_again_changes_nothing(codec):
    for dtype in filter(partial(_repeats, codec), float_cases(codec)):
        for numel in (1, 33, TILE + 77):
            spec, _, parts, y = both_ways(codec, dtype, numel, seed=3)
            again = encode(codec, y)
            assert_same_parts(again, parts)
            assert torch.equal(raw(decode(codec, again, spec)), raw(y))


@each_codec
def test_zeros_stay_zeros(codec):
    for dtype in float_cases(codec):
        spec = spec_of(codec, dtype, 1000)
        zeros = torch.zeros(1000, dtype=dtype.torch)
        # The steps of some first moments follow the second, which are zero as long as these are.
        companions = dict.fromkeys(context(codec, 0, 1)["companions"], torch.zeros(1000))
        parts = codec.encode(zeros, companions=companions)
        assert torch.equal(codec.decode(parts, spec, companions=companions).double(), zeros.double())


NOT_FINITE = {
    DType.FLOAT16: (0x7C00, 0xFC00, 0x7E00, 0x7C01, 0x7FFF, 0xFFFF),
    DType.BFLOAT16: (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x7FFF, 0xFFFF, 0xFFC1),
    DType.FLOAT32: (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7FFFC000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC12345),
    DType.FLOAT64: (0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, (0x7FF << 52) | 1, (1 << 63) - 1, (1 << 64) - 1),
}
"""Both infinities, the usual NaN, the smallest signalling NaN, NaNs of all ones, other payloads."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def with_bits(x: torch.Tensor, position: int | slice, bits: int) -> torch.Tensor:
    width = 8 * x.element_size()
    x = x.clone()
    x.view(_INTEGERS[x.element_size()])[position] = bits - (1 << width) if bits >> (width - 1) else bits
    return x


POSITIONS = {1: (0,), 33: (0, 7, 31, 32, slice(None)), TILE + 33: (5, TILE - 1, TILE, TILE + 32, slice(64, 96))}


INHERITING = [codec for codec in CODECS_UNDER_TEST if codec.inherited]
each_that_inherits = pytest.mark.parametrize("codec", INHERITING, ids=repr)


def changed(x):
    """A state some steps later."""
    return (x.float() * torch.linspace(0.7, 1.4, len(x))).to(x.dtype)


@each_that_inherits
def test_inherited_parts_are_taken_as_they_are(codec):
    for dtype in float_cases(codec):
        for numel in (0, 1, 65, 1000):
            spec = spec_of(codec, dtype, numel)
            x = sample(codec, dtype, numel)
            earlier = encode(codec, x)
            assert_same_parts(encode(codec, x, inherited=earlier), earlier)
            later = encode(codec, changed(x), inherited=earlier)
            assert list(later) == list(codec.layout(spec))
            assert all(torch.equal(later[name], earlier[name]) for name in codec.inherited if name in later)
            assert torch.equal(decode(codec, later, spec) == 0, x == 0)


@each_that_inherits
def test_a_beginning_inherits_beginnings(codec):
    x = sample(codec, DType.FLOAT32, 1000)
    earlier = encode(codec, x, first=96)
    later = encode(codec, changed(x), first=96, inherited=earlier)
    beginning = encode(codec, changed(x)[:500], first=96, inherited=earlier)
    for name, part in beginning.items():
        assert torch.equal(part, later[name][: len(part)]), name


@each_codec
def test_a_codec_continues_itself_unless_others_take_part_in_it(codec):
    is_alone = not codec.companions and codec.copied is None
    assert codec.continued(codec) == (codec if is_alone else None)
    assert all(codec.continued(other) is None for other in CODECS_UNDER_TEST if type(other) is not type(codec))


@each_lossy
def test_lossy_codecs_refuse_what_is_not_finite(codec):
    for dtype in float_cases(codec):
        for numel, positions in POSITIONS.items():
            x = sample(codec, dtype, numel, seed=4)
            encode(codec, x)
            for position in positions:
                for bits in NOT_FINITE[dtype]:
                    with pytest.raises(RefusedError):
                        encode(codec, with_bits(x, position, bits))


@pytest.mark.parametrize("dtype", FLOATS)
def test_lossless_keeps_payload_bits(dtype):
    codec = Lossless()
    for numel, positions in POSITIONS.items():
        x = sample(codec, dtype, numel, seed=4)
        for position in positions:
            for bits in NOT_FINITE[dtype]:
                y = with_bits(x, position, bits)
                spec = TensorSpec("w", Role.OTHER, dtype, (numel,))
                assert torch.equal(raw(decode(codec, encode(codec, y), spec)), raw(y))


@pytest.mark.parametrize("dtype", DType)
def test_lossless_holds_every_bit_of_every_type(dtype):
    codec = Lossless()
    for numel in (0, 1, 33, TILE + 45):
        generator = torch.Generator().manual_seed(numel)
        data = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        x = data.clone().view(dtype.torch)
        spec = TensorSpec("w", Role.OTHER, dtype, (numel,))
        assert codec.accepts(spec)
        parts = encode(codec, x)
        layout = codec.layout(spec)
        assert {n: (p.dtype, p.numel()) for n, p in parts.items()} == {
            n: (torch.uint8, p.numel) for n, p in layout.items()
        }
        assert sum(part.numel() for part in parts.values()) == data.numel()
        y = decode(codec, parts, spec)
        assert y.dtype == dtype.torch
        assert torch.equal(y.view(torch.uint8), data)
        out = torch.zeros(numel * dtype.itemsize, dtype=torch.uint8)
        decode(codec, parts, spec, out=out.view(dtype.torch))
        assert torch.equal(out, data)


@pytest.mark.parametrize("dtype", FLOATS)
def test_planes_are_the_rotated_bits(dtype):
    """Plane k is byte k from the top of the bits rotated left by one, worked out with Python integers."""
    size = dtype.itemsize
    generator = torch.Generator().manual_seed(size)
    data = bytes(torch.randint(0, 256, (500 * size,), generator=generator, dtype=torch.uint8).tolist())
    x = torch.frombuffer(bytearray(data), dtype=dtype.torch)
    parts = Lossless().encode(x)
    assert list(parts) == [f"plane{k}" for k in range(size)]
    for i in range(500):
        bits = int.from_bytes(data[i * size : (i + 1) * size], "little")
        rotated = ((bits << 1) & ((1 << (8 * size)) - 1)) | (bits >> (8 * size - 1))
        assert bytes(int(parts[f"plane{k}"][i]) for k in range(size)) == rotated.to_bytes(size, "big")


@pytest.mark.parametrize(("dtype", "bias"), [(DType.BFLOAT16, 127), (DType.FLOAT32, 127)])
def test_the_first_plane_is_the_exponent(dtype, bias):
    x = torch.tensor([1.0, -1.0, 2.0, -0.5, 0.0, -0.0, 3.0e38, 1.5], dtype=dtype.torch)
    expected = [bias, bias, bias + 1, bias - 1, 0, 0, 254, bias]
    assert Lossless().encode(x)["plane0"].tolist() == expected
