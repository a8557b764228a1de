"""Parametrised weights train on through the gates and are cut exactly; what cannot be followed is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import tgfx
from tests.support import promises
from tgfx.errors import InputError

Wrap = Callable[[nn.Module], nn.Module]
TOLERANCE = 1e-12  # float64, of the largest entry


class Net(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.stem = wrap(nn.Conv2d(3, 8, 3, padding=1))
        self.bn = nn.BatchNorm2d(8)
        self.block = nn.Sequential(wrap(nn.Conv2d(8, 12, 3, padding=1)), nn.ReLU())
        self.fc = wrap(nn.Linear(12, 16))
        self.out = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.relu(self.bn(self.stem(x)))).mean((2, 3))
        return self.out(torch.relu(self.fc(x)))


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square() + 0.1


def squared(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "bias", Squared())
    return parametrizations.weight_norm(layer)


WRAPS: dict[str, Wrap] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm_whole": lambda layer: parametrizations.weight_norm(layer, dim=None),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own_and_two": squared,
}


def example(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))


def net(name: str) -> Net:
    torch.manual_seed(0)
    return Net(WRAPS[name]).double()


def stepped(model: nn.Module, names: list[str], steps: int = 3) -> list[Tensor]:
    own = dict(model.named_parameters())
    optimizer = torch.optim.SGD([own[name] for name in names], lr=0.05)
    losses = []
    for step in range(steps):
        loss = model(example(3 + step)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("name", WRAPS)
def test_trains_as_the_model_does(name: str) -> None:
    model = net(name).train()
    gated = tgfx.transform(model, example())
    names = [n for n, _ in model.named_parameters()]
    assert [n for n, _ in gated.named_parameters() if not n.startswith("gate_bank")] == names
    before = {n: p.detach().clone() for n, p in gated.named_parameters()}
    losses = [stepped(each, names) for each in (model, gated)]
    for expected, found in zip(*losses, strict=True):
        promises.assert_close(found, expected, TOLERANCE, "loss")
    for key, tensor in model.state_dict().items():
        promises.assert_close(gated.state_dict()[key].double(), tensor.double(), 1e-10, key)
    still = [n for n in names if torch.equal(gated.get_parameter(n), before[n])]
    assert set(still) <= {"stem.bias", "stem.parametrizations.bias.original"}, "only a bias before batch norm may rest"


@pytest.mark.parametrize("name", WRAPS)
def test_cuts_exactly_after_training(name: str) -> None:
    gated = tgfx.transform(net(name), example()).train()
    assert {n: g.weight.numel() for n, g in gated.gates.items()} == {"stem": 8, "block.0": 12, "fc": 16}
    stepped(gated, [n for n, _ in gated.named_parameters()])
    promises.gate_at_random(gated, 0.5, seed=1)
    held = {key: value.clone() for key, value in gated.state_dict().items()}
    compact = tgfx.shrink(gated)  # in train mode: a look at a spectral norm must not move it
    assert all(torch.equal(value, held[key]) for key, value in gated.state_dict().items())
    gated.eval(), compact.eval()
    with torch.no_grad():
        promises.assert_close(compact(example(5)), gated(example(5)), TOLERANCE, "compact output")
    assert not any(parametrize.is_parametrized(module) for module in compact.modules())
    assert sum(p.numel() for p in compact.parameters()) == gated.cost("params").item()
    assert all(p.requires_grad for p in compact.parameters())


@pytest.mark.parametrize("name", WRAPS)
def test_copies_stay_parametrised(name: str) -> None:
    gated = tgfx.transform(net(name).train(), example())
    state = {key: value.clone() for key, value in gated.state_dict().items()}
    twin = copy.deepcopy(gated)
    assert all(torch.equal(value, state[key]) for key, value in twin.state_dict().items()), "copying moved something"
    names = [n for n, _ in gated.named_parameters()]
    for expected, found in zip(stepped(gated, names), stepped(twin, names), strict=True):
        promises.assert_close(found, expected, TOLERANCE, "loss of the copy")


def test_the_users_model_stays_as_it_is() -> None:
    model = net("spectral_norm").train()
    before = promises.snapshot(model)
    gated = tgfx.transform(model, example())
    stepped(gated, [n for n, _ in gated.named_parameters()])
    promises.assert_same_snapshot(before, promises.snapshot(model))


def test_plan_of_a_parametrised_model(tmp_path) -> None:
    gated = tgfx.transform(net("weight_norm"), example())
    promises.gate_at_random(gated, 0.5, seed=2)
    tgfx.save_plan(gated, tmp_path / "plan")
    compact = tgfx.load_plan(tmp_path / "plan", net("weight_norm"), example())
    with torch.no_grad():
        promises.assert_close(compact.eval()(example(2)), gated.eval()(example(2)), TOLERANCE, "loaded")


def test_parametrised_recurrent_layer_is_refused() -> None:
    # torch's recurrent layers keep the computed weight as an attribute, and deepcopy stops there
    model = nn.Sequential(parametrizations.weight_norm(nn.LSTM(6, 4), "weight_hh_l0")).double()
    with pytest.raises(InputError, match="cannot be copied"):
        tgfx.transform(model, torch.zeros(1, 2, 6, dtype=torch.float64))


def test_tied_parametrised_layer() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 6)
            self.first = parametrizations.weight_norm(nn.Linear(6, 6))
            self.again = self.first
            self.out = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.relu(self.again(torch.relu(self.first(self.stem(x))))))

    torch.manual_seed(0)
    model = Tied().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    gated = tgfx.transform(model, x)
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.1)
    gated.train()(x).square().sum().backward()
    optimizer.step()
    promises.gate_at_random(gated, 0.5, seed=0)
    gated.eval()
    with torch.no_grad():
        promises.assert_close(tgfx.shrink(gated)(x), gated(x), TOLERANCE, "cut")


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.(weight_norm|spectral_norm).*:FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (nn.utils.weight_norm, "remove_weight_norm"),
        (nn.utils.spectral_norm, "remove_spectral_norm"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "prune.remove"),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_old_hooks_are_refused(wrap: Wrap, says: str) -> None:
    model = Net(wrap)
    with pytest.raises(InputError, match=r"stem, block\.0, fc") as refused:
        tgfx.transform(model, example().float())
    assert says in str(refused.value)


def test_parametrised_tensor_of_the_root_is_refused() -> None:
    model = nn.Linear(3, 3)
    parametrizations.weight_norm(model)
    with pytest.raises(InputError, match="weight"):
        tgfx.transform(model, torch.zeros(1, 3))


def test_a_name_that_a_gated_model_needs_is_refused() -> None:
    model = Net(lambda layer: layer)
    model.groups = nn.Identity()
    with pytest.raises(InputError, match="groups"):
        tgfx.transform(model, example().float())


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = Net(lambda layer: layer)
    model.cached = model.out.weight * 2  # has a gradient history
    with pytest.raises(InputError, match="cannot be copied"):
        tgfx.transform(model, example().float())
