"""The command line: parse, call, print. ``EXIT_CODES`` lists what it returns."""

import sys
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from ckpt8 import __version__
from ckpt8.cli.commands import (
    Force,
    Json,
    Output,
    Threads,
    bench,
    compress,
    convert,
    finding_bases,
    rebase,
    stopwatch,
)
from ckpt8.cli.guard import (
    console,
    guarded,
    louder,
    one_object,
    present,
    print_json,
    print_lines,
    progress_bar,
    quieter,
    usual_volume,
    waited,
)
from ckpt8.cli.run_commands import chain, runs, thin
from ckpt8.core.errors import CheckFailedError, UsageError, require
from ckpt8.core.files.paths import as_path
from ckpt8.core.text import listed, printable, size


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ckpt8 {__version__}")
        raise typer.Exit


def _global(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@finding_bases
def inspect(
    path: Annotated[
        Path, typer.Argument(readable=False, help="A .ckpt8, a checkpoint file or a directory; or s3://BUCKET/KEY.")
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="ORIGINAL",
            help="Measure the error of a .ckpt8 against ORIGINAL. With --readiness: of any copy.",
        ),
    ] = None,
    readiness: Annotated[
        bool, typer.Option("--readiness", help="Predict what fp16, bf16, fp8 and int8 would lose.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Read every element instead of a sample.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a report with charts: one HTML page, no network, no script."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="FILE",
            help="Add replayed steps to the report: the output of verify --resume-steps N --json.",
        ),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show what a .ckpt8 or a checkpoint holds, where its bytes are, red flags, and what resuming will notice.

    Of a checkpoint it predicts what every preset and three budgets would make: size, error in optimizer steps, and how
    much the loss of a resumed run would drift. Of a .ckpt8, -v shows every error that was measured.

    Red flags are NaN, dead rows, weights stored twice, and classes that torch.load refuses with weights_only;
    --readiness adds values that fp16 would lose. inspect reads a sample of a checkpoint, and no values of a .ckpt8;
    with --full it reads every element of both. In the JSON see flags, sample and layers.
    """
    from ckpt8.container.joined import is_stored
    from ckpt8.inspecting.inspection import facts_of

    path, against, report = as_path(path), against and as_path(against), None
    if html is not None:
        from ckpt8.cli.show.report import Report

        report = Report(html, path, original=against, replay=replay, full=full, force=force)
    elif replay is not None:
        raise UsageError("--replay is shown in a report; give --html FILE")
    with progress_bar(f"inspect {path.name}", path, enabled=full and not as_json and not is_stored(path)) as progress:
        facts = facts_of(
            path,
            tensors=tensors,
            full=full,
            against=against,
            readiness=readiness,
            visit=report.visit if report else None,
            progress=progress,
        )
    if report is not None:
        report.write(facts)
    if as_json:
        print_json(facts)
    else:
        from ckpt8.cli.show.inspect import show

        show(console(), facts)
        if html is not None:
            print_lines(console(), [f"{html}: is written; open it in a browser"])


@finding_bases
def restore(
    src: Annotated[
        Path,
        typer.Argument(readable=False, metavar="SRC.ckpt8", help="A compressed checkpoint; or s3://BUCKET/KEY."),
    ],
    output: Output = None,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="SRC is damaged: write what is intact, list what is lost.")
    ] = False,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write the original checkpoint back, by default next to SRC and under the name of SRC.

    A directory that the ranks of torch.distributed.checkpoint packed becomes a plain one: give its name with -o.

    best.ckpt8 becomes best.pt, best.safetensors, ... or the directory best/. restore also shows the original's name.
    --force replaces checkpoints: a directory only if it holds nothing else, another file only if -o names it.
    """
    from ckpt8.container.joined import containers_of, open_stored
    from ckpt8.inspecting.container import names_in_container, warning
    from ckpt8.restoring import restore as api

    src = as_path(src)
    if salvage:
        salvaged = api.restore(src, output, salvage=True, force=force, threads=threads)
        present(salvaged.to_json(), lambda console: print_lines(console, salvaged.lines()), as_json=as_json)
        require(salvaged.complete, f"{src}: not everything in it was recovered for certain", CheckFailedError)
        return
    api.refuse_plain(src)
    with open_stored(src) as stored:
        total = sum(member.size for member in stored.manifest.members)
        foreign = [foreign_name for reader in containers_of(stored) for foreign_name in names_in_container(reader)]
    elapsed = stopwatch()
    with progress_bar(f"restore {src.name}", total=total, enabled=not as_json) as progress:
        restored = api.restore_original(src, output, force=force, threads=threads, progress=progress)
    lines = [f"{restored.path}: {size(total)} in {waited():.2f} s", *restored.lines()]
    present(
        {
            "target": str(restored.path),
            "bytes": total,
            "seconds": elapsed(),
            "original": restored.original,
            "replaced": restored.replaced,
        },
        lambda console: print_lines(console, lines),
        as_json=as_json,
    )
    if (line := warning(str(restored.path), foreign)) is not None:
        sys.stderr.write(f"ckpt8: {printable(line)}\n")


@finding_bases
def verify(
    src: Annotated[
        Path,
        typer.Argument(
            readable=False, metavar="SRC", help="A .ckpt8, or a plain checkpoint or directory; or s3://BUCKET/KEY."
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option(readable=False, metavar="ORIGINAL", help="Measure every error figure again, against ORIGINAL."),
    ] = None,
    resume_steps: Annotated[
        int,
        typer.Option(
            min=0, max=1 << 20, metavar="N", help="Replay N optimizer steps on both and show how they differ."
        ),
    ] = 0,
    max_replay_error: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="X", help="Exit with 1 if the replay error, the NMSE of a replayed update, exceeds X."
        ),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Check every byte of SRC, and with --against every error figure that it states.

    Of a plain checkpoint it checks what can be checked: each CRC, that every byte can be read, and the structure.
    """
    from dataclasses import asdict

    from ckpt8.cli.show.results import show_verified
    from ckpt8.core.workers import settle
    from ckpt8.inspecting.verify import verify as run

    settle()
    src, against = as_path(src), against and as_path(against)
    # An original counts twice: verify decodes as many bytes, then compares them.
    sources = [src] if against is None else [against, against]
    with progress_bar(f"verify {src.name}", *sources, enabled=not as_json) as progress:
        result = run(
            src,
            against,
            resume_steps=resume_steps,
            max_replay_error=max_replay_error,
            threads=threads,
            progress=progress,
        )
    facts = asdict(result)
    if result.plain is None:
        del facts["plain"]
    present(
        {"path": str(src), **facts},
        lambda console: show_verified(console, src, against, result),
        as_json=as_json,
    )
    if result.failures:
        more = f" (and {len(result.failures) - 1} more)" if len(result.failures) > 1 else ""
        raise CheckFailedError(f"{src}: {result.failures[0]}{more}")


@finding_bases
def diff(
    a: Annotated[
        Path,
        typer.Argument(
            readable=False,
            metavar="A",
            help="A checkpoint file or directory, or a .ckpt8 of one; or s3://BUCKET/KEY.",
        ),
    ],
    b: Annotated[Path, typer.Argument(readable=False, metavar="B", help="Another one, of any of these kinds.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor that both have.")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Show what differs between A and B, and by how much. Exit code 0: they are identical. 1: they differ."""
    from ckpt8.cli.show.results import show_diff
    from ckpt8.inspecting.diff import diff as run

    a, b = as_path(a), as_path(b)
    with progress_bar(f"diff {a.name} {b.name}", a, b, enabled=not as_json) as progress:
        difference = run(a, b, threads=threads, progress=progress)
    facts = difference.to_json()
    present(facts, lambda console: show_diff(console, facts, tensors=tensors), as_json=as_json)
    if not difference.identical:
        raise typer.Exit(CheckFailedError.exit_code)


COMMANDS: tuple[Callable[..., None], ...] = (
    compress,
    chain,
    thin,
    runs,
    inspect,
    restore,
    verify,
    rebase,
    convert,
    diff,
    bench,
)
"""The functions of all commands, in the order of ``--help``."""


EXAMPLES: dict[str, tuple[str, str]] = {
    "compress": ("ckpt8 compress run.pt", "ckpt8 compress run/*.pt --preset archive --remove"),
    "chain": ("ckpt8 chain run/ --preset archive --remove", "ckpt8 chain run/ --watch --remove --keep-raw 2"),
    "thin": ("ckpt8 thin run/ --to 50GB", "ckpt8 thin run/ --keep last:3,best:1,every:1000,log --apply"),
    "runs": ("ckpt8 runs run/", "ckpt8 runs run/ --html run.html"),
    "inspect": ("ckpt8 inspect run.pt", "ckpt8 inspect run.ckpt8 --against run.pt --html report.html"),
    "restore": ("ckpt8 restore run.ckpt8 -o back.pt", "ckpt8 restore broken.ckpt8 --salvage -o rest.pt"),
    "verify": ("ckpt8 verify run.pt", "ckpt8 verify run.ckpt8 --against run.pt --resume-steps 3"),
    "rebase": ("ckpt8 rebase run/step-300.ckpt8", "ckpt8 rebase run/step-300.ckpt8 -o whole.ckpt8"),
    "convert": (
        "ckpt8 convert run.ckpt8 model.safetensors",
        "ckpt8 convert run.ckpt8 model/ --to trainer --dtype bfloat16",
    ),
    "diff": ("ckpt8 diff a.ckpt8 b.ckpt8", "ckpt8 diff run.pt run.ckpt8 --tensors"),
    "bench": ("ckpt8 bench run.pt", "ckpt8 bench --size 1GB --threads 4"),
}
"""Two lines that the help of each command ends with."""


EXIT_CODES = (
    "0 ok, 1 a check fails, diff finds a difference or salvage loses something, 2 usage, 3 the input is damaged or no "
    "checkpoint, 4 the output cannot be written, 70 ckpt8 has a defect or lacks memory, 130 and 143 SIGINT and SIGTERM "
    "end it, 141 the reader of its output went away"
)


_SECOND = {"restore": ("output", "-o"), "rebase": ("output", "-o"), "verify": ("against", "--against")}
_SECOND["inspect"] = _SECOND["verify"]
"""What a second argument of a command is meant for: the name of a parameter, and its option."""


def _volume_option(names: list[str], change: Callable[[], None], text: str) -> TyperOption:
    def run(ctx: Any, _: object, given: bool) -> None:
        if given and not ctx.resilient_parsing:
            change()

    return TyperOption(
        param_decls=names, type=bool, is_flag=True, default=False, expose_value=False, callback=run, help=text
    )


_QUIET, _VERBOSE = ("--quiet", "-q"), ("--verbose", "-v")


def _volume_options() -> list[TyperOption]:
    """The two options that stand before a command or after it."""
    return [
        _volume_option([*_QUIET], quieter, "No progress, and nothing on stdout but --json."),
        _volume_option([*_VERBOSE], louder, "Show all that was measured, all rows, and what ckpt8 falls back to."),
    ]


class _Command(TyperCommand):
    """A command with ``--quiet`` and ``--verbose``. It says which option an argument too many belongs to."""

    allow_extra_args = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params = [*self.params, *_volume_options()]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. Raises UsageError for one too many."""
        super().parse_args(ctx, args)
        if not (extra := [str(text) for text in ctx.args]) or ctx.resilient_parsing:
            return extra
        name, option = _SECOND.get(self.name or "", ("", ""))
        text = listed(extra)
        if len(extra) == 1 and name and ctx.params.get(name) is None:
            raise UsageError(f"{text}: {self.name} takes one path; give this one with its option: {option} {text}")
        raise UsageError(f"{text}: more arguments than {self.name} takes; ckpt8 {self.name} --help lists them")


class _Commands(TyperGroup):
    """All commands. With ``--json`` each prints one object, also where its arguments are wrong."""

    _as_json = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params = [*self.params, *_volume_options()]

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line."""
        with usual_volume():
            return super().main(*args, **extra)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Read the arguments of a command."""
        self._as_json = "--json" in takewhile("--".__ne__, args)
        with one_object(as_json=self._as_json):
            return super().make_context(info_name, args, *rest, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with one_object(as_json=self._as_json):
            return super().invoke(ctx)


def make_app(commands: Iterable[Callable[..., None]]) -> typer.Typer:
    """The command line with these commands."""
    made = typer.Typer(
        name="ckpt8",
        cls=_Commands,
        no_args_is_help=True,
        epilog=f"Exit codes: {EXIT_CODES}.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Make training checkpoints about three times smaller. A run that resumes from one trains on as before.",
    )
    made.callback()(_global)
    for command in commands:
        made.command(cls=_Command, epilog="\n  ".join(["Examples:", *EXAMPLES[command.__name__]]))(command)
    return made


app = make_app(COMMANDS)


def main() -> None:
    """Run the command that ``sys.argv`` asks for, see ``guarded``."""
    # typer reads the signatures of all its commands, and takes long for each: give it only the one that runs.
    words = [word for word in sys.argv[1:] if word not in (*_QUIET, *_VERBOSE)]
    guarded(make_app([command for command in COMMANDS if [command.__name__] == words[:1]] or COMMANDS))
