"""The container against FORMAT.md: its annotated example, a second reader written from it alone, and safetensors."""

from __future__ import annotations

import json
import re
import struct
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from budget_kit import run_of
from reference_kit import LAYOUTS, masters
from safetensors import safe_open
from safetensors.torch import save_file
from small_kit import ALL_LOSSY, adamw_state, mixed
from strict_reader import CHUNK, Strict, same
from test_decoded_copies import tree_of

import ckpt8
import ckpt8.container
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import StorageInfo, TensorRef
from ckpt8.compressing.compressor import Compressor, Options
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container import header as layout
from ckpt8.core.tensors import DType

FORMAT = (Path(ckpt8.container.__file__).parent / "FORMAT.md").read_text()
GOLDEN = sorted((Path(__file__).parents[2] / "fixtures" / "golden").glob("*.ckpt8"))


class Example:
    """The source of FORMAT.md's example."""

    format = "example"

    def __init__(self, data):
        self.data = data
        self.size = len(data)
        self.storages = (StorageInfo("0", DType.FLOAT32, 4, 8),)
        self.tree = {"w": TensorRef("0", DType.FLOAT32, 0, (2,), (1,))}

    def read_into(self, offset, buffer):
        assert offset + len(buffer) <= len(self.data)
        buffer[:] = self.data[offset : offset + len(buffer)]

    def check_unchanged(self):
        pass


def _example():
    """The lines of bytes, by name, and the entries with their offsets as written, from the last section."""
    text = FORMAT.partition("## Example")[2]
    named = dict(re.findall(r"^    (\S+) +((?:[0-9a-f]{2} +)*[0-9a-f]{2})$", text, re.MULTILINE))
    lines = {name: bytes.fromhex(digits) for name, digits in named.items()}
    entries = re.findall(r"`([^`\s]+)`\s+\[([\w+]+),([\w+]+)\]", text)
    return lines, entries, " ".join(text.split())


def _compress_example(data, target):
    bundle = Bundle.of(Example(data), "a.bin")
    plan = plan_bundle(bundle, Policy.of("lossless"))
    Compressor(bundle, plan, Options()).run(target, Policy.of("lossless"), force=False)


def test_the_example_of_the_specification_is_what_is_written(tmp_path):
    lines, entries, text = _example()
    assert set(lines) == {"source", "w/plane0", "w/plane1", "w/plane2", "w/plane3", "ckpt8.skeleton/bytes"}
    assert [name for name, *_ in entries] == [*list(lines)[1:], "ckpt8.manifest", "ckpt8.seal"]
    source = lines.pop("source")
    assert struct.unpack_from("<2f", source, 4) == (1.0, -2.0)
    assert len(source) == 20
    _compress_example(source, tmp_path / "x.ckpt8")
    data = (tmp_path / "x.ckpt8").read_bytes()
    plain = Strict(tmp_path / "x.ckpt8")
    assert {name: plain.contents[name] for name in lines} == lines
    m = len(plain.contents["ckpt8.manifest"])
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    # The offsets are numbers and sums with m, as in "52+m".
    offsets = [
        [sum(m if term == "m" else int(term) for term in offset.split("+")) for offset in pair] for _, *pair in entries
    ]
    assert [header[name]["data_offsets"] for name, *_ in entries] == offsets
    assert set(header) == {"__metadata__", *plain.contents}
    segments = json.loads(re.search(r"`segments` (\[\[.*?\]\])", text)[1])
    skeleton = int(re.search(r"`skeleton` (\d+)", text)[1])
    (member,) = plain.manifest["members"]
    assert (member["segments"], member["skeleton"], member["size"]) == (segments, skeleton, 20)
    assert plain.original() == source
    assert ckpt8.restore(tmp_path / "x.ckpt8", tmp_path / "y").read_bytes() == source


def test_the_rotation_of_the_example():
    """The line that explains the frames, checked by hand."""
    rotations = re.findall(r"(-?\d\.\d): ([0-9a-f]{8}) -> ([0-9a-f]{8})", FORMAT)
    assert len(rotations) == 2
    for value, bits, rotated in rotations:
        number = int(bits, 16)
        assert struct.unpack("<f", struct.pack("<I", number)) == (float(value),)
        assert int(rotated, 16) == (number << 1 | number >> 31) & 0xFFFFFFFF


