"""Milliseconds in ONNX Runtime, and images from the files that were exported."""

from __future__ import annotations

import time
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

TURNS = 25


def open_file(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def stylise(session: onnxruntime.InferenceSession, images: Tensor, style: int) -> Tensor:
    chosen = torch.full((len(images),), style, dtype=torch.int64)
    (found,) = session.run(None, {"image": images.numpy(), "style": chosen.numpy()})
    return torch.from_numpy(found)


def milliseconds(files: dict[str, Path], image: Tensor) -> dict[str, float]:
    """Of one image, by model. They take turns, so that a busy machine is busy for all, and the least time counts:
    processor time, since others may run in between."""
    sessions = {name: open_file(path) for name, path in files.items()}
    least = dict.fromkeys(files, float("inf"))
    for _ in range(TURNS):
        for name, session in sessions.items():
            began = time.process_time()
            stylise(session, image.unsqueeze(0), 0)
            least[name] = min(least[name], 1000 * (time.process_time() - began))
    return least
