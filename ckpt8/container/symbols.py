"""Packs symbols in tensors into planes of bytes and unpacks them: see ``manifest`` for the form.

These functions of torch define the planes, on any device. ``packing`` and ``unpacking`` do the same for arrays.

Parts of two storages on the same lattice have differences, chunk by chunk, and these have sums: see FORMAT.md. Symbols
stand for integers q, and -1 for a value of its own; with those of the base:

    base not -1    the difference is -1 where the symbol is -1, else the symbol of q - q of the base
    base -1        the difference is 0 where the symbol is -1, else the symbol + 1

All other parts differ by the exclusive or of their bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt8.codecs.lattice import RESERVED
from ckpt8.codecs.lattice.reference import from_zigzag, zigzag
from ckpt8.container.manifest import DIGITS, LANES, SYMBOL_LIMIT, Mode, Packing
from ckpt8.container.modes import choose
from ckpt8.core.arrays import as_array
from ckpt8.core.errors import RefusedError, require
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Parts


def pack_parts(parts: Parts) -> tuple[Parts, dict[str, Packing]]:
    """``parts`` with symbols packed, each as a row of planes, and their packings by name. Others are as they were."""
    packed, packings = dict(parts), dict[str, Packing]()
    for name, part in parts.items():
        if part.dtype is torch.int32:
            packed[name], packings[name] = pack(part)
    return packed, packings


def unpack_parts(parts: Parts, packings: Mapping[str, Packing], where: str) -> Parts:
    """The ``parts`` that ``pack_parts`` was given, on the device of these. Raises InputError as ``unpack``."""
    unpacked = dict(parts)
    for name, how in packings.items():
        unpacked[name] = unpack(split(parts[name], how), how, where)
    return unpacked


def pack(symbols: torch.Tensor) -> tuple[torch.Tensor, Packing]:
    """The planes of flat symbols, one behind the other, on the same device, and how they are packed.

    Symbols are below ``SYMBOL_LIMIT`` - 1.
    """
    counts = torch.bincount(symbols + 1, minlength=2).cpu()
    packing = Packing(choose(as_array(counts), symbols.numel()), symbols.numel())
    row = torch.empty(sum(packing.plane_lengths), dtype=torch.uint8, device=symbols.device)
    write_planes(symbols, packing.mode, split(row, packing))
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


def write_planes(symbols: torch.Tensor, mode: Mode, planes: Sequence[torch.Tensor]) -> None:
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


def difference(parts: Parts, base: Parts) -> Parts:
    """The differences of ``parts`` to those of the base, as new tensors on the same device.

    Raises RefusedError where one is no symbol that can be packed.
    """
    return {name: _difference(part, base[name]) for name, part in parts.items()}


def _difference(part: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    if part.dtype is not torch.int32:
        return part.view(torch.uint8).bitwise_xor(base.view(torch.uint8)).view(part.dtype)
    result, largest = subtract(part, base)
    if largest >= SYMBOL_LIMIT - 1:
        raise RefusedError("is too far from its base")
    return result


def subtract(symbols: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, int]:
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
