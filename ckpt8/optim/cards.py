"""The cards: what ckpt8 knows of each optimizer, its state, its settings, and the published classes. Imports no torch.

``TRAINED`` are the optimizers of ``ckpt8.optim``, ``RECOGNISED`` those of other packages that ckpt8 recognises, and
replays or not: ``UNREPLAYED`` are those whose state has roles and whose step is not replayed, each with the reason.
Second moments are values from zero on that an update divides by; first moments are what else is an average, or the last
gradient.

State and settings are those of torch 2.13, torch-optimi 0.3.3, came-pytorch 0.1.3, pytorch-optimizer 4.1.0,
lion-pytorch 0.2.5, schedulefree 1.4.1, prodigyopt 1.1.2, adam-mini 1.1.1, muon-optimizer 0.1.0, adan-pytorch 0.1.0,
galore-torch 1.0 and apollo-torch 1.0.3.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt8.core.tensors import Role

Shape = tuple[int, ...]
Slot = Literal[
    "moment1", "moment1_2", "moment1_3", "moment2", "moment2_2", "max_moment2", "weight", "statistic", "exact"
]
Update = Literal["adam", "stable_adamw", "came", "momentum", "replayed"]
Reach = Literal["element", "tensor", "matrix"]


_ROLES = {"weight": Role.WEIGHT, "moment1": Role.MOMENT1, "moment2": Role.MOMENT2}


def role_of(slot: str) -> Role:
    """What presets take the tensor in a slot for."""
    return next((role for name, role in _ROLES.items() if name in slot), Role.OTHER)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of a parameter's state.

    ``slot`` is the moment that it holds, each slot once in a form; ``weight`` for a copy of the weight, ``statistic``
    for fp32 averages over rows or columns. ``shape`` computes its shape from the parameter's. ``when`` names the
    setting without which it is absent. ``packable``: presets may compress it, whatever else the state holds. A key that
    says little without its neighbours is not packable here; ``other_states`` gives it a role.
    """

    key: str
    slot: Slot
    shape: Callable[[Shape], Shape] = tuple
    when: str = ""
    packable: bool = True

    @property
    def is_moment(self) -> bool:
        """Whether it has the shape of the parameter."""
        return self.slot not in ("statistic", "exact")

    @property
    def role(self) -> Role:
        """What presets take it for."""
        return role_of(self.slot)


@dataclass(frozen=True, slots=True)
class Form:
    """State and rule of the matrices, or of the vectors, of a model.

    ``rule`` locates the function that takes a step (see ``packed_tensor``). ``update`` says how the state determines a
    step (see ``meaning.optimizer_state``): ``replayed`` where it takes a gradient as well, so that the figure
    is that of the first replayed step; None means that errors are not measured in update space, and that steps are not
    replayed. ``reach`` says on what the step of an element depends: on the values of that element, on sums over its
    tensor, or on the whole matrix, which the rule then gets as one block of the shape of the parameter.
    """

    rule: str
    tensors: tuple[StateTensor, ...]
    update: Update | None = None
    reach: Reach = "element"

    def present(self, settings: Mapping[str, Any]) -> list[StateTensor]:
        """The tensors that a state has under these settings."""
        return [tensor for tensor in self.tensors if not tensor.when or settings.get(tensor.when)]


@dataclass(frozen=True, slots=True)
class Published:
    """A class of another package with the same state.

    Groups of torch have ``maximize``, those of optimi ``beta1`` and ``beta2`` in place of ``betas``.

    ``step``: where it counts steps: in the state, as a 0-d float tensor or an int, or in the group; None: nowhere.
    ``state``: what else a state holds; a function computes the value from the group. ``optional``: keys that a state
    may hold. ``sign``: the key that only its state has. ``group``: more entries of a new group. ``widened``: the state
    of a 16-bit parameter may be fp32.
    """

    package: str
    name: str
    step: Literal["tensor", "int", "group"] | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    sign: str | None = None
    group: Mapping[str, Any] = field(default_factory=dict)
    widened: bool = False


