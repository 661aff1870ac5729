"""Mutations: of any bytes, of trees and their JSON, of pickles by opcode, and of zip files by record and field."""

from __future__ import annotations

import copy
import io
import itertools
import json
import pickletools
import struct
import zipfile
import zlib
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

INTERESTING = (
    0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 4096, 0x7FFF, 0x8000, 0xFFFF, 2**20, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**40, 2**61 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
JSON_VALUES = (
    None, True, False, -1, 0, 1, 2, 40, 2**20, 2**31, 2**61, 2**62 - 1, 2**62, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308,
    "", "x", "../x", "a/../b", "/etc/x", "[bold]", "\ud800", "\x1b[2J", "a\nb", "float32", "uint8", "F32", "U8", "BF16",
    "F4", "moment2", "lossless/1", "split24/1", "companded8/1", "torch-zip", "torch-legacy", "safetensors", "file",
    "symlink", "directory", [], {}, [[]], [0], [0, 0], [[0, 0]], [2**61, 2**61], {"id": "lossless/1"}, {"a": {"a": {}}},
)  # fmt: skip
RAW_JSON = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" * 5000, b"0." + b"1" * 5000, b"[" * 5000,
    b'{"a":' * 999, b'"\\ud800"', b'"\xff"', b'"\xed\xa0\x80"', b"00", b"\x00", b"//", b"'x'", b"1E400", b"tru",
    b'"\\u00"', b"\xef\xbb\xbf",
)  # fmt: skip
VAST = ([1] * 30_000, "a/" * 30_000, "a" * 60_000, [[]] * 20_000, [2**62] * 5000)


def mutate_bytes(rng, data, other=b""):
    """One to four small changes anywhere in ``data``; ``other`` is what splices are taken from."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, changed, other or data)
    return bytes(changed)


def _change(rng, data, other):
    size = len(data)
    if not size:
        data += rng.randbytes(4)
        return
    at = rng.randrange(size)
    # Most of a file is often one long run of tensors; its ends are where the structure is.
    if rng.random() < 0.5:
        at = rng.randrange(min(size, 600)) if rng.random() < 0.5 else size - 1 - rng.randrange(min(size, 600))
    how, count = rng.randrange(12), rng.choice((1, 2, 4, 8, 64, 100, 500))
    if how <= 1:
        data[at] ^= 1 << rng.randrange(8)
    elif how == 2:
        data[at] = rng.choice((rng.randrange(256), *b'0123456789"{}[]:,.-eE \n\\'))
    elif how == 3:
        data[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
    elif how == 4:
        data[at : at + count] = bytes([rng.choice((0, 255, 65))]) * min(count, size - at)
    elif how == 5:
        del data[at : at + count]
    elif how == 6:
        data[at:at] = data[at : at + count] * rng.choice((1, 2, 20))
    elif how == 7:
        del data[at:]
    elif how == 8:
        place = rng.randrange(len(other) or 1)
        data[at : at + rng.choice((0, 4, 64))] = other[place : place + rng.choice((4, 64, 300))]
    else:
        code = rng.choice(["<H", "<I", "<Q", ">I", ">Q"])
        value = struct.pack(code, rng.choice(INTERESTING) % (1 << 8 * struct.calcsize(code)))
        data[at : at + len(value)] = value


def slots(tree, kind=()):
    """Every entry of dictionaries and element of lists: the last names above it, its container, its key."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        names = (*kind, key)[-3:] if isinstance(key, str) else kind
        yield names, tree, key
        if isinstance(value, (dict, list)):
            yield from slots(value, names)


def edit_tree(rng, tree, value, counts=(1, 1, 2, 3)):
    """Change a tree in place: entries go, come twice, change places or names, or become a ``value(names, old)``.

    Names of fields are chosen evenly, however often each occurs.
    """
    for _ in range(rng.choice(counts)):
        fields = {}
        for names, node, key in slots(tree):
            fields.setdefault(names, []).append((node, key))
        if not fields:
            break
        names = rng.choice(list(fields))
        node, key = rng.choice(fields[names])
        other, there = rng.choice(rng.choice(list(fields.values())))
        sibling = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        how = rng.randrange(14)
        if how == 0:
            del node[key]
        elif how == 1 and isinstance(node, list):
            node[sibling:sibling] = [copy.deepcopy(node[key])] * rng.choice((1, 1, 2, 40, 300))
        elif how == 2:
            node[key], node[sibling] = node[sibling], node[key]
        elif how == 3 and isinstance(node, dict):
            new = rng.choice(("x", "", "__metadata__", "ckpt8.seal", "a" * 3000, f"{key}#2", f"{key}/x", "bytes", "R"))
            node[new] = node[key] if rng.random() < 0.5 else node.pop(key)
        elif how == 4 and isinstance(node[key], list):
            node[key] = rng.choice((node[key][::-1], [], node[key] * 2, node[key][:1] * 1000))
        elif how == 5 and (other is node or not isinstance(node[key], dict | list)):
            other[there] = node[key]
        elif how == 6 and type(node[key]) is int:
            old = node[key]
            node[key] = rng.choice(
                (old + 1, old - 1, old + 8, old * 2, old // 2, -old, old * 2**20, old % 2**60 + 0.0, f"{old}")
            )
        else:
            node[key] = value(names, node[key])
    return tree


def json_value(rng):
    """A maker of values for ``edit_tree`` that knows of no fields."""

    def value(_names, old):
        if type(old) is int and rng.random() < 0.3:
            return rng.choice(INTERESTING)
        return copy.deepcopy(rng.choice(VAST if rng.random() < 0.01 else JSON_VALUES))

    return value


def render_json(rng, tree):
    """The text of a tree; now and then with something in it that no JSON writer writes."""
    text = json.dumps(tree, separators=(",", ":")).encode()
    if rng.random() < 0.12 and text:
        at = rng.randrange(len(text))
        places = [k for k in range(at, min(at + 200, len(text))) if text[k] in b":[,"] or [at]
        at = rng.choice(places) + 1
        text = text[:at] + rng.choice(RAW_JSON) + text[at + rng.randrange(3) :]
    return mutate_bytes(rng, text) if rng.random() < 0.05 else text


def mutate_header(rng, text):
    """Another header of safetensors, without its length."""
    return render_json(rng, edit_tree(rng, json.loads(text), json_value(rng)))


# Pickles: the stream stays a sequence of opcodes, of which some are others

_NAMES = (
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"c__builtin__\ngetattr\n", b"ccollections\nOrderedDict\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_parameter\n", b"ctorch\nFloatStorage\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch\nSize\n", b"c_codecs\nencode\n", b"c__builtin__\nbytearray\n",
    b"c__builtin__\nset\n", b"ccopy_reg\n_reconstructor\n", b"ctorch.storage\nUntypedStorage\n",
    b"ctorch._utils\n_rebuild_sparse_tensor\n", b"ctorch._utils\n_rebuild_tensor_v3\n", b"ctorch\nfloat32\n",
    b"c__builtin__\ncomplex\n", b"ccollections\ndefaultdict\n", b"ctorch.nn.parameter\nParameter\n",
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
)  # fmt: skip
_PIECES = (
    *(bytes([code]) for code in b"N\x88\x89]})(t\x85\x86\x87ldaesu012RbQ.\x94\x8f\x90\x91\x81\x92\x93o\x97\x98"),
    b"K\x00", b"K\x05", b"M\xff\xff", b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"q\x00", b"h\x00", b"h\x01",
    b"h\x05", b"G\x7f\xf0\0\0\0\0\0\0", b"G\x7f\xf8\0\0\0\0\0\0", b"\x8a\x09\0\0\0\0\0\0\0\0\x01",
    b"X\x01\0\0\0x", b"X\0\0\0\0", b"X\x07\0\0\0storage", b"X\x05\0\0\0state", b"U\x01\xff", b"I01\n",
    b"I9999999999999999999999\n", b"F1e999\n", b"L5L\n", b"S'x'\n", b"V\\ud800\n", b"\x8c\x01a",
    b"\x8d\x01\0\0\0\0\0\0\0a", b"B\x01\0\0\0a", b"C\x01a", b"\x95\x05\0\0\0\0\0\0\0", b"\x82\x01", b"Px\n",
    b"(K\x01t", b")\x85\x85\x85", b"]]a", b"}K\x00Ns", b"\x80\x02", b"p5\n", b"g5\n",
)  # fmt: skip
_KINDS = {b"K": "int", b"M": "int", b"J": "int", b"\x8a": "int", b"X": "text", b"\x8c": "text", b"G": "float"}
_KINDS |= {b"h": "get", b"j": "get", b"N": "none", b"\x88": "bool", b"\x89": "bool"}
_TEXTS = (
    "", "x", "cpu", "cuda:0", "meta", "0", "1", "99", "step", "state", "param_groups", "params", "a.b", "é", "x" * 3000,
)  # fmt: skip
_NUMBERS = (
    *INTERESTING, -1, -(2**63), 10**400, -(10**400), 0.0, 0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), None,
    True, False,
)  # fmt: skip


@lru_cache(maxsize=256)
def opcodes(data):
    """The pickle cut at its opcodes; whatever follows the first STOP is one more piece."""
    stream = io.BytesIO(data)
    places = [*(place for _, _, place in pickletools.genops(stream)), stream.tell()]
    pieces = [data[start:stop] for start, stop in itertools.pairwise(places)]
    return (*pieces, data[places[-1] :]) if places[-1] < len(data) else tuple(pieces)


def mutate_pickle(rng, data):
    """One to four changes: opcodes taken out, repeated, swapped, put in, or with another argument."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    pieces = list(opcodes(data))
    for _ in range(rng.choice((1, 1, 1, 1, 2, 4))):
        if not pieces:
            break
        at, other, how = rng.randrange(len(pieces)), rng.randrange(len(pieces)), rng.randrange(12)
        if how == 0:
            del pieces[at : at + rng.choice((1, 1, 2, 5))]
        elif how == 1:
            times = rng.choice((1, 2, 50, 1100)) if rng.random() < 0.95 else 20_000
            pieces[at:at] = pieces[at : at + rng.choice((1, 2, 5))] * times
        elif how == 2:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif how == 3:
            pieces.insert(at, rng.choice(_PIECES))
        elif how <= 5:
            pieces[at] = rng.choice(_PIECES if how == 4 else _NAMES)
        elif how <= 7:
            pieces[at] = _other_argument(rng, pieces[at])
        else:
            _change_value(rng, pieces)
    return b"".join(pieces)


def _other_argument(rng, piece):
    """The opcode with other bytes behind it, of as many or of a length that is not theirs."""
    code, rest = piece[:1], bytearray(piece[1:])
    if code in b"XBT" and rest and rng.random() < 0.5:
        return code + struct.pack("<I", rng.choice(INTERESTING) % 2**32) + bytes(rest[4:])
    if not rest:
        return encoded(rng.choice(INTERESTING))
    at = rng.randrange(len(rest))
    rest[at] = rng.choice(b"01239aexz_.\xff\0\x7f\x80")
    return code + bytes(rest)


def encoded(value):
    """The opcode that puts a plain value on the stack and leaves the memo alone."""
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    text = str(value).encode()
    return b"X" + struct.pack("<I", len(text)) + text


def mutate_values(rng, data):
    """One to four other values; opcodes keep their order."""
    pieces = list(opcodes(data))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change_value(rng, pieces)
    return b"".join(pieces)


def _change_value(rng, pieces):
    """Another value: a number, a text, or a reference to what was there before. Kinds are chosen evenly."""
    places = {}
    for at, piece in enumerate(pieces):
        if kind := _KINDS.get(piece[:1]):
            places.setdefault(kind, []).append(at)
    if not places:
        return
    kind, dice = rng.choice(list(places)), rng.random()
    at, other = rng.choice(places[kind]), rng.choice(places[kind])
    if dice < 0.3:
        pieces[at], pieces[other] = pieces[other], pieces[at]
    elif dice < 0.5:
        pieces[at] = pieces[other]
    elif kind == "get":
        pieces[at] = b"h" + bytes([rng.randrange(256)])
    else:
        pieces[at] = encoded(rng.choice(_TEXTS if kind == "text" and dice < 0.85 else _NUMBERS))


def length_of_pickle(data):
    """How many bytes the pickle has that ``data`` begins with. Raises ValueError where it is none."""
    stream = io.BytesIO(data)
    deque(pickletools.genops(stream), maxlen=0)
    return stream.tell()


@lru_cache(maxsize=64)
def cut_pickles(data):
    """The five pickles at the start of a legacy file, and the rest."""
    pickles = []
    for _ in range(5):
        length = length_of_pickle(data)
        pickles.append(data[:length])
        data = data[length:]
    return pickles, data


def mutate_legacy(rng, data, other=b"", mutate=mutate_pickle):
    """A file with changed bytes, where there is something to splice, or with one changed pickle."""
    if other and rng.random() < 0.4:
        return mutate_bytes(rng, data, other)
    pickles, rest = cut_pickles(data)
    chosen = rng.choice((0, 1, 2, 3, 3, 3, 3, 4))
    return b"".join(mutate(rng, each) if k == chosen else each for k, each in enumerate(pickles)) + rest


_COMMON = {"needed": "H", "flags": "H", "method": "H", "time": "H", "date": "H", "crc": "I", "compressed": "I"}
_COMMON |= {"size": "I", "name": "H", "extra": "H"}
_CENTRAL = {"made_by": "H", **_COMMON, "comment": "H", "disk": "H", "internal": "H", "external": "I", "header": "I"}
_END = {"disk": "H", "start_disk": "H", "here": "H", "count": "H", "bytes": "I", "offset": "I", "comment": "H"}


@dataclass
class Record:
    """A record and what its headers are to state instead of the truth."""

    name: bytes
    content: bytes
    local: dict = field(default_factory=dict)
    central: dict = field(default_factory=dict)
    extra: bytes = b""
    deflate: bool = False


def write_zip(records, end=None, *, tail=b""):
    """A zip file as simple tools write it, with the fields that were asked for."""
    body, directory = bytearray(), bytearray()
    for record in records:
        content = zlib.compress(record.content, 9, -15) if record.deflate else record.content
        true = {
            "made_by": 20, "needed": 20, "method": 8 if record.deflate else 0, "date": 33,
            "crc": zlib.crc32(record.content), "compressed": len(content), "size": len(record.content),
            "name": len(record.name), "extra": len(record.extra), "header": len(body),
        }  # fmt: skip
        body += _pack(b"PK\x03\x04", _COMMON, true | record.local) + record.name + record.extra + content
        directory += _pack(b"PK\x01\x02", _CENTRAL, true | record.central) + record.name + record.extra
    true = {"here": len(records), "count": len(records), "bytes": len(directory), "offset": len(body)}
    true["comment"] = len(tail)
    return bytes(body + directory + _pack(b"PK\x05\x06", _END, true | (end or {})) + tail)


def _pack(signature, fields, values):
    numbers = [values.get(name, 0) % {"H": 2**16, "I": 2**32}[code] for name, code in fields.items()]
    return signature + struct.pack("<" + "".join(fields.values()), *numbers)


@lru_cache(maxsize=64)
def read_zip(data):
    """(name, content) of every record of a valid file without compression."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        starts = [
            (info, 30 + sum(struct.unpack_from("<HH", data, info.header_offset + 26))) for info in archive.infolist()
        ]
    return tuple((i.filename.encode(), data[i.header_offset + s :][: i.file_size]) for i, s in starts)


