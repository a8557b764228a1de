"""What a gate is worth where only gates are trained: evidence from both of its states, corrected as gates move.

As in tgfx.training.evidence the rise of the loss is seen from the state that a gate is in,

    loss(closed) − loss(open) ≈ ½·h − g      seen from the open gate
                              ≈ −½·h − g     seen from the closed one

but frozen weights allow, and ask for, more. Nothing repairs a wrong choice, so closed gates must be able to come back,
and the model moves only when gates move, so means may remember more. Three things differ:

- The size of h is measured. The mean square of the gradient tells the gates' curvatures apart, but it grows with the
  loss, and is on another scale where the loss is no likelihood (a squared error). When a gate moves, its gradient
  before and after differs by h: these differences, for a gate of average mean square, give the size of all. Gates that
  hardly matter move first, and their differences are nothing but noise; so the mean square is what is believed at
  first, give or take as much, and the differences count as far as they are surer than that.
- The mean of g is of one state. When its gate moves it goes on from what h foretells.
- A gate counts for more than it seems, by its standard error, in the state that it is in. Gates change places where
  that is surely better, and not by chance.

With a probe (tgfx.training.probed) the gradient has no noise of its own, and h is the mean square of the probe's:
nothing is left to be measured at moves. Most gates have a slope then that is smaller than its standard error. It counts
as far as it is beyond that, or noise would rank the many gates that matter least, which are those in question; and a
gate counts for more in its own state by a share of its h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgfx.training.saved_state import check_fits

SURE = 0.5  # standard errors, on either side
SHARE = 0.1  # of the steps so far that the means remember
SHORTEST, LONGEST = 4.0, 200.0  # steps to remember
PROBED_SHARE, PROBED_SHORTEST = 0.2, 10.0  # the same with probes
FORETOLD = 4.0  # steps that the gradient foretold for a moved gate counts for
SOON = 3  # steps after a move in which the gradient's distance from its mean is no noise
WAIT = 8  # steps in a state before its mean gradient is compared with that of the other
DOUBT = 1.0  # standard error of the mean square as the curvature's size, as a share of it
STAY = 0.5  # share of ½·h by which a gate counts for more in the state that it is in, where h is known from a probe
PROBES = 50.0  # steps that the mean square of probes remembers: h changes more slowly than g
FADE = 0.98  # by which older moves count less, for each step that has new ones


class TwoStates:
    """Running means over batches, per gate and of the state that it is in. It has the methods of `Evidence`."""

    def __init__(self, size: int, *, device: torch.device | str = "cpu") -> None:
        self.seen = 0
        self.samples = 1

        def zeros() -> Tensor:
            return torch.zeros(size, dtype=torch.float64, device=device)

        self.mean, self.variance, self.count, self.probed = zeros(), zeros(), zeros(), zeros()
        self.probes = 0
        self.since, self.before, self.after = zeros(), zeros(), zeros()
        self.opened = torch.ones(size, dtype=torch.bool, device=device)
        self.compared = torch.ones(size, dtype=torch.bool, device=device)  # or there is nothing to compare
        self.moves = torch.zeros(2, dtype=torch.float64)  # sums of differences and of relative squares

    @property
    def memory(self) -> float:
        share, shortest = (PROBED_SHARE, PROBED_SHORTEST) if self.probes else (SHARE, SHORTEST)
        return min(max(share * self.seen, shortest), LONGEST)

    def update(self, gradient: Tensor, samples: int, probe: Tensor | None = None) -> bool:
        """Take in the gradient of a batch of `samples`; False if it is not finite, and then nothing changes."""
        gradient = gradient.to(self.mean)
        probe = None if probe is None else probe.to(self.mean)
        if not bool(gradient.isfinite().all()) or not (probe is None or bool(probe.isfinite().all())):
            return False
        if probe is not None:
            self.probes += 1
            self.probed.lerp_(samples * probe.square(), 1 / min(self.probes, PROBES))
        self.seen += 1
        self.samples = samples
        self.count += 1
        self.since += 1
        gap = gradient - self.mean
        # a gap from a mean of n batches is that much wider than one from the truth; from a foretold mean it is none
        spread = gap.square() * (1 - 1 / self.count.clamp(max=2 * self.memory))
        told = (self.since > SOON) if self.seen > SOON else self.count > 1
        rate = 1 / min(max(self.seen - 1.0, 1.0), self.memory)
        self.variance = torch.where(told, self.variance + rate * (spread - self.variance), self.variance)
        self.mean += gap / self.count.clamp(max=self.memory)
        self.after += (gradient - self.after) / self.since.clamp(max=self.memory)
        self._compare()
        return True

    def moved(self, opened: Tensor) -> None:
        """The gates are as in `opened` from now on."""
        changed = opened != self.opened
        if not bool(changed.any()):
            return
        change = torch.where(opened, 1.0, -1.0) * self.curvature()
        self.compared = torch.where(changed, self.since < WAIT, self.compared)
        self.before = torch.where(changed, self.after, self.before)
        self.mean = torch.where(changed, self.mean + change, self.mean)
        self.count = torch.where(changed, self.count.clamp(max=FORETOLD), self.count)
        self.since = self.since.masked_fill(changed, 0.0)
        self.after = self.after.masked_fill(changed, 0.0)
        self.opened = opened.clone()

    def rise(self, opened: Tensor) -> Tensor:
        """Loss with the gate closed minus loss with it open, in favour of the state that the gate is in."""
        steps = self.count.clamp(min=1.0, max=max(1.0, 2 * self.memory - 1))
        error = (self.variance / steps).sqrt()
        if self.probes:
            curvature = self.curvature()
            slope = torch.where(opened, self.mean, self.mean + curvature)  # as it is, or would be, with the gate open
            sure = (1 - (error / slope).square()).clamp(min=0).nan_to_num(0.0)  # 0 / 0: no slope
            return torch.where(opened, 1 + STAY, 1 - STAY) * curvature / 2 - slope * sure
        here = self.curvature() / 2 + SURE * error
        return torch.where(opened, here, -here) - self.mean

    def curvature(self) -> Tensor:
        if self.probes:
            return self.probed
        squares = self._squares()
        believed = float(squares.mean())
        return squares * (self._size(believed) / max(believed, 1e-300))

    def _size(self, believed: float) -> float:
        """The curvature of a gate of average mean square: `believed` to be that, and measured where gates moved."""
        differences, squares = self.moves.tolist()
        if squares <= 0 or believed <= 0:
            return believed
        # the mean of WAIT batches before and after: noise of a gate is as its mean square
        noise = 2 * believed / (WAIT * self.samples)
        sure, doubtful = squares / noise, 1 / (DOUBT * believed) ** 2
        return max(0.0, (sure * differences / squares + doubtful * believed) / (sure + doubtful))

    def _squares(self) -> Tensor:
        """Mean square of the gradient over single samples: over batches of n, n times the variance, and g²."""
        return self.samples * self.variance + self.mean.square()

    def _compare(self) -> None:
        """Gates that moved WAIT steps ago: what they tell of the curvature."""
        ready = (self.since >= WAIT) & ~self.compared
        if not bool(ready.any()):
            return
        sign = torch.where(self.opened[ready], 1.0, -1.0)
        relative = _relative(self._squares())
        found = torch.stack([(sign * (self.after - self.before)[ready]).sum(), relative[ready].sum()])
        self.compared |= ready
        self.moves = FADE * self.moves + found.cpu()

    def state_dict(self) -> dict[str, object]:
        own = {"seen": self.seen, "samples": self.samples, "probes": self.probes}
        return {**own, **{name: getattr(self, name).clone() for name in _TENSORS}}

    def load_state_dict(self, state: dict) -> None:
        state = {"probes": 0, "probed": torch.zeros_like(self.probed), **state}  # states from before there were probes
        check_fits(state, {name: getattr(self, name) for name in _TENSORS}, "evidence of the gates")
        self.seen, self.samples, self.probes = state["seen"], state["samples"], state["probes"]
        for name in _TENSORS:
            getattr(self, name).copy_(state[name])


def _relative(squares: Tensor) -> Tensor:
    return squares / squares.mean().clamp(min=1e-300)


_TENSORS = ("mean", "variance", "count", "probed", "since", "before", "after", "opened", "compared", "moves")
