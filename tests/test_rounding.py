"""round_to: the layers' sizes are multiples, after compact_ too, and of heads the rows are counted."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tgfx
from tests.support.attention import LENGTH, Model, Variant
from tgfx.rounding import rows_per_gate

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def gated_at(counts: tuple[int, int], sizes: tuple[int, int] = (32, 32)) -> tgfx.GatedModule:
    """Two hidden layers of these sizes, with so many of their channels open."""
    torch.manual_seed(0)
    first, second = sizes
    model = nn.Sequential(nn.Linear(6, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 3))
    gated = tgfx.transform(model.double(), X.double()).eval()
    for gate, count in zip(gated.gates.values(), counts, strict=True):
        order = torch.randperm(len(gate.weight))
        with torch.no_grad():
            gate.weight.copy_((count - 0.5 - order).double())
        assert gate.open_count() == count
    return gated


def hidden(model: nn.Module) -> list[int]:
    return [layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)][:-1]


def test_after_compaction_what_it_left_is_no_multiple() -> None:
    gated = gated_at((27, 27))
    tgfx.compact_(gated, patience=0)
    with pytest.warns(UserWarning, match="round_to=8: .* so 24 instead of 27 of '0', 24 instead of 27 of '2' stay"):
        compact = tgfx.shrink(gated, round_to=8)
    assert hidden(compact) == [24, 24]
    finished = tgfx.finish(gated, params=0.8, round_to=8)
    assert hidden(finished.model) == [24, 24]
    assert finished.after["params"] == sum(p.numel() for p in finished.model.parameters())


def test_where_no_multiple_is_left_all_stays_and_shrink_says_so() -> None:
    gated = gated_at((5, 32))
    tgfx.compact_(gated, patience=0)
    with pytest.warns(UserWarning, match="round_to=8: .* so 5 of '0' stay"):
        assert hidden(tgfx.shrink(gated, round_to=8)) == [5, 32]


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(2, 20), st.integers(2, 20)),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.integers(1, 9),
)
def test_sizes_are_multiples_or_whole(
    sizes: tuple[int, int], left: tuple[float, float], opened: tuple[float, float], multiple: int
) -> None:
    """`left`: the share that compact_ leaves; `opened`: what is open of that afterwards."""
    counts = tuple(max(1, round(share * size)) for share, size in zip(left, sizes, strict=True))
    gated = gated_at(counts, sizes)  # type: ignore[arg-type]
    tgfx.compact_(gated, patience=0)
    for gate, share in zip(gated.gates.values(), opened, strict=True):
        gate.set_open_(torch.arange(len(gate.weight)) < max(1, round(share * len(gate.weight))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shrunk = tgfx.shrink(gated, round_to=multiple)
    whole = gated.ratio("params").item()
    for found in (hidden(shrunk), hidden(tgfx.finish(gated, params=1.0, round_to=multiple).model)):
        for size, there, original in zip(found, counts, sizes, strict=True):
            assert size % multiple == 0 or size == original or (size == there < multiple)
    assert whole <= 1


class Attention(nn.Module):
    """4 heads of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def test_of_heads_the_rows_are_counted() -> None:
    torch.manual_seed(0)
    gated = tgfx.transform(Attention(), torch.randn(2, 5, 32), granularity="head").eval()
    (gate,) = gated.gates.values()
    gate.set_open_(torch.tensor([True, False, True, False]))
    compact = tgfx.shrink(gated, round_to=8)
    assert compact.get_parameter("attention.out_proj.weight").shape == (32, 16)
    finished = tgfx.finish(gated, heads=0.5, round_to=8)
    assert finished.after["heads"] == 2 and finished.moved == 0
    assert tgfx.finish(gated, heads=0.5, round_to=16).after["heads"] == 2  # 2 heads are 16 rows
    assert tgfx.shrink(gated, round_to=32).get_parameter("attention.out_proj.weight").shape == (32, 32)


@pytest.mark.parametrize("layout", ["separate", "fused", "by head", "conv"])
@pytest.mark.parametrize("position", ["none", "table"])
def test_rows_of_a_head_however_it_is_written(layout: str, position: str) -> None:
    variant = Variant(heads=4, size=3, layout=layout, position=position)
    gated = tgfx.transform(Model(variant), torch.randn(2, LENGTH, 5), granularity="head")
    assert {rows_per_gate(gated.facts, group) for group in gated.facts.coupling.groups} == {3}


def test_fewer_key_heads_go_with_their_queries() -> None:
    variant = Variant(heads=4, size=3, key_heads=2)
    gated = tgfx.transform(Model(variant), torch.randn(2, LENGTH, 5), granularity="head")
    assert {rows_per_gate(gated.facts, g) for g in gated.facts.coupling.groups if g.kind == "head"} == {3}
