"""``ckpt8 bench --device cuda``: kernels, optimizer steps, save and resume on one device, in one run.

The yardstick of kernels is a copy from the device to itself: each reaches a fraction of its bandwidth (bytes read plus
bytes written). The yardstick of steps is torch's AdamW on fp32 parameters. Times are medians, after a warm-up, by
events on a CUDA device. The tensors should be several times as large as the last cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

import ckpt8
from ckpt8 import __version__
from ckpt8.cli.show.tables import Table
from ckpt8.codecs import Codec
from ckpt8.codecs.base import Companions
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.lattice import Lattice
from ckpt8.codecs.rclog import RowColumnLog
from ckpt8.codecs.split24 import Split24
from ckpt8.codecs.vscaled import VScaled
from ckpt8.core.files.atomic import temporary_directory
from ckpt8.core.tensors import DType, Role, TensorSpec
from ckpt8.core.text import size
from ckpt8.optim import CAME, SGD, AdamW, Lion, StableAdamW

_WARM_UP = 3
_HEAD_START = 20_000_000
"""Cycles, some 10 ms."""

_SIDE = 4096
ELEMENTS = 1 << 27
"""Half a gigabyte of fp32."""

CODECS: dict[str, tuple[Codec, Role]] = {
    "split24": (Split24(), Role.WEIGHT),
    "companded8 signed": (Companded8(), Role.MOMENT1),
    "companded8 unsigned": (Companded8(signed=False, Q=255), Role.MOMENT2),
    "companded8 unsigned p=1/2": (Companded8(signed=False, Q=255, p=0.5), Role.MOMENT2),
    "lattice": (Lattice(), Role.WEIGHT),
    "rclog": (RowColumnLog(C=_SIDE), Role.MOMENT2),
    "rclog with columns": (RowColumnLog(C=_SIDE, columns=True), Role.MOMENT2),
    "vscaled": (VScaled(second=0), Role.MOMENT1),
}


@dataclass(frozen=True, slots=True)
class Clock:
    """Times work on ``device``."""

    device: torch.device
    repeat: int

    def seconds(self, work: Callable[[], object]) -> float:
        """Median time of ``work``, warm."""
        for _ in range(_WARM_UP):
            work()
        return median(self._once(work) for _ in range(self.repeat))

    def _once(self, work: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            # Keep the device busy while the host queues the work: the host's own time does not count.
            torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
            first.record()
            work()
            last.record()
        torch.cuda.synchronize(self.device)
        return float(first.elapsed_time(last)) / 1e3


def bench_device(where: torch.device, *, parameters: int, elements: int = ELEMENTS, repeat: int = 20) -> dict[str, Any]:
    """All figures as plain values: kernels on ``elements``, steps and files of ``parameters``."""
    clock = Clock(where, repeat)
    copied, kernels = _kernels(elements, clock)
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "elements": elements,
        "parameters": parameters,
        "repeat": repeat,
        "versions": {"ckpt8": __version__, "torch": torch.__version__},
        "copy_bytes_per_second": copied,
        "kernels": kernels,
        "steps": _step_rows(parameters, clock),
        "files": _file_rows(parameters, where),
    }


def _kernels(elements: int, clock: Clock) -> tuple[float, list[dict[str, Any]]]:
    """Bandwidth of a copy, and the rows of all kernels."""
    source = torch.randn(elements, device=clock.device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / clock.seconds(lambda: target.copy_(source))
    return copied, [row for name in CODECS for row in _kernel_rows(name, source, clock, copied)]


def _kernel_rows(name: str, source: torch.Tensor, clock: Clock, copied: float) -> list[dict[str, Any]]:
    codec, role = CODECS[name]
    x = source.square() if role is Role.MOMENT2 else source
    spec = TensorSpec(name, role, DType.FLOAT32, tuple(x.shape))
    stored = x.nbytes + sum(part.nbytes for part in codec.layout(spec).values())
    decoded = {companion: source.square() for companion in codec.companions}
    both = {**decoded, **({f"original_{name}": v for name, v in decoded.items()} if codec.compares_originals else {})}
    parts = codec.encode(x, companions=both)
    out = torch.empty_like(x)
    work: dict[str, tuple[Callable[[], object], Companions]] = {
        "encode": (lambda: codec.encode(x, companions=both), both),
        "decode": (lambda: codec.decode(parts, spec, out=out, companions=decoded), decoded),
    }
    rows = []
    for direction, (run, companions) in work.items():
        seconds = clock.seconds(run)
        moved = stored + sum(companion.nbytes for companion in companions.values())
        row = {"kernel": f"{name} {direction}", "bytes": moved, "seconds": seconds}
        rows.append({**row, "bytes_per_second": moved / seconds, "of_copy": moved / seconds / copied})
    return rows


def _parameters(count: int, dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    """Matrices of 4096 columns with gradients, ``count`` elements or a little more in all."""
    rows = min(_SIDE, -(-count // _SIDE))
    parameters = []
    for _ in range(max(1, count // (rows * _SIDE))):
        parameter = torch.nn.Parameter(torch.randn(rows, _SIDE, device=device).mul_(0.02).to(dtype))
        parameter.grad = torch.randn(rows, _SIDE, device=device).mul_(1e-3).to(dtype)
        parameters.append(parameter)
    return parameters


def _step_rows(count: int, clock: Clock) -> list[dict[str, Any]]:
    """Time of one step for each parameter, and of torch's fp32 AdamW."""
    fused = True if clock.device.type == "cuda" else None
    cases: dict[str, tuple[torch.dtype, Callable[[Any], torch.optim.Optimizer]]] = {
        "torch AdamW, fp32": (torch.float32, lambda params: torch.optim.AdamW(params, lr=1e-4, fused=fused)),
        "ckpt8.optim AdamW, bf16": (torch.bfloat16, lambda params: AdamW(params, lr=1e-4)),
        "ckpt8.optim StableAdamW, bf16": (torch.bfloat16, lambda params: StableAdamW(params, lr=1e-4)),
        "ckpt8.optim CAME, bf16": (torch.bfloat16, lambda params: CAME(params, lr=1e-4)),
        "ckpt8.optim Lion, bf16": (torch.bfloat16, lambda params: Lion(params, lr=1e-5)),
        "ckpt8.optim SGD, bf16": (torch.bfloat16, lambda params: SGD(params, lr=1e-3, momentum=0.9)),
    }
    if clock.device.type == "cuda" and find_spec("flashoptim") is not None:
        from flashoptim import FlashAdamW

        cases["flashoptim FlashAdamW, bf16"] = (torch.bfloat16, lambda params: FlashAdamW(params, lr=1e-4))
    rows: list[dict[str, Any]] = []
    for name, (dtype, make) in cases.items():
        params = _parameters(count, dtype, clock.device)
        optimizer = make(params)
        seconds = clock.seconds(optimizer.step)
        total = sum(param.numel() for param in params)
        reference = rows[0]["seconds"] if rows else seconds
        rows.append(
            {
                "step": name,
                "seconds": seconds,
                "seconds_per_parameter": seconds / total,
                "to_torch": seconds / reference,
                "bytes_per_parameter": (sum(param.nbytes for param in params) + _state_size(optimizer)) / total,
            }
        )
        del params, optimizer
    return rows


