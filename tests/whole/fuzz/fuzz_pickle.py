"""Mutations of pickles by opcode: the stream stays a sequence of opcodes, of which some are others."""

from __future__ import annotations

import io
import itertools
import pickletools
import random
import struct
from collections import deque
from functools import lru_cache

from fuzz_bytes import INTERESTING, mutate_bytes

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
    b"N", b"\x88", b"\x89", b"K\x00", b"K\x05", b"M\xff\xff", b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"]", b"}",
    b")",
    b"(", b"t", b"\x85", b"\x86", b"\x87", b"l", b"d", b"a", b"e", b"s", b"u", b"0", b"1", b"2", b"R", b"b", b"Q", b".",
    b"q\x00", b"h\x00", b"h\x01", b"h\x05", b"\x94", b"\x8f", b"\x90", b"\x91", b"\x81", b"\x92", b"\x93", b"o",
    b"G\x7f\xf0\0\0\0\0\0\0", b"G\x7f\xf8\0\0\0\0\0\0", b"\x8a\x09\0\0\0\0\0\0\0\0\x01", b"X\x01\0\0\0x", b"X\0\0\0\0",
    b"X\x07\0\0\0storage", b"X\x05\0\0\0state", b"U\x01\xff", b"I01\n", b"I9999999999999999999999\n", b"F1e999\n",
    b"L5L\n",
    b"S'x'\n", b"V\\ud800\n", b"\x8c\x01a", b"\x8d\x01\0\0\0\0\0\0\0a", b"B\x01\0\0\0a", b"C\x01a",
    b"\x95\x05\0\0\0\0\0\0\0",
    b"\x82\x01", b"\x97", b"\x98", b"Px\n", b"(K\x01t", b")\x85\x85\x85", b"]]a", b"}K\x00Ns", b"\x80\x02", b"p5\n",
    b"g5\n",
)  # fmt: skip


@lru_cache(maxsize=256)
def opcodes(data: bytes) -> tuple[bytes, ...]:
    """The pickle cut at its opcodes; whatever follows the first STOP is one more piece."""
    stream = io.BytesIO(data)
    places = [place for _, _, place in pickletools.genops(stream)]
    places.append(stream.tell())
    pieces = [data[start:stop] for start, stop in itertools.pairwise(places)]
    return (*pieces, data[places[-1] :]) if places[-1] < len(data) else tuple(pieces)


def mutate_pickle(rng: random.Random, data: bytes) -> bytes:
    """One to six changes: opcodes taken out, repeated, swapped, put in, or with another argument."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    pieces = list(opcodes(data))
    for _ in range(rng.choice((1, 1, 1, 1, 2, 4))):
        at = rng.randrange(len(pieces) or 1)
        if not pieces:
            break
        how = rng.randrange(12)
        if how == 0:
            del pieces[at : at + rng.choice((1, 1, 2, 5))]
        elif how == 1:
            times = rng.choice((1, 2, 50, 1100)) if rng.random() < 0.95 else 20_000
            pieces[at:at] = pieces[at : at + rng.choice((1, 2, 5))] * times
        elif how == 2:
            other = rng.randrange(len(pieces))
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif how == 3:
            pieces.insert(at, rng.choice(_PIECES))
        elif how == 4:
            pieces[at] = rng.choice(_PIECES)
        elif how == 5:
            pieces[at] = rng.choice(_NAMES)
        elif how == 6:
            pieces[at] = rng.choice(pieces)
        else:
            pieces[at] = _other_argument(rng, pieces[at])
    return b"".join(pieces)


def _other_argument(rng: random.Random, piece: bytes) -> bytes:
    code, value = piece[:1], rng.choice(INTERESTING)
    if code in (b"K", b"h", b"q", b"\x80"):
        return code + bytes([value % 256])
    if code == b"M":
        return code + struct.pack("<H", value % 2**16)
    if code in (b"J", b"j", b"r"):
        return code + struct.pack("<I", value % 2**32)
    if code in (b"\x8a", b"K") or len(piece) < 2:
        raw = value.to_bytes(9, "little")
        return b"\x8a\x09" + raw
    if code in (b"X", b"B", b"T") and rng.random() < 0.5:
        return code + struct.pack("<I", value % 2**32) + piece[5:]
    if code == b"G":
        return code + rng.choice((b"\x7f\xf0", b"\x7f\xf8", b"\xff\xf0", b"\x80\0", b"\0\0")) + bytes(6)
    changed = bytearray(piece)
    changed[rng.randrange(1, len(piece))] = rng.choice(b"01239aexz_.\xff\0")
    return bytes(changed)


_INTEGERS = (b"K", b"M", b"J", b"\x8a")
_TEXTS = (b"X", b"\x8c")
_GETS = (b"h", b"j")
_ATOMS = (*_INTEGERS, b"G", *_TEXTS, b"N", b"\x88", b"\x89", *_GETS)
_ODD_TEXTS = (
    "", "x", "cpu", "cuda:0", "meta", "0", "1", "99", "step", "state", "param_groups", "params", "a.b", "é",
    "x" * 3000,
)  # fmt: skip
_ODD_NUMBERS: tuple[object, ...] = (
    *INTERESTING, -1, -(2**63), 10**400, -(10**400), 0.0, 0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), None,
    True, False,
)  # fmt: skip


def encoded(value: object) -> bytes:
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


def mutate_values(rng: random.Random, data: bytes) -> bytes:
    """One to four other values: numbers, texts, and references to what was there before; opcodes keep their order."""
    pieces = list(opcodes(data))
    places: dict[bytes, list[int]] = {}
    for at, piece in enumerate(pieces):
        if piece[:1] in _ATOMS:
            kind = b"J" if piece[:1] in _INTEGERS else b"X" if piece[:1] in _TEXTS else piece[:1]
            places.setdefault(kind, []).append(at)
    for _ in range(rng.choice((1, 1, 1, 2, 4)) if places else 0):
        kind = rng.choice(list(places))
        at, other, dice = rng.choice(places[kind]), rng.choice(places[kind]), rng.random()
        if dice < 0.3:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif dice < 0.5:
            pieces[at] = pieces[other]
        elif kind == b"X" and dice < 0.85:
            pieces[at] = encoded(rng.choice(_ODD_TEXTS))
        elif kind in _GETS:
            pieces[at] = b"h" + bytes([rng.randrange(256)])
        else:
            pieces[at] = encoded(rng.choice(_ODD_NUMBERS))
    return b"".join(pieces)


@lru_cache(maxsize=64)
def _pickles(data: bytes) -> tuple[tuple[bytes, ...], bytes]:
    stream, places = io.BytesIO(data), [0]
    for _ in range(5):
        deque(pickletools.genops(stream), maxlen=0)  # up to the next STOP
        places.append(stream.tell())
    return tuple(data[a:b] for a, b in itertools.pairwise(places)), data[places[-1] :]


def cut_pickles(data: bytes) -> tuple[list[bytes], bytes]:
    """The five pickles at the start of a legacy file, and the rest."""
    pickles, rest = _pickles(data)
    return list(pickles), rest
