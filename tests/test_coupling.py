"""Structure: which parameter axes share a gate, how many atoms there are, and what is kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.random_models import BLOCKS, DIMS, EXTENT, Block, Case, build

IMAGE = torch.zeros(2, 3, 8, 8)
TOKENS = torch.zeros(2, 6, 5)


class Net(nn.Module):
    """Layers by name, and a forward given as a function of (layers, input)."""

    def __init__(self, forward, **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def groups(forward, x: Tensor = IMAGE, **layers) -> dict[frozenset[str], int]:
    """Members of every gated group -> its number of atoms."""
    gated = tgfx.transform(Net(forward, **layers), x)
    return {frozenset(map(str, g.members)): g.size for g in gated.groups.values() if g.frozen is None}


def members(*names: str) -> frozenset[str]:
    return frozenset(names)


def conv(c_in: int, c_out: int, kernel: int = 1, **options) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, kernel, bias=False, **options)


def linear(c_in: int, c_out: int) -> nn.Linear:
    return nn.Linear(c_in, c_out, bias=False)


# -- convolutions ------------------------------------------------------------------------------------------


def test_chain() -> None:
    """Bias and norm belong to the layer that makes the channel, and so does the reader's input axis."""
    found = groups(
        lambda m, x: m.b(torch.relu(m.norm(m.a(x)))),
        a=nn.Conv2d(3, 8, 1),
        norm=nn.BatchNorm2d(8),
        b=conv(8, 2),
    )
    assert found == {members("a.weight[0]", "a.bias[0]", "norm.weight[0]", "norm.bias[0]", "b.weight[1]"): 8}


def test_residual_add() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = m.a(x)
        return m.out(x + m.c(torch.relu(m.b(x))))

    found = groups(run, a=conv(3, 8), b=conv(8, 4), c=conv(4, 8), out=conv(8, 2))
    assert found == {
        members("a.weight[0]", "c.weight[0]", "b.weight[1]", "out.weight[1]"): 8,
        members("b.weight[0]", "c.weight[1]"): 4,
    }


def test_residual_with_projection() -> None:
    found = groups(lambda m, x: m.out(m.a(x) + m.p(x)), a=conv(3, 8), p=conv(3, 8), out=conv(8, 2))
    assert found == {members("a.weight[0]", "p.weight[0]", "out.weight[1]"): 8}


def test_concat_keeps_its_parts_apart() -> None:
    found = groups(lambda m, x: m.out(torch.cat([m.a(x), m.b(x)], 1)), a=conv(3, 8), b=conv(3, 4), out=conv(12, 2))
    assert found == {members("a.weight[0]", "out.weight[1]"): 8, members("b.weight[0]", "out.weight[1]"): 4}


def test_dense_concat_reads_each_part_everywhere() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = m.a(x)
        x = torch.cat([x, m.b(x)], 1)
        return m.out(torch.cat([x, m.c(x)], 1))

    found = groups(run, a=conv(3, 8), b=conv(8, 4), c=conv(12, 5), out=conv(17, 2))
    assert found == {
        members("a.weight[0]", "b.weight[1]", "c.weight[1]", "out.weight[1]"): 8,
        members("b.weight[0]", "c.weight[1]", "out.weight[1]"): 4,
        members("c.weight[0]", "out.weight[1]"): 5,
    }


SPLITS = {
    "split": lambda y: torch.split(y, [2, 6], 1),
    "method": lambda y: y.split((2, 6), dim=1),
    "slice": lambda y: (y[:, :2], y[:, 2:]),
    "narrow": lambda y: (y.narrow(1, 0, 2), y.narrow(1, 2, 6)),
    "tensor_split": lambda y: torch.tensor_split(y, (2,), 1),
}


