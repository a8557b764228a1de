"""Name -> builder, with torchvision made importable first."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import tests.support.torchvision_ops  # noqa: F401  (before anything imports torchvision)
from examples.zoo.models import Built, zoo


@cache
def models() -> dict[str, Callable[[], Built]]:
    # the model libraries' own warnings (deprecations, missing weights) say nothing about tgfx
    warnings.filterwarnings("ignore", module=r"(torchvision|timm|transformers)\.")
    return dict(zoo())
