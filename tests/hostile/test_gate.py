"""Whatever ends in ``torch.load``: nothing that torch's own unpickler would do of its own takes memory, time, or a crash.

Every file is small, and every call in it is one that ``weights_only`` allows. Each is tried in a process of its own with
little memory and time, so that what gets through to torch fails here.
"""

from __future__ import annotations

import struct
import zipfile

import pytest
import torch
from gate_kit import (
    GATES,
    HOOKS,
    LISTS,
    NESTED,
    STORAGE,
    TENSOR,
    TUPLES,
    among,
    archive,
    attempt,
    call,
    call_name,
    expanded,
    legacy,
    nested,
    number,
    pickled,
    text,
    written,
)
from hostile_kit import container_of

HUGE, NONE, NO = number(1 << 40), b"N", b"\x89"
MANY = 20_000
REBUILD = "torch._utils._rebuild_"
SCALAR = call(f"{REBUILD}tensor_v2", STORAGE, number(0), b")", b")", NO, HOOKS)
EMPTY_LIST, EMPTY_TUPLE = b"]", b")"
LIST_OF_MANY = b"](" + b"".join(number(k) for k in range(MANY)) + b"eq\x10"
PAIRS_OF_MANY = b"}(" + b"".join(number(k) + b"N" for k in range(MANY)) + b"uq\x10"
TUPLE_OF_MANY = b"(" + b"K\x01" * MANY * 10 + b"tq\x10"
PRIME = (1 << 61) - 1
COLLIDING = [number(k * PRIME) for k in range(1, 40_001)]


def again(name, times, argument=b"h\x10"):
    """The same call over and over, of the value that is memo entry 16."""
    made = call_name(name) + b"q\x11" + argument + b"\x85R"
    return made + (b"h\x11" + argument + b"\x85R") * (times - 1)


def typed(function, arguments, state=NONE):
    """A tensor with attributes, or so it says."""
    return call("torch._tensor._rebuild_from_type_v2", call_name(function), call_name("torch.Tensor"), arguments, state)


BODIES = {
    # Memory that the arguments of a call ask for
    "bytearray": call("builtins.bytearray", HUGE),
    "bytearray of a tensor": call("builtins.bytearray", SCALAR),
    "bytearray behind another function": typed("builtins.bytearray", HUGE + b"\x85"),
    "tensor": call("torch.FloatTensor", HUGE),
    "tensor of a shape of tensors": call("torch.Tensor", SCALAR, SCALAR),
    "tensor of lists in lists": among(nested(number(1), LISTS, wide=64, deep=5), call("torch.Tensor", NESTED)),
    "storage": call("torch.storage.UntypedStorage", HUGE),
    "new storage": call_name("torch.storage.UntypedStorage") + HUGE + b"\x85\x81",
    "storage of lists in lists": among(
        nested(number(1), LISTS, wide=64, deep=5), call("torch.storage.TypedStorage", NESTED)
    ),
    "expanded tensor of another type": call(
        f"{REBUILD}device_tensor_from_cpu_tensor", expanded(1 << 36), call_name("torch.float64"), text("cpu"), NO
    ),
    "quantized tensor": call(
        f"{REBUILD}qtensor",
        STORAGE,
        number(0),
        HUGE + b"\x85",
        number(0) + b"\x85",
        call_name("torch.per_tensor_affine") + b"G?\xf0\0\0\0\0\0\0" + number(0) + b"\x87",
        NO,
        HOOKS,
    ),
    "scales of a quantized tensor": among(
        nested(number(1), LISTS, wide=64, deep=5),
        call(
            f"{REBUILD}qtensor",
            STORAGE,
            number(0),
            number(64) + b"\x85",
            number(0) + b"\x85",
            b"(" + call_name("torch.per_channel_affine") + NESTED + NESTED + number(0) + b"t",
            NO,
            HOOKS,
        ),
    ),
    "sparse tensor of expanded ones": call(
        f"{REBUILD}sparse_tensor",
        call("torch.serialization._get_layout", text("torch.sparse_coo")),
        expanded(1 << 36) + expanded(1 << 36) + b"(" + HUGE + b"t\x87",
    ),
    # Memory by copying the same over and over
    "hexadecimal digits of digits": among(
        call("_codecs.encode", text("x" * 4096), text("latin1")) + b"q\x10",
        *(call("_codecs.encode", b"h\x10", text("hex")) + b"q\x10" for _ in range(24)),
    ),
    "sizes": among(TUPLE_OF_MANY, again("torch.Size", 2000)),
    "sets": among(LIST_OF_MANY, again("builtins.set", 2000)),
    "counters": among(PAIRS_OF_MANY, again("collections.Counter", 2000)),
    "dictionaries": among(PAIRS_OF_MANY, again("collections.OrderedDict", 2000)),
    "attributes": among(
        PAIRS_OF_MANY,
        call_name("collections.OrderedDict") + b"q\x11" + b")Rh\x10b",
        *(b"h\x11)Rh\x10b" for _ in range(2000)),
    ),
    "empty dictionaries": among(call_name("collections.OrderedDict") + b"q\x11)R", b"h\x11)R" * 1_000_000),
    # Time
    "counted collisions": call_name("collections.Counter") + b")R(" + b"N".join(COLLIDING) + b"Nu",
    "set of collisions": call("builtins.set", b"](" + b"".join(COLLIDING) + b"e"),
    "set of tuples in tuples": among(
        nested(number(1), TUPLES, wide=64, deep=5), call("builtins.set", b"](" + NESTED + b"e")
    ),
    "layout by tuples in tuples": among(
        nested(number(1), TUPLES, wide=64, deep=5), call("torch.serialization._get_layout", NESTED)
    ),
    # What torch says of what it refuses is as long as that
    "call of lists in lists": among(nested(number(1), LISTS, wide=64, deep=5), NESTED + b")R"),
    "class of lists in lists": among(nested(number(1), LISTS, wide=64, deep=5), NESTED + b")\x81"),
    # A tensor or its storage changed behind the back of whoever checked it
    "storage given to a tensor": call("torch.FloatTensor")
    + b"("
    + STORAGE
    + number(0)
    + HUGE
    + b"\x85"
    + number(1)
    + b"\x85tb",
    "attributes of a storage": STORAGE + b"}" + text("dtype") + call_name("torch.float64") + b"sb",
    "data of a tensor": typed(
        f"{REBUILD}tensor_v2",
        b"(" + STORAGE + number(0) + b"))" + NO + HOOKS + b"t",
        b"}" + text("data") + TENSOR + b"s",
    ),
}
"""What makes ``g``, by what is wrong with it."""

