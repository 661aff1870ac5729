"""A short run of the fuzzer with a fixed seed, and the fuzzer itself: it must find what is there to be found.

A long one: ``python tests/whole/fuzz/fuzz.py --inputs 1000000 --jobs 8``; counts are in ``fixtures/bench/fuzz.json``.
"""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path

import fuzz
import fuzz_commands
import fuzz_environment
import fuzz_targets
import pytest
from fuzz_checkpoints import seeds
from fuzz_mutations import Record, mutate_pickle, opcodes, read_zip, write_zip
from hostile_kit import pack, unpack

import ckpt8
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.core.errors import Ckpt8Error, InputError

INPUTS = {
    "zip": 250, "legacy": 250, "safetensors": 300, "container": 25, "directory": 40, "resume": 100, "metadata": 100,
    "manifest": 30, "values": 20, "environment": 2,
}  # fmt: skip


def test_every_target_has_its_number():
    assert set(INPUTS) == set(fuzz_targets.TARGETS)
    assert sum(target.share for target in fuzz_targets.TARGETS.values()) == pytest.approx(1)


@pytest.mark.by_default("container", "manifest", "metadata", "values")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", INPUTS)
def test_a_short_run_finds_nothing(target, tmp_path):
    counts = short_run(target, 7, INPUTS[target], tmp_path)
    assert counts.read > counts.inputs // 50 or counts.inputs < 20
    assert counts.refused > counts.inputs // 5 or counts.inputs < 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", INPUTS)
def test_a_longer_run_finds_nothing(target, tmp_path):
    short_run(target, 8, 6 * INPUTS[target], tmp_path)


def short_run(target, seed, inputs, folder):
    counts = fuzz.Counts()
    with fuzz.prepared():
        for number in range(inputs):
            fuzz.try_one(target, seed, number, folder, counts)
    # Time is measured in the long run: here others may have the machine.
    assert [finding for finding in counts.findings if not finding["what"].startswith("took")] == []
    assert counts.inputs == inputs
    return counts


@pytest.mark.slow
def test_inputs_follow_from_their_number():
    for name, target in fuzz_targets.TARGETS.items():
        made = [[target.mutate(fuzz.generator(1, name, number)) for number in range(20)] for _ in range(2)]
        assert made[0] == made[1]
        assert len({str(each) for each in made[0]}) > 10


def test_what_breaks_a_promise_is_found(tmp_path, monkeypatch):
    """An exception of another kind, a message of two lines, and a slow reader, each of them a finding."""
    counts = fuzz.Counts()

    def run(action):
        broken = fuzz_targets.Target(lambda rng: b"x", lambda *_: fuzz_commands.attempt(action, Ckpt8Error), 0)
        monkeypatch.setitem(fuzz_targets.TARGETS, "broken", broken)
        fuzz.try_one("broken", 1, len(counts.findings), tmp_path, counts)

    run(lambda: {}["key"])
    run(lambda: exec("raise ValueError"))
    monkeypatch.setattr(InputError, "__str__", lambda self: "two\nlines")
    run(lambda: ckpt8.load(tmp_path / "input"))
    monkeypatch.setattr(fuzz, "SLOW", 1e-9)
    run(lambda: True)
    found = [finding["what"].split()[0] for finding in counts.findings]
    assert found == ["KeyError", "ValueError", "BrokenError", "took"]


def test_what_ckpt8_writes_elsewhere_is_found(tmp_path):
    folder, other = tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    with fuzz_commands.writes_only_in(folder) as outside:
        (folder / "x").write_bytes(b"")
        (folder / "link").symlink_to(other)
        assert outside == []
        other.mkdir()
        (other / "y").write_bytes(b"")
        (other / "y").read_bytes()
        (folder / ".." / "z").write_bytes(b"")
    assert outside == [str(other), str(other / "y"), str(folder / ".." / "z")]


