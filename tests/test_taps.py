"""Gates over taps: which entries of its window a convolution reads of each channel."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import tgfx
from tests.support import promises
from tests.support.residual_gates import check_cut, open_gates_change_nothing, set_gates
from tests.support.residual_models import BLOCKS, ResidualCase
from tgfx.errors import GranularityError

TAPPED = [name for name in BLOCKS if "attention" not in name and name not in ("inverted", "twice")]
CASES = [ResidualCase((name, "post")) for name in BLOCKS]
GRANULARITIES = ["tap", ("tap", "connection"), ("tap", "layer")]


@dataclass(frozen=True)
class Convolutions:
    """Three convolutions of any make, one after the other."""

    space: int
    options: tuple[dict[str, Any], ...]
    seed: int = 0
    size: int = 9
    blocks: tuple = ()
    activation: type[nn.Module] = nn.Sigmoid  # which makes something of zero
    widths: tuple[int, ...] = field(default=(2, 5, 4, 3))

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[self.space]
        layers: list[nn.Module] = []
        for index, options in enumerate(self.options):
            layers += [kind(self.widths[index], self.widths[index + 1], **options), self.activation()]
        return nn.Sequential(*layers[:-1]).double()

    def example(self, batch: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(batch, self.widths[0], *[self.size] * self.space, generator=generator, dtype=torch.float64)


@st.composite
def convolutions(draw: st.DrawFn) -> Convolutions:
    def layer() -> dict[str, Any]:
        kernel, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        padding: Any = draw(st.integers(0, 2))
        stride = draw(st.integers(1, 2))
        if stride == 1 and draw(st.booleans()):
            padding = draw(st.sampled_from(["same", "valid"]))
        return {
            "kernel_size": kernel, "dilation": dilation, "padding": padding, "stride": stride,
            "bias": draw(st.booleans()),
        }  # fmt: skip

    first = {**layer(), "kernel_size": 3, "padding": 1, "stride": 1}
    second = {**layer(), "padding": 2, "stride": draw(st.integers(1, 2))}
    return Convolutions(draw(st.sampled_from([1, 2, 2, 3])), (first, second, {**second, "bias": draw(st.booleans())}))


@settings(max_examples=60)
@given(convolutions(), st.integers(0, 1000), st.sampled_from([0.0, 0.2, 0.5, 0.9]))
def test_any_convolution(case: Convolutions, seed: int, density: float) -> None:
    gated = tgfx.transform(case.build(), case.example(), granularity="tap").eval()
    promises.identical_in_eval(case, case.build().eval(), gated)  # type: ignore[arg-type]
    set_gates(gated, seed, density)
    check_cut(case, gated)  # type: ignore[arg-type]
    promises.marginal_is_the_slope(gated)


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=3),
    st.sampled_from(GRANULARITIES),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.3, 0.7]),
)
def test_any_gates_on_any_chain(names: list[str], granularity: Any, seed: int, density: float) -> None:
    case = ResidualCase(tuple(names), seed)
    gated = tgfx.transform(case.build(), case.example(), granularity=granularity).eval()
    set_gates(gated, seed, density)
    check_cut(case, gated)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_open_gates_change_nothing(granularity: Any) -> None:
    open_gates_change_nothing(ResidualCase(tuple(TAPPED)), granularity)


@pytest.mark.parametrize("case", CASES, ids=sorted(BLOCKS))
def test_dead_taps_count_for_nothing(case: ResidualCase) -> None:
    """Whatever stands in their place in the weights."""
    gated = tgfx.transform(case.build(), case.example(), granularity="tap").eval()
    set_gates(gated, 3)
    assert promises.dead_count_for_nothing(case, gated) > 0


def test_every_entry_of_the_window_decides_for_itself() -> None:
    case = ResidualCase(("post",))
    gated = tgfx.transform(case.build(), case.example(), granularity="tap").eval()
    taps = {group.name: group for group in gated.groups if group.kind == "tap"}
    assert {name: group.size for name, group in taps.items()} == {
        "stem.taps": 27, "blocks.0.conv1.taps": 8 * 9, "blocks.0.conv2.taps": 6 * 9,
    }  # fmt: skip
    mask = torch.ones(6, 3, 3, dtype=torch.bool)
    mask[2, 0, 1] = mask[4, 2, 2] = False
    gated.gates["blocks.0.conv2.taps"].set_open_(mask.reshape(-1))
    weight = gated.get_submodule("blocks.0.conv2").weight
    plain = case.build().eval()
    with torch.no_grad():
        plain.get_submodule("blocks.0.conv2").weight.copy_(weight.where(mask, 0))
        x = case.example(3)
        promises.assert_close(gated(x), plain(x), promises.EXACT, "as with zeros in the weight")
    compact = tgfx.shrink(gated)
    left = compact.get_submodule("blocks.0.conv2")
    assert (left.in_channels, left.kernel_size, tuple(left.weight.shape)) == (52, (1, 1), (8, 52, 1, 1))
    assert "54 taps, 52 open" in gated.explain("blocks.0.conv2.taps")
    assert "members: blocks.0.conv2.weight[taps]" in gated.explain("blocks.0.conv2.taps")


def test_channels_that_are_not_read_leave_an_ordinary_convolution() -> None:
    case = ResidualCase(("post",))
    gated = tgfx.transform(case.build(), case.example(), granularity="tap").eval()
    mask = torch.ones(8, 3, 3, dtype=torch.bool)
    mask[[1, 5]] = False
    gated.gates["blocks.0.conv1.taps"].set_open_(mask.reshape(-1))
    compact = tgfx.shrink(gated)
    left = compact.get_submodule("blocks.0.conv1")
    assert (left.in_channels, left.kernel_size, left.padding) == (6, (3, 3), (1, 1))
    assert [node.target for node in compact.graph.nodes if node.name.startswith(("index", "pad", "cat"))] == [
        torch.index_select
    ]
    check_cut(case, gated)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_without_a_tap_gives_its_bias(bias: bool) -> None:
    case = Convolutions(2, ({"kernel_size": 3}, {"kernel_size": 3, "stride": 2, "bias": bias}, {"kernel_size": 1}))
    gated = tgfx.transform(case.build(), case.example(), granularity="tap").eval()
    gated.gates["2.taps"].set_open_(torch.zeros(45, dtype=torch.bool))
    compact = check_cut(case, gated)  # type: ignore[arg-type]
    assert [name for name, _ in compact.named_parameters() if name.startswith("2.")] == ["2.weight"] + ["2.bias"] * bias
    smaller = torch.randn(1, 2, 7, 8, dtype=torch.float64)  # another size than the example's
    with torch.no_grad():
        promises.assert_close(compact(smaller), gated(smaller), promises.EXACT, "another size")


def test_without_a_batch() -> None:
    case = Convolutions(2, ({"kernel_size": 3, "padding": 1}, {"kernel_size": 2, "stride": 2}))
    x = case.example(1)[0]
    gated = tgfx.transform(case.build(), x, granularity="tap").eval()
    set_gates(gated, 2)
    compact = tgfx.shrink(gated)
    with torch.no_grad():
        promises.assert_close(compact(x), gated(x), promises.EXACT, "without a batch")
    set_gates(gated, 2, 0.0)
    with torch.no_grad():
        promises.assert_close(tgfx.shrink(gated)(x), gated(x), promises.EXACT, "without a batch or a tap")


@pytest.mark.parametrize("name", TAPPED)
def test_compacted_on_the_way(name: str) -> None:
    """Channels go, taps stay as gates until the last cut."""
    case = ResidualCase((name, "post"))
    gated = tgfx.transform(case.build(), case.example(), granularity="tap").eval()
    set_gates(gated, 1, 0.7)
    other = copy.deepcopy(gated)
    before = sum(parameter.numel() for parameter in gated.parameters())
    tgfx.compact_(gated, patience=0)
    assert sum(parameter.numel() for parameter in gated.parameters()) < before
    generator = torch.Generator().manual_seed(2)
    for group in [group for group in gated.groups if group.kind == "tap"]:
        mask = torch.rand(group.size, generator=generator) < 0.5
        gated.gates[group.name].set_open_(mask)
        other.gates[group.name].set_open_(mask)
    with torch.no_grad():
        promises.assert_close(gated(case.example(3)), other(case.example(3)), promises.EXACT, "compacted")
    check_cut(case, gated)
    assert float(gated.cost("flops")) == float(other.cost("flops"))


def test_copies_and_plans_carry_the_gates(tmp_path: Path) -> None:
    case = ResidualCase(("projected", "shared", "hourglass"))
    gated = tgfx.transform(case.build(), case.example(), granularity=("tap", "connection")).eval()
    set_gates(gated, 5)
    compact = tgfx.shrink(gated).eval()
    x = case.example(3)
    for twin in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):
        assert torch.equal(twin(x), gated(x))
        assert torch.equal(tgfx.shrink(twin).eval()(x), compact(x))
    folder = tgfx.save_plan(gated, tmp_path / "plan")
    rebuilt = tgfx.load_plan(folder, ResidualCase(case.names, seed=9).build(), case.example()).eval()
    assert torch.equal(rebuilt(x), compact(x))


@pytest.mark.parametrize("round_to", [None, 2])
def test_a_budget_is_met(round_to: int | None) -> None:
    case = ResidualCase(("post", "pre", "post"))
    gated = tgfx.transform(case.build(), case.example(), granularity=("tap", "connection"))
    x = case.example(8)
    wanted = torch.randn_like(gated(x)).detach()
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.01))
    for _ in range(40):
        loss = (gated(x) - wanted).square().mean() + gated.budget_loss(flops=0.5, steps=40, round_to=round_to)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert 0.47 <= gated.eval().ratio("flops").item() <= 0.5
    assert any(0 < int(gated.gates[g.name].is_open().sum()) < g.size for g in gated.groups if g.kind == "tap")
    compact = check_cut(case, gated)
    if round_to is not None:  # channels are multiples, or whole; taps are no size of a layer
        tapped = [g.name.removesuffix(".taps") for g in gated.groups if g.kind == "tap"]
        assert all(compact.get_submodule(name).out_channels % round_to == 0 for name in tapped)


def test_ignored_layers_keep_their_taps() -> None:
    case = ResidualCase(("post",))
    gated = tgfx.transform(case.build(), case.example(), granularity="tap", ignore="blocks.0.conv2")
    assert {group.name for group in gated.facts.coupling.groups if group.kind == "tap"} == {
        "stem.taps", "blocks.0.conv1.taps",
    }  # fmt: skip


def test_weights_that_others_read_too_keep_their_taps() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x))) * self.c.weight.abs().mean()

    with pytest.raises(GranularityError, match="no taps to gate"):
        tgfx.transform(Tied(), torch.randn(1, 3, 8, 8), granularity="tap")


def test_models_without_windows_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4))
    with pytest.raises(GranularityError, match="no taps to gate") as caught:
        tgfx.transform(model, torch.randn(1, 3, 8, 8), granularity="tap")
    assert 'granularity="channel"' in str(caught.value)


def test_time_is_not_foretold() -> None:
    case = ResidualCase(("post",))
    gated = tgfx.transform(case.build(), case.example(), granularity="tap")
    with pytest.raises(GranularityError, match="lost taps"):
        tgfx.latency.measure(gated)


def test_nothing_can_be_written_to() -> None:
    """What a layer without a tap and a bias gives is a tensor like any other."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y[:, 0] += 1
            return self.b(y.relu_()).view(len(x), -1)

    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    gated = tgfx.transform(Written().double(), x, granularity="tap").eval()
    gated.gates["a.taps"].set_open_(torch.zeros(27, dtype=torch.bool))
    with torch.no_grad():
        promises.assert_close(tgfx.shrink(gated)(x), gated(x), promises.EXACT, "written to")
    last = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False)).double()
    gated = tgfx.transform(last, x, granularity="tap").eval()
    gated.gates["0.taps"].set_open_(torch.zeros(27, dtype=torch.bool))
    out = tgfx.shrink(gated)(x)
    out[:, 0] += 1
    assert float(out[:, 1:].abs().max()) == 0


