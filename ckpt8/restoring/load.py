"""``ckpt8.load``: loads one member of a container, as the object that its own library would load."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import IO, Any

import torch

from ckpt8.checkpoint.meaning.optimizer_state import SavedParameter
from ckpt8.checkpoint.meaning.pairing import saved_parameters
from ckpt8.checkpoint.meaning.parameters import join_weights
from ckpt8.checkpoint.meaning.state_dicts import find, is_packed, weight_checks
from ckpt8.checkpoint.sources.stored_member import load_plain, load_source, member_index
from ckpt8.codecs import Codec
from ckpt8.container.header import is_meant_as_container
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import find_sharded
from ckpt8.core.errors import UsageError, WrongTypeError, require
from ckpt8.core.files.file_objects import path_to_read
from ckpt8.core.files.paths import as_path
from ckpt8.core.public import checked, described
from ckpt8.core.workers import Workers
from ckpt8.optim.packed_tensor import weight_check
from ckpt8.optim.state_conversion import join_weight, unpack


@checked
def load(
    path: str | os.PathLike[str] | IO[bytes],
    map_location: Any = None,
    *,
    weights_only: bool = True,
    member: str | None = None,
    unpack: bool = False,
    threads: int | None = None,
) -> Any:
    """Load what ``torch.load(..., weights_only=True)`` or safetensors' ``load_file`` would give for the original.

    ``path`` may also be an original of torch or safetensors, and a binary file such as ``io.BytesIO``. Arrays and
    scalars of numpy are loaded as well. A file that has any comes on the CPU, unless ``map_location`` names a device.
    ``weights_only`` is for those who write it for torch: False is refused, as nothing here unpickles.

    A container of several checkpoint files needs ``member``, the path of one of them. A file of a distributed
    checkpoint, which has to be named too, gives the slices of tensors in it by name: ``wte.weight[0:64,:]``. To load
    such a checkpoint as a whole, restore it and use ``torch.distributed.checkpoint``. A directory that
    ``Ckpt8StorageWriter`` wrote gives the whole state dict.

    With ``unpack``, a run of ``ckpt8.optim`` comes as the published optimizers would have saved it: codes
    and scales as fp32 moments, in the layout of torch, optimi, came-pytorch or lion-pytorch, and a 16-bit weight with
    its residual or master as the fp32 weight. It changes nothing about other optimizers.

    Raises UsageError that lists the members where one must be named, UnsupportedError that lists the classes which
    torch does not allow, and InputError for damage.

    >>> ckpt8.load("run.ckpt8")["model"]["weight"].shape
    torch.Size([128, 128])
    """
    if not weights_only:
        raise UsageError("load: weights_only is False; leave it out: ckpt8 never runs what a pickle names")
    if not isinstance(path, (str, os.PathLike)):
        require(callable(getattr(path, "read", None)), f"load: {described(path)} cannot be read", WrongTypeError)
        with path_to_read(path) as copied:
            return load(copied, map_location, member=member, unpack=unpack, threads=threads)
    path = as_path(path)
    if (directory := find_sharded(path)) is not None:
        if member is not None or unpack:
            advice = "leave out member" if not unpack else "convert it to torch with dtype float32 to unpack it"
            raise UsageError(f"{path}: is a directory of containers of ranks, and loaded as a whole; {advice}")
        # Needs torch.distributed.checkpoint, which takes as long to import as torch.
        from ckpt8.restoring.sharded import load_directory

        return load_directory(directory, map_location, threads)
    if not is_meant_as_container(path):
        if member is not None:
            raise UsageError(f"{path}: is one checkpoint and no .ckpt8; leave out member")
        obj, tree = load_plain(path, map_location)
        return unpack_tree(obj, tree, str(path)) if unpack else obj
    with ContainerReader(path) as reader, Workers(threads) as workers:
        index = member_index(reader, member)
        file = MemberFile(reader, index, workers)
        file.expect()
        obj, tree = load_source(reader, index, file, map_location)
        if unpack:
            obj = unpack_tree(obj, tree, str(path))
        return obj


def _join_loaded(
    saved: Mapping[str, Any],
    model: Mapping[str, torch.Tensor],
    states: Mapping[int, Mapping[str, torch.Tensor]],
    parameters: Iterable[SavedParameter],
    label: str,
) -> dict[str, torch.Tensor]:
    """The fp32 weights of the loaded ``model``. ``states`` are the loaded states, by the ``id`` of the saved ones.

    Names or order propose the weight of a parameter; the check in its group must agree.
    """

    def join(parameter: SavedParameter, key: str, codec: Codec) -> tuple[str, torch.Tensor]:
        where = f"{label}: {parameter.name}"
        if parameter.weight is None:
            raise UsageError(f"{where}: which weight it completes is unknown: {parameter.unpaired}; leave out unpack")
        name = next(own for own, ref in saved.items() if ref is parameter.weight)
        weight = model[name]
        if weight.is_meta:
            raise UsageError(f"{where}: cannot be unpacked on the meta device")
        expected = weight_checks(parameter.group).get(parameter.identifier)
        if weight.element_size() != 2 or expected != weight_check(weight):
            raise UsageError(
                f"{where}: its state belongs to another weight than {name}, which has its place; leave out unpack"
            )
        return name, join_weight(weight, states[id(parameter.state)][key], codec)

    def is_copy(name: str, other: str) -> bool:
        mine, theirs = (model[key].contiguous().view(torch.int16) for key in (name, other))
        return bool(model[name].any()) and torch.equal(mine, theirs)

    return join_weights(saved, parameters, join, is_copy)


def unpack_tree(obj: Any, tree: object, where: str) -> Any:
    """Unpack all state of ``ckpt8.optim`` in ``obj``, loaded from ``tree``; return ``obj``, changed in place.

    Where ``obj`` is itself a packed state, returns the plain one. Raises UsageError where it is not certain which
    weight a residual completes, where the published optimizer cannot express a state, and for a state in a tuple.
    """
    models, optimizers = find(tree)
    packed = [optimizer for optimizer in optimizers if is_packed(optimizer)]
    if not packed:
        return obj

    places = _places(tree, obj, {id(candidate.node) for candidate in (*models, *packed)})
    states: dict[int, Mapping[str, torch.Tensor]] = {}
    for candidate in packed:
        loaded = places[id(candidate.node)][0][0]["state"]
        pairs = zip(candidate.node["state"].values(), loaded.values(), strict=True)
        states.update((id(saved), state) for saved, state in pairs)
    parameters = saved_parameters(tree)
    for saved in [model.node for model in models] or [{}]:
        loaded_model: dict[str, Any] = places[id(saved)][0][0] if id(saved) in places else {}
        loaded_model.update(_join_loaded(saved, loaded_model, states, parameters, where))
    for candidate in packed:
        plain = unpack(places[id(candidate.node)][0][0])
        for _, parent, key in places[id(candidate.node)]:
            if parent is None:
                return plain
            if isinstance(parent, tuple):
                raise UsageError(
                    f"{where}: {candidate.path} lies in a tuple, which cannot be changed; leave out unpack"
                )
            parent[key] = plain
    return obj


def _places(tree: object, obj: Any, wanted: Collection[int]) -> dict[int, list[tuple[Any, Any, Any]]]:
    """The places in ``obj`` of the nodes of ``tree`` with a ``wanted`` ``id``. Walks both trees in step.

    A place is ``(value, parent, key)``; ``parent`` is None for ``obj`` itself.
    """
    places: dict[int, list[tuple[Any, Any, Any]]] = {}
    seen = set()
    stack: list[tuple[Any, tuple[Any, Any, Any]]] = [(tree, (obj, None, None))]
    while stack:
        node, place = stack.pop()
        if id(node) in wanted:
            places.setdefault(id(node), []).append(place)
        if id(node) in seen:
            continue
        seen.add(id(node))
        value, pairs = place[0], list[tuple[Any, Any, Any]]()
        if isinstance(node, dict) and isinstance(value, dict):
            pairs = list(zip(node.values(), value.values(), value, strict=True))
        elif isinstance(node, (list, tuple)) and isinstance(value, (list, tuple)):
            pairs = list(zip(node, value, range(len(node)), strict=True))
        stack += [(child, (item, value, key)) for child, item, key in pairs]
    return places
