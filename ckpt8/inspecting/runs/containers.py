"""One row from a container: its head, and the frames of a skeleton where step and loss stand in it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.readers.heads import tree_of_head
from ckpt8.checkpoint.run_folder import TRAINER_STATE
from ckpt8.checkpoint.scalars import number_of
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.walk import Components, format_path
from ckpt8.codecs.error_stats import StepError, read_step_error
from ckpt8.container.json_fields import Fields
from ckpt8.container.overview import Contained, Overview
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.json_text import parse_any_json
from ckpt8.inspecting.counters import GLOBAL_KEYS
from ckpt8.inspecting.manifest_facts import asked_words
from ckpt8.inspecting.runs.facts import Facts
from ckpt8.inspecting.runs.progress import Progress, no_tensor, of_trainer_state, of_tree

_LONGEST_STATE = 16 << 20
_MOST_MEMBERS = 8
"""Files of a directory in which a step is looked for."""


def read_container(path: Path) -> Facts:
    """The facts of a container. Raises InputError for damage."""
    with closing(SourceFile(ByteRange.of(path))) as file:
        overview = Overview(file)
        parameters = overview.parameters
        return Facts(
            format=f"ckpt8 {overview.version}",
            bytes=sum(member.size for member in overview.members),
            progress=_progress(overview),
            counted=_rule_step(parameters),
            original=overview.directory or next((member.path for member in overview.members), None),
            asked=asked_words(overview.preset, overview.budget),
            seal=overview.seal,
            base=overview.base,
            error=_error_in_steps(parameters),
        )


def _error_in_steps(parameters: Iterable[Fields]) -> StepError | None:
    """The error of all parameters together; None where it was not measured, or where all that is lossy is outside."""
    total = None
    for parameter in parameters:
        if (error := read_step_error(parameter.optional("steps", dict))) is not None:
            total = total or StepError()
            total.merge(error)
    return total if total is not None and total.energy > 0 else None


def _rule_step(parameters: Iterable[Fields]) -> int | None:
    """The step of the first parameter whose update rule has one."""
    rules = (parameter.optional("rule", dict) or {} for parameter in parameters)
    return next((step for rule in rules if type(step := rule.get("step")) is int and step > 0), None)


def _progress(overview: Overview) -> Progress:
    """What the tree of a single file says, or the state of Trainer in a directory."""
    if overview.directory is None:
        return _of_file(overview, overview.members[0]) if len(overview.members) == 1 else Progress()
    found = Progress()
    for member in overview.members:
        if member.path.rpartition("/")[2] == TRAINER_STATE and member.size <= _LONGEST_STATE:
            content = overview.skeleton(member)
            if content is not None and len(content) == member.size:
                found.complete(_of_state(content))
    for member in overview.members[:_MOST_MEMBERS] if found.step is None else ():
        tree = _tree(overview, member)
        if found.step is None and tree is not None:
            found.step = of_tree(tree, no_tensor, GLOBAL_KEYS).step
    return found


def _of_state(content: bytes) -> Progress:
    try:
        return of_trainer_state(parse_any_json(content, TRAINER_STATE))
    except InputError:
        return Progress()  # the file may have been odd before it was compressed


def _of_file(overview: Overview, member: Contained) -> Progress:
    def number(path: Components, _: TensorRef) -> float | None:
        found = overview.element(format_path(path))
        return None if found is None else number_of(*found)

    return of_tree(_tree(overview, member), number)


def _tree(overview: Overview, member: Contained) -> Any:
    """The tree of a member; None where it has none, or a pickle that is longer than what is read of it."""
    head = overview.skeleton(member)
    with suppress(InputError):
        return None if head is None else tree_of_head(member.format, head, member.path)
    return None
