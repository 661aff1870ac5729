"""``ckpt8.compress`` and ``ckpt8.save``: from a checkpoint, or from objects in memory, to a ``.ckpt8``.

A save in the background copies a checkpoint in memory, or packs it there, and returns; then ``background`` does the
rest.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar, overload

from ckpt8.checkpoint.readers import PACKED
from ckpt8.checkpoint.readers.entries import directory_name, is_directory
from ckpt8.checkpoint.replacing import checkpoint_file, run_in
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.gate import refusal_of
from ckpt8.checkpoint.sources.live_object import LiveCheckpoint, live_checkpoint
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.tree import Global, Inert, OpenCheckpoint, format_path, iter_nodes
from ckpt8.compressing.background import Job, PendingSave, Unsaved, key_of, start_saving, wait_for
from ckpt8.compressing.chosen_base import (
    Auto,
    Wanted,
    bases_kept,
    candidates_kept,
    checked_frozen,
    choose_base,
    is_unlinked,
    wanted,
)
from ckpt8.compressing.compressor import Compressor, Options, OverBudgetError, Unwritten, no_progress
from ckpt8.compressing.deltas import BrokenBaseError
from ckpt8.compressing.device_encoder import choose_encoder
from ckpt8.compressing.frozen_file import FrozenFile
from ckpt8.compressing.plan import Measured
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container.bases import looked_for_in
from ckpt8.container.header import CONTAINER, is_container
from ckpt8.container.kept_bases import unneeded_file
from ckpt8.container.manifest import Manifest
from ckpt8.container.reader import ContainerReader
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import Ckpt8Error, InputError, UsageError, WrongTypeError, require
from ckpt8.core.files.atomic import AtomicFile, any_file, as_private_as, default_path, refuse_source, writing
from ckpt8.core.files.file_objects import path_to_write
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import RemotePath, reading, refuse_target, refuse_url, resolved
from ckpt8.core.gpu import requested
from ckpt8.core.json_text import is_unicode
from ckpt8.core.log import log
from ckpt8.core.public import checked, described
from ckpt8.core.text import listed
from ckpt8.core.workers import Progress

if TYPE_CHECKING:
    import torch

    from ckpt8.checkpoint.sources.snapshot import Snapshot

R = TypeVar("R")

_OTHERS = (".pt", ".pth", ".bin", ".safetensors")
"""Suffixes of files that other programs read. Lightning names what its plugin writes and reads ``.ckpt``."""

_SHOWN = 5

_CALLER = 5
"""Frames from a warning to the caller of ``save``."""


def default_target(source: Path) -> Path:
    """``run.pt`` becomes ``run.ckpt8``, ``checkpoint-500/`` becomes ``checkpoint-500.ckpt8``. Raises InputError."""
    if is_directory(source):
        name = directory_name(source)
        return (source if source.name == name else source.resolve()).with_name(name + CONTAINER)
    return source.with_suffix(CONTAINER)


def checked_options(**options: Any) -> dict[str, Any]:
    """Arguments for later calls of ``compress`` or ``save``. Raises UsageError for what no checkpoint can have."""
    bound = options.get("max_update_error")
    Policy.of(options["preset"], options["rules"], options["budget"], bound)
    Options(options["threads"], options.get("stats", True), bound)
    requested(options.get("device", "auto"))
    if (frozen_from := options.get("frozen_from")) is not None:
        checked_frozen(frozen_from, wanted(options["base"]))
    _check_snapshot(options.get("snapshot", "copy"))
    return options


def _check_snapshot(snapshot: str) -> None:
    require(snapshot in ("copy", "packed"), f"snapshot {snapshot!r}: expected copy or packed", UsageError)


@checked
def compress(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    preset: str | None = None,
    budget: float | None = None,
    rules: Sequence[str] = (),
    device: str = "auto",
    threads: int | None = None,
    stats: bool = True,
    max_update_error: float | None = None,
    base: str | os.PathLike[str] | Auto | None = None,
    base_dirs: Sequence[str | os.PathLike[str]] = (),
    frozen_from: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Compress a checkpoint file or directory into a ``.ckpt8``, by default next to it; return its manifest.

    Either may be ``s3://BUCKET/KEY``.

    ``preset`` is flash (the default), compact, archive or lossless. ``budget`` takes its place: a number of optimizer
    steps, from 0.01 to 10. Weights and moments then differ from the original as much as so many steps of training
    change them; archive is one step, compact 0.15. ``rules`` are ``GLOB=CODEC`` for tensors by name; the first match
    wins. ``device`` packs on auto, cpu or cuda; auto is cpu. ``stats`` measures the error while compressing. Moments
    stay lossless where the max |Δu| of their parameter exceeds ``max_update_error`` or is unknown; the codes of a
    budget keep to it. With ``force`` an existing file is replaced; without ``target`` only a checkpoint or container
    is. A directory needs a ``target`` where it is the folder of a run, or is given as ``.`` or ``..``. ``progress`` is
    called with the number of source bytes just finished.

    ``base`` is the container of an earlier state of the same training. The new one then holds differences to it, takes
    much less room, and cannot be read without it. "auto" chooses one among the containers in the folder of the target,
    and none where none makes the file smaller: see ``chosen_base``. It links that, and all below it, into ``bases/``
    there, so that they may be removed; links that nothing needs go. Files below a base are looked for beside it and in
    ``base_dirs``.

    ``frozen_from`` is what the run began with: a lossless container, or any checkpoint, of which ``bases/`` beside the
    target then gets a lossless container, once. Weights that no optimizer updates, and that it holds bit for bit under
    whatever name, are not stored again: it becomes their base. It is no base beside a path as ``base``, and beside
    "auto" only where that chooses none.

    Raises InputError for a source or base that is damaged, or a source that holds no tensors, OutputError for the
    target, UsageError for the arguments and where a directory needs a target.

    >>> ckpt8.compress("run.pt", "small.ckpt8", preset="compact").preset
    'compact'
    """
    source = as_path(source)
    policy = Policy.of(preset, rules, budget, max_update_error)
    options = Options(threads, stats, max_update_error, progress)
    return _compress_path(
        source, target, policy, options, base, base_dirs, frozen_from, device=device, force=force, containers=False
    )