def _state_size(optimizer: torch.optim.Optimizer) -> int:
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))


def _file_rows(count: int, device: torch.device) -> list[dict[str, Any]]:
    """Save and resume from end to end, outputs not flushed to the disk."""
    model = torch.nn.ParameterList(_parameters(count, torch.float32, device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer.step()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with temporary_directory("ckpt8-bench-") as directory:
        raw, packed = directory / "run.pt", directory / "run.ckpt8"
        work: dict[str, Callable[[], object]] = {
            "torch.save": lambda: torch.save(checkpoint, raw),
            "ckpt8.save": lambda: ckpt8.save(checkpoint, packed),
            "torch.load and load_state_dict": lambda: _load(raw, model, optimizer),
            "ckpt8.resume": lambda: ckpt8.resume(packed, model, optimizer),
        }
        rows = []
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            rows.append({"operation": name, "seconds": time.perf_counter() - start})
        sizes = {"torch.save": raw.stat().st_size, "ckpt8.save": packed.stat().st_size}
    return [row | {"bytes": sizes.get(str(row["operation"]))} for row in rows]


def _load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loaded = torch.load(path, weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def show_device_bench(console: Console, result: dict[str, Any]) -> None:
    """Print the figures of ``bench --device``."""
    console.print(
        f"{escape(result['device'])}: a copy moves {size(result['copy_bytes_per_second'])}/s; "
        f"kernels on {result['elements']:,} elements, steps of {result['parameters']:,} parameters",
        soft_wrap=True,
    )
    moved = [
        (
            row["kernel"],
            f"{row['seconds'] * 1e3:.3f}",
            f"{size(row['bytes_per_second'])}/s",
            f"{row['of_copy']:.2f}",
        )
        for row in result["kernels"]
    ]
    console.print(Table(("kernel", "ms", "throughput", "of copy"), moved))
    stepped = [
        (
            row["step"],
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['seconds_per_parameter'] * 1e12:.1f}",
            f"{row['to_torch']:.2f}x",
            f"{row['bytes_per_parameter']:.2f}",
        )
        for row in result["steps"]
    ]
    console.print(Table(("step", "ms", "ps per parameter", "of torch", "bytes per parameter"), stepped))
    ended = [(row["operation"], f"{row['seconds']:.2f}", size(row["bytes"] or 0)) for row in result["files"]]
    console.print(Table(("operation", "seconds", "size"), ended))
