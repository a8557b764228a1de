"""A program is the same if it makes the same calls on the same tensors; numbers are computed only where it is not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import tgfx
from tests.support.random_models import build, cases
from tgfx import transforming
from tgfx.capture import Reference, prepare
from tgfx.errors import NothingToGateError, VerificationError
from tgfx.ir import hollow
from tgfx.ir.kept_state import KeptState
from tgfx.ir.rehearsal import Rehearsal, RehearsalEndedError

aten = torch.ops.aten


class Net(nn.Module):
    """Two layers of one shape, in-place and out-of-place activations, a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = (nn.Conv2d(i, 8, 3, padding=1) for i in (3, 8, 8))
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        y = self.two(torch.tanh(self.one(x)))
        return self.head((x + y).mean((2, 3)))


def _node(graph: fx.Graph, target: object) -> fx.Node:
    return next(n for n in graph.nodes if n.target == target)


def _swap_layers(graph: fx.Graph) -> None:
    one, two = _node(graph, "one"), _node(graph, "two")
    one.target, two.target = two.target, one.target


def _drop_activation(graph: fx.Graph) -> None:
    node = _node(graph, torch.tanh)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def _drop_in_place(graph: fx.Graph) -> None:
    node = _node(graph, "relu")
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def _write_to_output(graph: fx.Graph) -> None:
    head = _node(graph, "head")
    with graph.inserting_after(head):
        graph.call_function(operator.iadd, (head, 1.0))


def _write_between(graph: fx.Graph) -> None:
    two = _node(graph, "two")
    with graph.inserting_after(two):
        graph.call_method("mul_", (two, 2.0))


def _write_unseen(graph: fx.Graph) -> None:
    two = _node(graph, "two")
    with graph.inserting_after(two):
        data = graph.call_function(getattr, (two, "data"))
    with graph.inserting_after(data):
        graph.call_method("mul_", (data, 2.0))


def _leave_out_branch(graph: fx.Graph) -> None:
    add = _node(graph, operator.add)
    add.args = (add.args[0], add.args[0])


@pytest.mark.parametrize(
    "spoil",
    [
        _swap_layers, _drop_activation, _drop_in_place, _write_to_output, _write_between, _write_unseen,
        _leave_out_branch,
    ],
)  # fmt: skip
@pytest.mark.parametrize("rehearse", [True, False])
def test_wrong_graphs_are_found_out(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[fx.Graph], None], rehearse: bool
) -> None:
    def wrongly_captured(*args: object) -> object:
        source = tgfx.capture.capture(*args)
        spoil(source.module.graph)
        source.module.graph.lint()
        source.module.recompile()
        return source

    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(1, 3, 32, 32)
    monkeypatch.setattr(transforming, "prepare", partial(prepare, rehearse=rehearse))
    tgfx.transform(model, x)
    monkeypatch.setattr(transforming, "capture", wrongly_captured)
    with pytest.raises(VerificationError, match="does not compute what the model does"):
        tgfx.transform(model, x)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that had to be computed."""
    seen: list[str] = []
    compute = Reference.compute

    def noted(self: Reference) -> None:
        seen.append(type(self.model).__name__)
        compute(self)

    monkeypatch.setattr(Reference, "compute", noted)
    return seen


def test_nothing_is_computed_where_the_calls_are_the_same(computed: list[str]) -> None:
    tgfx.transform(Net().eval(), torch.randn(1, 3, 32, 32))
    assert computed == []


class Looks(nn.Module):
    """Takes its way, or its places, from numbers that a large layer gives."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.zero, self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 4, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(self.zero(x))
        if self.how == "choice":
            return self.two(torch.where(y > 0, y, y * 0.5))
        if self.how == "places":
            return self.two(y).gather(1, self.two(y).argsort(1))
        return self.two(y.index_select(1, y.abs().sum((0, 2, 3)).topk(16).indices.sort().values))


@pytest.mark.parametrize("how", ["choice", "places", "topk"])
def test_whatever_looks_at_numbers_is_computed(how: str, computed: list[str]) -> None:
    torch.manual_seed(0)
    model, x = Looks(how).eval(), torch.randn(2, 3, 24, 24)
    gated = tgfx.transform(model, x)
    assert computed == ["Looks"]
    assert torch.allclose(gated.eval()(x), model(x), atol=1e-6)


