"""The cards of optimizers that ckpt8 recognises and does not train with: their state and settings. Imports no torch.

ckpt8 replays the steps of most. ``UNREPLAYED`` are those whose state has roles and whose step is not replayed, each
with the reason.

State and settings are those of torch 2.13, torch-optimi 0.3.3, pytorch-optimizer 4.1.0, schedulefree 1.4.1, prodigyopt
1.1.2, adam-mini 1.1.1, muon-optimizer 0.1.0, adan-pytorch 0.1.0, galore-torch 1.0 and apollo-torch 1.0.3.
"""

from collections.abc import Mapping
from typing import Any

from ckpt8.optim.cards import FIRST, OFF, SECOND, Card, Form, StateTensor, Update

_BY_BLOCKS = "its second moments are averages over blocks that the file does not name, so that its step is not replayed"
_ROLES_ONLY = "its step is not replayed"


def _has_distance(group: Mapping[Any, Any]) -> bool:
    """Whether the distance that Prodigy estimates is a number that steps can be counted with."""
    return type(group["d"]) in (int, float) and 1e-30 <= group["d"] <= 1e30


def _roles(
    rule_id: str,
    name: str,
    unknown: str,
    *tensors: StateTensor,
    signs: tuple[str, ...] = (),
    update: Update | None = None,
    **more: Any,
) -> Card:
    """An optimizer whose steps are not replayed. That of a state is known with an ``update``."""
    return Card(
        rule_id=rule_id,
        name=name,
        unknown=unknown,
        settings={},
        matrix=Form("", tensors, update),
        signs=frozenset(signs),
        **more,
    )


UNREPLAYED = (
    # These keep averages like Adam's, and are told by their settings or by other keys of their state.
    _roles(
        "soap",
        "SOAP",
        "its step depends on a preconditioner that changes as it trains, and is not replayed",
        FIRST,
        SECOND,
        signs=("precondition_frequency", "shampoo_beta", "GG"),
    ),
    _roles(
        "galore",
        "GaLore, Fira, Conda, APOLLO",
        "its step depends on a projection that changes as it trains, and is not replayed",
        FIRST,
        SECOND,
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
        "its step depends on all parameters together, and is not replayed",
        *(FIRST, SECOND, StateTensor("p0", "weight", when="slice_p"), StateTensor("s", "moment1_2")),
        signs=("d_coef", "growth_rate"),  # the latter of D-Adaptation, too
        update="adam",
        needs=("d", "d_coef", "d_max"),
        agrees=_has_distance,
        scale_key="d",
    ),
    _roles(
        "lamb",
        "LAMB, LARS, AdamP, TRAC",
        "its step depends on norms of the whole tensor, and is not replayed",
        signs=("grad_averaging", "trust_clip", "trust_coefficient", "max_unorm", "wd_ratio", "trac"),
    ),
    # These are told by all the keys of their state together.
    _roles(
        "ademamix_official",
        "AdEMAMix",
        _ROLES_ONLY,
        *(SECOND, StateTensor("exp_avg_slow", "moment1_2"), StateTensor("exp_avg_fast", "moment1")),
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
        FIRST,
        SECOND,
        StateTensor("exp_avg_diff", "moment1_2"),
        StateTensor("pre_grad", "moment1_3", when="pre_grad"),
    ),
    _roles("mars", "MARS", _ROLES_ONLY, FIRST, SECOND, StateTensor("last_grad", "moment1_2")),
    _roles("diffgrad", "DiffGrad", _ROLES_ONLY, FIRST, SECOND, StateTensor("previous_grad", "moment1_2")),
    _roles(
        "schedule_free_sgd",
        "ScheduleFree SGD",
        "its state does not say how large its gradients are, so that its step is not replayed",
        StateTensor("z", "weight"),
    ),
    _roles(
        "schedule_free_reference",
        "ScheduleFree",
        _ROLES_ONLY,
        *(StateTensor(key, "weight") for key in ("x", "y", "z")),
        StateTensor("exp_avg_sq", "moment2", when="betas"),
    ),
    _roles("asgd", "ASGD", _ROLES_ONLY, StateTensor("ax", "weight")),
    # Prodigy with a first beta of zero.
    _roles(
        "prodigy_no_momentum",
        "Prodigy",
        _ROLES_ONLY,
        *(SECOND, StateTensor("p0", "weight", when="slice_p"), StateTensor("s", "moment1_2")),
    ),
    _roles("ranger_optimi", "Ranger", _ROLES_ONLY, FIRST, SECOND, StateTensor("la_param", "weight")),
    _roles("ranger", "Ranger", _ROLES_ONLY, FIRST, SECOND, StateTensor("slow_buffer", "weight")),
    _roles("adam_mini", "Adam-mini", _BY_BLOCKS, StateTensor("m", "moment1"), StateTensor("v_mean", "exact")),
    _roles("adam_mini_official", "Adam-mini", _BY_BLOCKS, StateTensor("m", "moment1"), StateTensor("vmean", "exact")),
    _roles(
        "adamuon",
        "AdaMuon, Adam-mini",
        _ROLES_ONLY,
        *(StateTensor("m", "moment1"), StateTensor("v", "moment2", when="v")),
    ),
)


