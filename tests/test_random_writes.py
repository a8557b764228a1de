"""G2 on random little programs between two layers: values with other names for their memory, changed and added up."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import example, given, reject
from hypothesis import strategies as st
from torch import Tensor, nn

import tgfx
from tests.support.promises import EXACT, assert_close, gate_at_random
from tests.support.random_models import randomised
from tgfx.errors import EmptyGroupError, NothingToGateError

CHANNELS, SIZE = 6, 5
Step = Callable[["Program", Tensor, Tensor, Tensor], Tensor | None]


def written(write: Callable[["Program", Tensor, Tensor], object]) -> Step:
    """A step that gives nothing, but changes its first value."""

    def step(m: "Program", x: Tensor, a: Tensor, b: Tensor) -> None:
        write(m, a, b)

    return step


def set_row(m: "Program", a: Tensor, b: Tensor) -> None:
    a[:, :, 1] = 0.7


def set_channels(m: "Program", a: Tensor, b: Tensor) -> None:
    a[:, :2] = a[:, :2].sigmoid() * 2 - 0.5


def set_to_other(m: "Program", a: Tensor, b: Tensor) -> None:
    a[:, :, 1:3] = b[:, :, 1:3]


def add_to_row(m: "Program", a: Tensor, b: Tensor) -> None:
    a[:, :, 0] += 1


STEPS: dict[str, Step] = {
    "relu": lambda m, x, a, b: F.relu(a),
    "leaky relu": lambda m, x, a, b: F.leaky_relu(a, 0.1),
    "sigmoid": lambda m, x, a, b: a.sigmoid(),
    "tanh": lambda m, x, a, b: torch.tanh(a),
    "dropout": lambda m, x, a, b: F.dropout(a, 0.5, m.training),
    "pool": lambda m, x, a, b: F.max_pool2d(a, 3, 1, 1),
    "average": lambda m, x, a, b: F.avg_pool2d(a, 3, 1, 1),
    "add": lambda m, x, a, b: a + b,
    "add twice": lambda m, x, a, b: a + a,
    "add alpha": lambda m, x, a, b: torch.add(a, b, alpha=0.5),
    "subtract": lambda m, x, a, b: a - b,
    "multiply": lambda m, x, a, b: a * b.tanh(),
    "greater": lambda m, x, a, b: torch.maximum(a, b),
    "choose": lambda m, x, a, b: torch.where(m.fixed > 0, a, b),
    "choose a number": lambda m, x, a, b: torch.where(m.fixed > 0, a, 0.3),
    "blend": lambda m, x, a, b: torch.lerp(a, b, 0.3),
    "add a number": lambda m, x, a, b: a + 0.3,
    "subtract from a number": lambda m, x, a, b: 0.3 - a,
    "add a map": lambda m, x, a, b: a + m.map(x),
    "add a parameter": lambda m, x, a, b: m.one + a,
    "add a table": lambda m, x, a, b: a + m.fixed,
    "add a bias": lambda m, x, a, b: a + m.bias,
    "scale": lambda m, x, a, b: a * m.bias,
    "add the mean of channels": lambda m, x, a, b: a + b.mean(1, keepdim=True),
    "add the mean of places": lambda m, x, a, b: a + b.mean((2, 3), keepdim=True),
    "squeeze and excite": lambda m, x, a, b: a * b.mean((2, 3), keepdim=True).sigmoid(),
    "join halves": lambda m, x, a, b: torch.cat([a[:, :3], b[:, 3:]], 1),
    "stack": lambda m, x, a, b: torch.stack([a, b]).mean(0),
    "view": lambda m, x, a, b: a.view(a.shape),
    "flat view": lambda m, x, a, b: a.flatten(2).view(a.shape),
    "shuffle": lambda m, x, a, b: a.view(a.shape[0], 2, 3, SIZE, SIZE).transpose(1, 2).reshape(a.shape),
    "shuffle the other way": lambda m, x, a, b: a.unflatten(1, (3, 2)).transpose(1, 2).flatten(1, 2),
    "turn": lambda m, x, a, b: a.transpose(2, 3),
    "itself": lambda m, x, a, b: a[:, :],
    "clone": lambda m, x, a, b: a.clone(),
    "conv": lambda m, x, a, b: m.inner(a),
    "depthwise": lambda m, x, a, b: m.depthwise(a),
    "norm": lambda m, x, a, b: m.inner_norm(a),
    "conv and norm": lambda m, x, a, b: m.inner_norm(m.inner(a)),
    "another norm": lambda m, x, a, b: m.other_norm(m.other(x)),
    "relu_": written(lambda m, a, b: a.relu_()),
    "F.relu in place": written(lambda m, a, b: F.relu(a, inplace=True)),
    "sigmoid_": written(lambda m, a, b: a.sigmoid_()),
    "add_": written(lambda m, a, b: a.add_(b)),
    "add_ a number": written(lambda m, a, b: a.add_(0.3)),
    "add_ a parameter": written(lambda m, a, b: a.add_(m.one)),
    "mul_": written(lambda m, a, b: a.mul_(b.sigmoid())),
    "copy_": written(lambda m, a, b: a.copy_(b)),
    "add_ in a view": written(lambda m, a, b: a.reshape(-1).add_(0.3)),
    "fill_ a window": written(lambda m, a, b: a[:, :, 1:3].fill_(0.3)),
    "masked_fill_": written(lambda m, a, b: a.masked_fill_(m.fixed > 0, 0.7)),
    "clamp_": written(lambda m, a, b: a.clamp_(min=0.2)),
    "a chunk": written(lambda m, a, b: a.chunk(2, 1)[0].cos_()),
    "set a row": written(set_row),
    "set channels": written(set_channels),
    "set to another": written(set_to_other),
    "add to a row": written(add_to_row),
}


@dataclass(frozen=True)
class Text:
    """steps: name, and which values (counted from the last) they take; reads: which values are summed up at the end."""

    steps: tuple[tuple[str, int, int], ...]
    reads: tuple[int, ...]
    normed: bool
    seed: int


class Program(nn.Module):
    def __init__(self, text: Text) -> None:
        super().__init__()
        c = CHANNELS
        self.text = text
        self.first, self.norm = nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c) if text.normed else nn.Identity()
        self.map, self.other, self.other_norm = nn.Conv2d(3, 1, 1), nn.Conv2d(3, c, 1), nn.BatchNorm2d(c)
        self.inner, self.inner_norm = nn.Conv2d(c, c, 1, bias=False), nn.BatchNorm2d(c)
        self.depthwise = nn.Conv2d(c, c, 3, padding=1, groups=c)
        self.one, self.bias = nn.Parameter(torch.full((1,), 0.7)), nn.Parameter(torch.randn(c, 1, 1))
        self.register_buffer("fixed", torch.randn(1, 1, SIZE, SIZE))
        self.last = nn.ModuleList(nn.Conv2d(c, 4, 3) for _ in text.reads)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.norm(self.first(x))]
        for name, i, j in self.text.steps:
            made = STEPS[name](self, x, values[-1 - i % len(values)], values[-1 - j % len(values)])
            if made is not None:
                values.append(made)
        read = [layer(values[-1 - i % len(values)]) for layer, i in zip(self.last, self.text.reads, strict=True)]
        return torch.stack(read).sum(0)


PLACE = st.integers(0, 3)
TEXTS = st.builds(
    Text,
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), PLACE, PLACE), min_size=1, max_size=6).map(tuple),
    reads=st.lists(PLACE, min_size=1, max_size=2).map(tuple),
    normed=st.sampled_from([True, True, False]),
    seed=st.integers(0, 1000),
)


@given(TEXTS)
@example(Text((("shuffle", 0, 0), ("relu_", 1, 3)), (2,), True, 150))  # no copy any more, if one of two groups is left
@example(Text((("shuffle", 1, 1), ("add to a row", 3, 3)), (2,), True, 886))
@example(Text((("shuffle the other way", 3, 1), ("relu_", 1, 2)), (0,), True, 277))
def test_a_cut_changes_nothing(text: Text) -> None:
    torch.manual_seed(text.seed)
    net = randomised(Program(text)).double().eval()
    x = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    with torch.no_grad():
        try:
            expected = net(x)
        except RuntimeError:  # such as a write into memory that is read under another name
            reject()
    try:
        gated = tgfx.transform(net, x)
    except NothingToGateError:
        return
    with torch.no_grad():
        assert_close(gated.eval()(x), expected, EXACT, "all open")
        for density in (0.5, 0.0):
            gate_at_random(gated, density, text.seed)
            agree(gated, x)
        for gate in gated.gates.values():  # nothing is left of any of them
            gate.set_open_(torch.zeros_like(gate.weight, dtype=torch.bool))
            try:
                agree(gated, x)
            except EmptyGroupError:
                gate.set_open_(torch.arange(len(gate.weight)) % 2 == 0)


def agree(gated: tgfx.GatedModule, x: Tensor) -> None:
    gated.eval()
    assert_close(tgfx.shrink(gated, verify=False).eval()(x), gated(x), EXACT, "the cut model")
