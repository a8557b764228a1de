"""Analysis: which parameters are weights of convolutions and fully-connected layers, and how often each entry is used.

Runs the captured graph once on its example under a TorchDispatchMode, so that a layer, its function and a matrix
product written by hand are all seen as the same few ATen operators. A weight is known by its memory: a transposed
or sliced view (the three parts of an attention's in_proj_weight) is still the same parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tgfx.ir.refusal import Refusal
from tgfx.ir.source import Source
from tgfx.ops.modules import reads_as_function

COUNTED = ("convolution", "mm", "addmm")  # "flops"; any other product belongs to "flops_all" only
_WEIGHT_AT = {"convolution": 1, "mm": 1, "addmm": 2, "mv": 0, "addmv": 1, "bmm": 1, "baddbmm": 2}


@dataclass(frozen=True)
class WeightUse:
    """One call that reads a weight: FLOPs per entry and sample, and the entries it reads (None: all of them)."""

    op: str
    flops: float
    region: tuple[tuple[int, ...], tuple[int, ...], int] | None  # size, stride and offset of the view

    @property
    def counted(self) -> bool:
        return self.op in COUNTED


@dataclass(frozen=True)
class WeightUses:
    """uses: per weight, tied ones under the first of their names; kept: weights that cannot be gated, and why;
    other: FLOPs per sample of products without a weight, by kind.
    """

    uses: dict[str, tuple[WeightUse, ...]]
    kept: dict[str, Refusal]
    other: dict[str, float]


def find_weights(source: Source) -> WeightUses:
    watch = _Watch(source)
    state = [(tensor, tensor.clone()) for tensor in source.module.buffers()]
    versions = {name: p._version for name, p in watch.parameters.items()}
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            source.result = watch.run(source)
            if source.training is not None:  # finds weights that only train mode uses; the price is that of eval
                other, uses = dict(watch.other), {name: list(own) for name, own in watch.uses.items()}
                watch.run(source.training)
                unused: dict[str, list[WeightUse]] = {name: [] for name in watch.uses if name not in uses}
                watch.other, watch.uses = other, uses | unused
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        with torch.no_grad():
            for tensor, before in state:  # a train-mode graph moves running statistics
                tensor.copy_(before)
    kept = _closed(source) | (_closed(source.training) if source.training is not None else {})
    for name, parameter in watch.parameters.items():
        if parameter._version != versions[name]:
            kept[name] = Refusal("is written to by the model itself", name, "in-place")
    kept = {name: refusal for name, refusal in kept.items() if name in watch.uses}
    return WeightUses({name: tuple(own) for name, own in watch.uses.items()}, kept, watch.other)


def first_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter -> the first of its names, by which a tied one goes."""
    first: dict[int, str] = {}
    names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    return names


class _Watch(TorchDispatchMode):
    """Sees every ATen call; sums up FLOPs per weight and of everything else."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.parameters = dict(source.module.named_parameters())
        self.by_memory: dict[int, str | None] = {}
        for name, parameter in self.parameters.items():
            memory = parameter.untyped_storage()._cdata
            self.by_memory[memory] = None if memory in self.by_memory else name  # two in one: neither can be told
        self.uses: dict[str, list[WeightUse]] = defaultdict(list)
        self.other = {"flops": 0.0, "flops_all": 0.0}
        tensors = source.example_tensors()
        self.batch = tensors[0].shape[0] if tensors and tensors[0].ndim else 1

    def run(self, source: Source) -> Any:
        with self:
            return fx.Interpreter(source.module).run(*source.flat_inputs(), enable_io_processing=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.observe(func, args, kwargs or {}, out)
        return out

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        op = func._schema.name.removeprefix("aten::")
        if op in _WEIGHT_AT and self._reads_weight(op, args, out):
            return
        packet = func._overloadpacket
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out) / self.batch
            self.other["flops_all"] += flops
            if op in COUNTED:
                self.other["flops"] += flops

    def _reads_weight(self, op: str, args: tuple[Any, ...], out: Tensor) -> bool:
        weight = args[_WEIGHT_AT[op]]
        name = self.by_memory.get(weight.untyped_storage()._cdata)
        if name is None or weight.numel() == 0:
            return False
        parameter = self.parameters[name]
        if op in ("bmm", "baddbmm") and weight.stride(0) != 0:
            return False  # a stack of matrices is no fully-connected layer; one that is repeated is
        if op == "convolution":
            times = args[0].shape[0] * math.prod((args[0] if args[6] else out).shape[2:])
        else:
            times = out.numel() // weight.shape[-1] if op not in ("mv", "addmv") else 0
        axes = [a for a in range(weight.ndim) if weight.stride(a) != 0]
        size, stride = tuple(weight.shape[a] for a in axes), tuple(weight.stride(a) for a in axes)
        region = (size, stride, weight.storage_offset()) if math.prod(size) != parameter.numel() else None
        self.uses[name].append(WeightUse(op, 2 * times / self.batch, region))
        return True


def _closed(source: Source) -> dict[str, Refusal]:
    """Parameters of modules that are called as they are and cannot take a gated weight."""
    names = first_names(source.module)
    kept = {}
    for node in source.module.graph.nodes:
        if node.op != "call_module":
            continue
        module = source.module.get_submodule(str(node.target))
        if not takes_weight(module, node):
            for own, _ in module.named_parameters(remove_duplicate=False):
                reason = f"is used inside {type(module).__name__}, which is called as it is"
                kept[names[f"{node.target}.{own}"]] = Refusal(reason, node.name, type(module).__name__, limit=True)
    return kept


def takes_weight(module: nn.Module, node: fx.Node) -> bool:
    """Whether this call can be written as a function of its weight."""
    if type(module) is nn.Embedding:  # not if it writes to the weight, or wants sparse gradients
        return module.max_norm is None and not module.sparse and len(node.args) + len(node.kwargs) == 1
    return reads_as_function(module, node)