_UNPUBLISHED = Published("", "", step="int")
"""How ``unpack`` writes the state of an optimizer that no package publishes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One optimizer. ``name`` is its class in ``ckpt8.optim``; ``cls`` locates it as ``module:name``.

    ``cls`` is empty for an optimizer that ckpt8 recognises and does not train: only all the tensors of its state
    together have roles, since one key alone may be of any optimizer. ``unknown`` says why its step is not known, or not
    replayed where a form has an ``update``. ``scale_key``: the setting that the learning rate is multiplied by, and
    gradients before they are averaged.
    ``settings``: the settings that the rule takes from a group, and how many numbers each has; 0: any value that
    ``choices`` allows. ``choices``: the values that a setting must have for the rule to be that of the card; a missing
    setting is None. ``fixed``: arguments of the rule that a group does not set; ``taken`` gets the number of the steps
    so far. ``nullable``: settings with numbers that may be None. ``side``: keys of a state that the rule does not read.
    ``step_key``: the setting that counts steps, if it is not ``step``.
    ``objects``: classes of which a state holds objects, with nothing but attributes. ``projects``: its moments are of a
    projected gradient, and smaller than the parameter.
    ``signs``: keys of which a saved state or its group must have one. ``needs``: keys that the group must have.
    ``lacks``: keys that neither may have. ``agrees``: whether the settings agree with one another as the card says.
    ``counts``: the rule depends on the number of the step. ``coupled``: weight decay is always part of the gradient;
    ``own_decay``: the rule alone decides. ``needs_weight``: the step depends on the weight beyond its decay.
    ``average``: computes (a, b) of m = a m + b g from the arguments, where ``tensors[0]`` of a form is m and there is
    no ``exp_avg_sq``. ``gradient_rms``: computes the RMS of recent gradients, element by element, from (state,
    arguments, step); without it, it follows from row and column statistics, from ``exp_avg_sq`` and the second beta, or
    from ``average``.
    ``kernels``: whether ``optim.triton.rules`` has the rule. ``flashoptim``: whether flashoptim has the optimizer.
    ``published``: the classes with the same state; ``unpack`` writes the state of the first.
    """

    rule_id: str
    name: str
    cls: str = ""
    unknown: str = ""
    settings: Mapping[str, int]
    matrix: Form
    vector: Form | None = None
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    side: frozenset[str] = frozenset()
    step_key: str = "step"
    scale_key: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    nullable: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()
    projects: bool = False
    signs: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    lacks: frozenset[str] = frozenset()
    counts: bool = False
    coupled: bool = False
    own_decay: bool = False
    needs_weight: bool = False
    agrees: Callable[[Mapping[Any, Any]], bool] | None = None
    average: Callable[[Mapping[str, Any]], tuple[float, float]] | None = None
    gradient_rms: Callable[[Mapping[str, Any], Mapping[str, Any], int], Any] | None = None
    kernels: bool = False
    flashoptim: bool = False
    published: tuple[Published, ...] = (_UNPUBLISHED,)

    def form(self, ndim: int) -> Form:
        """State and rule of a parameter of ``ndim`` dimensions."""
        return self.matrix if ndim > 1 or self.vector is None else self.vector

    @property
    def forms(self) -> tuple[Form, ...]:
        """Both forms, or the only one."""
        return (self.matrix,) if self.vector is None else (self.matrix, self.vector)

    @property
    def tensors(self) -> dict[str, StateTensor]:
        """Every tensor that a state may hold, by key."""
        return {tensor.key: tensor for form in self.forms for tensor in form.tensors}


_M, _V = StateTensor("exp_avg", "moment1"), StateTensor("exp_avg_sq", "moment2")
_ADAM_SETTINGS = {"lr": 1, "betas": 2, "eps": 1, "weight_decay": 1}

_TORCH: dict[str, Any] = {"foreach": None, "differentiable": False, "fused": None}
_OPTIMI: dict[str, Any] = {
    "decouple_lr": False,
    "max_lr": None,
    "kahan_sum": False,
    "foreach": False,
    "triton": False,
    "gradient_release": False,
    "setup": True,
}
_KAHAN: dict[str, Any] = {"kahan_comp": None}
_OPTIMI_KEYS = frozenset({"mean_square", "group", "step"})


def _optimi(name: str, *, step: Literal["group"] | None = "group") -> Published:
    return Published("optimi", name, step=step, state=_KAHAN, optional=_OPTIMI_KEYS, group=_OPTIMI)


def _rows_and_columns(*names: str, kept: bool = False) -> tuple[StateTensor, ...]:
    """Averages over rows and columns, in turn; ``kept``: the averaged dimension stays, with size 1."""
    one = (1,) if kept else ()
    shapes = (lambda shape: (*shape[:-1], *one)), (lambda shape: (*shape[:-2], *one, shape[-1]))
    return tuple(StateTensor(name, "statistic", shapes[at % 2]) for at, name in enumerate(names))


def _adam(rule_id: str, name: str, *, decoupled: bool) -> Card:
    """AdamW, or Adam."""
    return Card(
        rule_id=rule_id,
        name=name,
        cls=f"ckpt8.optim.optimizers:{name}",
        settings=_ADAM_SETTINGS,
        matrix=Form(
            "ckpt8.optim.optimizers:adam",
            (_M, _V, StateTensor("max_exp_avg_sq", "max_moment2", when="amsgrad")),
            "adam",
        ),
        fixed={"decoupled": decoupled},
        signs=frozenset({"amsgrad", "bias_correction", "correct_bias", "t_alpha", "use_muon"}),
        counts=True,
        kernels=True,
        flashoptim=True,
        published=(
            Published(
                "torch",
                name,
                step="tensor",
                group={**_TORCH, "amsgrad": False, "capturable": False, "decoupled_weight_decay": decoupled},
            ),
            _optimi(name),
        ),
    )


