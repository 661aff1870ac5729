"""Packs and tables in hostile containers: each is sound or refused, soon, and takes no more memory than its text."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hostile_kit import both, bounded, drop, edited, fields, pack, put, unpack
from hypothesis import given
from hypothesis import strategies as st
from small_kit import ALL_LOSSY, adamw_state
from test_damage import exercise, mutated

import ckpt8
from ckpt8.core.errors import InputError


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A container of a few kB with packs of every codec, and its source."""
    folder = tmp_path_factory.mktemp("packs")
    torch.save(adamw_state(24), folder / "a.pt")
    ckpt8.compress(folder / "a.pt", rules=ALL_LOSSY)
    return folder / "a.ckpt8"


@pytest.fixture(scope="module")
def parts(small):
    return unpack(small.read_bytes())


def packs(manifest):
    return [record for record in manifest["storages"] if record["codec"] == {"id": "shared/1"}]


def of_moments(manifest):
    return next(record for record in packs(manifest) if record["role"] == "moment1")


def of_pack(change):
    """``change`` of the pack of first moments."""
    return lambda manifest: change(of_moments(manifest))


def shared(**columns):
    return of_pack(fields("shared", **columns))


def pack_with(**given):
    return of_pack(fields(**given))


def flat(value):
    """A number far beyond memory, where rows are counted."""
    return {"all": value}


SEGMENTS = ("member_table", "segments", "all")
members, tensors = partial(fields, "member_table"), partial(fields, "tensor_table")
MALFORMED = {
    "more elements than a pack may have": both(shared(numel=flat(2**16)), pack_with(numel=24 * 2**16)),
    "another sum": pack_with(numel=7),
    "a huge storage": both(shared(numel=lambda n: [2**61, *n[1:]]), pack_with(numel=2**61)),
    "a negative storage": shared(numel=lambda n: [-1, *n[1:]]),
    "a storage that is text": shared(numel=lambda n: ["1", *n[1:]]),
    "a storage that is true": shared(numel=flat(True)),
    "no storages": shared(storages=[]),
    "storages that are no list": shared(storages={"from": 0}),
    "a storage twice": shared(storages=lambda steps: [*steps[:-1], 0]),
    "a storage of another pack": shared(storages=lambda steps: [0, *steps[1:]]),
    "a storage behind the end": shared(storages=lambda steps: [*steps[:-1], 10**6]),
    "a storage before the first": shared(storages=lambda steps: [-(2**61), *steps[1:]]),
    "fewer names": shared(name=lambda names: names[1:]),
    "no names": shared(name=flat(None)),
    "names that count": shared(name={"from": 0}),
    "a name of half a pair": shared(name=lambda names: ["\ud800", *names[1:]]),
    "a reason that is a number": shared(reason=flat(1)),
    "an error that is a list": shared(error=flat([])),
    "a column of two kinds": shared(error={"all": None, "from": 0}),
    "a column that is text": shared(error="x"),
    "a column that is missing": shared(error=None),
    "no table": pack_with(shared=None),
    "a reference": shared(codec={"id": "reference/1", "runs": [[0, 0, 8]]}),
    "a codec that is a pack": shared(codec={"id": "shared/1"}),
    "an unknown codec": shared(codec={"id": "x/1"}),
    "an element type that the codec does not hold": pack_with(dtype="int64"),
    "fewer parts": of_pack(drop("parts", "scales")),
    "more frames": of_pack(fields("parts", "codes", lengths=[1, 1], crcs=[0, 0])),
    "no frames": of_pack(fields("parts", "codes", lengths=[], crcs=[])),
    "the entries of another pack": lambda manifest: pack_with(name=packs(manifest)[0]["name"])(manifest),
    "no members": members(path=[]),
    "no table of members": drop("member_table"),
    "no table of tensors": drop("tensor_table"),
    "a member without a skeleton": members(skeleton=flat(10**6)),
    "segments that overlap": put(*SEGMENTS, "before", 0, -(2**40)),
    "segments far away": put(*SEGMENTS, "before", 0, 2**61),
    "segments that repeat": put(*SEGMENTS, "storage", flat(3)),
    "segments that count": members(segments={"from": 3}),
    "checksums outside of the skeleton": put("member_table", "crc_fields", "all", "gap", flat(0)),
    "tensors of no storage": tensors(storage={"from": 60}),
    "tensors that count on": tensors(storage={"from": 2**62 - 1}),
    "an unknown type": tensors(dtype=flat("float3")),
    "a type that is a number": tensors(dtype=flat(3)),
    "a shape that is text": tensors(shape=flat("12")),
    "a negative shape": tensors(shape=flat([-1])),
    "strides of another length": tensors(stride=flat([1, 1, 1])),
    "flags that are none": tensors(flags=flat(["x"])),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_packs_and_tables_that_are_not_sound(name, parts, small, tmp_path):
    path = edited(parts, MALFORMED[name], tmp_path / "x.ckpt8")
    with bounded(), pytest.raises(InputError) as caught:
        ckpt8.verify(path)
    assert len(str(caught.value)) < 500
    exercise(path, small.with_suffix(".pt"), tmp_path)


@pytest.mark.slow
def test_other_forms_of_the_same_columns_are_sound(parts, tmp_path):
    """The checks above refuse what they name, not whatever was changed."""
    metadata, entries, manifest = parts
    path = tmp_path / "x.ckpt8"
    count = len(manifest["tensor_table"]["name"])
    for change in (
        tensors(offset=[0] * count),
        tensors(flags=[[]] * count),
        shared(reason=[None] * 24),
        shared(error=flat(None)),
        pack_with(name="another name"),
    ):
        changed = copy.deepcopy(manifest)
        change(changed)
        renamed = of_moments(changed)["name"]
        old = of_moments(manifest)["name"]
        path.write_bytes(
            pack(changed, {name.replace(f"{old}:", f"{renamed}:"): e for name, e in entries.items()}, metadata)
        )
        assert not ckpt8.verify(path).failures


@pytest.mark.parametrize("shape", [[2**40, 2**20], [2] * 39 + [1] * 5000], ids=["large", "of many sizes"])
def test_a_shape_for_all_tensors_takes_no_memory(shape, parts, tmp_path):
    """Rows are counted by lists alone, so a short text cannot ask for many. Its strides take no time either."""
    path = edited(parts, tensors(shape=flat(shape), stride=flat(None)), tmp_path / "x.ckpt8")
    with bounded(), ckpt8.open(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            with pytest.raises(InputError, match="does not fit its storage"):
                file.get_tensor(name)


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 32))
def test_a_mutated_manifest_with_packs_is_read_or_refused(seed, parts, small, tmp_path):
    mutated(parts, seed, small, tmp_path)
