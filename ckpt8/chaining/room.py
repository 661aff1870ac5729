"""Fits the checkpoints of a run into so much room: what each of them becomes.

Each checkpoint has choices from fine to coarse: as it is, then the presets and budgets of RUNGS, then gone. The use of
checkpoint i among those that stay is

    u_i = span_i / age_i        span: half the steps from the one before, or from the first of the run, to the one after
                                age: the steps to the newest, and one interval

so that checkpoints at equal distances count 1, 1/2, 1/3, ... from the newest back. The best one counts 1 at least. The
loss of a choice is u times its error in steps of the optimizer, and u times GONE for one that goes. The search takes
the choice with the least loss for each byte that it frees, until all fits; then it takes back what fits the room that
is left, the greatest gain first, until nothing more does.

Files are whole as long as all fit so at the finest rung. Else neighbours of one rung become chains: a key, and up to
LINKS deltas, each to the one before. Deltas lose nothing, and come before coarser rungs.

Sizes are those of ``inspecting.prediction``. That of a delta is predicted for the pairs of the plan that is found, and
until then is the whole size times the share that the others of its rung have; then the search is repeated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from heapq import heappop, heappush
from itertools import pairwise
from statistics import median

from ckpt8.chaining.choices import Item
from ckpt8.chaining.keeping import Ranking, interval
from ckpt8.chaining.layout import Deltas, Form, Layout, State
from ckpt8.core.errors import InputError
from ckpt8.inspecting.prediction import Expected, expect_delta

GONE = 20.0
"""The error in steps that one which goes counts as: old ones become as coarse as they may before some go."""

_TRIED = 8
"""Choices whose sizes are added up before one of them is taken."""

_SEARCHES = 8
"""Searches from the beginning with better and better sizes, at most."""

_SMALL, _FAR, _FEW = 100, 20, 2
"""In a run of more checkpoints than this, so many after one tell about what its change frees, and fewer searches do."""


_Move = tuple[float, float, int, int]
"""Of a coarser choice its loss for each byte, about; its loss, the item, and the choice: -1 for gone."""


class _Freed:
    """What choices free in a layout. What one frees is found once, until something near it changes."""

    def __init__(self, layout: Layout) -> None:
        self._layout, count = layout, len(layout.state)
        self._far = count if count <= _SMALL else _FAR
        self._known = [dict[int, int]() for _ in layout.state]

    def __call__(self, index: int, then: int) -> int:
        """The bytes that a choice frees; -1 is gone."""
        known = self._known[index]
        if then not in known:
            known[then] = -self._layout.more(index, None if then < 0 else then, self._far)[0]
        return known[then]

    def change(self, index: int, then: int | None) -> None:
        """Give an item a choice."""
        last = self._layout.change(index, then)
        first = 0 if last == len(self._known) else max(index - self._far - 1, 0)
        for known in self._known[first : last + 1]:
            known.clear()


class _Moves:
    """The choices that may be taken next, in the order of what they look like."""

    def __init__(self, count: int) -> None:
        self._heap, self._made = list[tuple[_Move, int]](), [0] * count

    def make(self, index: int, moves: Iterable[_Move]) -> None:
        """Those of an item, in place of the ones before."""
        self._made[index] += 1
        for move in moves:
            heappush(self._heap, (move, self._made[index]))

    def best(self, freed: Callable[[int, int], int]) -> tuple[int, int | None] | None:
        """Item and choice with the least loss for each byte, among the first ones that free any; None without one."""
        looked_at = list[tuple[_Move, int]]()
        best: _Move | None = None
        while best is None and (first := self._first()):
            looked_at += first
            moves = [move for move, _ in first if freed(*move[2:]) > 0]
            best = min(moves, key=lambda move: (move[1] / freed(*move[2:]), move[2]), default=None)
        for move in looked_at:
            heappush(self._heap, move)
        return None if best is None else (best[2], None if best[3] < 0 else best[3])

    def _first(self) -> list[tuple[_Move, int]]:
        """Take the first few."""
        first = list[tuple[_Move, int]]()
        while self._heap and len(first) < _TRIED:
            move, made = heappop(self._heap)
            if made == self._made[move[2]]:
                first.append((move, made))
        return first


class RoomError(Exception):
    """The least room that the checkpoints take."""

    def __init__(self, least: int) -> None:
        super().__init__(least)
        self.least = least


class Planner:
    """Finds what becomes of ``items``, which are in the order of their steps, in ``room`` bytes if given.

    What is not ``kept`` goes, if it may; what is in ``firm`` does not go for the lack of room. Without a room, what is
    kept stays as it is. ``outside`` are the bytes of bases of checkpoints that are gone. ``done`` is what has become of
    some items. ``tell`` gets the names of some.
    """

    def __init__(
        self,
        items: Sequence[Item],
        room: int | None,
        kept: Set[int],
        firm: Set[int],
        *,
        outside: int = 0,
        delta: bool,
        threads: int | None,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._items, self._outside, self._room, self._firm = items, outside, room, firm
        self._may_delta, self._threads, self._tell = delta, threads, tell
        self.done: dict[int, Form] = {}
        self._start: State = [0 if i in kept or not item.may_go else None for i, item in enumerate(items)]
        self._places = _places([item.record.step for item in items])
        self._deltas = Deltas()
        ranking = Ranking.of([item.record for item in items])
        self._best = {*ranking.order()[:1], *ranking.named}
        self._unit = max(median([b - a for a, b in pairwise(self._places)] or [1.0]), 1.0)
        # What was found last.
        self._state, self._delta = self._start, False
        self._forms: list[Form] | None = None

    def plan(self) -> list[Form]:
        """What becomes of each item. Raises RoomError where that is more than the room."""
        self._delta = False
        state = self._search(self._start)
        if self._may_delta and not (state and self._is_fine(state)):
            self._delta = True
            return self._settled(self._start)
        if state is None:
            raise RoomError(self._layout(self._least()).total)
        return self._found(state)

    def go_on(self) -> list[Form]:
        """The last plan, as far as it still fits with what is ``done``, or better. Raises as ``plan``."""
        return self._settled(self._state) if self._forms is None else self._forms

    def settle(self, index: int, form: Form) -> None:
        """Note what has become of an item: the plan stands if it stays as it is or goes, as planned."""
        if self._forms is not None and (form.is_new or form != self._forms[index]):
            self._forms = None
        self.done[index] = form

    def hold(self, indexes: Set[int], outside: int) -> None:
        """Search again: these stay as they are, and as many bytes ``outside`` more are needed for that."""
        self._firm, self._outside, self._forms = self._firm | indexes, self._outside + outside, None
        for index in indexes:
            self._start[index] = self._state[index] = 0

    def forget(self) -> None:
        """Search again: an item takes more than it did."""
        self._forms = None

    def _found(self, state: State) -> list[Form]:
        self._state, self._forms = state, self._layout(state).forms()
        return self._forms

    def _is_fine(self, state: State) -> bool:
        """Whether nothing goes for the lack of room, and nothing is coarser than the finest rung."""
        return all(
            number is not None and (number == 0 or item.choices[number - 1].rung is None)
            for item, number, began in zip(self._items, state, self._start, strict=True)
            if began is not None
        )

    def _settled(self, begin: State) -> list[Form]:
        """Search from a state on until the sizes of all deltas are predicted."""
        state, tried = self._search(begin), 1
        searches = _SEARCHES if len(begin) <= _SMALL else _FEW
        while self._measure(state or self._least()):
            # Some searches begin anew; then the last one is mended.
            state, tried = self._search(begin if tried < searches else state or begin), tried + 1
        if state is None:
            raise RoomError(self._layout(self._least()).total)
        return self._found(state)

    def _least(self) -> State:
        """Only what has to stay, as coarse as it may be."""
        return [
            len(item.choices) - 1 if began is not None and (i in self._firm or not item.may_go) else None
            for i, (item, began) in enumerate(zip(self._items, self._start, strict=True))
        ]

    def _measure(self, state: State) -> bool:
        """Predict the deltas of a layout that are not known yet; False where all are."""
        forms, is_new = self._layout(state).forms(), False
        for index, form in enumerate(forms):
            if index in self.done or form.base is None or form.choice is None or form.choice.rung is None:
                continue
            key = index, form.base, form.choice.name
            if key in self._deltas.known:
                continue
            self._tell(self._items[index].record.name)
            planned = self._planned(form.base, forms[form.base])
            source, base = self._items[index].source, self._items[form.base].source
            try:
                found = expect_delta(source, form.choice.rung.policy, base, planned.plan, self._threads)
            except InputError:  # one of both turns out to be damaged as it is compressed
                found = None
            self._deltas.add(key, found, form.choice.nbytes)
            is_new = True
        return is_new

    def _planned(self, index: int, form: Form) -> Expected:
        """What an item of that form is planned to be."""
        assert form.choice is not None and form.choice.expected is not None  # noqa: S101, PT018 - it has a rung
        known = None if form.base is None else self._deltas.known.get((index, form.base, form.choice.name))
        return known or form.choice.expected

    def _layout(self, state: State) -> Layout:
        return Layout(self._items, state, self.done, self._deltas if self._delta else None, self._outside)

    def taken(self) -> int:
        """What all take together, as far as is known, in the plan that was found last."""
        return self._layout(self._state).taken

    def least_useful(self) -> int | None:
        """Of all that is done, what may go and is no base: the one of least use; None where there is none."""
        bases = {form.base for form in self.done.values()}
        stay = self._staying([None if form.choice is None else 0 for _, form in sorted(self.done.items())])
        free = [
            index
            for index, form in self.done.items()
            if form.choice is not None and index not in bases | self._firm and self._items[index].may_go
        ]
        return min(free, key=lambda index: self._use(index, stay), default=None)

    def _search(self, begin: State) -> State | None:
        # Where no single choice frees anything, all of them together may: neighbours that become one chain.
        layout = self._shrunk(begin) or self._shrunk(self._least())
        return None if layout is None else self._grown(layout)

    def _shrunk(self, begin: State) -> Layout | None:
        """Take choices with the least loss for each byte until all fits; None where nothing more can be freed."""
        layout, count = self._layout(begin), len(begin)
        if self._room is None:
            return layout
        stay, moves, near = self._staying(begin), _Moves(count), _Freed(layout)
        for index in range(count):
            moves.make(index, self._moves(begin, stay, index))
        while layout.total > self._room:
            best = moves.best(near)
            if best is None:
                return None
            index, then = best
            near.change(index, then)
            changed = {index} if then is not None else {index, *self._leave(stay, index)}
            for each in changed:
                moves.make(each, self._moves(layout.state, stay, each))
        return layout

    def _moves(self, state: State, stay: Sequence[float], index: int) -> Iterator[_Move]:
        """Each coarser choice: its loss for each byte, about; its loss, the item, and the choice: -1 for gone."""
        number = state[index]
        if number is None or index in self.done:
            return
        item, use = self._items[index], self._use(index, stay)
        now, taken = item.choices[number], self._about(item, number)
        for then in range(number + 1, len(item.choices)):
            freed, loss = taken - self._about(item, then), use * (item.choices[then].loss - now.loss)
            if freed > 0:
                yield loss / freed, loss, index, then
        if item.may_go and index not in self._firm and taken > 0:
            loss = use * (GONE - now.loss)
            yield loss / taken, loss, index, -1

    def _about(self, item: Item, number: int) -> float:
        """The bytes of a choice, whatever its neighbours are."""
        choice = item.choices[number]
        return choice.nbytes * (self._deltas.share(choice.name) if self._delta and choice.rung is not None else 1.0)

    def _grown(self, layout: Layout) -> State:
        """Take back what fits, the greatest gain first, until nothing more does."""
        stay, count = self._staying(layout.state), len(self._items)
        # What a choice adds, and the last item that this changes.
        known = dict[int, tuple[int, int]]()
        while True:
            gains = []
            for index, number in enumerate(layout.state):
                if self._start[index] is None or number == 0 or index in self.done:
                    continue
                choices = self._items[index].choices
                then = len(choices) - 1 if number is None else number - 1
                loss = GONE if number is None else choices[number].loss
                gains.append((self._use(index, stay) * (loss - choices[then].loss), index, then))
            for _, index, then in sorted(gains, reverse=True):
                if index not in known:
                    known[index] = layout.more(index, then, count)
                if self._room is None or layout.total + known[index][0] <= self._room:
                    break
            else:
                return layout.state
            if layout.state[index] is None:
                insort(stay, self._places[index])
            last = layout.change(index, then)
            known = {at: each for at, each in known.items() if last < count and (at > last or each[1] < index)}

    def _staying(self, state: State) -> list[float]:
        """The places of those that stay."""
        return [place for place, number in zip(self._places, state, strict=True) if number is not None]

    def _leave(self, stay: list[float], index: int) -> Iterator[int]:
        """Take the place of an item out of those that stay. Yields the items beside it, whose use this changes."""
        place = self._places[index]
        at = bisect_left(stay, place)
        del stay[at]
        beside = stay[max(at - 1, 0) : at + 1]
        if place not in beside:
            for other in set(beside):
                yield from range(bisect_left(self._places, other), bisect_right(self._places, other))

    def _use(self, index: int, stay: Sequence[float]) -> float:
        """The use of an item, where it stays."""
        place = self._places[index]
        at, beyond = bisect_left(stay, place), bisect_right(stay, place)
        before = stay[at - 1] if at else self._places[0] - self._unit
        after = stay[beyond] if beyond < len(stay) else place + self._unit
        use = (after - before) / 2 / (self._places[-1] - place + self._unit)
        return max(use, 1.0) if index in self._best else use


def _places(steps: Sequence[int | None]) -> list[float]:
    """Where checkpoints stand in their run: at their steps, those without one after all others."""
    known = [step for step in steps if step is not None]
    unit, last = interval(sorted(set(known))), max(known, default=0)
    places = []
    for step in steps:
        last += unit if step is None else 0
        places.append(float(last if step is None else step))
    return places
