"""The quick look at a container, against the reader that checks everything."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
import torch
from small_kit import mixed

import ckpt8
from ckpt8.container.overview import Overview
from ckpt8.container.reader import ContainerReader, SkeletonFile
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import ByteRange, SourceFile


def opened(path):
    return closing(SourceFile(ByteRange.of(path)))


def assert_same(path):
    with opened(path) as file, ContainerReader(path) as reader:
        overview = Overview(file)
        manifest = reader.manifest
        assert overview.seal == reader.seal.hex()
        assert (overview.version, overview.preset, overview.directory, overview.budget, overview.base) == (
            manifest.version, manifest.preset, manifest.directory, manifest.budget, manifest.base
        )  # fmt: skip
        assert [tuple(member) for member in overview.members] == [
            (each.path, each.format, each.size, each.skeleton) for each in manifest.members
        ]
        for index, member in enumerate(overview.members):
            whole = SkeletonFile(reader, index)
            content = bytearray(whole.read(0, member.size))
            for offset, storage in reversed(manifest.members[index].segments):
                del content[offset : offset + manifest.storages[storage].nbytes]
            assert overview.skeleton(member) == content


def test_all_golden_files(inputs):
    for path in sorted((inputs.parent / "golden").glob("*.ckpt8")):
        assert_same(path)


def test_a_directory(containers):
    for path in containers.values():
        assert_same(path)


def test_single_floats_of_every_type(tmp_path):
    values = {kind: torch.tensor(-0.1, dtype=getattr(torch, kind)) for kind in ("float64", "float32")}
    values["bfloat16"] = torch.tensor(-7.0).bfloat16()
    values["float16"] = torch.tensor(1e-7).half()
    torch.save({**mixed(), **values}, tmp_path / "x.pt")
    ckpt8.compress(tmp_path / "x.pt")
    with opened(tmp_path / "x.ckpt8") as file, ckpt8.open(tmp_path / "x.ckpt8") as whole:
        overview = Overview(file)
        for name, value in values.items():
            dtype, content = overview.element(name)
            assert dtype.torch is value.dtype
            assert content == bytes(whole.get_tensor(name).reshape(1).view(torch.uint8).tolist())
            assert torch.frombuffer(bytearray(content), dtype=dtype.torch)[0] == value
        assert overview.element("matrix") is overview.element("nothing") is None


def test_lossy_values_are_not_read(tmp_path):
    torch.save({"model": {"w": torch.randn(80, 80)}}, tmp_path / "x.pt")
    ckpt8.compress(tmp_path / "x.pt")
    with opened(tmp_path / "x.ckpt8") as file:
        overview = Overview(file)
        assert overview.skeleton(overview.members[0]._replace(skeleton=0)) is None
        with pytest.raises(InputError, match="malformed at 'skeleton'"):
            overview.skeleton(overview.members[0]._replace(skeleton=9))


def test_a_skeleton_of_several_frames_is_whole(tmp_path):
    torch.save({"text": "".join(map(str, range(300_000))), "w": torch.randn(80, 80), "step": 3}, tmp_path / "x.pt")
    ckpt8.compress(tmp_path / "x.pt")
    with opened(tmp_path / "x.ckpt8") as file, (tmp_path / "x.ckpt8").open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        assert json.loads(raw.read(length))
        overview = Overview(file)
        assert len(overview.skeleton(overview.members[0])) > 1 << 20
    assert [record.step for record in ckpt8.runs(tmp_path)] == [3]
