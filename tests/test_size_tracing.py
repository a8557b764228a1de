"""Models that ask for sizes: traced by fx with the example's answers, which are checked in every call."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tgfx


class Asks(nn.Module):
    """Two convolutions with a question in between."""

    def __init__(self, ask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.ask(self.first(x)))


def pads_odd_sizes(x: torch.Tensor) -> torch.Tensor:
    if x.shape[2] % 2:
        x = nn.functional.pad(x, (0, 0, 0, 1))
    return x.relu()


def unpacks_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    sizes = [size for size in x.shape]
    return x.reshape(*sizes[:2], sizes[2] * sizes[3]).unflatten(2, (sizes[2], sizes[3]))


def asks_for_the_rank(x: torch.Tensor) -> torch.Tensor:
    return x.relu() if len(x.shape) == 4 else x


def writes_into_a_mask(x: torch.Tensor) -> torch.Tensor:
    mask = x.new_zeros((x.shape[2], x.shape[3]))
    if x.shape[2] > 2:
        mask[: x.shape[2] // 2, :] = 1
        mask[-1, 0] = 3
    return x * mask


def pads_to_a_stride(x: torch.Tensor) -> torch.Tensor:
    short = max(math.ceil(x.shape[2] / 4) * 4 - x.shape[2], 0)
    return nn.functional.pad(x, (0, 0, 0, short))[:, :, : round(x.shape[2] * 1.0)]


def asks_for_channels(x: torch.Tensor) -> torch.Tensor:
    return x.relu() if x.shape[1] > 5 else x.sigmoid()


def asks_for_the_type(x: torch.Tensor) -> torch.Tensor:
    return x.relu() if x.dtype == torch.float32 or x.dtype == torch.float64 else x


def asks_where_it_is(x: torch.Tensor) -> torch.Tensor:
    return x.relu() if not x.is_cuda and x.device.type != "mps" else x


QUESTIONS = [
    pads_odd_sizes, unpacks_in_a_loop, asks_for_the_rank, writes_into_a_mask, pads_to_a_stride,
    asks_for_channels, asks_for_the_type,
    asks_where_it_is,
]  # fmt: skip


def half_closed(gated: tgfx.GatedModule) -> tgfx.GatedModule:
    with torch.no_grad():
        for gate in gated.gates.values():
            gate.weight[::2] = -1
    return gated


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("ask", QUESTIONS)
def test_followed_by_fx_and_cut_exactly_at_any_batch(ask: Callable, batch: int) -> None:
    model = Asks(ask).double().eval()
    gated = tgfx.transform(model, torch.randn(batch, 3, 6, 6, dtype=torch.double))
    assert gated.facts.source.front_end == "fx"
    assert len(gated.gates) == 1
    for other in (1, 2, 5):
        x = torch.randn(other, 3, 6, 6, dtype=torch.double)
        torch.testing.assert_close(gated.eval()(x), model(x), rtol=1e-12, atol=1e-12)
    compact = tgfx.shrink(half_closed(gated)).eval()
    assert compact.second.in_channels == 4
    for other in (1, 2, 5):
        x = torch.randn(other, 3, 6, 6, dtype=torch.double)
        torch.testing.assert_close(compact(x), gated.eval()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shrunk", [False, True])
def test_sizes_with_the_same_answer_are_free_and_others_an_error(shrunk: bool) -> None:
    model = Asks(pads_odd_sizes).eval()
    gated = tgfx.transform(model, torch.randn(1, 3, 6, 6)).eval()
    run = tgfx.shrink(gated).eval() if shrunk else gated
    x = torch.randn(2, 3, 10, 7)
    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError, match=r"test_size_tracing.py:\d+, which was False"):
        run(torch.randn(2, 3, 7, 6))


def test_the_batch_is_never_fixed_by_a_question() -> None:
    def asks_for_the_batch(x: torch.Tensor) -> torch.Tensor:
        return x.relu() if x.shape[0] == 1 else x.sigmoid()

    model = Asks(asks_for_the_batch).eval()
    try:
        gated = tgfx.transform(model, torch.randn(1, 3, 6, 6)).eval()
    except tgfx.TgfxError:
        return  # refusing is right too
    for batch in (1, 2, 3):
        x = torch.randn(batch, 3, 6, 6)
        try:
            found = gated(x)
        except Exception:
            continue  # so is an error
        torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-6)


def test_answers_that_depend_on_numbers_are_not_baked_in() -> None:
    class Decides(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu() if x.mean() > 0 else -x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.decides, self.second = nn.Conv2d(3, 8, 3), Decides(), nn.Conv2d(8, 8, 3)
            self.third = nn.Conv2d(8, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.decides(self.first(x))).relu())

    model = Model().eval()
    gated = tgfx.transform(model, torch.randn(2, 3, 8, 8)).eval()
    for scale in (-9, 9):
        x = torch.randn(2, 3, 8, 8) + scale
        torch.testing.assert_close(gated(x), model(x), rtol=1e-5, atol=1e-5)


def test_train_and_eval_have_their_own_answers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x))
            if x.shape[-1] % 2 == 0:
                x = nn.functional.dropout(x, 0.5, self.training)
            return self.second(x)

    model = Model()
    gated = tgfx.transform(model, torch.randn(2, 3, 8, 8))
    gated.train(), model.train()
    x = torch.randn(4, 3, 8, 8)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(gated(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gated.norm.running_mean, model.norm.running_mean, rtol=1e-6, atol=1e-7)
    gated.eval(), model.eval()
    torch.testing.assert_close(gated(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_false_assertion_of_the_model_still_fails() -> None:
    def asserts(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[2] == 6, "six rows only"
        return x

    gated = tgfx.transform(Asks(asserts).eval(), torch.randn(1, 3, 6, 6)).eval()
    with pytest.raises(AssertionError):
        gated(torch.randn(1, 3, 8, 6))


def test_attempts_that_fail_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    class SkipsALayer(nn.Module):
        """Traced by torch.export in eval mode, and by nothing in train mode."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(x.ndim - 1):
                x = self.first(x)
            if self.training and torch.rand([]) < 0.5:
                return self.third(x)
            return self.third(self.second(x).relu())

    model = SkipsALayer().eval()
    with pytest.warns(UserWarning, match="could not be captured in train mode"):  # and nothing but that
        gated = tgfx.transform(model, torch.randn(2, 4)).eval()
    x = torch.randn(3, 4)
    torch.testing.assert_close(gated(x), model(x), rtol=1e-6, atol=1e-6)
    out, err = capfd.readouterr()
    assert out == "" and err == ""
