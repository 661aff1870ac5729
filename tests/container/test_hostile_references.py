"""References in hostile containers: each is sound or refused, soon, and none asks for more work than it may."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from hostile_kit import both, edited, fields, index_of, put, unpack
from hypothesis import given
from hypothesis import strategies as st
from reference_kit import LAYOUTS, masters
from test_damage import exercise, is_detected, mutated

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


def runs(*wanted):
    """Other runs of the copy; names stand for the indices of storages."""

    def change(manifest):
        given = [[index_of(manifest, run[0]), *run[1:]] if isinstance(run[0], str) else list(run) for run in wanted]
        codec(runs=given)(manifest)

    return change


copy_with = partial(fields, "storages", COPY)
codec = partial(fields, "storages", COPY, "codec")
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
    "the other type": ("other type", codec(id="reference16/1")),
    "too short": ("numel", runs((MASTER, 0, 6399))),
    "too long": ("numel", runs((MASTER, 0, 6400), (MASTER, 0, 1))),
    "no runs": ("numel", runs()),
    "a run of nothing": ("runs", runs((MASTER, 0, 6400), (MASTER, 0, 0))),
    "a run of two": ("runs", runs((MASTER, 6400))),
    "a run that is a number": ("runs", codec(runs=[1])),
    "runs that are text": ("runs", codec(runs="x")),
    "a field more": ("runs", codec(R=1)),
    "a boolean": ("runs", runs((MASTER, False, 6400))),
    "padding of 17 bits": ("runs", runs((None, 2**16, 6400))),
    "all padding": ("padding", runs((None, 0, 6400))),
    "more padding than copy": ("padding", runs((None, 0, 3201), (MASTER, 0, 3199))),
    "a huge copy of padding": ("padding", both(runs((None, 0, 2**61)), copy_with(numel=2**61))),
    "a huge copy of one master": ("copies", both(runs(*[(MASTER, 0, 6400)] * 500), copy_with(numel=6400 * 500))),
    "another element type": ("type", copy_with(dtype="float16")),
    "parts": (None, copy_with(parts={"rho": {"lengths": [], "crcs": []}})),
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
        runs((MASTER, 0, 3200), (MASTER, 3200, 3200)),
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
    parts = unpack((tmp_path / "a.ckpt8").read_bytes())
    for reason, wanted in (("work", [(chunk * (k % 3), 1) for k in range(60)]), ("copies", [(0, 3 * chunk)] * 5)):
        given = {"id": "reference/1", "runs": [[index_of(parts[2], MASTER), *run] for run in wanted]}
        change = fields("storages", "model.w", codec=given, numel=sum(length for _, length in wanted))
        path = edited(parts, change, tmp_path / "x.ckpt8")
        started = time.process_time()
        with pytest.raises(InputError, match=REFUSED[reason]):
            ckpt8.verify(path)
        assert time.process_time() - started < 1


def test_a_cycle(parts, tmp_path):
    copy, head, master = (index_of(parts[2], name) for name in (COPY, "model.head.weight", MASTER))
    back = put("storages", head, "codec", "runs", [[copy, 0, 6400], [master, 0, 80]])
    change = both(codec(runs=[[head, 0, 6400]]), back)
    assert is_detected(edited(parts, change, tmp_path / "x.ckpt8"))


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 32))
def test_a_mutated_manifest_with_references_is_read_or_refused(seed, parts, small, tmp_path):
    mutated(parts, seed, small, tmp_path)
