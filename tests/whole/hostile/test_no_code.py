"""Threat model, line by line, and where each line is tested.

1. No input runs code or imports a module: here, for every place in which ckpt8 reads a pickle;
   ``readers/test_inert_pickle``, ``readers/test_torch_zip``.
2. No small file takes unbounded memory or time
   * sizes and counts that are not there: ``test_bounds``; ``readers/test_inert_pickle``, ``test_torch_legacy``,
     ``test_torch_zip``, ``test_safetensors``; ``container/test_damage`` (headers, manifests, frames)
   * calls that torch would make with other arguments than its own: ``test_gate``
   * more values than a file has room for, in JSON and in pickles: ``test_values``
   * decompression bombs: ``test_bounds``; ``container/test_damage`` (frames, manifest); zip records that are compressed
     are refused: ``readers/test_torch_zip``
   * deep nesting, shared parts, long names, colliding keys: ``test_bounds``; ``readers/test_inert_pickle``
   * offsets out of range, holes, overlaps, duplicate names: ``readers/test_torch_zip``,
     ``test_safetensors``; ``container/test_damage``; ``restoring/test_member_attacks``
   * NaN, Infinity, huge numbers, non-UTF-8 in JSON: ``test_bounds``; ``readers/test_safetensors``,
     ``container/test_damage``
3. Nothing is written outside of the target: ``test_targets``; ``restoring/test_member_attacks``,
   ``test_outputs`` (names of members).
4. A file says nothing to the terminal: ``test_targets``.
5. Damage is noticed, at every bit: ``container/test_damage``, ``restoring/test_member_attacks``,
   ``readers/test_torch_zip``.
6. Whatever else is wrong with a file, there is one line that says so: ``fuzz``, and ``test_corpus`` with what it found.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import sys
import zipfile

import pytest
import torch
from hostile_kit import container_of, one_line
from safetensors.torch import save_file

import ckpt8
from ckpt8.checkpoint.readers.torch_legacy import MAGIC, PROTOCOL_VERSION
from ckpt8.core.errors import Ckpt8Error, InputError
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container

SPAWNS = {"os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen"}
_watchers: list[list[str]] = []


def _hook(event, _):
    if event in SPAWNS:
        for seen in _watchers:
            seen.append(event)


sys.addaudithook(_hook)


def _text(argument):
    return b"X" + struct.pack("<I", len(argument)) + argument


def gadgets(marker):
    """Pickles, without PROTO and STOP, that make ``marker`` when they are loaded by Python's own pickle."""
    path, script = _text(str(marker).encode()), _text(f"open({str(marker)!r}, 'w')".encode())
    system = _text(f"touch {marker}".encode())
    called = b"\x85R"
    return {
        "system": b"cposix\nsystem\n" + system + called,
        "os.system": b"cos\nsystem\n" + system + called,
        "eval": b"cbuiltins\neval\n" + script + called,
        "exec": b"cbuiltins\nexec\n" + script + called,
        "old names": b"c__builtin__\neval\n" + script + called,
        "an import": b"chostile_gadget\nNAME\n",
        "instance": b"(" + script + b"ibuiltins\neval\n",
        "object": b"(cbuiltins\neval\n" + script + b"o",
        "new object": b"chostile_class\nMade\n" + path + b"\x85\x81",
        "stack global": _text(b"builtins") + _text(b"eval") + b"\x93" + script + called,
        "getattr": b"cbuiltins\ngetattr\ncos\npath\nX\x02\0\0\0os\x86RX\x06\0\0\0systemq\x00"
        + (b"0cos\nsystem\n" + system + b"\x85R\x86"),
        "state": b"chostile_class\nState\n)\x81" + path + b"b",
        "key": b"}cbuiltins\neval\n" + script + called + b"Ns",
        "partial": b"cfunctools\npartial\ncbuiltins\neval\n\x85R" + script + called,
    }


NAMES = sorted(gadgets("x"))


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that no gadget may make; on the way out nothing was started and nothing imported."""
    path = tmp_path / "marker"
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "hostile_gadget.py").write_text(f"NAME = open({str(path)!r}, 'w')\n")
    (modules / "hostile_class.py").write_text(
        "class Made:\n    def __new__(cls, path):\n        open(path, 'w')\n        return object.__new__(cls)\n"
        "class State:\n    def __setstate__(self, path):\n        open(path, 'w')\n"
    )
    monkeypatch.syspath_prepend(modules)
    seen: list[str] = []
    _watchers.append(seen)
    yield path
    _watchers.remove(seen)
    for module in ("hostile_gadget", "hostile_class"):
        imported = sys.modules.pop(module, None)
        assert path.exists() or imported is None
    assert path.exists() or seen == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_the_gadgets_are_loaded(name, marker):
    """With Python's own pickle each does what it should, or nothing here would prove anything."""
    with contextlib.suppress(TypeError):
        pickle.loads(b"\x80\x02" + gadgets(marker)[name] + b".")  # a code of exit is no file, None no key
    assert marker.exists()


def _attempts(path, folder):
    """Everything that reads a file, one after the other."""
    inside = path.suffix == ".ckpt8"
    yield lambda: inspect_container(path, tensors=True) if inside else inspect_checkpoint(path, tensors=True)
    yield lambda: ckpt8.compress(path, folder / "out.ckpt8")
    yield lambda: ckpt8.verify(path)
    yield lambda: ckpt8.verify(folder / "out.ckpt8", path)
    for packed in (path, folder / "out.ckpt8"):
        for unpack in (False, True):
            yield lambda packed=packed, unpack=unpack: ckpt8.load(packed, unpack=unpack)
            yield lambda packed=packed: ckpt8.load(packed, member="a.pt")
        yield lambda packed=packed: ckpt8.restore(packed, folder / "back", force=True)
        yield lambda packed=packed: ckpt8.resume(packed, model=torch.nn.Linear(2, 2))


