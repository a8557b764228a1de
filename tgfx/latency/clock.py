"""Times of ONNX models in ONNX Runtime, in units that do not change with the load of the machine."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tgfx.latency.onnx_layer import reference_model
from tgfx.latency.packages import onnxruntime

QUIET = 60  # runs of the reference to begin with
RUNS = 2  # of each model in each turn: the first finds caches that another model has filled


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
    """Times models in turns, beside a reference: a small convolution.

    Other jobs only ever add to a time, so the fastest of many runs counts (of the estimates tried on a busy machine it
    varied least). Where even that is slow, as long as something else runs, so is the reference: times are given in
    ms of a machine on which the reference takes `quiet` ms.
    """

    def __init__(self, threads: int = 1, quiet: float | None = None) -> None:
        self.threads = threads
        self._reference = Timed(reference_model(), threads=threads)
        self.quiet = quiet if quiet is not None else min(self._reference.run() for _ in range(QUIET))

    def times(self, models: list[bytes | tuple[bytes, dict[str, np.ndarray]]], turns: int) -> np.ndarray:
        """ms of each: all run once to warm up, then `turns` times one after the other, so that all see the same."""
        timed = [Timed(*(model if isinstance(model, tuple) else (model,)), threads=self.threads) for model in models]
        timed.append(self._reference)
        for one in timed:
            one.run()
        fastest = np.full(len(timed), np.inf)
        for turn in range(turns):
            for index in range(len(timed))[:: 1 if turn % 2 else -1]:  # nobody always goes first
                fastest[index] = min(fastest[index], *(timed[index].run() for _ in range(RUNS)))
        return fastest[:-1] * (self.quiet / fastest[-1])


def _random(size: list[Any]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(size, dtype=np.float32)
