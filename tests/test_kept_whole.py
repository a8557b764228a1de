"""What is not cut: outputs, what the user names, and what is not understood."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.coupling import IMAGE, Net, conv
from tests.support.random_models import BLOCKS, DIMS, EXTENT, Block


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


@pytest.mark.parametrize(
    "move",
    [
        lambda y: y.as_strided(y.shape, y.stride()),
        lambda y: y.as_strided((8, 8), (1, 8)),
        lambda y: y.as_strided_((8, 8), (1, 8)),
    ],
    ids=["stays", "turned", "turned in place"],
)
def test_what_is_addressed_by_strides_is_kept(move: Callable) -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(move(self.first(x))).relu())

    gated = tgfx.transform(Strided(), torch.randn(8, 4))
    assert list(gated.gates) == ["middle"]
