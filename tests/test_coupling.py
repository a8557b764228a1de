"""What is tied to what: convolutions, their channels parted and joined, and weights used twice."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.coupling import IMAGE, TOKENS, Net, conv, groups, linear, members


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
