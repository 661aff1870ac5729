"""Decoders of the codecs, written from FORMAT.md alone, for ``plain_reader``: they share no code with the package."""

from __future__ import annotations

import numpy as np
import torch

FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
SYMBOLS = "symbols"


def itemsize(dtype):
    return getattr(torch, dtype).itemsize


def integers(plane, dtype=torch.uint8):
    return torch.frombuffer(bytearray(plane), dtype=dtype).to(torch.int64)


def low_bytes(x, size):
    """The low bytes of 64-bit integers, little-endian."""
    return bytes(x.contiguous().view(torch.uint8).view(-1, 8)[:, :size].contiguous().flatten().tolist())


def lossless(parts, storage, n, *_):
    if "bytes" in parts:
        return parts["bytes"][0]
    size = FLOATS[storage["dtype"]]
    rotated = sum(integers(parts[f"plane{k}"][0]) << 8 * (size - 1 - k) for k in range(size))
    width = 8 * size
    return low_bytes((rotated >> 1) & ((1 << (width - 1)) - 1) | (rotated & 1) << (width - 1), size)


def split24(parts, storage, n, *_):
    levels = storage["codec"]["R"]
    exponent, mantissa = integers(parts["exponent"][0]), integers(parts["mantissa"][0])
    rho = integers(parts["rho"][0], torch.int8)
    hi = exponent << 7 | (mantissa & 0x7F)
    size = torch.div(32768 * rho.abs() + levels // 2, levels, rounding_mode="floor")
    d = rho.sign() * size.clamp(max=32767)
    return low_bytes((mantissa >> 7) << 31 | ((hi << 16) + d), 4)


def companded8(parts, storage, n, *_):
    codec = storage["codec"]
    high, low = parts["scales"]
    bits = (integers(high) << 8 | integers(low)) << 15
    scale = bits.to(torch.int32).view(torch.float32).repeat_interleave(32)[:n]
    code = integers(parts["codes"][0], torch.int8 if codec["signed"] else torch.uint8).float()
    y = code / torch.tensor(float(codec["Q"]))
    if codec["signed"]:
        x = scale * (y / (2 - y.abs()))
    else:
        root = scale * y if codec["p"] == 1 else scale * (y * y)
        x = root * root
    x = x.to(getattr(torch, storage["dtype"]))
    return bytes(x.view(torch.uint8).tolist())


def unpacked(planes, mode, n):
    """The symbols in the four planes of a chunk."""
    raw, base, over, top, bits = *mode, *[0] * (5 - len(mode))
    each = {3: 5, 6: 3, 16: 2, 256: 1}[base]
    digits = np.frombuffer(planes[0], np.uint8).astype(np.int64)[:, None] // base ** np.arange(each) % base
    assert max(planes[0]) < base**each
    assert not digits.ravel()[n:].any()
    high, low = (
        sum(np.frombuffer(p, np.uint8).astype(np.int64) << 8 * k for k, p in enumerate(reversed(part)))
        for part in (planes[1 : 1 + over], planes[1 + over : 1 + over + raw])
    )
    assert not np.any((high != 0) & (digits.ravel()[:n] != base - 1))
    s = ((digits.ravel()[:n] + high) << 8 * raw) + low
    if bits:
        m = -(-n // 8)
        joint = sum(
            np.frombuffer(planes[1 + over], np.uint8).astype(np.uint64).reshape(bits, m)[k] << 8 * k
            for k in range(bits)
        )
        fields = np.concatenate([joint >> bits * j & 2**bits - 1 for j in range(8)]).astype(np.int64)
        assert not fields[n:].any()
        s = (s << bits) + fields[:n]
    assert s.max() < 1 << 20
    if top == 0:
        return s - 1
    assert top < 0 or s.max() <= top
    return np.where(s == top, -1, s)


def added(own, base):
    """A part of one chunk from its differences to that of the base: the planes, or the symbols."""
    if isinstance(own, list):
        assert [len(plane) for plane in own] == [len(plane) for plane in base]
        return [bytes(a ^ b for a, b in zip(*each, strict=True)) for each in zip(own, base, strict=True)]
    q, below = (np.where(s % 2, -(s + 1) // 2, s // 2) for s in (own, base))
    total = np.where(q + below < 0, -2 * (q + below) - 1, 2 * (q + below))
    assert not np.any((own == -1) & (base == -1))
    found = np.where(base == -1, own - 1, np.where(own == -1, -1, total))
    assert found.max() < 1 << 20
    return found


def plane_lengths(mode, n):
    """The bytes of each of the four planes of n symbols."""
    raw, base, over, top, *bits = mode
    assert 0 <= raw <= (0 if bits else 2)
    assert over >= 0
    assert raw + over + len(bits) <= 3
    assert -1 <= top < 1 << 20
    assert bits == [] or (len(bits) == 1 and 1 <= bits[0] <= 7)
    lengths = [-(-n // {3: 5, 6: 3, 16: 2, 256: 1}[base]), *[n] * (raw + over), *(each * -(-n // 8) for each in bits)]
    return lengths + [0] * (4 - len(lengths))


def whole(symbols):
    """0, 1, 2, 3, 4, ... stand for 0, -1, 1, -2, 2, ..."""
    return np.where(symbols % 2, -(symbols + 1) // 2, symbols // 2)


def offset(first, n, salt):
    """1/2 - t of n elements from index ``first`` on."""
    h = (np.arange(first, first + n, dtype=np.uint64) % 2**32 * 0x9E3779B1 + salt) % 2**32
    h ^= h >> 15
    h = h * 0x2C1B3C6D % 2**32
    h ^= h >> 12
    h = h * 0x297A2D39 % 2**32
    h ^= h >> 15
    return np.float32(0.5) - (h >> 8).astype(np.float32) * np.float32(2.0**-24)


def fp32_bytes(x, storage):
    """fp32 numbers as elements of a storage: as they are, or rounded to bf16."""
    bits = x.astype(np.float32).view(np.uint32)
    if storage["dtype"] == "float32":
        return bits.tobytes()
    assert storage["dtype"] == "bfloat16"
    return rounded_bits(bits).astype(np.uint16).tobytes()


def rounded_bits(bits):
    """The bits of bf16 for those of fp32."""
    bits = bits.astype(np.uint64)
    return (bits + 0x7FFF + (bits >> 16 & 1)) % 2**32 >> 16


def lattice(parts, storage, n, first, _):
    codec = storage["codec"]
    assert set(codec) == {"id", "k", "salt"}
    symbols = parts["codes"]
    x = (whole(symbols).astype(np.float32) + offset(first, n, codec["salt"])) * step_of(codec)
    return fp32_bytes(np.where(symbols == -1, np.float32(0), x), storage)


def next_symbols(below, partner, storage, first):
    """The symbols of ``storage`` for the elements that the symbols ``below`` of ``partner`` stand for."""
    bits = np.frombuffer(lattice({"codes": below}, partner, len(below), first, None), np.uint8)
    wide = bits.view(np.uint32) if partner["dtype"] == "float32" else bits.view(np.uint16).astype(np.uint32) << 16
    w, t = wide.view(np.float32), np.float32(0.5) - offset(first, len(below), storage["codec"]["salt"])
    q = np.floor(w / step_of(storage["codec"]) + t).astype(np.int64)
    assert np.abs(q).max(initial=0) < 1 << 18
    return np.where(w == 0, -1, np.where(q < 0, -2 * q - 1, 2 * q))


def step_of(codec):
    mantissa = (0x800000, 0x9837F0, 0xB504F3, 0xD744FD)[codec["k"] % 4]
    return np.float32(mantissa * 2.0 ** (codec["k"] // 4 - 23))


def rclog(parts, storage, n, first, _):
    codec = storage["codec"]
    assert set(codec) == {"id", "S", "C", "columns"}
    i, width, symbols = np.arange(first, first + n), codec["C"], parts["codes"]
    factors = factors_of(parts["rows"])[i // width - first // width]
    if codec["columns"]:
        factors = factors + factors_of(parts["columns"])[i % width]
    low, high = (1, 0x7F7FFFFF) if storage["dtype"] == "float32" else (0x10000, 0x7F7F0000)
    bits = np.clip(whole(symbols) * codec["S"] + (factors << 20), low, high)
    return fp32_bytes(np.where(symbols == -1, 0, bits).astype(np.uint32).view(np.float32), storage)


def factors_of(planes):
    """Signed numbers of two bytes, from a plane for each."""
    high, low = (np.frombuffer(plane, np.uint8).astype(np.int64) for plane in planes)
    return ((high << 8 | low) ^ 0x8000) - 0x8000


def vscaled(parts, storage, n, first, second):
    codec = storage["codec"]
    assert set(codec) == {"id", "second", "k", "u_max", "bias1", "root_bias2", "eps", "salt"}
    k, u_max, bias1, root_bias2, eps = (np.float32(codec[x]) for x in ("k", "u_max", "bias1", "root_bias2", "eps"))
    v = second[first : first + n]
    divisor = (np.sqrt(v) / root_bias2 + eps) * bias1
    largest = u_max * np.float32(1 - 2**-7) * divisor
    step = np.where(v == 0, largest, np.minimum(k * np.sqrt(np.sqrt(v)), largest))
    moved = np.where(v == 0, np.float32(0), offset(first, n, codec["salt"]))
    assert parts["codes"].min() >= 0
    return fp32_bytes((whole(parts["codes"]).astype(np.float32) + moved) * step, storage)


DECODE = {
    "lossless/1": lossless,
    "split24/1": split24,
    "companded8/1": companded8,
    "lattice/1": lattice,
    "lattice/2": lattice,
    "rclog/1": rclog,
    "vscaled/1": vscaled,
}
