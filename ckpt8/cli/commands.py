"""The commands ``compress``, ``convert``, ``rebase`` and ``bench``; ``run_commands`` and ``app`` have the others.

The options that several commands share are here as well, and their stopwatch. Every command that opens containers has
``--base-dir``. With ``torchrun -m ckpt8 compress`` the ranks share a directory of torch.distributed.checkpoint, and
write another.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ckpt8.cli.guard import console, is_quiet, present, print_json, print_lines, progress_bar, waited
from ckpt8.core.errors import OutputError, UsageError, require
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import RemotePath
from ckpt8.core.public import parse_size
from ckpt8.core.text import listed, printable, size

if TYPE_CHECKING:
    from ckpt8.cli.jobs import Tally


def _completed(*values: str) -> Callable[[str], list[str]]:
    """What completes an option in a shell: those of ``values`` that begin so."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


PRESETS = ("flash", "compact", "archive", "lossless")
FORMATS = ("torch", "safetensors", "trainer", "dcp", "flashoptim", "compressed-tensors", "ckpt8")
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output: a file, or a checkpoint directory.")]
Threads = Annotated[int | None, typer.Option(min=1, max=256, help="Worker threads. Default: one per core, at most 8.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write. Default: next to the input.")]
Container = Annotated[Path, typer.Argument(readable=False, metavar="SRC.ckpt8", help="A compressed checkpoint.")]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=_completed(*PRESETS),
        help="flash, compact (smaller), archive (smallest) or lossless (bit-exact). Default: flash. compact is a "
        "budget of 0.15, archive of 1.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        metavar="STEPS",
        help="Instead of a preset: the error in optimizer steps, from 0.01 to 10. At 1, weights and moments differ "
        "from SRC as much as one step of training changes them.",
    ),
]
Rules = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB=CODEC", help="Store tensors whose path matches GLOB with CODEC. The first match wins."),
]
Device = Annotated[
    str,
    typer.Option(autocompletion=_completed("auto", "cpu", "cuda"), help="Pack on the cpu or on cuda. auto is the cpu."),
]
Remove = Annotated[
    bool,
    typer.Option("--remove", help="Remove a checkpoint once its container was verified against it, never otherwise."),
]
FrozenFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Do not store weights that no optimizer updates and that FILE holds bit for bit, such as the base of "
        "adapters. FILE is a lossless .ckpt8, which the new file then needs, or any checkpoint: bases/ gets a "
        ".ckpt8 of it. Or s3://BUCKET/KEY, hf://OWNER/NAME/FILE.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Say what would be written, its predicted size, and what would be removed. Write nothing."
    ),
]


def stopwatch() -> Callable[[], float]:
    """Import torch, then start: the seconds since then, without the import, are the result of the function."""
    from ckpt8.core.workers import settle

    settle()
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


_NAME = "base_dir"
_BaseDirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--base-dir",
        readable=False,
        metavar="DIR",
        envvar="CKPT8_BASE_DIR",
        help="Look for the base of a delta in DIR, too. Also several times.",
    ),
]


def finding_bases(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with the option ``--base-dir``, which holds for every container that it opens."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        from ckpt8.container.bases import looked_for_in

        with looked_for_in(options.pop(_NAME, None) or ()):
            command(*args, **options)

    # Resolved here: names in the annotations of ``command`` are those of its module.
    hints = {**get_type_hints(command, include_extras=True), _NAME: _BaseDirs}
    parameters = [
        *inspect.signature(command).parameters.values(),
        inspect.Parameter(_NAME, inspect.Parameter.KEYWORD_ONLY, default=None),
    ]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters], return_annotation=None
    )
    run.__annotations__ = hints
    return run


LISTED = 5
_UNSHARED = {"device": "auto", "max_update_error": None, "base": None, "frozen_from": None}
"""Options that the ranks do not take, with the value that asks for nothing."""
_NO_DELTA = dict.fromkeys(("base", "frozen_from"), ": a delta is made of whole tensors, and they keep slices")


