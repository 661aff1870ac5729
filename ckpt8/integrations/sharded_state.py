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
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.container.sharded.reading import read_index
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


def state_to_pack(model: Any, optimizers: Any, *, adapter_only: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of a model and the state of its optimizers.

    With ``adapter_only`` the model is one of peft, and its base is left out.
    """
    weights, moments = get_state_dict(model, optimizers)
    if adapter_only:
        groups: Any = moments["param_groups"]
        stepped = {name for group in groups for name in group["params"]}
        kept = stepped - _parameters(model, trained=False) | _adapters(model, weights)
        weights = {name: weight for name, weight in weights.items() if name in kept}
    return weights, moments


def load_model(
    folder: Path, key: str, model: Any, *, strict: bool = True, has_adapters: bool = False, threads: int | None = None
) -> None:
    """Load the weights under ``key`` into a model that is sharded in any way.

    ``has_adapters``: the model is one of peft, and keeps what ``folder`` does not have of its base.
    """
    state = get_model_state_dict(model)
    if has_adapters:
        stored, needed = read_index(folder).tensors, _adapters(model, state)
        state = {name: value for name, value in state.items() if name in needed or f"{key}.{name}" in stored}
    weights = _read(folder, key, state, strict, threads)
    set_model_state_dict(model, weights, options=StateDictOptions(strict=strict and not has_adapters))


def _adapters(model: Any, weights: dict[str, Any]) -> set[str]:
    """The names of those weights of a model of peft that its base does not have: what is trained, and what peft saves.

    Adapters may have frozen parts, which began at random. Buffers count too.
    """
    from peft import get_peft_model_state_dict

    saved: set[int] = set()
    for name, config in model.peft_config.items():
        if not config.is_prompt_learning:
            saved |= {id(tensor) for tensor in get_peft_model_state_dict(model, weights, adapter_name=name).values()}
    buffers = set(plain_names(name for name, _ in model.named_buffers()).values())
    frozen_parts = {name for name, weight in weights.items() if id(weight) in saved}
    return weights.keys() & (_parameters(model, trained=True) | buffers | frozen_parts)


def _parameters(model: Any, *, trained: bool) -> set[str]:
    """All names of the parameters that are trained, or of those that are frozen."""
    parameters = model.named_parameters(remove_duplicate=False)
    return set(plain_names(name for name, parameter in parameters if parameter.requires_grad is trained).values())


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
