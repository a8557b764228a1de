"""Gates on attention heads: found however attention is written, gated as a whole, really removed."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tgfx
from tests.support.attention import LENGTH, Model, Variant
from tests.support.head_promises import EXACT, close_some, keep_promises
from tests.support.promises import assert_close, marginal_is_the_slope
from tgfx.errors import BudgetError, EmptyGroupError, GranularityError, NothingToGateError, PlanError
from tgfx.granularity import parse
from tgfx.plan import PLAN

X = torch.randn(2, LENGTH, 5, generator=torch.Generator().manual_seed(0))
WIDE = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# -- hand-written attention --------------------------------------------------------------------------------


@st.composite
def variants(draw: st.DrawFn) -> Variant:
    heads = draw(st.sampled_from([2, 3, 4, 6]))
    position = draw(st.sampled_from(["none", "table", "slopes", "rotary"]))
    layout = draw(st.sampled_from(["separate", "fused", "by head", "conv"]))
    own = layout in ("fused", "by head")
    key_heads = heads if own else draw(st.sampled_from([n for n in range(2, heads + 1) if heads % n == 0] + [1]))
    product = draw(st.sampled_from(["sdpa", "matmul", "bmm", "einsum", "einsum length first"]))
    return Variant(
        heads=heads,
        size=draw(st.sampled_from([2, 4] if position == "rotary" else [1, 2, 3])),
        key_heads=key_heads,
        layout=layout,
        product=product,
        position=position,
        norm=draw(st.sampled_from(["none", "layer", "rms", "l2 with scale"])),
        repeat=draw(st.sampled_from(["expand", "interleave", *(["gqa flag"] if product == "sdpa" else [])])),
        causal=draw(st.booleans()),
        bias=draw(st.booleans()),
    )


@settings(max_examples=15, deadline=None)
@given(variant=variants(), both=st.booleans(), seed=st.integers(0, 99))
def test_any_way_to_write_attention(variant: Variant, both: bool, seed: int) -> None:
    # heads of one channel that share a key head are told apart by nothing but an expanded axis of size 1: all are kept
    assume(variant.size > 1 or variant.key_heads in (1, variant.heads))
    torch.manual_seed(seed)
    granularity = ("channel", "head") if both else "head"
    gated, _ = keep_promises(Model(variant), X, X[:1], torch.cat([X, X]), granularity=granularity, seed=seed)
    groups = [g for g in gated.facts.coupling.groups if g.kind == "head"]
    assert [g.name for g in groups] == ["blocks.0", "blocks.1"]
    # a key head goes with all queries that it serves; a single one serves all and stays
    size = variant.heads if variant.key_heads == 1 else variant.key_heads
    assert [g.size for g in groups] == [size, size]
    assert gated.total("heads") == 2 * variant.heads
    opened = sum(gated.gates[g.name].open_count() for g in groups)
    assert float(gated.cost("heads")) == opened * variant.heads // size
    assert both == any(g.kind == "channel" for g in gated.facts.coupling.groups)


class TalkingHeads(nn.Module):
    """Heads are mixed before and after the softmax: they are channels of those layers, no heads of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.before, self.after, self.out = (nn.Linear(*n) for n in ((24, 72), (4, 4), (4, 4), (24, 24)))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, 6).permute(2, 0, 3, 1, 4).unbind(0)
        scores = self.before((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1))
        weights = self.after(scores.permute(0, 3, 1, 2).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


class ChannelAttention(nn.Module):
    """softmax over the channels of each head, as in XCiT."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": nn.Linear(24, 72), "proj": nn.Linear(24, 24)})
        self.temperature = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.attn["qkv"](x).reshape(b, n, 3, 4, 6).permute(2, 0, 3, 4, 1).unbind(0)
        weights = (nn.functional.normalize(q, dim=-1) @ k.transpose(-2, -1) * self.temperature).softmax(-1)
        return self.attn["proj"]((weights @ v).permute(0, 3, 1, 2).reshape(b, n, c))


class AddedProjections(nn.Module):
    """q is a sum (LoRA), and a table along the head size is multiplied in before the heads meet."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.up = nn.Linear(24, 24), nn.Linear(24, 2, bias=False), nn.Linear(2, 24, bias=False)
        self.kv, self.out = nn.Linear(24, 48), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q = (self.up(self.down(x)) + self.q(x)).view(b, n, 4, 6).transpose(1, 2)
        k, v = self.kv(x).view(b, n, 2, 4, 6).permute(2, 0, 3, 1, 4).unbind(0)
        angles = torch.arange(7.0, dtype=x.dtype)[:, None] * torch.arange(6.0, dtype=x.dtype)
        mixed = nn.functional.scaled_dot_product_attention(q * angles.cos(), k * angles.sin(), v)
        return self.out(mixed.transpose(1, 2).reshape(b, n, c))


@pytest.mark.parametrize("kind", [ChannelAttention, AddedProjections])
def test_unusual_attention(kind: type[nn.Module]) -> None:
    gated, _ = keep_promises(kind(), WIDE, torch.cat([WIDE, WIDE]))
    assert gated.total("heads") == 4


def test_mixed_heads_are_channels() -> None:
    with pytest.raises(NothingToGateError, match="no attention heads"):
        tgfx.transform(TalkingHeads(), WIDE, granularity="head")
    gated = tgfx.transform(TalkingHeads(), WIDE, granularity=("channel", "head"))
    assert {g.kind for g in gated.facts.coupling.groups} == {"channel"}


# -- torch -------------------------------------------------------------------------------------------------

CAUSAL = torch.triu(torch.full((7, 7), float("-inf")), 1)
PADDING = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
PLAIN = {"batch_first": True}


class Attending(nn.Module):
    """nn.MultiheadAttention, called the given way, and a layer after it."""

    def __init__(self, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.self_attn, self.out = nn.MultiheadAttention(24, 4, **arguments), nn.Linear(24, 3)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, padding: Any = None) -> Tensor:
        if self.self_attn._qkv_same_embed_dim:
            key = value = query
        return self.out(self.self_attn(query, key, value, attn_mask=mask, key_padding_mask=padding, **self.options)[0])


TORCH_CALLS = {
    "self": (PLAIN, {}, {}),
    "length first": ({}, {}, {}),
    "fused": (PLAIN, {"need_weights": False}, {}),
    "no bias, dropout": ({**PLAIN, "bias": False, "dropout": 0.1}, {}, {}),
    "mask": (PLAIN, {}, {"mask": CAUSAL}),
    "mask, fused": (PLAIN, {"need_weights": False}, {"mask": CAUSAL}),
    "padding": (PLAIN, {}, {"padding": PADDING}),
    "padding, fused": (PLAIN, {"need_weights": False}, {"padding": PADDING, "mask": CAUSAL < 0}),
    "added key": ({**PLAIN, "add_bias_kv": True}, {}, {}),
    "added zero": ({**PLAIN, "add_zero_attn": True}, {}, {}),
}


@pytest.mark.parametrize(("arguments", "options", "masks"), TORCH_CALLS.values(), ids=TORCH_CALLS)
def test_multihead_attention(arguments: dict, options: dict, masks: dict) -> None:
    example = {"query": WIDE, "key": WIDE, "value": WIDE, **masks}
    gated, compact = keep_promises(Attending(arguments, options), example)
    assert [(g.name, g.size) for g in gated.facts.coupling.groups] == [("self_attn", 4)]
    opened = gated.gates["self_attn"].open_count()
    assert compact.self_attn.in_proj_weight.shape == (3 * 6 * opened, 24)
    assert compact.self_attn.out_proj.weight.shape == (24, 6 * opened)


def test_cross_attention_of_other_widths() -> None:
    def example(batch: int, rows: int, columns: int) -> dict[str, Tensor]:
        return {
            "query": torch.randn(batch, rows, 24),
            "key": torch.randn(batch, columns, 10),
            "value": torch.randn(batch, columns, 14),
        }

    model = Attending({**PLAIN, "kdim": 10, "vdim": 14}, {})
    gated, compact = keep_promises(model, example(2, 7, 5), example(3, 4, 9))
    opened = 6 * gated.gates["self_attn"].open_count()
    assert compact.self_attn.k_proj_weight.shape == (opened, 10)
    assert compact.self_attn.v_proj_weight.shape == (opened, 14)


def test_masks_of_their_own_for_each_head_keep_heads() -> None:
    example = {"query": WIDE, "key": WIDE, "value": WIDE, "mask": torch.randn(8, 7, 7)}
    with pytest.raises(NothingToGateError, match="no attention heads"):
        tgfx.transform(Attending(PLAIN, {}), example, granularity="head")


def test_encoder_has_no_way_around_the_gates() -> None:
    layer = nn.TransformerEncoderLayer(24, 4, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    gated, _ = keep_promises(model, WIDE, torch.randn(3, 4, 24))
    assert [g.name for g in gated.facts.coupling.groups] == ["layers.0.self_attn", "layers.1.self_attn"]


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
def test_transformer_layers(norm_first: bool) -> None:
    options = {"batch_first": True, "norm_first": norm_first}
    keep_promises(nn.TransformerEncoderLayer(24, 4, 16, **options), WIDE, torch.randn(3, 4, 24))
    decoder = nn.TransformerDecoderLayer(24, 4, 16, **options)
    gated, _ = keep_promises(decoder, (WIDE, WIDE[:, :5]), (torch.randn(3, 4, 24), torch.randn(3, 9, 24)))
    assert [g.name for g in gated.facts.coupling.groups] == ["self_attn", "multihead_attn"]


# -- the rest of the library -------------------------------------------------------------------------------


def _gated(granularity: Any = "head", **options: Any) -> tgfx.GatedModule:
    torch.manual_seed(0)
    return tgfx.transform(Model(Variant(**options)).double(), X.double(), granularity=granularity).eval()


def test_only_heads_are_gated() -> None:
    gated = _gated()
    assert list(gated.gates) == ["blocks.0", "blocks.1"]
    assert {g.kind for g in gated.facts.coupling.groups} == {"head"}
    assert "only heads are gated" in str(gated.groups["stem"].frozen)
    assert "4 heads" in gated.explain("blocks.0.q")
    text = str(gated.report())
    assert "2 gates over 8 heads" in text
    assert "heads: 8 of 8" in text


def test_heads_and_channels() -> None:
    gated = _gated(("channel", "head"))
    assert {g.name: g.kind for g in gated.facts.coupling.groups} == {
        "stem": "channel",
        "blocks.0": "head",
        "blocks.1": "head",
    }
    assert "gates over 12 channels, 8 heads" in str(gated.report())


def test_price_of_heads() -> None:
    gated = _gated()
    close_some(gated)
    opened = sum(gate.open_count() for gate in gated.gates.values())
    assert float(gated.cost("heads")) == opened
    assert str(gated.cost_expr("heads")) == "n[blocks.0] + n[blocks.1]"
    assert gated.cheapest("heads") == 2 / 8
    marginal_is_the_slope(gated, ("heads", "flops", "flops_all", "params"))


def test_gates_learn_from_task_and_budget() -> None:
    gated = _gated().train()
    loss = gated(X.double()).square().mean() + gated.budget_loss(heads=0.5)
    gradients = torch.autograd.grad(loss, [gate.weight for gate in gated.gates.values()])
    assert all(bool(gradient.all()) for gradient in gradients)


def test_no_heads_no_price() -> None:
    for granularity, options in (("channel", {}), (("channel", "head"), {"heads": 1, "key_heads": 1})):
        gated = _gated(granularity, **options)
        for ask in (gated.cost, gated.total, gated.ratio, gated.cost_expr, gated.marginal, gated.cheapest):
            with pytest.raises(BudgetError, match="heads are not gated"):
                ask("heads")
        with pytest.raises(BudgetError, match="heads are not gated"):
            gated.budget_loss(heads=0.5)


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)), Model(Variant(heads=1, key_heads=1))]
)
def test_nothing_to_gate(model: nn.Module) -> None:
    with pytest.raises(NothingToGateError, match="has no attention heads that can be gated"):
        tgfx.transform(model, X, granularity="head")