def _is_shared(source: Path) -> bool:
    with suppress(OSError):
        return source.is_dir() and (source / ".metadata").is_file()
    return False


def ranks(sources: list[Path]) -> tuple[int, int] | None:
    """The number of this process and of all where torchrun has started it to share the source; else None.

    Only a directory with a ``.metadata`` is shared. Raises UsageError where the environment contradicts itself.
    """
    given = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if None in given or len(sources) != 1 or not _is_shared(sources[0]):
        return None
    try:
        rank, world = (int(text or "") for text in given)
    except ValueError:
        rank, world = 0, 0
    require(
        0 <= rank < world,
        f"RANK is {given[0]!r} and WORLD_SIZE {given[1]!r}; start the ranks with torchrun",
        UsageError,
    )
    return rank, world


def compress_share(
    src: Path, output: Path | None, options: dict[str, Any], rank: int, world: int, *, force: bool, as_json: bool
) -> None:
    """Pack the share of this rank. Every rank prints a line of its part, rank 0 then the whole."""
    from ckpt8.container.header import CONTAINER

    if output is None or output.suffix == CONTAINER:
        raise UsageError(
            f"{src}: {world} ranks write a directory, a file each; give it with -o DIR, or unset RANK and WORLD_SIZE "
            f"to write one {CONTAINER}"
        )
    for name, nothing in _UNSHARED.items():
        require(
            options[name] == nothing,
            f"--{name.replace('_', '-')} is not for ranks that share a source{_NO_DELTA.get(name, '')}; leave it out",
            UsageError,
        )

    from ckpt8.cli.show.inspect import summary
    from ckpt8.inspecting.container import inspect_container
    from ckpt8.integrations.dcp.sharing import compress_share as run
    from ckpt8.integrations.dcp.sharing import connected

    given = {name: value for name, value in options.items() if name not in _UNSHARED}
    elapsed = stopwatch()
    with warnings.catch_warnings(record=True) as said, connected(world):
        warnings.simplefilter("always", UserWarning)
        planned = run(src, output, given, rank, world, overwrite=force)
    seconds = elapsed()
    for line in dict.fromkeys(str(warning.message) for warning in said):
        if line.startswith(f"{output}: "):
            sys.stderr.write(f"ckpt8: {printable(line)}\n")
    if not as_json:
        print_lines(console(), [f"rank {rank} of {world}: {planned.share.slices} slices, {size(planned.share.size)}"])
    if rank:
        return
    left_out, facts = planned.left_out, inspect_container(output)
    if as_json:
        print_json({"target": str(output), "seconds": seconds, "left_out": left_out, **facts})
    else:
        summary(console(), facts, str(src), str(output), seconds, whole=waited(), kept=True)
        print_lines(console(), [f"left out: {listed(left_out, LISTED)}"] if left_out else [])


