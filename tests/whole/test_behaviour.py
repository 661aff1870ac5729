"""What this version writes and says of the committed checkpoints is what ``fixtures/golden/behaviour.json`` records.

Recorded are, of containers, each stream before zstd, the bits of each tensor, the manifest and the restored source; the
``--json`` of inspect, verify, diff and runs; converted files; and a packed directory with its index. All of it is exact
but sums and figures of reports, which may differ by 1e-9 of themselves, and sizes, by a hundredth: a manifest is as
long as the digits of its sums. What zstd makes of the streams is compared where its version is the recorded one. The
processor makes no difference.

A change that is meant is recorded by hand, from the repository's root; the commit says what changed and why:

    PYTHONPATH=.:tests/kits python tests/whole/test_behaviour.py

To see a difference in full, let the code before it and after it write all facts as text, and compare the two folders:

    PYTHONPATH=.:tests/kits python tests/whole/test_behaviour.py --facts FOLDER [CASE ...]
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import dcp_kit
import packed_kit
import pytest
import torch
import zstandard
from typer.testing import CliRunner

import ckpt8
from ckpt8.cli.app import app

FIXTURES = Path(__file__).parents[2] / "fixtures"
GOLDEN = FIXTURES / "golden" / "behaviour.json"
SETTINGS = {preset: {"preset": preset} for preset in ("flash", "compact", "archive", "lossless")} | {"5": {"budget": 5}}
LAYOUTS = ("torch", "safetensors", "trainer", "dcp", "flashoptim", "compressed-tensors", "ckpt8")

SUMS = re.compile(r"\.(sum_\w+|steps\.(step|weight|moment1|moment2))$")
"""Figures of a manifest that may differ in their last digits. All other numbers there are exact, maxima among them."""

SIZES = re.compile(r"(stored_bytes|overhead_bytes|nbytes|ratio|bytes_per_weight|parts\.\w+|^(predicted.*|b)\.bytes)$")
CLOSE, SIMILAR = 1e-9, 1e-2
LEAF = 6
"""Bytes of a digest, and of a float64 as it is recorded: 8 characters of base64, 1.5e-11 of the number."""


def digest(data):
    """The first bytes of SHA-256."""
    return hashlib.sha256(data).digest()[:LEAF]


def leaves(facts):
    """The (path, bytes, tolerance) of every fact: the text of each key without figures, then digests and figures."""
    figures = []
    sums = SUMS if "manifest" in facts else re.compile("")

    def text(value, path):
        if isinstance(value, dict):
            return {key: text(each, f"{path}.{key}") for key, each in value.items()}
        if isinstance(value, list):
            # An element of a list has the name of the list, for the patterns.
            return [text(each, path) for each in value]
        if isinstance(value, bytes):
            figures.append((path, value, 0))
        elif value == 0:
            return value
        elif type(value) in (int, float) and SIZES.search(path):
            figures.append((path, struct.pack(">d", value)[:LEAF], SIMILAR))
        elif isinstance(value, float) and sums.search(path):
            figures.append((path, struct.pack(">d", value)[:LEAF], CLOSE))
        else:
            return value
        return None

    texts = {key: json.dumps(text(value, key)).encode() for key, value in facts.items()}
    return [
        ("keys", digest(" ".join(texts).encode()), 0),
        *((k, digest(text), 0) for k, text in texts.items()),
        *figures,
    ]


def differences(facts, recorded):
    """What differs between facts and their recorded form, in words."""
    now, before = leaves(facts), base64.b64decode(recorded)
    pairs = [(*leaf, before[k * LEAF : (k + 1) * LEAF]) for k, leaf in enumerate(now)]
    # Where a text differs, other figures may follow; they would be compared with those of others.
    found = [f"{path}: another text" for path, new, _, old in pairs[: len(facts) + 1] if new != old]
    if not found and len(before) != LEAF * len(now):
        found = [f"{len(now)} facts, recorded are {len(before) // LEAF}"]
    return found or [message for pair in pairs if (message := difference(*pair))]


def difference(path, new, tolerance, old):
    """What differs in one fact, in words, or None."""
    if new == old or (path == "stored" and tuple(recorded()["zstd"]) != zstandard.ZSTD_VERSION):
        return None
    if not tolerance:
        return f"{path}: other bytes"
    values = [struct.unpack(">d", each + bytes(8 - LEAF))[0] for each in (old, new)]
    return None if math.isclose(*values, rel_tol=tolerance) else f"{path}: {values[0]:.12g} became {values[1]:.12g}"


def recorded():
    """The golden file: the version of zstd, and by case and item the leaves."""
    return json.loads(GOLDEN.read_text())


def report(*arguments):
    """What a command prints with ``--json``."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code in (0, 1), done
    assert done.stdout, done.exception
    return json.loads(done.stdout)


