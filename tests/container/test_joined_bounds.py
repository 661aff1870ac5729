"""An index that says much in a few numbers: memory does not grow with what nobody wrote."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt8.container.joined import JoinedReader
from ckpt8.core.errors import InputError
from ckpt8.integrations.dcp import Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")


def test_cells_that_no_file_holds_are_not_listed(tmp_path):
    cells = 2_000_000
    dcp.save({"w": torch.ones(8)}, storage_writer=Ckpt8StorageWriter(tmp_path / "x"), no_dist=True)
    index = tmp_path / "x" / "ckpt8-dcp.json"
    tree = json.loads(index.read_text())
    tree["tensors"]["w"] |= {"shape": [cells], "cuts": [[[1, cells]]], "owners": [[0, cells, 0]]}
    index.write_text(json.dumps(tree | {"padding": "x" * (cells // 64)}))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="names 2000000 slices, and its files hold 1"):
            JoinedReader(tmp_path / "x")
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
