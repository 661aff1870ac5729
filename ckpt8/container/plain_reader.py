"""Reads every ``.ckpt8`` without ckpt8: one file that needs Python, numpy and zstandard, and nothing else.

    python read_ckpt8.py run.ckpt8              lists the tensors
    python read_ckpt8.py run.ckpt8 run.npz      writes them for numpy.load
    python read_ckpt8.py run.ckpt8 run.pt       writes back what was compressed, a file or a directory of any name
    python read_ckpt8.py run.ckpt8 run.pt DIR   as above, with the bases of deltas in DIR

    read_ckpt8.read("run.ckpt8")["model.lm_head.weight"]    an array; each tensor is decoded when it is asked for

It also reads the tensors of a directory that ranks have packed. numpy has no bfloat16 and no complex32: these become
float32 and complex64, with the same values. fp8 is uint8, as stored, and so is what is smaller. Values that are no
tensors, such as the step, are in what was compressed: torch.load reads them there.

A ``.ckpt8`` is a safetensors file: header, data, at the end a manifest and a seal. The manifest lists storages, the
buffers that tensors are views of. A codec cut each storage into chunks and each chunk into parts; a part is cut into
planes of bytes, and each plane is stored as a frame, as it is or compressed by zstd. The sections below have the names
of those of ckpt8's ``FORMAT.md``, which says the rest. Every checksum is compared. Memory holds the storage of a tensor
and a chunk; what somebody forged to take more is not looked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import accumulate, chain, product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard

CHUNK = 1 << 20
"""Elements of a storage that are encoded together."""

SYMBOLS = "symbols"
"""What a part holds that has modes. Every other part holds integers: ``i1``, ``u1``, ``i2`` or ``u2``, as in numpy."""

FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""The bytes of the types that ``lossless/1`` cuts into planes."""

OTHERS = {"bfloat16": "u2", "complex32": "u4", "qint8": "i1", "qint32": "i4", "quint8": "u1", "quint4x2": "u1"}
OTHERS |= {"quint2x4": "u1", "float8_e4m3fn": "u1", "float8_e5m2": "u1", "float8_e4m3fnuz": "u1"}
OTHERS |= {"float8_e5m2fnuz": "u1", "float8_e8m0fnu": "u1", "float4_e2m1fn_x2": "u1"}
"""How numpy takes the bits of torch's types that it does not know; the others have the same names."""

Array = np.ndarray[Any, Any]
Json = dict[str, Any]
Parts = dict[str, Array]
Layout = dict[str, tuple[str, int]]


class UnreadableError(Exception):
    """A file is damaged, missing or of another kind. The text is one line that names it."""


