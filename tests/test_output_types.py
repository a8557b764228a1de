"""The gated and the compact model hand out what the model hands out, in the same class."""

import copy
import io
import pickle
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tgfx.errors import CaptureError
from tgfx.ir.source import tensors_in

transformers = pytest.importorskip("transformers")


class Pair(NamedTuple):
    logits: Tensor
    hidden: tuple[Tensor, ...]


@dataclass
class Answer:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    loss: Tensor | None = None


@dataclass
class Twice:
    """Does something to what it is made from."""

    logits: Tensor

    def __post_init__(self) -> None:
        self.logits = self.logits * 2


@dataclass
class Counted:
    """Holds what it was not made from."""

    logits: Tensor
    seen: list[int] = field(default_factory=lambda: [1], init=False)


class Own(dict[str, Any]):
    pass


class Ordered(OrderedDict[str, Any]):
    pass


def _image_output(logits: Tensor, hidden: Tensor) -> Any:
    output = transformers.modeling_outputs.ImageClassifierOutput
    return output(logits=logits, hidden_states=(hidden,))


MAKERS = {
    "ModelOutput": _image_output,
    "OrderedDict": lambda logits, hidden: OrderedDict(logits=logits, hidden=(hidden,)),
    "subclass of OrderedDict": lambda logits, hidden: Ordered(logits=logits, hidden=hidden),
    "subclass of dict": lambda logits, hidden: Own(logits=logits, hidden=hidden),
    "named tuple": lambda logits, hidden: Pair(logits, (hidden,)),
    "dataclass": lambda logits, hidden: Answer(logits, hidden=(hidden,)),
    "nested": lambda logits, hidden: (Pair(logits, (hidden,)), [OrderedDict(a=Answer(logits))], {"b": Own(c=hidden)}),
}


class Net(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make, self.first, self.last = make, nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).relu()
        return self.make(self.last(hidden), hidden.mean(-1))


class Exported(Net):
    """fx does not follow writing to places that a tensor tells."""

    def forward(self, x: Tensor) -> Any:
        y = torch.zeros_like(x)
        y[:, torch.arange(2)] = x[:, 2:]
        return super().forward(x + y)


class MoreInTraining(Exported):
    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return Answer(output[0], (output[1][0],), loss=output[0].sum()) if self.training else output


def _shape(value: Any) -> Any:
    """Types and names, all the way down."""
    if isinstance(value, dict):
        return type(value), [(key, _shape(item)) for key, item in value.items()]
    if isinstance(value, tuple | list):
        return type(value), [_shape(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return type(value), [(key, _shape(getattr(value, key))) for key in value.__dataclass_fields__]
    return type(value)


def _saved(module: nn.Module) -> nn.Module:
    memory = io.BytesIO()
    torch.save(module, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


KNOWN_TO_TORCH = ("ModelOutput", "OrderedDict", "named tuple")


@pytest.mark.parametrize(
    ("name", "front_end"), [*((name, "fx") for name in MAKERS), *((name, "export") for name in KNOWN_TO_TORCH)]
)
@pytest.mark.filterwarnings("ignore:.*treespec")
def test_outputs_keep_their_type(name: str, front_end: str) -> None:
    model = (Net if front_end == "fx" else Exported)(MAKERS[name]).double().eval()
    x = torch.randn(2, 4, dtype=torch.float64)
    gated = tgfx.transform(model, x).eval()
    assert gated.facts.source.front_end == front_end
    promises.gate_at_random(gated, 0.5, 0)
    assert [len(gate.weight) for gate in gated.gates.values()] == [8]
    kept = gated.groups["last"].frozen
    assert (kept.reason, kept.limit) == ("makes the model's output", False)
    expected = gated(x)
    assert _shape(expected) == _shape(model(x))
    compact = tgfx.shrink(gated)
    copies = (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), _saved)
    again = [copied(tgfx.shrink(copied(gated))) for copied in copies]
    for other in (gated, compact, *again, *(copied(copied(one)) for copied in copies for one in (gated, compact))):
        found = other(x)
        assert _shape(found) == _shape(expected)
        for mine, theirs in zip(tensors_in(found), tensors_in(expected), strict=True):
            promises.assert_close(mine, theirs, promises.EXACT, name)


@pytest.mark.parametrize("kind", [Twice, Counted])
def test_a_class_that_does_more_than_hold_is_refused(kind: Any) -> None:
    with pytest.raises(CaptureError, match=kind.__name__):
        tgfx.transform(Net(lambda logits, hidden: kind(logits)), torch.randn(2, 4))


@pytest.mark.filterwarnings("ignore:.*treespec")
def test_each_mode_may_give_something_else() -> None:
    torch.export.register_dataclass(Answer)
    model = MoreInTraining(MAKERS["named tuple"]).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    gated = tgfx.transform(model, x)
    assert gated.facts.source.front_end == "export"
    for training in (True, False):
        found, expected = gated.train(training)(x), model.train(training)(x)
        assert _shape(found) == _shape(expected)
        promises.assert_close(found.logits, expected.logits, promises.IDENTITY, "logits")


def test_a_compact_model_makes_its_outputs_without_tgfx(tmp_path: Any) -> None:
    compact = tgfx.shrink(tgfx.transform(Net(_image_output), torch.randn(2, 4)))
    torch.save(compact, tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['tgfx'] = None; import torch; "
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); "
        "found = model(torch.randn(2, 4)); print(type(found).__name__, tuple(found.logits.shape))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.stdout.split("\n")[0] == "ImageClassifierOutput (2, 3)", run.stderr


def test_gradients_are_recomputed_through_an_output_of_its_own_class() -> None:
    gated = tgfx.transform(Net(_image_output), torch.randn(2, 4)).train()
    gated.gradient_checkpointing_enable()
    found = gated(torch.randn(2, 4))
    assert type(found).__name__ == "ImageClassifierOutput"
    found.logits.sum().backward()
    assert gated.get_parameter("first.weight").grad is not None
