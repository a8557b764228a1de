"""What train and eval mode do differently is not baked in."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tests.support.random_models import randomised


class Moded(nn.Module):
    """`middle` behaves differently in training."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Conv2d(3, 8, 1), middle or nn.Identity(), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        return self.middle(x)


class FunctionalDropout(Moded):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class FunctionalDropout2d(Moded):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout2d(x, 0.5, self.training)


class FunctionalBatchNorm(Moded):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def between(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training)


class AttentionDropout(Moded):
    def between(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2).unsqueeze(1)
        y = F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.5 if self.training else 0.0)
        return y.squeeze(1).transpose(1, 2).reshape(x.shape)


class OwnBranch(Moded):
    def between(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class WithRange(Moded):
    """Plain fx cannot follow this: the export front end does."""

    def between(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, :4] = x[:, 4:]
        for _ in range(x.ndim - 3):
            y = y + self.middle(x)
        return y


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], 1, 1, 1, dtype=x.dtype) > 0.5)


MODED = {
    "dropout": FunctionalDropout,
    "dropout2d": FunctionalDropout2d,
    "batch_norm": FunctionalBatchNorm,
    "attention_dropout": AttentionDropout,
    "own_branch": OwnBranch,
    **{
        f"{front}-{type(layer).__name__}": lambda kind=kind, layer=layer: kind(copy.deepcopy(layer))
        for front, kind in (("fx", Moded), ("export", WithRange))
        for layer in (
            nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.RReLU(), nn.BatchNorm2d(8),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True), DropPath(),
        )
    },
}  # fmt: skip


TWO_GRAPHS = {"batch_norm", "own_branch", "export-DropPath"}


@pytest.mark.parametrize("name", MODED)
def test_modes_stay_switchable(name: str) -> None:
    model = randomised(MODED[name]().double())
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    gated = tgfx.transform(model.eval(), x)
    if name in TWO_GRAPHS:  # cannot be one graph of torch's own layers: the user is told, and eval mode is exact
        with pytest.warns(UserWarning, match="another path in train mode"):
            compact = tgfx.shrink(gated)
    else:
        compact = tgfx.shrink(gated)  # all gates open
    # where compact sits out the training step its statistics do not move: compare in eval mode first
    for training in (False, True) if name in TWO_GRAPHS else (True, False):
        model.train(training)
        torch.manual_seed(0)
        with torch.no_grad():
            expected = model(x)
        for what, other in (("gated", gated), ("compact", compact)):
            if what == "compact" and training and name in TWO_GRAPHS:
                continue
            other.train(training)
            torch.manual_seed(0)
            with torch.no_grad():
                promises.assert_close(other(x), expected, promises.IDENTITY, f"{what}, training={training}")
