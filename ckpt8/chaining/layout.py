"""What all checkpoints of a run become together, and the bytes of that: chains, and deltas that lose their bases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ckpt8.chaining.choices import Choice, Item
from ckpt8.inspecting.prediction import Expected

LINKS = 4
"""The most deltas above a key."""

_SHARE = 0.8
"""What a delta takes of the whole, before any is known."""

_OFF, _OFF_BYTES = 0.01, 1 << 10
"""How much larger than predicted a file is at most: a part of it, and bytes."""

State = list[int | None]
"""The number of its choice for each item; None for one that goes."""


@dataclass(frozen=True, slots=True)
class Form:
    """What an item becomes: its ``choice``, None for one that goes, of ``nbytes``, a delta to item ``base`` or whole.

    ``is_rebased``: it stays as it is, but its base does not, so that it becomes whole.
    """

    choice: Choice | None
    nbytes: int = 0
    base: int | None = None
    is_rebased: bool = False

    @property
    def is_new(self) -> bool:
        """Whether it is compressed."""
        return self.choice is not None and self.choice.rung is not None


class Deltas:
    """What is predicted of deltas, each of an item to a base under the name of a rung."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int, str], Expected | None] = {}
        self._all: dict[str, list[float]] = {}
        self._shares: dict[str, float] = {}

    def add(self, key: tuple[int, int, str], found: Expected | None, whole: int) -> None:
        """Note one, of a file that takes ``whole`` bytes without it; None where it is hardly smaller."""
        self.known[key] = found
        shares = self._all.setdefault(key[2], [])
        shares.append(1.0 if found is None else found.nbytes / whole)
        self._shares[key[2]] = median(shares)

    def share(self, name: str) -> float:
        """What a delta of a rung takes of the whole: the median of those that are known."""
        return self._shares.get(name, _SHARE)

    def nbytes(self, index: int, base: int, choice: Choice) -> int | None:
        """What a delta takes, as far as it is known; None where it is hardly smaller than the whole."""
        key = index, base, choice.name
        if key in self.known:
            known = self.known[key]
            return None if known is None else known.nbytes
        return int(self.share(choice.name) * choice.nbytes)


_Place = tuple[int, int, str | None]
"""The chain that an item may continue: the number of its last one, its deltas, and the name of its rung."""

_NOWHERE: _Place = (-1, 0, None)

_Part = tuple[int, int, int | None, _Place]
"""Of an item the bytes, those to spare, the base of its delta, and the chain after it."""


