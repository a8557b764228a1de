"""G4: what is not understood stays as it is, with the reason, and is never wrong."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tests.support.random_models import BLOCKS, Case, build, randomised
from tgfx.errors import StrictError


class Stack(nn.Module):
    """free -> met -> (something) -> last: `met` reaches the unknown, `free` does not."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.met, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.met(torch.relu(self.free(x)))))


class Sorted(Stack):
    def middle(self, x: Tensor) -> Tensor:
        return torch.sort(x, dim=1)[0]  # line of sort


class Summed(Stack):
    def middle(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, 1)  # line of cumsum


class Spectral(Stack):
    def middle(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x, dim=1).real  # line of fft


class Inverted(Stack):
    def middle(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        gram = torch.linalg.inv(flat @ flat.transpose(1, 2) + 5 * torch.eye(8))  # line of inv
        return (gram @ flat).reshape(x.shape)


class Recurrent(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        tokens, _ = self.lstm(x.flatten(2).transpose(1, 2))  # line of lstm
        return tokens.transpose(1, 2).reshape(x.shape)


def line_of(what: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    (found,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"# line of {what}")]
    return found


UNKNOWN = [(Sorted, "sort"), (Summed, "cumsum"), (Spectral, "fft"), (Inverted, "inv"), (Recurrent, "lstm")]
each_unknown = pytest.mark.parametrize(("kind", "op"), UNKNOWN, ids=[op for _, op in UNKNOWN])


@each_unknown
def test_what_reaches_an_unknown_operator_is_kept_with_the_reason(kind: type[Stack], op: str) -> None:
    model, x = randomised(kind()).eval(), torch.randn(2, 3, 4, 4)
    gated = tgfx.transform(model, x).eval()
    assert list(gated.gates) == ["free"]  # the rest of the model is gated all the same
    assert gated.gates["free"].weight.shape == (8,)
    refusal = gated.groups["met"].frozen
    assert isinstance(refusal, tgfx.Refusal)
    assert refusal.reason and refusal.node and refusal.op
    assert op in f"{refusal.reason} {refusal.op} {refusal.node}".lower()
    file, _, line = refusal.source.rpartition(":")
    assert (Path(file), int(line)) == (Path(__file__), line_of(op))
    assert refusal.source in gated.explain("met")
    assert refusal.reason in str(gated.report()).replace("\n", " ") or refusal.reason in gated.explain("met")
    promises.gate_at_random(gated, 0.5, 0)
    compact = tgfx.shrink(gated).eval()
    assert compact.met.weight.shape[0] == 8 and compact.met.weight.shape[1] < 8
    with torch.no_grad():
        promises.assert_close(compact(x), gated(x), 1e-5, "compact output")


@each_unknown
def test_strict_raises_instead(kind: type[Stack], op: str) -> None:
    with pytest.raises(StrictError, match=op) as caught:
        tgfx.transform(kind().eval(), torch.randn(2, 3, 4, 4), strict=True)
    assert caught.value.found and caught.value.expected and caught.value.fix


@pytest.mark.parametrize("name", ["Residual", "Dense", "Shuffle", "WindowAttention", "ConvNext", "SqueezeExcite"])
def test_strict_is_content_where_all_is_known(name: str) -> None:
    case = Case("image", ((name, BLOCKS[name].variants()[0]),), "pool")
    assert tgfx.transform(build(case), case.example(), strict=True).gates


class DependsOnData(nn.Module):
    """Which convolution runs is decided by the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if float(x.sum()) > 0 else self.two(x)


class PartlyOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.choice, self.after = nn.Conv2d(3, 8, 1), DependsOnData(), nn.Conv2d(8, 8, 1)
        self.free, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.after(self.choice(self.before(torch.sigmoid(self.free(x)[:, :3]))))))


def test_a_submodule_that_cannot_be_traced_stays_closed() -> None:
    model = randomised(PartlyOpaque()).eval()
    x = torch.randn(4, 3, 4, 4)
    gated = tgfx.transform(model, x).eval()
    (refusal,) = gated.facts.source.refusals
    assert refusal.node == "choice" and "traced" in refusal.reason
    assert "choice" in str(gated.report())
    assert gated.groups["before"].frozen is not None  # it feeds the closed box
    assert "after" in gated.gates  # behind the box all goes on
    assert not any(m.name.startswith("choice") for g in gated.facts.coupling.groups for m in g.members)
    promises.gate_at_random(gated, 0.5, 0)
    compact = tgfx.shrink(gated).eval()
    with torch.no_grad():
        for data in (x, -x, x.abs() * 3, torch.randn(1, 3, 4, 4)):  # both ways through the box
            promises.assert_close(compact(data), gated(data), 1e-5, "compact output")
    with pytest.raises(StrictError, match="choice"):
        tgfx.transform(model, x, strict=True)
