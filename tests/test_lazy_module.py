"""A lazily written GraphModule runs, reads and is inspected like an eager one, from the first moment."""

from __future__ import annotations

import copy
import inspect
import pickle

import torch
from torch import fx, nn

import tgfx
from tgfx.ir.lazy_module import LazyGraphModule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 4, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(image).relu())


X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def gated() -> tuple[nn.Module, tgfx.GatedModule]:
    torch.manual_seed(0)
    model = Net().eval()
    return model, tgfx.transform(model, X)


def lazy() -> LazyGraphModule:
    traced = fx.symbolic_trace(Net())
    for node in traced.graph.nodes:
        node.type = None  # annotations as strings cannot be pickled by fx
    return LazyGraphModule(traced, traced.graph)


def test_written_on_first_use_only() -> None:
    module = lazy()
    assert "forward" not in type(module).__dict__
    module(X)
    assert "forward" in type(module).__dict__


def test_signature_and_code_before_the_first_call() -> None:
    assert list(inspect.signature(gated()[1].forward).parameters) == ["image"]
    assert list(inspect.signature(type(gated()[1]).forward).parameters) in (["image"], ["self", "image"])
    assert "def forward" in gated()[1].code
    assert "def forward" in str(gated()[1])


def test_follows_the_graph_after_recompile() -> None:
    module = lazy()
    before = module(X)
    relu = next(n for n in module.graph.nodes if n.target == "relu")
    relu.target = "neg"
    module.recompile()
    assert not torch.equal(module(X), before)
    assert "neg" in module.code


def test_two_modules_do_not_share_code() -> None:
    one, two = lazy(), lazy()
    next(n for n in two.graph.nodes if n.target == "relu").target = "neg"
    one(X)
    assert "neg" in two.code
    assert "neg" not in one.code


def test_tools_see_the_real_forward() -> None:
    model, fresh = gated()
    expected = model(X)
    compiled = torch.compile(fresh.eval(), backend="eager")
    assert torch.allclose(compiled(X), expected, atol=1e-6)
    exported = torch.export.export(gated()[1].eval(), (X,)).module()
    assert torch.allclose(exported(X), expected, atol=1e-6)
    again = fx.symbolic_trace(gated()[1].eval())
    assert torch.allclose(again(X), expected, atol=1e-6)


def test_copies_before_the_first_call() -> None:
    model, fresh = gated()
    for twin in (copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh))):
        assert torch.allclose(twin.eval()(X), model(X), atol=1e-6)
    plain = lazy()
    for twin in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain)), copy.copy(plain)):
        assert torch.equal(twin(X), plain(X))
