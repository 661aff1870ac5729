"""What does not fit is refused with one clear line, and nothing has changed."""

import copy

import pytest
import torch
from resume_kit import OPTIMIZERS, Net, groups, same, snapshot, trained
from resumed_kit import refused, tree_of, write
from torch import nn

import ckpt8
from ckpt8.core.errors import InputError, ResumeError, ResumeWarning, UsageError

ADAMW = OPTIMIZERS["torch-adamw"]


@pytest.fixture(params=["raw", "flash"])
def form(request):
    return request.param


def live():
    """What the checkpoint goes into: in training itself, so that there is state to lose."""
    return trained(ADAMW, 2, seed=5)


MATRIX = 0  # the identifier of the tied matrix


def turned(weights):
    return {name: weights[name].t() for name in ("embed.weight", "head.weight")}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w, s: w.pop("body.weight"), "model body.weight: is missing"),
        (lambda w, s: w.pop("norm.running_mean"), "model norm.running_mean: is missing"),
        (lambda w, s: w.update(other=torch.zeros(3)), "model other: is in the checkpoint but not"),
        (
            lambda w, s: w.update(turned(w)),
            r"model embed.weight: was saved with shape \[72, 64\], here it has \[64, 72\]",
        ),
        (lambda w, s: w.update({"body.bias": w["body.bias"].double()}), "body.bias: was saved as float64, here"),
        (lambda w, s: w.update({"head.weight": w["head.weight"] + 1}), "head.weight: is tied"),
        (lambda w, s: s[MATRIX].pop("exp_avg_sq"), "embed.weight: its optimizer state lacks exp_avg_sq"),
        (lambda w, s: s[MATRIX].update(extra=1), "embed.weight: its optimizer state has extra, which AdamW"),
        (
            lambda w, s: s[MATRIX].update(exp_avg=s[MATRIX]["exp_avg"].t()),
            r"embed.weight: exp_avg was saved with shape \[72, 64\]",
        ),
        (
            lambda w, s: s[MATRIX].update(exp_avg=s[MATRIX]["exp_avg"].bfloat16()),
            "embed.weight: exp_avg was saved as bfloat16, here it is float32",
        ),
        (lambda w, s: s[MATRIX].update(step=torch.tensor(2.5)), "step is not a whole number"),
        (lambda w, s: s[MATRIX].update(step=2**24 + 1), "cannot be held exactly"),
        (lambda w, s: s.update({MATRIX: 1}), "embed.weight: its optimizer state is malformed"),
    ],
)
def test_a_checkpoint_that_does_not_fit(tmp_path, change, match, form):
    tree = tree_of(*trained(ADAMW))
    tree["model"] = dict(tree["model"])
    change(tree["model"], tree["optimizer"]["state"])
    refused(write(tmp_path, tree, form), *live(), match)


def test_another_model(tmp_path, form):
    tree = tree_of(*trained(ADAMW))
    path = write(tmp_path, tree, form)
    model, other = Net(width=80), nn.Linear(3, 4)
    refused(path, model, ADAMW(groups(model), 0.1), "was saved with shape")
    refused(path, other, ADAMW(other.parameters(), 0.1), "model weight: is missing")
    tree["model"] = {name: t for name, t in tree["model"].items() if not name.startswith("norm.")}
    error = refused(write(tmp_path, tree), *live(), r"norm.weight: is missing .*\(and 4 more")
    assert (len(error.problems), error.exit_code) == (5, 2)  # all problems are told


ALIKE = [{"torch-adamw", "torch-adamw-amsgrad"}, {"torch-sgd", "torch-sgd-momentum"}]


@pytest.fixture(scope="module")
def all_trained(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp(name), tree_of(*trained(make, 1))) for name, make in OPTIMIZERS.items()}


@pytest.mark.by_default(most=4)
@pytest.mark.parametrize("target", OPTIMIZERS)
def test_another_optimizer_class(all_trained, target):
    model = Net(seed=3)
    optimizer = OPTIMIZERS[target](groups(model), 0.1)
    for source, path in all_trained.items():
        if source != target and {source, target} not in ALIKE:
            refused(path, model, optimizer, "optimizer ")


def test_other_numbers_of_parameters(tmp_path):
    path = write(tmp_path, tree_of(*trained(ADAMW)))
    model = Net()
    for here, count in (([p for p in model.parameters() if p.requires_grad], "8"), (groups(model)[::-1], "5, 3")):
        refused(path, model, ADAMW(here, 0.1), rf"hold \[3, 5\] parameters, those here hold \[{count}\]")


def equal_groups(model, *, named):
    """Two groups that look the same: two parameters each, of the same shapes."""
    pairs = [[(name, model.get_parameter(name)) for name in (f"{k}.weight", f"{k}.bias")] for k in range(2)]
    return [
        {"params": pair if named else [parameter for _, parameter in pair], "weight_decay": decay}
        for pair, decay in zip(pairs, (0.1, 0.0), strict=True)
    ]


