"""Packs symbols into planes of bytes and unpacks them: see ``manifest`` for the form.

The mode follows from a histogram, so that every device and backend chooses the same. The functions of torch define the
planes; ``kernels`` fills the same ones faster.

The mode of a chunk is that whose planes zstd should make smallest, by a histogram of its symbols.

Parts of two storages on the same lattice have differences, chunk by chunk, and these have sums: see FORMAT.md. Symbols
stand for integers q, and -1 for a value of its own; with those of the base:

    base not -1    the difference is -1 where the symbol is -1, else the symbol of q - q of the base
    base -1        the difference is 0 where the symbol is -1, else the symbol + 1

All other parts differ by the exclusive or of their bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import ModuleType

from ckpt8.codecs.lattice import RESERVED
from ckpt8.codecs.lattice.reference import from_zigzag, zigzag
from ckpt8.container.frames import SHORT_PLANE, SYMBOLS_WORTH_IT
from ckpt8.container.manifest import DIGITS, LANES, MOST_BITS, MOST_RAW, NO_TOP, PLANES, SYMBOL_LIMIT, Mode, Packing
from ckpt8.core import backend as backends
from ckpt8.core.errors import RefusedError, require
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Parts
from ckpt8.core.workers import scratch_elements

_BYTE = 256
_BLOCK, _BLOCK_BYTES, _FRAME_BYTES = 1 << 17, 4.0, 9.0
_TABLE_BYTES = 0.5
"""What a value of a byte takes in the Huffman table of every block."""
_EFFORT = 0.01
"""Bits that a byte counts besides where zstd takes it: of modes that are nearly equal, that with fewer such bytes is
faster, and no larger as measured."""
_LEAST_SHARE = 1 / 127
"""zstd stores bytes as they are unless one of them is more frequent."""
_FEWEST_ABOVE, _BASES_ABOVE = 4, (16, 256)
"""Below bits is no less than that, in digits of these bases: less has no noise below it."""

_SHARES = (
    0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.9925, 0.995, 0.997, 0.998, 0.999, 1.0,
)  # fmt: skip
_EXCESS = (
    0.03, 0.03, 0.05, 0.08, 0.13, 0.28, 0.45, 0.59, 0.60, 0.53, 0.35, 0.236, 0.172, 0.0955, 0.073, 0.0425, 0.018, 0.013,
    0.005, 0.002,
)  # fmt: skip
"""Bits that zstd takes for a byte beyond its entropy, by the share of the most frequent byte, as measured. Huffman
takes one at least, and the matches that zstd finds where a byte repeats cost more than they save until it has 0.9."""

Tabulate = Callable[["torch.Tensor", Sequence[Mode]], "torch.Tensor"]
"""The counts of the values in each plane of each mode but that of the bits, of digits in the first, a row of 256 for
each: from the counts of what symbols have above the bits."""


def choose(counts: torch.Tensor, numel: int, tabulate: Tabulate | None = None) -> Mode:
    """The mode for ``numel`` symbols. ``counts`` say how often each value from -1 on occurs: int64, on the CPU.

    The first one of equals. Bits are taken for noise.
    """
    candidates, tables = list[Mode](), list[torch.Tensor]()
    for top in (len(counts) - 1, 0) if counts[0] else (NO_TOP,):
        stored = _with_top(counts, top)
        largest = _largest_counted(stored)
        for bits in range(MOST_BITS + 1 if largest >= _FEWEST_ABOVE else 1):
            modes = list(_candidates(largest >> bits, top, bits))
            if modes:
                candidates += modes
                tables.append((tabulate or _tabulate)(_above_bits(stored, bits), modes))
    planes = [mode.plane_lengths(numel)[: 1 + mode.over + mode.raw] for mode in candidates]
    lengths = [length for plane in planes for length in plane]
    digits = [
        size for mode, own in zip(candidates, planes, strict=True) for size in (DIGITS[mode.base], *[1] * len(own[1:]))
    ]
    sizes = iter(_stored(torch.cat(tables), _numbers(lengths), _numbers(digits)).tolist())
    totals = [
        sum(islice(sizes, len(own)), mode.bits * -(-numel // LANES))
        for mode, own in zip(candidates, planes, strict=True)
    ]
    return candidates[totals.index(min(totals))]


def _above_bits(counts: torch.Tensor, bits: int) -> torch.Tensor:
    """``counts`` of what symbols have above their lowest bits."""
    width = 1 << bits
    return torch.nn.functional.pad(counts, (0, -len(counts) % width)).view(-1, width).sum(1) if bits else counts


def _with_top(counts: torch.Tensor, top: int) -> torch.Tensor:
    """``counts`` of the stored symbols from 0 on."""
    if top == 0:
        return counts
    return counts[1:] if top == NO_TOP else torch.cat([counts[1:], counts[:1]])


def _numbers(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _candidates(largest: int, top: int, bits: int) -> Iterator[Mode]:
    """The modes of so many bits that hold values up to ``largest`` above them, apart from those that gain nothing."""
    if bits and largest < _FEWEST_ABOVE:
        return
    for raw in range(1 if bits else MOST_RAW + 1):
        rest = largest >> 8 * raw
        if raw and not rest:
            return
        for base in _BASES_ABOVE if bits else DIGITS:
            over = ((rest - (base - 1)).bit_length() + 7) // 8 if rest >= base else 0
            if raw + over + (bits > 0) < PLANES:
                yield Mode(raw, base, over, top, bits)


def _tabulate(counts: torch.Tensor, modes: Sequence[Mode]) -> torch.Tensor:
    """How often every byte occurs in every plane of every mode: the torch form of ``Tabulate``."""
    rests, lowest = [counts], list[torch.Tensor]()
    for _ in range(max(mode.raw for mode in modes)):
        low, above = _cut_off_byte(rests[-1])
        lowest.insert(0, low)
        rests.append(above)
    rows: list[torch.Tensor] = []
    for raw, base, over, *_ in modes:
        rest = rests[raw]
        digits = torch.nn.functional.pad(rest[: base - 1], (0, _BYTE - min(base - 1, len(rest))))
        digits[base - 1] = rest[base - 1 :].sum()
        rows += [digits, *_over_planes(rest, base, over), *lowest[len(lowest) - raw :]]
    return torch.stack(rows)


def _over_planes(rest: torch.Tensor, base: int, over: int) -> list[torch.Tensor]:
    above = rest[base - 1 :].clone()
    if over:
        above[0] += rest[: base - 1].sum()
    planes: list[torch.Tensor] = []
    for _ in range(over):
        low, above = _cut_off_byte(above)
        planes.insert(0, low)
    return planes


def _cut_off_byte(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The counts of the lowest byte, and those of what is above it."""
    by_byte = torch.nn.functional.pad(counts, (0, -len(counts) % _BYTE)).view(-1, _BYTE)
    return by_byte.sum(0), by_byte.sum(1)


