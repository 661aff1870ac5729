"""Arrays and scalars of numpy in a checkpoint: ``ckpt8.load`` makes the plain ones itself, and nothing else."""

from __future__ import annotations

import random
import re
from collections import Counter, OrderedDict
from importlib import import_module

import numpy as np
import pytest
import torch
from gate_kit import among, archive, attempt, call, call_name, member, number, text, written
from resume_kit import same

import ckpt8

ARRAY = "numpy._core.multiarray._reconstruct"
PLAIN = {
    "the state of np.random": np.random.RandomState(7).get_state(),
    "the state of a generator": np.random.default_rng(7).bit_generator.state,
    "kinds": [np.ones(3, kind) for kind in ("?", "i1", "u2", "i8", "f2", "f4", "f8", "c8", "c16")],
    "texts": [np.array(["ä", "bb"]), np.array([b"a", b"bcd"]), np.str_("x"), np.bytes_(b"y")],
    "empty texts": [np.str_(""), np.bytes_(b""), np.array(["", ""]), np.array([], "U")],
    "scalars": [np.float64(2.5), np.int32(-1), np.bool_(True), np.complex64(1j), np.float16(0.1)],
    "shapes": [np.array(3), np.zeros((0, 4)), np.arange(24).reshape(2, 3, 4), np.asfortranarray(np.eye(3)[:2])],
    "beside others": {"python": random.Random(7).getstate(), "torch": torch.get_rng_state(), "a": np.arange(3)},
}
REFUSED = {
    "objects": (np.array([{}], dtype=object), "ObjectDType"),
    "fields": (np.zeros(2, dtype=[("a", "i4")]), "VoidDType"),
    "void": (np.zeros(2, "V4"), "VoidDType"),
    "dates": (np.array(["2020-01-01"], "M8[D]"), "DateTime64DType"),
    "a subclass": (np.ma.masked_array([1, 2]), "MaskedArray"),
}


# Of a file of protocol 5 that has no array torch warns.
@pytest.mark.parametrize(
    ("name", "protocol"), [*((name, 2) for name in PLAIN), ("kinds", 5), ("texts", 5), ("shapes", 5)]
)
def test_plain_arrays_and_scalars_load_as_pickle_makes_them(name, protocol, tmp_path):
    value = {"model": {"w": torch.ones(3)}, "value": PLAIN[name]}
    torch.save(value, tmp_path / "a.pt", pickle_protocol=protocol)
    ckpt8.compress(tmp_path / "a.pt", tmp_path / "a.ckpt8")
    assert same(torch.load(tmp_path / "a.pt", weights_only=False), ckpt8.load(tmp_path / "a.ckpt8"))
    ckpt8.save(value, tmp_path / "a.ckpt8")  # a warning would be an error
    assert same(value, ckpt8.load(tmp_path / "a.ckpt8", map_location="cpu"))


def with_attributes(made, **attributes):
    vars(made).update(attributes)
    return made


