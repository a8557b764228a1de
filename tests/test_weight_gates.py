"""granularity="weight": identity, exact gradients, exact price, exact shrink; copies, budgets and refusals."""

from __future__ import annotations

import copy
import pickle

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
from tgfx.errors import BudgetError, GranularityError, InputError, NothingToGateError, StrictError
from tgfx.gates import GateSettings
from tgfx.ops import weight_gate
from tgfx.ops.weight_gate import GatedWeight, OpenSum

KINDS = ("flops", "flops_all", "params")


class Convolutions(nn.Module):
    """1-d, 2-d, 3-d, transposed, grouped, depthwise, padded by reflection, with norms in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Conv1d(4, 6, 3, groups=2), nn.Conv3d(2, 3, 2)
        self.two = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.bn = nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, padding="same", groups=8, bias=False)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
        self.out = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(torch.relu(self.bn(self.two(x))))
        y = self.up(y)
        line = self.one(y.flatten(2))
        box = self.three(y.reshape(len(y), 2, 2, *y.shape[2:]))
        return self.out(y.mean((2, 3))) + line.mean() + box.square().mean()


class Tied(nn.Module):
    """One weight in two layers, an embedding that is also the output layer, a weight used as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.first(self.embedding(x))))
        return self.head(y + F.linear(y, self.matrix) + torch.matmul(y, self.matrix))


class Attention(nn.Module):
    """in_proj_weight is used in three parts, of different length each: keys are pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        short = x[:, ::2]
        return self.out(self.norm(x + self.attention(x, short, short, need_weights=False)[0]))


MODELS = {
    "convolutions": (Convolutions, lambda: torch.randn(2, 3, 6, 6, dtype=torch.float64)),
    "tied": (Tied, lambda: torch.randint(0, 11, (2, 5))),
    "attention": (Attention, lambda: torch.randn(2, 6, 8, dtype=torch.float64)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def made(name: str, **options) -> tuple[nn.Module, tgfx.GatedModule, Tensor]:
    torch.manual_seed(0)
    kind, example = MODELS[name]
    model, x = kind().double().eval(), example()
    return model, tgfx.transform(model, x, granularity="weight", **options), x


def close_at_random(gated: tgfx.GatedModule, density: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for gate in gated.gates.values():
        gate.set_open_(torch.rand(gate.weight.shape, generator=generator) < density)


def kept_entries(model: nn.Module) -> int:
    return sum(int((p != 0).sum()) for p in model.parameters())


def randomised(model: nn.Module) -> nn.Module:
    """No parameter entry is zero by itself."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.where(parameter == 0, 0.1, 0.0))
    return model


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


# -- G5, G7, training -----------------------------------------------------------------------------------------


def test_the_input_is_untouched() -> None:
    model, _, x = made("convolutions")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    gated = tgfx.transform(model, x, granularity="weight", gate=tgfx.GateSpec(init="random"))
    close_at_random(gated, 0.5)
    latents = {n: g.weight.clone() for n, g in gated.gates.items()}
    sparse = tgfx.shrink(gated)
    with torch.no_grad():
        for parameter in sparse.parameters():
            parameter.add_(1)
    assert all(torch.equal(g.weight, latents[n]) for n, g in gated.gates.items())
    with torch.no_grad():
        for parameter in gated.parameters():
            parameter.add_(1)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@each_model
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(name: str, clone) -> None:
    _, gated, x = made(name)
    close_at_random(gated, 0.5)
    (gated.train()(x).sum() + gated.budget_loss(params=0.5)).backward()  # a copy may be taken in the middle of training
    twin = clone(gated)
    assert isinstance(twin, tgfx.GatedModule) and type(twin).__mro__[1] is type(gated).__mro__[1]
    with torch.no_grad():
        assert torch.equal(twin.eval()(x), gated.eval()(x))
    assert list(twin.state_dict()) == list(gated.state_dict())
    assert float(twin.cost("flops")) == float(gated.cost("flops"))
    assert str(twin.report()) == str(gated.report())
    sparse = clone(tgfx.shrink(twin))
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), gated(x), rtol=1e-13, atol=1e-14)
        next(iter(twin.gates.values())).weight.fill_(-1)
        assert not torch.equal(twin(x), gated(x))
    other = made(name)[1].eval()
    other.load_state_dict(gated.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), gated(x))


