"""Makes a synthetic checkpoint to measure: the tensors of a transformer and of its AdamW, drawn at random.

The values are like those of training where it matters for time: weights of a narrow normal distribution, first moments
whose scale differs from row to row, second moments that are smoothed squares of these. How small a checkpoint gets
follows from its values, so that only a real one says that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.sources.live_object import recording_pickle, torch_writes, with_crc_fields
from ckpt8.checkpoint.tree import StorageInfo
from ckpt8.container.checks import CRC_BYTES
from ckpt8.container.frames import bytes_of
from ckpt8.core.errors import OutputError
from ckpt8.core.files.source_file import combine, crc32
from ckpt8.core.files.write_at import write_all_at

_BYTES = 12
"""Of one parameter: fp32 weight and moments."""

_WIDTH = 64
_STEPS = 1000
_WEIGHT, _MOMENT, _ROOT_RATIO = 0.02, 1e-5, 4.0
"""Standard deviation of weights, the middle of those of first moments in rows, and how much larger the roots of second
moments are: steps of AdamW are then about a quarter of the learning rate."""

_SMOOTH = 4
"""Neighbours in a row whose squares a second moment is the mean of."""

_TILE = 1 << 20
"""Elements that are drawn at once."""


def write(target: Path, nbytes: int) -> dict[str, Any]:
    """Write a checkpoint of about ``nbytes`` bytes, at least a few kilobytes, tile by tile; and describe it.

    It is a function of the size alone. Raises OutputError.
    """
    network = {name: torch.nn.Parameter(torch.empty(shape)) for name, shape in _shapes(nbytes // _BYTES).items()}
    optimizer = torch.optim.AdamW(network.values(), lr=3e-4)
    for weight in network.values():
        moments = {key: torch.empty_like(weight) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(float(_STEPS)), **moments}
    saved: dict[str, torch.UntypedStorage] = {}
    try:
        # torch leaves holes for the tensors, whose memory nothing has touched.
        with torch_writes(), torch.serialization.skip_data():
            model = {name: weight.detach() for name, weight in network.items()}
            checkpoint = {"model": model, "optimizer": optimizer.state_dict(), "iter_num": _STEPS}
            torch.save(checkpoint, target, pickle_module=cast("Any", recording_pickle(saved)))
        with open_checkpoint(target) as skeleton:
            places = {saved[place.key].data_ptr(): place for place in with_crc_fields(skeleton)}
        with target.open("r+b") as file:
            for seed, (parameter, state) in enumerate(optimizer.state.items()):
                step, *moments = state.values()
                large = [places[tensor.data_ptr()] for tensor in (parameter, *moments)]
                _write_tiles(file.fileno(), [places[step.data_ptr()]], iter([[step]]))
                _write_tiles(file.fileno(), large, _tiles(parameter.shape, seed))
    except OSError as exc:
        raise OutputError(f"{target}: cannot be written: {exc.strerror or exc}") from exc
    return {"parameters": sum(weight.numel() for weight in network.values()), "steps": _STEPS}


def _shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a network of about so many parameters: 64 wide for each layer, the vocabulary takes the rest."""
    width = _WIDTH * max(1, int((parameters * _WIDTH / 12) ** (1 / 3) / _WIDTH))
    layer = {
        "ln_1.weight": (width,),
        "attn.c_attn.weight": (3 * width, width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "ln_2.weight": (width,),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (width, 4 * width),
    }
    layers, left = divmod(parameters, width * (12 * width + 9))
    shapes = {"wte.weight": (max(1, left // width), width)}
    return shapes | {f"h.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()}


def _tiles(shape: Sequence[int], seed: int) -> Iterator[list[torch.Tensor]]:
    """Weights, first and second moments of a tensor, some rows at a time; a vector is one row."""
    generator = torch.Generator().manual_seed(seed)
    columns = shape[-1]
    rows = shape[0] if len(shape) > 1 else 1
    for start in range(0, rows, max(1, _TILE // columns)):
        count = min(rows - start, max(1, _TILE // columns))
        noise = torch.randn(count, columns + _SMOOTH - 1, generator=generator)
        scale = _MOMENT * torch.randn(count, 1, generator=generator).exp()
        smoothed = noise.square().unfold(1, _SMOOTH, 1).mean(2)
        weights = _WEIGHT * torch.randn(count, columns, generator=generator)
        yield [weights, scale * noise[:, :columns], (_ROOT_RATIO * scale).square() * smoothed]


def _write_tiles(descriptor: int, places: Sequence[StorageInfo], tiles: Iterator[Sequence[torch.Tensor]]) -> None:
    """Write tiles, each with one tensor for every place, one after another; and the checksums of what was written."""
    crcs, done = [0] * len(places), 0
    for tile in tiles:
        for number, (place, values) in enumerate(zip(places, tile, strict=True)):
            content = bytes_of(values.contiguous())
            write_all_at(descriptor, [content], place.offset + done)
            crcs[number] = combine(crcs[number], crc32(content), len(content))
        done += len(bytes_of(tile[0]))
    for place, crc in zip(places, crcs, strict=True):
        for field in place.crc_fields:
            write_all_at(descriptor, [crc.to_bytes(CRC_BYTES, "little")], field)
