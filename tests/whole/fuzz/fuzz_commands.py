"""The target ``manifest``: containers edited by grammar, and everything that reads one.

A command ends with an error that the guide documents for it, or what it gives equals what the container gave before the
edit. A difference is no finding where ``verify`` says so: the seal of an edited container is valid, its content is not.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fuzz_checks import REFUSED, BrokenError, attempt, digest, silent
from fuzz_container import pack, unpack
from fuzz_kinds import GOLDEN, Kind, kinds, train
from fuzz_manifest import edit_manifest
from fuzz_skeleton import edit_skeleton
from fuzz_watch import content_of, writes_only_in

import ckpt8
from ckpt8.cli.show.inspect import show
from ckpt8.container.bases import looked_for_in
from ckpt8.core.errors import CheckFailedError, InputError, OutputError, UsageError
from ckpt8.inspecting.container import inspect_container


@dataclass(frozen=True)
class Edited:
    """A container, the kind that it was, and whether its frames or its members' skeletons are edited."""

    kind: Kind
    content: bytes


def mutate(rng: random.Random) -> Edited:
    """A container of some kind with edits of its manifest, of its entries and of its skeletons."""
    small = [kind for kind in kinds() if len(kind.content) < 1 << 16]
    kind = rng.choice(small if rng.random() < 0.9 else kinds())
    metadata, entries, manifest = unpack(kind.content)
    if rng.random() < 0.25:
        manifest, entries = json.loads(json.dumps(manifest)), dict(entries)
        edit_skeleton(rng, manifest, entries)
        if rng.random() < 0.7:
            return Edited(kind, pack(metadata, entries, manifest))
    manifest, entries = edit_manifest(rng, manifest, entries)
    return Edited(kind, pack(metadata, entries, manifest))


def run(path: Path, rng: random.Random, edited: Edited) -> bool:
    """Two or three commands; whether the first of them, which is ``verify``, accepts the container."""
    reader = Reader(path, edited.kind)
    with (
        warnings.catch_warnings(),
        looked_for_in([GOLDEN]),
        temporary_in(path.parent),
        writes_only_in(path.parent) as outside,
    ):
        warnings.simplefilter("ignore")
        good = attempt(lambda: ckpt8.verify(path, threads=1), InputError) is not REFUSED
        names = rng.sample(list(COMMANDS), rng.choice((1, 1, 2)))
        differing = [name for name in names if not reader.same(name)]
        if differing and not reader.verify_objects():
            raise BrokenError(f"{edited.kind.name}: {differing} give something else, and verify accepts it")
    if outside:
        raise BrokenError(f"writes {outside[:3]}")
    if path.read_bytes() != edited.content:
        raise BrokenError("the source is changed")
    return good


@contextmanager
def temporary_in(folder: Path) -> Iterator[None]:
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


class Reader:
    """Runs commands on an edited container and compares their results with those of the unedited one."""

    def __init__(self, path: Path, kind: Kind) -> None:
        self.path, self.kind, self.folder = path, kind, path.parent / "out"

    def same(self, name: str) -> bool:
        """Whether a command is refused, or gives what it gave before the edit."""
        command, compared = COMMANDS[name]
        with self.output():
            found = command(self.path, self.folder, self.kind)
        if found is REFUSED or not compared:
            return True
        if name not in self.kind.cache:
            self.kind.cache[name] = self._unedited(command)
        return bool(found == self.kind.cache[name])

    def _unedited(self, command: Callable[..., Any]) -> Any:
        path = self.path.with_name("unedited")
        path.write_bytes(self.kind.content)
        with self.output():
            found = command(path, self.folder, self.kind)
        path.unlink()
        return found

    @contextmanager
    def output(self) -> Any:
        """A folder for output, beside which nothing may appear."""
        self.folder.mkdir()
        (self.path.parent / "originals").mkdir(exist_ok=True)
        before = sorted(self.path.parent.iterdir())
        try:
            yield
            if sorted(self.path.parent.iterdir()) != before:
                raise BrokenError("leaves something beside its output")
        finally:
            shutil.rmtree(self.folder)

    def verify_objects(self) -> bool:
        """Whether ``verify`` says that this is not what the original was; True where there is no original."""
        original = self.kind.write_original(self.path.parent)
        if original is None:
            return True
        found = attempt(lambda: ckpt8.verify(self.path, original, threads=1), InputError, CheckFailedError)
        return found is REFUSED or bool(found.failures)


def _restore(path: Path, folder: Path, kind: Kind) -> Any:
    found = attempt(lambda: ckpt8.restore(path, folder / "back", threads=1), InputError, OutputError)
    left = [entry.name for entry in folder.iterdir()]
    if left != ([] if found is REFUSED else ["back"]):
        raise BrokenError(f"restore leaves {left}")
    return REFUSED if found is REFUSED else content_of(folder / "back")


def _salvage(path: Path, folder: Path, kind: Kind) -> Any:
    found = attempt(lambda: ckpt8.restore(path, folder / "back", salvage=True, threads=1), InputError, OutputError)
    left = sorted(entry.name for entry in folder.iterdir())
    if found is REFUSED:
        if left:
            raise BrokenError(f"salvage leaves {left}")
        return REFUSED
    json.dumps(found.to_json(), allow_nan=False)
    if any("\n" in line for line in found.lines()) or left != [found.path.name]:
        raise BrokenError(f"salvage gives {left} and {found.lines()[:3]}")
    return content_of(found.path) if found.complete else REFUSED


def _inspect(path: Path, folder: Path, kind: Kind) -> Any:
    facts = attempt(lambda: inspect_container(path, tensors=True), InputError)
    if facts is not REFUSED:
        json.dumps(facts, allow_nan=False)
        show(silent(), facts)
    return facts


