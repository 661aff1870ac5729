"""Packs symbols into planes of bytes and unpacks them: see ``symbol_modes`` for the form.

The mode follows from a histogram, so that every device and backend chooses the same. The functions of torch define the
planes; ``symbols_numba`` fills the same ones faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import torch

from ckpt8.container.symbol_choice import choose
from ckpt8.container.symbol_modes import DIGITS, LANES, Mode, Packing
from ckpt8.core import backend as backends
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import Parts
from ckpt8.core.workers import scratch_elements


def pack_parts(
    parts: Parts, backend: backends.Backend | None = None, *, reuse: bool = False
) -> tuple[Parts, dict[str, Packing]]:
    """``parts`` with symbols packed, each as a row of planes, and their packings by name. Others are as they were.

    With ``reuse`` the rows are in buffers of this thread, until it packs again. The symbols are then on the CPU.
    """
    found, packings = dict(parts), dict[str, Packing]()
    for name, part in parts.items():
        if part.dtype is torch.int32:
            found[name], packings[name] = pack(part, backend, f"row {name}" if reuse else None)
    return found, packings


def unpack_parts(
    parts: Parts,
    packings: Mapping[str, Packing],
    where: str,
    backend: backends.Backend | None = None,
    *,
    reuse: bool = False,
) -> Parts:
    """The ``parts`` that ``pack_parts`` was given, on the device of these. Raises InputError as ``unpack``.

    With ``reuse`` symbols are in buffers of this thread, until it unpacks again. The rows are then on the CPU.
    """
    unpacked = dict(parts)
    for name, how in packings.items():
        out = scratch_elements(f"unpacked {name}", torch.int32, how.numel) if reuse else None
        unpacked[name] = unpack(split(parts[name], how), how, where, backend, out)
    return unpacked


def pack(
    symbols: torch.Tensor, backend: backends.Backend | None = None, slot: str | None = None
) -> tuple[torch.Tensor, Packing]:
    """The planes of flat symbols, one behind the other, on the same device, and how they are packed.

    Symbols are below ``SYMBOL_LIMIT`` - 1. With a ``slot`` the row is in this buffer of the thread.
    """
    fast = _numba(symbols, backend)
    largest = fast.largest(symbols) if fast else _largest(symbols)
    counts = fast.histogram(symbols, largest) if fast else _histogram(symbols, largest)
    mode = choose(counts, symbols.numel(), fast.tabulate if fast else None)
    packing = Packing(mode, symbols.numel())
    length = sum(packing.plane_lengths)
    if slot is None:
        row = torch.empty(length, dtype=torch.uint8, device=symbols.device)
    else:
        row = scratch_elements(slot, torch.uint8, length)
    planes = split(row, packing)
    fast.fill(symbols, mode, planes) if fast else _fill(symbols, mode, planes)
    return row, packing


def split(row: torch.Tensor, packing: Packing) -> list[torch.Tensor]:
    """The planes in a row of them."""
    return list(torch.split(row, packing.plane_lengths))


def unpack(
    planes: Sequence[torch.Tensor],
    packing: Packing,
    where: str,
    backend: backends.Backend | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The symbols that four planes hold, in ``out`` if it is given: int32, as many as they are.

    Raises InputError, which begins with ``where``, for what no writer makes.
    """
    if out is None:
        out = torch.empty(packing.numel, dtype=torch.int32, device=planes[0].device)
    if packing.numel:
        mode = packing.mode
        last = packing.numel % DIGITS[mode.base] or DIGITS[mode.base]
        fast = _numba(out, backend)
        is_sound = int(planes[0][-1]) < mode.base**last
        if not (is_sound and (fast.join(planes, mode, out) if fast else _join(planes, mode, out))):
            raise InputError(f"{where}: its symbols are not those of their mode; the file is damaged")
    return out


def _numba(symbols: torch.Tensor, backend: backends.Backend | None) -> ModuleType | None:
    """The module of numba's kernels where the backend, or by default the size, asks for it."""
    if backends.resolve(backends.on_cpu(backend, symbols.device), symbols.device, symbols.numel()) != "numba":
        return None
    from ckpt8.container import symbols_numba

    return symbols_numba


def _largest(symbols: torch.Tensor) -> int:
    """The largest symbol, at least 0."""
    return max(int(symbols.max()), 0) if symbols.numel() else 0


def _histogram(symbols: torch.Tensor, largest: int) -> torch.Tensor:
    """How often each value from -1 on occurs."""
    return torch.bincount(symbols + 1, minlength=largest + 2).cpu()


def _fill(symbols: torch.Tensor, mode: Mode, planes: Sequence[torch.Tensor]) -> None:
    """Fill the planes."""
    whole = symbols + 1 if mode.top == 0 else symbols.where(symbols >= 0, mode.top)
    if mode.bits:
        _fill_bits(whole & (1 << mode.bits) - 1, mode.bits, planes[1 + mode.over])
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


def _fill_bits(low: torch.Tensor, bits: int, plane: torch.Tensor) -> None:
    """Fill the bits plane with the ``low`` bits of symbols."""
    lanes = torch.nn.functional.pad(low, (0, -len(low) % LANES)).view(LANES, -1)
    joint = sum(lane.to(torch.int64) << bits * k for k, lane in enumerate(lanes))
    for k, out in enumerate(plane.view(bits, -1)):
        out.copy_((joint >> 8 * k) & 0xFF)


def _join_bits(plane: torch.Tensor, bits: int) -> torch.Tensor:
    """The low bits of symbols in a bits plane, those behind the last symbol too."""
    joint = sum(each.to(torch.int64) << 8 * k for k, each in enumerate(plane.view(bits, -1)))
    return torch.cat([(joint >> bits * k) & (1 << bits) - 1 for k in range(LANES)]).to(torch.int32)


def _join(planes: Sequence[torch.Tensor], mode: Mode, out: torch.Tensor) -> bool:
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
    found = planes[0].to(torch.int32)
    for plane in planes[1:]:
        found = (found << 8) | plane
    return found
