"""Decides what ``--force`` may replace and what may be removed: checkpoints.

Removing a directory removes every file in it. So its content must show that it holds a checkpoint, and every file in it
must either be written again under the same path, or have a name that frameworks give to files of one checkpoint. A
directory without any file may be removed too.

Finds the checkpoints in the folder of a run as well: which entries they are, their steps, whether they are complete.
Nothing here reads more than the first bytes of a file.
"""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from ckpt8.checkpoint.meaning.nodes import is_optimizer
from ckpt8.checkpoint.readers import is_text, match_reader
from ckpt8.checkpoint.readers.dcp_metadata import METADATA
from ckpt8.checkpoint.readers.entries import is_named_shard
from ckpt8.checkpoint.tree import iter_nodes
from ckpt8.checkpoint.vocabulary import words
from ckpt8.container import sharded
from ckpt8.container.checks import name_problem
from ckpt8.container.header import CONTAINER, HEAD_BYTES, SUFFIXES, is_container
from ckpt8.container.kept_bases import unneeded_file
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, OutputError, require
from ckpt8.core.files.atomic import SUFFIX as PARTIAL
from ckpt8.core.files.atomic import any_file
from ckpt8.core.files.source_file import ByteRange, Entry, is_folder, open_range, reading, resolved, scan

_MODEL = r"(?:pytorch_|adapter_|diffusion_pytorch_)?model"
_FILES = re.compile(
    "|".join(
        (
            # transformers, diffusers, peft, accelerate
            rf"{_MODEL}(?:[._-](?:fp16|bf16|\d+-of-\d+|\d+))*\.(?:safetensors|bin|pt|pth)(?:\.index\.json)?",
            r"(?:optimizer|scheduler|sampler|scaler|training_args)(?:_\d+)?\.(?:pt|bin)",
            r"rng_state(?:_\d+)?\.pth|(?:random_states|custom_checkpoint)_\d+\.pkl",
            r"(?:\w+_)?config\.json|trainer_state\.json|README\.md|\.gitattributes",
            r"(?:tokenizer|special_tokens_map|added_tokens|vocab|chat_template)\.json|(?:vocab|merges)\.txt",
            r"(?:tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.jinja",
            # torch.distributed.checkpoint, Ckpt8StorageWriter
            rf"\.metadata|__\d+_\d+\.(?:distcp|ckpt8)|{re.escape(sharded.INDEX)}|{sharded.PART}",
            # Lightning, beside the slices of its strategies
            r"meta\.pt",
            # DeepSpeed
            r"[\w-]*mp_rank_\d+[\w-]*_(?:model|optim)_states\.pt|latest|zero_to_fp32\.py",
        )
    )
)
_FOLDERS = re.compile(r"global_step\d+|(?:pytorch_model_fsdp|optimizer)_\d+|ckpt8")


def checkpoint_file(path: Path) -> str:
    """A description of the file at ``path``.

    Raises OutputError unless it is a checkpoint, a container that no other one needs as its base, or empty.
    """
    require(
        _is_checkpoint(path),
        f"{path}: exists and is no checkpoint; to replace it all the same, give its name with -o",
        OutputError,
    )
    return unneeded_file(path)