class _Box(nn.Module):
    """Cannot be traced: it looks at numbers."""

    def __init__(self, conv: nn.Conv2d, *, own: bool) -> None:
        super().__init__()
        self.reference = [conv]
        self.conv = conv if own else nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.conv2d(x, self.reference[0].weight, None, padding=1)
        return self.conv(y) if float(y.detach().sum()) > -1e9 else y


@pytest.mark.parametrize("own", [False, True])
def test_a_weight_that_a_closed_box_reads_keeps_its_taps(own: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.box, self.head = _Box(self.a, own=own), nn.Conv2d(4, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.box(self.a(self.stem(x)).sigmoid()).sigmoid())

    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    gated = tgfx.transform(Model().double().eval(), x, granularity="tap").eval()
    tapped = {group.name for group in gated.facts.coupling.groups if group.kind == "tap"}
    assert tapped == {"stem.taps", "head.taps"}
    for name in tapped:
        gated.gates[name].set_open_(torch.arange(gated.groups[name].size) % 2 == 0)
    compact = tgfx.shrink(gated).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        found = compact(x)
    promises.assert_close(found, gated(x), promises.EXACT, "beside a closed box")
    assert float(gated.cost("flops")) * len(x) == counter.get_total_flops()


def test_settings_that_were_changed_later() -> None:
    """One number for all axes, as F.conv2d takes it; "same" with another dilation than at first."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Conv2d(4, 5, 3, padding="same"), nn.Sigmoid(), nn.Conv2d(5, 2, 3)
    ).double()
    model[0].stride, model[0].padding, model[2].dilation = 2, 1, (2, 3)  # type: ignore[assignment]
    x = torch.randn(2, 3, 17, 19, dtype=torch.float64)
    with torch.no_grad():
        expected = model.eval()(x)
    gated = tgfx.transform(model, x, granularity="tap").eval()
    with torch.no_grad():
        promises.assert_close(gated(x), expected, promises.IDENTITY, "open gates")
    for density in (0.5, 0.0):
        set_gates(gated, 4, density)
        with torch.no_grad():
            promises.assert_close(tgfx.shrink(gated)(x), gated(x), promises.EXACT, f"cut, {density}")


def test_complex_weights_have_no_taps() -> None:
    model = nn.Sequential(*(nn.Conv2d(2, 2, 3, dtype=torch.complex64) for _ in range(2)))
    with pytest.raises(GranularityError, match="no taps to gate"):
        tgfx.transform(model, torch.randn(1, 2, 8, 8, dtype=torch.complex64), granularity="tap")


@pytest.mark.parametrize("train", ["joint", "gates"])
def test_taps_stay_where_closing_them_saves_nothing(train: Any) -> None:
    """A budget in channels is met by closing channels."""
    case = ResidualCase(("post", "post"))
    gated = tgfx.transform(case.build().float(), case.example().float(), granularity="tap")
    loader = [(torch.randn(8, 3, 4, 4), torch.randint(4, (8,))) for _ in range(10)]
    tgfx.fit(
        gated, loader, nn.functional.cross_entropy, budget={"channels": 0.6}, steps=30, train=train, progress=False
    )
    assert all(bool(gated.gates[g.name].is_open().all()) for g in gated.groups if g.kind == "tap")
    assert 0.5 <= float(gated.eval().ratio("channels")) <= 0.6
