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

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median

from ckpt8.chaining.jobs import Look
from ckpt8.chaining.keeping import Ranking, interval
from ckpt8.compressing.policy import Policy
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import UsageError
from ckpt8.inspecting.prediction import Expected, expect, expect_delta
from ckpt8.inspecting.runs import RunRecord

GONE = 20.0
"""The error in steps that one which goes counts as: old ones become as coarse as they may before some go."""

LINKS = 4
"""The most deltas above a key."""

_SHARE = 0.8
"""What a delta takes of the whole, before any is known."""

_GAIN = 0.97
"""A coarser rung takes less than this part of what the finer one takes."""

_OFF, _OFF_BYTES = 0.01, 1 << 10
"""How much larger than predicted a file is at most: a part of it, and bytes."""

_TRIED = 8
"""Choices whose sizes are added up before one of them is taken."""

_SEARCHES = 8
"""Searches from the beginning with better and better sizes, at most."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A preset, or a budget in steps. ``steps`` is about what it errs, where that is not known better."""

    name: str
    steps: float
    preset: str | None = None
    budget: float | None = None

    @property
    def policy(self) -> Policy:
        """What it asks for."""
        return Policy.of(self.preset, (), self.budget)


def rung(text: str) -> Rung:
    """The rung of a preset's name, or of ``budget:STEPS``. Raises UsageError."""
    name, _, number = text.partition(":")
    if name == "budget":
        try:
            budget = float(number)
        except ValueError:
            raise UsageError(f"{text!r} is no budget; give budget:STEPS, such as budget:2") from None
        Policy.of(None, (), budget)
        return Rung(f"budget:{budget:g}", budget, budget=budget)
    known = {"lossless": 0.0, "flash": 0.06, "compact": 0.15, "archive": 1.0}
    if text not in known:
        raise UsageError(f"{text!r} is neither {', '.join(known)} nor budget:STEPS")
    return Rung(text, known[text], preset=text)


RUNGS = tuple(map(rung, ("lossless", "flash", "compact", "archive", "budget:2", "budget:5")))


def rungs_between(finest: str, coarsest: str) -> list[Rung]:
    """The rungs from one to another, both included. Raises UsageError."""
    first, last = rung(finest), rung(coarsest)
    if first.steps > last.steps:
        raise UsageError(f"the finest, {finest}, is coarser than the coarsest, {coarsest}")
    inner = [each for each in RUNGS if first.steps < each.steps < last.steps]
    return list(dict.fromkeys((first, *inner, last)))


@dataclass(frozen=True, slots=True)
class Choice:
    """What a checkpoint may become: ``nbytes`` whole, with an error of ``steps``, None where that is unknown.

    ``loss`` is what the error counts as. Without a ``rung`` nothing is compressed: ``name`` is ``as it is``, or
    ``.ckpt8 alone`` where the original beside a container goes.
    """

    name: str
    nbytes: int
    steps: float | None
    loss: float
    rung: Rung | None = None
    expected: Expected | None = None


