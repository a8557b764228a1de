"""The last step of the pipeline: a small, proven ONNX file."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tgfx.errors import InputError, TgfxError
from tgfx.ir.rng import untouched_rng
from tgfx.onnx_export.examples import Examples
from tgfx.onnx_export.graph_size import GraphSize, graph_size
from tgfx.onnx_export.measuring import timings
from tgfx.onnx_export.metadata import example_entry, metadata_for, set_metadata
from tgfx.onnx_export.naming import left_out, named_outputs
from tgfx.onnx_export.profiles import (
    Profile,
    check_batch,
    check_operators,
    fitted,
    profile_named,
    provider_note,
    write_ort,
)
from tgfx.onnx_export.proving import Case, Proof, cases_for, prove, stuck_axes
from tgfx.onnx_export.report import OnnxReport, declared_shapes
from tgfx.onnx_export.session import Feeds, as_numpy
from tgfx.onnx_export.simplifying import candidates
from tgfx.onnx_export.subject import Subject, result_of, subject_of
from tgfx.onnx_export.tracing import WIDE, Traced, trace
from tgfx.onnx_export.writing import checked_target, move_into_place, written_aside
from tgfx.optional_packages import need_all, needed

LARGEST = 2**31 - 2**20  # bytes that a protocol buffer can hold, with room for the graph; more goes into a second file
OPSETS = range(13, 24)
FIXED_SIZE = "height and width (or length) are the example's; dynamic_size=True frees what the model leaves free"
NO_OTHER_SIZE = "dynamic_size=True freed nothing: the model takes no other sizes than the example's"


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    simplify: bool = True,
    dynamic_batch: bool = True,
    dynamic_size: bool = False,
    opset: int = 18,
    metadata: Mapping[str, str] | None = None,
    profile: str | None = None,
    original: nn.Module | None = None,
    measure: bool = True,
) -> OnnxReport:
    """Write a compact, gated (it is shrunk first) or any other model as ONNX, proven equal before the file appears.

    ONNX Runtime is run against torch at batch 1, n and n+1 (and at another size with dynamic_size=True), on a file
    beside `path` that takes its place only then; on any error what was there stays. dynamic_size: also leave free
    every other axis that torch.export finds to be free. profile: "nnapi", "coreml", "ncnn", "mnn" or "ort-mobile"
    fixes shapes where that runtime wants them, checks its operators, and for ort-mobile writes an .ort file too.
    original: the model before the cut, to compare with (of a gated model it is known). measure=False skips timing.
    """
    need_all("onnx", "onnxscript", "onnxruntime", purpose="tgfx.export_onnx")
    if not isinstance(opset, int) or opset not in OPSETS:
        raise InputError("unknown opset", expected=f"{OPSETS[0]} to {OPSETS[-1]}", found=repr(opset))
    target = checked_target(path)
    wanted = profile_named(profile)
    with untouched_rng():
        subject = subject_of(model, example_inputs, original)
        entries = metadata_for(subject, metadata, profile)
        free_batch = dynamic_batch and not wanted.static
        examples = Examples.of(subject.args, subject.kwargs, batched=free_batch)
        check_batch(wanted, examples.batch)
        outputs = _outputs(subject, examples)
        traced = _traced(subject, outputs, examples, opset, dynamic_size and not wanted.static)
        cases = cases_for(subject, traced)
        feeds = _feeds(traced)
        entries |= example_entry({name: value.shape for name, value in feeds.items()})
        with written_aside(target) as aside:
            written = _first_proven(traced, cases, aside, entries, simplify, wanted)
            check_operators(written.model, wanted, traced.sources)
            subject.notes += written.notes + wanted.notes(dynamic_batch, dynamic_size)
            subject.notes += provider_note(written.model, wanted)
            subject.notes += _about_sizes(traced, dynamic_size, wanted)
            before = _original(subject, examples, outputs, opset, simplify) if measure else None
            sizes = {} if before is None else {"original": graph_size(before)}
            sizes["exported"], sizes["written"] = written.exported, written.size
            report = OnnxReport(
                target,
                subject.name,
                opset,
                declared_shapes(written.model.graph.input),
                declared_shapes(written.model.graph.output),
                sizes,
                written.simplifier,
                written.proof.max_delta,
                written.proof.cases,
                profile=profile,
                metadata=entries,
                notes=subject.notes,
            )
            if measure:
                report.timings = timings(aside, before, feeds)
            if wanted.ort:
                report.ort_path = target.with_suffix(".ort")
                write_ort(aside, cases)
            move_into_place(aside, target)
    return report


def _traced(subject: Subject, outputs: tuple[str, ...], examples: Examples, opset: int, dynamic_size: bool) -> Traced:
    traced = trace(subject, outputs, examples, opset=opset, dynamic_size=dynamic_size)
    stuck = stuck_axes(subject, traced)
    if stuck:
        traced = trace(subject, outputs, examples, opset=opset, dynamic_size=True, fixed=stuck)
    return traced


@dataclass
class _Written:
    """A candidate that passed the proof; its file lies beside the target."""

    model: Any
    simplifier: str
    proof: Proof
    exported: GraphSize
    size: GraphSize
    notes: list[str]


def _first_proven(
    traced: Traced, cases: list[Case], aside: Path, entries: Mapping[str, str], simplify: bool, wanted: Profile
) -> _Written:
    """The most simplified form that passes; the raw one must."""
    if _weights(traced) > LARGEST:
        return _large(traced, cases, aside, entries, simplify)
    onnx_ir = needed("onnx_ir")
    raw = onnx_ir.to_proto(traced.program.model)
    notes: list[str] = []
    for name, make in candidates(raw, simplify):
        try:
            model, changes = fitted(make(), wanted)
            set_metadata(model, entries)
            aside.write_bytes(model.SerializeToString())
            proof = prove(model, aside, traced, cases)
        except Exception as error:
            if not name:
                raise
            notes.append(f"{name} was of no use: {_first_line(error)}")
            continue
        if simplify and not name:
            warnings.warn("the file is not simplified: " + "; ".join(notes), stacklevel=4)
        return _Written(model, name, proof, graph_size(raw), graph_size(model), notes + changes)
    raise AssertionError("the raw graph is the last candidate and either passes or raises")


def _large(traced: Traced, cases: list[Case], aside: Path, entries: Mapping[str, str], simplify: bool) -> _Written:
    """Over 2 GB: weights in a file of their own, named by their content so that no model meets another one's."""
    onnx, onnx_ir = needed("onnx"), needed("onnx_ir")
    graph = traced.program.model
    graph.metadata_props.update(entries)
    data = aside.with_name(f"{aside.name}.{_fingerprint(traced)}.data")
    onnx_ir.save(graph, aside, external_data=data.name)
    notes = ["over 2 GB: weights are in a second file, " + data.name]
    if simplify:
        notes.append("not simplified: simplifiers do not take models over 2 GB")
        warnings.warn(notes[-1], stacklevel=5)
    model = onnx.load(str(aside), load_external_data=False)
    proof = prove(model, aside, traced, cases)
    size = graph_size(model, sum(file.stat().st_size for file in aside.parent.iterdir()))
    return _Written(model, "", proof, size, size, notes)


