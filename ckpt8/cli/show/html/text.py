"""Text and figures on their way into a page."""

from __future__ import annotations

from html import escape

from ckpt8.core.text import printable

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def text(value: object) -> str:
    """Any text as it is to be read: nothing in it is markup, and nothing in it turns the text around it."""
    return escape(printable(str(value)), quote=True)


def power(base: int, exponent: int) -> str:
    """Such as 10⁻⁶."""
    return f"{base}{str(exponent).translate(_SUPERSCRIPTS)}"
