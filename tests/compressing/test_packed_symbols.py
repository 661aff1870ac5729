"""Symbols on their way to a container: a packed chunk holds bytes, alike on every backend and with any threads."""

from __future__ import annotations

import pytest
import torch
from budget_kit import run_of
from hostile_kit import unpack

import ckpt8
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.compressing.chunk_encoder import ChunkEncoder, store
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container import header
from ckpt8.core import backend
from ckpt8.core.workers import Workers


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "run.pt"
    torch.save(run_of([(1100, 1000), (70, 64)]), path)
    return path


@pytest.mark.slow
def test_a_packed_chunk_holds_planes_of_bytes(source):
    """As in a save in the background, which holds all of them: no more than the planes that zstd will get."""
    with open_source(source) as bundle, Workers(2) as workers:
        plan = plan_bundle(bundle, Policy.of(budget=1))
        encoder = ChunkEncoder(bundle, measure=False)
        work = [
            (unit, chunk)
            for unit in plan.units
            for chunk in range(header.chunk_count(unit.numel))
            if len(unit.streams) > 1
        ]
        packed = list(encoder.packed(work, workers))
        elements = held = 0
        for (unit, number), chunk in zip(work, packed, strict=True):
            for stream, parts, packings in zip(unit.streams, chunk.parts, chunk.packings, strict=True):
                expected = stream.codec.layout(stream.chunk_spec(number))
                assert set(packings) == {"codes"}
                assert expected["codes"].is_symbols
                assert all(part.dtype != torch.int32 for part in parts.values())
                assert len(parts["codes"]) == sum(packings["codes"].plane_lengths)
                elements += expected["codes"].numel
                held += len(parts["codes"])
        assert elements > 3_000_000
        assert held < 1.5 * elements
        stored = [store(chunk) for chunk in packed]
        assert [list(each.packings) for each in stored] == [list(each.packings) for each in packed]


def entries(path):
    """All frames, and what the manifest says of decoding them: figures of errors are sums in another order."""
    _, found, manifest = unpack(path.read_bytes())
    return found, [(each["name"], each["codec"], each["parts"]) for each in manifest["storages"]]


@pytest.mark.slow
def test_backends_and_threads_do_not_show_in_the_frames(source, tmp_path, monkeypatch):
    written = []
    for least, threads in ((0, 1), (0, 2), (1 << 60, 2)):
        monkeypatch.setattr(backend, "LEAST_FOR_NUMBA", least)
        ckpt8.compress(source, tmp_path / "x.ckpt8", preset="archive", threads=threads, force=True)
        written.append(entries(tmp_path / "x.ckpt8"))
    assert all(each == written[0] for each in written)
    back = ckpt8.restore(tmp_path / "x.ckpt8", tmp_path / "x.pt").read_bytes()
    monkeypatch.setattr(backend, "LEAST_FOR_NUMBA", 0)
    assert ckpt8.restore(tmp_path / "x.ckpt8", tmp_path / "y.pt").read_bytes() == back
