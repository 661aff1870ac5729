"""The cards: what ckpt8 knows of each optimizer, its state, its settings, and the published classes. Imports no torch.

``TRAINED`` are the optimizers of ``ckpt8.optim``; ``recognised_cards`` has those of other packages. Second moments are
values from zero on that an update divides by; first moments are what else is an average, or the last gradient.

State and settings are those of torch 2.13, torch-optimi 0.3.3, came-pytorch 0.1.3, pytorch-optimizer 4.1.0 and
lion-pytorch 0.2.5.
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


FIRST, SECOND = StateTensor("exp_avg", "moment1"), StateTensor("exp_avg_sq", "moment2")
"""The moments of Adam, and of many others."""

OFF = (None, False)
"""Values of a setting that is off."""

VARIANTS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("adam_debias", "adanorm", "ams_bound", "caution", "cautious", "rectify", "stable_adamw", "use_gc"), OFF
)
"""Settings that turn the rule of any card into another one, and their values that do not."""

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
            (FIRST, SECOND, StateTensor("max_exp_avg_sq", "max_moment2", when="amsgrad")),
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
            (FIRST, *_rows_and_columns("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")),
            "came",
            "tensor",
        ),
        vector=Form("ckpt8.optim.optimizers:came", (FIRST, SECOND), "momentum", "tensor"),
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
        matrix=Form("ckpt8.optim.optimizers:stable_adamw", (FIRST, SECOND), "stable_adamw", "tensor"),
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
        matrix=Form("ckpt8.optim.optimizers:lion", (FIRST,), "replayed"),
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
