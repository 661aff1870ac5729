"""The one file that reads every ``.ckpt8`` without ckpt8: to the bit as ``ckpt8.open`` does, alone, and when damaged.

``test_format`` reads with it whatever else the format allows.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from chain_kit import chain
from flips_kit import make_sample
from hostile_kit import edited, put, unpack
from packed_kit import load, pack, save_sliced
from strict_reader import Strict, same

import ckpt8
from ckpt8 import codecs
from ckpt8.codecs import codec_class, config_of
from ckpt8.codecs.rounded_copy import round_to
from ckpt8.compressing.policy import PRESETS
from ckpt8.container import plain_reader
from ckpt8.container.plain_reader import (
    CODECS,
    UnreadableError,
    bf16_bits,
    decoded,
    fp16_bits,
    item_type,
    layout_of,
    plane_lengths,
    read,
    unpacked,
)
from ckpt8.core.tensors import DType, Role, TensorSpec

FILE = Path(plain_reader.__file__)


def agrees(path):
    """The codecs of a container whose tensors have the values that ckpt8 gives them, as has what was compressed."""
    tensors = Strict(path)
    with ckpt8.open(path) as file:
        assert list(tensors) == file.keys()
        assert all(same(tensors[name], file.get_tensor(name)) for name in tensors)
    assert tensors.original() == ckpt8.restore(path, path.with_suffix(".back"), force=True).read_bytes()
    return {storage["codec"]["id"] for storage in tensors.storages}


def test_it_knows_every_codec_and_every_element_type():
    assert set(CODECS) == {codec_id for codec_id, _ in (*codecs.CODECS, *codecs.BUDGETED, *codecs.RELATIONS)}
    assert all(item_type(dtype.label).itemsize == dtype.itemsize for dtype in DType)
    assert {dtype.label for dtype in DType if dtype.is_plane_float} == set(plain_reader.FLOATS)


CONFIGS = {
    "lossless/1": [{}],
    "split24/1": [{"R": levels} for levels in (1, 7, 127)],
    "split32/1": [{}],
    "companded8/1": [{"Q": 127}, {"Q": 31}, *({"signed": False, "Q": 255, "p": p} for p in (1, 0.5))],
    "lattice/1": [{"k": k, "salt": 2**32 - k % 9 - 1} for k in (-408, -61, 0, 33, 400)],
    "lattice/2": [{"k": k, "salt": 7} for k in (-99, -50)],
    "rclog/1": [{"S": s, "C": c, "columns": c < 999} for s in (2**14, 11744051) for c in (3, 500, 2**30)],
    "vscaled/1": [{"second": 0, "k": k, "u_max": 2.0, "bias1": 0.3, "root_bias2": 0.9, "salt": 1} for k in (1e-3, 1.0)],
}


@pytest.mark.by_default(*CONFIGS)
@pytest.mark.parametrize("codec_id", CONFIGS)
def test_decoders_beside_those_of_the_codecs(codec_id):
    """Any codes, also those that no encoder has written: at the ends of their range, and from a later chunk."""
    assert set(CONFIGS) == {name for name, (*_, decoder) in CODECS.items() if decoder is not None}
    draw, seen = np.random.default_rng(0), 0
    for config, dtype in product(CONFIGS[codec_id], DType):
        for role in Role:
            codec, spec, first = codec_class(codec_id)(**config), TensorSpec("x", role, dtype, (999,)), 3 << 20
            if not codec.accepts(spec):
                continue
            storage = {"name": "x", "dtype": dtype.label, "role": role.value, "codec": config_of(codec)}
            parts = {}
            for name, (holds, count) in layout_of(storage, 999).items():
                low, high = (-1, 1 << 19) if holds == "symbols" else (np.iinfo(holds).min, np.iinfo(holds).max)
                high = {"scales": 0xFF00, "exponent": 0x7F}.get(name, high)
                drawn = draw.integers({"exponent": 1}.get(name, low), high, count)
                drawn = np.where(draw.random(count) < 0.5, drawn % 40, drawn) if holds == "symbols" else drawn
                drawn = abs(drawn) if codec_id == "vscaled/1" else drawn
                parts[name] = drawn.astype("i4" if holds == "symbols" else holds)
            second = torch.rand(999) ** 9 * (torch.arange(999) % 5 > 0)
            tensors = {name: torch.from_numpy(part) for name, part in parts.items()}
            expected = codec.decode(tensors, spec, backend="torch", first=first, companions={"second": second})
            wide = {name: part.astype(np.int64) if part.dtype == "i4" else part for name, part in parts.items()}
            with np.errstate(all="ignore"):
                found = decoded(storage, wide, 999, first, second.numpy())
            assert found.tobytes() == bytes(expected.view(torch.uint8).tolist()), (config, dtype, role)
            seen += 1
    assert seen


def test_what_is_rounded_to_half_precision():
    bits = torch.cat([torch.arange(1 << 16, dtype=torch.int32) << 16 | low for low in (0, 1, 0x8000, 0xFFFF)])
    for dtype, rounded in ((DType.FLOAT16, fp16_bits), (DType.BFLOAT16, bf16_bits)):
        numbers = bits.view(torch.float32)
        expected = round_to(dtype, numbers).view(torch.int16).numpy().view(np.uint16)
        with np.errstate(all="ignore"):
            assert (rounded(bits.numpy().view(np.uint32)) == expected).all()


def test_symbols_of_another_form_are_refused():
    assert unpacked([b"\x10\x00", b"\x05", b"", b""], [0, 16, 0, -1, 1], 3).tolist() == [1, 2, 1]
    for planes, mode in (
        ([b"\x10\x00", b"\x0d", b"", b""], [0, 16, 0, -1, 1]),  # bits of a fourth symbol
        ([b"\x10\x10", b"\x05", b"", b""], [0, 16, 0, -1, 1]),  # a digit of it
        ([b"\x10\x00", b"\x00\x01\x00", b"", b""], [0, 16, 1, -1]),  # more beside a digit that is not the largest
        ([b"\xf3", b"", b"", b""], [0, 3, 0, -1]),  # a byte that is no five digits
        ([b"\x10\x02", b"", b"", b""], [0, 16, 0, 1]),  # above the largest
        ([b"", b"", b"", b""], [0, 7, 0, -1]),
        ([b"", b"", b"", b""], [1, 16, 0, -1, 1]),
    ):
        with pytest.raises(UnreadableError, match="of symbols"):
            assert plane_lengths(mode, 3) and unpacked(planes, mode, 3)  # noqa: PT018


def test_what_leads_out_of_a_directory_is_not_written(tmp_path):
    parts = unpack(make_sample(tmp_path, "directory").read_bytes())
    paths = [member["path"] for member in parts[2]["members"]]
    note = paths.index("note.txt")
    for path in ("../note.txt", "/note.txt", "a//b", "..", "./x"):
        edited(parts, put("members", note, "path", path), tmp_path / "x.ckpt8")
        with pytest.raises(UnreadableError, match=r"x\.ckpt8: a member leaves its directory"):
            read(tmp_path / "x.ckpt8").write_original(tmp_path / "out")
        shutil.rmtree(tmp_path / "out")
    edited(parts, put("members", note, "format", "symlink"), tmp_path / "x.ckpt8")
    read(tmp_path / "x.ckpt8").write_original(tmp_path / "original")
    assert str((tmp_path / "original" / "note.txt").readlink()) == "a note"
    (tmp_path / "run" / "note.txt").write_text("../../x")
    ckpt8.compress(tmp_path / "run", tmp_path / "other.ckpt8", rules=["*=lossless"])
    edited(
        unpack((tmp_path / "other.ckpt8").read_bytes()), put("members", note, "format", "symlink"), tmp_path / "x.ckpt8"
    )
    with pytest.raises(UnreadableError, match=r"x\.ckpt8: a link leaves its directory"):
        read(tmp_path / "x.ckpt8").write_original(tmp_path / "out")


@pytest.mark.by_default(*PRESETS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(preset, inputs, tmp_path):
    ckpt8.compress(inputs / "gpt_bf16.pt", tmp_path / "x.ckpt8", preset=preset)
    agrees(tmp_path / "x.ckpt8")


@pytest.mark.by_default(*codecs.RULED)
@pytest.mark.parametrize("rule", codecs.RULED)
def test_every_codec_that_a_rule_names(rule, inputs, tmp_path):
    rules = {"companded8": ["*.exp_avg=companded8(Q=31)"], "lattice2": ["*.exp_avg=lattice2(k=-60, salt=3)"]}
    ckpt8.compress(inputs / "crc_off.pt", tmp_path / "x.ckpt8", rules=rules.get(rule, [f"*={rule}"]))
    assert codecs.RULED[rule] in agrees(tmp_path / "x.ckpt8")


ALONE = """
import runpy, sys
for name in ("ckpt8", "torch", "safetensors", "numba"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def alone(*arguments):
    """What the file does in a process that can import neither ckpt8 nor torch."""
    command = [sys.executable, "-I", "-c", ALONE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A key and two deltas, with a copy of the reader beside them."""
    folder = tmp_path_factory.mktemp("run")
    chain(folder, 3)
    shutil.copy(FILE, folder / "read_ckpt8.py")
    return folder


def test_it_needs_neither_ckpt8_nor_torch(run, tmp_path):
    (last,) = run.glob("step-2.ckpt8")
    listed = alone(run / "read_ckpt8.py", last)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert alone(run / "read_ckpt8.py", last, tmp_path / "x.npz").stderr == ""
    assert alone(run / "read_ckpt8.py", last, tmp_path / "x.pt").stderr == ""
    with ckpt8.open(last) as file, np.load(tmp_path / "x.npz") as arrays:
        lines = [
            f"{name}  {str(file.get_tensor(name).dtype)[6:]}  {list(file.get_tensor(name).shape)}" for name in arrays
        ]
        assert listed.stdout.splitlines() == lines
        assert list(arrays) == file.keys()
        assert all(same(arrays[name], file.get_tensor(name)) for name in arrays)
    assert (tmp_path / "x.pt").read_bytes() == ckpt8.restore(last, tmp_path / "y.pt").read_bytes()
    again = alone(run / "read_ckpt8.py", last, tmp_path / "x.npz")
    assert again.returncode == 1
    assert again.stderr == f"{tmp_path / 'x.npz'}: is there already\n"
    damaged = bytearray(last.read_bytes())
    damaged[8 + int.from_bytes(damaged[:8], "little")] ^= 1  # in a frame
    (tmp_path / "x.ckpt8").write_bytes(damaged)
    found = alone(run / "read_ckpt8.py", tmp_path / "x.ckpt8", tmp_path / "y.npz", run)
    assert (found.returncode, len(found.stderr.splitlines())) == (1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.ckpt8", "x.npz", "x.pt", "y.npz.partial", "y.pt"]


def test_bases_are_found_by_their_seals(run, tmp_path):
    files = {path.name: path for path in run.glob("*.ckpt8")}
    delta = shutil.copy(files["step-2.ckpt8"], tmp_path / "delta.ckpt8")
    name = next(iter(read(delta)))
    with pytest.raises(UnreadableError, match=r"delta\.ckpt8: its base step-1\.ckpt8 \(seal [0-9a-f]{12}\) is missing"):
        read(delta)[name]
    assert list(read(delta)) == list(read(files["step-2.ckpt8"]))
    expected = read(files["step-2.ckpt8"])[name]
    assert (read(delta, [run])[name] == expected).all()
    (tmp_path / "bases").mkdir()
    for number, each in enumerate(("key.ckpt8", "step-1.ckpt8")):
        shutil.copy(files[each], tmp_path / "bases" / f"{number}.ckpt8")
    assert (read(delta)[name] == expected).all()
    for field, value in (("place", 0), ("links", 1), ("key", "0" * 64)):
        edited(unpack(Path(delta).read_bytes()), put("base", field, value), tmp_path / "other.ckpt8")
        with pytest.raises(UnreadableError, match=r"other\.ckpt8: its base .*/bases/1\.ckpt8 is of another chain"):
            read(tmp_path / "other.ckpt8")[name]
    damaged = bytearray((tmp_path / "bases" / "1.ckpt8").read_bytes())
    damaged[40] ^= 1
    (tmp_path / "bases" / "1.ckpt8").write_bytes(damaged)
    with pytest.raises(UnreadableError, match=r"delta\.ckpt8: .*/bases/1\.ckpt8: is damaged"):
        read(delta)[name]


def everything(path, folder):
    tensors = read(path)
    for name in tensors:
        tensors[name]
    tensors.write_original(folder / "original")
    (folder / "original").unlink()


def test_every_bit_is_checked_and_damage_is_one_line(tmp_path):
    sample = make_sample(tmp_path, "file")
    whole = sample.read_bytes()
    everything(sample, tmp_path)
    draw = random.Random(0)
    flips = [(draw.randrange(len(whole)), 1 << draw.randrange(8)) for _ in range(150)]
    for name, content in (
        *((f"flip of {at}", whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]) for at, bit in flips),
        *((f"cut to {at}", whole[:at]) for at in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1)),
        ("longer", whole + b"\0"),
        ("text", b"a text that is long enough to have a length"),
    ):
        (tmp_path / "x.ckpt8").write_bytes(content)
        with pytest.raises(UnreadableError) as caught:
            everything(tmp_path / "x.ckpt8", tmp_path)
        (tmp_path / "original").unlink(missing_ok=True)
        assert str(caught.value).startswith(f"{tmp_path / 'x.ckpt8'}: "), name
        assert "\n" not in str(caught.value), name


def test_a_file_that_is_missing_is_one_line(tmp_path):
    found = alone(FILE, tmp_path / "x.ckpt8")
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == f"{tmp_path / 'x.ckpt8'}: No such file or directory\n"
    assert alone(FILE).stderr == plain_reader.__doc__ + "\n"


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    model = {
        "w": torch.randn(90, 70),
        "b": torch.randn(70).bfloat16(),
        "n": torch.tensor(3.0),
        "none": torch.empty(0, 4),
    }
    return {"model": model, "ids": torch.arange(50), "step": 3}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", ["flash", "lossless"])
@pytest.mark.parametrize("world", [1, 3])
def test_what_ranks_have_packed_is_joined(world, preset, state, tmp_path):
    packed = pack(save_sliced(state, tmp_path / "plain"), tmp_path / "packed", world, preset=preset)
    tensors = read(packed)
    expected = load(
        {
            "model": {name: torch.zeros_like(t) for name, t in state["model"].items()},
            "ids": torch.zeros_like(state["ids"]),
        },
        packed,
    )
    flat = {f"model.{name}": tensor for name, tensor in expected["model"].items()} | {"ids": expected["ids"]}
    assert set(tensors) == set(flat)
    assert all(same(tensors[name], tensor) for name, tensor in flat.items())
    assert alone(FILE, packed).stdout.splitlines() == [
        f"{name}  {str(flat[name].dtype)[6:]}  {list(flat[name].shape)}" for name in tensors
    ]
    found = alone(FILE, packed, tmp_path / "x.pt")
    assert (found.returncode, len(found.stderr.splitlines())) == (1, 1)
    (packed / "__0_0.ckpt8").unlink()
    with pytest.raises(UnreadableError, match=r"__0_0\.ckpt8: No such file"):
        read(packed)
