"""The reader that is shipped, which shares no code with the package, with asserts for all that a writer must keep."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
import zstandard

from ckpt8.container.plain_reader import CHUNK, FLOATS, Container, layout_of

EXACT = {"lossless/1", "split24/1", "split32/1"}
STEPPED = {"lattice/1", "lattice/2", "rclog/1", "vscaled/1", "reference/2"}
FIELDS = {
    "lossless/1": set(),
    "split24/1": {"R"},
    "split32/1": set(),
    "companded8/1": {"signed", "Q", "p"},
    "lattice/1": {"k", "salt"},
    "lattice/2": {"k", "salt"},
    "rclog/1": {"S", "C", "columns"},
    "vscaled/1": {"second", "k", "u_max", "bias1", "root_bias2", "eps", "salt"},
    "reference/1": {"runs"},
    "reference16/1": {"runs"},
    "reference/2": {"runs"},
}
"""What the configuration of each codec has besides its id."""


class Strict(Container):
    """A container of which all was checked that its writer must keep. ``contents`` are the bytes of its entries."""

    def __init__(self, path):
        super().__init__(path)
        data = Path(path).read_bytes()
        self.contents = {name: data[start:stop] for name, (start, stop) in self.entries.items()}
        header = _strict_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert next(iter(header)) == "__metadata__"
        stored = self.contents["ckpt8.manifest"]
        text = zstandard.ZstdDecompressor().decompress(stored)
        assert zstandard.frame_content_size(stored) == len(text) <= 2**20 + 64 * len(stored)
        self.stated = _strict_json(text)
        assert self.stated["version"] == header["__metadata__"]["ckpt8"] == lowest_version(self.stated)
        assert self.stated["frame"] == CHUNK
        self._check_entries()
        self._check_storages()
        if "base" in self.stated:
            assert set(self.stated["base"]) == {"seal", "path", "key", "place", "links"}
            assert 1 <= self.stated["base"]["links"] <= min(255, self.stated["base"]["place"])
        if "tensor_table" in self.stated:
            assert self.stated["tensors"] == self.stated["members"] == []

    @property
    def differences(self):
        """The indices of the storages that are kept as differences."""
        return [index for index, storage in enumerate(self.storages) if "partner" in storage]

    def _check_entries(self):
        """Frames fill their entries, and the manifest names all of these. None is longer than its plane."""
        sizes = {"ckpt8.manifest": None, "ckpt8.seal": 32}
        for record in self.stated["storages"]:
            mark, chunks = ":" if "shared" in record else "/", -(-record["numel"] // CHUNK)
            for part, table in record["parts"].items():
                lengths, modes = table["lengths"], table.get("modes", [])
                assert len(lengths) == len(table["crcs"])
                assert (not lengths) == (not chunks)
                assert len(modes) in (0, chunks)
                assert all(lengths) or modes
                if chunks:
                    each, rest = divmod(len(lengths), chunks)
                    assert not rest
                    per_slab = each * (self.stated["slab"] // CHUNK)
                    for number, first in enumerate(range(0, len(lengths), per_slab)):
                        name = f"{record['name']}{mark}{part}" + (f"@{number}" if len(lengths) > per_slab else "")
                        assert name not in sizes
                        sizes[name] = sum(lengths[first : first + per_slab])
        assert set(sizes) == set(self.contents)
        assert all(size in (None, len(self.contents[name])) for name, size in sizes.items())

    def _check_storages(self):
        names = [storage["name"] for storage in self.storages if storage["name"] is not None]
        assert len(set(names)) == len(names)
        for storage in self.storages:
            codec = storage["codec"]
            assert set(codec) == {"id", *FIELDS[codec["id"]]}
            if "runs" in codec:
                masters = [self.storages[master] for master, *_ in codec["runs"] if master is not None]
                assert {master["dtype"] for master in masters} == {"float32"}
                steps = {"lattice/1"} if codec["id"] == "reference/2" else set()
                assert {master["codec"]["id"] for master in masters} <= {*EXACT, *steps}
            if "second" in codec and not isinstance(codec["second"], list):
                second = self.storages[codec["second"]]
                assert (second["numel"], second["dtype"] in FLOATS) == (storage["numel"], True)
                assert not {"second", "runs"} & set(second["codec"])
            if "partner" in storage:
                partner = self.base.storages[storage["partner"]]
                assert not {"second", "runs"} & set(codec)
                assert "pack" not in storage
                assert "pack" not in partner
            if "pack" not in storage:
                assert set(storage["parts"]) == set(layout_of(storage, 1))

    def content(self, index):
        """The bytes of a storage."""
        return b"".join(self.pieces(index))

    def tensor(self, record):
        """A tensor as torch has it, by its record; before its flags are applied."""
        dtype = getattr(torch, record["dtype"])
        if math.prod(record["shape"]) == 0:
            return torch.empty(record["shape"], dtype=dtype)
        flat = torch.frombuffer(bytearray(self.content(record["storage"])), dtype=torch.uint8).view(dtype)
        return flat.as_strided(record["shape"], record["stride"], record["offset"])

    def original(self):
        """What was compressed: the bytes of a file, or the format and the bytes of every member by path."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "original")
            self.write_original(target)
            if "directory" not in self.stated:
                return target.read_bytes()
            found, members = {}, self.members()
            for member in members:
                path, kind = target / member["path"], member["format"]
                assert path.is_symlink() == (kind == "symlink")
                assert path.is_dir() == (kind == "directory") or kind == "symlink"
                content = {"symlink": lambda path: str(path.readlink()).encode(), "directory": lambda _: b""}
                found[member["path"]] = kind, content.get(kind, Path.read_bytes)(path)
                own = [member["skeleton"], *(index for _, index in member["segments"])]
                assert all(self.storages[index]["name"].startswith(f"{member['path']}:") for index in own[1:])
            assert len(found) == len(members)
            return found

    def parts_of_tensors(self):
        """{(name, offsets): tensor} of the parts of distributed tensors."""
        return {key: self.tensor(self.records[name]) for key, name in self.slices.items()}


def same(array, tensor):
    """Whether an array of the reader has the values of a tensor, bit for bit, in the types that numpy has."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.dtype is torch.complex32:
        expected = torch.view_as_real(tensor).numpy().astype(np.float32).view(np.complex64)[..., 0]
    elif tensor.dtype is torch.bfloat16:
        expected = tensor.float().numpy()
    else:
        is_fp8 = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
        expected = tensor.view(torch.uint8 if is_fp8 else tensor.dtype).numpy()
    return (array.shape, array.dtype, array.tobytes()) == (expected.shape, expected.dtype, expected.tobytes())


def lowest_version(manifest):
    """The lowest version that has all that a container holds."""
    configurations = [each.get("shared", each)["codec"] for each in manifest["storages"]]
    codecs = {each.get("codec", each)["id"] for each in configurations}
    tables = [part for each in manifest["storages"] for part in each["parts"].values()]
    if "lattice/2" in codecs:
        return "1.7"
    if "slices" in manifest or any(len(mode) > 4 for table in tables for mode in table.get("modes", [])):
        return "1.6"
    if "base" in manifest:
        return "1.5"
    if "budget" in manifest or codecs & STEPPED:
        return "1.4"
    if any("shared" in each or each["codec"]["id"] == "reference16/1" for each in manifest["storages"]):
        return "1.3"
    if "reference/1" in codecs:
        return "1.2"
    return "1.1" if "directory" in manifest else "1.0"


def _strict_json(text):
    def unique(pairs):
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
