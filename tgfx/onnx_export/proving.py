"""The proof with every export: a sound file, free where it says so, and torch's numbers at several sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tgfx.errors import InputError, VerificationError
from tgfx.onnx_export.bisecting import first_difference
from tgfx.onnx_export.examples import BATCH
from tgfx.onnx_export.parity import delta, tolerance_for
from tgfx.onnx_export.quietly import quietly
from tgfx.onnx_export.session import Feeds, as_numpy, open_session, run
from tgfx.onnx_export.subject import Subject, run_torch
from tgfx.onnx_export.tracing import WIDE, Traced
from tgfx.optional_packages import needed

GROWN = (2.0, 1.5, 1.25, 0.5)  # other extents to try, as multiples; the first that torch accepts is used


@dataclass
class Case:
    """One call: what it is called in reports, its values, and torch's answer."""

    name: str
    values: list[Any]
    feeds: Feeds
    expected: dict[str, np.ndarray]


@dataclass
class Proof:
    """What was compared, and the largest |difference| of each output over all of it."""

    cases: list[str] = field(default_factory=list)
    max_delta: dict[str, float] = field(default_factory=dict)


def cases_for(subject: Subject, traced: Traced) -> list[Case]:
    """Batch 1, n and n+1 where the batch is free, and other extents where those are."""
    examples = traced.examples
    if not examples.batched:
        cases = [_case(subject, traced, f"batch {examples.batch}", list(examples.leaves))]
    else:
        n = max(WIDE, examples.batch)
        cases = [_case(subject, traced, f"batch {size}", examples.call(size)) for size in (1, n, n + 1)]
    if traced.examples.free:
        cases.append(_other_extents(subject, traced))
    return cases


def _case(subject: Subject, traced: Traced, name: str, values: list[Any]) -> Case:
    args, kwargs = traced.examples.arguments(values)
    expected = {out: as_numpy(tensor) for out, tensor in run_torch(subject, args, kwargs).items()}
    for output, value in expected.items():
        if np.issubdtype(value.dtype, np.floating) and np.isnan(value).any():
            raise InputError(
                "the model gives no numbers on the example, so equality would prove nothing",
                expected="finite outputs",
                found=f"NaN in {output}, {name}",
                fix="pass example_inputs that the model can work with",
            )
    feeds = {k: as_numpy(v) for k, v in zip(traced.inputs, values, strict=True) if k is not None}
    return Case(name, values, feeds, expected)


def _other_extents(subject: Subject, traced: Traced) -> Case:
    """All free sizes at once, at the first multiple that torch accepts."""
    now = _free_sizes(traced)
    for factor in GROWN:
        sizes = {name: max(1, round(size * factor)) for name, size in now.items()}
        if _accepted(subject, traced, sizes):
            shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
            return _case(subject, traced, shown, traced.examples.call(sizes=sizes))
    raise InputError(
        "dynamic_size=True, but the model takes no other size than the example's",
        expected=f"other sizes than {now} that torch accepts",
        found=f"none of {', '.join(f'{factor:g} times' for factor in GROWN)}",
        fix="leave dynamic_size at False",
    )


def stuck_axes(subject: Subject, traced: Traced) -> frozenset[tuple[int, int]]:
    """(leaf, axis) that torch.export left open but whose size cannot change, as of two inputs that are concatenated to
    as many channels as the first layer wants."""
    stuck = {
        name
        for name, size in _free_sizes(traced).items()
        if not any(_accepted(subject, traced, {name: max(1, round(size * factor))}) for factor in GROWN)
    }
    return frozenset(place for place, name in traced.examples.free.items() if name in stuck)


def _free_sizes(traced: Traced) -> dict[str, int]:
    return {name: traced.examples.leaves[place].shape[axis] for (place, axis), name in traced.examples.free.items()}


def _accepted(subject: Subject, traced: Traced, sizes: dict[str, int]) -> bool:
    args, kwargs = traced.examples.arguments(traced.examples.call(sizes=sizes))
    try:
        with quietly():  # a traced module prints where it failed
            run_torch(subject, args, kwargs)
    except Exception:
        return False
    return True


def prove(model: Any, file: Path, traced: Traced, cases: list[Case]) -> Proof:
    """Raises VerificationError with the first node that differs. file: the model as it will be handed out."""
    onnx = needed("onnx")
    try:
        onnx.checker.check_model(str(file), full_check=True)
    except Exception as error:
        raise VerificationError(
            "the exported file is not sound ONNX",
            expected="what onnx.checker accepts",
            found=(str(error).strip().splitlines() or [""])[0],
        ) from error
    _check_free_axes(onnx.load(str(file), load_external_data=False), traced)
    session = open_session(file)
    proof = Proof()
    for case in cases:
        found = _answer(session, case)
        for output, expected in case.expected.items():
            gap = delta(expected, found[output])
            if not gap.within(tolerance_for(expected)) or expected.dtype != found[output].dtype:
                place = first_difference(model, traced, case.values, case.feeds)
                raise VerificationError(
                    "the ONNX model does not compute what torch does; it is not handed out",
                    expected=f"{output} as torch gives it at {case.name}, within {tolerance_for(expected):g}",
                    found=f"max |difference| {gap.largest:.3g} ({gap.relative:.3g} of the largest entry)",
                    where=place,
                )
            proof.max_delta[output] = max(proof.max_delta.get(output, 0.0), gap.largest)
        proof.cases.append(case.name)
    return proof


def _answer(session: Any, case: Case) -> dict[str, np.ndarray]:
    try:
        return run(session, case.feeds)
    except Exception as error:
        raise VerificationError(
            f"the ONNX model does not run at {case.name}, where torch does",
            expected="the model to run wherever its sizes are free",
            found=(str(error).strip().splitlines() or [""])[0],
        ) from error


def _check_free_axes(model: Any, traced: Traced) -> None:
    inputs = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    wanted = {(name, 0): BATCH for name in traced.batched if name in inputs}
    for (place, axis), size in traced.examples.free.items():
        name = traced.inputs[place]
        if name in inputs:
            wanted[str(name), axis] = size
    for (name, axis), size in wanted.items():
        if not inputs[name][axis].dim_param:
            raise VerificationError(
                f"axis {axis} of {name} is no longer free",
                expected=f"the size '{size}'",
                found=str(inputs[name][axis].dim_value),
            )
