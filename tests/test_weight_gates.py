"""granularity="weight": identity, exact gradients, exact price, exact shrink."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tgfx
from tests.support.random_models import Case, build, cases
from tests.support.weight_models import (
    KINDS,
    close_at_random,
    each_model,
    kept_entries,
    made,
    randomised,
)
from tgfx.gates import GateSettings
from tgfx.ops import weight_gate
from tgfx.ops.weight_gate import GatedWeight, OpenSum

# -- the gate function ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["constant", "sigmoid", "tanh", torch.cos])
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("block", [1, 7, 1 << 18])
def test_gradients_are_those_of_autograd(shape, owned: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gate, "BLOCK", block)
    options = GateSettings(M=1e3, shape=shape)
    torch.manual_seed(0)
    weight = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    latent = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(7, 6, dtype=torch.float64)
    factor = torch.rand(5, 1, 2, dtype=torch.float64)

    def loss(gated: Tensor, count: Tensor, priced: Tensor) -> Tensor:
        return F.linear(x, gated.flatten(1)).pow(3).sum() + 0.3 * count.square() + 0.2 * priced

    value = options.trained(latent)
    expected_parts = weight * value, value.sum(), (value * factor).sum()
    expected = torch.autograd.grad(loss(*expected_parts), (weight, latent))
    parts = (*GatedWeight.apply(weight, latent, options, owned), OpenSum.apply(latent, options, factor))
    for part, wanted in zip(parts, expected_parts, strict=True):
        torch.testing.assert_close(part, wanted, rtol=1e-14, atol=1e-14)
    for found, wanted in zip(torch.autograd.grad(loss(*parts), (weight, latent)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", ["constant", "sigmoid"])
def test_second_gradients(shape: str) -> None:
    options = GateSettings(M=10.0, shape=shape)
    weight = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    latent = torch.tensor([[0.31, -0.52], [0.77, 0.13], [-0.24, 0.96]], dtype=torch.float64, requires_grad=True)

    def twice(use_plain: bool) -> tuple[Tensor, ...]:
        if use_plain:
            value = options.trained(latent)
            gated, count = weight * value, value.sum()
        else:
            gated, count = GatedWeight.apply(weight, latent, options, True)
        first = torch.autograd.grad(gated.pow(3).sum() + count**2, (weight, latent), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (weight, latent))

    for found, wanted in zip(twice(False), twice(True), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_an_optimizer_step_between_forward_and_backward_is_noticed() -> None:
    _, gated, x = made("convolutions")
    loss = gated.train()(x).sum()
    with torch.no_grad():
        next(iter(gated.gates.values())).weight.sub_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gated_weights_are_not_kept_for_backward() -> None:
    """Only parameters and activations are: nothing of a weight's size that is not a parameter."""
    torch.manual_seed(0)
    gated = tgfx.transform(nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 100)), torch.randn(2, 300),
                           granularity="weight").train()  # fmt: skip
    own = {p.data_ptr() for p in gated.parameters()}
    large = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() >= 200 * 100 and tensor.data_ptr() not in own:
            large.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = gated(torch.randn(2, 300)).sum()
    assert not large
    loss.backward()
    assert all(p.grad is not None for p in gated.parameters())


# -- G1, G2, G3 ----------------------------------------------------------------------------------------------


@each_model
def test_identity(name: str) -> None:
    model, gated, x = made(name)
    with torch.no_grad():
        torch.testing.assert_close(gated.eval()(x), model(x), rtol=1e-12, atol=1e-12)
    plain = copy.deepcopy(model).train()
    gated.train()
    names = [n for n, _ in plain.named_parameters()]
    optimizers = [torch.optim.SGD([dict(m.named_parameters())[n] for n in names], lr=0.05) for m in (plain, gated)]
    for _ in range(3):
        losses = [m(x).square().mean() for m in (plain, gated)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        ours = dict(gated.named_parameters())
        for n, parameter in plain.named_parameters():
            torch.testing.assert_close(ours[n].grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=n)
        for optimizer in optimizers:
            optimizer.step()
    state = gated.state_dict()
    for n, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[n], tensor, rtol=1e-9, atol=1e-12, msg=n)


