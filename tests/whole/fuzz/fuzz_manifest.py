"""Edits of a container by the grammar of its manifest: references, counts, names, and records as a whole.

A manifest that is edited at random is mostly refused at its first field. Here a field gets what a field of its kind may
hold, so that most edits get past the types and reach what the reader concludes from them.
"""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from fuzz_grammar import CHOICES, HUGE, LISTS, MODES, NAMES, NUMBERS, OTHERS, PATHS, REFERENCES, TABLES

Manifest = dict[str, Any]
Entries = dict[str, bytes]
Slot = tuple[Any, Any]  # a container of JSON and the key or index of a field in it


def _lists(tree: Any) -> Iterator[list[Any]]:
    """Every list of a tree that has elements."""
    for value in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(value, (dict, list)) and value:
            if isinstance(value, list):
                yield value
            if not isinstance(value, list) or isinstance(value[0], (dict, list)):
                yield from _lists(value)


def _records(manifest: Manifest) -> list[tuple[str, dict[str, Any]]]:
    """Every record of the four lists, and every table, with its name. The manifest may be edited already."""
    tables = [(name, manifest[name]) for name in TABLES if isinstance(manifest.get(name), dict) and manifest[name]]
    return tables + [
        (name, record)
        for name in LISTS
        for record in (manifest.get(name) if isinstance(manifest.get(name), list) else [])
        if isinstance(record, dict)
    ]


