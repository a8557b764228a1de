"""Batches of a loader as ONNX inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from tgfx.errors import InputError
from tgfx.onnx_export.session import Feeds


def feeds_from(loader: Iterable[Any], model: Any, batches: int) -> Iterator[Feeds]:
    """A batch is a tensor, a tuple whose first entries are the inputs (labels may follow), or a dict by input name.
    Where the file has a fixed batch, larger batches are taken apart."""
    given = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in given]
    fixed = inputs[0].type.tensor_type.shape.dim[0].dim_value if inputs[0].type.tensor_type.shape.dim else 0
    seen = 0
    for batch in islice(loader, batches):
        seen += 1
        feeds = _named(batch, [value.name for value in inputs])
        rows = len(next(iter(feeds.values())))
        step = fixed or rows
        for start in range(0, rows - rows % step, step):
            yield {name: value[start : start + step] for name, value in feeds.items()}
    if not seen:
        raise InputError("the calibration loader is empty", expected="at least one batch", found="none")


def _named(batch: Any, names: list[str]) -> Feeds:
    if isinstance(batch, Mapping):
        missing = [name for name in names if name not in batch]
        if missing:
            raise InputError("a batch lacks an input", expected=", ".join(names), found=", ".join(map(str, batch)))
        return {name: _array(batch[name]) for name in names}
    values = list(batch) if isinstance(batch, tuple | list) else [batch]
    if len(values) < len(names):
        raise InputError(
            "a batch has too few tensors", expected=f"{len(names)}: {', '.join(names)}", found=str(len(values))
        )
    return {name: _array(value) for name, value in zip(names, values, strict=False)}


def _array(value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value
    raise InputError("a batch holds something else", expected="tensors or arrays", found=type(value).__name__)
