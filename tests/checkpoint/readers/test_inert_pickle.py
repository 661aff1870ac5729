"""The pickle machine against Python's own, against hostile streams, and the walk over what it builds."""

from __future__ import annotations

import collections
import enum
import io
import os
import pickle
import sys

import pytest

from ckpt8.checkpoint.readers.inert_pickle import load_pickle
from ckpt8.checkpoint.tree import Global, Inert, StatefulDict, StorageRef, TensorRef, iter_leaves
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType

PROTOCOLS = range(6)


def load(data, **options):
    stream = io.BytesIO(data)
    value = load_pickle(stream, len(data), "file.pt", **options)
    assert stream.tell() == len(data)
    return value


def storage(pid):
    return StorageRef(pid, DType.FLOAT32, 100)


def as_python(value):
    """Sets come as Inert nodes, to keep the order of the pickle."""
    if type(value) is Inert and value.name in ("builtins.set", "builtins.frozenset"):
        return {"builtins.set": set, "builtins.frozenset": frozenset}[value.name](map(as_python, value.items))
    if type(value) in (list, tuple):
        return type(value)(map(as_python, value))
    if isinstance(value, dict):
        return {key: as_python(part) for key, part in value.items()}
    return value


VALUES = [
    None, True, False, 0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, 2**63, -(2**200), 2**2040,
    0.0, -0.0, 1.5, -1e300, float("inf"), 5e-324,
    "", "a", "line\nand \\u0041 and \\ and \r", "αβγ", "😀", "\ud800", "x" * 300, "y" * 70_000,
    b"", b"abc", bytes(range(256)), b"z" * 70_000, bytearray(b""), bytearray(b"q\x00\xff" * 100),
    (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),)), [], [[]], [1, [2, (3, "x")]],
    {}, {"a": 1, 2: "b", None: 0, 1.5: [], b"k": (), (1, ("x",)): {}, True: {"n": {}}},
    list(range(2500)), {i: str(i) for i in range(2500)}, tuple(range(1000)),
    set(), {1, 2, "x"}, frozenset(), frozenset({(1, 2), "y"}), 1 + 2j, slice(1, None, 2),
    collections.OrderedDict([("z", 1), ("a", [2])]), collections.defaultdict(None, {"k": 1}),
]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", VALUES, ids=[f"{type(value).__name__}-{k}" for k, value in enumerate(VALUES)])
def test_gives_what_python_gives(value, protocol):
    got = as_python(load(pickle.dumps(value, protocol)))
    assert got == value
    if not isinstance(value, (set, frozenset)):
        # True == 1 and 0.0 == -0.0, so compare the spelling and the order of keys too.
        expected = dict(value) if isinstance(value, dict) else value
        assert repr(got) == repr(expected)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_and_self_referential_objects_keep_their_identity(protocol):
    inner = ["x"]
    loop = [inner, inner]
    loop.append(loop)
    loop.append({"self": loop})
    got = load(pickle.dumps(loop, protocol))
    assert got[0] is got[1]
    assert got[2] is got
    assert got[3]["self"] is got
    assert list(iter_leaves(got)) == []


class Plain:
    def __init__(self):
        self.a = [1]
        self.b = "x"


class Slotted:
    __slots__ = ("s",)


class Colour(enum.Enum):
    RED = 3


class Listlike(list):
    pass


class Dictlike(dict):
    pass


class Keyworded:
    def __new__(cls, *, size):
        return object.__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"size": [7]}


Point = collections.namedtuple("Point", "x y")
HERE = __name__


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_become_inert_nodes_that_keep_their_parts(protocol):
    made = load(pickle.dumps(Plain(), protocol))
    assert (type(made), made.name, made.args, made.state) == (Inert, f"{HERE}.Plain", (), {"a": [1], "b": "x"})
    made = load(pickle.dumps(Colour.RED, protocol))
    assert (made.name, made.args) == (f"{HERE}.Colour", (3,))
    if protocol >= 2:
        slotted = Slotted()
        slotted.s = 5
        assert load(pickle.dumps(slotted, protocol)).state == (None, {"s": 5})
        made = load(pickle.dumps(Listlike([1, 2]), protocol))
        assert (made.name, made.items) == (f"{HERE}.Listlike", [1, 2])
        made = load(pickle.dumps(Dictlike(k=[3]), protocol))
        assert (made.name, made.pairs) == (f"{HERE}.Dictlike", [("k", [3])])
        made = load(pickle.dumps(Point(1, (2,)), protocol))
        assert (made.name, made.args) == (f"{HERE}.Point", (1, (2,)))
        keyworded = pickle.dumps(Keyworded(size=1), protocol)
        assert "[7]" in repr(load(keyworded))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_attributes_of_an_ordered_dict_stay_out_of_the_way(protocol):
    value = collections.OrderedDict(w=1)
    value._metadata = {"version": 2}
    got = load(pickle.dumps(value, protocol))
    assert type(got) is StatefulDict
    assert got == {"w": 1}
    assert got.state == {"_metadata": {"version": 2}}


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_in_a_pickle_is_executed(protocol, tmp_path):
    target = str(tmp_path / "ran")
    data = pickle.dumps(Evil(target), protocol)
    made = load(data)
    assert (made.name, made.args) == (f"{os.mkdir.__module__}.mkdir", (target,))
    assert not list(tmp_path.iterdir())
    pickle.loads(data)
    assert [entry.name for entry in tmp_path.iterdir()] == ["ran"]  # the same bytes do run in Python's own machine


