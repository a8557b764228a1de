"""tgfx: plug-in, trainable gates for any PyTorch model."""

from tgfx._version import __version__
from tgfx.compaction import CompactionReport, compact_
from tgfx.errors import TgfxError
from tgfx.gated import GatedModule
from tgfx.gates import GateSpec, TrainableGate
from tgfx.ir.refusal import Refusal
from tgfx.passes.couple import Group
from tgfx.plan import load_plan, save_plan
from tgfx.shrinking import shrink
from tgfx.transforming import transform

__all__ = [
    "CompactionReport",
    "GateSpec",
    "GatedModule",
    "Group",
    "Refusal",
    "TgfxError",
    "TrainableGate",
    "__version__",
    "compact_",
    "load_plan",
    "save_plan",
    "shrink",
    "transform",
]
