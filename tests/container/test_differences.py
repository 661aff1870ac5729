"""Differences of parts against the rule that FORMAT.md states, number by number, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt8.container.manifest import SYMBOL_LIMIT
from ckpt8.container.symbols import difference, total
from ckpt8.core.errors import InputError, RefusedError

BACKENDS = ("torch", "numba")
EDGES = (-1, 0, 1, 2, 3, 254, 255, 256, (1 << 19) - 2, (1 << 19) - 1)
BYTES = (torch.uint8, torch.int8, torch.int16, torch.uint16)


def integer(symbol):
    return -(symbol + 1) // 2 if symbol % 2 else symbol // 2


def symbol_of(q):
    return 2 * q if q >= 0 else -2 * q - 1


def rule(own, base):
    """The difference of a symbol to that of the base."""
    if base == -1:
        return 0 if own == -1 else own + 1
    return -1 if own == -1 else symbol_of(integer(own) - integer(base))


def symbols(values):
    return torch.tensor(values, dtype=torch.int32)


def pairs():
    return zip(*((own, base) for own in EDGES for base in EDGES), strict=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_symbols_follow_the_rule_and_come_back(backend):
    own, base = map(list, pairs())
    found = difference({"codes": symbols(own)}, {"codes": symbols(base)}, backend)
    assert found["codes"].tolist() == [rule(*each) for each in zip(own, base, strict=True)]
    assert total(found, {"codes": symbols(base)}, "x", backend)["codes"].tolist() == own


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_every_symbol_has_one_difference(backend, data):
    base = data.draw(st.integers(-1, (1 << 19) - 1))
    own = data.draw(st.lists(st.integers(-1, (1 << 19) - 1), min_size=1, max_size=40, unique=True))
    below = {"codes": torch.full((len(own),), base, dtype=torch.int32)}
    found = difference({"codes": symbols(own)}, below, backend)
    assert len(set(found["codes"].tolist())) == len(own)
    assert total(found, below, "x", backend)["codes"].tolist() == own


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_be_packed_is_refused(backend):
    far = {"codes": symbols([2 * ((1 << 18) + 5)])}, {"codes": symbols([2 * ((1 << 18) + 5) - 1])}
    with pytest.raises(RefusedError, match="too far"):
        difference(*far, backend)
    with pytest.raises(RefusedError, match="too far"):
        difference({"codes": symbols([SYMBOL_LIMIT - 2])}, {"codes": symbols([-1])}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("found", "base"),
    [(-1, -1), (SYMBOL_LIMIT - 2, SYMBOL_LIMIT - 2), (SYMBOL_LIMIT - 1, SYMBOL_LIMIT - 1), (2, SYMBOL_LIMIT - 2)],
)
def test_sums_that_are_no_symbols_are_damage(backend, found, base):
    """Among symbols that are fine."""
    differences, below = {"codes": symbols([0, found, 1])}, {"codes": symbols([0, base, -1])}
    with pytest.raises(InputError, match=r"a\.ckpt8: w: its symbols are not differences"):
        total(differences, below, "a.ckpt8: w", backend)


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_other_parts_differ_by_their_bits(dtype):
    own, base = (torch.randint(0, 256, (64,), dtype=torch.uint8).view(dtype) for _ in range(2))
    before = own.clone()
    found = difference({"rows": own}, {"rows": base})["rows"]
    assert found.dtype is dtype
    bits = [a ^ b for a, b in zip(own.view(torch.uint8).tolist(), base.view(torch.uint8).tolist(), strict=True)]
    assert found.view(torch.uint8).tolist() == bits
    assert own.view(torch.uint8).equal(before.view(torch.uint8))
    assert total({"rows": found}, {"rows": base}, "x")["rows"].view(torch.uint8).equal(own.view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_without_elements(backend):
    empty = {"codes": symbols([]), "rows": torch.empty(0, dtype=torch.int16)}
    found = difference(empty, empty, backend)
    assert [len(x) for x in total(found, empty, "x", backend).values()] == [0, 0]
