"""Example inputs that are one tensor, or share memory: each argument stays an input of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tgfx.capture import Reference
from tgfx.capture.examples import told_apart, unshared
from tgfx.ir.remembered import Remembered


class Two(nn.Module):
    """Reads two inputs, in a way that plain fx, fx with sizes, or torch.export can follow."""

    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)
        self.ask = ask

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(self.ask(self.a(x).relu() - self.b(y).relu()))


def nothing(x: Tensor) -> Tensor:
    return x


def a_size(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] == 8 else x


def a_loop(x: Tensor) -> Tensor:
    for _ in range(x.ndim):
        x = x * 2
    return x


ASKS = {"fx": nothing, "sizes": a_size, "export": a_loop}


@pytest.mark.parametrize("shared", ["same", "view", "equal"])
@pytest.mark.parametrize("ask", ASKS)
def test_both_arguments_count(ask: str, shared: str) -> None:
    model = Two(ASKS[ask]).double().eval()
    x = torch.randn(2, 4, dtype=torch.double)
    example = {"x": x, "y": {"same": x, "view": x[:], "equal": x.clone()}[shared]}
    gated = tgfx.transform(model, example).eval()
    assert gated.facts.source.front_end == ("export" if ask == "export" else "fx")
    for batch in (2, 3):
        new = {name: torch.randn(batch, 4, dtype=torch.double) for name in example}
        with torch.no_grad():
            promises.assert_close(gated(**new), model(**new), promises.IDENTITY, f"gated output, batch {batch}")
    promises.gate_at_random(gated, 0.5, 0)
    with torch.no_grad():
        promises.assert_close(tgfx.shrink(gated)(**new), gated(**new), promises.EXACT, "compact output")


def test_seq2seq_called_with_the_same_ids_twice() -> None:
    import tests.support.torchvision_ops  # noqa: F401  before transformers

    hf = pytest.importorskip("transformers", reason="transformers is an optional package")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 30}
    model = hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **sizes)).double().eval()
    ids, other = torch.randint(3, 30, (2, 2, 7))
    gated = tgfx.transform(model, {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}).eval()
    new = {"input_ids": ids, "decoder_input_ids": other, "use_cache": False}
    with torch.no_grad():
        promises.assert_close(gated(**new).logits, model(**new).logits, 1e-9, "logits")


def test_only_tensors_that_share_memory_are_copied() -> None:
    x, y = torch.randn(3), torch.randn(3, requires_grad=True)
    args, kwargs = unshared((x, [x, y]), {"z": x[1:], "n": 1})
    assert args[0] is x and args[1][1] is y and kwargs["n"] == 1
    assert args[1][0] is not x and torch.equal(args[1][0], x)
    assert torch.equal(kwargs["z"], x[1:]) and kwargs["z"].data_ptr() != x[1:].data_ptr()


def test_a_graph_that_reads_one_input_for_both_is_found_out() -> None:
    model = Two(nothing).eval()
    x = torch.randn(2, 4)

    class Wrong(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return model(a, a)

    reference = Reference(model, (x, x.clone()), {}, [], Remembered())
    assert reference.is_met_apart(model) and not reference.is_met_apart(Wrong())
    assert told_apart((x, x + 1), {}) is None
