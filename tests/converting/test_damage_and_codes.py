"""What convert does not pass on as if nothing were wrong: damage, and codes without what they mean."""

from __future__ import annotations

import zipfile

import pytest
import torch
from safetensors.torch import save_file

import ckpt8
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.inspecting.checkpoint import inspect_checkpoint


def flip_a_bit(path, record):
    """In the middle of a record of a zip file."""
    with zipfile.ZipFile(path) as file:
        info = next(each for each in file.infolist() if each.filename.endswith(record))
    data = bytearray(path.read_bytes())
    name, extra = (
        int.from_bytes(data[info.header_offset + k : info.header_offset + k + 2], "little") for k in (26, 28)
    )
    data[info.header_offset + 30 + name + extra + info.file_size // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def damaged(tmp_path):
    path = tmp_path / "run.pt"
    torch.save({"model": {"a.weight": torch.ones(40, 40), "b.weight": torch.ones(8, 8)}}, path)
    flip_a_bit(path, "data/1")
    return path


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors", "out.ckpt8", "dcp/"])
def test_a_flipped_bit_is_not_converted(damaged, tmp_path, name):
    with pytest.raises(InputError, match=r"run\.pt: .*(damaged|do not match)"):
        ckpt8.convert(damaged, f"{tmp_path}/{name}", to="dcp" if name == "dcp/" else None)
    assert [each.name for each in tmp_path.iterdir()] == ["run.pt"]


def test_a_flipped_bit_in_a_directory_names_the_file(damaged, tmp_path):
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file({"a.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    damaged.rename(folder / "optimizer.pt")
    with pytest.raises(InputError, match=r"checkpoint-5: optimizer\.pt: storage '1' is damaged"):
        ckpt8.convert(folder, tmp_path / "out.pt")
    with pytest.raises(InputError, match=r"checkpoint-5: optimizer\.pt: storage '1' is damaged"):
        inspect_checkpoint(folder, full=True)


def test_inspect_in_full_tells_of_a_flipped_bit(damaged):
    inspect_checkpoint(damaged)
    with pytest.raises(InputError, match=r"run\.pt: storage '1' is damaged"):
        inspect_checkpoint(damaged, full=True)


@pytest.fixture
def exported(tmp_path):
    generator = torch.Generator().manual_seed(0)
    state = {f"layers.{k}.mlp.weight": torch.randn(24, 16, generator=generator) for k in range(2)}
    torch.save(state | {"norm.weight": torch.ones(16)}, tmp_path / "run.pt")
    ckpt8.convert(tmp_path / "run.pt", f"{tmp_path}/export/", dtype="float8_e4m3fn")
    return tmp_path / "export"


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_codes_are_not_converted_without_what_they_mean(exported, tmp_path, to):
    with pytest.raises(
        UnsupportedError, match=r"export.*layers\.0\.mlp\.weight and 1 more are quantised for inference"
    ):
        ckpt8.convert(exported, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_codes_count_as_parameters_and_their_scales_do_not(exported):
    assert sum(group["parameters"] for group in inspect_checkpoint(exported)["layers"]) == 2 * 24 * 16 + 16


def test_diff_says_that_it_compares_codes(exported, tmp_path):
    found = ckpt8.diff(tmp_path / "run.pt", exported / "model.safetensors").to_json()
    assert any("quantised for inference" in note for note in found["notes"])