def no_checkpoint(path: Path) -> str:
    """A description of the file at ``path``, which a report may replace.

    Raises OutputError where it may be a checkpoint or a part of one: it has such a name, or is no text. Raises OSError.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    names_one = is_part(path.name) or is_named_shard(path.name) or path.suffix.lower() in (*SUFFIXES, CONTAINER)
    if head and (names_one or not is_text(head)):
        raise OutputError(f"{path}: may be a checkpoint, and a report never replaces one; give another name")
    return any_file(path)


def checkpoint_directory(written: Collection[str] = ()) -> Callable[[Path], str]:
    """A function that describes the directory at a path. ``written`` are the paths that are written in it again.

    It raises OutputError if the directory may not be replaced, and OSError.
    """

    def check(path: Path) -> str:
        contents = _contents(path, frozenset(written))
        require(
            contents.problem is None,
            f"{path}: {contents.problem}; force=True replaces checkpoints only: remove it, or give another name",
            OutputError,
        )
        return f"{path}: {contents.files:,} files, {contents.nbytes:,} bytes"

    return check


def is_part(name: str) -> bool:
    """Whether frameworks give this name to a file of a checkpoint that has several."""
    return _FILES.fullmatch(name) is not None


def problem_of(path: Path) -> str | None:
    """Why a file or directory may not be removed as a checkpoint, or None. Raises OSError."""
    if path.is_dir():
        return _contents(path, frozenset()).problem
    return None if _is_checkpoint(path) else "it is no checkpoint"


def _contents(path: Path, written: frozenset[str]) -> _Contents:
    """The contents of the directory at ``path``, read again if another run replaces it. Raises OutputError."""
    for _ in range(20):
        with suppress(FileNotFoundError):
            before = path.stat().st_ino
            contents = _Contents(path, written)
            if path.stat().st_ino == before:
                return contents
    raise OutputError(f"{path}: is changed by another run; wait for that")


def _is_checkpoint(path: Path) -> bool:
    """Whether a file begins as a checkpoint or is empty, as after an interrupted save. Raises OSError, OutputError."""
    try:
        with closing(open_range(ByteRange.of(path))) as file:
            return not file.source.length or is_container(path) or match_reader(file) is not None
    except InputError as exc:
        if isinstance(exc.__cause__, OSError):
            raise exc.__cause__ from None
        raise OutputError(str(exc)) from exc


def _is_own_folder(entry: Entry) -> bool:
    """Whether an entry is a folder, and no link to one."""
    return not entry.is_symlink() and entry.is_dir()


class _Contents:
    """The files of a directory and their bytes. ``problem`` is the first reason to keep the directory, or None."""

    def __init__(self, root: Path, written: frozenset[str]) -> None:
        self.files = self.nbytes = 0
        self._written = written
        self._folders = {path[:end] for path in written for end, c in enumerate(path) if c == "/"} | {""}
        self._holds_checkpoint = False
        self.problem = next(self._problems(root), None)

    def _problems(self, root: Path) -> Iterator[str]:
        """Reasons to keep it, found file by file: nobody waits until all of a home directory is read."""
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            by_name = sorted(scan(root / folder), key=lambda entry: entry.name)
            folders = [entry.name for entry in by_name if _is_own_folder(entry)]
            steps = [name for name in folders if name.startswith("global_step")]
            if len(steps) > 1 and not self._folders.issuperset(f"{folder}/{step}".strip("/") for step in steps):
                yield f"holds several checkpoints ({steps[0]!r}, {steps[1]!r})"
            for entry in by_name:
                path = f"{folder}/{entry.name}".lstrip("/")
                if not _is_own_folder(entry):
                    yield from self._look_at(root, entry, path, folder)
                elif (root / path).is_mount():
                    yield f"holds another file system, {path[:80]!r}"
                else:
                    waiting.append(path)
        if self.files and not self._holds_checkpoint:
            yield "holds no checkpoint"

    def _look_at(self, root: Path, entry: Entry, path: str, folder: str) -> Iterator[str]:
        """Count a file. Yields a reason to keep it, if there is one."""
        status = entry.stat(follow_symlinks=False)
        self.files += 1
        self.nbytes += status.st_size
        if stat.S_ISLNK(status.st_mode):
            return  # the file that it leads to stays
        in_known_folder = folder in self._folders or _FOLDERS.fullmatch(folder)
        is_known = path in self._written or (in_known_folder and _FILES.fullmatch(entry.name))
        if not (is_known and stat.S_ISREG(status.st_mode)):
            yield f"holds {path[:80]!r}, which is no part of a checkpoint"
        elif not self._holds_checkpoint and status.st_size:
            self._holds_checkpoint = is_named_shard(entry.name) or _is_checkpoint(root / path)


_NUMBER = r"[-_=.]?(\d{1,18})(?![a-z\d]|\.\d|-of-)"
"""A number after a word: none of ``7b``, ``0.5`` and ``00001-of-00002``."""


def _after(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-z])(?:{words}){_NUMBER}", re.IGNORECASE)


_STEPS = (
    _after(r"(?:global[-_]?)?steps?|iters?|iterations?|itr|updates?"),
    re.compile(r"(?<![a-z\d.])(\d{1,18})[-_]?(?:steps?|iters?|iterations?)(?![a-z])", re.IGNORECASE),
    re.compile(r"(?<![a-z])checkpoint_\d+_(\d{1,18})$"),  # fairseq: epoch and updates
    _after(r"checkpoint|ckpt(?!8(?!\d))|chkpt|batch|ba"),
)
"""The number of a step behind or before a word for it; the first that matches counts."""

_NUMBERED = (
    _after(r"snapshot|model|net|network|weights?|optim|optimizer|saved?|ema_0\.\d+|[gd](?=_)"),
    re.compile(r"(?:^|(?<![a-z])run[-_.])(\d{3,18})$|^(\d{1,18})$", re.IGNORECASE),
)
"""The number of a step in names that writers give to files: ``model_2500``, ``2500``."""

_EPOCH = re.compile(
    r"(?<![a-z])(?:epochs?|ep)[-_=.]?(\d{1,9})(?![a-z\d])|(?<![a-z\d.])(\d{1,9})[-_]?epochs?(?![a-z])"
    r"|(?<![a-z])checkpoint_(\d{1,9})_\d+$",
    re.IGNORECASE,
)
_LONE = re.compile(r"(?<![a-z\d])(\d{1,18})(?![a-z\d])", re.IGNORECASE)
"""A number that is no part of a word."""

_NAMES = frozenset({"best", "checkpoint", "ckpt", "final", "init", "last", "latest", "model", "resume", "snapshot"})
"""Words in the name of a file that is a checkpoint, though it has no number."""

_NUMBERED_PART = re.compile(r"(?:model|optimizer)[._-]?\d+\.\w+")
_OF_ONE = re.compile(
    rf"{re.escape(METADATA)}|{re.escape(sharded.INDEX)}|{sharded.PART}|random_states_\d+\.pkl|.*_optim_states\.pt"
)
"""Files that stand in the folder of one checkpoint only."""

_PART = re.compile(
    r"(?:.*[._-])?(model|adapter|optim|optimizer|scheduler|lr_scheduler|rng|scaler|ema|training_args|recipe_state"
    r"|random_states|zero_pp_rank|consolidated|model_states|optim_states)(?:[._-].*)?"
)
"""Names of the parts of a checkpoint, without the suffix, and what such a part is."""

_SHARD = re.compile(r"-of-\d+|rank_?\d+|random_states_\d+|rng_state_\d+")
_MAY_BE = frozenset({CONTAINER, *SUFFIXES, ".tar", ".model", ""})

_DEEPEST = 3
"""Folders inside a checkpoint: DeepSpeed, Megatron and FSDP have one for a rank or a model."""

TRAINER_STATE = "trainer_state.json"
"""The file in which Trainer keeps step and losses."""

TRAINER_ARGUMENTS = "training_args.bin"
"""The pickle of the arguments of Trainer."""

_TRAINER_FIRST = frozenset({TRAINER_ARGUMENTS, "rng_state.pth", "rng_state_0.pth"})
"""Files of Trainer that no other program writes; ``trainer_state.json`` comes after them."""

_POINTERS = ("latest", "latest_checkpointed_iteration.txt")
"""The files that DeepSpeed and Megatron write beside a checkpoint once it is complete."""

_WHOLE_MODEL = re.compile(rf"{_MODEL}\.(?:safetensors|bin)")
"""Files with all weights, which no index completes."""

_POINTED = re.compile(r"global_step\d+|iter_\d{7}")

_LAST = re.compile(r"last(-v\d+)?\.ckpt")
"""What Lightning calls the file that it resumes from, beside the one of the same step."""


def turn_in_store(path: str) -> int:
    """When the file at a path in a checkpoint is written to a store, where directories grow: the lowest first.

    Last come the files without which programs take a directory for incomplete: the weights, then what says where
    tensors are, then the state of a trainer. All that may come at any time has 0.
    """
    name = path.rpartition("/")[2]
    if name == TRAINER_STATE:
        return 3
    if name in (METADATA, sharded.INDEX, *_POINTERS) or name.endswith(".index.json"):
        return 2
    return 1 if _WHOLE_MODEL.fullmatch(name) is not None else 0


class RunEntry(NamedTuple):
    """A checkpoint in the folder of a run.

    One that ``is_doubtful`` has the name of a part, or one that says nothing. ``skipped``: why it is none.
    """

    path: Path
    is_doubtful: bool = False
    skipped: str | None = None


def bare_name(name: str) -> str:
    """A name without the suffixes of checkpoints and containers."""
    while (path := Path(name)).suffix.lower() in (CONTAINER, *SUFFIXES, ".tar"):
        name = path.stem
    return name


def step_in_name(name: str) -> int | None:
    """The step in the name of a file or directory, as training programs write it; an epoch is none."""
    return _last_number(bare_name(name), (*_STEPS, *_NUMBERED))


def step_in_path(path: str) -> int | None:
    """The step in the name of a file, else in the names of the folders above it, the nearest first."""
    *above, name = path.split("/")
    steps = (step_in_name(name), *(_last_number(folder, _STEPS) for folder in reversed(above)))
    return next((step for step in steps if step is not None), None)


def epoch_in_name(name: str) -> int | None:
    """The epoch in the name of a file or directory."""
    return _last_number(bare_name(name), (_EPOCH,))


def _last_number(text: str, patterns: Iterable[re.Pattern[str]]) -> int | None:
    matches = next(filter(None, (list(pattern.finditer(text)) for pattern in patterns)), None)
    return None if matches is None else int(next(filter(None, matches[-1].groups())))


def is_numbered(name: str) -> bool:
    """Whether a name has a number that stands alone, so that nothing writes under it again and again."""
    text = bare_name(name)
    return any(pattern.search(text) for pattern in (*_STEPS, *_NUMBERED, _EPOCH, _LONE))


def written_once(paths: Iterable[Path]) -> list[Path]:
    """Those that nothing writes again and again, by their names: with a number.

    Where no name has one, those without a word such as ``last``.
    """
    files = list(paths)
    return [path for path in files if is_numbered(path.name)] or [path for path in files if not _has_word(path)]


def _has_word(path: Path) -> bool:
    return not _NAMES.isdisjoint(words(path.stem))


def may_be_checkpoint(name: str) -> bool:
    """Whether a file of this name may be a checkpoint, a container, or a part of one."""
    suffix = os.path.splitext(name)[1]  # noqa: PTH122 - a name is no path
    return suffix in _MAY_BE or suffix[1:].isdigit()


def is_one_checkpoint(names: Iterable[str]) -> bool:
    """Whether one of the files in a folder shows that the folder is one checkpoint."""
    return any(map(_OF_ONE.fullmatch, names))


def parts_in(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of the files in a folder that are one checkpoint together; none if each is one of its own.

    They are parts by their names, such as ``model.safetensors`` and ``optimizer.pt``. Where several are a model, or
    several an optimizer, each is a file of its own, unless it is a shard. So are all where training goes on from the
    model alone, since the state of its optimizer is in it.
    """
    names = list(names)
    roles: dict[str, str] = {}
    variants = defaultdict[str, set[str]](set)
    for name in names:
        stem = os.path.splitext(name)[0]  # noqa: PTH122 - a name is no path
        if may_be_checkpoint(name) and (match := _PART.fullmatch(stem)) is not None:
            roles[name] = match[1]
            if not _SHARD.search(name):
                variants[match[1]].add(stem)
    parts = [name for name, role in roles.items() if len(variants[role]) < 2]
    are_apart = TRAINER_STATE not in names and (
        len(set(map(bare_name, parts))) < 2
        or any(roles[name] == "model" and _is_whole(folder / name) for name in parts)
    )
    return [] if are_apart else parts