@each_model
def test_training_gradients_are_those_of_the_product(name: str) -> None:
    """The whole model against functional_call with weights gated by plain autograd, gates half closed."""
    model, gated, x = made(name, gate=tgfx.GateSpec(shape="sigmoid"))
    close_at_random(gated.train(), 0.5)
    model = randomised(model).train()
    gated.load_state_dict({**gated.state_dict(), **model.state_dict()})
    weights = dict(model.named_parameters())
    latents = {n: g.weight.detach().clone().requires_grad_() for n, g in gated.gates.items()}
    values = {n: weights[n] * gated.gates[n].settings.trained(v) for n, v in latents.items()}
    swapped = {n: values.get(first, p) for n, p, first in _tied(model)}
    expected = torch.func.functional_call(model, swapped, (x,), tie_weights=False)
    found = gated(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    expected.square().mean().backward()
    found.square().mean().backward()
    for n, latent in latents.items():
        torch.testing.assert_close(gated.gates[n].weight.grad, latent.grad, rtol=1e-9, atol=1e-13, msg=n)
        torch.testing.assert_close(dict(gated.named_parameters())[n].grad, weights[n].grad, rtol=1e-9, atol=1e-13)


def _tied(model: nn.Module) -> list[tuple[str, Tensor, str]]:
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return [(n, p, first.setdefault(id(p), n)) for n, p in named]


@each_model
@pytest.mark.parametrize("density", [0.5, 0.05, 0.0])
def test_shrink_and_price_are_exact(name: str, density: float) -> None:
    model, _, x = made(name)
    gated = tgfx.transform(randomised(model), x, granularity="weight").eval()
    close_at_random(gated, density)
    sparse = tgfx.shrink(gated)
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), gated(x), rtol=1e-13, atol=1e-14)
    assert float(gated.cost("params")) == kept_entries(sparse)
    parameters = dict(sparse.named_parameters())
    for n, gate in gated.gates.items():
        assert torch.equal(parameters[n] != 0, gate.is_open())
        closed = parameters[n][~gate.is_open()]
        assert not bool(torch.signbit(closed).any())  # +0.0
    assert [n for n, _ in sparse.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert set(sparse.state_dict()) == set(model.state_dict())
    assert all(type(m).__module__.startswith("torch.") for path, m in sparse.named_modules() if path)
    for (_, a, first), (_, b, other) in zip(_tied(model), _tied(sparse), strict=True):
        assert first == other and a is not b


@each_model
def test_whole_price(name: str) -> None:
    model, gated, x = made(name)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x)
    counted = {str(op).split(".")[-1]: n for op, n in counter.get_flop_counts()["Global"].items()}
    assert gated.total("flops") * len(x) == sum(counted.get(op, 0) for op in ("convolution", "mm", "addmm"))
    assert gated.total("flops_all") * len(x) == sum(counted.values())
    assert gated.total("params") == sum(p.numel() for p in model.parameters())
    for kind in KINDS:
        assert float(gated.cost(kind)) == gated.total(kind)
        everything = gated.facts.cost.fixed[kind] + sum(float(m.sum()) for m in gated.marginal(kind).values())
        assert everything == gated.total(kind)
        assert gated.cheapest(kind) == gated.facts.cost.fixed[kind] / gated.total(kind)