def test_the_specification_names_every_field_that_is_written(tmp_path):
    _compress_example(_example()[0]["source"], tmp_path / "x.ckpt8")
    manifest = Strict(tmp_path / "x.ckpt8").stated
    section = FORMAT.partition("## Manifest")[2].partition("## Storages")[0]
    records = [manifest, manifest["storages"][0], manifest["members"][0], manifest["tensors"][0]]
    for field in {key for record in records for key in record}:
        assert re.search(rf"\b{field}\b", section), field


def _raw(tensor):
    # What is stored: of a conjugate or negative view, before the flag is applied.
    tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


def agrees(path):
    plain = Strict(path)
    with ckpt8.open(path) as file:
        assert file.keys() == list(plain)
        for name, record in plain.records.items():
            ours, theirs = file.get_tensor(name), plain.tensor(record)
            assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
            assert _raw(ours) == _raw(theirs), name
            assert same(plain[name], ours), name
    if "directory" not in plain.stated:
        assert ckpt8.restore(path, path.with_suffix(".restored")).read_bytes() == plain.original()
    _agrees_with_safetensors(path, plain)
    return plain


def _agrees_with_safetensors(path, plain):
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(plain.contents)
        assert file.metadata()["ckpt8"] == plain.stated["version"]
        for name, content in plain.contents.items():
            assert file.get_slice(name).get_dtype() == "U8"
            assert file.get_slice(name).get_shape() == [len(content)]
            if content:
                assert bytes(file.get_tensor(name).tolist()) == content


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_golden_files_read_from_the_specification_alone(path, tmp_path):
    copy = tmp_path / path.name
    for each in GOLDEN if path.name.startswith(("chain_", "momentum_")) else [path]:
        (tmp_path / each.name).write_bytes(each.read_bytes())
    found = agrees(copy).original()
    if isinstance(found, dict):
        back = ckpt8.restore(copy, tmp_path / "back")
        for name, (kind, content) in found.items():
            expected = {"symlink": lambda path: str(path.readlink()).encode(), "directory": lambda path: b""}
            assert expected.get(kind, Path.read_bytes)(back / name) == content


@pytest.mark.parametrize("preset", ["flash", "lossless"])
def test_a_directory_read_from_the_specification_alone(preset, inputs, tmp_path):
    root = tmp_path / "run"
    (root / "a" / "hollow").mkdir(parents=True)
    for name in ("gpt_bf16.pt", "views.pt", "legacy.pt"):
        (root / "a" / name).write_bytes((inputs / name).read_bytes())
    save_file({"w": torch.randn(80, 80), "b": torch.ones(3)}, root / "model.safetensors")
    (root / "notes").write_text("notes")
    (root / "nothing").touch()
    (root / "a" / "link").symlink_to("../notes")
    ckpt8.compress(root, preset=preset)
    plain = Strict(tmp_path / "run.ckpt8")
    assert plain.stated["directory"] == "run"
    found = plain.original()
    assert found.pop("a/hollow") == ("directory", b"")
    assert found.pop("a/link") == ("symlink", b"../notes")
    assert {path: kind for path, (kind, _) in found.items()} == {
        "a/gpt_bf16.pt": "torch-zip",
        "a/legacy.pt": "torch-legacy",
        "a/views.pt": "torch-zip",
        "model.safetensors": "safetensors",
        "notes": "file",
        "nothing": "file",
    }
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    assert all((back / path).read_bytes() == content for path, (_, content) in found.items())
    _agrees_with_safetensors(tmp_path / "run.ckpt8", plain)


@pytest.mark.parametrize("preset", ["flash", "compact", "lossless"])
@pytest.mark.parametrize("name", ["gpt_bf16.pt", "custom_objects.pt", "views.pt", "legacy.pt"])
def test_fresh_files_read_from_the_specification_alone(name, preset, inputs, tmp_path):
    ckpt8.compress(inputs / name, tmp_path / "x.ckpt8", preset=preset)
    agrees(tmp_path / "x.ckpt8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_adamw.pt", "gpt_bf16.pt", "gpt_stable_adamw.pt", "gpt_came.pt"])