def need(condition: object, problem: str) -> None:
    """Raise UnreadableError unless the condition holds."""
    if not condition:
        raise UnreadableError(problem)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise UnreadableError, with the path, for all that goes wrong."""
    try:
        yield
    except UnreadableError as exc:
        raise UnreadableError(f"{path}: {exc}") from exc
    except OSError as exc:
        raise UnreadableError(f"{exc.filename or path}: {exc.strerror}") from exc
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, zstandard.ZstdError) as exc:
        raise UnreadableError(f"{path}: is damaged: {type(exc).__name__}: {exc}") from exc


def item_type(dtype: str) -> np.dtype[Any]:
    """The type in which numpy takes the bits of an element."""
    return np.dtype(OTHERS.get(dtype, dtype)).newbyteorder("<")


# Symbols

DIGITS = {3: 5, 6: 3, 16: 2, 256: 1}
"""How many digits are in a byte, by their base."""


def plane_lengths(mode: Sequence[int], n: int) -> list[int]:
    """The bytes of each of the four planes of ``n`` symbols. Raises UnreadableError for a mode of another form."""
    raw, base, over, top, *bits = mode
    sound = len(bits) < 2 and all(1 <= width <= 7 for width in bits) and 0 <= raw <= (0 if bits else 2)
    sound = sound and base in DIGITS and 0 <= over <= 3 - raw - len(bits) and -1 <= top < 1 << 20
    need(sound, "a mode of symbols is not known")
    lengths = [-(-n // DIGITS[base]), *[n] * (over + raw), *(width * -(-n // 8) for width in bits)]
    return lengths + [0] * (4 - len(lengths))


def unpacked(planes: Sequence[bytes], mode: Sequence[int], n: int) -> Array:
    """The ``n`` symbols in the four planes of a chunk. -1 stands for a value of its own."""
    raw, base, over, top, *bits = mode
    columns = [np.frombuffer(plane, np.uint8).astype(np.int64) for plane in planes]
    digits = (columns[0][:, None] // base ** np.arange(DIGITS[base]) % base).ravel()
    sound = columns[0].max(initial=0) < base ** DIGITS[base] and not digits[n:].any()
    high, low = np.zeros((2, n), np.int64)
    for plane in columns[1 : 1 + over]:
        high = high << 8 | plane
    for plane in columns[1 + over : 1 + over + raw]:
        low = low << 8 | plane
    symbols = (digits[:n] + high << 8 * raw) + low
    for width in bits:
        joint = np.zeros(-(-n // 8), np.uint64)
        for k, plane in enumerate(columns[1 + over].reshape(width, -1)):
            joint |= plane.astype(np.uint64) << np.uint64(8 * k)
        fields = np.concatenate([joint >> np.uint64(width * j) & np.uint64(2**width - 1) for j in range(8)])
        sound = sound and not fields[n:].any()
        symbols = (symbols << width) + fields[:n].astype(np.int64)
    sound = sound and not high[digits[:n] != base - 1].any()
    need(sound and symbols.max(initial=0) < (top + 1 if top > 0 else 1 << 20), "a chunk of symbols is malformed")
    return symbols - 1 if top == 0 else np.where(symbols == top, -1, symbols)


def whole(symbols: Array) -> Array:
    """The integers that symbols stand for: 0, -1, 1, -2, 2, ... for 0, 1, 2, 3, 4, ..."""
    return np.where(symbols % 2, -(symbols + 1) // 2, symbols // 2)


def folded(integers: Array) -> Array:
    """The symbols of integers."""
    return np.where(integers < 0, -2 * integers - 1, 2 * integers)


# Codecs. A decoder returns fp32 numbers, or the bits of elements. ``first`` is the index of its first element in the
# storage, and ``v`` are the second moments that ``vscaled/1`` needs.


def lossless(parts: Parts, *_: Any) -> Array:
    """Floats are rotated left by one bit, and cut into planes."""
    if "bytes" in parts:
        return parts["bytes"]
    size = len(parts)
    planes = [parts[f"plane{k}"] for k in range(size)]
    bits = np.stack(planes, axis=-1).view(f">u{size}")[:, 0].astype(f"<u{size}")
    one, last = bits.dtype.type(1), bits.dtype.type(8 * size - 1)
    return np.asarray(bits >> one | (bits & one) << last)


def split(parts: Parts, storage: Json, *_: Any) -> Array:
    """The nearest bf16, and what the element has more: all of it, or that in some levels."""
    if "residual" in parts:
        more = parts["residual"].astype(np.int64)
    else:
        rho, levels = parts["rho"].astype(np.int64), storage["codec"]["R"]
        more = np.sign(rho) * np.minimum((32768 * np.abs(rho) + levels // 2) // levels, 32767)
    exponent, mantissa = parts["exponent"].astype(np.int64), parts["mantissa"].astype(np.int64)
    return (mantissa >> 7 << 31 | ((exponent << 7 | mantissa & 0x7F) << 16) + more).astype("<u4")


def companded8(parts: Parts, storage: Json, n: int, *_: Any) -> Array:
    """Codes of 8 bits; 32 elements share a scale."""
    codec = storage["codec"]
    scale = np.repeat((parts["scales"].astype("<u4") << np.uint32(15)).view("<f4"), 32)[:n]
    y = parts["codes"].astype("<f4") / np.float32(codec["Q"])
    if codec["signed"]:
        return scale * (y / (np.float32(2) - np.abs(y)))
    root = scale * y if codec["p"] == 1 else scale * (y * y)
    return root * root


def offset(first: int, n: int, salt: int) -> Array:
    """1/2 - t, with the dither t, of ``n`` elements from index ``first`` on."""
    h = (np.arange(first, first + n, dtype=np.uint64) % 2**32 * 0x9E3779B1 + salt) % 2**32
    h ^= h >> 15
    h = h * 0x2C1B3C6D % 2**32
    h ^= h >> 12
    h = h * 0x297A2D39 % 2**32
    h ^= h >> 15
    return np.float32(0.5) - (h >> 8).astype("<f4") * np.float32(2.0**-24)


def step_of(codec: Json) -> np.float32:
    """The step of a lattice."""
    return np.float32((0x800000, 0x9837F0, 0xB504F3, 0xD744FD)[codec["k"] % 4] * 2.0 ** (codec["k"] // 4 - 23))


def lattice(parts: Parts, storage: Json, n: int, first: int, *_: Any) -> Array:
    """Even steps, shifted by the dither."""
    x = whole(parts["codes"]).astype("<f4") + offset(first, n, storage["codec"]["salt"])
    return np.where(parts["codes"] == -1, np.float32(0), x * step_of(storage["codec"]))


def rclog(parts: Parts, storage: Json, n: int, first: int, *_: Any) -> Array:
    """Even steps of the bits of fp32, above what rows and columns have in common."""
    codec, codes, i = storage["codec"], parts["codes"], np.arange(first, first + n)
    common = parts["rows"].astype(np.int64)[i // codec["C"] - first // codec["C"]]
    if codec["columns"]:
        common = common + parts["columns"].astype(np.int64)[i % codec["C"]]
    low, high = (1, 0x7F7FFFFF) if storage["dtype"] == "float32" else (0x10000, 0x7F7F0000)
    bits = np.clip(whole(codes) * codec["S"] + (common << 20), low, high)
    return np.where(codes == -1, 0, bits).astype("<u4").view("<f4")


def vscaled(parts: Parts, storage: Json, n: int, first: int, v: Array) -> Array:
    """Steps that follow from the second moments."""
    codec = storage["codec"]
    k, u_max, bias1, root_bias2, eps = (np.float32(codec[x]) for x in ("k", "u_max", "bias1", "root_bias2", "eps"))
    largest = u_max * np.float32(1 - 2**-7) * ((np.sqrt(v) / root_bias2 + eps) * bias1)
    step = np.where(v == 0, largest, np.minimum(k * np.sqrt(np.sqrt(v)), largest))
    shift = np.where(v == 0, np.float32(0), offset(first, n, codec["salt"]))
    return (whole(parts["codes"]).astype("<f4") + shift) * step


FP32, WIDE = ("float32",), ("float32", "bfloat16")
CODECS: dict[str, tuple[Sequence[str], dict[str, str], Any]] = {
    "lossless/1": ((), {}, lossless),
    "split24/1": (FP32, {"exponent": "u1", "mantissa": "u1", "rho": "i1"}, split),
    "split32/1": (FP32, {"exponent": "u1", "mantissa": "u1", "residual": "i2"}, split),
    "companded8/1": (WIDE, {"codes": "i1"}, companded8),
    "lattice/1": (WIDE, {"codes": SYMBOLS}, lattice),
    "lattice/2": (WIDE, {"codes": SYMBOLS}, lattice),
    "rclog/1": (WIDE, {"codes": SYMBOLS, "rows": "i2"}, rclog),
    "vscaled/1": (WIDE, {"codes": SYMBOLS}, vscaled),
    "reference/1": (("bfloat16",), {}, None),
    "reference16/1": (("float16",), {"delta": "i1"}, None),
    "reference/2": (("bfloat16", "float16"), {}, None),
}
"""By codec: its element types, none for all; what its parts hold; its decoder, none for a copy of other storages."""


def layout_of(storage: Json, n: int) -> Layout:
    """What each part of a chunk of ``n`` elements holds, and how many. Raises UnreadableError for an unknown codec."""
    codec, dtype, role = storage["codec"], storage["dtype"], storage["role"]
    need(codec["id"] in CODECS, f"{storage['name']}: this reader does not know the codec {codec['id']!r}")
    dtypes, parts, _ = CODECS[codec["id"]]
    sound = (dtype in dtypes or not dtypes) and (codec["id"] != "lattice/2" or role == "moment1")
    need(sound, f"{storage['name']}: {codec['id']} holds no {role} of {dtype}")
    layout = {part: (holds, n) for part, holds in parts.items()}
    if codec["id"] == "lossless/1":
        layout = {f"plane{k}": ("u1", n) for k in range(FLOATS.get(dtype, 0))}
        layout = layout or {"bytes": ("u1", n * item_type(dtype).itemsize)}
    if codec["id"] == "companded8/1":
        layout = {"codes": ("i1" if codec["signed"] else "u1", n), "scales": ("u2", -(-n // 32))}
    if codec["id"] == "rclog/1":
        layout["rows"] = "i2", (n - 1) // codec["C"] + 2
        layout |= {"columns": ("i2", codec["C"])} if codec["columns"] else {}
    return layout


def bf16_bits(bits: Array) -> Array:
    """Bits of fp32 rounded to bf16."""
    wide = bits.astype(np.uint64)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) % 2**32 >> 16).astype("<u2")


def fp16_bits(bits: Array) -> Array:
    """Bits of fp32 rounded to fp16."""
    rounded = bits.view("<f4").astype("<f2").view("<u2")
    return np.where(np.isnan(bits.view("<f4")), bits >> 16 & 0x8000 | 0x7E00, rounded).astype("<u2")


def decoded(storage: Json, parts: Parts, n: int, first: int, v: Array | None = None) -> Array:
    """The elements of a chunk, as bits."""
    found = CODECS[storage["codec"]["id"]][2](parts, storage, n, first, v)
    found = found.view("<u4") if found.dtype.kind == "f" else found
    return bf16_bits(found) if storage["dtype"] == "bfloat16" and found.itemsize == 4 else found


def numbers(bits: Array, dtype: str) -> Array:
    """Bits of a float as numbers of fp32."""
    is_bf16 = dtype == "bfloat16"
    return (bits.astype("<u4") << np.uint32(16)).view("<f4") if is_bf16 else bits.view(item_type(dtype)).astype("<f4")


# Deltas


def added(own: Array, base: Array, holds: str) -> Array:
    """A part of a chunk, from its differences to that of the base."""
    if holds != SYMBOLS:
        return own ^ base
    found = np.where(own == -1, -1, folded(whole(own) + whole(base)))
    found = np.where(base == -1, own - 1, found)
    need(not ((own == -1) & (base == -1)).any() and found.max(initial=0) < 1 << 20, "symbols do not fit the base")
    return found


def moved(elements: Array, codec: Json, first: int) -> Array:
    """The symbols of the elements of a base on a lattice with another step or salt."""
    t = np.float32(0.5) - offset(first, len(elements), codec["salt"])
    q = np.floor(elements / step_of(codec) + t)
    need((np.abs(q) < 1 << 18).all(), "elements of the base are too large")
    return np.where(elements == 0, -1, folded(q.astype(np.int64)))


# Packs


def rows(table: Json | None, listed: str) -> list[Json]:
    """The rows of a table, in which the column ``listed`` is a list; none without a table."""
    if table is None:
        return []
    columns, count = [], len(table[listed])
    for column in table.values():
        match column:
            case {"all": value}:
                columns.append([value] * count)
            case {"from": first}:
                columns.append([*range(first, first + count)])
            case _:
                columns.append(column)
    return [dict(zip(table, row, strict=True)) for row in zip(*columns, strict=True)]


# The file


def chunks_of(storage: Json) -> list[int]:
    """The number of elements of each chunk of a storage."""
    return [min(CHUNK, storage["numel"] - first) for first in range(0, storage["numel"], CHUNK)]


class Tensors(Mapping[str, Array]):
    """Named tensors, each decoded when it is asked for. ``records`` have ``dtype``, torch's name, and ``shape``."""

    records: dict[str, Json]

    def write_original(self, target: Path) -> None:
        """Write what was compressed, a file or a directory, to a path where nothing is."""
        raise UnreadableError(f"{target}: ranks packed tensors, and no file; write them into a .npz")

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)


