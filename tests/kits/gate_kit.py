"""Files for ``torch.load``, and every public way that leads there, tried in a process with little memory and time.

``attempt`` forks for each try. The fork has ``MEMORY`` more bytes of address space than it uses, and ``SECONDS`` of
processor time: what takes more fails in it, whoever asked for it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import warnings
import zipfile
from pathlib import Path

from hostile_kit import container_of

MEMORY = 768 << 20
SECONDS = 5
GATES = ("load", "lightning", "lightning of a container", "storage reader", "load of a directory")
OF_DIRECTORIES = GATES[-2:]

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
_HEAD = (pickle.dumps(1001, 2), pickle.dumps({"protocol_version": 1001, "little_endian": True}, 2))


def archive(body, data=bytes(8), *, dtype="FloatStorage", location="cpu", before=(), after=()):
    """A zip file of torch whose pickle is a dict of the tensor ``w`` over one storage, and ``g``, made by ``body``."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compresslevel=1) as out:
        for name, pieces, method in before:
            info = zipfile.ZipInfo(f"archive/{name}")
            info.compress_type = method
            with out.open(info, "w") as record:
                record.writelines(pieces)
        out.writestr("archive/data.pkl", pickled(body, data, dtype=dtype, location=location))
        out.writestr("archive/data/0", data)
        if not any(name == "version" for name, _, _ in before):
            out.writestr("archive/version", b"3\n")
        for name, record, method in after:
            out.writestr(f"archive/{name}", record, method)
    return content.getvalue()


def legacy(body, data=bytes(8), *, first=MAGIC):
    """The same in the format before the zip files; ``first`` is its first pickle."""
    keys = pickle.dumps(["0"], 2)
    count = struct.pack("<q", len(data) // 4)
    return first + b"".join(_HEAD) + pickled(body, data, view=b"N") + keys + count + data


def pickled(body, data, *, dtype="FloatStorage", location="cpu", view=b""):
    """The storage is memo entry 1, the tensor 2, an OrderedDict's class 3."""
    size = {"FloatStorage": 4, "LongStorage": 8, "ByteStorage": 1, "QInt8Storage": 1}[dtype]
    place = text("storage") + call_name(f"torch.{dtype}") + text("0") + text(location) + number(len(data) // size)
    storage = b"(" + place + view + b"tQq\x01"
    tail = b"\x85" + number(1) + b"\x85\x89" + call_name("collections.OrderedDict") + b"q\x03)RtRq\x02"
    tensor = call_name("torch._utils._rebuild_tensor_v2") + b"(" + storage + number(0) + number(len(data) // size)
    return b"\x80\x02}(" + text("w") + tensor + tail + text("g") + body + b"u."


STORAGE, TENSOR, HOOKS = b"h\x01", b"h\x02", b"h\x03)R"


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value):
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def call_name(name):
    module, _, rest = name.rpartition(".")
    return f"c{module}\n{rest}\n".encode()


def call(name, *arguments):
    return call_name(name) + b"(" + b"".join(arguments) + b"tR"


def expanded(count):
    """A tensor of ``count`` elements that are all the same one."""
    shape, stride = number(count) + b"\x85", number(0) + b"\x85"
    return call("torch._utils._rebuild_tensor_v2", STORAGE, number(0), shape, stride, b"\x89", HOOKS)


def among(*values):
    """A list of the values, for those that only have to be made on the way."""
    return b"](" + b"".join(values) + b"e"


def nested(leaf, brackets, *, wide, deep):
    """``wide`` times the same, ``deep`` times over: little to write, ``wide ** deep`` to go through. It is memo 99."""
    made = leaf + b"q\x40"
    for level in range(deep):
        memo = 99 if level == deep - 1 else 65 + level
        made += brackets[0] + (b"h" + bytes([64 + level])) * wide + brackets[1] + b"q" + bytes([memo])
    return made


LISTS, TUPLES, NESTED = (b"](", b"e"), (b"(", b"t"), b"h\x63"


def member(content, folder, name):
    """A container whose one member is ``content``."""
    kind = "torch-zip" if content[:4] == b"PK\3\4" else "torch-legacy"
    path = folder / name
    path.write_bytes(container_of(content, kind))
    return path


def saved_object(content, folder):
    """A checkpoint of Ckpt8StorageWriter with an object ``g`` that torch.save is said to have written."""
    import torch

    import ckpt8

    folder.mkdir()
    ckpt8.save({"objects": torch.frombuffer(bytearray(content), dtype=torch.uint8)}, folder / "__0_0.ckpt8")
    seal = (folder / "__0_0.ckpt8").read_bytes()[-32:].hex()
    tree = {"format": "ckpt8-dcp", "version": "2.0", "files": [["__0_0.ckpt8", seal]], "tensors": {}}
    tree["objects"] = {"g": [0, 0, len(content)]}
    (folder / "ckpt8-dcp.json").write_text(json.dumps(tree))
    return folder


def written(content, folder, gate):
    """The path that ``gate`` is to load ``content`` from."""
    if gate == "lightning":
        (folder / "a.ckpt").write_bytes(content)
        return folder / "a.ckpt"
    return saved_object(content, folder / "dcp") if gate in OF_DIRECTORIES else member(content, folder, "a.ckpt8")


def loads():
    """By gate, what loads a path."""
    import torch.distributed.checkpoint as dcp

    import ckpt8
    from ckpt8.integrations.dcp import Ckpt8StorageReader
    from ckpt8.integrations.lightning import Ckpt8CheckpointIO

    def by_storage_reader(path):
        state = {"g": None}
        try:
            dcp.load(state, storage_reader=Ckpt8StorageReader(path), no_dist=True)
        except dcp.api.CheckpointException as exc:
            raise next(iter(exc.failures.values()))[0] from None
        return state

    lightning = Ckpt8CheckpointIO().load_checkpoint
    return dict(zip(GATES, (ckpt8.load, lightning, lightning, by_storage_reader, ckpt8.load), strict=True))


def _named(name):
    import importlib

    module, _, rest = name.rpartition(".")
    return getattr(importlib.import_module(module), rest)


def _outcome(load, path):
    from ckpt8.core.errors import Ckpt8Error

    try:
        load(Path(path))
    except Ckpt8Error as exc:
        return type(exc).__name__, str(exc)
    except BaseException as exc:
        return f"not ours: {type(exc).__name__}", str(exc)[:300]
    return "loaded", ""


def _limit():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    spent = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def attempt(gate, path, *, allow=()):
    """What becomes of a path at a gate: ``loaded``, an error by its class and text, or ``killed``."""
    import torch

    load = loads()[gate]
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside threads, among others, and in the fork
        child = os.fork()
        if not child:
            try:
                torch.serialization.add_safe_globals([_named(name) for name in allow])
                _limit()
                os.write(writing, json.dumps(_outcome(load, path)).encode())
            finally:
                os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        answer = said.read()
    os.waitpid(child, 0)
    return tuple(json.loads(answer)) if answer else ("killed", "")