def _weights(traced: Traced) -> int:
    return sum(value.const_value.nbytes for value in traced.program.model.graph.initializers.values())


def _fingerprint(traced: Traced) -> str:
    digest = hashlib.sha256()
    for name, value in traced.program.model.graph.initializers.items():
        digest.update(name.encode())
        digest.update(value.const_value.tobytes())
    return digest.hexdigest()[:16]


def _original(subject: Subject, examples: Examples, outputs: tuple[str, ...], opset: int, simplify: bool) -> Any | None:
    """The model before the cut by the same route, to compare sizes and times with."""
    if subject.original is None:
        return None
    whole = Subject(subject.name, subject.original, subject.args, subject.kwargs)
    traced = trace(whole, outputs, examples, opset=opset)
    if _weights(traced) > LARGEST:
        subject.notes.append("the original is over 2 GB and was not compared")
        return None
    raw = needed("onnx_ir").to_proto(traced.program.model)
    for _, make in candidates(raw, simplify):
        try:
            return make()
        except Exception as error:
            subject.notes.append(f"of the original: {_first_line(error)}")
    return raw


def _outputs(subject: Subject, examples: Examples) -> tuple[str, ...]:
    """Names of the outputs, from a first run that also shows whether the example fits."""
    batch = max(WIDE, examples.batch) if examples.batched else None
    for size in dict.fromkeys((None, batch)):
        args, kwargs = examples.arguments(examples.call(size))
        try:
            whole = result_of(subject, args, kwargs)
        except Exception as error:
            raise InputError(
                "the model does not run on the example" + (f" at batch {size}" if size else ""),
                expected="inputs that the model takes",
                found=f"{type(error).__name__}: {_first_line(error)}",
                fix="dynamic_batch=False keeps the example's batch size" if size else "pass other example_inputs",
            ) from error
    result, constants = named_outputs(whole), left_out(whole)
    if constants:
        subject.notes.append(f"the file gives tensors only; it leaves out {', '.join(constants)}")
    if not result:
        raise InputError("the model returns no tensor", expected="at least one output", found="none")
    return tuple(result)


def _feeds(traced: Traced) -> Feeds:
    """The user's own example, for timing."""
    return {k: as_numpy(v) for k, v in zip(traced.inputs, traced.examples.leaves, strict=True) if k is not None}


def _about_sizes(traced: Traced, dynamic_size: bool, wanted: Profile) -> list[str]:
    if wanted.static:
        return []
    if dynamic_size:
        return [] if traced.examples.free else [NO_OTHER_SIZE]
    leaves = traced.examples.leaves
    return [FIXED_SIZE] if any(isinstance(leaf, torch.Tensor) and leaf.ndim > 2 for leaf in leaves) else []


def _first_line(error: BaseException) -> str:
    text = error.message if isinstance(error, TgfxError) else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]
