"""Which entry of a checkpoint belongs to which of several live objects.

A path that was given decides. Then come the keys of a dict: as the path of an entry or the end of it, else by the stem
that is left of both without words such as ``net`` or ``optimizer``: ``netG`` is ``optimizer_G``. For the rest decides
what fits, by names and shapes; of several optimizers that fit, the one that the file has for the weights of the live
one. What fits alike is refused: order decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.ownership import owners
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find_trees
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.errors import UsageError
from ckpt8.core.text import counted, listed
from ckpt8.restoring.resume.given import Given

_SHOWN = 10
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_COMMON = frozenset(
    {
        *("state", "dict", "sd", "model", "models", "net", "nets", "network", "networks", "module", "weights"),
        *("optimizer", "optimizers", "optim", "optims", "opt", "opts", "checkpoint"),
    }
)
"""Words of keys that say what kind of thing an entry is, and not whose."""

Fits = Callable[[int, Candidate], int]
"""How well a candidate fits the object of a number: 0 for not at all."""


def candidates_at(path: Path, candidates: list[Candidate], at: str | None, keyword: str) -> list[Candidate]:
    """The candidate at the path ``at``, or all of them where none is given. Raises UsageError for an unknown path."""
    if at is None:
        return candidates
    found = [candidate for candidate in candidates if candidate.path == at]
    if not found:
        paths = listed((candidate.path for candidate in candidates), _SHOWN) or "nothing of the kind"
        raise UsageError(f"{path}: {keyword}={at!r} is not one of {paths}")
    return found


def match_several(path: Path, given: Given[Any], candidates: list[Candidate], fits: Fits) -> list[Candidate]:
    """The candidate of each object; of several that fit, the one that fits best.

    Where one object and one candidate are left, it gets what does not fit, so that the caller can say why. Raises
    UsageError where the choice is not clear.
    """
    matching = _Matching(path, given, candidates, fits)
    matching.by_path()
    matching.by_key()
    matching.by_fit()
    return [matching.chosen[number] for number in range(len(given.objects))]


class _Matching:
    def __init__(self, path: Path, given: Given[Any], candidates: list[Candidate], fits: Fits) -> None:
        self._path, self._given, self._candidates, self._fits = path, given, candidates, fits
        self.chosen: dict[int, Candidate] = {}
        if len(candidates) < len(given.objects):
            raise self._unclear(f"{len(given.objects)} were given")

    def _unclear(self, why: str) -> UsageError:
        paths = listed((candidate.path for candidate in self._candidates), _SHOWN)
        if not paths:
            return UsageError(f"{self._path}: holds no state dict of any {self._given.what}, and {why}")
        holds = f"{counted(len(self._candidates), f'{self._given.what} state')} ({paths})"
        return UsageError(
            f"{self._path}: holds {holds}, and {why}; give a dict with these keys, or {self._given.what}_at="
        )

    def _choose(self, number: int, candidate: Candidate) -> None:
        for other, taken in self.chosen.items():
            if taken is candidate:
                both = f"{self._given.labels[other]} and {self._given.labels[number]}"
                raise self._unclear(f"both {both} may be {candidate.path}")
        self.chosen[number] = candidate

    def _open(self) -> tuple[list[int], list[Candidate]]:
        """The objects without a candidate, and the candidates without an object."""
        taken = {id(candidate) for candidate in self.chosen.values()}
        numbers = [number for number in range(len(self._given.objects)) if number not in self.chosen]
        return numbers, [candidate for candidate in self._candidates if id(candidate) not in taken]

    def by_path(self) -> None:
        for number, at in enumerate(self._given.at):
            if at is not None:
                found = candidates_at(self._path, self._candidates, at, f"{self._given.what}_at")
                self._choose(number, found[0])

    def by_key(self) -> None:
        keys = self._given.keys or []
        for number, key in enumerate(keys):
            if number not in self.chosen:
                same = [each for each in self._candidates if each.path == key]
                same = same or [each for each in self._candidates if f".{each.path}".endswith(f".{key}")]
                if len(same) == 1:
                    self._choose(number, same[0])
        open_numbers, open_candidates = self._open()
        stems = {number: _stem(keys[number]) for number in open_numbers} if keys else {}
        for number, stem in stems.items():
            same = [each for each in open_candidates if stem and _stem(each.path) == stem]
            if len(same) > 1:
                same = [each for each in same if self._fits(number, each)]
            if len(same) == 1 and list(stems.values()).count(stem) == 1:
                self._choose(number, same[0])

    def by_fit(self) -> None:
        while self._settle_one():
            pass
        for number, found in self._options().items():
            if found:
                raise self._unclear(
                    f"{self._given.labels[number]} may be one of {listed((each.path for each in found), _SHOWN)}"
                )
        numbers, left = self._open()
        if numbers and not len(numbers) == len(left) == 1:
            raise self._unclear(f"none fits {self._given.labels[numbers[0]]}")
        for number in numbers:
            self._choose(number, left[0])

    def _options(self) -> dict[int, list[Candidate]]:
        """The open candidates that fit each open object best."""
        numbers, left = self._open()
        fits = {number: [self._fits(number, each) for each in left] for number in numbers}
        return {
            number: [each for each, fit in zip(left, own, strict=True) if fit == max(own) > 0]
            for number, own in fits.items()
        }

    def _settle_one(self) -> bool:
        """Choose for an object that one open candidate fits, and no other object alone. Whether there was one."""
        options = self._options()
        for number, found in options.items():
            if len(found) == 1 and list(options.values()).count(found) == 1:
                self._choose(number, found[0])
                return True
        return False


Weights = set[tuple[str, int]]
"""Saved tensors, each as the key of its storage and where it begins in it."""


def saved_weights(optimizer: Optimizer, filled: Mapping[int, TensorRef]) -> Weights:
    """The saved tensors that fill the parameters of a live optimizer; ``filled`` has those of all, by ``id``."""
    refs = (filled.get(id(each)) for group in optimizer.param_groups for each in group["params"])
    return {(ref.key, ref.offset) for ref in refs if ref is not None}


class TrainedWeights:
    """Which weights the optimizers of a file train."""

    def __init__(self, tree: object, optimizers: Sequence[Candidate]) -> None:
        found = owners(optimizers, find_trees(tree), by_order=False)
        self._owners = {id(each): owner for each, owner in zip(optimizers, found, strict=True)}

    def has(self, optimizer: Candidate, weights: Weights) -> bool:
        """Whether the optimizer trains the model of the weights for certain."""
        model = self._owners[id(optimizer)].model
        return model is not None and not weights.isdisjoint(_weights_in(model))

    def elsewhere(self, optimizer: Candidate, weights: Weights) -> str:
        """The paths of the models to which the key of the optimizer belongs, if none of them has the weights."""
        keyed = self._owners[id(optimizer)].keyed if weights else ()
        if any(not weights.isdisjoint(_weights_in(each)) for each in keyed):
            return ""
        return listed((each.path for each in keyed), _SHOWN)


def _weights_in(model: Candidate) -> Weights:
    return {(ref.key, ref.offset) for ref in model.node.values() if isinstance(ref, TensorRef)}


def _stem(path: str) -> tuple[str, ...]:
    """What a path says beside the kind of thing, as lower-case words: ``optimizer_G`` and ``netG`` are both ``g``."""
    words: Sequence[str] = [word.lower() for word in _WORDS.findall(path)]
    return tuple(word for word in words if word not in _COMMON)
