"""The skeleton of a member as a file: everything outside the tensors as it was, the tensors zero."""

import random
from collections import Counter
from pathlib import Path

import torch

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