@each_model
def test_every_gate_has_its_price(name: str) -> None:
    """Closing one gate changes the cost by its marginal, and the polynomial says the same."""
    _, gated, _ = made(name)
    gated.eval()
    for kind in KINDS:
        before = float(gated.cost(kind))
        for n, gate in gated.gates.items():
            mask = torch.ones_like(gate.weight, dtype=torch.bool)
            mask.view(-1)[-1] = False
            gate.set_open_(mask)
            assert before - float(gated.cost(kind)) == float(gated.marginal(kind)[n].reshape(-1)[-1])
            gate.set_open_(torch.ones_like(mask))
        prices = {n: gated.marginal(kind)[n].unique() for n in gated.gates}
        symbols = gated.cost_expr(kind).free_symbols
        values = {}
        for n in gated.gates:
            for price in prices[n].tolist():
                label = f"n[{n}]" if len(prices[n]) == 1 else f"n[{n} @ {price:g}]"
                values[label] = int((gated.marginal(kind)[n] == price).sum())
        assert float(gated.cost_expr(kind).subs({s: values[str(s)] for s in symbols})) == before


def test_parts_of_a_weight_have_prices_of_their_own() -> None:
    _, gated, _ = made("attention")
    price = gated.marginal("flops")["attention.in_proj_weight"]
    assert price[:8].unique().tolist() == [2 * 6] and price[8:].unique().tolist() == [2 * 3]


@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(cases(), st.sampled_from((0.5, 0.0, 0.2, 0.9)), st.integers(0, 9))
def test_random_models(case: Case, density: float, seed: int) -> None:
    model = build(case).eval()
    x = case.example()
    gated = tgfx.transform(model, x, granularity="weight").eval()
    channel_totals = tgfx.transform(model, x)
    with torch.no_grad():
        torch.testing.assert_close(gated(x), model(x), rtol=1e-9, atol=1e-9)
        assert gated.total("flops") == channel_totals.total("flops")
        assert gated.total("params") == channel_totals.total("params")
        close_at_random(gated, density, seed)
        sparse = tgfx.shrink(gated)
        torch.testing.assert_close(sparse(x), gated(x), rtol=1e-12, atol=1e-12, equal_nan=True)
    closed = sum(int((~gate.is_open()).sum()) for gate in gated.gates.values())
    assert float(gated.cost("params")) == gated.total("params") - closed


# -- larger models --------------------------------------------------------------------------------------------


def vit() -> tuple[nn.Module, tuple]:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 16, 2, 2, 32, 64, num_classes=7)
    return model, (torch.randn(1, 3, 32, 32),)


def resnet() -> tuple[nn.Module, tuple]:
    from torchvision.models import resnet18

    return resnet18(num_classes=9), (torch.randn(2, 3, 33, 33),)


def bert() -> tuple[nn.Module, tuple]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, return_dict=False,
    )  # fmt: skip
    return BertForMaskedLM(config), (torch.randint(0, 50, (2, 9)),)


@pytest.mark.parametrize("make", [vit, resnet, bert])
def test_known_models(make) -> None:
    torch.manual_seed(0)
    model, example = make()
    model = randomised(model).eval()
    gated = tgfx.transform(model, example, granularity="weight")
    linear = {
        f"{path}.weight"
        for path, m in model.named_modules()
        if isinstance(m, nn.Linear | nn.Conv2d) and not path.endswith("decoder")
    }
    linear |= {n for n, _ in model.named_parameters() if n.endswith("in_proj_weight")}
    assert linear <= set(gated.gates)
    assert sum(g.weight.numel() for g in gated.gates.values()) > 0.6 * gated.total("params")

    def output(module: nn.Module) -> Tensor:
        with torch.no_grad():
            found = module(*example)
        return found[0] if isinstance(found, tuple) else found

    torch.testing.assert_close(output(gated.eval()), output(model), rtol=1e-5, atol=1e-5)
    close_at_random(gated, 0.3)
    sparse = tgfx.shrink(gated)
    torch.testing.assert_close(output(sparse), output(gated), rtol=0, atol=0)
    assert float(gated.cost("params")) == kept_entries(sparse)
    model.load_state_dict(sparse.state_dict())  # the original class takes the weights
    torch.testing.assert_close(output(model), output(sparse), rtol=1e-5, atol=1e-5)