class Container(Tensors):
    """One ``.ckpt8``. ``folders`` are those where the base of a delta may be, besides its own."""

    def __init__(self, path: str | os.PathLike[str], folders: Iterable[str | os.PathLike[str]] = ()) -> None:
        self.path, self.folders = Path(path), [Path(folder) for folder in folders]
        # Each keeps what it decoded last.
        self.chunk: Callable[[int, int], Array] = lru_cache(1)(self._chunk)
        self._content: Callable[[int], Array] = lru_cache(1)(self._read_content)
        self._shared: Callable[[int], Parts] = lru_cache(1)(self._read_shared)
        with reading(self.path):
            self._read_head()
            self.storages = self._read_storages()
            self.records = {record["name"]: record for record in self._read_tensors()}

    def _read_head(self) -> None:
        self._data = np.memmap(self.path, np.uint8, "r")
        length = int.from_bytes(self._data[:8].tobytes(), "little")
        need(2 <= length <= min(100_000_000, len(self._data) - 8), "is no .ckpt8, or its first bytes are damaged")
        head = self._data[: 8 + length].tobytes()
        header = json.loads(head[8:])
        version = header.pop("__metadata__", {}).get("ckpt8")
        need(version, "is no .ckpt8")
        need(version.partition(".")[0] == "1", f"has format {version}, and this reader knows format 1")
        self.entries, position = dict[str, tuple[int, int]](), 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            sound = entry == {"dtype": "U8", "shape": [stop - start], "data_offsets": [position, stop]}
            need(sound and start <= stop, f"entry {name!r} is malformed")
            self.entries[name] = len(head) + start, len(head) + stop
            position = stop
        size = len(head) + position
        need(size == len(self._data), f"has {len(self._data)} bytes, and should have {size}")
        need(list(self.entries)[-2:] == ["ckpt8.manifest", "ckpt8.seal"], "does not end in a manifest and a seal")
        stored, seal = (self._data[slice(*self.entries[name])].tobytes() for name in ("ckpt8.manifest", "ckpt8.seal"))
        need(seal == hashlib.sha256(head + stored).digest(), "is damaged: header or manifest does not match the seal")
        self.manifest, self.seal = json.loads(zstandard.ZstdDecompressor().decompress(stored)), seal.hex()

    # Storages, chunks, slabs, frames

    def _read_storages(self) -> list[Json]:
        """The records of all storages by index, those in packs among them."""
        own, packed = [], dict[int, Json]()
        for number, record in enumerate(self.manifest["storages"]):
            codec = record["codec"]
            if codec["id"] == "shared/1":
                packed |= self._read_pack(record, number)
                continue
            if codec["id"] == "delta/1":
                record |= {"partner": codec["base"], "codec": codec["codec"]}
            need(set(record["parts"]) == set(layout_of(record, 1)), f"{record['name']}: has other parts than its codec")
            own.append(record)
        rest = iter(own)
        return [packed.get(index) or next(rest) for index in range(len(own) + len(packed))]

    @staticmethod
    def _read_pack(pack: Json, number: int) -> dict[int, Json]:
        """The storages of a pack by index. They lie in each part one behind the other, from ``starts`` on."""
        shared = dict(pack["shared"])
        codec, found, index, layouts = shared.pop("codec"), dict[int, Json](), 0, []
        for place, row in enumerate(rows(shared, "storages")):
            index += row["storages"]
            of_pack = {"dtype": pack["dtype"], "role": pack["role"], "codec": codec, "pack": number, "place": place}
            found[index] = row | of_pack
            layouts.append(layout_of(found[index], row["numel"]))
        starts = {part: [*accumulate((each[part][1] for each in layouts), initial=0)] for part in layouts[0]}
        pack |= {"starts": starts, "layout": {part: (layouts[0][part][0], ends[-1]) for part, ends in starts.items()}}
        return found

    def _part(self, record: Json, part: str, chunk: int, holds: str, count: int) -> Array:
        """A part of a chunk: its symbols, or its integers, whose planes begin with the most significant byte."""
        table, per_slab, chunks = record["parts"][part], self.manifest["slab"] // CHUNK, len(chunks_of(record))
        is_symbols, slab = holds == SYMBOLS, f"@{chunk // per_slab}" if chunks > per_slab else ""
        sizes = plane_lengths(table["modes"][chunk], count) if is_symbols else [count] * int(holds[1])
        at, first = len(sizes) * (chunk - chunk % per_slab), len(sizes) * chunk
        start, _ = self.entries[f"{record['name']}{':' if 'shared' in record else '/'}{part}{slab}"]
        start += sum(table["lengths"][at:first])
        planes = []
        for k, size in enumerate(sizes, first):
            stored = self._data[start : start + table["lengths"][k]].tobytes()
            start += len(stored)
            need(zlib.crc32(stored) == table["crcs"][k], f"{record['name']}: is damaged, a checksum does not match")
            if len(stored) != size:
                need(zstandard.frame_content_size(stored) == size, f"{record['name']}: a frame does not hold its plane")
                stored = zstandard.ZstdDecompressor(max_window_size=1 << 24).decompress(stored)
            planes.append(stored)
        if is_symbols:
            return unpacked(planes, table["modes"][chunk], count)
        return np.stack([np.frombuffer(plane, np.uint8) for plane in planes], axis=-1).view(f">{holds}")[:, 0]

    def _read_shared(self, number: int) -> Parts:
        pack = self.manifest["storages"][number]
        return {part: self._part(pack, part, 0, *held) for part, held in pack["layout"].items()}

    def parts(self, index: int, chunk: int) -> Parts:
        """The parts of a chunk of a storage; those of a difference are added to those of the base."""
        storage = self.storages[index]
        if "pack" in storage:
            starts, place = self.manifest["storages"][storage["pack"]]["starts"], storage["place"]
            shared = self._shared(storage["pack"])
            return {part: shared[part][starts[part][place] : starts[part][place + 1]] for part in starts}
        layout = layout_of(storage, chunks_of(storage)[chunk])
        parts = {part: self._part(storage, part, chunk, *held) for part, held in layout.items()}
        if "partner" in storage:
            below = self._below(storage, chunk)
            parts = {part: added(own, below[part], layout[part][0]) for part, own in parts.items()}
        return parts

    def _chunk(self, index: int, chunk: int) -> Array:
        """The elements of a chunk as their bits, or as bytes where they are no floats of 16 to 64 bits."""
        storage, first = self.storages[index], chunk * CHUNK
        n = chunks_of(storage)[chunk]
        with np.errstate(all="ignore"):
            if "runs" in storage["codec"]:
                return self._copy(index, first, n)
            v = self._second(storage, first, n) if "second" in storage["codec"] else None
            return decoded(storage, self.parts(index, chunk), n, first, v)

    def elements(self, index: int, first: int, count: int) -> Array:
        """Elements of a storage of floats, as bits."""
        need(first + count <= self.storages[index]["numel"], "a storage needs more elements than another one has")
        chunks = range(first // CHUNK, -(-(first + count) // CHUNK))
        found = [self.chunk(index, k)[max(first - k * CHUNK, 0) : first + count - k * CHUNK] for k in chunks]
        return np.concatenate(found or [np.zeros(0, "<u4")])

    def _second(self, storage: Json, first: int, count: int) -> Array:
        """The second moments of elements: another storage, or what statistics of rows and columns give."""
        second = storage["codec"]["second"]
        if not isinstance(second, list):
            return numbers(self.elements(second, first, count), self.storages[second]["dtype"])
        *indices, height, width = second
        of_rows, of_columns = (self.elements(k, 0, self.storages[k]["numel"]).view("<f4") for k in indices)
        matrices = of_rows.astype(np.float64).reshape(-1, height)
        means = np.array([math.fsum(matrix) for matrix in matrices]) / height
        relative = (matrices / means[:, None]).astype("<f4").ravel()
        row, column = np.divmod(np.arange(first, first + count), width)
        return relative[row] * of_columns.reshape(-1, width)[row // height, column]  # type: ignore[no-any-return]

    def _copy(self, index: int, first: int, count: int) -> Array:
        """Elements of a copy, which are masters rounded to its type, or padding."""
        storage, found, position = self.storages[index], [], 0
        is_half = (storage["dtype"], storage["codec"]["id"]) == ("float16", "reference/2")
        for master, start, length in storage["codec"]["runs"]:
            begin, end = max(first - position, 0), min(first + count - position, length)
            position += length
            if begin < end and master is None:
                found.append(np.full(end - begin, start, "<u2"))
            elif begin < end:
                bits = self.elements(master, start + begin, end - begin)
                found.append(fp16_bits(bits) if is_half else bf16_bits(bits))
        need(position == storage["numel"], f"{storage['name']}: its runs do not fill it")
        copy = np.concatenate(found)
        if storage["codec"]["id"] == "reference16/1":
            copy = fp16_bits(copy.astype("<u4") << np.uint32(16))
            copy += self.parts(index, first // CHUNK)["delta"].astype("<u2")
        return copy

    # Deltas

    @cached_property
    def base(self) -> Container:
        """The base of a delta, shown by its seal: under its name, in ``bases/``, or anywhere beside the delta."""
        stated = self.manifest["base"]
        homes = [self.path.parent, self.path.resolve().parent, *self.folders]
        homes += [home.parent for home in homes if home.name == "bases"]
        paths = [home / stated["path"] for home in homes]
        paths += [path for home in homes for folder in (home, home / "bases") for path in folder.glob("*.ckpt8")]
        for path in filter(Path.is_file, paths):
            if path.stat().st_size < 40 or np.memmap(path, np.uint8, "r")[-32:].tobytes().hex() != stated["seal"]:
                continue
            base = Container(path, self.folders)
            below = base.manifest.get("base", {"key": base.seal, "place": 0, "links": 0})
            sound = stated["key"] == below["key"] and stated["links"] == below["links"] + 1
            need(sound and stated["place"] > below["place"], f"its base {path} is of another chain")
            return base
        name = f"{stated['path']} (seal {stated['seal'][:12]})"
        raise UnreadableError(f"its base {name} is missing or damaged; put it beside this file, or give its folder")

    def _below(self, storage: Json, chunk: int) -> Parts:
        """The parts of the base to which those of a difference are added."""
        base, index, codec = self.base, storage["partner"], storage["codec"]
        partner = base.storages[index]
        sound = all(storage[key] == partner[key] for key in ("dtype", "numel")) and "pack" not in partner
        is_lattice = codec["id"] == partner["codec"]["id"] in ("lattice/1", "lattice/2")
        need(sound and (codec == partner["codec"] or is_lattice), f"{storage['name']}: its partner is of another kind")
        if codec == partner["codec"]:
            return base.parts(index, chunk)
        return {"codes": moved(numbers(base.chunk(index, chunk), partner["dtype"]), codec, chunk * CHUNK)}

    # Tensors

    def _read_tensors(self) -> list[Json]:
        """The records of all tensors; some are rows of a table."""
        records = [*self.manifest["tensors"], *rows(self.manifest.get("tensor_table"), "name")]
        for record in records:
            storage = self.storages[record["storage"]]
            record["name"] = storage["name"] if record["name"] is None else record["name"]
            record["shape"] = [storage["numel"]] if record["shape"] is None else record["shape"]
            if record["stride"] is None:
                sizes = [max(size, 1) for size in record["shape"]]
                record["stride"] = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
        return records

    def pieces(self, index: int) -> Iterator[bytes]:
        """The bytes of a storage, chunk by chunk."""
        return (self.chunk(index, k).tobytes() for k in range(len(chunks_of(self.storages[index]))))

    def _read_content(self, index: int) -> Array:
        content = bytearray()
        for piece in self.pieces(index):
            content += piece
        return np.frombuffer(content, np.uint8)

    def _size(self, index: int) -> int:
        return int(self.storages[index]["numel"]) * item_type(self.storages[index]["dtype"]).itemsize

    def __getitem__(self, name: str) -> Array:
        record = self.records[name]
        shape, kind = tuple(record["shape"]), item_type(record["dtype"])
        with reading(self.path):
            content = self._content(record["storage"])
            items = content[: len(content) // kind.itemsize * kind.itemsize].view(kind)
            end = record["offset"] + sum((n - 1) * stride for n, stride in zip(shape, record["stride"], strict=True))
            need(0 in shape or end < len(items), f"{name}: does not lie in its storage")
            strides = [kind.itemsize * stride for stride in record["stride"]]
            view = np.lib.stride_tricks.as_strided(items[record["offset"] :], shape, strides)
            return finished(view, record["dtype"], record["flags"])

    # Slices

    @cached_property
    def slices(self) -> dict[tuple[str, tuple[int, ...]], str]:
        """The names of tensors that are parts of distributed ones, by the name of that and the offsets in it."""
        names, found = list(self.records), dict[tuple[str, tuple[int, ...]], str]()
        for row in rows(self.manifest.get("slices"), "name"):
            dims = len(self.records[names[row["tensor"]]]["shape"])
            found[row["name"], tuple(row["offsets"] or [0] * dims)] = names[row["tensor"]]
        return found

    # Directories

    def members(self) -> list[Json]:
        """The records of the files that were compressed."""
        for record in (records := rows(self.manifest.get("member_table"), "path")):
            segments, fields, at = [], list[list[int]](), 0
            for row in rows(record["segments"], "before"):
                segments.append([at + row["before"], row["storage"]])
                at += row["before"] + self._size(row["storage"])
            for row in rows(record["crc_fields"], "gap"):
                fields.append([row["gap"] + (fields[-1][0] if fields else 0), row["storage"]])
            record |= {"segments": segments, "crc_fields": fields}
        return [*self.manifest["members"], *records]

    def write_original(self, target: Path) -> None:
        """Write what was compressed, a file or a directory, to a path where nothing is."""
        with reading(self.path):
            if "directory" in self.manifest:
                target.mkdir()
            for member in self.members():
                names = member["path"].split("/") if "directory" in self.manifest else []
                need(not {"", ".", ".."} & set(names), "a member leaves its directory")
                path = target.joinpath(*names)
                path.parent.mkdir(parents=True, exist_ok=True)
                if member["format"] == "directory":
                    path.mkdir()
                elif member["format"] == "symlink":
                    link = b"".join(self.pieces(member["skeleton"])).decode()
                    up = link.split("/").count("..")
                    sound = up < len(names) and link.split("/")[:up] == [".."] * up and not link.startswith("/")
                    need(sound, "a link leaves its directory")
                    path.symlink_to(link)
                else:
                    with path.open("xb") as file:
                        self._write_member(member, file)

    def _write_member(self, member: Json, file: BinaryIO) -> None:
        skeleton, rest, crcs = self.pieces(member["skeleton"]), b"", dict[int, int]()
        for start, index in [*member["segments"], [member["size"], None]]:
            while file.tell() < start:
                rest = rest or next(skeleton)
                rest = rest[file.write(rest[: start - file.tell()]) :]
            for piece in () if index is None else self.pieces(index):
                crcs[index] = zlib.crc32(piece, crcs.get(index, 0))
                file.write(piece)
        need(file.tell() == member["size"], f"{member['path']}: has another size than its parts")
        for place, index in member["crc_fields"]:
            file.seek(place)
            file.write(crcs.get(index, 0).to_bytes(4, "little"))


def finished(view: Array, dtype: str, flags: Sequence[str] = ()) -> Array:
    """The values of a tensor, in a type that numpy has."""
    if dtype == "bfloat16":
        view = numbers(view, dtype)
    if dtype == "complex32":
        view = np.ascontiguousarray(view).reshape(-1).view("<f2").astype("<f4").view("<c8").reshape(view.shape)
    view = np.conj(view) if "conj" in flags else view
    view = np.negative(view) if "neg" in flags else view.view()
    view.flags.writeable = False
    return view


# Directories of ranks


class Ranks(Tensors):
    """A directory that ranks have packed: tensors cut into boxes, which the containers in it have as slices."""

    def __init__(self, folder: Path) -> None:
        self.path, self.records, self._files = folder, {}, list[Container]()
        with reading(folder):
            parts = sorted(folder.glob("ckpt8-dcp.*.json"), key=lambda path: int(path.name.split(".")[1]))
            whole = folder / "ckpt8-dcp.json"
            indices = [index_of(path.read_bytes(), path.name) for path in ([whole] if whole.exists() else parts)]
            saves = {(part["world"], part["save"]) for part in (index.get("part") for index in indices) if part}
            need(not saves or [world for world, _ in saves] == [len(indices)], "does not have the parts of one save")
            # Of what several ranks have, the first one's counts: it is written over that of the others.
            for index in reversed(indices):
                first = len(self._files)
                for name, seal in index["files"]:
                    self._files.append(Container(folder / name))
                    need(self._files[-1].seal == seal, f"{name} is of another save")
                for name, record in index["tensors"].items():
                    boxes = self.records.setdefault(name, {**record, "boxes": []})["boxes"]
                    boxes += [(self._files[first + file], *box) for file, *box in boxes_of(record)]

    def __getitem__(self, name: str) -> Array:
        record = self.records[name]
        kind = finished(np.zeros(0, item_type(record["dtype"])), record["dtype"]).dtype
        whole, missing = np.zeros(record["shape"], kind), np.ones(record["shape"], bool)
        with reading(self.path):
            for container, offsets, sizes in record["boxes"]:
                own = container.slices.get((name, tuple(offsets)))
                if own is not None:  # torch.save may have written it
                    box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
                    whole[box], missing[box] = container[own], False
            need(not missing.any(), f"{name}: a part of it is missing, or is not stored as a tensor")
        whole.flags.writeable = False
        return whole


def index_of(text: bytes, name: str) -> Json:
    """The index in a file of that name, which ends with the checksum of what is before."""
    head, mark, stated = text.rpartition(b',"crc32":"')
    need(not mark or stated == b'%08x"}' % zlib.crc32(head), f"{name}: is damaged, a checksum does not match")
    return json.loads(text)  # type: ignore[no-any-return]


def boxes_of(record: Json) -> list[Any]:
    """The boxes of a tensor: number of the file, offsets, sizes. A grid has the cuts of each dimension, and owners."""
    if "boxes" in record:
        return record["boxes"]  # type: ignore[no-any-return]
    sizes = [[size for size, count in runs for _ in range(count)] for runs in record["cuts"]]
    offsets = [[*accumulate(cuts, initial=0)][:-1] for cuts in sizes]
    runs = ([owner, 1, 0] if isinstance(owner, int) else owner for owner in record["owners"])
    owners = chain.from_iterable([first + k * step for k in range(count)] for first, count, step in runs)
    return list(zip(owners, product(*offsets), product(*sizes), strict=True))


def read(path: str | os.PathLike[str], folders: Iterable[str | os.PathLike[str]] = ()) -> Container | Ranks:
    """The tensors of a ``.ckpt8``, or of a directory that ranks have packed, by name. Raises UnreadableError."""
    packed = [folder for folder in (Path(path), Path(path) / "ckpt8") if any(folder.glob("ckpt8-dcp*.json"))]
    return Ranks(packed[0]) if packed else Container(path, folders)


def main(path: str, target: str | None = None, *folders: str) -> None:
    """The command line: list the tensors, write them into a .npz, or write what was compressed."""
    tensors = read(path, folders)
    if target is None:
        for name, record in tensors.records.items():
            sys.stdout.write(f"{name if name.isprintable() else ascii(name)}  {record['dtype']}  {record['shape']}\n")
        return
    need(not os.path.lexists(target), f"{target}: is there already")
    partial = Path(f"{target}.partial")
    if target.endswith(".npz"):
        with zipfile.ZipFile(partial, "x") as archive:
            for name, array in tensors.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
    else:
        tensors.write_original(partial)
    partial.rename(target)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (UnreadableError, OSError) as exc:
        sys.exit(str(exc))