@pytest.mark.parametrize("named", [False, True])
def test_groups_in_another_order(tmp_path, named):
    model, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    optimizer = ADAMW(equal_groups(model, named=named), 0.1)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    path = write(tmp_path, tree_of(model, optimizer))
    swapped = ADAMW(equal_groups(other, named=named)[::-1], 0.2)
    if not named:
        refused(path, other, swapped, "weight decays of those here in another order")
        return
    ckpt8.resume(path, other, swapped)
    for name in ("0.weight", "1.weight"):
        mine, theirs = (o.state[m.get_parameter(name)] for o, m in ((swapped, other), (optimizer, model)))
        assert same(mine, dict(theirs))
    assert [group["weight_decay"] for group in swapped.param_groups] == [0.0, 0.1]


def test_a_raw_file_with_a_flipped_bit(tmp_path):
    path = write(tmp_path, tree_of(*trained(ADAMW)))
    whole = bytearray(path.read_bytes())
    with ckpt8.checkpoint.readers.open_checkpoint(path) as checkpoint:
        last = max(checkpoint.storages, key=lambda storage: storage.offset)
    whole[last.offset] ^= 1
    path.write_bytes(whole)
    refused(path, *live(), "CRC", InputError)
    path.write_bytes(whole[: len(whole) // 2])
    refused(path, *live(), "run", InputError)


def test_a_file_without_what_is_asked_for(tmp_path):
    model, optimizer = live()
    refused(write(tmp_path, {"step": 1, "x": torch.ones(2)}), model, None, "holds no model state dict", UsageError)
    for tree in (model.state_dict(), {"model": [model]}):
        refused(write(tmp_path, tree), None, optimizer, "holds no optimizer state", UsageError)
    refused(tmp_path / "missing.pt", model, None, "No such file", InputError)


def test_not_strict_takes_what_fits_and_lists_the_rest(tmp_path):
    source, optimizer = trained(ADAMW)
    tree = copy.deepcopy(tree_of(source, optimizer))
    tree["model"]["body.weight"] = torch.zeros(2, 2)
    tree["optimizer"]["state"][MATRIX]["exp_avg"] = torch.zeros(3)
    path = write(tmp_path, tree)
    model, mine = live()
    before = snapshot(model, mine)
    with pytest.warns(ResumeWarning) as caught:
        ckpt8.resume(path, model, mine, strict=False)
    assert len(caught) == 1
    for said in ("body.weight: was saved with shape [2, 2]", "embed.weight: exp_avg was saved"):
        assert said in str(caught[0].message)
    now = snapshot(model, mine)
    assert torch.equal(now[0]["body.weight"], before[0]["body.weight"])
    assert torch.equal(now[0]["conv.weight"], source.conv.weight)
    assert same(now[1]["state"][MATRIX], before[1]["state"][MATRIX])
    assert same(now[1]["state"][1], optimizer.state_dict()["state"][1])


def test_not_strict_leaves_another_optimizer_alone(tmp_path):
    path = write(tmp_path, tree_of(*trained(OPTIMIZERS["came-pytorch"])))
    model, mine = live()
    before = snapshot(None, mine)
    with pytest.warns(ResumeWarning, match="another optimizer than AdamW"):
        ckpt8.resume(path, model, mine, strict=False)
    assert same(snapshot(None, mine), before)


class Copies(nn.Linear):
    """A model whose state dict is not made of its own tensors."""

    def state_dict(self, **settings):
        return {name: t.clone() for name, t in super().state_dict(**settings).items()}


def test_a_model_that_cannot_be_filled(tmp_path):
    path = write(tmp_path, nn.Linear(2, 2).state_dict())
    refused(path, Copies(2, 2), None, "model weight: is not a tensor that can be filled in place")
    with pytest.raises(ResumeError, match="model weight: is on the meta device"):
        ckpt8.resume(path, nn.Linear(2, 2, device="meta"))


def test_conjugate_views_are_refused(tmp_path):
    model = nn.Linear(2, 2, dtype=torch.complex64)
    optimizer = ADAMW(model.parameters(), 0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    tree = copy.deepcopy(tree_of(model, optimizer))
    tree["optimizer"]["state"][0]["exp_avg"] = tree["optimizer"]["state"][0]["exp_avg"].conj()
    refused(write(tmp_path, tree), model, optimizer, "weight: exp_avg was saved as a conjugate")
    tree = {"bias": model.bias.conj(), "weight": model.weight}
    refused(write(tmp_path, tree), model, None, "model bias: was saved as a")


@pytest.mark.slow
def test_damage_anywhere_is_found_before_anything_changes(tmp_path):
    path = write(tmp_path, tree_of(*trained(ADAMW)), "flash")
    whole = path.read_bytes()
    model, optimizer = live()
    for place in range(100, len(whole), len(whole) // 25):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        refused(path, model, optimizer, "run", InputError)
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path, model, optimizer, "run", InputError)
