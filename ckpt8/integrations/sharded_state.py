"""Models and optimizers that ranks share, as one packed directory: for frameworks that save them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckpt8.core.arguments import checked
from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter


class PacksSlices:
    """Takes the options of Ckpt8StorageWriter and gives the class behind it the other arguments."""

    @checked
    def __init__(
        self,
        *args: Any,
        preset: str | None = None,
        budget: float | None = None,
        rules: Sequence[str] = (),
        threads: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._packing: dict[str, Any] = {"preset": preset, "budget": budget, "rules": tuple(rules), "threads": threads}
        Ckpt8StorageWriter(".", **self._packing)  # raises UsageError now, not at the first save
        super().__init__(*args, **kwargs)


def save_packed(folder: Path, state: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Pack ``state`` into ``folder``, a weight and its moments into the file of one rank.

    ``options`` are those of Ckpt8StorageWriter.
    """
    state_dict_saver.save(state, storage_writer=Ckpt8StorageWriter(folder, **options), planner=Ckpt8SavePlanner())


def load_model(folder: Path, key: str, model: Any, *, strict: bool = True, threads: int | None = None) -> None:
    """Load the weights under ``key`` into a model that is sharded in any way."""
    weights = _read(folder, key, get_model_state_dict(model), strict, threads)
    set_model_state_dict(model, weights, options=StateDictOptions(strict=strict))


def load_optimizers(folder: Path, key: str, model: Any, optimizers: Any, *, threads: int | None = None) -> None:
    """Load the state under ``key`` into the optimizers of a model."""
    moments = _read(folder, key, get_optimizer_state_dict(model, optimizers), True, threads)
    set_optimizer_state_dict(model, optimizers, moments)


def _read(folder: Path, key: str, state: Any, strict: bool, threads: int | None) -> Any:
    """``state``, with the values that ``folder`` has under ``key``."""
    wanted = {key: state}
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    state_dict_loader.load(wanted, storage_reader=Ckpt8StorageReader(folder, threads=threads), planner=planner)
    return wanted[key]
