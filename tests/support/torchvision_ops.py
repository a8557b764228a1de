"""Lets torchvision be imported where its compiled operators do not load.

torchvision's registry wheel is linked against a CUDA torch; on a CPU torch `_C.so` fails to load, and
importing torchvision then fails because it registers fake kernels for operators that do not exist. The
schemas of these two are enough: no model here calls them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _has_compiled_ops() -> bool:
    """Whether torchvision's own library loads; looking for it does not import torchvision."""
    spec = importlib.util.find_spec("torchvision")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in Path(folder).glob("_C*.so"):
            try:
                torch.ops.load_library(library)
            except (ImportError, OSError):
                continue
            return True
    return False


def _define_missing_ops() -> torch.library.Library | None:
    if _has_compiled_ops():
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    return library


# The definitions live as long as this object does.
LIBRARY = _define_missing_ops()
