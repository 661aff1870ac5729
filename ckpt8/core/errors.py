"""Every exception that ckpt8 raises on purpose, and the exit code that the command line gives it.

A message is one line: which file, which tensor, what was found, what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt8.core.text import printable, shortened


class Ckpt8Error(Exception):
    """Base of all errors that are reported to a user without a traceback. Its text is one line of bounded length.

    >>> issubclass(ckpt8.OutputError, ckpt8.Ckpt8Error)
    True
    """

    exit_code = 1

    @property
    def problem(self) -> str:
        """The text without what to do about it, where that depends on the class."""
        return shortened(printable(Exception.__str__(self)), 1500)  # KeyError would quote it

    def __str__(self) -> str:
        return self.problem

    def told(self, problem: str) -> Ckpt8Error:
        """An error of its kind that tells another ``problem``, and gives no advice that the other does not."""
        return type(self)(problem)


class CheckFailedError(Ckpt8Error):
    """A statistic, a bound or a limit does not hold, or a container was made with other settings (exit code 1).

    >>> ckpt8.CheckFailedError.exit_code
    1
    """


class UsageError(Ckpt8Error, ValueError):
    """An argument cannot be used: an unknown codec, a malformed rule, an unknown tensor name (exit code 2).

    >>> try:
    ...     ckpt8.compress("run.pt", preset="tiny")
    ... except ckpt8.UsageError as error:
    ...     error.exit_code
    2
    """

    exit_code = 2


class WrongTypeError(UsageError, TypeError):
    """An argument has a type or value that its parameter does not take (exit code 2)."""


class UnknownNameError(UsageError, KeyError):
    """A checkpoint has no tensor of this name (exit code 2)."""


class ResumeError(UsageError):
    """A checkpoint does not fit the model or optimizer; neither was changed (exit code 2).

    ``problems`` are all the reasons, one line each; the message shows the first.

    >>> try:
    ...     ckpt8.resume("run.ckpt8", model=torch.nn.Linear(2, 2))
    ... except ckpt8.ResumeError as error:
    ...     len(error.problems)
    2
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class ResumeWarning(UserWarning):
    """Names what ``resume(strict=False)`` did not restore.

    >>> import warnings
    >>> warnings.simplefilter("error", ckpt8.ResumeWarning)  # strict=False becomes strict again
    """


class KernelCacheWarning(UserWarning):
    """Compiled kernels cannot be kept on disk, or a kept one cannot be trusted; compiling them again takes time.

    >>> import warnings
    >>> warnings.simplefilter("ignore", ckpt8.KernelCacheWarning)
    """


class InputError(Ckpt8Error):
    """The input is damaged, hostile or not a checkpoint (exit code 3).

    >>> try:
    ...     ckpt8.load("none.ckpt8")
    ... except ckpt8.InputError as error:
    ...     error.exit_code
    3
    """

    exit_code = 3


class DamagedError(InputError):
    """A container is damaged, and ``restore`` with ``salvage`` reads it; the message says so (exit code 3)."""

    def __str__(self) -> str:
        return f"{self.problem}; restore with salvage=True writes whatever is intact"

    def told(self, problem: str) -> Ckpt8Error:
        """An InputError: what wraps this knows better what to do."""
        return InputError(problem)


class MissingError(InputError, FileNotFoundError):
    """The input is not there (exit code 3)."""


class UnsupportedError(InputError):
    """The input is a checkpoint in a layout or version that ckpt8 does not read (exit code 3).

    >>> issubclass(ckpt8.UnsupportedError, ckpt8.InputError)
    True
    """


class OutputError(Ckpt8Error):
    """The output could not be written; nothing was left behind (exit code 4).

    >>> try:
    ...     ckpt8.restore("run.ckpt8")
    ... except ckpt8.OutputError as error:  # run.pt is there
    ...     error.exit_code
    4
    """

    exit_code = 4


class RefusedError(Exception):
    """A codec refuses a tensor, which then gets another one. Never reaches a user.

    ``storage`` is the index of its storage, where several are encoded together.
    """

    storage: int | None = None


def require(holds: object, message: str, error: type[Ckpt8Error] | None = None) -> None:
    """Raise ``error``, by default InputError, with the message unless ``holds`` is true."""
    if not holds:
        raise (error or InputError)(message)


@contextmanager
def system_errors(error_of: Callable[[OSError], Ckpt8Error]) -> Iterator[None]:
    """Turn an OSError of the block into what ``error_of`` makes of it. A Ckpt8Error stays, also a MissingError."""
    try:
        yield
    except Ckpt8Error:
        raise
    except OSError as exc:
        raise error_of(exc) from exc