def _fields(tree: Any, key: str = "") -> Iterator[tuple[str, Slot]]:
    """Every field of a record with the name that says its kind; elements of lists bear that of the list."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for place, value in list(pairs):
        name = place if isinstance(place, str) else key
        yield name, (tree, place)
        if isinstance(value, (dict, list)):
            yield from _fields(value, name)


def _pick(rng: random.Random, manifest: Manifest) -> tuple[str, Slot] | None:
    """A field of a record: its kind and its place. Lists, and the fields of a record, are chosen evenly."""
    if rng.random() < 0.1:
        kind, slot = rng.choice(list(_fields({k: v for k, v in manifest.items() if k not in LISTS + TABLES})))
        return kind, (manifest, kind) if kind in manifest else slot
    by_list: dict[str, list[dict[str, Any]]] = {}
    for name, record in _records(manifest):
        by_list.setdefault(name, []).append(record)
    if not by_list:
        return None
    name = rng.choice(list(by_list))
    by_kind: dict[str, list[Slot]] = {}
    for kind, slot in _fields(rng.choice(by_list[name])):
        by_kind.setdefault(kind, []).append(slot)
    if not by_kind:
        return None
    kind = rng.choice(list(by_kind))
    return kind, rng.choice(by_kind[kind])


def _index(rng: random.Random, manifest: Manifest) -> Any:
    """A reference to a storage: mostly one that is there."""
    storages = manifest.get("storages")
    count = len(storages) if isinstance(storages, list) else 0
    return rng.randrange(count) if count and rng.random() < 0.8 else rng.choice((count, -1, *NUMBERS))


def _count(rng: random.Random, old: Any) -> Any:
    """Another number: one near the old one, or at a boundary."""
    if type(old) is int and rng.random() < 0.5:
        return rng.choice((old + 1, old - 1, old * 2, old // 2, -old, old + 2**20, old * 2**20, old + 0.0, str(old)))
    return rng.choice(NUMBERS)


def edit_field(rng: random.Random, manifest: Manifest) -> None:
    """Another value for one field, of its kind or of any."""
    found = _pick(rng, manifest)
    if found is None:
        return
    kind, (place, key) = found
    old, dice = place[key], rng.random()
    if dice < 0.07:
        del place[key]
    elif dice < 0.14:
        place[key] = copy.deepcopy(rng.choice(OTHERS))
    elif kind in REFERENCES and not isinstance(old, float):
        place[key] = _index(rng, manifest)
    elif kind in ("segments", "crc_fields", "runs") and type(old) is int:
        is_index = key == (0 if kind == "runs" else 1)
        place[key] = _index(rng, manifest) if is_index else _count(rng, old)
    elif isinstance(old, dict) and old.keys() & {"all", "from"}:
        place[key] = rng.choice(({"all": rng.choice(OTHERS)}, {"from": rng.choice(NUMBERS)}, {"all": 1, "from": 1}, []))
    elif kind in CHOICES and not isinstance(old, list | dict):
        place[key] = copy.deepcopy(rng.choice(CHOICES[kind]))
    elif kind in NAMES and not isinstance(old, list):
        place[key] = rng.choice(PATHS if rng.random() < 0.7 else _names(manifest) or PATHS)
    elif isinstance(old, dict) and old and rng.random() < 0.5:
        first, second = rng.choice(list(old)), rng.choice(list(old))
        old[first], old[second] = old[second], old[first]
    elif isinstance(old, dict):
        old[rng.choice(("x", "bytes", "plane0", "codes", "moment1", "max_moment2", "R", "runs", ""))] = _count(rng, 1)
    elif isinstance(old, list):
        _edit_list(rng, old, rng.choice(NUMBERS))
    else:
        place[key] = _count(rng, old)


def _names(manifest: Manifest) -> list[str]:
    return [record["name"] for _, record in _records(manifest) if isinstance(record.get("name"), str)]


def _edit_list(rng: random.Random, found: list[Any], new: Any = None) -> None:
    """Drop, double, swap, move, repeat, reverse or empty what a list holds."""
    if not found:
        found.append(new)
        return
    at, other, how = rng.randrange(len(found)), rng.randrange(len(found)), rng.randrange(8)
    if how == 0:
        del found[at]
    elif how <= 2:
        found.insert(other, copy.deepcopy(found[at]))
    elif how <= 4:
        found[at], found[other] = found[other], found[at]
    elif how == 5:
        found.insert(other, found.pop(at))
    elif how == 6:
        found.reverse()
    elif rng.random() < 0.3:
        found[:] = [found[at]] * rng.choice((2, 40, 40, 1000))
    else:
        found.clear()


def edit_record(rng: random.Random, manifest: Manifest) -> None:
    """Records, entries of one, or elements of its lists dropped, doubled, swapped or moved."""
    name = rng.choice(LISTS)
    if isinstance(manifest.get(name), list) and rng.random() < 0.5:
        _edit_list(rng, manifest[name], {})
        return
    _edit_list(rng, rng.choice(list(_lists(manifest)) or [[]]))


def edit_reference(rng: random.Random, manifest: Manifest) -> None:
    """Storages that are copies of others, of themselves and of copies, differences; two that change their places."""
    storages = [record for name, record in _records(manifest) if name == "storages"]
    if len(storages) < 2:
        return
    a, b = rng.sample(range(len(storages)), 2)
    how = rng.randrange(6)
    if how == 0:
        number = storages[a].get("numel")
        run = [rng.choice((a, b, None)), rng.choice((0, 0, 1, 2**15)), number]
        storages[a]["codec"] = {
            "id": rng.choice(("reference/1", "reference/2")),
            "runs": [run] * rng.choice((1, 1, 1, 2, 3000)),
        }
        storages[a]["parts"] = {}
        storages[a]["dtype"] = rng.choice(("bfloat16", "float16", storages[a].get("dtype")))
    elif how == 1:
        for key in rng.sample(("codec", "parts", "dtype", "numel", "role", "error", "name", "reason"), 2):
            storages[a][key], storages[b][key] = storages[b].get(key), storages[a].get(key)
    elif how == 2:
        storages[a][rng.choice(("codec", "parts", "dtype", "role", "error"))] = copy.deepcopy(
            storages[b].get(rng.choice(("codec", "parts", "dtype", "role", "error")))
        )
    elif how == 3:
        codec = storages[a].get("codec")
        is_delta = isinstance(codec, dict) and codec.get("id") == "delta/1"
        storages[a]["codec"] = codec.get("codec") if is_delta else {"id": "delta/1", "base": b, "codec": codec}
    else:
        _swap_segments(rng, manifest)


def _swap_segments(rng: random.Random, manifest: Manifest) -> None:
    """Two storages, mostly of one size, lie in each other's place."""
    storages, alike = manifest["storages"], {}
    for _, record in _records(manifest):
        for segment in record["segments"] if isinstance(record.get("segments"), list) else ():
            match segment:
                case [_, int(at)] if 0 <= at < len(storages) and isinstance(storages[at], dict):
                    alike.setdefault(f"{storages[at].get('numel')} {storages[at].get('dtype')}", []).append(segment)
    groups = [each for each in alike.values() if len(each) > 1] or list(alike.values())
    if groups:
        group = rng.choice(groups)
        a, b = rng.choice(group), rng.choice(group)
        a[1], b[1] = b[1], a[1]


def edit_modes(rng: random.Random, manifest: Manifest) -> None:
    """Symbols packed in another way, which the frames may hold."""
    parts = [each["parts"] for _, each in _records(manifest) if isinstance(each.get("parts"), dict)]
    tables = [table for each in parts for table in each.values() if isinstance(table, dict) and "modes" in table]
    if tables:
        modes = rng.choice(tables)["modes"]
        if isinstance(modes, list) and modes:
            modes[rng.randrange(len(modes))] = copy.deepcopy(rng.choice(MODES))


