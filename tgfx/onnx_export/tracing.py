"""From a module to a raw ONNX graph, through torch.export."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tgfx.errors import ExportError
from tgfx.ir.rng import untouched_rng
from tgfx.onnx_export.examples import BATCH, Examples
from tgfx.onnx_export.naming import bound_inputs
from tgfx.onnx_export.quietly import quietly
from tgfx.onnx_export.source_lines import user_line
from tgfx.onnx_export.subject import Subject, flat_result
from tgfx.onnx_export.tidying import sources_of, tidy

WIDE = 2  # torch.export takes an axis of size 1 for one that stays 1


@dataclass
class Traced:
    """A raw export. program: torch's ONNXProgram."""

    program: Any
    examples: Examples
    inputs: tuple[str | None, ...]  # the graph's name for each leaf of the example, None for what is no tensor
    outputs: tuple[str, ...]
    batched: frozenset[str]  # inputs whose first axis is the batch
    sources: dict[str, str]  # name of a value -> where it comes from: the user's line, or else the layer


def trace(
    subject: Subject,
    outputs: tuple[str, ...],
    examples: Examples,
    *,
    opset: int,
    dynamic_size: bool = False,
    fixed: frozenset[tuple[int, int]] = frozenset(),
) -> Traced:
    """Export at a batch of at least two where the batch may change. fixed: (leaf, axis) that must keep its size."""
    values = examples.call(max(WIDE, examples.batch)) if examples.batched else list(examples.leaves)
    args, kwargs = examples.arguments(values)
    with quietly(), untouched_rng(), torch.no_grad(), flat_result(subject.module), no_fast_path():
        shapes = _dynamic_shapes(subject, examples, args, kwargs, fixed if dynamic_size else None)
        program = _guarded(
            lambda: torch.export.export(subject.module, args, kwargs, dynamic_shapes=shapes, strict=False),
            "torch.export cannot follow the model",
            examples.batched,
        )
        onnx_program = _guarded(
            lambda: torch.onnx.export(
                program,
                dynamo=True,
                external_data=False,
                opset_version=opset,
                verbose=False,
                output_names=list(outputs),
            ),
            "the model cannot be written as ONNX",
            examples.batched,
            program,
        )
    final = onnx_program.exported_program
    inputs = tuple(
        name if isinstance(leaf, Tensor) else None
        for name, leaf in zip(final.graph_signature.user_inputs, examples.leaves, strict=True)
    )
    batched = frozenset(
        name for name, leaf in zip(inputs, examples.leaves, strict=True) if name and examples.has_batch(leaf)
    )
    sources = sources_of(onnx_program.model)
    free = tidy(onnx_program.model, tuple(name for name in inputs if name), batched)
    places = {name: place for place, name in enumerate(inputs)}
    named = {(places[name], axis): size for (name, axis), size in free.items()}
    return Traced(onnx_program, replace(examples, free=named), inputs, outputs, batched, sources)


def _dynamic_shapes(
    subject: Subject,
    examples: Examples,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fixed: frozenset[tuple[int, int]] | None,
) -> Any:
    """What torch.export wants to know about each tensor's axes, arranged like the arguments. fixed=None: all are."""
    leaves = pytree.tree_leaves((args, kwargs))
    widened = replace(examples, leaves=tuple(leaves))
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    batch = torch.export.Dim(BATCH)

    def axes(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        open_axes = [] if fixed is None else [n for n in range(1, leaf.ndim) if (places[id(leaf)], n) not in fixed]
        sizes = {axis: torch.export.Dim.AUTO for axis in open_axes}
        return {**({0: batch} if widened.has_batch(leaf) else {}), **sizes}

    return pytree.tree_map(axes, bound_inputs(subject.module.forward, args, kwargs))


def _guarded(
    step: Callable[[], Any], what: str, batched: bool, program: torch.export.ExportedProgram | None = None
) -> Any:
    try:
        return step()
    except Exception as error:
        causes = list(_chain(error))
        text = "\n".join(str(cause) for cause in causes)
        operator = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", text)
        if operator is not None:
            what, found = f"{operator[1]} has no ONNX form", f"the operator {operator[1]}"
        else:
            found = f"{type(causes[-1]).__name__}: {(str(causes[-1]).strip().splitlines() or [''])[0]}"
        fixed_batch = batched and BATCH in text
        raise ExportError(
            what,
            expected="operators that ONNX has" if operator else "a model that torch.export can trace",
            found=found,
            where=_place(error, text, program) or None,
            fix="dynamic_batch=False: the model wants the batch size of its example" if fixed_batch else None,
        ) from error


def _place(error: BaseException, text: str, program: torch.export.ExportedProgram | None) -> str:
    named = re.search(r"translating node %(\w+)", text)
    if named is not None and program is not None:
        base = re.sub(r"_\d+$", "", named[1])
        lines = {node.name: user_line(node.meta.get("stack_trace") or "") for node in program.graph.nodes}
        found = lines.get(named[1]) or next((v for k, v in lines.items() if base in k and v), "")
        if found:
            return found
        # a part of what the user called: whoever reads the same values in the program before it was taken apart
        operands = set(re.findall(r"%(\w+)", text[named.end() :].partition("args = (")[2].partition(")")[0]))
        for node in program.graph.nodes:
            if lines[node.name] and operands & {given.name for given in node.all_input_nodes}:
                return lines[node.name]
    from_text = user_line(text)
    if from_text:
        return from_text
    frames = []
    for cause in _chain(error):
        walked = cause.__traceback__
        while walked is not None:
            frames.append(f'File "{walked.tb_frame.f_code.co_filename}", line {walked.tb_lineno}')
            walked = walked.tb_next
    return user_line("\n".join(frames[-200:])) if frames else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Transformer layers have a fused form in eval mode that ONNX does not know."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
