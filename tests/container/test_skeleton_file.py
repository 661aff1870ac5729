"""The skeleton of a member as a file: everything outside the tensors as it was, the tensors zero."""

import random
from pathlib import Path

import torch

import ckpt8
from ckpt8.container.reader import ContainerReader
from ckpt8.container.skeleton_file import SkeletonFile


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