def container(path):
    """Streams, tensors, manifest and source of a container, read as FORMAT.md says."""
    data = path.read_bytes()
    start = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:start])
    version = header.pop("__metadata__")
    entries = {name: data[start:][slice(*entry["data_offsets"])] for name, entry in header.items()}
    manifest = json.loads(zstandard.decompress(entries.pop("ckpt8.manifest")))
    entries.pop("ckpt8.seal")
    stored = [manifest.pop("writer").split()[0]]
    for record in manifest["storages"]:
        for part, table in record["parts"].items():
            lengths = table.pop("lengths")
            stored.append((lengths, table.pop("crcs")))
            name = next((n for n in (f"{record['name']}/{part}", f"{record['name']}:{part}") if n in entries), None)
            if name is not None:
                entries[name] = planes(entries[name], lengths)
    for key in ("seal", "key"):
        manifest.get("base", {}).pop(key, None)
    with ckpt8.open(path) as file:
        tensors = {name: digest(bits(file.get_tensor(name))) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return {
        "version": version,
        "streams": {name: digest(content) for name, content in entries.items()},
        "tensors": tensors,
        "manifest": manifest,
        "stored": digest(json.dumps(stored).encode()),
        "restored": files(ckpt8.restore(path, Path(f"restored-{path.name}"))),
    }


def planes(content, lengths):
    """The planes of a stream: a frame that does not begin as one of zstd is the plane itself."""
    found = []
    for length in lengths:
        frame, content = content[:length], content[length:]
        found.append(zstandard.decompress(frame) if frame.startswith(zstandard.FRAME_HEADER) else frame)
    assert not content
    return b"".join(found)


def bits(tensor):
    """The bytes of the elements in order."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def files(path):
    """The digest of every file below a path, or of the file."""
    found = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    contents = {each.relative_to(path).as_posix(): each.read_bytes() for each in found}
    if ".metadata" in contents:
        contents[".metadata"] = dcp_metadata(path)
    return {name: digest(content) for name, content in contents.items()}


def dcp_metadata(folder):
    """What the metadata of torch.distributed.checkpoint says, in text: its pickle is another one for every torch."""
    metadata = dcp_kit.read_metadata(folder)
    tensors = [
        (name, value.properties.dtype, value.size, [(chunk.offsets, chunk.sizes) for chunk in value.chunks])
        for name, value in metadata.state_dict_metadata.items()
        if hasattr(value, "chunks")
    ]
    places = [
        (index.fqn, index.offset, index.index, place.relative_path, place.offset, place.length)
        for index, place in metadata.storage_data.items()
    ]
    return repr((list(metadata.state_dict_metadata), tensors, places, metadata.planner_data)).encode()


def packed(source):
    """A checkpoint with every preset and a budget, and what the commands say of it."""
    facts = {"inspect": report("inspect", source)}
    for setting, options in SETTINGS.items():
        target = Path(f"{setting}.ckpt8")
        ckpt8.compress(source, target, **options)
        facts[setting] = container(target)
        facts[f"inspect {setting}"] = report("inspect", target)
    for setting in ("flash", "archive"):
        facts[f"verify {setting}"] = report("verify", f"{setting}.ckpt8", "--against", source, "--resume-steps", 2)
    facts["diff"] = report("diff", source, "archive.ckpt8")
    return facts


def of_input(name):
    """The facts of a checkpoint of ``fixtures/inputs``."""
    source, copy = FIXTURES / "inputs" / name, Path(name).name
    shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    return packed(Path(copy))


def of_golden(name):
    """The facts of the source of a golden container: references, packs, half precision, a directory of all formats."""
    return packed(ckpt8.restore(FIXTURES / "golden" / name, Path("source")))


def deltas():
    """Chains of differences, the base given or chosen."""
    facts = {}
    for stem, preset, count in (("chain", "archive", 4), ("chain_bf16", "lossless", 2)):
        target = None
        for k in range(count):
            source = ckpt8.restore(FIXTURES / "golden" / f"{stem}_{k}.{preset}.ckpt8", Path(f"{stem}-{k}.pt"))
            base, target = "auto" if k > 1 else target, Path(f"{stem}-{k}.ckpt8")
            ckpt8.compress(source, target, preset=preset, base=base)
            facts[target.name] = container(target)
    return facts


def runs():
    """The lists of two folders, all of whose files are of one time."""
    for name in ("inputs", "golden"):
        shutil.copytree(FIXTURES / name, name)
        for path in (Path(name), *Path(name).rglob("*")):
            os.utime(path, (0, 0))
    return {name: report("runs", name) for name in ("inputs", "golden")}


def exports():
    """A file and a directory in every layout, from the original and from a container."""
    facts = {}
    for name in ("gpt_bf16.pt", "trainer-adamw"):
        source = FIXTURES / "inputs" / name
        ckpt8.compress(source, Path(f"{name}.ckpt8"), preset="archive")
        for layout in LAYOUTS:
            target = Path(f"{name}-as-{layout}")
            options = ["--to", layout, *(["--dtype", "int8"] if layout == "compressed-tensors" else [])]
            # The pickle of a distributed checkpoint's metadata is torch's, and a manifest has the digits of its sums.
            varying = {"seconds", "total_seconds", *(["bytes"] if layout in ("dcp", "ckpt8") else [])}
            said = report("convert", source, target, *options)
            facts[f"{target} says"] = {key: value for key, value in said.items() if key not in varying}
            facts[f"{target}"] = container(target) if layout == "ckpt8" else files(target)
            if layout != "ckpt8":
                again = Path(f"packed-{target}")
                report("convert", f"{name}.ckpt8", again, *options)
                facts[f"{again}"] = files(again)
    return facts


def ranks():
    """A directory that two ranks packed: its index, its containers and what the commands say of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = torch.load(FIXTURES / "inputs" / "crc_off.pt", weights_only=True)
        plain = packed_kit.save_sliced({key: state[key] for key in ("model", "optimizer")}, Path("plain"))
        folder = packed_kit.pack(plain, Path("ranks"), preset="archive")
    facts = {path.name: container(path) for path in sorted(folder.glob("*.ckpt8"))}
    index = json.loads((folder / "ckpt8-dcp.json").read_text())
    del index["crc32"]  # it counts what varies, such as
    index |= {"save_id": None, "files": [name for name, _seal in index["files"]]}
    # Values that are no tensors come in the order of a set.
    facts["index"] = {
        key: dict(sorted(each.items())) if isinstance(each, dict) else each for key, each in index.items()
    }
    return facts | {command: report(command, folder) for command in ("inspect", "verify")}


INPUTS = [
    *(f"{stem}.pt" for stem in ("crc_off", "custom_objects", "legacy", "module", "views")),
    *(f"gpt_{stem}.pt" for stem in ("adamw", "bf16", "came", "stable_adamw")),
    *(f"low_bit/{stem}.pt" for stem in ("bitsandbytes", "flash", "torchao_4", "torchao_8", "torchao_fp8")),
    *("lightning.ckpt", "accelerate", "trainer-adamw", "trainer-stable-adamw"),
]
GOLDENS = [
    *("copied_masters.archive", "directory.flash", "half_precision.lossless", "low_bits.archive", "many_small.flash"),
    *("mixed_precision.lossless", "gpt_bf16_part.flash", "gpt_came_part.archive", "momentum_0.flash"),
]
CASES = {
    **{name: (of_input, name) for name in INPUTS},
    **{name: (of_golden, f"{name}.ckpt8") for name in GOLDENS},
    **{each.__name__: (each,) for each in (deltas, runs, exports, ranks)},
}
SLOW = {
    *("gpt_adamw.pt", "gpt_bf16.pt", "gpt_came.pt", "gpt_stable_adamw.pt", "trainer-stable-adamw", "directory.flash"),
    *("low_bit/torchao_4.pt", "low_bit/torchao_fp8.pt", "crc_off.pt", "trainer-adamw"),
}
"""Cases that cost half of the time and have smaller ones of their kind."""


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_behaviour_is_as_recorded(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, *arguments = CASES[case]
    facts, golden = function(*arguments), recorded()["cases"][case]
    assert list(facts) == list(golden)
    found = {item: differences(each, golden[item]) for item, each in facts.items()}
    assert [f"{item}: {message}" for item, messages in found.items() for message in messages[:5]] == []


OTHER_PROCESSOR = {
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ATEN_CPU_CAPABILITY": "default",
    "NUMBA_CPU_NAME": "generic",
    "NUMBA_CPU_FEATURES": "",
}
"""Makes torch and numba compute as on an old processor. Square roots of MKL are rounded otherwise there."""


@pytest.mark.slow
def test_behaviour_is_the_same_on_another_processor(tmp_path):
    cases = " or ".join(("torchao_8", "gpt_came_part", "accelerate", "exports"))
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", __file__, "-k", cases]
    environment = {**os.environ, **OTHER_PROCESSOR, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "4 passed" in done.stdout, done.stdout


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--facts", type=Path)
    parser.add_argument("cases", nargs="*", default=[*CASES])
    given = parser.parse_args()
    home, golden = Path.cwd(), {"zstd": zstandard.ZSTD_VERSION, "cases": {}}
    for case in given.cases:
        function, *arguments = CASES[case]
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            facts = function(*arguments)
            os.chdir(home)
        for item, each in facts.items():
            golden["cases"].setdefault(case, {})[item] = base64.b64encode(
                b"".join(b for _, b, _ in leaves(each))
            ).decode()
            if given.facts:
                given.facts.mkdir(parents=True, exist_ok=True)
                text = json.dumps(each, indent=1, default=bytes.hex)
                assert folder not in text
                (given.facts / f"{case}.{item}.json".replace("/", "-")).write_text(text)
    if not given.facts:
        GOLDEN.write_text(json.dumps(golden, indent=0) + "\n")


if __name__ == "__main__":
    main()
