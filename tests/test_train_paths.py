"""Code that only train mode runs and plain fx cannot follow: captured in another way, kept closed, or told of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tests.support.random_models import randomised
from tests.support.stepwise import MODES, exact_cut, same_step_for_step
from tgfx.errors import CaptureError, StrictError


def _noise(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape[0], 1, 1, 1) > 0.3)


def _filled(x: Tensor) -> Tensor:
    return x * torch.zeros(x.shape[0], 1, 1, 1, dtype=x.dtype).uniform_()


def _loop(x: Tensor) -> Tensor:
    return torch.stack([x[i] * (1 + i) for i in range(x.shape[0])])


def _samples(x: Tensor) -> Tensor:
    return torch.stack([sample * sample.mean() for sample in x])


def _numbers(x: Tensor) -> Tensor:
    return x * float(2 if x.mean() > 0 else 3)


def _vmapped(x: Tensor) -> Tensor:
    return torch.vmap(lambda sample: sample * sample.mean())(x)


FREE = [_noise, _filled, _vmapped]  # exported with a batch that is free
FIXED = [_loop, _samples]


class Part(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.act = nn.Conv2d(8, 8, 1), act

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.act(x) if self.training else x)


class Own(nn.Module):
    """The model's own forward does it."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1), act

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.last(self.act(x) if self.training else x)


def _net(act: Callable[[Tensor], Tensor]) -> nn.Module:
    rest = (nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1))
    return nn.Sequential(nn.Conv2d(3, 8, 3), Part(act), *rest)


def _images(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 6, 6, dtype=torch.float64)


def _compared(model: nn.Module, batch: int = 4) -> tgfx.GatedModule:
    """Gated on a batch of four; trained beside the model itself, without a warning."""
    model = randomised(model.double()).train()
    gated = tgfx.transform(model, _images())
    same_step_for_step(copy.deepcopy(model), copy.deepcopy(gated), [_images(batch) for _ in MODES])
    return gated


def _cut_agrees(gated: tgfx.GatedModule, x: Tensor) -> None:
    """As exact_cut, of a model with a closed module in it."""
    promises.gate_at_random(gated, 0.5, 0)
    compact = tgfx.shrink(gated.eval())
    for training in (False, True):
        torch.manual_seed(0)
        expected = gated.train(training)(x)
        torch.manual_seed(0)
        found = compact.train(training)(x)
        promises.assert_close(found, expected, promises.TRAINED if not training else 1e-4, f"cut, training={training}")


@pytest.mark.parametrize("batch", [4, 3, 1])
@pytest.mark.parametrize("act", FREE)
@pytest.mark.parametrize("make", [_net, Own])
def test_train_mode_is_exported(make: Callable, act: Callable, batch: int) -> None:
    gated = _compared(make(act), batch)
    source = gated.facts.source
    assert source.front_end == "fx" and source.training is not None and source.training.front_end == "export"
    assert not source.opaque and not source.refusals
    with pytest.warns(UserWarning, match="another path in train mode"):
        exact_cut(gated, _images())


@pytest.mark.parametrize("batch", [4, 3])
@pytest.mark.parametrize("act", [*FIXED, _numbers])
def test_what_no_front_end_follows_for_every_batch_is_kept_closed(act: Callable, batch: int) -> None:
    gated = _compared(_net(act), batch)
    assert gated.facts.source.opaque == {"1"} and list(gated.gates) == ["4"]
    (refusal,) = gated.facts.source.refusals
    assert refusal.node == "1" and refusal.limit and "could not be traced in train mode" in refusal.reason
    _cut_agrees(gated, _images())
    with pytest.raises(StrictError, match="train mode"):
        tgfx.transform(_net(act).double(), _images(), strict=True)


@pytest.mark.parametrize("act", FIXED)
@pytest.mark.parametrize("alone", [False, True])
def test_a_batch_that_is_looped_over_stays_where_nothing_can_be_closed(act: Callable, alone: bool) -> None:
    """Closed, the part would leave no channels; and the model's own forward cannot be closed."""
    small = nn.Sequential(nn.Conv2d(3, 8, 3), Part(act), nn.ReLU(), nn.Conv2d(8, 2, 1))
    gated = _compared(small if alone else Own(act))
    assert gated.gates and not gated.facts.source.refusals
    with pytest.raises(AssertionError, match="transform it anew"):
        gated.train()(_images(3))
    gated.eval()(_images(3))


def test_the_eval_path_is_trained_with_a_warning_only() -> None:
    model = Own(_numbers).double().train()
    with pytest.warns(UserWarning, match="Own could not be captured in train mode .*the eval path there too") as told:
        gated = tgfx.transform(model, _images())
    assert told[0].filename == __file__
    (refusal,) = gated.facts.source.refusals
    assert refusal.limit and "the eval path is kept in both" in refusal.reason
    x = _images()
    promises.assert_close(gated.eval()(x), model.eval()(x), promises.IDENTITY, "gated output")
    with pytest.warns(UserWarning, match="train mode"), pytest.raises(StrictError, match="train mode"):
        tgfx.transform(model, x, strict=True)
    with pytest.warns(UserWarning, match="train mode"):
        tgfx.transform(model, x, granularity="weight")


