"""Times of ONNX models in ONNX Runtime, taken in turns."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tgfx.latency.packages import onnxruntime


class Timed:
    """A model that is ready to run, with random inputs."""

    def __init__(self, model: bytes, inputs: dict[str, np.ndarray] | None = None, *, threads: int = 1) -> None:
        ort = onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._inputs = inputs if inputs is not None else {i.name: _random(i.shape) for i in self._session.get_inputs()}
        # On one thread, processor time leaves out what other jobs take.
        self._clock = time.process_time if threads == 1 else time.perf_counter

    def run(self) -> float:
        """Seconds of one call."""
        start = self._clock()
        self._session.run(None, self._inputs)
        return self._clock() - start


def median_times(models: list[Timed], turns: int) -> np.ndarray:
    """ms of each: all run once to warm up, then `turns` times one after the other, so that all see the same load."""
    for model in models:
        model.run()
    order = np.arange(len(models))
    found = np.zeros((turns, len(models)))
    for turn in range(turns):
        for index in order if turn % 2 else order[::-1]:
            found[turn, index] = models[index].run()
    return np.median(found, axis=0) * 1e3


def _random(size: list[Any]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(size, dtype=np.float32)