@finding_bases
def compress(
    src: Annotated[
        list[Path],
        typer.Argument(
            readable=False, metavar="SRC...", help="Checkpoint files, or directories of them. Or one s3://BUCKET/KEY."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write, such as s3://BUCKET/KEY; of several SRC, the folder. Default: next to each.",
        ),
    ] = None,
    preset: Preset = None,
    budget: Budget = None,
    rule: Rules = None,
    device: Device = "auto",
    threads: Threads = None,
    max_update_error: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="X",
            help="Keep moments lossless where max |Δu| exceeds X or is unknown. Codes of a budget keep to X.",
        ),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Measure the error while compressing.")] = True,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="OLD",
            help="Store differences to OLD, the .ckpt8 of an earlier step, which the new one then needs. auto chooses "
            "one among those in its folder, where that makes it smaller.",
        ),
    ] = None,
    frozen_from: FrozenFrom = None,
    remove: Remove = False,
    dry_run: DryRun = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compress SRC into a .ckpt8, then show its size and its error.

    torchrun -m ckpt8 compress DIR -o OUT has the ranks share the slices of a directory of torch.distributed.checkpoint;
    OUT becomes a directory with a .ckpt8 of each rank.

    Several SRC become a .ckpt8 each. If one fails, a message says why and the others go on; the exit code is the
    highest of all failures.
    """
    src, output = list(map(as_path, src)), output and as_path(output)
    require(stats or not remove, "--remove verifies by the statistics of a container; leave out --no-stats", UsageError)
    if len(src) > 1 and output is None and is_new_container(src[-1]):
        raise UsageError(f"{src[-1]}: is not there; to write a container of that name: -o {src[-1]}")
    options: dict[str, Any] = {
        "preset": preset,
        "budget": budget,
        "rules": rule or (),
        "device": device,
        "threads": threads,
        "stats": stats,
        "max_update_error": max_update_error,
        "base": base,
        "frozen_from": frozen_from,
    }
    if (place := ranks(src)) is not None:
        require(
            not (remove or dry_run),
            f"{'--remove' if remove else '--dry-run'} is not for ranks that share a source; leave it out",
            UsageError,
        )
        compress_share(src[0], output, options, *place, force=force, as_json=as_json)
    elif len(src) == 1:
        from ckpt8.compressing.compress import default_target

        target = default_target(src[0])
        is_remote = isinstance(output, RemotePath)
        if output is not None and not is_remote and os.path.isdir(output):  # noqa: PTH112 - no error for a long name
            output = output / target.name
        if dry_run:
            _preview_one(src[0], output or target, options, remove=remove, force=force, as_json=as_json)
        else:
            _compress_one(src[0], output, output or target, options, remove=remove, force=force, as_json=as_json)
    else:
        from ckpt8.chaining.chain import collected
        from ckpt8.chaining.jobs import Settings
        from ckpt8.cli.jobs import run_jobs

        elapsed = stopwatch()
        with collected(src, output, Settings(options, remove), force=force, dry=dry_run) as jobs:
            tally = run_jobs(jobs, "compress", quiet=as_json, dry=dry_run)
        end(tally, {**tally.to_json(), "seconds": elapsed()}, as_json=as_json)


def is_new_container(path: Path) -> bool:
    """Whether ``path`` has the name of a container, and nothing has that name."""
    from ckpt8.container.header import CONTAINER

    return path.suffix == CONTAINER and not (path.exists() or path.is_symlink())


def _compress_one(
    src: Path, output: Path | None, target: Path, options: dict[str, Any], *, remove: bool, force: bool, as_json: bool
) -> None:
    """Compress ``src`` into ``target``; ``output`` is that if the user named it."""
    from ckpt8.inspecting.container import inspect_container

    finished, left = None, dict[str, Any]()
    if remove:  # killed processes may have left removals beside ``src``
        from ckpt8.chaining.jobs import Settings, finishing
        from ckpt8.cli.jobs import run_jobs

        settings = Settings(options, remove)
        finished = run_jobs([finishing(src.parent, [target.parent], settings)], "finish", quiet=as_json)
        remove = settings.removes(src)
        left = finished.to_json()
    rows = left.get("checkpoints", [])
    if as_json:
        print_json({"finished": rows, **({"error": left["error"]} if "error" in left else {})})
    container = next((Path(row["target"]) for row in rows if row["removed"] and row["source"] == str(src)), None)
    if container is None:
        options = {**options, "force": force}
        seconds, is_there, facts = _compress_now(src, output, target, options, remove=remove, as_json=as_json)
    else:
        target, seconds, is_there, facts = container, 0.0, True, inspect_container(container)
    if as_json:
        print_json({"target": str(target), "seconds": seconds, "present": is_there, "removed": remove, **facts})
    if finished and finished.exit_code:
        raise typer.Exit(finished.exit_code)


def _preview_one(src: Path, target: Path, options: dict[str, Any], *, remove: bool, force: bool, as_json: bool) -> None:
    from ckpt8.chaining.chain import job_for
    from ckpt8.chaining.jobs import Job, Settings, finishing
    from ckpt8.cli.jobs import run_jobs

    is_folder = isinstance(target, RemotePath) or target.parent.is_dir()
    require(is_folder, f"{target}: cannot be written: {target.parent} is no folder", OutputError)
    settings = Settings(options, remove)
    jobs = finishing(src.parent, [target.parent], settings) if remove else []
    if not any(job.source == src for job in jobs):
        jobs.append((job_for if remove else Job)(src, target, settings, force=force))
    tally = run_jobs([jobs], "compress", quiet=as_json, dry=True)
    end(tally, tally.to_json(), as_json=as_json)


def _compress_now(
    src: Path, output: Path | None, target: Path, options: dict[str, Any], *, remove: bool, as_json: bool
) -> tuple[float, bool, dict[str, Any]]:
    """Compress ``src``, show the result and remove ``src`` if asked to.

    Returns the seconds, whether the container was there already, as it may with ``remove``, and its facts.
    """
    from ckpt8.cli.show.inspect import summary
    from ckpt8.compressing.compress import compress as run
    from ckpt8.inspecting.container import inspect_container

    is_there = False
    if remove:
        from ckpt8.chaining.chain import job_for
        from ckpt8.chaining.jobs import Settings, anew, refuse_removal, remove_verified
        from ckpt8.compressing.compressor import no_progress

        refuse_removal(src)
        is_there = job_for(src, target, Settings(options, remove), force=options["force"]).is_done(no_progress)
        target = anew(target)
    elapsed = stopwatch()
    if not is_there:
        with progress_bar(f"compress {src.name}", src, enabled=not as_json) as progress:
            run(src, output, **options, progress=progress)
    seconds = elapsed()
    facts = inspect_container(target)
    if is_there and not as_json:
        print_lines(console(), [f"{target}: was there already"])
    elif not as_json:
        summary(console(), facts, str(src), str(target), seconds, whole=waited(), kept=not remove)
    if remove:
        with progress_bar(f"verify {src.name}", src, src, enabled=not as_json) as progress:
            remove_verified(src, target, threads=options["threads"], progress=progress)
        if not as_json:
            print_lines(console(), [f"{src}: removed, after the container was verified against it"])
    return seconds, is_there, facts


def end(tally: Tally, facts: dict[str, Any], *, as_json: bool) -> None:
    """Print the total, or ``facts`` as JSON, and end with the exit code of what failed."""
    present(facts, lambda _: tally.show_total(), as_json=as_json)
    if tally.exit_code:
        raise typer.Exit(tally.exit_code)


@finding_bases
def convert(
    src: Annotated[
        Path,
        typer.Argument(readable=False, help="A checkpoint file or directory, a .ckpt8 of one; or s3://BUCKET/KEY."),
    ],
    dst: Annotated[str, typer.Argument(readable=False, help="The file or directory to write; or s3://BUCKET/KEY.")],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            autocompletion=_completed(*FORMATS),
            help="torch, safetensors, trainer, dcp, flashoptim, compressed-tensors or ckpt8. Default: what DST's name "
            "says.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            autocompletion=_completed(*DTYPES),
            help="Type of the weights: float32, bfloat16, float16. Default: as they are; safetensors get fp32 as bf16. "
            "float8_e4m3fn and int8 quantise linear layers and write a directory for inference.",
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="S",
            autocompletion=_completed("absmax", "unit"),
            help="Scales of quantised weights: absmax, or unit (powers of two, float8).",
        ),
    ] = None,
    per: Annotated[
        str | None,
        typer.Option(
            metavar="P",
            autocompletion=_completed("channel", "tensor"),
            help="A scale for each channel (a row; default of float8) or tensor (default of int8).",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Modules that stay bf16, like embeddings and head.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(readable=False, metavar="FILE", help="The model's config.json, if SRC has none.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Which model, if SRC holds several: ema, state_dict_ema. torch and dcp write that model alone.",
        ),
    ] = None,
    member: Annotated[
        str | None, typer.Option(metavar="M", help="Which file of a directory, or which folder with a DCP.")
    ] = None,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write SRC in another format: a .pt, safetensors that transformers loads, a Trainer or DCP directory, a .ckpt8."""
    from ckpt8.cli.show.results import show_converted
    from ckpt8.converting.convert import convert as run

    src, elapsed = as_path(src), stopwatch()
    with progress_bar(f"convert {src.name}", src, enabled=not as_json) as progress:
        report = run(
            src,
            dst,
            to=to,
            dtype=dtype,
            key=key,
            member=member,
            scale=scale,
            per=per,
            keep=keep or (),
            config=config,
            force=force,
            threads=threads,
            progress=progress,
        )
    present(
        {**report.to_json(), "seconds": elapsed()},
        lambda console: show_converted(console, report, waited()),
        as_json=as_json,
    )
    if report.warning is not None:
        sys.stderr.write(f"ckpt8: {printable(report.warning)}\n")


