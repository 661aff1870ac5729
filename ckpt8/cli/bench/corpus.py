"""The text that the GPT of ``bench`` learns: the source of Python's standard library.

It is real text, and needs no download. It differs between Python versions.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

VOCABULARY = b"\n" + bytes(range(32, 127))
CORPUS_BYTES = 4 << 20
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "encodings", "__pycache__"}


@cache
def corpus() -> Tensor:
    """The modules of the library as indices into ``VOCABULARY`` (uint8).

    They come in the order of a hash of their path, so that the held-out end is like the rest.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = sorted(paths, key=lambda name: (crc32(name.encode()), name))
    other_bytes = bytes(set(range(256)) - set(VOCABULARY))
    to_index = bytes.maketrans(VOCABULARY, bytes(range(len(VOCABULARY))))
    text = bytearray()
    for name in names:
        if _SKIPPED_FOLDERS.isdisjoint(name.split("/")):
            text += (root / name).read_bytes().translate(to_index, other_bytes)
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def batch(step: int, *, seed: int, batch_size: int, block_size: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets: a pure function of the arguments.

    They come from the first nine tenths of the text, or from the held-out tenth.
    """
    text = corpus()
    border = len(text) * 9 // 10
    part = text[border:] if held_out else text[:border]
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 2 + held_out)
    starts = torch.randint(len(part) - block_size, (batch_size, 1), generator=generator)
    window = part[starts + torch.arange(block_size + 1)].long()
    return window[:, :-1], window[:, 1:]