LARGE = bytes(4 << 20)
TYPES = {
    "bytearray of a tensor": "LongStorage",
    "tensor of a shape of tensors": "LongStorage",
    "quantized tensor": "QInt8Storage",
    "scales of a quantized tensor": "QInt8Storage",
}
DATA = {"bytearray of a tensor": struct.pack("<q", 1 << 40), "tensor of a shape of tensors": struct.pack("<q", 1 << 20)}


def with_large_storages():
    cast = call(f"{REBUILD}device_tensor_from_cpu_tensor", TENSOR, call_name("torch.float64"), text("cpu"), NO)
    place = b"(" + text("storage") + call_name("torch.FloatStorage") + text("0") + text("meta") + number(1 << 20)
    return {
        "the same tensor converted again": archive(among(cast * 300), LARGE),
        "a storage read again": archive(among(place + b"tq\x12Q", b"h\x12Q" * 30_000), LARGE, location="meta"),
    }


def with_odd_archives():
    deflated, innocent = zipfile.ZIP_DEFLATED, bytes(8)
    hostile = pickled(BODIES["bytearray"], innocent)
    bomb = bytes(1 << 30)
    inner = archive(BODIES["bytearray"])
    outer = bytearray(archive(NONE, after=[("more", inner, zipfile.ZIP_STORED)]))
    outer[-2:] = struct.pack("<H", 22)
    directory, place = inner.rfind(b"PK\5\6"), outer.find(inner)
    end = bytearray(inner[directory:])
    end[16:20] = struct.pack("<I", struct.unpack("<I", end[16:20])[0] + place)
    return {
        "a version that inflates": archive(NONE, before=[("version", bomb, deflated)]),
        "a number of the file that inflates": archive(NONE, after=[(".data/serialization_id", bomb, deflated)]),
        "names by case": archive(NONE, before=[("DATA.PKL", hostile, zipfile.ZIP_STORED)]),
        "another end in the comment": bytes(outer) + bytes(end),
    }