@finding_bases
def rebase(
    src: Container,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write. Default: in the place of the input.")
    ] = None,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a delta as a .ckpt8 that needs no base, by default in its own place."""
    from ckpt8.container.joined import open_stored
    from ckpt8.container.writer import rebase as run

    src, output = as_path(src), output and as_path(output)
    elapsed = stopwatch()
    with open_stored(src) as stored:
        before, base = stored.size, stored.manifest.base
    with progress_bar(f"rebase {src.name}", src, enabled=not as_json) as progress:
        target = run(src, output, force=force, threads=threads, progress=progress)
    seconds, after = elapsed(), target.stat().st_size if target.is_file() else before
    was = "needed no base" if base is None else f"no longer needs {base.path}"
    line = f"{target}: {was}, {size(before)} -> {size(after)} in {waited():.2f} s"
    present(
        {
            "target": str(target),
            "base": base and base.path,
            "bytes": before,
            "stored_bytes": after,
            "seconds": seconds,
        },
        lambda console: print_lines(console, [line]),
        as_json=as_json,
    )


def bench(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            readable=False, help="A checkpoint file or directory. Without one, bench makes a synthetic one."
        ),
    ] = None,
    synthetic_size: Annotated[
        str, typer.Option("--size", metavar="BYTES", help="Size of the synthetic checkpoint, as in 1.5GB.")
    ] = "0.25GB",
    scratch: Annotated[
        Path | None,
        typer.Option(
            readable=False, metavar="DIR", help="A folder on the disk to measure. Default: the one for temporary files."
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            autocompletion=_completed("cpu", "cuda"), help="cpu measures files, cuda kernels and optimizer steps."
        ),
    ] = "cpu",
    parameters: Annotated[int, typer.Option(min=1, help="With cuda: how many parameters a step updates.")] = 1 << 30,
    threads: Threads = None,
    repeat: Annotated[int, typer.Option(min=1, help="How many rounds to time. bench reports medians.")] = 3,
    as_json: Json = False,
) -> None:
    """Compare time, size and memory with cp, zstd and torch; on a GPU, kernels and steps with a copy and torch."""
    from ckpt8.core.gpu import requested

    where = requested(device)
    if where is not None and where.type != "cpu":
        from ckpt8.cli.bench.device import bench_device, show_device_bench

        measured = bench_device(where, parameters=parameters)
        present(measured, lambda console: show_device_bench(console, measured), as_json=as_json)
        return
    from ckpt8.cli.bench import run

    size = parse_size(synthetic_size, "--size")
    try:
        result = run.bench(checkpoint, size=size, threads=threads, repeat=repeat, scratch=scratch, say=_say)
    finally:
        _say("")
    present(result, lambda console: run.show_bench(console, result), as_json=as_json)


def _say(text: str) -> None:
    """Show the current operation on one line of a terminal."""
    if sys.stderr.isatty() and not is_quiet():
        sys.stderr.write(f"\r\x1b[K{printable(text)}")
        sys.stderr.flush()
