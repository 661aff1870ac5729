"""Leaves ``read_ckpt8.py`` beside a run: a copy of ``container/plain_reader.py``, which reads it without ckpt8."""

from contextlib import closing
from pathlib import Path

from ckpt8 import container
from ckpt8.core.errors import InputError, OutputError, require
from ckpt8.core.files.atomic import AtomicFile, default_path
from ckpt8.core.files.source_file import ByteRange, open_range

NAME = "read_ckpt8.py"

_FILE = Path(container.__file__).with_name("plain_reader.py")


def leave_reader(folder: Path) -> bool:
    """Write the copy into the folder or bucket of a run; False if it is there already. Replaces one of another version.

    Raises OutputError where a file of that name is another one, or where it cannot be written.
    """
    content = _FILE.read_bytes()
    target = default_path(folder / NAME)
    is_known = content.partition(b"\n")[0] + b"\n"

    def check(path: Path) -> str:
        require(_read(path).startswith(is_known), f"{path}: is no copy of the reader; move it away", OutputError)
        return f"{path}: another version of the reader"

    if target.exists() and _read(target) == content:
        return False
    with AtomicFile(target, force=True, check=check) as output:
        with output.guard():
            output.file.write(content)
        output.publish()
    return True


def _read(path: Path) -> bytes:
    """The bytes of a file that is not much longer than the reader, else its first ones. Raises OutputError."""
    try:
        with closing(open_range(ByteRange.of(path))) as file:
            return file.read(0, min(file.source.length, 1 << 20))
    except InputError as exc:
        raise OutputError(f"{path}: {exc.problem}") from exc