@dataclass
class Item:
    """A checkpoint of the run. ``raw`` is the original, ``packed`` its container, as far as they are there.

    ``base`` is the number of the item that the container is a delta to. ``leans``: its base is a checkpoint that is
    gone, in ``bases/``. ``is_sound``: it is complete, as far as its heads say. ``held`` says why it has to stay as it
    is; other ones may go, and change if ``may_change``. ``looks`` is how its files looked when they were listed, or
    written.
    """

    record: RunRecord
    raw: Path | None
    packed: Path | None
    target: Path
    base: int | None = None
    leans: bool = False
    is_sound: bool = True
    held: str | None = None
    may_change: bool = True
    choices: list[Choice] = field(default_factory=list)
    looks: dict[Path, Look] = field(default_factory=dict)

    def grow(self, whole: int) -> None:
        """Note that the container became ``whole``, of so many bytes, before anything else becomes of it."""
        more = whole - self.record.stored_bytes
        self.record.stored_bytes, self.base, self.leans = whole, None, False
        self.choices = [
            each if each.rung is not None else replace(each, nbytes=each.nbytes + more) for each in self.choices
        ]

    @property
    def may_go(self) -> bool:
        """Whether it may be removed."""
        return self.held is None

    @property
    def nbytes(self) -> int:
        """What it takes now."""
        return self.record.stored_bytes + self.record.raw_bytes

    @cached_property
    def alone(self) -> int:
        """What the container takes without a base. Raises InputError."""
        with ContainerReader(self.packed or self.target) as reader:
            return reader.whole_size

    @property
    def source(self) -> Path:
        """What it would be compressed from: the original, as long as that is there."""
        return self.raw if self.raw is not None and self.raw.exists() else self.packed or self.target

    def add_choices(self, rungs: Sequence[Rung], threads: int | None) -> None:
        """Predict what it may become. Raises InputError for a source that cannot be read."""
        record, now = self.record, self.record.kind == "raw" or self.record.raw is not None
        steps = 0.0 if record.kind == "raw" else record.steps
        own = _steps_asked(record.asked) if steps is None else steps
        self.choices = [Choice("as it is", self.nbytes, 0.0 if now else steps, 0.0 if now else own)]
        if not self.may_change:
            return
        if self.raw is not None and self.packed is not None:
            self.choices.append(Choice(".ckpt8 alone", record.stored_bytes, steps, own))
        earlier = 0.0 if now else own
        coarser = [each for each in rungs if self.packed is None or each.steps > own]
        predicted = expect(self.source, [each.policy for each in coarser], threads) if coarser else []
        for each, expected in zip(coarser, predicted, strict=True):
            error = None if expected.steps is None or (steps is None and not now) else expected.steps + earlier
            loss = each.steps + earlier if error is None else error
            if expected.nbytes < _GAIN * self.choices[-1].nbytes:
                self.choices.append(Choice(each.name, expected.nbytes, error, loss, each, expected))


def _steps_asked(asked: str | None) -> float:
    """About what a container errs that was made with these words; 0 for unknown ones."""
    try:
        return rung((asked or "").replace("budget ", "budget:")).steps
    except UsageError:
        return 0.0


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


class RoomError(Exception):
    """The least room that the checkpoints take."""

    def __init__(self, least: int) -> None:
        super().__init__(least)
        self.least = least


