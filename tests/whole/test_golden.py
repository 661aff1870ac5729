"""Files written by an earlier version decode to the bytes that were recorded when they were written."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch

import ckpt8

FOLDER = Path(__file__).parents[2] / "fixtures" / "golden"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def _sha256(data):
    return hashlib.sha256(data).hexdigest()


def _digest(tensor):
    flat = tensor.resolve_conj().contiguous().reshape(-1)
    return _sha256(bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b"")


def test_every_golden_file_is_expected_and_small():
    files = {path.name: path.stat().st_size for path in FOLDER.glob("*.ckpt8")}
    assert set(files) == set(EXPECTED)
    assert sum(files.values()) < 1_850_000
    codecs, versions, links, bits = set(), set(), set(), set()
    for name in files:
        with ckpt8.open(FOLDER / name) as file:
            codecs |= {storage.codec["id"] for storage in file.manifest.storages}
            versions.add(file.manifest.version)
            parts = [part for storage in file.manifest.storages for part in storage.parts.values()]
            bits |= {mode.bits for part in parts for mode in part.modes}
            links.add(file.manifest.base.links if file.manifest.base else 0)
    assert codecs >= {"lossless/1", "split24/1", "companded8/1", "reference/1", "reference16/1", "reference/2"}
    assert codecs >= {"lattice/1", "lattice/2", "rclog/1", "vscaled/1"}
    assert versions == {"1.0", "1.1", "1.2", "1.3", "1.4", "1.5", "1.6", "1.7"}
    assert len(bits) > 3
    assert links == {0, 1, 2, 3}


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_files_decode_to_what_was_recorded(name, tmp_path):
    with ckpt8.open(FOLDER / name) as file:
        assert {key: _digest(file.get_tensor(key)) for key in file.keys()} == EXPECTED[name]["tensors"]  # noqa: SIM118
    restored = ckpt8.restore(FOLDER / name, tmp_path / "restored.pt")
    assert _script().describe_restored(restored) == EXPECTED[name]["restored"]
    assert not ckpt8.verify(FOLDER / name).failures


@pytest.mark.parametrize("preset", ["flash", "compact", "lossless"])
def test_golden_files_of_a_committed_source_still_agree_with_it(preset, inputs):
    result = ckpt8.verify(FOLDER / f"crc_off.{preset}.ckpt8", inputs / "crc_off.pt")
    assert not result.failures
    assert (result.statistics > 0) == (preset != "lossless")


def test_the_lossless_golden_file_is_its_source():
    source = (FOLDER.parent / "inputs" / "crc_off.pt").read_bytes()
    assert EXPECTED["crc_off.lossless.ckpt8"]["restored"] == _sha256(source)


def _script():
    spec = importlib.util.spec_from_file_location("make_golden", FOLDER / "make_golden.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_golden_files_are_never_replaced():
    script = _script()
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in FOLDER.iterdir()}
    with pytest.raises(SystemExit, match="never replaced"):
        script.main()
    after = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in FOLDER.iterdir()}
    assert {name: after[name] for name in before} == before
