"""Recognition by content, and one clear line for everything that is no checkpoint."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ckpt8.checkpoint.readers import READERS, get_reader, open_checkpoint
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, SourceFile


def tar_bytes():
    header = bytearray(512)
    header[257:262] = b"ustar"
    return bytes(header)


def safetensors_bytes(header):
    return len(header).to_bytes(8, "little") + header


def zip_bytes():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("word/document.xml", "x")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", InputError, "an empty file"),
        (b"hello, world\n" * 50, InputError, "a text file"),
        ("αβγ".encode() * 200, InputError, "a text file"),
        (b"version https://git-lfs.github.com/spec/v1\n", InputError, "a Git LFS pointer"),
        (bytes(range(256)) * 3, InputError, "of an unknown format"),
        (b"\xff\xfe\xfd\xfc" * 3, InputError, "of an unknown format"),
        (bytes(1000), InputError, "zero bytes"),
        (pickle.dumps({"a": 1}), InputError, "a plain pickle"),
        (tar_bytes(), UnsupportedError, "a tar file"),
        (zip_bytes(), InputError, "a zip file without a data.pkl"),
        (b"PK\5\6" + bytes(18), InputError, "a zip file without a data.pkl"),
        (b"PK\3\4" + bytes(200), InputError, "damaged zip file"),
        (safetensors_bytes(b'{"w":{"dtype":"F32"}}'), InputError, "tensor 'w': its header entry is malformed"),
        (safetensors_bytes(b'{"__metadata__":{"ckpt8":"1.0"}}'), InputError, r"already a \.ckpt8 file"),
    ],
)
def test_other_content_is_named(tmp_path, content, error, message):
    path = tmp_path / "model.pt"  # the name says nothing
    path.write_bytes(content)
    with pytest.raises(error, match=message) as caught, open_checkpoint(path):
        pass
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_what_is_not_a_file_is_named(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, message in [
        (tmp_path / "missing.pt", "cannot be read: No such file"),
        (empty, "an empty directory"),
        (tmp_path, "a directory; give"),
        (pipe, "is not a regular file"),
    ]:
        with pytest.raises(InputError, match=f"^{path}: {message}"), open_checkpoint(path):
            pass


def test_the_name_does_not_matter(tmp_path, compare):
    path = tmp_path / "notes.txt"
    torch.save({"w": torch.arange(5.0)}, path)
    with open_checkpoint(path) as checkpoint:
        compare(checkpoint, torch.load(path))


def test_reader_table():
    with closing(SourceFile(ByteRange(Path(os.devnull), 0, 0))) as empty:
        for reader_id, module in READERS.items():
            assert get_reader(reader_id).__name__ == module
            assert not get_reader(reader_id).sniff(empty)
