"""Random chains of blocks with gates closed at random, for property tests."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

import tgfx
from tests.support import promises
from tests.support.random_models import Case, build

densities = st.sampled_from((0.5, 0.0, 0.2, 0.9))  # 0: one gate open in every group
seeds = st.integers(0, 9)


def examples(count: int) -> settings:
    """No shrinking: a chain is short, every block is tested alone as well, and it would take minutes."""
    return settings(
        max_examples=count,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def gated_at(case: Case, density: float, seed: int) -> tgfx.GatedModule:
    gated = tgfx.transform(build(case), case.example())
    promises.gate_at_random(gated, density, seed)
    return gated.eval()
