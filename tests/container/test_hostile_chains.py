"""Bases in hostile containers: each is sound, or is refused with one line, and what needs no base is still read."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from chain_kit import chain, delta, moved
from hostile_kit import both, drop, edited, fields, put, unpack
from test_damage import exercise

import ckpt8
from ckpt8.container.reader import ContainerReader
from ckpt8.container.writer import ContainerWriter
from ckpt8.core.errors import InputError, OutputError

W, M, V = "model.layers.0.weight", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A key and two deltas."""
    return chain(tmp_path_factory.mktemp("chain"), 3)[0]


@pytest.fixture(scope="module")
def parts(files):
    return unpack(files[2].read_bytes())


base = partial(fields, "base")
CODEC = ("storages", W, "codec")
wrapped = partial(fields, *CODEC)
second = partial(fields, "storages", V, "codec", "codec")


MALFORMED = {
    **{
        f"{field}: {value!r}": base(**{field: value})
        for field, values in {
            "seal": ("", "0" * 63, "A" * 64, "0" * 65, 7, None, ["0" * 64], "x" * 64, "0" * 64 + "\n"),
            "key": ("", "0" * 63, None, "\ud800" * 64),
            "path": ("", "/etc/passwd", "a\0b", "x" * 4097, "é" * 2049, "\ud800", None, 7),
            "place": (-1, 1, "2", None, 2.0, True, 1 << 62, 10**400),
            "links": (0, -1, 3, 256, 1 << 62, None, True, "1"),
        }.items()
        for value in values
    },
    "base is a list": put("base", []),
    "base is a text": put("base", "step-1.ckpt8"),
    "base is empty": put("base", {}),
    "a partner below zero": wrapped(base=-1),
    "a partner that is text": wrapped(base="0"),
    "a partner beyond 62 bits": wrapped(base=1 << 62),
    "no partner": drop(*CODEC, "base"),
    "no codec": drop(*CODEC, "codec"),
    "a codec that is text": wrapped(codec="lattice/1"),
    "a difference of a difference": wrapped(codec={"id": "delta/1", "base": 0, "codec": {"id": "lossless/1"}}),
    "a difference of a pack": wrapped(codec={"id": "shared/1"}),
    "a difference without a base": drop("base"),
    "a difference and null as base": put("base", None),
    "a first moment": put("storages", M, "codec", lambda own: {"id": "delta/1", "base": 4, "codec": own}),
    "a reference": wrapped(codec={"id": "reference/1", "runs": []}),
}
"""What is refused when the file is opened."""

AT_THE_BASE = {
    "another key": (base(key="0" * 64), "its place in its chain does not fit"),
    "fewer links": (base(links=1), "its place in its chain does not fit"),
    "a partner that is not there": (wrapped(base=99), f"{W}: has no partner in its base"),
    "another partner": (
        both(wrapped(base=5), put("storages", V, "codec", "base", 0)),
        "has a partner of another type or size|has a partner with another codec",
    ),
    "factors of other columns": (second(C=32), f"{V}: has a partner with another codec|frames of|cannot hold"),
    "other steps of a second moment": (second(S=1 << 20), f"{V}: has a partner with another codec"),
    "another seal": (base(seal="0" * 64), r"its base step-1.ckpt8 \(seal 000000000000\) is changed"),
    "another seal and path": (base(seal="0" * 64, path="no/y"), r"its base no/y \(seal 000000000000\) is missing"),
    "a path to a folder": (base(seal="0" * 64, path=".."), "is changed: another file is at"),
    "a path that no file can have": (base(seal="0" * 64, path="x" * 300), r"\(seal 000000000000\) is missing"),
}
"""What is refused when the base is needed."""


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bases(name, parts, files, tmp_path):
    path = changed(parts, MALFORMED[name], files)
    with pytest.raises(InputError) as caught:
        ContainerReader(path)
    assert len(str(caught.value)) < 500
    exercise(path, path, tmp_path)


@pytest.mark.parametrize("name", AT_THE_BASE)
def test_bases_that_do_not_fit(name, parts, files, tmp_path):
    change, said = AT_THE_BASE[name]
    path = changed(parts, change, files)
    try:
        with pytest.raises(InputError, match=said):
            ckpt8.verify(path)
        exercise(path, path, tmp_path)
    finally:
        path.unlink()


def test_a_skeleton_is_no_difference(tmp_path, monkeypatch):
    """``inspect`` reads what a pickle would call from the frames of this file alone."""
    for name in ("key", "next"):
        torch.save({"w": torch.randn(64, 96), "long": list(range(20_000)), name: 1}, tmp_path / "run.pt")
        ckpt8.compress(tmp_path / "run.pt", tmp_path / f"{name}.ckpt8", preset="lossless")
    with ContainerReader(tmp_path / "next.ckpt8") as reader:
        skeleton = reader.manifest.members[0].skeleton
        assert reader.manifest.storages[skeleton].pack is None
    monkeypatch.setattr(ContainerWriter, "_check_readable", lambda *_: None)
    path = delta(tmp_path / "next.ckpt8", tmp_path / "key.ckpt8", tmp_path / "x.ckpt8", only=[skeleton])
    with pytest.raises(InputError, match="skeleton: is a difference, but no tensor"):
        ContainerReader(path)
    (tmp_path / "out").mkdir()
    exercise(path, path, tmp_path / "out")


@pytest.mark.parametrize("named", ["nowhere/y.ckpt8", "..", "../" * 40 + "etc/passwd"])
def test_a_base_is_found_by_its_seal_under_any_name(named, parts, files):
    path = changed(parts, base(path=named), files)
    assert ckpt8.verify(path).failures == ()
    path.unlink()


def changed(parts, change, files):
    """A delta with another manifest, beside its base."""
    return edited(parts, change, files[0].with_name("x.ckpt8"))


def test_what_is_changed_here_is_sound_before(parts, files):
    path = changed(parts, base(path="./step-1.ckpt8", place=15), files)
    assert ckpt8.verify(path).failures == ()
    path.unlink()


def test_a_delta_to_itself_is_refused(files, tmp_path):
    """No seal can hold itself: such a file has a base of another seal."""
    path = delta(moved(files[0], tmp_path / "whole.ckpt8", 1), files[0], tmp_path / "x.ckpt8", path="x.ckpt8")
    with pytest.raises(InputError, match=r"is changed: another file is at .*x\.ckpt8"):
        ckpt8.verify(path)


@pytest.mark.slow
def test_a_longest_chain_is_read_and_a_longer_one_refused(files, tmp_path):
    """Files that are made by hand: every link but the last says nothing new."""
    key = tmp_path / "0.ckpt8"
    torch.save({"w": torch.arange(40.0)}, tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt", key, preset="lossless")
    below = key
    for k in range(1, 256):
        below = delta(key, below, tmp_path / f"{k}.ckpt8")
    assert torch.equal(ckpt8.load(below)["w"], torch.arange(40.0))
    with pytest.raises(OutputError, match="malformed at 'links'; nothing was written"):
        delta(key, below, tmp_path / "256.ckpt8")