def coarsen(
    container: Path,
    *,
    preset: str | None,
    budget: float | None,
    base: Path | None,
    threads: int | None = None,
    approve: Callable[[Path], object] | None = None,
) -> Manifest:
    """Compress what a container holds again, into its own place; the new one states the error of both together.

    ``approve`` gets the path of the new one before it takes that place; what it raises keeps the old one. Raises as
    ``compress``.
    """
    with ContainerReader(container) as reader:
        options = Options(threads, earlier=reader.manifest.stated_as_earlier, approve=approve)
    policy = Policy.of(preset, (), budget)
    return _compress_path(container, container, policy, options, base, force=True, containers=True)


def _compress_path(
    source: Path,
    target: str | os.PathLike[str] | None,
    policy: Policy,
    options: Options,
    base: str | os.PathLike[str] | Auto | None,
    base_dirs: Sequence[str | os.PathLike[str]] = (),
    frozen_from: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    force: bool,
    containers: bool,
) -> Manifest:
    """``compress``; with ``containers`` of a container, in its place."""
    gpu = requested(device)
    target = None if target is None else as_path(target)
    if target is None or not containers:
        target = target_of(source, target, force=force)
    asked = wanted(base)
    frozen = checked_frozen(frozen_from, asked)
    with (
        looked_for_in(base_dirs),
        as_private_as(source),
        open_source(source, containers=containers, decode=not policy.keeps_compressed) as bundle,
    ):
        if not is_unicode(bundle.directory or source.name):
            raise InputError(f"{source}: its name is not valid UTF-8, and a container states it; rename it")
        if not bundle.holds_tensors:
            raise InputError(f"{source}: holds no tensors; there is nothing to compress")
        if policy.budget is not None:
            bundle.keep_all(needs_room=True)  # it measures before it packs
        write = partial(Compressor.run, target=target, policy=policy, force=force)
        return _compress(bundle, target, policy, options, asked, write, device=gpu, frozen_from=frozen)