def with_legacy_pickles():
    first = b"\x80\x02" + b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    view = b"(" + text("v") + number(0) + number(2) + b"t"
    body = pickled(NONE, bytes(8), view=view)
    deep = among(nested(number(1), TUPLES, wide=64, deep=5))
    return {
        "legacy: bytearray": legacy(BODIES["bytearray"]),
        "legacy: bytearray among the keys": legacy(NONE).replace(
            b"\x80\x02]q\x00X\x01\0\0\x000q\x01a.", b"\x80\x02](X\x01\0\0\x000" + BODIES["bytearray"] + b"e."
        ),
        "legacy: a view by tuples in tuples": legacy(deep).replace(
            body[:0] + b"N" + b"tQq\x01", b"(" + nested(number(1), TUPLES, wide=64, deep=5) + b"ttQq\x01", 1
        ),
        "legacy: empty dictionaries": legacy(BODIES["empty dictionaries"], first=first),
    }


FILES = (
    {
        name: archive(body, DATA.get(name, bytes(64)), dtype=TYPES.get(name, "FloatStorage"))
        for name, body in BODIES.items()
    }
    | with_large_storages()
    | with_odd_archives()
    | with_legacy_pickles()
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each file came to at each gate."""
    folder = tmp_path_factory.mktemp("gate")
    tries = {}
    for at, (name, content) in enumerate(FILES.items()):
        for number_, gate in enumerate(GATES):
            own = folder / f"{at}-{number_}"
            own.mkdir()
            tries[name, gate] = written(content, own, gate)
    found = attempt([(gate, path) for (_, gate), path in tries.items()])
    return dict(zip(tries, found, strict=True))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", FILES)
def test_what_torch_would_do_is_refused_in_front_of_it(name, gate, outcomes):
    kind, message = outcomes[name, gate]
    assert kind in ("InputError", "UnsupportedError"), message
    assert message.isprintable()
    assert "MemoryError" not in message
    assert "RuntimeError" not in message


ODD = {
    "a device that is none": call("torch.device", number(5), number(5)),
    "a call of a type": call("torch.float32"),
    "a call of a storage class": call("torch.FloatStorage"),
    "a parameter of nothing": call("torch.nn.parameter.Parameter", number(3)),
    "a layout that is none": call("torch.serialization._get_layout", text("torch.round")),
    "a number for an id": number(7) + b"Q",
    "no id": b")Q",
    "text that is none": b"U\x02\xff\xfe",
    "bytes that are none": call("_codecs.encode", text("\u20ac"), text("latin1")),
    "a complex number of text": call("builtins.complex", text("x")),
    "a sparse tensor of nothing": call(f"{REBUILD}sparse_tensor", NONE, EMPTY_TUPLE),
    "attributes of a number": number(5) + b"}b",
    "attributes that are none": call("collections.OrderedDict") + number(5) + b"b",
    "metadata that are none": call(f"{REBUILD}tensor_v2", STORAGE, number(0), b")", b")", NO, HOOKS, text("conj")),
    "a state of three": typed(
        f"{REBUILD}tensor_v2", b"(" + STORAGE + number(0) + b"))" + NO + HOOKS + b"t", NONE * 3 + b"\x87"
    ),
    "an unknown opcode": b"\xff",
    "a location that is nowhere": b"("
    + text("storage")
    + call_name("torch.FloatStorage")
    + text("0")
    + text("nowhere:1")
    + number(2)
    + b"tQ",
}


def test_whatever_else_is_wrong_is_one_line(tmp_path):
    tries = []
    for at, body in enumerate(ODD.values()):
        (tmp_path / str(at)).mkdir()
        tries += [(gate, written(archive(body), _below(tmp_path / str(at), gate), gate)) for gate in GATES]
    for (gate, path), (kind, message) in zip(tries, attempt(tries), strict=True):
        assert kind in ("InputError", "UnsupportedError", "loaded"), (list(ODD)[int(path.parts[-3])], gate, message)
        assert message.isprintable() or not message


def _below(folder, gate):
    (folder / gate).mkdir()
    return folder / gate


NUMPY = ["numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"]


@pytest.mark.parametrize(
    "body",
    ids=["shape", "call", "new"],
    argvalues=[
        call("numpy._core.multiarray._reconstruct", call_name("numpy.ndarray"), HUGE + b"\x85", text("b")),
        call("numpy.ndarray", HUGE),
        call_name("numpy.ndarray") + HUGE + b"\x85\x81",
    ],
)
def test_arrays_that_are_allowed_are_as_large_as_what_they_hold(body, tmp_path):
    tries = [(gate, written(archive(body), _below(tmp_path, gate), gate)) for gate in GATES]
    for kind, message in attempt(tries, allow=NUMPY):
        assert kind == "InputError", message
        assert "MemoryError" not in message


# What must go through


class Plain:
    """An object of a class that the user allows."""

    def __init__(self, content):
        self.content = content

    def __eq__(self, other):
        return self.content == other.content


class Subclass(torch.Tensor):
    pass
