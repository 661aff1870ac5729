"""Saving warns of the values that loading refuses, and of no others: each value is saved, then loaded by the reader."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import functools
import os
import pathlib
import random
import warnings

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckpt8
from ckpt8.integrations.dcp import Ckpt8StorageReader, Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated", "ignore:torch.distributed is", "ignore:Validating sparse tensor"
)


class Own:
    pass


class Kind(enum.Enum):
    A = 1


class OwnDict(dict):
    pass


class OwnInt(int):
    pass


class OwnTensor(torch.Tensor):
    pass


Pair = collections.namedtuple("Pair", "a b")


def with_attribute(value):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.extra = value
    return parameter


LOADED = {
    "int": 3, "long": 2**200, "float": 1.5, "text": "a", "None": None, "bool": True, "bytes": b"ab",
    "bytearray": bytearray(b"x"), "complex": 1j, "tuple": (1, (2,)), "list": [1, {"a": None}], "set": {1, 2},
    "ordered": collections.OrderedDict(a=1), "counter": collections.Counter("aab"), "dtype": torch.float32,
    "device": torch.device("cpu"), "size": torch.Size([1, 2]), "rng": torch.get_rng_state(),
    "random": random.getstate(), "np.random": np.random.get_state(), "inside": {"a": [np.float64(2)]},
    "np.float64": np.float64(1), "np.float32": np.float32(1), "np.int64": np.int64(1), "np.bool": np.bool_(True),
    "array": np.ones(3), "np.str": np.str_("a"),
    "parameter": torch.nn.Parameter(torch.ones(2)), "attribute": with_attribute(5), "sparse": torch.eye(3).to_sparse(),
    "strided": torch.ones(4, 4).t(), "empty": {},
}  # fmt: skip
REFUSED = {
    "np.dtype": np.dtype("f4"), "objects": np.array([None]),
    "own": Own(), "class": Own, "enum": Kind.A, "own dict": OwnDict(a=1),
    "own int": OwnInt(3), "pair": Pair(1, 2), "date": datetime.date(2020, 1, 1), "span": datetime.timedelta(1),
    "decimal": decimal.Decimal(1), "path": pathlib.PurePosixPath("x"), "namespace": argparse.Namespace(a=1),
    "function": os.getcwd, "partial": functools.partial(int, "3"), "type": int, "module": torch.nn.Linear(2, 2),
    "exception": ValueError("x"), "attribute": with_attribute(Own()),
    "own tensor": torch.ones(2).as_subclass(OwnTensor),
    "deque": collections.deque([1]), "range": range(3),
}  # fmt: skip
VALUES = [(name, value) for each in (LOADED, REFUSED) for name, value in each.items()]


def warned(save):
    """The warnings about refused values while ``save`` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save()
    return [each for each in caught if "will refuse" in str(each.message)]


def target_of(value):
    fresh = torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
    return fresh.as_subclass(type(value)) if isinstance(value, OwnTensor) else fresh


def refused(load):
    try:
        load()
    except (Exception, CheckpointException) as error:
        return str(error)
    return None


@pytest.mark.by_default(most=12)
@pytest.mark.parametrize(("name", "value"), VALUES, ids=[name for name, _ in VALUES])
def test_save_warns_of_what_load_refuses(name, value, tmp_path):
    found = warned(lambda: ckpt8.save({"here": value, "w": torch.ones(2)}, tmp_path / "x.ckpt8", threads=1))
    error = refused(lambda: ckpt8.load(tmp_path / "x.ckpt8"))
    assert (len(found) == 1) == (error is not None), (error, found)
    assert all("here" in str(each.message) and each.filename == __file__ for each in found)
    assert name not in ("np.float64", "array") or not error
    assert name not in ("objects", "own") or error


@pytest.mark.by_default(most=12)
@pytest.mark.parametrize(("name", "value"), VALUES, ids=[name for name, _ in VALUES])
def test_the_writer_warns_of_what_the_reader_refuses(name, value, tmp_path):
    state = {"here": value, "also": {"here": value}, "w": torch.ones(2)}
    writer, reader = Ckpt8StorageWriter(tmp_path / "x", threads=1), Ckpt8StorageReader(tmp_path / "x", threads=1)
    found = warned(lambda: dcp.save(state, storage_writer=writer, no_dist=True))
    target = {"here": target_of(value), "also": {"here": target_of(value)}, "w": torch.zeros(2)}
    error = refused(lambda: dcp.load(target, storage_reader=reader, no_dist=True))
    assert (len(found) == 1) == (error is not None), (error, found)
    for each in found:
        assert "here" in str(each.message)
        assert "also.here" in str(each.message)
        assert "add_safe_globals" in str(each.message)
    assert name not in ("np.float64", "array") or not error
    assert name not in ("objects", "own") or error


def test_a_class_that_the_user_allows_is_not_refused(tmp_path):
    with torch.serialization.safe_globals([Own]):
        assert not warned(lambda: ckpt8.save({"here": Own()}, tmp_path / "x.ckpt8", threads=1))
        assert isinstance(ckpt8.load(tmp_path / "x.ckpt8")["here"], Own)