@pytest.mark.parametrize("options", [{"preset": "archive"}, {"preset": "compact"}, {"budget": 7}], ids=str)
def test_real_runs_under_a_budget_read_from_the_specification_alone(name, options, inputs, tmp_path):
    ckpt8.compress(inputs / name, tmp_path / "x.ckpt8", **options)
    plain = agrees(tmp_path / "x.ckpt8")
    codecs = {storage["codec"]["id"] for storage in plain.storages}
    assert codecs - {"rclog/1"} == {"lossless/1", "lattice/1", "vscaled/1"}
    assert "rclog/1" in codecs or name == "gpt_came.pt"
    assert plain.stated["version"] == "1.6"
    tables = [part for storage in plain.stated["storages"] for part in storage["parts"].values()]
    assert len({(*mode[:3], *mode[4:]) for table in tables for mode in table.get("modes", [])}) > 3


@pytest.mark.parametrize("preset", ["flash", "lossless"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_references_read_from_the_specification_alone(layout, preset, tmp_path):
    torch.save(LAYOUTS[layout](masters()), tmp_path / "a.pt")
    manifest = ckpt8.compress(tmp_path / "a.pt", preset=preset)
    assert any(storage.is_reference for storage in manifest.storages)
    agrees(tmp_path / "a.ckpt8")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_copies_of_decoded_masters(layout, dtype, tmp_path):
    torch.save(tree_of(layout, dtype, masters()), tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt", preset="archive")
    found = {storage["codec"]["id"] for storage in agrees(tmp_path / "a.ckpt8").storages}
    assert found >= {"reference/2", "lattice/1", "rclog/1", "vscaled/1"}


@pytest.mark.parametrize(
    ("tree", "options", "expected"),
    [
        (mixed(), {}, set()),
        (adamw_state(40), {}, {"lossless/1"}),
        (adamw_state(40), {"rules": ALL_LOSSY}, {"companded8/1"}),
        (adamw_state(40), {"rules": ALL_LOSSY, "max_update_error": 1e-2}, {"companded8/1", "lossless/1"}),
    ],
    ids=["mixed", "adamw", "lossy", "refused"],
)
def test_packs_read_from_the_specification_alone(tree, options, expected, tmp_path):
    torch.save(tree, tmp_path / "a.pt")
    manifest = ckpt8.compress(tmp_path / "a.pt", **options)
    assert manifest.version == "1.3"
    codecs = {storage.codec["id"] for storage in manifest.storages if storage.pack and storage.role.value == "moment1"}
    assert codecs == expected
    plain = agrees(tmp_path / "a.ckpt8")
    fields = {*next(iter(plain.records.values())), *plain.members()[0], "member_table", "tensor_table", "shared"}
    section = FORMAT.partition("## Packs")[2].partition("## Codecs")[0]
    assert all(re.search(rf"\b{field}\b", section) for field in fields)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_element_type_and_empty_storages(tmp_path):
    generator = torch.Generator().manual_seed(3)
    dtypes = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    dtypes += ["uint16", "uint32", "uint64", "complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2"]
    tree = {}
    for dtype in dtypes:
        kind = getattr(torch, dtype)
        raw = torch.randint(0, 2 if dtype == "bool" else 256, (37 * kind.itemsize,), generator=generator)
        tree[dtype] = raw.to(torch.uint8).view(kind)
        tree[f"{dtype} empty"] = torch.empty(0, dtype=kind)
    tree["scalar"] = torch.tensor(3.5)
    torch.save(tree, tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt")
    plain = agrees(tmp_path / "a.ckpt8")
    assert plain.original() == (tmp_path / "a.pt").read_bytes()
    assert set(plain) == set(tree)
    for name, record in plain.records.items():
        assert record["dtype"] == str(tree[name].dtype).removeprefix("torch.")
        assert _raw(plain.tensor(record)) == _raw(tree[name])


@pytest.mark.slow
def test_several_slabs(tmp_path, monkeypatch):
    """A storage of three slabs and a ragged end in each codec, and a skeleton of two."""
    generator = torch.Generator().manual_seed(4)
    n = 2 * CHUNK + 12_345
    m = torch.randn(n, generator=generator) * 1e-3
    tree = {
        "model": {"w": torch.randn(n, generator=generator), "flags": m > 0},
        "optimizer": {
            "state": {0: {"step": torch.tensor(9.0), "exp_avg": m, "exp_avg_sq": (m * m).bfloat16()}},
            "param_groups": [{"params": [0], "betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False}],
        },
        "note": bytes(torch.randint(0, 256, (CHUNK + 99_999,), generator=generator).tolist()),
    }
    torch.save(tree, tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt", tmp_path / "whole.ckpt8")
    monkeypatch.setattr(layout, "SLAB", CHUNK)
    ckpt8.compress(tmp_path / "a.pt", tmp_path / "cut.ckpt8")
    plain, whole = agrees(tmp_path / "cut.ckpt8"), Strict(tmp_path / "whole.ckpt8")
    assert (plain.stated["slab"], whole.stated["slab"]) == (CHUNK, 1 << 24)
    for name in ("model.w/rho", "model.flags/bytes", "optimizer.state.0.exp_avg/codes"):
        assert [f"{name}@{k}" in plain.contents for k in range(4)] == [True, True, True, False]
        assert b"".join(plain.contents[f"{name}@{k}"] for k in range(3)) == whole.contents[name]
    assert [f"ckpt8.skeleton/bytes@{k}" in plain.contents for k in range(3)] == [True, True, False]
    # Slabs show in the entries and nowhere else.
    assert plain.storages == whole.storages
    assert not ckpt8.verify(tmp_path / "cut.ckpt8", tmp_path / "a.pt").failures


def test_a_slab_of_two_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "SLAB", 2 * CHUNK)
    w = torch.arange(3 * CHUNK, dtype=torch.int16)
    torch.save({"w": w}, tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt")
    plain = agrees(tmp_path / "a.ckpt8")
    assert plain.original() == (tmp_path / "a.pt").read_bytes()
    assert [name for name in plain.contents if name.startswith("w/")] in (
        ["w/bytes@0", "w/bytes@1"],
        ["w/bytes@0", "w/bytes@1", "w/bytes@2"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_chunks_and_slabs_under_a_budget(dtype, tmp_path, monkeypatch):
    """Rows and columns of factors begin anew in every chunk, the dither and the rows of the tensor do not."""
    monkeypatch.setattr(layout, "SLAB", CHUNK)
    torch.save(run_of([(1100, 1000), (70_000,)], dtype=dtype), tmp_path / "a.pt")
    manifest = ckpt8.compress(tmp_path / "a.pt", budget=1)
    plain = agrees(tmp_path / "a.ckpt8")
    assert {storage["codec"]["id"] for storage in plain.storages} >= {"lattice/1", "rclog/1", "vscaled/1"}
    section = FORMAT.partition("## Manifest")[2].partition("## Storages")[0]
    fields = {*plain.stated["budget"], *plain.stated["parameters"][0]["steps"], "modes", "budget", "steps"}
    assert all(field in section for field in fields)
    assert {
        (each.codec["C"], each.codec["columns"]) for each in manifest.storages if each.codec["id"] == "rclog/1"
    } == {(1000, True), (64, False)}
    assert "model.layers.0.weight/codes@1" in plain.contents


@pytest.mark.slow
def test_packs_of_symbols(tmp_path):
    """Second moments share entries where all else of their parameters is kept exactly."""
    rules = ["model.*=lossless", "*.exp_avg=lossless"]
    torch.save(run_of([(64, 72), (70, 64)] * 20), tmp_path / "a.pt")
    manifest = ckpt8.compress(tmp_path / "a.pt", budget=2, rules=rules)
    packed = [storage.codec["C"] for storage in manifest.storages if storage.pack and "C" in storage.codec]
    assert sorted(packed) == [64] * 20 + [72] * 20
    assert agrees(tmp_path / "a.ckpt8").manifest["version"] in ("1.4", "1.6")


@pytest.mark.parametrize("preset", ["flash", "lossless"])
def test_files_without_a_budget_state_nothing_of_it(preset, inputs, tmp_path):
    ckpt8.compress(inputs / "gpt_adamw.pt", tmp_path / "x.ckpt8", preset=preset)
    manifest = Strict(tmp_path / "x.ckpt8").stated
    assert manifest["version"] == "1.3"
    assert "budget" not in manifest
    assert {"steps" in parameter for parameter in manifest["parameters"]} == {preset == "flash"}
    assert not any("modes" in part for storage in manifest["storages"] for part in storage["parts"].values())


# The arithmetic of the codecs in exact fractions


def _fp32(value):
    """The fp32 number nearest to a fraction, ties to even."""
    if value == 0:
        return Fraction(0)
    exponent = max(-149, abs(value.numerator).bit_length() - value.denominator.bit_length() - 24)
    exponent += abs(value) / Fraction(2) ** exponent >= 1 << 24
    scaled = abs(value) / Fraction(2) ** exponent
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2)
    return (1 if value > 0 else -1) * whole * Fraction(2) ** exponent


def _float(bits):
    return Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])


def _exact_moment(code, scale_bits, codec):
    s, y = _float(scale_bits << 15), _fp32(Fraction(code, codec["Q"]))
    if codec["signed"]:
        return _fp32(s * _fp32(y / _fp32(2 - abs(y))))
    root = _fp32(s * y) if codec["p"] == 1 else _fp32(s * _fp32(y * y))
    return _fp32(root * root)


@pytest.mark.parametrize(
    "rules",
    [[], ["*.exp_avg=companded8(Q=31)", "*.exp_avg_sq=companded8(signed=False,Q=63,p=0.5)"]],
    ids=["flash", "fewer levels"],
)
def test_moments_are_decoded_as_exact_fractions_say(rules, inputs, tmp_path):
    ckpt8.compress(inputs / "gpt_adamw.pt", tmp_path / "x.ckpt8", rules=rules)
    plain = Strict(tmp_path / "x.ckpt8")
    kinds = set()
    with ckpt8.open(tmp_path / "x.ckpt8") as file:
        for record in plain.records.values():
            storage = plain.storages[record["storage"]]
            codec = storage["codec"]
            if codec["id"] != "companded8/1":
                continue
            kinds.add(codec["signed"])
            parts = plain.parts(record["storage"], 0)
            codes, scales = parts["codes"].tolist(), parts["scales"].tolist()
            values = file.get_tensor(record["name"]).flatten()
            for k in range(0, len(codes), len(codes) // 60):
                exact = _exact_moment(codes[k], scales[k // 32], codec)
                assert Fraction(values[k].item()) == exact
    assert kinds == {True, False}


def test_weights_are_decoded_as_integers_say(inputs, tmp_path):
    ckpt8.compress(inputs / "gpt_adamw.pt", tmp_path / "x.ckpt8", rules=["*=split24(R=7)"])
    plain = Strict(tmp_path / "x.ckpt8")
    seen = 0
    with ckpt8.open(tmp_path / "x.ckpt8") as file:
        for record in plain.records.values():
            storage = plain.storages[record["storage"]]
            if storage["codec"]["id"] != "split24/1":
                continue
            parts = plain.parts(record["storage"], 0)
            exponent, mantissa, rho = (parts[part].tolist() for part in ("exponent", "mantissa", "rho"))
            bits = file.get_tensor(record["name"]).flatten().view(torch.int32)
            for k in range(0, len(rho), 97):
                d = min((32768 * abs(rho[k]) + 7 // 2) // 7, 32767) * ((rho[k] > 0) - (rho[k] < 0))
                word = (mantissa[k] >> 7) << 31 | ((exponent[k] << 7 | mantissa[k] & 0x7F) << 16) + d
                assert bits[k].item() & 0xFFFFFFFF == word
                seen += 1
    assert seen > 1000