def target_of(source: Path, target: Path | None, *, force: bool) -> Path:
    """Where ``compress`` writes. Raises OutputError where it may not, and InputError for the source; writes nothing.

    Raises UsageError for a directory that needs a target.
    """
    refuse_url(source)
    if not isinstance(source, RemotePath):
        with reading(source):
            source.stat()  # its container may have taken its place
    require(not is_container(source), f"{source}: {PACKED}")
    refuse_target(default_target(source) if target is None else target)
    refuse_source(default_target(source) if target is None else target, source)
    if target is None:
        target = default_path(default_target(source))
        if is_directory(source):
            _refuse_place(source, target)
        if force and target.is_file():
            checkpoint_file(target)
    with writing(target):
        AtomicFile.examine(target, force=force, check=unneeded_file)
    return target


def _refuse_place(source: Path, target: Path) -> None:
    """Raise UsageError for a directory whose container needs a name: that of a run, or one such as ``.``."""
    if names := run_in(source):
        raise UsageError(
            f"{source}: is the folder of a run ({listed(names)}); ckpt8 chain {source} compresses each of them, and "
            "-o FILE packs all into one"
        )
    if source.name != directory_name(source):
        raise UsageError(f"{source}: its container would go beside the folder; give -o {target}, or another name")


# The overloads repeat the parameters, since their type of result depends on ``background`` alone.
@overload
def save(
    obj: object,
    target: str | os.PathLike[str] | IO[bytes],
    *,
    preset: str | None = ...,
    budget: float | None = ...,
    rules: Sequence[str] = ...,
    threads: int | None = ...,
    stats: bool = ...,
    max_update_error: float | None = ...,
    base: str | os.PathLike[str] | Auto | None = ...,
    base_dirs: Sequence[str | os.PathLike[str]] = ...,
    frozen_from: str | os.PathLike[str] | None = ...,
    force: bool = ...,
    background: Literal[False] = ...,
    snapshot: str = ...,
) -> Manifest: ...


@overload
def save(
    obj: object,
    target: str | os.PathLike[str] | IO[bytes],
    *,
    preset: str | None = ...,
    budget: float | None = ...,
    rules: Sequence[str] = ...,
    threads: int | None = ...,
    stats: bool = ...,
    max_update_error: float | None = ...,
    base: str | os.PathLike[str] | Auto | None = ...,
    base_dirs: Sequence[str | os.PathLike[str]] = ...,
    frozen_from: str | os.PathLike[str] | None = ...,
    force: bool = ...,
    background: Literal[True],
    snapshot: str = ...,
) -> PendingSave: ...