class Counting(nn.Module):
    """Writes to a buffer and to its input, even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 3)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        y = self.one(x)
        self.seen.add_(y.mean((0, 2, 3)))
        return self.two(y + self.seen[:, None, None])


@pytest.mark.parametrize("rehearse", [True, False])
def test_state_and_example_are_as_before(monkeypatch: pytest.MonkeyPatch, rehearse: bool) -> None:
    monkeypatch.setattr(transforming, "prepare", partial(prepare, rehearse=rehearse))
    torch.manual_seed(0)
    model, x = Counting().eval(), torch.randn(2, 3, 24, 24)
    before = x.clone()
    gated = tgfx.transform(model, x).eval()
    assert torch.equal(x, before)
    assert torch.equal(model.seen, torch.zeros(16))
    assert torch.equal(gated.seen, torch.zeros(16))
    with torch.no_grad():
        assert torch.allclose(gated(x.clone()), model(x.clone()), atol=1e-6)
        assert torch.equal(gated.seen, model.seen)


# -- the calls --------------------------------------------------------------------------------------------------


def rehearsed(run: Callable[[], Any]) -> tuple[Rehearsal, Any]:
    rehearsal = Rehearsal()
    with torch.no_grad(), rehearsal.recording(KeptState(())):
        return rehearsal, run()


class _Second(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self.rehearsal = rehearsal

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.rehearsal.call(func, args, kwargs or {})


def repeats(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> bool:
    rehearsal, result = rehearsed(first)
    try:
        with torch.no_grad(), _Second(rehearsal):
            again = second()
    except RehearsalEndedError:
        return False
    return rehearsal.ends_with([result], [again])


X, W, V = torch.randn(1, 8, 32, 32), torch.randn(8, 8, 3, 3), torch.randn(8, 8, 3, 3)


def program(
    weights: tuple[Tensor, Tensor] = (W, V), slope: float = 0.1, order: bool = True, more: bool = False
) -> Tensor:
    y = F.conv2d(X, weights[0], padding=1)
    z = F.conv2d(X, weights[1], padding=1)
    y = F.leaky_relu_(y, slope)
    result = torch.add(y, z) if order else torch.add(z, y)
    if more:
        y.zero_()
    return result


@pytest.mark.parametrize(
    "other",
    [
        lambda: program((V, W)),
        lambda: program((W, W)),
        lambda: program((W, V.clone())),
        lambda: program(slope=0.2),
        lambda: program(order=False),
        lambda: program(more=True),
        lambda: program().relu(),
        lambda: program().flatten(),
        lambda: torch.zeros(1, 8, 32, 32),
    ],
    ids=["swapped", "one twice", "a copy", "number", "order", "more", "other end", "other size", "else"],
)
def test_any_difference_ends_it(other: Callable[[], Tensor]) -> None:
    assert repeats(program, program)
    assert not repeats(program, other)
    assert not repeats(other, program)


def test_views_are_no_calls() -> None:
    assert repeats(program, lambda: program().unsqueeze(0).squeeze(0))
    assert repeats(lambda: program().view(1, 8, -1).view(1, 8, 32, 32), program)
    assert not repeats(lambda: program().transpose(2, 3), program)


# -- hollow results ---------------------------------------------------------------------------------------------


def like(real: Any, made: Any) -> bool:
    real, made = ((t,) if isinstance(t, Tensor) else t for t in (real, made))
    return [(t.shape, t.stride(), t.dtype) for t in real] == [(t.shape, t.stride(), t.dtype) for t in made]


@settings(max_examples=80, deadline=None)
@given(
    axes=st.integers(1, 3), size=st.integers(5, 9), kernel=st.integers(1, 3), stride=st.integers(1, 3),
    padding=st.integers(0, 2), dilation=st.integers(1, 2), groups=st.sampled_from([1, 2, 4]), batch=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_hollow_convolutions(axes, size, kernel, stride, padding, dilation, groups, batch, dtype) -> None:
    x = torch.randn(batch, 4, *[size] * axes, dtype=dtype)
    weight = torch.randn(8, 4 // groups, *[kernel] * axes, dtype=dtype)
    args = (x, weight, None, [stride] * axes, [padding] * axes, [dilation] * axes, False, [0] * axes, groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hollow, "LEAST_PRODUCTS", 0)
        made = hollow.product(aten.convolution.default, args)
    assert made is not None
    assert like(aten.convolution.default(*args), made)


A, B, C = torch.randn(2, 6, 5), torch.randn(2, 5, 7), torch.randn(2, 6, 7)
Q = torch.randn(2, 3, 4, 8)
MAP = torch.randn(2, 4, 6, 6)


@pytest.mark.parametrize(
    ("func", "args"),
    [(aten.mm.default, (A[0], B[0])), (aten.addmm.default, (C[0, 0], A[0], B[0])), (aten.bmm.default, (A, B)),
     (aten.mm.default, (A[0], B[0].t().contiguous().t())), (aten.baddbmm.default, (C, A, B))],
)  # fmt: skip
def test_hollow_products(monkeypatch: pytest.MonkeyPatch, func: Any, args: tuple) -> None:
    monkeypatch.setattr(hollow, "LEAST_PRODUCTS", 0)
    assert like(func(*args), hollow.product(func, args))


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.native_batch_norm.default, (MAP, None, None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5)),
        (aten.native_layer_norm.default, (MAP, [6, 6], None, None, 1e-5)),
        (aten._softmax.default, (MAP, 1, False)),
        (aten.clone.default, (MAP,)),
        (aten.cat.default, ([MAP, MAP[:1]],)),
        (aten.cat.default, ([MAP, MAP], 1)),
        (aten.cat.default, ([MAP, MAP], -1)),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, Q, Q)),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q.transpose(1, 2),) * 3),
        (aten.avg_pool2d.default, (MAP, [3, 3], [2, 2], [1, 1], True)),
        (aten.max_pool2d_with_indices.default, (MAP, [3, 3], [2, 2], [1, 1])),
        (aten.upsample_bilinear2d.default, (MAP, [12, 9], False)),
        (aten.upsample_nearest2d.default, (MAP, [12, 9])),
        (aten.hardswish.default, (MAP,)),
        (aten.relu.default, (MAP,)),
        (aten.gelu.default, (MAP,)),
        (aten.add.Tensor, (MAP, MAP)),
        (aten.mul.Tensor, (MAP, torch.randn(4, 1, 1))),
        (aten.mul.Tensor, (torch.randn(2, 4, 1, 1), MAP)),
        (aten.mul.Tensor, (MAP, torch.randn(2, 4, 6, 6, dtype=torch.float64))),
        (aten.add.Tensor, (MAP, 1)),
        (aten.gt.Scalar, (MAP, 0)),
        (aten.isnan.default, (MAP,)),
        (aten.where.self, (MAP > 0, MAP, MAP)),
    ],
    ids=lambda value: value._schema.name if hasattr(value, "_schema") else "",
)
def test_hollow_results(monkeypatch: pytest.MonkeyPatch, func: Any, args: tuple) -> None:
    monkeypatch.setattr(hollow, "LEAST_NUMBERS", 0)
    made = hollow.passed_on(func, args, {})
    assert made is not None
    assert like(func(*args), made)


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_the_analysis_is_the_same(case) -> None:
    """With and without numbers: groups, members, reasons and costs."""
    model, example = build(case), case.example()
    found = []
    for rehearse in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transforming, "prepare", partial(prepare, rehearse=rehearse))
            patch.setattr(hollow, "LEAST_PRODUCTS", 0)
            patch.setattr(hollow, "LEAST_NUMBERS", 0)
            try:
                gated = tgfx.transform(model, example)
            except NothingToGateError as error:
                found.append(str(error))
                continue
        found.append([
            [(g.name, g.size, g.members, str(g.frozen)) for g in gated.groups],
            *(str(gated.cost_expr(kind)) for kind in ("flops", "params", "channels")),
        ])  # fmt: skip
    assert found[0] == found[1]
