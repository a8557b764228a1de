"""tgfx.param_groups with every optimizer of torch."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tgfx

REFUSED = {  # by torch, with these words
    "LBFGS": "doesn't support per-parameter options",
    "Muon": "only supports 2D parameters",
    "SparseAdam": "does not support dense gradients",
}
ALL = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
RATES = {"Adadelta": 1.0, "Rprop": 1e-3}
X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))


def gated_model() -> tgfx.GatedModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
    return tgfx.transform(model, X).train()


def steps(gated: tgfx.GatedModule, optimizer: torch.optim.Optimizer, count: int = 12) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = F.cross_entropy(gated(X), torch.arange(32) % 3)
        (loss + gated.budget_loss(params=0.5, steps=12)).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", sorted(set(ALL) - set(REFUSED)))
def test_trains_with(name: str) -> None:
    gated = gated_model()
    optimizer = ALL[name](tgfx.param_groups(gated, lr=RATES.get(name, 1e-3), weight_decay=0.01))
    before = {n: p.detach().clone() for n, p in gated.named_parameters()}
    steps(gated, optimizer)
    assert 0.45 <= gated.eval().ratio("params") <= 0.5
    assert all(not torch.equal(p, before[n]) for n, p in gated.named_parameters())
    twin = copy.deepcopy(optimizer)
    twin.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    tgfx.compact_(gated.train(), optimizer, patience=0)
    steps(gated, optimizer, 1)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_is_refused(name: str) -> None:
    gated = gated_model()
    with pytest.raises((ValueError, RuntimeError), match=REFUSED[name]):
        steps(gated, ALL[name](tgfx.param_groups(gated, lr=1e-3)), 1)


def test_gates_take_plain_steps() -> None:
    """No momentum, and an eps that outweighs the moments, where the optimizer has these as numbers."""
    for name in ("SGD", "RMSprop", "Adam", "AdamW", "Adagrad", "NAdam"):
        groups = ALL[name](tgfx.param_groups(gated_model(), lr=0.1)).param_groups
        assert groups[1].get("eps", 1.0) == 1.0 and groups[1].get("momentum", 0.0) == 0.0
        assert groups[0].get("eps", 0.0) < 1e-5
    sgd = torch.optim.SGD(tgfx.param_groups(gated_model(), lr=0.1), momentum=0.9, nesterov=True)
    assert [group["momentum"] for group in sgd.param_groups] == [0.9, 0.0]
    adafactor = torch.optim.Adafactor(tgfx.param_groups(gated_model(), lr=0.1))
    assert adafactor.param_groups[1]["eps"] == adafactor.defaults["eps"]


def test_muon_for_matrices_and_another_for_the_rest() -> None:
    gated = gated_model()
    matrices = [p for p in gated.parameters() if p.ndim == 2]
    weights, gates = tgfx.param_groups(gated, lr=1e-3)
    weights["params"] = [p for p in weights["params"] if p.ndim != 2]
    muon, adam = torch.optim.Muon(matrices), torch.optim.Adam([weights, gates])
    for _ in range(12):
        loss = F.cross_entropy(gated(X), torch.arange(32) % 3) + gated.budget_loss(params=0.5, steps=12)
        loss.backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
    assert 0.45 <= gated.eval().ratio("params") <= 0.5