def alike(one, other, where="tree"):
    """Assert that two values have the same types, bits, flags and attributes, all the way down."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert same(one.detach(), other.detach()), where
        assert one.data_ptr() - one.untyped_storage().data_ptr() == one.storage_offset() * one.itemsize
        for flag in ("requires_grad", "is_leaf", "grad_fn", "device", "_base"):
            assert getattr(one, flag) == getattr(other, flag), (where, flag)
    elif isinstance(one, dict):
        alike(list(one.items()), list(other.items()), where)
    elif isinstance(one, (list, tuple)) and type(one) is not torch.Size:
        assert len(one) == len(other), where
        for k, pair in enumerate(zip(one, other, strict=True)):
            alike(*pair, f"{where}.{k}")
    else:
        assert same(one, other), where
    if hasattr(one, "__dict__"):
        assert vars(one) == vars(other), where


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_stands_beside_an_array_loads_as_torch_loads_it(is_zip, tmp_path):
    weight = torch.nn.Parameter(torch.randn(4, 6))
    spectrum, other = torch.randn(2, 3, dtype=torch.complex64).unbind()
    other = other.clone()
    value = {
        "model": with_attributes(OrderedDict(w=weight, tied=weight), _metadata={"": {"version": 1}}, note=[1]),
        "parameters": [torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.nn.Parameter(torch.ones(()))],
        "attributes": [
            with_attributes(one(torch.ones(3)), note="a", count=1) for one in (torch.clone, torch.nn.Parameter)
        ],
        "flags": [torch.randn(3, requires_grad=True), spectrum.conj(), other.conj().imag, weight.detach().t()],
        "sizes": [torch.Size([2, 3]), torch.Size([]), (2, 3), {torch.Size([1]): 2}, torch.ones(2, 3).shape],
        "others": [
            {1, (2, "b")},
            Counter("abca"),
            torch.device("cpu"),
            torch.bfloat16,
            1j,
            bytearray(b"x"),
            -(2**70),
            (),
        ],
        "module": torch.nn.BatchNorm1d(2).state_dict(keep_vars=True),
        "array": np.arange(3),
    }
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    ckpt8.compress(tmp_path / "a.pt", tmp_path / "a.ckpt8", preset="lossless")
    expected = torch.load(tmp_path / "a.pt", weights_only=False)
    for name in ("a.pt", "a.ckpt8"):
        loaded = ckpt8.load(tmp_path / name)
        alike(loaded, expected)
        assert loaded["model"]["w"] is loaded["model"]["tied"]
    torch.save({"model": value["model"], "sizes": value["sizes"]}, tmp_path / "b.pt")  # without an array
    alike(ckpt8.load(tmp_path / "b.pt"), {"model": expected["model"], "sizes": expected["sizes"]})


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_and_errors_are_those_of_torch_where_an_array_stands_beside_them(tmp_path):
    value = {"s": torch.arange(6.0).storage(), "u": torch.ones(3).untyped_storage(), "a": np.ones(2)}
    torch.save(value, tmp_path / "a.pt")
    loaded, expected = ckpt8.load(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt", weights_only=False)
    for name in ("s", "u"):
        assert type(loaded[name]) is type(expected[name])
        assert (loaded[name].dtype, loaded[name].tolist()) == (expected[name].dtype, expected[name].tolist())
    for place in ("nowhere", 5):
        with pytest.raises(ckpt8.InputError, match=r"a\.pt: cannot be loaded: torch says"):
            ckpt8.load(tmp_path / "a.pt", place)


@pytest.mark.parametrize("name", REFUSED)
def test_the_refusal_of_another_array_names_all_that_torch_asks_for(name, tmp_path):
    value, kind = REFUSED[name]
    path = tmp_path / "a.ckpt8"
    with pytest.warns(UserWarning, match="ckpt8.load will refuse it: value"):
        ckpt8.save({"w": torch.ones(3), "value": value}, path)
    with pytest.raises(ckpt8.UnsupportedError, match=kind) as refusal:
        ckpt8.load(path)
    if name == "a subclass":  # its reduction calls what a user cannot allow by the name of a class alone
        return
    names = re.search(r"holds (.*), which torch", str(refusal.value))[1].split(", ")
    with torch.serialization.safe_globals(
        [getattr(import_module(n.rpartition(".")[0]), n.split(".")[-1]) for n in names]
    ):
        assert ckpt8.load(path)["value"].dtype == value.dtype


def made(shape, dtype, data, kind="numpy.ndarray"):
    """An array as its pickle makes it: an empty one, whose state has the shape, the dtype and the bytes."""
    empty = call(ARRAY, call_name(kind), number(0) + b"\x85", content(b"b"))
    return empty + b"(" + number(1) + shape + dtype + b"\x89" + data + b"tb"


def content(value):
    return b"C" + bytes([len(value)]) + value


def dtype(kind, *, fields=b"N", names=b"N"):
    state = b"(" + number(3) + text("<") + b"N" + names + fields + number(-1) * 2 + number(0) + b"tb"
    return call("numpy.dtype", text(kind), b"\x89", b"\x88") + state


FOUR, F4 = number(4) + b"\x85", dtype("f4")
CRAFTED = {
    "more elements than bytes": made(number(1 << 40) + b"\x85", F4, content(bytes(16))),
    "fewer elements than bytes": made(number(3) + b"\x85", F4, content(bytes(16))),
    "a negative shape": made(number(-2) + number(-2) + b"\x86", F4, content(bytes(16))),
    "nothing, in a huge shape": made(number(0) + number(10**30) + b"\x86", F4, b"C\0"),
    "a hundred dimensions": made(b"(" + number(1) * 100 + b"t", F4, content(bytes(4))),
    "a shape of texts": made(text("4") + b"\x85", F4, content(bytes(16))),
    "objects from bytes": made(FOUR, dtype("O8"), content(bytes(32))),
    "a list for its bytes": made(FOUR, F4, b"]"),
    "a text for its bytes": made(FOUR, F4, text("0123456789abcdef")),
    "fields": made(FOUR, dtype("f4", fields=b"}", names=text("a") + b"\x85"), content(bytes(16))),
    "a wide text": made(FOUR, dtype("U999999999"), content(bytes(16))),
    "a dtype that there is not": made(FOUR, dtype("i3"), content(bytes(12))),
    "a dtype by its fields": made(FOUR, dtype("i4,i4"), content(bytes(32))),
    "a subclass": made(FOUR, F4, content(bytes(16)), "numpy.memmap"),
    "a great many empty texts": made(number(1 << 40) + b"\x85", dtype("U0"), b"C\0"),
    "no state": call(ARRAY, call_name("numpy.ndarray"), number(1 << 50) + b"\x85", content(b"b")),
    "a call of the class": call("numpy.ndarray", number(1 << 50) + b"\x85"),
    "a scalar of objects": call("numpy._core.multiarray.scalar", dtype("O8"), content(bytes(8))),
    "a buffer that is none": call("numpy._core.numeric._frombuffer", number(1 << 50), F4, FOUR, text("C")),
    "memory for bytes": call("builtins.bytes", number(1 << 40)) + call(ARRAY, call_name("numpy.ndarray"), b")", b"N"),
}


SCALAR = "numpy._core.multiarray.scalar"
CRAFTED_KEYS = {
    "an array": (b"}" + made(FOUR, F4, content(bytes(16))) + number(1) + b"s", "cannot be built: unhashable"),
    "numbers of one hash": (
        dtype("c16") + b"q\x600}("
        + b"".join(
            call(SCALAR, b"h\x60", content(np.complex128(-1000003 * k, k).tobytes())) + number(k)
            for k in range(1, 1 << 12)
        )
        + b"u", "made to collide"
    ),
    "a set of numbers of one hash": (
        made(FOUR, F4, content(bytes(16))) + call(
            "builtins.set", b"](" + b"".join(number(k * ((1 << 61) - 1)) for k in range(1, 1 << 12)) + b"e"
        ),
        "made to collide",
    ),
    "a text that is none": (call(SCALAR, dtype("U1"), content(b"\xff" * 4)), "not Unicode"),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED_KEYS)
def test_what_only_a_built_value_shows_is_refused_in_one_line(name, tmp_path):
    body, message = CRAFTED_KEYS[name]
    path = member(archive(among(body)), tmp_path, "a.ckpt8")
    with pytest.raises(ckpt8.InputError, match=message):
        ckpt8.load(path)


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_array_is_refused(name, tmp_path):
    path = member(archive(among(CRAFTED[name])), tmp_path, "a.ckpt8")
    with pytest.raises(ckpt8.InputError) as refusal:
        ckpt8.load(path)
    assert str(refusal.value).isprintable()


def test_the_same_bytes_in_a_great_many_arrays(tmp_path):
    data = b"B" + (1 << 20).to_bytes(4, "little") + bytes(1 << 20) + b"q\x60"
    again = made(number(1 << 20) + b"\x85", b"h\x61", b"h\x60")
    # So many that copies of each, to see whether it can be made, would take many seconds.
    body = among(data, dtype("u1") + b"q\x610", *[again] * 30_000)
    assert attempt("load", written(archive(body), tmp_path, "load")) == (
        "InputError", "the checkpoint has the same data in many arrays of numpy",
    )  # fmt: skip
