"""tgfx: plug-in, trainable gates for any PyTorch model."""

import importlib
from typing import Any

from tgfx import latency
from tgfx._version import __version__
from tgfx.budget import Budget
from tgfx.choice import Choice
from tgfx.compaction import CompactionReport, compact_
from tgfx.errors import TgfxError
from tgfx.gated import GatedModule
from tgfx.gates import GateSpec, TrainableGate
from tgfx.ir.refusal import Refusal
from tgfx.onnx_export.export import export_onnx
from tgfx.onnx_export.half_precision import fp16_onnx
from tgfx.onnx_export.quantizing import quantize_onnx
from tgfx.onnx_export.report import OnnxReport
from tgfx.passes.couple import Group
from tgfx.plan import load_plan, save_plan
from tgfx.runtimes.verify import verify_onnx
from tgfx.shrinking import shrink
from tgfx.sparse_file import load_sparse, save_sparse
from tgfx.training.controller import BudgetController
from tgfx.training.finish import Finished, finish
from tgfx.training.fit import FitResult, fit
from tgfx.training.optimizers import check_optimizer, param_groups
from tgfx.training.probed import Probed
from tgfx.training.recalibrate import recalibrate
from tgfx.training.schedule import Schedule
from tgfx.transforming import transform
from tgfx.view import to_dot, to_model_explorer, to_networkx, visualize

__all__ = [
    "Budget",
    "BudgetController",
    "Choice",
    "CompactionReport",
    "Finished",
    "FitResult",
    "GateSpec",
    "GatedModule",
    "Group",
    "OnnxReport",
    "Probed",
    "Refusal",
    "Schedule",
    "TgfxError",
    "TrainableGate",
    "__version__",
    "check_optimizer",
    "compact_",
    "export_onnx",
    "finish",
    "fit",
    "fp16_onnx",
    "latency",
    "load_plan",
    "load_sparse",
    "param_groups",
    "quantize_onnx",
    "recalibrate",
    "save_plan",
    "save_sparse",
    "shrink",
    "to_dot",
    "to_model_explorer",
    "to_networkx",
    "transform",
    "verify_onnx",
    "visualize",
]

_ON_FIRST_USE = (
    "distributed",
    "hf",
    "lightning",
)  # modules that need packages which not everybody has, or wants loaded


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"tgfx.{name}")
    raise AttributeError(f"module 'tgfx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
