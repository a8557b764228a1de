"""ONNX files from anywhere: read with care, and inputs that fit them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tgfx.errors import OnnxFileError
from tgfx.onnx_export.metadata import example_shapes
from tgfx.onnx_export.session import Feeds
from tgfx.optional_packages import needed

BATCH_SIZE, OTHER_SIZE = 2, 32  # of free axes that nobody gave a size


def read_model(path: str | os.PathLike[str]) -> Any:
    """The graph, checked; weights that lie in a second file stay there."""
    onnx = needed("onnx", purpose="reading ONNX")
    file = Path(path)
    if not file.is_file():
        raise OnnxFileError("there is no such file", expected="an ONNX file", found=f"nothing at {path}")
    try:
        onnx.checker.check_model(str(file), full_check=True)
        return onnx.load(str(file), load_external_data=False)
    except Exception as error:
        raise OnnxFileError(
            "the file is damaged, or no ONNX",
            expected="what onnx.checker accepts",
            found=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}",
            where=str(path),
            fix="export it again",
        ) from error


def input_shapes(model: Any, sizes: Mapping[str, int] | None = None, batch: int | None = None) -> dict[str, list[int]]:
    """Shapes to call a model with: what `sizes` says of free axes, else its own example, else a guess."""
    known = example_shapes(model)
    given = {tensor.name for tensor in model.graph.initializer}
    shapes = {}
    for value in model.graph.input:
        if value.name in given:
            continue
        shape = []
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            example = known.get(value.name, [])
            if not dim.dim_param and dim.dim_value:
                shape.append(dim.dim_value)
            elif sizes and dim.dim_param in sizes:
                shape.append(sizes[dim.dim_param])
            elif axis == 0:
                shape.append(batch or BATCH_SIZE)
            else:
                shape.append(example[axis] if axis < len(example) else OTHER_SIZE)
        shapes[value.name] = shape
    return shapes


def random_feeds(model: Any, sizes: Mapping[str, int] | None = None, batch: int | None = None, seed: int = 0) -> Feeds:
    """Numbers of a normal distribution; whole numbers are 0 and 1, which are in every vocabulary."""
    onnx = needed("onnx", purpose="reading ONNX")
    dice = np.random.default_rng(seed)
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    feeds = {}
    for name, shape in input_shapes(model, sizes, batch).items():
        dtype = onnx.helper.tensor_dtype_to_np_dtype(types[name])
        if np.issubdtype(dtype, np.floating):
            feeds[name] = dice.standard_normal(shape).astype(dtype)
        else:
            feeds[name] = dice.integers(0, 2, shape).astype(dtype)
    return feeds
