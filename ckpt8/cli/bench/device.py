"""``ckpt8 bench --device cuda``: kernels, optimizer steps, save and resume on one device, in one run.

The yardstick of kernels is a copy from the device to itself: each reaches a fraction of its bandwidth (bytes read plus
bytes written). The yardstick of steps is torch's AdamW on fp32 parameters. Times are medians, after a warm-up, by
events on a CUDA device. The tensors should be several times as large as the last cache.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
        for _ in range(3):
            work()
        return median(self._once(work) for _ in range(self.repeat))

    def _once(self, work: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            # Keep the device busy, some 10 ms, while the host queues the work: the host's own time does not count.
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            first.record()
            work()
            last.record()
        torch.cuda.synchronize(self.device)
        return float(first.elapsed_time(last)) / 1e3


def bench_device(where: torch.device, *, parameters: int, elements: int = ELEMENTS, repeat: int = 20) -> dict[str, Any]:
    """All figures as plain values: kernels on ``elements``, steps and files of ``parameters``."""
    clock = Clock(where, repeat)
    source = torch.randn(elements, device=where)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / clock.seconds(lambda: target.copy_(source))
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "elements": elements,
        "parameters": parameters,
        "repeat": repeat,
        "versions": {"ckpt8": __version__, "torch": torch.__version__},
        "copy_bytes_per_second": copied,
        "kernels": [row for name in CODECS for row in _kernel_rows(name, source, clock, copied)],
        "steps": _step_rows(parameters, clock),
        "files": _file_rows(parameters, where),
    }


def _kernel_rows(name: str, source: torch.Tensor, clock: Clock, copied: float) -> Iterator[dict[str, Any]]:
    codec, role = CODECS[name]
    x = source.square() if role is Role.MOMENT2 else source
    spec = TensorSpec(name, role, DType.FLOAT32, tuple(x.shape))
    stored = x.nbytes + sum(part.nbytes for part in codec.layout(spec).values())
    decoded = {companion: source.square() for companion in codec.companions}
    both = {**decoded, **({f"original_{name}": v for name, v in decoded.items()} if codec.compares_originals else {})}
    parts, out = codec.encode(x, companions=both), torch.empty_like(x)
    work: dict[str, tuple[Callable[[], object], Companions]] = {
        "encode": (lambda: codec.encode(x, companions=both), both),
        "decode": (lambda: codec.decode(parts, spec, out=out, companions=decoded), decoded),
    }
    for direction, (run, companions) in work.items():
        seconds = clock.seconds(run)
        moved = stored + sum(companion.nbytes for companion in companions.values())
        yield {
            "kernel": f"{name} {direction}",
            "bytes": moved,
            "seconds": seconds,
            "bytes_per_second": moved / seconds,
            "of_copy": moved / seconds / copied,
        }


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
    makes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "torch AdamW, fp32": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=fused),
        "ckpt8.optim AdamW, bf16": lambda params: AdamW(params, lr=1e-4),
        "ckpt8.optim StableAdamW, bf16": lambda params: StableAdamW(params, lr=1e-4),
        "ckpt8.optim CAME, bf16": lambda params: CAME(params, lr=1e-4),
        "ckpt8.optim Lion, bf16": lambda params: Lion(params, lr=1e-5),
        "ckpt8.optim SGD, bf16": lambda params: SGD(params, lr=1e-3, momentum=0.9),
    }
    rows: list[dict[str, Any]] = []
    for name, make in makes.items():
        params = _parameters(count, torch.float32 if name.endswith("fp32") else torch.bfloat16, clock.device)
        optimizer = make(params)
        seconds = clock.seconds(optimizer.step)
        total = sum(param.numel() for param in params)
        state = (value for state in optimizer.state.values() for value in state.values())
        held = sum(value.nbytes for value in (*params, *state) if isinstance(value, torch.Tensor))
        rows.append(
            {
                "step": name,
                "seconds": seconds,
                "seconds_per_parameter": seconds / total,
                "to_torch": seconds / (rows[0]["seconds"] if rows else seconds),
                "bytes_per_parameter": held / total,
            }
        )
        del params, optimizer, state
    return rows


def _file_rows(count: int, device: torch.device) -> list[dict[str, Any]]:
    """Save and resume from end to end, outputs not flushed to the disk."""
    model = torch.nn.ParameterList(_parameters(count, torch.float32, device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer.step()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with temporary_directory("ckpt8-bench-") as directory:
        raw, packed = directory / "run.pt", directory / "run.ckpt8"

        def load() -> None:
            loaded = torch.load(raw, weights_only=True)
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])

        work: dict[str, tuple[Callable[[], object], Path | None]] = {
            "torch.save": (lambda: torch.save(checkpoint, raw), raw),
            "ckpt8.save": (lambda: ckpt8.save(checkpoint, packed), packed),
            "torch.load and load_state_dict": (load, None),
            "ckpt8.resume": (lambda: ckpt8.resume(packed, model, optimizer), None),
        }
        rows = []
        for name, (run, file) in work.items():
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            rows.append(
                {"operation": name, "seconds": time.perf_counter() - start, "bytes": file and file.stat().st_size}
            )
    return rows


def show_device_bench(console: Console, result: dict[str, Any]) -> None:
    """Print the figures of ``bench --device``."""
    console.print(
        f"{escape(result['device'])}: a copy moves {size(result['copy_bytes_per_second'])}/s; "
        f"kernels on {result['elements']:,} elements, steps of {result['parameters']:,} parameters",
        soft_wrap=True,
    )
    tables: dict[str, dict[str, Callable[[dict[str, Any]], str]]] = {
        "kernels": {
            "kernel": lambda row: row["kernel"],
            "ms": lambda row: f"{row['seconds'] * 1e3:.3f}",
            "throughput": lambda row: f"{size(row['bytes_per_second'])}/s",
            "of copy": lambda row: f"{row['of_copy']:.2f}",
        },
        "steps": {
            "step": lambda row: row["step"],
            "ms": lambda row: f"{row['seconds'] * 1e3:.3f}",
            "ps per parameter": lambda row: f"{row['seconds_per_parameter'] * 1e12:.1f}",
            "of torch": lambda row: f"{row['to_torch']:.2f}x",
            "bytes per parameter": lambda row: f"{row['bytes_per_parameter']:.2f}",
        },
        "files": {
            "operation": lambda row: row["operation"],
            "seconds": lambda row: f"{row['seconds']:.2f}",
            "size": lambda row: size(row["bytes"] or 0),
        },
    }
    for key, columns in tables.items():
        console.print(Table(list(columns), ([cell(row) for cell in columns.values()] for row in result[key])))
