"""Symbols, codecs with steps and budgets in hostile containers: each is sound or refused, soon, and takes no memory."""

from __future__ import annotations

import copy
import random
import zlib
from functools import partial

import pytest
import torch
import zstandard
from budget_kit import run_of
from hostile_kit import INFINITE, both, bounded, drop, edited, fields, found_at, index_of, pack, put, unpack
from hypothesis import given
from hypothesis import strategies as st
from test_damage import exercise, is_detected, mutated

import ckpt8
from ckpt8.container.manifest import PLANES, Mode
from ckpt8.core.errors import InputError, UnsupportedError

W, M, V = "model.layers.0.weight", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq"
STEP = "optimizer.state.0.step"
NUMEL = 64 * 65
HUGE = 10**400


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A container of each codec with steps and of as many bytes, and its source."""
    folder = tmp_path_factory.mktemp("symbols")
    torch.save(run_of([(64, 65)]) | {"bytes": torch.zeros(NUMEL, dtype=torch.uint8)}, folder / "a.pt")
    ckpt8.compress(folder / "a.pt", budget=1, threads=1)
    return folder / "a.ckpt8"


@pytest.fixture(scope="module")
def parts(small):
    return unpack(small.read_bytes())


CODES = ("storages", W, "parts", "codes")
codes = partial(fields, *CODES)


def storage(manifest, name):
    return found_at(manifest, ("storages", name))


def table(manifest, name=W):
    return storage(manifest, name)["parts"]["codes"]


def modes(value):
    return codes(modes=value)


def mode(**changed):
    """One field of the one mode of the weights."""

    def change(manifest):
        table(manifest)["modes"] = [list(Mode(*table(manifest)["modes"][0])._replace(**changed).stated)]

    return change


def many_chunks(manifest):
    """As many chunks as a manifest of some kB can state, all in frames of a byte."""
    count = 1 << 12
    table(manifest).update(lengths=[1, 0, 0, 0] * count, crcs=[0] * (PLANES * count), modes=[[0, 3, 0, -1]] * count)
    storage(manifest, W)["numel"] = count << 20


def codec(name, **given):
    return fields("storages", name, "codec", **given)


def second(name):
    return lambda manifest: codec(M, second=index_of(manifest, name))(manifest)


def second_of(dtype):
    """Second moments of an element type that is no float."""
    return both(put("storages", "bytes", "dtype", dtype), second("bytes"))


steps = partial(fields, "parameters", 0, "steps")


MALFORMED = {
    "no modes": drop(*CODES, "modes"),
    "modes that are null": modes(None),
    "modes that are a number": modes(3),
    "modes of another form": modes([{"raw": 0}]),
    "modes that are short": modes([[0, 256, 0]]),
    "an empty list": modes([]),
    "two modes of one chunk": modes([[0, 256, 0, -1]] * 2),
    "a thousand modes": modes([[0, 256, 0, -1]] * 1000),
    "modes of other parts": fields("storages", V, "parts", "rows", modes=[[0, 256, 0, -1]]),
    "modes of a skeleton": fields("storages", "ckpt8.skeleton", "parts", "bytes", modes=[[0, 256, 0, -1]]),
    "another base": mode(base=7),
    "a base that is none": mode(base=0),
    "more raw bytes": mode(raw=2),
    "more overflow": mode(over=3),
    "bits beside raw bytes": mode(raw=1, bits=4),
    "more bits": mode(bits=8),
    "fewer bits": mode(bits=0),
    "bits below zero": mode(bits=-1),
    "huge bits": mode(bits=HUGE),
    "bits that are none": lambda m: table(m)["modes"][0].__setitem__(slice(4, None), [0]),
    "bits that are text": mode(bits="4"),
    "bits that are true": mode(bits=True),
    "a sixth number": lambda m: table(m)["modes"][0].extend([1, 1]),
    "a top that is too large": mode(top=1 << 20),
    "a huge top": mode(top=HUGE),
    "a top below all": mode(top=-2),
    "no lengths": codes(lengths=[0] * PLANES),
    "a byte for an empty plane": codes(lengths=lambda old: [old[0] - 1, *old[1:-1], 1]),
    "fewer frames": codes(lengths=lambda old: old[:-1], crcs=lambda old: old[:-1]),
    "more frames": codes(lengths=lambda old: [*old, 0], crcs=lambda old: [*old, 0]),
    "a huge storage": put("storages", W, "numel", 2**61),
    "a thousand chunks": many_chunks,
    "a companion that is itself": second(M),
    "a companion of another length": second("ckpt8.skeleton"),
    "a companion of bytes": second("bytes"),
    **{f"a companion of {dtype}": second_of(dtype) for dtype in ("qint8", "quint4x2", "float4_e2m1fn_x2", "bool")},
    "a companion that is not there": codec(M, second=10**6),
    "a companion that is negative": codec(M, second=-1),
    "a companion that is true": codec(M, second=True),
    "a companion that is null": codec(M, second=None),
    "a companion that is text": codec(M, second="1"),
    "statistics that are no storages": codec(M, second=[10**6, 0, 64, 65]),
    "statistics that are negative": codec(M, second=[-1, 0, 64, 65]),
    "statistics that are lossy": lambda m: codec(M, second=[index_of(m, W), index_of(m, W), 64, 65])(m),
    "statistics of another shape": lambda m: codec(M, second=[index_of(m, STEP), index_of(m, STEP), 1, NUMEL])(m),
    "statistics of huge matrices": lambda m: codec(M, second=[index_of(m, STEP), index_of(m, STEP), 2**40, 2**40])(m),
    "statistics of no rows": codec(M, second=[0, 0, 0, 65]),
    "statistics that are short": codec(M, second=[0, 0]),
    "statistics that are text": codec(M, second=["0", 0, 64, 65]),
    "statistics beyond numbers": codec(M, second=[0, 0, HUGE, 1]),
    "parts of another codec": lambda m: storage(m, V).update(codec=storage(m, W)["codec"], role="other"),
    "rows that are longer": codec(V, C=65 * 64),
    "no columns": codec(V, columns=False),
    "first moments as weights": lambda m: storage(m, W).update(codec=storage(m, M)["codec"]),
    "integers on a lattice": put("storages", W, "dtype", "int32"),
    "fp16 on a lattice": put("storages", W, "dtype", "float16"),
    "moments on a lattice": put("storages", W, "role", "moment1"),
    "steps that are a list": put("parameters", 0, "steps", []),
    "no optimizer": drop("parameters", 0, "steps", "optimizer"),
    "an optimizer below zero": steps(optimizer=-1),
    "an optimizer that is text": steps(optimizer="0"),
    "weights that are not there": steps(weight_storage=10**6),
    "weights that are text": steps(weight_storage="0"),
    "a budget that is a list": put("budget", []),
    "a budget of nothing": put("budget", {}),
    "a budget of text": put("budget", {"steps": "1", "u_max": 1, "cap": 1}),
    "a budget of zero": put("budget", {"steps": 0, "u_max": 1, "cap": 1}),
    "a budget beyond numbers": put("budget", {"steps": HUGE, "u_max": 1, "cap": 1}),
    "a budget without bound": put("budget", {"steps": 1, "u_max": INFINITE, "cap": 1}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_manifests_that_are_not_sound(name, parts, small, tmp_path):
    path = edited(parts, MALFORMED[name], tmp_path / "x.ckpt8")
    with bounded(), pytest.raises(InputError) as caught:
        ckpt8.verify(path, threads=1)
    assert len(str(caught.value)) < 500
    exercise(path, small.with_suffix(".pt"), tmp_path)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (W, {"k": 401}), (W, {"k": -409}), (W, {"k": 1.0}), (W, {"k": HUGE}), (W, {"salt": -1}), (W, {"salt": 2**32}),
        (W, {"salt": None}), (W, {"x": 1}), (V, {"S": 0}), (V, {"S": 11744052}), (V, {"S": HUGE}), (V, {"C": 0}),
        (V, {"C": 2**40 + 1}), (V, {"C": 8193}), (V, {"columns": 1}), (M, {"k": 0}), (M, {"k": -1.0}), (M, {"k": HUGE}),
        (M, {"u_max": 2.0**101}), (M, {"eps": -1e-9}), (M, {"bias1": "1"}), (M, {"root_bias2": True}),
        (M, {"salt": 0.5}),
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_no_codec_has(name, given, parts, tmp_path):
    path = edited(parts, codec(name, **given), tmp_path / "x.ckpt8")
    with bounded(), pytest.raises(UnsupportedError) as caught:
        ckpt8.verify(path, threads=1)
    assert len(str(caught.value)) < 500


def with_planes(parts, name, given, planes):
    """A container with these planes of symbols, a mode, and the right checksums."""
    metadata, entries, manifest = parts
    changed = copy.deepcopy(manifest)
    frames = [zstandard.compress(plane) if len(plane) > 8 else plane for plane in planes]
    frames += [b""] * (PLANES - len(frames))
    table(changed, name).update(
        lengths=[len(frame) for frame in frames], crcs=[zlib.crc32(frame) for frame in frames], modes=[list(given)]
    )
    return pack(changed, {**entries, f"{name}/codes": b"".join(frames)}, metadata)


def bytes_of(count, **given):
    """Zeros, with other values at some places."""
    content = bytearray(count)
    for place, value in given.items():
        content[int(place.removeprefix("at"))] = value
    return bytes(content)


THIRD, LOW = -(-NUMEL // 3), 5 * -(-NUMEL // 8)
UNSOUND = {
    "a digit beyond the base": ((0, 6, 0, -1), [bytes_of(THIRD, at9=216)]),
    "a digit behind the last": ((0, 6, 0, -1), [bytes_of(THIRD, **{f"at{THIRD - 1}": 36})]),
    "what no digit escapes to": ((0, 256, 1, -1), [bytes(NUMEL), bytes_of(NUMEL, at4000=1)]),
    "a symbol beyond the top": ((0, 256, 0, 9), [bytes_of(NUMEL, at7=10)]),
    "a symbol that is too large": ((2, 256, 0, -1), [bytes_of(NUMEL, at7=16), bytes(NUMEL), bytes(NUMEL)]),
    "bits above the top": ((0, 256, 0, 9, 5), [bytes_of(NUMEL, at7=1), bytes(LOW)]),
    "bits of a symbol that is too large": (
        (0, 256, 2, -1, 5),
        [bytes_of(NUMEL, at7=255), bytes_of(NUMEL, at7=127), bytes_of(NUMEL, at7=1), bytes(LOW)],
    ),
    "bits of another width": ((0, 256, 0, -1, 4), [bytes(NUMEL), bytes(LOW)]),
    "no bits": ((0, 256, 0, -1, 5), [bytes(NUMEL)]),
    "a plane that is too long": ((0, 256, 0, -1), [bytes(NUMEL + 1)]),
    "a plane that is too short": ((0, 256, 0, -1), [bytes(NUMEL - 1)]),
    "a plane of another base": ((0, 16, 0, -1), [bytes(NUMEL)]),
    "a bomb": ((0, 256, 0, -1), [bytes(10_000_000)]),
}


@pytest.mark.parametrize("name", [W, M, V])
@pytest.mark.parametrize("what", UNSOUND)
def test_planes_that_are_not_sound(what, name, parts, small, tmp_path):
    """The message names the tensor, whatever codec it has."""
    path = tmp_path / "x.ckpt8"
    path.write_bytes(with_planes(parts, name, *UNSOUND[what]))
    with bounded(), pytest.raises(InputError, match=name.replace(".", r"\.")):
        ckpt8.verify(path, threads=1)
    assert "restore" in exercise(path, small.with_suffix(".pt"), tmp_path)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", [W, M, V])
def test_any_symbols_decode(name, seed, parts, tmp_path):
    """What the container takes, every codec takes: the largest symbols, -1, and steps and factors at their ends."""
    rng = random.Random(seed)
    rest = bytes(rng.choice((0, 1, 15)) for _ in range(NUMEL))
    low = [rng.randbytes(NUMEL), rng.randbytes(NUMEL)]
    given = (2, 256, 0, rng.choice((-1, 0, (1 << 20) - 1)))
    metadata, entries, manifest = unpack(with_planes(parts, name, given, [rest, *low]))
    settings_of = {W: {"k": 400}, M: {"k": 2.0**100, "u_max": 2.0**100}, V: {"S": 7 * 2**23 // 5}}
    if seed % 2:
        storage(manifest, name)["codec"].update(settings_of[name])
    if seed % 3 == 0:
        content = rng.randbytes(2 * 65)
        frames = [content[:65], content[65:]]
        storage(manifest, V)["parts"]["rows"] = {"lengths": [65, 65], "crcs": [zlib.crc32(each) for each in frames]}
        entries[f"{V}/rows"] = content
    path = tmp_path / "x.ckpt8"
    path.write_bytes(pack(manifest, entries, metadata))
    with bounded(), ckpt8.open(path) as file:
        values = file.get_tensor(name)
    assert values.shape == (64, 65)
    if name == V:
        assert bool((values >= 0).all())
        assert bool(values.isfinite().all())


def test_frames_built_the_same_way_are_read(parts, tmp_path):
    path = tmp_path / "x.ckpt8"
    path.write_bytes(with_planes(parts, W, (0, 6, 0, -1), [bytes_of(THIRD, at9=215)]))
    assert not is_detected(path)


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 32))
def test_a_mutated_manifest_with_symbols_is_read_or_refused(seed, parts, small, tmp_path):
    mutated(parts, seed, small, tmp_path)
