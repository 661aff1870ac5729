"""The pickle machine against Python's own and against hostile streams, storages in it, and the walk over a tree."""

from __future__ import annotations

import collections
import datetime
import enum
import io
import os
import pickle
import random
import sys
import time
import tracemalloc

import pytest
from hostile_kit import Pickled

from ckpt8.checkpoint.readers import inert_pickle, rebuild
from ckpt8.checkpoint.readers.inert_pickle import StorageTable, load_pickle
from ckpt8.checkpoint.readers.rebuild import make_tensor
from ckpt8.checkpoint.tree import (
    MAX_DEPTH,
    Global,
    Inert,
    StatefulDict,
    StorageRef,
    TensorRef,
    check_depth,
    format_path,
    iter_leaves,
)
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.tensors import DType

PROTOCOLS = range(6)


def load(data, *, is_whole=True, **options):
    stream = io.BytesIO(data)
    value = load_pickle(stream, len(data), "file.pt", **options)
    assert not is_whole or stream.tell() == len(data)
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
        self.a, self.b = [1], "x"


class Slotted:
    __slots__ = ("s",)


class Colour(enum.Enum):
    RED = 3


class Keyworded:
    def __new__(cls, *, size):
        return object.__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"size": [7]}


Listlike, Dictlike = type("Listlike", (list,), {}), type("Dictlike", (dict,), {})
Point = collections.namedtuple("Point", "x y")
HERE = __name__


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_become_inert_nodes_that_keep_their_parts(protocol):
    made = load(pickle.dumps(Plain(), protocol))
    assert (type(made), made.name, made.args, made.state) == (Inert, f"{HERE}.Plain", (), {"a": [1], "b": "x"})
    made = load(pickle.dumps(Colour.RED, protocol))
    if (3, 11, 0) <= sys.version_info < (3, 11, 4):  # Python looks members up by their names
        assert (made.name, made.args[1]) == ("builtins.getattr", "RED")
    else:
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


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_in_a_pickle_is_executed(protocol, tmp_path):
    target = str(tmp_path / "ran")
    data = pickle.dumps(Pickled(os.mkdir, target), protocol)
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


# Streams made to crash, hang or fill the memory: each is refused in one clear line


OBJECTS = [
    [None, True, 1, 300, 70_000, -1, 2**70, 1.5, "text", "\u03b1\n\\", b"bytes", bytearray(b"x")],
    {"k": (1, (2, [3])), 5: {"n": ()}, (1, "x"): {1, 2}},
    frozenset({1}), datetime.timedelta(3), 1 + 2j,
]  # fmt: skip
TENSOR = tensor_pickle()["v2"] + b"."
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
            check_depth(load(damaged, is_whole=False, persistent_load=storage), "file.pt")
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


@pytest.mark.parametrize("repeat", [b"0c__builtin__\nbytearray\nh\x00\x85R", b"0ccollections\nOrderedDict\nh\x01\x85R"])
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


# What a pickle may say about a storage


def test_one_storage_under_two_types():
    table = StorageTable("file.pt")
    kinds = [Global("torch.FloatStorage"), Global("torch.cuda.ByteStorage"), Global("torch.storage.UntypedStorage")]
    assert table.load(("storage", kinds[0], "k", "cpu", 2)) == StorageRef("k", DType.FLOAT32, 2)
    assert table.dtype_for("k", 8) is DType.FLOAT32
    assert table.load(("storage", kinds[1], "k", "cpu", 8)) == StorageRef("k", DType.UINT8, 8)
    assert table.dtype_for("k", 8) is DType.UINT8
    table.load(("storage", kinds[2], "k", "cpu", 9))
    with pytest.raises(InputError, match="9 elements"):
        table.dtype_for("k", 8)


FLOAT = Global("torch.FloatStorage")


@pytest.mark.parametrize(
    "pid",
    [
        None,
        "storage",
        (),
        ("storage",),
        ("other", FLOAT, "k", "cpu", 1),
        ("storage", "FloatStorage", "k", "cpu", 1),
        ("storage", FLOAT, ("k",), "cpu", 1),
        ("storage", FLOAT, "k", None, 1),
        ("storage", FLOAT, "k", "cpu", -1),
        ("storage", FLOAT, "k", "cpu", 2**63),
        ("storage", FLOAT, "k", "cpu", True),
        ("storage", FLOAT, "k", "cpu", 5, ("v", 3, 3)),
        ("storage", FLOAT, "k", "cpu", 5, ("v", -1, 3)),
        ("storage", FLOAT, "k", "cpu", 5, (1, 2)),
        ("module", "x", "y", "z"),
    ],
    ids=repr,
)
def test_malformed_persistent_ids(pid):
    with pytest.raises(InputError, match=r"^file\.pt: damaged pickle"):
        StorageTable("file.pt").load(pid)


