"""Channel shuffles as a whole: what is recognised, and exact cuts of networks made of them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tgfx.ir.facts import Shuffle


class ShuffleNetUnit(nn.Module):
    """ShuffleNet (the first): grouped 1x1, shuffle, depthwise, grouped 1x1, added or concatenated."""

    def __init__(self, c_in: int, c_out: int, groups: int, stride: int) -> None:
        super().__init__()
        self.groups, self.stride = groups, stride
        inner, rest = c_out // 2, c_out - c_in if stride > 1 else c_out
        self.squeeze = nn.Conv2d(c_in, inner, 1, groups=groups, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.expand = nn.Conv2d(inner, rest, 1, groups=groups, bias=False)
        self.norm3 = nn.BatchNorm2d(rest)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.squeeze(x)))
        b, c, h, w = y.size()
        y = y.view(b, self.groups, c // self.groups, h, w)
        y = torch.transpose(y, 1, 2).contiguous().view(b, -1, h, w)
        y = self.norm3(self.expand(self.norm2(self.depthwise(y))))
        return F.relu(torch.cat((F.avg_pool2d(x, 3, 2, 1), y), 1) if self.stride > 1 else x + y)


def shuffle_net(groups: int = 3) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, 2, 1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        ShuffleNetUnit(12, 36, groups, 2),
        ShuffleNetUnit(36, 36, groups, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(36, 5),
    )
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)
    return net.double().eval()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", [2, 3])
def test_first_shufflenet_is_cut_exactly(groups: int, seed: int) -> None:
    gated = tgfx.transform(shuffle_net(groups), torch.randn(1, 3, 16, 16, dtype=torch.float64)).eval()
    assert [len(s.order) for s in gated.facts.channels.shuffles] == [18, 18]
    dice = torch.Generator().manual_seed(seed)
    for gate in gated.gates.values():
        opened = torch.rand(gate.weight.shape, generator=dice) > 0.5
        opened[int(torch.randint(len(opened), (), generator=dice))] = True
        gate.set_open_(opened)
    compact = tgfx.shrink(gated)
    for shape in ((1, 3, 16, 16), (3, 3, 9, 20)):
        x = torch.randn(shape, generator=dice, dtype=torch.float64)
        torch.testing.assert_close(compact(x), gated(x), rtol=1e-9, atol=1e-11)


class Moved(nn.Module):
    """What `move` does to the channels between two layers."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.move = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1), nn.Conv2d(4, 2, 1), move

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.move(self.a(x))))


def found_in(move: Callable[[Tensor], Tensor]) -> tuple[Shuffle, ...]:
    return tgfx.transform(Moved(move).double(), torch.randn(2, 3, 4, 4, dtype=torch.float64)).facts.channels.shuffles


def test_look_up_exports_and_is_not_saved() -> None:
    net = Moved(lambda y: y.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2)).double().eval()
    gated = tgfx.transform(net, torch.randn(1, 3, 8, 8, dtype=torch.float64)).eval()
    gated.gates["a"].set_open_(torch.tensor([True, False, True, True, True, False]))
    compact = tgfx.shrink(gated)
    assert [node.op for node in compact.graph.nodes if node.target is torch.index_select] == ["call_function"]
    assert list(compact.state_dict()) == list(net.state_dict())
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    exported = torch.export.export(compact, (x,)).module()
    torch.testing.assert_close(exported(x), gated(x), rtol=1e-9, atol=1e-11)


def test_another_axis_that_is_split_on_the_way() -> None:
    """Columns have channels too here, and are taken apart and put together while the rows' are shuffled."""

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.wide, self.narrow, self.b = (
                nn.Conv2d(3, 6, 1),
                nn.Linear(4, 6),
                nn.Linear(6, 2),
                nn.Conv2d(6, 2, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            y = self.wide(self.a(x)).unflatten(-1, (2, 3)).unflatten(1, (2, 3))
            return self.b(self.narrow(y.transpose(1, 2).flatten(1, 2).flatten(-2)))

    gated = tgfx.transform(Grid().double(), torch.randn(2, 3, 4, 4, dtype=torch.float64)).eval()
    assert {name: gate.weight.numel() for name, gate in gated.gates.items()} == {"a": 6, "wide": 6}
    x = torch.randn(3, 3, 5, 4, dtype=torch.float64)
    for closed in ({"wide": [1]}, {"a": [4]}, {"a": [0, 3, 4], "wide": [1, 2, 3]}):
        for name, gate in gated.gates.items():
            gate.set_open_(~torch.isin(torch.arange(6), torch.tensor(closed.get(name, []))))
        torch.testing.assert_close(tgfx.shrink(gated)(x), gated(x), rtol=1e-9, atol=1e-11)


def test_order_and_axis() -> None:
    (shuffle,) = found_in(lambda y: y.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2))
    assert (shuffle.axis, shuffle.order) == (1, (0, 3, 1, 4, 2, 5))
    assert len(shuffle.nodes) == 3 and shuffle.inside == frozenset(shuffle.nodes[:-1])


def test_the_whole_chain_counts() -> None:
    """There and back is no shuffle, once more is."""

    def twice(y: Tensor) -> Tensor:
        return y.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2)

    def back(y: Tensor) -> Tensor:
        return y.unflatten(1, (3, 2)).transpose(1, 2).flatten(1, 2)

    (shuffle,) = found_in(lambda y: twice(back(twice(y))))
    assert shuffle.order == (0, 3, 1, 4, 2, 5) and len(shuffle.nodes) == 9


def test_pixels_that_move_are_no_shuffle() -> None:
    assert found_in(lambda y: y.flatten(2).transpose(1, 2).reshape(y.shape)) == ()
    assert found_in(lambda y: y.transpose(2, 3)) == ()


def test_changed_in_between_is_no_shuffle() -> None:
    """The copy was taken before the input changed: a look-up at the end would see the change."""

    def forward(y: Tensor) -> Tensor:
        copied = y.unflatten(1, (2, 3)).transpose(1, 2).contiguous()
        y.relu_()
        return copied.flatten(1, 2) + y

    assert found_in(forward) == ()
