"""Names that a pickle would call outside ``weights_only``: a red flag in every report, and a line in ``restore``."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from torch import _weights_only_unpickler as unpickler

import ckpt8
from ckpt8.checkpoint.readers.torch_rules import ALLOWED

pytestmark = pytest.mark.usefixtures("without_predictions")


class Evil:
    """Calls something when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_the_names_are_those_that_torch_allows():
    """All of this version, and beyond them only what other versions allow."""
    allowed = set(unpickler._get_allowed_globals())
    assert allowed - ALLOWED == set()
    assert ALLOWED - allowed <= {"torch._utils._rebuild_nested_tensor", "torch.bcomplex32"} | {
        name for name in ALLOWED if "int" in name or "float" in name or "bits" in name
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zipped", [True, False])
def test_every_report_of_a_file_has_the_names(zipped, protocol, run_command, tmp_path):
    tree = {"a": Evil(os.system, "true"), "b": Evil(eval, "1"), "model": {"w": torch.randn(80, 80)}}
    source, packed = tmp_path / "run.pt", tmp_path / "run.ckpt8"
    torch.save(tree, source, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    ckpt8.compress(source)
    for path in (source, packed):
        code, out, err = run_command("inspect", path)
        assert (code, err) == (0, "")
        assert "names in a pickle that torch.load refuses" in out
        assert "run.pt: builtins.eval, posix.system" in out
        for flags in ((), ("--full",)):
            found = json.loads(run_command("inspect", path, "--json", *flags)[1])["flags"][0]
            assert (found["kind"], found["tensor"], found["count"]) == ("foreign_globals", "run.pt", 2)
            assert found["globals"] == ["builtins.eval", "posix.system"]
        run_command("inspect", path, "--html", tmp_path / "r.html", "--force")
        assert "run.pt: builtins.eval, posix.system" in (tmp_path / "r.html").read_text()
    for shown in ((), ("--json",)):
        code, out, err = run_command("restore", packed, "-o", tmp_path / "back.pt", "--force", *shown)
        assert code == 0
        assert err.startswith(
            f"ckpt8: {tmp_path / 'back.pt'}: refers to builtins.eval, posix.system, which torch.load "
        )
        assert err.count("\n") == 1
    if zipped and protocol == 2:
        with pytest.raises(pickle.UnpicklingError):
            torch.load(source, weights_only=True)


def test_files_of_a_directory_are_named(run_command, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"model": {"w": torch.randn(80, 80)}}, folder / "clean.pt")
    torch.save({"evil": Evil(os.system, "true"), "w": torch.randn(80, 80)}, folder / "evil\x1b[2K.pt")
    ckpt8.compress(folder, tmp_path / "run.ckpt8")
    for path in (folder, tmp_path / "run.ckpt8"):
        flags = json.loads(run_command("inspect", path, "--json")[1])["flags"]
        assert [flag["tensor"] for flag in flags if flag["kind"] == "foreign_globals"] == ["evil\x1b[2K.pt"]
        out = run_command("inspect", path)[1]
        assert r"evil\x1b[2K.pt: posix.system" in out


def test_a_damaged_skeleton_is_still_inspected(run_command, tmp_path):
    """Plain ``inspect`` reads no tensor; ``verify`` finds the damage."""
    torch.save({"evil": Evil(os.system, "true"), "w": torch.randn(80, 80)}, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    path = tmp_path / "run.ckpt8"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start = header["ckpt8.skeleton/bytes"]["data_offsets"][0]
    data[8 + length + start + 5] ^= 1
    path.write_bytes(data)
    code, out, err = run_command("inspect", path)
    assert (code, err) == (0, "")
    assert "posix.system" not in out
    assert run_command("verify", path)[0] == 3
