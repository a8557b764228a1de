"""The trainable gate function: Proposition 1 of the paper, exact gradients, and the module around it."""

import copy
import io
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tgfx
from tgfx.errors import InputError
from tgfx.gates import GateSettings, GateSpec, TrainableGate, binary_gate, trainable_gate


def bump(w: Tensor) -> Tensor:
    """A shape of the user's own."""
    return torch.exp(-w.square())


def sine_gate(w: Tensor) -> Tensor:
    """A binary gate that is not the step: 1 where sin w > 0. Bool on purpose."""
    return w.sin() > 0


def sigmoid_shape(w: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.sigmoid(w)
    return p * (1 - p), p * (1 - p) * (1 - 2 * p)


def tanh_shape(w: Tensor) -> tuple[Tensor, Tensor]:
    t = torch.tanh(w)
    return 1 - t**2, -2 * t * (1 - t**2)


# name or callable; w -> (g, g') in closed form; sup|g|, sup|g'|
SHAPES: dict[str, tuple[str | Callable, Callable, float, float]] = {
    "constant": ("constant", lambda w: (torch.ones_like(w), torch.zeros_like(w)), 1.0, 0.0),
    "sigmoid": ("sigmoid", sigmoid_shape, 1 / 4, 1 / (6 * math.sqrt(3))),
    "tanh": ("tanh", tanh_shape, 1.0, 4 / (3 * math.sqrt(3))),
    "callable": (bump, lambda w: (bump(w), -2 * w * bump(w)), 1.0, math.sqrt(2 / math.e)),
}
MS = [1e2, 1e3, 1e4, 1e5, 1e6]
ROUNDING = 1e-15  # of b + s·g in float64, where b is 0 or 1

each_shape = pytest.mark.parametrize("name", SHAPES)
each_m = pytest.mark.parametrize("M", MS, ids=lambda M: f"M{M:.0e}")


def smooth_points(M: float, count: int = 20_001) -> Tensor:
    """Weights over [-3, 3] in float64, off the jumps of s and b, which lie at the multiples of 1/M."""
    cell = torch.linspace(-3 * M, 3 * M, count, dtype=torch.float64).floor()
    inside = torch.linspace(0.1, 0.9, 17, dtype=torch.float64).repeat(count // 17 + 1)[:count]
    return (cell + inside) / M


def value_and_grad(settings: GateSettings, w: Tensor) -> tuple[Tensor, Tensor]:
    w = w.clone().requires_grad_()
    value = settings.trained(w)
    (grad,) = torch.autograd.grad(value.sum(), w)
    return value.detach(), grad


class TestProposition1:
    @each_shape
    @each_m
    def test_value_converges_uniformly_to_the_binary_gate(self, name: str, M: float) -> None:
        shape, _, sup_g, _ = SHAPES[name]
        w = smooth_points(M)
        value, _ = value_and_grad(GateSettings(M, shape), w)
        error = (value - (w > 0).double()).abs().max().item()
        assert error <= sup_g / M + ROUNDING
        assert error > 0.5 * sup_g / M  # the bound says something: the gate is shaped at all

    @each_shape
    @each_m
    def test_derivative_converges_uniformly_to_the_shape(self, name: str, M: float) -> None:
        shape, closed_form, _, sup_dg = SHAPES[name]
        w = smooth_points(M)
        _, grad = value_and_grad(GateSettings(M, shape), w)
        error = (grad - closed_form(w)[0]).abs().max().item()
        assert error <= sup_dg / M + ROUNDING
        assert error >= 0.5 * sup_dg / M

    @each_shape
    @given(st.integers(-(10**6), 10**6), st.floats(0.01, 0.99), st.integers(2, 6))
    def test_both_bounds_hold_at_any_smooth_point(self, name: str, cell: int, inside: float, digits: int) -> None:
        shape, closed_form, sup_g, sup_dg = SHAPES[name]
        M = 10.0**digits
        w = torch.tensor([(cell + inside) / M], dtype=torch.float64)
        value, grad = value_and_grad(GateSettings(M, shape), w)
        assert abs(value - (w > 0).double()) <= sup_g / M + ROUNDING
        assert abs(grad - closed_form(w)[0]) <= sup_dg / M + ROUNDING

    @given(st.floats(-1e4, 1e4), st.sampled_from(MS), st.sampled_from([torch.float32, torch.float64]))
    def test_value_bound_holds_everywhere_jumps_included(self, w: float, M: float, dtype: torch.dtype) -> None:
        weight = torch.tensor([w], dtype=dtype)
        excess = trainable_gate(weight, M=M) - binary_gate(weight)
        assert 0 <= excess.item() <= 1 / M + torch.finfo(dtype).eps


class TestGradient:
    @each_shape
    @each_m
    def test_equals_the_closed_form(self, name: str, M: float) -> None:
        shape, closed_form, _, _ = SHAPES[name]
        w = smooth_points(M, 1001)
        g, dg = closed_form(w)
        s = (M * w - (M * w).floor()) / M
        _, grad = value_and_grad(GateSettings(M, shape), w)
        torch.testing.assert_close(grad, g + s * dg, rtol=1e-13, atol=1e-15)

    @each_shape
    def test_equals_finite_differences(self, name: str) -> None:
        M = 1e3
        w = smooth_points(M, 31).requires_grad_()
        function = GateSettings(M, SHAPES[name][0]).trained
        assert torch.autograd.gradcheck(function, w, eps=0.05 / M, atol=1e-8, rtol=1e-8)

    def test_a_binary_gate_of_the_users_own_adds_no_gradient(self) -> None:
        w = smooth_points(1e5, 101)
        value, grad = value_and_grad(GateSettings(binary=sine_gate), w)
        torch.testing.assert_close(grad, torch.ones_like(w), rtol=1e-13, atol=0)
        torch.testing.assert_close(value, (w.sin() > 0).double(), rtol=0, atol=1.01e-5)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("shape", ["constant", "sigmoid", "tanh"])
    def test_low_precision_weights_neither_overflow_nor_lose_the_gradient(self, dtype: torch.dtype, shape: str) -> None:
        w = torch.linspace(-3, 3, 61).to(dtype)
        value, grad = value_and_grad(GateSettings(shape=shape), w)
        assert value.dtype is dtype
        assert grad.dtype is dtype
        torch.testing.assert_close(value, (w > 0).to(dtype), rtol=0, atol=2e-5)
        expected = SHAPES[shape][1](w.double())[0].to(dtype)
        torch.testing.assert_close(grad, expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


class TestModule:
    def test_starts_open_and_exactly_one_in_both_modes(self) -> None:
        gate = TrainableGate(7)
        assert torch.equal(gate.train()(), torch.ones(7))
        assert torch.equal(gate.eval()(), torch.ones(7))
        assert gate.open_count() == 7

    @each_shape
    def test_eval_is_exactly_binary_and_training_close_to_it(self, name: str) -> None:
        w = torch.linspace(-1, 1, 101)
        gate = TrainableGate(101, shape=SHAPES[name][0], init=w)
        b = gate.eval()()
        assert torch.equal(b, (w > 0).float())
        assert not b.requires_grad
        trained = gate.train()()
        assert not torch.equal(trained, b)
        torch.testing.assert_close(trained, b, rtol=0, atol=1.1e-5)

    def test_a_weight_of_zero_is_closed(self) -> None:
        assert TrainableGate(1, init_value=0.0).open_count() == 0

    def test_is_open_is_a_bool_vector_in_either_mode(self) -> None:
        gate = TrainableGate(3, init=torch.tensor([0.5, -0.5, 0.25]))
        for mode in (True, False):
            assert gate.train(mode).is_open().tolist() == [True, False, True]
            assert gate.is_open().dtype is torch.bool
            assert gate.open_count() == 2
        assert type(gate.open_count()) is int

    def test_gradient_descent_opens_and_closes_gates(self) -> None:
        gate = TrainableGate(4, init=torch.tensor([0.3, 0.3, -0.3, -0.3]))
        wanted = torch.tensor([1.0, 0.0, 1.0, 0.0])
        optimizer = torch.optim.SGD(gate.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            (gate() - wanted).square().sum().backward()
            optimizer.step()
        assert torch.equal(gate.eval()(), wanted)

    def test_concatenated_gates_of_equal_settings_give_the_same_values(self) -> None:
        generator = torch.Generator().manual_seed(0)
        gates = [TrainableGate(n, shape="tanh", init="random", generator=generator) for n in (3, 5)]
        assert gates[0].settings == gates[1].settings
        assert len({gate.settings for gate in gates}) == 1
        together = gates[0].settings.trained(torch.cat([gate.weight for gate in gates]))
        assert torch.equal(together, torch.cat([gate() for gate in gates]))

    def test_repr_names_the_function(self) -> None:
        assert repr(TrainableGate(4)) == "TrainableGate(4, M=100000, shape=constant, binary=step)"
        assert "shape=bump" in repr(TrainableGate(4, shape=bump))


class TestInit:
    def test_constant_takes_the_value(self) -> None:
        assert TrainableGate(2, init_value=-0.5).weight.tolist() == [-0.5, -0.5]

    def test_random_is_open_within_range_and_follows_the_generator(self) -> None:
        def draw(seed: int) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            return TrainableGate(5000, init="random", init_value=0.1, generator=generator).weight.detach()

        w = draw(0)
        assert ((w > 0) & (w <= 0.1)).all()
        assert abs(w.mean() - 0.05) < 0.005
        assert torch.equal(w, draw(0))
        assert not torch.equal(w, draw(1))

    def test_a_generator_leaves_the_global_one_alone(self) -> None:
        before = torch.get_rng_state()
        TrainableGate(5, init="random", generator=torch.Generator())
        TrainableGate(5)
        assert torch.equal(torch.get_rng_state(), before)

    def test_tensor_is_copied(self) -> None:
        w = torch.tensor([1.0, -1.0])
        gate = TrainableGate(2, init=w)
        w.zero_()
        assert gate.weight.tolist() == [1.0, -1.0]

    def test_callable_gets_the_size(self) -> None:
        assert TrainableGate(3, init=lambda size: torch.arange(float(size))).weight.tolist() == [0, 1, 2]


class TestSetOpen:
    def test_changes_signs_in_place_and_keeps_magnitudes(self) -> None:
        gate = TrainableGate(4, init=torch.tensor([0.25, -0.5, 0.0, 0.0]))
        weight = gate.weight
        assert gate.set_open_(torch.tensor([False, True, True, False])) is gate
        assert gate.weight is weight
        assert weight.requires_grad
        assert weight.tolist() == [-0.25, 0.5, 1.0, -1.0]

    @given(st.lists(st.booleans(), min_size=1, max_size=20), st.booleans())
    def test_is_open_reads_back_the_mask(self, mask: list[bool], training: bool) -> None:
        gate = TrainableGate(len(mask)).train(training).set_open_(torch.tensor(mask))
        assert gate.is_open().tolist() == mask
        assert gate.open_count() == sum(mask)
        assert torch.equal(gate(), torch.tensor(mask).float())  # ±1: s is exactly 0

    def test_works_where_gates_started_at_zero(self) -> None:
        assert TrainableGate(2, init_value=0.0).set_open_(torch.tensor([True, False])).open_count() == 1

    @pytest.mark.parametrize("mask", [torch.ones(3), torch.ones(2, dtype=torch.bool), [True, True, True]])
    def test_rejects_a_mask_that_does_not_fit(self, mask: object) -> None:
        with pytest.raises(InputError, match="bool tensor"):
            TrainableGate(3).set_open_(mask)

    def test_refuses_unchanged_where_the_sign_does_not_decide(self) -> None:
        gate = TrainableGate(2, binary=lambda w: w > 0.5, init_value=0.25)
        with pytest.raises(InputError, match="does not decide"):
            gate.set_open_(torch.tensor([True, False]))
        assert gate.weight.tolist() == [0.25, 0.25]


class TestPortability:
    @each_shape
    def test_deepcopy_pickle_save_and_state_dict(self, name: str) -> None:
        gate = TrainableGate(3, shape=SHAPES[name][0], M=1e4, init=torch.tensor([0.3, -0.2, 0.7]))
        buffer = io.BytesIO()
        torch.save(gate, buffer)
        buffer.seek(0)
        loaded = TrainableGate(3, shape=SHAPES[name][0], M=1e4)
        loaded.load_state_dict(gate.state_dict())
        for twin in (
            copy.deepcopy(gate),
            pickle.loads(pickle.dumps(gate)),
            torch.load(buffer, weights_only=False),
            loaded,
        ):
            assert twin.settings == gate.settings
            assert torch.equal(twin(), gate())
        assert list(gate.state_dict()) == ["weight"]

    def test_follows_dtype_conversions(self) -> None:
        gate = TrainableGate(3)
        assert gate.double()().dtype is torch.float64
        assert gate.to(torch.bfloat16)().dtype is torch.bfloat16
        assert gate.eval()().dtype is torch.bfloat16

    @each_shape
    def test_compiles_without_a_graph_break(self, name: str) -> None:
        gate = TrainableGate(5, shape=SHAPES[name][0], init="random", generator=torch.Generator().manual_seed(0))
        torch.compiler.reset()
        compiled = torch.compile(gate, backend="eager", fullgraph=True)
        assert torch.equal(compiled(), gate())
        gate.eval()
        assert torch.equal(compiled(), gate())


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_random_gates_follow_the_seed(granularity: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        torch.rand(5 * seed)  # only the seed counts
        before = torch.get_rng_state()
        gated = tgfx.transform(model, x, granularity=granularity, gate=GateSpec(init="random"))
        assert torch.equal(before, torch.get_rng_state())
        drawn.append(torch.cat([gate.weight.detach().flatten() for gate in gated.gates.values()]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


class TestSpec:
    def test_builds_gates_of_any_size(self) -> None:
        spec = GateSpec(M=1e3, shape="tanh", binary=sine_gate, init="random", init_value=0.5)
        for size in (1, 6):
            gate = spec.build(size, generator=torch.Generator().manual_seed(1))
            assert gate.settings == spec.settings == GateSettings(1e3, "tanh", sine_gate)
            assert gate.weight.shape == (size,)
            assert ((gate.weight > 0) & (gate.weight <= 0.5)).all()

    def test_defaults_are_those_of_the_gate(self) -> None:
        built, direct = GateSpec().build(3), TrainableGate(3)
        assert built.settings == direct.settings == GateSettings()
        assert torch.equal(built.weight, direct.weight)
        assert torch.equal(trainable_gate(direct.weight), direct())

    def test_is_hashable_and_comparable(self) -> None:
        assert GateSpec(shape="tanh") == GateSpec(shape="tanh") != GateSpec()
        assert len({GateSpec(), GateSpec(M=1e5), GateSpec(M=10)}) == 2

    def test_does_not_take_a_tensor(self) -> None:
        with pytest.raises(InputError, match="callable"):
            GateSpec(init=torch.ones(3))


BAD = {
    "M zero": {"M": 0},
    "M negative": {"M": -1e5},
    "M infinite": {"M": math.inf},
    "M text": {"M": "large"},
    "M bool": {"M": True},
    "shape unknown": {"shape": "relu"},
    "shape none": {"shape": None},
    "shape unhashable": {"shape": []},
    "shape not elementwise": {"shape": torch.sum},
    "shape not a tensor": {"shape": lambda w: 1.0},
    "shape fails": {"shape": lambda w: w @ torch.ones(2)},
    "binary unknown": {"binary": "ramp"},
    "binary not binary": {"binary": torch.sigmoid},
    "init unknown": {"init": "zeros"},
    "init none": {"init": None},
    "init_value nan": {"init_value": math.nan},
    "init_value of random": {"init": "random", "init_value": 0.0},
}


@pytest.mark.parametrize("options", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("make", [GateSpec, lambda **options: TrainableGate(3, **options)], ids=["spec", "gate"])
def test_bad_options_are_refused(make: Callable, options: dict) -> None:
    with pytest.raises(InputError) as caught:
        make(**options)
    assert caught.value.found is not None


@pytest.mark.parametrize("size", [0, -1, 2.0, "3", None, True])
def test_bad_sizes_are_refused(size: object) -> None:
    with pytest.raises(InputError, match="at least 1"):
        TrainableGate(size)


@pytest.mark.parametrize(
    "init",
    [
        torch.ones(2),
        torch.ones(3, 1),
        torch.ones(3, dtype=torch.int64),
        torch.full((3,), math.nan),
        torch.tensor,
    ],
    ids=["length", "rank", "integer", "nan", "callable"],
)
def test_bad_initial_weights_are_refused(init: object) -> None:
    with pytest.raises(InputError, match="init"):
        TrainableGate(3, init=init)