_State = list[int | None]
"""The number of its choice for each item; None for one that goes."""


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
        self._start: _State = [0 if i in kept or not item.may_go else None for i, item in enumerate(items)]
        self._places = _places([item.record.step for item in items])
        self._deltas: dict[tuple[int, int, str], Expected | None] = {}
        self._shares: dict[str, list[float]] = {}
        ranking = Ranking.of([item.record for item in items])
        self._best = {*ranking.order()[:1], *ranking.named}
        # What was found last.
        self._state, self._delta = self._start, False

    def plan(self) -> list[Form]:
        """What becomes of each item. Raises RoomError where that is more than the room."""
        self._delta = False
        state = self._search(self._start)
        if self._may_delta and not (state and self._is_fine(state)):
            self._delta = True
            return self._settled(self._start)
        if state is None:
            raise RoomError(self._total(self._least()))
        self._state = state
        return self._layout(state)

    def go_on(self) -> list[Form]:
        """The last plan, as far as it still fits with what is ``done``, or better. Raises as ``plan``."""
        return self._settled(self._state)

    def _is_fine(self, state: _State) -> bool:
        """Whether nothing goes for the lack of room, and nothing is coarser than the finest rung."""
        return all(
            number is not None and (number == 0 or item.choices[number - 1].rung is None)
            for item, number, began in zip(self._items, state, self._start, strict=True)
            if began is not None
        )

    def _settled(self, begin: _State) -> list[Form]:
        """Search from a state on until the sizes of all deltas are predicted."""
        state, tried = self._search(begin), 1
        while self._measure(state or self._least()):
            # Some searches begin anew; then the last one is mended.
            state, tried = self._search(begin if tried < _SEARCHES else state or begin), tried + 1
        if state is None:
            raise RoomError(self._total(self._least()))
        self._state = state
        return self._layout(state)

    def _least(self) -> _State:
        """Only what has to stay, as coarse as it may be."""
        return [
            len(item.choices) - 1 if began is not None and (i in self._firm or not item.may_go) else None
            for i, (item, began) in enumerate(zip(self._items, self._start, strict=True))
        ]

    def _measure(self, state: _State) -> bool:
        """Predict the deltas of a layout that are not known yet; False where all are."""
        forms, is_new = self._layout(state), False
        for index, form in enumerate(forms):
            if index in self.done or form.base is None or form.choice is None or form.choice.rung is None:
                continue
            key = index, form.base, form.choice.name
            if key in self._deltas:
                continue
            self._tell(self._items[index].record.name)
            planned = self._planned(form.base, forms[form.base])
            source, base = self._items[index].source, self._items[form.base].source
            found = expect_delta(source, form.choice.rung.policy, base, planned.plan, self._threads)
            self._deltas[key] = found
            share = 1.0 if found is None else found.nbytes / form.choice.nbytes
            self._shares.setdefault(form.choice.name, []).append(share)
            is_new = True
        return is_new

    def _planned(self, index: int, form: Form) -> Expected:
        """What an item of that form is planned to be."""
        assert form.choice is not None and form.choice.expected is not None  # noqa: S101, PT018 - it has a rung
        known = None if form.base is None else self._deltas.get((index, form.base, form.choice.name))
        return known or form.choice.expected

    def _layout(self, state: _State) -> list[Form]:
        """What the items become, with chains where ``delta`` allows them."""
        forms, last, links = list[Form](), -1, 0
        for index, number in enumerate(state):
            item, done = self._items[index], self.done.get(index)
            if done is not None:
                forms.append(done)
                if done.choice is not None:
                    last, links = index, 0 if done.base is None else links + 1
                continue
            if number is None:
                forms.append(Form(None))
                continue
            choice = item.choices[number]
            if choice.rung is None:
                base = None if item.base is None else forms[item.base]
                stays = base is None or not (base.choice is None or base.choice.rung or base.is_rebased)
                more = choice.nbytes - item.record.stored_bytes
                forms.append(Form(choice, choice.nbytes if stays else item.alone + more, is_rebased=not stays))
                last = -1
                continue
            before = forms[last].choice if last >= 0 else None
            is_next = before is not None and before.name == choice.name and before.rung is not None
            nbytes = self._delta_bytes(index, last, choice) if self._delta and is_next and links < LINKS else None
            links = 0 if nbytes is None else links + 1
            forms.append(Form(choice, choice.nbytes if nbytes is None else nbytes, None if nbytes is None else last))
            last = index
        return forms

    def _delta_bytes(self, index: int, base: int, choice: Choice) -> int | None:
        """What a delta takes, as far as it is known; None where it is hardly smaller than the whole."""
        key = index, base, choice.name
        if key in self._deltas:
            known = self._deltas[key]
            return None if known is None else known.nbytes
        return int(self._share(choice.name) * choice.nbytes)

    def _share(self, name: str) -> float:
        shares = self._shares.get(name)
        return median(shares) if shares else _SHARE

    def taken(self, forms: Sequence[Form]) -> int:
        """What all take together, as far as is known."""
        leaning = (
            item.leans and form.choice is not None and form.choice.rung is None and not form.is_rebased
            for item, form in zip(self._items, forms, strict=True)
        )
        return sum(form.nbytes for form in forms) + (self._outside if any(leaning) else 0)

    def _total(self, state: _State) -> int:
        """What all take at most: more than predicted by as much as predictions are off."""
        forms = self._layout(state)
        open_ = (form for index, form in enumerate(forms) if index not in self.done)
        spare = sum(int(_OFF * form.nbytes) + _OFF_BYTES for form in open_ if form.choice and form.choice.rung)
        return self.taken(forms) + spare

    def least_useful(self) -> int | None:
        """Of all that is done, what may go and is no base: the one of least use; None where there is none."""
        bases = {form.base for form in self.done.values()}
        state = [None if form.choice is None else 0 for _, form in sorted(self.done.items())]
        uses = self._uses(state)
        free = [
            index
            for index, form in self.done.items()
            if form.choice is not None and index not in bases | self._firm and self._items[index].may_go
        ]
        return min(free, key=lambda index: uses[index], default=None)

    def _search(self, begin: _State) -> _State | None:
        # Where no single choice frees anything, all of them together may: neighbours that become one chain.
        state = self._shrunk(list(begin)) or self._shrunk(self._least())
        return None if state is None else self._grown(state)

    def _shrunk(self, state: _State) -> _State | None:
        """Take choices with the least loss for each byte until all fits; None where nothing more can be freed."""
        while self._room is not None and (total := self._total(state)) > self._room:
            best = None
            moves = sorted(self._moves(state))
            # What a choice frees depends on the chain around it: that decides among those that look best.
            for first in range(0, len(moves), _TRIED):
                rated = []
                for _, loss, index, then in moves[first : first + _TRIED]:
                    other: _State = [*state[:index], None if then < 0 else then, *state[index + 1 :]]
                    if (freed := total - self._total(other)) > 0:
                        rated.append((loss / freed, index, other))
                if rated:
                    best = min(rated, key=lambda move: move[:2])
                    break
            if best is None:
                return None
            state = best[2]
        return state

    def _moves(self, state: _State) -> Iterator[tuple[float, float, int, int]]:
        """Each coarser choice: its loss for each byte, about; its loss, the item, and the choice: -1 for gone."""
        uses = self._uses(state)
        for index, number in enumerate(state):
            if number is None or index in self.done:
                continue
            item, use = self._items[index], uses[index]
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
        return choice.nbytes * (self._share(choice.name) if self._delta and choice.rung is not None else 1.0)

    def _grown(self, state: _State) -> _State:
        """Take back what fits, the greatest gain first, until nothing more does."""
        while True:
            gains = []
            for index, number in enumerate(state):
                if self._start[index] is None or number == 0 or index in self.done:
                    continue
                choices = self._items[index].choices
                then = len(choices) - 1 if number is None else number - 1
                other = [*state[:index], then, *state[index + 1 :]]
                if self._room is None or self._total(other) <= self._room:
                    use = self._uses(other)[index]
                    loss = GONE if number is None else choices[number].loss
                    gains.append((use * (loss - choices[then].loss), index, other))
            if not gains:
                return state
            state = max(gains, key=lambda gain: (gain[0], gain[1]))[2]

    def _uses(self, state: _State) -> list[float]:
        """The use of every item, where it stays."""
        stay = [place for place, number in zip(self._places, state, strict=True) if number is not None]
        unit = max(median([b - a for a, b in pairwise(self._places)] or [1.0]), 1.0)
        uses = []
        for index, place in enumerate(self._places):
            at, beyond = bisect_left(stay, place), bisect_right(stay, place)
            before = stay[at - 1] if at else self._places[0] - unit
            after = stay[beyond] if beyond < len(stay) else place + unit
            use = (after - before) / 2 / (self._places[-1] - place + unit)
            uses.append(max(use, 1.0) if index in self._best else use)
        return uses


def _places(steps: Sequence[int | None]) -> list[float]:
    """Where checkpoints stand in their run: at their steps, those without one after all others."""
    known = [step for step in steps if step is not None]
    unit, last = interval(sorted(set(known))), max(known, default=0)
    places = []
    for step in steps:
        last += unit if step is None else 0
        places.append(float(last if step is None else step))
    return places