def _largest_counted(counts: torch.Tensor) -> int:
    used = counts.nonzero()
    return int(used[-1]) if len(used) else 0


def _stored(counts: torch.Tensor, lengths: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    """The bytes that planes are expected to take, by row: ``digits`` share a byte, ``lengths`` are in bytes."""
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    most = shares.amax(1) ** digits
    entropy = digits * torch.special.entr(shares).sum(1) / math.log(2)
    bits = entropy + _excess(most) + _EFFORT
    values = ((counts > 0).sum(1).double() ** digits).clamp(max=_BYTE)
    blocks = torch.ceil(lengths / _BLOCK)
    packed = bits * lengths / 8 + blocks * (_BLOCK_BYTES + _TABLE_BYTES * values) + _FRAME_BYTES
    worth = torch.where(lengths < SHORT_PLANE, 1.0, SYMBOLS_WORTH_IT)
    return torch.where((packed < worth * lengths) & (most > _LEAST_SHARE), packed, lengths)


def _excess(shares: torch.Tensor) -> torch.Tensor:
    """_EXCESS between its points."""
    at, values = _numbers(_SHARES), _numbers(_EXCESS)
    k = torch.searchsorted(at, shares).clamp(1, len(at) - 1)
    part = (shares - at[k - 1]) / (at[k] - at[k - 1])
    return values[k - 1] + part * (values[k] - values[k - 1])


def pack_parts(
    parts: Parts, backend: backends.Backend | None = None, *, reuse: bool = False
) -> tuple[Parts, dict[str, Packing]]:
    """``parts`` with symbols packed, each as a row of planes, and their packings by name. Others are as they were.

    With ``reuse`` the rows are in buffers of this thread, until it packs again. The symbols are then on the CPU.
    """
    packed, packings = dict(parts), dict[str, Packing]()
    for name, part in parts.items():
        if part.dtype is torch.int32:
            packed[name], packings[name] = pack(part, backend, f"row {name}" if reuse else None)
    return packed, packings


def unpack_parts(parts: Parts, packings: Mapping[str, Packing], where: str) -> Parts:
    """The ``parts`` that ``pack_parts`` was given, on the device of these. Raises InputError as ``unpack``."""
    unpacked = dict(parts)
    for name, how in packings.items():
        unpacked[name] = unpack(split(parts[name], how), how, where)
    return unpacked


def pack(
    symbols: torch.Tensor, backend: backends.Backend | None = None, slot: str | None = None
) -> tuple[torch.Tensor, Packing]:
    """The planes of flat symbols, one behind the other, on the same device, and how they are packed.

    Symbols are below ``SYMBOL_LIMIT`` - 1. With a ``slot`` the row is in this buffer of the thread.
    """
    fast = _numba(symbols, backend)
    if fast:
        array = symbols.numpy()
        counts = torch.from_numpy(fast.histogram(array, fast.largest(array)))
        mode = choose(counts, len(array), lambda x, modes: torch.from_numpy(fast.tabulate(x.numpy(), modes)))
    else:
        mode = choose(_histogram(symbols, _largest(symbols)), symbols.numel())
    packing = Packing(mode, symbols.numel())
    length = sum(packing.plane_lengths)
    row = (
        torch.empty(length, dtype=torch.uint8, device=symbols.device)
        if slot is None
        else scratch_elements(slot, torch.uint8, length)
    )
    planes = split(row, packing)
    if fast:
        fast.fill(symbols.numpy(), mode, [plane.numpy() for plane in planes])
    else:
        _write_planes(symbols, mode, planes)
    return row, packing


def split(row: torch.Tensor, packing: Packing) -> list[torch.Tensor]:
    """The planes in a row of them."""
    return list(torch.split(row, packing.plane_lengths))


def unpack(planes: Sequence[torch.Tensor], packing: Packing, where: str) -> torch.Tensor:
    """The symbols that four planes hold: int32, as many as they are.

    Raises InputError, which begins with ``where``, for what no writer makes.
    """
    out = torch.empty(packing.numel, dtype=torch.int32, device=planes[0].device)
    if packing.numel:
        mode = packing.mode
        last = packing.numel % DIGITS[mode.base] or DIGITS[mode.base]
        is_sound = int(planes[0][-1]) < mode.base**last and join(planes, mode, out)
        require(is_sound, f"{where}: its symbols are not those of their mode; the file is damaged")
    return out


def _numba(symbols: torch.Tensor, backend: backends.Backend | None) -> ModuleType | None:
    """The module of numba's kernels where the backend, or by default the size, asks for it."""
    if backends.resolve(backends.on_cpu(backend, symbols.device), symbols.device, symbols.numel()) != "numba":
        return None
    from ckpt8.container import kernels

    return kernels


def _largest(symbols: torch.Tensor) -> int:
    """The largest symbol, at least 0."""
    return max(int(symbols.max()), 0) if symbols.numel() else 0


def _histogram(symbols: torch.Tensor, largest: int) -> torch.Tensor:
    """How often each value from -1 on occurs."""
    return torch.bincount(symbols + 1, minlength=largest + 2).cpu()


def _write_planes(symbols: torch.Tensor, mode: Mode, planes: Sequence[torch.Tensor]) -> None:
    """Fill the planes."""
    whole = symbols + 1 if mode.top == 0 else symbols.where(symbols >= 0, mode.top)
    if mode.bits:
        _write_bits(whole & (1 << mode.bits) - 1, mode.bits, planes[1 + mode.over])
    rest, per_byte = whole >> mode.bits + 8 * mode.raw, DIGITS[mode.base]
    digits = torch.nn.functional.pad(rest.clamp(max=mode.base - 1), (0, -len(rest) % per_byte)).view(-1, per_byte)
    packed = digits[:, 0].clone()
    for k in range(1, per_byte):
        packed += digits[:, k] * mode.base**k
    planes[0].copy_(packed)
    above = (rest - (mode.base - 1)).clamp_(min=0)
    for k in range(mode.over):
        planes[mode.over - k].copy_((above >> 8 * k) & 0xFF)
    for k in range(mode.raw):
        planes[mode.over + mode.raw - k].copy_((whole >> 8 * k) & 0xFF)


def _write_bits(low: torch.Tensor, bits: int, plane: torch.Tensor) -> None:
    """Fill the bits plane with the ``low`` bits of symbols."""
    lanes = torch.nn.functional.pad(low, (0, -len(low) % LANES)).view(LANES, -1)
    joint = sum(lane.to(torch.int64) << bits * k for k, lane in enumerate(lanes))
    for k, out in enumerate(plane.view(bits, -1)):
        out.copy_((joint >> 8 * k) & 0xFF)


def _join_bits(plane: torch.Tensor, bits: int) -> torch.Tensor:
    """The low bits of symbols in a bits plane, those behind the last symbol too."""
    joint = sum(row.to(torch.int64) << 8 * k for k, row in enumerate(plane.view(bits, -1)))
    return torch.cat([(joint >> bits * k) & (1 << bits) - 1 for k in range(LANES)]).to(torch.int32)


def join(planes: Sequence[torch.Tensor], mode: Mode, out: torch.Tensor) -> bool:
    """Fill ``out``; return whether the planes are sound, apart from digits behind the last symbol."""
    values, escape = torch.arange(256, dtype=torch.int32, device=out.device), mode.base - 1
    digits = torch.stack([values // mode.base**k % mode.base for k in range(DIGITS[mode.base])], 1)
    is_sound = int(planes[0].max()) < mode.base ** DIGITS[mode.base]
    rest = digits.index_select(0, planes[0].to(torch.int32)).view(-1)[: len(out)]
    if mode.over:
        above = _number(planes[1 : 1 + mode.over])
        is_sound = is_sound and not bool(((above > 0) & (rest != escape)).any())
        rest = rest + above
    if mode.raw:
        rest = (rest << 8 * mode.raw) | _number(planes[1 + mode.over : 1 + mode.over + mode.raw])
    if mode.bits:
        low = _join_bits(planes[1 + mode.over], mode.bits)
        is_sound = is_sound and not bool(low[len(out) :].any())
        rest = (rest << mode.bits) | low[: len(out)]
    out.copy_(rest - 1 if mode.top == 0 else rest.where(rest != mode.top, -1))
    return is_sound and int(rest.max()) <= mode.largest


def _number(planes: Sequence[torch.Tensor]) -> torch.Tensor:
    """What bytes stand for, the most significant first."""
    number = planes[0].to(torch.int32)
    for plane in planes[1:]:
        number = (number << 8) | plane
    return number


def difference(parts: Parts, base: Parts, backend: backends.Backend | None = None) -> Parts:
    """The differences of ``parts`` to those of the base, as new tensors on the same device.

    Raises RefusedError where one is no symbol that can be packed.
    """
    return {name: _difference(part, base[name], backend) for name, part in parts.items()}


def _difference(part: torch.Tensor, base: torch.Tensor, backend: backends.Backend | None) -> torch.Tensor:
    if part.dtype is not torch.int32:
        return part.view(torch.uint8).bitwise_xor(base.view(torch.uint8)).view(part.dtype)
    if fast := _numba(part, backend):
        array, largest = fast.subtract(part.numpy(), base.numpy())
        result = torch.from_numpy(array)
    else:
        result, largest = _subtract(part, base)
    if largest >= SYMBOL_LIMIT - 1:
        raise RefusedError("is too far from its base")
    return result


def _subtract(symbols: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The differences, and the largest of them, at least 0."""
    result = _combined(symbols, base, from_zigzag(symbols).sub_(from_zigzag(base)), 1)
    return result, max(int(result.max()), 0) if result.numel() else 0


def add(symbols: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The sums, the smallest, at most 0, and the largest, at least 0."""
    result = _combined(symbols, base, from_zigzag(symbols).add_(from_zigzag(base)), -1)
    least, largest = (int(bound) for bound in result.aminmax()) if result.numel() else (0, 0)
    return result, min(least, 0), max(largest, 0)


def _combined(symbols: torch.Tensor, base: torch.Tensor, q: torch.Tensor, shift: int) -> torch.Tensor:
    """The symbols of ``q``, but where one is reserved: ``symbols`` moved by ``shift`` where that is the base's."""
    combined = zigzag(q)
    # Most chunks have none, and to find that out is one pass of memory for each.
    if combined.numel() and int(symbols.min()) < 0:
        combined.masked_fill_(symbols < 0, RESERVED)
    if combined.numel() and int(base.min()) < 0:
        combined = combined.where(base >= 0, symbols + shift)
    return combined