def test_ignored_attention_keeps_its_heads() -> None:
    torch.manual_seed(0)
    gated = tgfx.transform(Model(Variant()), X, granularity="head", ignore="blocks.0")
    assert list(gated.gates) == ["blocks.1"]
    assert gated.total("heads") == 8  # kept ones count too


def test_an_attention_without_heads_goes_with_its_add() -> None:
    gated = _gated(bias=False)
    gated.gates["blocks.0"].set_open_(torch.zeros(4, dtype=torch.bool))
    compact = tgfx.shrink(gated).eval()
    assert not any(name.startswith("blocks.0") for name, _ in compact.named_parameters())
    with torch.no_grad():
        assert_close(compact(X.double()), gated(X.double()), EXACT, "without the first attention")
    assert float(gated.cost("params")) == sum(p.numel() for p in compact.parameters())
    assert float(gated.cost("heads")) == 4


def test_a_bias_left_behind_is_an_error() -> None:
    gated = _gated()
    gated.gates["blocks.0"].set_open_(torch.zeros(4, dtype=torch.bool))
    with pytest.raises(EmptyGroupError, match="all 4 gates of group"):
        tgfx.shrink(gated)


def test_copies_keep_their_heads() -> None:
    gated = _gated()
    close_some(gated)
    for twin in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):
        assert float(twin.cost("heads")) == float(gated.cost("heads"))
        assert torch.equal(tgfx.shrink(twin).eval()(X.double()), tgfx.shrink(gated).eval()(X.double()))


