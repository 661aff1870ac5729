"""Chooses the codec of a storage: presets go by role, rules by name, and some tensors always stay lossless."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ckpt8.checkpoint.vocabulary import BUFFERS
from ckpt8.codecs import Codec, parse_codec
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.split24 import Split24
from ckpt8.compressing.budget import PRESET_BUDGETS, Budget
from ckpt8.core.arguments import described
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import Role, TensorSpec, is_small

LOSSLESS = Lossless()

_FLASH: Mapping[Role, Codec] = {
    Role.WEIGHT: Split24(),
    Role.MOMENT1: Companded8(),
    Role.MOMENT2: Companded8(signed=False, Q=255),
}

PRESETS: Mapping[str, Mapping[Role, Codec]] = {"flash": _FLASH, "compact": _FLASH, "archive": _FLASH, "lossless": {}}
"""The codec of each role. Under a budget these are the codecs of what a budget cannot be given to."""


_COMPONENTS = re.compile(r"[.:]")
"""Separates the components of a path; a colon follows the name of a member."""


@dataclass(frozen=True, slots=True)
class Rule:
    """``GLOB=CODEC``: tensors whose path matches get that codec. ``text`` is what the user wrote."""

    text: str
    glob: str
    codec: type[Any]
    fields: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule. Raises UsageError."""
        match = re.fullmatch(r"(.+?)=([a-z0-9]+\s*(?:\(.*\))?)", text.strip())
        if match is None:
            raise UsageError(f"rule {text!r}: expected GLOB=CODEC, as in '*.lm_head.weight=lossless'")
        codec, fields = parse_codec(match[2])
        rule = cls(text, match[1].strip(), codec, fields)
        if rule.codec_for(Role.OTHER) is None and rule.codec_for(Role.MOMENT2) is None:
            codec(**fields)
        return rule

    def matches(self, names: Sequence[str]) -> bool:
        """Whether the glob matches one of ``names``."""
        return any(fnmatchcase(name, self.glob) for name in names)

    def codec_for(self, role: Role) -> Codec | None:
        """The codec with the fields of the rule, or None where they do not suit the role.

        Fields that the rule does not give have the defaults of the role: second moments are unsigned.
        """
        try:
            codec: Codec = self.codec(**{**self.codec.defaults_for(role), **self.fields})
        except UsageError:
            return None
        return codec


@dataclass(frozen=True, slots=True)
class Policy:
    """A preset and rules; the first rule that matches wins over the preset.

    ``budget`` is that of the preset, or the one that was asked for; None without one.
    """

    preset: str = "flash"
    rules: tuple[Rule, ...] = ()
    budget: Budget | None = None

    @classmethod
    def of(
        cls,
        preset: str | None = None,
        rules: Sequence[str] = (),
        budget: float | None = None,
        max_update_error: float | None = None,
    ) -> Policy:
        """Read a preset, flash by default, and rules. A ``budget`` in steps is a preset of its own.

        Moments under a budget keep ``max_update_error``. Raises UsageError for an unknown preset, a preset beside a
        budget, a budget out of range, and a malformed rule.
        """
        if budget is not None and preset is not None:
            raise UsageError(f"preset {preset!r} and budget {described(budget)} exclude each other; give one of them")
        if preset is None:
            preset = "flash" if budget is None else "archive"
        if preset not in PRESETS:
            raise UsageError(f"preset {preset!r}: expected one of {', '.join(PRESETS)}")
        found = PRESET_BUDGETS.get(preset) if budget is None else Budget.of(budget)
        if found is not None and max_update_error:
            found = found.bounded(max_update_error)
        return cls(preset, tuple(Rule.parse(text) for text in rules), found)

    @property
    def keeps_compressed(self) -> bool:
        """Whether slices that a framework has compressed stay as they are, so that every file comes back exactly."""
        return self.preset == "lossless"

    def check_rules(self, names: Sequence[str]) -> None:
        """Raise UsageError for a rule that matches no tensor: with a typo, it would protect nothing."""
        for rule in self.rules:
            if not rule.matches(names):
                raise UsageError(f"rule {rule.text!r} matches no tensor; inspect --tensors lists them")

    def has_rule(self, names: Sequence[str]) -> bool:
        """Whether a rule matches any of these tensors."""
        return any(rule.matches(names) for rule in self.rules)

    def choose(
        self, spec: TensorSpec, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Codec, str | None]:
        """The codec of a storage, and the reason where it is lossless although its role or a rule says otherwise.

        ``spec`` is that of the storage, flat; ``names`` and ``shapes`` are those of its tensors.
        """
        for rule in self.rules:
            if rule.matches(names):
                codec = rule.codec_for(spec.role)
                if codec is not None and codec.accepts(spec):
                    return codec, None
                return LOSSLESS, f"rule {rule.text!r} does not fit {spec.dtype.label} {spec.role.value}"
        wanted = PRESETS[self.preset].get(spec.role)
        if wanted is None or not wanted.accepts(spec):
            return LOSSLESS, None
        kept = _why_kept(names, shapes)
        return (wanted, None) if kept is None else (LOSSLESS, kept)

    def is_free(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether a budget may choose the codec of a storage: no rule names it, and it is not kept as it is."""
        return _why_kept(names, shapes) is None and not self.has_rule(names)


def _why_kept(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str | None:
    """Why a storage stays exact under every preset, or None."""
    if any(_COMPONENTS.split(name)[-1] in BUFFERS for name in names):
        return "buffer"
    return "small" if any(is_small(shape) for shape in shapes) else None