@pytest.mark.parametrize("kind", ["params", "flops"])
def test_a_budget_is_met(kind: str) -> None:
    _, gated, x = made("convolutions", gate=tgfx.GateSpec(init="magnitude"))
    gated.train()
    optimizer = torch.optim.Adam([gate.weight for gate in gated.gates.values()], lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        (0.01 * gated(x).square().mean() + gated.budget_loss(steps=150, **{kind: 0.4})).backward()
        optimizer.step()
    assert abs(float(gated.eval().ratio(kind)) - 0.4) < 0.01


def test_budget_and_loss_may_be_differentiated_apart() -> None:
    _, gated, x = made("convolutions", gate=tgfx.GateSpec(shape="tanh"))
    close_at_random(gated.train(), 0.5)
    latents = [gate.weight for gate in gated.gates.values()]
    together = torch.autograd.grad(
        gated(x).square().sum() + gated.budget_loss(params=0.3, flops=0.2, weight=1.0), latents
    )
    loss = gated(x).square().sum()
    budget = gated.budget_loss(params=0.3, flops=0.2, weight=1.0)
    loss.backward()
    budget.backward()
    for found, wanted in zip(latents, together, strict=True):
        torch.testing.assert_close(found.grad, wanted, rtol=1e-10, atol=1e-12)
    alone = made("convolutions", gate=tgfx.GateSpec(shape="tanh"))[1].train()
    alone.load_state_dict(gated.state_dict())
    without_forward = alone.budget_loss(params=0.3, flops=0.2, weight=1.0)
    assert float(without_forward.detach()) == float(gated.budget_loss(params=0.3, flops=0.2, weight=1.0).detach())


def test_magnitudes_order_the_gates() -> None:
    model, gated, x = made("convolutions", gate=tgfx.GateSpec(init="magnitude", init_value=2.0))
    for n, p in model.named_parameters():
        if n in gated.gates:
            latent = gated.gates[n].weight
            assert torch.equal(latent.reshape(-1).argsort(stable=True), p.abs().reshape(-1).argsort(stable=True))
            assert bool((latent > 0).all()) and latent.mean().item() == pytest.approx(2.0, rel=1e-2)
    with torch.no_grad():
        torch.testing.assert_close(gated.eval()(x), model(x), rtol=1e-12, atol=1e-12)
    with pytest.raises(InputError, match="magnitude"):
        tgfx.transform(model, x, gate=tgfx.GateSpec(init="magnitude"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_precisions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype).eval(),
        torch.randn(2, 8, dtype=dtype),
    )
    gated = tgfx.transform(model, x, granularity="weight")
    assert all(gate.weight.dtype == torch.float32 for gate in gated.gates.values())
    with torch.no_grad():
        assert torch.equal(gated.eval()(x), model(x))
    (gated.train()(x).float().square().mean() + gated.budget_loss(params=0.5, weight=1.0)).backward()
    assert all(bool(p.grad.any()) for p in gated.parameters())
    close_at_random(gated.eval(), 0.5)
    with torch.no_grad():
        assert torch.equal(tgfx.shrink(gated)(x), gated(x))


# -- choices and refusals --------------------------------------------------------------------------------------


def test_ignore_and_explain() -> None:
    _, gated, _ = made("convolutions", ignore=["two", nn.Linear])
    assert set(gated.gates) == {"one.weight", "three.weight", "depth.weight", "up.weight"}
    assert "ignored" in gated.explain("two") and "one gate per entry" in gated.explain("one.weight")
    assert gated.groups["out.weight"].frozen is not None
    with pytest.raises(InputError, match="nothing to explain"):
        gated.explain("nowhere")
    _, tied, _ = made("tied", ignore="second")  # a tied weight is ignored under any of its names
    assert set(tied.gates) == {"embedding.weight", "matrix"}
    assert "head.weight" in tied.explain("embedding")


def test_refusals() -> None:
    model, gated, x = made("convolutions")
    with pytest.raises(GranularityError, match="round_to"):
        tgfx.shrink(gated, round_to=8)
    with pytest.raises(GranularityError, match="save_sparse"):
        tgfx.save_plan(gated, "nowhere")
    for call in (lambda: gated.cost("channels"), lambda: gated.budget_loss(channels=0.5), lambda: gated.total("x")):
        with pytest.raises(BudgetError, match="flops, flops_all, params"):
            call()
    for mixed in (["channel", "weight"], "weight+channel"):
        with pytest.raises(GranularityError, match=r"mixed|unknown"):
            tgfx.transform(model, x, granularity=mixed)
    with pytest.raises(NothingToGateError):
        tgfx.transform(nn.Sequential(nn.BatchNorm1d(4)), torch.randn(2, 4), granularity="weight")


class Boxed(nn.Module):
    """An LSTM is called as it is; its matrices keep their entries."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


def test_closed_boxes_are_kept_with_a_reason() -> None:
    model, x = Boxed().eval(), torch.randn(2, 4, 6)
    gated = tgfx.transform(model, x, granularity="weight").eval()
    assert set(gated.gates) == {"out.weight"}
    close_at_random(gated, 0.5)
    with torch.no_grad():
        assert torch.equal(tgfx.shrink(gated)(x), gated(x))
    assert gated.groups["lstm.weight_ih_l0"].frozen is not None


class Resized(nn.Module):
    """The size of the output is an argument of the call: such a call is left as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x), output_size=[8, 8])


def test_calls_with_more_than_an_input_are_kept() -> None:
    model, x = Resized().eval(), torch.randn(2, 3, 8, 8)
    gated = tgfx.transform(model, x, granularity="weight").eval()
    assert set(gated.gates) == {"down.weight"}
    assert "ConvTranspose2d, which is called as it is" in gated.explain("up.weight")
    close_at_random(gated, 0.5)
    with torch.no_grad():
        assert torch.equal(tgfx.shrink(gated)(x), gated(x))
    with pytest.raises(StrictError, match="ConvTranspose2d"):
        tgfx.transform(model, x, granularity="weight", strict=True)
