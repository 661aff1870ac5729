"""Optimizer state that a program quantised or packed already, told from its structure alone.

    bitsandbytes   state1, state2 uint8 with qmap1, absmax1, ...: 8-bit codes, a table and the scale of every block;
                   float32 where it keeps 32 bits; its later versions put all of it into __bnb_optimizer_quant_state__
    torchao        a tensor of class OptimState8bit, OptimState4bit or OptimStateFp8: codes, scale, and a table qmap
    flashoptim     NAME::quantized and NAME::scales, with error_bits that complete the weight
    ckpt8.optim    NAME_codes and NAME_scales, with residual

All of it is kept byte for byte: to quantise it again would add an error that nobody asked for. Only the 32-bit
moments of bitsandbytes are what torch calls exp_avg and exp_avg_sq, where the state tells which is which.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt8.core.tensors import DType, Role, TensorSpec

_BITSANDBYTES = re.compile(r"(?P<owner>.*)\.(?P<part>state[12]|absmax[12]|max[12]|qmap[12])")
_TORCHAO = re.compile(r"(?P<owner>.*)\.[a-z_]+\.3\.(?P<part>codes|scale|qmap)")
_FLASHOPTIM = re.compile(r"(?P<owner>.*)\.[a-z_]+::(?P<part>quantized|scales)")
_CKPT8 = re.compile(r"(?P<owner>.*)\.[a-z_]+_(?P<part>codes|scales)")
_PROGRAMS = {"bitsandbytes": _BITSANDBYTES, "torchao": _TORCHAO, "flashoptim": _FLASHOPTIM, "ckpt8.optim": _CKPT8}
_LARGEST_BLOCK = 4096


def find_low_bit(parts: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """What of a checkpoint is state that is kept as it was found: program, bits, block, parameters and bytes.

    ``block`` is the number of values that share a scale, None where that is not known; ``reason`` says why 32 bits are
    kept. Sorted by program and bits.
    """
    owners: dict[tuple[str, str], dict[str, list[TensorSpec]]] = {}
    for part in parts:
        for program, pattern in _PROGRAMS.items():
            found = pattern.fullmatch(part.name)
            if found is not None and part.role is Role.OTHER:
                owner = owners.setdefault((program, found["owner"]), {})
                owner.setdefault(found["part"], []).append(part)
                break
    rows: dict[tuple[str, str, int | None], dict[str, Any]] = {}
    for (program, _), owned in owners.items():
        described = _describe(program, owned)
        if described is None:
            continue
        bits, block = described
        row = rows.setdefault((program, bits, block), {"parameters": 0, "bytes": 0})
        row["parameters"] += 1
        row["bytes"] += sum(part.numel * part.dtype.itemsize for each in owned.values() for part in each)
    return [
        {
            "program": program,
            "bits": bits,
            "block": block,
            **row,
            "reason": "what its moments are cannot be told" if bits == "32-bit" else None,
        }
        for (program, bits, block), row in sorted(rows.items(), key=lambda each: (*each[0][:2], each[0][2] or 0))
    ]


def _describe(program: str, owned: Mapping[str, list[TensorSpec]]) -> tuple[str, int | None] | None:
    """Bits and block of the state of one parameter; None where it is not that of the program."""
    codes = next(
        (parts[0] for name, parts in owned.items() if name in ("state2", "state1", "codes", "quantized")), None
    )
    if codes is None:
        return None
    if program == "bitsandbytes":
        return _describe_bitsandbytes(owned)
    scales = next((owned[name][0] for name in ("scale", "scales") if name in owned), None)
    if scales is None:
        return None
    if program != "torchao":
        return ("8-bit", 32) if codes.dtype in (DType.INT8, DType.UINT8) else None
    if "qmap" not in owned:
        return "fp8", codes.numel // max(scales.numel, 1)
    packed = 2 if owned["qmap"][0].numel == 16 else 1
    return f"{8 // packed}-bit", packed * codes.numel // max(scales.numel, 1)


def _describe_bitsandbytes(owned: Mapping[str, list[TensorSpec]]) -> tuple[str, int | None] | None:
    state = owned["state1"][0] if "state1" in owned else owned["state2"][0]
    if state.dtype is DType.FLOAT32:
        return "32-bit", None
    if state.dtype is not DType.UINT8 or "qmap1" not in owned:
        return None
    scales = owned["absmax1"][0].numel if "absmax1" in owned else 0
    blocks = (1 << k for k in range(_LARGEST_BLOCK.bit_length()))
    return "8-bit", next((block for block in blocks if -(-state.numel // block) == scales), None)


def line(row: Mapping[str, Any]) -> str:
    """One row of ``find_low_bit`` for people."""
    block = f" (block {row['block']})" if row["block"] else ""
    reason = f": {row['reason']}" if row["reason"] else ""
    count = f"{row['parameters']:,} parameter" + ("s" if row["parameters"] > 1 else "")
    return f"{row['program']} {row['bits']} state of {count}{block}, kept as it is{reason}"