@pytest.mark.filterwarnings("ignore")
def test_a_command_that_gives_something_else_is_found(tmp_path, monkeypatch):
    """Unless the container does not verify."""
    kind = next(kind for kind in fuzz_commands.kinds() if kind.name == "safetensors")
    path, restore = tmp_path / "input", fuzz_commands.COMMANDS["restore"]

    def other(path, folder, kind):
        found = restore(path, folder, kind)
        return found if path.name == "unedited" else found[:-1] + b"x"

    def run(content):
        path.write_bytes(content)
        fuzz_commands.run_edited(path, random.Random(1), fuzz_commands.Edited(kind, content))

    monkeypatch.setattr(fuzz_commands, "COMMANDS", {"restore": other, "again": other})
    with pytest.raises(fuzz_commands.BrokenError, match="verify accepts it"):
        run(kind.content)
    metadata, entries, manifest = unpack(kind.content)
    manifest["tensors"] = manifest["tensors"][:-1]
    run(pack(manifest, entries, metadata))


@pytest.mark.filterwarnings("ignore")
def test_what_a_command_line_must_not_do_is_found(tmp_path):
    (tmp_path / "place").mkdir()
    setting = fuzz_environment.Setting(("inspect", "{c}", "--json"))
    place = fuzz_environment.Place(tmp_path / "place", setting)
    place.check(0, b"{}", b"")
    place.check(3, b"", b"ckpt8: x\n")
    for code, out, err in ((1, b"", b"ckpt8: x\n"), (3, b"", b""), (0, b"{", b""), (2, b"", b"Traceback")):
        with pytest.raises((fuzz_commands.BrokenError, ValueError)):
            place.check(code, out, err)
    for name, match in (("o", "fails and leaves"), ("s", "a source is changed")):
        Path(place.paths[name]).write_bytes(b"x")
        with pytest.raises(fuzz_commands.BrokenError, match=match):
            place.check(4, b"", b"ckpt8: x\n")


def test_the_seeds_are_whole_and_what_is_written_of_them_is_read(tmp_path):
    """Mutations change what the seeds are made of, so taking apart and putting together must change nothing."""
    path = tmp_path / "x"
    for kind in ("zip", "legacy", "safetensors"):
        for content in set(seeds(kind)):
            path.write_bytes(content)
            with open_checkpoint(path) as checkpoint:
                assert checkpoint.format.endswith(kind)
    for content in set(seeds("zip")):
        path.write_bytes(write_zip([Record(*each) for each in read_zip(content)]))
        assert zipfile.ZipFile(path).testzip() is None
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.format == "torch-zip"
        pickle = dict(read_zip(content))[next(name for name, _ in read_zip(content) if name.endswith(b"data.pkl"))]
        assert b"".join(opcodes(pickle)) == pickle
        assert len(opcodes(pickle)) > 20
    for kind in fuzz_commands.kinds():
        _, entries, manifest = unpack(kind.content)
        assert manifest["storages"]
        assert entries


def test_most_changed_pickles_get_past_their_first_opcodes():
    rng = random.Random(1)
    pickle = next(content for name, content in read_zip(seeds("zip")[0]) if name.endswith(b"data.pkl"))
    changed = [mutate_pickle(rng, pickle) for _ in range(300)]
    assert len(set(changed)) > 250
    assert sum(each[:20] == pickle[:20] for each in changed) > 150


def test_reports_add_up():
    one = fuzz.merged({}, {"zip": fuzz.Counts(inputs=5, refused=5, slowest=0.5)}, 1, 0)
    both = json.loads(json.dumps(fuzz.merged(one, {"zip": fuzz.Counts(inputs=3, read=3, slowest=0.1)}, 1, 5)))
    assert both["inputs"] == 8
    assert both["targets"]["zip"] | {"seconds": 0, "memory": 0, "findings": []} == {
        "inputs": 8, "read": 3, "refused": 5, "seconds": 0, "slowest": 0.5, "memory": 0, "findings": []
    }  # fmt: skip
    assert both["runs"] == [{"target": "zip", "seed": 1, "first": 0, "inputs": 8}]
