"""Streams made to crash, hang or fill the memory of the pickle machine: each is refused in one clear line."""

from __future__ import annotations

import datetime
import io
import pickle
import random
import tracemalloc

import pytest

from ckpt8.checkpoint.readers import inert_pickle, rebuild
from ckpt8.checkpoint.readers.inert_pickle import StorageTable, load_pickle
from ckpt8.checkpoint.tree import StorageRef, check_depth
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType


def load(data, **options):
    return load_pickle(io.BytesIO(data), len(data), "file.pt", **options)


def storage(pid):
    return StorageRef(pid, DType.FLOAT32, 100)


PROTOCOLS = range(6)
OBJECTS = [
    [None, True, 1, 300, 70_000, -1, 2**70, 1.5, "text", "\u03b1\n\\", b"bytes", bytearray(b"x")],
    {"k": (1, (2, [3])), 5: {"n": ()}, (1, "x"): {1, 2}},
    frozenset({1}), datetime.timedelta(3), 1 + 2j,
]  # fmt: skip
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n(X\x01\0\0\0kQK\x05K\x02K\x03\x86K\x03K\x01\x86"
    b"\x89ccollections\nOrderedDict\n)RtR."
)
MALFORMED = {
    "empty": (b"", "too early"),
    "no value": (b".", "left over"),
    "two values": (b"NN.", "left over"),
    "open mark": (b"N(.", "left over"),
    "protocol": (b"\x80\x06N.", "protocol 6"),
    "opcode": (b"N\x01.", "opcode"),
    "extension": (b"\x82\x01.", "opcode"),
    "buffer": (b"\x97.", "opcode"),
    "memo": (b"h\x05.", "memo"),
    "memo index": (b"Ng" + b"9" * 30 + b"\n.", "digits"),
    "long4 negative": (b"\x8b\xff\xff\xff\xff.", "announced"),
    "long4 huge": (b"\x8b\xff\xff\xff\x7f.", "2147483647 bytes"),
    "long1 short": (b"\x8a\x05\x01.", "announced"),
    "digits": (b"I" + b"1" * 5000 + b"\n.", "digits"),
    "integer": (b"Ixyz\n.", "invalid literal"),
    "float": (b"Fxyz\n.", "could not convert"),
    "float8": (b"G\0\0.", "too early"),
    "quotes": (b"Sabc\n.", "quotes"),
    "line": (b"Vabc", "inside a line"),
    "escape": (b"V\\u12\n.", "truncated"),
    "utf8": (b"X\x01\0\0\0\xff.", "utf-8"),
    "unicode8": (b"\x8d" + b"\xff" * 8 + b".", "announced"),
    "bytes8": (b"\x8e" + b"\0" * 7 + b"\x40.", "announced"),
    "bytearray8": (b"\x96" + b"\0" * 7 + b"\x7f.", "announced"),
    "frame": (b"\x95" + b"\0" * 7 + b"\x01N.", "frame"),
    "append": (b"NNa.", "NoneType"),
    "set item": (b"NNNs.", "NoneType"),
    "odd dict": (b"(Nd.", "no value"),
    "list key": (b"}]Ns.", "list"),
    "dict key": (b"}}Ns.", "dict"),
    "deep key": (b"})" + b"\x85" * 100 + b"Ns.", "key is too large"),
    "wide key": (b"}(" + b"N" * 100 + b"tNs.", "key is too large"),
    "huge int key": (b"}\x8b\x00\x04\0\0" + b"\x01" * 1024 + b"Ns.", "key is too large"),
    "call": (b"cos\nmkdir\nNR.", "argument tuple"),
    "empty object": (b"(o.", "not enough values"),
    "name": (b"NN\x93.", "not text"),
    "long name": (b"c" + b"x" * 2000 + b"\ny\n.", "names"),
    "state of a list": (b"]}b.", "list"),
    "state of a dict": (b"}}b.", "dict"),
    "persistent": (b"NQ.", "outside"),
    "huge complex": (b"c__builtin__\ncomplex\n\x8b\x00\x04\0\0" + b"\x01" * 1024 + b"K\x00\x86R.", "too large"),
    "marks": (b"(" * 20_000, "marks"),
    "pairs": (b"ccollections\nOrderedDict\n(](N\x85aetR.", ""),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_streams_are_one_clear_line(name):
    data, expected = MALFORMED[name]
    with pytest.raises(InputError, match=r"^file\.pt: damaged pickle") as caught:
        load(data)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_pickles_never_raise_anything_else():
    seeds = [pickle.dumps(OBJECTS, protocol) for protocol in PROTOCOLS] + [TENSOR, TENSOR]
    generator = random.Random(7)
    messages = []
    for data in [seed for seed in seeds for _ in range(300)]:
        damaged = bytearray(data)
        for _ in range(generator.randrange(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        try:
            check_depth(load(damaged, persistent_load=storage), "file.pt")
        except InputError as exc:
            messages.append(str(exc))
    assert len(messages) > 600
    assert all(message.startswith("file.pt: ") and "\n" not in message for message in messages)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_truncation_is_noticed(protocol):
    data = pickle.dumps(OBJECTS, protocol)
    for length in range(len(data)):
        with pytest.raises(InputError):
            load(data[:length])


@pytest.mark.slow
def test_deep_arguments_are_never_hashed():
    """Hashing a tuple nested a million times would overflow the interpreter's own stack."""
    deep = b")" + b"\x85" * 1_000_000
    for name in (b"c_codecs\nencode\n", b"c__builtin__\nbytearray\n"):
        made = load(name + b"U\x01x" + deep + b"\x86R.")
        assert made.args[0] == "x"
    with pytest.raises(InputError, match="key is too large"):
        load(b"}" + deep + b"Ns.")
    with pytest.raises(InputError):
        StorageTable("file.pt").load((*load(deep + b"."), 1, 2, 3, 4))


def test_announced_lengths_allocate_nothing():
    tracemalloc.start()
    try:
        for name in ("unicode8", "bytes8", "bytearray8", "long4 huge", "frame"):
            with pytest.raises(InputError):
                load(MALFORMED[name][0])
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "repeat",
    [b"0c__builtin__\nbytearray\nh\x00\x85R", b"0ccollections\nOrderedDict\nh\x01\x85R"],
)
def test_copies_are_budgeted(repeat):
    pairs = b"](" + b"NN\x86" * 5000 + b"e"
    data = b"B\x10\x27\0\0" + b"x" * 10_000 + b"q\x00" + b"0" + pairs + b"q\x01" + repeat * 3000 + b"."
    with pytest.raises(InputError, match="over and over"):
        load(data)


def test_caps_are_enforced(monkeypatch):
    monkeypatch.setattr(inert_pickle, "FREE_UNITS", 100)
    with pytest.raises(InputError, match="builds more objects than"):
        load(b"(" + b"}" * 400 + b"t.")
    monkeypatch.setattr(inert_pickle, "MAX_GLOBALS", 2)
    with pytest.raises(InputError, match="names"):
        load(b"(ca\nb\nca\nc\nca\nd\nt.")
    monkeypatch.setattr(rebuild, "MAX_DIMS", 1)
    with pytest.raises(InputError, match="2 dimensions"):
        load(TENSOR, persistent_load=storage)