def test_a_typed_view_starts_at_a_whole_element():
    view = StorageRef("k", DType.UINT8, 8, offset=4)
    assert make_tensor(view, DType.FLOAT32, 1, (1,), (1,)).offset == 2
    with pytest.raises(ValueError, match="starts inside an element"):
        make_tensor(StorageRef("k", DType.UINT8, 8, offset=2), DType.FLOAT32, 0, (1,), (1,))
    with pytest.raises(ValueError, match="reaches element 2 of a storage that has 2"):
        make_tensor(view, DType.FLOAT32, 2, (1,), (1,))


def test_unknown_storage_types_are_named():
    with pytest.raises(UnsupportedError, match=r"torch\.QuaternionStorage"):
        StorageTable("file.pt").load(("storage", Global("torch.QuaternionStorage"), "k", "cpu", 1))


# The walk: names, order, and trees made to be endless, deep or shared


def test_walk_names_and_order():
    tensors = [TensorRef(str(i), DType.FLOAT32, 0, (), ()) for i in range(9)]
    ref = StorageRef("s", DType.UINT8, 4)
    metadata = StatefulDict()
    metadata["w"] = tensors[0]
    metadata.state = {"_metadata": tensors[1]}
    empty = StatefulDict()
    empty.state = {"hook": tensors[0]}
    tree = {
        "model": metadata,
        "state": {0: {"m": tensors[2]}, (1, "x"): [tensors[3]]},
        "object": Inert("m.C", args=(0, tensors[4]), state={"weight": tensors[5]}),
        "slots": Inert("m.D", items=[tensors[6]], pairs=[("k", tensors[7])], state=(None, {"s": ref})),
        "scalar": 3,
        tensors[8]: None,
    }
    got = [(format_path(path), leaf.key) for path, leaf in iter_leaves(tree)]
    assert got == [
        ("model.w", "0"),
        ("model._metadata", "1"),
        ("state.0.m", "2"),
        ("state.(1,x).0", "3"),
        ("object.1", "4"),
        ("object.weight", "5"),
        ("slots.0", "6"),
        ("slots.k", "7"),
        ("slots.s", "s"),
        ("key", "8"),
    ]
    assert list(iter_leaves(tensors[0])) == [((), tensors[0])]
    assert [format_path(path) for path, _ in iter_leaves([empty])] == ["0.hook"]
    long = next(iter_leaves({"x" * 10_000: tensors[0]}))[0]
    assert len(format_path(long)) < 2000


def test_walk_depth_limit_is_exact():
    tree = [TensorRef("k", DType.FLOAT32, 0, (), ())]
    for _ in range(MAX_DEPTH - 1):
        tree = [tree]
    assert len(next(iter_leaves(tree))[0]) == MAX_DEPTH
    with pytest.raises(InputError, match="nested deeper"):
        check_depth([tree], "file.pt")


DEEP = {
    "tuples": b")" + b"\x85" * 1_000_000,
    "lists": b"]" * 200_000 + b"a" * 199_999,
    "dicts": b"}U\x01k" * 200_000 + b"N" + b"s" * 200_000,
    "calls": b")q\x00" + b"0cm\nC\nh\x00\x85Rq\x00" * 100_000,
    "states": b"cm\nC\n)R" * 100_000 + b"b" * 99_999,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEEP)
def test_deep_nesting_is_refused_by_the_walk_and_freed_safely(kind):
    tree = load(DEEP[kind] + b".")
    with pytest.raises(InputError, match=f"^file.pt: .*nested deeper than {MAX_DEPTH}"):
        check_depth(tree, "file.pt")
    del tree


SHARED = {
    "doubled tuples": b"X\x01\0\0\0kQ\x85" + b"2\x86" * 900,
    "one argument tuple": b"((X\x01\0\0\0kQ" + b"N" * 20_000 + b"tq\x000" + b"cm\nC\nh\x00R" * 20_000 + b"t",
    "one state": b"(}(" + b"U\x01kX\x01\0\0\0kQ" * 20_000 + b"uq\x000" + b"cm\nC\n)Rh\x00b" * 20_000 + b"t",
    "one set": b"((X\x01\0\0\0kQ" + b"N" * 20_000 + b"lq\x000" + b"c__builtin__\nset\nh\x00\x85R" * 20_000 + b"t",
}


@pytest.mark.by_default("doubled tuples")
@pytest.mark.parametrize("kind", SHARED)
def test_shared_parts_are_walked_once(kind):
    tree = load(SHARED[kind] + b".", persistent_load=storage)
    started = time.process_time()
    assert len(list(iter_leaves(tree))) == 1
    assert time.process_time() - started < 2  # quadratic time would be minutes