class Several(nn.Module):
    """Arguments of any form, some left out, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, pair: Any, more: Any, scale: float = 2.0, mask: Tensor | None = None) -> dict[str, Any]:
        x, (y, _) = pair
        hidden = self.first(x + y * more["z"]).relu() * scale
        if mask is not None:
            hidden = hidden * mask
        if self.training:
            hidden = hidden * (torch.rand(x.shape[0], 1) > 0.5)
        return {"y": self.last(hidden), "hidden": (hidden.sum(1), None)}


def test_an_exported_train_mode_is_called_as_the_model_is() -> None:
    model = randomised(Several().double())

    def example(batch: int) -> tuple[Any, Any]:
        x, y, z = (torch.randn(batch, 4, dtype=torch.float64) for _ in range(3))
        return (x, [y, x]), {"z": z}

    pair, more = example(2)
    gated = tgfx.transform(model, {"pair": pair, "more": more})
    assert gated.facts.source.training is not None and gated.gates
    for training in (True, False):
        pair, more = example(3)
        torch.manual_seed(0)
        expected = model.train(training)(pair, more=more)
        torch.manual_seed(0)
        found = gated.train(training)(pair, more=more)
        assert list(found) == list(expected)
        promises.assert_close(found["y"], expected["y"], promises.IDENTITY, f"training={training}")
        promises.assert_close(found["hidden"][0], expected["hidden"][0], promises.IDENTITY, "the other output")
        with pytest.raises(AssertionError, match="mask"):
            gated(pair, more, mask=torch.ones(8, dtype=torch.float64))


class SkipsNoLayer(nn.Module):
    """As Hugging Face's LayerDrop with a probability of 0: an answer that torch.export does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.ndim - 1):
            x = self.first(x)
        skip = self.training and torch.rand([]) < 0.0
        if not skip:
            x = self.second(F.dropout(x, 1.0 - 1e-9, training=self.training)).relu()
        return self.last(x)


def test_a_layer_that_is_never_skipped_is_trained() -> None:
    model = randomised(SkipsNoLayer().double()).train()
    gated = tgfx.transform(model, torch.randn(2, 4, dtype=torch.float64))
    assert gated.facts.source.front_end == "export" and gated.facts.source.training is None
    assert not gated.facts.source.refusals
    x = torch.randn(3, 4, dtype=torch.float64)
    for training in (True, False):  # in train mode all is dropped, whatever is drawn
        promises.assert_close(gated.train(training)(x), model.train(training)(x), promises.IDENTITY, f"{training=}")


class Shifted(SkipsNoLayer):
    """The number that is asked about is not the one that was drawn."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand([])
        drawn -= 1
        return super().forward(-x if self.training and drawn < 0.0 else x)


def test_a_number_that_was_changed_since_is_not_known() -> None:
    with pytest.warns(UserWarning, match="Shifted could not be captured in train mode"):
        tgfx.transform(Shifted().double(), torch.randn(2, 4, dtype=torch.float64))


# -- torch.func ------------------------------------------------------------------------------------------------------


class Transformed(nn.Module):
    """`act` runs a layer under a transform of torch.func."""

    def __init__(self, act: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.layer, self.last = (
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2),
        )  # fmt: skip
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.norm(self.first(x)).tanh(), 0.5, self.training)
        return self.last(self.act(self.layer, hidden).relu())


class Inner(nn.Module):
    def __init__(self, act: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(8, 8), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer, x)


def _vmap(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(layer)(x)


def _vmap_twice(layer: nn.Module, x: Tensor) -> Tensor:
    y = torch.vmap(lambda a, b: layer(a) * b)(x, x)
    return y + torch.vmap(torch.vmap(torch.sin))(x)


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(layer, {name: 2 * p for name, p in layer.named_parameters()}, (x,))


def _jvp(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jvp(layer, (x,), (x,))[1]


def _grad(layer: nn.Module, x: Tensor) -> Tensor:
    return x * torch.func.grad(lambda y: layer(y).square().sum())(x)


@pytest.mark.parametrize("act", [_vmap, _vmap_twice, _call])
@pytest.mark.parametrize("batch", [5, 3, 1])
def test_transforms_are_written_out(act: Callable, batch: int) -> None:
    model = randomised(Transformed(act).double())
    gated = tgfx.transform(model, torch.randn(5, 4, dtype=torch.float64))
    assert gated.facts.source.front_end == "export" and gated.facts.source.training is None
    assert not gated.facts.source.refusals
    inputs = [torch.randn(max(batch, 2), 4, dtype=torch.float64) for _ in MODES]
    same_step_for_step(copy.deepcopy(model), copy.deepcopy(gated), inputs)
    x = torch.randn(batch, 4, dtype=torch.float64)
    promises.assert_close(gated.eval()(x), model.eval()(x), promises.IDENTITY, "gated output")
    exact_cut(gated, x)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning", "ignore:.*torch.jit.script.*:FutureWarning"
)
def test_jvp_is_written_out_for_the_batch_of_the_example() -> None:
    model = randomised(Transformed(_jvp).double())
    gated = tgfx.transform(model, torch.randn(5, 4, dtype=torch.float64))
    same_step_for_step(
        copy.deepcopy(model), copy.deepcopy(gated), [torch.randn(5, 4, dtype=torch.float64) for _ in MODES]
    )
    with pytest.raises(AssertionError, match="transform it anew"):
        gated(torch.randn(3, 4, dtype=torch.float64))


def test_a_module_that_takes_gradients_is_kept_closed() -> None:
    rest = (nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    model = randomised(nn.Sequential(nn.Linear(4, 8), Inner(_grad), *rest).double())
    gated = tgfx.transform(model, torch.randn(5, 4, dtype=torch.float64))
    assert gated.facts.source.opaque == {"1"} and list(gated.gates) == ["3"]
    inputs = [torch.randn(3, 4, dtype=torch.float64) for _ in MODES]
    same_step_for_step(copy.deepcopy(model), copy.deepcopy(gated), inputs)
    _cut_agrees(gated, inputs[0])


def test_a_model_that_takes_gradients_is_told_what_to_do() -> None:
    with pytest.raises(CaptureError, match="into a submodule"):
        tgfx.transform(Transformed(_grad).double(), torch.randn(5, 4, dtype=torch.float64))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