def edit_view(rng: random.Random, manifest: Manifest) -> None:
    """A tensor gets a shape, strides, an offset and a type that belong together, or nearly so."""
    tensors = [record for name, record in _records(manifest) if name == "tensors"]
    if not tensors:
        return
    record, number = rng.choice(tensors), rng.choice((0, 1, 2, 8, 2**20, 2**31, 2**40, 2**61, HUGE))
    shape = rng.choice(([number], [number, 0], [0, number], [number] * 2, [1] * 65, [1] * 3000, [number, 1, 2], []))
    stride = rng.choice(([0] * len(shape), [1] * len(shape), [number] * len(shape), [number][: len(shape)]))
    record |= {"shape": shape, "stride": stride}
    if rng.random() < 0.3:
        record["offset"] = rng.choice((0, 1, number))
    if rng.random() < 0.3:
        record["dtype"] = rng.choice(CHOICES["dtype"])


def renumber(rng: random.Random, manifest: Manifest) -> None:
    """Put the storages in another order and every reference with them: the container says the same as before."""
    order = list(range(len(manifest["storages"])))
    rng.shuffle(order)
    new = {old: at for at, old in enumerate(order)}
    manifest["storages"] = [manifest["storages"][old] for old in order]
    for record in manifest["storages"]:
        record["codec"]["runs"] = [[new.get(run[0]), *run[1:]] for run in record["codec"].get("runs", [])]
        if not record["codec"]["runs"]:
            del record["codec"]["runs"]
        match record["codec"].get("second"):
            case int(other):
                record["codec"]["second"] = new[other]
            case [rows, columns, *sizes]:
                record["codec"]["second"] = [new[rows], new[columns], *sizes]
    for tensor in manifest["tensors"]:
        tensor["storage"] = new[tensor["storage"]]
    for parameter in manifest["parameters"]:
        parameter["moments"] = {slot: new[index] for slot, index in parameter["moments"].items()}
        steps = parameter.get("steps") or {}
        if steps.get("weight_storage") is not None:
            steps["weight_storage"] = new[steps["weight_storage"]]
    for member in manifest["members"]:
        member["skeleton"] = new[member["skeleton"]]
        for key in ("segments", "crc_fields"):
            member[key] = [[place, new[index]] for place, index in member[key]]


def edit_entries(rng: random.Random, manifest: Manifest, entries: Entries) -> None:
    """Entries dropped, doubled, renamed, swapped; frames cut anew, emptied, or many of them."""
    name, other, how = rng.choice(list(entries)), rng.choice(list(entries)), rng.randrange(7)
    if how == 0:
        del entries[name]
    elif how == 1:
        entries[rng.choice((name + "@1", name + "x", "x/bytes", "", "\ud800", "a" * 3000, "../x"))] = entries[name]
    elif how == 2:
        entries[rng.choice((name + "@0", other + "x", "ckpt8.x", "__metadata__x"))] = entries.pop(name)
    elif how == 3:
        entries[name], entries[other] = entries[other], entries[name]
    else:
        _edit_frames(rng, manifest, entries)


def _edit_frames(rng: random.Random, manifest: Manifest, entries: Entries) -> None:
    record = rng.choice(manifest["storages"])
    for part, table in record["parts"].items():
        name = f"{record['name']}{':' if 'shared' in record else '/'}{part}"
        if name in entries:
            frame, times = entries[name], rng.choice((0, 1, 2, 3))
            frame = rng.choice((frame, frame[:-1], frame + b"x", b"", frame[::-1], bytes(len(frame))))
            entries[name] = frame * times
            table |= {"lengths": [len(frame)] * times, "crcs": [zlib.crc32(frame)] * times}
            if rng.random() < 0.5:
                record["numel"] = rng.choice((0, 1, 2**20 * times, record["numel"]))


_EDITS: tuple[Callable[[random.Random, Manifest], None], ...] = (
    edit_field, edit_field, edit_field, edit_record, edit_record, edit_reference, edit_view, edit_modes,
)  # fmt: skip


def edit_manifest(rng: random.Random, manifest: Manifest, entries: Entries) -> tuple[Manifest, Entries]:
    """A copy with one to three edits."""
    manifest, entries = json.loads(json.dumps(manifest)), dict(entries)
    if rng.random() < 0.1 and "tensor_table" not in manifest:
        renumber(rng, manifest)
    if rng.random() < 0.15:
        edit_entries(rng, manifest, entries)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        rng.choice(_EDITS)(rng, manifest)
    return manifest, entries
