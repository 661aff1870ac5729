"""``ckpt8 bench``: size, time and memory of every operation, as ratios to a copy of the files in the same run.

Each operation runs in a process of its own, in turn with the others. A first round brings the source into the page
cache and measures memory, which takes time; the report has medians and ranges of the rounds that follow. Each operation
flushes its output to the disk, and removes it afterwards.

Without a checkpoint it makes a synthetic one: the tensors of a transformer and of its AdamW, drawn at random. The
values are like those of training where it matters for time: weights of a narrow normal distribution, first moments
whose scale differs from row to row, second moments that are smoothed squares of these. How small a checkpoint gets
follows from its values, so that only a real one says that.
"""

import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ckpt8 import __version__
from ckpt8.checkpoint.readers.entries import size_of
from ckpt8.checkpoint.sources.live_object import torch_writes
from ckpt8.cli.bench import files, library, probe
from ckpt8.cli.bench.library import BACKGROUND, COPY, IN_MEMORY, TWICE, survey
from ckpt8.cli.bench.probe import DCP, PEERS, START, ZIPNN, Run, Source, remove, run_child
from ckpt8.cli.show.tables import Table
from ckpt8.core.errors import Ckpt8Error, OutputError, require
from ckpt8.core.files.atomic import temporary_directory
from ckpt8.core.files.source_file import refuse_url
from ckpt8.core.text import counted, printable_tree, size
from ckpt8.core.workers import default_threads


def in_gigabytes(count: float) -> str:
    """``1.50 GB``."""
    return f"{count / 1e9:.2f} GB"


MODULES = {name: module.__name__ for module in (probe, files, library) for name in module.OPERATIONS}
"""The module of every operation, in the order of the report."""

_ROOM, _MADE_ROOM = 2.0, 2.4
"""Files that are on the disk at once, in sizes of the checkpoint: a copy, and a container, which can be as large if
nothing packs. A checkpoint that is made for the purpose packs, but is on the disk itself."""


@dataclass(slots=True)
class Bench:
    """Where and how to measure: ``work`` is the folder for files, ``run`` does jobs, ``say`` shows each of them.

    ``failed`` are peers that failed, with the reason: they take no further part.
    """

    work: Path
    run: Run
    threads: int
    repeat: int
    say: Callable[[str], None] = lambda _: None
    failed: dict[str, str] = field(default_factory=dict)

    def check_space(self, nbytes: int, what: str, room: float) -> None:
        """Raise OutputError if there is no ``room``, in sizes of a checkpoint of ``nbytes`` bytes, for its files."""
        needed, free = int(nbytes * room) + (1 << 26), shutil.disk_usage(self.work).free
        require(
            free >= needed,
            f"{self.work}: {what} need {in_gigabytes(needed)} and {in_gigabytes(free)} are free; "
            "give another folder with --scratch",
            OutputError,
        )

    @contextmanager
    def made(self, make: Callable[[Path, int], dict[str, Any]], nbytes: int) -> Iterator[tuple[Path, dict[str, Any]]]:
        """A checkpoint of about ``nbytes`` bytes and what ``make`` says of it; the context removes the file.

        Raises OutputError where there is no room for it and its copies, and errors of ``make``.
        """
        self.check_space(nbytes, f"a checkpoint of {in_gigabytes(nbytes)} and its copies", _MADE_ROOM)
        target = self.work / f"{make.__name__}.pt"
        self.say(f"making a checkpoint of {in_gigabytes(nbytes)}")
        try:
            yield target, make(target, nbytes)
        finally:
            target.unlink(missing_ok=True)

    def measure(self, source: Source, operations: Sequence[str], threads: int | None = None) -> list[dict[str, Any]]:
        """One row for each operation: times, sizes and memory. Raises errors of the operations, with their name."""
        container, target = self.work / "container.ckpt8", self.work / "output"
        job = {"source": asdict(source), "container": str(container), "threads": threads or self.threads, "keep": False}
        rows: dict[str, dict[str, Any]] = {name: {"times": []} for name in operations}
        try:
            self._do("compress", {**job, "target": str(container), "keep": True}, "packing the checkpoint")
            for number in range(self.repeat + 1):
                where = f"round {number} of {self.repeat}" if number else "memory"
                for name in [name for name in rows if name not in self.failed]:
                    try:
                        done = self._do(name, {**job, "target": str(target)}, where, watch=number == 0)
                    except Ckpt8Error as exc:
                        if name not in PEERS:
                            raise
                        self.failed[name] = str(exc)
                        remove(target)
                        continue
                    if number:
                        rows[name]["times"].append(done["seconds"])
                    else:
                        rows[name] |= done
        finally:
            remove(container)
            remove(target)
        return [_row(name, source, row) for name, row in rows.items() if name not in self.failed]

    def _do(self, name: str, job: dict[str, Any], where: str, *, watch: bool = False) -> dict[str, Any]:
        self.say(f"{where}: {name}, {job['threads']} threads")
        try:
            return self.run(MODULES[name], {**job, "name": name}, watch)
        except Ckpt8Error as exc:
            raise exc.told(f"{name}: {exc}") from exc


