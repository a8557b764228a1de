"""Times of ONNX models in ONNX Runtime, in units that do not change with the load of the machine."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tgfx.latency.onnx_layer import reference_model
from tgfx.latency.packages import onnxruntime

BETWEEN = 6  # models that run between two runs of the reference
QUIET = 60  # runs of the reference, of which the fastest counts


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
        """ms of one call."""
        start = self._clock()
        self._session.run(None, self._inputs)
        return (self._clock() - start) * 1e3


class Clock:
    """Times models beside a reference, a small convolution that runs again and again between them.

    Other jobs slow the machine down, for seconds at a time: by as much for the reference. Each time is taken as a
    multiple of the reference just before and after it, and given in ms of a quiet machine, where the reference takes
    `quiet` ms.
    """

    def __init__(self, threads: int = 1, quiet: float | None = None) -> None:
        self.threads = threads
        self._reference = Timed(reference_model(), threads=threads)
        self.quiet = quiet if quiet is not None else min(self._reference.run() for _ in range(QUIET))

    def times(self, models: list[bytes | tuple[bytes, dict[str, np.ndarray]]], turns: int) -> np.ndarray:
        """ms of each: all run once to warm up, then `turns` times one after the other; the median counts."""
        timed = [Timed(*(model if isinstance(model, tuple) else (model,)), threads=self.threads) for model in models]
        for one in timed:
            one.run()
        found = np.zeros((turns, len(timed)))
        for turn in range(turns):
            order = np.arange(len(timed))[:: 1 if turn % 2 else -1]  # nobody always goes first
            before = self._reference.run()
            for part in np.array_split(order, -(-len(order) // BETWEEN)):
                own = [timed[index].run() for index in part]
                after = self._reference.run()
                found[turn, part] = np.array(own) / ((before + after) / 2)
                before = after
        return np.median(found, axis=0) * self.quiet


def _random(size: list[Any]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(size, dtype=np.float32)