class Layout:
    """The forms of ``items`` in a ``state``, and the ``total`` of their bytes. What is ``done`` has its form.

    With ``deltas``, neighbours of one rung are chains. ``outside`` are the bytes that all of those take together that
    lean on bases of checkpoints that are gone. What a change makes of the total is found from the items after it, up to
    where all is as before.
    """

    def __init__(
        self, items: Sequence[Item], state: State, done: Mapping[int, Form], deltas: Deltas | None, outside: int
    ) -> None:
        self._items, self.state, self._done, self._deltas, self._outside = items, list(state), done, deltas, outside
        self._above = defaultdict[int, list[int]](list)
        for index, item in enumerate(items):
            if item.base is not None:
                self._above[item.base].append(index)
        self._loses_base = [self._would_lose_base(index) for index in range(len(items))]
        self._leaning = sum(map(self._leans, range(len(items)), state))
        self._parts = list[_Part]()
        for index, number in enumerate(state):
            chain = self._parts[-1][3] if index else _NOWHERE
            self._parts.append(self._part(index, number, chain, loses_base=self._loses_base[index]))
        self.total = sum(part[0] + part[1] for part in self._parts) + (outside if self._leaning else 0)

    @property
    def taken(self) -> int:
        """The total without the bytes to spare."""
        return self.total - sum(part[1] for part in self._parts)

    def forms(self) -> list[Form]:
        """The form of each item."""
        return [self._done.get(index) or self._form(index, number) for index, number in enumerate(self.state)]

    def _form(self, index: int, number: int | None) -> Form:
        if number is None:
            return Form(None)
        choice, (nbytes, _, base, _) = self._items[index].choices[number], self._parts[index]
        return Form(choice, nbytes, base, is_rebased=choice.rung is None and self._loses_base[index])

    def more(self, index: int, number: int | None, far: int) -> tuple[int, int]:
        """How many bytes more all take if an item gets another choice, and the last item that this changes.

        Of those after it, it looks at ``far`` at most.
        """
        parts = self._changed(index, number, far)
        return self._more(index, number, parts, self._bases_after(index, number)), index + len(parts) - 1

    def _more(self, index: int, number: int | None, parts: Sequence[_Part], bases: Sequence[tuple[int, bool]]) -> int:
        more = 0
        for at, part in enumerate(parts, index):
            known = self._parts[at]
            more += part[0] + part[1] - known[0] - known[1]
        for at, loses_base in bases:
            more += self._bytes_now(at, loses_base=loses_base) - self._parts[at][0]
        leaning = self._leaning - self._leans(index, self.state[index]) + self._leans(index, number)
        return more + self._outside * (bool(leaning) - bool(self._leaning))

    def change(self, index: int, number: int | None) -> int:
        """Give an item another choice. Returns the last item that this changes, of all where a base is concerned."""
        count = len(self._items)
        parts, bases = self._changed(index, number, count), self._bases_after(index, number)
        self.total += self._more(index, number, parts, bases)
        self._leaning += self._leans(index, number) - self._leans(index, self.state[index])
        self.state[index] = number
        self._parts[index : index + len(parts)] = parts
        self._loses_base[index] = self._would_lose_base(index)
        for at, loses_base in bases:
            self._loses_base[at] = loses_base
            self._parts[at] = self._part(at, self.state[at], _NOWHERE, loses_base=loses_base)
        return count if self._above else index + len(parts) - 1

    def _changed(self, index: int, number: int | None, far: int) -> list[_Part]:
        """The parts from an item on that change with its choice."""
        chain = self._parts[index - 1][3] if index else _NOWHERE
        parts = [self._part(index, number, chain, loses_base=self._would_lose_base(index))]
        at = index
        while parts[-1][3] != self._parts[at][3] and at + 1 < len(self._items) and len(parts) <= far:
            at += 1
            parts.append(self._part(at, self.state[at], parts[-1][3], loses_base=self._loses_base[at]))
        return parts

    def _part(self, index: int, number: int | None, chain: _Place, *, loses_base: bool) -> _Part:
        """What an item is in a chain."""
        done = self._done.get(index)
        if done is not None:
            links = 0 if done.base is None else chain[1] + 1
            after = chain if done.choice is None else (index, links, done.choice.name) if done.is_new else _NOWHERE
            return done.nbytes, 0, done.base, after
        if number is None:
            return 0, 0, None, chain
        choice = self._items[index].choices[number]
        if choice.rung is None:
            return self._bytes(index, choice, loses_base=loses_base), 0, None, _NOWHERE
        last, links, name = chain
        can_follow = self._deltas is not None and name == choice.name and links < LINKS
        nbytes = self._deltas.nbytes(index, last, choice) if can_follow and self._deltas else None
        if nbytes is None:
            return choice.nbytes, int(_OFF * choice.nbytes) + _OFF_BYTES, None, (index, 0, choice.name)
        return nbytes, int(_OFF * nbytes) + _OFF_BYTES, last, (index, links + 1, choice.name)

    def _bytes_now(self, index: int, *, loses_base: bool) -> int:
        return self._bytes(index, self._items[index].choices[self.state[index] or 0], loses_base=loses_base)

    def _bytes(self, index: int, choice: Choice, *, loses_base: bool) -> int:
        """What an item takes that stays as it is, but for its base."""
        item = self._items[index]
        return item.alone + choice.nbytes - item.record.stored_bytes if loses_base else choice.nbytes

    def _stays(self, index: int, number: int | None) -> bool:
        """Whether an item with this choice is not compressed."""
        return number is not None and self._items[index].choices[number].rung is None

    def _leans(self, index: int, number: int | None) -> bool:
        form = self._done.get(index)
        if form is not None:
            return self._items[index].leans and form.choice is not None and not (form.is_new or form.is_rebased)
        return self._items[index].leans and self._stays(index, number)

    def _would_lose_base(self, index: int, other: int = -1, number: int | None = None) -> bool:
        """Whether a file that an item needs does not stay as it is, where ``other`` has the choice ``number``."""
        base = self._items[index].base
        while base is not None:
            form = self._done.get(base)
            if form is not None:
                return form.choice is None or form.is_new or form.is_rebased
            if not self._stays(base, number if base == other else self.state[base]):
                return True
            base = self._items[base].base
        return False

    def _bases_after(self, index: int, number: int | None) -> list[tuple[int, bool]]:
        """Which of the items that stay as they are lose a base, or keep it, once an item has another choice."""
        if index not in self._above or self._stays(index, number) == self._stays(index, self.state[index]):
            return []
        found, waiting = [], [index]
        for at in waiting:
            for above in self._above.get(at, ()):
                if above not in self._done and self._stays(above, self.state[above]):
                    waiting.append(above)
                    loses_base = self._would_lose_base(above, index, number)
                    if loses_base != self._loses_base[above]:
                        found.append((above, loses_base))
        return found