_MUON_SIGNS = ("use_muon", "ns_steps", "nesterov", "ns_method", "ns_coefficients")


def _root(squares: Any) -> Any:
    """Square roots, correctly rounded: torch's of fp32 differ from processor to processor."""
    return squares.double().sqrt().float()


def _square_avg_rms(state: Mapping[str, Any], given: Mapping[str, Any], step: int) -> Any:
    """The root of the average of squares without its bias; RMSprop calls its decay alpha, Adadelta rho."""
    beta = float(given["alpha" if "alpha" in given else "rho"])
    return _root(state["square_avg"].clamp(min=0) / (1 - beta ** max(step, 1)))


def _adan_rms(state: Mapping[str, Any], given: Mapping[str, Any], step: int) -> Any:
    """Of independent gradients g, where the state averages the squares of (1 + b2) g - b2 g_(t-1)."""
    _, beta2, beta3 = given["betas"]
    bias = 1.0 if given["debiased"] else 1 - beta3 ** max(step, 1)
    return _root(state["exp_avg_sq"].clamp(min=0) / (bias * ((1 + beta2) ** 2 + beta2**2)))


def _belief_rms(state: Mapping[str, Any], given: Mapping[str, Any], step: int) -> Any:
    """From the variance and the mean."""
    variance = state["exp_avg_var"].clamp(min=0) / (1 - given["betas"][1] ** max(step, 1))
    return _root(variance + state["exp_avg"].square())


def _known(rule: str, *tensors: StateTensor, **more: Any) -> dict[str, Any]:
    """The form, and settings of Adam with two betas unless ``more`` has others, of an optimizer with a rule."""
    settings = {"lr": 1, "eps": 1, "weight_decay": 1, "betas": more.pop("betas", 2), **more.pop("settings", {})}
    return {
        "matrix": Form(f"ckpt8.optim.recognised_rules:{rule}", tensors, "replayed", more.pop("reach", "element")),
        "settings": {name: count for name, count in settings.items() if count >= 0},
        "counts": True,
        **more,
    }


def _adan(rule_id: str, last: str, **settings: int) -> Card:
    """Adan by the key of its last gradient, and by its setting for decoupled weight decay.

    optimi stores averages without bias, and 0.3.3 ignores its setting ``adam_wd``.
    """
    is_optimi = not settings
    return Card(
        rule_id=rule_id,
        name="Adan",
        **_known(
            "adan",
            *(FIRST, StateTensor("exp_avg_diff", "moment1_2"), SECOND, StateTensor(last, "moment1_3")),
            betas=3,
            settings=settings,
            fixed={"last": last, "debiased": is_optimi},
            choices={"adam_wd": (False,)} if is_optimi else {},
            needs=tuple(settings) or ("adam_wd",),
            own_decay=True,
            gradient_rms=_adan_rms,
        ),
    )


def _muon(rule_id: str, settings: Mapping[str, int], *, fused: bool = True, **choices: tuple[Any, ...]) -> Card:
    """Muon by the settings that one package has."""
    return Card(
        rule_id=rule_id,
        name="Muon",
        **_known(
            "muon",
            StateTensor("momentum_buffer", "moment1"),
            reach="matrix",
            betas=-1,
            settings={"momentum": 1, "eps": -1, **settings},
            choices=choices,
            fixed={"fused": fused},
            needs=("momentum", *(name for name in _MUON_SIGNS if name in {**settings, **choices})),
            lacks=frozenset(_MUON_SIGNS) - {*settings, *choices} | {"beta2", "gamma", "qk_clip_threshold", "dampening"},
            counts=False,
            average=lambda given: (given["momentum"], 1 - given["momentum"]),
        ),
    )


def _schedule_free(rule_id: str, step_key: str) -> Card:
    """ScheduleFree AdamW by the setting that counts steps."""
    return Card(
        rule_id=rule_id,
        name="ScheduleFree AdamW",
        **_known(
            "schedule_free_adamw",
            StateTensor("z", "weight"),
            SECOND,
            settings=dict.fromkeys(("r", "weight_lr_power", "warmup_steps", "weight_sum", "lr_max"), 1),
            fixed={"taken": 0},
            choices={"train_mode": (True,), "decoupling_c": (None, 0), "use_palm": OFF, "silent_sgd_phase": (None,)},
            needs=("weight_sum", step_key),
            own_decay=True,
            needs_weight=True,
            step_key=step_key,
            agrees=_scheduled,
        ),
    )


