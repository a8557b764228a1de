"""Operator rules: one module per family. Importing the package registers every family."""

from tgfx.ops import (  # noqa: F401  (imported for their registrations)
    attention,
    contraction,
    creation,
    joining,
    lookup,
    movement,
    normalization,
    pointwise,
    positions,
    reduction,
    spatial,
)
from tgfx.ops.registry import rule_for

__all__ = ["rule_for"]
