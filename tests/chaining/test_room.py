"""The search for what fits a room, and the layouts that it compares, on made-up sizes."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch

from ckpt8.chaining import room as room_of
from ckpt8.chaining.choices import Choice, Item, rungs_between
from ckpt8.chaining.layout import Deltas, Layout
from ckpt8.chaining.room import GONE, Planner, RoomError
from ckpt8.inspecting.prediction import Expected
from ckpt8.inspecting.runs import RunRecord


def items(count, seed):
    draw = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        sizes = [10**8, 4 * 10**7, 2 * 10**7, 11 * 10**6, 8 * 10**6, 5 * 10**6]
        scale = 0.5 + torch.rand((), generator=draw).item()
        record = RunRecord(f"step-{index}", step=10 * index, stored_bytes=int(1e8 * scale))
        item = Item(record, None, None, None)
        item.choices = [Choice("as it is", int(1e8 * scale), 0.0, 0.0)]
        rungs = rungs_between("flash", "budget:5")
        item.choices += [
            Choice(rung.name, int(nbytes * scale), rung.steps, rung.steps, rung)
            for rung, nbytes in zip(rungs, sizes[1:], strict=True)
        ]
        made.append(item)
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.6, 0.2, 0.07, 0.03])
def test_no_listed_plan_that_is_finer_by_one_choice_fits_the_room(seed, share):
    made = items(12, seed)
    room = int(share * sum(item.nbytes for item in made))
    forms = Planner(made, room, set(range(12)), {11}, delta=False, threads=1).plan()
    total = sum(form.nbytes for form in forms)
    assert total <= room
    assert forms[11].choice is not None
    for item, form in zip(made, forms, strict=True):
        number = len(item.choices) if form.choice is None else item.choices.index(form.choice)
        if number:
            # Of what is predicted, a hundredth is spared.
            assert 1.011 * (total - form.nbytes + item.choices[number - 1].nbytes) > room
    # Nothing goes while one that stays could be coarser for less loss.
    if any(form.choice is None for form in forms):
        oldest = next(form for form in forms if form.choice is not None)
        assert oldest.choice.name == "budget:5"
    assert max(choice.loss for item in made for choice in item.choices) < GONE


def test_the_least_room_is_said():
    made = items(4, 0)
    with pytest.raises(RoomError) as caught:
        Planner(made, 10, set(range(4)), {1, 3}, delta=False, threads=1).plan()
    least = made[1].choices[-1].nbytes + made[3].choices[-1].nbytes
    assert least < caught.value.least < 1.02 * least  # a hundredth is spared
    forms = Planner(made, caught.value.least, set(range(4)), {1, 3}, delta=False, threads=1).plan()
    assert least <= sum(form.nbytes for form in forms) <= caught.value.least


@pytest.mark.parametrize("seed", range(6))
def test_the_least_room_is_enough_for_chains(seed, monkeypatch):
    """Where a neighbour that becomes coarser alone frees nothing, since it leaves its chain."""
    made = items(5, seed)
    for item in made:
        item.choices = [replace(each, expected=Expected(each.nbytes, each.steps, None)) for each in item.choices]

    def third(path, policy, base, planned, threads):
        known = next(rung for rung in rungs_between("flash", "budget:5") if rung.policy == policy)
        sizes = [choice.nbytes for item in made for choice in item.choices if choice.name == known.name]
        return Expected(min(sizes) // 3, known.steps, None)

    monkeypatch.setattr(room_of, "expect_delta", third)
    kept = set(range(5))
    with pytest.raises(RoomError) as caught:
        Planner(made, 10, kept, kept, delta=True, threads=1).plan()
    forms = Planner(made, caught.value.least, kept, kept, delta=True, threads=1).plan()
    assert sum(form.nbytes for form in forms) <= caught.value.least


def naive(made, state, known):
    """Form by form: choice, bytes, base, and whether an item that stays as it is loses its base."""
    found, last, links = [], None, 0
    for index, number in enumerate(state):
        item = made[index]
        if number is None:
            found.append((None, 0, None, False))
            continue
        choice = item.choices[number]
        if choice.rung is None:
            base = item.base
            while base is not None and state[base] == 0:
                base = made[base].base
            found.append((choice, choice.nbytes + (500 if base is not None else 0), None, base is not None))
            last = None
        elif last is not None and made[last].choices[state[last]].name == choice.name and links < 4:
            found.append((choice, known.get((index, last), int(0.8 * choice.nbytes)), last, False))
            last, links = index, links + 1
        else:
            found.append((choice, choice.nbytes, None, False))
            last, links = index, 0
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_layout_after_many_changes_is_that_of_its_state(seed):
    draw, made, deltas = random.Random(seed), items(40, seed), Deltas()
    for index, item in enumerate(made):
        # Of a run that began anew, a base may have a higher step.
        item.base = draw.choice([None, None, index - 1, index + 1]) if 20 < index < 39 else None
        item.base = None if item.base is not None and made[item.base].base == index else item.base
        item.__dict__["alone"] = item.nbytes + 500
        item.leans = index in (3, 7)
    known = {}
    state = [0] * 40
    layout = Layout(made, state, {}, deltas, 10**7)
    for _ in range(300):
        index, number = draw.randrange(40), draw.choice([None, *range(6)])
        if draw.random() < 0.1 and index:
            key, name = (index, draw.randrange(index)), rungs_between("flash", "budget:5")[0].name
            if state[key[0]] != 1:
                known[key] = 5_000_000
                deltas.known[(*key, name)] = Expected(known[key], 1.0, None)
        more, _ = layout.more(index, number, 40)
        before = layout.total
        layout.change(index, number)
        state[index] = number
        assert layout.total - before == more
        flash = {key: nbytes for key, nbytes in known.items() if state[key[0]] == 1}
        forms = [(form.choice, form.nbytes, form.base, form.is_rebased) for form in layout.forms()]
        assert forms == naive(made, state, flash)
        outside = 10**7 if any(state[at] == 0 for at in (3, 7)) else 0
        assert layout.taken == outside + sum(nbytes for _, nbytes, _, _ in forms)
        spare = sum(int(0.01 * form[1]) + 1024 for form in forms if form[0] is not None and form[0].rung)
        assert layout.total == layout.taken + spare


def test_a_thousand_are_planned_in_seconds_and_once(monkeypatch):
    made = items(1000, 0)
    for item in made:
        item.choices = [replace(each, expected=Expected(each.nbytes, each.steps, None)) for each in item.choices]
    draw = random.Random(0)
    monkeypatch.setattr(Item, "source", property(lambda self: self))

    def some(item, policy, base, planned, threads):
        whole = next(choice for choice in item.choices if choice.rung and choice.rung.policy == policy)
        return Expected(int(draw.uniform(0.4, 0.8) * whole.nbytes), whole.steps, None)

    monkeypatch.setattr(room_of, "expect_delta", some)
    room = sum(item.nbytes for item in made) // 20
    planner, started = Planner(made, room, set(range(1000)), {999}, delta=True, threads=1), time.process_time()
    forms = planner.plan()
    assert time.process_time() - started < 20  # about 2 on a machine with nothing else to do; hours before
    assert 0.95 * room < planner.taken() == sum(form.nbytes for form in forms) <= room
    assert forms[999].choice is not None
    monkeypatch.setattr(Planner, "_search", None)
    for index, form in enumerate(forms):
        if form.choice is None:
            planner.settle(index, form)
    assert planner.go_on() is forms