def _is_whole(path: Path) -> bool:
    """Whether a file holds weights and the state of their optimizer."""
    try:
        if is_container(path):
            with ContainerReader(path) as container:
                return bool(container.manifest.parameters)
        with closing(open_range(ByteRange.of(path))) as file:
            reader = match_reader(file)
            nodes = () if reader is None else iter_nodes(reader.read(file).tree)
            return any(is_optimizer(node) for at, node in nodes if at)
    except InputError:
        return False


def checkpoints_in(folder: Path) -> list[RunEntry]:
    """The raw checkpoints in a folder, by name, and what looks like one and is skipped. Raises InputError.

    A hidden entry, a container and what ranks have packed are neither. A folder that is one checkpoint has none.
    """
    require(
        not folder.exists() or folder.is_dir(),
        f"{folder}: is no folder; give the folder of a run, or use ckpt8 compress for one checkpoint",
    )
    with reading(folder):
        paths = sorted(folder.iterdir())
        names = [path.name for path in paths if path.is_file()]
        if is_one_checkpoint(names):
            return []
        parts = set(parts_in(folder, filter(_is_visible, names)))
        return [run_entry for path in paths if (run_entry := _run_entry(path, parts)) is not None]


def run_in(folder: Path) -> list[str]:
    """The names of the checkpoints and containers in a folder, if it is that of a run; else none. Raises InputError.

    It is one where they are of several steps or epochs, or where there are containers among them.
    """
    raw = [path.path.name for path in checkpoints_in(folder) if not path.is_doubtful and path.skipped is None]
    others = (path for path in folder.iterdir() if re.fullmatch(sharded.RANK_FILE, path.name) is None)
    packed = [path.name for path in others if _is_visible(path.name) and is_container(path)]
    steps = {(step_in_name(name), epoch_in_name(name)) for name in (*raw, *packed)} - {(None, None)}
    return sorted((*raw, *packed)) if raw and (packed or len(steps) > 1) else []