@checked
def save(
    obj: object,
    target: str | os.PathLike[str] | IO[bytes],
    *,
    preset: str | None = None,
    budget: float | None = None,
    rules: Sequence[str] = (),
    threads: int | None = None,
    stats: bool = True,
    max_update_error: float | None = None,
    base: str | os.PathLike[str] | Auto | None = None,
    base_dirs: Sequence[str | os.PathLike[str]] = (),
    frozen_from: str | os.PathLike[str] | None = None,
    force: bool = True,
    background: bool = False,
    snapshot: str = "copy",
) -> Manifest | PendingSave:
    """Save ``obj`` as ``torch.save`` does, but to a ``.ckpt8``; return its manifest.

    Tensors are packed on the device that they are on, CPU or GPU. Arguments are those of ``compress``, except that an
    existing file is replaced unless ``force`` is False. A name such as ``b.pt`` gets a warning: torch.load cannot read
    a container. Raises OutputError, and UsageError for wrong arguments and for
    an object that cannot be pickled. ``target`` may be ``s3://BUCKET/KEY``, or a binary file such as ``io.BytesIO``,
    which gets the container.

    With ``background`` it returns a ``PendingSave`` once all tensors are copied to memory of the CPU. You may then
    change them; the file gets the old values. A thread packs and writes it, and the interpreter waits for that thread
    before it exits. What fails later is raised by ``PendingSave.result``. A save to a target that is still being
    written waits for that first. The copy takes as much memory as the tensors (pinned, for those of a GPU), and one is
    kept for the next save, which then waits for the copy alone. ``snapshot="packed"`` packs them before it returns,
    which takes longer, and keeps no copy: in flash 5.1 bytes a parameter, for the 12 of fp32 and AdamW.

    >>> ckpt8.save({"model": model.state_dict()}, "model.ckpt8").preset
    'flash'
    """
    require(not sys.is_finalizing(), "save: the interpreter ends; save before it does, as in atexit", UsageError)
    if not isinstance(target, (str, os.PathLike)):
        if background or base is not None or frozen_from is not None:
            raise UsageError("save: background, base and frozen_from need a path as the target, not a file object")
        require(callable(getattr(target, "write", None)), f"save: {described(target)} takes no bytes", WrongTypeError)
        with path_to_write(target) as path:
            return save(
                obj, path, preset=preset, budget=budget, rules=rules, threads=threads, stats=stats,
                max_update_error=max_update_error,
            )  # fmt: skip
    target = as_path(target)
    policy = Policy.of(preset, rules, budget, max_update_error)
    options = Options(threads, stats, max_update_error)
    member = _member_of(target)
    asked = wanted(base)
    frozen = checked_frozen(frozen_from, asked)
    named = frozen or (asked if isinstance(asked, Path) else None)
    is_linked = isinstance(asked, Auto)
    _check_snapshot(snapshot)
    name = target.stem
    if background:
        # The thread writes to where these paths lead now.
        refuse_target(target)
        target = resolved(target)
        asked = asked.absolute() if isinstance(asked, Path) else asked
        frozen, named = frozen and frozen.absolute(), named and named.absolute()
        base_dirs = [as_path(folder).absolute() for folder in base_dirs]

    def compress_live(checkpoint: OpenCheckpoint, run_or_pack: Callable[..., R]) -> R:
        with looked_for_in(base_dirs):
            live = checkpoint.memory if isinstance(checkpoint, LiveCheckpoint) else {}
            write = partial(run_or_pack, target=target, policy=policy, force=force)
            return _compress(
                Bundle.of(checkpoint, member), target, policy, options, asked, write, live=live, frozen_from=frozen
            )

    def compress_object(run_or_pack: Callable[..., R]) -> R:
        with live_checkpoint(obj, name) as checkpoint:
            _warn_of_refusal(target, checkpoint)
            return compress_live(checkpoint, run_or_pack)

    def pack(job: Job) -> Unsaved:
        from ckpt8.checkpoint.sources.snapshot import give_back

        give_back()
        return compress_object(partial(_protecting, job, is_linked, Compressor.pack))

    def copy(job: Job) -> Unsaved:
        from ckpt8.checkpoint.sources.snapshot import Snapshot

        _examine(target, force=force)
        with ExitStack() as resources:
            resources.enter_context(candidates_kept(asked, target))
            taken = resources.enter_context(Snapshot(obj, name))
            if taken.pickled is not None:
                _warn_of_refusal(target, taken.pickled)
            run = partial(compress_live, run_or_pack=partial(_protecting, job, is_linked, Compressor.run))
            return _Copied(taken, run, resources.pop_all())

    if background and snapshot == "copy":
        return start_saving(target, named, copy)
    if named is not None:
        wait_for(named)
    if background:
        return start_saving(target, None, pack)
    wait_for(target)
    return compress_object(Compressor.run)


def _member_of(target: Path) -> str:
    """The name of the file that ``target`` is of. Warns of a target that looks like such a file; raises UsageError."""
    member = target.with_suffix(".pt").name
    if not is_unicode(member):
        raise UsageError(f"{target}: is not valid UTF-8, and a container states its name; give another name")
    if target.suffix.lower() in _OTHERS:
        warnings.warn(
            f"{target}: becomes a container, which torch.load cannot read; give it the suffix {CONTAINER}, or read it "
            "with ckpt8.load",
            stacklevel=4,
        )
    return member


