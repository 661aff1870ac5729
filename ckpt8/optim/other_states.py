"""The state of optimizers that ckpt8 has no rule for: which of their tensors are moments, and which are weights.

A key alone says little (``sum``, ``z``, ``s``), so that all tensors of a state must be those of one optimizer. No
figure in update space follows from these roles, and no step is replayed. The keys are those of torch 2.13 and
pytorch-optimizer 4.1.0. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpt8.core.tensors import Role

_FIRST, _SECOND, _WEIGHT, _EXACT = Role.MOMENT1, Role.MOMENT2, Role.WEIGHT, Role.OTHER


@dataclass(frozen=True, slots=True)
class OtherState:
    """The tensors in the state of one parameter, scalars aside, each with its role; ``optional`` ones may be missing.

    ``MOMENT2`` are values from zero on that an update divides by. ``MOMENT1`` is what else is an average, or the last
    gradient.
    """

    optimizers: str
    roles: Mapping[str, Role]
    optional: Mapping[str, Role]

    def fits(self, keys: Collection[str]) -> bool:
        """Whether a state with these tensors is of this kind."""
        return self.roles.keys() <= set(keys) <= self.roles.keys() | self.optional.keys()


_ADAM = {"exp_avg": _FIRST, "exp_avg_sq": _SECOND}
_LAST_GRADIENTS = ("previous_grad", "prev_grad", "pre_grad", "neg_pre_grad")

OTHER_STATES = (
    OtherState("Adamax", {"exp_avg": _FIRST, "exp_inf": _SECOND}, {}),
    OtherState("AdaBelief", {"exp_avg": _FIRST, "exp_avg_var": _SECOND}, {"max_exp_avg_var": _SECOND}),
    OtherState("AdEMAMix", {**_ADAM, "exp_avg_slow": _FIRST}, {"exp_avg_fast": _FIRST}),
    OtherState("Adan", {**_ADAM, "exp_avg_diff": _FIRST}, dict.fromkeys(_LAST_GRADIENTS, _FIRST)),
    OtherState("Adagrad", {"sum": _SECOND}, {}),
    OtherState("RMSprop", {"square_avg": _SECOND}, {"momentum_buffer": _FIRST, "grad_avg": _FIRST}),
    OtherState("Adadelta", {"square_avg": _SECOND, "acc_delta": _SECOND}, {}),
    OtherState("ScheduleFree", {"z": _WEIGHT}, {"exp_avg_sq": _SECOND}),
    OtherState("Prodigy", {**_ADAM, "p0": _WEIGHT, "s": _FIRST}, {}),
    OtherState("ASGD", {"ax": _WEIGHT}, {}),
    OtherState("Ranger", {**_ADAM, "la_param": _WEIGHT}, {}),
    OtherState("Ranger", {**_ADAM, "slow_buffer": _WEIGHT}, {}),
    OtherState("Adam-mini, AdaMuon", {"m": _FIRST}, {"v": _SECOND, "v_mean": _EXACT}),
)


def other_roles(keys: Collection[str]) -> Mapping[str, Role]:
    """The roles of the tensors of a state by their keys; empty for a state that is none of these."""
    found = next((each for each in OTHER_STATES if each.fits(keys)), None)
    return {} if found is None else {**found.roles, **found.optional}