def read_all(path, marker):
    """Try everything; what is refused is refused by ckpt8, in one line."""
    done = 0
    for attempt in _attempts(path, marker.parent):
        try:
            attempt()
            done += 1
        except Ckpt8Error as exc:
            one_line(exc)
        assert not marker.exists()
    return done


def read_alone_and_packed(content, kind, marker):
    """Read a file, and a container of which it is the member."""
    done = 0
    for name, data in (("a0.pt", content), ("a1.ckpt8", container_of(content, kind))):
        (marker.parent / name).write_bytes(data)
        done += read_all(marker.parent / name, marker)
    return done


def zipped(pickle_bytes, **more):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", pickle_bytes)
        archive.writestr("archive/data/0", bytes(8))
        archive.writestr("archive/version", b"3\n")
        for name, content in more.items():
            archive.writestr(f"archive/{name}", content)
    return data.getvalue()


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x02tQ"
    b"K\x00K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
)


def tree(gadget, place):
    """A checkpoint with a tensor ``w``, and the gadget in one of the places where an object can be."""
    hooks = TENSOR[: -len(b"ccollections\nOrderedDict\n)RtR")]
    key = gadget if gadget.startswith(b"c") else b"K\x01"
    made = {
        "value": b"X\x01\0\0\0g" + gadget,
        "argument": b"X\x01\0\0\0gccollections\nOrderedDict\n]" + gadget + b"a\x85R",
        "hooks": b"X\x01\0\0\0h" + hooks + gadget + b"tR",
        "state": b"X\x01\0\0\0sccollections\nOrderedDict\n)R}X\x01\0\0\0g" + gadget + b"sb",
        "key of a dict": b"X\x01\0\0\0d}" + key + b"Ns",
        "persistent id": b"X\x01\0\0\0p" + gadget + b"Q",
        "dropped": gadget + b"0",
    }
    return b"\x80\x02}(X\x01\0\0\0w" + TENSOR + made[place] + b"u."


PLACES = ["value", "argument", "hooks", "state", "key of a dict", "persistent id", "dropped"]


@pytest.mark.by_default("value")
@pytest.mark.parametrize("place", PLACES)
def test_in_a_zip_file_and_in_a_container(place, marker):
    """Every gadget, in every place of the pickle; all of them as a file, and as a member of a container."""
    read = 0
    for gadget in gadgets(marker).values():
        read += read_alone_and_packed(zipped(tree(gadget, place)), "torch-zip", marker)
    assert read > len(NAMES)  # inspection and restoration of most of them go through


def legacy(gadget, place):
    """A file of torch before 1.6 with the gadget in one of its five pickles."""
    versions = {"protocol_version": PROTOCOL_VERSION, "little_endian": True}
    pickles = [pickle.dumps(each, 2) for each in (MAGIC, PROTOCOL_VERSION, versions, None, ["0"])]
    pickles[3] = b"\x80\x02}X\x01\0\0\0w" + TENSOR + b"s."
    if place == 3:
        pickles[3] = tree(gadget, "value")
    else:
        # The value is what it was, and the gadget is run on the way.
        pickles[place] = pickles[place][:2] + gadget + b"0" + pickles[place][2:]
    return b"".join(pickles) + struct.pack("<q", 2) + bytes(8)


@pytest.mark.by_default(most=1)
@pytest.mark.parametrize("place", range(5))
def test_in_every_pickle_of_a_legacy_file_and_in_a_container(place, marker):
    for gadget in gadgets(marker).values():
        read_alone_and_packed(legacy(gadget, place), "torch-legacy", marker)


@pytest.mark.parametrize("name", NAMES)
def test_in_members_of_a_directory_and_in_records_beside_the_pickle(name, marker):
    gadget = gadgets(marker)[name]
    whole = b"\x80\x02" + gadget + b"."
    root = marker.parent / "run"
    root.mkdir()
    save_file({"w": torch.ones(2)}, root / "model.safetensors", metadata={"pickle": whole.decode("latin-1")})
    (root / "training_args.bin").write_bytes(zipped(tree(gadget, "value")))
    (root / "random_states_0.pkl").write_bytes(whole)
    (root / "script.pt").write_bytes(zipped(tree(b"N", "value"), **{"constants.pkl": whole, "code/x.py": b"import os"}))
    (root / "more.pt").write_bytes(zipped(tree(b"N", "value"), **{"extra.pkl": whole, ".data/serialization_id": whole}))
    inspect_checkpoint(root, tensors=True)
    ckpt8.compress(root)
    ckpt8.verify(root.with_suffix(".ckpt8"), root)
    ckpt8.restore(root.with_suffix(".ckpt8"), marker.parent / "back")
    for member in ("training_args.bin", "model.safetensors", "more.pt", "random_states_0.pkl"):
        with contextlib.suppress(Ckpt8Error):
            ckpt8.load(root.with_suffix(".ckpt8"), member=member)
        assert not marker.exists()


@pytest.mark.parametrize("name", NAMES)
def test_in_a_distributed_checkpoint(name, marker):
    gadget = gadgets(marker)[name]
    root = marker.parent / "run"
    root.mkdir()
    (root / ".metadata").write_bytes(b"\x80\x02" + gadget + b".")
    (root / "__0_0.distcp").write_bytes(zipped(tree(gadget, "value")) * 2)
    for read in (inspect_checkpoint, ckpt8.compress):
        with pytest.raises(InputError, match=r"\.metadata: "):
            read(root)
    assert not marker.exists()
    assert not list(root.parent.glob("*ckpt8*"))