@pytest.mark.parametrize("pick", [lambda y: y[:, 2:3], lambda y: y.split((2, 1, 5), 1)[1], lambda y: y.narrow(1, 2, 1)])
def test_a_channel_used_on_its_own_stays(pick) -> None:
    """As FocalNet's gates: one channel is taken out and multiplied to all others."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.out(m.b(x) * pick(y)) + m.rest(y)

    net = Net(run, a=conv(3, 8), b=conv(3, 6), out=conv(6, 2), rest=conv(8, 2))
    gated = tgfx.transform(net.double(), IMAGE.double()).eval()
    assert {name: gate.weight.numel() for name, gate in gated.gates.items()} == {"a": 7, "b": 6}
    gated.gates["a"].set_open_(torch.arange(7) == 6)
    gated.gates["b"].set_open_(torch.arange(6) < 2)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(tgfx.shrink(gated)(x), gated(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_unequal_parts_are_groups_of_their_own(split) -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        parts = split(m.a(x))
        return m.b(parts[0]) + m.c(parts[1])

    found = groups(run, a=conv(3, 8), b=conv(2, 2), c=conv(6, 2))
    assert found == {members("a.weight[0]", "b.weight[1]"): 2, members("a.weight[0]", "c.weight[1]"): 6}


def test_chunk_with_a_shorter_last_part() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        one, two, three = m.a(x).chunk(3, 1)
        return m.b(one) + m.c(two) + m.d(three)

    found = groups(run, a=conv(3, 8), b=conv(3, 2), c=conv(3, 2), d=conv(2, 2))
    assert sorted(found.values()) == [2, 3, 3]
    assert all("a.weight[0]" in own for own in found)


SHUFFLES = {
    "view": lambda m, y: y.view(-1, 2, 4, y.shape[2], y.shape[3]).transpose(1, 2).reshape(y.shape),
    "inner sizes": lambda m, y: _flattened(y.view(y.size(0), 2, 4, -1, y.size(3)).permute(0, 2, 1, 3, 4).contiguous()),
    "channels last": lambda m, y: y.movedim(1, -1).unflatten(-1, (2, 4)).swapaxes(3, 4).flatten(3).movedim(-1, 1),
    "module": lambda m, y: m.mix(y),
    "function": lambda m, y: F.channel_shuffle(y, 2),
    "layers": lambda m, y: m.together(m.apart(y).transpose(1, 2)),
}


def _flattened(y: Tensor) -> Tensor:
    return y.view(y.size(0), y.size(1) * y.size(2), y.size(3), -1)


def _shuffled_halves(shuffle, **more) -> tuple:
    """Two halves interleaved, then told apart again: even and odd places."""
    layers = {"mix": nn.ChannelShuffle(2), "apart": nn.Unflatten(1, (2, 4)), "together": nn.Flatten(1, 2)}

    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = shuffle(m, torch.cat([m.a(x), m.b(x)], 1))
        return m.even(y[:, ::2]) + m.odd(y[:, 1::2])

    return run, {"a": conv(3, 4), "b": conv(3, 4), "even": conv(4, 2), "odd": conv(4, 2), **layers, **more}


@pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES)
def test_channel_shuffle_ties_nothing(shuffle) -> None:
    run, layers = _shuffled_halves(shuffle)
    assert groups(run, **layers) == {
        members("a.weight[0]", "even.weight[1]"): 4,
        members("b.weight[0]", "odd.weight[1]"): 4,
    }


@pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES)
@pytest.mark.parametrize(("a", "b"), [((0, 2, 3), (1,)), ((1, 3), (1, 3)), ((0, 1, 2, 3), (2,))])
def test_ragged_shuffle_is_one_look_up(shuffle, a: tuple, b: tuple) -> None:
    """Any choice of survivors is cut exactly, at other sizes too; where both groups keep the same, the chain stays."""
    run, layers = _shuffled_halves(shuffle)
    gated = tgfx.transform(Net(run, **layers).double(), IMAGE.double()).eval()
    for name, kept in (("a", a), ("b", b)):
        gated.gates[name].set_open_(torch.isin(torch.arange(4), torch.tensor(kept)))
    compact = tgfx.shrink(gated)
    look_ups = [
        getattr(compact, node.args[2].target) for node in compact.graph.nodes if node.target is torch.index_select
    ]
    of_all = [index for index in look_ups if len(index) == len(a) + len(b)]  # y[:, ::2] may be one as well, of fewer
    assert len(of_all) == (a != b)
    for shape in ((2, 3, 8, 8), (3, 3, 5, 4)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(compact(x), gated(x), rtol=1e-9, atol=1e-11)


def test_shuffle_seen_by_others_stays_tied() -> None:
    """The inner value has another reader: there the groups must stay rectangular."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = m.a(x)
        apart = y.view(-1, 2, 4, y.shape[2], y.shape[3]).transpose(1, 2)
        return m.one(apart.reshape(y.shape)) + m.two(torch.sigmoid(apart).reshape(y.shape))

    found = groups(run, a=conv(3, 8), one=conv(8, 2), two=conv(8, 2))
    assert found == {members("a.weight[0]", "one.weight[1]", "two.weight[1]"): 4}