def _scheduled(group: Mapping[Any, Any]) -> bool:
    """Whether the last learning rate is that of the schedule; that of AdamWScheduleFreePaper has another factor."""
    try:
        share = min(1.0, group["k"] / group["warmup_steps"]) if group["warmup_steps"] else 1.0
        return bool(abs(group["scheduled_lr"] - group["lr"] * share) <= 1e-6 * abs(group["lr"]))
    except (KeyError, TypeError, ArithmeticError):
        return "scheduled_lr" not in group


def _is_adabelief(group: Mapping[Any, Any]) -> bool:
    """Whether eps is as small as AdaBelief needs it; Aida has the same settings, and 1e-8 by default."""
    return isinstance(group.get("eps"), float) and group["eps"] < 1e-10


RECOGNISED = (
    *UNREPLAYED,
    Card(
        rule_id="adamax",
        name="Adamax",
        **_known(
            "adamax",
            *(FIRST, StateTensor("exp_inf", "moment2")),
            coupled=True,
            # The norm is the largest of recent gradients: about three times their RMS.
            gradient_rms=lambda state, _given, _step: state["exp_inf"] / 3,
        ),
    ),
    Card(
        rule_id="nadam",
        name="NAdam",
        **_known(
            "nadam",
            *(FIRST, SECOND),
            settings={"momentum_decay": 1},
            needs=("momentum_decay",),
            lacks=frozenset({"amsgrad"}),
            side=frozenset({"mu_product"}),
            coupled=True,
        ),
    ),
    Card(
        rule_id="radam",
        name="RAdam",
        **_known(
            "radam",
            *(FIRST, SECOND),
            needs=("decoupled_weight_decay", "foreach", "maximize", "capturable", "differentiable"),
            lacks=frozenset({"amsgrad", "momentum_decay", "fused"}),
            coupled=True,
        ),
    ),
    Card(
        rule_id="adabelief",
        name="AdaBelief",
        **_known(
            "adabelief",
            *(FIRST, StateTensor("exp_avg_var", "moment2")),
            StateTensor("max_exp_avg_var", "max_moment2", when="ams_bound"),
            needs=("rectify",),
            agrees=_is_adabelief,
            gradient_rms=_belief_rms,
        ),
    ),
    Card(
        rule_id="ademamix",
        name="AdEMAMix",
        **_known(
            "ademamix",
            *(FIRST, SECOND, StateTensor("exp_avg_slow", "moment1_2")),
            betas=3,
            settings={"alpha": 1},
            choices={"t_alpha_beta3": (None,)},
            needs=("t_alpha_beta3",),
        ),
    ),
    _adan("adan", "previous_grad", weight_decouple=1),
    _adan("adan_official", "neg_pre_grad", no_prox=1),
    _adan("adan_optimi", "prev_grad"),
    _schedule_free("schedule_free_adamw", "k"),
    _schedule_free("schedule_free_adamw_step", "step"),
    Card(
        rule_id="rmsprop",
        name="RMSprop",
        **_known(
            "rmsprop",
            StateTensor("square_avg", "moment2"),
            StateTensor("momentum_buffer", "moment1", when="momentum"),
            StateTensor("grad_avg", "moment1_2", when="centered"),
            betas=-1,
            settings={"alpha": 1, "momentum": 1, "centered": 1},
            needs=("alpha", "centered"),
            coupled=True,
            gradient_rms=_square_avg_rms,
        ),
    ),
    Card(
        rule_id="adagrad",
        name="Adagrad",
        **_known(
            "adagrad",
            StateTensor("sum", "moment2"),
            betas=-1,
            settings={"lr_decay": 1},
            needs=("lr_decay",),
            coupled=True,
            gradient_rms=lambda state, _given, step: _root(state["sum"].clamp(min=0) / max(step, 1)),
        ),
    ),
    Card(
        rule_id="adadelta",
        name="Adadelta",
        **_known(
            "adadelta",
            StateTensor("square_avg", "moment2"),
            StateTensor("acc_delta", "moment2_2"),
            betas=-1,
            settings={"rho": 1},
            needs=("rho",),
            coupled=True,
            gradient_rms=_square_avg_rms,
        ),
    ),
    _muon(
        "muon",
        {"nesterov": 1, "ns_coefficients": 3, "eps": 1, "ns_steps": 1, "adjust_lr_fn": 0},
        adjust_lr_fn=(None, "original", "match_rms_adamw"),
    ),
    _muon(
        "muon_pytorch_optimizer",
        {"nesterov": 1, "ns_steps": 1, "use_adjusted_lr": 1},
        use_muon=(True,),
        ns_method=("newton_schulz",),
        ns_coeffs=([(3.4445, -4.775, 2.0315)], ((3.4445, -4.775, 2.0315),)),
        weight_decouple=(True,),
    ),
    _muon("muon_keller_jordan", {}, fused=False, use_muon=(True,)),
)