@pytest.mark.parametrize("form", ["(S{0!r}\nios\nmkdir\n.", "(cos\nmkdir\nS{0!r}\no."])
def test_old_instance_opcodes_are_not_executed(form, tmp_path):
    made = load(form.format(str(tmp_path / "ran")).encode())
    assert (made.name, made.args) == ("os.mkdir", (str(tmp_path / "ran"),))
    assert not list(tmp_path.iterdir())


def test_no_module_is_imported(tmp_path, monkeypatch):
    (tmp_path / "trap_module.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(str(tmp_path))
    for data in (b"ctrap_module\nThing\n.", b"\x80\x04\x8c\x0btrap_module\x8c\x05Thing\x93."):
        assert load(data) == Global("trap_module.Thing")
    assert "trap_module" not in sys.modules


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"S'a\\n\\x41\\101\\'\\q'\n.", "a\nAA'\\q"),
        (b"S'\\xff'\n.", b"\xff"),
        (b"U\x02hi.", "hi"),
        (b"T\x02\0\0\0\xff\xfe.", b"\xff\xfe"),
        (b"I01\n.", True),
        (b"I-7\n.", -7),
        (b"L12L\n.", 12),
        (b"F-2.5\n.", -2.5),
        (b"(I1\nI2\nd.", {1: 2}),
        (b"(I1\nI2\nl.", [1, 2]),
        (b"I1\n(I2\nI3\n1.", 1),
        (b"I1\n(0.", 1),
        (b"I1\n2\x86.", (1, 1)),
        (b"I5\np0\n0g0\n.", 5),
        (b"\x8b\x02\0\0\0\xff\xff.", -1),
        (b"\x95\x02\0\0\0\0\0\0\0N.", None),
    ],
)
def test_opcodes_that_python_3_no_longer_writes(data, value):
    assert repr(load(data)) == repr(value)


def tensor_pickle():
    """The calls that torch.save writes for tensors, parameters and attributes."""
    pid = b"X\x01\0\0\x00kQ"
    size = b"K\x02K\x03\x86K\x03K\x01\x86"
    empty = b"ccollections\nOrderedDict\n)R"
    v2 = b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"K\x05" + size + b"\x89" + empty + b"tR"
    v3 = (
        b"ctorch._utils\n_rebuild_tensor_v3\n(" + pid + b"K\x05" + size + b"\x89" + empty
        + b"ctorch\nbfloat16\ntR"
    )  # fmt: skip
    parameter = b"ctorch._utils\n_rebuild_parameter\n" + v2 + b"\x88" + empty + b"\x87R"
    typed = (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n("
        + pid + b"K\x05" + size + b"\x89" + empty + b"t}X\x01\0\0\0fK\x01stR"
    )  # fmt: skip
    return {"v2": v2, "v3": v3, "parameter": parameter, "typed": typed}


@pytest.mark.parametrize("form", ["v2", "v3", "parameter", "typed"])
def test_tensor_calls_become_references(form):
    got = load(tensor_pickle()[form] + b".", persistent_load=storage)
    assert type(got) is TensorRef
    assert (got.key, got.offset, got.shape, got.stride) == ("k", 5, (2, 3), (3, 1))
    assert got.dtype is (DType.BFLOAT16 if form == "v3" else DType.FLOAT32)


def test_a_subclass_or_hidden_tensors_are_not_taken_for_a_plain_tensor():
    forms = tensor_pickle()
    subclass = forms["typed"].replace(b"ctorch\nTensor\n", b"cmine\nTensor\n")
    got = load(subclass + b".", persistent_load=storage)
    assert type(got) is Inert
    assert [type(leaf) for _, leaf in iter_leaves(got)] == [StorageRef]
    hidden = forms["typed"].replace(b"K\x01stR", forms["v2"] + b"stR")
    got = load(hidden + b".", persistent_load=storage)
    assert [type(leaf) for _, leaf in iter_leaves(got)] == [StorageRef, TensorRef]


@pytest.mark.parametrize(
    ("form", "old", "new"),
    [
        ("v2", b")R", b")R" + b"U\x01hU\x01kQs"),
        ("parameter", b"\x88ccollections\nOrderedDict\n)R", b"\x88ccollections\nOrderedDict\n)RU\x01hU\x01kQs"),
        ("v3", b"ctorch\nbfloat16\n", b"ctorch\nfloat3_e1m1\n"),
    ],
)
def test_a_call_that_hides_a_storage_or_has_an_unknown_type_stays_inert(form, old, new):
    data = tensor_pickle()[form]
    assert old in data
    got = load(data.replace(old, new) + b".", persistent_load=storage)
    assert type(got) is Inert
    assert StorageRef in [type(leaf) for _, leaf in iter_leaves(got)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"K\x05K\x02", b"K\x5fK\x02", "reaches element 100"),
        (b"K\x02K\x03\x86K\x03", b"K\x02K\x03\x86N", "not a count"),
        (b"K\x03K\x01\x86", b"K\x03\x85", "do not belong"),
        (b"K\x05K\x02", b"J\xff\xff\xff\xffK\x02", "not a count"),
        (b"K\x03\x86K\x03K\x01\x86", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x86K\x00K\x00\x86", "more elements"),
    ],
)
def test_a_tensor_must_lie_inside_its_storage(old, new, message):
    good = tensor_pickle()["v2"]
    assert old in good
    with pytest.raises(InputError, match=message):
        load(good.replace(old, new) + b".", persistent_load=storage)
