"""What is exported: a copy of the model in eval mode, an example to call it with, and what is known about its cut."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _PyTreeCodeGen

from tgfx.capture.copying import copy_model
from tgfx.capture.examples import example_inputs_for
from tgfx.errors import InputError
from tgfx.gated import GatedModule
from tgfx.onnx_export.naming import named_outputs
from tgfx.shrinking import cut_to, example_like, shrink
from tgfx.verify import eval_mode
from tgfx.weight.gated import WeightGatedModule

TRAIN_NOTE = "the model was in train mode; the file holds its eval form (no dropout, batch norm with its averages)"

KNOWN = ("float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass
class Subject:
    """A module ready to be traced: nothing of the user's own is in it."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    original: nn.Module | None = None
    budget: dict[str, float] = field(default_factory=dict)
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)  # group -> (channels that stay, all)
    notes: list[str] = field(default_factory=list)


def subject_of(model: nn.Module, example_inputs: Any, original: nn.Module | None) -> Subject:
    """Check the model and take what is needed of it; a gated one is shrunk."""
    if not isinstance(model, nn.Module):
        raise InputError("only a module can be exported", expected="torch.nn.Module", found=type(model).__name__)
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "a scripted module cannot be exported",
            expected="the module that it was made from",
            found=type(model).__name__,
            fix="torch.jit is deprecated in torch; keep the module itself",
        )
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    _check_types(model)
    subject = _gated(model, example_inputs, original) if isinstance(model, GatedModule) else None
    if subject is None:
        args, kwargs = example_inputs_for(model, example_inputs)
        subject = Subject(type(model).__name__, _own_copy(model), args, kwargs, kept=_kept(model))
        subject.original = None if original is None else _own_copy(original)
    subject.args, subject.kwargs = _on_cpu((subject.args, subject.kwargs))
    for leaf in torch.utils._pytree.tree_leaves((subject.args, subject.kwargs)):
        if isinstance(leaf, Tensor):
            _check_type(leaf, "the example")
    check_numbers(subject.module)
    if any(module.training for module in model.modules()):
        subject.notes.append(TRAIN_NOTE)
        warnings.warn(f"{TRAIN_NOTE}; call model.eval() first if you know", stacklevel=3)
    return subject


def _gated(gated: GatedModule, example_inputs: Any, original: nn.Module | None) -> Subject:
    if example_inputs is None:
        args, kwargs = copy.deepcopy(example_like(gated))
    else:
        args, kwargs = example_inputs_for(gated, example_inputs)
    with warnings.catch_warnings():  # a path that is taken in training only is not in the file anyway
        warnings.filterwarnings("ignore", message=".* takes another path in train mode")
        compact = shrink(gated)
    subject = Subject(gated.facts.model_name, _own_copy(compact), args, kwargs, kept=_kept(compact))
    if gated.controller is not None:
        subject.budget = dict(gated.controller.budget)
    if original is not None:
        subject.original = _own_copy(original)
    if isinstance(gated, WeightGatedModule):
        return subject  # single weights are gated: no channel goes, and the whole model has the same graph
    if original is None:
        subject.original = _own_copy(cut_to(gated, _as_whole_as_possible(gated), verify=False))
    return subject


def _kept(compact: nn.Module) -> dict[str, tuple[int, int]]:
    """What `shrink` left with the compact model."""
    return dict(getattr(compact, "meta", {}).get("kept", {}))


def _as_whole_as_possible(gated: GatedModule) -> np.ndarray:
    """All gates open that compact_ has left; of a choice what is chosen."""
    opened = gated.open_slots().copy()
    for group in gated.facts.coupling.groups:
        if group.kind != "choice" and group.name in gated.gates:
            opened[gated.gate_slots(group.name)] = True
    return opened


def _own_copy(model: nn.Module) -> nn.Module:
    try:
        twin = copy_model(model).cpu()
    except Exception as error:
        raise InputError(
            "the model cannot be copied, and your own is not to be touched",
            expected="a model that copy.deepcopy takes",
            found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            fix="export what is inside of wrappers, such as model.module",
        ) from error
    twin.__dict__.pop("forward", None)  # a wrapper, as of Accelerate's precision
    return twin.eval().requires_grad_(False)


def _on_cpu(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v.detach().cpu() if isinstance(v, Tensor) else v, value)


def check_numbers(module: nn.Module) -> None:
    """A weight that is not a number makes every comparison meaningless."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
            raise InputError(
                "the model has weights that are not numbers",
                expected="finite weights",
                found=f"NaN in {int(torch.isnan(tensor).sum())} of {tensor.numel()} entries",
                where=name,
                fix="training has diverged; load an earlier checkpoint",
            )


def _check_types(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise InputError(
                "the model is not built yet",
                expected="weights that are there",
                found="a lazy layer that has seen no input",
                where=name,
                fix="call the model once",
            )
        _check_type(tensor, name)


def _check_type(tensor: Tensor, where: str) -> None:
    if str(tensor.dtype).removeprefix("torch.") not in KNOWN:
        raise InputError(
            "numbers of this type cannot be compared in ONNX Runtime on the CPU",
            expected=", ".join(KNOWN),
            found=str(tensor.dtype),
            where=where,
            fix="model.float(), and float32 examples",
        )


@contextmanager
def flat_result(module: nn.Module) -> Iterator[None]:
    """The (own) module returns a tuple of tensors for a while, so that any result can be traced."""
    inner = _through_interpreter(module) if isinstance(module, fx.GraphModule) else module.forward

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(named_outputs(inner(*args, **kwargs)).values())

    forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    module.forward = forward  # an attribute of this object: parameters keep their names
    try:
        with _flat_graph(module.graph) if isinstance(module, fx.GraphModule) else nullcontext():
            yield
    finally:
        del module.forward


@contextmanager
def _flat_graph(graph: fx.Graph) -> Iterator[None]:
    """torch.export runs a graph node by node and never calls `forward`: the graph itself gives a tuple of tensors."""
    output, codegen = graph.output_node(), graph._codegen
    whole = codegen.process_outputs if isinstance(codegen, _PyTreeCodeGen) else lambda values: values
    with graph.inserting_before(output):
        flat = graph.call_function(lambda values: tuple(named_outputs(whole(values)).values()), output.args)
    args, output.args = output.args, (flat,)
    if isinstance(codegen, _PyTreeCodeGen):
        graph._codegen = copy.copy(codegen)
        graph._codegen.pytree_info = codegen.pytree_info._replace(out_spec=None)
    try:
        yield
    finally:
        output.args, graph._codegen = args, codegen
        graph.erase_node(flat)


def _through_interpreter(module: fx.GraphModule) -> Any:
    """Run a graph node by node: torch.export then takes over where in the user's files each node comes from."""
    signature = inspect.signature(module.forward)
    for node in module.graph.nodes:
        file, _, line = str(node.meta.get("tgfx_source") or "").rpartition(":")
        node.meta = {"stack_trace": f'  File "{file}", line {line}, in forward\n    {node.name}'} if file else {}

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return fx.Interpreter(module).run(*bound.args, *bound.kwargs.values())

    return run


def run_torch(subject: Subject, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """What torch computes, by output name; the arguments are copied in case the model writes into them."""
    return {name: tensor.detach() for name, tensor in named_outputs(result_of(subject, args, kwargs)).items()}


def result_of(subject: Subject, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the model gives, with all that is no tensor."""
    args, kwargs = copy.deepcopy((args, dict(kwargs)))
    with torch.no_grad(), eval_mode(subject.module):
        return subject.module(*args, **kwargs)