def test_movement_that_is_a_shuffle_at_one_size_only_is_none() -> None:
    """With one pixel this reorders channels; with more it mixes them with pixels."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.out(y.view(y.shape[0], 2, -1).transpose(1, 2).reshape(y.shape))

    net = Net(run, a=conv(3, 8), out=conv(8, 2))
    gated = tgfx.transform(net, torch.randn(1, 3, 1, 1))
    assert gated.facts.channels.shuffles == ()


def test_pixel_shuffle_ties_the_channels_of_one_pixel() -> None:
    found = groups(lambda m, x: m.out(m.up(m.a(x))), a=conv(3, 16), up=nn.PixelShuffle(2), out=conv(4, 2))
    assert found == {members("a.weight[0]", "out.weight[1]"): 4}


def test_pixel_unshuffle_spreads_a_channel() -> None:
    found = groups(lambda m, x: m.out(m.down(m.a(x))), a=conv(3, 4), down=nn.PixelUnshuffle(2), out=conv(16, 2))
    assert found == {members("a.weight[0]", "out.weight[1]"): 4}


def test_option_a_pads_with_channels_of_their_own() -> None:
    """The middle of the wide layer is tied to the narrow one; the padded rims are free."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = m.a(x)
        return m.out(m.wide(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4)))

    found = groups(run, a=conv(3, 8), wide=conv(8, 16, stride=2), out=conv(16, 2))
    assert found == {
        members("a.weight[0]", "wide.weight[1]", "wide.weight[0]", "out.weight[1]"): 8,
        members("wide.weight[0]", "out.weight[1]"): 8,
    }


def test_depthwise_convolution_is_transparent() -> None:
    found = groups(lambda m, x: m.out(m.dw(m.a(x))), a=conv(3, 8), dw=conv(8, 8, 3, groups=8), out=conv(8, 2))
    assert found == {members("a.weight[0]", "dw.weight[0]", "out.weight[1]"): 8}


def test_depth_multiplier() -> None:
    found = groups(lambda m, x: m.out(m.dw(m.a(x))), a=conv(3, 8), dw=conv(8, 16, 3, groups=8), out=conv(16, 2))
    assert found == {members("a.weight[0]", "dw.weight[0]", "out.weight[1]"): 8}


def test_one_input_channel_is_no_depthwise_convolution() -> None:
    found = groups(lambda m, x: m.b(m.a(x)), torch.zeros(2, 1, 8, 8), a=conv(1, 8), b=conv(8, 2))
    assert found == {members("a.weight[0]", "b.weight[1]"): 8}
    found = groups(lambda m, x: m.c(m.b(m.a(x))), a=conv(3, 1), b=conv(1, 8), c=conv(8, 2))
    assert found == {members("b.weight[0]", "c.weight[1]"): 8}


def test_few_wide_groups_lose_equal_positions() -> None:
    found = groups(lambda m, x: m.out(m.g(m.a(x))), a=conv(3, 8), g=conv(8, 12, groups=2), out=conv(12, 2))
    assert found == {members("a.weight[0]", "g.weight[1]"): 4, members("g.weight[0]", "out.weight[1]"): 6}


def test_many_narrow_groups_go_whole() -> None:
    found = groups(lambda m, x: m.out(m.g(m.a(x))), a=conv(3, 16), g=conv(16, 16, groups=8), out=conv(16, 2))
    assert found == {members("a.weight[0]", "g.weight[0]", "out.weight[1]"): 8}


def test_transposed_convolution_has_its_axes_swapped() -> None:
    up = nn.ConvTranspose2d(8, 6, 2, stride=2)
    found = groups(lambda m, x: m.out(m.up(m.a(x))), a=conv(3, 8), up=up, out=conv(6, 2))
    assert found == {
        members("a.weight[0]", "up.weight[0]"): 8,
        members("up.weight[1]", "up.bias[0]", "out.weight[1]"): 6,
    }


def test_grouped_transposed_convolution() -> None:
    up = nn.ConvTranspose2d(8, 12, 2, stride=2, groups=2)
    found = groups(lambda m, x: m.out(m.up(m.a(x))), a=conv(3, 8), up=up, out=conv(12, 2))
    assert found == {
        members("a.weight[0]", "up.weight[0]"): 4,
        members("up.weight[1]", "up.bias[0]", "out.weight[1]"): 6,
    }