def _row(name: str, source: Source, done: dict[str, Any]) -> dict[str, Any]:
    """Figures of one operation; speeds are bytes of the original checkpoint per second."""
    seconds, output = median(done["times"]), done["output_bytes"]
    return {
        "operation": name,
        "seconds": seconds,
        "spread": [min(done["times"]), max(done["times"])],
        "times": done["times"],
        "bytes_per_second": source.nbytes / seconds,
        "output_bytes": output,
        "ratio": source.nbytes / output if output else None,
        "peak_memory": max(done["peak_rss"], done["session_pss"]),
        **{key: done[key] for key in ("peak_rss", "session_pss", "processes")},
    }


@contextmanager
def opened(
    scratch: Path | None, threads: int, repeat: int, say: Callable[[str], None], run: Run | None
) -> Iterator[Bench]:
    """A bench in a temporary folder below ``scratch``. Raises OutputError where there can be none."""
    folder = scratch or Path(gettempdir())
    refuse_url(folder)
    with ExitStack() as stack:
        try:
            work = stack.enter_context(temporary_directory("ckpt8-bench-", folder))
        except OSError as exc:
            raise OutputError(f"{folder}: cannot be written to: {exc.strerror}") from exc
        yield Bench(work, run or run_child(work), threads, repeat, say)


def bench(
    checkpoint: Path | None = None,
    *,
    size: int = 250_000_000,
    threads: int | None = None,
    repeat: int = 3,
    scratch: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    run: Run | None = None,
) -> dict[str, Any]:
    """Measure every operation on a checkpoint, a file or a directory, or on a synthetic one of ``size`` bytes.

    Raises InputError for the checkpoint, OutputError if ``scratch`` has too little room.
    """
    with opened(scratch, threads or default_threads(), repeat, say, run) as here:
        if checkpoint is None:
            with here.made(synthetic, size) as (path, facts):
                return _report(here, survey(path), "a synthetic checkpoint") | {"synthetic": facts}
        here.check_space(size_of(checkpoint), f"the copies of {checkpoint}", _ROOM)
        return _report(here, survey(checkpoint), checkpoint.name)


