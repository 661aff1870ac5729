"""Errors are Python's as well: a missing file is a FileNotFoundError, a wrong argument a ValueError or TypeError."""

from __future__ import annotations

import pytest
import torch

import ckpt8


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Every public function with a path at its first place, as a function of that path."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    return {
        "chain": ckpt8.chain,
        "compress": ckpt8.compress,
        "convert": lambda path: ckpt8.convert(path, "a.safetensors"),
        "diff": lambda path: ckpt8.diff(path, path),
        "load": ckpt8.load,
        "open": ckpt8.open,
        "rebase": ckpt8.rebase,
        "restore": ckpt8.restore,
        "resume": lambda path: ckpt8.resume(path, model=model),
        "runs": ckpt8.runs,
        "verify": ckpt8.verify,
    }


@pytest.mark.parametrize("name", ["none.pt", "none.ckpt8", "no folder/none.pt"])
def test_a_missing_file_is_a_file_not_found_error(name, calls, tmp_path):
    for call in calls.values():
        with pytest.raises(FileNotFoundError, match="none") as error:
            call(name)
        assert isinstance(error.value, ckpt8.InputError)
        assert error.value.exit_code == 3
        assert not list(tmp_path.iterdir())


def test_a_wrong_argument_is_a_value_error_or_a_type_error(calls, tmp_path):
    for call in calls.values():
        with pytest.raises(TypeError) as error:
            call(object())
        assert isinstance(error.value, ckpt8.UsageError)
    torch.save({"w": torch.ones(3)}, "a.pt")
    for arguments in ({"preset": "tiny"}, {"budget": -1.0}, {"rules": ["*=nothing"]}, {"threads": -1}):
        with pytest.raises(ValueError, match=r"\w") as error:
            ckpt8.compress("a.pt", **arguments)
        assert error.value.exit_code == 2
        assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    with pytest.raises(ValueError, match="no optimizer state"):
        ckpt8.resume("a.pt", optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]))


def test_an_input_that_is_missing_inside_an_output_is_no_error_of_the_output(tmp_path):
    from ckpt8.core.errors import MissingError
    from ckpt8.core.files.atomic import AtomicFile

    with pytest.raises(MissingError), AtomicFile(tmp_path / "a", force=False) as output, output.guard():
        raise MissingError("none.pt: cannot be read")
    assert not list(tmp_path.iterdir())


def test_the_block_that_reads_a_file_of_lightning_keeps_its_own_errors(tmp_path):
    lightning = pytest.importorskip("ckpt8.integrations.lightning")
    torch.save({}, tmp_path / "a.ckpt")
    with (
        pytest.raises(FileNotFoundError, match=r"none\.ckpt: cannot be read"),
        lightning.opened(tmp_path / "none.ckpt"),
    ):
        pass
    with pytest.raises(FileNotFoundError, match=r"none\.pt: cannot be read"), lightning.opened(tmp_path / "a.ckpt"):
        ckpt8.load(tmp_path / "none.pt")
