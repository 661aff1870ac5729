"""Runs of the elements of a tensor of any strides, counted in the order of its dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def rows(x: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """The views of a tensor, whole rows and parts of rows, that make up its elements ``start`` to ``stop``."""
    if (start, stop) == (0, x.numel()):
        yield x
        return
    inner = x[0].numel()
    while start < stop:
        row, into = divmod(start, inner)
        whole = (stop - start) // inner if into == 0 else 0
        if whole:
            yield x[row : row + whole]
            start += whole * inner
        else:
            taken = min(stop - start, inner - into)
            yield from rows(x[row], into, into + taken)
            start += taken


def assign(target: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Set the elements from ``start`` on, counted in the order of dimensions, of a tensor of any stride."""
    flat = [target.view(-1)[start : start + len(values)]] if target.is_contiguous() else None
    for part in flat or rows(target, start, start + len(values)):
        part.copy_(values[: part.numel()].view(part.shape))
        values = values[part.numel() :]