@pytest.mark.parametrize("granularity", ["head", ("head", "channel")], ids=str)
def test_plan(granularity: Any, tmp_path: Path) -> None:
    gated = _gated(granularity, position="table")
    close_some(gated)
    folder = tgfx.save_plan(gated, tmp_path / "plan")
    fresh = Model(Variant(position="table")).double()
    rebuilt = tgfx.load_plan(folder, fresh, X.double()).eval()
    assert torch.equal(rebuilt(X.double()), tgfx.shrink(gated).eval()(X.double()))
    saved = json.loads((folder / PLAN).read_text())
    assert saved["granularity"] == sorted(parse(granularity))
    with pytest.raises(PlanError, match="another architecture"):
        tgfx.load_plan(folder, nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)), X)


def test_plans_of_the_first_format_are_read(tmp_path: Path) -> None:
    gated = _gated("channel")
    close_some(gated)
    folder = tgfx.save_plan(gated, tmp_path / "plan")
    old = json.loads((folder / PLAN).read_text())
    del old["granularity"]
    (folder / PLAN).write_text(json.dumps(old | {"format": 1}))
    rebuilt = tgfx.load_plan(folder, Model(Variant()).double(), X.double()).eval()
    assert torch.equal(rebuilt(X.double()), tgfx.shrink(gated).eval()(X.double()))
    (folder / PLAN).write_text(json.dumps(old | {"granularity": ["hat"]}))
    with pytest.raises(PlanError, match="granularity"):
        tgfx.load_plan(folder, Model(Variant()).double(), X.double())


@pytest.mark.parametrize("wrong", ["heads", (), ("head", "hat"), ("weight", "head"), 3, None], ids=repr)
def test_unknown_granularities(wrong: Any) -> None:
    with pytest.raises(GranularityError) as caught:
        parse(wrong)
    assert caught.value.found == repr(wrong)


def test_known_granularities() -> None:
    assert parse("head") == {"head"}
    assert parse(["channel", "head"]) == parse({"head", "channel"}) == {"channel", "head"}
