"""Salvage of containers that someone made, not damaged: a result or one error, soon, of bounded size, nowhere else."""

import copy
import json
import random
import time

import pytest
from fuzz_mutations import edit_tree, json_value
from hostile_kit import pack
from hypothesis import given
from hypothesis import strategies as st
from test_damage import HEADERS, MALFORMED, _header, parts, small  # noqa: F401 - fixtures

import ckpt8
from ckpt8.core.errors import Ckpt8Error

LARGEST = 64 << 20
"""No manifest here describes more than its file can hold, but for the frames of 2^20 elements that it may name."""


def attempt(data, folder):
    """What salvage makes of ``data``, with and without a seal that holds; nothing else appears."""
    results = []
    for seal in (data[-32:], bytes(32)):
        (folder / "x.ckpt8").write_bytes(data[:-32] + seal)
        started, said = time.process_time(), ""
        try:
            found = ckpt8.restore(folder / "x.ckpt8", folder / "out", salvage=True, threads=1)
        except Ckpt8Error as exc:
            results.append(None)
            said = str(exc)
            assert [each.name for each in folder.iterdir()] == ["x.ckpt8"]
        else:
            results.append(found)
            json.dumps(found.to_json(), allow_nan=False)
            found.lines()
            assert {each.name for each in folder.iterdir()} == {"x.ckpt8", found.path.name}
            assert found.path.stat().st_size < LARGEST
            found.path.unlink()
        assert "\n" not in said
        assert time.process_time() - started < 10
    return results


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_manifests(name, parts, tmp_path):  # noqa: F811
    metadata, entries, manifest = parts
    changed = copy.deepcopy(manifest)
    MALFORMED[name](changed)
    attempt(pack(changed, entries, metadata), tmp_path)


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_are_not_needed(name, parts, tmp_path):  # noqa: F811
    """The manifest of each is whole: all comes back. With a seal that holds it is no damage, and may be refused."""
    _, found = attempt(_header(parts, HEADERS[name]), tmp_path)
    assert found is not None
    assert found.damage
    assert found.lost == []


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 32))
def test_mutated_manifests(seed, parts, tmp_path):  # noqa: F811
    metadata, entries, manifest = parts
    rng = random.Random(seed)
    changed = edit_tree(rng, copy.deepcopy(manifest), json_value(rng), counts=(1, 2, 3))
    attempt(pack(changed, entries, metadata), tmp_path)
