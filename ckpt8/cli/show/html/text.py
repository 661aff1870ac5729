"""Text, figures and ticks of axes on their way into a page."""

from __future__ import annotations

import math
from html import escape

from ckpt8.core.text import printable

LOG10_OF_2 = math.log10(2)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def text(value: object) -> str:
    """Any text as markup that shows it: it contains no tags, and no characters that reverse the text around it."""
    return escape(printable(str(value)), quote=True)


def power(base: int, exponent: int) -> str:
    """Such as 10⁻⁶."""
    return f"{base}{str(exponent).translate(_SUPERSCRIPTS)}"


def linear_ticks(top: float, most: int = 4) -> list[float]:
    """Round numbers from 0 to ``top`` or just above it: the last is the end of the axis."""
    if not top > 0:
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(top / most))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10, 20) if size * factor * most >= top * (1 - 1e-9))
    return [step * k for k in range(math.ceil(top / step - 1e-9) + 1)]


def decades(low: float, high: float, most: int = 6) -> list[int]:
    """At most ``most`` exponents of powers of ten between ``low`` and ``high``, which are such exponents, too."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    return [each for each in range(first, last + 1) if each % step == 0]
