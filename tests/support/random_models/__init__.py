"""Random small models: every construct that the coupling analysis has to follow, chained at random.

A `Case` is plain data. Its repr can be pasted into a reproducer: `build(Case(...))` gives that model.
"""

# the order in which blocks are made known is that of the tests
from tests.support.random_models import convolutions, channels, tokens  # noqa: F401, I001
from tests.support.random_models.blocks import BLOCKS, DIMS, EXTENT, Block
from tests.support.random_models.models import Case, build, cases, randomised, single_cases

__all__ = ["BLOCKS", "DIMS", "EXTENT", "Block", "Case", "build", "cases", "randomised", "single_cases"]