def _examine(target: Path, *, force: bool) -> None:
    """Raise OutputError for a target, without links in its path, that is known not to be writable; write nothing."""
    with writing(target):
        AtomicFile.examine(target, force=force, check=any_file)
        if isinstance(target, RemotePath):
            return
        folder = target.parent
        os.stat(os.path.join(folder, ""))  # noqa: PTH116, PTH118 - a directory, and no file
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@dataclass(slots=True)
class _Copied:
    """A copy of an object, and how to save it."""

    snapshot: Snapshot
    compress: Callable[[OpenCheckpoint], Manifest]
    resources: ExitStack

    def write(self) -> Manifest:
        """As ``save`` in the foreground. Raises what that raises."""
        with self.snapshot.checkpoint() as checkpoint:
            return self.compress(checkpoint)

    def close(self) -> None:
        """Free the copy, and let go of what may have become a base."""
        self.resources.close()


def _protecting(
    job: Job, is_linked: bool, run_or_pack: Callable[..., R], compressor: Compressor, *, target: Path, **how: Any
) -> R:
    """``run_or_pack`` the target of ``job``; a save to its base waits for that, unless a link keeps the base."""
    record, is_linked = compressor.base, is_linked and not is_unlinked(target)
    job.base = None if record is None or is_linked else key_of(target.parent / record.path)
    return run_or_pack(compressor, target=target, **how)


def _warn_of_refusal(target: Path, checkpoint: OpenCheckpoint) -> None:
    """Warn of objects that ``ckpt8.load`` will refuse."""
    refusal = refusal_of(checkpoint.file)
    if refusal is None:
        return

    def is_refused(node: object) -> bool:
        return isinstance(node, (Inert, Global)) and node.name in refusal.names

    nodes = iter_nodes(checkpoint.tree, is_leaf=is_refused)
    paths = (format_path(path) or "the object" for path, node in nodes if is_refused(node))
    where = ", ".join(islice(paths, _SHOWN)) or "the object"
    warnings.warn(
        f"{target}: ckpt8.load will refuse it: {where}: {refusal.reason}; save numbers, texts, lists, dicts and "
        "tensors instead, or allow these classes with torch.serialization.add_safe_globals before loading",
        stacklevel=_CALLER,
    )


@without_collection()
def _compress(
    source: Bundle,
    target: Path,
    policy: Policy,
    options: Options,
    asked: Wanted,
    write: Callable[[Compressor], R],
    *,
    live: Mapping[str, torch.UntypedStorage] | None = None,
    device: torch.device | None = None,
    frozen_from: Path | None = None,
) -> R:
    """Plan the codecs of ``source``, choose the base of ``target``, and ``write``.

    Again where the error of the whole file exceeds the budget, and where a chosen base cannot be read.
    """
    measured: Measured | None = None
    damage: str | None = None
    with ExitStack() as saving:
        frozen = None if frozen_from is None else FrozenFile.beside(target, frozen_from, options.threads)
        kept = saving.enter_context(bases_kept(asked, target, packs=frozen is not None and not frozen.is_container))
        while True:
            plan = plan_bundle(source, policy, measured)
            policy.check_rules([path for tensor, _ in plan.tensors for path in tensor.paths])
            try:
                with choose_base(asked, target, source, plan, policy, kept, options.threads, frozen) as (
                    plan,
                    base,
                    reason,
                ):
                    if base is None and reason is not None:
                        log.info("%s: is stored whole: %s", target, reason)
                    measures = options.stats and plan.is_lossy
                    encoder = choose_encoder(source, live or {}, device, measure=measures, base=base)
                    record = None if base is None else base.record(target)
                    result = write(Compressor(source, plan, options, encoder, record, damage or reason))
            except OverBudgetError as exc:
                log.info("%s: exceeds its budget where a sample did not; it is compressed again", target)
                measured, options = exc.measured, replace(options, progress=no_progress)
            except BrokenBaseError as exc:
                if not isinstance(asked, Auto) or asked.begins:
                    raise
                with suppress(Ckpt8Error):
                    if frozen is not None and kept is not None and frozen.mend(kept):
                        continue
                asked, frozen = replace(asked, begins=True), None
                damage = f"a file below it is damaged: {exc}"
                warnings.warn(f"{target}: is stored whole, as {damage}", stacklevel=_CALLER)
            else:
                break
        if isinstance(result, Unwritten):
            result.resources.push(saving.pop_all())
        return result
