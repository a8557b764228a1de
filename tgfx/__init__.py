"""tgfx: plug-in, trainable gates for any PyTorch model."""

from tgfx._version import __version__
from tgfx.errors import TgfxError
from tgfx.gated import GatedModule
from tgfx.gates import GateSpec, TrainableGate
from tgfx.ir.refusal import Refusal
from tgfx.passes.couple import Group
from tgfx.plan import load_plan, save_plan
from tgfx.shrinking import shrink
from tgfx.sparse_file import load_sparse, save_sparse
from tgfx.transforming import transform

__all__ = [
    "GateSpec",
    "GatedModule",
    "Group",
    "Refusal",
    "TgfxError",
    "TrainableGate",
    "__version__",
    "load_plan",
    "load_sparse",
    "save_plan",
    "save_sparse",
    "shrink",
    "transform",
]
