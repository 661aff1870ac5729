"""References in hostile containers: each is sound or refused, soon, and none asks for more work than it may."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from hostile_kit import edited, pack, unpack
from reference_kit import LAYOUTS, masters
from test_damage import exercise, is_detected

import ckpt8
from ckpt8.core.errors import InputError

COPY, MASTER = "model.embed.weight", "optimizer.state.0.master_param"
SHAPES = {"embed.weight": (80, 80), "layers.0.norm.weight": (128,), "head.weight": (81, 80)}
REFUSED = {
    "other": "refers to something other than elements of fp32 masters",
    "numel": "elements for the",
    "type": "does not hold float16",
    "other type": "does not hold bfloat16",
    "runs": "is not known to this version",
    "padding": "is mostly padding",
    "copies": "is one copy too many",
    "work": "too many small pieces",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A container of a few kB with references, and its source."""
    folder = tmp_path_factory.mktemp("small")
    torch.save(LAYOUTS["master_param"](masters(shapes=SHAPES)), folder / "a.pt")
    ckpt8.compress(folder / "a.pt")
    return folder / "a.ckpt8"


@pytest.fixture(scope="module")
def parts(small):
    return unpack(small.read_bytes())


def index(manifest, name):
    return next(k for k, storage in enumerate(manifest["storages"]) if storage["name"] == name)


def record(manifest, name=COPY):
    return manifest["storages"][index(manifest, name)]


def runs(*wanted):
    """Other runs of the copy; names stand for the indices of storages."""

    def change(manifest):
        given = [[index(manifest, run[0]), *run[1:]] if isinstance(run[0], str) else list(run) for run in wanted]
        record(manifest)["codec"]["runs"] = given

    return change


def fields(**given):
    return lambda manifest: record(manifest).update(given)


MALFORMED = {
    "no such storage": ("other", runs((99, 0, 6400))),
    "a negative storage": ("runs", runs((-1, 0, 6400))),
    "itself": ("other", runs((COPY, 0, 6400))),
    "a reference": ("other", runs(("model.head.weight", 0, 6400))),
    "a moment in few bits": ("other", runs(("optimizer.state.0.exp_avg", 0, 6400))),
    "the skeleton": ("other", runs(("ckpt8.skeleton", 0, 6400))),
    "behind the end": ("other", runs((MASTER, 1, 6400))),
    "far behind the end": ("other", runs((MASTER, 2**61, 6400))),
    "a start beyond 62 bits": ("runs", runs((MASTER, 2**62, 6400))),
    "a negative start": ("runs", runs((MASTER, -1, 6400))),
    "the other type": ("other type", lambda manifest: record(manifest)["codec"].update(id="reference16/1")),
    "too short": ("numel", runs((MASTER, 0, 6399))),
    "too long": ("numel", runs((MASTER, 0, 6400), (MASTER, 0, 1))),
    "no runs": ("numel", runs()),
    "a run of nothing": ("runs", runs((MASTER, 0, 6400), (MASTER, 0, 0))),
    "a run of two": ("runs", runs((MASTER, 6400))),
    "a run that is a number": ("runs", lambda manifest: record(manifest)["codec"].update(runs=[1])),
    "runs that are text": ("runs", lambda manifest: record(manifest)["codec"].update(runs="x")),
    "a field more": ("runs", lambda manifest: record(manifest)["codec"].update(R=1)),
    "a boolean": ("runs", runs((MASTER, False, 6400))),
    "padding of 17 bits": ("runs", runs((None, 2**16, 6400))),
    "all padding": ("padding", runs((None, 0, 6400))),
    "more padding than copy": ("padding", runs((None, 0, 3201), (MASTER, 0, 3199))),
    "a huge copy of padding": ("padding", lambda m: (runs((None, 0, 2**61))(m), fields(numel=2**61)(m))),
    "a huge copy of one master": (
        "copies",
        lambda m: (runs(*[(MASTER, 0, 6400)] * 500)(m), fields(numel=6400 * 500)(m)),
    ),
    "another element type": ("type", fields(dtype="float16")),
    "parts": (None, fields(parts={"rho": {"lengths": [], "crcs": []}})),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_references_that_are_not_sound(name, parts, small, tmp_path):
    reason, change = MALFORMED[name]
    path = edited(parts, change, tmp_path / "x.ckpt8")
    started = time.process_time()
    with pytest.raises(InputError) as caught:
        ckpt8.verify(path)
    assert reason is None or REFUSED[reason] in str(caught.value)
    assert len(str(caught.value)) < 500
    exercise(path, small.with_suffix(".pt"), tmp_path)
    assert time.process_time() - started < 1


def test_other_references_that_are_sound(parts, tmp_path):
    """The checks above refuse what they name, not whatever was changed."""
    for change in (
        runs((MASTER, 0, 6400)),
        runs((MASTER, 0, 3200), (None, 0x3F80, 3200)),
        runs(*[(MASTER, 10, 1600)] * 4),
        runs(("optimizer.state.2.master_param", 80, 6400)),
    ):
        path = edited(parts, change, tmp_path / "x.ckpt8")
        assert not ckpt8.verify(path).failures
        with ckpt8.open(path) as file:
            assert file.get_tensor(COPY).shape == (80, 80)


def test_scattered_runs_and_many_copies(tmp_path):
    """A few kB that would have whole chunks decoded for every element, or a master copied without end."""
    chunk = 2**20
    torch.save(LAYOUTS["master_param"]({"w": torch.zeros(3 * chunk)}), tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt")
    metadata, entries, manifest = unpack((tmp_path / "a.ckpt8").read_bytes())
    path = tmp_path / "x.ckpt8"
    for reason, wanted in (
        ("work", [(chunk * (k % 3), 1) for k in range(60)]),
        ("copies", [(0, 3 * chunk)] * 5),
    ):
        changed = copy.deepcopy(manifest)
        copied = record(changed, "model.w")
        copied["codec"]["runs"] = [[index(changed, MASTER), *run] for run in wanted]
        copied["numel"] = sum(length for _, length in wanted)
        path.write_bytes(pack(changed, entries, metadata))
        started = time.process_time()
        with pytest.raises(InputError, match=REFUSED[reason]):
            ckpt8.verify(path)
        assert time.process_time() - started < 1


def test_a_cycle(parts, tmp_path):
    def change(manifest):
        other = "model.head.weight"
        record(manifest)["codec"]["runs"] = [[index(manifest, other), 0, 6400]]
        record(manifest, other)["codec"]["runs"] = [[index(manifest, COPY), 0, 6400], [index(manifest, MASTER), 0, 80]]

    assert is_detected(edited(parts, change, tmp_path / "x.ckpt8"))