def mutate_zip(rng, data, other=b""):
    """A file with changed bytes, or with changed pickles, records, or fields of headers."""
    if rng.random() < 0.25:
        return mutate_bytes(rng, data, other)
    records, end, tail = [Record(name, content) for name, content in read_zip(data)], {}, b""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.randrange(10)
        if kind <= 4:
            for record in records:
                if record.name.endswith(b"data.pkl"):
                    record.content = _other_pickle(rng, record.content)
        elif kind <= 7:
            tail = _change_record(rng, records) or tail
        elif kind == 8 and records:
            chosen = rng.choice(records)
            place, fields = rng.choice(((chosen.local, _COMMON), (chosen.central, _CENTRAL)))
            place[rng.choice(list(fields))] = _number(rng)
        else:
            end[rng.choice(list(_END))] = _number(rng)
    return write_zip(records, end, tail=tail)


def _other_pickle(rng, content):
    try:
        return mutate_pickle(rng, content)
    except ValueError:  # it was changed before into something that has no opcodes
        return mutate_bytes(rng, content)


def _number(rng):
    return rng.choice(INTERESTING) if rng.random() < 0.6 else rng.randrange(5000)


def _change_record(rng, records):
    """Change a record as a whole; what it gives is a comment for the end of the file."""
    if not records:
        return b""
    chosen, other, how = rng.choice(records), rng.choice(records), rng.randrange(10)
    if how == 0:
        records.remove(chosen)
    elif how == 1:
        records.insert(rng.randrange(len(records)), Record(chosen.name, chosen.content))
    elif how == 2:
        names = b"", b"../x", b"/x", b"a/data.pkl", b"a\\b", b"\xff", chosen.name + b"x", b"x/" + chosen.name
        chosen.name = rng.choice(names)
    elif how == 3:
        chosen.content = mutate_bytes(rng, chosen.content)
    elif how == 4:
        chosen.content = chosen.content[: rng.randrange(len(chosen.content) + 1)]
    elif how == 5:
        chosen.content, other.content = other.content, chosen.content
    elif how == 6:
        chosen.deflate = True
    elif how == 7:
        size = struct.pack("<HHQQQ", 1, 24, *(_number(rng) for _ in range(3)))
        chosen.extra = rng.choice((size, size[:12], rng.randbytes(7), b"\xff\xff\xff\xff"))
        for key in rng.sample(("size", "compressed"), rng.randrange(1, 3)):
            chosen.central[key] = chosen.local[key] = 0xFFFFFFFF
    elif how == 8:
        name = rng.choice((b"a/code/x", b"a/constants.pkl", b"archive/byteorder", b"x"))
        records.append(Record(name, rng.choice((b"big", b"little", b""))))
    else:
        return rng.choice((b"comment", b"PK\x05\x06" * 50, b"PK\x05\x06" + bytes(18)))
    return b""