def _survey(path: Path, folder: Path, kind: Kind) -> Any:
    facts = attempt(lambda: inspect_container(path, full=True), InputError)
    if facts is not REFUSED:
        json.dumps(facts, allow_nan=False)
    return facts


def _load(path: Path, folder: Path, kind: Kind) -> Any:
    """Every member that is a checkpoint, by its place in the manifest."""
    found: list[Any] = []

    def each() -> None:
        with ckpt8.open(path) as file:
            members = [member.path for member in file.manifest.members]
        for member in members[:10]:
            # UsageError: this member is no checkpoint.
            one = attempt(lambda member=member: ckpt8.load(path, member=member, threads=1), InputError, UsageError)
            found.append(one if one is REFUSED else digest(one))

    return REFUSED if attempt(each, InputError) is REFUSED or REFUSED in found else found


def _unpack(path: Path, folder: Path, kind: Kind) -> Any:
    found = attempt(lambda: ckpt8.load(path, threads=1, unpack=True), InputError, UsageError)
    return REFUSED if found is REFUSED else digest(found)


def _tensors(path: Path, folder: Path, kind: Kind) -> Any:
    """The tensors one by one, as a reader of a part gets them."""
    found: dict[str, Any] = {}

    def each() -> None:
        with ckpt8.open(path) as file:
            for name in file.keys()[:30]:
                file.stats(name)
                tensor = attempt(lambda name=name: file.get_tensor(name), InputError)
                if tensor is not REFUSED and tensor.numel() < 1 << 20:
                    found[name] = digest(tensor)

    return REFUSED if attempt(each, InputError) is REFUSED else found


def _diff(path: Path, folder: Path, kind: Kind) -> Any:
    unedited = folder / "unedited.ckpt8"
    unedited.write_bytes(kind.content)
    found = attempt(lambda: ckpt8.diff(path, unedited, threads=1), InputError)
    if found is REFUSED:
        return REFUSED
    json.dumps(found.to_json(), allow_nan=False)
    return found.identical


def _resume(path: Path, folder: Path, kind: Kind) -> Any:
    model, optimizer = train(ckpt8.optim.AdamW if kind.name == "packed" else torch.optim.AdamW)
    before = digest([model.state_dict(), optimizer.state_dict()])
    found = attempt(lambda: ckpt8.resume(path, model=model, optimizer=optimizer), InputError, UsageError)
    after = digest([model.state_dict(), optimizer.state_dict()])
    if found is REFUSED and after != before:
        raise BrokenError("a refused resume changes the model or the optimizer")
    return REFUSED if found is REFUSED else (after, digest(found))


def _against(path: Path, folder: Path, kind: Kind) -> Any:
    original = kind.write_original(path.parent)
    if original is None:
        return REFUSED
    steps = len(path.read_bytes()) % 3 == 0
    found = attempt(
        lambda: ckpt8.verify(path, original, threads=1, resume_steps=int(steps)),
        InputError,
        CheckFailedError,
        UsageError,
    )
    if found is not REFUSED:
        json.dumps([found.resume, found.failures])
        if not found.failures:
            _check_stated(path, kind)
    return REFUSED


def _check_stated(path: Path, kind: Kind) -> None:
    """Raise BrokenError for a figure that holds no more, though ``verify`` has measured it."""
    unedited = path.with_name("unedited")
    unedited.write_bytes(kind.content)
    with ckpt8.open(unedited) as file:
        known = _stated(file.manifest)
    unedited.unlink()
    with ckpt8.open(path) as file:
        stated = _stated(file.manifest)
    for place, figure in stated.items():
        if figure is not None and known.get(place) is not None and not math.isclose(figure, known[place], rel_tol=1e-8):
            raise BrokenError(f"{kind.name}: verify accepts {figure!r} for {known[place]!r} as {place}")


def _stated(manifest: Any) -> dict[tuple[Any, ...], float | None]:
    """The figures of errors and rules by the names of storages and parameters."""
    found = {}
    for record in (*manifest.storages, *manifest.parameters):
        for field in ("error", "rule"):
            values = getattr(record, field, None)
            for key, value in (values or {}).items():
                if type(value) in (int, float):
                    found[record.name, field, key] = value if abs(value) < 1e300 else None
    return found


def _convert(to: str) -> Callable[[Path, Path, Kind], Any]:
    def command(path: Path, folder: Path, kind: Kind) -> Any:
        target = folder / {"torch": "x.pt", "safetensors": "x.safetensors"}.get(to, "x")
        found = attempt(lambda: ckpt8.convert(path, target, to=to, threads=1), InputError, UsageError, OutputError)
        left = [entry.name for entry in folder.iterdir()]
        if left != ([] if found is REFUSED else [target.name]):
            raise BrokenError(f"convert leaves {left}")
        return REFUSED if found is REFUSED else content_of(target)

    return command


COMMANDS: dict[str, tuple[Callable[[Path, Path, Kind], Any], bool]] = {
    "restore": (_restore, True),
    "salvage": (_salvage, True),
    "inspect": (_inspect, False),
    "survey": (_survey, False),
    "load": (_load, True),
    "unpack": (_unpack, True),
    "tensors": (_tensors, True),
    "diff": (_diff, True),
    "resume": (_resume, True),
    "against": (_against, False),
    "to torch": (_convert("torch"), True),
    "to safetensors": (_convert("safetensors"), True),
    "to dcp": (_convert("dcp"), True),
    "to flashoptim": (_convert("flashoptim"), True),
    "to trainer": (_convert("trainer"), True),
}
"""Commands, and whether their results are compared."""