def packed_in(folder: Path) -> list[str]:
    """The names of the directories in a folder that ranks have packed, as a whole or with other files around that."""
    try:
        return sorted(
            path.name for path in folder.iterdir() if _is_visible(path.name) and path.is_dir() and _is_packed(path)
        )
    except OSError:
        return []


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(PARTIAL)


def _is_packed(path: Path) -> bool:
    return any(name == sharded.INDEX or sharded.is_part(name) for _, name in _files(path))


def _run_entry(path: Path, parts: Collection[str]) -> RunEntry | None:
    if not _is_visible(path.name) or path.name.endswith(CONTAINER):
        return None
    is_directory = path.is_dir()
    if is_directory:
        is_one = _is_checkpoint_directory(path) and not _is_packed(path)
    else:
        is_one = path.is_file() and (is_named_shard(path.name) or _is_file_of_one(path))
    if not is_one:
        return None
    if path.is_symlink():
        return RunEntry(path, skipped="it is a link")
    if path.name in parts or is_named_shard(path.name):
        return RunEntry(path, skipped="it is a part of a checkpoint of several files")
    has_part_name = is_part(path.name) and _NUMBERED_PART.fullmatch(path.name) is None
    return RunEntry(path, not is_directory and (has_part_name or not (is_numbered(path.name) or _has_word(path))))


