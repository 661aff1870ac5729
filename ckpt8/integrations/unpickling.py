"""Objects that a framework has pickled, made again only of what torch allows: no other name in a pickle is imported."""

from __future__ import annotations

import pickle
from typing import IO, Any

from ckpt8.errors import InputError, UnsupportedError
from ckpt8.resuming.names import listed

_SHOWN = 5


def load_allowed(file: IO[bytes], where: str, map_location: Any = None) -> Any:
    """``torch.load(..., weights_only=True)`` of a seekable file that ``where`` names.

    Raises UnsupportedError that lists the classes which torch does not allow, InputError for damage.
    """
    import torch

    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as exc:
        names = _unsafe_names(file)
        if not names:
            raise InputError(f"{where}: cannot be loaded: {str(exc).splitlines()[0]}") from exc
        raise UnsupportedError(
            f"{where}: holds {listed(names, _SHOWN)}, which torch does not allow and nothing here unpickles; "
            "if you trust the file, call torch.serialization.add_safe_globals with these classes first"
        ) from exc
    except (EOFError, RuntimeError, ValueError) as exc:
        raise InputError(f"{where}: cannot be loaded: {str(exc).splitlines()[0]}") from exc


def _unsafe_names(file: IO[bytes]) -> list[str]:
    """The names in a pickle that torch does not allow, as far as they can be told. None of them is imported."""
    import torch

    file.seek(0)
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError):
        return []
