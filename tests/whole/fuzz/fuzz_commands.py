"""What reads a container, and what must hold of it.

A command ends with an error that the guide documents for it, writes to its output alone, and changes no source. Of an
edited container it gives what it gave before the edit, or ``verify`` says so: its seal is valid, its content is not.
What is compressed comes back byte for byte where nothing lossy is asked for, and always in the same length.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from fuzz_checkpoints import (
    FIXTURES,
    distributed_seeds,
    make_tree,
    mixed,
    network,
    objects,
    run_of,
    saved,
    small_tree,
    train,
    written,
)
from fuzz_containers import ROOM, edit_blindly, edit_by_grammar
from hostile_kit import unpack
from rich.console import Console

import ckpt8
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.cli.show.inspect import show
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container.bases import looked_for_in
from ckpt8.core.errors import CheckFailedError, Ckpt8Error, InputError, OutputError, UsageError
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container

GOLDEN = FIXTURES / "golden"
"""Where the bases of deltas are."""
MAX_MESSAGE = 2000
"""Characters of a message: one line that a person can read."""
REFUSED = "refused"


class BrokenError(Exception):
    """A promise that does not hold, other than by an exception."""


def attempt(action, *allowed):
    """The result, or REFUSED for an error of the ``allowed`` classes. Any other exception goes on."""
    try:
        return action()
    except Ckpt8Error as exc:
        text = str(exc)
        if not text or "\n" in text or len(text) > MAX_MESSAGE:
            kind = type(exc).__name__
            raise BrokenError(f"the message of {kind} is {len(text)} characters long: {text[:200]!r}") from exc
        if not isinstance(exc, allowed):
            raise BrokenError(f"{type(exc).__name__} is no error of this command: {exc}") from exc
        return REFUSED


def digest(value, above=()):
    """What tells two loaded objects apart: types and plain values, and for tensors their layout and their bytes."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.numel() > 1 << 20 or value.is_meta or "q" in str(value.dtype):
            stride = value.stride() if value.layout is torch.strided else ""
            return str((value.layout, value.dtype, value.shape, stride))
        flat = torch.empty(value.numel(), dtype=value.dtype).view(value.shape).copy_(value.detach()).reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()
    if id(value) in above:
        return "itself"
    inside = (*above, id(value))
    if isinstance(value, dict):
        return type(value).__name__, [(digest(key), digest(item, inside)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [digest(item, inside) for item in value]
    if isinstance(value, torch.nn.Module):
        return digest(value.state_dict())
    return f"{type(value).__name__} {value!r}" if isinstance(value, (str, bytes, int, float)) else type(value).__name__


def content_of(path):
    """The bytes of a file, or everything below a directory: bytes, targets of links, None for directories."""
    if not path.is_dir():
        return path.read_bytes()
    found = {}
    for below in sorted(path.rglob("*")):
        is_directory = below.is_dir() and not below.is_symlink()
        content = str(below.readlink()) if below.is_symlink() else None if is_directory else below.read_bytes()
        found[str(below.relative_to(path))] = content
    return found


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {
    "os.mkdir": 1, "os.rename": 2, "os.link": 2, "os.remove": 1, "os.rmdir": 1, "os.truncate": 1, "os.chmod": 1,
    "shutil.rmtree": 1, "os.chown": 1, "os.utime": 1,
}  # fmt: skip
"""Names of audit events with the number of their first arguments that are paths. A link may point anywhere."""
_allowed, _outside = [], []


def _audit(event, arguments):
    if not _allowed:
        return
    paths = arguments[1:2] if event == "os.symlink" else arguments[: _EVENTS.get(event, 0)]
    if event == "open":
        path, mode, flags = arguments
        writes = flags & _WRITES if isinstance(flags, int) else isinstance(mode, str) and set(mode) & set("wxa+")
        paths = (path,) if writes else ()
    for path in paths:
        if isinstance(path, (str, bytes, os.PathLike)):
            text = os.fsdecode(path)
            # A relative path is one of a directory that is open; it must not lead up.
            inside = not text.startswith("/") or os.path.normpath(text).startswith((*_allowed, "/dev/null"))
            if not inside or ".." in text.split("/"):
                _outside.append(text[:200])


_hook = cache(sys.addaudithook)


@contextlib.contextmanager
def writes_only_in(folder):
    """Yield the paths outside of ``folder`` that the body writes, makes, renames or removes."""
    _hook(_audit)
    _outside.clear()
    _allowed.append(str(folder.resolve()))
    try:
        yield _outside
    finally:
        _allowed.pop()


@contextlib.contextmanager
def temporary_in(folder):
    """Temporary files lie in ``folder``, and none is left at the end."""
    before, own = tempfile.tempdir, folder / "temporary"
    own.mkdir(exist_ok=True)
    tempfile.tempdir = str(own)
    try:
        yield
    finally:
        tempfile.tempdir = before
    if list(own.iterdir()):
        raise BrokenError("leaves temporary files")


@contextlib.contextmanager
def output_beside(path):
    """A folder for output, beside which nothing may appear."""
    folder = path.parent / "out"
    folder.mkdir()
    (path.parent / "originals").mkdir(exist_ok=True)
    before = sorted(path.parent.iterdir())
    try:
        yield folder
        if sorted(path.parent.iterdir()) != before:
            raise BrokenError("leaves something beside its output")
    finally:
        shutil.rmtree(folder)


# Containers of every kind


@dataclass(frozen=True)
class Kind:
    """A valid container and what it was made from: None where nobody has that, and there is nothing to compare with."""

    name: str
    content: bytes
    original: bytes | dict | None
    results: dict = field(default_factory=dict)

    def write_original(self, folder):
        """The original as a file or directory in ``folder``."""
        if self.original is None:
            return None
        path = folder / "originals" / self.name.replace(" ", "-")
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(self.original) if isinstance(self.original, bytes) else make_tree(path, self.original)
        return path


def _tied():
    """One storage under several names, transposed and cut."""
    run = run_of(torch.optim.SGD, momentum=0.9)
    weight, ones = run["model"]["0.weight"], torch.ones(2) * 1j
    run["model"] |= {"head.weight": weight, "row": weight[3], "t": weight.t(), "c": ones, "conj": ones.conj()}
    return run


def _many_small():
    """So many small tensors that they share entries."""
    model = torch.nn.ModuleList(torch.nn.Linear(3, 2) for _ in range(20))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.stack([layer(torch.ones(3)).sum() for layer in model]).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _sources():
    """Name, source, and options for ``compress``."""
    adamw = torch.optim.AdamW
    run = {**run_of(adamw), "room": ROOM}
    rules = ["*.w=split24", "*.exp_avg=companded8", "*.exp_avg_sq=companded8(signed=False, Q=63, p=0.5)"]
    yield "file", saved(run), {}
    yield "small", saved({**objects()["run"], "room": ROOM}), {"rules": rules}
    yield "compact", saved(run_of(adamw, amsgrad=True)), {"preset": "compact"}
    yield "budget", saved(run), {"budget": 1}
    yield "budget of masters", saved(mixed()), {"budget": 7}
    yield "legacy", saved(run, _use_new_zipfile_serialization=False), {}
    yield "lossless", saved(objects()["typed"]), {"preset": "lossless"}
    yield "objects", saved({**objects()["objects"], "room": ROOM}), {}
    yield "safetensors", written()["safetensors"]["optimizer"], {}
    yield "directory", small_tree(), {}
    yield "tied", saved(_tied()), {}
    yield "masters", saved(mixed()), {}
    yield "packed", saved(run_of(ckpt8.optim.AdamW)), {}
    yield "shared", saved(_many_small()), {}
    for number, tree in enumerate(distributed_seeds()):
        yield f"dcp {number}", tree, {}


@cache
def kinds():
    """All of them."""
    found = []
    with TemporaryDirectory() as scratch, looked_for_in([GOLDEN]):
        folder = Path(scratch)
        packed = folder / "x.ckpt8"
        for number, (name, source, options) in enumerate(_sources()):
            path = folder / f"source {number}"
            path.write_bytes(source) if isinstance(source, bytes) else make_tree(path, source)
            ckpt8.compress(path, packed, threads=1, force=True, **options)
            found.append(Kind(name, packed.read_bytes(), content_of(path)))
        ckpt8.save(run_of(torch.optim.AdamW), packed, force=True)
        found.append(Kind("saved", packed.read_bytes(), None))
    for path in sorted(GOLDEN.glob("*.ckpt8")):
        source = FIXTURES / "inputs" / f"{path.name.partition('.')[0]}.pt"
        found.append(Kind(path.stem, path.read_bytes(), source.read_bytes() if source.exists() else None))
    assert {unpack(kind.content)[2]["version"] for kind in found} >= {f"1.{minor}" for minor in range(8)}
    return tuple(found)


@dataclass(frozen=True)
class Edited:
    """A container, and the kind that it was."""

    kind: Kind
    content: bytes


def edited(rng, *, blindly):
    """A container of some kind, mostly a small one, with edits."""
    small = [kind for kind in kinds() if len(kind.content) < 1 << 16]
    kind, other = rng.choice(small if rng.random() < 0.9 else kinds()), rng.choice(small)
    content = edit_blindly(rng, kind.content, other.content) if blindly else edit_by_grammar(rng, kind.content)
    return Edited(kind, content)


# Commands: what each gives of a container, or REFUSED


def _restore(path, folder, kind):
    found = attempt(lambda: ckpt8.restore(path, folder / "back", threads=1), InputError, OutputError)
    return _only(folder, found, "back")


def _only(folder, found, name):
    """What is in ``folder``: nothing where a command was refused, else its output alone."""
    left = [entry.name for entry in folder.iterdir()]
    if left != ([] if found is REFUSED else [name]):
        raise BrokenError(f"a command leaves {left}")
    return REFUSED if found is REFUSED else content_of(folder / name)


def _salvage(path, folder, kind):
    found = attempt(lambda: ckpt8.restore(path, folder / "back", salvage=True, threads=1), InputError, OutputError)
    if found is REFUSED:
        return _only(folder, found, "")
    json.dumps(found.to_json(), allow_nan=False)
    if any("\n" in line for line in found.lines()):
        raise BrokenError(f"salvage says {found.lines()[:3]}")
    content = _only(folder, found, found.path.name)
    return content if found.complete else REFUSED


def _inspect(path, folder, kind):
    is_source, full = kind is None, len(kind.content if kind else path.name) % 2 == 0
    look = inspect_checkpoint if is_source else inspect_container
    facts = attempt(lambda: look(path, tensors=True, full=full), InputError)
    if facts is not REFUSED:
        json.dumps(facts, allow_nan=False)
        show(Console(file=io.StringIO(), width=120, force_terminal=True), facts)
    return REFUSED


def _load(path, folder, kind):
    """Every member that is a checkpoint, by its place in the manifest."""

    def members():
        with ckpt8.open(path) as file:
            return [member.path for member in file.manifest.members][:10]

    names = attempt(members, InputError)
    if names is REFUSED:
        return REFUSED
    # UsageError: this member is no checkpoint.
    loads = [partial(ckpt8.load, path, member=name, threads=1) for name in names]
    found = [attempt(lambda load=load: digest(load()), InputError, UsageError) for load in loads]
    return REFUSED if REFUSED in found else found


def _unpack(path, folder, kind):
    return attempt(lambda: digest(ckpt8.load(path, threads=1, unpack=True)), InputError, UsageError)


def _tensors(path, folder, kind):
    """The tensors one by one, as a reader of a part gets them."""
    found = {}

    def read():
        with ckpt8.open(path) as file:
            for name in file.keys()[:30]:
                file.stats(name)
                tensor = attempt(lambda name=name: file.get_tensor(name), InputError)
                if tensor is not REFUSED and tensor.numel() < 1 << 20:
                    found[name] = digest(tensor)
        return found

    return attempt(read, InputError)


def _diff(path, folder, kind):
    unedited = folder / "unedited.ckpt8"
    unedited.write_bytes(kind.content)
    found = attempt(lambda: ckpt8.diff(path, unedited, threads=1), InputError)
    if found is REFUSED:
        return REFUSED
    json.dumps(found.to_json(), allow_nan=False)
    return found.identical


def _resume(path, folder, kind):
    model, optimizer = train(ckpt8.optim.AdamW if kind.name == "packed" else torch.optim.AdamW)
    return resumed(path, model, optimizer)


def resumed(path, model, optimizer, **options):
    """Load a checkpoint into a model and an optimizer: all of it or nothing."""
    before = digest([model.state_dict(), optimizer.state_dict()])
    resume = partial(ckpt8.resume, path, model=model, optimizer=optimizer, **options)
    found = attempt(lambda: digest(resume()), InputError, UsageError)
    after = digest([model.state_dict(), optimizer.state_dict()])
    if found is REFUSED and after != before:
        raise BrokenError("a refused resume changes the model or the optimizer")
    return REFUSED if found is REFUSED else (after, found)


def _against(path, folder, kind):
    original = kind.write_original(path.parent)
    if original is None:
        return REFUSED
    steps = int(len(path.read_bytes()) % 3 == 0)
    verify = partial(ckpt8.verify, path, original, threads=1, resume_steps=steps)
    found = attempt(verify, InputError, CheckFailedError, UsageError)
    if found is not REFUSED:
        json.dumps([found.resume, found.failures])
        if not found.failures:
            _check_stated(path, folder, kind)
    return REFUSED


def _check_stated(path, folder, kind):
    """Raise BrokenError for a figure that holds no more, though ``verify`` has measured it."""
    unedited = folder / "unedited"
    unedited.write_bytes(kind.content)
    stated, known = _stated(path), _stated(unedited)
    for place, figure in stated.items():
        if figure is not None and known.get(place) is not None and not math.isclose(figure, known[place], rel_tol=1e-8):
            raise BrokenError(f"{kind.name}: verify accepts {figure!r} for {known[place]!r} as {place}")


def _stated(path):
    """The figures of errors and rules by the names of storages and parameters."""
    with ckpt8.open(path) as file:
        records = (*file.manifest.storages, *file.manifest.parameters)
    return {
        (record.name, name, key): value if abs(value) < 1e300 else None
        for record in records
        for name in ("error", "rule")
        for key, value in (getattr(record, name, None) or {}).items()
        if type(value) in (int, float)
    }


def _convert(to):
    def command(path, folder, kind):
        name = {"torch": "x.pt", "safetensors": "x.safetensors"}.get(to, "x")
        convert = partial(ckpt8.convert, path, folder / name, to=to, threads=1)
        return _only(folder, attempt(convert, InputError, UsageError, OutputError), name)

    return command


COMMANDS = {
    "restore": _restore, "salvage": _salvage, "inspect": _inspect, "load": _load, "unpack": _unpack,
    "tensors": _tensors, "diff": _diff, "resume": _resume, "against": _against,
    **{f"to {to}": _convert(to) for to in ("torch", "safetensors", "dcp", "flashoptim", "trainer")},
}  # fmt: skip
"""What each gives is compared with what it gave before the edit, but for REFUSED."""


def run_edited(path, rng, edited):
    """Two or three commands; whether the first of them, which is ``verify``, accepts the container."""
    with (
        warnings.catch_warnings(),
        looked_for_in([GOLDEN]),
        temporary_in(path.parent),
        writes_only_in(path.parent) as outside,
    ):
        warnings.simplefilter("ignore")
        good = attempt(lambda: ckpt8.verify(path, threads=1), InputError) is not REFUSED
        names = rng.sample(list(COMMANDS), rng.choice((1, 1, 2)))
        differing = [name for name in names if not _same(path, edited.kind, name)]
        original = edited.kind.write_original(path.parent) if differing else None
        if original is not None:
            found = attempt(lambda: ckpt8.verify(path, original, threads=1), InputError, CheckFailedError)
            if found is not REFUSED and not found.failures:
                raise BrokenError(f"{edited.kind.name}: {differing} give something else, and verify accepts it")
    if outside:
        raise BrokenError(f"writes {outside[:3]}")
    if path.read_bytes() != edited.content:
        raise BrokenError("the source is changed")
    return good


def _same(path, kind, name):
    """Whether a command is refused, or gives what it gave before the edit."""
    with output_beside(path) as folder:
        found = COMMANDS[name](path, folder, kind)
    if found is REFUSED:
        return True
    if name not in kind.results:
        unedited = path.with_name("unedited")
        unedited.write_bytes(kind.content)
        with output_beside(path) as folder:
            kind.results[name] = COMMANDS[name](unedited, folder, kind)
        unedited.unlink()
    return found == kind.results[name]


def read_source(path, rng, _):
    """Open a checkpoint and plan it; of one in fifty that opens do all the rest, there and back."""

    def look():
        with open_source(path, containers=False) as source:
            plan_bundle(source, Policy.of(rng.choice(("flash", "archive"))))

    if attempt(look, Ckpt8Error) is REFUSED:
        return False
    if rng.random() < 0.02:
        there_and_back(path, rng, None)
    return True


def resume_source(path, rng, _):
    """Load a checkpoint into a model and an optimizer of one kind or another."""
    model, optimizer = network(rng.choice((torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam)))
    return resumed(path, model, optimizer, strict=rng.random() < 0.7) is not REFUSED


def there_and_back(path, rng, _):
    """Compress, verify, restore, and one more command; whether the source was read."""
    preset = rng.choice(("lossless", "lossless", "flash", "compact", "archive"))
    rules = ((), (), ("*=lossless",), ("*w*=split24", "*=lossless"), ("*exp_avg=companded8",), ("*=split32",))
    options = {"preset": preset, "rules": rng.choice(rules), "threads": 1}
    before = content_of(path)
    with warnings.catch_warnings(), output_beside(path) as folder:
        warnings.simplefilter("ignore")
        packed = folder / "x.ckpt8"
        if rng.random() < 0.15:
            _inspect(path, folder, None)
        # UsageError: a rule that fits nothing, or a codec that does not hold what it is given.
        errors = InputError, UsageError, OutputError
        made = attempt(lambda: ckpt8.compress(path, packed, **options), *errors)
        if made is REFUSED:
            if list(folder.iterdir()) or content_of(path) != before:
                raise BrokenError("a refused compression leaves or changes something")
            return False
        lossy = {record.codec["id"] for record in made.storages} - {"lossless/1", "split32/1", "reference/1"}
        found = ckpt8.verify(packed, path, threads=1)
        if found.failures:
            raise BrokenError(f"what was just compressed does not verify: {found.failures[0]}")
        after = content_of(ckpt8.restore(packed, folder / "back", threads=1))
        if not lossy and after != before:
            raise BrokenError("what is lossless comes back otherwise")
        if _sizes(after) != _sizes(before) or content_of(path) != before:
            raise BrokenError("what comes back has other files or lengths, or the source is changed")
        _look(path, packed, rng, before, lossless=not lossy)
    return True


def _sizes(content):
    if isinstance(content, dict):
        return {name: each if each is None else len(each) for name, each in content.items()}
    return len(content)


def _look(path, packed, rng, original, *, lossless):
    """One more command on the container or on its source."""
    kind, how = Kind("source", packed.read_bytes(), original), rng.randrange(12)
    if how <= 6:
        name = rng.choice(list(COMMANDS))
        source = path if name.startswith("to ") and how <= 3 else packed
        with TemporaryDirectory(dir=packed.parent) as folder:
            found = COMMANDS[name](source, Path(folder), kind)
        if name == "load" and path.is_file():
            _check_loaded(path, found, lossless=lossless)
    elif how == 7 and lossless:
        found = attempt(lambda: ckpt8.diff(packed, path, threads=1), InputError)
        if found is not REFUSED and not found.identical:
            raise BrokenError("a lossless container differs from its source")
    elif how == 8 and path.is_file():
        _check_saved(path, packed.with_name("saved.ckpt8"))
    elif how <= 10:
        made = train(rng.choice((torch.optim.AdamW, torch.optim.SGD, ckpt8.optim.AdamW)))
        resumed(packed, *made, strict=rng.random() < 0.6)


def _check_loaded(path, found, *, lossless):
    """What torch loads, ckpt8 loads too."""
    try:
        expected = torch.load(path, weights_only=True)
    except Exception:
        return
    if found is REFUSED or (lossless and found != [digest(expected)]):
        raise BrokenError(f"torch loads the source, ckpt8 {'refuses it' if found is REFUSED else 'something else'}")


def _check_saved(path, target):
    """An object in memory: saved and loaded, or refused."""
    try:
        value = torch.load(path, weights_only=False)
        torch.save(value, io.BytesIO())
    except Exception:
        return
    save = partial(ckpt8.save, value, target, preset="lossless", threads=1)
    if attempt(save, InputError, UsageError, OutputError) is REFUSED:
        if target.exists():
            raise BrokenError("a refused save leaves something behind")
        return
    loaded = attempt(lambda: ckpt8.load(target, threads=1), InputError)
    if loaded is not REFUSED and digest(loaded) != digest(value):
        raise BrokenError("what was saved loads as something else")
