"""Webs of Concat, Gather and Split between convolutions: the same numbers, without look-ups."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from torch import Tensor, nn

import tgfx
from tests.support.head_promises import close_some
from tgfx.onnx_export.look_ups import fold_look_ups
from tgfx.onnx_export.routes import straighten_routes


class Unit(nn.Module):
    """ShuffleNetV2's: one half waits, the other is computed, then both are shuffled."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.first, self.depthwise = nn.Conv2d(half, half, 1), nn.Conv2d(half, half, 3, padding=1, groups=half)
        self.last = nn.Conv2d(half, half, 1)

    def forward(self, x: Tensor) -> Tensor:
        wait, work = x.chunk(2, 1)
        y = torch.cat((wait, F.relu(self.last(self.depthwise(F.relu(self.first(work)))))), 1)
        n, c, h, w = y.shape
        return y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class Net(nn.Module):
    def __init__(self, shown: bool = False) -> None:
        super().__init__()
        self.stem, self.units = nn.Conv2d(3, 16, 3), nn.ModuleList(Unit(16) for _ in range(4))
        self.left, self.right, self.head = nn.Conv2d(16, 6, 1), nn.Conv2d(16, 6, 3, padding=1), nn.Linear(16, 5)
        self.shown = shown

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.stem(x))
        for unit in self.units:
            y = unit(y)
        answer = self.left(y) + self.right(F.relu(y)), self.head(y.mean((2, 3)))
        return (*answer, y.sum(1)) if self.shown else answer


def ops(model: Any) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def test_a_cut_stack_of_shuffles_has_no_look_up(tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = torch.randn(1, 3, 9, 9)
    gated = tgfx.transform(Net().eval(), example).eval()
    close_some(gated)
    raw = tgfx.export_onnx(gated, tmp_path / "raw.onnx", simplify=False, measure=False)
    report = tgfx.export_onnx(gated, tmp_path / "net.onnx", measure=False)
    assert raw.ops["Gather"] >= 3, "the test is blind: the cut left rectangles"
    assert report.simplified_by == "onnxsim" and not {"Gather", "Transpose"} & set(report.ops)
    x = torch.randn(3, 3, 9, 9)
    found = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(None, {"x": x.numpy()})
    for ours, theirs in zip(gated(x), found, strict=True):
        assert np.abs(ours.detach().numpy() - theirs).max() < 1e-5


def test_where_an_order_shows_the_look_ups_stay(tmp_path: Path) -> None:
    """A sum over channels reads the shuffled value too: its order is not this rewrite's to choose."""
    torch.manual_seed(0)
    gated = tgfx.transform(Net(shown=True).eval(), torch.randn(1, 3, 9, 9)).eval()
    close_some(gated)
    report = tgfx.export_onnx(gated, tmp_path / "net.onnx", measure=False)
    assert report.simplified_by == "onnxsim" and report.ops["Gather"] >= 1


class Web:
    """A random graph: convolutions make values, moves carry them about, convolutions read them."""

    def __init__(self, seed: int) -> None:
        self.dice = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.values: dict[str, int] = {}  # name -> channels
        for _ in range(self.dice.integers(1, 4)):
            made = self.convolution("x", 3)
            self.values[made] = self.values.pop(made)
        self.read: set[str] = set()
        for _ in range(self.dice.integers(2, 7)):
            self.move()
        ends = [name for name in self.values if name not in self.read]
        self.ends = [self.reader(name) for name in ends]

    def name(self) -> str:
        return f"v{len(self.nodes)}_{len(self.weights)}"

    def constant(self, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, f"w{len(self.weights)}"))
        return str(self.weights[-1].name)

    def convolution(self, source: str, channels: int, groups: int = 1) -> str:
        rows = int(self.dice.integers(2, 7)) if groups == 1 else groups
        kernel = self.dice.standard_normal((rows, channels // groups, 1, 1)).astype(np.float32)
        given = [source, self.constant(kernel), self.constant(self.dice.standard_normal(rows).astype(np.float32))]
        out = self.name()
        self.nodes.append(helper.make_node("Conv", given, [out], group=groups))
        self.nodes.append(helper.make_node("Relu", [out], [out + "r"]))
        self.values[out + "r"] = rows
        return out + "r"

    def move(self) -> None:
        kind = self.dice.choice(["Concat", "Gather", "Split", "Slice"])
        source = str(self.dice.choice(list(self.values)))
        channels, out = self.values[source], self.name()
        if channels == 1 and kind in ("Split", "Slice"):
            return
        self.read.add(source)
        if kind == "Concat":
            others = [str(name) for name in self.dice.permutation([n for n in self.values if n != source])[:1]]
            self.read.update(others)
            self.nodes.append(helper.make_node("Concat", [source, *others], [out], axis=1))
            self.values[out] = sum(self.values[name] for name in (source, *others))
        elif kind == "Gather":
            order = self.dice.permutation(channels)[: self.dice.integers(1, channels + 1)]
            self.nodes.append(helper.make_node("Gather", [source, self.constant(order)], [out], axis=1))
            self.values[out] = len(order)
        else:
            cut = int(self.dice.integers(1, channels))
            if kind == "Split":
                sizes = self.constant(np.array([cut, channels - cut]))
                self.nodes.append(helper.make_node("Split", [source, sizes], [out + "a", out + "b"], axis=1))
                self.values |= {out + "a": cut, out + "b": channels - cut}
            else:
                bounds = [self.constant(np.array([bound])) for bound in (0, cut, 1)]
                self.nodes.append(helper.make_node("Slice", [source, *bounds], [out]))
                self.values[out] = cut

    def reader(self, source: str) -> str:
        channels = self.values[source]
        if self.dice.random() < 0.3:
            source = self.convolution(source, channels, channels)  # channel by channel
        return self.convolution(source, self.values[source])

    def model(self) -> Any:
        shape = ["batch", 3, 4, 4]
        x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
        ends = [
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", self.values[name], 4, 4])
            for name in self.ends
        ]
        graph = helper.make_graph(self.nodes, "web", [x], ends, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_random_webs_compute_the_same(seed: int) -> None:
    web = Web(seed)
    before, after = web.model(), web.model()
    fold_look_ups(straighten_routes(after))
    onnx.checker.check_model(after, full_check=True)
    x = np.random.default_rng(seed).standard_normal((2, 3, 4, 4)).astype(np.float32)
    ours, theirs = (
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x}) for model in (before, after)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert np.abs(a - b).max() <= 1e-4 * max(1.0, np.abs(a).max())
    assert ops(after)["Gather"] <= ops(before)["Gather"]


def test_random_webs_lose_their_look_ups() -> None:
    """So that the test above is not one of a rewrite that never happens."""
    webs = [Web(seed).model() for seed in range(60)]
    before = sum(ops(model)["Gather"] for model in webs)
    after = sum(ops(fold_look_ups(straighten_routes(model)))["Gather"] for model in webs)
    assert before > 60 and after < 0.3 * before
