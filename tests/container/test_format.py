"""The container against FORMAT.md: its annotated example, a second reader written from it alone, and safetensors."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from fractions import Fraction
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from reference_kit import LAYOUTS, masters
from safetensors import safe_open
from safetensors.torch import save_file
from small_kit import ALL_LOSSY, adamw_state, mixed

import ckpt8
import ckpt8.container
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import StorageInfo, TensorRef
from ckpt8.compressing.bundle_plan import plan_bundle
from ckpt8.compressing.compressor import Compressor, Options
from ckpt8.compressing.policy import Policy
from ckpt8.container import layout
from ckpt8.core.tensors import DType

FORMAT = (Path(ckpt8.container.__file__).parent / "FORMAT.md").read_text()
GOLDEN = sorted((Path(__file__).parents[2] / "fixtures" / "golden").glob("*.ckpt8"))
CHUNK = 1 << 20
SHARED = {"id": "shared/1"}
FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Plain:
    """A reader of the format that shares no code with the package."""

    def __init__(self, data):
        (length,) = struct.unpack_from("<Q", data)
        assert length <= 100_000_000
        head = data[: 8 + length]
        header = json.loads(head[8:].decode(), object_pairs_hook=self._unique, parse_constant=self._refuse)
        version = header.pop("__metadata__")["ckpt8"]
        self.entries, position = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            assert entry == {"dtype": "U8", "shape": [stop - start], "data_offsets": [position, stop]}
            self.entries[name] = data[len(head) + start : len(head) + stop]
            position = stop
        assert len(head) + position == len(data)
        assert list(self.entries)[-2:] == ["ckpt8.manifest", "ckpt8.seal"]
        stored = self.entries["ckpt8.manifest"]
        assert self.entries["ckpt8.seal"] == hashlib.sha256(head + stored).digest()
        size = zstandard.frame_content_size(stored)
        assert 0 < size <= 2**20 + 64 * len(stored)
        text = zstandard.ZstdDecompressor().decompress(stored)
        assert len(text) == size
        self.manifest = json.loads(text.decode(), object_pairs_hook=self._unique, parse_constant=self._refuse)
        assert self.manifest["version"] == version == self.lowest_version()
        assert self.manifest["frame"] == CHUNK
        assert self.manifest["slab"] % CHUNK == 0
        self.storages = self.manifest["storages"]
        if any(storage["codec"] == SHARED for storage in self.storages):
            self.expand()
        assert len({storage["name"] for storage in self.storages}) == len(self.storages)
        self.read = set()

    def expand(self):
        """Put the storages of packs in their places, and the rows of tables into the lists of records."""
        packed = {}
        for pack in (storage for storage in self.storages if storage["codec"] == SHARED):
            shared = pack["shared"]
            assert set(shared) == {"codec", "storages", "name", "numel", "reason", "error"}
            assert (pack["reason"], pack["error"]) == (None, None)
            rows = self.rows({key: value for key, value in shared.items() if key != "codec"}, "storages")
            numels = [row["numel"] for row in rows]
            assert sum(numels) == pack["numel"] <= 1 << 16
            index = 0
            for place, row in enumerate(rows):
                index += row.pop("storages")
                same = {"dtype": pack["dtype"], "role": pack["role"], "codec": shared["codec"]}
                assert index not in packed
                packed[index] = {**row, **same, "pack": pack, "place": place, "numels": numels}
        own = iter([storage for storage in self.storages if storage["codec"] != SHARED])
        total = sum(storage["codec"] != SHARED for storage in self.storages) + len(packed)
        self.storages = [packed.get(index) or next(own) for index in range(total)]
        assert self.manifest["tensors"] == self.manifest["members"] == []
        for row in self.rows(self.manifest["member_table"], "path"):
            skeleton = self.storages[row["skeleton"]]
            before = f"{row['path']}:" if "directory" in self.manifest else ""
            skeleton["name"] = f"{before}ckpt8.skeleton" if skeleton["name"] is None else skeleton["name"]
        assert all(storage["name"] for storage in self.storages)
        for row in self.rows(self.manifest["tensor_table"], "name"):
            storage = self.storages[row["storage"]]
            row["name"] = storage["name"] if row["name"] is None else row["name"]
            row["shape"] = [storage["numel"]] if row["shape"] is None else row["shape"]
            if row["stride"] is None:
                row["stride"] = [prod(max(n, 1) for n in row["shape"][k + 1 :]) for k in range(len(row["shape"]))]
            self.manifest["tensors"].append(row)
        for row in self.rows(self.manifest["member_table"], "path"):
            segments, fields, at = [], [], 0
            for each in self.rows(row["segments"], "before") if row["segments"] else []:
                storage = self.storages[each["storage"]]
                segments.append([at + each["before"], each["storage"]])
                at += each["before"] + storage["numel"] * itemsize(storage["dtype"])
            at = 0
            for each in self.rows(row["crc_fields"], "gap") if row["crc_fields"] else []:
                at += each["gap"]
                fields.append([at, each["storage"]])
            self.manifest["members"].append({**row, "segments": segments, "crc_fields": fields})

    @staticmethod
    def rows(table, listed):
        """The rows of a table."""
        count = len(table[listed])
        columns = {}
        for key, column in table.items():
            if isinstance(column, list):
                columns[key] = column
            elif "all" in column:
                columns[key] = [column["all"]] * count
            else:
                columns[key] = list(range(column["from"], column["from"] + count))
            assert len(columns[key]) == count
        return [{key: column[k] for key, column in columns.items()} for k in range(count)]

    def packed(self, storage):
        """{part: planes} of a storage in a pack."""
        pack, place, numels = storage["pack"], storage["place"], storage["numels"]
        found = {}
        for part, table in pack["parts"].items():
            sizes = [self.layout(storage, n)[part] for n in numels]
            width, counts = sizes[0][0], [count for _, count in sizes]
            first = sum(counts[:place])
            name, at = f"{pack['name']}:{part}", 0
            if not sum(numels):
                assert name not in self.entries
                assert table == {"lengths": [], "crcs": []}
                found[part] = [b""] * width
                continue
            self.read.add(name)
            assert len(table["lengths"]) == len(table["crcs"]) == width
            found[part] = []
            for length, crc in zip(table["lengths"], table["crcs"], strict=True):
                frame = self.entries[name][at : at + length]
                assert zlib.crc32(frame) == crc
                found[part].append(self.plane(frame, sum(counts))[first : first + counts[place]])
                at += length
            assert at == len(self.entries[name])
        assert set(found) == set(self.layout(storage, 1))
        return found

    def lowest_version(self):
        if any(each["codec"] == SHARED or each["codec"]["id"] == "reference16/1" for each in self.manifest["storages"]):
            return "1.3"
        if any(storage["codec"]["id"] == "reference/1" for storage in self.manifest["storages"]):
            return "1.2"
        return "1.1" if "directory" in self.manifest else "1.0"

    @staticmethod
    def _unique(pairs):
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    @staticmethod
    def _refuse(text):
        raise AssertionError(text)

    def layout(self, storage, n):
        """{part: (bytes of an element, elements)} of a chunk of n elements."""
        codec, dtype = storage["codec"], storage["dtype"]
        if codec["id"] == "lossless/1":
            assert set(codec) == {"id"}
            if dtype in FLOATS:
                return {f"plane{k}": (1, n) for k in range(FLOATS[dtype])}
            return {"bytes": (1, n * itemsize(dtype))}
        if codec["id"] == "split24/1":
            assert set(codec) == {"id", "R"}
            assert dtype == "float32"
            return {"exponent": (1, n), "mantissa": (1, n), "rho": (1, n)}
        if codec["id"] == "reference16/1":
            return {"delta": (1, n)}
        assert codec["id"] == "companded8/1"
        assert set(codec) == {"id", "signed", "Q", "p"}
        assert dtype in ("float32", "bfloat16")
        return {"codes": (1, n), "scales": (2, -(-n // 32))}

    def frames(self, storage):
        """{part: [bytes of every plane, by chunk]} of a storage, all checks made."""
        total = storage["numel"]
        if "pack" in storage:
            return {part: [planes] for part, planes in self.packed(storage).items()}, [total]
        chunks = [min(CHUNK, total - start) for start in range(0, total, CHUNK)]
        per_slab = self.manifest["slab"] // CHUNK
        slabs = -(-len(chunks) // per_slab)
        found = {}
        for part, table in storage["parts"].items():
            lengths, crcs = list(table["lengths"]), list(table["crcs"])
            planes = []
            for slab in range(slabs):
                name = f"{storage['name']}/{part}" + (f"@{slab}" if slabs > 1 else "")
                content, place = self.entries[name], 0
                self.read.add(name)
                for n in chunks[slab * per_slab : (slab + 1) * per_slab]:
                    width, count = self.layout(storage, n)[part]
                    planes.append([])
                    for _ in range(width):
                        length = lengths.pop(0)
                        frame = content[place : place + length]
                        place += length
                        assert zlib.crc32(frame) == crcs.pop(0)
                        planes[-1].append(self.plane(frame, count))
                assert place == len(content)
            assert not lengths
            assert not crcs
            found[part] = planes
        assert set(found) == set(self.layout(storage, 1))
        return found, chunks

    @staticmethod
    def plane(frame, length):
        if len(frame) == length:
            return frame
        parameters = zstandard.get_frame_parameters(frame)
        assert parameters.content_size == length
        assert parameters.window_size <= 8 << 20
        return zstandard.ZstdDecompressor().decompress(frame)

    def storage(self, index):
        """The bytes of a storage."""
        storage = self.storages[index]
        if storage["codec"]["id"] == "reference/1":
            return self.copy(storage, "bfloat16")
        if storage["codec"]["id"] == "reference16/1":
            return self.half_copy(storage)
        frames, chunks = self.frames(storage)
        decode = DECODE[storage["codec"]["id"]] if storage["numel"] else lambda *_: b""
        return b"".join(
            decode({part: planes[k] for part, planes in frames.items()}, storage, n) for k, n in enumerate(chunks)
        )

    def half_copy(self, storage):
        """The bytes of a reference of fp16: masters rounded to bf16, then to fp16, and what the copy has more."""
        high = integers(self.copy(storage, "float16", {"delta"}), torch.int16) & 0xFFFF
        wide = (high.numpy().astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            half = wide.astype(np.float16).view(np.uint16).astype(np.int64)
        nan = np.isnan(wide)
        half[nan] = (high.numpy()[nan] & 0x8000) | 0x7E00
        frames, _ = self.frames(storage)
        delta = integers(b"".join(planes[0] for planes in frames["delta"]), torch.int8)
        return low_bytes((torch.from_numpy(half) + delta) % 2**16, 2)

    def copy(self, storage, dtype, parts=frozenset()):
        """The bytes of a reference: masters rounded to bf16, and padding."""
        assert set(storage["codec"]) == {"id", "runs"}
        assert storage["dtype"] == dtype
        assert set(storage["parts"]) == parts
        out = b""
        for master, start, length in storage["codec"]["runs"]:
            if master is None:
                out += struct.pack("<H", start) * length
                continue
            assert self.storages[master]["dtype"] == "float32"
            assert self.storages[master]["codec"]["id"] in ("lossless/1", "split24/1", "split32/1")
            u = integers(self.storage(master)[4 * start : 4 * (start + length)], torch.int32) & 0xFFFFFFFF
            assert len(u) == length
            out += low_bytes((u + 0x7FFF + ((u >> 16) & 1)) % 2**32 >> 16, 2)
        assert len(out) == 2 * storage["numel"]
        return out

    def member(self):
        """The bytes of a source that was one file."""
        assert "directory" not in self.manifest
        (member,) = self.manifest["members"]
        return self.content(member)

    def directory(self):
        """Of a source that was a directory, the format and content of every member."""
        members = self.manifest["members"]
        paths = [member["path"] for member in members]
        assert len(set(paths)) == len(paths)
        for member in members:
            components = member["path"].split("/")
            assert not {"", ".", ".."} & set(components)
            assert not {"/".join(components[:k]) for k in range(1, len(components))} & set(paths)
            own = [member["skeleton"], *(index for _, index in member["segments"])]
            assert all(self.storages[index]["name"].startswith(f"{member['path']}:") for index in own)
            if member["format"] in ("file", "symlink", "directory"):
                assert not member["segments"]
                assert not member["crc_fields"]
        return {member["path"]: (member["format"], self.content(member)) for member in members}

    def content(self, member):
        rest = self.storage(member["skeleton"])
        out, position, used = b"", 0, 0
        contents = {}
        for offset, index in member["segments"]:
            assert offset >= position
            contents[index] = self.storage(index)
            out += rest[used : used + offset - position] + contents[index]
            used += offset - position
            position = len(out)
        out += rest[used:]
        assert len(out) == member["size"]
        filled = bytearray(out)
        for place, index in member["crc_fields"]:
            filled[place : place + 4] = zlib.crc32(contents[index]).to_bytes(4, "little")
        return bytes(filled)

    def tensor(self, record):
        data = bytearray(self.storage(record["storage"]))
        if prod(record["shape"]) == 0:
            return torch.empty(record["shape"], dtype=getattr(torch, record["dtype"]))
        flat = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, record["dtype"]))
        return flat.as_strided(record["shape"], record["stride"], record["offset"])


def itemsize(dtype):
    return getattr(torch, dtype).itemsize


def integers(plane, dtype=torch.uint8):
    return torch.frombuffer(bytearray(plane), dtype=dtype).to(torch.int64)


def low_bytes(x, size):
    """The low bytes of 64-bit integers, little-endian."""
    return bytes(x.contiguous().view(torch.uint8).view(-1, 8)[:, :size].contiguous().flatten().tolist())


def lossless(parts, storage, n):
    if "bytes" in parts:
        return parts["bytes"][0]
    size = FLOATS[storage["dtype"]]
    rotated = sum(integers(parts[f"plane{k}"][0]) << 8 * (size - 1 - k) for k in range(size))
    width = 8 * size
    return low_bytes((rotated >> 1) & ((1 << (width - 1)) - 1) | (rotated & 1) << (width - 1), size)


def split24(parts, storage, n):
    levels = storage["codec"]["R"]
    exponent, mantissa = integers(parts["exponent"][0]), integers(parts["mantissa"][0])
    rho = integers(parts["rho"][0], torch.int8)
    hi = exponent << 7 | (mantissa & 0x7F)
    size = torch.div(32768 * rho.abs() + levels // 2, levels, rounding_mode="floor")
    d = rho.sign() * size.clamp(max=32767)
    return low_bytes((mantissa >> 7) << 31 | ((hi << 16) + d), 4)


def companded8(parts, storage, n):
    codec = storage["codec"]
    high, low = parts["scales"]
    bits = (integers(high) << 8 | integers(low)) << 15
    scale = bits.to(torch.int32).view(torch.float32).repeat_interleave(32)[:n]
    code = integers(parts["codes"][0], torch.int8 if codec["signed"] else torch.uint8).float()
    y = code / torch.tensor(float(codec["Q"]))
    if codec["signed"]:
        x = scale * (y / (2 - y.abs()))
    else:
        root = scale * y if codec["p"] == 1 else scale * (y * y)
        x = root * root
    x = x.to(getattr(torch, storage["dtype"]))
    return bytes(x.view(torch.uint8).tolist())


DECODE = {"lossless/1": lossless, "split24/1": split24, "companded8/1": companded8}


# The example


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
    assert set(lines) == {
        "source",
        "w/plane0",
        "w/plane1",
        "w/plane2",
        "w/plane3",
        "ckpt8.skeleton/bytes",
    }
    assert [name for name, *_ in entries] == [*list(lines)[1:], "ckpt8.manifest", "ckpt8.seal"]
    source = lines.pop("source")
    assert struct.unpack_from("<2f", source, 4) == (1.0, -2.0)
    assert len(source) == 20
    _compress_example(source, tmp_path / "x.ckpt8")
    data = (tmp_path / "x.ckpt8").read_bytes()
    plain = Plain(data)
    assert {name: plain.entries[name] for name in lines} == lines
    m = len(plain.entries["ckpt8.manifest"])
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    # The offsets are numbers and sums with m, as in "52+m".
    offsets = [
        [sum(m if term == "m" else int(term) for term in offset.split("+")) for offset in pair] for _, *pair in entries
    ]
    assert [header[name]["data_offsets"] for name, *_ in entries] == offsets
    assert set(header) == {"__metadata__", *plain.entries}
    segments = json.loads(re.search(r"`segments` (\[\[.*?\]\])", text)[1])
    skeleton = int(re.search(r"`skeleton` (\d+)", text)[1])
    (member,) = plain.manifest["members"]
    assert (member["segments"], member["skeleton"], member["size"]) == (segments, skeleton, 20)
    assert plain.member() == source
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
    manifest = Plain((tmp_path / "x.ckpt8").read_bytes()).manifest
    section = FORMAT.partition("## Manifest")[2].partition("## Storages")[0]
    records = [manifest, manifest["storages"][0], manifest["members"][0], manifest["tensors"][0]]
    for field in {key for record in records for key in record}:
        assert re.search(rf"\b{field}\b", section), field


# The second reader


def _raw(tensor):
    # What is stored: of a conjugate or negative view, before the flag is applied.
    tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


def _agrees(path):
    plain = Plain(path.read_bytes())
    with ckpt8.open(path) as file:
        names = [record["name"] for record in plain.manifest["tensors"]]
        assert file.keys() == names
        for record in plain.manifest["tensors"]:
            ours, theirs = file.get_tensor(record["name"]), plain.tensor(record)
            assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
            assert _raw(ours) == _raw(theirs), record["name"]
    target = path.with_suffix(".restored")
    assert ckpt8.restore(path, target).read_bytes() == plain.member()
    assert plain.read == set(plain.entries) - {"ckpt8.manifest", "ckpt8.seal"}
    _agrees_with_safetensors(path, plain)
    return plain


def _agrees_with_safetensors(path, plain):
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(plain.entries)
        assert file.metadata()["ckpt8"] == plain.manifest["version"]
        for name, content in plain.entries.items():
            assert file.get_slice(name).get_dtype() == "U8"
            assert file.get_slice(name).get_shape() == [len(content)]
            if content:
                assert bytes(file.get_tensor(name).tolist()) == content


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_golden_files_read_from_the_specification_alone(path, tmp_path):
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    plain = Plain(copy.read_bytes())
    if "directory" not in plain.manifest:
        _agrees(copy)
        return
    back = ckpt8.restore(copy, tmp_path / "back")
    for name, (kind, content) in plain.directory().items():
        member = back / name
        expected = {"symlink": lambda path: str(path.readlink()).encode(), "directory": lambda path: b""}
        assert expected.get(kind, Path.read_bytes)(member) == content


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
    plain = Plain((tmp_path / "run.ckpt8").read_bytes())
    assert plain.manifest["directory"] == "run"
    found = plain.directory()
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
    assert plain.read == set(plain.entries) - {"ckpt8.manifest", "ckpt8.seal"}
    _agrees_with_safetensors(tmp_path / "run.ckpt8", plain)


@pytest.mark.parametrize("preset", ["flash", "compact", "lossless"])
@pytest.mark.parametrize("name", ["gpt_bf16.pt", "custom_objects.pt", "views.pt", "legacy.pt"])
def test_fresh_files_read_from_the_specification_alone(name, preset, inputs, tmp_path):
    ckpt8.compress(inputs / name, tmp_path / "x.ckpt8", preset=preset)
    _agrees(tmp_path / "x.ckpt8")


@pytest.mark.parametrize("preset", ["flash", "lossless"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_references_read_from_the_specification_alone(layout, preset, tmp_path):
    torch.save(LAYOUTS[layout](masters()), tmp_path / "a.pt")
    manifest = ckpt8.compress(tmp_path / "a.pt", preset=preset)
    assert any(storage.is_reference for storage in manifest.storages)
    _agrees(tmp_path / "a.ckpt8")


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
    plain = _agrees(tmp_path / "a.ckpt8")
    fields = {*plain.manifest["tensors"][0], *plain.manifest["members"][0], "member_table", "tensor_table", "shared"}
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
    plain = _agrees(tmp_path / "a.ckpt8")
    assert plain.member() == (tmp_path / "a.pt").read_bytes()
    records = {record["name"]: record for record in plain.manifest["tensors"]}
    assert set(records) == set(tree)
    for name, record in records.items():
        assert record["dtype"] == str(tree[name].dtype).removeprefix("torch.")
        assert _raw(plain.tensor(record)) == _raw(tree[name])


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
    plain, whole = _agrees(tmp_path / "cut.ckpt8"), Plain((tmp_path / "whole.ckpt8").read_bytes())
    assert (plain.manifest["slab"], whole.manifest["slab"]) == (CHUNK, 1 << 24)
    for name in ("model.w/rho", "model.flags/bytes", "optimizer.state.0.exp_avg/codes"):
        assert [f"{name}@{k}" in plain.entries for k in range(4)] == [True, True, True, False]
        assert b"".join(plain.entries[f"{name}@{k}"] for k in range(3)) == whole.entries[name]
    assert [f"ckpt8.skeleton/bytes@{k}" in plain.entries for k in range(3)] == [True, True, False]
    # Slabs show in the entries and nowhere else.
    assert plain.storages == whole.storages
    assert not ckpt8.verify(tmp_path / "cut.ckpt8", tmp_path / "a.pt").failures


def test_a_slab_of_two_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "SLAB", 2 * CHUNK)
    w = torch.arange(3 * CHUNK, dtype=torch.int16)
    torch.save({"w": w}, tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt")
    plain = _agrees(tmp_path / "a.ckpt8")
    assert plain.member() == (tmp_path / "a.pt").read_bytes()
    assert [name for name in plain.entries if name.startswith("w/")] in (
        ["w/bytes@0", "w/bytes@1"],
        ["w/bytes@0", "w/bytes@1", "w/bytes@2"],
    )


# The arithmetic of the codecs in exact fractions: what the second reader leaves to torch


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


@pytest.mark.parametrize("preset", ["flash", "compact"])
def test_moments_are_decoded_as_exact_fractions_say(preset, inputs, tmp_path):
    ckpt8.compress(inputs / "gpt_adamw.pt", tmp_path / "x.ckpt8", preset=preset)
    plain = Plain((tmp_path / "x.ckpt8").read_bytes())
    kinds = set()
    with ckpt8.open(tmp_path / "x.ckpt8") as file:
        for record in plain.manifest["tensors"]:
            storage = plain.storages[record["storage"]]
            codec = storage["codec"]
            if codec["id"] != "companded8/1":
                continue
            kinds.add(codec["signed"])
            frames, _ = plain.frames(storage)
            codes, (high, low) = frames["codes"][0][0], frames["scales"][0]
            values = file.get_tensor(record["name"]).flatten()
            for k in range(0, len(codes), len(codes) // 60):
                code = codes[k] - 256 if codec["signed"] and codes[k] > 127 else codes[k]
                exact = _exact_moment(code, high[k // 32] << 8 | low[k // 32], codec)
                assert Fraction(values[k].item()) == exact
    assert kinds == {True, False}


def test_weights_are_decoded_as_integers_say(inputs, tmp_path):
    ckpt8.compress(inputs / "gpt_adamw.pt", tmp_path / "x.ckpt8", rules=["*=split24(R=7)"])
    plain = Plain((tmp_path / "x.ckpt8").read_bytes())
    seen = 0
    with ckpt8.open(tmp_path / "x.ckpt8") as file:
        for record in plain.manifest["tensors"]:
            storage = plain.storages[record["storage"]]
            if storage["codec"]["id"] != "split24/1":
                continue
            frames, _ = plain.frames(storage)
            exponent, mantissa, rho = (frames[part][0][0] for part in ("exponent", "mantissa", "rho"))
            bits = file.get_tensor(record["name"]).flatten().view(torch.int32)
            for k in range(0, len(rho), 97):
                r = rho[k] - 256 if rho[k] > 127 else rho[k]
                d = min((32768 * abs(r) + 7 // 2) // 7, 32767) * ((r > 0) - (r < 0))
                word = (mantissa[k] >> 7) << 31 | ((exponent[k] << 7 | mantissa[k] & 0x7F) << 16) + d
                assert bits[k].item() & 0xFFFFFFFF == word
                seen += 1
    assert seen > 1000