@pytest.mark.parametrize(("kind", "d"), [(nn.Conv1d, 1), (nn.Conv3d, 3)])
def test_other_dimensions(kind, d: int) -> None:
    x = torch.zeros(2, 3, *(4,) * d)
    found = groups(lambda m, x: m.b(m.a(x)), x, a=kind(3, 8, 1), b=kind(8, 2, 1))
    assert found == {members("a.weight[0]", "a.bias[0]", "b.weight[1]"): 8}


def test_squeeze_excite() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = m.a(x)
        return m.out(x * torch.sigmoid(m.up(torch.relu(m.down(F.adaptive_avg_pool2d(x, 1))))))

    found = groups(run, a=conv(3, 8), down=conv(8, 4), up=conv(4, 8), out=conv(8, 2))
    assert found == {
        members("a.weight[0]", "down.weight[1]", "up.weight[0]", "out.weight[1]"): 8,
        members("down.weight[0]", "up.weight[1]"): 4,
    }


def test_flatten_repeats_a_channel_over_its_places() -> None:
    found = groups(lambda m, x: m.fc(m.a(x).flatten(1)), a=conv(3, 8), fc=linear(8 * 64, 2))
    assert found == {members("a.weight[0]", "fc.weight[1]"): 8}


# -- shared ------------------------------------------------------------------------------------------------


def test_a_module_called_twice_has_one_gate() -> None:
    found = groups(lambda m, x: m.out(m.b(torch.relu(m.b(m.a(x))))), a=conv(3, 8), b=conv(8, 8), out=conv(8, 2))
    assert found == {members("a.weight[0]", "b.weight[0]", "b.weight[1]", "out.weight[1]"): 8}


def test_a_tied_weight_has_one_gate() -> None:
    a, b = linear(5, 8), linear(5, 8)
    b.weight = a.weight
    found = groups(lambda m, x: m.out(torch.relu(m.a(x)) + m.b(x)), TOKENS, a=a, b=b, out=linear(8, 2))
    assert found == {members("a.weight[0]", "out.weight[1]"): 8}


def test_tied_embedding_and_output_layer() -> None:
    ids = torch.zeros(2, 6, dtype=torch.long)
    embedding, head = nn.Embedding(11, 8), linear(8, 11)
    head.weight = embedding.weight
    net = Net(lambda m, x: m.head(m.fc(m.emb(x))), emb=embedding, fc=nn.Linear(8, 8), head=head)
    gated = tgfx.transform(net, ids)
    found = {frozenset(map(str, g.members)): g.size for g in gated.facts.coupling.groups}
    # the columns of the table are what fc reads and what it makes: one gate for both uses
    assert found == {members("emb.weight[1]", "fc.weight[1]", "fc.weight[0]", "fc.bias[0]"): 8}
    promised = 11 * 8 + 8 * 8 + 8
    assert gated.total("params") == promised == sum(p.numel() for p in net.parameters())


# -- attention ---------------------------------------------------------------------------------------------


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


# -- kept --------------------------------------------------------------------------------------------------


def plain() -> Net:
    layers = {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(8, 6, 1), "out": nn.Conv2d(6, 2, 1)}
    return Net(lambda m, x: m.out(torch.relu(m.b(torch.relu(m.a(x))))), **layers)


def test_the_layer_that_makes_the_output_is_kept() -> None:
    gated = tgfx.transform(plain(), IMAGE)
    group = gated.groups["out"]
    assert group.size == 2 and "out" not in gated.gates
    assert "output" in group.frozen.reason
    assert {"out.weight[0]", "out.bias[0]"} <= set(map(str, group.members))


def test_all_layers_that_make_an_output_are_kept() -> None:
    def run(m: nn.Module, x: Tensor) -> dict[str, Tensor]:
        x = m.a(x)
        return {"left": m.b(x), "both": [m.c(x), {"x": x[:, :2]}]}

    gated = tgfx.transform(Net(run, a=conv(3, 8), b=conv(8, 4), c=conv(8, 5)), IMAGE)
    assert list(gated.gates) == ["a"]
    assert gated.groups["a"].size == 6  # two of the eight are put out themselves
    assert gated.groups["b"].frozen and gated.groups["c"].frozen


IGNORED = {
    "name": ("a", {"b"}),
    "glob": ("[ab]", None),
    "parameter": ("b.weight", {"a"}),
    "type": (nn.Conv2d, None),
    "list": (["b", "out"], {"a"}),
}


