"""The cards of optimizers of other packages that ckpt8 recognises, and replays or not. Imports no torch.

State and settings are those of torch 2.13, pytorch-optimizer 4.1.0, torch-optimi 0.3.3, schedulefree 1.4.1, prodigyopt
1.1.2, adam-mini 1.1.1, muon-optimizer 0.1.0, adan-pytorch 0.1.0, galore-torch 1.0 and apollo-torch 1.0.3. Second
moments are values from zero on that an update divides by; first moments are what else is an average, or the last
gradient.

``UNREPLAYED`` are those whose state has roles and whose step is not replayed, each with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


_OFF = (None, False)
VARIANTS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("adam_debias", "adanorm", "ams_bound", "caution", "cautious", "rectify", "stable_adamw", "use_gc"), _OFF
)
"""Settings that turn the rule of any card into another one, and their values that do not."""

_SETTINGS = {"lr": 1, "eps": 1, "weight_decay": 1}
_MUON_SIGNS = ("use_muon", "ns_steps", "nesterov", "ns_method", "ns_coefficients")

Rms = Callable[[Mapping[str, Any], Mapping[str, Any], int], Any]


def _rms(key: str, beta: Callable[[Mapping[str, Any]], float]) -> Rms:
    """The root of an average of squares without its bias; ``beta`` reads its decay from the arguments."""

    def find(state: Mapping[str, Any], given: Mapping[str, Any], step: int) -> Any:
        return (state[key].clamp(min=0) / (1 - beta(given) ** max(step, 1))).sqrt()

    return find


def _adan_rms(state: Mapping[str, Any], given: Mapping[str, Any], step: int) -> Any:
    """Of independent gradients g, where the state averages the squares of (1 + b2) g - b2 g_(t-1)."""
    _, beta2, beta3 = given["betas"]
    bias = 1.0 if given["debiased"] else 1 - beta3 ** max(step, 1)
    return (state["exp_avg_sq"].clamp(min=0) / (bias * ((1 + beta2) ** 2 + beta2**2))).sqrt()


def _belief_rms(state: Mapping[str, Any], given: Mapping[str, Any], step: int) -> Any:
    """From the variance and the mean."""
    variance = state["exp_avg_var"].clamp(min=0) / (1 - given["betas"][1] ** max(step, 1))
    return (variance + state["exp_avg"].square()).sqrt()


def _known(rule: str, *tensors: StateTensor, **more: Any) -> dict[str, Any]:
    """The form, and settings of Adam with two betas unless ``more`` has others, of an optimizer with a rule."""
    form = Form(f"ckpt8.optim.recognised.rules:{rule}", tensors, "replayed", more.pop("reach", "element"))
    counts = more.pop("counts", True)
    settings = {**_SETTINGS, "betas": more.pop("betas", 2), **more.pop("settings", {})}
    return {
        "matrix": form,
        "settings": {name: count for name, count in settings.items() if count >= 0},
        "counts": counts,
        "choices": more.pop("choices", {}),
        **more,
    }


def _adan(rule_id: str, last: str, **settings: int) -> Card:
    """Adan by the key of its last gradient, and by its setting for decoupled weight decay.

    optimi stores averages without bias, and 0.3.3 ignores its setting ``adam_wd``.
    """
    is_optimi = not settings
    known = _known(
        "adan",
        *(_M, StateTensor("exp_avg_diff", "moment1_2"), _V, StateTensor(last, "moment1_3")),
        betas=3,
        settings=settings,
        fixed={"last": last, "debiased": is_optimi},
        choices={"adam_wd": (False,)} if is_optimi else {},
        needs=tuple(settings) or ("adam_wd",),
        own_decay=True,
        gradient_rms=_adan_rms,
    )
    return Card(rule_id=rule_id, name="Adan", **known)


def _muon(rule_id: str, settings: Mapping[str, int], *, fused: bool = True, **choices: tuple[Any, ...]) -> Card:
    """Muon by the settings that one package has."""
    known = _known(
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
    )
    return Card(rule_id=rule_id, name="Muon", **known)


def _schedule_free(rule_id: str, step_key: str) -> Card:
    """ScheduleFree AdamW by the setting that counts steps."""
    known = _known(
        "schedule_free_adamw",
        StateTensor("z", "weight"),
        _V,
        settings=dict.fromkeys(("r", "weight_lr_power", "warmup_steps", "weight_sum", "lr_max"), 1),
        fixed={"taken": 0},
        choices={"train_mode": (True,), "decoupling_c": (None, 0), "use_palm": _OFF, "silent_sgd_phase": (None,)},
        needs=("weight_sum", step_key),
        own_decay=True,
        needs_weight=True,
        step_key=step_key,
        agrees=_scheduled,
    )
    return Card(rule_id=rule_id, name="ScheduleFree AdamW", **known)


def _scheduled(group: Mapping[Any, Any]) -> bool:
    """Whether the last learning rate is that of the schedule; that of AdamWScheduleFreePaper has another factor."""
    try:
        share = min(1.0, group["k"] / group["warmup_steps"]) if group["warmup_steps"] else 1.0
        return bool(abs(group["scheduled_lr"] - group["lr"] * share) <= 1e-6 * abs(group["lr"]))
    except (KeyError, TypeError, ArithmeticError):
        return "scheduled_lr" not in group


def _is_adabelief(group: Mapping[Any, Any]) -> bool:
    """Whether eps is as small as AdaBelief needs it; Aida has the same settings, and 1e-8 by default."""
    eps = group.get("eps")
    return isinstance(eps, float) and eps < 1e-10


RECOGNISED = (
    *UNREPLAYED,
    Card(
        rule_id="adamax",
        name="Adamax",
        **_known(
            "adamax",
            *(_M, StateTensor("exp_inf", "moment2")),
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
            *(_M, _V),
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
            *(_M, _V),
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
            *(_M, StateTensor("exp_avg_var", "moment2")),
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
            *(_M, _V, StateTensor("exp_avg_slow", "moment1_2")),
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
            gradient_rms=_rms("square_avg", lambda given: float(given["alpha"])),
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
            gradient_rms=lambda state, _given, step: (state["sum"].clamp(min=0) / max(step, 1)).sqrt(),
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
            gradient_rms=_rms("square_avg", lambda given: float(given["rho"])),
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
