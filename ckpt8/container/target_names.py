"""Names an output that the user did not name: the input's own name with a suffix of this list.

A container states the name of its original. Whoever made it chose that name, so ckpt8 shows it but writes nothing under
it.
"""

from __future__ import annotations

from pathlib import Path

from ckpt8.container.checks import is_plain_name
from ckpt8.container.manifest import Manifest
from ckpt8.core.errors import OutputError

CONTAINER = ".ckpt8"
TORCH = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS = ".safetensors"
SUFFIXES = (*TORCH, SAFETENSORS)
"""The suffixes of checkpoint files."""

_OF_FORMAT = {"torch-zip": ".pt", "torch-legacy": ".pt", "safetensors": SAFETENSORS}
_OF_BYTES = ".bin"


def original_name(manifest: Manifest) -> str:
    """The name of the original file or directory, as the container states it: any text."""
    return manifest.members[0].path if manifest.directory is None else manifest.directory


def container_names(name: str) -> tuple[str, str]:
    """The names that the container of a file or directory may have without being told: short and long."""
    return Path(name).with_suffix(CONTAINER).name, name + CONTAINER


def restored_path(source: Path, manifest: Manifest) -> Path:
    """Where ``restore`` writes by default: next to the container ``source``, under its name.

    ``best.ckpt8`` gives the directory ``best``, or a file ``best.pt``, ``best.safetensors``, ... The suffix is that of
    the original if it is one of SUFFIXES; else, as for ``weights.model`` or ``weights``, the member's format decides:
    ``.pt`` for what torch.save wrote, ``.safetensors`` for safetensors. So a container that keeps its name gives the
    original its name back. A name that has such a suffix already gets no other one: ``run.pt.ckpt8`` gives ``run.pt``.
    A container with another suffix, or none, keeps it: ``run.v2`` gives ``run.v2.pt``.

    Raises OutputError where that name cannot be used.
    """
    known = source.suffix.lower() in (CONTAINER, *SUFFIXES)
    name = source.stem if known else source.name
    suffix = _suffix(manifest)
    alike = TORCH if suffix.lower() in TORCH else (SAFETENSORS,)
    if manifest.directory is None and Path(name).suffix.lower() not in alike:
        name += suffix
    if not is_plain_name(name):
        raise OutputError(f"{source}: its name leaves none for the directory in it; give one with -o")
    return default_path(source.with_name(name))


def default_path(target: Path) -> Path:
    """A target that the user did not name. Raises OutputError for a link to nothing, which could lead anywhere."""
    try:
        dead = target.is_symlink() and not target.exists()
    except OSError as exc:
        raise OutputError(f"{target}: cannot be written: {exc.strerror}") from exc
    if dead:
        raise OutputError(f"{target}: is a link to something that does not exist; remove it, or give a name with -o")
    return target


def _suffix(manifest: Manifest) -> str:
    stored = Path(original_name(manifest)).suffix
    return stored if stored.lower() in SUFFIXES else _OF_FORMAT.get(manifest.members[0].format, _OF_BYTES)