def _is_file_of_one(path: Path) -> bool:
    """Whether a file is a checkpoint, or has the name of one and may be damaged."""
    # Other files have the suffix .bin, too.
    is_named = path.suffix.lower() in {*SUFFIXES} - {".bin"}
    return not is_container(path) if is_named else _is_known(path)


def _is_known(path: Path) -> bool:
    with suppress(InputError), closing(open_range(ByteRange.of(path))) as file:
        return match_reader(file) is not None
    return False


def _is_checkpoint_directory(path: Path) -> bool:
    """Whether a directory holds the files of one checkpoint: by their names, or by its own name and their content."""
    has_step = any(pattern.search(path.name) for pattern in (*_STEPS, _EPOCH))
    return any(
        is_named_shard(name)
        or ((is_part(name) or (has_step and not is_numbered(name))) and _is_known(path / folder / name))
        for folder, name in _files(path)
    )


def _files(root: Path) -> Iterator[tuple[str, str]]:
    """Folder and name of the files in a directory and a few levels below."""
    waiting = ["."]
    for inside in waiting:
        try:
            entries = sorted(scan(root / inside), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if not is_folder(entry):
                yield inside, entry.name
            elif not entry.is_symlink() and len(Path(inside).parts) < _DEEPEST:
                waiting.append(str(Path(inside, entry.name)))


def incomplete(path: Path) -> str | None:
    """Why the program that writes a checkpoint has not finished it, from its own files; None where nothing says so."""
    if not path.is_dir():
        return None
    if (problem := _not_pointed_at(path)) is not None:
        return problem
    files = set(_files(path))
    at_top = {name for folder, name in files if folder == "."}
    if not at_top.isdisjoint(_TRAINER_FIRST) and TRAINER_STATE not in at_top:
        return f"it has no {TRAINER_STATE} yet"
    described = {folder for folder, name in files if name == METADATA}
    shards = (Path(folder) for folder, name in files if is_named_shard(name))
    if any(described.isdisjoint(map(str, (folder, ".", *folder.parents))) for folder in shards):
        return f"its shards have no {METADATA} yet"
    tags = {folder for folder, _ in files if _POINTED.fullmatch(folder)}
    return next((problem for tag in sorted(tags) if (problem := _not_pointed_at(path / tag)) is not None), None)


def asked_for(folder: Path) -> Callable[[Path], str | None]:
    """A function that says why a resume asks for a path in a folder under this name; None where nothing says so.

    Links lead there, the pointers of DeepSpeed and Megatron name it, also once it is a container, or it is the
    ``last.ckpt`` of Lightning. Raises InputError.
    """
    named: dict[Path, str] = {}
    with reading(folder):
        for path in folder.iterdir():
            if path.is_symlink():
                named[resolved(path)] = f"{path.name} leads to it"
            elif _LAST.fullmatch(path.name):
                named[resolved(path)] = "Lightning resumes from this name"
            if path.name in _POINTERS and path.is_file():
                name = _pointed_at(path)
                names = {name, f"iter_{int(name):07}" if name.isdecimal() else name}
                for target in filter(lambda name: name_problem(name) is None, names):
                    place = resolved(folder / target)
                    named |= dict.fromkeys((place, place.with_name(place.name + CONTAINER)), f"{path.name} names it")

    def reason(path: Path) -> str | None:
        place = resolved(path)
        return next((why for target, why in named.items() if place in (target, *target.parents)), None)

    return reason


def _pointed_at(pointer: Path) -> str:
    """What a pointer of DeepSpeed or Megatron names. Raises OSError."""
    return pointer.read_bytes()[:200].decode(errors="replace").strip()


def _not_pointed_at(path: Path) -> str | None:
    """Why a folder of DeepSpeed or Megatron is not complete: its pointer is older than its files, and names another."""
    pointers = _POINTERS if _POINTED.fullmatch(path.name) is not None else ()
    try:
        for pointer in [place for place in map(path.with_name, pointers) if place.is_file()]:
            named = _pointed_at(pointer)
            newest = max((path / folder / name).lstat().st_mtime_ns for folder, name in _files(path))
            is_named = named == path.name or (named.isdecimal() and int(named) == step_in_name(path.name))
            if not is_named and pointer.stat().st_mtime_ns < newest:
                return f"{pointer.name} does not name it yet"
    except (OSError, ValueError):
        return "its files change"
    return None