TRAINED = (
    Card(
        rule_id="came",
        name="CAME",
        cls="ckpt8.optim.optimizers:CAME",
        settings={"lr": 1, "betas": 3, "eps": 2, "clip_threshold": 1, "weight_decay": 1},
        matrix=Form(
            "ckpt8.optim.optimizers:came",
            (_M, *_rows_and_columns("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")),
            "came",
            "tensor",
        ),
        vector=Form("ckpt8.optim.optimizers:came", (_M, _V), "momentum", "tensor"),
        signs=frozenset({"RMS"}),
        kernels=True,
        published=(
            Published("came_pytorch", "CAME", step="int", state={"RMS": 0.0}, widened=True),
            Published("pytorch_optimizer", "CAME", step="group", state={"RMS": 0.0}, widened=True),
        ),
    ),
    Card(
        rule_id="stable_adamw",
        name="StableAdamW",
        cls="ckpt8.optim.optimizers:StableAdamW",
        settings=_ADAM_SETTINGS,
        matrix=Form("ckpt8.optim.optimizers:stable_adamw", (_M, _V), "stable_adamw", "tensor"),
        fixed={"clip_threshold": 1.0},
        signs=frozenset({"beta1", "kahan_comp", "eps_sq"}),  # optimi's AdamW and Adam keep these averages too
        counts=True,
        kernels=True,
        published=(
            Published(
                "optimi",
                "StableAdamW",
                step="group",
                state={"eps_sq": lambda group: group["eps"] ** 2, **_KAHAN},
                optional=_OPTIMI_KEYS,
                sign="eps_sq",
                group=_OPTIMI,
            ),
            Published("pytorch_optimizer", "StableAdamW", step="group", state=_KAHAN, sign="kahan_comp", widened=True),
        ),
    ),
    _adam("adamw", "AdamW", decoupled=True),
    _adam("adam", "Adam", decoupled=False),
    Card(
        rule_id="sgd",
        name="SGD",
        cls="ckpt8.optim.optimizers:SGD",
        settings={"lr": 1, "momentum": 1, "dampening": 1, "weight_decay": 1, "nesterov": 1},
        matrix=Form(
            "ckpt8.optim.optimizers:sgd", (StateTensor("momentum_buffer", "moment1", when="momentum"),), "momentum"
        ),
        needs=("momentum", "dampening", "nesterov"),  # Muon has no dampening
        lacks=frozenset({"eps"}),  # LARS has all keys of SGD, and an eps
        coupled=True,
        average=lambda given: (given["momentum"], 1 - given["dampening"]),
        kernels=True,
        flashoptim=True,
        published=(Published("torch", "SGD", group=_TORCH),),
    ),
    Card(
        rule_id="lion",
        name="Lion",
        cls="ckpt8.optim.optimizers:Lion",
        settings={"lr": 1, "betas": 2, "weight_decay": 1},
        matrix=Form("ckpt8.optim.optimizers:lion", (_M,), "replayed"),
        needs=("betas",),
        average=lambda given: (given["betas"][1], 1 - given["betas"][1]),
        kernels=True,
        flashoptim=True,
        published=(
            Published("lion_pytorch", "Lion"),
            _optimi("Lion", step=None),
            Published("pytorch_optimizer", "Lion", step="group"),
        ),
    ),
    Card(
        rule_id="adafactor",
        name="Adafactor",
        cls="ckpt8.optim.optimizers:Adafactor",
        settings={"lr": 1, "beta2_decay": 1, "eps": 2, "d": 1, "weight_decay": 1},
        matrix=Form("ckpt8.optim.optimizers:adafactor", _rows_and_columns("row_var", "col_var", kept=True)),
        vector=Form("ckpt8.optim.optimizers:adafactor", (StateTensor("variance", "moment2", packable=False),)),
        nullable=frozenset({"eps"}),
        counts=True,
        published=(Published("torch", "Adafactor", step="tensor", group={"foreach": None}),),
    ),
)


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
        _M,
        _V,
        signs=("precondition_frequency", "shampoo_beta", "GG"),
    ),
    _roles(
        "galore",
        "GaLore, Fira, Conda, APOLLO",
        "its step depends on a projection that changes as it trains, and is not replayed",
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
        "its step depends on all parameters together, and is not replayed",
        *(_M, _V, StateTensor("p0", "weight", when="slice_p"), StateTensor("s", "moment1_2")),
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
        *(_V, StateTensor("p0", "weight", when="slice_p"), StateTensor("s", "moment1_2")),
    ),
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
            *(_M, StateTensor("exp_avg_diff", "moment1_2"), _V, StateTensor(last, "moment1_3")),
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
            _V,
            settings=dict.fromkeys(("r", "weight_lr_power", "warmup_steps", "weight_sum", "lr_max"), 1),
            fixed={"taken": 0},
            choices={"train_mode": (True,), "decoupling_c": (None, 0), "use_palm": _OFF, "silent_sgd_phase": (None,)},
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
