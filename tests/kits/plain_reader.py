"""A reader of containers written from FORMAT.md alone: it shares no code with the package."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from math import prod

import numpy as np
import torch
import zstandard
from plain_codecs import DECODE, FLOATS, SYMBOLS, added, itemsize, next_symbols, plane_lengths, rounded_bits, unpacked

CHUNK = 1 << 20
SHARED = {"id": "shared/1"}
EXACT = ("lossless/1", "split24/1", "split32/1")
STEPPED = {"lattice/1", "lattice/2", "rclog/1", "vscaled/1", "reference/2"}


def half_bits(bits):
    """The bits of fp16 for those of fp32."""
    numbers = bits.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        half = numbers.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(numbers), bits >> 16 & 0x8000 | 0x7E00, half)


class Plain:
    """A reader of the format that shares no code with the package. ``folder`` is that of the file, for its base."""

    def __init__(self, data, folder=None):
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
        self.seal, self.base = self.entries["ckpt8.seal"].hex(), None
        self.partners = {}
        if "base" in self.manifest:
            self.open_base(folder)
        assert len({storage["name"] for storage in self.storages}) == len(self.storages)
        self.read = set()

    def open_base(self, folder):
        """Open the base of a delta, and give the differences the codec of their partners."""
        record = self.manifest["base"]
        assert set(record) == {"seal", "path", "key", "place", "links"}
        path = folder / record["path"]
        self.base = base = Plain(path.read_bytes(), path.parent)
        below = base.manifest.get("base", {"key": base.seal, "place": 0, "links": 0})
        assert (record["seal"], record["key"], record["links"]) == (base.seal, below["key"], below["links"] + 1)
        assert below["place"] < record["place"]
        assert 1 <= record["links"] <= min(255, record["place"])
        for index, storage in enumerate(self.storages):
            if storage["codec"]["id"] == "delta/1":
                assert set(storage["codec"]) == {"id", "base", "codec"}
                self.partners[index] = storage["codec"]["base"]
                partner = base.storages[self.partners[index]]
                storage["codec"] = storage["codec"]["codec"]
                assert "pack" not in storage
                assert "pack" not in partner
                assert storage["codec"]["id"] not in {"reference/1", "reference16/1", "reference/2", "vscaled/1"}
                assert all(storage[key] == partner[key] for key in ("dtype", "numel"))
                both = {storage["codec"]["id"], partner["codec"]["id"]}
                assert storage["codec"] == partner["codec"] or both in ({"lattice/1"}, {"lattice/2"})

    def whole(self, index):
        """As ``frames``, with the parts of the base added to differences."""
        found, chunks = self.frames(self.storages[index])
        if index in self.partners:
            storage, partner = self.storages[index], self.base.storages[self.partners[index]]
            below, _ = self.base.whole(self.partners[index])
            if storage["codec"] != partner["codec"]:
                symbols = enumerate(below["codes"])
                below = {"codes": [next_symbols(s, partner, storage, k * CHUNK) for k, s in symbols]}
            for part, planes in found.items():
                found[part] = [added(*each) for each in zip(planes, below[part], strict=True)]
        return found, chunks

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
            name = f"{pack['name']}:{part}"
            if not sum(numels):
                assert name not in self.entries
                assert table == {"lengths": [], "crcs": []}
                found[part] = [] if width == SYMBOLS else [b""] * width
                continue
            self.read.add(name)
            planes, rest = self.planes(self.entries[name], table, 0, width, sum(counts))
            assert not rest
            own = slice(first, first + counts[place])
            found[part] = planes[own] if width == SYMBOLS else [plane[own] for plane in planes]
        assert set(found) == set(self.layout(storage, 1))
        return found

    def lowest_version(self):
        configurations = [each.get("shared", each)["codec"] for each in self.manifest["storages"]]
        codecs = {each.get("codec", each)["id"] for each in configurations}
        tables = [part for each in self.manifest["storages"] for part in each["parts"].values()]
        if "lattice/2" in codecs:
            return "1.7"
        if "slices" in self.manifest or any(len(mode) > 4 for table in tables for mode in table.get("modes", [])):
            return "1.6"
        if "base" in self.manifest:
            return "1.5"
        if "budget" in self.manifest or codecs & STEPPED:
            return "1.4"
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
        if codec["id"] in ("lattice/1", "lattice/2", "vscaled/1"):
            assert codec["id"] != "lattice/2" or storage["role"] == "moment1"
            return {"codes": (SYMBOLS, n)}
        if codec["id"] == "rclog/1":
            columns = {"columns": (2, codec["C"])} if codec["columns"] else {}
            return {"codes": (SYMBOLS, n), "rows": (2, (n - 1) // codec["C"] + 2), **columns}
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
            planes = []
            for slab in range(slabs):
                name = f"{storage['name']}/{part}" + (f"@{slab}" if slabs > 1 else "")
                content = self.entries[name]
                self.read.add(name)
                for n in chunks[slab * per_slab : (slab + 1) * per_slab]:
                    one, content = self.planes(content, table, len(planes), *self.layout(storage, n)[part])
                    planes.append(one)
                assert not content
            width = self.layout(storage, 1)[part][0]
            frames = len(chunks) * (4 if width == SYMBOLS else width)
            assert (len(table["lengths"]), len(table["crcs"])) == (frames, frames)
            assert len(table.get("modes", [])) == (len(chunks) if width == SYMBOLS else 0)
            found[part] = planes
        assert set(found) == set(self.layout(storage, 1))
        return found, chunks

    def planes(self, content, table, chunk, width, count):
        """The planes of a chunk, or its symbols, at the beginning of ``content``, and what follows them."""
        mode = table["modes"][chunk] if width == SYMBOLS else None
        sizes = [count] * width if mode is None else plane_lengths(mode, count)
        found = []
        for k, size in enumerate(sizes, chunk * len(sizes)):
            frame, content = content[: table["lengths"][k]], content[table["lengths"][k] :]
            assert zlib.crc32(frame) == table["crcs"][k]
            assert bool(frame) == bool(size)
            found.append(self.plane(frame, size))
        return found if mode is None else unpacked(found, mode, count), content

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
            assert (storage["dtype"], storage["parts"]) == ("bfloat16", {})
            return self.copy(storage, rounded_bits)
        if storage["codec"]["id"] == "reference16/1":
            return self.half_copy(storage)
        if storage["codec"]["id"] == "reference/2":
            assert not storage["parts"]
            rounded = {"bfloat16": rounded_bits, "float16": half_bits}[storage["dtype"]]
            return self.copy(storage, rounded, {*EXACT, "lattice/1"})
        frames, chunks = self.whole(index)
        decode = DECODE[storage["codec"]["id"]] if storage["numel"] else lambda *_: b""
        second = self.companion(storage)
        return b"".join(
            decode({part: planes[k] for part, planes in frames.items()}, storage, n, k * CHUNK, second)
            for k, n in enumerate(chunks)
        )

    def companion(self, storage):
        """The fp32 elements of the storage that the codec of another needs."""
        if "second" not in storage["codec"]:
            return None
        if isinstance(storage["codec"]["second"], list):
            return self.factored(storage)
        other = self.storages[storage["codec"]["second"]]
        assert other["numel"] == storage["numel"]
        assert not {"second", "runs"} & set(other["codec"])
        content = np.frombuffer(self.storage(storage["codec"]["second"]), np.uint8)
        if other["dtype"] == "float32":
            return content.view(np.float32)
        assert other["dtype"] == "bfloat16"
        return (content.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def factored(self, storage):
        """The fp32 elements that statistics of rows and columns give."""
        rows, columns, height, width = storage["codec"]["second"]
        for index, size in ((rows, width), (columns, height)):
            assert self.storages[index]["dtype"] == "float32"
            assert self.storages[index]["codec"]["id"] in ("lossless/1", "split32/1")
            assert self.storages[index]["numel"] * size == storage["numel"]
            assert self.storages[index]["numel"] <= CHUNK
        R, C = (np.frombuffer(self.storage(index), np.float32) for index in (rows, columns))  # noqa: N806
        R = R.reshape(-1, height).astype(np.float64)  # noqa: N806
        means = np.array([math.fsum(each) for each in R]) / height
        relative = (R / means[:, None]).astype(np.float32)
        return (relative[:, :, None] * C.reshape(-1, 1, width)).reshape(-1)

    def half_copy(self, storage):
        """The bytes of a reference of fp16: masters rounded to bf16, then to fp16, and what the copy has more."""
        assert (storage["dtype"], set(storage["parts"])) == ("float16", {"delta"})
        high = np.frombuffer(self.copy(storage, rounded_bits), np.uint16).astype(np.uint32)
        frames, _ = self.frames(storage)
        delta = np.frombuffer(b"".join(planes[0] for planes in frames["delta"]), np.int8)
        return ((half_bits(high << 16).astype(np.int64) + delta) % 2**16).astype(np.uint16).tobytes()

    def copy(self, storage, rounded, codecs=EXACT):
        """The bytes of a copy: padding, and elements of masters that ``rounded`` makes numbers of 16 bits."""
        assert set(storage["codec"]) == {"id", "runs"}
        out = b""
        for master, start, length in storage["codec"]["runs"]:
            if master is None:
                out += struct.pack("<H", start) * length
                continue
            assert self.storages[master]["dtype"] == "float32"
            assert self.storages[master]["codec"]["id"] in codecs
            bits = np.frombuffer(self.storage(master), np.uint32)[start : start + length]
            assert len(bits) == length
            out += rounded(bits).astype(np.uint16).tobytes()
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

    def slices(self):
        """{(name, offsets): tensor} of the parts of distributed tensors."""
        tensors, found = self.manifest["tensors"], {}
        for row in self.rows(self.manifest.get("slices", {"name": []}), "name"):
            assert set(row) == {"name", "tensor", "offsets"}
            part = self.tensor(tensors[row["tensor"]])
            offsets = tuple([0] * part.dim() if row["offsets"] is None else row["offsets"])
            assert len(offsets) == part.dim()
            assert (row["name"], offsets) not in found
            found[row["name"], offsets] = part
        return found

    def tensor(self, record):
        data = bytearray(self.storage(record["storage"]))
        if prod(record["shape"]) == 0:
            return torch.empty(record["shape"], dtype=getattr(torch, record["dtype"]))
        flat = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, record["dtype"]))
        return flat.as_strided(record["shape"], record["stride"], record["offset"])
