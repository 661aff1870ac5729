"""Cards of optimizers whose state has roles, and whose step is not replayed, each with the reason. Imports no torch."""

from __future__ import annotations

from typing import Any

from ckpt8.optim.card import Card, Form, StateTensor

_BY_TENSOR = "its step depends on norms of the whole tensor, and is not replayed"
_BY_PROJECTION = "its step depends on a projection that changes as it trains, and is not replayed"
_BY_BASIS = "its step depends on a preconditioner that changes as it trains, and is not replayed"
_BY_ALL = "its step depends on all parameters together, and is not replayed"
_BY_BLOCKS = "its second moments are averages over blocks that the file does not name, so that its step is not replayed"
_NO_SCALE = "its state does not say how large its gradients are, so that its step is not replayed"
_ROLES_ONLY = "its step is not replayed"

_M, _V = StateTensor("exp_avg", "moment1"), StateTensor("exp_avg_sq", "moment2")


def _roles(
    rule_id: str, name: str, unknown: str, *tensors: StateTensor, signs: tuple[str, ...] = (), **more: Any
) -> Card:
    """An optimizer whose step is not known."""
    return Card(
        rule_id=rule_id,
        name=name,
        unknown=unknown,
        settings={},
        matrix=Form("", tensors),
        signs=frozenset(signs),
        **more,
    )


UNREPLAYED = (
    # These keep averages like Adam's, and are told by their settings or by other keys of their state.
    _roles("soap", "SOAP", _BY_BASIS, _M, _V, signs=("precondition_frequency", "shampoo_beta", "GG")),
    _roles(
        "galore",
        "GaLore, Fira, Conda, APOLLO",
        _BY_PROJECTION,
        _M,
        _V,
        signs=("projector", "update_proj_gap", "proj_type", "projection_type", "scale_type"),
        objects=frozenset(
            {
                "galore_torch.galore_projector.GaLoreProjector",
                "apollo_torch.svd_projector.GaLoreProjector",
                "apollo_torch.random_projector.GradientProjector",
                "pytorch_optimizer.optimizer.utils.galore.GaLoreProjector",
            }
        ),
        projects=True,
    ),
    _roles(
        "prodigy",
        "Prodigy",
        _BY_ALL,
        StateTensor("exp_avg", "moment1", when="betas"),
        *(_V, StateTensor("p0", "weight", when="slice_p"), StateTensor("s", "moment1_2")),
        signs=("d_coef", "growth_rate"),
    ),
    _roles(
        "lamb",
        "LAMB, LARS, AdamP, TRAC",
        _BY_TENSOR,
        signs=("grad_averaging", "trust_clip", "trust_coefficient", "max_unorm", "wd_ratio", "trac"),
    ),
    # These are told by all the keys of their state together.
    _roles(
        "ademamix_official",
        "AdEMAMix",
        _ROLES_ONLY,
        *(_V, StateTensor("exp_avg_slow", "moment1_2"), StateTensor("exp_avg_fast", "moment1")),
    ),
    _roles(
        "adan_pytorch",
        "Adan",
        _ROLES_ONLY,
        *(StateTensor("m", "moment1"), StateTensor("v", "moment1_2"), StateTensor("n", "moment2")),
        StateTensor("prev_grad", "moment1_3"),
    ),
    _roles(
        "adan_pre_grad",
        "Adan",
        _ROLES_ONLY,
        _M,
        _V,
        StateTensor("exp_avg_diff", "moment1_2"),
        StateTensor("pre_grad", "moment1_3", when="pre_grad"),
    ),
    _roles("mars", "MARS", _ROLES_ONLY, _M, _V, StateTensor("last_grad", "moment1_2")),
    _roles("diffgrad", "DiffGrad", _ROLES_ONLY, _M, _V, StateTensor("previous_grad", "moment1_2")),
    _roles("schedule_free_sgd", "ScheduleFree SGD", _NO_SCALE, StateTensor("z", "weight")),
    _roles(
        "schedule_free_reference",
        "ScheduleFree",
        _ROLES_ONLY,
        *(StateTensor(key, "weight") for key in ("x", "y", "z")),
        StateTensor("exp_avg_sq", "moment2", when="betas"),
    ),
    _roles("asgd", "ASGD", _ROLES_ONLY, StateTensor("ax", "weight")),
    _roles("ranger_optimi", "Ranger", _ROLES_ONLY, _M, _V, StateTensor("la_param", "weight")),
    _roles("ranger", "Ranger", _ROLES_ONLY, _M, _V, StateTensor("slow_buffer", "weight")),
    _roles("adam_mini", "Adam-mini", _BY_BLOCKS, StateTensor("m", "moment1"), StateTensor("v_mean", "exact")),
    _roles("adam_mini_official", "Adam-mini", _BY_BLOCKS, StateTensor("m", "moment1"), StateTensor("vmean", "exact")),
    _roles(
        "adamuon",
        "AdaMuon, Adam-mini",
        _ROLES_ONLY,
        *(StateTensor("m", "moment1"), StateTensor("v", "moment2", when="v")),
    ),
)
