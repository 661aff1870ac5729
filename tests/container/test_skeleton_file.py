"""The skeleton of a member as a file: everything outside the tensors as it was, the tensors zero."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from small_kit import mixed

import ckpt8
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader, SkeletonFile


def test_any_window_has_the_bytes_of_the_source_with_zeros_for_tensors(tmp_path: Path):
    source, packed = tmp_path / "s.pt", tmp_path / "s.ckpt8"
    torch.save({f"t{i}": torch.randn(1 + i % 5) for i in range(300)} | {"none": torch.empty(0)}, source)
    ckpt8.compress(source, packed, preset="lossless")
    expected = bytearray(source.read_bytes())
    with ContainerReader(packed) as reader:
        for offset, storage in reader.manifest.members[0].segments:
            nbytes = reader.manifest.storages[storage].nbytes
            expected[offset : offset + nbytes] = bytes(nbytes)
        file = SkeletonFile(reader, 0)
        size = len(expected)
        borders = sorted({0, size, *(offset for offset, _ in reader.manifest.members[0].segments)})
        rng = random.Random(0)
        windows = [(0, size), (size, 0), *((at, min(8, size - at)) for at in borders)]
        windows += [(at, rng.randrange(min(3000, size - at) + 1)) for at in rng.choices(range(size), k=300)]
        for offset, length in windows:
            assert file.read(offset, length) == expected[offset : offset + length]


def test_small_reads_in_turn_decode_every_chunk_once(tmp_path: Path, monkeypatch):
    """Also those that end inside a tensor: the skeleton, between all tensors, would be decoded for each of them."""
    source, packed = tmp_path / "s.pt", tmp_path / "s.ckpt8"
    torch.save({f"t{i}": torch.full((64,), i) for i in range(100)}, source)
    ckpt8.compress(source, packed)
    decoded = Counter()
    fill = ContainerReader.fill_chunk

    def counted(self, storage, chunk, out):
        decoded[storage, chunk] += 1
        fill(self, storage, chunk, out)

    monkeypatch.setattr(ContainerReader, "fill_chunk", counted)
    with ContainerReader(packed) as reader:
        member = MemberFile(reader, 0)
        assert b"".join(iter(lambda: member.read(1000), b"")) == source.read_bytes()
    assert set(decoded.values()) == {1}
    assert len(decoded) == 101


@pytest.mark.parametrize("which", ["golden", "directories"])
def test_the_skeleton_is_what_the_file_has_outside_of_tensors(which, inputs, containers):
    for path in containers.values() if which == "directories" else (inputs.parent / "golden").glob("*.ckpt8"):
        with ContainerReader(path) as reader:
            for index, member in enumerate(reader.manifest.members):
                content = bytearray(SkeletonFile(reader, index).read(0, member.size))
                for offset, storage in reversed(member.segments):
                    del content[offset : offset + reader.manifest.storages[storage].nbytes]
                assert reader.skeleton(index) == content


def test_single_floats_of_every_type(tmp_path):
    values = {kind: torch.tensor(-0.1, dtype=getattr(torch, kind)) for kind in ("float64", "float32")}
    values["bfloat16"] = torch.tensor(-7.0).bfloat16()
    values["float16"] = torch.tensor(1e-7).half()
    torch.save({**mixed(), **values}, tmp_path / "x.pt")
    ckpt8.compress(tmp_path / "x.pt")
    with ContainerReader(tmp_path / "x.ckpt8") as reader:
        for name, value in values.items():
            dtype, content = reader.element(name)
            assert torch.equal(torch.frombuffer(bytearray(content), dtype=dtype.torch)[0], value)
        assert reader.element("matrix") is reader.element("nothing") is None


def test_what_is_read_of_a_skeleton(tmp_path):
    torch.save({"text": "".join(map(str, range(300_000))), "w": torch.randn(80, 80), "step": 3}, tmp_path / "x.pt")
    ckpt8.compress(tmp_path / "x.pt")
    with ContainerReader(tmp_path / "x.ckpt8") as reader:
        assert len(reader.skeleton(0)) > 1 << 20
        reader.manifest.members[0].skeleton = next(
            at for at, own in enumerate(reader.manifest.storages) if own.name == "w"
        )
        assert reader.skeleton(0) is None  # lossy values are not read
    assert [record.step for record in ckpt8.runs(tmp_path)] == [3]
