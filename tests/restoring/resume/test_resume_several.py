"""Several models and optimizers in one call of resume: each gets its own, or nothing changes."""

import copy
import itertools

import pytest
import torch
from resume_kit import same
from torch import nn

import ckpt8
from ckpt8.core.errors import ResumeError, UsageError


def net(seed, width=24):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16))


def stepped(model, make):
    optimizer = make(model.parameters())
    for seed in (1, 2):
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3)


def sgd(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


class Gan:
    """Two models of other or equal shapes, each with its optimizer."""

    def __init__(self, seed, *, trained, widths=(24, 40), makes=(adamw, sgd)):
        self.nets = [net(seed + k, width) for k, width in enumerate(widths)]
        run = stepped if trained else lambda model, make: make(model.parameters())
        self.optimizers = [run(model, make) for model, make in zip(self.nets, makes, strict=True)]

    def states(self):
        return [each.state_dict() for each in (*self.nets, *self.optimizers)]

    def equals(self, other):
        return same(self.states(), other.states())


def all_same(here, there):
    return all(same(mine.state_dict(), its.state_dict()) for mine, its in zip(here, there, strict=True))


LAYOUTS = {
    "keys": lambda g, d, og, od: {"netG": g, "netD": d, "optimizerG": og, "optimizerD": od},
    "other keys": lambda g, d, og, od: {"G_state_dict": g, "D_state_dict": d, "opt_G": og, "opt_D": od, "epoch": 3},
    "lists": lambda g, d, og, od: {"models": [g, d], "optimizers": [og, od]},
    "nested": lambda g, d, og, od: {"D": {"model": d, "optimizer": od}, "G": {"model": g, "optimizer": og}},
    "lightning": lambda g, d, og, od: {"generator": g, "discriminator": d, "optimizer_states": [og, od]},
    "tuples": lambda g, d, og, od: ((g, og), (d, od)),
}


def saved(folder, tree, name="x.ckpt8"):
    if name.endswith(".pt"):
        torch.save(tree, folder / name)
    else:
        ckpt8.save(tree, folder / name, preset="lossless", threads=1)
    return folder / name


def alike():
    """A trained pair of models of equal shapes, and a new one."""
    return [Gan(seed, trained=seed == 1, widths=(24, 24), makes=(adamw, adamw)) for seed in (1, 7)]


def unlike():
    """A trained pair of models of other shapes, and a new one."""
    return [Gan(seed, trained=seed == 1) for seed in (1, 7)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lists_of_models_of_other_shapes_find_their_own(layout, order, tmp_path):
    there, here = unlike()
    path = saved(tmp_path, LAYOUTS[layout](*there.states()))
    model, optimizer = [here.nets[k] for k in order], tuple(here.optimizers[k] for k in order)
    rest = ckpt8.resume(path, model=model, optimizer=optimizer)
    assert here.equals(there)
    assert "epoch" not in LAYOUTS[layout](*there.states()) or rest == {"epoch": 3}


@pytest.mark.parametrize("name", ["x.ckpt8", "x.pt"])
@pytest.mark.parametrize("layout", ["keys", "other keys", "nested"])
def test_dicts_find_their_keys_though_all_have_one_shape(layout, name, tmp_path):
    there, here = alike()
    path = saved(tmp_path, LAYOUTS[layout](*there.states()), name)
    models = dict(zip(reversed(PATHS[layout]), reversed(here.nets), strict=True))
    ckpt8.resume(path, model=models, optimizer={"discriminator": here.optimizers[1], "generator": here.optimizers[0]})
    assert here.equals(there)


PATHS = {
    "keys": ["netG", "netD"],
    "other keys": ["G_state_dict", "D_state_dict"],
    "lists": ["models.0", "models.1"],
    "nested": ["G.model", "D.model"],
    "tuples": ["0.0", "1.0"],
    "lightning": ["generator", "discriminator"],
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("layout", [each for each in PATHS if each != "lightning"])
def test_an_optimizer_takes_the_state_of_its_model(layout, order, tmp_path):
    """Of those alike, whatever their order: by the parameters that it steps."""
    there, here = alike()
    path = saved(tmp_path, LAYOUTS[layout](*there.states()))
    models = dict(zip("ab", (here.nets[0], nn.DataParallel(here.nets[1])), strict=True))
    at = dict(zip("ab", PATHS[layout], strict=True))
    optimizers = [here.optimizers[k] for k in order]
    given = optimizers if order == (1, 0) else dict(zip(("second", "first"), optimizers, strict=True))
    ckpt8.resume(path, model=models, model_at=at, optimizer=given)
    assert here.equals(there)


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize(("layout", "strict"), [*((each, True) for each in PATHS), ("lightning", False)])
def test_order_decides_nothing(layout, strict, tmp_path):
    there, here = alike()
    path, before = saved(tmp_path, LAYOUTS[layout](*there.states())), copy.deepcopy(here.states())
    for given in ({"model": here.nets}, {"optimizer": here.optimizers}):
        with pytest.raises(UsageError, match=r"\[0\] may be .*; give a dict with these keys, or (model|optimizer)_at="):
            ckpt8.resume(path, strict=strict, **given)
    if layout == "lightning":
        with pytest.raises(UsageError, match=r"optimizer\[0\] may be one of optimizer_states\.0, optimizer_states\.1"):
            ckpt8.resume(path, here.nets, here.optimizers, strict, model_at=PATHS[layout])
    assert same(here.states(), before)


def test_keys_that_name_the_optimizer_of_another_model(tmp_path):
    there, here = alike()
    path, before = saved(tmp_path, LAYOUTS["keys"](*there.states())), copy.deepcopy(here.states())
    models = {"netG": here.nets[0], "netD": here.nets[1]}
    swapped = {"optimizerG": here.optimizers[1], "optimizerD": here.optimizers[0]}
    with pytest.raises(ResumeError, match=r"\['optimizerG'\] at optimizerG: belongs to netG, .*give optimizer_at="):
        ckpt8.resume(path, models, swapped)
    assert same(here.states(), before)
    ckpt8.resume(path, models, swapped, optimizer_at={key: key for key in swapped})
    here.optimizers.reverse()
    assert here.equals(there)


def test_one_of_several_is_enough(tmp_path):
    there, here = unlike()
    path = saved(tmp_path, LAYOUTS["keys"](*there.states()))
    ckpt8.resume(path, model=[here.nets[1]], optimizer={"D": here.optimizers[1]})
    assert same(here.states()[1::2], there.states()[1::2])
    there, here = alike()
    tree = LAYOUTS["keys"](*there.states())
    ckpt8.resume(saved(tmp_path, tree), here.nets[1], here.optimizers[1], model_at="netD")
    assert same(here.states()[1::2], there.states()[1::2])
    average = {"model": tree["netG"], "ema": tree["netD"], "optimizer": tree["optimizerG"]}
    ckpt8.resume(saved(tmp_path, average, "average.ckpt8"), here.nets[0], here.optimizers[0], model_at="ema")
    assert same(here.nets[0].state_dict(), there.nets[1].state_dict())
    assert same(here.optimizers[0].state_dict(), there.optimizers[0].state_dict())
    del tree["optimizerD"]
    with pytest.raises(ResumeError, match="belongs to netG, whose weights"):
        ckpt8.resume(saved(tmp_path, tree, "one.pt"), here.nets[1], here.optimizers[1], model_at="netD")


@pytest.mark.parametrize("named", [True, False])
def test_two_optimizers_of_parts_alike(named, tmp_path):
    def parts(seed, run):
        whole = nn.ModuleDict({"encoder": net(seed), "decoder": net(seed + 1)})
        return whole, [run(whole[key], lambda params, key=key: optimizer(key, whole, params)) for key in whole]

    def optimizer(key, whole, params):
        inside = [(name, p) for name, p in whole.named_parameters() if name.startswith(key)]
        return adamw(inside if named else params)

    (there, trained), (here, fresh) = parts(1, stepped), parts(5, lambda part, make: make(part.parameters()))
    keys = ("a", "b") if named else ("opt_enc", "opt_dec")
    states = dict(zip(keys, (each.state_dict() for each in trained), strict=True))
    ckpt8.resume(saved(tmp_path, {"model": there.state_dict(), **states}), here, fresh[::-1])
    assert all_same(fresh, trained)


def test_paths_choose(tmp_path):
    there, here = alike()
    path = saved(tmp_path, {**LAYOUTS["keys"](*there.states()), "ema_G": there.nets[0].state_dict()})
    with pytest.raises(UsageError, match=r"may be one of netG, netD, ema_G; give a dict with these keys, or model_at="):
        ckpt8.resume(path, model=here.nets)
    options = {"model_at": ["netG", "netD"], "optimizer_at": {"a": "optimizerG", "b": "optimizerD"}}
    ckpt8.resume(path, here.nets, dict(zip("ab", here.optimizers, strict=True)), **options)
    assert here.equals(there)


@pytest.mark.parametrize("entries", [lambda a, b: {"optimizers": [a, b]}, lambda a, b: {"adamw": b, "muon": a}])
def test_one_model_with_muon_and_adamw(entries, tmp_path):
    def split(model):
        matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is flag] for flag in (True, False))
        return [torch.optim.Muon(matrices, lr=1e-3), adamw(vectors)]

    there, here = net(1), net(5)
    trained, fresh = split(there), split(here)
    there(torch.ones(2, 16)).sum().backward()
    for each in trained:
        each.step()
    path = saved(tmp_path, {"model": there.state_dict(), **entries(*(each.state_dict() for each in trained))})
    assert ckpt8.resume(path, model=here, optimizer=fresh) == {}
    assert all_same((here, *fresh), (there, *trained))


def test_packed_optimizers(tmp_path):
    nets, here = [net(1).bfloat16(), net(2, 40).bfloat16()], [net(8, 40).bfloat16(), net(9).bfloat16()]
    trained, fresh = ([ckpt8.optim.AdamW(each.parameters(), lr=1e-3) for each in side] for side in (nets, here))
    for model, optimizer in zip(nets, trained, strict=True):
        model(torch.ones(2, 16, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
    path = saved(tmp_path, {"m": [n.state_dict() for n in nets], "o": [o.state_dict() for o in trained]})
    ckpt8.resume(path, model=here, optimizer=fresh)
    assert all_same((*here, *fresh), (*nets[::-1], *trained[::-1]))


class Failing(torch.optim.Rprop):
    def load_state_dict(self, state):
        self.param_groups[0]["lr"] = 99.0
        raise ValueError("no")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        *((number, r"\[3, 3\].*nothing was changed") for number in range(4)),
        (None, r"optimizer\[1\]: Failing does not take the saved state.*nothing was changed"),
    ],
)
def test_nothing_changes_when_one_does_not_fit_or_fails_to_load(broken, said, tmp_path):
    saving, loading = (sgd, sgd) if broken is not None else (torch.optim.Rprop, Failing)
    there, here = Gan(1, trained=True, makes=(adamw, saving)), Gan(7, trained=True, makes=(adamw, loading))
    states = there.states()
    if broken in (0, 1):
        states[broken]["0.weight"] = torch.ones(3, 3)
    elif broken is not None:
        states[broken]["state"][0]["momentum_buffer" if broken == 3 else "exp_avg"] = torch.ones(3, 3)
    before = copy.deepcopy(here.states())
    with pytest.raises(ResumeError, match=said):
        ckpt8.resume(saved(tmp_path, LAYOUTS["keys"](*states)), model=here.nets, optimizer=here.optimizers)
    assert same(here.states(), before)


def test_a_weight_of_two_models_that_was_saved_with_two_values(tmp_path):
    models = [net(1), net(2)]
    path = saved(tmp_path, {"a": models[0].state_dict(), "b": models[1].state_dict()})
    models[1][0] = models[0][0]
    with pytest.raises(ResumeError, match=r"model\['b'\] 0.weight: is shared by two models"):
        ckpt8.resume(path, model=dict(zip("ab", models, strict=True)))


def wrapped(model):
    shell = nn.Module()
    shell.module = model
    return shell


def test_wrapped_models_in_a_list(tmp_path):
    there, here = unlike()
    models = [wrapped(here.nets[0]), nn.DataParallel(here.nets[1])]
    ckpt8.resume(saved(tmp_path, LAYOUTS["keys"](*there.states())), model=models, optimizer=here.optimizers)
    assert here.equals(there)


WRONG = {
    "a state dict": lambda m, o: ({"model": m.state_dict()}, "model is a state dict"),
    "a list of state dicts": lambda m, o: ({"model": [m.state_dict()]}, r"model\[0\] is an? OrderedDict"),
    "a path": lambda m, o: ({"model": "x.pt"}, "model is 'x.pt'"),
    "a class": lambda m, o: ({"model": nn.Linear}, "model is the class Linear"),
    "None inside": lambda m, o: ({"model": [m, None]}, r"model\[1\] is None"),
    "a generator": lambda m, o: ({"model": (each for each in [m])}, "model is a generator"),
    "a set": lambda m, o: ({"model": {m}}, "model is a set"),
    "nothing": lambda m, o: ({"model": []}, "model is an empty list"),
    "an empty dict": lambda m, o: ({"model": {}}, "model is an empty dict"),
    "numbers for keys": lambda m, o: ({"model": {1: m}}, "keys are no texts"),
    "twice": lambda m, o: ({"model": [m, m]}, r"model\[0\] and model\[1\] are the same model"),
    "twice, wrapped": lambda m, o: ({"model": {"a": m, "b": wrapped(m)}}, "'a'.*'b'.* are the same model"),
    "an optimizer": lambda m, o: ({"model": o}, "model is an AdamW"),
    "a function": lambda m, o: ({"model": m.forward}, "model is a method"),
    "too many": lambda m, o: ({"model": [m, net(3)]}, "holds 1 model state .*2 were given"),
    "parameters": lambda m, o: ({"model": list(m.parameters())}, r"model\[0\] is a Parameter"),
    "a model": lambda m, o: ({"optimizer": m}, "optimizer is a Sequential"),
    "a state of an optimizer": lambda m, o: ({"optimizer": o.state_dict()}, "optimizer is a state dict"),
    "an optimizer class": lambda m, o: ({"optimizer": torch.optim.AdamW}, "optimizer is the class AdamW"),
    "an optimizer twice": lambda m, o: ({"optimizer": (o, o)}, "are the same optimizer"),
    "an int": lambda m, o: ({"optimizer": 3}, "optimizer is 3"),
    "groups": lambda m, o: ({"optimizer": o.param_groups}, r"optimizer\[0\] is a dict"),
    "too many optimizers": lambda m, o: ({"optimizer": [o, adamw(m.parameters())]}, "holds 1 optimizer state "),
    "a scheduler": lambda m, o: ({"optimizer": torch.optim.lr_scheduler.ConstantLR(o)}, "no state or parameter groups"),
    "in the place of strict": lambda m, o: ({"model": m, "optimizer": o, "strict": o}, "strict is an AdamW"),
    "a path for nothing": lambda m, o: ({"model_at": "model"}, "model_at is given, and model is not"),
    "a path that is none": lambda m, o: ({"model": m, "model_at": 3}, "model_at is 3"),
    "one path for several": lambda m, o: ({"model": [m], "model_at": "model"}, "give a list of 1 paths"),
    "other keys": lambda m, o: ({"model": {"a": m}, "model_at": {"b": "model"}}, "under the same keys"),
    "an unknown path": lambda m, o: ({"model": [m], "model_at": ["no"]}, "model_at='no' is not one of model"),
    "a member": lambda m, o: ({"model": m, "member": 3}, "member is 3"),
    "threads": lambda m, o: ({"model": m, "threads": "two"}, "threads is 'two'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_wrong_arguments_are_one_line_and_change_nothing(case, tmp_path):
    there, model = net(1), net(5)
    trained, optimizer = stepped(there, adamw), stepped(model, adamw)
    path = saved(tmp_path, {"model": there.state_dict(), "optimizer": trained.state_dict()})
    arguments, said = WRONG[case](model, optimizer)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    with pytest.raises(UsageError, match=said) as found:
        ckpt8.resume(path, **arguments)
    assert "\n" not in str(found.value)
    assert same([model.state_dict(), optimizer.state_dict()], before)


def test_one_optimizer_over_two_models(tmp_path):
    there, here = [net(1), net(2, 40)], [net(3), net(4, 40)]
    trained, fresh = (adamw(itertools.chain(*(each.parameters() for each in side))) for side in (there, here))
    sum(model(torch.ones(2, 16)).sum() for model in there).backward()
    trained.step()
    path = saved(tmp_path, {"a": there[0].state_dict(), "b": there[1].state_dict(), "optimizer": trained.state_dict()})
    ckpt8.resume(path, model=here, optimizer=fresh)
    assert all_same((*here, fresh), (*there, trained))
