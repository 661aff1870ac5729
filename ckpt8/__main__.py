"""``python -m ckpt8`` and the command ``ckpt8``: an interrupt ends it at any moment, in silence."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

_SOON = 0.01
"""Seconds after which an interrupt that was lost strikes again."""


def _strike_again(lost: Any) -> None:
    """As ``sys.unraisablehook``: an interrupt inside a callback or a finaliser, whose exceptions nobody gets."""
    error = lost.exc_value
    if not isinstance(error, (KeyboardInterrupt, SystemExit)):
        sys.__unraisablehook__(lost)
        return

    def strike(*_: object) -> NoReturn:
        raise error

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, _SOON)


def main() -> None:
    """Run the command line."""
    sys.unraisablehook = _strike_again
    try:
        from ckpt8.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        # The outcome is known and temporary files are removed; what is left is to leave.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
