"""What is tied to what: attention, norms and what else works on tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.coupling import TOKENS, conv, groups, linear, members
from tests.support.random_models import Case, build


def attention(mix, heads: int = 2, kv: int | None = None):
    kv = kv or heads

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = m.a(x)
        b, n = x.shape[0], x.shape[1]
        q = m.q(x).view(b, n, heads, -1).transpose(1, 2)
        k, v = m.k(x).view(b, n, kv, -1).transpose(1, 2), m.v(x).view(b, n, kv, -1).transpose(1, 2)
        return m.out(m.proj(mix(q, k, v).transpose(1, 2).reshape(b, n, -1)) + x)

    wide = 16 // heads * kv
    layers = dict(a=linear(5, 8), q=linear(8, 16), k=linear(8, wide), v=linear(8, wide), proj=linear(16, 8))
    return groups(run, TOKENS, **layers, out=linear(8, 2))


STREAM = members("a.weight[0]", "q.weight[1]", "k.weight[1]", "v.weight[1]", "proj.weight[0]", "out.weight[1]")
MIXES = {
    "sdpa": F.scaled_dot_product_attention,
    "matmul": lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) / 4, -1) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhns,bhsd->bhnd", torch.einsum("bhnd,bhsd->bhns", q, k).softmax(-1), v),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_attention(mix) -> None:
    """Stream, query with key, value with projection: each for itself, equal places of both heads together."""
    assert attention(mix) == {
        STREAM: 8,
        members("q.weight[0]", "k.weight[0]"): 8,
        members("v.weight[0]", "proj.weight[1]"): 8,
    }


GROUPED = {
    "enable_gqa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    "repeat": lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)),
}


@pytest.mark.parametrize("mix", GROUPED.values(), ids=GROUPED)
def test_grouped_query_attention(mix) -> None:
    assert attention(mix, heads=4, kv=2) == {
        STREAM: 8,
        members("q.weight[0]", "k.weight[0]"): 4,
        members("v.weight[0]", "proj.weight[1]"): 4,
    }


@pytest.mark.parametrize("how", ["permute", "chunk"])
def test_fused_qkv(how: str) -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        y = m.qkv(x)
        if how == "permute":
            q, k, v = y.reshape(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = y.chunk(3, -1)
            q, k, v = (parts[i].view(b, n, 2, 4).transpose(1, 2) for i in range(3))
        y = F.scaled_dot_product_attention(q, k, v)
        return m.out(y.transpose(1, 2).reshape(b, n, 8))

    found = groups(run, TOKENS, qkv=linear(5, 24), out=linear(8, 2))
    if how == "permute":  # one view of all three: what is left of q, k and v must be equally long
        assert found == {members("qkv.weight[0]", "out.weight[1]"): 4}
    else:  # one weight, two groups: its query and key rows, and its value rows with the reader
        assert found == {members("qkv.weight[0]"): 4, members("qkv.weight[0]", "out.weight[1]"): 4}


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_attention(batch_first: bool) -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = m.a(x)
        return m.out(x + m.mha(x, x, x, need_weights=False)[0])

    mha = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    found = groups(run, TOKENS, a=linear(5, 8), mha=mha, out=linear(8, 2))
    rows = ("mha.in_proj_weight[0]", "mha.in_proj_bias[0]")
    made = ("a.weight[0]", "mha.out_proj.weight[0]", "mha.out_proj.bias[0]")
    assert found == {
        members(*made, "mha.in_proj_weight[1]", "out.weight[1]"): 8,
        members(*rows): 4,
        members(*rows, "mha.out_proj.weight[1]"): 4,
    }


def test_windowed_attention_with_a_relative_position_table() -> None:
    case = Case("image", (("WindowAttention", {"shift": True, "table": "index"}),), "pool")
    gated = tgfx.transform(build(case), case.example())
    (stream,) = [g for g in gated.facts.coupling.groups if "stem.weight[0]" in map(str, g.members)]
    assert stream.size == 8
    assert {
        "blocks.0.norm.weight[0]",
        "blocks.0.qkv.weight[1]",
        "blocks.0.proj.weight[0]",
        "head.last.weight[1]",
    } <= set(map(str, stream.members))
    (inner,) = [g for g in gated.facts.coupling.groups if "blocks.0.qkv.weight[0]" in map(str, g.members)]
    assert inner.size == 4
    assert "blocks.0.proj.weight[1]" in map(str, inner.members)


# -- norms and the rest ------------------------------------------------------------------------------------

NORMS = {
    "layer": (nn.LayerNorm(8), {"norm.weight[0]", "norm.bias[0]"}, 8),
    "rms": (nn.RMSNorm(8), {"norm.weight[0]"}, 8),
    "plain": (nn.LayerNorm(8, elementwise_affine=False), set(), 8),
}


@pytest.mark.parametrize(("norm", "own", "size"), NORMS.values(), ids=NORMS)
def test_norms_over_channels_leave_them_prunable(norm: nn.Module, own: set[str], size: int) -> None:
    found = groups(lambda m, x: m.b(m.norm(m.a(x))), TOKENS, a=linear(5, 8), norm=norm, b=linear(8, 2))
    assert found == {members("a.weight[0]", "b.weight[1]", *own): size}


# groups of GroupNorm -> atoms of 8 channels: equal positions of every group, or whole groups
@pytest.mark.parametrize(("count", "atoms"), [(1, 8), (2, 4), (4, 4), (8, 8)])
def test_group_norm(count: int, atoms: int) -> None:
    norm = nn.GroupNorm(count, 8)
    found = groups(lambda m, x: m.b(m.norm(m.a(x))), a=conv(3, 8), norm=norm, b=conv(8, 2))
    assert found == {members("a.weight[0]", "norm.weight[0]", "norm.bias[0]", "b.weight[1]"): atoms}


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm(affine: bool) -> None:
    norm = nn.InstanceNorm2d(8, affine=affine)
    found = groups(lambda m, x: m.b(m.norm(m.a(x))), a=conv(3, 8), norm=norm, b=conv(8, 2))
    own = ("norm.weight[0]", "norm.bias[0]") if affine else ()
    assert found == {members("a.weight[0]", "b.weight[1]", *own): 8}


GLUS = {
    "glu": lambda y: F.glu(y, 1),
    "chunk": lambda y: y.chunk(2, 1)[0] * torch.sigmoid(y.chunk(2, 1)[1]),
    "slice": lambda y: y[:, :8] * F.silu(y[:, 8:]),
}


@pytest.mark.parametrize("glu", GLUS.values(), ids=GLUS)
def test_glu_ties_its_halves(glu) -> None:
    found = groups(lambda m, x: m.b(glu(m.a(x))), a=conv(3, 16), b=conv(8, 2))
    assert found == {members("a.weight[0]", "b.weight[1]"): 8}


def test_embedding_positions_and_class_token_share_the_stream() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = m.emb(x)
        x = torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1) + m.places
        return m.out((x + m.gamma * m.fc(x))[:, 0])

    shapes = {"token": (1, 1, 8), "places": (1, 7, 8), "gamma": (8,)}
    own = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    ids = torch.zeros(2, 6, dtype=torch.long)
    found = groups(run, ids, emb=nn.Embedding(11, 8), fc=linear(8, 8), out=linear(8, 2), **own)
    stream = (
        "emb.weight[1]",
        "token[2]",
        "places[2]",
        "gamma[0]",
        "fc.weight[0]",
        "fc.weight[1]",
        "out.weight[1]",
    )
    assert found == {members(*stream): 8}


def test_token_mixing_has_channels_along_the_tokens() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = m.a(x)
        return m.out(x + m.t2(F.gelu(m.t1(x.transpose(1, 2)))).transpose(1, 2))

    found = groups(run, TOKENS, a=linear(5, 8), t1=linear(6, 12), t2=linear(12, 6), out=linear(8, 2))
    assert found == {members("a.weight[0]", "out.weight[1]"): 8, members("t1.weight[0]", "t2.weight[1]"): 12}
