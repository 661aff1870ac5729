"""``python -m ckpt8`` and the command ``ckpt8``: SIGINT and SIGTERM end it at any moment, silently, with 128 + number.

They strike as exceptions, so that temporary files are removed on the way out.
"""

import gc
import signal
import sys
from typing import Any, NoReturn

_struck: list[int] = []
"""Numbers of the signals that came."""


def _interrupt(number: int, _: object) -> NoReturn:
    _struck.append(number)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _strike_again(lost: Any) -> None:
    """Raise an interrupt again that struck inside a callback or a finaliser, whose exceptions nobody gets."""
    error = lost.exc_value
    if not isinstance(error, (KeyboardInterrupt, SystemExit)):
        sys.__unraisablehook__(lost)
        return

    def strike(*_: object) -> NoReturn:
        raise error

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.01)  # seconds


def _run() -> None:
    from ckpt8.cli.app import main as run

    gc.freeze()
    gc.enable()
    run()


def main() -> None:
    """Run the command line."""
    sys.unraisablehook = _strike_again
    signal.signal(signal.SIGTERM, _interrupt)
    # A shell has what runs in the background ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        # Modules live until the exit: the garbage collector need not look through them.
        gc.disable()
        from ckpt8.cli.guard import guarded, open_streams

        open_streams()
        guarded(_run)
    except BaseException:
        # In place of whatever became of an interrupt: in the middle of a wait for a lock, say, a RuntimeError.
        if _struck:
            sys.exit(128 + _struck[0])
        raise
    finally:
        # The outcome is known and temporary files are removed; what is left is to leave.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        # Libraries that come with torch count their objects at exit, and must find them freed.
        if "torch" not in sys.modules:
            gc.freeze()


if __name__ == "__main__":
    main()