def _report(here: Bench, source: Source, name: str) -> dict[str, Any]:
    """The report on one checkpoint, as plain values. Raises errors of the operations, with their name.

    ``to_cp`` of a row are its ratios to ``cp``; ``load_to_torch`` are those of ``load`` to ``torch.load(mmap=False)``,
    and the memory of both beyond the bytes of the files. ``blocked_to_copy`` says how long training waits for a save,
    as ratios to a copy of its tensors in memory.
    """
    missing = left_out(source)
    rows = {row["operation"]: row for row in here.measure(source, [name for name in MODULES if name not in missing])}
    for row in rows.values():
        row["to_cp"] = {
            key: None if row[key] is None else row[key] / rows["cp"][key]
            for key in ("seconds", "bytes_per_second", "output_bytes", "peak_memory")
        }
    ours, theirs, copy = rows.get("load"), rows.get("torch.load"), rows.get(COPY)
    return {
        "checkpoint": name,
        "bytes": source.nbytes,
        "synthetic": None,
        "threads": here.threads,
        "repeat": here.repeat,
        "versions": versions(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "left_out": missing | here.failed,
        "results": list(rows.values()),
        "load_to_torch": ours
        and theirs
        and {
            **{key: ours[key] / theirs[key] for key in ("seconds", "peak_memory")},
            "beyond_files": ours["peak_memory"] - source.nbytes,
            "torch_beyond_files": theirs["peak_memory"] - source.nbytes,
        },
        "blocked_to_copy": copy
        and {name: rows[name]["seconds"] / copy["seconds"] for name in _BLOCKING if name in rows},
    }


_BLOCKING = (BACKGROUND, DCP, "save", "torch.save")


def left_out(source: Source) -> dict[str, str]:
    """Operations that cannot be measured here, each with the reason."""
    reasons, memory = {}, Path("/proc/meminfo")
    if find_spec("zipnn") is None:
        reasons[ZIPNN] = "is not installed"
    if not source.loaded:
        return reasons | dict.fromkeys(
            IN_MEMORY + TWICE, "torch.load(weights_only=True) opens no file of this checkpoint"
        )
    if memory.exists():
        free = int(dict(line.split(":") for line in memory.read_text().splitlines())["MemAvailable"].split()[0]) * 1024
        if free < 1.2 * source.nbytes + (1 << 29):
            reasons |= dict.fromkeys(IN_MEMORY, "there is too little memory for the tensors")
        if free < 2.4 * source.nbytes + (1 << 29):
            reasons |= dict.fromkeys(TWICE, "there is too little memory for the tensors and a copy of them")
    return reasons


def versions() -> dict[str, str]:
    """Of ckpt8, Python, and the packages that are compared."""
    installed = {"ckpt8": __version__, "python": platform.python_version()}
    for package in ("torch", "zstandard", "zipnn"):
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


_WIDTH = 64
_STEPS = 1000
_WEIGHT, _MOMENT, _ROOT_RATIO = 0.02, 1e-5, 4.0
"""Standard deviation of weights, the middle of those of first moments in rows, and how much larger the roots of second
moments are: steps of AdamW are then about a quarter of the learning rate."""

_SMOOTH = 4
"""Neighbours in a row whose squares a second moment is the mean of."""


def synthetic(target: Path, nbytes: int) -> dict[str, Any]:
    """Write a checkpoint of about ``nbytes`` bytes, at least a few kilobytes; and describe it.

    It is a function of the size alone. Raises OutputError.
    """
    generator = torch.Generator().manual_seed(0)
    network, states = {}, []
    # A parameter takes 12 bytes: fp32 weight and moments.
    for name, shape in _shapes(nbytes // 12).items():
        rows, columns = math.prod(shape[:-1]), shape[-1]
        noise = torch.randn(rows, columns + _SMOOTH - 1, generator=generator)
        scale = _MOMENT * torch.randn(rows, 1, generator=generator).exp()
        moment2 = (_ROOT_RATIO * scale).square() * noise.square().unfold(1, _SMOOTH, 1).mean(2)
        moments = {"exp_avg": (scale * noise[:, :columns]).view(shape), "exp_avg_sq": moment2.view(shape)}
        network[name] = torch.nn.Parameter(_WEIGHT * torch.randn(shape, generator=generator))
        states.append({"step": torch.tensor(float(_STEPS)), **moments})
    optimizer = torch.optim.AdamW(network.values(), lr=3e-4)
    optimizer.state.update(zip(network.values(), states, strict=True))
    model = {name: weight.detach() for name, weight in network.items()}
    try:
        with torch_writes():
            torch.save({"model": model, "optimizer": optimizer.state_dict(), "iter_num": _STEPS}, target)
    except OSError as exc:
        raise OutputError(f"{target}: cannot be written: {exc.strerror or exc}") from exc
    return {"parameters": sum(weight.numel() for weight in network.values()), "steps": _STEPS}


def _shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a network of about so many parameters: 64 wide for each layer, the vocabulary takes the rest."""
    width = _WIDTH * max(1, int((parameters * _WIDTH / 12) ** (1 / 3) / _WIDTH))
    layer = {
        "ln_1.weight": (width,),
        "attn.c_attn.weight": (3 * width, width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "ln_2.weight": (width,),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (width, 4 * width),
    }
    layers, left = divmod(parameters, width * (12 * width + 9))
    return {
        "wte.weight": (max(1, left // width), width),
        **{f"h.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()},
    }


def show_bench(console: Console, result: dict[str, Any]) -> None:
    """Print the figures of ``bench``; escape unprintable characters of names."""
    result = printable_tree(result)
    rounds = "one round" if result["repeat"] == 1 else f"medians of {result['repeat']:,} rounds"
    console.print(
        f"{escape(result['checkpoint'])}, {size(result['bytes'])}, {counted(result['threads'], 'thread')}, "
        f"{rounds}, bytes of the checkpoint per second",
        soft_wrap=True,
    )
    if made := result["synthetic"]:
        console.print(
            f"{made['parameters']:,} parameters and moments of AdamW, drawn at random: "
            "for the size of a real one, name a checkpoint",
            soft_wrap=True,
        )
    columns = ("operation", "seconds", "range", "of cp", "throughput", "output", "ratio", "peak memory", "of cp")
    rows = (
        (
            row["operation"],
            f"{row['seconds']:.2f}",
            "{:.2f} to {:.2f}".format(*row["spread"]),
            f"{row['to_cp']['seconds']:.2f}x",
            "-" if row["operation"] == START else f"{size(row['bytes_per_second'])}/s",
            size(row["output_bytes"]) if row["output_bytes"] else "-",
            f"{row['ratio']:.2f}x" if row["ratio"] else "-",
            size(row["peak_memory"]),
            f"{row['to_cp']['peak_memory']:.1f}x",
        )
        for row in result["results"]
    )
    console.print(Table(columns, rows))
    for name, reason in result["left_out"].items():
        console.print(f"{name}: {reason}", markup=False, soft_wrap=True)
    console.print(
        "the start is in no other figure; peak memory is that of all processes of an operation: the kernel's own "
        "record of the first (VmHWM) or, where more, the sum of shares (PSS) in samples",
        soft_wrap=True,
    )
    if load := result["load_to_torch"]:
        console.print(
            f"load takes {load['seconds']:.2f}x the time and {load['peak_memory']:.2f}x the memory of torch.load; "
            f"memory beyond the size of the files: {size(load['beyond_files'])}, "
            f"torch.load {size(load['torch_beyond_files'])}",
            soft_wrap=True,
        )
    if blocked := result["blocked_to_copy"]:
        ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in blocked.items())
        console.print(f"training waits for a save, in times of a copy in memory: {ratios}", soft_wrap=True)