@pytest.mark.parametrize(("ignore", "left"), IGNORED.values(), ids=IGNORED)
def test_ignore_keeps_output_channels(ignore, left: set[str] | None) -> None:
    if left is None:
        with pytest.raises(tgfx.TgfxError, match="ignored"):
            tgfx.transform(plain(), IMAGE, ignore=ignore)
        return
    gated = tgfx.transform(plain(), IMAGE, ignore=ignore)
    assert set(gated.gates) == left
    assert any(g.frozen and "ignored" in g.frozen.reason for g in gated.groups.values())


def test_ignore_takes_a_module() -> None:
    net = plain()
    assert set(tgfx.transform(net, IMAGE, ignore=net.a).gates) == {"b"}


def test_unused_layers_are_kept() -> None:
    net = plain()
    net.spare = nn.Linear(4, 4)
    gated = tgfx.transform(net, IMAGE)
    assert not any(m.name.startswith("spare") for g in gated.facts.coupling.groups for m in g.members)
    assert tgfx.shrink(gated).spare.weight.shape == (4, 4)


def test_every_group_says_what_it_is() -> None:
    gated = tgfx.transform(plain(), IMAGE)
    for name, group in gated.groups.items():
        assert isinstance(group, tgfx.Group) and group.name == name
        assert group.size > 0 and group.members
        assert (group.frozen is None) == (name in gated.gates)
    assert {n: g.weight.numel() for n, g in gated.gates.items()} == {"a": 8, "b": 6}
    assert gated.groups["a"].op == "convolution"


def test_explain_and_report_name_the_layers() -> None:
    gated = tgfx.transform(plain(), IMAGE)
    text = gated.explain("b")
    for part in (
        "'b'",
        "'a'",
        "6 channels",
        "8 channels",
        "b.weight[0]",
        "out.weight[1]",
        "convolution",
        __file__,
    ):
        assert part in text, text
    assert "output" in gated.explain("out")
    report = str(gated.report())
    for part in ("8/8", "6/6", "kept 2", "flops", "params", "channels", "FLOPs = 2"):
        assert part in report, report


def test_blocks_are_blocks() -> None:
    """The generator's own shape book-keeping: what the random models rest on."""
    for name, blueprint in BLOCKS.items():
        for family in blueprint.families:
            for options in blueprint.variants():
                made = blueprint.make(DIMS[family], 8, EXTENT[family], **options)
                assert isinstance(made, Block), name
                d = DIMS[family]
                x = torch.randn(2, 8, *(EXTENT[family],) * d) if d else torch.randn(2, EXTENT[family], 8)
                y = made.eval()(x)
                wanted = (2, made.out, *(made.extent,) * d) if d else (2, made.extent, made.out)
                assert tuple(y.shape) == wanted, (name, family, options)


class Standardised(nn.Conv2d):
    """Weight standardisation, as in norm-free nets and BiT: each filter over its input channels and window."""

    def __init__(self, c_in: int, c_out: int, kernel: int, **options) -> None:
        super().__init__(c_in, c_out, kernel, **options)
        self.gain = nn.Parameter(torch.rand(c_out) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, self.gain, training=True, momentum=0.0, eps=1e-6)
        weight = weight.reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, padding=self.padding)


class OnlyForExport(nn.Identity):
    """Python that plain fx cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.ndim - 3):
            x = -x
        return x


@pytest.mark.parametrize(("front_end", "last"), [("fx", nn.Identity()), ("export", OnlyForExport())])
def test_standardised_weights_count_living_channels_only(front_end: str, last: nn.Module) -> None:
    filters = Standardised(3, 8, 3), nn.ReLU(), Standardised(8, 6, 3, padding=1), nn.ReLU()
    net = nn.Sequential(*filters, conv(6, 2), last).double().eval()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    gated = tgfx.transform(net, x).eval()
    assert gated.facts.source.front_end == front_end
    assert {name: gate.weight.numel() for name, gate in gated.gates.items()} == {"0": 8, "2": 6}
    torch.testing.assert_close(gated(x), net(x), rtol=1e-9, atol=1e-11)
    gated.gates["0"].set_open_(torch.arange(8) % 3 > 0)
    gated.gates["2"].set_open_(torch.arange(6) != 4)
    compact = tgfx.shrink(gated)
    assert compact.get_submodule("2").weight.shape == (5, 5, 3, 3)
    torch.testing.assert_close(compact(x), gated(x), rtol=1e-9, atol=1e-11)
